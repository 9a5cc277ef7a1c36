"""What ``demo`` shows while it works and at its end. ``rich`` draws it, an optional extra."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch_bcg.commands.results import Result
from torch_bcg.graph.values import counted
from torch_bcg.report.advice import causes


@contextlib.contextmanager
def bar(total: int, drawn: bool) -> Iterator[Callable[[], None]]:
    """Yields what advances a progress bar by one call."""
    if not drawn:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("calling, eager and compiled", total=total)
        yield lambda: shown.advance(task)


def show(result: Result) -> None:
    """Prints plan, table, coverage and verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    asked = result.asked
    title = f"{result.title}: {counted(asked.layers, 'layer')}, random weights, on {asked.device}"
    console.print(f"{title}\n{result.marked} is marked", markup=False)
    if asked.device == "cpu":
        console.print(
            "No GPU is used: the host recorder replays. Its times say nothing about CUDA graphs."
        )
    console.print("\nplan")
    for plan in result.plans:
        console.print(f"  {plan}", markup=False)
        for cause in causes(plan.reasons):
            console.print(f"    {len(cause.reasons)} x {cause.title}", markup=False)
    table = Table(result.sizes, "calls", "replayed", "eager ms", "replayed ms", "difference")
    for column in table.columns:
        column.justify = "right"
    for row in result.rows:
        times = [f"{t:.3f}" if t is not None else "-" for t in (row.eager_ms, row.replayed_ms)]
        difference = "0, to the bit" if row.bitwise else f"{row.largest_difference:.1e}"
        table.add_row(str(row.length), str(row.calls), str(row.replays), *times, difference)
    console.print("\nmedian of the calls that were replayed; largest difference of all calls")
    console.print(table)
    if result.kinds:
        kinds = ", ".join(f"{result.kinds.get(k, 0)} {k}" for k in ("prefill", "mixed", "decode"))
        console.print(f"steps: {kinds}")
    covered = result.counted.coverage
    console.print(
        f"first call (compile, probe, capture): {result.first_ms / 1e3:.1f} s\n"
        f"coverage, first calls of a size apart: {covered.calls:.0%} of calls, "
        f"{covered.kernels:.0%} of their kernels replayed"
    )
    if asked.dump:
        console.print(f"dumped to {asked.dump}", markup=False)
    console.print(f"verdict: {result.verdict}")
