"""The calls of attached models that are running in this thread or task, as their forward hooks see them."""

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn

from skip_attn_compile.frames import calls_around
from skip_attn_compile.timestep import Level, Reading, TimestepSpec

Schedule = Callable[[], Level | None]  # the scheduler's own noise level of the step that is running, None where it is not known


class Watch:
    """A model whose calls `owner` wants to see, and the hooks that show them. Both are held weakly.

    spec: how the model is told the noise level, None where that is not known.
    """

    def __init__(self, owner: object, model: nn.Module, spec: TimestepSpec | None, schedule: Schedule | None) -> None:
        self.owner = weakref.ref(owner)
        self.spec, self.schedule = spec, schedule
        self._model = weakref.ref(model)
        self._position = argument_position(model, spec) if spec is not None else None

    def install(self) -> None:
        model = self._model()
        if model is None:
            return
        if model not in _watches:
            _watches[model] = _Watched(model)
        if self not in _watches[model].by:
            _watches[model].by.append(self)

    def remove(self) -> None:
        model = self._model()
        watched = _watches.get(model) if model is not None else None
        if watched is not None and self in watched.by:
            watched.by.remove(self)
            watched.remove_hooks_nobody_needs()

    def argument(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """What the model's forward was given as the argument that tells the noise level; None where it was not."""
        if self.spec is None:
            return None
        positional = args[self._position] if self._position is not None and self._position < len(args) else None
        return kwargs.get(self.spec.argument, positional)


class _Watched:
    """The hooks of one model, one pair whoever watches it."""

    def __init__(self, model: nn.Module) -> None:
        self.by: list[Watch] = []
        enter = model.register_forward_pre_hook(_enter, with_kwargs=True)
        self._handles = [enter, model.register_forward_hook(_leave, always_call=True)]
        self._model = weakref.ref(model)

    def remove_hooks_nobody_needs(self) -> None:
        self.by = [watch for watch in self.by if watch.owner() is not None]
        model = self._model()
        if not self.by and model is not None:
            for handle in self._handles:
                handle.remove()
            _watches.pop(model, None)


@dataclass(eq=False)
class Call:
    """A call that is running. `reading` is for the owner of the watch to fill: once a call, whatever number of graphs ask.

    The module is held weakly: after a KeyboardInterrupt torch runs no hook that would end the call.
    """

    module: "weakref.ref[nn.Module]"
    class_name: str
    watch: Watch
    argument: object
    outer: "Call | None"
    depth: int = 0  # of the model's calls of itself
    reading: Reading | None = None
    thread: int = field(default_factory=threading.get_ident)  # a task or thread with a copy of the context may see it, too


def innermost_call(owner: object) -> Call | None:
    """Of those that `owner` watches."""
    call = _calls.get()
    while call is not None and call.watch.owner() is not owner:
        call = call.outer
    return call


def argument_position(model: nn.Module, spec: TimestepSpec) -> int | None:
    """Of the spec's argument among the positional ones of the model's forward, self not counted."""
    names = list(inspect.signature(model.forward).parameters)
    return names.index(spec.argument) if spec.argument in names else None


_calls: ContextVar[Call | None] = ContextVar("skip_attn_compile_calls", default=None)
_watches: "weakref.WeakKeyDictionary[nn.Module, _Watched]" = weakref.WeakKeyDictionary()


# Hooks of a compiled model run between Dynamo's frames; without `disable` it would compile each as a frame of its own. They find what
# belongs to a model in a table and hold nothing, so that a model with hooks can still be copied and pickled.
@torch.compiler.disable
def _enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    watched, outer = _watches.get(module), _calls.get()
    if watched is None:  # a copy of a model that is watched
        return
    if outer is not None:  # after a KeyboardInterrupt torch runs no hook that would end a call
        running = calls_around(module)
        while outer is not None and outer.thread == threading.get_ident() and outer.depth >= running[id(outer.module())]:
            outer = outer.outer
        _calls.set(outer)
    depth = outer.depth + 1 if outer is not None and outer.module() is module else 0
    for watch in watched.by:
        argument = watch.argument(args, kwargs)
        _calls.set(Call(weakref.ref(module), type(module).__name__, watch, argument, _calls.get(), depth))
    watched.remove_hooks_nobody_needs()


@torch.compiler.disable
def _leave(module: nn.Module, args: object, output: object) -> None:
    call = _calls.get()
    depth = None if call is None else call.depth
    while call is not None and call.module() is module and call.depth == depth:
        call = call.outer
    _calls.set(call)
