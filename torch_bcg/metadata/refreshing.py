"""``refresh``: brings the values of one step into the object that recorded segments read."""

from __future__ import annotations

import operator
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_bcg.errors import BindingError
from torch_bcg.graph.values import Kind
from torch_bcg.metadata import registration, schema
from torch_bcg.metadata.comparing import refuse_if_unlike, same_geometry, unlike
from torch_bcg.metadata.registration import declared_of, kinds_of
from torch_bcg.metadata.schema import Getter, Steps


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
    if recipe is None or recipe.stamp != registration.stamp() or not recipe.built.like(captured):
        recipe = _recipes[cls] = _made_for(captured, recipe)
    if type(live) is not cls or not recipe.built.like(live) or recipe.differ(captured, live):
        refuse_if_unlike(captured, live, recipe.kinds)
    if recipe.new and id(captured) not in recipe.places:
        for steps in recipe.new:  # it may hold what an earlier object brought along
            schema.put(captured, steps, schema.at(live, steps).clone())
    targets, sources = recipe.copies(captured), recipe.copies(live)
    place = recipe.place_of(captured, targets)
    if not place.takes(sources):
        refuse_if_unlike(captured, live, recipe.kinds)
    pairs = place.pairs(targets, sources) or _pairs_over_shared_memory(recipe, captured, live)
    with torch.inference_mode():  # in which tensors of both kinds may be written
        for into, out_of in pairs:
            torch._foreach_copy_(into, out_of)
    for steps, value in zip(recipe.rebound, recipe.values(live), strict=True):
        schema.put(captured, steps, value)


Pairs = list[tuple[list[Tensor], list[Tensor]]]


class _Place:
    """Where the copies of one captured object go: looked at once, for as long as it stays.

    Attributes:
        tensors: weak references to them.
        like: whether others have their geometry, see `same_geometry`.
        shapes, dtypes, devices: of them.
        starts, ends: their addresses in ascending order, by the byte.
        largest: bytes of the largest one.
        apart: no two meet.
        alike: their places, for each dtype and device.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self.tensors = [weakref.ref(t) for t in targets]
        self.like = same_geometry(targets)
        self.shapes = [t.shape for t in targets]
        self.dtypes = [t.dtype for t in targets]
        self.devices = [t.device for t in targets]
        ranges = sorted(_range(t) for t in targets)
        self.starts, self.ends = [low for low, _ in ranges], [high for _, high in ranges]
        self.largest = max((high - low for low, high in ranges), default=0)
        self.apart = all(_dense(t) for t in targets) and all(
            a <= b for a, b in zip(self.ends, self.starts[1:], strict=False)
        )
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(targets):
            groups.setdefault((t.dtype, t.device), []).append(i)
        self.alike = list(groups.values())

    def holds(self, targets: Sequence[Tensor]) -> bool:
        """Whether it was made for these very tensors."""
        mine = [ref() for ref in self.tensors]
        return len(mine) == len(targets) and all(map(operator.is_, mine, targets))

    def takes(self, sources: Sequence[Tensor]) -> bool:
        """Whether sources have the shapes, dtypes and devices of their targets."""
        return self.like(sources) or (
            [s.shape for s in sources] == self.shapes
            and [s.dtype for s in sources] == self.dtypes
            and [s.device for s in sources] == self.devices
        )

    def pairs(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Pairs:
        """What to copy in one launch each; nothing where some of the memory may be one."""
        if not self.apart or self.meet(sources):
            return []
        return [([targets[i] for i in alike], [sources[i] for i in alike]) for alike in self.alike]

    def meet(self, sources: Sequence[Tensor]) -> bool:
        """Whether a source lies in the memory of a target."""
        starts = [s.data_ptr() for s in sources]
        if starts and (min(starts) >= self.ends[-1] or max(starts) < self.starts[0] - self.largest):
            return False  # most are made long after what was captured, elsewhere
        return any(map(self.meets, sources))

    def meets(self, source: Tensor) -> bool:
        """Whether one source lies in the memory of a target."""
        low, high = _range(source)
        i = bisect_left(self.starts, high)
        return i > 0 and self.ends[i - 1] > low


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
        equal, copies, values: what is compared, copied and rebound of an object.
        copied, rebound: paths of the latter two.
        new: paths that were rebound before, and are copied now.
        places: of captured objects, by id.
    """

    stamp: tuple[int, int]
    kinds: Mapping[str, Kind]
    built: schema.Built
    equal: Getter
    copies: Getter
    values: Getter
    copied: Mapping[str, Steps]
    rebound: Sequence[Steps]
    new: Sequence[Steps]
    places: dict[int, _Place] = field(default_factory=dict)

    def differ(self, captured: object, live: object) -> bool:
        """Whether numbers that are declared equal are not."""
        return self.equal(captured) != self.equal(live)

    def place_of(self, captured: object, targets: Sequence[Tensor]) -> _Place:
        """Where an object's copies go."""
        place = self.places.get(id(captured))
        if place is None or not place.holds(targets):
            if len(self.places) >= _MOST_PLACES:
                self.places.clear()
            place = self.places[id(captured)] = _Place(targets)
        return place


_MOST_PLACES = 256  # captured objects of one class: more than any ladder has
_REBOUND: tuple[Kind, ...] = ("REBIND", "FOLLOWS")
_recipes: dict[type, _Recipe] = {}


def _made_for(captured: object, before: _Recipe | None) -> _Recipe:
    kinds, steps = _kinds(captured)
    rebound_before = before.kinds if before is not None else {}
    copied = {
        path: steps[path]
        for path, kind in kinds.items()
        if kind == "COPY" and schema.at(captured, steps[path]) is not None
    }
    rebound = [steps[path] for path, kind in kinds.items() if kind in _REBOUND]
    places = []
    for place, _, _ in schema.walked(captured):
        path = schema.text_of(place)
        if path and (path in kinds or not any(schema.within(path, whole) for whole in kinds)):
            places.append(place)
    return _Recipe(
        registration.stamp(),
        kinds,
        schema.Built(captured, places),
        schema.getter_of([steps[path] for path, kind in kinds.items() if kind == "EQUAL"]),
        schema.getter_of(list(copied.values())),
        schema.getter_of(rebound),
        copied,
        rebound,
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
    place = _Place([t for t, _ in pairs])
    sources = [s.clone() if place.meets(s) else s for _, s in pairs]
    return [([pairs[i][0] for i in alike], [sources[i] for i in alike]) for alike in place.alike]


def _lies(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride()


def _meet(a: Tensor, b: Tensor) -> bool:
    (low, high), (low2, high2) = _range(a), _range(b)
    return low < high2 and low2 < high


def _alike(a: Tensor, b: Tensor, source: Tensor, source2: Tensor) -> bool:
    """Whether two sources share memory as their targets do."""
    apart = b.data_ptr() - a.data_ptr() == source2.data_ptr() - source.data_ptr()
    return apart and (a.stride(), b.stride()) == (source.stride(), source2.stride())
