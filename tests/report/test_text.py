"""The text of `explain`: what is recorded, what is not and why, what it costs a call."""

import re

import torch
from expecttest import assert_expected_inline

import torch_bcg
from report.shown import Layers, Untagged, called, explained, mixed, shown
from torch_bcg.explain import explain
from torch_bcg.report.text import explanation


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
