"""How fast is the attention of DeepSeek-V4 over listed keys, beside what the device can do?

Rows of one request in a prefill: the last 128 keys of each, which it shares with its neighbours,
alone (``window``) and with 512 of 16,384 entries picked at random for each row (``both``); 64 heads
of 512, bf16. Real neighbours share most of their picks: random ones are harder on the caches.

  device    what one call takes on the device: a CUDA graph of several, over their number
  host      from call to return, the device idle before

TFLOP/s count 4 * rows * heads * keys * 512 operations, and TB/s everything that a call reads and
writes: queries, results, indices, and for every row its keys, most of which come from the L2 cache.
Beside them, in the same run, the ceilings: a product of two large bf16 matrices, a large copy.
Results of some rows are checked against float64 before any time is taken.
The claim, on a GPU: with all keys, the most rows reach 0.3 of the product's TFLOP/s. On a CPU a
small case runs through the reference and is checked, but nothing is claimed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Claim, Record, Refused, measure, parser, save, say, status, table, wait_idle
from torch import Tensor

from torch_bcg.dsv4.attention import sparse_attention, sparse_attention_reference

LIMIT = 0.3
TOLERANCE = 2e-2  # of bf16, relative norm
WINDOW = 128
CALLS = 10  # in one graph
CHECKED = 16  # rows
Launch = Callable[[Tensor], Any]
Config = tuple[int, int, int, int]


@dataclass(frozen=True)
class Sizes:
    """What is the same in all cases."""

    heads: int
    dim: int
    picks: int
    entries: int
    device: torch.device


class Case:
    """The arguments of a number of rows; ``picks`` of the entries for each row, or none."""

    def __init__(self, sizes: Sizes, rows: int, picks: int) -> None:
        self.rows, self.keys, self.heads, self.dim = rows, WINDOW + picks, sizes.heads, sizes.dim
        on: dict[str, Any] = {"device": sizes.device}
        normal = partial(torch.randn, dtype=torch.bfloat16, **on)
        self.q = normal(rows, sizes.heads, sizes.dim)
        newest = torch.arange(rows, **on)[:, None] + WINDOW
        slots = (newest - torch.arange(WINDOW, **on)).int()
        window = (normal(rows + WINDOW, sizes.dim), slots, full(rows, WINDOW, sizes.device))
        extra: tuple[Any, ...] = (None, None, None)
        if picks:
            order = torch.rand(rows, sizes.entries, **on).topk(picks, dim=1).indices
            picked = order.sort(dim=1).values.int()
            extra = (normal(sizes.entries, sizes.dim), picked, full(rows, picks, sizes.device))
        self.sinks = torch.randn(sizes.heads, **on)
        self.lists = (*window, *extra)
        self.out = torch.full_like(self.q, torch.nan)

    def args(self, rows: slice = slice(None)) -> list[Any]:
        """Arguments without ``out``, of some rows."""
        swa, slots, lengths, extra, more, more_lengths = self.lists
        given = [self.q[rows], swa, slots[rows], lengths[rows], extra]
        given += [None if x is None else x[rows] for x in (more, more_lengths)]
        return [*given, self.sinks, self.dim**-0.5]

    def launch(self, config: Config | None) -> Launch:
        """One call; a config is for the kernel."""
        args = [*self.args(), self.out]
        if config is None:
            return lambda _: sparse_attention(*args)
        from torch_bcg.dsv4.kernels import attention

        return lambda _: attention.sparse_attention(*args, config)

    def error(self) -> float:
        """Relative norm of the distance from float64, for rows from all over."""
        every = max(1, self.rows // CHECKED)
        rows = slice(every - 1, None, every)
        given = self.args(rows)
        for i in (0, 1, 4, 7):  # queries, pools, sinks
            given[i] = None if given[i] is None else given[i].double()
        want = sparse_attention_reference(*given)
        return float((self.out[rows].double() - want).norm() / want.norm())

    @property
    def operations(self) -> int:
        """Of the two products."""
        return 4 * self.rows * self.heads * self.keys * self.dim

    @property
    def bytes(self) -> int:
        """Read and written, keys once for each row."""
        return self.rows * (2 * 2 * self.heads * self.dim + self.keys * (2 * self.dim + 4))


def full(rows: int, value: int, device: torch.device) -> Tensor:
    """Lengths."""
    return torch.full((rows,), value, dtype=torch.int32, device=device)


# time


def on_device(launch: Launch, repeats: int, device: torch.device) -> list[float]:
    """Microseconds of one call on the device; on a CPU until it returns."""
    nothing = torch.empty(0)
    if device.type == "cpu":
        return measure({"": launch}, [nothing], repeats, device)[""]
    graph = torch.cuda.CUDAGraph()
    launch(nothing)
    wait_idle(device)
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            launch(nothing)
    samples = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats + 3):
        start.record()
        graph.replay()
        end.record()
        wait_idle(device)
        samples.append(start.elapsed_time(end) * 1000 / CALLS)
    return samples[3:]  # warm


def ceilings(repeats: int, device: torch.device) -> tuple[list[Record], dict[str, float]]:
    """Records of a large product and a large copy; what they reach in TFLOP/s and TB/s."""
    n = 8192 if device.type == "cuda" else 256
    a, b, c = torch.randn(3, n, n, device=device).bfloat16()
    from_, to = torch.randn(2, 4 * n * n, device=device)
    calls: dict[str, tuple[Launch, str, float]] = {
        "product": (lambda _: torch.mm(a, b, out=c), "TFLOP/s", 2 * n**3),
        "copy": (lambda _: to.copy_(from_), "TB/s", 2 * from_.nbytes),
    }
    records, reached = [], {}
    for name, (call, unit, amount) in calls.items():
        taken = on_device(call, repeats, device)
        record = Record.of("sparse_attention", name, "us", taken, time="device", size=n)
        reached[unit] = record.params[unit] = amount / record.p50 / 1e6
        records.append(record)
    return records, reached


def measured(
    case: Case, variant: str, config: Config | None, repeats: int, device: torch.device
) -> list[Record]:
    """Device and host time of one case, checked before.

    Raises:
        Refused: the result is wrong.
    """
    launch = case.launch(config)
    case.out.fill_(torch.nan)
    launch(torch.empty(0))
    error = case.error()
    if not error < TOLERANCE:
        raise Refused(f"{variant}, {case.rows} rows, is wrong: relative error {error:.1e}.")
    params = {"rows": case.rows, "keys": case.keys, "config": config, "error": error}
    taken = {
        "device": on_device(launch, repeats, device),
        "host": measure({"": launch}, [torch.empty(0)], repeats, device)[""],
    }
    records = [
        Record.of("sparse_attention", variant, "us", samples, time=how, **params)
        for how, samples in taken.items()
    ]
    for unit, amount in {"TFLOP/s": case.operations, "TB/s": case.bytes}.items():
        records[0].params[unit] = amount / records[0].p50 / 1e6
    return records


def judge(records: Sequence[Record], ceiling: float) -> Claim:
    """The best config with the most rows."""
    found = [r for r in records if r.variant == "both" and r.params["time"] == "device"]
    most = max(r.params["rows"] for r in found)
    value = max(r.params["TFLOP/s"] for r in found if r.params["rows"] == most) / ceiling
    return Claim.at_least(f"TFLOP/s of both, {most} rows / TFLOP/s of a product", value, LIMIT)


def run(args: argparse.Namespace) -> None:
    """Ceilings, then every case with every config; saves and prints."""
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    sizes = Sizes(64, 512, 512, 16384, device) if gpu else Sizes(4, 64, 64, 256, device)
    rows = args.rows or ([16, 64, 256, 1024, 2048] if gpu else [4, 16])
    repeats = args.repeats or (50 if gpu else 5)
    if args.config and not gpu:
        raise Refused("--config is for the kernel, which needs a GPU.")
    torch.manual_seed(0)
    tops, reached = ceilings(repeats, device)
    records: list[Record] = []
    for n in rows:
        for variant, picks in (("window", 0), ("both", sizes.picks)):
            case = Case(sizes, n, picks)
            for config in args.config or [None]:
                say(f"{variant}, {n} rows, config {config or 'chosen'}")
                records += measured(case, variant, config and tuple(config), repeats, device)
    claims = [judge(records, reached["TFLOP/s"]).on(device)]
    save(args.out, "sparse_attention", [*tops, *records], claims=claims)
    print(f"{sizes.heads} heads of {sizes.dim}, bf16, on {device}, {repeats} samples, microseconds")
    print(text([*tops, *records]), *claims, sep="\n")


def text(records: Sequence[Record]) -> str:
    """The table."""
    shown = ("rows", "keys", "config", "time")
    head = ("variant", *shown, "p20", "p50", "p80", "TFLOP/s", "TB/s", "error")
    body = []
    for r in records:
        given = [r.params.get(name) or "-" for name in shown]
        rates = [r.params.get(name, "-") for name in ("TFLOP/s", "TB/s")]
        error = f"{r.params['error']:.1e}" if "error" in r.params else "-"
        body.append((r.variant, *given, r.p20, r.p50, r.p80, *rates, error))
    return table(head, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__, only=False)
    options.add_argument("--rows", type=int, nargs="+", help="16 to 2048; 4 and 16 on a CPU")
    options.add_argument("--repeats", type=int, help="samples of each: 50; 5 on a CPU")
    options.add_argument(
        "--config",
        type=int,
        nargs=4,
        action="append",
        metavar=("HEADS", "KEYS", "WARPS", "STAGES"),
        help="instead of the one that the kernel chooses; may be given several times",
    )
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
