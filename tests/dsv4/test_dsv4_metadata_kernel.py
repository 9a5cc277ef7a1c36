"""The metadata kernel gives what plain torch gives: interpreted on a CPU, compiled on a GPU.

A check takes a device. On a CPU it runs in the process that has Triton's interpreter, which loads
this file for itself.
"""

import dataclasses
import importlib
import random

import pytest
import torch
from torch import Tensor

from dsv4.dsv4_batches import LAYOUTS, Work, batch_of, random_works, worked_example
from dsv4.interpreted import child
from torch_bcg.dsv4 import building
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata, empty
from twin import no_synchronisation

ROUTE = {
    **LAYOUTS,
    "one page": Layout(context=256, requests=4, pages=5, index_topk=64),
    "wide pages": Layout(
        context=128, requests=9, pages=20, page_size=32, window=64, c4_ratio=8, c128_ratio=32,
        index_topk=2,
    ),
    "twice a page": Layout(
        context=64, requests=12, pages=30, page_size=16, window=5, c4_ratio=2, c128_ratio=8,
        index_topk=3,
    ),
}  # fmt: skip
PARTS = ("core_attn", "indexer", "c4_compress", "c128_compress")


def kernels():
    return importlib.import_module("torch_bcg.dsv4.kernels.metadata")


def tensors_of(md):
    """Every tensor of a metadata object by path."""
    return {
        f"{part}.{name}": value
        for part in PARTS
        for name, value in vars(getattr(md, f"{part}_metadata")).items()
        if isinstance(value, Tensor)
    }


def on(device, batch):
    moved = {k: v.to(device) for k, v in vars(batch).items() if isinstance(v, Tensor)}
    return dataclasses.replace(batch, **moved)


def stale(layout, rows, device):
    """An object full of numbers that no step leaves there."""
    md = empty(layout, rows, device)
    for t in tensors_of(md).values():
        t.fill_(77)
    return md


def compare(md, batch, layout):
    """Equal to what plain torch makes of the step on a CPU, in what a builder writes."""
    expected = stale(layout, len(md.core_attn_metadata.raw_out_loc), "cpu")
    building.build_into(expected, on("cpu", batch), layout)
    found = tensors_of(md)
    for name, value in tensors_of(expected).items():
        torch.testing.assert_close(
            found[name].cpu(), value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def built(batch, layout, rows, device):
    md = stale(layout, rows, device)
    kernels().build_into(md, on(device, batch), layout)
    assert md.num_token_non_padded == batch.num_tokens
    compare(md, batch, layout)
    return md


# the checks


def check_the_worked_example(device):
    for works in ((Work(1, 5, 7), Work(2, 130, 3)), (Work(1, 126, 3),), (Work(2, 120, 20),)):
        layout, batch = worked_example(works)
        for rows in {batch.num_tokens, batch.num_tokens + 6}:
            built(batch, layout, rows, device)


def check_random_steps(device):
    for name, layout in ROUTE.items():
        for seed in range(2 if device == "cpu" else 40):
            rng = random.Random(f"{name} {seed}")
            works = random_works(layout, rng, rng.choice((1, 7, 30)))
            batch = batch_of(layout, works, seed)
            padding = rng.choice((0, rng.randint(1, 9)))
            built(batch, layout, max(batch.num_tokens + padding, 1), device)


def check_requests_without_tokens(device):
    layout = ROUTE["twice a page"]
    none, some = Work(3, 9, 0), Work(4, 7, 5)
    last, first = Work(5, 63, 1), Work(6, 0, 2)
    for works in (
        *([none], [none, some], [some, none], [none, some, none, last, none], [some, first, last]),
        [],
    ):
        built(batch_of(layout, works), layout, 9, device)
    _, batch = worked_example([])
    built(batch, Layout(context=512, requests=3, pages=4), 3, device)


def check_several_blocks_of_rows(device):
    """Records of one block follow those of the last, and begin and end anywhere."""
    layout = ROUTE["twice a page"]
    works = [Work(2, 3, 60), Work(1, 0, 0), Work(3, 21, 22), Work(4, 0, 55), Work(7, 19, 1)]
    batch = batch_of(layout, works)
    built(batch, layout, 138 if device == "cpu" else 1000, device)


def check_many_requests(device):
    """More than are summed at a time; most of them have nothing to do."""
    layout = dataclasses.replace(ROUTE["twice a page"], requests=1400, pages=1500)
    rng = random.Random(0)
    works = [
        Work(slot, rng.randrange(14), rng.choice((0,) * 25 + (1, 2))) for slot in range(1, 1301)
    ]
    batch = batch_of(layout, works)
    assert 128 < batch.num_tokens < 160
    built(batch, layout, 160, device)


def check_slots_of_nobody(device):
    """Index -1 of the mapping is its last element, -1; unmapped slots are 0."""
    layout = ROUTE["near ratios"]
    batch = batch_of(layout, [Work(1, 30, 9), Work(2, 0, 9)])
    batch.req_to_token[1, 20:36] = -1
    batch.req_to_token[3:] = -1
    batch.out_cache_loc[4] = -1
    batch.full_to_swa[batch.req_to_token[2, :7].long()] = 0
    built(batch, layout, 20, device)


def check_wider_tables(device):
    """Columns of the request table behind the context, and a table that is a view."""
    layout, batch = worked_example()
    wide = torch.full((3, 700), 5, dtype=torch.int32)
    wide[:, 30:542] = batch.req_to_token
    batch = dataclasses.replace(on(device, batch), req_to_token=wide.to(device)[:, 30:])
    md = stale(layout, 16, device)
    kernels().build_into(md, batch, layout)
    compare(md, batch, layout)


def check_the_same_object_again(device):
    """Addresses stay, so does what the indexer writes; nothing of the last step is left."""
    layout = ROUTE["near ratios"]
    md = stale(layout, 24, device)
    picked = md.core_attn_metadata.c4_sparse_page_indices
    picked.copy_(torch.arange(picked.numel()).view_as(picked))
    before = {k: (v.data_ptr(), v.clone()) for k, v in tensors_of(md).items()}
    for works in ([Work(1, 40, 20)], [Work(2, 0, 3), Work(3, 7, 9)], []):
        batch = batch_of(layout, works, seed=len(works))
        kernels().build_into(md, on(device, batch), layout)
        for name, value in tensors_of(md).items():
            assert value.data_ptr() == before[name][0], name
            if "sparse_page" in name or "raw_indices" in name:
                assert torch.equal(value, before[name][1]), name
        before_picked = picked.clone()
        picked.fill_(77)
        compare(md, batch, layout)
        picked.copy_(before_picked)


def check_other_tensors_in_the_object(device):
    """What was prepared for an object does not outlive its tensors, their places or layout."""
    layout = ROUTE["near ratios"]
    md = stale(layout, 24, device)
    core = md.core_attn_metadata
    batches = [batch_of(layout, [Work(1, 20 * i, 9 + i)], seed=i) for i in range(5)]

    def again(batch):
        kernels().build_into(md, batch, layout)
        compare(md, batch, layout)

    again(on(device, batches[0]))
    again(on(device, batches[1]))
    old = core.page_table
    core.page_table = old.clone()
    again(on(device, batches[2]))
    # Not at a multiple of 16 bytes: what is written, then what is read.
    core.page_table = old.new_empty(old.numel() + 1)[1:].view_as(old)
    core.seq_lens_casual = old.new_empty(27)[3:]
    again(on(device, batches[3]))
    batch = on(device, batches[4])
    shifted = {
        k: torch.cat([v.new_zeros(1), v])[1:]
        for k, v in vars(batch).items()
        if isinstance(v, Tensor) and v.ndim == 1
    }
    again(dataclasses.replace(batch, **shifted))
    core.page_table.set_(old.clone())  # the same tensor over other memory
    again(on(device, batches[0]))


def check_what_does_not_fit_is_refused(device):
    layout, batch = worked_example(device=device)
    build_into = kernels().build_into
    md = empty(layout, 16, device)
    for name in ("seq_lens", "extend_seq_lens", "extend_start_loc", "req_to_token"):
        wrong = dataclasses.replace(batch, **{name: getattr(batch, name).long()})
        with pytest.raises(ValueError, match=r"torch.int64 on .* expected torch.int32"):
            build_into(md, wrong, layout)
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        build_into(md, dataclasses.replace(batch, seq_lens=batch.seq_lens.repeat(2)[::2]), layout)
    build_into(md, batch, layout)
    core = md.core_attn_metadata
    for name, other in {
        "page_table": core.page_table.T.contiguous().T,
        "swa_page_indices": core.swa_page_indices[:, :64].contiguous(),
        "c4_out_loc": core.c4_out_loc.int(),
        "positions_casual": core.positions_casual[:8],
    }.items():
        right = getattr(core, name)
        setattr(core, name, other)
        with pytest.raises(ValueError, match=rf"strides of {name} are .* expected"):
            build_into(md, batch, layout)
        setattr(core, name, right)
    with pytest.raises(ValueError, match="of page_table are"):
        build_into(md, batch, dataclasses.replace(layout, context=1024))


CHECKS = {k.removeprefix("check_"): v for k, v in dict(globals()).items() if k.startswith("check_")}


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel(name, device):
    pytest.importorskip("triton")
    if device == "cuda":
        CHECKS[name](device)
        return
    code = "import runpy; runpy.run_path(path)[name](device)"
    given = {"path": __file__, "name": f"check_{name}", "device": device}
    child().submit(exec, code, given).result()


# how it is launched


class Compiled:
    """Stands for the kernel: notes what is compiled, and what it is launched with."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *args, grid, num_warps):
        self.compiled.append(args)
        return self

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((grid, args))


def test_later_launches_go_by_the_addresses_of_now(monkeypatch):
    pytest.importorskip("triton")
    kernel = Compiled()
    monkeypatch.setattr(kernels(), "_build", kernel)
    monkeypatch.setattr(kernels(), "_launches", {})
    layout = ROUTE["near ratios"]

    def launch(md, batch):
        kernels().build_into(md, batch, layout)
        (blocks, *others), (written, *given) = kernel.launched[-1]
        assert others == [1, 1]  # a compiled kernel takes all three
        core = md.core_attn_metadata
        rows = len(core.raw_out_loc)
        assert blocks == 3 * -(-rows // 128) + 3 * -(-rows // 4)
        assert (written[0], written[3]) == (core.raw_out_loc.data_ptr(), core.page_table.data_ptr())
        assert written[-1] == md.c128_compress_metadata.plan_w.data_ptr()
        assert given[:2] == [batch.req_pool_indices.data_ptr(), batch.seq_lens.data_ptr()]
        assert given[7:11] == [rows, batch.num_tokens, len(batch.seq_lens), layout.context]
        assert given[11:] == [16, 65, 4, 8, 65, 12]
        return len(kernel.compiled)

    one, two = (batch_of(layout, [Work(i, 0, 5)], seed=i) for i in (1, 2))
    md = empty(layout, 24, "cpu")
    assert launch(md, one) == launch(md, two) == launch(empty(layout, 24, "cpu"), one) == 1
    md.core_attn_metadata.page_table = md.core_attn_metadata.page_table.clone()
    assert launch(md, one) == 1
    odd = torch.empty(24 * 12 + 1, dtype=torch.int32)[1:].view(24, 12)
    md.core_attn_metadata.page_table = odd
    assert launch(md, one) == launch(md, two) == 2
    assert launch(empty(layout, 25, "cpu"), two) == 3
    assert len(kernel.launched) == 7


@pytest.mark.cuda
def test_one_launch_and_no_synchronisation():
    layout, batch = worked_example(device="cuda")
    md = DSV4Metadata.create(batch, layout, 16)
    torch.cuda.synchronize()
    with torch.profiler.profile() as watched:
        with no_synchronisation():
            DSV4Metadata.create(batch, layout, 16, md)
        torch.cuda.synchronize()
    ran = [e.name for e in watched.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert ran == ["_build"]
