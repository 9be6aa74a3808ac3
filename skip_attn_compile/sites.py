"""What the graph holds: every scaled-dot-product attention call, as a frozen record of facts. Decides nothing, changes nothing."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from skip_attn_compile.composites import is_composite
from skip_attn_compile.masks import MaskReader, Part
from skip_attn_compile.sizes import Size, static_size

SDPA_TARGETS = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class AttentionSite:
    """One SDPA call of a graph. Shapes are those of the example inputs; sizes may be symbolic."""

    node: Node
    arguments: dict[str, Any]  # SDPA's eight arguments by name: nodes, or constants
    module_ids: tuple[int, ...]  # ids of the nn.Modules that the call was traced in, innermost first; may be empty
    call_index: int  # how many SDPA calls the same module made before this one in this graph
    query: torch.Tensor | None  # [B,Hq,Sq,D], fake; None where the graph does not say
    key: torch.Tensor | None  # [B,Hkv,Skv,D]
    value: torch.Tensor | None  # [B,Hkv,Skv,Dv]
    mask: torch.Tensor | None  # broadcasts to [B,Hq,Sq,Skv]
    dtype: torch.dtype | None  # of the result: autocast may cast the inputs first
    nested: bool  # inside a subgraph of a higher-order operator (checkpoint, cond)
    key_mask: Part | None = None  # the mask as [B|1,1,1,Skv], and-ed with
    query_mask: Part | None = None  # boolean [B|1,1,Sq,1]; where both are None it cannot be written so

    @property
    def kv_len(self) -> Size | None:
        """Number of keys; an int where it is static."""
        return None if self.key is None or self.key.dim() != 4 else static_size(self.key.shape[2])


def find_sites(gm: GraphModule) -> list[AttentionSite]:
    """Every SDPA call in `gm`, in call order, those in nested graphs last."""
    calls_of_module: Counter[tuple[int, ...]] = Counter()
    masks_of = cache(MaskReader)
    sites = []
    for graph_module, node, nested in _sdpa_nodes(gm):
        module_ids = _module_ids(node)
        arguments = _arguments(graph_module, node)
        result, mask = _example(node), _example(arguments["attn_mask"])
        key_mask = query_mask = None
        if mask is not None:
            key_mask, query_mask = masks_of(node.graph).key_and_query_mask(arguments["attn_mask"])
        sites.append(
            AttentionSite(
                node=node,
                arguments=arguments,
                module_ids=module_ids,
                call_index=calls_of_module[module_ids],
                query=_example(arguments["query"]),
                key=_example(arguments["key"]),
                value=_example(arguments["value"]),
                mask=mask,
                dtype=None if result is None else result.dtype,
                nested=nested,
                key_mask=key_mask,
                query_mask=query_mask,
            )
        )
        calls_of_module[module_ids] += 1
    return sites


def _sdpa_nodes(gm: GraphModule, nested: bool = False) -> Iterator[tuple[GraphModule, Node, bool]]:
    for node in gm.graph.nodes:
        if (node.op == "call_function" and node.target in SDPA_TARGETS) or is_composite(node):
            yield gm, node, nested
    for child in gm.children():
        if isinstance(child, GraphModule):
            yield from _sdpa_nodes(child, True)


def _arguments(gm: GraphModule, node: Node) -> dict[str, Any]:
    if is_composite(node):  # it could not be opened, so what it gives SDPA is not known
        return dict.fromkeys(_ARGUMENTS)
    normalized = node.normalized_arguments(gm, normalize_to_only_use_kwargs=True)
    if normalized is None:
        raise RuntimeError(f"FX could not normalise the arguments of {node.format_node()}; please report this graph")
    arguments = dict(normalized.kwargs)
    dropout_p = arguments["dropout_p"]
    if isinstance(dropout_p, Node) and isinstance(value := dropout_p.meta.get("example_value"), torch.SymFloat):
        arguments["dropout_p"] = float(value)  # under dynamic=True a Python default is symbolic too: a guard makes it the constant it is
    return arguments


def _module_ids(node: Node) -> tuple[int, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    # The keys are str(id(module)), with "@n" appended from the module's second call on; the names inside are not stable.
    return tuple(int(key.split("@")[0]) for key in reversed(stack) if key.split("@")[0].isdigit())


def _example(argument: Any) -> torch.Tensor | None:
    value = argument.meta.get("example_value") if isinstance(argument, Node) else None
    return value if isinstance(value, torch.Tensor) else None
