"""The timestep gate of a running model: which noise level does a call of a compiled graph have, and is it dense?

The best source that knows it wins: `with timestep(t)` around the call; the scheduler of a pipeline (`compile_pipeline`); the model's
own argument, which a forward hook of an attached model sees, or a graph that holds the whole model has among its inputs.
"""

import numbers
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from skip_attn_compile.calls import Call, Schedule, Watch, argument_position, innermost_call
from skip_attn_compile.layers import Candidate, Frame, KnownModels, forward_codes, unwrap
from skip_attn_compile.settings import Settings
from skip_attn_compile.steps import StepLog
from skip_attn_compile.timestep import Level, Reading, TimestepSpec, current, spec_of

_EXPLICIT = "or wrap the call in `with skip_attn_compile.timestep(t):`"
_NO_SOURCE = (
    "disabled_until_timestep=%g: the noise level of a call of %s is not known, so it is dense; attach(model) on the backend reads it from"
    f" the model's argument, {_EXPLICIT}"
)
_NO_SPEC = (
    "disabled_until_timestep=%g: how %s is told its noise level is not known, so it is dense; say it with"
    f" attach(model, timestep_spec=TimestepSpec(argument, scale)), {_EXPLICIT}"
)
_NO_ARGUMENT = f"disabled_until_timestep=%g: %s was called without a number or tensor %s, so the call is dense; pass it, {_EXPLICIT}"
_OUTSIDE = (
    "disabled_until_timestep=%g: %s was called with %s = %g, which would be noise level %g, outside [0, 1], so it is dense; describe the"
    f" argument with attach(model, timestep_spec=TimestepSpec(argument, scale)), {_EXPLICIT}"
)
_ROUNDING = 1e-3  # by which integer and bfloat16 timesteps may leave [0, 1]


class Gate:
    """The gate of one backend: the models whose calls it sees, and what it decided."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watches: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
        self.log = StepLog()

    @property
    def cutoff(self) -> float:
        return self._settings.config.disabled_until_timestep

    def attach(self, model: nn.Module, spec: TimestepSpec | None, schedule: Schedule | None = None) -> None:
        """See the calls of `model`. spec: how it is told the noise level; None: by its class."""
        model = unwrap(model)
        self.detach(model)
        self._watches[model] = Watch(self, model, spec or spec_of(model), schedule)
        self.install_hooks()

    def detach(self, model: nn.Module) -> None:
        watch = self._watches.pop(unwrap(model), None)
        if watch is not None:
            watch.remove()

    def install_hooks(self) -> None:
        """On the attached models, and off them while the gate is off: no model has a hook that nobody needs."""
        for watch in list(self._watches.values()):
            watch.install() if self.cutoff > 0 else watch.remove()

    def dense(self, frames: Sequence[Frame], callers: Sequence[Candidate | None], arguments: Sequence[object]) -> bool | torch.Tensor:
        """Is a call of the graph that holds `frames` dense? A bool, or a 0-d bool tensor on the device that knows. For a cutoff > 0."""
        reading = self._reading(frames, callers, arguments)
        dense = reading.dense(self.cutoff)
        caller = next((c for c in callers if c is not None), None)
        self.log.add(frames[0].function if caller is None else caller.model.label, reading, dense)
        return dense

    def running_level(self) -> Level | None:
        """The noise level of the attached model's call that is running, by the sources above; None, without a warning, where unknown."""
        if (explicit := current()) is not None:
            return explicit.level
        call = innermost_call(self)
        if call is None or (call.watch.schedule is None and call.watch.spec is None):
            return None
        if call.reading is None:
            call.reading = self._read(call)
        return call.reading.level

    def find_input(self, gm: GraphModule, frame: Frame, models: KnownModels) -> tuple[str, int] | None:
        """(argument, position) of the graph input that tells the noise level, where the graph is a model's whole forward."""
        model = next((c.model.reference() for c in frame.candidates(models) if not c.path), None)
        spec = None if model is None else self._spec(model)
        return None if model is None or spec is None else _argument_input(gm, frame, model, spec)

    def _reading(self, frames: Sequence[Frame], callers: Sequence[Candidate | None], arguments: Sequence[object]) -> Reading:
        if (explicit := current()) is not None:
            return explicit
        call = innermost_call(self)
        if call is not None and all(c is None or c.model.reference() is call.module() for c in callers):
            if call.reading is None:
                call.reading = self._read(call)
            return call.reading
        for frame, caller in zip(frames, callers, strict=True):
            model = caller.model.reference() if caller is not None else None
            spec = self._spec(model) if model is not None else None
            if model is not None and spec is not None and frame.timestep_input is not None and frame.timestep_input[0] == spec.argument:
                return self._from_argument(type(model).__name__, spec, arguments[frame.timestep_input[1]])
        return self._unknown(_NO_SOURCE, frames[0].function.removeprefix("torch_dynamo_resume_in_").split("_at_")[0])

    def _read(self, call: Call) -> Reading:
        level = call.watch.schedule() if call.watch.schedule is not None else None
        if level is not None:
            return Reading(level, "the scheduler")
        if call.watch.spec is None:
            return self._unknown(_NO_SPEC, call.class_name)
        return self._from_argument(call.class_name, call.watch.spec, call.argument)

    def _from_argument(self, name: str, spec: TimestepSpec, x: Any) -> Reading:
        if not isinstance(x, torch.Tensor | numbers.Real):
            return self._unknown(_NO_ARGUMENT, name, spec.argument)
        level = spec.noise_level(x)  # type: ignore[arg-type]
        if not isinstance(level, torch.Tensor) and not -_ROUNDING <= level <= 1 + _ROUNDING:
            return self._unknown(_OUTSIDE, name, spec.argument, float(torch.as_tensor(x).max()), level)
        if not isinstance(level, torch.Tensor):
            level = min(max(level, 0.0), 1.0)
        return Reading(level, f"argument {spec.argument}")

    def _unknown(self, message: str, model: str, *facts: object) -> Reading:
        self._settings.warn_once(message, self.cutoff, model, *facts, key=(model,))
        return Reading(None, "no source")

    def _spec(self, model: nn.Module) -> TimestepSpec | None:
        watch = self._watches.get(model)
        return watch.spec if watch is not None else spec_of(model)


def _argument_input(gm: GraphModule, frame: Frame, model: nn.Module, spec: TimestepSpec) -> tuple[str, int] | None:
    """Only in the model's own forward: after a graph break Dynamo resumes with locals, which may be something else by then."""
    if frame.code not in forward_codes(model):
        return None
    position, parameters = argument_position(model, spec), frame.code.co_argcount + frame.code.co_kwonlyargcount
    wanted = {f"L['{spec.argument}']"}
    for local in frame.code.co_varnames[parameters : parameters + 2]:  # a decorator's *args and **kwargs
        wanted.add(f"L['{local}']['{spec.argument}']")
        if position is not None:
            wanted.add(f"L['{local}'][{position + 1 - frame.code.co_argcount}]")
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        name: Any = getattr(getattr(node, "_dynamo_source", None), "name", None)
        if (name() if callable(name) else name) in wanted:  # in torch 2.11 it is a method
            return spec.argument, index
    return None
