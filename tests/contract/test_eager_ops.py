"""Eager operations: once a call, with what they are given, read, write and raise."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_bcg
from twin import assert_same, check, counted, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def test_each_side_effect_happens_once_a_call(device):
    log = []

    @torch_bcg.eager_on_graph(mutates_args=("out",))
    def note(x: Tensor, out: Tensor, layer: int) -> None:
        log.append((layer, float(x[0, 0])))
        out.copy_(x + layer)

    def fn(x):
        for layer in range(3):
            out = torch.empty_like(x)
            note(x * 2, out, layer)
            x = out
        return x * 1

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(1, 6):
            log.clear()
            assert compiled(torch.full((4, 6), float(i), device=device))[0, 0] == 8 * i + 4
            assert log == [(0, 2.0 * i), (1, 4.0 * i), (2, 8.0 * i + 2)]
    assert counts.replays == 4


def test_arguments_of_every_kind(device):
    @torch_bcg.eager_on_graph(fake=lambda x, *args, **kwargs: torch.empty_like(x))
    def mixed(
        x: Tensor,
        others: list[Tensor],
        maybe: Tensor | None,
        n: int,
        s: float,
        flag: bool,
        sizes: list[int],
        word: str = "a",
    ) -> Tensor:
        total = sum(others) + (0 if maybe is None else maybe)
        return x * n + total * s + flag + sum(sizes) + len(word)

    def fn(x, y):
        u = mixed(x + 1, [y, y * 2], None, 3, 0.5, True, [1, 2], word="abc")
        return mixed(u * 2, [x], y, 2, 1.5, False, []) - 1

    check(fn, lambda i: (rows(device), rows(device)))


def test_ambient_state_is_read_live(device):
    cache = {}

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def plus_current(x: Tensor) -> Tensor:
        return x + cache["current"]

    def fn(x):
        return plus_current(x * 2) * 3

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            cache["current"], x = rows(device), rows(device)
            assert_same(compiled(x), (x * 2 + cache["current"]) * 3)
    assert counts.replays == 4


def test_an_operator_that_reads_the_host_is_found_without_a_mark(device):
    """Nobody tagged it: the probe sees the read, cuts there and goes on."""
    with torch.library._scoped_library("torch_bcg_contract_host", "FRAGMENT") as library:
        library.define("scale_by_rows(Tensor x, Tensor counts) -> Tensor")

        def scale_by_rows(x, counts):
            return x * sum(counts.tolist())

        library.impl("scale_by_rows", scale_by_rows, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "torch_bcg_contract_host::scale_by_rows", lambda x, c: torch.empty_like(x), lib=library
        )
        op = torch.ops.torch_bcg_contract_host.scale_by_rows

        def fn(x, counts):
            y = op(x + 1, counts * 2)
            return y.relu() + 1

        check(fn, lambda i: (rows(device), torch.randint(0, 9, (3,), device=device)))


# Exceptions.


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (2, 3), (0, 1, 4)])
def test_an_exception_after_a_recorded_write(device, failing):
    """The caller's memory is what eager leaves behind, and the next call is right again."""
    armed = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def fragile(x: Tensor) -> Tensor:
        if armed:
            raise ValueError("on demand")
        return x + 1

    def fn(x, cache):
        cache.add_(x)
        y = plus_one(x * 2)
        z = fragile(y)
        cache.mul_(2)
        return z + cache

    compiled = torch.compile(fn, backend="bcg")
    got, want = (torch.zeros(4, 6, device=device) for _ in range(2))
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            x = rows(device)
            armed[:] = [1] if i in failing else []
            if armed:
                with pytest.raises(ValueError, match="on demand"):
                    fn(x, want)
                with pytest.raises(ValueError, match="on demand"):
                    compiled(x, got)
            else:
                assert_same(compiled(x, got), fn(x, want))
            assert_same(got, want)
    assert counts.replays >= 8 - len(failing) - 2
    assert counts.num_eager == 0


def test_an_exception_keeps_the_random_state_usable(device):
    armed = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def fragile(x: Tensor) -> Tensor:
        if armed:
            raise ValueError("on demand")
        return x + 1

    def fn(x):
        return F.dropout(fragile(F.dropout(x, 0.5)), 0.5)

    compiled = torch.compile(fn, backend="bcg")
    x = torch.zeros(30, 40, device=device)
    with torch.no_grad():
        for i in range(6):
            armed[:] = [1] if i == 3 else []
            if armed:
                with pytest.raises(ValueError, match="on demand"):
                    compiled(x)
            else:
                assert set(compiled(x).unique().tolist()) == {0.0, 2.0}
        torch.manual_seed(3)
        first = compiled(x)
        torch.manual_seed(3)
        assert_same(compiled(x), first)
