"""Measuring a model while it runs as it is: each scaled_dot_product_attention call goes through `measure`, dense, and is counted.

In eager PyTorch, through a torch function mode, so that every model can be measured, however its graphs would look. The counts stay on the
device for a while, and are then added to histograms whose size depends on the model and the schedule, not on how much is run.
"""

import contextlib
import functools
import math
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from skip_attn_compile.gate import Gate
from skip_attn_compile.kernels import mask_kind
from skip_attn_compile.layers import KnownModels, LayerName, unwrap
from skip_attn_compile.measure import measure

Want = Callable[[LayerName, int], bool]  # (layer, number of keys) -> is the call measured?


_GENERAL_MASK = "its mask is not a key mask [batch|1, 1, 1, keys], nor one and-ed with a query mask [batch|1, 1, queries, 1]"
_MOST_CALLS = 4096  # that wait on a device: a pipeline of 40 layers and 50 steps waits once, a loop over many prompts stays small


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
    """What a histogram is kept for: one call of one layer, at one number of keys and noise level (to 1/1000, None unknown)."""

    component: str
    site: str
    kv_len: int
    t: float | None

    @property
    def layer(self) -> str:
        return self.site.split("#")[0]


@dataclass
class _Call:
    component: str
    site: str
    kv_len: int | Tensor  # a tensor where a mask leaves some of them: their mean over the batch
    t: float | Tensor | None
    counts: Tensor  # int64 [1 + n] on the call's device


class Watcher(TorchFunctionMode):
    """While it is entered, in this thread: `attend` runs the attention calls that `want` wants, PyTorch all others."""

    def __init__(self, models: Mapping[str, nn.Module], want: Want, gate: Gate) -> None:
        super().__init__()
        self._names: dict[nn.Module, LayerName] = {}
        self.modules: dict[LayerName, nn.Module] = {}
        known = KnownModels()
        for component, model in models.items():
            for path, module in known.attach(model, component).modules():
                name = self._names.setdefault(module, LayerName(component, path))
                self.modules[name] = module
        self._roots = {unwrap(model) for model in models.values()}
        self._want, self._gate = want, gate
        self._running: list[LayerName] = []
        self._repeats: Counter[LayerName] = Counter()
        self.seen: dict[LayerName, None] = {}  # layers that called attention, wanted or not
        self.kept: Counter[str] = Counter()  # reasons for calls of wanted layers that only PyTorch can run

    @abstractmethod
    def attend(
        self,
        layer: LayerName,
        repeat: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """The output of one call. repeat: how many calls of the layer came before it, in this call of the model."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Enter, with the hooks that tell which module is running."""
        thread = threading.get_ident()

        def enter(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread and module in self._names:
                if module in self._roots:
                    self._repeats.clear()
                self._running.append(self._names[module])

        def leave(module: nn.Module, *_: object) -> None:
            if threading.get_ident() == thread and module in self._names:
                self._running.pop()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            with _eagerly, self:
                yield
        finally:
            self._running.clear()
            for hook in hooks:
                hook.remove()

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
        repeat = self._repeats[layer]
        self._repeats[layer] += 1
        self.seen[layer] = None
        kv_len = key.shape[-2]
        wanted = self._want(layer, kv_len)
        masks = split_mask(attn_mask) if wanted else None
        reason = self._reason(query, key, value, dropout_p) if masks is not None else _GENERAL_MASK
        if not wanted or masks is None or reason is not None:
            if wanted and reason is not None:
                self.kept[reason] += 1
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
        return self.attend(layer, repeat, query, key, value, *masks, is_causal, scale)

    def _reason(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str | None:
        if not query.dim() == key.dim() == value.dim() == 4:
            return "query, key and value must have four dimensions"
        if query.shape[1] % key.shape[1] or query.shape[0] != key.shape[0]:
            return "query, key and value must agree in batch, and heads must divide"
        if dropout_p:
            return "dropout_p must be 0: put the model into eval() mode"
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return "a gradient is needed: run under torch.no_grad()"
        return None


class Observer(Watcher):
    """`take` gives the counts of all calls since the last time, by cell."""

    def __init__(
        self, models: Mapping[str, nn.Module], want: Want, thresholds: list[float], tile_order: str, tile: tuple[int, int], gate: Gate
    ) -> None:
        super().__init__(models, want, gate)
        self._thresholds, self._tile_order, self._tile = thresholds, tile_order, tile
        self._on_device: dict[torch.device, Tensor] = {}
        self._calls: list[_Call] = []
        self._found: dict[Cell, list[int]] = {}

    def attend(
        self,
        layer: LayerName,
        repeat: int,
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
        site = layer.path if repeat == 0 else f"{layer.path}#{repeat}"
        level = self._gate.running_level()
        self._calls.append(_Call(layer.component, site, _mean(kv_lens(key, key_mask)), level, counts.sum((0, 1), dtype=torch.int64)))
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
            t = None if call.t is None or math.isnan(call.t) else round(float(call.t), 3)
            cell = Cell(call.component, call.site, round(float(call.kv_len)), t)
            counts, before = call.counts.tolist(), self._found.get(cell)
            if counts[0] == 0:  # all masked, or no tokens
                continue
            self._found[cell] = counts if before is None else [a + b for a, b in zip(before, counts, strict=True)]


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
    """L, as lambda is derived from it: the number of keys; under a key mask of those that take part, [B], or [] for all samples alike."""
    if attn_mask is None:
        return key.shape[2]
    takes_part = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
    counted = takes_part.expand(*takes_part.shape[:-1], key.shape[2]).sum(-1).clamp_min(1)
    return counted.reshape(-1 if attn_mask.dim() == 4 and attn_mask.shape[0] > 1 else ())


def _mean(kv_len: int | Tensor) -> int | Tensor:
    return kv_len.float().mean() if isinstance(kv_len, Tensor) else kv_len
