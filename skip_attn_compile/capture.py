"""Attention that depends on values, such as Mochi's on the number of real text tokens: let Dynamo capture it, in one model alone."""

import threading
from typing import Any

import torch
from torch import nn

from skip_attn_compile.layers import unwrap

_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def capture(model: nn.Module) -> "Capture":
    """Switch Dynamo's two capture flags on while `model` runs, when it is compiled again later too, and nowhere else.

    For models that the report says are split by an operator whose output shape depends on values (MochiTransformer3DModel): without
    the flags that attention stays outside every graph. Returns what takes it off again; ValueError where model is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"capture needs the torch.nn.Module that is compiled, got {type(model).__name__}")
    return Capture(unwrap(model))


class Capture:
    """What `capture` returns."""

    def __init__(self, model: nn.Module) -> None:
        enter = model.register_forward_pre_hook(_enter)
        self._handles: list[Any] = [enter, model.register_forward_hook(_leave, always_call=True)]

    def remove(self) -> None:
        """Leave the model as it was; graphs that are compiled already stay in use."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


_lock = threading.Lock()
_depth = 0  # calls that run, in all threads
_before: dict[str, bool] = {}  # the flags before the first of them


@torch.compiler.disable
def _enter(*_: object) -> None:
    global _depth
    with _lock:
        if _depth == 0:
            _before.update({flag: getattr(torch._dynamo.config, flag) for flag in _FLAGS})
        _depth += 1
        for flag in _FLAGS:
            setattr(torch._dynamo.config, flag, True)


@torch.compiler.disable
def _leave(*_: object) -> None:
    global _depth
    with _lock:
        _depth -= 1
        # At once, not only after the last call: from torch 2.12 on each thread has flags of its own.
        for flag, value in _before.items():
            setattr(torch._dynamo.config, flag, value)
