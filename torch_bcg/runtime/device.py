"""What a device has one of: a lock, a pool, a capture stream, and the stream that replayed last."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator

import torch


class Pool:
    """One for each device. ``lock`` is held for a whole call; ``busy`` tells a call inside a call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.busy = False
        self.dead: list[object] = []  # programs dropped where memory could not be given back

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

    def capturing(self) -> bool:
        """Whether somebody records the current stream."""
        return False

    @contextlib.contextmanager
    def sync_reports(self) -> Iterator[list[str]]:
        """Collects what synchronises with the host; the operation itself is not disturbed."""
        yield []

    def reserved(self) -> int:
        """Bytes the allocator holds for this process."""
        return 0


class CudaPool(Pool):
    """The pool of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.last: torch.cuda.Stream | None = None
        self.renew()

    def renew(self) -> None:
        """Takes new memory and a new stream.

        Nothing but captures runs on the stream, so cuBLAS allocates its workspace for it inside the
        pool: a workspace from ordinary memory is lost when anybody clears them, as cudagraph trees do.
        """
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)

    def order(self) -> None:
        now = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last != now:
            now.wait_stream(self.last)
        self.last = now

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    @contextlib.contextmanager
    def sync_reports(self) -> Iterator[list[str]]:
        before = torch.cuda.get_sync_debug_mode()
        found: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for w in caught:
            if "synchronizing CUDA operation" in str(w.message):
                found.append("synchronises with the device")
            elif "Synchronization debug mode is a prototype" not in str(w.message):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self.device))


_POOLS: dict[str, Pool] = {}
_POOLS_LOCK = threading.Lock()


def pool_of(device: str) -> Pool:
    """The pool of a device, e.g. ``cpu`` or ``cuda:0``."""
    with _POOLS_LOCK:
        if device not in _POOLS:
            kind = torch.device(device)
            _POOLS[device] = CudaPool(kind) if kind.type == "cuda" else Pool(kind)
        return _POOLS[device]


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
