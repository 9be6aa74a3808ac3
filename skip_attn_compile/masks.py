"""What a mask is made of: read off the graph nodes that build it, so that nothing is run and no model needs an adapter.

Models repeat a mask over keys for every head, or multiply it with its own transpose:

    m.repeat_interleave(H, 0).view(B, H, 1, S)        [B,H,1,S]     LTX, PixArt, Sana, ...
    r & r.transpose(2, 3), r = m.view(B, 1, 1, S).repeat(1, 1, S, 1)
                                                      [B,1,S,S]     HunyuanVideo-1.5, anew in each block
    m[:, None, None, :] * m[:, None, :, None]         [B,1,S,S]     Chroma, boolean

Followed upwards, through what only moves or repeats values and through the boolean "and", each of these ends in m [B,S], along the keys,
along the queries, or along both. The operator takes that as a key mask [B|1,1,1,Skv] and a query mask [B|1,1,Sq,1]: a row keeps the same
keys, and one that had none gives 0. For such rows SDPA promises nothing: it gives 0 on the CPU and in the math and efficient kernels, and
some finite number in cuDNN's, the default for a boolean mask in bfloat16 on an H200 (run: 2.13 on the CPU, 2.11 on both). So a model has
to hide such rows again, as those above do, or its result depends on the kernel.

No mask, and left alone: a product of floating-point masks. It is added to the scores, where its 0 hides nothing (Chroma's pipeline makes
one); and a query mask for a joint attention that has a key mask alone: its padding rows have results, which a model might use.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from skip_attn_compile.dataflow import Dims, broadcast_dims, made_of, written_by
from skip_attn_compile.sizes import is_one


@dataclass(frozen=True)
class Part:
    """A tensor of the graph spread over a mask [B,H,Sq,Skv]: dims[i] is its dimension along i, None where the mask does not vary."""

    source: Node
    dims: Dims
    dtype: torch.dtype  # the mask's; source may have another one, of the same kind

    @property
    def is_key_mask(self) -> bool:
        return self.dims[1] is None and self.dims[2] is None

    @property
    def is_query_mask(self) -> bool:
        alike = self.dims[1] is None and self.dims[3] is None and not self.is_key_mask
        return alike and self.dtype == torch.bool

    @property
    def is_cast(self) -> bool:
        return _example(self.source).dtype != self.dtype

    @property
    def in_order(self) -> bool:
        """Can indexing alone make the mask of source?"""
        dims = [d for d in self.dims if d is not None]
        return dims == sorted(dims)

    @property
    def index(self) -> tuple[Any, ...] | None:
        """`source[index]` has the mask's four dimensions, of size 1 where it does not vary. None if source broadcasts as it is."""
        shape = _example(self.source).shape
        own = broadcast_dims(shape, 4)
        if len(shape) > 0 and all(d == o or (d is None and is_one(shape[o])) for d, o in zip(self.dims, own, strict=True) if o is not None):
            return None
        index: list[Any] = []
        following = 0
        for d in self.dims:
            index += [None] if d is None else [*[0] * (d - following), slice(None)]
            following = following if d is None else d + 1
        return (*index, *[0] * (len(shape) - following))

    @property
    def example(self) -> Tensor:
        """What `source[index]` in the mask's dtype looks like, fake."""
        source = _example(self.source)
        return (source if self.index is None else source[self.index]).to(self.dtype)


class MaskReader:
    """Takes the masks of one graph apart."""

    def __init__(self, graph: Graph) -> None:
        self._position = {node: position for position, node in enumerate(graph.nodes)}
        writes = ((_storage(n), position) for node, position in self._position.items() for n in written_by(node))
        self._last_write = {storage: position for storage, position in writes if storage is not None}

    def key_and_query_mask(self, mask: Node) -> tuple[Part | None, Part | None]:
        """The key mask [B|1,1,1,Skv] and the boolean query mask [B|1,1,Sq,1] whose "and" is `mask`; (None, None) if there are none."""
        if _example(mask).dim() > 4:
            return None, None
        whole = _part(mask, broadcast_dims(_example(mask).shape, 4), _example(mask).dtype)
        for parts in (self._parts(whole), {whole}):
            keys = [part for part in parts if part.is_key_mask]
            queries = [part for part in parts if part.is_query_mask]
            if len(keys) <= 1 and len(queries) <= 1 and len(parts) == len(keys + queries) and all(part.in_order for part in parts):
                return next(iter(keys), None), next(iter(queries), None)
        return None, None

    def _parts(self, whole: Part) -> set[Part]:
        """The tensors whose "and" is `whole`, each as far up the graph as it can be followed."""
        inputs = made_of(whole.source)
        nodes = (whole.source, *whole.source.all_input_nodes, *(given for given, _ in inputs))
        split = len(inputs) > 1 and (whole.is_key_mask or whole.is_query_mask)
        rounded_twice = whole.is_cast and any(_example(given).dtype != _example(whole.source).dtype for given, _ in inputs)
        if not inputs or split or rounded_twice or any(map(self._changes_later, nodes)):
            return {whole}
        parts = (_part(given, tuple(None if d is None else of[d] for d in whole.dims), whole.dtype) for given, of in inputs)
        return set().union(*map(self._parts, parts))

    def _changes_later(self, node: Node) -> bool:
        """Is it written to after it was made, perhaps through a view? Then it need not be what it was made of, nor what was made of it."""
        storage = _storage(node)
        return storage is not None and self._last_write.get(storage, -1) > self._position[node]


def per_sample(mask: Tensor) -> bool:
    """Does each sample have its own number of keys? A key mask [B,1,1,Skv], B > 1, says so."""
    return mask.dim() == 4 and not is_one(mask.shape[0])


def keys_left(call: Callable[..., Any], mask: Any, example: Tensor, keys: Any) -> Any:
    """L, as lambda is derived from it: how many of `keys` a key mask leaves, [B] if `per_sample`, else []. At least 1: it is divided by.

    call(function, *args): the result, or the node of a graph that makes it. example: the mask, perhaps fake.
    """
    taking_part = mask if example.dtype == torch.bool else call(operator.gt, mask, float("-inf"))
    counted = call(torch.clamp_min, call(torch.sum, taking_part, -1), 1)
    if is_one(example.shape[-1]):  # one value for all keys
        counted = call(operator.mul, counted, keys)
    return call(torch.reshape, counted, [-1] if per_sample(example) else [])


def _part(source: Node, dims: Dims, dtype: torch.dtype) -> Part:
    shape = _example(source).shape
    return Part(source, tuple(None if d is None or is_one(shape[d]) else d for d in dims), dtype)


def _example(node: Node) -> Tensor:
    return node.meta["example_value"]


def _storage(node: Node) -> int | None:
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, Tensor) and torch._C._has_storage(example) else None
