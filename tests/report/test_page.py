"""The page: whole, self-contained, escaped, and with every segment on it."""

import re
from html.parser import HTMLParser

import pytest
import torch

from report.shown import Layers, Untagged, called, compiler, explained, mixed
from torch_bcg.errors import BCGWarning
from torch_bcg.graph import ir
from torch_bcg.report.page import page

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Every element is closed, in order; nothing comes from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(plan, code=None, fusings=None):
    html = page(plan, code or {}, fusings)
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    assert "url(" not in html
    assert "@import" not in html
    assert checker.ids == [f"segment-{s.index}" for s in plan.segments]
    return "".join(checker.text)


def test_every_segment_reason_and_output():
    (plan,) = mixed().plans
    text = checked(plan, {0: "class graph_000: ..."})
    assert "class graph_000" in text
    for said in (
        "mark: shown::route",
        "copied back to the caller: l_total_",
        "copied to a slot: y",
    ):
        assert said in text
    assert "the caller's own copy" in text


def test_advice():
    (plan,) = called(Untagged(), (torch.ones(3),)).plans
    assert 'torch_bcg.eager_on_graph("shown::untagged")' in checked(plan)


def test_alike_layers_fold_out():
    (plan,) = explained(Layers(40), torch.ones(4, 16)).plans
    text = checked(plan)
    assert len(re.findall(r"segments \d+\.\.\d+: \d+ times segments", text)) == 1


def test_what_is_fused():
    x = torch.ones(4, 16)
    with pytest.warns(BCGWarning, match="<no> room"):
        explanation = called(Layers(3), (x,), (x,), inner=compiler(refused=4))
    (plan,) = explanation.plans
    text = checked(plan, fusings=explanation.fusings[plan.name])
    assert "Fused segments" in text
    for said in (
        "3 of 4, by 2 compilations",
        "alike 2, 4",
        "unfused 6: ValueError: <no> room",
    ):
        assert said in text
    assert "known once a program is recorded" in checked(plan, fusings=())
    assert "fused" not in checked(plan).lower()


def test_escaped():
    reason = ir.Reason("<b>", "<i>", "", "<script>&")
    segment = ir.EagerSegment(0, ("<n>",), (), (), (), module="<m>", reasons=(reason,))
    plan = ir.Plan("<p>", "cpu", (), (), (), (segment,), (), (ir.Output("literal", "<o>"),))
    text = checked(plan, {0: "</pre><script>"})
    for said in ("<p>", "<m>", "<script>&", "<o>", "</pre><script>"):
        assert said in text


def test_nothing_recorded():
    reason = ir.Reason("changed geometry", "set_")
    plan = ir.Plan("graph_0", "cpu", (), (), (), (), (), (), reason)
    assert "Nothing is recorded: changed geometry (set_)." in checked(plan)
