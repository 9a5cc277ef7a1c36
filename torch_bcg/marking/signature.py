"""What a plain function must look like to become an operator, and what is in the way if not.

Everything is checked where the function is decorated. Left to torch, a wrong fake for one would
only show as a graph break, with the function traced and recorded on the other side of it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from torch_bcg.errors import MarkError

__all__ = ["checked_fake", "place_of", "schema_of"]

_READ_OBJECTS_INSIDE = "pass tensors and numbers;\nread objects inside, by a global"
_ODD_KINDS: dict[Callable[[object], bool], str] = {
    inspect.iscoroutinefunction: "async",
    inspect.isasyncgenfunction: "async",
    inspect.isgeneratorfunction: "a generator",
}


def schema_of(fn: FunctionType, mutates_args: Iterable[str]) -> str:
    """The schema of the operator that ``fn`` can become, without a name.

    Args:
        fn: A plain function whose arguments are all annotated.
        mutates_args: Names of the parameters it writes.

    Raises:
        MarkError: An operator cannot be called like this; the message says what is in the way.
    """
    for odd, word in _ODD_KINDS.items():
        if odd(fn):
            raise _no_operator(
                fn,
                f"is {word}",
                expected="a function that returns when its work is done",
                found=word,
                fix="mark what it calls",
            )
    signature = _resolved_signature(fn)
    parameters = list(signature.parameters.values())
    mutated = _checked_mutates_args(fn, mutates_args, [p.name for p in parameters])
    for parameter in parameters:
        _check_parameter(fn, parameter, [parameter.name] if parameter.name in mutated else [])
    try:
        return _infer_schema(parameters, signature.return_annotation, mutated)
    except ValueError as error:
        returns = signature.return_annotation
        found = "no annotation" if returns is signature.empty else inspect.formatannotation(returns)
        raise _no_operator(
            fn,
            "does not say that it returns tensors",
            expected="-> None, Tensor, a number, or a tuple of them",
            found=found,
            fix="annotate what it returns",
        ) from error


def checked_fake(
    fn: FunctionType, fake: Callable[..., Any] | None, schema: str
) -> Callable[..., Any]:
    """The fake of an operator of this schema: the given one if it takes the same arguments.

    Raises:
        MarkError: It does not, or there is none though ``fn`` returns something.
    """
    if fake is None and schema.endswith("-> ()"):
        return lambda *args, **kwargs: None
    if fake is None:
        raise MarkError(
            f"{fn.__qualname__} returns tensors, and nothing says of what shape.",
            where=place_of(fn),
            expected="fake=, a function of the same arguments that returns empty tensors",
            found="no fake",
            fix="@eager_on_graph(fake=lambda x: torch.empty_like(x)),\n"
            "or write into an argument and return None",
        )
    signature = inspect.signature(fn)
    _check_takes(fn, fake, signature)

    @functools.wraps(fake)
    def filled(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher leaves out arguments that equal their default; a fake has no defaults.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return fake(*bound.args, **bound.kwargs)

    return filled


def place_of(fn: FunctionType) -> str:
    """``file:line`` of a function."""
    return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"


def _check_takes(fn: FunctionType, fake: Callable[..., Any], signature: inspect.Signature) -> None:
    try:
        own = inspect.signature(fake)
    except ValueError:
        return  # A function of torch written in C, such as torch.empty_like, does not tell.
    parameters = signature.parameters.values()
    named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        own.bind(*[None] * (len(parameters) - len(named)), **named)
    except TypeError as error:
        raise MarkError(
            f"The fake of {fn.__qualname__} does not take its arguments ({error}).",
            where=place_of(fn),
            expected=f"fake{_without_types(signature)}",
            found=f"fake{_without_types(own)}",
            fix="give the fake the same parameters in the same order",
        ) from error


def _without_types(signature: inspect.Signature) -> str:
    parameters = [
        p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def _resolved_signature(fn: FunctionType) -> inspect.Signature:
    # Tensor is often imported for type checkers only; torch resolves it without an import as well.
    names = {"torch": torch, "Tensor": torch.Tensor, **fn.__globals__}
    try:
        return inspect.signature(fn, globals=names, eval_str=True)
    except (NameError, AttributeError, SyntaxError) as error:
        raise _no_operator(
            fn,
            "has an annotation that cannot be evaluated",
            expected="types that its module knows when it runs",
            found=str(error),
            fix="import the type outside of TYPE_CHECKING",
        ) from error


def _checked_mutates_args(
    fn: FunctionType, mutates_args: Iterable[str], parameters: list[str]
) -> list[str]:
    mutated = [mutates_args] if isinstance(mutates_args, str) else list(mutates_args)
    for name in mutated:
        if name not in parameters or isinstance(mutates_args, str):
            near = difflib.get_close_matches(name, parameters, n=1)
            fix = f"did you mean ({near[0]!r},)?" if near else "name each argument that is written"
            raise MarkError(
                f"mutates_args of {fn.__qualname__} does not name what it writes.",
                where=place_of(fn),
                expected=f"a tuple of names out of {', '.join(parameters)}",
                found=repr(mutates_args),
                fix=fix,
            )
    return mutated


def _check_parameter(fn: FunctionType, parameter: inspect.Parameter, mutated: list[str]) -> None:
    name = parameter.name
    if name in ("self", "cls"):
        raise _no_operator(
            fn, "is a method", expected="tensors and numbers", found=f"an argument {name!r}"
        )
    if parameter.annotation is parameter.empty:
        raise _no_operator(
            fn,
            f"does not say what {name!r} is",
            expected="an annotation for each argument",
            found=f"{name!r} without one",
            fix=f"annotate it, as {name}: torch.Tensor",
        )
    try:
        _infer_schema([parameter], None, mutated)
    except ValueError as error:
        kinds = (
            "tensors" if mutated else "tensors, numbers, strings, dtypes, devices, lists of them"
        )
        raise _no_operator(
            fn,
            f"{'writes' if mutated else 'takes'} {name!r}, which no operator can",
            expected=kinds,
            found=str(parameter),
        ) from error


def _infer_schema(
    parameters: Sequence[inspect.Parameter], returns: object, mutated: list[str]
) -> str:
    def prototype() -> None: ...

    signature = inspect.Signature(parameters, return_annotation=returns)
    prototype.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=mutated)


def _no_operator(
    fn: FunctionType, why: str, *, expected: str, found: str, fix: str = _READ_OBJECTS_INSIDE
) -> MarkError:
    return MarkError(
        f"{fn.__qualname__} {why}, so it cannot become an operator.",
        where=place_of(fn),
        expected=expected,
        found=found,
        fix=fix,
    )
