"""What `sensitivity` found: errors by layer and step, what speed costs, and the proposal that follows."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.layers import LayerName
from skip_attn_compile.report import table
from skip_attn_compile.trial import stronger


@dataclass(frozen=True)
class LayerError:
    """What one layer costs with it alone sparse: relative errors, root mean square over calls and items.

    block_error: of its block's output, on dense inputs; None where the block does not give the same twice. error, psnr: of the run's
    output, None where no run was made with it alone. visited, skipped: its tiles, in the dense run's trajectory.
    """

    layer: LayerName
    block_error: float | None
    error: float | None
    psnr: float | None
    visited: int
    skipped: int

    @property
    def cost(self) -> float:
        """Squared error per skipped tile; errors of several layers add in squares, as far as they are independent."""
        error = self.block_error if self.error is None else self.error
        return math.inf if error is None else error**2 / max(self.skipped, 1)


@dataclass(frozen=True)
class StepError:
    """What skipping in all layers costs at one noise level: root mean square of the block errors, and the share skipped."""

    t: float | None
    block_error: float | None
    share: float


@dataclass(frozen=True)
class Point:
    """One real run of all items: these layers dense, this gate, and where a config's own is stronger, that.

    share: skipped, of the tiles of all layers. psnr: of the worst item.
    """

    ignore: tuple[LayerName, ...]
    disabled_until_timestep: float
    share: float
    speedup: float
    error: float
    psnr: float


@dataclass(frozen=True)
class Sensitivity:
    """layers, steps: errors, by layer and noise level. points: what was run, in order, the dense run first. psnr: what to keep, in dB.

    `str()` shows all of it with the proposal, `to_dict()` gives it to programs, `config()` applies it.
    """

    layers: tuple[LayerError, ...]
    steps: tuple[StepError, ...]
    points: tuple[Point, ...]
    psnr: float
    attention_share: float
    configs: Mapping[str, SkipConfig]

    @property
    def proposal(self) -> Point:
        """Of the points that keep `psnr`, as the dense run always does, the one that skips most."""
        return max((point for point in self.points if point.psnr >= self.psnr), key=lambda point: point.share)

    @property
    def ignore(self) -> tuple[str, ...]:
        """Full names of the layers to leave dense."""
        return tuple(layer.full for layer in self.proposal.ignore)

    @property
    def disabled_until_timestep(self) -> float:
        return self.proposal.disabled_until_timestep

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The points that no other beats in both speed and PSNR, the fastest first."""
        best, kept = -math.inf, []
        for point in sorted(self.points, key=lambda p: (-p.speedup, -p.psnr)):
            if point.psnr > best:
                best = point.psnr
                kept.append(point)
        return tuple(kept)

    def config(self, base: SkipConfig | Mapping[str, SkipConfig] | None = None) -> SkipConfig | dict[str, SkipConfig]:
        """`base`, or the config that was measured, with the proposed `ignore` and gate; by component, except for a single model."""
        single = list(self.configs) == [""]
        given = dict.fromkeys(self.configs, base) if isinstance(base, SkipConfig) else self.configs if base is None else base
        if not isinstance(given, Mapping) or not all(isinstance(c, SkipConfig) for c in given.values()) or (single and "" not in given):
            raise ValueError(f"base must be a SkipConfig{'' if single else ', or a dict of them by component'}, got {base!r}")
        found = {}
        for component, config in given.items():
            own = tuple(layer.path for layer in self.proposal.ignore if layer.component == component)
            cutoff = stronger(config.disabled_until_timestep, self.disabled_until_timestep)
            found[component] = dataclasses.replace(config, ignore=tuple(dict.fromkeys(config.ignore + own)), disabled_until_timestep=cutoff)
        return found[""] if single else found

    def to_dict(self) -> dict[str, Any]:
        """For strict JSON: None stands for what is not finite, as the PSNR of a run that equals the dense one."""
        return {
            "layers": [{**_fields(row), "layer": row.layer.full} for row in self.layers],
            "steps": [_fields(step) for step in self.steps],
            "points": [_point(point) for point in self.points],
            "proposal": _point(self.proposal),
            "psnr": self.psnr,
            "attention_share": self.attention_share,
        }

    def __str__(self) -> str:
        rows = [("layer alone", "block error", "output error", "PSNR", "skipped")]
        for row in sorted(self.layers, key=lambda row: -row.cost):
            share = row.skipped / max(row.visited, 1)
            rows.append((row.layer.full, _percent(row.block_error), _percent(row.error), _decibel(row.psnr), f"{share:.1%}"))
        lines = [*table(rows), ""]
        if self.steps and self.steps[0].t is not None:
            steps = [(f"{step.t:.4g}", _percent(step.block_error), f"{step.share:.1%}") for step in self.steps]
            lines += [*table([("noise level t", "block error", "skipped"), *steps]), ""]
        what = "attention's" if self.attention_share == 1 else "the run's"
        points = [("speed-up", "skipped", "PSNR", "dense layers", "disabled_until_timestep")]
        points += [(f"{p.speedup:.2f}", f"{p.share:.1%}", _decibel(p.psnr), str(len(p.ignore)), self._gate(p)) for p in self.frontier]
        lines += [*table(points), f"speed-up: {what} FLOP limit, estimated; PSNR: measured, of the worst item", ""]
        best = self.proposal
        if not best.share:
            return "\n".join([*lines, f"nothing can be skipped within PSNR >= {self.psnr:g} dB: lower the threshold or the target"])
        lines.append(f"for PSNR >= {self.psnr:g} dB: disabled_until_timestep={self._gate(best)}, ignore={self.ignore}")
        lines.append(f"measured {_decibel(best.psnr)}, {best.share:.1%} skipped; estimated speed-up {best.speedup:.2f} at most")
        return "\n".join(lines)

    def _gate(self, point: Point) -> str:
        """As `config()` sets it; by component where their own differ."""
        gates = {name: stronger(config.disabled_until_timestep, point.disabled_until_timestep) for name, config in self.configs.items()}
        return str(point.disabled_until_timestep if len(set(gates.values())) == 1 else gates)


def _point(point: Point) -> dict[str, Any]:
    return {**_fields(point), "ignore": [layer.full for layer in point.ignore]}


def _fields(record: Any) -> dict[str, Any]:
    values = dataclasses.asdict(record).items()
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values}


def root_mean(squares: Sequence[float]) -> float | None:
    return math.sqrt(math.fsum(squares) / len(squares)) if squares and not any(map(math.isnan, squares)) else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _decibel(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"
