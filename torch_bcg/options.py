"""Options and environment variables, made into one frozen ``Options`` and checked on the way.

``torch.compile(..., options={...})`` wins over ``TORCH_BCG_<NAME>``, which wins over the default;
``TORCH_BCG_EXECUTE=off`` alone wins over everything. The environment is read when options are made,
never at import. What an option does is the business of the module that reads it: here a value is
only known to be one of those that exist.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch_bcg.errors import OptionError

__all__ = ["CHECKS", "Options"]

CHECKS = ("address",)
_PREFIX = "TORCH_BCG_"
_EXECUTE = re.compile(r"graphs|segments|off|segments:(\d+)(?:-(\d+))?")


def _option(
    default: object, parse: Callable[[object], object], valid: tuple[str, ...], meaning: str
) -> Any:
    """Make a field. ``parse`` raises ValueError or TypeError for what is not ``valid``."""
    return field(default=default, metadata={"parse": parse, "valid": valid, "help": meaning})


def _choice(valid: tuple[str, ...], meaning: str) -> Any:
    """Make a field that takes one of some words, the first by default."""

    def parse(value: object) -> str:
        if value not in valid:
            raise ValueError
        return str(value)

    return _option(valid[0], parse, valid, meaning)


def _count(value: object) -> int:
    if isinstance(value, str):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError
    return value


def _execute(value: object) -> str:
    found = _EXECUTE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError
    first, last = found.groups()
    if last is not None and int(last) < int(first):
        raise ValueError
    return found.group()


def _checks(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise TypeError
    names = [name.strip() if isinstance(name, str) else name for name in names]
    if names == ["off"]:
        return ()
    if not names or any(name not in CHECKS for name in names):
        raise ValueError
    return tuple(name for name in CHECKS if name in names)


def _marks(value: object) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError
    return tuple(value)


def _path(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError
    return path


@dataclass(frozen=True, slots=True)
class Options:
    """Everything one ``torch.compile(..., backend="bcg")`` can be told, checked.

    Made by ``Options.make``; the ``help`` of each field stands in its metadata. Options with equal
    fields are equal, so ``torch.compile`` shares compiled code between them.
    """

    mark: tuple[object, ...] = _option(
        (),
        _marks,
        ("an iterable of what eager_on_graph takes",),
        "what runs eagerly in this compile only: anything `eager_on_graph` takes",
    )
    execute: str = _option(
        "graphs",
        _execute,
        ("graphs", "segments", "segments:7", "segments:12-20", "off"),
        "`graphs` replays; `segments` runs the same segments unrecorded (`segments:7` and "
        "`segments:12-20` only those); `off` runs the graph as it came",
    )
    check: tuple[str, ...] = _option(
        ("address",),
        _checks,
        ("off", *CHECKS),
        "`address` compares the address of everything recorded in place, at every call; "
        "`off` does not",
    )
    outputs: str = _choice(
        ("clone", "alias"),
        "`clone` gives the caller memory of its own; `alias` is valid until the next replay",
    )
    max_programs: int = _option(
        32,
        _count,
        ("an integer from 1 up",),
        "programs of one graph and set of addresses; calls that would need one more are eager",
    )
    min_segment_kernels: int = _option(
        1,
        _count,
        ("an integer from 1 up",),
        "a segment with fewer kernels runs eagerly",
    )
    on_cut: str = _choice(
        ("accept", "warn", "error"),
        "at an operation that nobody marked and that cannot be recorded",
    )
    on_eager_call: str = _choice(
        ("warn", "count", "error"),
        "at a call that cannot be replayed; it is counted in any case",
    )
    on_moved: str = _choice(
        ("recapture", "error"),
        "at a parameter or buffer that is no longer where it was when recorded",
    )
    dump: str | None = _option(
        None,
        _path,
        ("a folder", "None"),
        "folder that graph, segments, plan and figures are written to",
    )

    @classmethod
    def make(
        cls,
        options: Mapping[str, object] | Options | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Options:
        """Check options and environment and make them one.

        Args:
            options: What ``torch.compile(..., options=...)`` was given. An ``Options`` is taken as
                it is, but for ``TORCH_BCG_EXECUTE=off``.
            environ: The environment; ``os.environ`` as it is now when left out.

        Returns:
            The frozen options.

        Raises:
            OptionError: A name or a value does not exist. The message says where it came from,
                what exists and what is nearest to it.
        """
        environ = os.environ if environ is None else environ
        found = _from_environment(environ)
        given = _given(options)
        values = {**found, **given}
        if found.get("execute") == "off":
            # The switch to turn everything off without a code change has to be the last word.
            values["execute"] = "off"
        return cls(**values)

    def unrecorded(self, index: int) -> bool:
        """Whether ``execute`` asks that the segment with this number runs unrecorded."""
        if self.execute in ("segments", "off"):
            return True
        span = _EXECUTE.fullmatch(self.execute)
        if span is None or span[1] is None:
            return False
        return int(span[1]) <= index <= int(span[2] or span[1])


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read every ``TORCH_BCG_*`` variable; marks are objects, so they have none."""
    readable = {f"{_PREFIX}{f.name.upper()}": f.name for f in fields(Options) if f.name != "mark"}
    values = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(_PREFIX):
            continue
        if variable not in readable:
            raise _unknown(variable, list(readable), "the environment")
        values[readable[variable]] = _parsed(readable[variable], text, f"variable {variable}")
    return values


def _given(options: Mapping[str, object] | Options | None) -> dict[str, Any]:
    """Check what the caller passed, name by name."""
    if isinstance(options, Options):  # made by hand, so not checked yet
        made = {f.name: getattr(options, f.name) for f in fields(Options)}
        options = {**made, "check": options.check or "off"}
    names = [f.name for f in fields(Options)]
    values = {}
    for name, value in (options or {}).items():
        if name not in names:
            raise _unknown(str(name), names, "torch.compile(..., options={...})")
        values[name] = _parsed(name, value, f"option {name!r}")
    return values


def _parsed(name: str, value: object, source: str) -> object:
    about = next(f for f in fields(Options) if f.name == name).metadata
    try:
        return about["parse"](value)
    except (TypeError, ValueError):
        raise OptionError(
            f"{value!r} is no value of {name!r}.",
            where=source,
            expected=", ".join(about["valid"]),
            found=repr(value),
            fix=_nearest(str(value), about["valid"]),
        ) from None


def _unknown(name: str, valid: list[str], where: str) -> OptionError:
    return OptionError(
        f"There is no {'variable' if name.startswith(_PREFIX) else 'option'} {name!r}.",
        where=where,
        expected=textwrap.fill(", ".join(valid), 80),
        found=name,
        fix=_nearest(name, valid),
    )


def _nearest(found: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(found, valid, n=1)
    return f"did you mean {near[0]}?" if near else "use one of those, or leave it out"
