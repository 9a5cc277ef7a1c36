"""Memory that programs share: flat slots of one graph, and the arena that recordings are made in."""

import gc

import pytest
import torch

import torch_bcg
from torch_bcg.counters import counters
from torch_bcg.graph.ir import TensorSpec
from torch_bcg.runtime.slots import Arena, Slots
from twin import assert_same, plus_one


def spec(device, dtype="float32"):
    device = "cuda:0" if device == "cuda" else device  # plans name the index
    return TensorSpec(dtype, device, ("s0", "6"), ("6", "1"))


def at(n, width=6):
    """Sizes and strides of a contiguous [n, width]."""
    return (n, width), (width, 1), 0


@pytest.fixture
def slots():
    return Slots()


@pytest.fixture
def arena():
    return Arena()


# slots


def test_sizes_of_one_name_lie_in_the_same_bytes(device, slots):
    large, flat = slots.take("x", spec(device), at(8), at(8))
    small, again = slots.take("x", spec(device), at(3), at(8))
    assert flat is again
    assert (large.shape, small.shape) == ((8, 6), (3, 6))
    assert large.data_ptr() == small.data_ptr() == flat.data_ptr()
    small.fill_(1)
    large[3:].fill_(2)
    assert large.view(-1)[:18].eq(1).all()
    assert small.eq(1).all()


def test_a_size_has_its_own_strides(device, slots):
    """Of a transposed value a stride follows the size."""
    like = spec(device)
    large, flat = slots.take("x", like, ((6, 8), (1, 6), 0), ((6, 8), (1, 6), 0))
    small, _ = slots.take("x", like, ((3, 5), (5, 1), 0), ((6, 8), (1, 6), 0))
    assert (large.stride(), small.stride()) == ((1, 6), (5, 1))
    assert flat.numel() == 6 * 8 * 4


def test_memory_is_taken_for_the_largest_size_at_once(device, slots):
    before = counters.pool_bytes
    small, flat = slots.take("x", spec(device), at(3), at(8))
    assert small.shape == (3, 6)
    assert flat.numel() == slots.taken == counters.pool_bytes - before == 8 * 6 * 4
    _, again = slots.take("x", spec(device), at(8), at(8))
    assert again is flat
    assert slots.taken == 8 * 6 * 4


def test_names_lie_apart(device, slots):
    x, _x = slots.take("x", spec(device), at(3), at(3))
    y, _y = slots.take("y", spec(device), at(3), at(3))
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()


def test_a_name_may_have_another_dtype_in_another_plan(device, slots):
    x, flat = slots.take("x", spec(device), at(8), at(8))
    half, again = slots.take("x", spec(device, "bfloat16"), at(8), at(8))
    assert again is flat
    assert (half.dtype, half.shape) == (torch.bfloat16, (8, 6))
    x.zero_()
    assert half.eq(0).all()


def test_growth_leaves_what_was_given_out(device, slots):
    """A call above the ladder takes more; programs of before keep the memory that they know."""
    before = counters.pool_bytes
    small, flat = slots.take("x", spec(device), at(3), at(8))
    small.fill_(5)
    large, grown = slots.take("x", spec(device), at(20), at(20))
    assert grown is not flat
    large.fill_(7)
    assert small.eq(5).all()
    assert counters.pool_bytes - before == (8 + 20) * 6 * 4
    del small, flat
    assert counters.pool_bytes - before == 20 * 6 * 4
    again, same = slots.take("x", spec(device), at(3), at(8))
    assert same is grown
    assert again.data_ptr() == large.data_ptr()


def test_slots_go_with_the_last_program(device, slots):
    before = counters.pool_bytes
    _, mine = slots.take("x", spec(device), at(8), at(8))
    _, theirs = slots.take("x", spec(device), at(3), at(8))
    del mine
    assert counters.pool_bytes - before == 8 * 6 * 4
    del theirs
    assert counters.pool_bytes == before
    assert not slots.flat
    _, flat = slots.take("x", spec(device), at(3), at(3))
    assert flat.numel() == 3 * 6 * 4
    assert slots.taken == (8 + 3) * 6 * 4


@pytest.mark.parametrize("geometry", [((0, 6), (6, 1), 0), ((), (), 0), ((4, 6), (0, 1), 0)])
def test_sizes_without_many_elements(device, slots, geometry):
    t, flat = slots.take("x", spec(device), geometry, geometry)
    assert (tuple(t.shape), t.stride()) == geometry[:2]
    assert flat.numel() == {0: 0, 1: 4, 24: 24}[t.numel()]


def growing(device, n):
    x = torch.randn(n, 6, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_programs_of_smaller_sizes_stay_right_when_slots_grow(device):
    """Exact shapes: nobody knows the largest one, so slots grow with the calls."""

    def fn(x):
        return plus_one(x * 2) * 3 + x

    compiled = torch.compile(fn, backend="bcg")
    gc.collect()
    held = torch_bcg.stats().pool_bytes
    with torch.no_grad():
        for n in (3, 3, 5, 5, 9, 9, 3, 5, 9, 3):
            x = growing(device, n)
            assert_same(compiled(x), fn(x), exact=False)
    sizes = [dict(p.sizes) for p in torch_bcg.programs(compiled)]
    assert sorted(n for s in sizes for n in s.values()) == [3, 5, 9]
    assert torch_bcg.stats().pool_bytes > held
    torch_bcg.reset(compiled)
    gc.collect()
    assert torch_bcg.stats().pool_bytes == held


# the arena


def test_a_block_is_free_when_its_tensor_is_gone(device, arena):
    first = arena.take(spec(device), at(8))
    address = first.data_ptr()
    second = arena.take(spec(device), at(8))
    assert second.data_ptr() != address
    assert (arena.free, arena.bytes) == ([], 2 * 8 * 6 * 4)
    del first
    assert [b.data_ptr() for b in arena.free] == [address]
    third = arena.take(spec(device), at(8))
    assert third.data_ptr() == address
    assert arena.bytes == 2 * 8 * 6 * 4
    assert second.data_ptr() != third.data_ptr()


def test_the_smallest_block_that_is_large_enough_is_taken(device, arena):
    blocks = [arena.take(spec(device), at(n)) for n in (20, 5, 10, 2)]
    addresses = {t.shape[0]: t.data_ptr() for t in blocks}
    del blocks
    taken = [arena.take(spec(device), at(n)) for n in (5, 4, 3, 2)]
    assert [t.data_ptr() for t in taken] == [addresses[n] for n in (5, 10, 20, 2)]
    assert arena.free == []
    assert arena.bytes == 37 * 6 * 4


def test_a_larger_value_takes_a_new_block(device, arena):
    small = arena.take(spec(device), at(2))
    address = small.data_ptr()
    del small
    large = arena.take(spec(device), at(3))
    assert large.data_ptr() != address
    assert [b.data_ptr() for b in arena.free] == [address]


def test_a_block_serves_any_geometry_and_dtype(device, arena):
    first = arena.take(spec(device), at(8))
    address = first.data_ptr()
    del first
    other = arena.take(spec(device, "float64"), ((6, 2), (1, 6), 0))
    assert (other.dtype, other.stride(), other.data_ptr()) == (torch.float64, (1, 6), address)
    del other
    assert len(arena.free) == 1


def test_what_lives_is_never_written_by_others(device, arena):
    """Tensors come and go in any order; each keeps what was written to it."""
    generator = torch.Generator().manual_seed(0)
    alive = []
    for i in range(200):
        n = int(torch.randint(1, 9, (), generator=generator))
        t = arena.take(spec(device), at(n))
        t.fill_(i)
        alive.append((i, t))
        del t
        if len(alive) > 5:
            del alive[int(torch.randint(0, len(alive), (), generator=generator))]
        assert all(t.eq(j).all() for j, t in alive)
    alive.clear()
    assert sum(b.numel() for b in arena.free) == arena.bytes
    assert arena.bytes <= 8 * 8 * 6 * 4


def test_a_value_without_elements(device, arena):
    empty = arena.take(spec(device), ((0, 6), (6, 1), 0))
    assert empty.shape == (0, 6)
    assert arena.bytes == 0
