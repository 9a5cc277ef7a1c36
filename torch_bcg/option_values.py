"""What each option may be: one function an option, from what was given to what is kept.

Every function takes a value of the caller's or the text of an environment variable, takes what it
returned before, returns something hashable, and raises ValueError or TypeError for anything else,
of which `options` makes an `OptionError`, or one that says more.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from torch_bcg.errors import OptionError

# Inductor's settings that are not the caller's: no CUDA graphs of its own, eager's random numbers.
INDUCTOR: Mapping[str, object] = {"triton.cudagraphs": False, "fallback_random": True}
CHECKS = ("address", "verify", "poison")
EXECUTE = re.compile(r"graphs|segments|off|segments:(\d+)(?:-(\d+))?")


def one_of(words: tuple[str, ...]) -> Callable[[object], str]:
    """One of these words."""

    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return parse


def count(value: object) -> int:
    """An integer from 1 up."""
    number = _integer(int(value) if isinstance(value, str) else value)
    if number < 1:
        raise ValueError
    return number


def factor(value: object) -> float:
    """A number from 1 up, infinity included."""
    number = float(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError
    if not number >= 1:  # not a number is neither
        raise ValueError
    return float(number)


def execute(value: object) -> str:
    """What `EXECUTE` matches, a span from low to high."""
    found = EXECUTE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError
    first, last = found.groups()
    if last is not None and int(last) < int(first):
        raise ValueError
    return found.group()


def checks(value: object) -> tuple[str, ...]:
    """``off`` alone, or some of `CHECKS`, which are kept in that order."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise TypeError
    names = [name.strip() if isinstance(name, str) else name for name in names]
    if names == ["off"]:
        return ()
    if not names or any(name not in CHECKS for name in names):
        raise ValueError
    return tuple(name for name in CHECKS if name in names)


def marks(value: object) -> tuple[object, ...]:
    """Any iterable but a text; what is in it is looked at when the graph is."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError
    return tuple(value)


def compiler(value: object) -> str | tuple[tuple[str, object], ...] | Callable[..., Any]:
    """``eager``, ``inductor``, settings of Inductor as pairs, or anything that can be called."""
    if isinstance(value, (Mapping, tuple)):
        return _settings(dict(value))
    if isinstance(value, str) and value in ("eager", "inductor"):
        return value
    if not callable(value):
        raise TypeError
    return value


def functions(value: object) -> tuple[Callable[..., object], ...]:
    """Any iterable of functions."""
    found = marks(value)
    if not all(map(callable, found)):
        raise TypeError
    return found  # type: ignore[return-value]


def path(value: object) -> str | None:
    """A path that is not empty, or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError
    text = os.fspath(value)
    if not isinstance(text, str) or not text:
        raise ValueError
    return text


def buckets(value: object) -> Literal["ladder"] | tuple[int, ...] | None:
    """``ladder``, sizes in rows, or None; sizes are kept in ascending order."""
    if _is_none(value):
        return None
    if isinstance(value, str):
        if value == "ladder":
            return "ladder"
        value = [int(size) for size in value.split(",")]
    if not isinstance(value, (list, tuple, range)):
        raise TypeError
    kept = tuple(sorted(count(_integer(size)) for size in value))
    if not kept or len(set(kept)) < len(kept):
        raise ValueError
    return kept


def dimension(value: object) -> tuple[str, int] | None:
    """The name of an argument and one of its dims, or None."""
    if _is_none(value):
        return None
    if isinstance(value, str):
        name, _, dim = value.rpartition(",")
        value = (name.strip(), int(dim))
    if not isinstance(value, (list, tuple)):
        raise TypeError
    name, dim = value
    return _name(name), _integer(dim)


def pads(value: object) -> tuple[tuple[str, float], ...]:
    """A mapping from name to number, kept as pairs in the order of the names."""
    if isinstance(value, str):
        value = [_pad(text) for text in value.split(",")]
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)):
        raise TypeError
    found: dict[str, float] = {}
    for name, number in pairs:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError
        if _name(name) in found or number != number:  # not a number never equals itself
            raise ValueError
        found[name] = number
    return tuple(sorted(found.items()))


def _settings(given: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Settings that Inductor has, in the order of their names, without those that are decided."""
    for name in given:
        if name in INDUCTOR:
            raise OptionError(
                f"Inductor's setting {name!r} cannot be given.",
                where="option 'inner'",
                expected=f"{INDUCTOR[name]!r}, which it is here",
                found=repr(given[name]),
                fix="leave it out",
            )
        valid = torch._inductor.list_options()
        if name not in valid:
            raise OptionError(
                f"Inductor has no setting {name!r}.",
                where="option 'inner'",
                expected="a name out of torch._inductor.list_options()",
                found=repr(name),
                fix=nearest(str(name), valid),
            )
    kept = tuple(sorted(given.items()))
    hash(kept)  # TypeError: a setting that cannot be kept
    return kept


def nearest(found: str, valid: Iterable[str]) -> str:
    """What was meant perhaps, as a hint."""
    near = difflib.get_close_matches(found, valid, n=1)
    return f"did you mean {near[0]}?" if near else "use one of those, or leave it out"


def _is_none(value: object) -> bool:
    """None, or what an environment variable says for it."""
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _pad(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name.strip(), int(number)
    except ValueError:
        return name.strip(), float(number)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    if not value:
        raise ValueError
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value
