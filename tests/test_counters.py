"""Counters: shares, the frozen copy, the table, and ``expect``."""

from __future__ import annotations

import dataclasses
import json

import pytest
from expecttest import assert_expected_inline

from torch_bcg.counters import Counters, Stats, stats
from torch_bcg.counters import counters as shared


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    fresh = Counters()
    monkeypatch.setattr("torch_bcg.counters.counters", fresh)
    return fresh


def test_shares_of_nothing_are_zero(counters: Counters) -> None:
    assert (stats().coverage.calls, stats().coverage.kernels) == (0.0, 0.0)


def test_probe_and_warming_calls_are_in_no_share(counters: Counters) -> None:
    counters.probes, counters.warming, counters.replays = 1, 2, 3
    counters.eager_call("re-entered")
    assert stats().coverage.calls == 3 / 4


def test_kernel_share(counters: Counters) -> None:
    counters.kernels, counters.recorded_kernels = 40, 30
    assert stats().coverage.kernels == 0.75


def test_stats_is_a_copy(counters: Counters) -> None:
    counters.eager_call("re-entered")
    before = stats()
    counters.eager_call("re-entered")
    counters.replays += 1
    assert (before.replays, before.eager_calls) == (0, {"re-entered": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.replays = 7  # type: ignore[misc]


def test_table(counters: Counters) -> None:
    counters.probes, counters.warming, counters.captures, counters.replays = 1, 1, 2, 1996
    counters.kernels, counters.recorded_kernels, counters.copied_bytes = 40_000, 38_000, 1_048_576
    counters.eager_call("re-entered")
    counters.eager_call("re-entered")
    counters.eager_call("above max_programs=32")
    assert_expected_inline(
        str(stats()),
        """\
probes                           1
warming                          1
captures                         2
replays                      1,996
eager_calls                      3
  above max_programs=32          1
  re-entered                     2
kernels                     40,000
recorded_kernels            38,000
copied_bytes             1,048,576
rows                             0
replayed_rows                    0
pad_rows                         0
pool_bytes                       0
inner_compilations               0
inner_seconds                  0.0
unfused                          0
coverage of calls            99.8%
coverage of rows              0.0%
coverage of kernels          95.0%""",
    )


def test_json_has_every_field(counters: Counters) -> None:
    counters.eager_call("re-entered")
    read = json.loads(stats().json())
    assert list(read) == [f.name for f in dataclasses.fields(Stats)]
    assert read["eager_calls"] == {"re-entered": 1}
    assert read["coverage"] == {"calls": 0.0, "rows": 0.0, "kernels": 0.0}


def test_stats_has_every_counter_and_says_its_unit() -> None:
    names = {f.name for f in dataclasses.fields(Counters)}
    assert names | {"coverage"} == {f.name for f in dataclasses.fields(Stats)}
    assert all(f"{name}: " in (Stats.__doc__ or "") for name in names)


def test_expect_passes(counters: Counters) -> None:
    counters.eager_call("re-entered")
    with counters.expect(captures=3, replays=0, eager_calls=2):
        counters.captures += 3
        counters.probes += 1
        counters.eager_call("re-entered")
        counters.eager_call("other stream")


def test_expect_by_reason(counters: Counters) -> None:
    counters.eager_call("re-entered")
    with counters.expect(eager_calls={"re-entered": 1}):
        counters.eager_call("re-entered")
    with counters.expect(eager_calls={}):
        pass


def test_expect_names_each_that_differs(counters: Counters) -> None:
    def call() -> None:
        with counters.expect(captures=3, replays=1, eager_calls={"re-entered": 1}):
            counters.captures += 2
            counters.replays += 1
            counters.eager_call("other stream")

    with pytest.raises(AssertionError) as caught:
        call()
    assert_expected_inline(
        str(caught.value),
        "counters grew otherwise: captures: expected 3, found 2; "
        "eager_calls: expected {'re-entered': 1}, found {'other stream': 1}",
    )


def test_expect_knows_its_counters(counters: Counters) -> None:
    with pytest.raises(TypeError, match=r"replay$"), counters.expect(replay=1):
        pass


def test_expect_lets_an_error_through(counters: Counters) -> None:
    with pytest.raises(KeyError), counters.expect(replays=1):
        raise KeyError


def test_clear_keeps_what_memory_is_held(counters: Counters) -> None:
    counters.replays, counters.pool_bytes = 4, 512
    counters.eager_call("re-entered")
    counters.clear()
    assert counters == Counters(pool_bytes=512)


def test_one_for_the_process() -> None:
    assert isinstance(shared, Counters)
    with shared.expect(replays=0):
        stats()
