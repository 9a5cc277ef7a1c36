"""Which models can be padded to buckets, and is the result eager's at every length?

Each model of a zoo script is compiled with backend="bcg", dynamic=True and buckets="ladder", and
called three times at every length of a sweep, with new data each time; all outputs of all calls are
compared with eager. Attention is marked, so that it sees the rows of a call alone; --unmarked
leaves it in the recorded segments, where padding is refused unless --rows independent vouches for
it. A model is padded if a graph of it is and rows were filled up; else the table says why not.

The third call of a length is watched: how many rows each graph is called with, and so which buckets
they fall into. A padded graph with more programs than those buckets records what it should share.
A model that differs from eager, raises, or has more programs is named, and nothing is written.

The script defines MODELS ({name: (class, configuration class, configuration, kind of input)}),
inputs(kind, length, device, batch=...), tensors(result) and ATTENTION_CLASS.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import (
    Record,
    Refused,
    check_names,
    environment,
    parser,
    plans_of,
    save,
    say,
    status,
    table,
)
from profile_zoo import build, load, mark_attention
from watch import calls_of

import torch_bcg
from torch_bcg.compiled import CompiledGraph
from torch_bcg.graph.ir import Plan, Reason
from torch_bcg.handle import ProgramHandle

TOLERANCE = 1e-4
CALLS = 3
SLOW = ("mamba", "deepseek_v4")  # those that --few is for: Dynamo traces their loops over tokens


@dataclass
class Row:
    """One model.

    Attributes:
        verdict: ``padded`` or ``refused: ...``, or what is wrong.
        graphs, padded_graphs: of Dynamo's, and those of them that are padded.
        programs, buckets: of the padded graphs: recorded, and that calls fall into.
        exact_programs: of the other graphs, one for each shape.
        lengths: how many the model was called at.
        eager_calls: by reason.
    """

    model: str
    verdict: str = ""
    wrong: bool = False
    graphs: int = 0
    padded_graphs: int = 0
    programs: int = 0
    buckets: int = 0
    exact_programs: int = 0
    lengths: int = 0
    replays: int = 0
    pad_rows: int = 0
    eager_calls: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def fail(self, what: str) -> None:
        """A row that must not be reported."""
        self.verdict, self.wrong = what, True


def spread(low: int, high: int, few: int | None) -> list[int]:
    """All lengths from ``low`` to ``high``, or a few of them, both ends included."""
    if few is None or few > high - low:
        return list(range(low, high + 1))
    return sorted({low + round(i * (high - low) / max(1, few - 1)) for i in range(few)})


def is_padded(plan: Plan) -> bool:
    """Whether calls of a graph are padded."""
    return plan.padding is not None and plan.padding.refused is None


def bucket_of(plan: Plan, key: Sequence[int]) -> int:
    """The smallest size of the ladder, as far as the graph is for it, that takes a call, or 0."""
    assert plan.padding is not None
    rows = key[[symbol for symbol, _, _ in plan.symbols].index(plan.padding.symbol)]
    return next((size for size in plan.padding.ladder if size >= rows), 0)


def is_exact(program: ProgramHandle) -> bool:
    """Whether a program has the rows of its calls and no padding."""
    padding = program.plan.padding
    if padding is None or padding.refused is not None:
        return True
    return program.sizes[padding.symbol] not in padding.ladder


def refusal(plan: Plan) -> str:
    """Why a graph is not padded, in one line."""
    reason = plan.padding.refused if plan.padding is not None else plan.unrecorded
    if reason is None:
        reason = Reason("not asked", "")
    text = f"{reason.kind}: {reason.detail}" if reason.detail else reason.kind
    return f"{text} ({reason.where})" if reason.where else text


def sweep(zoo: ModuleType, row: Row, lengths: Sequence[int], args: argparse.Namespace) -> Any:
    """Calls a model at every length and compares; the compiled model, and the keys of its graphs.

    Raises:
        AssertionError: a result is not eager's.
    """
    model = build(zoo, row.model, args.device)
    options = {"buckets": "ladder", "rows": args.rows, "on_eager_call": "count"}
    compiled = torch.compile(model, backend="bcg", dynamic=True, options=options)
    keys: dict[str, set[tuple[int, ...]]] = {}
    for length in lengths:
        row.lengths += 1
        for i in range(CALLS):
            kind = zoo.MODELS[row.model][3]
            x = zoo.inputs(kind, length, args.device, batch=args.batch)
            want = list(zoo.tensors(model(*x)))
            if i < CALLS - 1:
                result = compiled(*x)
            else:
                with calls_of(CompiledGraph.run_program.__code__) as calls:
                    result = compiled(*x)
                for call in calls:
                    keys.setdefault(call["self"].name, set()).add(tuple(call["key"]))
                calls.clear()
            try:
                torch.testing.assert_close(
                    list(zoo.tensors(result)), want, rtol=TOLERANCE, atol=TOLERANCE
                )
            except AssertionError as error:
                raise AssertionError(f"at length {length}, call {i + 1}: {error}") from error
    return compiled, keys


def look(zoo: ModuleType, name: str, lengths: Sequence[int], args: argparse.Namespace) -> Row:
    """One model: its calls, and what became of its graphs."""
    row = Row(name)
    torch._dynamo.reset()
    start, before = time.perf_counter(), torch_bcg.stats()
    try:
        compiled, keys = sweep(zoo, row, lengths, args)
    except Exception as error:  # one model's error must not hide the others
        first = " ".join(str(error).split())
        kind = "differs" if isinstance(error, AssertionError) else type(error).__name__
        row.fail(f"{kind}: {first[:160]}")
        return row
    finally:
        row.seconds = round(time.perf_counter() - start, 1)
    after = torch_bcg.stats()
    row.replays = after.replays - before.replays
    row.pad_rows = after.pad_rows - before.pad_rows
    counts = {why: n - before.eager_calls.get(why, 0) for why, n in after.eager_calls.items()}
    row.eager_calls = {why: n for why, n in counts.items() if n}
    judge(row, compiled, keys)
    return row


def judge(row: Row, compiled: Any, keys: dict[str, set[tuple[int, ...]]]) -> None:
    """Fills in what the plans and programs of a model say."""
    plans = plans_of(compiled)
    # Rows that the graph is for no padded size of are recorded as they are.
    recorded = torch_bcg.programs(compiled)
    exact = Counter(p.plan.name for p in recorded if is_exact(p))
    programs = Counter(p.plan.name for p in recorded if not is_exact(p))
    padded = [plan for plan in plans if is_padded(plan)]
    others = [plan for plan in plans if not is_padded(plan)]
    row.graphs, row.padded_graphs = len(plans), len(padded)
    row.exact_programs = sum(exact.values())
    more = []
    for plan in padded:
        sizes = {bucket_of(plan, key) for key in keys.get(plan.name, ())} - {0}
        row.programs += programs[plan.name]
        row.buckets += len(sizes)
        if programs[plan.name] > len(sizes):
            more.append(f"{plan.name}: {programs[plan.name]} programs, {len(sizes)} buckets")
    refused = Counter(refusal(plan) for plan in others)
    why = "; ".join(text for text, _ in refused.most_common())
    if padded and row.pad_rows:
        row.verdict = "padded"
        if others:
            row.verdict += f" ({len(padded)} of {len(plans)} graphs; others refused: {why})"
    elif padded:
        row.verdict = "no row was filled up"
    else:
        row.verdict = f"refused: {why}" if plans else "nothing is compiled"
    if more:
        row.fail(f"more programs than buckets: {'; '.join(more)}")
    elif not row.replays:
        row.fail(f"no call was replayed; {row.verdict}")


HEAD = (
    *("model", "padding", "graphs", "programs", "buckets used", "exact programs", "lengths"),
    *("replays", "rows filled up", "eager calls", "seconds"),
)


def cells(row: Row) -> list[str]:
    """A row of the table."""
    eager = ", ".join(f"{n} {why}" for why, n in sorted(row.eager_calls.items())) or "0"
    numbers = (row.graphs, row.programs, row.buckets, row.exact_programs, row.lengths)
    last = (eager, f"{row.seconds:.1f}")
    return [row.model, row.verdict, *map(str, numbers), f"{row.replays}", f"{row.pad_rows}", *last]


def summary(rows: Sequence[Row]) -> str:
    """How many are padded, refused and wrong."""
    padded = sum(r.verdict.startswith("padded") for r in rows)
    refused = sum(r.verdict.startswith("refused") for r in rows)
    wrong = sum(r.wrong for r in rows)
    rest = len(rows) - padded - refused - wrong
    text = f"{padded} padded, {refused} refused, {wrong} wrong"
    return f"{text}, {rest} neither" if rest else text


def markdown(rows: Sequence[Row], title: str) -> str:
    """The table as a page."""
    here = environment()
    where = here["gpu"] or here["cpu"]
    origin = f"Written by `{here['command']}` on {here['date']}, commit {here['commit']}."
    lines = [
        f"# {title}",
        "",
        f"{origin} torch {here['torch']}, {where}.",
        "",
        f"{summary(rows)}. Every output of every call equals eager within {TOLERANCE:g}.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells(r))} |" for r in rows),
    ]
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> None:
    """All models, one after the other."""
    zoo = load(args.zoo)
    names = check_names(args.only, zoo.MODELS)
    torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))
    torch._dynamo.config.recompile_limit = 256
    warnings.filterwarnings("ignore")
    if not args.unmarked:
        mark_attention(zoo)
    rows: list[Row] = []
    low, high = args.sweep
    for name in names:
        lengths = spread(low, high, args.few if name in SLOW else None)
        rows.append(look(zoo, name, lengths, args))
        row = rows[-1]
        say(
            f"[{len(rows)}/{len(names)}] {name}: {row.verdict}, {row.programs} programs, "
            f"{row.buckets} buckets, {row.seconds:.1f} s"
        )
    marks = "unmarked" if args.unmarked else "marked"
    vouched = "_independent" if args.rows == "independent" else ""
    name = f"pad_zoo_{marks}{vouched}_batch{args.batch}_{torch.device(args.device).type}"
    print(table(HEAD, map(cells, rows)))
    print(summary(rows))
    wrong = [r.model for r in rows if r.wrong]
    if wrong:
        raise Refused(f"wrong: {', '.join(wrong)}; see the table.")
    params = {k: getattr(args, k) for k in ("unmarked", "rows", "batch", "sweep", "few", "device")}
    records = [Record.of("pad_zoo", r.model, "s", [r.seconds], **asdict(r), **params) for r in rows]
    save(args.out, name, records)
    if args.out is not None:
        title = f"Padding, zoo with attention {marks}, rows={args.rows!r}, batch {args.batch}"
        path = args.out / f"{name}.md"
        path.write_text(markdown(rows, title), encoding="utf-8")
        say(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 compared, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--zoo", type=Path, required=True, help="the script with the models")
    options.add_argument("--sweep", type=int, nargs=2, default=[2, 80], metavar=("LOW", "HIGH"))
    options.add_argument("--few", type=int, metavar="N", help=f"lengths of {', '.join(SLOW)}")
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--unmarked", action="store_true", help="attention is recorded")
    options.add_argument("--rows", choices=("facts", "independent"), default="facts")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
