"""Running a model eagerly with some of its layers sparse, by the operator that serves, at the operating point of a config.

As `watch.py` sees it, through a torch function mode: any set of layers and any gate can be tried without compiling anything.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skip_attn_compile.calls import Schedule
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.layers import LayerName
from skip_attn_compile.operands import Operands
from skip_attn_compile.ops import attention
from skip_attn_compile.rules import policy
from skip_attn_compile.timestep import host_level, is_dense
from skip_attn_compile.watch import Watcher, kv_lens

_REPEATS = 1e-3  # relative error below which a block, run again on its inputs, gives what it gave: else it changes them, or has a state


@dataclass
class Tally:
    """Of one layer at one noise level: tiles, and the squared relative errors of its block's output with this layer alone sparse.

    NaN for a block that does not repeat its output.
    """

    visited: int = 0
    skipped: int = 0
    block_errors: list[float] = field(default_factory=list)


class Trial(Watcher):
    """`sparse` layers skip, in calls that neither their config's gate nor `cutoff` keeps dense; all others run as they are."""

    def __init__(self, models: Mapping[str, nn.Module], configs: Mapping[str, SkipConfig], schedule: Schedule | None) -> None:
        super().__init__(models, self._config_to_run, schedule)
        self._configs = configs
        self._policies = {name: policy(configs[name.component], name) for name in self.modules if name.component in configs}
        self._blocks = {layer: _block(self.modules, layer) for layer in self._policies}
        self._repeats_itself: dict[nn.Module, bool] = {}
        self._met: dict[LayerName, None] = {}  # layers that could skip, and whose block is still running
        self._comparing = False
        self._attended: Tally | None = None  # of the last call that was run here
        self.sparse: Collection[LayerName] = ()
        self.cutoff = 0.0
        self.tallies: dict[tuple[LayerName, float | None], Tally] = defaultdict(Tally)
        self.first_input: Tensor | None = None  # of the models, in one run
        self.last_output: Any = None

    def attend(self, layer: LayerName, call: Operands) -> Tensor:
        config, level = self._configs[layer.component], self._gate.running_level()
        cutoff = stronger(config.disabled_until_timestep, self.cutoff)
        gated = cutoff > 0 and (level is None or bool(is_dense(level, cutoff)))
        c0, c1 = (0.0, 0.0) if gated else self._policies[layer].control
        query, key, value, *rest = call
        keys = torch.as_tensor(kv_lens(key, call.key_mask), dtype=torch.float32, device=query.device)
        out, _, counts = attention(query, key, value, c0 + c1 / keys, *rest, config.tile_order, config.implementation)
        tally = self._attended = self.tallies[layer, host_level(level)]
        visited, skipped = counts.sum((0, 1)).tolist()
        tally.visited += visited
        tally.skipped += skipped
        return out

    def _config_to_run(self, layer: LayerName, kv_len: int) -> SkipConfig | None:
        if layer not in self._policies or self._policies[layer].reasons or kv_len < self._configs[layer.component].min_kv_len:
            return None
        if not self._comparing:
            self._met[layer] = None
        return self._configs[layer.component] if layer in self.sparse else None

    @contextmanager
    def running(self, *, compare_blocks: bool = False) -> Iterator[None]:
        """`watching`, with what goes in and comes out noted; compare_blocks: with each block run again for each layer that could skip."""
        self.first_input = self.last_output = None
        with ExitStack() as hooks:
            for model in self._models.values():
                hooks.callback(model.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                hooks.callback(model.register_forward_hook(self._leave).remove)
                for module in model.modules() if compare_blocks else ():
                    hooks.callback(module.register_forward_hook(self._compare, with_kwargs=True).remove)
            with self.watching():
                yield

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.first_input is None:
            given = tensors([*args, *kwargs.values()])
            self.first_input = given[0].to("cpu", copy=True) if given else None

    def _leave(self, model: nn.Module, args: object, output: Any) -> None:
        if not self._comparing:
            self.last_output = output

    def _compare(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._comparing:
            return
        layers = [layer for layer in self._met if self._blocks[layer] is block]
        self._met = {layer: None for layer in self._met if layer not in layers}
        self._comparing = True
        try:
            for layer in layers:
                if block not in self._repeats_itself:
                    self._repeats_itself[block] = Difference.of(output, block(*args, **kwargs)).relative < _REPEATS
                self.sparse, self._attended = (layer,), None
                error = Difference.of(output, block(*args, **kwargs)).relative
                self.sparse = ()
                if self._attended is not None:
                    self._attended.block_errors.append(error**2 if self._repeats_itself[block] else math.nan)
        finally:
            self._comparing, self.sparse = False, ()


def stronger(cutoff: float, other: float) -> float:
    """Of two gates the one that keeps more dense; 0 keeps nothing."""
    return min(cutoff, other) if cutoff and other else cutoff or other


def tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors, arrays and images (bytes in a tensor are one) in what a model or a pipeline takes or returns.

    Not those that are empty.
    """
    if isinstance(value, Tensor):
        return [value.detach()] if value.numel() and (value.is_floating_point() or value.dtype == torch.uint8) else []
    if hasattr(value, "__array_interface__"):  # NumPy's arrays, Pillow's images
        import numpy

        return tensors(torch.from_numpy(numpy.asarray(value, dtype="float32")))
    if isinstance(value, Mapping):
        return tensors(list(value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class Difference:
    """Of two outputs: the sum of squared differences, that of the squares of the first, and the number of values."""

    squares: float
    first: float
    count: int

    @classmethod
    def of(cls, first: Any, second: Any) -> "Difference":
        pairs = [(a.float(), b.float()) for a, b in zip(tensors(first), tensors(second), strict=True)]
        sums = [(float((a - b).square().sum()), float(a.square().sum()), a.numel()) for a, b in pairs]
        return cls(sum(s[0] for s in sums), sum(s[1] for s in sums), sum(s[2] for s in sums))

    @property
    def relative(self) -> float:
        """Root mean square of the difference, relative to that of the first output."""
        if self.squares and not self.first:
            return math.inf
        return math.sqrt(self.squares / self.first) if self.squares else 0.0

    def psnr(self, peak: float) -> float:
        """In dB; inf where both are equal, -inf where one is not finite. peak: largest minus smallest value that an output can have."""
        if not math.isfinite(self.squares):
            return -math.inf
        return 10 * math.log10(peak**2 * self.count / self.squares) if self.squares else math.inf


def _block(modules: Mapping[LayerName, nn.Module], layer: LayerName) -> nn.Module:
    """The innermost member of a ModuleList that holds the layer, else the layer itself."""
    path = layer.path
    while path:
        outer = path.rpartition(".")[0]
        if isinstance(modules.get(LayerName(layer.component, outer)), nn.ModuleList):
            return modules[LayerName(layer.component, path)]
        path = outer
    return modules[layer]
