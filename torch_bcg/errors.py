"""Every error and warning of the package, and the one shape their messages have.

A message says what happened, then where, what was expected, what was found and what to do. All
five are required keywords, so no error can be raised without them; they stay readable as
attributes, so a test or a tool never parses text. Nothing here decides when to raise.
"""

from __future__ import annotations

__all__ = [
    "BCGError",
    "BCGWarning",
    "BindingError",
    "CaptureError",
    "CheckError",
    "CutError",
    "EagerCallError",
    "HostReadError",
    "MarkError",
    "MisfitError",
    "MovedError",
    "OptionError",
    "OutputError",
    "StreamError",
]


class BCGError(RuntimeError):
    """Base of everything ``torch_bcg`` raises.

    Args:
        what: One sentence with the names involved.
        where: Segment, node, option or ``file:line``.
        expected: What would have been right.
        found: What was there instead.
        fix: What to do about it, with the option or call to use.
    """

    def __init__(self, what: str, *, where: str, expected: str, found: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        """The whole message, one part a line."""
        parts = {
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "to do": self.fix,
        }
        lines = [f"  {name}: {_indented(text)}" for name, text in parts.items()]
        return "\n".join([self.what, *lines])

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when an error crosses a process boundary (Exception keeps only args)."""
        parts = (self.what, self.where, self.expected, self.found, self.fix)
        return _rebuild, (type(self), *parts)


class OptionError(BCGError, ValueError):
    """An option or a ``TORCH_BCG_*`` variable has an unknown name or a value it cannot take.

    Raised when the backend is called or the options are made, before anything is compiled.
    """


class MarkError(BCGError, TypeError):
    """``eager_on_graph`` or ``options={"mark": ...}`` was given something that cannot be marked.

    Raised while the mark is made: a function whose arguments are no tensors and numbers, a
    ``mutates_args`` name that is no parameter, an operator that does not exist.
    """


class BindingError(BCGError):
    """Metadata is declared, bound or refreshed in a way that would be silently wrong.

    Raised when a class is registered, when a graph that reads it is compiled, when an object is
    bound, and by a refresh before it has written anything.
    """


class CutError(BCGError):
    """The graph was cut at an operation that nobody marked, and ``on_cut="error"`` is set.

    Raised when the plan is made, and after the probe for cuts that only a real run shows.
    """


class CaptureError(BCGError):
    """A segment could not be recorded.

    Raised while a plan is turned into a program; nothing of the caller's memory has changed. Also
    at a replay on the host whose memory was freed, a fault of this package.

    Attributes:
        segment: Index of the segment, -1 if unknown.
        node: Name of the node that failed, "" if unknown.
        out_of_memory: The device had none left.
    """

    segment: int = -1
    node: str = ""
    out_of_memory: bool = False


class CheckError(BCGError):
    """A check found that a replay is wrong: a segment gives another result than run eagerly.

    Raised during the call, with ``check="verify"`` or ``check="poison"``, before its outputs are
    returned; what earlier segments wrote stays written.
    """


class HostReadError(BCGError):
    """A recorded segment read a tensor's value on the host.

    Raised by the host recorder at replay, where a captured CUDA graph would go on with the value
    of its capture.
    """


class OutputError(BCGError):
    """The real output of a marked function differs from that of its ``fake``.

    Raised when shape or dtype differ, or when the output aliases memory that nobody
    planned, while a recorded segment reads it.
    """


class StreamError(BCGError):
    """Work on a side stream is not joined where a recorded segment ends.

    Raised when the plan is made, for a fork that Dynamo sees and a cut that is known by then.
    """


class MovedError(BCGError):
    """A tensor recorded at its own address is now somewhere else, and ``on_moved="error"`` is set.

    Raised before any segment runs that reads the old address.
    """


class MisfitError(BCGError):
    """A program that is called directly is not for this call; the compiled function finds which is.

    It was freed; a tensor moved or was replaced; marks, settings of torch or numbers are others; an
    argument has another shape. Raised before anything that the same call of the compiled function
    would do twice.

    Attributes:
        program: the handle that was called.
    """

    program: object = None


class EagerCallError(BCGError):
    """A call could not be replayed, and ``on_eager_call="error"`` is set.

    Raised before anything of the caller's is written. Probe and warming calls never raise it.
    """


class BCGWarning(UserWarning):
    """Everything ``torch_bcg`` warns of, so that one filter reaches all of it."""


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _rebuild(
    cls: type[BCGError], what: str, where: str, expected: str, found: str, fix: str
) -> BCGError:
    return cls(what, where=where, expected=expected, found=found, fix=fix)


for _name in __all__:
    # Tracebacks, logs and pickles show the path users import from, not this file.
    globals()[_name].__module__ = "torch_bcg"
