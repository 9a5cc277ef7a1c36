"""The text of `explain`: what is recorded, what is not and why, what it costs a call."""

import re

import pytest
import torch
from expecttest import assert_expected_inline

import torch_bcg
from report.shown import Layers, Untagged, called, compiler, explained, mixed, shown
from torch_bcg.errors import BCGWarning
from torch_bcg.explain import explain
from torch_bcg.graph.fusing import Fusing
from torch_bcg.report.text import explanation, fused


def fused_part(text):
    """The lines on what is fused."""
    return "fused segments" + shown(text).partition("fused segments")[2].partition("\n\n")[0]


def test_marked_layer():
    text = explained(Layers(), torch.ones(4, 16))
    assert_expected_inline(
        shown(text),
        """\
graph_N on cpu: 4 of 5 kernels recorded, in 2 segments; 1 eager

segments, in the order of a call
    0 graph  1 kernel    layers.0.up
          | 512 bytes: linear f32[4, 32]
    1 eager  1 kernel    layers.0
             mark: shown::attention (attention_default, FILE:LINE)
    2 graph  3 kernels   layers.0

cuts
  1 time mark: shown::attention (attention_default, FILE:LINE)

slots: memory at a fixed address
  l_x_ f32[4, 16]  256 bytes  copied in
  4 static tensors, 3,264 bytes: recorded where they are, never copied
  A caller's tensor that stays where it is needs no slot:
      torch._dynamo.mark_static_address(tensor)

numbers
  Any other number is a constant of the graph: Dynamo compares it at each call.

outputs
  x f32[4, 16]  the caller's own copy  256 bytes

Not probed: marks, schemas and fake tensors say this. An operation that reads the host and
does not say so is found by the first real call, which adds a cut for it, and so is metadata
that a marked function reads by itself; explain(compiled) after that call shows both.
""",
    )


def test_alike_layers_are_folded():
    text = explained(Layers(40), torch.ones(4, 16))
    assert_expected_inline(
        shown(str(text).partition("\n\nslots")[0]),
        """\
graph_N on cpu: 160 of 200 kernels recorded, in 41 segments; 40 eager

segments, in the order of a call
    0 graph  1 kernel    layers.0.up
          | 512 bytes: linear f32[4, 32]
    1 eager  1 kernel    layers.0
             mark: shown::attention (attention_default, FILE:LINE)
    2 graph  4 kernels   layers
          | 768 bytes: x f32[4, 16], linear_2 f32[4, 32]
    3 eager  1 kernel    layers.1
             mark: shown::attention (attention_default_1, FILE:LINE)
          | 256 bytes: x f32[4, 16]
  .. segments 4..79: 38 times segments 2..3, names apart, layers.2 to layers.39
   80 graph  3 kernels   layers.39

cuts
  40 times mark: shown::attention (attention_default, FILE:LINE, and 39 more)""",
    )


def test_bridge_written_argument_and_numbers():
    assert_expected_inline(
        shown(mixed()),
        """\
graph_N on cpu: 5 of 6 kernels recorded, in 2 segments; 1 eager

segments, in the order of a call
    0 graph  4 kernels
          | 32*sNN bytes: mul f32[sNN, 8]
    1 eager  1 kernel
             mark: shown::route (y, FILE:LINE)
          | 32*sNN bytes: y f32[sNN, 8]
    2 graph  1 kernel

cuts
  1 time mark: shown::route (y, FILE:LINE)

slots: memory at a fixed address
  l_total_ f32[]    4 bytes       copied in, and back after segment 0
  l_x_ f32[sNN, 8]  32*sNN bytes  copied in
  y f32[sNN, 8]     32*sNN bytes  copied once its eager segment made it
  1 static tensor, 4 bytes: recorded where they are, never copied
  A caller's tensor that stays where it is needs no slot:
      torch._dynamo.mark_static_address(tensor)

numbers
  sNN                 l_x_.shape[0], given as argument sNN  each value records a program
  item from l_scale_  float32                               follows the call
  Any other number is a constant of the graph: Dynamo compares it at each call.

outputs
  add f32[sNN, 8]  the caller's own copy  32*sNN bytes
  sNN              follows from the key

Probed: the first call looked for operations that read the host, wait for the device or keep
memory and do not say so; what it found is a cut above. What they would do with other values
was not tried.
""",
    )


def test_cut_found_by_the_probe_says_what_to_mark():
    text = called(Untagged(), (torch.ones(3),), (torch.ones(3),))
    assert_expected_inline(
        shown(text),
        """\
graph_N on cpu: 2 of 3 kernels recorded, in 2 segments; 1 eager

segments, in the order of a call
    0 graph  1 kernel
          | 12 bytes: add f32[3]
    1 eager  1 kernel
             host read: shown::untagged, Tensor.tolist (untagged_default, FILE:LINE)
          | 12 bytes: untagged_default f32[3]
    2 graph  1 kernel

cuts
  1 time host read: shown::untagged, Tensor.tolist (untagged_default, FILE:LINE)
      To mark it: torch_bcg.eager_on_graph("shown::untagged")

slots: memory at a fixed address
  l_x_ f32[3]              12 bytes  copied in
  untagged_default f32[3]  12 bytes  copied once its eager segment made it
  A caller's tensor that stays where it is needs no slot:
      torch._dynamo.mark_static_address(tensor)

numbers
  Any other number is a constant of the graph: Dynamo compares it at each call.

outputs
  add_1 f32[3]  the caller's own copy  12 bytes

Probed: the first call looked for operations that read the host, wait for the device or keep
memory and do not say so; what it found is a cut above. What they would do with other values
was not tried.
""",
    )


def test_what_it_says_to_mark_is_then_a_mark():
    (call,) = re.findall(
        r"torch_bcg\.eager_on_graph\(.*\)", str(called(Untagged(), (torch.ones(3),)))
    )
    torch._dynamo.reset()
    handle = eval(call, {"torch_bcg": torch_bcg})
    try:
        (plan,) = explained(Untagged(), torch.ones(3)).plans
        assert [r.kind for r in plan.reasons] == ["mark"]
    finally:
        handle.remove()


def test_line_of_the_user_for_a_cut():
    (plan,) = called(Untagged(), (torch.ones(3),)).plans
    assert re.fullmatch(r"shown\.py:\d+", plan.reasons[0].where)


def test_fused_segments_and_which_are_alike():
    x = torch.ones(4, 16)
    text = called(Layers(6), (x,), (x,), inner=compiler())
    assert_expected_inline(
        fused_part(text),
        """\
fused segments
  7 of 7, by 3 compilations, in 1 program
      alike    2, 4, 6, 8, 10""",
    )


def test_unfused_segments_and_why():
    x = torch.ones(4, 16)
    with pytest.warns(BCGWarning, match="<no> room"):
        text = called(Layers(3), (x,), (x,), inner=compiler(refused=6))
    assert_expected_inline(
        fused_part(text),
        """\
fused segments
  2 of 4, by 2 compilations, in 1 program
      unfused  2, 4: ValueError: <no> room""",
    )


def test_sizes_that_are_fused_otherwise_are_shown_apart():
    calls = [(torch.ones(n, 16),) for n in (8, 64, 16)]
    inner = compiler(refused=4, rows=64)
    with pytest.warns(BCGWarning, match="<no> room"):
        text = called(Layers(3), *calls, dynamic=True, inner=inner, buckets=[8, 16, 64])
    assert_expected_inline(
        fused_part(text),
        """\
fused segments
  4 of 4, by 3 compilations, in 2 programs
      sizes    sNN = 8, 16
      alike    2, 4
  3 of 4, by 2 compilations, in 1 program
      sizes    sNN = 64
      alike    2, 4
      unfused  6: ValueError: <no> room""",
    )


def test_sizes_that_are_compiled_apart_are_counted():
    """A guard that holds for some sizes: nothing else differs."""

    def by_eight(code, examples):
        bool(examples[0] % 8 == 0)
        return code.forward

    calls = [(torch.ones(n, 16),) for n in (24, 12, 8, 4) for _ in range(2)]
    text = called(Layers(2), *calls, dynamic=True, inner=by_eight)
    assert_expected_inline(
        fused_part(text),
        """\
fused segments
  3 of 3, by 6 compilations, in 4 programs
      sizes    sNN = 4, 8, 12, 24""",
    )


def test_nothing_is_known_to_be_fused_before_a_program():
    expected = "fused segments\n  known once a program is recorded"
    assert fused_part(explained(Layers(), torch.ones(4, 16), inner="inductor")) == expected


def test_nothing_is_said_of_fusing_where_nobody_asked():
    x = torch.ones(4, 16)
    assert "fused" not in str(called(Layers(), (x,), (x,)))
    assert "fused" not in str(explained(Layers(), x))


def test_programs_of_several_sizes_and_many_segments():
    def of(n, m, *reasons):
        alike = [(i, 1) for i in range(2, 64, 2)]
        return Fusing((("s0", n), ("s1", m)), ((0, 0), *alike), tuple(enumerate(reasons, 64)))

    (plan,) = explained(Layers(), torch.ones(4, 16)).plans
    programs = [of(8, 2), of(4, 2, "one", "other", "one"), of(8, 1), of(8, 2)]
    assert_expected_inline(
        "\n".join(fused(plan, programs)),
        """\
fused segments
  32 of 35, by 2 compilations, in 1 program
      sizes    (s0, s1) = (4, 2)
      alike    2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44,
               46, 48, 50, 52, 54, 56, 58, 60, 62
      unfused  64, 66: one
      unfused  65: other
  32 of 32, by 2 compilations, in 3 programs
      sizes    (s0, s1) = (8, 1), (8, 2)
      alike    2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44,
               46, 48, 50, 52, 54, 56, 58, 60, 62""",
    )


def test_no_graph():
    assert_expected_inline(
        explanation([], False),
        """\
No graph was planned: nothing was compiled and called yet, or all calls needed gradients
(call under torch.inference_mode()).
""",
    )


def test_two_graphs():
    def f(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    with torch.inference_mode():
        text = str(explain(f)(torch.ones(2)))
    assert text.startswith(
        "2 graphs, in the order in which Dynamo made them.\n\ngraph_0 on cpu: 1 of 1"
    )
    assert "\n\ngraph_1 on cpu: 1 of 1" in text
