"""Calibration: run a model on inputs of your own, dense, and learn which lambda skips which share of its tiles.

    measurement = skip_attn_compile.calibrate(pipe, lambda prompt: pipe(prompt, ...), prompts, state="wan.json")
    print(measurement)
    config = measurement.config(target_sparsity=0.5)            # for compile_pipeline or backend
    measurement.to_checkpoint(0.5)                              # ModelOpt's sparse_attention_config, by component

One pass serves every threshold (`measure`). What NVIDIA ModelOpt calls calibration, at the tiles and in the order that serve.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.files import check_writable
from skip_attn_compile.layers import LayerName, is_compiled
from skip_attn_compile.measurement import Measurement, Setup
from skip_attn_compile.observe import Observer
from skip_attn_compile.pipeline import SchedulerLevel, denoisers
from skip_attn_compile.progress import progress as show_progress
from skip_attn_compile.rules import policy
from skip_attn_compile.state import described
from skip_attn_compile.summary import unmatched_patterns

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
) -> Measurement:
    """Run `run(item)` for each item, or `run()` once, and count in every attention call the tiles that each threshold would skip.

    pipe_or_model: an uncompiled diffusers pipeline, all of whose denoisers are measured, or a torch.nn.Module.
    run: drives it, for example `lambda prompt: pipe(prompt)`. items: prompts, saved inputs, ...; of those that have calls of about the same
        length, every second one is held out from the fit there, and tells how far the curve can be trusted.
    thresholds: up to 32 lambdas in (0, 1], ascending. tile_order, tile: as they will be served; (128, 128) ascending is ModelOpt's.
    include, ignore, min_kv_len: as in SkipConfig, which calls are measured.
    state: a JSON file that is written after each item; where it exists, the items in it are not run again.
    progress: on stderr, a bar where tqdm is installed and a line for each item where it is not.

    The run is dense and exact, and counts in the pass that makes the output. Memory and state file do not grow with the items: lengths
    share their counts in bins, of one key tile up to 20 tiles and of 5 % above, each at its mean; noise levels are exact, as a schedule
    repeats its own, and from the 1,025th on they count at the next 1/1000. Calls that serving would keep are left alone, and told.
    Raises ValueError for what cannot be measured, and for a state file of another calibration.
    """
    models, schedule = models_of(pipe_or_model, "calibrate")
    todo = items_of(run, items, "calibrate")
    setup = Setup(thresholds, tile_order, tile, include, ignore, min_kv_len)  # type: ignore[arg-type]
    select = setup.select
    want = lambda layer, kv_len: select if kv_len >= min_kv_len and not policy(select, layer).reasons else None
    state_file = None if state is None else Path(state)
    observer = Observer(models, want, schedule, setup.thresholds, tile_order, setup.tile)
    measurement = Measurement(setup, described(models))
    if state_file is not None:
        check_writable("state", state_file)
        measurement = _resumed(state_file, measurement, observer.modules, len(todo)) if state_file.exists() else measurement
    observer.levels.update(cell.t for cell in (*measurement.fitted, *measurement.held_out) if cell.t is not None)
    with show_progress("calibration", len(todo), done=measurement.items, show=progress) as advance:
        first = measurement.items
        for number in range(first, len(todo)):
            with observer.watching():
                run(*todo[number])
            found = observer.take()
            measurement.add(found)
            if number == first:
                warn_of_unmatched([select], observer.seen)
            if not found:
                why = "".join(f"; {reason}" for reason in observer.kept)
                log.warning("item %d made no attention call that could be measured%s", number, why)
            for component in measurement.components:
                measured = (observer.modules[LayerName(component, path)] for path in measurement.layers(component))
                measurement.attention_classes[component] = sorted({type(module).__name__ for module in measured})
            if state_file is not None and measurement.fitted:
                measurement.save(state_file)
            advance("")
    if not measurement.fitted:
        raise ValueError(_nothing_measured(models, min_kv_len, observer.kept))
    for reason, calls in observer.kept.items():
        log.warning("%d attention calls were not measured: %s", calls, reason)
    for component in models:
        if component not in measurement.components:
            log.warning("%s made no attention call that could be measured; it gets no curve", component)
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


def items_of(run: Any, items: Any, asker: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of `run`; ValueError in the name of `asker`."""
    if not callable(run):
        raise ValueError(f"{asker} needs run, a function that drives the model, got {run!r}; write lambda item: pipe(item)")
    if items is None:
        return [()]
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ValueError(f"items must be a sequence, each of which is given to run, got {items!r}; write items=[{items!r}]")
    todo = [(item,) for item in items]
    if not todo:
        raise ValueError("items must hold at least one, got none; leave it out where run takes no argument")
    return todo


def warn_of_unmatched(configs: Iterable[SkipConfig], seen: Iterable[LayerName]) -> None:
    """Of the patterns that select none of the layers that were seen to call attention."""
    layers = list(seen)
    for text in dict.fromkeys(str(pattern) for config in configs for pattern in unmatched_patterns(config, layers)):
        log.warning("%s", text)


def _resumed(path: Path, wanted: Measurement, modules: Mapping[LayerName, nn.Module], items: int) -> Measurement:
    """What the state file holds; ValueError where that is not a part of the `wanted` calibration."""
    found = Measurement.load(path)
    elsewhere = "give another state file, or remove it"
    if found.setup != wanted.setup:
        raise ValueError(f"{path} holds another calibration, {found.setup}, this one is {wanted.setup}; {elsewhere}")
    if found.models != wanted.models:
        raise ValueError(f"{path} holds the calibration of another model, {_named(found)}, this one is {_named(wanted)}; {elsewhere}")
    layers = [LayerName(cell.component, cell.layer) for cell in (*found.fitted, *found.held_out)]
    foreign = next((layer.full for layer in layers if layer not in modules), None)
    if foreign is not None:
        raise ValueError(f"{path} holds the calibration of another model, one with a layer {foreign}; {elsewhere}")
    if found.items > items:
        raise ValueError(f"{path} holds {found.items} items, more than the {items} that are given; give them all, or {elsewhere}")
    return found


def _named(measurement: Measurement) -> str:
    return "; ".join(f"{name}: {model}" if name else model for name, model in measurement.models.items())


def _nothing_measured(models: Iterable[str], min_kv_len: int, kept: Mapping[str, int]) -> str:
    if kept:
        return f"calibration measured no attention call, for this reason: {'; '.join(kept)}"
    who = ", ".join(filter(None, models)) or "the model"
    return (
        f"calibration measured no attention call: {who} made none with at least {min_kv_len} keys in an included layer and in the thread"
        " that called calibrate; give longer inputs, or a smaller min_kv_len"
    )
