"""What a plan says about padded sizes, and how many sizes of a ladder become programs."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import torch_bcg
from graph.traced import planned
from report.shown import shown
from torch_bcg.graph.buckets import LADDER
from torch_bcg.graph.ir import Plan
from twin import add_one_to, assert_same, counted, plus_one


def dynamic(*shape, dim=0):
    x = torch.randn(*shape)
    torch._dynamo.mark_dynamic(x, dim)
    return x


def numbers(n):
    x = torch.arange(n)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def rendered(fn, *args, **options):
    """The plan as text; what is written as JSON gives the same."""
    plan = planned(fn, *args, options=options).plan
    assert Plan.from_json(plan.to_json()) == plan
    return shown(plan.render())


def blocks(text, *names):
    """What a rendered plan says about these."""
    return "\n\n".join(b for b in text.split("\n\n") if b.startswith(names)) + "\n"


@torch.library.custom_op("padding_plan::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """What facts know nothing of."""
    return x * 2


HOST = [torch.Tag.data_dependent_output]


@torch.library.custom_op("padding_plan::host", mutates_args=(), tags=HOST)
def host(x: Tensor, y: Tensor) -> Tensor:
    """What nobody marked and cannot be recorded."""
    return x * int(y.isfinite().all())


scaled.register_fake(torch.empty_like)
host.register_fake(lambda x, y: torch.empty_like(x))


def test_tried_and_filled():
    def fn(x, memory, slots):
        memory[slots] = scaled(x)
        return plus_one(x) * 2 + slots[:, None]

    args = dynamic(8, 4), torch.zeros(64, 4), numbers(8)
    text = rendered(fn, *args, buckets="ladder", pad={"slots": 0})
    assert_expected_inline(
        blocks(text, "plan", "key", "padding", "arguments", "values"),
        """\
plan graph_N on cpu: 4 of 5 kernels recorded, in 2 segments; 1 eager

key: a program for each
  sNN  l_x_.shape[0], given as argument sNN  padded

padding: sNN, that is l_slots_.shape[0], to 4, 8, 12 .. 2048, 42 sizes
  tried       operator: padding_plan::scaled (scaled_default, FILE:LINE)
  rows hold   l_slots_: 0

arguments: 4
  sNN        size                             sNN, of the key
  l_x_       slot  f32[sNN, 4]  16*sNN bytes  copied in
  l_memory_  slot  f32[64, 4]   1,024 bytes   copied in, and back where written
  l_slots_   slot  i64[sNN]     8*sNN bytes   copied in

values: 2
  twin_plus_one_default  bridge    f32[sNN, 4]  16*sNN bytes  copied into its slot after the eager segment
  add                    recorded  f32[sNN, 4]  16*sNN bytes  memory of a recorded segment
""",
    )


def test_fronts_that_are_copied():
    def fn(x):
        y = (x * 2).transpose(1, 2)
        add_one_to(y)
        return plus_one(y) * 2

    text = rendered(fn, dynamic(2, 8, 4, dim=1), buckets=[8, 16])
    assert_expected_inline(
        blocks(text, "padding", "segments"),
        """\
padding: sNN, that is l_x_.shape[1], to 8, 16

segments: 3
  0 graph, 1 kernel
      nodes       mul
      reads       l_x_ (slot)
      makes       mul f32[2, sNN, 4] (recorded)
      crosses     32*sNN bytes: mul
  1 eager, 2 kernels
      reason      mark: torch_bcg::twin_add_one_to (twin_add_one_to_default, FILE:LINE)
      reason      mark: torch_bcg::twin_plus_one (twin_plus_one_default, FILE:LINE)
      nodes       twin_add_one_to_default, twin_plus_one_default
      reads       mul (recorded)
      makes       twin_plus_one_default f32[2, 4, sNN] (bridge)
      sees        the rows of the call of y, copied and back
      crosses     32*sNN bytes: twin_plus_one_default
  2 graph, 1 kernel
      nodes       mul_1
      reads       twin_plus_one_default (bridge)
      makes       mul_1 f32[2, 4, sNN] (recorded)
""",
    )


def test_an_eager_segment_that_sees_all_rows():
    """Nobody marked it, and rows cannot be cut out of what it takes."""

    def fn(x):
        return host(x, (x * 2).view(-1, 4)) + 1

    text = rendered(fn, dynamic(2, 8, 4, dim=1), buckets=[8])
    assert_expected_inline(
        blocks(text, "padding"),
        """\
padding: sNN, that is l_x_.shape[1], to 8
  tried       operator: padding_plan::host (host_default, FILE:LINE)
""",
    )
    assert "      sees        all rows, padded ones too\n" in text


def test_refused():
    def fn(x):
        return plus_one(x - x.mean(0)) * 2

    text = rendered(fn, dynamic(8, 4), buckets="ladder")
    assert_expected_inline(
        blocks(text, "key", "padding"),
        """\
key: a program for each
  sNN  l_x_.shape[0], given as argument sNN  fixed in a program

padding: none
  reason      reduction over tokens: aten::mean.dim (mean, FILE:LINE)
""",
    )


REFUSED = {
    "no size": (lambda x: plus_one(x) * 2, [torch.ones(8, 4)], "no padded size: no size varies"),
    "several": (
        lambda x, y: (plus_one(x) * 2, y * 2),
        [dynamic(8, 4), dynamic(7, 4)],
        "no padded size: several sizes vary: sNN is dim 0 of x, sNN is dim 0 of y; name one with",
    ),
    "merged": (
        lambda x: plus_one((x * 2).view(-1, 4)) * 2,
        [dynamic(2, 8, 4, dim=1)],
        "rows cannot be cut",
    ),
    "written": (
        lambda x, memory, slots: (memory.index_copy_(0, slots, x), plus_one(x) * 2),
        [dynamic(8, 4), torch.zeros(64, 4), numbers(8)],
        "padded rows are written",
    ),
}


@pytest.mark.parametrize(("fn", "args", "reason"), REFUSED.values(), ids=REFUSED)
def test_reasons(fn, args, reason):
    plan = planned(fn, *args, options={"buckets": [8]}).plan
    assert shown(str(plan.padding.refused)).startswith(reason)
    assert plan.padding.tried == ()
    assert not any(s.fronts for s in plan.segments)
    assert not any(v.row_dims for v in plan.values)


def test_nobody_asked():
    plan = planned(lambda x: plus_one(x) * 2, dynamic(8, 4)).plan
    assert plan.padding is None
    assert "padding:" not in plan.render()


# programs of a ladder


def called(compiled, sizes, width=4):
    with torch.no_grad():
        for n in sizes:
            x = dynamic(n, width)
            assert_same(compiled(x), compiled._torchdynamo_orig_callable(x), exact=False)


def recorded(compiled):
    return sorted(n for p in torch_bcg.programs(compiled) for n in p.sizes.values())


def double(x):
    return plus_one(x * 2) * 2


def test_the_whole_ladder_is_recorded():
    """It has more sizes than `max_programs`, which is about sizes that nobody foresaw."""
    options = {"buckets": "ladder", "on_eager_call": "error"}
    compiled = torch.compile(double, backend="bcg", options=options)
    with counted() as counts:
        called(compiled, reversed(LADDER))
        called(compiled, (n - 1 for n in LADDER if n > 4))
    assert len(LADDER) == 42
    assert recorded(compiled) == list(LADDER)
    assert counts.captures == 42
    assert counts.replays == 41
    assert counts.num_eager == 0


def test_warm_up_records_the_whole_ladder():
    compiled = torch.compile(double, backend="bcg", options={"buckets": "ladder"})
    with torch.inference_mode():
        warmed = torch_bcg.warm_up(compiled, lambda n: (dynamic(n, 4),), progress=False)
    assert [w.size for w in warmed] == list(reversed(LADDER))
    assert {w.how for w in warmed} == {"replay"}
    assert recorded(compiled) == list(LADDER)


def test_other_sizes_are_bounded_as_before():
    """Exact shapes beside padded ones: the ladder comes on top of `max_programs`."""
    options = {
        "buckets": [8, 16],
        "max_programs": 2,
        "bucket_dim": ("x", 0),
        "on_eager_call": "count",
    }
    compiled = torch.compile(double, backend="bcg", options=options)
    with torch.no_grad(), counted() as counts:
        for width in (4, 5, 6):
            for n in (7, 15):
                x = dynamic(n, width)
                torch._dynamo.mark_dynamic(x, 1)
                assert_same(compiled(x), double(x))
    assert len(torch_bcg.programs(compiled)) == 4
    assert counts.eager_calls == {"max_programs": 2}


def test_a_refused_graph_has_no_more_programs_than_others():
    options = {"buckets": [8, 16, 32], "max_programs": 2, "on_eager_call": "count"}
    compiled = torch.compile(lambda x: plus_one(x - x.mean(0)) * 2, backend="bcg", options=options)
    with counted() as counts:
        called(compiled, (3, 3, 5, 5, 7, 7, 7))
    assert recorded(compiled) == [3, 5]
    assert counts.eager_calls == {"max_programs": 3}
