"""A compiled function beside its eager twin: `check` is what a contract test says in one line.

Both get arguments built twice from one seed, so that views, strides and overlaps are the same on
both sides. After every call these are compared: outputs, arguments and module state (values,
dtypes, shapes, strides), and which tensors among them share memory, at which offset. At the end the
outputs of all calls are compared again, since a caller may keep them. What was counted meanwhile is
compared with what the test expects: a backend that never replays fails.
"""

import contextlib
import copy
import warnings
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_bcg


class Call(NamedTuple):
    args: tuple
    kwargs: dict


def call(*args, **kwargs):
    """The arguments of one call, when there are keywords among them."""
    return Call(args, kwargs)


@dataclass
class Counts:
    """How often each thing happened inside `with counted() as counts`, filled in at its end."""

    probes: int = 0
    warming: int = 0
    captures: int = 0
    replays: int = 0
    kernels: int = 0
    recorded_kernels: int = 0
    copied_bytes: int = 0
    rows: int = 0
    replayed_rows: int = 0
    pad_rows: int = 0
    eager_calls: dict = field(default_factory=dict)

    @property
    def num_eager(self):
        return sum(self.eager_calls.values())


@contextlib.contextmanager
def no_synchronisation():
    """Raises where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mode calls itself a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def counted():
    counts, before = Counts(), torch_bcg.stats()
    yield counts
    after = torch_bcg.stats()
    for one in fields(Counts):
        if one.name != "eager_calls":
            setattr(counts, one.name, getattr(after, one.name) - getattr(before, one.name))
    grown = {
        reason: number - before.eager_calls.get(reason, 0)
        for reason, number in after.eager_calls.items()
    }
    counts.eager_calls = {reason: number for reason, number in grown.items() if number}


def tensors_of(tree):
    """All tensors of a nested value in order, those inside wrapper subclasses included."""
    found = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
            found += tensors_of([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def sharing(tensors):
    """For each tensor: number of its storage, and distance in bytes from the first one in it."""
    seen = {}
    result = []
    for tensor in tensors:
        offset = tensor.storage_offset() * tensor.element_size()
        number, first = seen.setdefault(tensor.untyped_storage()._cdata, (len(seen), offset))
        result.append((number, offset - first))
    return result


def returned_arguments(call, state, outputs):
    """For each output: the position of the argument or state tensor that it is itself, or None."""
    owned = pytree.tree_leaves((call, state))
    return [
        next((i for i, mine in enumerate(owned) if mine is out), None)
        for out in pytree.tree_leaves(outputs)
        if isinstance(out, Tensor)
    ]


def assert_same(got, want, *, exact=True):
    """Nested values agree: structure, types, numbers, and tensors to the bit unless not `exact`."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert type(g) is type(w)
        if not isinstance(w, Tensor):
            assert g == w or (g != g and w != w)  # nan agrees with nan
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    for g, w in zip(tensors_of(got), tensors_of(want), strict=True):
        torch.testing.assert_close(g, w, check_stride=True, equal_nan=True, **tolerance)
        assert g.requires_grad == w.requires_grad


def assert_same_call(got, want, *, exact=True):
    """`got` and `want` are (arguments, state, outputs): values, sharing, returned arguments agree."""
    assert_same(got, want, exact=exact)
    assert sharing(tensors_of(got)) == sharing(tensors_of(want))
    assert returned_arguments(*got) == returned_arguments(*want)


def state_of(fn):
    if isinstance(fn, nn.Module):
        return {**dict(fn.named_parameters()), **dict(fn.named_buffers())}
    return {}


def seeded(make, i):
    torch.manual_seed(100 + i)
    made = make(i)
    return made if isinstance(made, Call) else Call(tuple(made), {})


def check(
    fn,
    make,
    *,
    calls=4,
    replays=3,
    eager_calls=0,
    twin=None,
    mode=torch.no_grad,
    exact=True,
    **compile_kwargs,
):
    """Calls the compiled `fn` and its eager twin `calls` times with `make(i)` and compares them.

    Args:
        fn: a function or module.
        make: arguments of call `i`: a tuple, or `call(...)`. Called twice with one seed.
        calls: number of calls.
        replays: how many of them must be replays: a number, or a range where it depends on how
            many graphs this release of Dynamo makes.
        eager_calls: how many of them must be counted as eager calls; None likewise.
        twin: the eager side; a deep copy of a module, `fn` itself otherwise.
        mode: context manager each call runs in.
        exact: bitwise comparison.
        compile_kwargs: for torch.compile.

    Returns:
        the compiled function.
    """
    if twin is None:
        twin = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    compiled = torch.compile(fn, backend="bcg", **compile_kwargs)
    kept = []
    with counted() as counts:
        for i in range(calls):
            want_call, got_call = seeded(make, i), seeded(make, i)
            with mode():
                want = twin(*want_call.args, **want_call.kwargs)
                got = compiled(*got_call.args, **got_call.kwargs)
            assert_same_call(
                (got_call, state_of(fn), got), (want_call, state_of(twin), want), exact=exact
            )
            kept.append((got, want))
    for got, want in kept:
        assert_same(got, want, exact=exact)
    allowed = replays if isinstance(replays, range) else (replays,)
    assert counts.replays in allowed, counts
    if eager_calls is not None:
        assert counts.num_eager == eager_calls, counts
    return compiled


@torch_bcg.eager_on_graph(mutates_args=("out",))
def double_into(x: Tensor, out: Tensor) -> None:
    """out = 2 x"""
    out.copy_(x * 2)


@torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
def plus_one(x: Tensor) -> Tensor:
    """x + 1, in new memory"""
    return x + 1


@torch_bcg.eager_on_graph(mutates_args=("x",))
def add_one_to(x: Tensor) -> None:
    """x += 1"""
    x.add_(1)
