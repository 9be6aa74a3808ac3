"""Whole diffusers pipelines: every denoiser attached, compiled in place, and told the scheduler's own noise level."""

import inspect
import logging
import sys
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch
from torch import nn

from skip_attn_compile.backend import Inner, SkipBackend
from skip_attn_compile.capture import Capture
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.frames import self_of
from skip_attn_compile.layers import forward_codes, is_compiled
from skip_attn_compile.report import Report, UnmatchedPattern
from skip_attn_compile.schedule import level_tensor
from skip_attn_compile.summary import at_recompile_limit
from skip_attn_compile.timestep import Level, TimestepSpec, spec_of

log = logging.getLogger(__name__)

Configs = SkipConfig | Mapping[str, SkipConfig]


def compile_pipeline(
    pipe: Any,
    config: Configs,
    *,
    regional: bool = False,
    capture: bool = False,
    inner: Inner = "inductor",
    timestep_spec: TimestepSpec | None = None,
    **torch_compile_kwargs: Any,
) -> "CompiledPipeline":
    """Compile the denoisers of a diffusers pipeline in place, each with a backend of its own, and return a handle on them.

    pipe: any pipeline with `components`; its denoisers are those called transformer or unet (transformer_2, ...), or whose class is known.
    config: one SkipConfig for all of them, or a dict by component name, as `SkipConfig.from_checkpoint(folder)` gives; a denoiser that
        the dict does not name is left as it is.
    regional: compile the repeated blocks, `model.compile_repeated_blocks()`, instead of the whole model, `model.compile()`.
    capture: let Dynamo capture attention that depends on values, see `capture`; for Mochi.
    inner, torch_compile_kwargs: as for `backend` and torch.compile (mode, fullgraph, dynamic, options).
    timestep_spec: how the denoisers are told the noise level, for classes not known here.

    Classes, LoRA, offloading and the pipeline's own attributes stay what they are. Raises ValueError, with nothing changed, where
    there is nothing to compile, a name in the dict is wrong, or a denoiser is compiled already.
    """
    if "backend" in torch_compile_kwargs:
        raise ValueError("compile_pipeline brings its own backend; to choose what compiles the rest, pass inner=")
    models = denoisers(pipe, "compile_pipeline")
    configs = configs_of(models, config, pipe, "compile_pipeline")
    for name in configs:
        _check_compilable(name, models[name], regional)
    handle = CompiledPipeline(models, {name: SkipBackend(own, inner) for name, own in configs.items()})
    try:
        for name, backend in handle.backends.items():
            backend._attach(models[name], name, timestep_spec, SchedulerLevel(pipe))
            compile_in_place = models[name].compile_repeated_blocks if regional else models[name].compile
            compile_in_place(backend=backend, **torch_compile_kwargs)  # type: ignore[operator]
            if capture:
                handle._captures.append(Capture(models[name]))
    except BaseException:
        handle.uncompile()
        raise
    codes = {code for name in configs for m in (models[name].modules() if regional else (models[name],)) for code in forward_codes(m)}
    for note in at_recompile_limit({code: code.co_qualname for code in codes}):
        log.warning("%s", note)
    return handle


class CompiledPipeline:
    """What `compile_pipeline` returns. backends: one for each compiled component, by name, for what concerns only one of them."""

    def __init__(self, models: dict[str, nn.Module], backends: dict[str, SkipBackend]) -> None:
        self._models = models
        self._captures: list[Capture] = []
        self._compiled = True
        self.backends = backends

    def report(self) -> Report:
        """The sites, counts and runs of all components in one report. Reads the device."""
        reports = {name: backend.report() for name, backend in self.backends.items()}
        combined = Report([], unmatched=self._unmatched(reports))
        for report in reports.values():
            combined.sites += report.sites
            combined.runs += report.runs
            combined.notes += [note for note in report.notes if note not in combined.notes]
            combined.implementations |= report.implementations
            combined.graphs += report.graphs
        left = [name for name in self._models if name not in self.backends]
        combined.notes += [
            f"{name}: no config was given for it, so it is not compiled and all of its attention is as it was" for name in left
        ]
        return combined

    def update(self, **operating_point: float | None) -> None:
        """As `SkipBackend.update`, for every component; where one refuses, none is changed. ValueError after `uncompile`."""
        if not self._compiled:
            raise ValueError("update cannot take effect: the pipeline was uncompiled; compile_pipeline compiles it again")
        with ExitStack() as updates:
            for backend in self.backends.values():
                updates.enter_context(backend._updating)
            updated = {name: backend._updated(**operating_point) for name, backend in self.backends.items()}
            for name, backend in self.backends.items():
                backend._use(updated[name])

    def uncompile(self) -> None:
        """Give the pipeline back as it was before `compile_pipeline`: no compiled call, no hook. The report stays readable."""
        if not self._compiled:  # it may have been compiled anew since
            return
        self._compiled = False
        for name, backend in self.backends.items():
            for module in self._models[name].modules():
                module.__dict__.pop("_compiled_call_impl", None)
            backend._gate.detach(self._models[name])
        for capture in self._captures:
            capture.remove()

    def _unmatched(self, reports: Mapping[str, Report]) -> list[UnmatchedPattern]:
        """A pattern of a config that several components share need match in one of them."""
        found: dict[tuple[str, str], UnmatchedPattern] = {}
        for name, report in reports.items():
            sharing = [reports[other] for other, b in self.backends.items() if b.config == self.backends[name].config]
            missed = [{(u.field, u.pattern) for u in r.unmatched} for r in sharing]
            for pattern in report.unmatched:
                key = pattern.field, pattern.pattern
                if all(key in patterns for patterns in missed):
                    found.setdefault(key, pattern)
        return list(found.values())


def denoisers(pipe: Any, asker: str) -> dict[str, nn.Module]:
    """The denoising models among a pipeline's components, by name; ValueError in the name of `asker` where there is none."""
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        raise ValueError(f"{asker} needs a diffusers pipeline, got {type(pipe).__name__}; for a model use torch.compile with backend()")
    modules = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    found = {name: m for name, m in modules.items() if "transformer" in name or "unet" in name or spec_of(m) is not None}
    doubled = [name for name, m in found.items() if any(m is other for earlier, other in found.items() if earlier < name)]
    if doubled:
        raise ValueError(f"{asker} needs components that are models of their own, got {', '.join(doubled)} of {type(pipe).__name__} twice")
    if not found:
        raise ValueError(f"{asker} found no transformer or unet in {type(pipe).__name__}; it has {', '.join(components) or 'nothing'}")
    return found


def configs_of(models: Mapping[str, nn.Module], config: Configs, pipe: Any, asker: str) -> dict[str, SkipConfig]:
    """`config` by component; ValueError in the name of `asker` for what is no config, or not for these models."""
    given = dict(config) if isinstance(config, Mapping) else dict.fromkeys(models, config)
    known = f"it has {', '.join(models)}" if list(models) != [""] else "a model takes one SkipConfig"
    for name, own in given.items():
        if name not in models:
            raise ValueError(f"config names {name!r}, which is no denoiser of {type(pipe).__name__}; {known}")
        if not isinstance(own, SkipConfig):
            raise ValueError(f"{asker} needs a SkipConfig, or a dict of them by component, got {own!r}; write SkipConfig(threshold=0.1)")
    if not given:
        raise ValueError(f"config must hold a SkipConfig for at least one of {', '.join(models)}, got an empty dict")
    return given


def _check_compilable(name: str, model: nn.Module, regional: bool) -> None:
    if is_compiled(model):
        raise ValueError(
            f"{name} is compiled already; call .uncompile() on the handle of compile_pipeline, or take the pipeline's own model"
        )
    blocks = getattr(model, "_repeated_blocks", None) or ()
    if regional and not any(type(m).__name__ in blocks for m in model.modules()):
        raise ValueError(f"{name}, a {type(model).__name__}, does not say which blocks repeat (_repeated_blocks); use regional=False")


class SchedulerLevel:
    """The noise level of the step that a pipeline is running, by its scheduler: exact, where timesteps may be rounded.

    None, and the model's argument is read, outside the pipeline's own call and where the scheduler does not know which step it is in.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = weakref.ref(pipe)
        self._code = inspect.unwrap(type(pipe).__call__).__code__
        self._source: tuple[object, object] = (None, None)  # the tensors that _levels were computed from
        self._levels: list[Any] | torch.Tensor = []

    def __call__(self) -> Level | None:
        pipe = self._pipe()
        scheduler = getattr(pipe, "scheduler", None)
        if not hasattr(scheduler, "step_index") or not _is_running(pipe, self._code):
            return None
        index = _step(pipe, scheduler)
        levels = self._levels_of(scheduler)
        return levels[index] if index is not None and 0 <= index < len(levels) else None

    def _levels_of(self, scheduler: Any) -> list[Any] | torch.Tensor:
        source = (scheduler.timesteps, getattr(scheduler, "sigmas", None))
        if any(a is not b for a, b in zip(source, self._source, strict=True)):  # set_timesteps makes new ones for each run
            levels: Any = level_tensor(scheduler)
            if levels is not None and levels.device.type == "cpu":
                levels = levels.tolist() if bool(((levels >= 0) & (levels <= 1)).all()) else None  # None: not what this scheduler means
            self._levels = [] if levels is None else levels
            self._source = source
        return self._levels


def _step(pipe: Any, scheduler: Any) -> int | None:
    """The index of the running step in the scheduler's timesteps: the place of the pipeline's own t among them, else what is counted.

    A pipeline may step copies of its scheduler, which then does not count.
    """
    now, timesteps = getattr(pipe, "_current_timestep", None), scheduler.timesteps
    if isinstance(now, torch.Tensor) and now.dim() == 0 and now.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr():
        return int(now.storage_offset() - timesteps.storage_offset()) // (timesteps.stride(0) or 1)
    for index in (scheduler.step_index, getattr(scheduler, "begin_index", None)):
        if index is not None:
            return int(index)
    return None


def _is_running(pipe: object, code: CodeType) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is code and self_of(frame) is pipe:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
