"""Recording that fails: the operation becomes a cut with its error as the reason, nothing is lost."""

import pytest
import torch

import torch_bcg
from tests.twin import check, counted, plus_one
from torch_bcg.runtime import capture, recorders


def rows(device):
    return torch.randn(4, 6, device=device)


class Failing(recorders.HostRecorder):
    """Fails at every node of the given names, as a CUDA capture fails at an operation."""

    def __init__(self, names, error):
        self.names, self.error = names, error

    def record(self, code, operands, allocate):
        for node in code.graph.nodes:
            if node.name in self.names and node.op != "placeholder":
                error = self.error
                error.bcg_node = node.name
                raise error
        return super().record(code, operands, allocate)


def failing(monkeypatch, names, error):
    recorder = Failing(names, error)
    monkeypatch.setattr(capture, "recorder_for", lambda pool, unrecorded: recorder)


def two_cuts(x):
    return plus_one(x * 2).sin().cos() + 1


def the_plan():
    graph = torch_bcg.compiled.live_graphs()[-1]
    return graph.plan


def test_what_fails_to_record_is_cut_with_its_error(monkeypatch, device):
    failing(monkeypatch, {"sin"}, RuntimeError("no such luck"))
    check(two_cuts, lambda i: (rows(device),))
    (reason,) = [r for r in the_plan().reasons if r.kind == "cannot be recorded"]
    assert (reason.node, reason.detail) == ("sin", "RuntimeError: no such luck")
    assert the_plan().recorded_kernels == the_plan().kernels - 2


def test_several_failures_are_cut_one_by_one(monkeypatch, device):
    failing(monkeypatch, {"sin", "cos"}, NotImplementedError("neither"))
    check(two_cuts, lambda i: (rows(device),))
    assert [r.node for r in the_plan().reasons if r.kind == "cannot be recorded"] == ["sin", "cos"]


def test_a_failure_nobody_can_place_ends_too(monkeypatch, device):
    def record(self, code, operands, allocate):
        raise RuntimeError("anywhere")

    monkeypatch.setattr(recorders.HostRecorder, "record", record)
    monkeypatch.setattr(recorders.CudaRecorder, "record", record)
    check(two_cuts, lambda i: (rows(device),))
    assert the_plan().recorded_kernels == 0


def test_out_of_memory_leaves_a_working_unrecorded_function(monkeypatch, device):
    failing(monkeypatch, {"sin"}, torch.OutOfMemoryError("none left"))
    compiled = torch.compile(two_cuts, backend="bcg")
    with torch.no_grad(), counted() as counts:
        torch.testing.assert_close(compiled(x := rows(device)), two_cuts(x))
        with pytest.warns(torch_bcg.errors.BCGWarning, match="out of memory"):
            for _ in range(3):
                torch.testing.assert_close(compiled(x := rows(device)), two_cuts(x))
    assert counts.replays == 0
    assert sum(counts.eager_calls.values()) == 3


@pytest.mark.cuda
def test_an_operation_that_only_fails_in_a_capture_is_cut():
    with torch.library._scoped_library("bcg_test", "FRAGMENT") as library:
        library.define("waits(Tensor x) -> Tensor")

        @torch.library.impl(library, "waits", "CUDA")
        def waits(x):
            torch.cuda.current_stream().synchronize()
            return x + 1

        @torch.library.register_fake("bcg_test::waits", lib=library)
        def fake(x):
            return torch.empty_like(x)

        def fn(x):
            return torch.ops.bcg_test.waits(x * 2) * 3

        check(fn, lambda i: (rows("cuda"),))
        assert [r.detail.split(":")[0] for r in the_plan().reasons]
        torch.rand(3, device="cuda")  # the generator is not left captured
        torch.cuda.empty_cache()  # nor the allocator


@pytest.mark.cuda
def test_memory_sent_from_the_host_is_not_recorded():
    def fn(x):
        index = torch.tensor([2, 0, 1], device=x.device)
        return (x[index] * torch.tensor(x.shape[0], device=x.device)).sum(0)

    check(fn, lambda i: (rows("cuda"),))


def test_a_wrong_fake_of_several_results_names_the_function(device):
    @torch_bcg.eager_on_graph(fake=lambda x: (x.new_empty(x.shape), x.new_empty(3)))
    def two_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * 2

    compiled = torch.compile(lambda x: two_results(x)[1] * 2, backend="bcg")
    with torch.no_grad(), pytest.raises(torch_bcg.errors.OutputError, match="two_results"):
        compiled(rows(device))
