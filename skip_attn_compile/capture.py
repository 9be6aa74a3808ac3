"""Attention that depends on values, such as Mochi's on the number of real text tokens: let Dynamo capture it, in one model alone."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from skip_attn_compile.frames import calls_around
from skip_attn_compile.layers import unwrap

_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def capture(model: nn.Module) -> "Capture":
    """Switch Dynamo's two capture flags on while `model` runs, when it is compiled again later too, and nowhere else.

    For models that the report says are split by an operator whose output shape depends on values (MochiTransformer3DModel): without
    the flags that attention stays outside every graph. A KeyboardInterrupt leaves them on until the model is called again.
    Returns what takes it off again; ValueError where model is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"capture needs the torch.nn.Module that is compiled, got {type(model).__name__}")
    return Capture(unwrap(model))


class Capture:
    """What `capture` returns."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        enter = model.register_forward_pre_hook(_enter)
        self._handles: list[Any] = [enter, model.register_forward_hook(_leave, always_call=True)]

    def remove(self) -> None:
        """Leave the model as it was; graphs that are compiled already stay in use."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        with _lock:  # if it is running, or was interrupted, `_leave` will not come
            for thread in list(_inside):
                _forget(thread, lambda model: model is self._model())


_lock = threading.Lock()
_inside: dict[int, list[weakref.ref[nn.Module]]] = {}  # thread -> the models that it is running, the innermost last
_before: dict[str, bool] = {}  # the flags before the first of them


@torch.compiler.disable
def _enter(model: nn.Module, _: object) -> None:
    thread = threading.get_ident()
    with _lock:
        if thread in _inside:  # after a KeyboardInterrupt torch runs no hook that would end a call
            running = calls_around(model)
            _forget(thread, lambda other: not running[id(other)])
        if not _inside:
            _before.update({flag: getattr(torch._dynamo.config, flag) for flag in _FLAGS})
        _inside.setdefault(thread, []).append(weakref.ref(model))
        _set(dict.fromkeys(_FLAGS, True))


@torch.compiler.disable
def _leave(model: nn.Module, *_: object) -> None:
    with _lock:
        own = _inside.get(threading.get_ident(), [])
        depth = next((n for n in reversed(range(len(own))) if own[n]() is model), None)
        if depth is not None:  # else another hook failed before `_enter` could run
            del own[depth:]  # with those inside that were interrupted
            _forget(threading.get_ident(), lambda _: False)


def _forget(thread: int, ended: Callable[[nn.Module | None], bool]) -> None:
    """Those of a thread's models that have ended; after the last one its flags are what they were.

    Though other threads may be inside: from torch 2.12 on each thread has flags of its own.
    """
    _inside[thread] = [model for model in _inside[thread] if not ended(model())]
    if not _inside[thread]:
        del _inside[thread]
        _set(_before)


def _set(flags: dict[str, bool]) -> None:
    for flag, value in flags.items():
        setattr(torch._dynamo.config, flag, value)
