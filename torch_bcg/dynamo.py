"""The backend: what Dynamo calls once a graph, and what ``torch._dynamo.reset()`` calls.

What becomes of a graph, in this order; `torch_bcg.compiled` is the one place where it happens:

  once a graph    facts about every node; cuts at marks and at what cannot be recorded; a plan, that
                  names segments and says where each value lives; passes over the plan: lifetimes,
                  padding, metadata
  first call      runs node by node for real, and is the result of the call: what reads the host
                  unsaid is a new cut, and the graph is planned again. Then each segment is recorded
                  at fixed addresses, which runs nothing
  a new size      runs for real as well and is recorded: at once where sizes are padded to a ladder,
                  else at its second call
  later calls     find their program by sizes and addresses: copy in, replay the steps, hand out
  else            an eager call, with a reason that is counted and told
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torch_bcg.compiled import CompiledGraph, live_graphs
from torch_bcg.eager import Unrecorded
from torch_bcg.errors import OptionError
from torch_bcg.frame import needs_gradients
from torch_bcg.options import Options
from torch_bcg.runtime.device import renew_pools


class Backend:
    """``torch.compile(..., backend="bcg")``; `bcg` is its one instance."""

    compiler_name = "bcg"
    __name__ = "bcg"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        *,
        mode: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Callable[..., Any]:
        """Plans one graph and returns what Dynamo calls in its place.

        Args:
            gm: Dynamo's graph: torch-level calls, in-place operations in place.
            example_inputs: the arguments it was traced with.
            mode: refused; ``torch.compile`` modes belong to Inductor.
            options: see `Options`.

        Raises:
            OptionError: an option or environment variable is wrong, or a mode was given.
            CutError: a cut nobody asked for, with ``on_cut="error"``.
        """
        if mode is not None:
            raise OptionError(
                "backend='bcg' takes no mode=.",
                where="torch.compile(..., mode=...)",
                expected="options={...}",
                found=f"mode={mode!r}",
                fix="Leave mode= out; what can be chosen is an option of torch_bcg.Options.",
            )
        chosen = Options.make(options)
        if chosen.execute == "off":
            return Unrecorded(gm, "execute=off", chosen, warn=False)
        if needs_gradients(gm, example_inputs):
            return Unrecorded(gm, "gradients", chosen)
        return CompiledGraph(gm, example_inputs, chosen, options)

    def reset(self) -> None:
        """Frees every program, slot and pool; ``torch._dynamo.reset()`` calls it."""
        for graph in live_graphs():
            graph.reset()
        renew_pools()


bcg = Backend()
