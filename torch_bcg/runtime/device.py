"""What a device has one of: a lock, a pool, a capture stream, and the stream that replayed last."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_bcg.runtime.slots import Arena

# The handle of the current stream of a device, without an object for it: 0.1 instead of 4 us.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_WAITS = "called a synchronizing CUDA operation"


class Pool:
    """One for each device. ``lock`` is held for a whole call; ``busy`` tells a call inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.busy = False
        self.arena = Arena()
        self.programs: weakref.WeakSet[Any] = weakref.WeakSet()  # those recorded in it

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Marks the pool's memory as being read and written by a call."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def order(self) -> None:
        """Makes the current stream wait for the last call, if that ran on another stream."""

    def settle(self) -> None:
        """Waits for the last replay, so that what it uses can be freed on any stream."""

    def capturing(self) -> bool:
        """Whether somebody records the current stream."""
        return False

    def prevented(self) -> str:
        """Why no replay may begin now, or ""."""
        return "re-entry" if self.busy else "outer capture" if self.capturing() else ""

    @contextlib.contextmanager
    def sync_reports(self) -> Iterator[list[str]]:
        """Collects what synchronises with the host; the operation itself is not disturbed."""
        yield []

    def reserved(self) -> int:
        """Bytes held for recordings, or by the allocator that gives them memory."""
        return self.arena.bytes

    def renew(self) -> None:
        """Takes new memory, so that the old can be given back."""
        self.arena = Arena()

    def let_go(self) -> None:
        """Gives memory back to the device, if no program needs it any more."""
        if not self.busy and all(p.dead for p in self.programs):
            self.renew()
            self.trim()

    def trim(self) -> None:
        """Gives the device what the allocator keeps."""


class CudaPool(Pool):
    """The pool of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.index = self.device.index or 0
        self.last: torch.cuda.Stream | None = None
        self.last_raw: int | None = None
        # Nothing but captures runs on it, so cuBLAS allocates its workspace for it inside the pool:
        # one from ordinary memory is lost when anybody clears them, as cudagraph trees do.
        self.stream = torch.cuda.Stream(device)
        self.side: list[torch.cuda.Stream] = []
        self.renew()

    def renew(self) -> None:
        """Takes new memory; what recordings made so far need stays with them."""
        super().renew()
        self.handle = torch.cuda.graph_pool_handle()
        self.anchor: torch.cuda.CUDAGraph | None = None

    def trim(self) -> None:
        """Gives the device what the allocator keeps."""
        if not self.capturing():
            torch.cuda.empty_cache()

    def prepare(self) -> None:
        """Holds the pool with a recording of almost nothing.

        The allocator refuses a pool whose recordings have all gone while a block of it is in use.
        """
        if self.anchor is None:
            self.anchor = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                self.anchor.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                torch.empty(1, device=self.device).zero_()
                self.anchor.capture_end()

    def sides(self, count: int) -> list[torch.cuda.Stream]:
        """Streams for the side lanes of a recording, the same for every recording."""
        while len(self.side) < count:
            self.side.append(torch.cuda.Stream(self.device))
        return self.side[:count]

    def abandon(self) -> None:
        """After a capture that failed: the allocator and the random generator as before it.

        The allocator may still send memory to the pool, which makes `torch.cuda.empty_cache` fail,
        and the generator may still think that it is captured, until a capture ends well.
        """
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end(self.index, self.handle)
        self.renew()
        self.prepare()

    def order(self) -> None:
        """Makes the current stream wait for the last call, if that ran on another stream."""
        raw = _raw_stream(self.index) if _raw_stream is not None else None
        if raw is not None and raw == self.last_raw:
            return
        now = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last != now:
            now.wait_stream(self.last)
        self.last, self.last_raw = now, raw

    def settle(self) -> None:
        """Waits for the last replay, so that what it uses can be freed on any stream."""
        if self.last is not None and not self.capturing():
            self.last.synchronize()

    def capturing(self) -> bool:
        """Whether somebody records the current stream."""
        return bool(torch.cuda.is_current_stream_capturing())

    @contextlib.contextmanager
    def sync_reports(self) -> Iterator[list[str]]:
        """Collects what waits for the device, with PyTorch's own debug mode set to warn.

        The mode is process-wide: what other threads wait for meanwhile is heard and not told.
        """
        before = torch.cuda.get_sync_debug_mode()
        here, found = threading.get_ident(), []
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_WAITS)
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            show = warnings.showwarning

            def heard(message: Warning | str, *args: Any, **kwargs: Any) -> None:
                if not str(message).startswith(_WAITS):
                    show(message, *args, **kwargs)
                elif threading.get_ident() == here:
                    found.append("waits for the device")

            warnings.showwarning = heard
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
                time.sleep(0.001)  # a thread about to warn still does it while it is heard here

    def reserved(self) -> int:
        """Bytes the allocator holds for this process."""
        return int(torch.cuda.memory_reserved(self.device))


_POOLS: dict[str, Pool] = {}
_ALL: weakref.WeakSet[Pool] = weakref.WeakSet()  # with those that one graph has for itself
_POOLS_LOCK = threading.Lock()


def renew_pools() -> None:
    """Lets every pool go whose programs are gone."""
    with _POOLS_LOCK:
        pools = list(_ALL)
    for pool in pools:
        with pool.lock:
            pool.let_go()


def pool_of(device: str) -> Pool:
    """The pool of a device, e.g. ``cpu`` or ``cuda:0``."""
    with _POOLS_LOCK:
        if device not in _POOLS:
            _POOLS[device] = new_pool(device)
        return _POOLS[device]


def new_pool(device: str) -> Pool:
    """A pool that shares no memory with any other."""
    kind = torch.device(device)
    pool = CudaPool(kind) if kind.type == "cuda" else Pool(kind)
    _ALL.add(pool)
    return pool


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Holds off garbage collection: a CUDA graph destroyed while another is recorded breaks it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
