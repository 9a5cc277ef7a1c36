"""Plans and what happened to them -> files, numbered in the order of the flow.

``<directory>/rank0/graph_0/`` holds the graph, its segments, the plan, the code of each segment,
what was captured, counters, a page. Each file is written whole or not at all. Texts and code are
the same on every run; figures are in JSON.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import fx

from torch_bcg.counters import stats
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.ir import Plan
from torch_bcg.graph.lower import Lowering
from torch_bcg.report import code, text
from torch_bcg.report.page import page

log = logging.getLogger(__name__)
_INDEX = {
    "00_graph.py": "the graph that Dynamo handed over, with shapes, strides, devices",
    "01_segments.txt": "what `explain` says: segments, cuts with their reasons, costs of a call",
    "02_plan.txt": "every value, its home, who reads it; every segment",
    "02_plan.json": "the same as data: `torch_bcg.graph.ir.Plan.from_json` reads it",
    "03_segment_*.py": "code of each segment",
    "04_capture.json": "programs in the order of capture: key, bytes",
    "05_counters.json": "counters of the process, after the last capture",
    "page.html": "the plan drawn; open it in a browser",
}
_directory: ContextVar[str | None] = ContextVar("torch_bcg_dump", default=None)


@contextmanager
def dump_to(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Dumps every graph planned inside the ``with``, and what is captured for it later on.

    Args:
        directory: made if it is not there; ``TORCH_BCG_DUMP`` and the option ``dump`` do the same.

    Yields:
        The folder of this rank, with one folder a graph.
    """
    token = _directory.set(os.fspath(directory))
    try:
        yield _rank_folder(os.fspath(directory))
    finally:
        _directory.reset(token)


class Dump:
    """The folder of one graph, and what is written to it again as programs are captured."""

    def __init__(
        self, folder: Path, plan: Plan, segments_code: Mapping[int, str], probed: bool
    ) -> None:
        self.folder = folder
        self.plan, self.segments_code, self.probed = plan, segments_code, probed
        self.programs: list[Mapping[str, object]] = []

    def captured(
        self,
        key: Mapping[str, int],
        figures: Mapping[str, object],
        fusings: Sequence[Fusing] | None = None,
    ) -> None:
        """Notes a program, and writes the counters as they are now.

        Args:
            key: value of each symbol of the plan.
            figures: e.g. ``bytes``, ``copied_bytes``, by name.
            fusings: what is fused of each program that there is; None: nothing is to be.
        """
        self.programs.append({"key": dict(key), **figures})
        write(self.folder / "04_capture.json", json.dumps(self.programs, indent=1) + "\n")
        write(self.folder / "05_counters.json", stats().json() + "\n")
        if fusings is not None:
            for name, content in self.shown(fusings).items():
                write(self.folder / name, content)

    def shown(self, fusings: Sequence[Fusing] | None) -> dict[str, str]:
        """The files that say what is fused."""
        said = text.explanation([self.plan], self.probed, {self.plan.name: fusings})
        return {
            "01_segments.txt": said,
            "page.html": page(self.plan, self.segments_code, fusings),
        }


def chosen(option: str | None) -> str | None:
    """Where a graph that is compiled now is dumped, for all its plans; None: nowhere.

    Args:
        option: the option ``dump``; an enclosing `dump_to` comes before it.
    """
    return _directory.get() or option


def planned(
    name: str,
    plan: Plan,
    gm: fx.GraphModule,
    lowering: Lowering,
    directory: str | None,
    probed: bool = False,
    fusings: Sequence[Fusing] | None = None,
) -> Dump | None:
    """Dumps a plan, again when it changed or was probed.

    Args:
        name: of the graph, and of its folder.
        plan: an annotated plan.
        gm: the graph it is the plan of.
        lowering: of that plan.
        directory: what `chosen` said when the graph was compiled.
        probed: whether the plan knows what the probe found.
        fusings: as for `Dump.captured`.

    Returns:
        What takes note of captures, or None if nobody asked for a dump.
    """
    if directory is None:
        return None
    segments = code.segments_code(plan, lowering)
    made = Dump(_rank_folder(directory) / name, plan, segments, probed)
    dump(made, code.graph_code(gm), fusings)
    log.info("%s is dumped to %s", name, made.folder)
    return made


def dump(made: Dump, graph_code: str, fusings: Sequence[Fusing] | None) -> None:
    """Writes all that is known before anything is captured; files of an older plan go."""
    folder, plan = made.folder, made.plan
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "00_graph.py": graph_code,
        "02_plan.txt": plan.render(),
        "02_plan.json": plan.to_json() + "\n",
        **{f"03_segment_{i:03d}.py": source for i, source in made.segments_code.items()},
        **made.shown(fusings),
        "INDEX.md": index(plan),
    }
    for old in (*folder.glob("03_segment_*.py"), *folder.glob("0[45]_*.json")):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        write(folder / name, content)


def index(plan: Plan) -> str:
    """``INDEX.md``: what each file is."""
    rows = [f"| `{name}` | {what} |" for name, what in _INDEX.items()]
    return "\n".join([f"# {plan}", "", "| file | what it is |", "|---|---|", *rows]) + "\n"


def write(path: Path, content: str) -> None:
    """Writes a file whole or not at all: a reader sees the older one or this one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _rank_folder(directory: str) -> Path:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return Path(directory) / f"rank{distributed.get_rank() if ready else 0}"
