"""Numbers in plans: what follows the call, what is of the key, what is made once."""

import torch

from graph.traced import homes, planned
from torch_bcg.graph.ir import Reason
from torch_bcg.graph.sizes import geometries
from twin import plus_one


def rows(*shape):
    return torch.randn(shape or (4, 6))


def test_what_is_made_from_numbers_alone_is_made_once():
    """Where making it waits for the device, it is no cut."""
    graph = planned(lambda x: plus_one(x + torch.full((6,), 2.0)), rows())
    assert "full" not in homes(graph.plan)
    assert graph.plan.segments[0].nodes == ("full", "add")
    graph.found["full"] = Reason("host read", "full")
    graph.make_plan()
    assert homes(graph.plan)["full"] == "constant"
    assert graph.plan.segments[0].nodes == ("add",)


def test_number_slots_only_where_the_bits_stay():
    def fn(x, n):
        return plus_one(x) * n, x**n, x / n, x.clamp(max=n)

    plan = planned(fn, rows(), 3, dynamic=True).plan
    (slot,) = plan.number_slots
    assert slot.dtype == "float32"
    uses = [r.detail.split(" ")[0] for r in plan.reasons if r.kind == "number"]
    assert uses == ["pow", "truediv", "clamp"]


def test_geometries_are_numbers_once_the_key_is_known():
    plan = planned(lambda x: plus_one(x.t()) * 2, rows(4, 6), dynamic=True).plan
    at = geometries(plan)
    assert len(plan.symbols) == 2
    for key in ((4, 6), (6, 4), (9, 2)):
        found = at(*key)
        sizes = {v.name: found[v.name][0] for v in plan.values if v.spec}
        assert sorted(sizes["l_x_"]) == sorted(key)
        bridge = next(v.name for v in plan.values if v.home == "bridge")
        assert sizes[bridge] == sizes["l_x_"][::-1]
