"""Calibration: run a model on inputs of your own, dense, and learn which lambda skips which share of its tiles.

    measurement = skip_attn_compile.calibrate(pipe, lambda prompt: pipe(prompt, ...), prompts, state="wan.json")
    print(measurement)
    config = measurement.config(target_sparsity=0.5)            # for compile_pipeline or backend
    measurement.to_checkpoint(0.5)                              # ModelOpt's sparse_attention_config, by component

One pass serves every threshold (`measure`). What NVIDIA ModelOpt calls calibration, at the tiles and in the order that serve.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.gate import Gate
from skip_attn_compile.layers import LayerName, is_compiled
from skip_attn_compile.measure import MOST_THRESHOLDS
from skip_attn_compile.measurement import Measurement, Setup
from skip_attn_compile.observe import Observer
from skip_attn_compile.pipeline import SchedulerLevel, denoisers
from skip_attn_compile.progress import progress as show_progress
from skip_attn_compile.rules import policy
from skip_attn_compile.settings import Settings
from skip_attn_compile.validate import check_ints

log = logging.getLogger(__name__)

# A factor of 1.83 apart, and closer towards 1, where shares may rise steeply: on tiny_wan from 27 % at .64 to 40 % at 1.
THRESHOLDS = (*(10 ** (-6 + 5.5 * n / 21) for n in range(22)), 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)


def calibrate(
    pipe_or_model: Any,
    run: Callable[..., object],
    items: Iterable[Any] | None = None,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    tile_order: str = "ascending",
    tile: tuple[int, int] = (64, 128),
    include: Sequence[str] = ("*",),
    ignore: Sequence[str] = (),
    min_kv_len: int = 1024,
    state: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> "Measurement":
    """Run `run(item)` for each item, or `run()` once, and count in every attention call the tiles that each threshold would skip.

    pipe_or_model: an uncompiled diffusers pipeline, all of whose denoisers are measured, or a torch.nn.Module.
    run: drives it, for example `lambda prompt: pipe(prompt)`. items: prompts, saved inputs, ...; every second one is held out from the
        fit, and tells how far the curve can be trusted.
    thresholds: up to 32 lambdas in (0, 1], ascending. tile_order, tile: as they will be served; (128, 128) ascending is ModelOpt's.
    include, ignore, min_kv_len: as in SkipConfig, which calls are measured.
    state: a JSON file that is written after each item; where it exists, the items in it are not run again.
    progress: on stderr, a bar where tqdm is installed and a line for each item where it is not.

    The run is dense and exact, and counts in the pass that makes the output; its memory does not grow with the items.
    Raises ValueError for what cannot be measured, and for a state file of another calibration.
    """
    models, schedule = models_of(pipe_or_model, "calibrate")
    tile_q, tile_k = check_ints("tile", tile, 2)
    select = SkipConfig(threshold=0.0, include=tuple(include), ignore=tuple(ignore), min_kv_len=min_kv_len, tile_order=tile_order)
    setup = Setup(_check_thresholds(thresholds), tile_order, (tile_q, tile_k), select.include, select.ignore, min_kv_len)
    want = lambda layer, kv_len: kv_len >= min_kv_len and not policy(select, layer).reasons
    path = None if state is None else Path(state)
    measurement = Measurement.load(path) if path is not None and path.exists() else Measurement(setup)
    if measurement.setup != setup:
        raise ValueError(
            f"{path} holds another calibration, {measurement.setup}, this one is {setup}; give another state file, or remove it"
        )

    gate = Gate(Settings(SkipConfig(threshold=0.0, disabled_until_timestep=1.0), warns=False))  # reads t, decides nothing
    for model in models.values():
        gate.attach(model, None, schedule)
    observer = Observer(models, want, list(setup.thresholds), tile_order, setup.tile, gate)
    todo = [()] if items is None else [(item,) for item in items]
    try:
        with show_progress("calibration", len(todo), done=measurement.items, show=progress) as advance:
            for number in range(measurement.items, len(todo)):
                with observer.watching():
                    run(*todo[number])
                measurement.add(observer.take(), held_out=number % 2 == 1)
                for component in measurement.components:
                    measured = (observer.modules[LayerName(component, path)] for path in measurement.layers(component))
                    measurement.targets[component] = sorted({type(module).__name__ for module in measured})
                if path is not None:
                    measurement.save(path)
                advance("")
    finally:
        for model in models.values():
            gate.detach(model)
    for reason, calls in observer.kept.items():
        log.warning("%d attention calls were not measured: %s", calls, reason)
    if not measurement.counts[0]:
        raise ValueError(
            f"calibration measured no attention call: {', '.join(models) or 'the model'} made none with at least {min_kv_len} keys in an"
            " included layer; give longer inputs, or a smaller min_kv_len"
        )
    return measurement


def models_of(pipe_or_model: Any, asker: str) -> tuple[dict[str, nn.Module], Any]:
    """The models to run, by component, and what tells a pipeline's noise level; ValueError in the name of `asker`."""
    if isinstance(pipe_or_model, nn.Module):
        models, schedule = {"": pipe_or_model}, None
    else:
        models, schedule = denoisers(pipe_or_model, asker), SchedulerLevel(pipe_or_model)
    for name, model in models.items():
        if is_compiled(model):
            raise ValueError(f"{asker} needs an uncompiled model, {name or type(model).__name__} is compiled; measure first, then compile")
    return models, schedule


def _check_thresholds(thresholds: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(t) for t in thresholds)
    if not 1 <= len(values) <= MOST_THRESHOLDS or not all(0 < t <= 1 for t in values) or list(values) != sorted(set(values)):
        raise ValueError(f"thresholds must be 1 to {MOST_THRESHOLDS} ascending lambdas in (0, 1], got {list(thresholds)!r}")
    return values
