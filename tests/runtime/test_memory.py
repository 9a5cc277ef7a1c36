"""Memory: what is handed out keeps strides and sharing, and overlaps are found by bytes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_bcg.graph.ir import TensorSpec
from torch_bcg.runtime import memory
from torch_bcg.runtime.statics import Overlaps, _meets
from twin import assert_same, sharing


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def handed_out(*tensors):
    """Copies of tensors of program memory, as the last steps of a program make them."""
    made = {}
    for make, parts in memory.out_of(dict(enumerate(tensors))):
        copy = make()
        made.update((i, part(copy)) for i, part in parts)
    return [made[i] for i in range(len(tensors))]


def complex_rows(device):
    return torch.complex(rows(device), rows(device))


FORMS = {
    "dense": lambda d: rows(d),
    "transposed": lambda d: rows(d).t(),
    "channels_last": lambda d: rows(d, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": lambda d: rows(d)[:, ::2],
    "offset": lambda d: rows(d)[2:, 3:],
    "expanded": lambda d: rows(d, 1, 6).expand(4, 6),
    "expanded_twice": lambda d: rows(d, 1, 6, 1).expand(4, 6, 5),
    "scalar": lambda d: rows(d).sum(),
    "empty": lambda d: rows(d, 0, 6),
    "one_column": lambda d: rows(d)[:, 2:3],
    "windows": lambda d: rows(d, 10).unfold(0, 4, 2),
    "half": lambda d: rows(d).half()[1:],
    "bool": lambda d: rows(d)[1:] > 0,
    "view_of_dtype": lambda d: rows(d)[:, 1:3].view(torch.int16),
    "complex": lambda d: complex_rows(d)[1:],
    "conjugate": lambda d: complex_rows(d).conj(),
    "negative": lambda d: complex_rows(d).conj().imag,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_copy_has_the_strides_and_none_of_the_memory(device, form):
    t = form(device)
    (copy,) = handed_out(t)
    before = t.clone()
    assert_same(copy, t)
    assert (copy.is_conj(), copy.is_neg()) == (t.is_conj(), t.is_neg())
    assert t.numel() == 0 or copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    memory.once(copy)(copy).zero_()
    assert_same(t.clone(), before)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_shared_memory_without_the_object(device, form):
    t = form(device)
    alias = memory.shared(t)
    assert_same(alias, t)
    assert alias is not t
    assert alias.data_ptr() == t.data_ptr()


def test_copies_share_what_their_sources_share(device):
    for _ in range(3):
        base, other = rows(device, 6, 6), rows(device)
        tensors = [base[1:], base.t(), other, base[2:4, 1:], base[1:], base.view(torch.int32)[5]]
        copies = handed_out(*tensors)
        assert_same(copies, tensors)
        assert sharing(copies) == sharing(tensors)
        copies[0][0, 1] = 77.0
        assert copies[1][1, 1] == 77.0
        assert base[1, 1] != 77.0


def test_only_the_bytes_between_are_copied(device):
    base = rows(device, 1000, 6)
    copies = handed_out(base[10:12], base[13])
    assert copies[0].untyped_storage().nbytes() == 4 * 6 * 4


def test_allocation_follows_geometry(device):
    spec = TensorSpec("float32", device, ("s0", "6"), ("6", "1"))
    for size, stride in (((4, 6), (6, 1)), ((4, 6), (1, 4)), ((5, 6), (0, 1)), ((0, 6), (6, 1))):
        t = memory.allocate(spec, (size, stride, 0))
        assert (tuple(t.shape), t.stride(), t.dtype) == (size, stride, torch.float32)
        assert t.untyped_storage().nbytes() == memory.extent(t)


def test_moved_views_go_by_bytes(device):
    """A view of the caller's tensor, wherever in its storage that lies."""
    for start in (0, 1, 2):
        base = rows(device, 8, 6)[start : start + 4]
        cases = {
            "float32": (base[1:3, 2:], ((2, 4), (6, 1), 4 * 8)),
            "int32": (base.view(torch.int32)[3], ((6,), (1,), 4 * 18)),
            "int16": (base.view(torch.int16)[:, 1], ((4,), (12,), 2)),
        }
        for dtype, (want, geometry) in cases.items():
            got = memory.moved_view(base, dtype, geometry)
            assert_same(got, want)
            assert sharing([got, base, want]) == sharing([want, base, got])
            assert got.data_ptr() == want.data_ptr()


def test_extent_and_once():
    cases = {
        24 * 4: torch.empty(4, 6),
        (3 * 6 + 5) * 4: torch.empty(4, 6)[:, ::2][:, :3],
        6 * 4: torch.empty(1, 6).expand(4, 6),
        4: torch.empty(()),
        0: torch.empty(0, 6),
        8: torch.empty(4, 6)[1:2, 3:5],
    }
    for extent, t in cases.items():
        assert memory.extent(t) == extent
        assert memory.extent(memory.once(t)(t)) == extent
    assert memory.once(torch.empty(1, 6, 1).expand(4, 6, 5))(torch.ones(4, 6, 5)).shape == (1, 6, 1)


# Ranges, against sets of bytes. Few addresses, so that ranges meet and touch.
ranges = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda r: (min(r), max(r)))
many = st.lists(ranges, max_size=3)


def covered(rs):
    return {b for low, high in rs for b in range(low, high)}


@given(many)
def test_merged_ranges_cover_the_same(rs):
    merged = memory.merged(rs)
    assert covered(merged) == covered(rs)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


@settings(max_examples=500)
@given(many, ranges)
def test_a_range_meets_others_where_they_share_a_byte(rs, one):
    low, high = one
    if low < high:
        assert _meets(memory.merged(rs), low, high) == bool(covered(rs) & covered([one]))


class At:
    """Something that lies at an address."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


argument = st.tuples(st.integers(0, 9), st.integers(1, 4), st.booleans(), st.booleans())


@settings(max_examples=1000)
@given(st.lists(argument, max_size=3), many, many)
def test_overlaps_that_slots_would_hide(arguments, static, written):
    """One of a pair is copied and one is written, and they share a byte."""
    moving = [(i, size, copied, write) for i, (_, size, copied, write) in enumerate(arguments)]
    overlaps = Overlaps(moving, memory.merged(static + written), memory.merged(written))
    memories = [
        (covered([(at, at + size)]), copied, write) for at, size, copied, write in arguments
    ]
    memories_static = [(covered(static), False, False), (covered(written), False, True)]
    everything = memories + memories_static
    expected = any(
        a & b and (copied or copied2) and (write or write2)
        for i, (a, copied, write) in enumerate(memories)
        for b, copied2, write2 in everything[i + 1 :]
    )
    found = overlaps.found([At(at) for at, *_ in arguments])
    assert (found is not None) == expected
