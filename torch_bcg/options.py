"""Options and environment variables, made into one frozen ``Options`` and checked on the way.

``torch.compile(..., options={...})`` wins over ``TORCH_BCG_<NAME>``, which wins over the default;
``TORCH_BCG_EXECUTE=off`` alone wins over everything. The environment is read when options are made,
never at import. What an option does is the business of the module that reads it: here a value is
only known to be one of those that exist.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch_bcg import option_values
from torch_bcg.errors import OptionError
from torch_bcg.option_values import CHECKS

__all__ = ["CHECKS", "Options"]

_PREFIX = "TORCH_BCG_"


def _option(
    default: object, parse: Callable[[object], object], valid: tuple[str, ...], meaning: str
) -> Any:
    """Make a field. ``parse`` raises ValueError or TypeError for what is not ``valid``."""
    return field(default=default, metadata={"parse": parse, "valid": valid, "help": meaning})


def _choice(valid: tuple[str, ...], meaning: str) -> Any:
    """Make a field that takes one of some words, the first by default."""
    return _option(valid[0], option_values.one_of(valid), valid, meaning)


@dataclass(frozen=True, slots=True)
class Options:
    """Everything one ``torch.compile(..., backend="bcg")`` can be told, checked.

    Made by ``Options.make``; the ``help`` of each field stands in its metadata. Options with equal
    fields are equal, so ``torch.compile`` shares compiled code between them.
    """

    mark: tuple[object, ...] = _option(
        (),
        option_values.marks,
        ("an iterable of what eager_on_graph takes",),
        "what runs eagerly in this compile only: anything `eager_on_graph` takes",
    )
    inner: str | tuple[tuple[str, object], ...] | Callable[..., Any] = _option(  # noqa: RUF009  # hashable, as all values are
        "eager",
        option_values.compiler,
        (
            "eager",
            "inductor",
            "a mapping of Inductor's settings",
            "a function, called as a backend of torch.compile is",
        ),
        "compiler of each recorded segment: `eager` records the operations as they are, `inductor` "
        "fuses them; segments that are alike are compiled once",
    )
    execute: str = _option(
        "graphs",
        option_values.execute,
        ("graphs", "segments", "segments:7", "segments:12-20", "off"),
        "`graphs` replays; `segments` runs the same segments unrecorded (`segments:7` and "
        "`segments:12-20` only those); `off` runs the graph as it came",
    )
    check: tuple[str, ...] = _option(
        ("address",),
        option_values.checks,
        ("off", *CHECKS),
        "`address` compares the address of everything recorded in place, at every call; "
        "`verify` runs each replay again eagerly and names what differs; "
        "`poison` fills what nobody may read; one or several, or `off`",
    )
    outputs: str = _choice(
        ("clone", "alias"),
        "`clone` gives the caller memory of its own; `alias` is valid until the next replay",
    )
    buckets: Literal["ladder"] | tuple[int, ...] | None = _option(
        None,
        option_values.buckets,
        ("None", "ladder", "distinct integers from 1 up, as in [64, 128] or 64,128"),
        "sizes in rows that calls are padded to (`torch_bcg.warm_up` records them); "
        "`None`: exact shapes",
    )
    bucket_dim: tuple[str, int] | None = _option(
        None,
        option_values.dimension,
        ("None", 'an argument and a dim, as in ("input_ids", 1) or input_ids,1'),
        "what is padded, where more than one size varies",
    )
    rows: str = _choice(
        ("facts", "independent"),
        "`independent` promises that no row depends on a later one, where facts cannot show it",
    )
    pad: tuple[tuple[str, float], ...] = _option(
        (),
        option_values.pads,
        ('a mapping from argument to number, as in {"slots": 0} or slots=0',),
        "value of padded rows; 0 for what is not named",
    )
    max_padding: float = _option(
        2.0,
        option_values.factor,
        ("a number from 1 up",),
        "a call padded to more than 32 rows and this many times its own is eager",
    )
    max_programs: int = _option(
        32,
        option_values.count,
        ("an integer from 1 up",),
        "programs of one graph and set of addresses, beside those of the ladder; calls that would "
        "need one more are eager",
    )
    min_segment_kernels: int = _option(
        1,
        option_values.count,
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
    passes: tuple[Callable[..., object], ...] = _option(
        (),
        option_values.functions,
        ("an iterable of functions from a plan and its context to a plan",),
        "passes over the plan after `torch_bcg.passes.PASSES`, in this order",
    )
    dump: str | None = _option(
        None,
        option_values.path,
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

    @property
    def opens(self) -> bool:
        """Whether a replay may begin before all addresses are compared.

        What looks at a segment, or hands out its memory, would notice one that runs in vain.
        """
        return self.check == ("address",) and self.outputs == "clone"

    def unrecorded(self, index: int) -> bool:
        """Whether ``execute`` asks that the segment with this number runs unrecorded."""
        if self.execute in ("segments", "off"):
            return True
        span = option_values.EXECUTE.fullmatch(self.execute)
        if span is None or span[1] is None:
            return False
        return int(span[1]) <= index <= int(span[2] or span[1])


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read every ``TORCH_BCG_*`` variable; marks and passes are objects, so they have none."""
    readable = {
        f"{_PREFIX}{f.name.upper()}": f.name
        for f in fields(Options)
        if f.name not in ("mark", "passes")
    }
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
    except OptionError:
        raise
    except (TypeError, ValueError):
        raise OptionError(
            f"{value!r} is no value of {name!r}.",
            where=source,
            expected=", ".join(about["valid"]),
            found=repr(value),
            fix=option_values.nearest(str(value), about["valid"]),
        ) from None


def _unknown(name: str, valid: list[str], where: str) -> OptionError:
    return OptionError(
        f"There is no {'variable' if name.startswith(_PREFIX) else 'option'} {name!r}.",
        where=where,
        expected=textwrap.fill(", ".join(valid), 80),
        found=name,
        fix=option_values.nearest(name, valid),
    )
