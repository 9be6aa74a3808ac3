"""Measuring a model while it runs as it is: each scaled_dot_product_attention call goes through `measure`, dense, and is counted.

In eager PyTorch, through a torch function mode, so that every model can be measured, however its graphs would look. The counts stay on the
device for a while, and are then added to histograms. Their number depends on the model, the schedule and the range of lengths, not on how
much is run: see `length_bin` and `_MOST_LEVELS`.
"""

import contextlib
import functools
import math
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from skip_attn_compile.calls import Schedule
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.gate import Gate
from skip_attn_compile.kernels import choose, mask_kind
from skip_attn_compile.layers import KnownModels, LayerName
from skip_attn_compile.masks import keys_left
from skip_attn_compile.measure import measure
from skip_attn_compile.ops import problem_of
from skip_attn_compile.rules import REASONS, reasons_of_call
from skip_attn_compile.settings import Settings
from skip_attn_compile.timestep import Level, float32

Want = Callable[[LayerName, int], SkipConfig | None]  # (layer, number of keys) -> the config that would serve the call; None: not wanted

_MOST_CALLS = 4096  # that wait on a device: a pipeline of 40 layers and 50 steps waits once, a loop over many prompts stays small
# Noise levels that are told apart exactly. A schedule repeats its own, at most 1,000. Of a loop that draws t at random, any further one
# counts at the next 1/1000 above it: still right for a gate with three decimals, and at most 1,001 more.
_MOST_LEVELS = 1024


class _Eagerly:
    """While any thread is inside, what was compiled runs eagerly, in all threads: Dynamo would trace the watcher with the model."""

    def __init__(self) -> None:
        self._lock, self._inside, self._stance = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.close()


_eagerly = _Eagerly()


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


class Watcher(TorchFunctionMode):
    """While it is entered, in this thread: `attend` runs the attention calls that `want` wants, PyTorch all others."""

    def __init__(self, models: Mapping[str, nn.Module], want: Want, schedule: Schedule | None) -> None:
        """schedule: what tells the noise level of the step that is running, if not the models' own arguments."""
        super().__init__()
        self._names: dict[nn.Module, LayerName] = {}
        self.modules: dict[LayerName, nn.Module] = {}
        known = KnownModels()
        for component, model in models.items():
            for path, module in known.attach(model, component).modules():
                name = self._names.setdefault(module, LayerName(component, path))
                self.modules[name] = module
        self._models, self._want, self._schedule = models, want, schedule
        # It reads noise levels, and decides nothing.
        self._gate = Gate(Settings(SkipConfig(threshold=0.0, disabled_until_timestep=1.0), warns=False))
        self._running: list[LayerName] = []
        self.seen: dict[LayerName, None] = {}  # layers that called attention, wanted or not
        self.kept: Counter[str] = Counter()  # reasons for calls of wanted layers that serving keeps

    @abstractmethod
    def attend(
        self,
        layer: LayerName,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """The output of one call."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Enter, with the hooks that tell which module is running, and at which noise level."""
        thread = threading.get_ident()

        def enter(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread and module in self._names:
                self._running.append(self._names[module])

        def leave(module: nn.Module, *_: object) -> None:
            if threading.get_ident() == thread and module in self._names:
                self._running.pop()

        with contextlib.ExitStack() as after:
            for model in self._models.values():
                after.callback(self._gate.detach, model)
                self._gate.attach(model, None, self._schedule)
            after.callback(register_module_forward_pre_hook(enter).remove)
            after.callback(register_module_forward_hook(leave, always_call=True).remove)
            after.callback(self._running.clear)
            with _eagerly, self:
                yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._running and func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **kwargs)
        if self._running and func is F.multi_head_attention_forward:
            return self._with_calls_seen(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _with_calls_seen(self, function: Any) -> Callable[..., Any]:
        """`function` of torch.nn.functional, which a mode sees as a whole, so that the SDPA call inside it comes here."""
        sdpa = functools.partial(self._attend, F.scaled_dot_product_attention)
        names = {**function.__globals__, "scaled_dot_product_attention": sdpa, "has_torch_function": lambda _: False}
        return FunctionType(function.__code__, names, argdefs=function.__defaults__)

    def _attend(
        self,
        sdpa: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        layer = self._running[-1]
        self.seen[layer] = None
        config = self._want(layer, key.shape[-2])
        if config is not None:
            given = _operands(config, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            if not isinstance(given, list):
                return self.attend(layer, *given, is_causal, scale)
            self.kept["; ".join(given)] += 1
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


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

    def attend(
        self,
        layer: LayerName,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        if query.device not in self._on_device:
            self._on_device[query.device] = torch.tensor(self._thresholds, dtype=torch.float32, device=query.device)
        out, counts = measure(
            query, key, value, self._on_device[query.device], key_mask, query_mask, is_causal, scale, self._tile_order, *self._tile
        )
        kv_len, level = _mean(kv_lens(key, key_mask)), self._gate.running_level()
        self._calls.append(_Call(layer, kv_len, level, counts.sum((0, 1), dtype=torch.int64)))
        if len(self._calls) >= _MOST_CALLS:
            self._fold()
        return out

    def take(self) -> dict[Cell, list[int]]:
        self._fold()
        found, self._found = self._found, {}
        return found

    def _fold(self) -> None:
        """The calls into their histograms: the one place that waits for the device."""
        calls, self._calls = self._calls, []
        for call in calls:
            kv_len, (visited, *skipped) = round(float(call.kv_len)), call.counts.tolist()
            if visited == 0:  # all masked, or no tokens
                continue
            cell = Cell(call.layer.component, call.layer.path, length_bin(kv_len, self._tile[1]), self._level(call.t))
            counts, before = [visited, *skipped, visited * kv_len], self._found.get(cell)
            self._found[cell] = counts if before is None else [a + b for a, b in zip(before, counts, strict=True)]

    def _level(self, given: Level | None) -> float | None:
        """Of a cell: float32, as `is_dense` compares it. None also for NaN and infinity, which a device may say."""
        t = None if given is None else float32(float(given))
        if t is None or not math.isfinite(t):
            return None
        if t not in self.levels and len(self.levels) >= _MOST_LEVELS:
            t = float32(math.ceil(1000 * min(max(t, 0.0), 1.0) - 1e-4) / 1000)  # 1e-4: float32(.9) stays .9
        self.levels.add(t)
        return t


def length_bin(kv_len: int, tile_k: int) -> int:
    """The number of the bin of lengths that share a curve: one key tile each up to 20 tiles, then 5 % each.

    So prompts of any length make few curves: 20 up to 2,560 keys, 111 up to 240,000. A curve is one at the mean of its lengths: one length
    alone stays what it is, and of several the mean share is right, as shares grow with the logarithm of the length.
    """
    tiles = kv_len / tile_k
    return math.ceil(tiles if tiles <= 20 else 20 + 20 * math.log(tiles / 20))


def _operands(
    config: SkipConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | list[str]:
    """query, key, value, key mask and query mask of an SDPA call for the operator; or why serving keeps the call."""
    reasons = reasons_of_call(query, key, value, attn_mask, dropout_p, enable_gqa)
    if reasons:
        return reasons
    masks = split_mask(attn_mask)
    if masks is None:
        assert attn_mask is not None
        return [REASONS["general mask"].format(shape=list(attn_mask.shape))]
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    problem = problem_of(query, key, value, masks[0], masks[1] is not None, is_causal, config.tile_order)
    chosen = choose(problem._replace(lambda_on_host=False), config.implementation)  # what takes it there counts no tiles
    return chosen if isinstance(chosen, list) else (query, key, value, *masks)


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None] | None:
    """(key mask, query mask) that say what `mask` says, as far as its values tell; None where no two do."""
    if mask is None or mask_kind(mask) == "key":
        return mask, None
    if mask.dim() != 4:
        return None
    key_mask = mask[:, :1, :1]
    if torch.equal(mask, key_mask.expand_as(mask)):
        return key_mask, None
    if mask.dtype == torch.bool:
        key_mask, query_mask = mask.any(1, True).any(2, True), mask.any(1, True).any(3, True)
        if torch.equal(mask, (key_mask & query_mask).expand_as(mask)):
            return key_mask, query_mask
    return None


def kv_lens(key: Tensor, attn_mask: Tensor | None) -> int | Tensor:
    """L, as lambda is derived from it: the number of keys, or what `keys_left` says under a key mask."""
    if attn_mask is None:
        return key.shape[2]
    return keys_left(lambda function, *args: function(*args), attn_mask, attn_mask, key.shape[2])


def _mean(kv_len: int | Tensor) -> int | Tensor:
    return kv_len.float().mean() if isinstance(kv_len, Tensor) else kv_len
