"""What a dump holds, and that it is whole or not there."""

import json
import re

import pytest
import torch
from expecttest import assert_expected_inline

from report.shown import Layers, Mixed, Untagged, compiled_and_called, compiler, shown
from torch_bcg.compiled import live_graphs
from torch_bcg.errors import BCGWarning
from torch_bcg.explain import explain
from torch_bcg.graph.annotate import annotated
from torch_bcg.graph.ir import Plan
from torch_bcg.report import files


def compiled_graph(model, *args):
    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(model.eval(), backend="bcg")(*args)
    graph = live_graphs()[-1]
    return graph, annotated(graph.plan, graph.lowering)


def planned(graph, plan, directory):
    return files.planned("graph_0", plan, graph.gm, graph.lowering, directory)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_files_stand_in_the_order_of_the_flow(tmp_path):
    graph, plan = compiled_graph(Mixed(), torch.ones(2), torch.zeros(()), 1.0)
    dump = planned(graph, plan, str(tmp_path))
    dump.captured({"s0": 2}, {"bytes": 64})
    dump.captured({"s0": 3}, {"bytes": 96})
    folder = tmp_path / "rank0" / "graph_0"
    assert_expected_inline(
        "\n".join(names(folder)),
        """\
00_graph.py
01_segments.txt
02_plan.json
02_plan.txt
03_segment_000.py
03_segment_001.py
03_segment_002.py
04_capture.json
05_counters.json
INDEX.md
page.html""",
    )
    assert Plan.from_json((folder / "02_plan.json").read_text()) == plan
    assert (folder / "02_plan.txt").read_text() == plan.render()
    assert json.loads((folder / "04_capture.json").read_text()) == [
        {"key": {"s0": 2}, "bytes": 64},
        {"key": {"s0": 3}, "bytes": 96},
    ]
    assert "captures" in json.loads((folder / "05_counters.json").read_text())
    index = (folder / "INDEX.md").read_text()
    for name in names(folder):
        assert name == "INDEX.md" or f"`{re.sub(r'segment_[0-9]+', 'segment_*', name)}`" in index


def test_code_of_a_segment(tmp_path):
    graph, plan = compiled_graph(Layers(), torch.ones(4, 16))
    planned(graph, plan, str(tmp_path))
    code = (tmp_path / "rank0/graph_0/03_segment_000.py").read_text()
    code = "\n".join(line for line in code.splitlines() if "# File" not in line)
    assert_expected_inline(
        code,
        """\
class graph_000(torch.nn.Module):
    def forward(self, l_self_modules_layers_modules_0_modules_up_parameters_weight_, l_self_modules_layers_modules_0_modules_up_parameters_bias_, l_x_):
        linear: "f32[4, 32][32, 1]cpu" = torch._C._nn.linear(l_x_, l_self_modules_layers_modules_0_modules_up_parameters_weight_, l_self_modules_layers_modules_0_modules_up_parameters_bias_);  l_x_ = l_self_modules_layers_modules_0_modules_up_parameters_weight_ = l_self_modules_layers_modules_0_modules_up_parameters_bias_ = None
        return (linear,)""",
    )


def test_no_dump_unless_asked_for(tmp_path):
    graph, plan = compiled_graph(Untagged(), torch.ones(3))
    assert planned(graph, plan, None) is None


def test_dump_to_comes_before_the_option_and_ends(tmp_path):
    assert files.chosen(None) is None
    with files.dump_to(tmp_path / "here") as folder:
        assert files.chosen("there") == str(tmp_path / "here")
    assert folder == tmp_path / "here" / "rank0"
    assert files.chosen("there") == "there"


def test_dump_of_a_compile(tmp_path):
    x, other = torch.ones(3), torch.ones(4)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(other, 0)
    compiled = torch.compile(Untagged(), backend="bcg")
    with torch.inference_mode():
        with files.dump_to(tmp_path / "here") as rank:
            compiled(x)
        for _ in range(2):
            compiled(other)
    (folder,) = rank.iterdir()
    assert "Probed:" in (folder / "01_segments.txt").read_text()
    assert "host read" in (folder / "02_plan.txt").read_text()
    programs = json.loads((folder / "04_capture.json").read_text())
    assert [list(p["key"].values()) for p in programs] == [[3], [4]]
    assert all(p["bytes"] > 0 for p in programs)
    torch._dynamo.reset()  # plans anew, but nothing is known better
    assert "host read" in (folder / "02_plan.txt").read_text()
    with torch.inference_mode():
        torch.compile(Untagged(), backend="bcg", options={"dump": str(tmp_path / "it")})(x)
    assert names(tmp_path) == ["here", "it"]


def test_dump_says_what_is_fused_of_the_programs_so_far(tmp_path):
    inner = compiler(refused=4, rows=64)
    x, more = torch.ones(8, 16), torch.ones(64, 16)
    options = {"inner": inner, "buckets": [8, 64], "dump": str(tmp_path)}
    compiled = compiled_and_called(Layers(3), (x,), dynamic=True, **options)
    with torch.inference_mode():
        (folder,) = (tmp_path / "rank0").iterdir()
        first = (folder / "01_segments.txt").read_text()
        assert first == str(explain(compiled))
        assert "unfused" not in first
        with pytest.warns(BCGWarning, match="<no> room"):
            compiled(more)
    both = (folder / "01_segments.txt").read_text()
    assert both == str(explain(compiled)) != first
    assert "unfused  6: ValueError: <no> room" in both
    html = (folder / "page.html").read_text(encoding="utf-8")
    assert "4 of 4, by 3 compilations" in html
    assert "unfused 6: ValueError: &lt;no&gt; room" in html
    small, large = json.loads((folder / "04_capture.json").read_text())
    assert list(small["fused"]) == ["0", "2", "4", "6"]
    assert len(set(small["fused"].values())) == 3
    assert small["fused"]["2"] == small["fused"]["4"]
    assert small["unfused"] == {}
    assert list(large["fused"]) == ["0", "2", "4"]
    assert large["unfused"] == {"6": "ValueError: <no> room"}


def test_files_of_an_older_plan_go(tmp_path):
    graph, plan = compiled_graph(Layers(3), torch.ones(4, 16))
    planned(graph, plan, str(tmp_path)).captured({}, {"bytes": 1})
    graph, plan = compiled_graph(Layers(1), torch.ones(4, 16))
    planned(graph, plan, str(tmp_path))
    folder = tmp_path / "rank0" / "graph_0"
    assert [n for n in names(folder) if n[:2] in ("03", "04", "05")] == [
        "03_segment_000.py",
        "03_segment_001.py",
        "03_segment_002.py",
    ]


def test_same_text_and_code_for_a_second_model(tmp_path):
    contents = []
    for name in ("one", "two"):
        graph, plan = compiled_graph(Layers(), torch.ones(4, 16))
        planned(graph, plan, str(tmp_path / name))
        folder = tmp_path / name / "rank0" / "graph_0"
        contents.append({n: shown((folder / n).read_text()) for n in names(folder)})
    assert contents[0] == contents[1]
    assert not any("0x7" in text for text in contents[0].values())


def test_a_failed_write_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write(path, "older")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="disk full"):
        files.write(path, "newer")
    assert path.read_text() == "older"
    assert names(tmp_path) == ["a.txt"]
