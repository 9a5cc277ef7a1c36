"""Who may import whom, who may touch CUDA, and which words are used: read from the source."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "torch_bcg"

# From the ground up; "" is the package itself, that is its __init__.py.
ORDER = [
    {"errors", "counters"},
    {"option_values"},
    {"options", "marking"},
    {"graph"},
    {"metadata"},
    {"runtime"},
    {"report"},
    {"sources"},
    {"frame"},
    {"rows"},
    {"passes"},
    {"eager"},
    {"attributes", "direct"},
    {"compiled"},
    {"dynamo"},
    {"handle"},
    {"programs"},
    {"explain", "warm_up"},
    {""},
    {"serving"},
    {"dsv4"},
    {"commands"},
    {"__main__"},
]
LEVEL = {unit: level for level, units in enumerate(ORDER) for unit in units}

LOCAL_IMPORTS = {
    ("commands/tables.py", "rich"): "an optional extra: --json and doctor do without it",
    ("warm_up.py", "rich"): "an optional extra: without it warming up logs instead",
    ("dsv4/attention.py", "torch_bcg"): "its kernels import Triton, which only a GPU needs",
    ("dsv4/compressor.py", "torch_bcg"): "its kernels import Triton, which only a GPU needs",
    ("dsv4/indexer.py", "torch_bcg"): "its kernels import Triton, which only a GPU needs",
}
CUDA = {
    "runtime/": "recorders and pools are the code for CUDA",
    "__main__.py": "asks whether there is a GPU, to choose the default of --device",
    "commands/doctor.py": "names the GPUs",
}
BANNED = {
    *("split", "break", "fallback", "piece", "chunk", "subgraph", "region"),
    *("manager", "helper", "util"),
}
# What belongs to Python, PyTorch or a model, quoted as it is called there.
PHRASES = {
    r"graph breaks?": "Dynamo's word for where it ends a graph",
    r"context managers?": "Python's",
    r"after a break": "a graph break of Dynamo's",
    r"breaks it": "the verb: to damage",
    r"grouped_mm_fallback": "an operator of transformers",
}


# Words of others that one module has to use for what they name there.
WORDS = {
    ("graph/inline.py", "region"): "torch.compiler.nested_compile_region",
    ("dsv4/requests.py", "chunk"): "chunked prefill, as every engine calls it",
}


def modules():
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text()) for p in ROOT.rglob("*.py")}


MODULES = modules()


def name_of(path):
    """``graph/ir.py`` -> ``torch_bcg.graph.ir``."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(["torch_bcg", *(p for p in parts if p != "__init__")])


NAMES = {name_of(path) for path in MODULES}


def unit_of(name):
    """``torch_bcg.graph.ir`` -> ``graph``."""
    return [*name.split("."), ""][1]


def imports_of(tree):
    """(node, name of a module of this package) of every import of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, a.name) for a in node.names if a.name.startswith("torch_bcg"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_bcg"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node, inner if inner in NAMES else node.module


def test_every_module_has_its_level():
    assert {unit_of(name) for name in NAMES} - LEVEL.keys() == set(), "say in ORDER where it stands"


@pytest.mark.parametrize("path", sorted(MODULES))
def test_imports_go_downward(path):
    mine = unit_of(name_of(path))
    wrong = [
        name
        for _, name in imports_of(MODULES[path])
        if unit_of(name) != mine and LEVEL[unit_of(name)] >= LEVEL[mine]
    ]
    assert wrong == [], f"{path} imports what stands above it"


def test_no_module_imports_itself_through_others():
    graph = {
        name_of(path): {n for _, n in imports_of(tree)} - {name_of(path)}
        for path, tree in MODULES.items()
    }
    # A folder's __init__ re-exports its modules; they never import from it.
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}


@pytest.mark.parametrize("folder", ["graph", "report"])
def test_planning_and_reporting_know_no_runtime(folder):
    for path, tree in MODULES.items():
        if path.startswith(f"{folder}/"):
            assert [n for _, n in imports_of(tree) if unit_of(n) == "runtime"] == [], path


def test_commands_are_imported_by_the_command_line_alone():
    for path, tree in MODULES.items():
        if path != "__main__.py" and not path.startswith("commands/"):
            assert [n for _, n in imports_of(tree) if unit_of(n) == "commands"] == [], path


def test_no_import_hides_in_a_function():
    found = set()
    for path, tree in MODULES.items():
        top = {id(n) for n in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top:
                name = getattr(node, "module", None) or node.names[0].name
                found.add((path, name.split(".")[0]))
    assert found == set(LOCAL_IMPORTS)


def test_only_the_runtime_touches_cuda():
    found = set()
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
                found.add(next((allowed for allowed in CUDA if path.startswith(allowed)), path))
    assert found == set(CUDA)


def test_no_folder_holds_a_single_module():
    for folder in (p for p in ROOT.rglob("*") if p.is_dir() and list(p.glob("*.py"))):
        assert len([p for p in folder.glob("*.py") if p.name != "__init__.py"]) > 1, folder.name


# One word for one thing.


def words_of(text):
    """Words of prose and of names: ``make_Plan``, ``PlanMaker`` -> make, plan; plan, maker."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+", spaced)}


def banned_in(text):
    for phrase in PHRASES:
        text = re.sub(phrase, "", text)
    words = words_of(text)
    found = {w for w in BANNED if w in words or f"{w}s" in words}
    return found | {"fall back"} if re.search(r"\bfall(s|ing)? back\b", text) else found


def names_defined(tree):
    """Names that this package chose: of what it defines, and of arguments and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def texts_of(source, tree):
    """Comments, docstrings and sentences; no single words, which may name things of torch."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


@pytest.mark.parametrize("path", sorted(MODULES))
def test_one_word_for_one_thing(path):
    source = (ROOT / path).read_text()
    names = [*name_of(path).split("."), *names_defined(MODULES[path])]
    for text in (*names, *texts_of(source, MODULES[path])):
        assert {w for w in banned_in(text) if (path, w) not in WORDS} == set(), text
