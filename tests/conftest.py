"""What every test stands on: which package is tested, the two recorders, and a clean slate.

The suite tests the package that `import torch_bcg` finds, installed or checkout, and refuses to
start when that is not file for file this checkout: after `pip install .` an edited source would
otherwise go untested, silently. `pip install -e '.[dev]'` is the way to work on it.
"""

import filecmp
import gc
import importlib.util
from pathlib import Path

import hypothesis
import pytest
import torch

CHECKOUT = Path(__file__).resolve().parent.parent / "torch_bcg"
# Found without importing it: a package that lacks files may not even import.
SPEC = importlib.util.find_spec("torch_bcg")
TESTED = Path(SPEC.origin).resolve().parent if SPEC and SPEC.origin else None
GPU = torch.cuda.is_available()

# The same examples on every run and every machine; no time limits, no files in the checkout.
hypothesis.settings.register_profile("torch_bcg", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("torch_bcg")


def differing_files():
    """Names of source files that the tested package and the checkout do not share."""
    if TESTED == CHECKOUT:
        return []
    here, there = (
        {p.relative_to(root) for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc"}
        for root in (CHECKOUT, TESTED)
    )
    changed = {p for p in here & there if not filecmp.cmp(CHECKOUT / p, TESTED / p, shallow=False)}
    return sorted(str(p) for p in (here ^ there) | changed)


def pytest_addoption(parser):
    group = parser.getgroup("torch_bcg")
    group.addoption(
        "--require-cuda",
        action="store_true",
        help="run only the tests marked `cuda`, and count a skip of one as a failure",
    )
    group.addoption("--slow", action="store_true", help="run the tests marked `slow` as well")


def pytest_configure(config):
    if TESTED is None:
        raise pytest.UsageError("torch_bcg is not installed: run `pip install '.[test]'` first.")
    if differing := differing_files():
        raise pytest.UsageError(
            f"torch_bcg is imported from {TESTED}, which is not this checkout: "
            f"{', '.join(differing[:5])} differ. Run `pip install .` again, or `pip install -e .`."
        )


def pytest_report_header(config):
    import torch_bcg

    gpu = torch.cuda.get_device_name() if GPU else "none, tests marked cuda are skipped"
    return f"torch {torch.__version__}, torch_bcg {torch_bcg.__version__} from {TESTED}, GPU: {gpu}"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--require-cuda"):
        others = [item for item in items if not item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("cuda")]
    for item in items:
        if item.get_closest_marker("cuda") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow, runs with --slow"))


def pytest_collection_finish(session):
    """What is imported stays: the collector, which tests and Dynamo keep busy, passes it by."""
    import torch._dynamo
    import torch._inductor
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """At exit everything is looked at again: extension modules complain of what is left."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    cuda_only = item.config.getoption("--require-cuda")
    asked_for = not item.get_closest_marker("slow") or item.config.getoption("--slow")
    if cuda_only and asked_for and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-cuda: {reason}"
    return report


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """`cpu` is served by the host recorder, `cuda` by CUDA graphs: one contract, tested on both."""
    return request.param


@pytest.fixture(autouse=True)
def clean_slate():
    """Nothing that one test compiled, counted, warned about or drew reaches the next."""
    import torch_bcg
    from torch_bcg.counters import counters

    torch.set_num_threads(2)
    torch._dynamo.reset()
    torch_bcg.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch_bcg.reset()
