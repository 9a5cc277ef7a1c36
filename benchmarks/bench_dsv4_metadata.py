"""What does the attention metadata of one step cost to build on a GPU, by one kernel?

DeepSeek-V4's metadata at 2,048 rows and a context of 65,536, written into the tensors of an object
that exists. Two kinds of steps, each call another one of its kind:

  mixed   64 requests decode behind long prefixes, 4 prefill 496 tokens each
  many    1,020 requests decode, 4 prefill 257 tokens each

and three ways:

  kernel   torch_bcg.dsv4.kernels.metadata.build_into
  create   DSV4Metadata.create(..., out=...), which checks the step and the object before it
  torch    torch_bcg.dsv4.building.build_into, plain torch on the same device

What they write is compared before and after, and no tensor may have moved. Times:

  host     from call to return, kernel and create in turn, torch in a run of its own
  cold     the same, each call after 1 ms of other Python work
  device   the sum of all kernels of one call as the profiler sees them, each call after a read of
           more memory than caches hold; not measured without CUPTI

The claims, on a GPU: at most 3 launches and 40 us of host; on the device at most twice the time
that the bytes take which have to be written and read, at 4.3 TB/s, and 10 us. Host is judged and
cold is not: cold adds what it costs to bring this code back into the caches of the CPU, which says
more about what ran before than about the call. Torch is 225 launches and 4 ms of Python, after
which any call is a cold one: hence the run of its own. An engine, which does other work between two
steps, is to expect something between the two. On a CPU few rows run without the kernel, and nothing
is claimed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from harness import Claim, Record, Refused, measure, parser, save, say, status, table, wait_idle
from torch import Tensor
from watch import launches

from torch_bcg.dsv4 import building
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata, ExtendBatch, empty

HOST_LIMIT, LAUNCH_LIMIT = 40, 3  # microseconds, launches
BYTES_PER_US, SPARE = 4.3e6, 10.0  # of the memory of an H200; microseconds
STEPS = 8  # different ones of a kind
FLUSHED = 512 << 20  # bytes that are read before a call: ten times the L2 cache
KINDS = {"mixed": (64, 4), "many": (1020, 4)}  # requests that decode, and that prefill
TOGETHER = ("kernel", "create")  # timed in turn
OTHER_WORK = 1_000_000  # nanoseconds
LEFT_ALONE = ("c4_sparse_page_indices", "c4_sparse_raw_indices")  # the indexer writes them
Build = Callable[[ExtendBatch], object]


# the steps


def tables_of(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """req_to_token and full_to_swa: every request has its whole context mapped, to random pages.

    Several may have the same page, which a reader cannot see.
    """
    pages = torch.randint(1, layout.pages, (layout.requests, layout.table_width), device=device)
    offsets = torch.arange(layout.page_size, device=device)
    slots = (pages[:, :, None] * layout.page_size + offsets).flatten(1)
    to_swa = torch.randperm(layout.pages, device=device)[:, None] * layout.page_size + offsets
    return slots.int(), torch.cat([to_swa.flatten(), to_swa.new_full((1,), -1)])


def step(
    tables: tuple[Tensor, Tensor], rows: int, decodes: int, prefills: int, seed: int
) -> ExtendBatch:
    """A step that fills all rows: long prefixes, the first prefill excepted, in any order."""
    req_to_token, full_to_swa = tables
    random = torch.Generator().manual_seed(seed)
    device, (requests, context) = req_to_token.device, req_to_token.shape
    new = torch.full((decodes + prefills,), 1)
    new[decodes:] = (rows - decodes) // prefills
    new[-1] += rows - int(new.sum())
    prefix = torch.randint(context // 2, context - rows, new.shape, generator=random)
    prefix[decodes] = 0
    order = torch.randperm(len(new), generator=random)
    new, prefix = new[order], prefix[order]
    req = torch.randperm(requests - 1, generator=random)[: len(new)] + 1
    start = new.cumsum(0) - new
    positions = torch.arange(rows) + (prefix - start).repeat_interleave(new)
    out = req_to_token[req.repeat_interleave(new).to(device), positions.to(device)]
    return ExtendBatch(
        req_pool_indices=req.to(device),
        seq_lens=(prefix + new).int().to(device),
        extend_seq_lens=new.int().to(device),
        extend_start_loc=start.int().to(device),
        out_cache_loc=out.long(),
        req_to_token=req_to_token,
        full_to_swa=full_to_swa,
        num_tokens=rows,
    )


def bytes_of(md: DSV4Metadata, batch: ExtendBatch, layout: Layout) -> int:
    """Bytes of every number that has to be written or read, each once, whatever a sector holds."""
    out = sum(t.nbytes for t in written(md).values())
    extend = batch.extend_seq_lens.long()
    seen = (batch.seq_lens - extend).clamp(max=layout.window - 1) + extend
    window = int(seen.sum()) * (batch.req_to_token.itemsize + batch.full_to_swa.itemsize)
    pages = len(extend) * layout.table_width * batch.req_to_token.itemsize
    by_request = (batch.req_pool_indices, batch.seq_lens, extend.int(), batch.extend_start_loc)
    return out + window + pages + batch.out_cache_loc.nbytes + sum(t.nbytes for t in by_request)


# checks


def written(md: DSV4Metadata) -> dict[str, Tensor]:
    """Every tensor but those that the indexer writes, by path."""
    return {
        f"{part}.{name}": value
        for part, held in vars(md).items()
        if part.endswith("_metadata")
        for name, value in vars(held).items()
        if isinstance(value, Tensor) and name not in LEFT_ALONE
    }


def verify(
    ways: Mapping[str, Build], objects: Mapping[str, DSV4Metadata], batch: ExtendBatch
) -> None:
    """Every way writes what plain torch does, into the tensors that were there before.

    Raises:
        Refused: one does not.
    """
    for name, build in ways.items():
        before = {k: t.data_ptr() for k, t in written(objects[name]).items()}
        build(batch)
        if {k: t.data_ptr() for k, t in written(objects[name]).items()} != before:
            raise Refused(f"{name}: a tensor has moved.")
    expected = written(objects["torch"])
    for name, md in objects.items():
        for field, has in written(md).items():
            if not torch.equal(has, expected[field]):
                raise Refused(f"{name} is wrong: {field} is not what plain torch gives.")


# times


def host_times(
    ways: Mapping[str, Build], batches: Sequence[ExtendBatch], repeats: int, device: torch.device
) -> dict[tuple[str, str], list[float]]:
    """Microseconds of each way, by its name and ``host`` or ``cold``."""
    together = {name: ways[name] for name in TOGETHER if name in ways}
    alone = {name: build for name, build in ways.items() if name not in together}
    taken = {}
    for group in (together, alone):
        found = measure(group, batches, repeats, device)
        taken |= {(name, "host"): samples for name, samples in found.items()}
    cold = {name: cold_times(build, batches, repeats, device) for name, build in together.items()}
    return taken | {(name, "cold"): samples for name, samples in cold.items()}


def cold_times(
    build: Build, batches: Sequence[ExtendBatch], repeats: int, device: torch.device
) -> list[float]:
    """Microseconds from call to return, each call after a while of other Python work."""
    samples = []
    gc.collect()
    gc.disable()
    try:
        for i in range(repeats):
            batch = batches[i % len(batches)]
            wait_idle(device)
            other_work()
            start = time.perf_counter_ns()
            build(batch)
            samples.append((time.perf_counter_ns() - start) / 1000)
    finally:
        gc.enable()
    return samples


def other_work() -> int:
    """Objects, dictionaries and text, for as long as `OTHER_WORK`: code and data that are new."""
    end, found = time.perf_counter_ns() + OTHER_WORK, 0
    while time.perf_counter_ns() < end:
        made = {str(i): [i, float(i)] for i in range(200)}
        found += sum(len(name) for name, _ in sorted(made.items(), reverse=True))
    return found


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel that a call makes the device run, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ran.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us()) for e in ran]


def launches_of(build: Build, batch: ExtendBatch, gpu: bool) -> int | None:
    """Kernels and copies of one call; None where the profiler sees none."""
    if not gpu:
        return None
    ran = launches(partial(build, batch))
    return sum(ran.kernels.values()) + sum(ran.copies.values()) or None


def device_times(build: Build, batches: Sequence[ExtendBatch], repeats: int) -> list[float]:
    """Microseconds of the device for each of ``repeats`` calls; none if the profiler sees none."""
    memory = torch.ones(FLUSHED // 4, device=batches[0].seq_lens.device)
    flush = partial(torch.linalg.vector_norm, memory)
    kernels_of(flush)  # wakes the profiler
    others = {name for name, _ in kernels_of(flush)}

    def calls() -> None:
        for i in range(repeats):
            flush()
            build(batches[i % len(batches)])

    taken = [us for name, us in kernels_of(calls) if name not in others]
    each = len(taken) // repeats
    return [sum(taken[i * each : (i + 1) * each]) for i in range(repeats)] if each else []


def judge(records: Sequence[Record]) -> list[Claim]:
    """The claims about the kernel."""
    found = []
    for r in records:
        kind, us = r.params["kind"], 2 * r.params["bytes"] / BYTES_PER_US + SPARE
        if r.variant == "kernel" and r.params["time"] == "host":
            found.append(Claim.at_most(f"{kind}: host, us", r.p50, HOST_LIMIT))
            if r.params["launches"] is not None:
                launched = r.params["launches"]
                found.append(Claim.at_most(f"{kind}: launches", launched, LAUNCH_LIMIT))
        elif r.variant == "kernel" and r.params["time"] == "device":
            found.append(Claim(f"{kind}: device, us", r.p50, f"at most {us:.4g}", r.p50 <= us))
    return found


def ways_of(layout: Layout, rows: int, device: torch.device) -> dict[str, tuple[Any, Build]]:
    """Each way with an object of its own; the kernel where there is a GPU."""
    builders = {"torch": building.build_into}
    if device.type == "cuda":
        builders["kernel"] = importlib.import_module("torch_bcg.dsv4.kernels.metadata").build_into
    made: dict[str, tuple[Any, Build]] = {}
    for name, build in builders.items():
        md = empty(layout, rows, device)
        made[name] = md, lambda batch, md=md, build=build: build(md, batch, layout)
    md = empty(layout, rows, device)
    made["create"] = md, lambda batch: DSV4Metadata.create(batch, layout, rows, md)
    return made


def run(args: argparse.Namespace) -> None:
    """Checks, times and checks again, for each kind of step; then saves and prints."""
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    rows, context = args.rows or (2048 if gpu else 64), args.context or (65536 if gpu else 2048)
    repeats = args.repeats or (500 if gpu else 20)
    torch.manual_seed(0)
    records: list[Record] = []
    for kind, (decodes, prefills) in KINDS.items():
        say(kind)
        decodes = min(decodes, rows // 2)
        requests = decodes + prefills
        layout = Layout(context=context, requests=requests + 1, pages=context // 4)
        tables = tables_of(layout, device)
        batches = [step(tables, rows, decodes, prefills, seed) for seed in range(STEPS)]
        made = ways_of(layout, rows, device)
        objects = {name: md for name, (md, _) in made.items()}
        ways = {name: build for name, (_, build) in made.items()}
        for batch in batches:
            verify(ways, objects, batch)
        params = {"kind": kind, "rows": rows, "requests": requests, "context": context}
        params |= {"device": str(device), "bytes": bytes_of(objects["torch"], batches[0], layout)}
        made_by = partial(Record.of, "dsv4_metadata", unit="us", **params)
        for (name, how), taken in host_times(ways, batches, repeats, device).items():
            records.append(made_by(variant=name, samples=taken, time=how))
            if how == "host":
                records[-1].params["launches"] = launches_of(ways[name], batches[0], gpu)
        for name, build in ways.items() if gpu else ():
            taken = device_times(build, batches, min(repeats, 100))
            if taken:
                records.append(made_by(variant=name, samples=taken, time="device"))
        wait_idle(device)
        verify(ways, objects, batches[0])
    if gpu and all(r.params["time"] != "device" for r in records):
        say("no time of the device: no CUPTI.")
    claims = [c.on(device) for c in judge(records)]
    save(args.out, "dsv4_metadata", records, claims=claims)
    print(f"{rows} rows, context {context}, on {device}, {repeats} calls, microseconds")
    print(text(records), *claims, sep="\n")


def text(records: Sequence[Record]) -> str:
    """The table."""
    body = []
    for r in records:
        kind, how, count = r.params["kind"], r.params["time"], r.params.get("launches")
        body.append((kind, r.variant, how, count or "-", r.p20, r.p50, r.p80))
    return table(("step", "way", "time", "launches", "p20", "p50", "p80"), body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__, only=False)
    options.add_argument("--rows", type=int, help="2,048; 64 on a CPU")
    options.add_argument("--context", type=int, help="65,536; 2,048 on a CPU")
    options.add_argument("--repeats", type=int, help="calls of each way: 500; 20 on a CPU")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
