"""Steps for the tests of DeepSeek-V4's metadata: pages at random, tables full of what others left."""

import random
from typing import NamedTuple

import torch

from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import ExtendBatch

CLASSIC = Layout(context=2048, requests=6, pages=32)
LAYOUTS = {
    "classic": CLASSIC,
    "other ratios": Layout(
        context=96, requests=9, pages=40, page_size=24, window=20, c4_ratio=2, c128_ratio=6,
        index_topk=5,
    ),
    "near ratios": Layout(
        context=192, requests=5, pages=40, page_size=16, window=65, c4_ratio=4, c128_ratio=8,
        index_topk=65,
    ),
}  # fmt: skip


class Work(NamedTuple):
    """What a step does for one request: its slot, positions before the step, and new ones."""

    slot: int
    prefix: int
    extend: int


EXAMPLE = (Work(1, 5, 7), Work(2, 130, 3))


def worked_example(works=EXAMPLE, device="cpu"):
    """The layout and step of which `test_dsv4_metadata.py` writes every value out.

    Request 1 lies in full page 1 and sliding-window page 3, request 2 in full page 2 and
    sliding-window page 1.
    """
    layout = Layout(context=512, requests=3, pages=4)
    req_to_token = torch.zeros(3, 512, dtype=torch.int32)
    full_to_swa = torch.zeros(layout.slots + 1, dtype=torch.int64)
    full_to_swa[-1] = -1
    page = torch.arange(256)
    for slot, swa_page in ((1, 3), (2, 1)):
        req_to_token[slot, :256] = slot * 256 + page
        full_to_swa[slot * 256 + page] = swa_page * 256 + page
    return layout, packed(works, req_to_token, full_to_swa, device)


def packed(works, req_to_token, full_to_swa, device="cpu"):
    """The inputs of a step whose tokens are mapped already."""
    extends = [w.extend for w in works]
    slots = [
        int(req_to_token[w.slot, p])
        for w in works
        for p in range(w.prefix, w.prefix + w.extend)
    ]  # fmt: skip

    def tensor(numbers, dtype=torch.int32):
        return torch.tensor(numbers, dtype=dtype, device=device)

    return ExtendBatch(
        req_pool_indices=tensor([w.slot for w in works], torch.int64),
        seq_lens=tensor([w.prefix + w.extend for w in works]),
        extend_seq_lens=tensor(extends),
        extend_start_loc=tensor([sum(extends[:i]) for i in range(len(works))]),
        out_cache_loc=tensor(slots, torch.int64),
        req_to_token=req_to_token.to(device),
        full_to_swa=full_to_swa.to(device),
        num_tokens=sum(extends),
    )


def batch_of(layout, works, seed=0, device="cpu"):
    """A step with pages given out at random.

    Columns that no request has reached hold slots of others. Pages of the sliding window that lie
    behind it are freed: they are mapped to 0, and their numbers are given to others.
    """
    rng = random.Random(seed)
    size = layout.page_size
    pages, swa_pages = (rng.sample(range(1, layout.pages), layout.pages - 1) for _ in range(2))
    tables = torch.tensor(
        [
            [rng.randrange(layout.slots) for _ in range(layout.context)]
            for _ in range(layout.requests)
        ],
        dtype=torch.int32,
    )
    full_to_swa = torch.zeros(layout.slots + 1, dtype=torch.int64)
    full_to_swa[-1] = -1
    offsets = torch.arange(size)
    for w in works:
        kept_from = w.prefix - max(layout.window, 2 * layout.c4_ratio)
        for start in range(0, w.prefix + w.extend, size):
            page = pages.pop()
            tables[w.slot, start : start + size] = page * size + offsets
            if start + size > kept_from:
                full_to_swa[page * size + offsets] = swa_pages.pop() * size + offsets
    return packed(works, tables, full_to_swa, device)


def random_works(layout, rng, most_rows):
    """Requests in any slots, some with nothing to do, some at the end of their context."""
    works, room = [], most_rows
    pages = layout.pages - 1
    for slot in rng.sample(range(1, layout.requests), rng.randint(0, layout.requests - 1)):
        extend = min(room, rng.choice((0, 1, 1, 2, 3, rng.randint(0, most_rows))), layout.context)
        most = layout.context - extend
        prefix = rng.choice(
            (0, most, rng.randint(0, most), min(most, rng.randint(0, 2 * layout.window)))
        )
        needed = -(-(prefix + extend) // layout.page_size)
        if needed <= pages:
            pages -= needed
            room -= extend
            works.append(Work(slot, prefix, extend))
    return works
