"""What Dynamo knows beyond the graph: whose code it is, what stays in place, gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext


def needs_gradients(gm: fx.GraphModule, example_inputs: Sequence[object]) -> bool:
    """Whether autograd would record the graph."""
    enabled = torch.is_grad_enabled() or any(
        n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes
    )
    return enabled and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def type_of_self() -> type | None:
    """The class of the module whose code Dynamo compiles now, if it compiles a method.

    A module is not in its own nn_module_stack, nor is one whose code is resumed after a break.
    """
    transaction = InstructionTranslator.current_tx() if TracingContext.try_get() else None
    scope = transaction.output.local_scope if transaction is not None else {}
    return type(scope["self"]) if "self" in scope else None


def static_arguments(gm: fx.GraphModule, example_inputs: Sequence[object]) -> frozenset[str]:
    """Placeholders that keep their address: parameters, buffers, module tensors, marked ones."""
    return frozenset(
        node.name
        for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        if isinstance(x, torch.Tensor)
        and (
            isinstance(x, torch.nn.Parameter)
            or hasattr(x, "_dynamo_static_input_type")
            or "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
        )
    )
