"""The plan as text and as JSON: the same to the character, nothing lost."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from report.shown import Layers, Mixed, Untagged, called, explained, mixed, shown
from torch_bcg.graph import ir
from torch_bcg.graph.amounts import bytes_of
from torch_bcg.graph.annotate import annotated

TESTS = Path(__file__).resolve().parent.parent


def test_marked_layer():
    (plan,) = explained(Layers(), torch.ones(4, 16)).plans
    assert_expected_inline(
        shown(plan.render()),
        """\
plan graph_N on cpu: 4 of 5 kernels recorded, in 2 segments; 1 eager

arguments: 5
  4 static tensors that nothing writes, 3,264 bytes: recorded where they are
  l_x_  slot  f32[4, 16]  256 bytes  copied in

values: 3
  linear  recorded  f32[4, 32]  512 bytes  memory of a recorded segment
  out     scratch   f32[4, 16]  256 bytes  allocated once a program, written
  x       recorded  f32[4, 16]  256 bytes  memory of a recorded segment

segments: 3
  0 graph, 1 kernel, layers.0.up
      nodes       linear
      reads       l_x_ (slot), 2 static tensors
      makes       linear f32[4, 32] (recorded)
      crosses     512 bytes: linear
      compares    2 static tensors once it runs
  1 eager, 1 kernel, layers.0
      reason      mark: shown::attention (attention_default, FILE:LINE)
      nodes       attention_default
      reads       linear (recorded), out (scratch)
  2 graph, 3 kernels, layers.0
      nodes       linear_1, relu, x
      reads       l_x_ (slot), out (scratch), 2 static tensors
      makes       x f32[4, 16] (recorded)

outputs: 1
  0  x  f32[4, 16]  the caller's own copy
""",
    )


def test_bridge_written_argument_and_numbers():
    (plan,) = mixed().plans
    assert_expected_inline(
        shown(plan.render()),
        """\
plan graph_N on cpu: 5 of 6 kernels recorded, in 2 segments; 1 eager

key: a program for each
  sNN  l_x_.shape[0], given as argument sNN  fixed in a program

numbers that follow the call
  item from l_scale_  float32  read from item_float32

arguments: 5
  l_self_buffers_calls_  static     f32[]        4 bytes       recorded where it is, written
  l_total_               slot       f32[]        4 bytes       copied in, and back where written
  sNN                    size                                  of the key
  l_x_                   slot       f32[sNN, 8]  32*sNN bytes  copied in
  l_scale_               reference  f64[]        8 bytes       passed on as it is

values: 3
  mul  recorded  f32[sNN, 8]  32*sNN bytes  memory of a recorded segment
  y    bridge    f32[sNN, 8]  32*sNN bytes  copied into its slot after the eager segment
  add  recorded  f32[sNN, 8]  32*sNN bytes  memory of a recorded segment

segments: 3
  0 graph, 4 kernels
      nodes       add_, sum_1, add__1, mul
      reads       l_self_buffers_calls_ (static), l_total_ (slot), l_x_ (slot)
      makes       mul f32[sNN, 8] (recorded)
      numbers     mul reads item from item_float32
      copies back l_total_
      crosses     32*sNN bytes: mul
  1 eager, 1 kernel
      reason      mark: shown::route (y, FILE:LINE)
      nodes       y
      reads       mul (recorded)
      makes       y f32[sNN, 8] (bridge)
      crosses     32*sNN bytes: y
  2 graph, 1 kernel
      nodes       add
      reads       y (bridge)
      makes       add f32[sNN, 8] (recorded)

outputs: 2
  0  add  f32[sNN, 8]  the caller's own copy
  1  sNN               follows from the key
""",
    )


def test_forty_layers_are_all_listed():
    (plan,) = explained(Layers(40), torch.ones(4, 16)).plans
    lines = plan.render().splitlines()
    heads = [line for line in lines if line.startswith("  ") and line.split()[1:2] == ["eager,"]]
    assert len(heads) == 40
    assert max(map(len, lines)) <= 100


def test_nothing_recorded():
    plan = ir.Plan(
        "graph_0",
        "cpu",
        (),
        ("x",),
        (),
        (),
        (),
        (),
        ir.Reason("changed geometry", "set_", "a.py:1", "set_"),
    )
    assert_expected_inline(
        plan.render(),
        """\
plan graph_0 on cpu: nothing is recorded, changed geometry: set_ (set_, a.py:1)

arguments: 1
  x  unused
""",
    )


def test_json_gives_an_equal_plan():
    for explanation in (mixed(), called(Untagged(), (torch.ones(3),))):
        for plan in explanation.plans:
            assert ir.Plan.from_json(plan.to_json()) == plan


names = st.text(min_size=1, max_size=8)
texts = st.tuples() | st.lists(names, max_size=3).map(tuple)
reasons = st.builds(ir.Reason, names, names, names, names, names, names)
specs = st.builds(ir.TensorSpec, names, names, texts, texts, names)
homes = st.sampled_from(["static", "slot", "bridge", "size"])
values = st.builds(
    ir.Value, names, homes, st.none() | specs, st.integers(-1, 9), names, names, st.booleans()
)
common = (st.integers(0, 9), texts, texts, texts, texts, texts)
slots = st.lists(st.tuples(names, st.integers(0, 3), names), max_size=2).map(tuple)
segments = st.builds(
    ir.GraphSegment, *common, slots, st.integers(0, 99), names, texts
) | st.builds(
    ir.EagerSegment, *common, slots, st.integers(0, 99), names, texts, st.tuples(reasons)
)  # fmt: skip
outputs = st.builds(ir.Output, st.sampled_from(["clone", "view"]), names, names, names)
plans = st.builds(
    ir.Plan, names, names, st.lists(st.tuples(names, names, st.integers(-1, 3)), max_size=2).map(tuple),
    texts, st.lists(values, max_size=3).map(tuple), st.lists(segments, max_size=3).map(tuple),
    st.lists(st.builds(ir.NumberSlot, names, names, names, texts), max_size=2).map(tuple),
    st.lists(outputs, max_size=3).map(tuple), st.none() | reasons,
)  # fmt: skip


@given(plans)
def test_json_gives_any_plan_back(plan):
    assert ir.Plan.from_json(plan.to_json()) == plan


def test_same_text_in_fresh_processes():
    code = (
        "from report.shown import *; "
        "e = called(Untagged(), (torch.ones(3),)); p = mixed().plans[0]; "
        "print(e, e.plans[0].render(), e.plans[0].to_json(), p.render(), p.to_json())"
    )
    once, again = (
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=TESTS, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    )  # fmt: skip
    assert once == again
    assert "host read" in once
    assert "0x" not in once


def spec(dtype, *size, stride=None):
    stride = stride or ("1",) * len(size)
    return ir.Value("x", "slot", ir.TensorSpec(dtype, "cpu", size, stride))


def test_bytes_are_expressions():
    cases = {
        "0 bytes": [],
        "1 byte": [spec("bool")],
        "256*s0 bytes": [spec("float32", "s0", "64")],
        "2*s0*s1 + 1,024 bytes": [spec("bfloat16", "s1", "s0"), spec("float8_e4m3fn", "1024")],
        "12*s0 bytes": [spec("int64", "s0"), spec("float32", "s0")],
        "8*(s0 + 1) bytes": [spec("complex64", "s0 + 1")],
        "8*s0*s0 bytes": [spec("float64", "s0", "s0")],
        "16*s0 bytes": [spec("float32", "4", "7", "s0", stride=("s0", "0", "1"))],
    }
    for text, values in cases.items():
        assert str(bytes_of(values)) == text


def test_annotating_again_changes_nothing():
    from torch_bcg.compiled import live_graphs

    called(Mixed(), (torch.ones(2), torch.zeros(()), 1.0))
    graph = live_graphs()[-1]
    once = annotated(graph.plan, graph.lowering)
    assert annotated(once, graph.lowering) == once
