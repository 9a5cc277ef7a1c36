"""Streams of the user's: what forks and joins inside a recorded segment records, or is an error.

Dynamo leaves ``with torch.cuda.stream(s)`` as a note on the nodes and the waits as nodes; an
operator of the user's may fork inside itself as well, unseen. See also tests/graph/test_streams.py.
"""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_bcg
from torch_bcg.errors import BCGWarning, StreamError
from twin import assert_same, check, counted, plus_one

pytestmark = pytest.mark.cuda
NAME = "torch_bcg_streams"


def rows(*shape):
    return torch.randn(*(shape or (4, 6)), device="cuda")


@pytest.fixture
def side():
    return torch.cuda.Stream()


def marks_alone(compiled):
    """Whether nothing but marks cuts the plans of a function."""
    plans = [p.plan for p in torch_bcg.programs(compiled)]
    return bool(plans) and all(r.kind == "mark" for plan in plans for r in plan.reasons)


# Forks that Dynamo sees.


def by_wait_stream(side, x):
    main = torch.cuda.current_stream()
    y = x + 1
    side.wait_stream(main)
    with torch.cuda.stream(side):
        z = (y @ y.t()).relu()
    w = y * 3
    main.wait_stream(side)
    return w + z.sum()


def by_events(side, x):
    y = x + 1
    forked, joined = torch.cuda.Event(), torch.cuda.Event()
    forked.record()
    with torch.cuda.stream(side):
        forked.wait()
        z = (y @ y.t()).relu()
        joined.record()
    w = y * 3
    joined.wait()
    return w + z.sum()


def in_a_stream_of_its_own(side, x):
    y = x + 1
    inner = torch.cuda.Stream()
    inner.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(inner):
        z = y.cos()
    torch.cuda.current_stream().wait_stream(inner)
    return y + z


def nested(side, x):
    main = torch.cuda.current_stream()
    other = torch.cuda.Stream()
    y = x + 1
    side.wait_stream(main)
    with torch.cuda.stream(side):
        z = y.cos()
        other.wait_stream(side)
        with torch.cuda.stream(other):
            u = z * 2
        side.wait_stream(other)
        v = z + u
    main.wait_stream(side)
    return v + y


def twice(side, x):
    return by_wait_stream(side, by_wait_stream(side, x))


def writes_an_argument(side, x):
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.mul_(2)
    main.wait_stream(side)
    return x + 1


FORKS = [by_wait_stream, by_events, in_a_stream_of_its_own, nested, twice, writes_an_argument]


@pytest.mark.parametrize("fork", FORKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("marked", [False, True], ids=["alone", "between marks"])
def test_a_fork_that_is_joined_in_its_segment_is_recorded(side, fork, marked):
    def fn(x):
        return plus_one(fork(side, plus_one(x))) if marked else fork(side, x)

    compiled = check(fn, lambda i: (rows(),), exact=False)
    assert marks_alone(compiled)
    torch.cuda.synchronize()


def test_work_on_a_stream_of_its_own_is_recorded_beside_the_rest(side, monkeypatch):
    """A recording orders what lies on one stream and what waits for it, and nothing else.

    So work on two streams may run at one time in a replay if no stream waits in between.
    """
    log = []

    def note(what):
        if torch.cuda.is_current_stream_capturing():
            log.append(what)

    def works(x: Tensor) -> Tensor:
        note(torch.cuda.current_stream().cuda_stream)
        return x * 2

    made = torch.library.custom_op(f"{NAME}::works", works, mutates_args=())
    made.register_fake(torch.empty_like)

    def fn(x):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = made(x)
        w = made(x + 1)
        main.wait_stream(side)
        return w + z

    wait_event = torch.cuda.Stream.wait_event  # wait_stream calls it too

    def noted(stream, event):
        note("wait")
        wait_event(stream, event)

    compiled = torch.compile(fn, backend="bcg")
    with torch.inference_mode():
        compiled(rows())
        torch_bcg.reset(compiled)  # recorded once more, as Dynamo is done with streams
        log.clear()
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", noted)
        with counted() as counts:
            for _ in range(4):
                x = rows()
                assert_same(compiled(x), (x + 1) * 2 + x * 2)
    assert (counts.captures, counts.replays) == (1, 3)
    fork, beside, rest, *joins = log
    assert (fork, {*joins}) == ("wait", {"wait"})
    assert "wait" not in (beside, rest)
    assert beside != rest


def test_streams_of_the_caller_and_of_the_graph(side):
    """The caller's current stream differs from call to call, and is the graph's side stream once."""
    compiled = torch.compile(lambda x: by_wait_stream(side, plus_one(x)), backend="bcg")
    callers = [torch.cuda.current_stream(), torch.cuda.Stream(), side]
    with torch.no_grad(), counted() as counts:
        for i in range(12):
            stream, x = callers[i % 3], rows()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got = compiled(x)
            torch.cuda.current_stream().wait_stream(stream)
            want = by_wait_stream(side, x + 1)
            torch.testing.assert_close(got, want)
    assert counts.replays >= 8
    assert counts.num_eager == 0


# Forks that cross a cut.


def line_of(function, text):
    """``file:line`` of the line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines, first) if text in line)
    return f"{Path(inspect.getfile(function)).name}:{number}"


def stream_error(fn):
    """The error with which a compiled function ends, out of what Dynamo puts around it."""
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), pytest.raises(Exception, match="stream") as caught:
        compiled(rows())
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, StreamError), error
    return error


def test_a_fork_that_crosses_a_mark_is_an_error_that_names_both(side):
    def fn(x):
        main = torch.cuda.current_stream()
        side.wait_stream(main)  # the fork
        with torch.cuda.stream(side):
            z = x.cos()
        y = plus_one(x)  # the cut
        main.wait_stream(side)
        return y + z

    error = stream_error(fn)
    assert line_of(fn, "# the fork") in error.where
    assert line_of(fn, "# the cut") in error.where
    assert "wait_stream" in error.fix


def test_a_fork_that_nobody_joins_is_an_error_that_names_it(side):
    def fn(x):
        y = plus_one(x) * 2
        side.wait_stream(torch.cuda.current_stream())  # the fork
        with torch.cuda.stream(side):
            x.add_(1)
        return y

    error = stream_error(fn)
    assert line_of(fn, "# the fork") in error.where
    assert "the end of the graph" in error.where


def test_a_cut_that_only_the_first_call_shows_is_no_error(side):
    """Nobody could see it coming; what was forked before it is joined there."""

    def looks(x: Tensor) -> Tensor:
        return x * 2 if x.tolist() else x

    made = torch.library.custom_op(f"{NAME}::looks", looks, mutates_args=())
    made.register_fake(torch.empty_like)

    def fn(x):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = x.cos()
        y = made(x + 1)
        main.wait_stream(side)
        return y + z

    compiled = check(fn, lambda i: (rows(),))
    reasons = [r for p in torch_bcg.programs(compiled) for r in p.plan.reasons]
    assert [(r.kind, r.detail.split(",")[0]) for r in reasons] == [("host read", f"{NAME}::looks")]


def test_a_fork_inside_an_eager_stretch_is_nobodys_business(side):
    def fn(x):
        with torch.fx.traceback.annotate({"bcg": "eager"}):
            z = by_wait_stream(side, x)
        return plus_one(z * 2)

    check(fn, lambda i: (rows(),), exact=False)


# Forks inside operators.


def forking(side, joins):
    """An operator that works on a stream of its own, and joins it or does not."""

    def forks(x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        if joins:
            main.wait_stream(side)
        return y

    made = torch.library.custom_op(f"{NAME}::forks", forks, mutates_args=())
    made.register_fake(torch.empty_like)
    return made


def joining(side):
    """The operator that joins what the other one left open."""

    def joins(x: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_stream(side)
        return x + 1

    made = torch.library.custom_op(f"{NAME}::joins", joins, mutates_args=())
    made.register_fake(torch.empty_like)
    return made


def test_an_operator_that_joins_its_stream_is_recorded(side):
    forks = forking(side, joins=True)
    compiled = check(lambda x: plus_one(forks(x + 1)) * 3, lambda i: (rows(),))
    assert marks_alone(compiled)


def test_a_pair_of_operators_in_one_segment_is_recorded(side):
    """As the asynchronous halves of a collective do it."""
    forks, joins = forking(side, joins=False), joining(side)

    def fn(x):
        a = x + 1
        y = forks(a)
        z = x * 2  # meanwhile, and not in the memory of a, which the other stream may still read
        return plus_one(joins(y) * z + a) * 3

    compiled = check(fn, lambda i: (rows(),))
    assert marks_alone(compiled)


def across_a_cut(side):
    forks, joins = forking(side, joins=False), joining(side)

    def fn(x):
        a = x + 1
        y = forks(a)
        z = plus_one(x)
        return joins(y) + z + a

    return fn


def test_an_operator_whose_stream_crosses_a_cut_is_a_cut_that_says_so(side):
    """meta-pytorch/breakable-cuda-graphs TestDebugForkTracking: which fork was not joined, where.

    Nothing shows it before the recording ends, so it is not too late: the operator runs eagerly.
    """
    compiled = check(across_a_cut(side), lambda i: (rows(),))
    torch.cuda.synchronize()
    reasons = [r for p in torch_bcg.programs(compiled) for r in p.plan.reasons]
    (fork,) = [r for r in reasons if "was not joined" in r.detail]
    assert fork.kind == "cannot be recorded"
    assert f"{NAME}::forks" in fork.detail


def test_after_such_a_recording_the_device_works_on(side):
    check(across_a_cut(side), lambda i: (rows(),))
    torch.cuda.synchronize()
    torch.rand(3, device="cuda")
    torch.cuda.empty_cache()
    check(lambda x: plus_one(x * 2) * 3, lambda i: (rows(),))
    check(lambda x: by_wait_stream(side, x), lambda i: (rows(),), exact=False)


# Work outside the graph.


def test_a_wait_for_work_outside_the_graph_is_kept(side):
    """The argument is filled on another stream, and a copy of it before the wait would be older."""

    def fn(x):
        torch.cuda.current_stream().wait_stream(side)
        return x * 2

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts, pytest.warns(BCGWarning, match="outside stream"):
        for i in range(4):
            x = torch.zeros(4, 6, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(10**7)
                x.fill_(i)
            assert_same(compiled(x), torch.full_like(x, 2 * i))
            torch.cuda.synchronize()
    assert counts.num_eager == 4


def test_work_outside_that_follows_the_graph_does_follow_it(side):
    def fn(x):
        y = x
        for _ in range(200):
            y = y @ x
        side.wait_stream(torch.cuda.current_stream())
        return y

    compiled = torch.compile(fn, backend="bcg")
    x = torch.eye(512, device="cuda")
    with torch.no_grad(), pytest.warns(BCGWarning, match="outside stream"):
        for _ in range(4):
            y = compiled(x)
            with torch.cuda.stream(side):
                got = y.clone()
            torch.cuda.synchronize()
            assert_same(got, x)


@pytest.mark.parametrize(
    "wait",
    [
        lambda side: side.synchronize(),
        lambda side: torch.cuda.synchronize(),
        lambda side: (e := torch.cuda.Event(), e.record(), e.synchronize()),
    ],
    ids=["stream", "device", "event"],
)
def test_a_wait_on_the_host_is_a_cut(side, wait):
    def fn(x):
        y = x * 2
        wait(side)
        return plus_one(y + 1)

    compiled = check(fn, lambda i: (rows(),), replays=range(3, 7))
    reasons = [r for p in torch_bcg.programs(compiled) for r in p.plan.reasons]
    assert all(r.where for r in reasons)
