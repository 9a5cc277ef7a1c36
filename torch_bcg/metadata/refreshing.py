"""``refresh``: brings the values of one step into the object that recorded segments read."""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from torch_bcg.errors import BindingError
from torch_bcg.graph.values import Kind
from torch_bcg.metadata import registration, schema
from torch_bcg.metadata.comparing import refuse_if_unlike, same_geometry, unlike
from torch_bcg.metadata.registration import declared_of, kinds_of
from torch_bcg.metadata.schema import Steps


def refresh(captured: object, live: object) -> None:
    """Copies what is read at a fixed address, rebinds the rest, and moves no address.

    Numbers declared EQUAL are compared first. COPY fields are copied in one launch per dtype,
    WRITTEN fields left alone, all others bound to what ``live`` holds. Nothing is written before
    everything was checked; nothing is read on the host. Call it on the stream that replays.

    Args:
        captured: the object that a program was recorded with, or `ProgramHandle.captured` gave.
        live: one of the same class, with this step's values. Values that lie in the memory of
            other fields of ``captured`` are cloned first.

    Raises:
        BindingError: another class; EQUAL numbers that differ; a field that is None on one side;
            a COPY field of another shape, dtype or device; two COPY fields that are one tensor in
            ``captured`` and two in ``live``; a field of which neither a declaration nor a compiled
            graph says anything.
    """
    place = _places.get(id(captured))
    if place is None or not place.holds_for(captured):
        place = _looked_at(captured, live)
    recipe, alike = place.recipe, place.alike
    values = recipe.built.of(live) or ()
    sources = values[recipe.copies]
    if not values or values[recipe.equal] != place.equal or not place.like(*sources):
        values = _checked(place, captured, live)
        sources = values[recipe.copies]
    if not place.apart or place.meet(sources):
        alike, sources = _over_shared_memory(recipe, captured, live)
    with _writing_to_any_tensor():
        for targets, pick in alike:
            torch._foreach_copy_(targets, pick(sources))
    rebound = values[recipe.values]
    for (way, put, key), value in zip(recipe.rebound, rebound, strict=True):
        put(schema.at(captured, way) if way else captured, key, value)
    place.held = place.kept + rebound


def _writing_to_any_tensor() -> AbstractContextManager[None]:
    """What `torch.inference_mode` enters, without its wrapper: also cheaper than `no_grad`."""
    mode: AbstractContextManager[None] = torch._C._InferenceMode(True)
    return mode


Pick = Callable[[Sequence[Any]], tuple[Any, ...]]
Alike = list[tuple[list[Tensor], Pick]]  # targets of one dtype and device, what picks sources


@dataclass
class _Recipe:
    """What to do with the fields of objects of one class that are built alike.

    Attributes:
        stamp: of registrations and graphs, when it was made.
        kinds: by path; of a container or object that is bound as one there is no more.
        built: gives what an object holds, if it is built like the one that this was made for; any
            value may lie where copies go.
        copies, equal, values: what is copied, compared and rebound of it.
        copied: paths of the first.
        rebound: of the last the way to what holds it, and what puts it there under which key.
        new: paths that were rebound before, and are copied now.
    """

    stamp: tuple[int, int]
    kinds: Mapping[str, Kind]
    built: schema.Built
    copies: slice
    equal: slice
    values: slice
    copied: Mapping[str, Steps]
    rebound: Sequence[tuple[Steps, schema.Setter, Any]]
    new: Sequence[Steps]


class _Place:
    """Where the copies of one captured object go: looked at once, for as long as it stays.

    Attributes:
        recipe: what to do with it.
        held: what it held after the last refresh.
        kept: of that what no refresh binds anew.
        equal: the numbers in it that have to be equal.
        geometry: of the targets.
        alike: targets by launch.
        edges: of their memory.
        apart: there are some, and no two of their elements have one address.
        like: whether tensors have the geometry of the last sources that were learned.
        reach: bytes from the first to the last element of each of those.
        before: what begins up to there ends before all targets.
    """

    def __init__(self, recipe: _Recipe, captured: object) -> None:
        self.recipe = recipe
        self.held = recipe.built.at(captured)
        self.kept = self.held[: recipe.values.start]
        self.equal = self.kept[recipe.equal]
        targets = self.kept[recipe.copies]
        self.geometry = _geometry(targets)
        self.alike = _by_launch(targets)
        self.edges = _edges(targets)
        self.learn(targets)
        covered = sum(self.edges[1::2]) - sum(self.edges[::2])
        self.apart = 0 < sum(self.reach) == covered and all(map(_dense, targets))

    def holds_for(self, captured: object) -> bool:
        """Whether nothing has changed since the last refresh of the object."""
        if self.recipe.stamp != registration.stamp():
            return False
        try:
            held = self.recipe.built.at(captured)
        except (AttributeError, LookupError, TypeError):  # it is not even built alike
            return False
        return all(map(operator.is_, held, self.held))

    def learn(self, sources: Sequence[Tensor]) -> None:
        """Takes the next sources for such as these."""
        self.like = same_geometry(sources)
        self.reach = [high - low for low, high in map(_range, sources)]
        self.before = min(self.edges, default=0) - max(self.reach, default=0)

    def meet(self, sources: Sequence[Tensor]) -> bool:
        """Whether one of the sources, which are like those learned, lies in a target's memory."""
        ordered = sorted(map(Tensor.data_ptr, sources))
        if ordered[0] >= self.edges[-1] or ordered[-1] <= self.before:
            return False
        lows = [s.data_ptr() for s in sources]
        return any(map(_meet, repeat(self.edges), lows, map(operator.add, lows, self.reach)))


def _geometry(values: Sequence[Any]) -> list[object]:
    """What a copy needs to be the same; None for what is no tensor."""
    return [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else None for v in values]


def _by_launch(targets: Sequence[Tensor]) -> Alike:
    """Targets of one dtype and device, and what picks their sources."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(targets):
        groups.setdefault((t.dtype, t.device), []).append(i)
    return [([targets[i] for i in alike], _picking(alike)) for alike in groups.values()]


def _picking(indices: Sequence[int]) -> Pick:
    """What takes some of a sequence, in C where it is more than one."""
    if len(indices) > 1:
        found: Pick = operator.itemgetter(*indices)
        return found
    return lambda items: tuple([items[i] for i in indices])


def _edges(tensors: Sequence[Tensor]) -> list[int]:
    """Where the memory of tensors begins and ends, in ascending order."""
    edges = [0, 0]
    for low, high in sorted(map(_range, tensors)):
        if low <= edges[-1]:
            edges[-1] = max(edges[-1], high)
        else:
            edges += [low, high]
    return edges[2:]


def _meet(edges: Sequence[int], low: int, high: int) -> bool:
    """Whether bytes from one address to another lie between edges."""
    before = bisect_right(edges, low)
    return before % 2 == 1 or before != bisect_left(edges, high)


def _dense(t: Tensor) -> bool:
    return all(stride or n < 2 for n, stride in zip(t.shape, t.stride(), strict=True))


def _range(t: Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the one behind its last."""
    if not t.numel():
        return 0, 0
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + reach * t.itemsize


_REBOUND: tuple[Kind, ...] = ("REBIND", "FOLLOWS")
_recipes: dict[type, _Recipe] = {}
_places: dict[int, _Place] = {}  # by id of what was captured, for as long as it lives


def _looked_at(captured: object, live: object) -> _Place:
    """How an object is refreshed, and where its copies go."""
    key, cls = id(captured), type(captured)
    recipe, place = _recipes.get(cls), _places.get(key)
    if recipe is None or not _is_for(recipe, captured):
        recipe = _recipes[cls] = _made_for(captured, recipe)
    if recipe.new and place is not None and place.recipe is not recipe:
        refuse_if_unlike(captured, live, recipe.kinds)
        for steps in recipe.new:  # it holds what an earlier object brought along
            schema.put(captured, steps, schema.at(live, steps).clone())
    found = _Place(recipe, captured)
    if place is not None or _dies_with(captured, key):
        _places[key] = found  # else it might be another object's next time
    return found


def _is_for(recipe: _Recipe, captured: object) -> bool:
    held = recipe.built.of(captured) if recipe.stamp == registration.stamp() else None
    return held is not None and None not in _geometry(held[recipe.copies])


def _dies_with(captured: object, key: int) -> bool:
    """Lets a place go when its object does; False for one that nobody can watch."""
    try:
        weakref.finalize(captured, _places.pop, key, None).atexit = False
    except TypeError:  # slots without __weakref__
        return False
    return True


def _checked(place: _Place, captured: object, live: object) -> tuple[Any, ...]:
    """What a live object holds that is not like the last one, if it fits.

    Raises:
        BindingError: it does not.
    """
    recipe = place.recipe
    values = recipe.built.of(live)
    if (
        values is None
        or values[recipe.equal] != place.equal
        or _geometry(values[recipe.copies]) != place.geometry
    ):
        refuse_if_unlike(captured, live, recipe.kinds)
        values = recipe.built.at(live)
    if not place.like(*values[recipe.copies]):
        place.learn(values[recipe.copies])
    return values


def _made_for(captured: object, before: _Recipe | None) -> _Recipe:
    kinds, steps = _kinds(captured)
    rebound_before = before.kinds if before is not None else {}
    copied = {
        path: steps[path]
        for path, kind in kinds.items()
        if kind == "COPY" and schema.at(captured, steps[path]) is not None
    }
    equal = [steps[path] for path, kind in kinds.items() if kind == "EQUAL"]
    rebound = [steps[path] for path, kind in kinds.items() if kind in _REBOUND]
    kept = [*copied.values(), *equal]
    for way, _, _ in schema.walked(captured):
        path = schema.text_of(way)
        inside = path not in kinds and any(schema.within(path, whole) for whole in kinds)
        if way and not inside and way not in kept + rebound:
            kept.append(way)
    n = len(copied)
    return _Recipe(
        registration.stamp(),
        kinds,
        schema.Built(captured, kept + rebound, n),
        slice(n),
        slice(n, n + len(equal)),
        slice(len(kept), None),
        copied,
        [(way[:-1], way[-1].setter, way[-1].key) for way in rebound],
        [s for path, s in copied.items() if rebound_before.get(path) == "REBIND"],
    )


def _refuse_no_number(cls: type, path: str, value: object) -> None:
    if value is not None and not isinstance(value, schema.Numbers):
        fix = f"Take it out of equal=; {path} can be bound anew (rebind=) or copied (copy=)."
        raise unlike(cls, path, "a number, since it is declared EQUAL", type(value).__name__, fix)


def _kinds(captured: object) -> tuple[dict[str, Kind], dict[str, Steps]]:
    """What becomes of each field, declared or shown by graphs, and the way to it.

    A container of which nothing is copied is bound as one, and so is an object declared so.

    Raises:
        BindingError: of a tensor neither is known.
    """
    cls = type(captured)
    declared = declared_of({p: type(part) for p, part in schema.parts(captured).items()})
    shown = kinds_of(cls)
    found: dict[str, Kind] = {}
    ways: dict[str, Steps] = {}

    def of_leaf(path: str, value: object) -> Kind:
        kind: Kind | None = schema.kind_at(path, declared)
        if kind == "EQUAL":
            _refuse_no_number(cls, path, value)
        if kind is None and isinstance(value, Tensor):
            kind = (shown or {}).get(path)
            if kind is None:
                raise _unknown(cls, path, "neither" if shown is None else "graphs without it")
        return kind or "FOLLOWS"

    def is_bound_as_one(path: str) -> bool:
        inner = [kind for name, kind in declared.items() if schema.within(name, path)]
        return declared.get(path) == "REBIND" and set(inner) == {"REBIND"}

    def search(steps: Steps, value: object) -> None:
        path = schema.text_of(steps)
        inside = list(schema.items(value))
        if steps and (not inside or is_bound_as_one(path)):
            found[path], ways[path] = of_leaf(path, value), steps
            return
        before = len(found)
        for step, held in inside:
            search((*steps, step), held)
        mine = list(found)[before:]
        if isinstance(value, (list, tuple, dict)) and all(found[p] in _REBOUND for p in mine):
            for p in mine:
                del found[p]
            found[path], ways[path] = "REBIND", steps

    search((), captured)
    return found, ways


def _unknown(cls: type, path: str, found: str) -> BindingError:
    return BindingError(
        f"Nothing is known of {cls.__name__}.{path}.",
        where=f"refresh of {cls.__name__}",
        expected="a declaration, or a graph that was compiled with such an object",
        found=found,
        fix="Call what was compiled first, or declare it with register_metadata_binding.",
    )


def _over_shared_memory(
    recipe: _Recipe, captured: object, live: object
) -> tuple[Alike, tuple[Tensor, ...]]:
    """What to copy where some of the memory is one: no source is overwritten before it is read.

    Raises:
        BindingError: fields share memory in ``captured`` and not likewise in ``live``, or a target
            has several elements in one place.
    """
    cls = type(captured)
    kept: list[tuple[str, Tensor, Tensor]] = []
    for path, steps in recipe.copied.items():
        t, s = schema.at(captured, steps), schema.at(live, steps)
        if any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True)):
            fix = "Capture an object in which it is contiguous."
            raise unlike(cls, path, "an address for each element", "expanded dims", fix)
        for other, t2, s2 in kept:
            if _meet(_edges([t2]), *_range(t)) and not _alike(t, t2, s, s2):
                fix = f"Let both lie in one tensor, or capture an object in which {path} does not."
                raise unlike(cls, path, f"memory shared with {other}, as captured", "others", fix)
        kept.append((path, t, s))
    pairs = [(t, s) for _, t, s in kept if t.numel() and _lies(t) != _lies(s)]
    targets = [t for t, _ in pairs]
    edges = _edges(targets)
    return _by_launch(targets), tuple(
        [s.clone() if _meet(edges, *_range(s)) else s for _, s in pairs]
    )


def _lies(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride()


def _alike(a: Tensor, b: Tensor, source: Tensor, source2: Tensor) -> bool:
    """Whether two sources share memory as their targets do."""
    apart = b.data_ptr() - a.data_ptr() == source2.data_ptr() - source.data_ptr()
    return apart and (a.stride(), b.stride()) == (source.stride(), source2.stride())
