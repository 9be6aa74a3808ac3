"""`sparse_attention_config` in a component's config.json <-> Calibration, every variant that is in the wild.

    V1   config_groups.NAME: algorithm, targets, ignore, threshold_scale_factor {formula, coefficients {a, b}}, target_sparsity,
         disabled_until_timestep; producer stands beside config_groups. The one that is written.
    V2   coefficients and target_sparsity by phase: a diffusion transformer takes `prefill`.
    V3   older names: sparse_algo: softmax_skip for algorithm, disabled_layers for ignore, log_a for a = exp(log_a); coefficients beside
         formula; the keys of the group, or some of them, at the top level.
    V4   another formula, which gives lambda itself: refused, as every formula but FORMULA is. Nothing is ever evaluated.

What lies where is known to `parse` and `_coefficients`, what a value may be to `json_values.At`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skip_attn_compile.config import Calibration
from skip_attn_compile.json_values import TOP, At, CheckpointError

KEY = "sparse_attention_config"
OWN_KEY = "skip_attn_compile"
FORMULA = "a * exp(b * target_sparsity)"
ALGORITHMS = ("skip_softmax", "softmax_skip")
MODELOPT_TILES = {"tile": (128, 128), "tile_order": "ascending"}  # what ModelOpt counts when it calibrates; its export does not say so


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


def parse(where: str, config: Any) -> CheckpointSparsity:
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


def _skip_group(root: At) -> At | None:
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


def _calibration(factor: At | None, facts: At | None, producer: tuple[str, str] | None) -> Calibration | None:
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


def _coefficients(table: At) -> tuple[float, float]:
    if table.get("c") is not None:
        raise table.fails(f'the coefficients of "{FORMULA}", a and b')
    if table.get("a") is None and (log_a := table.get("log_a")) is not None:
        a = log_a.number("a finite number whose exp is finite and > 0", lambda x: -745 < x < 709.7, math.exp)
    else:
        a = table.member("a").number("a finite number > 0", lambda x: x > 0)
    return a, table.member("b").number("a finite number")


def _phase(at: At | None) -> float | None:
    """A number in [0, 1], or an object of such by phase, of which a diffusion transformer takes prefill."""
    if at is not None and isinstance(at.value, Mapping):
        at = at.get("prefill")
    return None if at is None else at.number("a number in [0, 1]", lambda x: 0 <= x <= 1)


def _producer(at: At | None) -> tuple[str, str] | None:
    if at is None or (name := at.get("name")) is None:
        return None
    version = at.get("version")
    return name.text(), version.text() if version else ""


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


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in (None, [], {})}
