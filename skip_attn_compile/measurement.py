"""What a calibration run found, and the configs that follow from it."""

import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skip_attn_compile.checkpoint import CheckpointSparsity
from skip_attn_compile.config import Calibration, Rule, SkipConfig
from skip_attn_compile.files import write_whole
from skip_attn_compile.fit import Fit, MeasuredCurve, fit
from skip_attn_compile.layers import LayerName
from skip_attn_compile.measure import MOST_THRESHOLDS
from skip_attn_compile.observe import Cell
from skip_attn_compile.report import table
from skip_attn_compile.validate import check_cutoff, check_ints, check_target_sparsity

log = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True)
class Setup:
    """What was measured: fields as the arguments of `calibrate`."""

    thresholds: tuple[float, ...]
    tile_order: str
    tile: tuple[int, int]
    include: tuple[str, ...]
    ignore: tuple[str, ...]
    min_kv_len: int

    def __post_init__(self) -> None:
        try:
            thresholds = tuple(float(t) for t in self.thresholds)
        except (TypeError, ValueError):
            thresholds = ()
        ascend = list(thresholds) == sorted(set(thresholds))
        if not 1 <= len(thresholds) <= MOST_THRESHOLDS or not all(0 < t <= 1 for t in thresholds) or not ascend:
            raise ValueError(f"thresholds must be 1 to {MOST_THRESHOLDS} ascending lambdas in (0, 1], got {self.thresholds!r}")
        object.__setattr__(self, "thresholds", thresholds)
        object.__setattr__(self, "tile", check_ints("tile", self.tile, 2))
        select = self.select
        for name in ("include", "ignore"):
            object.__setattr__(self, name, getattr(select, name))

    @property
    def select(self) -> SkipConfig:
        """The config whose `policy` says which layers are measured."""
        fields = {"include": self.include, "ignore": self.ignore, "min_kv_len": self.min_kv_len, "tile_order": self.tile_order}
        return SkipConfig(threshold=0.0, **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        low, high = self.thresholds[0], self.thresholds[-1]
        where = f"{', '.join(self.include)}" + f" without {', '.join(self.ignore)}" * bool(self.ignore)
        tiles = f"tiles {self.tile}, {self.tile_order}, {self.min_kv_len} keys or more"
        return f"{len(self.thresholds)} thresholds from {low:.3g} to {high:.3g}, {tiles}, layers {where}"


@dataclass
class Measurement:
    """What `calibrate` found: tiles visited and skipped, by layer, number of keys, noise level and threshold.

    items: how many were run. counts: of the fitted and of the held-out items, cell -> [visited, skipped at each threshold].
    targets: component -> class names of the attention modules that were measured; a checkpoint names them.
    """

    setup: Setup
    items: int = 0
    counts: tuple[dict[Cell, list[int]], dict[Cell, list[int]]] = field(default_factory=lambda: ({}, {}))
    targets: dict[str, list[str]] = field(default_factory=dict)

    def add(self, found: Mapping[Cell, list[int]], *, held_out: bool) -> None:
        into = self.counts[held_out]
        for cell, counts in found.items():
            into[cell] = [a + b for a, b in zip(into[cell], counts, strict=True)] if cell in into else counts
        self.items += 1

    @property
    def components(self) -> list[str]:
        return list(dict.fromkeys(cell.component for cell in self.counts[0]))

    def layers(self, component: str) -> list[str]:
        """Paths of the measured attention modules. A layer's second, third ... call counts with its first: a Rule holds for all."""
        return list(dict.fromkeys(cell.layer for cell in self.counts[0] if cell.component == component))

    def curves(
        self, component: str, *, layer: str | None = None, up_to: float | None = None, held_out: bool = False
    ) -> list[MeasuredCurve]:
        """Share against threshold, one curve for each number of keys. up_to: only calls at noise levels t <= up_to, those a gate leaves."""
        sums: dict[int, list[int]] = defaultdict(lambda: [0] * (1 + len(self.setup.thresholds)))
        for cell, counts in self.counts[held_out].items():
            sparse = up_to is None or cell.t is None or cell.t <= up_to
            if cell.component == component and layer in (None, cell.layer) and sparse:
                sums[cell.kv_len] = [a + b for a, b in zip(sums[cell.kv_len], counts, strict=True)]
        return [
            MeasuredCurve(n, self.setup.thresholds, tuple(c / sum_[0] for c in sum_[1:])) for n, sum_ in sorted(sums.items()) if sum_[0]
        ]

    def level_left(self, component: str, gate: float) -> float | None:
        """`up_to` for the curves of a component under a gate; None for all, also where the gate leaves none: then any curve serves."""
        return gate if gate and self.curves(component, up_to=gate) else None

    def shares(self, component: str, calibration: Calibration, target_sparsity: float) -> dict[tuple[str, float | None], float]:
        """(layer, noise level) -> the share that `calibration` skips there when it is asked for `target_sparsity`; on all items."""
        sums: dict[tuple[str, float | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for cell, (visited, *skipped) in (row for part in self.counts for row in part.items()):
            if cell.component == component and visited:
                curve = MeasuredCurve(cell.kv_len, self.setup.thresholds, tuple(count / visited for count in skipped))
                share = curve.share_at(min(calibration.threshold_at(target_sparsity, cell.kv_len), 1.0))
                total = sums[cell.layer, cell.t]
                total[0] += visited
                total[1] += visited * share
        return {where: skipped / visited for where, (visited, skipped) in sums.items()}

    def _unseen(self, component: str, **which: Any) -> list[MeasuredCurve]:
        """What a fit is judged by: the curves of the held-out items, where they have any."""
        return self.curves(component, **which, held_out=True) or self.curves(component, **which)

    def fit(self, component: str, *, target: float | None = None, layer: str | None = None, up_to: float | None = None) -> Fit:
        """The curve of a component, or of one layer; near `target` if given. ValueError where the measurement cannot carry one."""
        return fit(self.curves(component, layer=layer, up_to=up_to), tile=self.setup.tile, tile_order=self.setup.tile_order, target=target)

    def deviations(self, component: str, targets: Sequence[float], *, up_to: float | None = None) -> dict[int, list[float]]:
        """Number of keys -> achieved minus asked share for each target, each with its curve; on held-out items, else on the fitted."""
        fits = [self.fit(component, target=target, up_to=up_to) for target in targets]
        curves = self._unseen(component, up_to=up_to)
        return {curve.kv_len: [f.deviation(curve, target) for f, target in zip(fits, targets, strict=True)] for curve in curves}

    def config(
        self, target_sparsity: float, *, disabled_until_timestep: float = 0.0, per_layer: bool | None = False, **fields: Any
    ) -> SkipConfig | dict[str, SkipConfig]:
        """A config that skips `target_sparsity` of the tiles in the calls that the gate leaves; for a pipeline a dict by component.

        fields: of SkipConfig; include, ignore and min_kv_len are those that were measured, unless given.
        per_layer: a curve for each layer; None: for the layers where that is nearer to the target on held-out items.
        Raises ValueError for a target that the largest lambda measured does not reach, with the share that it does reach.
        """
        if check_target_sparsity(target_sparsity) is None:
            raise ValueError("target_sparsity must be in [0, 1], the share of tiles to skip, got None")
        disabled_until_timestep = check_cutoff("disabled_until_timestep", disabled_until_timestep)
        for name in ("tile_order", "calibration"):
            if name in fields:
                raise ValueError(f"{name} is what was measured, got {fields[name]!r}; calibrate anew for another")
        fields = {"include": self.setup.include, "ignore": self.setup.ignore, "min_kv_len": self.setup.min_kv_len, **fields}
        given = SkipConfig(threshold=0.0, rules=fields.pop("rules", ())).rules
        configs = {}
        for component in self.components:
            up_to = self.level_left(component, disabled_until_timestep)
            reach = min(curve.share_at(1.0) for curve in self.curves(component, up_to=up_to))
            if target_sparsity > reach:
                most = "there is" if self.setup.thresholds[-1] == 1 else "that was measured"
                where = f" in {component}" if component else ""
                raise ValueError(
                    f"target_sparsity={target_sparsity:g} is beyond reach{where}: lambda = {self.setup.thresholds[-1]:g}, the most {most},"
                    f" skips {reach:.1%} of the tiles; ask for at most {math.floor(100 * reach) / 100:g}"
                )
            fitted = self.fit(component, target=target_sparsity, up_to=up_to)
            rules = () if per_layer is False else self._rules(component, fitted, target_sparsity, up_to, always=per_layer is True)
            configs[component] = SkipConfig(
                target_sparsity=target_sparsity,
                calibration=fitted.calibration,
                disabled_until_timestep=disabled_until_timestep,
                tile_order=self.setup.tile_order,
                rules=(*rules, *given),
                **fields,
            )
        return configs if list(configs) != [""] else configs[""]

    def to_checkpoint(self, target_sparsity: float, **fields: Any) -> dict[str, dict[str, Any]]:
        """Component -> its `sparse_attention_config`, with the observed ranges and tiles beside the curve."""
        configs = self.config(target_sparsity, **fields)
        by_name = configs if isinstance(configs, dict) else {"": configs}
        like = {name: CheckpointSparsity(targets=tuple(self.targets.get(name, ()))) for name in by_name}
        return {name: config.to_checkpoint(like[name]) for name, config in by_name.items()}

    def _rules(self, component: str, whole: Fit, target: float, up_to: float | None, *, always: bool) -> list[Rule]:
        rules = []
        for layer in self.layers(component):
            try:
                own = self.fit(component, target=target, layer=layer, up_to=up_to)
            except ValueError as reason:
                log.info("%s has no curve of its own and takes its component's: %s", layer, reason)
                continue
            curves = self._unseen(component, layer=layer, up_to=up_to)
            error = lambda f: max(abs(f.deviation(curve, target)) for curve in curves)  # noqa: B023
            if always or error(own) < error(whole):
                rules.append(Rule(LayerName(component, layer).full, calibration=own.calibration))
        return rules

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, at once or not at all."""
        data = {
            "skip_attn_compile_measurement": _FORMAT,
            "setup": asdict(self.setup),
            "items": self.items,
            "targets": self.targets,
            "fitted": [[c.component, c.site, c.kv_len, c.t, counts] for c, counts in self.counts[0].items()],
            "held_out": [[c.component, c.site, c.kv_len, c.t, counts] for c, counts in self.counts[1].items()],
        }
        write_whole(Path(path), json.dumps(data))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Measurement":
        """What `save` wrote. ValueError, naming the file, for anything else."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["skip_attn_compile_measurement"] != _FORMAT:
                raise ValueError(f"format {data['skip_attn_compile_measurement']!r}")
            given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data["setup"].items()}
            setup = Setup(**given)
            fitted, held_out = ({Cell(*row[:4]): row[4] for row in data[key]} for key in ("fitted", "held_out"))
            items, targets = data["items"], data["targets"]
            if not (isinstance(items, int) and items > 0 and fitted and all(_holds(part, setup) for part in (fitted, held_out))):
                raise ValueError("counts that no run gives")
            if not all(isinstance(text, str) for component, names in targets.items() for text in (component, *names)):
                raise ValueError(f"targets {targets!r}")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            text = f"{path} must be a measurement written by calibrate(state=...) or Measurement.save, but is not"
            raise ValueError(f"{text}: {type(error).__name__}: {error}") from error
        return cls(setup, items, (fitted, held_out), targets)

    def __str__(self) -> str:
        lines = [f"{self.items} items, {self.setup}"]
        for component in self.components:
            lines.append(f"\n{component or 'model'}")
            try:
                fitted = self.fit(component)
            except ValueError as error:
                lines.append(str(error))
                continue
            lines += [str(fitted), f"lambda = {self.setup.thresholds[-1]:g} skips {fitted.reach:.1%}"]
            step = next((step for step in (0.1, 0.05, 0.02) if 3 * step <= fitted.reach), 0.01)
            targets = [n * step for n in range(1, 10) if n * step <= fitted.reach]
            if not targets:
                continue
            rows = [("target", *(f"{target:.0%}" for target in targets))]
            deviations = self.deviations(component, targets)
            rows += [(f"{n:,} keys", *(f"{d:+.1%}" for d in row)) for n, row in deviations.items()]
            missed = [abs(d) for row in deviations.values() for d in row]
            items = "held-out" if self.counts[1] else "the fitted"
            lines += [f"achieved minus target on {items} items, {math.fsum(missed) / len(missed):.1%} in the mean:", *table(rows)]
        return "\n".join(lines)


def _holds(part: Mapping[Cell, list[int]], setup: Setup) -> bool:
    """Could a run with `setup` have counted this? ValueError or TypeError for what has no order."""
    return all(
        isinstance(cell.component, str)
        and isinstance(cell.site, str)
        and isinstance(cell.kv_len, int)
        and cell.kv_len > 0
        and (cell.t is None or math.isfinite(cell.t))
        and len(counts) == 1 + len(setup.thresholds)
        and all(isinstance(count, int) for count in counts)
        and counts[1] >= 0
        and counts[1:] == sorted(counts[1:])
        and counts[-1] <= counts[0]
        for cell, counts in part.items()
    )
