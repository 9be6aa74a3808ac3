"""Functions that Dynamo leaves whole although they call SDPA inside: opened, so that the call becomes a site of its own.

`F.multi_head_attention_forward` (nn.MultiheadAttention) is the one there is. It is traced to ATen on the fake inputs that Dynamo
recorded, and the trace is put in its place.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def has_composites(gm: GraphModule) -> bool:
    return any(is_composite(node) for node in gm.graph.nodes)


def open_composites(gm: GraphModule) -> None:
    """Replace every `F.multi_head_attention_forward` that would call SDPA by what it does, in place."""
    for node in list(gm.graph.nodes):
        if is_composite(node):
            _open(gm, node)
    gm.recompile()


def is_composite(node: Node) -> bool:
    # With need_weights it multiplies the matrices itself, and there is no SDPA call to find.
    return node.op == "call_function" and node.target is F.multi_head_attention_forward and node.kwargs.get("need_weights") is False


def _open(gm: GraphModule, node: Node) -> None:
    graph = gm.graph
    inputs = list(dict.fromkeys(node.all_input_nodes))
    examples = [n.meta.get("example_value") for n in inputs]
    if any(example is None for example in examples):
        return  # it stays whole; find_sites makes a site of it, which is kept because its shapes are not known
    body = make_fx(_as_function(node, inputs), pre_dispatch=True)(*examples)
    with graph.inserting_before(node):
        copied: dict[Node, Node] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for inner in body.graph.nodes:
            if inner.op in ("call_function", "call_method"):
                copied[inner] = graph.node_copy(inner, copied.__getitem__)
                copied[inner].meta["example_value"] = inner.meta.get("val")
                copied[inner].meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
                copied[inner].meta["stack_trace"] = node.meta.get("stack_trace")
            elif inner.op == "get_attr":
                raise RuntimeError(f"multi_head_attention_forward captured a constant, {inner.target}; please report this graph")
        result: Any = body.graph.output_node().args[0]
    for user in list(node.users):  # getitem 0 is the output, getitem 1 the absent weights: None, which Dynamo never passes on
        if user.args[1] == 0:
            user.replace_all_uses_with(copied[result[0]])
        graph.erase_node(user)
    graph.erase_node(node)


def _as_function(node: Node, inputs: list[Node]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = pytree.tree_map_only(Node, given.__getitem__, (tuple(node.args), dict(node.kwargs)))
        return F.multi_head_attention_forward(*args, **kwargs)

    return run
