"""Whether two tensors agree but for rounding, and what is said where they do not."""

import pytest
import torch

from torch_bcg.runtime import compare
from torch_bcg.runtime.compare import TOLERANCE, difference, is_sampled, unreserved

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def four_rows(monkeypatch):
    """Tensors of more than 24 elements are sampled."""
    monkeypatch.setattr(compare, "SAMPLED", 24)


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_the_same_agrees(device):
    for t in (
        rows(device),
        rows(device, 0, 6),
        rows(device) > 0,
        torch.arange(5, device=device),
        torch.zeros((), device=device),
        rows(device, dtype=torch.complex64),
        torch.tensor([INF, -INF, NAN, 1.0], device=device),
        torch.full((3,), NAN, device=device),
    ):
        assert difference(t.clone(), t) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_allowed_as_far_as_the_dtype_goes(device, dtype):
    real = torch.ones(4, 6, device=device, dtype=torch.float64)
    real[2, 3] = 8
    allowed = TOLERANCE[dtype] * 8
    step = max(allowed / 4, 8 * torch.finfo(dtype).eps)  # below it the dtype shows nothing
    real = real.to(dtype)
    near, far = real.clone(), real.clone()
    near[2, 3] += step if step < allowed else 0
    far[2, 3] += 8 * allowed
    assert difference(near, real) == ""
    assert difference(far, real).startswith("off by ")
    assert difference(far, real).endswith("where values go up to 8")


def test_tolerances_are_tighter_for_wider_dtypes():
    assert sorted(TOLERANCE.values()) == [TOLERANCE[d] for d in
                                          (torch.float64, torch.float32, torch.float16, torch.bfloat16)]  # fmt: skip


def test_the_largest_value_is_the_measure(device):
    """A kernel for another size adds in another order: small sums of large terms are off."""
    real = torch.tensor([1e4, 1e-3], device=device)
    assert difference(real + torch.tensor([0.0, 1.0], device=device), real) == ""
    assert difference(real + torch.tensor([0.0, 100.0], device=device), real) == (
        "off by 100 where values go up to 1e+04"
    )


def test_zeros_have_a_measure_too(device):
    real = torch.zeros(4, device=device)
    assert difference(real + 1e-12, real) == ""
    assert difference(real + 1e-3, real) == "off by 0.001 where values go up to 0"


@pytest.mark.parametrize(
    "value", [NAN, INF, -INF], ids=["not a number", "infinite", "minus infinite"]
)
def test_places_of_what_is_not_finite(device, value):
    real = rows(device)
    ours = real.clone()
    ours[1, 2] = value
    for a, b in ((ours, real), (real, ours)):
        assert difference(a, b) == "infinite or not a number in other places"
    moved = real.clone()
    moved[2, 1] = value
    assert difference(moved, ours) == "infinite or not a number in other places"
    assert difference(ours.clone(), ours) == ""


def test_beside_what_is_not_finite_numbers_count(device):
    real = torch.tensor([NAN, 1.0, 2.0], device=device)
    assert difference(torch.tensor([NAN, 1.0, 2.5], device=device), real) == (
        "off by 0.5 where values go up to 2"
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_and_truth_values_are_compared_exactly(device, dtype):
    real = torch.tensor([[0, 1], [1, 0], [1, 1]], device=device).to(dtype)
    ours = real.clone()
    ours[0, 0] = 1
    ours[2, 1] = 0
    assert difference(ours, real) == "2 of 6 elements differ"


def test_large_integers_are_not_rounded(device):
    real = torch.tensor([2**60], device=device)
    assert difference(real + 1, real) == "1 of 1 elements differ"


def test_complex_numbers(device):
    real = torch.complex(torch.ones(3, device=device), torch.full((3,), 2.0, device=device))
    ours = real.clone()
    ours[1] += 1j
    assert difference(ours, real).startswith("off by 1 ")


def test_shapes_and_dtypes(device):
    real = rows(device)
    assert difference(real[:3], real) == "torch.float32[3, 6] for torch.float32[4, 6]"
    assert difference(real.double(), real) == "torch.float64[4, 6] for torch.float32[4, 6]"
    assert difference(real[:0], real[:0].half()) == "torch.float32[0, 6] for torch.float16[0, 6]"


def test_gradients_and_views_do_not_matter(device):
    real = rows(device, 6, 4)
    ours = real.clone().requires_grad_()
    assert difference(ours, real) == ""
    assert difference(real.t().contiguous(), real.t()) == ""


# sampled


def test_large_tensors_are_sampled(device, four_rows):
    small, large = rows(device), rows(device, 5, 6)
    assert not is_sampled(small)
    assert is_sampled(large)
    assert not is_sampled(torch.zeros((), device=device))


def test_of_samples_every_other_position_counts(device, four_rows, monkeypatch):
    monkeypatch.setattr(compare, "_LAST", 1)
    real = rows(device, 8, 6)
    for row in range(8):
        ours = real.clone()
        ours[row] += 10
        assert bool(difference(ours, real)) == (row % 2 == 0 or row == 7)


def test_the_last_positions_are_always_compared(device, four_rows, monkeypatch):
    """Padding lies behind the last rows: they are what it reaches first."""
    monkeypatch.setattr(compare, "_LAST", 3)
    real = torch.zeros(101, 6, device=device)
    for row in (98, 99, 100):
        ours = real.clone()
        ours[row, 0] = 1
        assert difference(ours, real)


def test_the_largest_dim_is_sampled_and_every_row_stays(device, four_rows):
    real = rows(device, 3, 1000)
    for row in range(3):
        ours = real.clone()
        ours[row] += 10
        assert difference(ours, real)


# rows that padding may write


def test_reserved_rows_are_left_out(device):
    t = torch.arange(5, device=device)
    assert unreserved(t, [0]).tolist() == [1, 2, 3, 4]
    assert unreserved(t, [4, 1, 1]).tolist() == [0, 2, 3]
    assert unreserved(t, [-1]).tolist() == [0, 1, 2, 3]
    assert unreserved(t, [-6, 5]) is t
    assert unreserved(t, []) is t
    assert unreserved(t.sum(), [0]).item() == 10
    assert unreserved(torch.zeros(3, 2, device=device), [2]).shape == (2, 2)
