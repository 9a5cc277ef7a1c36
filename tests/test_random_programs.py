"""Random programs: views, writes, marked operations, numbers and sizes, compiled and eager.

A program is a list of statements, drawn one by one and kept only if it runs, eagerly, on the
arguments of every call. What fails prints its source. Half of them pad their rows, half are checked
with `poison`, and memory is taken and freed between the calls.

``python tests/test_random_programs.py cpu 0 5000`` tries those seeds, outside pytest.
"""

import contextlib
import copy
import itertools
import linecache
import sys
import textwrap
import warnings
from random import Random

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from twin import add_one_to, double_into, plus_one, returned_arguments, sharing, tensors_of

NUMBER = itertools.count()
NAMES = ("x0", "x1", "w", "b0", "b1")


def empty_pair(x):
    dtype = torch.result_type(x, 0.5)
    return torch.empty_like(x), x.new_empty(x.shape[::-1], dtype=dtype)


@torch_bcg.eager_on_graph(fake=empty_pair)
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """two results, the second with reversed dims"""
    return x + 2, (x * 0.5).permute(*reversed(range(x.dim()))).contiguous()


@torch_bcg.eager_on_graph(fake=lambda x, n, s: x.new_empty(x.shape, dtype=torch.result_type(x, s)))
def scaled(x: Tensor, n: int, s: float) -> Tensor:
    """x s + n"""
    return (x * s + n).contiguous()


ENV = {
    "torch": torch, "F": F, "plus_one": plus_one, "double_into": double_into,
    "add_one_to": add_one_to, "pair": pair, "scaled": scaled,
}  # fmt: skip


class Tensors(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.w = nn.Parameter(torch.randn(4, 4, generator=g), requires_grad=False)
        self.register_buffer("b0", torch.randn(3, 4, generator=g))
        self.register_buffer("b1", torch.randn(2, 6, generator=g))


VIEWS = [
    "{x}.transpose(0, -1)", "{x}.unsqueeze(0)", "{x}.flatten()", "{x}.reshape(-1)", "{x}.detach()",
    "{x}.contiguous()", "{x}[0]", "{x}[1:]", "{x}[..., ::2]", "{x}.select(-1, -1)",
    "{x}.chunk(2)[-1]", "{x}.split(1, -1)[-1]", "{x}.unbind(0)[0]", "{x}.narrow(0, 0, 1)",
    "{x}.view(-1)", "{x}.unfold(0, 2, 1)", "{x}.unsqueeze(0).expand(2, *{x}.shape)",
    "{x}.movedim(0, -1)", "{x}.float()", "{x}.squeeze()", "{x}.view_as({x})", "{x}.data",
    "F.dropout({x}, training=False)", "{x}.reshape({x}.shape[0], -1)", "{x}[:n]", "{x}.diagonal()",
    "{x}.view(torch.int32)", "{x}.view(torch.float32)", "{x}.flatten(0, 1)", "{x}.t()",
    "torch.view_as_complex({x}.unflatten(-1, (-1, 2)))", "{x}.conj()", "{x}.imag", "{x}.conj().imag",
    "torch.broadcast_tensors({x}, {y})[1]",
]  # fmt: skip
PURE = [
    "{x} + {s}", "{x} * {n}", "{x} - {n}", "{x} @ w", "{x} * {y}", "F.relu({x})", "{x}.softmax(-1)",
    "torch.cat([{x}, {s}])", "torch.where({x} > 0, {x}, {s})", "{x}.sum(0)", "{x}.cumsum(0)",
    "{x}.clone()", "torch.zeros_like({x})", "torch.full_like({x}, f)", "{x}.argmax(-1)",
    "{x}.to(torch.bfloat16)", "torch.arange(n, device=x0.device)", "{x} ** f", "{x} * {x}.shape[0]",
    "{x}.flip(0)", "{x}[[0, 0]]", "torch.ones(2, 3, device=x0.device)", "{x}.double()",
    "torch.tensor([1.0, 2.0], device=x0.device)", "torch.tensor(f, device=x0.device)",
    "{x}.max(-1)[1]", "{x}.sort(-1)[0]", "{x}.topk(1)[0]", "torch.var_mean({x}, -1)[0]",
    "torch._foreach_add([{x}, {s}], 1.0)[1]",
]  # fmt: skip
# A GPU may write the tensors of one foreach in any order, so no two of them are in one place.
WRITES = [
    "{x}.add_({n})", "{x}.mul_(0.5)", "{x}.copy_({s})", "{x}.zero_()", "{x}[0] = {n}", "{x} += {s}",
    "{x}[..., 0] = {y}", "{x}[1:] = {y}", "torch._foreach_add_([{x}, {s}.clone()], 1.0)", "{x}.clamp_(-1, 1)",
    "torch._foreach_copy_([{x}], [{s}])", "{x}.masked_fill_({x} > 0, {n})", "{x}[{x} > 0] = 0",
    "{x}.index_fill_(0, torch.tensor([0], device=x0.device), f)", "torch.add({x}, {s}, out={x})",
    "{x}[torch.tensor([0, 1], device=x0.device)] = {y}", "F.relu({x}, inplace=True)",
    "{x}.data.add_(1)", "{x}.flatten().add_(1)", "{x}.reshape(-1).mul_(2)", "{x}.lerp_({s}, 0.5)",
    "{x}.chunk(2)[0].add_(1)",
]  # fmt: skip
# What works on each row by itself, or on those before it.
ROW_VIEWS = [
    "{x}.unsqueeze(0)", "{x}.detach()", "{x}.contiguous()", "{x}[..., ::2]", "{x}.select(-1, -1)",
    "{x}.split(1, -1)[-1]", "{x}.transpose(0, -1)", "{x}.unsqueeze(-1).expand(*{x}.shape, 2)",
    "F.dropout({x}, training=False)", "{x}.reshape({x}.shape[0], -1)", "{x}[0]", "{x}.unsqueeze(0)[0]",
    "{x}.view_as({x})", "{x}[1:]", "F.pad({x}, (0, 0, 1, 0))[:-1]", "{x}.view(-1, 2, 2)", "{x}.t()",
]  # fmt: skip
ROW_PURE = [
    "{x} + {s}", "{x} * {n}", "{x} @ w", "{x} * {s}", "F.relu({x})", "{x}.softmax(-1)", "{x}.cumsum(0)",
    "torch.cat([{x}, {s}], -1)", "torch.where({x} > 0, {x}, {s})", "{x}.sum(-1)", "{x}.clone()",
    "torch.zeros_like({x})", "{x} ** f", "{x}.flip(-1)", "{x}.max(-1)[0]", "{x}.sort(-1)[0]",
    "w[{x}.argmax(-1) % 4]", "torch.arange(x0.shape[0], device=x0.device)", "{x} + x0.shape[0]",
    "{x}[torch.arange(x0.shape[0], device=x0.device)]", "{x}.index_select(0, {x}[..., 0].argsort())",
]  # fmt: skip
ROW_WRITES = [
    "{x}.add_({n})", "{x}.mul_(0.5)", "{x}.copy_({s})", "{x} += {s}", "{x}[..., 0] = 0.5", "{x}.zero_()",
    "torch._foreach_add_([{x}, {s}.clone()], 1.0)", "torch._foreach_copy_([{x}], [{s}])", "{x}[0] = {n}",
    "torch.add({x}, {s}, out={x})", "F.relu({x}, inplace=True)", "{x}.data.add_(1)", "b0.add_(1)",
    "b0[:2].add_({x}[:2])", "{x}.lerp_({s}, 0.5)",
]  # fmt: skip
MARKED = [
    "{t} = plus_one({x})", "{t} = plus_one({x})", "add_one_to({x})", "add_one_to({x})",
    "{t} = scaled({x}, n, f)", "{t} = scaled({x}, {x}.shape[0], 0.5)", "{t}, {t}b = pair({x})",
    "double_into({x}, {s})", "{t} = torch.empty_like({x}); double_into({x}, {t})",
    "with torch.autocast(x0.device.type, torch.bfloat16):\n    {t} = plus_one({x} @ w)",
]  # fmt: skip
AROUND = "with torch.fx.traceback.annotate({'bcg': 'eager'}):\n    "


def statement(random, env, name, padded):
    """One statement over the tensors in ``env``; it may not run."""
    rowwise = padded and random.random() < 0.95
    views, pure, writes = (ROW_VIEWS, ROW_PURE, ROW_WRITES) if rowwise else (VIEWS, PURE, WRITES)
    tensors = [k for k, v in env.items() if isinstance(v, Tensor)]
    x = random.choice(tensors[-3:] if random.random() < 0.4 else tensors)
    like = [k for k in tensors if env[k].shape == env[x].shape]
    kind = random.choice((views, views, pure, writes, writes, MARKED, MARKED))
    text = random.choice(kind).format(
        x=x, s=random.choice(like), y=random.choice(tensors), t=name,
        n=random.choice(("n", "f", "0.5", "n + 1", "x0.shape[0]")),
    )  # fmt: skip
    if kind is views or kind is pure:
        text = f"{name} = {text}"
    return AROUND + text if kind is not MARKED and random.random() < 0.15 else text


def arguments(call, tensors, previous):
    """Arguments of one call: new ones, those of the last call, one twice, overlapping, strided."""
    g = torch.Generator().manual_seed(call["seed"])
    rows, kind = call["rows"], call["kind"]
    device = tensors.w.device

    def new(*size):
        return torch.randn(size, generator=g).to(device)

    x0, x1 = new(rows, 4), new(rows, 4)
    if kind == "same" and previous is not None and len(previous[0]) == rows:
        return previous
    if kind == "twice":
        x1 = x0
    elif kind == "overlap":
        base = new(8 * rows)
        x0, x1 = base[: 4 * rows].view(rows, 4), base[4 : 4 + 4 * rows].view(rows, 4)
    elif kind == "strided":
        x0 = new(4, rows).t()
    elif kind == "buffer":
        x0 = tensors.w[:rows]
    return x0, x1, call["n"], call["f"]


def drawn_calls(random, padded):
    number = 8 if padded else 5

    def some(values, share=0.4):
        fixed = random.choice(values)
        return [random.choice(values) if random.random() < share else fixed for _ in range(number)]

    changing = padded or random.random() < 0.5
    kinds = ["new", *(some(("new", "new", "same", "twice", "overlap", "strided", "buffer"), 0.6))]
    rows, n, f = (
        some(v, 0.5 if changing else 0)
        for v in ((2, 3, 4, 5, 7, 8, 9), (1, 2, 3), (0.25, 1.5, -2.0))
    )
    if padded:
        rows, n = some((2, 3, 4, 5, 7, 8, 9), 1), some((2,))
    parts = zip(kinds, rows, n, f, strict=False)
    return [
        dict(zip(("kind", "rows", "n", "f"), p, strict=True), seed=i) for i, p in enumerate(parts)
    ]


def drawn_program(random, calls, padded):
    """(source, names returned): every statement runs for every call."""
    envs = []
    for call in calls:
        tensors = Tensors()
        plain = {**call, "kind": "strided" if call["kind"] == "strided" else "new"}
        values = arguments(plain, tensors, None)
        env = dict(zip(("x0", "x1", "n", "f"), values, strict=True))
        envs.append({**env, "w": tensors.w, "b0": tensors.b0, "b1": tensors.b1})
    lines = []
    for attempt in range(40):
        if len(lines) >= (7 if padded else 10):
            break
        text = statement(random, envs[0], f"t{attempt}", padded)
        trial = [copy.deepcopy(env) for env in envs]
        try:
            for env in trial:
                exec(text, ENV, env)
                assert all(v.numel() < 400 for v in env.values() if isinstance(v, Tensor))
        except Exception:  # a statement that does not run is not part of the program
            continue
        envs = trial
        lines.append(text)
    made = [k for k, v in envs[0].items() if isinstance(v, Tensor)]
    returned = [k for k in made if random.random() < 0.5] or ["x0"]
    head = "w, b0, b1 = m.w, m.b0, m.b1"
    body = "\n".join([head, *lines, f"return {', '.join(returned)}, n"])
    return "def fn(m, x0, x1, n, f):\n" + textwrap.indent(body, "    ") + "\n"


def function(source):
    name = f"<random program {next(NUMBER)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = dict(ENV)
    exec(compile(source, name, "exec"), namespace)
    return namespace["fn"]


def assert_equal(got, want, exact):
    """Equal, with equal strides in every dim longer than one, where strides mean something.

    To the bit, but for padded programs, whose kernels run at another size.
    """
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
    for g, w in zip(tensors_of(got), tensors_of(want), strict=True):
        if w.numel():
            assert [s for s, n in zip(g.stride(), w.shape, strict=True) if n > 1] == [
                s for s, n in zip(w.stride(), w.shape, strict=True) if n > 1
            ]


def in_eager(fn, calls, device):
    """Whether the program runs in eager, and in Dynamo without this backend."""
    fake = torch.compile(fn, backend="eager")
    try:
        for run in (fn, fake):
            tensors, previous = Tensors().to(device), None
            for call in calls:
                previous = arguments(call, tensors, previous)
                run(tensors, *previous)
    except Exception:
        return False
    return True


def churn(random, device):
    """Takes memory of the sizes that programs use, fills it and frees it."""
    for _ in range(random.randrange(4)):
        torch.full((random.choice((8, 16, 32, 64)),), float("nan"), device=device)


def compare(seed, device, note=print):
    """One program, compiled and eager, call by call."""
    random = Random(seed)
    padded = random.random() < 0.5
    calls = drawn_calls(random, padded)
    source = drawn_program(random, calls, padded)
    options = {"on_eager_call": "count"}
    if padded:
        options |= {"buckets": random.choice(([4, 8, 12], [16], [2, 3, 5, 9])), "max_padding": 8}
    if random.random() < 0.5:
        options["check"] = random.choice(("poison", "address,poison", "verify,poison"))
    note(f"{source}\n{calls}\n{options}")
    fn = function(source)
    torch._dynamo.reset()
    torch_bcg.reset()
    if not in_eager(fn, calls, device):
        return
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="bcg", options=options)
    mine, twins = Tensors().to(device), Tensors().to(device)
    got_args = want_args = None
    exact = not padded
    kept = []
    for call in calls:
        churn(random, device)
        got_args = arguments(call, mine, got_args)
        want_args = arguments(call, twins, want_args)
        want, got = fn(twins, *want_args), compiled(mine, *got_args)
        ours, theirs = (
            (got_args, dict(mine.state_dict()), got),
            (want_args, dict(twins.state_dict()), want),
        )
        assert_equal(ours, theirs, exact)
        assert sharing(tensors_of(ours)) == sharing(tensors_of(theirs))
        assert returned_arguments(*ours) == returned_arguments(*theirs)
        kept.append((got, want))
    for got, want in kept:
        assert_equal(got, want, exact)


@contextlib.contextmanager
def quiet():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@hypothesis.settings(max_examples=150, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(seed=st.integers(0, 2**32))
def test_a_random_program_gives_what_eager_gives(device, seed):
    with quiet():
        compare(seed, device, hypothesis.note)


def main(device, first, last):
    """Tries seeds outside pytest and says which fail."""
    failed, padded = [], 0
    with quiet():
        for seed in range(int(first), int(last)):
            told, before = [], torch_bcg.stats().pad_rows
            try:
                compare(seed, device, told.append)
            except Exception as error:  # every failure is shown, whatever it is
                failed.append(seed)
                print(f"seed {seed}: {type(error).__name__}: {error}\n", *told, flush=True)
            padded += torch_bcg.stats().pad_rows > before
    agree = int(last) - int(first) - len(failed)
    print(f"{agree} agree ({padded} padded), {len(failed)} differ: {failed}")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
