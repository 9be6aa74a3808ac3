"""What one call of a graph does to the values of its tensors: which it only moves, repeats, and-s or casts, and which it may write to."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from skip_attn_compile.sizes import is_one, same_size

Dims = tuple[int | None, ...]
"""For every dimension of one tensor the dimension of another that lies along it, None where the other does not vary."""

_AND = {"and_", "bitwise_and", "logical_and", "mul"}
_UNCHANGED = {"bool", "to", "contiguous", "clone"}
_REPEATED = {"expand", "repeat"}
_RESHAPED = {"view", "reshape", "squeeze", "unsqueeze"}

_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_WRITE_FIRST = {operator.setitem, *(getattr(operator, f"i{name}") for name in _AUGMENTED)}
_WRITE_NOTHING = {operator.and_, operator.or_}  # despite the underscore


def made_of(node: Node) -> list[tuple[Node, Dims]]:
    """The tensors that `node` moves, repeats, and-s or casts (numbers to numbers), each with its dimension along every one of `node`'s.

    None of them where the call does something else, or where what it does cannot be proven. Adds no guard.
    """
    tensors = [n for n in node.all_input_nodes if _has_example(n)]
    if not tensors or not _has_example(node):
        return []
    made, given = node.meta["example_value"], [n.meta["example_value"] for n in tensors]
    cast = _name(node) == "to" and made.is_floating_point() and given[0].is_floating_point()
    if any(x.device != made.device or (x.dtype != made.dtype and not cast) for x in given):
        return []
    if _name(node) in _AND and made.dtype == torch.bool and len(given) == len(node.args):
        dims = [_broadcast(x.shape, made.shape) for x in given]
    elif len(given) == 1:
        if (of_batch := _heads_from_batch(tensors[0], made.shape)) is not None and _name(node) in _RESHAPED:
            return [of_batch]
        dims = [_moved(node, given[0].shape, made.shape)]
    else:
        return []
    return [(n, d) for n, d in zip(tensors, dims, strict=True) if d is not None] if None not in dims else []


def written_by(node: Node) -> Sequence[Node]:
    """The tensors that a call may write to, as torch's names tell: the first one, or out=. Of a subgraph or a mutable schema: all."""
    target = node.target
    overload = getattr(target, "default", None) if isinstance(target, torch._ops.OpOverloadPacket) else target
    mutable = isinstance(overload, torch._ops.OpOverload) and overload._schema.is_mutable
    if mutable or isinstance(target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes
    name, out = target if isinstance(target, str) else getattr(target, "__name__", ""), node.kwargs.get("out")
    named_so = name.endswith("_") and not name.endswith("__") and target not in _WRITE_NOTHING
    first = named_so or target in _WRITE_FIRST or node.kwargs.get("inplace")
    return [*(node.all_input_nodes[:1] if first else ()), *([out] if isinstance(out, Node) else ())]


def broadcast_dims(shape: Sequence[Any], rank: int) -> Dims:
    """A tensor's dimensions when it is broadcast to `rank` dimensions: the last ones are its own."""
    return (*[None] * (rank - len(shape)), *range(len(shape)))


def _moved(node: Node, given: Sequence[Any], made: Sequence[Any]) -> Dims | None:
    """Dimensions of the one tensor, of shape `given`, of which a call makes a tensor of shape `made`."""
    name = _name(node)
    if name in _UNCHANGED:
        return broadcast_dims(made, len(made))
    if name in _REPEATED or (name == "repeat_interleave" and _interleaved_dim(node) is not None):
        return _broadcast(given, made)
    if name in _RESHAPED or (name == "getitem" and _only_adds_dims(node.args[1])):
        return _reshaped(given, made)
    if name == "transpose" and len(node.args) == 3:
        dims = list(range(len(made)))
        _, a, b = node.args
        dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
        return tuple(dims)
    return None


def _broadcast(given: Sequence[Any], made: Sequence[Any]) -> Dims | None:
    """The tensor is repeated along dimensions that it lacks or where it has size 1, and nowhere else."""
    dims = broadcast_dims(given, len(made))
    fits = len(given) <= len(made) and all(d is None or is_one(given[d]) or same_size(given[d], made[i]) for i, d in enumerate(dims))
    return dims if fits else None


def _reshaped(given: Sequence[Any], made: Sequence[Any]) -> Dims | None:
    """The tensor gains or loses dimensions of size 1, and no others."""
    before, after = ([d for d, size in enumerate(shape) if not is_one(size)] for shape in (given, made))
    if len(before) != len(after) or not all(same_size(given[b], made[a]) for b, a in zip(before, after, strict=True)):
        return None
    of = dict(zip(after, before, strict=True))
    return tuple(of.get(d) for d in range(len(made)))


def _heads_from_batch(repeated: Node, made: Sequence[Any]) -> tuple[Node, Dims] | None:
    """If repeated is x.repeat_interleave(H, 0), and made [B,H,...] the shape of a view of it: x [B,...], the same for every head."""
    source = repeated.args[0] if repeated.args else None
    if _interleaved_dim(repeated) != 0 or not isinstance(source, Node) or not _has_example(source) or len(made) < 2:
        return None
    given = source.meta["example_value"].shape
    dims = _reshaped(given, (made[0], *made[2:]))
    if dims is None or not same_size(given[0], made[0]):
        return None
    return source, (dims[0], None, *dims[1:])


def _interleaved_dim(node: Node) -> int | None:
    """The dimension along which each element is repeated, all equally often."""
    if _name(node) != "repeat_interleave" or len(node.args) < 2 or not isinstance(node.args[1], int):
        return None
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
    return dim if isinstance(dim, int) else None


def _only_adds_dims(index: object) -> bool:
    return all(i is None or i is Ellipsis or i == slice(None) for i in (index if isinstance(index, tuple) else (index,)))


def _name(node: Node) -> str:
    """What torch calls the call, be it written as an operator, a function, a method or in ATen; "" if it is none of torch's."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::")
    if node.op == "call_method":
        return str(target)
    name = getattr(target, "__name__", "") if node.op == "call_function" else ""
    return name if name and target in (getattr(operator, name, None), getattr(torch, name, None)) else ""


def _has_example(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)
