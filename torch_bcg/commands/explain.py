"""``explain pkg.module:make``: the text of `torch_bcg.explain` for what a function makes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torch_bcg.commands.misuse import MisuseError
from torch_bcg.explain import Explanation, explain
from torch_bcg.report.files import dump_to


def text_of(target: str, dump: Path | None) -> str:
    """Plans what ``make()`` returns, runs it once, and returns the explanation.

    Args:
        target: ``pkg.module:make``.
        dump: folder that the plans are written to.

    Raises:
        MisuseError: ``target`` names nothing, or ``make()`` returns something else than a callable
            and its arguments.
    """
    fn, args, kwargs = _made(target)
    with torch.inference_mode(), dump_to(dump) if dump else contextlib.nullcontext():
        planned = explain(fn)
        if not isinstance(planned, Explanation):
            return str(planned(*args, **kwargs))
        fn(*args, **kwargs)  # compiled already: what its first call finds is in the plan
        return str(explain(fn))


def _made(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise MisuseError(f"{target!r} is not of the form pkg.module:make.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise MisuseError(f"{module_name!r} cannot be imported: {error}.") from error
    make = getattr(module, name, None)
    if not callable(make):
        found = "is not there" if make is None else "is no function"
        raise MisuseError(f"{name!r} {found} in {module_name!r}.")
    match make():
        case (fn, tuple() | list() as args) if callable(fn):
            return fn, tuple(args), {}
        case (fn, tuple() | list() as args, Mapping() as kwargs) if callable(fn):
            return fn, tuple(args), kwargs
        case other:
            raise MisuseError(
                f"{target} returned something of type {type(other).__name__}: expected "
                "(callable, args) or (callable, args, kwargs)."
            )
