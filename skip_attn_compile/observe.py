"""Measuring a model while it runs as it is: each scaled_dot_product_attention call goes through `measure`, dense, and is counted.

The counts stay on the device for a while, and are then added to histograms. Their number depends on the model, the schedule and the range
of lengths, not on how much is run: see `length_bin` and `_MOST_LEVELS`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skip_attn_compile.calls import Schedule
from skip_attn_compile.layers import LayerName
from skip_attn_compile.measure import measure
from skip_attn_compile.operands import Operands
from skip_attn_compile.timestep import Level, float32, host_level
from skip_attn_compile.watch import Want, Watcher, kv_lens

_MOST_CALLS = 4096  # that wait on a device: a pipeline of 40 layers and 50 steps waits once, a loop over many prompts stays small
# Noise levels that are told apart exactly. A schedule repeats its own, at most 1,000. Of a loop that draws t at random, any further one
# counts at the next 1/1000 above it: still right for a gate with three decimals, and at most 1,001 more.
_MOST_LEVELS = 1024


@dataclass(frozen=True)
class Cell:
    """What a histogram is kept for: the calls of one layer, at lengths of one `length_bin` and one noise level (float32, None unknown)."""

    component: str
    layer: str
    length_bin: int
    t: float | None


@dataclass
class _Call:
    layer: LayerName
    kv_len: int | Tensor  # a tensor where a mask leaves some of them: their mean over the batch
    t: float | Tensor | None
    counts: Tensor  # int64 [1 + n] on the call's device


class Observer(Watcher):
    """`take` gives the histograms of all calls since the last time: [tiles visited, skipped at each threshold ..., visited times keys]."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        want: Want,
        schedule: Schedule | None,
        thresholds: Sequence[float],
        tile_order: str,
        tile: tuple[int, int],
    ) -> None:
        super().__init__(models, want, schedule)
        self._thresholds, self._tile_order, self._tile = thresholds, tile_order, tile
        self._on_device: dict[torch.device, Tensor] = {}
        self._calls: list[_Call] = []
        self._found: dict[Cell, list[int]] = {}
        self.levels: set[float] = set()  # that are told apart

    def attend(self, layer: LayerName, call: Operands) -> Tensor:
        query, key, value, *rest = call
        if query.device not in self._on_device:
            self._on_device[query.device] = torch.tensor(self._thresholds, dtype=torch.float32, device=query.device)
        out, counts = measure(query, key, value, self._on_device[query.device], *rest, self._tile_order, *self._tile)
        kv_len, level = _mean(kv_lens(key, call.key_mask)), self._gate.running_level()
        self._calls.append(_Call(layer, kv_len, level, counts.sum((0, 1), dtype=torch.int64)))
        if len(self._calls) >= _MOST_CALLS:
            self._fold()
        return out

    def take(self) -> dict[Cell, list[int]]:
        self._fold()
        found, self._found = self._found, {}
        return found

    def _fold(self) -> None:
        """The calls into their histograms. Waits for the device; else only `key_and_query_mask` does, for masks written out."""
        calls, self._calls = self._calls, []
        for call in calls:
            kv_len, (visited, *skipped) = round(float(call.kv_len)), call.counts.tolist()
            if visited == 0:  # all masked, or no tokens
                continue
            cell = Cell(call.layer.component, call.layer.path, length_bin(kv_len, self._tile[1]), self._level(call.t))
            counts, before = [visited, *skipped, visited * kv_len], self._found.get(cell)
            self._found[cell] = counts if before is None else [a + b for a, b in zip(before, counts, strict=True)]

    def _level(self, given: Level | None) -> float | None:
        t = host_level(given)
        if t is None:
            return None
        if t not in self.levels and len(self.levels) >= _MOST_LEVELS:
            t = float32(math.ceil(1000 * t - 1e-4) / 1000)  # 1e-4: float32(.9) stays .9
        self.levels.add(t)
        return t


def length_bin(kv_len: int, tile_k: int) -> int:
    """The number of the bin of lengths that share a curve: one key tile each up to 20 tiles, then 5 % each.

    So prompts of any length make few curves: 20 up to 2,560 keys, 111 up to 240,000. A curve is one at the mean of its lengths: one length
    alone stays what it is, and of several the mean share is right, as shares grow with the logarithm of the length.
    """
    tiles = kv_len / tile_k
    return math.ceil(tiles if tiles <= 20 else 20 + 20 * math.log(tiles / 20))


def _mean(kv_len: int | Tensor) -> int | Tensor:
    return kv_len.float().mean() if isinstance(kv_len, Tensor) else kv_len
