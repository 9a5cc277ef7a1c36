"""Recorders: recording runs nothing, a replay reads and writes the memory bound when recorded."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from torch_bcg.errors import HostReadError, OutputError
from torch_bcg.runtime.device import new_pool
from torch_bcg.runtime.recorders import host_reads, no_host_reads, recorder_for


def rows(device, *shape):
    return torch.randn(shape or (4, 6), device=device)


def code_of(fn):
    """A segment's module: it returns a tuple of nodes."""
    return fx.GraphModule({}, fx.symbolic_trace(fn).graph, class_name="graph_000")


def recorded(fn, operands, device, like=None):
    """The recording of ``fn``, with an output like ``like`` or the first operand."""
    recorder = recorder_for(new_pool(device), unrecorded=False)
    like = operands[0] if like is None else like
    return recorder.record(code_of(fn), operands, [lambda: torch.empty_like(like)])


def test_recording_runs_nothing(device):
    counter, x = torch.zeros(4, 6, device=device), rows(device)
    recording = recorded(lambda c, x: (c.add_(1) * x,), [counter, x], device)
    assert counter.sum() == 0
    for i in range(1, 4):
        recording.replay()
        assert torch.equal(counter, torch.full_like(counter, i))
        assert torch.equal(recording.outputs[0], i * x)


def test_recording_reads_no_value_of_unfilled_memory(device):
    """Indices that nobody has written yet are no error, since nothing looks them up."""
    table, ids = rows(device, 9, 6), torch.full((4,), 10**6, device=device)
    recording = recorded(lambda i, t: (F.embedding(i, t),), [ids, table], device, rows(device))
    for i in range(3):
        ids.copy_(torch.arange(4) + i)
        recording.replay()
        assert torch.equal(recording.outputs[0], table[i : i + 4])


def test_replay_reads_and_writes_the_addresses_it_was_bound_to(device):
    x, y = rows(device), rows(device)
    view = x[1:3]
    recording = recorded(lambda v, y: (v * 2 + y[:2],), [view, y], device)
    (out,) = recording.outputs
    address = out.data_ptr()
    for _ in range(4):
        x.copy_(rows(device))
        y.copy_(rows(device))
        recording.replay()
        assert out is recording.outputs[0]
        assert out.data_ptr() == address
        assert torch.equal(out, x[1:3] * 2 + y[:2])


def test_replay_follows_memory_not_names(device):
    """The object may change its storage afterwards: what was bound is the address."""
    x = rows(device)
    bound = x.view(4, 6)
    recording = recorded(lambda x: (x + 1,), [bound], device)
    before = x.clone()
    x.data = rows(device)
    recording.replay()
    assert torch.equal(recording.outputs[0], before + 1)


def test_one_recording_feeds_the_next(device):
    x = rows(device)
    first = recorded(lambda x: (x * 2,), [x], device)
    second = recorded(lambda y, x: (y + x,), [*first.outputs, x], device)
    for _ in range(3):
        x.copy_(rows(device))
        first.replay()
        second.replay()
        assert torch.equal(second.outputs[0], x * 2 + x)


def test_random_numbers_are_drawn_anew(device):
    x = torch.ones(30, 40, device=device)
    recording = recorded(lambda x: (F.dropout(x, 0.5),), [x], device)
    drawn = []
    for _ in range(3):
        recording.replay()
        drawn.append(recording.outputs[0].clone())
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def under_autocast(device, leave):
    """Code that enters autocast, and leaves it or does not."""

    graph = fx.Graph()
    x = graph.placeholder("x")
    mode = graph.call_function(_enter_autocast, (device, torch.bfloat16, True, False))
    y = graph.call_method("matmul", (x, x))
    if leave:
        graph.call_function(_exit_autocast, (mode,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output((y,))
    return fx.GraphModule({}, graph, class_name="graph_000")


@pytest.mark.parametrize("leave", [True, False])
def test_modes_end_with_the_segment(device, leave):
    x = rows(device, 6, 6)
    recorder = recorder_for(new_pool(device), unrecorded=False)
    like = x.bfloat16() @ x.bfloat16()  # and the library is loaded, which no capture may do
    with torch.no_grad():
        code = under_autocast(device, leave)
        recording = recorder.record(code, [x], [lambda: torch.empty_like(like)])
        for _ in range(3):
            x.copy_(rows(device, 6, 6))
            recording.replay()
            assert not torch.is_autocast_enabled(device)
            assert not torch.is_grad_enabled()
            assert torch.equal(recording.outputs[0], x.bfloat16() @ x.bfloat16())


def test_unrecorded_segments_keep_the_contract(device):
    counter = torch.zeros(4, 6, device=device)
    recorder = recorder_for(new_pool(device), unrecorded=True)
    recording = recorder.record(
        code_of(lambda c: (c.add_(1) * 2,)), [counter], [lambda: torch.empty_like(counter)]
    )
    assert counter.sum() == 0
    for i in range(1, 4):
        recording.replay()
        assert torch.equal(recording.outputs[0], torch.full_like(counter, 2.0 * i))


# The host recorder alone.

READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.sum().tolist(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "index": lambda x: [1, 2, 3][(x.sum() * 0).long()],
    "numpy": lambda x: x.numpy().sum(),
    "cpu": lambda x: x.cpu().sum(),
}


def reading(read):
    """A segment with a call that reads the host inside, as in an operator nobody tagged."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(lambda x: (read(x), x * 2)[1], (x,)),))
    return fx.GraphModule({}, graph, class_name="graph_007")


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_host_read_in_a_recorded_segment_raises(read):
    x = rows("cpu")
    recorder = recorder_for(new_pool("cpu"), unrecorded=False)
    recording = recorder.record(reading(read), [x], [lambda: torch.empty_like(x)])
    for _ in range(3):
        with pytest.raises(HostReadError, match="graph_007"):
            recording.replay()
    assert isinstance(x.sum().item(), float)


def test_reads_are_seen_only_here_and_only_then():
    methods = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "to", "__bool__")}
    seen = []
    with host_reads(seen.append):
        x = torch.ones(3)
        x.to(torch.float64).cpu()
        assert x.sum().item() == 3
    assert seen == ["cpu", "item"]
    with pytest.raises(ZeroDivisionError), no_host_reads("graph_000"):
        raise ZeroDivisionError
    assert {name: getattr(torch.Tensor, name) for name in methods} == methods


def test_a_result_unlike_its_facts_is_named():
    x = rows("cpu")
    for wrong in (lambda x: (x[:2] * 2,), lambda x: (x.double() * 2,)):
        recording = recorded(wrong, [x], "cpu")
        with pytest.raises(OutputError, match="mul"):
            recording.replay()


def test_results_keep_the_strides_and_expanded_dims_of_their_memory():
    x = rows("cpu")
    recorder = recorder_for(new_pool("cpu"), unrecorded=False)
    for fn, made in (
        (lambda x: (x.t() * 2,), lambda: torch.empty_strided((6, 4), (1, 6))),
        (lambda x: ((x[0] * 2).expand(5, 6),), lambda: torch.empty_strided((5, 6), (0, 1))),
    ):
        recording = recorder.record(code_of(fn), [x], [made])
        for _ in range(3):
            x.copy_(rows("cpu"))
            recording.replay()
            assert torch.equal(recording.outputs[0], fn(x)[0])
            assert recording.outputs[0].stride() == made().stride()
