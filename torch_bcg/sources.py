"""Where the arguments of a graph come from, as Dynamo says it: names, metadata objects behind them.

Everything of Dynamo's that this takes, and that is not public, is asked for here alone, each in a
function that says what it gives.
"""

from __future__ import annotations

import ast
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from torch_bcg.errors import BindingError
from torch_bcg.metadata.instances import Guard, Instance, Read, instance_of
from torch_bcg.metadata.registration import (
    BOUND,
    REGISTERED,
    bound_objects,
    declared_of,
    let_vary,
    registrations_of,
    shown_of,
)
from torch_bcg.metadata.schema import container_of, contents_of, kind_at, leaves, outline_of


def transaction() -> Any | None:
    """Dynamo's translation of the frame that it compiles now; None outside a compilation."""
    return InstructionTranslator.current_tx() if TracingContext.try_get() else None


def local_scope() -> Mapping[str, Any]:
    """The local variables of the frame that Dynamo compiles now, by name."""
    frame = transaction()
    return {} if frame is None else frame.output.local_scope


def source_text(placeholder: fx.Node) -> str | None:
    """``L['md'].core.slots``: where an argument comes from; None if Dynamo does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    return None if source is None else _text_of(source)


def _text_of(source: Any) -> str:
    name = getattr(source, "name", None)
    text = name() if callable(name) else name  # by version of torch
    if not isinstance(text, str):
        raise _silent(f"the name of a source, of {type(source).__name__}", repr(text))
    return text


def _ways(source: Any) -> Iterator[str]:
    """The texts of all that a source is reached through, the nearest first."""
    while (source := getattr(source, "base", None)) is not None:
        yield _text_of(source)


class _Seen(NamedTuple):
    """An argument of the graph, or what a guard looks at."""

    placeholder: str  # "" of a guard
    guard: Guard
    text: str
    source: Any


def _sources(gm: fx.GraphModule) -> list[_Seen]:
    """Arguments, then what guards look at."""
    arguments = [(p.name, getattr(p, "_dynamo_source", None)) for p in _placeholders(gm)]
    if arguments and all(source is None for _, source in arguments):
        raise _silent("_dynamo_source of placeholders", "no such attribute")
    found = [_Seen(name, "", _text_of(s), s) for name, s in arguments if s is not None]
    found += [_Seen("", _compared_by(g), _text_behind(g), g.originating_source) for g in _guards()]
    return [seen for seen in found if seen.source is not None]


def _compared_by(guard: Any) -> Guard:
    """What a guard compares of what it looks at."""
    kind = guard.create_fn_name()
    if kind in ("EQUALS_MATCH", "CONSTANT_MATCH", "ID_MATCH", "BOOL_MATCH", "NONE_MATCH"):
        return "value"
    return "type" if kind in ("TYPE_MATCH", "NOT_NONE_MATCH", "HASATTR") else "other"


def _text_behind(guard: Any) -> str:
    """The text of what a guard looks at; of ``hasattr``, of the attribute that is asked for."""
    text = _text_of(guard.originating_source) if guard.originating_source is not None else ""
    if guard.create_fn_name() != "HASATTR":
        return text
    member = getattr(guard.originating_source, "member", None)  # its last part in older versions
    asked = getattr(guard.create_fn, "keywords", {}).get("attr")
    if asked is None and member is None:
        raise _silent("which attribute HASATTR asks for", repr(guard.create_fn))
    return text if asked is None else f"{text}.{asked}"


def _guards() -> list[Any]:
    """What Dynamo compares before it calls the graph that it makes now."""
    guards = getattr(TracingContext.get().guards_context, "dynamo_guards", None)
    if guards is None:
        raise _silent("guards_context.dynamo_guards", "no such attribute")
    # Of hooks Dynamo says more than it looks at.
    found = [g for g in guards if "HOOKS" not in getattr(g, "create_fn_name", str)()]
    for guard in found:
        if not hasattr(guard, "create_fn_name") or not hasattr(guard, "originating_source"):
            raise _silent("create_fn_name and originating_source of a guard", repr(type(guard)))
    return found


# As versions of torch write it: through type() or __class__, bases, the dict or a copy of that.
_OF_CLASS = re.compile(
    r"(?:dict\()?(?:type\((?P<of>.*)\)|(?P<its>.*)\.__class__)(?:\.__mro__\[\d+\])?"
    r"(?:\.__dict__\)?\['(?P<key>\w+)'\]|\.(?P<name>\w+))"
)


class Link(NamedTuple):
    """One step on a way through a module.

    Attributes:
        kind: an attribute; what a container has under a key or at a place; the key that a dict, or
            what a set, has at a place; what a dict has under that key.
        key: the name, the key or the place.
    """

    kind: Literal["attribute", "item", "key", "value"]
    key: Any

    def __str__(self) -> str:
        return f".{self.key}" if self.kind == "attribute" else f"[{self.key!r}]"

    def of(self, holder: Any) -> Any:
        """Where it leads; what was derived from a container of Python is not asked itself."""
        if self.kind == "attribute":
            return getattr(holder, self.key)
        base, key = container_of(holder), self.key
        if self.kind != "item":
            key = [*base.__iter__(holder)][key]
        return key if self.kind == "key" else base.__getitem__(holder, key)


Way = tuple[Link, ...]


class _Missing:
    """What is where a way leads nowhere."""


MISSING = _Missing()


@dataclass(frozen=True)
class Premises:
    """What Dynamo made a graph for, of the module whose method it compiled.

    Instances that share the graph differ in which objects they have, but for functions and such.

    Attributes:
        tensors: placeholders -> where in the module they are, see `value_in`.
        outlines: where guards look in it -> what tells of what is there, and what that told.
        shared: where the module has what it has elsewhere as well -> where that is.
        unknown: what nobody can tell of it, "" if all is told.
    """

    tensors: Mapping[str, Way] = field(default_factory=dict)
    outlines: Mapping[Way, tuple[Callable[[Any], object], object]] = field(default_factory=dict)
    shared: Mapping[Way, Way] = field(default_factory=dict)
    unknown: str = ""


def premises_of(gm: fx.GraphModule) -> Premises:
    """Of Dynamo's own graph, while Dynamo calls the backend; else there are none."""
    if transaction() is None:
        return Premises()
    try:
        guards = [(_text_behind(g), g.create_fn_name()) for g in _guards()]
    except BindingError as error:  # nobody may ever call the program directly
        return Premises(unknown=error.expected)
    texts = {p.name: text for p in _placeholders(gm) if (text := source_text(p))}
    root, module = _module_of_frame()
    if module is None:
        of_modules = re.compile(r".*_(parameters|buffers|modules)\[")
        lost = any(map(of_modules.match, [*texts.values(), *(text for text, _ in guards)]))
        return Premises(unknown="which module the code belongs to" if lost else "")
    tensors = {n: way for n, t in texts.items() if root in t and (way := _way_of(t, root))}
    seen: dict[Way, set[str]] = {}
    for text, kind in guards:
        way = _way_of(text, root) if root in text else ()
        if way is None:
            return Premises(unknown=text)
        if way:
            seen.setdefault(way, set()).update([kind] if _of_instance(text) == text else [_CLASS])
    values = {way: value_in(module, way) for way in (*tensors.values(), *seen)}
    arguments = {id(values[way]) for way in tensors.values()}
    outlines: dict[Way, tuple[Callable[[Any], object], object]] = {}
    shared: dict[Way, Way] = {}
    first: dict[int, Way] = {id(module): ()}
    for way in (*tensors.values(), *sorted(seen, key=lambda way: _TWICE in seen[way])):
        value, kinds = values[way], seen.get(way, set())
        other = first.setdefault(id(value), way)
        tied = _TWICE in kinds or isinstance(value, (torch.Tensor, torch.nn.Module))
        if tied and way != other:  # else its twin is not the module's
            shared[way], kinds = other, kinds - {_TWICE}
        told_by = _told_by(value, kinds, id(value) in arguments)
        if told_by is None:
            return Premises(unknown=text_of(way))
        outlines[way] = told_by, told_by(value)
    return Premises(tensors, outlines, shared)


_TWICE, _CLASS = "DUPLICATE_INPUT", "of a class"
# Guards that say no more of a value than that, or of its class or attributes.
_OF_TYPE = {"TYPE_MATCH", "NOT_NONE_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"}


def _told_by(value: object, kinds: set[str], argument: bool) -> Callable[[Any], object] | None:
    """What tells whether there is the same in what guards of some kinds compare; None: nothing."""
    if kinds <= _OF_TYPE or type(value) in (type(None), type(...), type(NotImplemented)):
        return type
    if isinstance(value, torch.Tensor):
        return _tensor if argument else _constant
    if outline_of(value) is not type(value):
        return whole if kinds & {"EQUALS_MATCH", "CONSTANT_MATCH"} else contents_of
    if _CLASS in kinds:
        return type
    return _identity if value is not MISSING and _identity(value) else None


def whole(value: object) -> object:
    """All that is in a value."""
    return contents_of(value, whole=True)


def _tensor(x: object) -> object:
    """What every tensor in its place has to have; sizes are the program's."""
    return isinstance(x, torch.Tensor) and (type(x), x.requires_grad, x.dtype, x.device)


def _constant(x: object) -> object:
    """The same of a tensor that is no argument."""
    return _tensor(x) and (_tensor(x), getattr(x, "shape", None))


def _identity(x: Any) -> object:
    """Which object it is, held by nobody here, of a function its code; None if that is no use."""
    if isinstance(x, types.MethodType):
        return _identity(x.__func__)
    x = x.__code__ if isinstance(x, types.FunctionType) else x
    try:
        return id(x), weakref.ref(x)
    except TypeError:
        return None


def along(module: object, way: Way) -> Iterator[object]:
    """A module, and what a way leads to, link by link; the last is MISSING if there is nothing."""
    value = module
    yield value
    for link in way:
        try:
            value = link.of(value)
        except Exception:  # attributes of anybody's objects raise anything
            value = MISSING
        yield value
        if value is MISSING:
            return


def value_in(module: object, way: Way) -> object:
    """What a module has where a way leads."""
    return [*along(module, way)][-1]


def text_of(way: Way) -> str:
    """A way as it is written."""
    return "".join(map(str, way)).removeprefix(".")


def _way_of(text: str, root: str) -> Way | None:
    """From a module to what Dynamo's text says; None if it cannot be followed step by step.

    Args:
        text: may say what a class has until an instance has its own. What else is reached through a
            class has no way, (): classes are not compared.
        root: the text of the module.
    """
    text = _of_instance(text).replace(root, "M")
    try:
        tree = ast.parse(text, mode="eval").body
        if "type(" in text or "__class__" in text:  # maybe in a key
            return () if any(map(_is_class, ast.walk(tree))) else _links(tree)
        return _links(tree)
    except (SyntaxError, ValueError):
        return None


def _is_class(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Name("type")) | ast.Attribute(ast.Attribute(_, "__class__")):
            return True
    return False


def _links(node: ast.expr) -> Way:
    match node:
        case ast.Name("M"):
            return ()
        case ast.Attribute(holder, name):
            return *_links(holder), Link("attribute", name)
        case ast.Call(ast.Name("getattr"), [holder, ast.Constant(name)]):
            return *_links(holder), Link("attribute", name)
        case ast.Subscript(
            ast.Call(
                ast.Name("list"), [ast.Call(ast.Attribute(ast.Name("dict"), "keys"), [holder])]
            )
            | ast.Call(ast.Name("list"), [holder]),
            ast.Constant(place),
        ):
            return *_links(holder), Link("key", place)
        case ast.Subscript(holder, key) | ast.Call(
            ast.Attribute(ast.Name("dict" | "list"), "__getitem__"), [holder, key]
        ):
            way = _links(holder)
            return *way, _item(way, key)
    raise ValueError(ast.unparse(node))


def _item(holder: Way, key: ast.expr) -> Link:
    match key:
        case ast.Attribute(ast.Name("torch"), name):  # a dtype
            return Link("item", getattr(torch, name))
        case ast.Subscript(ast.Call()):  # list(dict.keys(X))[n] in X
            inside = _links(key)
            if inside[:-1] == holder and inside[-1].kind == "key":
                return Link("value", inside[-1].key)
    return Link("item", ast.literal_eval(key))


def _of_instance(text: str) -> str:
    """``dict(type(X).__dict__)['n']``, of a class until an instance has its own -> ``X.n``."""
    found = _OF_CLASS.fullmatch(text)
    if found is None:
        return text
    return f"{found['of'] or found['its']}.{found['key'] or found['name']}"


def _module_of_frame() -> tuple[str, object]:
    """Dynamo's text of the module whose method it compiles now, and that; or "" and None.

    Resumed code, and that of a wrapper, have it elsewhere than in their first argument.
    """
    frame, scope = transaction(), local_scope()
    first = frame.f_code.co_varnames[:1] if frame is not None else ()
    for name in (*first, "self", "fn"):
        if isinstance(scope.get(name), torch.nn.Module):
            return f"L['{name}']", scope[name]
    for name, given in scope.items():  # of a wrapper that takes *args
        if isinstance(given, tuple) and given and isinstance(given[0], torch.nn.Module):
            return f"L['{name}'][0]", given[0]
    return "", None


def _placeholders(gm: fx.GraphModule) -> Sequence[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _silent(what: str, found: str) -> BindingError:
    return BindingError(
        "This torch does not say where the arguments of a graph come from.",
        where="torch_bcg.sources",
        expected=what,
        found=found,
        fix="Report the version of torch. Without register_metadata_binding all else works.",
    )


def _object_at(text: str, scope: dict[str, Any]) -> object:
    """The object behind a text, which is Python; None where it needs names of Dynamo's own."""
    try:
        return eval(text, dict(scope))
    except Exception:  # attributes and items of anybody's objects raise anything
        return None


def metadata_behind(gm: fx.GraphModule) -> tuple[Instance, ...]:
    """The objects of registered classes that the graph reads, and which of their fields.

    Args:
        gm: Dynamo's own graph, while Dynamo calls the backend.

    Raises:
        BindingError: an attribute is read that is no field, or torch says no more where an argument
            comes from.
    """
    frame = transaction()
    if frame is None or not REGISTERED:
        return ()
    scope = {"L": frame.output.local_scope, "G": frame.output.global_scope}
    objects: dict[str, object] = {}
    found: dict[int, tuple[object, list[Read]]] = {}
    bound = {id(x) for x in bound_objects()}
    for seen in _sources(gm):
        # An argument lies in an object; a guard may look at the object itself.
        ways = [*_ways(seen.source)] if seen.placeholder else [seen.text, *_ways(seen.source)]
        for text in ways:
            if text not in objects:
                objects[text] = _object_at(text, scope)
            if registrations_of(type(objects[text])):
                path = seen.text.removeprefix(text).removeprefix(".")
                reads = found.setdefault(id(objects[text]), (objects[text], []))[1]
                reads.append(Read(path, seen.placeholder, seen.text, seen.guard))
    return tuple(
        instance_of(metadata, reads, id(metadata) in bound) for metadata, reads in found.values()
    )


def check_apart(gm: fx.GraphModule) -> None:
    """Refuses a tensor of a bound object that reaches the graph in another way as well.

    Dynamo takes the two for one, and would not see that another call brings two.

    Args:
        gm: Dynamo's own graph, while Dynamo calls the backend.

    Raises:
        BindingError: there is one, and the graph reads the object.
    """
    frame = transaction()
    bound = bound_objects() if frame is not None else []
    if frame is None or not bound:
        return
    scope = {"L": frame.output.local_scope, "G": frame.output.global_scope}
    texts = {_text_of(g.originating_source) for g in _guards() if g.originating_source}
    read = [_object_at(t[: t.index(BOUND)] + BOUND, scope) for t in texts if BOUND in t]
    others = [(t, _object_at(t, scope)) for p in _placeholders(gm) if (t := source_text(p))]
    others = [(text, x) for text, x in others if BOUND not in text]
    others += [(name, x) for name, x in tree_leaves_of(frame.output.local_scope)]
    for metadata in bound:
        if any(metadata is x for x in read):
            fields = {id(x): path for path, x in leaves(metadata).items()}
            for text, x in others:
                if isinstance(x, torch.Tensor) and id(x) in fields:
                    raise _twice(f"{type(metadata).__name__}.{fields[id(x)]}", text)


def tree_leaves_of(scope: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Leaves of all variables, in containers as well, by the name of the variable."""
    return [(name, leaf) for name, x in scope.items() for leaf in pytree.tree_leaves(x)]


def _twice(name: str, text: str) -> BindingError:
    return BindingError(
        f"{name} is also an argument or a tensor of the model.",
        where=f"{name}, {text}",
        expected="tensors of a call that were there before its metadata was bound",
        found="one that was read from the bound object",
        fix="Take it from the object before bind_metadata, or pass a view: tensor.view_as(tensor)",
    )


def let_integers_vary(instances: Sequence[Instance]) -> None:
    """Tells Dynamo of integers that differ between graphs: from the next one on they vary."""
    for instance in instances:
        declared = declared_of(instance.parts)
        for path, text in instance.constants.items():
            value = instance.numbers.get(path)
            if type(value) is not int or kind_at(path, declared) == "EQUAL":
                continue
            seen = [shown.constants.get(path, value) for shown in shown_of(instance.cls)]
            if any(other != value for other in seen):
                let_vary(registrations_of(instance.cls)[0], text)
