"""What users may rely on: the public names, the name of the backend, and a cheap import."""

import inspect
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.registry import lookup_backend

import torch_bcg


def fresh(program):
    """Runs a program in an interpreter that has imported nothing, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_public_names():
    assert_expected_inline(
        "\n".join(sorted(torch_bcg.__all__)),
        """\
BCGError
Options
__version__
bcg
bind_metadata
current_metadata
dump_to
eager_on_graph
explain
programs
register_metadata_binding
reset
stats
warm_up""",
    )


@pytest.mark.parametrize("name", sorted(torch_bcg.__all__))
def test_each_is_there_and_says_what_it_is(name):
    value = getattr(torch_bcg, name)
    if name != "__version__":
        assert inspect.getdoc(value)


def test_signatures():
    functions = [torch_bcg.dump_to, torch_bcg.explain, torch_bcg.programs, torch_bcg.reset]
    functions.append(torch_bcg.warm_up)
    shown = [f"{f.__name__}({', '.join(inspect.signature(f).parameters)})" for f in functions]
    marks = inspect.signature(torch_bcg.eager_on_graph).parameters
    assert_expected_inline(
        "\n".join([*shown, f"eager_on_graph({', '.join(marks)})"]),
        """\
dump_to(directory)
explain(fn, options)
programs(compiled)
reset(compiled)
warm_up(compiled, make_inputs, sizes, metadata, progress)
eager_on_graph(target, mutates_args, fake, name, enable)""",
    )


def test_the_backend_is_found_by_name():
    assert "bcg" in torch._dynamo.list_backends()
    assert lookup_backend("bcg") is torch_bcg.bcg


def test_nothing_need_be_imported():
    program = """
import sys, torch
assert "torch_bcg" not in sys.modules
compiled = torch.compile(lambda x: x.sin() + 1, backend="bcg")
with torch.inference_mode():
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(compiled(x), x.sin() + 1)
import torch_bcg
print(torch_bcg.stats().replays)
"""
    assert fresh(program) == ["2"]


def test_lookup_after_an_import_and_the_other_way_round():
    for lines in (
        ("import torch_bcg", "from torch._dynamo.backends.registry import lookup_backend"),
        ("from torch._dynamo.backends.registry import lookup_backend", "import torch_bcg"),
    ):
        program = "\n".join([*lines, "print(lookup_backend('bcg') is torch_bcg.bcg)"])
        assert fresh(program) == ["True"]


def test_the_import_is_cheap():
    """Dynamo itself imports parts of Inductor: nothing of it, or of the extras, comes on top."""
    heavy = ("torch._inductor", "triton", "transformers", "rich", "matplotlib")
    program = f"""
import sys
import torch._dynamo
before = set(sys.modules)
import torch_bcg
print(*sorted(m for m in set(sys.modules) - before if m.startswith({heavy!r})))
"""
    assert fresh(program) == []
