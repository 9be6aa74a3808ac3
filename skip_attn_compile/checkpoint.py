"""Checkpoints of diffusers components and pipelines <-> SkipConfig: where the `sparse_attention_config` is, and what follows from it."""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skip_attn_compile.checkpoint_format import KEY, CheckpointSparsity, parse, write
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.json_values import CheckpointError, load, show
from skip_attn_compile.validate import check_patterns

log = logging.getLogger(__name__)

KEPT = SkipConfig(threshold=0.0, ignore=("*",))  # for a component in which nothing may skip


def from_checkpoint(source: Any, overrides: Mapping[str, Any]) -> SkipConfig | dict[str, SkipConfig]:
    """The config of a component, or, for a pipeline, of each of its components; `overrides` are fields of SkipConfig."""
    overrides = {name: tuple(value) if isinstance(value, Iterator) else value for name, value in overrides.items()}
    parts = _pipeline_parts(source)
    if parts is None:
        where, config = _open(source)
        return _config(where, parse(where, config), overrides)

    records: dict[str, tuple[str, CheckpointSparsity | CheckpointError]] = {}
    for name, part in parts.items():
        try:
            where, config = _open(part)
            records[name] = where, parse(where, config)
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
    return parse(where, config)


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
