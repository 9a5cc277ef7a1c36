"""Memory that an operator makes and keeps: a workspace built at its first call, a cached result.

Recorded kernels would use it at every replay, though Python may replace it whenever it likes. No
schema tells, so live tensors are compared before and after a call, for operators that are not
PyTorch's own. What code outside Python keeps is not seen.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.geometry import has_memory

_OWN = ("aten", "prim", "prims", "streams")  # PyTorch's: they keep nothing of the caller's


class Keepers:
    """Notes which operators of one run keep memory that they made."""

    def __init__(self, device: str) -> None:
        self.kind = torch.device(device).type
        self.seen: set[object] = set()
        self.held: dict[object, list[StorageWeakRef]] = {}
        self.found: set[object] = set()

    def call(self, n: fx.Node, operands: list[Any], run: Callable[[], Any]) -> Any:
        """Runs a node, watched if it is the first of its operator with operands of these shapes."""
        if not is_foreign(n):
            return run()
        self.confirm(n.target)  # before it replaces what it kept
        shapes = tuple(tuple(t.shape) for t in tree_leaves(operands) if isinstance(t, Tensor))
        if (n.target, shapes) in self.seen:
            return run()
        self.seen.add((n.target, shapes))
        before = set(map(self.address, self.alive()))
        result = run()
        if self.left(result, before):
            gc.collect()  # what only a cycle holds is not kept
            self.held[n.target] = [StorageWeakRef(s) for s in self.left(result, before)]
        return result

    def confirm(self, *targets: object) -> None:
        """Finds the operators whose memory is still there; other threads had some that is not."""
        for target in targets:
            if any(not storage.expired() for storage in self.held.pop(target, ())):
                self.found.add(target)

    def keeping(self) -> set[object]:
        """The operators that keep memory, now that the run is over."""
        self.confirm(*self.held)
        return self.found

    def alive(self) -> list[Tensor]:
        """Every tensor with memory on the device that Python holds."""
        kinds = _with_subclasses(Tensor) - {FakeTensor}
        return [o for o in gc.get_objects() if type(o) in kinds and self.address(o)]

    def address(self, t: Tensor) -> int:
        """Where a tensor's storage lies; 0 if it has none, or not on the device."""
        with torch._C.DisableTorchFunctionSubclass():
            if not has_memory(t) or is_traceable_wrapper_subclass(t):
                return 0
            if t.device.type != self.kind:
                return 0
            try:
                return t.untyped_storage().data_ptr()
            except RuntimeError:  # a fake tensor has a storage without memory
                return 0

    def left(self, result: object, before: set[int]) -> list[torch.UntypedStorage]:
        """Storages made meanwhile that somebody holds besides the result itself."""
        returned = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        given = {id(x) for t in returned for x in (t, t._base)}
        alive, held = self.alive(), []
        for t in alive:
            made = self.address(t) not in before
            if made and (id(t) not in given or _is_held(t, result, returned, alive)):
                held.append(t.untyped_storage())
        return held


def _is_held(t: Tensor, result: object, *ours: object) -> bool:
    """Whether anything but ``result`` and ``ours`` refers to ``t``."""
    known = {id(x) for x in (*_containers(result), *ours)}
    return any(
        id(holder) not in known and not isinstance(holder, types.FrameType)
        for holder in gc.get_referrers(t)
    )


def _containers(result: object) -> Iterator[object]:
    if isinstance(result, (list, tuple, dict)):
        yield result
        for part in result.values() if isinstance(result, dict) else result:
            yield from _containers(part)


def is_foreign(n: fx.Node) -> bool:
    """Whether a node calls code that neither PyTorch nor Python wrote."""
    target: Any = n.target
    if n.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _OWN
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.split("::")[0] not in _OWN
    module = getattr(target, "__module__", None) or "builtins"
    return isinstance(target, types.FunctionType) and module.split(".")[0] != "torch"


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
