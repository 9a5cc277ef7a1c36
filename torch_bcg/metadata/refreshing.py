"""``refresh``: brings the values of one step into the object that recorded segments read."""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    cls = type(captured)
    recipe = _recipes.get(cls)
    place = recipe.places.get(id(captured)) if recipe is not None else None
    if recipe is None or place is None or not recipe.holds_for(place, captured):
        recipe, place = _looked_at(captured, live)
    values = recipe.built.of(live) if type(live) is cls else None
    alike = values is not None and place.like(recipe.copies(values))
    if values is None or not (alike or place.takes(recipe.copies(values))):
        refuse_if_unlike(captured, live, recipe.kinds)
        values = recipe.built.at(live)
    if recipe.equal(values) != place.equal:
        refuse_if_unlike(captured, live, recipe.kinds)
    pairs = place.pairs(recipe.copies(values), alike) or _pairs_over_shared_memory(
        recipe, captured, live
    )
    with place.mode():
        for into, out_of in pairs:
            torch._foreach_copy_(into, out_of)
    for (way, last), value in zip(recipe.rebound, recipe.values(values), strict=True):
        last.put(schema.at(captured, way) if way else captured, value)
    place.values = recipe.built.at(captured)


Pairs = list[tuple[list[Tensor], tuple[Tensor, ...]]]
Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


class _Place:
    """Where the copies of one captured object go: looked at once, for as long as it stays.

    Attributes:
        values: what the object held at the places of the recipe, after the last refresh.
        equal: the numbers in it that have to be equal.
        like: whether tensors have the geometry of the targets, see `same_geometry`.
        shapes, dtypes, devices: of the targets.
        starts, ends: their addresses in ascending order, by the byte.
        ends_before, starts_after: of the one before, and the one behind, each gap between them.
        reach: bytes from the first to the last element of each, in their own order.
        apart: no two meet.
        alike: targets of one dtype and device, and what picks their sources.
        mode: in which they may be written.
    """

    def __init__(
        self, values: tuple[Any, ...], equal: tuple[Any, ...], targets: Sequence[Tensor]
    ) -> None:
        self.values, self.equal = values, equal
        self.like = same_geometry(targets)
        self.shapes = [t.shape for t in targets]
        self.dtypes = [t.dtype for t in targets]
        self.devices = [t.device for t in targets]
        ranges = sorted(_range(t) for t in targets)
        self.starts, self.ends = [low for low, _ in ranges], [high for _, high in ranges]
        self.reach = [high - low for low, high in map(_range, targets)]
        self.ends_before, self.starts_after = [0, *self.ends], [*self.starts, 1 << 64]
        ordered = all(a <= b for a, b in zip(self.ends, self.starts[1:], strict=False))
        self.apart = ordered and all(map(_dense, targets))
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(targets):
            groups.setdefault((t.dtype, t.device), []).append(i)
        self.alike = [([targets[i] for i in alike], _picking(alike)) for alike in groups.values()]
        inference = any(t.is_inference() for t in targets)
        self.mode = torch.inference_mode if inference else torch.no_grad

    def takes(self, sources: Sequence[Tensor]) -> bool:
        """Whether sources have the shapes, dtypes and devices of their targets."""
        return (
            [s.shape for s in sources] == self.shapes
            and [s.dtype for s in sources] == self.dtypes
            and [s.device for s in sources] == self.devices
        )

    def pairs(self, sources: Sequence[Tensor], alike: bool) -> Pairs:
        """What to copy in one launch each; nothing where some of the memory may be one."""
        if not self.apart or self.meet(sources, alike):
            return []
        return [(targets, pick(sources)) for targets, pick in self.alike]

    def meet(self, sources: Sequence[Tensor], alike: bool) -> bool:
        """Whether a source lies in the memory of a target; ``alike``: with the same strides."""
        lows = [s.data_ptr() for s in sources]
        reach = self.reach if alike else [high - low for low, high in map(_range, sources)]
        if not lows or min(lows) >= self.ends[-1] or max(lows) + max(reach) <= self.starts[0]:
            return False
        places = map(bisect_right, repeat(self.starts), lows)
        return any(
            self.ends_before[i] > low or low + n > self.starts_after[i]
            for i, low, n in zip(places, lows, reach, strict=True)
        )

    def meets(self, source: Tensor) -> bool:
        """Whether one source lies in the memory of a target."""
        low, high = _range(source)
        i = bisect_left(self.starts, high)
        return i > 0 and self.ends[i - 1] > low


def _picking(indices: Sequence[int]) -> Pick:
    """What takes some of a sequence, in C where it is more than one."""
    if len(indices) > 1:
        found: Pick = operator.itemgetter(*indices)
        return found
    return lambda items: tuple([items[i] for i in indices])


def _dense(t: Tensor) -> bool:
    return all(stride or n < 2 for n, stride in zip(t.shape, t.stride(), strict=True))


def _range(t: Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the one behind its last."""
    if not t.numel():
        return 0, 0
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + reach * t.itemsize


@dataclass
class _Recipe:
    """What to do with the fields of objects of one class that are built alike.

    Attributes:
        stamp: of registrations and graphs, when it was made.
        kinds: by path; of a container or object that is bound as one there is no more.
        built: tells whether another object is built like the one that this was made for.
        equal, copies, values: what is compared, copied and rebound, of what an object holds.
        copied, rebound: paths of the latter two, of the last with its last step apart.
        new: paths that were rebound before, and are copied now.
        places: of captured objects, by id, for as long as they live.
    """

    stamp: tuple[int, int]
    kinds: Mapping[str, Kind]
    built: schema.Built
    equal: Pick
    copies: Pick
    values: Pick
    copied: Mapping[str, Steps]
    rebound: Sequence[tuple[Steps, schema.Step]]
    new: Sequence[Steps]
    places: dict[int, _Place] = field(default_factory=dict)

    def holds_for(self, place: _Place, captured: object) -> bool:
        """Whether nothing has changed since the last refresh of an object."""
        if self.stamp != registration.stamp():
            return False
        try:
            now = self.built.at(captured)
        except (AttributeError, LookupError, TypeError):  # it is not even built alike
            return False
        return all(map(operator.is_, now, place.values))


_REBOUND: tuple[Kind, ...] = ("REBIND", "FOLLOWS")
_recipes: dict[type, _Recipe] = {}


def _looked_at(captured: object, live: object) -> tuple[_Recipe, _Place]:
    """How objects of a class are refreshed, and where the copies of this one go."""
    cls = type(captured)
    recipe = _recipes.get(cls)
    if recipe is None or recipe.stamp != registration.stamp() or recipe.built.of(captured) is None:
        recipe = _recipes[cls] = _made_for(captured, recipe)
    if recipe.new and id(captured) not in recipe.places:
        refuse_if_unlike(captured, live, recipe.kinds)
        for steps in recipe.new:  # it may hold what an earlier object brought along
            schema.put(captured, steps, schema.at(live, steps).clone())
    values = recipe.built.at(captured)
    place = _Place(values, recipe.equal(values), recipe.copies(values))
    places, key = recipe.places, id(captured)
    if key not in places and not _dies_with(captured, places, key):
        return recipe, place  # it might be another object's next time
    places[key] = place
    return recipe, place


def _dies_with(captured: object, places: dict[int, _Place], key: int) -> bool:
    """Lets a place go when its object does; False for one that nobody can watch."""
    try:
        weakref.finalize(captured, places.pop, key, None).atexit = False
    except TypeError:  # slots without __weakref__
        return False
    return True


def _made_for(captured: object, before: _Recipe | None) -> _Recipe:
    kinds, steps = _kinds(captured)
    rebound_before = before.kinds if before is not None else {}
    places = []
    for way, _, _ in schema.walked(captured):
        path = schema.text_of(way)
        if path and (path in kinds or not any(schema.within(path, whole) for whole in kinds)):
            places.append(way)
    index = {schema.text_of(way): i for i, way in enumerate(places)}
    copied = {
        path: steps[path]
        for path, kind in kinds.items()
        if kind == "COPY" and schema.at(captured, steps[path]) is not None
    }
    rebound = [path for path, kind in kinds.items() if kind in _REBOUND]
    return _Recipe(
        registration.stamp(),
        kinds,
        schema.Built(captured, places),
        _picking([index[path] for path, kind in kinds.items() if kind == "EQUAL"]),
        _picking([index[path] for path in copied]),
        _picking([index[path] for path in rebound]),
        copied,
        [(steps[path][:-1], steps[path][-1]) for path in rebound],
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


def _pairs_over_shared_memory(recipe: _Recipe, captured: object, live: object) -> Pairs:
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
            if _meet(t, t2) and not _alike(t, t2, s, s2):
                fix = f"Let both lie in one tensor, or capture an object in which {path} does not."
                raise unlike(cls, path, f"memory shared with {other}, as captured", "others", fix)
        kept.append((path, t, s))
    pairs = [(t, s) for _, t, s in kept if t.numel() and _lies(t) != _lies(s)]
    place = _Place((), (), [t for t, _ in pairs])
    sources = [s.clone() if place.meets(s) else s for _, s in pairs]
    return [(targets, pick(sources)) for targets, pick in place.alike]


def _lies(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride()


def _meet(a: Tensor, b: Tensor) -> bool:
    (low, high), (low2, high2) = _range(a), _range(b)
    return low < high2 and low2 < high


def _alike(a: Tensor, b: Tensor, source: Tensor, source2: Tensor) -> bool:
    """Whether two sources share memory as their targets do."""
    apart = b.data_ptr() - a.data_ptr() == source2.data_ptr() - source.data_ptr()
    return apart and (a.stride(), b.stride()) == (source.stride(), source2.stride())
