"""What a calibration run found, and the configs that follow from it."""

import json
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from skip_attn_compile.checkpoint_format import CheckpointSparsity
from skip_attn_compile.config import Calibration, Rule, SkipConfig
from skip_attn_compile.files import write_whole
from skip_attn_compile.fit import Fit, MeasuredCurve, fit_curves
from skip_attn_compile.json_values import load
from skip_attn_compile.layers import LayerName
from skip_attn_compile.measure import MOST_THRESHOLDS
from skip_attn_compile.observe import Cell
from skip_attn_compile.report import table
from skip_attn_compile.timestep import is_dense
from skip_attn_compile.validate import check_cutoff, check_ints, check_target_sparsity

log = logging.getLogger(__name__)

_FORMAT = 3
_MAX_BYTES = 2**30  # of a state file: 40 layers of two calls, 50 steps and ten bins of lengths take 30 MiB


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


Counts = dict[Cell, list[int]]


@dataclass
class Measurement:
    """What `calibrate` found: tiles visited and skipped, by layer, bin of lengths, noise level and threshold.

    items: how many were run. fitted, held_out: cell -> [visited, skipped at each threshold ..., visited times keys].
    times: (component, length bin) -> the number of items that had it; of these every second one is held out.
    models: component -> its class and size, to tell whether a run that goes on is of the same models.
    attention_classes: component -> class names of the attention modules that were measured; a checkpoint names them as its targets.
    """

    setup: Setup
    models: dict[str, str] = field(default_factory=dict)
    items: int = 0
    fitted: Counts = field(default_factory=dict)
    held_out: Counts = field(default_factory=dict)
    times: Counter[tuple[str, int]] = field(default_factory=Counter)
    attention_classes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, found: Counts) -> None:
        """What one item gave."""
        for cell, counts in found.items():
            into = self.held_out if self.times[cell.component, cell.length_bin] % 2 else self.fitted
            into[cell] = [a + b for a, b in zip(into[cell], counts, strict=True)] if cell in into else counts
        self.times.update({(cell.component, cell.length_bin) for cell in found})
        self.items += 1

    @property
    def components(self) -> list[str]:
        return list(dict.fromkeys(cell.component for cell in self.fitted))

    def layers(self, component: str) -> list[str]:
        """Paths of the measured attention modules."""
        return list(dict.fromkeys(cell.layer for cell in self.fitted if cell.component == component))

    def curves(self, component: str, *, layer: str | None = None, cutoff: float = 0.0, held_out: bool = False) -> list[MeasuredCurve]:
        """Share against threshold, one curve for each bin of lengths. cutoff: only of calls that such a gate leaves; 0 is none."""
        sums: dict[int, list[list[int]]] = defaultdict(list)
        for cell, counts in (self.held_out if held_out else self.fitted).items():
            sparse = cell.t is None or not is_dense(cell.t, cutoff)
            if cell.component == component and layer in (None, cell.layer) and sparse:
                sums[cell.length_bin].append(counts)
        return [self._curve([sum(column) for column in zip(*rows, strict=True)]) for _, rows in sorted(sums.items())]

    def _curve(self, counts: Sequence[int]) -> MeasuredCurve:
        """At the mean length."""
        visited, *skipped, keys = counts
        return MeasuredCurve(round(keys / visited), self.setup.thresholds, tuple(count / visited for count in skipped))

    def cutoff_left(self, component: str, cutoff: float) -> float:
        """`cutoff`, or 0 where it leaves nothing of the component: then any curve serves."""
        return cutoff if self.curves(component, cutoff=cutoff) else 0.0

    def shares(self, component: str, calibration: Calibration, target_sparsity: float) -> dict[tuple[str, float | None], float]:
        """(layer, noise level) -> the share that `calibration` skips there when it is asked for `target_sparsity`; on all items."""
        sums: dict[tuple[str, float | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for cell, counts in (*self.fitted.items(), *self.held_out.items()):
            if cell.component == component:
                curve, visited = self._curve(counts), counts[0]
                share = curve.share_at(min(calibration.threshold_at(target_sparsity, curve.kv_len), 1.0))
                total = sums[cell.layer, cell.t]
                total[0] += visited
                total[1] += visited * share
        return {where: skipped / visited for where, (visited, skipped) in sums.items()}

    def fit(self, component: str, *, target: float | None = None, layer: str | None = None, cutoff: float = 0.0) -> Fit:
        """The curve of a component, or of one layer; near `target` if given. ValueError where the measurement cannot carry one."""
        return fit_curves(
            self.curves(component, layer=layer, cutoff=cutoff), tile=self.setup.tile, tile_order=self.setup.tile_order, target=target
        )

    def deviations(self, component: str, targets: Sequence[float], *, cutoff: float = 0.0) -> dict[int, list[float]]:
        """Number of keys -> achieved minus asked share for each target, each with its curve; on held-out items, else on the fitted."""
        fits = [self.fit(component, target=target, cutoff=cutoff) for target in targets]
        curves = self.curves(component, cutoff=cutoff, held_out=True) or self.curves(component, cutoff=cutoff)
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
            cutoff = self.cutoff_left(component, disabled_until_timestep)
            reach = min(curve.share_at(1.0) for curve in self.curves(component, cutoff=cutoff))
            if target_sparsity > reach:
                most = "there is" if self.setup.thresholds[-1] == 1 else "that was measured"
                where = f" in {component}" if component else ""
                raise ValueError(
                    f"target_sparsity={target_sparsity:g} is beyond reach{where}: lambda = {self.setup.thresholds[-1]:g}, the most {most},"
                    f" skips {reach:.1%} of the tiles; ask for at most {math.floor(100 * reach) / 100:g}"
                )
            fitted = self.fit(component, target=target_sparsity, cutoff=cutoff)
            rules = () if per_layer is False else self._rules(component, fitted, target_sparsity, cutoff, always=per_layer is True)
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
        like = {name: CheckpointSparsity(targets=tuple(self.attention_classes.get(name, ()))) for name in by_name}
        return {name: config.to_checkpoint(like[name]) for name, config in by_name.items()}

    def _rules(self, component: str, whole: Fit, target: float, cutoff: float, *, always: bool) -> list[Rule]:
        rules: list[Rule] = []
        if not always and not self.curves(component, cutoff=cutoff, held_out=True):
            log.warning(
                "per_layer=None gives no layer a curve of its own: no item was held out to judge by; calibrate on two or more alike"
            )
            return rules
        for layer in self.layers(component):
            try:
                own = self.fit(component, target=target, layer=layer, cutoff=cutoff)
            except ValueError as reason:
                log.info("%s has no curve of its own and takes its component's: %s", layer, reason)
                continue
            unseen = self.curves(component, layer=layer, cutoff=cutoff, held_out=True)
            error = lambda f: max(abs(f.deviation(curve, target)) for curve in unseen)  # noqa: B023
            if always or (unseen and error(own) < error(whole)):
                rules.append(Rule(LayerName(component, layer).full, calibration=own.calibration))
        return rules

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, at once or not at all."""
        data = {
            "skip_attn_compile_measurement": _FORMAT,
            "setup": asdict(self.setup),
            "models": self.models,
            "items": self.items,
            "attention_classes": self.attention_classes,
            "times": [[*where, count] for where, count in self.times.items()],
            "fitted": [[*astuple(cell), counts] for cell, counts in self.fitted.items()],
            "held_out": [[*astuple(cell), counts] for cell, counts in self.held_out.items()],
        }
        write_whole(Path(path), json.dumps(data))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Measurement":
        """What `save` wrote. ValueError, naming the file, for anything else."""
        try:
            data = load(Path(path), _MAX_BYTES)
            if (version := data["skip_attn_compile_measurement"]) != _FORMAT:
                raise ValueError(f"format {version!r}, where this version reads {_FORMAT}; calibrate anew, into another file")
            given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data["setup"].items()}
            setup = Setup(**given)
            fitted, held_out = ({Cell(*row): counts for *row, counts in data[key]} for key in ("fitted", "held_out"))
            models, items, classes = data["models"], data["items"], data["attention_classes"]
            times = Counter({(component, length_bin): count for component, length_bin, count in data["times"]})
            if not (isinstance(items, int) and items > 0 and fitted and all(_holds(part, setup) for part in (fitted, held_out))):
                raise ValueError("counts that no run gives")
            if {(cell.component, cell.length_bin) for cell in fitted} != set(times) or not all(0 < n <= items for n in times.values()):
                raise ValueError("numbers of items that no run gives")
            if not {cell.component for cell in fitted} <= set(models) or not all(isinstance(text, str) for text in models.values()):
                raise ValueError(f"models {models!r}")
            if not all(isinstance(text, str) for component, names in classes.items() for text in (component, *names)):
                raise ValueError(f"attention_classes {classes!r}")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            text = f"{path} must be a measurement written by calibrate(state=...) or Measurement.save, but is not"
            raise ValueError(f"{text}: {type(error).__name__}: {error}") from error
        return cls(setup, models, items, fitted, held_out, times, classes)

    def __str__(self) -> str:
        lines = [f"{self.items} items, {self.setup}"]
        for component in self.components:
            lines.append(f"\n{component or 'model'}: {self.models[component]}")
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
            items = "held-out" if self.held_out else "the fitted"
            lines += [f"achieved minus target on {items} items, {math.fsum(missed) / len(missed):.1%} in the mean:", *table(rows)]
        return "\n".join(lines)


def _holds(part: Counts, setup: Setup) -> bool:
    """Could a run with `setup` have counted this? ValueError or TypeError for what has no order."""
    return all(
        isinstance(cell.component, str)
        and isinstance(cell.layer, str)
        and isinstance(cell.length_bin, int)
        and (cell.t is None or math.isfinite(cell.t))
        and len(counts) == 2 + len(setup.thresholds)
        and all(isinstance(count, int) for count in counts)
        and counts[1] >= 0
        and counts[1:-1] == sorted(counts[1:-1])
        and counts[-2] <= counts[0] <= counts[-1]
        and counts[0] > 0
        for cell, counts in part.items()
    )
