"""Which steps of a schedule are dense: plan `disabled_until_timestep` before a run, with the scheduler that will run.

A step is dense while its noise level t (1 = pure noise) is above the cutoff; cutoff 0 is the gate switched off.
"""

import copy
import inspect
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from skip_attn_compile.timestep import float32, is_dense, quotient
from skip_attn_compile.validate import check_cutoff, is_finite

# diffusers' schedulers by what their attributes mean; any other has timesteps that count config.num_train_timesteps down to 0.
_FLOW = {  # sigmas are noise levels in [0, 1]; so they are wherever config.use_flow_sigmas is set
    "FlowMapEulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "HeliosDMDScheduler",
    "HeliosScheduler",
    "LTXEulerAncestralRFScheduler",
    "MiniMaxH3Scheduler",
}
_EDM = {"EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"}  # sigmas from 80 or more down; t = sigma / (1 + sigma)
_LEVELS = {"CosineDPMSolverMultistepScheduler", "DDPMWuerstchenScheduler"}  # timesteps are in [0, 1]
_TRIGFLOW = {"SCMScheduler"}  # timesteps are angles from pi/2 to 0; t = sin / (sin + cos)
_WITH_END = {"DDPMWuerstchenScheduler", "SCMScheduler"}  # timesteps end with the clean sample, where no model is called

# Pipelines that give their flow scheduler sigmas 1, 1 - 1/n ... 1/n (before its shift) instead of its own; names without Pipeline.
_UNIFORM_SIGMAS = """
    Bria BriaFibo BriaFibo2 BriaFiboEdit Chroma ChromaImg2Img ChromaInpaint DreamLite DreamLiteMobile ErnieImage Flux Flux2 Flux2Klein
    Flux2KleinInpaint Flux2KleinKV FluxControl FluxControlImg2Img FluxControlInpaint FluxControlNet FluxControlNetImg2Img
    FluxControlNetInpaint FluxFill FluxImg2Img FluxInpaint FluxKontext FluxKontextInpaint HunyuanImage HunyuanImageRefiner
    HunyuanSkyreelsImageToVideo HunyuanVideo HunyuanVideo15 HunyuanVideo15ImageToVideo HunyuanVideoFramepack HunyuanVideoImageToVideo
    Krea2 LTX LTX2 LTX2Condition LTX2HDR LTX2ImageToVideo LTX2InContext LTXImageToVideo LongCatAudioDiT LongCatImage LongCatImageEdit
    Lumina2 NucleusMoEImage OmniGen OvisImage QwenImage QwenImage21 QwenImageControlNet QwenImageControlNetInpaint QwenImageEdit
    QwenImageEditInpaint QwenImageEditPlus QwenImageImg2Img QwenImageInpaint QwenImageLayered VisualClozeGeneration ZImage
    ZImageControlNet ZImageControlNetInpaint ZImageImg2Img ZImageInpaint ZImageOmni
"""


class ScheduleRow(NamedTuple):
    """One cutoff: how many steps of a run are dense, and how many may skip."""

    cutoff: float
    dense_steps: int
    sparse_steps: int


@dataclass(frozen=True)
class ScheduleTable:
    """What cutoffs do to one schedule. `str()` is the table.

    scheduler: its class; t: the noise level at which each step starts; rows: one for each cutoff, in the order given.
    """

    scheduler: str
    t: list[float]
    rows: list[ScheduleRow]

    def __str__(self) -> str:
        lines = [f"{self.scheduler}, {len(self.t)} steps, t = {self.t[0]:.4f} ... {self.t[-1]:.4f}", "cutoff  dense  sparse"]
        lines += [f"{row.cutoff:>6g}  {row.dense_steps:>5}  {row.sparse_steps:>6}" for row in self.rows]
        return "\n".join(lines)


def dense_steps(t: Iterable[float], D: float, *, num_train_timesteps: int | None = None) -> int:
    """How many of the noise levels `t` are dense under disabled_until_timestep = D: those above D in float32; none for D = 0.

    t: noise levels in [0, 1], 1 = pure noise; or, with num_train_timesteps, raw timesteps, which are divided by it.
    D: in [0, 1]. ValueError for a value outside its range.
    """
    cutoff = check_cutoff("D", D)
    return sum(bool(is_dense(level, cutoff)) for level in _levels(t, num_train_timesteps))


def cutoff_for_dense_steps(t: Iterable[float], k: int, *, num_train_timesteps: int | None = None) -> float:
    """A disabled_until_timestep under which exactly k of the noise levels `t` are dense.

    It lies well between the last dense level and the first sparse one, with as few decimals as that allows, so that integer or bfloat16
    timesteps do not move a step across it; 0, the gate switched off, for k = 0. t and num_train_timesteps as in `dense_steps`.
    ValueError where no cutoff gives k, since equal levels stay together; the message says which k are possible.
    """
    levels = sorted(_levels(t, num_train_timesteps), reverse=True)
    bounds = list(pairwise([math.inf, *levels, 0.0]))  # k dense: lower <= cutoff < upper
    possible = [0] + [n for n, (upper, lower) in enumerate(bounds) if n > 0 and upper > lower]
    if isinstance(k, bool) or not isinstance(k, numbers.Integral) or k not in possible:
        raise ValueError(f"k must be one of {_ranges(possible)} for these {len(levels)} levels, got {k!r}; equal levels stay together")
    return 0.0 if k == 0 else _between(*reversed(bounds[int(k)]))


def schedule_table(
    pipe_or_scheduler: Any, num_inference_steps: int, cutoffs: Iterable[float], **set_timesteps_kwargs: Any
) -> ScheduleTable:
    """How many steps of a run are dense for each cutoff, from a diffusers pipeline's scheduler or a scheduler; it is copied, not changed.

    num_inference_steps: as in the pipeline's call. cutoffs: values for disabled_until_timestep, in [0, 1].
    set_timesteps_kwargs: what the pipeline passes to scheduler.set_timesteps besides the number of steps. A scheduler that shifts by
    resolution (use_dynamic_shifting) needs mu=. Sigmas of 1 ... 1/n, which most flow pipelines pass (Flux, Qwen-Image, HunyuanVideo, LTX),
    are passed for a pipeline; for a bare scheduler, and for pipelines with sigmas of another form (Mochi), give sigmas=.

    A step is an iteration of the pipeline's loop. Schedulers of order 2 (Heun, KDPM2, DPM-SDE) run their loop 2 n - 1 times and call the
    model twice in all steps but the last: a step counts once, by the noise level at which it starts. Its second call has a lower t
    of its own, so that call of the last dense step may be sparse. PNDM repeats its warm-up timesteps; each repetition is a step.

    ValueError for arguments that the scheduler does not take, and for a scheduler whose schedule is not known.
    """
    scheduler = getattr(pipe_or_scheduler, "scheduler", pipe_or_scheduler)
    if isinstance(scheduler, type) or not hasattr(scheduler, "set_timesteps"):
        given = (
            f"{type(pipe_or_scheduler).__name__} with scheduler {scheduler!r}" if scheduler is not pipe_or_scheduler else repr(scheduler)
        )
        raise ValueError(f"schedule_table needs a diffusers pipeline with a scheduler, or a scheduler, got {given}")
    if isinstance(num_inference_steps, bool) or not isinstance(num_inference_steps, numbers.Integral) or num_inference_steps < 1:
        raise ValueError(f"num_inference_steps must be an integer >= 1, got {num_inference_steps!r}")
    num_inference_steps = int(num_inference_steps)
    if isinstance(cutoffs, str) or not isinstance(cutoffs, Iterable):
        raise ValueError(f"cutoffs must be a sequence of numbers in [0, 1], got {cutoffs!r}; write cutoffs=({cutoffs!r},)")
    checked = [check_cutoff("cutoffs", cutoff) for cutoff in cutoffs]
    scheduler = copy.deepcopy(scheduler)
    if _passes_uniform_sigmas(pipe_or_scheduler, scheduler) and not {"sigmas", "timesteps"} & set(set_timesteps_kwargs):
        set_timesteps_kwargs["sigmas"] = [1 - step / num_inference_steps for step in range(num_inference_steps)]
    _set_timesteps(scheduler, num_inference_steps, set_timesteps_kwargs)
    t = noise_levels(scheduler)[:: getattr(scheduler, "order", 1)]
    rows = [ScheduleRow(cutoff, dense := dense_steps(t, cutoff), len(t) - dense) for cutoff in checked]
    return ScheduleTable(type(scheduler).__name__, t, rows)


def noise_levels(scheduler: Any) -> list[float]:
    """The noise level of each model call of a diffusers scheduler whose timesteps are set, exact float32 values in [0, 1].

    One for each entry of scheduler.timesteps at which the model is called. Flow schedulers: sigmas[i], the float behind timesteps that
    may be integers; EDM: sigma / (1 + sigma); others: timestep / num_train_timesteps. ValueError where the schedule is not known.
    """
    levels = level_tensor(scheduler)
    if levels is None or len(levels) == 0 or not bool(((levels >= 0) & (levels <= 1)).all()):
        first = scheduler.timesteps.tolist()[:4]
        raise ValueError(
            f"{type(scheduler).__name__} must have timesteps that map to noise levels in [0, 1], got {first} ...;"
            " give the levels themselves to dense_steps"
        )
    return levels.tolist()


def level_tensor(scheduler: Any) -> torch.Tensor | None:
    """`noise_levels` as a float32 tensor, on the device where the scheduler keeps them, unchecked; None where the schedule is not known."""
    names, config = _names(scheduler), getattr(scheduler, "config", None) or {}
    timesteps = torch.as_tensor(scheduler.timesteps)[: -1 if names & _WITH_END else None].to(torch.float32)
    continuous = config.get("timestep_type") == "continuous" and config.get("prediction_type") == "v_prediction"
    if names & _FLOW or config.get("use_flow_sigmas"):
        levels = torch.as_tensor(scheduler.sigmas).to(torch.float32)[: len(timesteps)]
        if config.get("invert_sigmas"):
            return 1 - levels
        edm = names & _FLOW and (config.get("sigma_max") or 0) > 1  # Cosmos 2 has a flow scheduler hold EDM sigmas
        return levels / (1 + levels) if edm else levels
    if names & _EDM or continuous:
        sigmas = torch.as_tensor(scheduler.sigmas).to(torch.float32)[: len(timesteps)]
        return sigmas / (1 + sigmas)
    if names & _TRIGFLOW:
        return (timesteps.sin() / (timesteps.sin() + timesteps.cos())).clamp(max=1)  # the first angle is 1.5708, above pi/2
    if names & _LEVELS:
        return timesteps
    return quotient(timesteps, total) if (total := config.get("num_train_timesteps")) else None


def _names(thing: object) -> set[str]:
    return {base.__name__ for base in type(thing).__mro__}


def _passes_uniform_sigmas(pipe: object, scheduler: object) -> bool:
    uniform = {f"{name}Pipeline" for name in _UNIFORM_SIGMAS.split()}
    return bool(_names(pipe) & uniform and _names(scheduler) & _FLOW)


def _set_timesteps(scheduler: Any, num_inference_steps: int, kwargs: dict[str, Any]) -> None:
    """As the pipelines call it: the number of steps, or a schedule of the caller's own."""
    name, accepted = type(scheduler).__name__, inspect.signature(scheduler.set_timesteps).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    for keyword in kwargs:
        if keyword not in accepted and not open_ended:
            raise ValueError(f"{name}.set_timesteps takes {', '.join(accepted)}, got {keyword}=")
    if "mu" in accepted and (getattr(scheduler, "config", None) or {}).get("use_dynamic_shifting") and kwargs.get("mu") is None:
        raise ValueError(
            f"mu must be given: {name} shifts its schedule by resolution (use_dynamic_shifting); pass mu=, which the pipeline"
            " computes from the number of image tokens, for example mu=1.15 for Flux at 1024 x 1024"
        )
    own = next((kwargs[key] for key in ("sigmas", "timesteps") if kwargs.get(key) is not None), None)
    if own is not None and len(own) not in (num_inference_steps, num_inference_steps + 1):  # some lists hold the end as well
        raise ValueError(f"num_inference_steps must be the number of sigmas or timesteps, {len(own)}, got {num_inference_steps}")
    count = accepted.get("num_inference_steps")
    if own is None or (count is not None and count.default is inspect.Parameter.empty):
        kwargs = {"num_inference_steps": num_inference_steps, **kwargs}
    scheduler.set_timesteps(**kwargs)


def _levels(t: Any, num_train_timesteps: int | None) -> list[float]:
    """`t` as noise levels, rounded to float32."""
    if num_train_timesteps is not None and (not is_finite(num_train_timesteps) or num_train_timesteps <= 0):
        raise ValueError(f"num_train_timesteps must be a number > 0, got {num_train_timesteps!r}")
    if hasattr(t, "tolist"):
        t = t.tolist()
    if isinstance(t, str) or not isinstance(t, Iterable):
        raise ValueError(f"t must be a sequence of noise levels in [0, 1], got {t!r}; write [{t!r}]")
    return [_level(value.item() if isinstance(value, torch.Tensor) else value, num_train_timesteps) for value in t]


def _level(value: Any, num_train_timesteps: int | None) -> float:
    if num_train_timesteps is None:
        if not is_finite(value) or not 0 <= float32(value) <= 1:
            raise ValueError(f"t must be noise levels in [0, 1], got {value!r}; for raw timesteps pass num_train_timesteps=, often 1000")
        return float32(value)
    if not is_finite(value) or not 0 <= value <= num_train_timesteps:
        raise ValueError(f"t must be raw timesteps in [0, num_train_timesteps={num_train_timesteps}], got {value!r}")
    return float32(float32(value) / num_train_timesteps)


def _between(lower: float, upper: float) -> float:
    """The shortest decimal in the middle half of [lower, upper), of the nearest to its centre; `lower` where they are neighbours."""
    quarter = (upper - lower) / 4
    for decimals in range(1, 12):
        cutoff = round((lower + upper) / 2, decimals)
        if lower + quarter <= cutoff <= upper - quarter and lower <= float32(cutoff) < upper:
            return cutoff
    return lower or upper / 2


def _ranges(values: Sequence[int]) -> str:
    """0-5, 7, 9-12."""
    starts = [n for n in values if n - 1 not in values]
    ends = [n for n in values if n + 1 not in values]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
