"""Where a model stands in its schedule, and the gate on it: t is a noise level in [0, 1], 1 = pure noise.

Attention is dense while float32(t) > float32(disabled_until_timestep), exactly. t comes from the user (`timestep`) or from the
model's own argument, which families write in different units and directions: `SPECS` says how, by class name. Nothing here waits for
a device: the noise level of a tensor on a device, and the decision on it, are 0-d tensors there.
"""

import ctypes
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from skip_attn_compile.layers import unwrap
from skip_attn_compile.validate import Checked, is_finite

Level = float | torch.Tensor  # a float32 value on the host, or a 0-d float32 tensor on a device

TRANSFORMS = ("linear", "edm")


@dataclass(eq=False)
class Reading:
    """A noise level and the source it was read from; level None where no source knows it."""

    level: Level | None
    source: str
    _decision: tuple[float, bool | torch.Tensor] | None = field(default=None, repr=False)

    def dense(self, cutoff: float) -> bool | torch.Tensor:
        """`is_dense`, and True where the level is not known. Computed once: all blocks of a model ask it in each call."""
        if self.level is None:
            return True
        if self._decision is None or self._decision[0] != cutoff:
            self._decision = cutoff, is_dense(self.level, cutoff)
        return self._decision[1]


_current: ContextVar[Reading | None] = ContextVar("skip_attn_compile_timestep", default=None)


@contextmanager
def timestep(t: float | torch.Tensor) -> Iterator[None]:
    """`with skip_attn_compile.timestep(t):` says at which noise level the model calls inside run; it goes before any other source of t.

    t: noise level in [0, 1], 1 = pure noise; of a tensor (one value per sample or token) the largest counts. Gone at exit, nested use
    restores the outer value, and other threads and async tasks do not see it. ValueError for a value outside [0, 1]; the values of a
    tensor on a device are not checked, since that would wait for the device.
    """
    token = _current.set(Reading(_checked_level(t), "timestep()"))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Reading | None:
    """The noise level set by the innermost `timestep` of this thread or async task; None outside."""
    return _current.get()


def is_dense(t: float | torch.Tensor, cutoff: float) -> bool | torch.Tensor:
    """float32(t) > float32(cutoff): a bool for a number; for a tensor (largest value) a 0-d bool tensor on its device, without a sync.

    cutoff 0 is the gate switched off: False, and t is not read.
    """
    if cutoff == 0:
        return False
    if isinstance(t, torch.Tensor):
        level = t.detach().to(torch.float32)  # first: bfloat16 would round the cutoff
        return ~((level.amax() if level.dim() else level) <= float32(cutoff))  # so that NaN is dense
    return not float32(t) <= float32(cutoff)


def float32(value: float) -> float:
    """`value` rounded to the nearest float32; beyond its range, inf."""
    return ctypes.c_float(value).value


def quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded alike on every device: by a number CUDA multiplies by its reciprocal, one unit in the last place off."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


@dataclass(frozen=True)
class TimestepSpec(Checked):
    """How a model's forward is told the noise level: noise = (x + offset) / scale, or 1 minus that.

    argument: the name of forward's parameter that holds x.
    scale: x at pure noise, in the argument's unit, > 0: 1000 for raw timesteps, 1 for noise levels.
    inverted: True where x counts upwards, 0 at pure noise and `scale` at the clean sample.
    offset: added to x first, in the argument's unit.
    transform: "linear", or "edm" where x is EDM's c_noise = ln(sigma) / 4: noise = sigma / (1 + sigma).
    """

    argument: str = ""
    scale: float = 1.0
    inverted: bool = False
    offset: float = field(default=0.0, kw_only=True)
    transform: str = field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.argument, str) or not self.argument.isidentifier():
            raise ValueError(f"argument must be the name of a parameter of the model's forward, got {self.argument!r}")
        if not is_finite(self.scale) or self.scale <= 0:
            raise ValueError(f"scale must be finite and > 0, the argument's value at pure noise, got {self.scale!r}")
        if not isinstance(self.inverted, bool):
            raise ValueError(f"inverted must be True or False, got {self.inverted!r}")
        if not is_finite(self.offset):
            raise ValueError(f"offset must be a finite number, got {self.offset!r}")
        if self.transform not in TRANSFORMS:
            raise ValueError(f"transform must be one of {', '.join(TRANSFORMS)}, got {self.transform!r}")
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "offset", float(self.offset))

    def noise_level(self, x: float | torch.Tensor) -> Level:
        """The largest noise level in `x`, the value of the argument: in float32, the same on every device.

        A float for a number or a CPU tensor; for a tensor on a device a 0-d tensor there. Not clamped: a level outside [0, 1] says that
        the spec does not fit the model. An empty tensor counts as pure noise.
        """
        values = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64, device="cpu")
        levels = self._levels(values.to(torch.float32))
        largest = levels.amax() if levels.numel() else levels.new_ones(())
        return largest.item() if largest.device.type == "cpu" else largest

    def _levels(self, x: torch.Tensor) -> torch.Tensor:
        levels = quotient(x + self.offset, self.scale)
        if self.transform == "edm":
            levels = torch.sigmoid(4 * levels)  # sigma / (1 + sigma) with sigma = exp(4 x)
        return 1 - levels if self.inverted else levels


def spec_of(model: nn.Module) -> TimestepSpec | None:
    """How `model` is told the noise level, by the names of its class and bases; None where that is not known."""
    model = unwrap(model)
    for base in type(model).__mro__:
        found = SPECS.get(base.__name__)
        if found is not None:
            return found if isinstance(found, TimestepSpec) else found(getattr(model, "config", None) or {})
    return None


def check_spec(spec: object, model: nn.Module) -> None:
    """ValueError where `spec` cannot tell how `model` is told the noise level."""
    if not isinstance(spec, TimestepSpec):
        raise ValueError(f"timestep_spec must be a TimestepSpec(argument, scale), got {spec!r}")
    model = unwrap(model)
    if not isinstance(model, nn.Module):  # for others to refuse
        return
    parameters = inspect.signature(model.forward).parameters
    if spec.argument not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        given = ", ".join(parameters)
        raise ValueError(f"timestep_spec must name an argument of {type(model).__name__}.forward ({given}), got {spec.argument!r}")


def host_level(level: Level | None) -> float | None:
    """`level` on the host, which may wait for its device: float32 as `is_dense` compares it, in [0, 1]; None where it is not known."""
    t = math.nan if level is None else float32(float(level))
    return min(max(t, 0.0), 1.0) if math.isfinite(t) else None


def _sana(config: Mapping[str, Any]) -> TimestepSpec:
    if config.get("guidance_embeds"):  # Sana-Sprint: sin / (sin + cos) of the schedule's angle
        return TimestepSpec("timestep")
    return TimestepSpec("timestep", 1000 * config.get("timestep_scale", 1.0))


def _cosmos(config: Mapping[str, Any]) -> TimestepSpec:
    # Cosmos 1 alone has learnable position embeddings; 2 and 2.5 pass the noise level.
    learnable = config.get("extra_pos_embed_type", "learnable") == "learnable"
    return TimestepSpec("timestep", transform="edm" if learnable else "linear")


def _sana_wm_refiner(config: Mapping[str, Any]) -> TimestepSpec:
    return TimestepSpec("timestep", config.get("timestep_scale_multiplier", 1000))


_NOISE_LEVEL = """
    AceStepTransformer1DModel AuraFlowTransformer2DModel BriaFibo2Transformer2DModel ChromaTransformer2DModel Flux2Transformer2DModel
    Flux3Transformer2DModel FluxTransformer2DModel Krea2Transformer2DModel LongCatImageTransformer2DModel
    NucleusMoEImageTransformer2DModel OvisImageTransformer2DModel PRXTransformer2DModel QwenImage21Transformer2DModel
    QwenImageTransformer2DModel StableAudioDiTModel
"""
_THOUSANDTHS = """
    AnyFlowFARTransformer3DModel AnyFlowTransformer3DModel BriaFiboTransformer2DModel BriaTransformer2DModel
    ChronoEditTransformer3DModel CogView4Transformer2DModel DreamLiteUNetModel EasyAnimateTransformer3DModel ErnieImageTransformer2DModel
    HeliosTransformer3DModel HunyuanImageTransformer2DModel HunyuanVideo15Transformer3DModel HunyuanVideoFramepackTransformer3DModel
    HunyuanVideoTransformer3DModel JoyImageEditPlusTransformer3DModel JoyImageEditTransformer3DModel Kandinsky5Transformer3DModel
    Kandinsky6SRTransformer3DModel Kandinsky6Transformer3DModel LTX2VideoTransformer3DModel LTXVideoTransformer3DModel
    MotifVideoTransformer3DModel SD3Transformer2DModel SanaVideoTransformer3DModel SanaWMTransformer3DModel SkyReelsV2Transformer3DModel
    StableAudio3DiTModel WanAnimate2Transformer3DModel WanAnimateTransformer3DModel WanTransformer3DModel WanVACETransformer3DModel
"""
_TRAINING_INDEX = """
    AllegroTransformer3DModel CogVideoXTransformer3DModel CogView3PlusTransformer2DModel ConsisIDTransformer3DModel
    DiTTransformer2DModel HunyuanDiT2DModel I2VGenXLUNet Kandinsky3UNet LatteTransformer3DModel PixArtTransformer2DModel
    UNet2DConditionModel UNet2DModel UNet3DConditionModel UNetMotionModel
"""
_CLEAN_LEVEL = """
    Ideogram4Transformer2DModel LongCatAudioDiTTransformer Lumina2Transformer2DModel LuminaNextDiT2DModel MiniMaxH3Transformer3DModel
    MiniMaxMusic3Transformer1DModel OmniGenTransformer2DModel
"""

# What the pipelines of diffusers pass, by the class that receives it; a function where that depends on the model's config.
SPECS: dict[str, TimestepSpec | Callable[[Mapping[str, Any]], TimestepSpec]] = {
    **dict.fromkeys(_NOISE_LEVEL.split(), TimestepSpec("timestep")),
    **dict.fromkeys(_THOUSANDTHS.split(), TimestepSpec("timestep", 1000)),
    **dict.fromkeys(_TRAINING_INDEX.split(), TimestepSpec("timestep", 1000)),  # 999 ... 0: a position, not a sigma
    **dict.fromkeys(_CLEAN_LEVEL.split(), TimestepSpec("timestep", inverted=True)),
    "Cosmos3OmniTransformer": TimestepSpec("vision_timesteps", 1000),
    "CosmosTransformer3DModel": _cosmos,
    "GlmImageTransformer2DModel": TimestepSpec("timestep", 1000, offset=1),
    "HiDreamImageTransformer2DModel": TimestepSpec("timesteps", 1000),
    "MochiTransformer3DModel": TimestepSpec("timestep", 1000, inverted=True),
    "SanaTransformer2DModel": _sana,
    "SanaWMLTX2RefinerTransformer3DModel": _sana_wm_refiner,
    "StableCascadeUNet": TimestepSpec("timestep_ratio"),
    "UNetSpatioTemporalConditionModel": TimestepSpec("timestep", transform="edm"),
    "ZImageTransformer2DModel": TimestepSpec("t", inverted=True),
}


def _checked_level(t: Any) -> Level:
    contract = "timestep must be noise levels in [0, 1], 1 = pure noise"
    remedy = "divide raw timesteps by the scheduler's num_train_timesteps, for example timestep(t / 1000)"
    if not isinstance(t, torch.Tensor):
        if not is_finite(t) or not 0 <= float32(t) <= 1:
            raise ValueError(f"{contract}, got {t!r}; {remedy}")
        return float32(t)
    if t.numel() == 0 or t.dtype is torch.bool or t.is_complex():
        raise ValueError(f"{contract}, got a tensor of shape {tuple(t.shape)} and {t.dtype}; pass at least one real number")
    if t.device.type != "cpu":
        return t.detach().to(torch.float32).amax()
    smallest, largest = (float(value) for value in t.detach().to(torch.float32).aminmax())
    if not 0 <= smallest <= largest <= 1 or math.isnan(smallest):
        raise ValueError(f"{contract}, got a tensor with values from {smallest:g} to {largest:g}; {remedy}")
    return largest
