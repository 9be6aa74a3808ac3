"""The only graph surgery. For every site that may skip, with q [B,Hq,Sq,D], k [B,Hkv,Skv,D], v [B,Hkv,Skv,Dv] and key mask m:

    before                                       after
    out = scaled_dot_product_attention(q,k,v,m)  lam = control[:, 0] + control[:, 1] / Skv          once per key length
    return (out,)                                out, lse, n = skip_attn_compile.attention(q, k, v, lam[i], m, None, causal, ...)
                                                 tiles = stack([n.sum((0, 1)), ...])                [n_sites, 2] int64
                                                 clamped = stack([(lam >= 1)[i], ...])              [n_sites]
                                                 counts = cat([tiles, clamped[:, None]], 1)         [n_sites, 3] int64
                                                 return (out, counts)

`control` float32 [n_sites, 2] is a new last input, so that lambda changes without a recompile; `counts` is a new last output, so that
counting needs no side effect, which would keep CUDA graphs from being recorded.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.masks import Part, keys_left, per_sample
from skip_attn_compile.ops import attention, attention_lambda_on_host
from skip_attn_compile.sites import AttentionSite

_EXTRA_ATTRIBUTES = ("_param_name_to_source", "_source_to_user_stacks")


def copy_graph_module(gm: GraphModule) -> GraphModule:
    """A copy whose graph can be changed: Dynamo still reads the placeholders of the original after the backend returns."""
    graph = Graph()
    nodes: dict[Node, Node] = {}
    result = graph.graph_copy(gm.graph, nodes)
    graph.output(result)
    for original, copied in nodes.items():
        if original.op == "placeholder":
            copied._dynamo_source = getattr(original, "_dynamo_source", None)  # an attribute, which copying loses
    copy = GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for name in _EXTRA_ATTRIBUTES:
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy


def rewrite(
    gm: GraphModule,
    sites: Sequence[AttentionSite],
    on_host: Sequence[bool],
    config: SkipConfig,
    control: torch.Tensor,
    device: torch.device,
) -> None:
    """Replace `sites` by the operator, in place.

    on_host: of each site, whether its kernel takes lambda on the host. control: float32 [n_sites, 2], an example of the new last input,
    on the CPU if any does. device: where the counts are gathered.
    """
    graph = gm.graph
    control_input = _add_control_input(graph, control)
    lambdas = {any(on_host): _Lambdas(graph, control_input, config.min_kv_len, None if control.device == device else device)}
    if any(on_host) and not all(on_host):
        with graph.inserting_after(control_input):
            lambdas[False] = _Lambdas(graph, _moved(graph, control_input, device), config.min_kv_len)
    counts: list[Node] = []
    current: list[AttentionSite] = []
    replaced: dict[Node, Node] = {}
    masks: dict[Part, Node] = {}
    for index, found in enumerate(sites):
        site = _with_current_arguments(graph, found, replaced, masks)
        current.append(site)
        threshold = lambdas[on_host[index]].of(site, index)
        replaced[site.node], tiles = _replace(graph, site, threshold, on_host[index], config, device)
        counts.append(tiles)
    output = graph.output_node()
    with graph.inserting_before(output):
        tiles = graph.call_function(torch.stack, (counts,))
        clamped = graph.call_function(torch.stack, ([lambdas[on_host[index]].clamped(site, index) for index, site in enumerate(current)],))
        columns = [tiles, graph.call_function(torch.unsqueeze, (clamped, 1))]
        with_clamped = graph.call_function(torch.cat, (columns, 1))
    output.args = ((*output.args[0], with_clamped),)  # type: ignore[misc]
    graph.lint()
    gm.recompile()


def _add_control_input(graph: Graph, control: torch.Tensor) -> Node:
    last = graph.find_nodes(op="placeholder")[-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder("skip_attn_control")
    # AOTAutograd asserts that the attribute is there; None says that Dynamo did not make this input.
    node._dynamo_source = None
    fake_mode = torch._guards.TracingContext.get().fake_mode
    assert fake_mode is not None
    node.meta["example_value"] = fake_mode.from_tensor(control, static_shapes=True)
    return node


class _Lambdas:
    """The lambda of each site as graph nodes, computed for all sites at once for each key length: one small kernel, not one a site.

    counts_device: where `clamped` is wanted, if not where lambda is.
    """

    def __init__(self, graph: Graph, control: Node, min_kv_len: int, counts_device: torch.device | None = None) -> None:
        self._graph, self._control, self._min_kv_len, self._counts_device = graph, control, min_kv_len, counts_device
        self._of_length: dict[object, tuple[Node, Node]] = {}  # lambda and lambda >= 1 of all sites, were this their length

    def of(self, site: AttentionSite, index: int) -> Node:
        """float32 [], or [B] under a key mask. The nodes stand before the site's own."""
        key = self._key(site)
        with self._graph.inserting_before(site.node):
            if key not in self._of_length:
                lambdas = self._all_sites(site, site.kv_len)
                per_site = lambdas if not self._per_sample(site) else self._call(torch.amax, lambdas, 1)
                clamped = self._call(operator.ge, per_site, 1)
                self._of_length[key] = (
                    lambdas,
                    clamped if self._counts_device is None else _moved(self._graph, clamped, self._counts_device),
                )
            return self._call(torch.select, self._of_length[key][0], 0, index)

    def clamped(self, site: AttentionSite, index: int) -> Node:
        """Boolean []: was lambda 1 or more, for any sample? `of` has been called for the site."""
        return self._call(torch.select, self._of_length[self._key(site)][1], 0, index)

    def _key(self, site: AttentionSite) -> object:
        length = site.kv_len
        return site.arguments["attn_mask"], length if isinstance(length, int) else length.node.expr  # type: ignore[union-attr]

    def _per_sample(self, site: AttentionSite) -> bool:
        return site.mask is not None and per_sample(site.mask)

    def _all_sites(self, site: AttentionSite, length: Any) -> Node:
        call = self._call
        size = length if isinstance(length, int) else self._graph.call_method("size", (site.arguments["key"], 2))
        c0, c1 = call(torch.select, self._control, 1, 0), call(torch.select, self._control, 1, 1)
        if site.mask is None:
            lambdas = call(operator.add, c0, call(operator.truediv, c1, size))
        else:
            keys = keys_left(call, site.arguments["attn_mask"], site.mask, size)  # [] or [B]
            if self._per_sample(site):
                c0, c1 = call(torch.unsqueeze, c0, 1), call(torch.unsqueeze, c1, 1)
            lambdas = call(operator.add, c0, call(operator.truediv, c1, keys))
        if not isinstance(length, int) and self._min_kv_len > 1:
            # 1 from min_kv_len keys on, else 0; in integers of the graph, so that no guard is added
            above = call(operator.sub, size, self._min_kv_len - 1)
            lambdas = call(operator.mul, lambdas, call(torch.sym_min, call(torch.sym_max, above, 0), 1))
        return lambdas

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        return self._graph.call_function(function, args)


def _with_current_arguments(graph: Graph, site: AttentionSite, replaced: dict[Node, Node], masks: dict[Part, Node]) -> AttentionSite:
    """`site` with the operator's arguments: its masks as nodes, made once for all sites, and the results of SDPA calls replaced before."""

    def node_of(part: Part | None) -> Node | None:
        if part is None:
            return None
        if part not in masks:
            node = replaced.get(part.source, part.source)
            with graph.inserting_before(site.node):
                if part.index is not None:
                    node = graph.call_function(operator.getitem, (node, part.index))
                if part.is_cast:
                    node = graph.call_method("to", (node, part.dtype))
            node.meta.setdefault("example_value", part.example)
            masks[part] = node
        return masks[part]

    arguments = {name: replaced.get(a, a) if isinstance(a, Node) else a for name, a in site.arguments.items()}
    arguments |= {"attn_mask": node_of(site.key_mask), "query_mask": node_of(site.query_mask)}
    return dataclasses.replace(site, arguments=arguments, mask=None if site.key_mask is None else site.key_mask.example)


def _replace(
    graph: Graph, site: AttentionSite, threshold: Node, on_host: bool, config: SkipConfig, counts_device: torch.device
) -> tuple[Node, Node]:
    """Put the operator in the place of one SDPA call; returns the nodes of its result and of its counts, int64 [2]."""
    node, arguments = site.node, site.arguments
    assert site.query is not None and site.dtype is not None
    with graph.inserting_before(node):
        query, key, value = (_cast(graph, arguments[name], site.dtype) for name in ("query", "key", "value"))
        mask = arguments["attn_mask"]
        if site.mask is not None and site.mask.dtype != torch.bool:
            mask = _cast(graph, mask, site.dtype)
        if site.query.device != counts_device and not on_host:
            threshold = _moved(graph, threshold, site.query.device)
        options = (mask, arguments["query_mask"], arguments["is_causal"], arguments["scale"], config.tile_order, config.implementation)
        result = graph.call_function(attention_lambda_on_host if on_host else attention, (query, key, value, threshold, *options))
        out = graph.call_function(operator.getitem, (result, 0))
        counts = graph.call_function(torch.sum, (graph.call_function(operator.getitem, (result, 2)), (0, 1)))
        if site.query.device != counts_device:
            counts = _moved(graph, counts, counts_device)
    for new in (result, out):
        new.meta.update({name: node.meta[name] for name in ("nn_module_stack", "stack_trace", "source_fn_stack") if name in node.meta})
    out.meta["example_value"] = node.meta.get("example_value")
    node.replace_all_uses_with(out)
    _erase_unused(graph, node)
    return out, counts


def _moved(graph: Graph, node: Node, device: torch.device) -> Node:
    """On another device. A few bytes from the host are staged at once, so nothing waits; those for the host are read there next."""
    return graph.call_method("to", (node, device), {"non_blocking": device.type != "cpu"})


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase `node`, and of the tensors that it was made of those that nothing else uses: a mask [B,1,S,S] that is not read is not built."""
    if not node.users and node.op.startswith("call") and isinstance(node.meta.get("example_value"), torch.Tensor):
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for n in inputs:
            _erase_unused(graph, n)


def _cast(graph: Graph, argument: Node, dtype: torch.dtype) -> Node:
    """`argument` in the dtype of SDPA's result; differs where autocast would have cast it."""
    example = argument.meta["example_value"]
    return argument if example.dtype == dtype else graph.call_method("to", (argument, dtype))
