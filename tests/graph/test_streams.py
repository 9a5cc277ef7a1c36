"""Streams in a graph: lanes and orders, what has to be joined before a cut, and what runs anyway.

The graphs are built by hand, as Dynamo of torch 2.12 on, and before, leaves them on a GPU; the
streams and events in Dynamo's table are stand-ins that write down what was asked of them.
"""

import contextlib
import weakref

import pytest
import torch
from torch import fx
from torch._dynamo import graph_bytecode_inputs as table
from torch._dynamo.variables import streams as dynamo

import torch_bcg
from torch_bcg.compiled import CompiledGraph
from torch_bcg.errors import BCGWarning, CaptureError, StreamError
from torch_bcg.graph.inline import inlined
from torch_bcg.graph.ir import Plan, Reason
from torch_bcg.graph.streams import place_of, role_of
from torch_bcg.options import Options
from torch_bcg.runtime.lanes import OnLanes, lanes_of, unjoined
from twin import assert_same, counted

OPS = torch.ops.streams


@torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x), name="torch_bcg_lanes::plus_one")
def plus_one(x: torch.Tensor) -> torch.Tensor:
    """x + 1, in new memory"""
    return x + 1


MARKED = torch.ops.torch_bcg_lanes.plus_one.default
MAIN, SIDE, OTHER, EVENT, SECOND = range(5)


class Told:
    """Stands for a stream or an event."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self, event=None):
        event = event or Told(f"event {len(self.log)}", self.log)
        self.log.append(f"{event.name} in {self.name}")
        return event

    def wait(self, stream):
        stream.wait_event(self)

    def record(self, stream):
        stream.record_event(self)

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")


@pytest.fixture(autouse=True)
def log(monkeypatch):
    """What streams were asked for; Dynamo's table holds the five objects."""
    calls = []
    names = ("main", "side", "other", "event", "second")
    objects = [Told(name, calls) for name in names]
    found = {i: weakref.ref(o) for i, o in enumerate(objects)}
    monkeypatch.setattr(table, "index_to_external_object_weakref", found)
    monkeypatch.setattr(table, "CURRENT_STREAM_INDEX", MAIN, raising=False)
    for name in ("_get_stream_by_index", "_get_event_by_index"):
        monkeypatch.setattr(dynamo, name, objects.__getitem__)
    yield calls
    del objects


class Build:
    """A graph of one argument; every node is at a line of its own of ``model.py``."""

    def __init__(self):
        self.graph, self.lane, self.line = fx.Graph(), MAIN, 0
        self.x = self.graph.placeholder("x")

    def noted(self, node):
        self.line += 1
        node.meta["stack_trace"] = f'  File "/somebody/model.py", line {self.line}, in forward\n'
        if self.lane != MAIN:
            node.meta["custom"] = {"stream": self.lane}
        return node

    def __call__(self, target, *args):
        return self.noted(self.graph.call_function(target, args))

    def method(self, name, *args):
        return self.noted(self.graph.call_method(name, args))

    @contextlib.contextmanager
    def stream(self, lane):
        self.lane, before = lane, self.lane
        yield
        self.lane = before

    def done(self, *results):
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def compiled(gm, **options):
    return CompiledGraph(gm, (torch.zeros(4, 6),), Options.make(options))


def same_as_eager(gm, want, calls=4):
    """The graph, called a few times and compared; everything but the first call is a replay."""
    graph = compiled(gm)
    with torch.no_grad(), counted() as counts:
        for _ in range(calls):
            x = torch.randn(4, 6)
            assert_same(graph(x), want(x))
    assert counts.replays == calls - 1
    assert counts.num_eager == 0
    return graph


def by_operators(b, y, lane=SIDE):
    b(OPS.wait_stream, lane, MAIN)
    with b.stream(lane):
        z = b(torch.cos, y)
    b(OPS.wait_stream, MAIN, lane)
    return z


def by_events(b, y):
    b(OPS.record_event, EVENT, MAIN)
    with b.stream(SIDE):
        b(table.get_external_object_by_index, EVENT)
        b(OPS.wait_event.default, EVENT, SIDE)
        z = b(torch.cos, y)
        b(OPS.record_event, SECOND, SIDE)
    b(OPS.wait_event, SECOND, MAIN)
    return z


def by_methods(b, y):
    """As torch 2.11 does it."""
    main, side = (b(table.get_external_object_by_index, i) for i in (MAIN, SIDE))
    b.method("wait_stream", side, main)
    with b.stream(SIDE):
        z = b(torch.cos, y)
        event = b.method("record_event", side)
    b.method("wait_event", main, event)
    return z


FORKS = [by_operators, by_events, by_methods]


def test_lanes_and_orders_of_two_forks_one_in_the_other():
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    with b.stream(SIDE):
        y = b(torch.cos, b.x)
        z = by_operators(b, y, OTHER)  # from the outer stream's point of view it joins main
        w = b(torch.sin, z)
    b(OPS.wait_stream, MAIN, SIDE)
    nodes = list(inlined(b.done(w)).graph.nodes)
    roles = [role_of(n) for n in nodes]
    assert roles == [None, "order", None, "order", None, "order", None, "order", None]
    lanes = [place_of(n).lane for n in nodes if role_of(n) is None]
    assert len(set(lanes)) == 3
    assert (lanes[0], lanes[1], lanes[-1]) == (0, lanes[3], 0)
    assert [place_of(n).before for n in nodes] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("fork", FORKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("marked", [False, True], ids=["alone", "between marks"])
def test_a_fork_that_is_joined_changes_neither_plan_nor_result(fork, marked):
    def built(fork):
        b = Build()
        y = b(torch.add, b.x, 1)
        if marked:
            y = b(MARKED, y)
        z = b(torch.mul, fork(b, y), 3)
        if marked:
            z = b(MARKED, z)
        return b.done(z)

    def want(x):
        y = plus_one(x + 1) if marked else x + 1
        return (plus_one(y.cos() * 3) if marked else y.cos() * 3,)

    graph = same_as_eager(built(fork), want)
    assert {r.kind for r in graph.plan.reasons} == ({"mark"} if marked else set())
    names = {n for s in graph.plan.segments for n in s.nodes}
    assert not any("wait" in n or "record" in n or "external" in n for n in names)
    serial = compiled(built(lambda b, y: b(torch.cos, y))).plan
    assert graph.plan.recorded_kernels == serial.recorded_kernels
    assert Plan.from_json(graph.plan.to_json()) == graph.plan


# Errors.


def error_of(gm, **options):
    with pytest.raises(StreamError) as caught:
        compiled(gm, **options)
    return caught.value


@pytest.mark.parametrize("cut", ["mark", "automatic"])
@pytest.mark.parametrize("fork", ["wait_stream", "events", "methods", "nested"])
def test_a_fork_that_crosses_a_cut_is_an_error_that_names_both(fork, cut):
    b = Build()
    if fork == "events":
        b(OPS.record_event, EVENT, MAIN)
        forks = b(OPS.wait_event, EVENT, SIDE)
    elif fork == "methods":
        main, side = (b(table.get_external_object_by_index, i) for i in (MAIN, SIDE))
        forks = b.method("wait_stream", side, main)
    else:
        forks = b(OPS.wait_stream, SIDE, MAIN)
    fork_line = b.line
    with b.stream(SIDE):
        y = b(torch.cos, b.x)
        if fork == "nested":
            forks = b(OPS.wait_stream, OTHER, SIDE)
            fork_line = b.line
            with b.stream(OTHER):
                y = b(torch.sin, y)
    if fork == "nested":  # the outer one is joined
        b(OPS.wait_stream, MAIN, SIDE)
    cuts = b(MARKED if cut == "mark" else torch.nonzero, b.x)
    cut_line = b.line
    b(OPS.wait_stream, MAIN, OTHER if fork == "nested" else SIDE)
    error = error_of(b.done(b(torch.add, y, 1), cuts))
    assert f"the fork is '{forks.name}' at model.py:{fork_line}" in error.where
    assert f"the cut is '{cuts.name}' at model.py:{cut_line}" in error.where
    assert "torch.cuda.current_stream().wait_stream(s)" in error.fix


def test_a_fork_that_nobody_joins_is_an_error_that_names_it():
    b = Build()
    y = b(torch.add, b.x, 1)
    fork = b(OPS.wait_stream, SIDE, MAIN)
    with b.stream(SIDE):
        z = b(torch.cos, y)
    error = error_of(b.done(z))
    assert error.what.startswith(f"Work on the stream that '{fork.name}' forks is not joined")
    assert error.what.endswith("before the graph ends.")
    assert error.where == f"the fork is '{fork.name}' at model.py:2; the end of the graph"


def test_work_on_a_stream_that_nothing_forked_has_to_be_joined_as_well():
    b = Build()
    with b.stream(SIDE):
        z = b(torch.cos, b.x)
    assert "'cos' at model.py:1" in error_of(b.done(z)).where


def test_a_second_fork_of_a_stream_is_the_one_that_is_named():
    b = Build()
    y = by_operators(b, b.x)
    b(OPS.wait_stream, SIDE, MAIN)
    line = b.line
    with b.stream(SIDE):
        z = b(torch.cos, y)
    assert f"model.py:{line}" in error_of(b.done(z)).where


def test_an_event_that_was_recorded_too_early_joins_nothing():
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    with b.stream(SIDE):
        y = b(torch.cos, b.x)
        b(OPS.record_event, EVENT, SIDE)
        z = b(torch.sin, y)
    b(OPS.wait_event, EVENT, MAIN)
    error_of(b.done(z))


@pytest.mark.parametrize("index", [0, 5])
def test_any_index_may_be_an_event(index):
    b = Build()
    b(OPS.record_event, index, MAIN)
    b(OPS.wait_event, index, SIDE)
    with b.stream(SIDE):
        y = b(torch.cos, b.x)
    b(OPS.record_event, index, SIDE)
    z = b(torch.sin, b.x)
    b(OPS.wait_event, index, MAIN)
    (told,) = recorded(b.done(b(torch.mul, y, z)))
    assert told == [
        "event 0 in lane 0", "lane 1 waits for event 0", "on lane 1",
        "event 3 in lane 1", "lane 0 waits for event 3", "lane 0 waits for lane 1",
    ]  # fmt: skip


def test_a_fork_may_lie_before_a_cut_and_its_work_behind_it():
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    y = b(MARKED, b.x)
    with b.stream(SIDE):
        z = b(torch.cos, y)
    b(OPS.wait_stream, MAIN, SIDE)
    same_as_eager(b.done(z), lambda x: ((x + 1).cos(),))


def test_a_fork_around_marked_work_alone_is_nobodys_business():
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    with b.stream(SIDE):
        z = b(MARKED, b.x)
    y = b(MARKED, b.x)
    b(OPS.wait_stream, MAIN, SIDE)
    graph = same_as_eager(b.done(b(torch.mul, y, z)), lambda x: ((x + 1) * (x + 1),))
    assert [s.kind for s in graph.plan.segments] == ["eager", "graph"]


def test_a_cut_that_only_a_run_shows_is_no_error():
    """Nobody could see it coming: the recording before it ends with a join of its own."""
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    with b.stream(SIDE):
        y = b(torch.cos, b.x)
    w = b(torch.sin, b.x)
    b(OPS.wait_stream, MAIN, SIDE)
    gm = b.done(b(torch.mul, y, w))
    graph = compiled(gm)
    graph.found["sin"] = Reason("host read", "sin")
    graph.make_plan()
    assert [s.kind for s in graph.plan.segments] == ["graph", "eager", "graph"]
    x = torch.randn(4, 6)
    for _ in range(3):
        assert_same(graph(x), (x.cos() * x.sin(),))


# What somebody outside waits for, or is waited for.


def outside_cases():
    def waits_for_a_copy(b):
        b(OPS.wait_stream, MAIN, SIDE)
        return b(torch.cos, b.x)

    def waits_for_an_event(b):
        b(OPS.wait_event, EVENT, MAIN)
        return b(torch.cos, b.x)

    def records_for_others(b):
        z = b(torch.cos, b.x)
        b(OPS.record_event, EVENT, MAIN)
        return z

    def lets_a_stream_follow(b):
        z = b(torch.cos, b.x)
        b(OPS.wait_stream, SIDE, MAIN)
        return z

    def by_a_method(b):
        main, side = (b(table.get_external_object_by_index, i) for i in (MAIN, SIDE))
        b.method("wait_stream", main, side)
        return b(torch.cos, b.x)

    return {
        waits_for_a_copy: "main waits for side",
        waits_for_an_event: "main waits for event",
        records_for_others: "event in main",
        lets_a_stream_follow: "side waits for main",
        by_a_method: "main waits for side",
    }


@pytest.mark.parametrize(
    ("case", "told"), outside_cases().items(), ids=[c.__name__ for c in outside_cases()]
)
def test_an_order_with_work_outside_the_graph_keeps_it_from_being_recorded(log, case, told):
    """Copies in and out would not be ordered by it."""
    b = Build()
    graph = compiled(b.done(b(torch.mul, case(b), 2)))
    assert graph.plan.unrecorded.kind == "outside stream"
    assert "model.py:" in graph.plan.unrecorded.where
    with counted() as counts, pytest.warns(BCGWarning, match="outside stream"):
        for _ in range(3):
            x = torch.randn(4, 6)
            assert_same(graph(x), (x.cos() * 2,))
    assert log == [told] * 3
    assert counts.num_eager == 3


def test_an_event_that_the_host_waits_for_is_recorded_for_it_at_every_call(log):
    b = Build()
    y = b(torch.cos, b.x)
    b(OPS.record_event, EVENT, MAIN)
    b.method("synchronize", b(table.get_external_object_by_index, EVENT))
    graph = same_as_eager(b.done(b(torch.sin, y)), lambda x: (x.cos().sin(),))
    assert log == ["event in main", "host waits for event"] * 4
    assert [r.kind for r in graph.plan.reasons] == ["host read", "host read"]


def test_what_concerns_the_graph_alone_is_left_out_of_a_replay(log):
    b = Build()
    graph = compiled(b.done(by_events(b, b.x)))
    graph(torch.randn(4, 6))
    assert len(log) == 4  # the first call is the program itself
    graph(torch.randn(4, 6))
    assert len(log) == 4


@pytest.mark.parametrize("old", [False, True])
def test_a_wait_on_the_host_is_a_cut(log, old):
    b = Build()
    y = b(torch.cos, b.x)
    if old:
        b.method("synchronize", b(table.get_external_object_by_index, SIDE))
    elif hasattr(OPS, "synchronize_stream"):
        b(OPS.synchronize_stream, SIDE)
    else:
        pytest.skip("torch 2.11 has the method alone")
    graph = same_as_eager(b.done(b(torch.sin, y)), lambda x: (x.cos().sin(),))
    assert log == ["host waits for side"] * 4
    assert [r.kind for r in graph.plan.reasons] == ["host read"]


# Recording.


def recorded(gm):
    """What the streams of a recording are asked for, and where each node runs."""
    graph = compiled(gm)
    codes = [graph.lowering.segment(s) for s in graph.plan.graph_segments]
    told = []
    for code in codes:
        lanes, calls = lanes_of(code), []
        streams = {lane: Told(f"lane {i}", calls) for i, lane in enumerate([0, *lanes])}

        @contextlib.contextmanager
        def enter(stream, calls=calls):
            calls.append(f"on {stream.name}")
            yield

        x = torch.randn(4, 6)
        run = OnLanes(code, streams, enter)
        run.run(*[x for _ in code.graph.find_nodes(op="placeholder")])
        told.append(calls)
    return told


def test_a_recording_forks_and_joins_as_the_program_does():
    b = Build()
    y = b(torch.add, b.x, 1)
    z = by_operators(b, y)
    told = recorded(b.done(b(torch.mul, z, y)))
    assert told == [
        [
            "lane 1 waits for lane 0",
            "on lane 1",
            "lane 0 waits for lane 1",
            "lane 0 waits for lane 1",
        ]
    ]


def test_nothing_waits_between_a_fork_and_its_join():
    """Work of two lanes may run at one time in a replay: only waits order one after the other."""
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    with b.stream(SIDE):
        z = b(torch.cos, b.x)
    y = b(torch.sin, b.x)
    b(OPS.wait_stream, MAIN, SIDE)
    graph = compiled(b.done(b(torch.mul, y, z)))
    (segment,) = graph.plan.graph_segments
    code = graph.lowering.segment(segment)
    nodes = [n for n in code.graph.nodes if n.name in segment.nodes]
    assert [(n.name, place_of(n).lane > 0) for n in nodes] == [
        ("cos", True), ("sin", False), ("mul", False),
    ]  # fmt: skip
    calls = []
    streams = {lane: Told(f"lane {i}", calls) for i, lane in enumerate([0, *lanes_of(code)])}

    class Noted(OnLanes):
        def call_function(self, target, args, kwargs):
            calls.append(target.__name__)
            return super().call_function(target, args, kwargs)

    @contextlib.contextmanager
    def enter(stream):
        calls.append(f"on {stream.name}")
        yield

    Noted(code, streams, enter).run(torch.randn(4, 6))
    assert calls == [
        "lane 1 waits for lane 0", "on lane 1", "cos", "sin",
        "lane 0 waits for lane 1", "mul", "lane 0 waits for lane 1",
    ]  # fmt: skip


def test_a_recording_waits_for_events_as_the_program_does():
    b = Build()
    y = b(torch.add, b.x, 1)
    (told,) = recorded(b.done(b(torch.mul, by_events(b, y), y)))
    assert told[1:4] == ["lane 1 waits for event 0", "on lane 1", "event 3 in lane 1"]
    assert told[4:] == ["lane 0 waits for event 3", "lane 0 waits for lane 1"]


def test_a_recording_that_begins_behind_the_fork_forks_itself():
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    y = b(MARKED, b.x)
    with b.stream(SIDE):
        z = b(torch.cos, y)
    b(OPS.wait_stream, MAIN, SIDE)
    told = recorded(b.done(z))
    assert told == [["lane 1 waits for lane 0", "on lane 1", "lane 0 waits for lane 1"]]


def test_a_lane_is_forked_where_the_program_forks_it_though_it_works_later():
    """Else what the caller's stream is given in between would be waited for."""
    b = Build()
    b(OPS.wait_stream, SIDE, MAIN)
    y = b(torch.sin, b.x)
    with b.stream(SIDE):
        z = b(torch.cos, b.x)
    b(OPS.wait_stream, MAIN, SIDE)
    gm = b.done(b(torch.mul, y, z))
    graph = compiled(gm)
    (segment,) = graph.plan.graph_segments
    code, calls = graph.lowering.segment(segment), []
    streams = {lane: Told(f"lane {i}", calls) for i, lane in enumerate([0, *lanes_of(code)])}

    class Noted(OnLanes):
        def call_function(self, target, args, kwargs):
            calls.append(target.__name__)
            return super().call_function(target, args, kwargs)

    Noted(code, streams, lambda stream: contextlib.nullcontext()).run(torch.randn(4, 6))
    assert calls[:3] == ["lane 1 waits for lane 0", "sin", "cos"]


def test_a_recording_without_streams_has_no_lanes():
    b = Build()
    graph = compiled(b.done(b(torch.cos, b.x)))
    assert [lanes_of(graph.lowering.segment(s)) for s in graph.plan.graph_segments] == [[]]


def test_values_of_lanes_live_until_the_recording_ends():
    b = Build()
    y = by_operators(b, b(torch.add, b.x, 1))
    graph = compiled(b.done(b(torch.mul, y, 2)))
    (segment,) = graph.plan.graph_segments
    code = graph.lowering.segment(segment)
    streams = {lane: Told("lane", []) for lane in [0, *lanes_of(code)]}
    run = OnLanes(code, streams, lambda stream: contextlib.nullcontext())
    run.run(torch.randn(4, 6))
    assert {"add", "cos", "mul"} <= {n.name for n in run.env}


def test_work_that_an_operator_left_open_is_said_to_be_of_it():
    b = Build()
    y = b(MARKED, b(torch.cos, b.x))
    gm = fx.GraphModule({}, b.done(y).graph, class_name="graph_001")
    error = RuntimeError("CUDA error: capturing stream has unjoined work\nmore")
    caught = unjoined(gm, error)
    assert isinstance(caught, CaptureError)
    assert "Work that an operator put on a side stream was not joined" in caught.what
    assert caught.what.endswith("it may be of torch_bcg_lanes::plus_one")
    assert (caught.where, caught.bcg_node) == ("graph_001", y.name)
    assert unjoined(gm, RuntimeError("CUDA error: something else")) is None


def test_the_error_reaches_the_reason_of_the_cut(monkeypatch):
    b = Build()
    gm = b.done(b(torch.sin, b(torch.cos, b.x)))

    def record(self, code, operands, allocate):
        raise unjoined(code, RuntimeError("unjoined work"))

    monkeypatch.setattr("torch_bcg.runtime.recorders.HostRecorder.record", record)
    graph = compiled(gm)
    graph(torch.randn(4, 6))
    assert graph.plan.recorded_kernels == 0
    assert all("side stream was not joined" in r.detail for r in graph.plan.reasons)


def test_dynamo_hands_the_error_on():
    """As far as a CPU goes: Dynamo traces its streams, which nothing can wait for."""
    side = torch.Stream(stream_id=1, device_index=0, device_type=0)

    def fn(x):
        y = x + 1
        with side:
            return y.cos()

    with torch.no_grad(), pytest.raises(Exception, match="is not joined") as caught:
        torch.compile(fn, backend="bcg")(torch.zeros(4, 6))
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, StreamError)
    assert "at test_streams.py:" in error.where
