"""What to do about a cut that nobody marked: the exact call, where a mark says it as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_bcg.graph.ir import Reason

_ANNOTATE = (
    "To say so in the code: torch_bcg.eager_on_graph(ItsModuleClass), "
    'or with torch.fx.traceback.annotate({"bcg": "eager"}):'
)
_ADVICE = {
    "CPU tensor": "To record it: keep that tensor on the device of the graph.",
    "several devices": "One device a graph is recorded: keep all operands on that.",
    "number": "A number from the host follows the call; a 0-dim tensor instead can be recorded.",
    "few kernels": "min_segment_kernels asks for it; a lower one records it.",
    "no kernels": "Nothing is lost: it launches no kernel.",
    "overlapping memory": "To record it: make the operand contiguous first.",
    "storage access": "To record it: index or view the tensor instead of as_strided.",
    "outside stream": "To record it: fork and join inside the graph, or wait outside of it.",
    "gradients": "To record it: call under torch.inference_mode().",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Cuts for one cause.

    Attributes:
        kind, detail, target: of each of its reasons.
        reasons: one a marked thing, in the order of the program.
    """

    kind: str
    detail: str
    target: str
    reasons: tuple[Reason, ...]

    @property
    def title(self) -> str:
        """``host read: aten::item``."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    @property
    def places(self) -> str:
        """Node and line of the first, and how many more there are."""
        first = self.reasons[0]
        place = f"{first.node}, {first.where}" if first.where else first.node
        more = len(self.reasons) - 1
        return f"{place}, and {more} more" if more else place

    @property
    def advice(self) -> str:
        """What to write; "" for a cut that was asked for."""
        if self.kind == "mark":
            return ""
        if self.kind == "data-dependent size" and self.target.startswith("aten::"):
            return f'{_ANNOTATE} (torch_bcg.eager_on_graph("{self.target}") marks every call of it)'
        if self.target:
            return f'To mark it: torch_bcg.eager_on_graph("{self.target}")'
        return _ADVICE.get(self.kind, _ANNOTATE)


def causes(reasons: Iterable[Reason]) -> list[Cause]:
    """Reasons grouped by what caused them, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Reason]] = {}
    for r in reasons:
        groups.setdefault((r.kind, r.detail, r.target), []).append(r)
    return [Cause(*cause, tuple(members)) for cause, members in groups.items()]
