"""Packaging of torch_bcg: all metadata is here, pyproject.toml only configures tools.

Nothing is imported from torch or from the package: the version is read as text.
"""

import re
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    text = (HERE / "torch_bcg" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__(?:\s*:\s*\w+)?\s*=\s*"([^"]+)"', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('torch_bcg/__init__.py holds no line `__version__ = "..."`')
    return match.group(1)


def read_readme() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


# `demo --model hf-deepseek-v4` builds one of transformers, which has it from 5.17 on (numpy is only
# its dependency, but torch warns at import without it). rich draws tables and the progress bar.
DEMO = ["transformers>=5.17", "numpy", "rich>=13"]
# pytest 9: `faulthandler_exit_on_timeout` and `strict` options used in pyproject.toml.
# expecttest keeps the text of explain() and of the dumps in the tests; hypothesis draws the random
# graphs that partition and plan are tried with; triton's interpreter runs the kernels of dsv4
# without a GPU (torch for a GPU brings its own); pytest-xdist runs several tests at a time (`-n`).
TRITON = "triton>=3.6; platform_system == 'Linux'"
TEST = [*DEMO, "pytest>=9", "pytest-xdist>=3.8", "expecttest>=0.3", "hypothesis>=6.100", TRITON]
BENCH = ["matplotlib>=3.8"]  # plots made from the JSON results
DEV = ["ruff>=0.15", "mypy>=1.18"]

# `pip install .` builds inside the checkout. A build/ left there would put modules that were since
# deleted into the next wheel, an egg-info would be found as a second installation of the package.
SCRATCH = tempfile.TemporaryDirectory(prefix="torch_bcg_build_")

setup(
    name="torch_bcg",
    version=read_version(),
    description="torch.compile backend: CUDA graphs around the operations that cannot be recorded",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    author="The torch_bcg authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # The one dependency; 2.11 is the first release whose Dynamo the backend is tested with.
    install_requires=["torch>=2.11"],
    extras_require={"demo": DEMO, "test": TEST, "bench": BENCH, "dev": [*TEST, *BENCH, *DEV]},
    packages=find_packages(include=["torch_bcg", "torch_bcg.*"]),
    package_data={"torch_bcg": ["py.typed"]},
    zip_safe=False,
    # `backend="bcg"` is found by name, without importing the package. There is deliberately no
    # `@register_backend(name="bcg")` beside it: Dynamo asserts when both name a backend.
    entry_points={"torch_dynamo_backends": ["bcg = torch_bcg.dynamo:bcg"]},
    options={"build": {"build_base": SCRATCH.name}, "egg_info": {"egg_base": SCRATCH.name}},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
