"""Calls from several threads and streams, and inside a capture of the caller's."""

import threading

import pytest
import torch
from torch import nn

from twin import assert_same, counted, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def simple(x):
    return plus_one(x * 2) * 3


def in_threads(count, work):
    errors = []

    def guarded(k):
        try:
            with torch.no_grad():
                work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("warm", [True, False])
def test_four_threads(device, warm):
    model = nn.Linear(6, 6, device=device)

    def fn(x):
        return plus_one(model(x)).relu() * 3

    compiled = torch.compile(fn, backend="bcg")
    inputs = [[rows(device) for _ in range(20)] for _ in range(4)]
    with torch.no_grad():
        expected = [[fn(x) for x in xs] for xs in inputs]
        if warm:
            compiled(inputs[0][0])

    def work(k):
        for x, want in zip(inputs[k], expected[k], strict=True):
            assert_same(compiled(x), want)

    with counted() as counts:
        in_threads(4, work)
    assert counts.replays == 80 if warm else counts.replays >= 60


@pytest.mark.cuda
def test_a_stream_per_thread():
    def fn(x):
        return (plus_one(x @ x) @ x).relu() * 3

    compiled = torch.compile(fn, backend="bcg")
    inputs = [[rows("cuda", 500, 500) for _ in range(20)] for _ in range(4)]
    with torch.no_grad():
        expected = [[fn(x) for x in xs] for xs in inputs]
        compiled(inputs[0][0])
    torch.cuda.synchronize()

    def work(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [compiled(x) for x in inputs[k]]
            torch.cuda.current_stream().synchronize()
        for one, want in zip(got, expected[k], strict=True):
            assert_same(one, want)

    with counted() as counts:
        in_threads(4, work)
    assert counts.replays == 80


@pytest.mark.cuda
def test_streams_in_turn_from_the_first_call():
    compiled = torch.compile(lambda x: plus_one(x @ x) @ x, backend="bcg")
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.no_grad(), counted() as counts:
        results = []
        for i in range(12):
            x = rows("cuda", 500, 500)
            streams[i % 3].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[i % 3]):
                results.append((x, compiled(x)))
        torch.cuda.synchronize()
        for x, got in results:
            assert_same(got, (x @ x + 1) @ x)
    assert counts.replays == 11


@pytest.mark.cuda
def test_an_outer_capture_records_the_segments_inline():
    compiled = torch.compile(simple, backend="bcg", options={"on_eager_call": "count"})
    x = rows("cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        for _ in range(3):
            x.copy_(rows("cuda"))
            graph.replay()
            assert_same(y, simple(x))
        with counted() as counts:
            assert_same(compiled(x), simple(x))
    assert counts.replays == 1
