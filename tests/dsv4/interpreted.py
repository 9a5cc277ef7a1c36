"""Triton kernels on a CPU: `interpreted` runs a launcher in a process that has the interpreter.

``TRITON_INTERPRET`` is read when Triton is imported, so this process cannot have it: one child
does, started at the first call and used by all later ones.
"""

import concurrent.futures
import functools
import importlib
import io
import multiprocessing
import os

import pytest
import torch


def interpreted(launcher, *args):
    """What a launcher returns, and its arguments after it ran: (result, args).

    Args:
        launcher: "module:function" below torch_bcg.dsv4.kernels, as "indexer:select".
        args: tensors on the CPU, numbers and None; these here are not written.
    """
    pytest.importorskip("triton")
    packed = io.BytesIO()
    torch.save(args, packed)
    answer = child().submit(_call, launcher, packed.getvalue()).result()
    return torch.load(io.BytesIO(answer))


@functools.cache
def child():
    """The process, which ends with this one."""
    return concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare
    )


def _prepare():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # what is allocated holds NaN, or the largest integer
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *rest):
        """Bounds of loops are arrays of one element, which NumPy 2.4 no longer takes for a number."""
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _call(launcher, packed):
    module, name = launcher.split(":")
    function = getattr(importlib.import_module(f"torch_bcg.dsv4.kernels.{module}"), name)
    args = torch.load(io.BytesIO(packed))
    result = function(*args)
    answer = io.BytesIO()
    torch.save((result, args), answer)
    return answer.getvalue()
