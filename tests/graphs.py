"""Graphs as text, and an inner compiler that remembers what it was given."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from skip_attn_compile.backend import SkipBackend, backend
from skip_attn_compile.config import SkipConfig

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.bool: "b8", torch.int64: "i64"}


class Recorder:
    """Runs graphs as they are. `graphs` are the modules that it was asked to compile, so `len(graphs)` is the number of compilations."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.keywords: list[dict[str, Any]] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.keywords.append(keywords)
        return gm.forward


def recording_backend(config: SkipConfig, **keywords: Any) -> tuple[SkipBackend, Recorder]:
    recorder = Recorder()
    return backend(config, inner=recorder, **keywords), recorder


def graph_text(gm: GraphModule) -> str:
    """One line for each node, `name: dtype[shape] = function(arguments)`, without the spelling of Dynamo's names."""
    names: dict[Node, str] = {}
    for node in gm.graph.nodes:
        name = _short(node)
        names[node] = f"{name}_" if name in names.values() else name
    return "\n".join(_line(node, names) for node in gm.graph.nodes)


def targets(gm: GraphModule) -> list[str]:
    """The functions that the graph calls, in order."""
    return [_target(node) for node in gm.graph.nodes if node.op.startswith("call")]


def _line(node: Node, names: dict[Node, str]) -> str:
    arguments = [_argument(a, names) for a in node.args] + [f"{name}={_argument(a, names)}" for name, a in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(_argument(a, names) for a in node.args[0])}"
    left = names[node] + _type(node)
    return left if node.op == "placeholder" else f"{left} = {_target(node)}({', '.join(arguments)})"


def _short(node: Node) -> str:
    name = node.name
    if node.op == "placeholder":
        name = re.sub(r"_?(modules|parameters|buffers)_+", "_", re.sub(r"^[lL]_(self_)?", "", name)).strip("_")
    return name


def _type(node: Node) -> str:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return ""
    return f": {_DTYPES.get(example.dtype, str(example.dtype))}[{', '.join(map(str, example.shape))}]"


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target.__name__.removesuffix('.default')}"
    return target if isinstance(target, str) else target.__name__


def _argument(argument: object, names: dict[Node, str]) -> str:
    if isinstance(argument, Node):
        return names[argument]
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument(a, names) for a in argument)}]"
    return repr(argument)
