"""Watching a model while it runs: which layer calls attention, at which noise level, and what serving would make of the call.

In eager PyTorch, through a torch function mode, so that every model can be watched, however its graphs would look.
"""

import contextlib
import functools
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from skip_attn_compile.operands import Operands
from skip_attn_compile.ops import problem_of
from skip_attn_compile.rules import REASONS, reasons_of_call
from skip_attn_compile.settings import Settings

Want = Callable[[LayerName, int], SkipConfig | None]  # (layer, number of keys) -> the config that would serve the call; None: not wanted


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
    def attend(self, layer: LayerName, call: Operands) -> Tensor:
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
            given = _operands(config, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if isinstance(given, Operands):
                return self.attend(layer, given)
            self.kept["; ".join(given)] += 1
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _operands(
    config: SkipConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Operands | list[str]:
    """An SDPA call for the operator; or why serving keeps it."""
    reasons = reasons_of_call(query, key, value, attn_mask, dropout_p, enable_gqa)
    if reasons:
        return reasons
    masks = key_and_query_mask(attn_mask)
    if masks is None:
        assert attn_mask is not None
        return [REASONS["general mask"].format(shape=list(attn_mask.shape))]
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if masks[0] is not None and masks[0].is_floating_point():
            masks = masks[0].to(dtype), masks[1]
    problem = problem_of(query, key, value, masks[0], masks[1] is not None, is_causal, config.tile_order)
    chosen = choose(problem._replace(lambda_on_host=False), config.implementation)  # what takes it there counts no tiles
    return chosen if isinstance(chosen, list) else Operands(query, key, value, *masks, is_causal, scale)


def key_and_query_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None] | None:
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
