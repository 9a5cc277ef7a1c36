"""The sizes that metadata, pools and pages of one engine are made for."""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNED = 64
"""Index tables are as wide as a multiple of this many columns, as sparse attention kernels ask."""

MOST_BEFORE = 1 << 16
"""Tokens of a compressed entry: a plan counts in 16 bits those that came before the step."""


@dataclass(frozen=True)
class Layout:
    """What every step of an engine shares: nothing here depends on a batch.

    Positions are tokens of a request. A page holds ``page_size`` tokens of one request in the full
    slot space; the compressed branches have ``page_size // ratio`` entries in the same page. Page 0
    of each space, and request slot 0, are reserved: padded rows read and write there.

    Attributes:
        context: most positions of a request, a multiple of ``page_size``.
        requests: request slots, the reserved one included.
        pages: full pages, the reserved one included.
        page_size: tokens, a multiple of ``2 * c4_ratio`` and of ``c128_ratio``; also that of the
            sliding-window space.
        window: positions that sliding attention sees, its own included.
        c4_ratio: tokens for an entry of the sparse branch, whose windows overlap by as many.
        c128_ratio: tokens for an entry of the heavy branch.
        index_topk: entries that the indexer picks, at most.
        online_compress: a step replaces the plan of the heavy branch whole, for engines that plan a
            running softmax on the host. Metadata alone goes by it: no pool or kernel does.

    Raises:
        ValueError: the page size or the context is no such multiple, a number is less than 1, or a
            window or ratio is one that there cannot be, see `check_windows`.
    """

    context: int
    requests: int
    pages: int
    page_size: int = 256
    window: int = 128
    c4_ratio: int = 4
    c128_ratio: int = 128
    index_topk: int = 512
    online_compress: bool = False

    def __post_init__(self) -> None:
        check_windows("Layout", self.window, self.c4_ratio, self.c128_ratio)
        for name in ("context", "requests", "pages", "page_size", "index_topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"Layout: {name} is {getattr(self, name)}; expected 1 or more.")
        unit = page_unit(self.c4_ratio, self.c128_ratio)
        if self.page_size % unit or self.context % self.page_size:
            raise ValueError(
                f"Layout: page_size is {self.page_size} and context {self.context}; expected "
                f"multiples of {unit} (twice c4_ratio, c128_ratio) and of page_size. Round both up."
            )

    @property
    def slots(self) -> int:
        """Token slots of the full space, and of the sliding-window space."""
        return self.pages * self.page_size

    @property
    def table_width(self) -> int:
        """Columns of a page table."""
        return self.context // self.page_size

    @property
    def window_width(self) -> int:
        """Columns of the sliding-window indices."""
        return _aligned(self.window)

    @property
    def sparse_width(self) -> int:
        """Columns of what the indexer picks."""
        return _aligned(self.index_topk)

    @property
    def heavy_width(self) -> int:
        """Columns of the heavy branch's indices."""
        return _aligned(self.context // self.c128_ratio)

    @property
    def c4_page(self) -> int:
        """Entries of the sparse branch in a page."""
        return self.page_size // self.c4_ratio

    @property
    def c4_ring(self) -> int:
        """Rows of the sparse branch's state for each page: two windows."""
        return 2 * self.c4_ratio

    @property
    def c4_state_rows(self) -> int:
        """Rows of the sparse branch's state."""
        return self.pages * self.c4_ring

    @property
    def c128_state_rows(self) -> int:
        """Rows of the heavy branch's state: one window for each request slot."""
        return self.requests * self.c128_ratio


def check_windows(where: str, window: int, c4_ratio: int, c128_ratio: int) -> None:
    """Refuses a window of no position, and ratios that no plan can count.

    Raises:
        ValueError: one is less than 1, or an entry is made of more than `MOST_BEFORE` tokens.
    """
    within = window >= 1 and c4_ratio >= 1 and c128_ratio >= 1
    if not within or max(2 * c4_ratio, c128_ratio) > MOST_BEFORE:
        raise ValueError(
            f"{where}: window is {window}, c4_ratio {c4_ratio} and c128_ratio {c128_ratio}; "
            f"expected 1 or more, and ratios up to {MOST_BEFORE // 2} and {MOST_BEFORE}."
        )


def page_unit(c4_ratio: int, c128_ratio: int) -> int:
    """A page is a multiple of this, so that no window of either branch crosses one."""
    return math.lcm(2 * c4_ratio, c128_ratio)


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED
