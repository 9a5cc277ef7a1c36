"""``refresh``: brings the values of one step into the object that recorded segments read."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bcg.errors import BindingError
from torch_bcg.graph.values import Kind
from torch_bcg.metadata import registration, schema
from torch_bcg.metadata.registration import declared_kind, declared_of, kinds_of, unequal


def refresh(captured: object, live: object) -> None:
    """Copies what is read at a fixed address, rebinds the rest, and moves no address.

    Numbers declared EQUAL are compared first. COPY fields are copied in one launch per dtype,
    WRITTEN fields left alone, all others bound to what ``live`` holds. Nothing is written before
    everything was checked; nothing is read on the host. Call it on the stream that replays.

    Args:
        captured: the object that a program was recorded with, or `ProgramHandle.captured` gave.
        live: one of the same class, with this step's values.

    Raises:
        BindingError: another class; EQUAL numbers that differ; a field that is None on one side;
            a COPY field of another shape, dtype or device, or in the memory of another one; a
            field of which neither a declaration nor a compiled graph says anything.
    """
    cls = type(captured)
    recipe = _recipes.get(cls)
    if recipe is None or recipe.stamp != registration.stamp() or not recipe.fits(captured):
        recipe = _recipes[cls] = _made_for(captured)
    if type(live) is not cls or not recipe.fits(live):
        _compare(captured, live, recipe.kinds)
    if recipe.equal(captured) != recipe.equal(live):
        _compare(captured, live, recipe.kinds)
    targets, sources = recipe.copies(captured), recipe.copies(live)
    place = recipe.place_of(captured, targets)
    shapes, dtypes, devices = place.geometry
    if (
        [s.shape for s in sources] != shapes
        or [s.dtype for s in sources] != dtypes
        or [s.device for s in sources] != devices
    ):
        _compare(captured, live, recipe.kinds)
    starts = [s.data_ptr() for s in sources]
    if place.apart and place.starts.isdisjoint(starts):
        pairs = [(pick(targets), pick(sources)) for pick in place.alike]
    else:
        pairs = _apart(cls, recipe, captured, live)
    with torch.inference_mode():  # in which tensors of both kinds may be written
        for into, out_of in pairs:
            torch._foreach_copy_(into, out_of)
    recipe.rebind(captured, live)


Pick = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class _Place:
    """Where the copies of one captured object go: looked at once, for as long as it stays.

    Attributes:
        tensors: weak references to them.
        geometry: their shapes, dtypes and devices.
        starts: their addresses.
        apart: no two are one.
        alike: picks those of one dtype and device, for each there is.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self.tensors = [weakref.ref(t) for t in targets]
        self.geometry = (
            [t.shape for t in targets], [t.dtype for t in targets], [t.device for t in targets],
        )  # fmt: skip
        self.starts = {t.data_ptr() for t in targets}
        self.apart = len(self.starts) == len(targets)
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(targets):
            groups.setdefault((t.dtype, t.device), []).append(i)
        self.alike = [_picking(indices) for indices in groups.values()]

    def holds(self, targets: Sequence[Tensor]) -> bool:
        """Whether it was made for these very tensors."""
        mine = [ref() for ref in self.tensors]
        return len(mine) == len(targets) and all(map(operator.is_, mine, targets))


def _picking(indices: Sequence[int]) -> Pick:
    return lambda tensors: tuple([tensors[i] for i in indices])


@dataclass
class _Recipe:
    """What to do with the fields of objects of one class and structure.

    Attributes:
        stamp: of registrations and graphs, when it was made.
        kinds: by path; of a container or object that is bound as one there is no more.
        structure: types of what objects and containers hold, as `structure_of` gives them.
        equal, copies: what is compared, and copied.
        rebind: binds the rest.
        places: of captured objects, by id.
    """

    stamp: tuple[int, int]
    kinds: Mapping[str, Kind]
    structure: tuple[object, ...]
    structure_of: schema.Getter
    equal: schema.Getter
    copies: schema.Getter
    rebind: Callable[[Any, Any], None]
    places: dict[int, _Place]

    def fits(self, instance: object) -> bool:
        """Whether an object has the structure that this was made for."""
        return schema.fits(instance, self.structure_of, self.structure)

    def place_of(self, captured: object, targets: Sequence[Tensor]) -> _Place:
        """Where an object's copies go."""
        place = self.places.get(id(captured))
        if place is None or not place.holds(targets):
            if len(self.places) >= _MOST_PLACES:
                self.places.clear()
            place = self.places[id(captured)] = _Place(targets)
        return place


_MOST_PLACES = 256  # captured objects of one class: more than any ladder has
_recipes: dict[type, _Recipe] = {}


def _made_for(captured: object) -> _Recipe:
    kinds = _kinds(captured)
    copied = [p for p, kind in kinds.items() if kind == "COPY"]
    copied = [p for p in copied if schema.getter(p)(captured) is not None]

    def asked(path: str) -> str:
        if path not in kinds:
            return ""
        none = f"x.{path} is None"
        return f"({none}, isinstance(x.{path}, Tensor))" if kinds[path] == "COPY" else none

    structure_of = schema.structured(captured, asked)
    return _Recipe(
        registration.stamp(),
        kinds,
        structure_of(captured),
        structure_of,
        schema.tuple_of(f"x.{p}" for p, kind in kinds.items() if kind == "EQUAL"),
        schema.tuple_of(f"x.{p}" for p in copied),
        _rebinding([p for p, kind in kinds.items() if kind in _BOUND]),
        {},
    )


_BOUND: tuple[Kind, ...] = ("REBIND", "FOLLOWS")


def _kinds(captured: object) -> dict[str, Kind]:
    """What becomes of each field: declared, else shown by graphs, else an error.

    A container of which nothing is copied is bound as one, and so is an object declared so.
    """
    cls = type(captured)
    declared = declared_of({p: type(part) for p, part in schema.parts(captured).items()})
    shown = kinds_of(cls)
    found: dict[str, Kind] = {}

    def of_leaf(path: str, value: object) -> Kind:
        kind: Kind | None = declared_kind(path, declared)
        if kind is not None:
            return kind
        if not isinstance(value, Tensor):
            return "FOLLOWS"
        if shown is not None and path in shown:
            return shown[path]
        raise BindingError(
            f"Nothing is known of {cls.__name__}.{path}.",
            where=f"refresh of {cls.__name__}",
            expected="a declaration, or a graph that was compiled with such an object",
            found="neither" if shown is None else "graphs that met no such field",
            fix="Call what was compiled first, or declare it with register_metadata_binding.",
        )

    def is_bound_as_one(path: str) -> bool:
        inner = [kind for name, kind in declared.items() if schema.within(name, path)]
        return declared.get(path) == "REBIND" and set(inner) == {"REBIND"}

    def search(path: str, value: object) -> None:
        inside = list(schema.items(value, path))
        if path and (not inside or is_bound_as_one(path)):
            found[path] = of_leaf(path, value)
            return
        before = len(found)
        for inner, held in inside:
            search(inner, held)
        mine = list(found)[before:]
        if isinstance(value, (list, tuple, dict)) and all(found[p] in _BOUND for p in mine):
            for p in mine:
                del found[p]
            found[path] = "REBIND"

    search("", captured)
    return found


def _compare(captured: object, live: object, kinds: Mapping[str, Kind]) -> None:
    """Says what keeps two objects apart, if it matters.

    Raises:
        BindingError: it does.
    """
    cls = type(captured)
    todo: list[tuple[str, Any, Any]] = [("", captured, live)]
    while todo:
        path, mine, other = todo.pop(0)
        kind = kinds.get(path)
        if kind == "EQUAL" and mine != other:
            raise unequal(cls, path, mine, other)
        if (mine is None) != (other is None):
            raise _unlike(cls, path, _said(mine), _said(other))
        if kind == "COPY" and _said(mine) != _said(other):
            raise _unlike(cls, path, _said(mine), _said(other))
        if kind is None:
            ours, theirs = (list(schema.items(x, path)) for x in (mine, other))
            if type(mine) is not type(other) or [p for p, _ in ours] != [p for p, _ in theirs]:
                raise _unlike(cls, path, _said(mine), _said(other))
            todo += [(p, a, b) for (p, a), (_, b) in zip(ours, theirs, strict=True)]


def _said(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}".removeprefix("torch.")
    inside = [path for path, _ in schema.items(value, "")]
    return f"a {type(value).__name__} of {', '.join(inside)}" if inside else repr(value)


def _unlike(cls: type, path: str, expected: str, found: str) -> BindingError:
    name = f"{cls.__name__}.{path}" if path else cls.__name__
    return BindingError(
        f"{name} cannot be refreshed.",
        where=f"refresh of {name}",
        expected=expected,
        found=found,
        fix="Build it at the sizes that were captured: widths from capacity, not from the batch.",
    )


def _apart(
    cls: type, recipe: _Recipe, captured: object, live: object
) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Pairs to copy where some of the memory is one: each target once, no source overwritten.

    Raises:
        BindingError: two fields are one tensor in ``captured`` and two in ``live``.
    """
    into: dict[int, tuple[str, Tensor, Tensor]] = {}
    paths = [p for p, kind in recipe.kinds.items() if kind == "COPY"]
    for path in paths:
        t, s = schema.getter(path)(captured), schema.getter(path)(live)
        if t is None or not t.numel():
            continue
        first, _, other = into.setdefault(t.data_ptr(), (path, t, s))
        if other.data_ptr() != s.data_ptr():
            raise _unlike(cls, path, f"one tensor with {first}, as captured", "two tensors")
    pairs = [(t, s) for _, t, s in into.values() if t.data_ptr() != s.data_ptr()]
    starts = {t.data_ptr() for t, _ in pairs}
    targets = [t for t, _ in pairs]
    sources = [s.clone() if s.data_ptr() in starts else s for _, s in pairs]
    return [(pick(targets), pick(sources)) for pick in _Place(targets).alike]


def _rebinding(paths: Sequence[str]) -> Callable[[Any, Any], None]:
    """Binds fields of one object to what another holds there."""
    lines = []
    for path in paths:
        if path.endswith("]"):
            lines.append(f"put(x, {path!r}, y.{path})")
        else:
            holder, _, name = path.rpartition(".")
            lines.append(f"bind(x{'.' if holder else ''}{holder}, {name!r}, y.{path})")
    body = "".join(f"    {line}\n" for line in lines) or "    pass\n"
    namespace: dict[str, Any] = {"bind": object.__setattr__, "put": schema.put}
    exec(compile(f"def rebind(x, y):\n{body}", "<rebinding>", "exec"), namespace)
    function: Callable[[Any, Any], None] = namespace["rebind"]
    return function
