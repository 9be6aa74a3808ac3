"""What a mask is made of: read off the graph nodes that build it, so that nothing is run and no model needs an adapter.

Models repeat a mask over keys for every head, or multiply it with its own transpose:

    m.repeat_interleave(H, 0).view(B, H, 1, S)        [B,H,1,S]     LTX, PixArt, Sana, ...
    r & r.transpose(2, 3), r = m.view(B, 1, 1, S).repeat(1, 1, S, 1)
                                                      [B,1,S,S]     HunyuanVideo-1.5, anew in each block
    m[:, None, None, :] * m[:, None, :, None]         [B,1,S,S]     Chroma, boolean

Followed upwards, through what only moves or repeats values and through the boolean "and", each of these ends in m [B,S], along the keys,
along the queries, or along both. The operator takes that as a key mask [B|1,1,1,Skv] and a query mask [B|1,1,Sq,1]: a row keeps the same
keys, and one that had none gives 0. For such rows SDPA promises nothing: it gives 0 on the CPU and in the math and efficient kernels, and
some finite number in cuDNN's, the default for a boolean mask in bfloat16 on an H200 (run: 2.13 on the CPU, 2.11 on both). Only rows that
a model hides again by a mask can be such rows.

No mask, and left alone: a product of floating-point masks. It is added to the scores, where its 0 hides nothing (Chroma's pipeline makes
one); and a query mask for a joint attention that has a key mask alone: its padding rows have results, which a model might use.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

Dims = tuple[int | None, ...]

_AND = {"and_", "bitwise_and", "logical_and", "mul"}
_UNCHANGED = {"bool", "to", "contiguous", "clone"}
_REPEATED = {"expand", "repeat", "repeat_interleave"}
_RESHAPED = {"view", "reshape", "squeeze", "unsqueeze", "getitem"}
_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_WRITE_FIRST = {operator.setitem, *(getattr(operator, f"i{name}") for name in _AUGMENTED)}
_WRITE_NOTHING = {operator.and_, operator.or_}  # despite the underscore


@dataclass(frozen=True)
class Part:
    """A tensor of the graph spread over a mask [B,H,Sq,Skv]: dims[i] is its dimension along i, None where the mask does not vary."""

    source: Node
    dims: Dims

    @property
    def is_key_mask(self) -> bool:
        return self.dims[1] is None and self.dims[2] is None

    @property
    def is_query_mask(self) -> bool:
        alike = self.dims[1] is None and self.dims[3] is None and not self.is_key_mask
        return alike and _example(self.source).dtype == torch.bool

    @property
    def in_order(self) -> bool:
        """Can indexing alone make the mask of source?"""
        dims = [d for d in self.dims if d is not None]
        return dims == sorted(dims)

    @property
    def index(self) -> tuple[Any, ...] | None:
        """`source[index]` has the mask's four dimensions, of size 1 where it does not vary. None if source broadcasts as it is."""
        shape = _example(self.source).shape
        own = _aligned(shape, 4)
        if all(d == o or (d is None and _is_one(shape[o])) for d, o in zip(self.dims, own, strict=True) if o is not None):
            return None
        index: list[Any] = []
        following = 0
        for d in self.dims:
            index += [None] if d is None else [*[0] * (d - following), slice(None)]
            following = following if d is None else d + 1
        return (*index, *[0] * (len(shape) - following))

    @property
    def example(self) -> Tensor:
        """What `source[index]` looks like, fake."""
        source = _example(self.source)
        return source if self.index is None else source[self.index]


class MaskReader:
    """Takes the masks of one graph apart."""

    def __init__(self, graph: Graph) -> None:
        self._position = {node: position for position, node in enumerate(graph.nodes)}
        self._last_write = {_storage(n): position for node, position in self._position.items() for n in _written_by(node)}

    def key_and_query_mask(self, mask: Node) -> tuple[Part | None, Part | None]:
        """The key mask [B|1,1,1,Skv] and the boolean query mask [B|1,1,Sq,1] whose "and" is `mask`; (None, None) if there are none."""
        if _example(mask).dim() > 4:
            return None, None
        whole = _part(mask, _aligned(_example(mask).shape, 4))
        for parts in (self._parts(whole), {whole}):
            keys = [part for part in parts if part.is_key_mask]
            queries = [part for part in parts if part.is_query_mask]
            if len(keys) <= 1 and len(queries) <= 1 and len(parts) == len(keys + queries) and all(part.in_order for part in parts):
                return next(iter(keys), None), next(iter(queries), None)
        return None, None

    def _parts(self, whole: Part) -> set[Part]:
        """The tensors whose "and" is `whole`, each as far up the graph as it can be followed."""
        inputs = [] if self._changes_later(whole.source) else _inputs(whole.source)
        done = len(inputs) > 1 and (whole.is_key_mask or whole.is_query_mask)
        if not inputs or done or any(self._changes_later(given) for given, _ in inputs):
            return {whole}
        parts = (_part(given, tuple(None if d is None else of[d] for d in whole.dims)) for given, of in inputs)
        return set().union(*map(self._parts, parts))

    def _changes_later(self, node: Node) -> bool:
        """Is it written to after it was made, perhaps through a view? Then it need not be what it was made of."""
        return self._last_write.get(_storage(node), -1) > self._position[node]


def _part(source: Node, dims: Dims) -> Part:
    shape = _example(source).shape
    return Part(source, tuple(None if d is None or _is_one(shape[d]) else d for d in dims))


def _inputs(node: Node) -> list[tuple[Node, Dims]]:
    """The tensors that `node` is made of by moving, repeating or and-ing values, each with its dimension along every dimension of `node`.

    None of them where that is not what `node` does, or where it cannot be proven.
    """
    tensors = [n for n in node.all_input_nodes if _has_example(n)]
    if not tensors or not _has_example(node) or [a for a in node.args if a in tensors] != tensors:
        return []
    name, made = _name(node), _example(node)
    if any((_example(n).dtype, _example(n).device) != (made.dtype, made.device) for n in tensors):
        return []
    shapes = [_example(n).shape for n in tensors]
    if name in _AND and made.dtype == torch.bool and len(tensors) == len(node.args):
        found = [_broadcast(shape, made.shape) for shape in shapes]
    elif len(tensors) > 1:
        return []
    elif name in _UNCHANGED:
        found = [_aligned(made.shape, made.dim())]
    elif name in _REPEATED:
        found = [_broadcast(shapes[0], made.shape) if name != "repeat_interleave" or _interleaved_dim(node) is not None else None]
    elif name == "transpose":
        found = [_transposed(made.dim(), *node.args[1:])]
    elif name in _RESHAPED and (name != "getitem" or _only_adds_dims(node.args[1])):
        if name in ("view", "reshape") and (per_head := _heads_from_batch(tensors[0], made.shape)) is not None:
            return [per_head]
        found = [_reshaped(shapes[0], made.shape)]
    else:
        return []
    return [] if None in found else list(zip(tensors, found, strict=True))  # type: ignore[arg-type]


def _aligned(shape: Sequence[Any], rank: int) -> Dims:
    """Dimensions of a tensor broadcast to `rank` dimensions: the last ones are its own."""
    return (*[None] * (rank - len(shape)), *range(len(shape)))


def _broadcast(given: Sequence[Any], made: Sequence[Any]) -> Dims | None:
    """The tensor is repeated along dimensions that it lacks or where it has size 1, and nowhere else."""
    dims = _aligned(given, len(made))
    fits = len(given) <= len(made) and all(d is None or _is_one(given[d]) or same_size(given[d], made[i]) for i, d in enumerate(dims))
    return dims if fits else None


def _transposed(rank: int, a: object, b: object) -> Dims | None:
    dims: list[int | None] = list(range(rank))
    if not isinstance(a, int) or not isinstance(b, int):
        return None
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


def _reshaped(given: Sequence[Any], made: Sequence[Any]) -> Dims | None:
    """The tensor gains or loses dimensions of size 1, and no others."""
    before, after = ([d for d, size in enumerate(shape) if not _is_one(size)] for shape in (given, made))
    if len(before) != len(after) or not all(same_size(given[b], made[a]) for b, a in zip(before, after, strict=True)):
        return None
    return tuple(dict(zip(after, before, strict=True)).get(d) for d in range(len(made)))


def _heads_from_batch(repeated: Node, made: Sequence[Any]) -> tuple[Node, Dims] | None:
    """If repeated is x.repeat_interleave(H, 0) and made [B,H,...] a view of it: x [B,...], which no head has for itself."""
    source = repeated.args[0] if repeated.args else None
    if _interleaved_dim(repeated) != 0 or not isinstance(source, Node) or len(made) < 2:
        return None
    given = _example(source).shape
    dims = _reshaped(given, (made[0], *made[2:]))
    if dims is None or not same_size(given[0], made[0]) or repeated.args[1] != made[1]:
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


def _written_by(node: Node) -> Sequence[Node]:
    """The tensors that a call may write to, as torch's names tell: the first one, or out=. Of a subgraph or a mutable schema: all."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) or (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable):
        return node.all_input_nodes
    name, out = _name(node), node.kwargs.get("out")
    named_so = name.endswith("_") and not name.endswith("__") and target not in _WRITE_NOTHING
    first = named_so or target in _WRITE_FIRST or node.kwargs.get("inplace")
    return [*(node.all_input_nodes[:1] if first else ()), *([out] if isinstance(out, Node) else ())]


def _name(node: Node) -> str:
    """What a call does, whether it is written as a function, as a method or as an ATen operator; "" if it is no call."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    if node.op == "call_method":
        return str(target)
    return getattr(target, "__name__", "") if node.op == "call_function" else ""


def _has_example(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _example(node: Node) -> Tensor:
    return node.meta["example_value"]


def _storage(node: Node) -> int | None:
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, Tensor) and torch._C._has_storage(example) else None


def same_size(a: int | SymInt, b: int | SymInt) -> bool:
    """Equality of sizes without a guard: symbolic sizes are equal when they are the same expression."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def _is_one(size: int | SymInt) -> bool:
    return same_size(size, 1)
