"""`sparse_attention_config` in a component's config.json <-> Calibration, every variant that is in the wild.

    V1   config_groups.NAME: algorithm, targets, ignore, threshold_scale_factor {formula, coefficients {a, b}}, target_sparsity,
         disabled_until_timestep; producer stands beside config_groups. The one that is written.
    V2   coefficients and target_sparsity by phase: a diffusion transformer takes `prefill`.
    V3   older names: sparse_algo: softmax_skip for algorithm, disabled_layers for ignore, log_a for a = exp(log_a); coefficients beside
         formula; the keys of the group, or some of them, at the top level.
    V4   another formula, which gives lambda itself: refused, as every formula but FORMULA is. Nothing is ever evaluated.

What lies where is known to `_parse` and `_coefficients`, what a value may be to `json_values.At`.
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skip_attn_compile.config import Calibration, SkipConfig
from skip_attn_compile.json_values import TOP, At, CheckpointError, load, show
from skip_attn_compile.validate import check_patterns

log = logging.getLogger(__name__)

KEY = "sparse_attention_config"
OWN_KEY = "skip_attn_compile"
FORMULA = "a * exp(b * target_sparsity)"
ALGORITHMS = ("skip_softmax", "softmax_skip")
MODELOPT_TILES = {"tile": (128, 128), "tile_order": "ascending"}  # what ModelOpt counts when it calibrates; its export does not say so
KEPT = SkipConfig(threshold=0.0, ignore=("*",))  # for a component in which nothing may skip


@dataclass(frozen=True)
class CheckpointSparsity:
    """What one component's checkpoint says about skip-softmax; None or empty where it says nothing.

    producer: (name, version) of the tool that wrote it.
    """

    calibration: Calibration | None = None
    ignore: tuple[str, ...] = ()
    target_sparsity: float | None = None
    disabled_until_timestep: float | None = None
    initial_disabled_steps: int | None = None
    targets: tuple[str, ...] = ()
    producer: tuple[str, str] | None = None


def from_checkpoint(source: Any, overrides: Mapping[str, Any]) -> SkipConfig | dict[str, SkipConfig]:
    """The config of a component, or, for a pipeline, of each of its components; `overrides` are fields of SkipConfig."""
    overrides = {name: tuple(value) if isinstance(value, Iterator) else value for name, value in overrides.items()}
    parts = _pipeline_parts(source)
    if parts is None:
        where, config = _open(source)
        return _config(where, _parse(where, config), overrides)

    records: dict[str, tuple[str, CheckpointSparsity | CheckpointError]] = {}
    for name, part in parts.items():
        try:
            where, config = _open(part)
            records[name] = where, _parse(where, config)
        except CheckpointError as error:
            if not records:
                raise
            records[name] = _name(part), error
    if not _needs_no_curve(overrides) and all(getattr(record, "calibration", None) is None for _, record in records.values()):
        cause = next((record for _, record in records.values() if isinstance(record, CheckpointError)), None)
        raise CheckpointError(_no_calibration(_name(source), f"any component ({', '.join(parts) or 'none'})")) from cause
    return {name: _part_config(where, record, overrides) for name, (where, record) in records.items()}


def read(source: Any) -> CheckpointSparsity:
    """What the checkpoint of one component says. source: its folder, its config.json, a dict, a diffusers model or its `.config`."""
    where, config = _open(source)
    return _parse(where, config)


def write(record: CheckpointSparsity) -> dict[str, Any]:
    """`record` as V1. vLLM-Omni and TensorRT-LLM look keys up by name in the group and in `coefficients`, and take every member of
    config_groups for a group; so what only we know stands under a key of our own inside the group, where it also stays with its curve.
    The curve stands there twice: ModelOpt's own loader (0.47) knows `prefill` alone, and serves a threshold of its own without it."""
    if record.calibration is None:
        raise ValueError("a checkpoint holds a calibration, and there is none to write")
    from skip_attn_compile import __version__

    curve = record.calibration
    name, version = record.producer or (OWN_KEY, __version__)
    facts = {
        "tile": curve.tile and list(curve.tile),
        "tile_order": curve.tile_order,
        "sparsity_range": curve.sparsity_range and list(curve.sparsity_range),
        "kv_lens": list(curve.kv_lens),
    }
    group = {
        "algorithm": ALGORITHMS[0],
        "targets": list(record.targets),
        "ignore": list(record.ignore),
        "threshold_scale_factor": {"formula": FORMULA, **{key: {"a": curve.a, "b": curve.b} for key in ("coefficients", "prefill")}},
        "target_sparsity": record.target_sparsity,
        "disabled_until_timestep": record.disabled_until_timestep,
        "initial_disabled_steps": record.initial_disabled_steps,
        OWN_KEY: _without_empty(facts),
    }
    return {KEY: {"config_groups": {"group_0": _without_empty(group)}, "producer": {"name": name, "version": version}}}


def to_checkpoint(config: SkipConfig, like: Any = None) -> dict[str, Any]:
    """`config` as V1; what a SkipConfig does not hold (targets, dense first steps) is taken from the checkpoint `like`."""
    order = None if config.calibration is None else config.calibration.tile_order
    unwritable = {
        "no calibration": config.calibration is None,
        f"threshold={config.threshold}": config.threshold is not None,
        f"rules for {', '.join(rule.pattern for rule in config.rules)}": bool(config.rules),
        f"include={config.include}": config.include != ("*",),
        f"tile_order={config.tile_order!r}, which is not the curve's": config.tile_order not in ("ascending", order),
    }
    if any(unwritable.values()):
        given = "; ".join(text for text, holds in unwritable.items() if holds)
        raise ValueError(f"a checkpoint holds one calibration, a target_sparsity and ignore patterns; to_checkpoint cannot write {given}")
    base = like if isinstance(like, CheckpointSparsity) else CheckpointSparsity() if like is None else read(like)
    ignore = tuple(dict.fromkeys(config.checkpoint_ignore + config.ignore))
    return write(
        replace(
            base,
            calibration=config.calibration,
            ignore=ignore,
            target_sparsity=config.target_sparsity,
            disabled_until_timestep=config.disabled_until_timestep or None,
            producer=None,
        )
    )


def _config(where: str, record: CheckpointSparsity, overrides: Mapping[str, Any]) -> SkipConfig:
    fields = {name: value for name, value in overrides.items() if (name, value) != ("disabled_until_timestep", None)}
    if fields.get("calibration") is None:
        fields["calibration"] = record.calibration
        if record.calibration is not None and record.calibration.tile_order is not None and fields.get("threshold") is None:
            fields.setdefault("tile_order", record.calibration.tile_order)  # in another order the curve would not hold
    fields["checkpoint_ignore"] = record.ignore + check_patterns("checkpoint_ignore", fields.get("checkpoint_ignore", ()))
    if all(fields.get(name) is None for name in ("threshold", "target_sparsity")):
        fields["target_sparsity"] = record.target_sparsity
        if record.target_sparsity is not None:
            log.info("%s: target_sparsity=%g, as the checkpoint says", where, record.target_sparsity)
        if record.disabled_until_timestep and "disabled_until_timestep" not in fields:
            fields["disabled_until_timestep"] = record.disabled_until_timestep
            log.info("%s: disabled_until_timestep=%g, as the checkpoint says", where, record.disabled_until_timestep)
    if record.initial_disabled_steps:
        text = "%s: initial_disabled_steps=%d asks for dense first steps; no timestep follows from it without the schedule: left to you"
        log.warning(text, where, record.initial_disabled_steps)
    if record.calibration is None and not _needs_no_curve(overrides):
        raise CheckpointError(_no_calibration(where, "it"))
    if all(fields.get(name) is None for name in ("threshold", "target_sparsity", "rules")):
        text = "the checkpoint names no target_sparsity; give one, from_checkpoint(..., target_sparsity=0.5), or a threshold"
        raise CheckpointError(f"{where}: {text}")
    return SkipConfig(**fields)


def _part_config(where: str, record: CheckpointSparsity | CheckpointError, overrides: Mapping[str, Any]) -> SkipConfig:
    """The config of a pipeline's component, which may hold nothing, or, unless it is the first, be unreadable."""
    if isinstance(record, CheckpointError):
        if overrides.get("threshold") is None:
            log.warning("%s; every attention of this component stays dense", record)
            return KEPT
        log.warning("%s; threshold is used, and no `ignore` of this component's checkpoint is known", record)
        record = CheckpointSparsity()
    if record.calibration is None and not _needs_no_curve(overrides):
        log.warning("%s; every attention of this component stays dense", _no_calibration(where, "it"))
        return KEPT
    return _config(where, record, overrides)


def _needs_no_curve(overrides: Mapping[str, Any]) -> bool:
    return any(overrides.get(name) is not None for name in ("threshold", "calibration", "rules"))


def _no_calibration(where: str, part: str) -> str:
    return f"{where}: no {KEY} with a skip_softmax calibration in {part}; set threshold instead, from_checkpoint(..., threshold=0.1)"


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in (None, [], {})}


# From a source to JSON values.


def _pipeline_parts(source: Any) -> dict[str, Any] | None:
    """The sources of a pipeline's denoisers by component name; None where `source` is no pipeline."""
    if isinstance(source, str | os.PathLike):
        folder = Path(os.fsdecode(source))
        folder = folder.parent if folder.name == "model_index.json" else folder
        if not os.path.isfile(folder / "model_index.json"):
            return None
        index = load(folder / "model_index.json")
        if not isinstance(index, dict):
            raise CheckpointError(f"{folder / 'model_index.json'}: a pipeline's index must be an object, got {show(index)}")
        # {"transformer": ["diffusers", "WanTransformer3DModel"], "transformer_2": [null, null], "boundary_ratio": 0.9, "_class_name": ...}
        names = [name for name, kind in index.items() if isinstance(kind, list) and len(kind) >= 2 and None not in kind[:2]]
        if not names:
            names = sorted(entry.parent.name for entry in folder.glob("*/config.json"))
        parts: dict[str, Any] = {name: folder / name for name in names}
    elif isinstance(components := getattr(source, "components", None), Mapping):
        parts = {name: part for name, part in components.items() if isinstance(getattr(part, "config", None), Mapping)}
    else:
        return None
    return {name: part for name, part in parts.items() if "transformer" in name or "unet" in name or _declares(part)}


def _declares(part: Any) -> bool:
    try:
        config = _open(part)[1]
    except CheckpointError:
        return False
    return isinstance(config, Mapping) and KEY in config


def _open(source: Any) -> tuple[str, Any]:
    """Where the config of a component stands, and its JSON value."""
    if isinstance(source, Mapping):
        return "dict", source
    if isinstance(source, str | os.PathLike):
        path = Path(os.fsdecode(source))
        if os.path.isdir(path):
            path = path / "config.json"
        return str(path), load(path)
    if isinstance(config := getattr(source, "config", None), Mapping):
        return f"{type(source).__name__}.config", config
    text = "must be a component's folder, its config.json, a dict, a diffusers model or its config, or a pipeline's folder"
    raise CheckpointError(f"{_name(source)}: source {text}, got {show(source)}")


def _name(source: Any) -> str:
    return os.fsdecode(source) if isinstance(source, str | os.PathLike) else type(source).__name__


def _parse(where: str, config: Any) -> CheckpointSparsity:
    top = At(where, TOP, config)
    inner = top.get(KEY) is None and any(top.get(key) is not None for key in ("config_groups", "threshold_scale_factor"))
    root = At(where, KEY, config) if inner else top.get(KEY)
    group = None if root is None else _skip_group(root)
    if root is None or group is None:
        return CheckpointSparsity()
    holders = (group,) if group is root else (group, root)

    def find(key: str) -> At | None:
        return next((at for holder in holders if (at := holder.get(key)) is not None), None)

    ignored = [at for holder in holders for key in ("ignore", "disabled_layers") if (at := holder.get(key)) is not None]
    producer = _producer(root.get("producer"))
    return CheckpointSparsity(
        calibration=_calibration(find("threshold_scale_factor"), find(OWN_KEY), producer),
        ignore=tuple(dict.fromkeys(pattern for at in ignored for pattern in at.patterns())),
        target_sparsity=_phase(find("target_sparsity")),
        disabled_until_timestep=_phase(find("disabled_until_timestep")),
        initial_disabled_steps=steps.count() if (steps := find("initial_disabled_steps")) else None,
        targets=tuple(at.text() for at in targets.items()) if (targets := find("targets")) else (),
        producer=producer,
    )


def _skip_group(root: "At") -> "At | None":
    """The group of skip-softmax, chosen by what it is and never by its name; the top level itself where there are no groups."""
    groups = root.get("config_groups")
    candidates = [root] if groups is None else groups.members()
    algorithms = [group.get("algorithm") or group.get("sparse_algo") for group in candidates]
    kinds = [None if algorithm is None else algorithm.text() for algorithm in algorithms]
    found = [group for group, kind in zip(candidates, kinds, strict=True) if kind in ALGORITHMS]
    if not found:  # the oldest files name no algorithm, and only skip-softmax has a threshold_scale_factor
        nameless = [group for group, kind in zip(candidates, kinds, strict=True) if kind is None]
        found = [group for group in nameless if group.get("threshold_scale_factor") is not None]
    if len(found) > 1:
        paths = " and ".join(group.path for group in found)
        raise CheckpointError(f"{root.where}: {paths} are all of algorithm skip_softmax; a component can have one")
    return found[0] if found else None


def _calibration(factor: "At | None", facts: "At | None", producer: tuple[str, str] | None) -> Calibration | None:
    if factor is None:
        return None
    tables = [at for key in ("coefficients", "prefill") if (at := factor.get(key)) is not None]
    tables += [factor] if any(factor.get(key) is not None for key in ("a", "log_a")) else []
    for at in [formula for holder in (factor, *tables) if (formula := holder.get("formula")) is not None]:
        if "".join(at.text().split()) != FORMULA.replace(" ", ""):
            raise at.fails(f'"{FORMULA}"')
    if not tables:
        raise factor.fails("an object with coefficients, with prefill, or with a and b")
    curves = {_coefficients(table) for table in tables}
    if len(curves) > 1:
        raise factor.fails("one curve")
    known: dict[str, Any] = dict(MODELOPT_TILES) if producer and producer[0].lower() == "modelopt" else {}
    for key in ("tile", "tile_order", "sparsity_range", "kv_lens"):
        if facts is not None and (fact := facts.get(key)) is not None:
            known[key] = fact.value
    try:
        return Calibration(*curves.pop(), **known)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{factor.where}: {facts.path if facts else factor.path}.{error}") from error


def _coefficients(table: "At") -> tuple[float, float]:
    if table.get("c") is not None:
        raise table.fails(f'the coefficients of "{FORMULA}", a and b')
    if table.get("a") is None and (log_a := table.get("log_a")) is not None:
        a = log_a.number("a finite number whose exp is finite and > 0", lambda x: -745 < x < 709.7, math.exp)
    else:
        a = table.member("a").number("a finite number > 0", lambda x: x > 0)
    return a, table.member("b").number("a finite number")


def _phase(at: "At | None") -> float | None:
    """A number in [0, 1], or an object of such by phase, of which a diffusion transformer takes prefill."""
    if at is not None and isinstance(at.value, Mapping):
        at = at.get("prefill")
    return None if at is None else at.number("a number in [0, 1]", lambda x: 0 <= x <= 1)


def _producer(at: "At | None") -> tuple[str, str] | None:
    if at is None or (name := at.get("name")) is None:
        return None
    version = at.get("version")
    return name.text(), version.text() if version else ""
