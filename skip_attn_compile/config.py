"""What the user asks for: frozen, validated at construction, and therefore never wrong later."""

import dataclasses
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skip_attn_compile.validate import (
    Checked,
    check_cutoff,
    check_ints,
    check_pattern,
    check_patterns,
    check_range,
    check_target_sparsity,
    check_threshold,
    is_finite,
)

log = logging.getLogger(__name__)

TILE_ORDERS = ("ascending", "own_first")
IMPLEMENTATIONS = ("auto", "reference", "sm90", "triton", "flashinfer")


class Caution(str):
    """A remark in a report that is logged as a warning: the user can act on it."""


@dataclass(frozen=True)
class Calibration(Checked):
    """A curve from a target sparsity s to lambda: lambda = a * exp(b * s) / L, with L the number of keys of the call.

    a: finite and > 0, in keys; b: finite.
    The facts below say where the curve holds; None or empty where they are not known.
    tile: (query rows, keys) of the tiles it was fitted at; tile_order: in which order they were visited.
    sparsity_range: smallest and largest skipped share observed; kv_lens: key lengths observed.
    """

    a: float = math.nan
    b: float = math.nan
    tile: tuple[int, int] | None = dataclasses.field(default=None, kw_only=True)
    tile_order: str | None = dataclasses.field(default=None, kw_only=True)
    sparsity_range: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)
    kv_lens: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            if not is_finite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)!r}")
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.a <= 0:
            raise ValueError(f"a must be a finite number > 0, got {self.a!r}")
        if self.tile is not None:
            object.__setattr__(self, "tile", check_ints("tile", self.tile, 2))
        if self.tile_order is not None and self.tile_order not in TILE_ORDERS:
            raise ValueError(f"tile_order must be one of {', '.join(TILE_ORDERS)}, or None, got {self.tile_order!r}")
        if self.sparsity_range is not None:
            object.__setattr__(self, "sparsity_range", check_range("sparsity_range", self.sparsity_range))
        object.__setattr__(self, "kv_lens", check_ints("kv_lens", self.kv_lens))

    def scale_factor(self, target_sparsity: float) -> float:
        """a * exp(b * s), that is lambda * L; inf where it leaves the range of a float."""
        try:
            return self.a * math.exp(self.b * target_sparsity)
        except OverflowError:
            return math.inf

    def extrapolates(self, target_sparsity: float, kv_len: int | None = None) -> list[str]:
        """In which ways the curve would be used outside of what it was fitted on, in words; empty where that is not so, or not known."""
        beyond = []
        if self.sparsity_range is not None and not self.sparsity_range[0] <= target_sparsity <= self.sparsity_range[1]:
            low, high = self.sparsity_range
            beyond.append(f"the target {target_sparsity:g} lies outside the shares {low:g} to {high:g} that the curve was fitted on")
        if self.kv_lens and kv_len is not None and not min(self.kv_lens) <= kv_len <= max(self.kv_lens):
            lengths = " to ".join(f"{n:,}" for n in dict.fromkeys((min(self.kv_lens), max(self.kv_lens))))
            beyond.append(Caution(f"{kv_len:,} keys are not the {lengths} that the curve was fitted at"))
        return beyond

    def threshold_at(self, target_sparsity: float, kv_len: int) -> float:
        """lambda for a target sparsity at kv_len keys; 1 or more means that the curve cannot reach the target there."""
        return self.scale_factor(target_sparsity) / kv_len

    def sparsity_at(self, threshold: float, kv_len: int) -> float:
        """The inverse: the skipped share that the curve expects of lambda `threshold` (at most 1) at kv_len keys, within [0, 1]."""
        threshold = min(threshold, 1.0)
        if threshold <= 0 or self.b == 0:
            return 0.0
        logarithm = math.log(threshold) + math.log(kv_len) - math.log(self.a)  # the quotient itself may leave the range of a float
        return min(max(logarithm / self.b, 0.0), 1.0)


@dataclass(frozen=True)
class Rule(Checked):
    """What to do in the modules that a pattern selects. Later rules win over earlier ones, value by value.

    pattern: fnmatch pattern on a module's name, `blocks.0.attn1` or `transformer.blocks.0.attn1`.
    threshold: lambda there, finite and >= 0; or
    target_sparsity: the share of tiles to skip there, in [0, 1]; and / or calibration: the curve that gives lambda there; or
    dense: True leaves attention as it is there.
    """

    pattern: str = ""
    threshold: float | None = dataclasses.field(default=None, kw_only=True)
    target_sparsity: float | None = dataclasses.field(default=None, kw_only=True)
    calibration: Calibration | None = dataclasses.field(default=None, kw_only=True)
    dense: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_pattern("pattern", self.pattern)
        if not isinstance(self.dense, bool):
            raise ValueError(f"dense must be True or False, got {self.dense!r}")
        object.__setattr__(self, "threshold", check_threshold(self.threshold))
        object.__setattr__(self, "target_sparsity", check_target_sparsity(self.target_sparsity))
        _check_calibration(self.calibration)
        given = [name for name in ("threshold", "target_sparsity") if getattr(self, name) is not None] + ["dense"] * self.dense
        choices = "threshold, target_sparsity, calibration (or both of these), dense=True"
        if len(given) > 1 or (self.calibration is not None and given not in ([], ["target_sparsity"])):
            given += ["calibration"] * (self.calibration is not None)
            raise ValueError(f"Rule({self.pattern!r}) must set one of {choices}, got {', '.join(given)}")
        if not given and self.calibration is None:
            raise ValueError(f"Rule({self.pattern!r}) must set one of {choices}, got none")


@dataclass(frozen=True, kw_only=True)
class SkipConfig(Checked):
    """Which attention calls skip, and how much.

    threshold: lambda, finite and >= 0; a tile of 128 keys is skipped for 64 query rows when no key in it can weigh more than lambda
        relative to a row's heaviest key so far. 0 skips nothing, useful values lie in (0, 1), and values above 1 act as 1. Or
    target_sparsity: the share of tiles to skip, in [0, 1]; it needs a calibration, which turns it into lambda for each key length.
    calibration: the curve for target_sparsity.
    disabled_until_timestep: the gate, in [0, 1]: a call at noise level t (1 = pure noise) is dense while t > it; 0, the default, is off.
    include: fnmatch patterns; modules that match none stay as they are.
    ignore: fnmatch patterns; modules that match one stay as they are, whatever include and rules say.
    rules: `Rule`s in order; the last that matches a module decides there.
    min_kv_len: calls with fewer keys stay dense (keys, not bytes); it compares with the key length of each call.
    tile_order: "ascending", or "own_first": each row group starts at the keys of its own position, which skips more tiles at equal lambda.
    implementation: "auto", or the name of one that must be used: "sm90", "triton", "flashinfer", "reference".
    checkpoint_ignore: as ignore, but given by a checkpoint: `from_checkpoint` sets it, and no override clears it.
    """

    threshold: float | None = None
    target_sparsity: float | None = None
    calibration: Calibration | None = None
    disabled_until_timestep: float = 0.0
    include: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    min_kv_len: int = 1024
    tile_order: str = "ascending"
    implementation: str = "auto"
    checkpoint_ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_field = lambda name, value: object.__setattr__(self, name, value)
        set_field("threshold", check_threshold(self.threshold))
        set_field("target_sparsity", check_target_sparsity(self.target_sparsity))
        _check_calibration(self.calibration)
        set_field("disabled_until_timestep", check_cutoff("disabled_until_timestep", self.disabled_until_timestep))
        set_field("checkpoint_ignore", check_patterns("checkpoint_ignore", self.checkpoint_ignore))
        set_field("include", check_patterns("include", self.include))
        set_field("ignore", check_patterns("ignore", self.ignore))
        set_field("rules", _check_rules(self.rules))
        if not self.include:
            raise ValueError('include must hold at least one pattern, got (); write include=("*",) for every module')
        if isinstance(self.min_kv_len, bool) or not isinstance(self.min_kv_len, int) or self.min_kv_len < 0:
            raise ValueError(f"min_kv_len must be an integer >= 0, got {self.min_kv_len!r}")
        for name, allowed in (("tile_order", TILE_ORDERS), ("implementation", IMPLEMENTATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        self._check_operating_point()
        self._warn_of_extrapolation()

    @classmethod
    def from_checkpoint(cls, source: Any, **overrides: Any) -> Any:
        """The config that a calibrated checkpoint asks for: its curve, its target_sparsity and gate, its `ignore`.

        source: a component's folder, its config.json, a dict, a diffusers model or its `.config`; or a pipeline's folder, which gives
            a dict of SkipConfig by component name.
        overrides: fields of SkipConfig. A threshold or target_sparsity beats the checkpoint's target and gate, a calibration replaces
            its curve; `ignore` adds to the checkpoint's, which is held as checkpoint_ignore. tile_order is the curve's, unless given.
        Raises CheckpointError, a ValueError, for what cannot be used.
        """
        from skip_attn_compile import checkpoint

        return checkpoint.from_checkpoint(source, overrides)

    def to_checkpoint(self, like: Any = None) -> dict[str, Any]:
        """`{"sparse_attention_config": ...}` for a component's config.json; ValueError where the format cannot say what this config says.

        It holds curve, target_sparsity, gate and both ignore lists, and of how a kernel is run what belongs to the curve, tiles and their
        order; not min_kv_len and implementation, which are for the machine that serves to choose.
        like: a source as for `from_checkpoint`, whose other facts (targets, dense first steps) are kept.
        """
        from skip_attn_compile import checkpoint

        return checkpoint.to_checkpoint(self, like)

    def _warn_of_extrapolation(self) -> None:
        """Of targets; of lengths the backend warns, which meets them."""
        points: tuple[SkipConfig | Rule, ...] = (self, *self.rules)
        for point in points:
            target = self.target_sparsity if point.target_sparsity is None else point.target_sparsity
            curve = point.calibration or self.calibration
            if target is not None and curve is not None:
                for text in curve.extrapolates(target):
                    where = f"rule {point.pattern!r}: " if isinstance(point, Rule) else ""
                    log.warning("%s%s: calibrate nearer to it, or expect another share", where, text)

    def _check_operating_point(self) -> None:
        if self.threshold is not None and self.target_sparsity is not None:
            given = f"threshold={self.threshold} and target_sparsity={self.target_sparsity}"
            raise ValueError(f"threshold and target_sparsity exclude each other, got {given}; drop one")
        points: tuple[SkipConfig | Rule, ...] = (self, *self.rules)
        if all(point.threshold is None and point.target_sparsity is None for point in points):
            raise ValueError("no operating point: set threshold, for example SkipConfig(threshold=0.1)")
        if all(point.calibration is None for point in points):
            for point in points:
                if point.target_sparsity is not None:
                    raise ValueError(
                        f"target_sparsity={point.target_sparsity} needs a calibration, calibration=Calibration(a=..., b=...);"
                        " without one set threshold instead, for example SkipConfig(threshold=0.1)"
                    )


def _check_calibration(value: Any) -> None:
    if value is not None and not isinstance(value, Calibration):
        raise ValueError(f"calibration must be a Calibration(a=..., b=...), got {value!r}")


def _check_rules(rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, Rule):
        raise ValueError(f"rules must be a sequence of Rule, got one Rule; write rules=({rules!r},)")
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(f"rules must be a sequence of Rule, got {rules!r}")
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"rules must hold Rule objects, got {rule!r}")
    return rules
