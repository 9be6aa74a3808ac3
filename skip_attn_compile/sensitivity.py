"""Which layers and steps cannot stand skipping: the error that each causes, and a proposal that keeps a stated quality.

    run = lambda seed: pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent")
    found = skip_attn_compile.sensitivity(pipe, run, [0, 1], config=config, psnr=30)
    print(found)                                      # layers by error, speed-up against error, the proposal
    handle = compile_pipeline(pipe, found.config())   # the config with the proposed `ignore` and gate

Errors and PSNR are of real runs. What is estimated is the speed-up, from the tiles that were skipped: see `attention_share`.
"""

import logging
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skip_attn_compile.calibrate import items_of, models_of, warn_of_unmatched
from skip_attn_compile.comparison import Comparison, Outcomes
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.frontier import LayerError, Point, Sensitivity
from skip_attn_compile.kernels import implementations
from skip_attn_compile.pipeline import Configs, configs_of
from skip_attn_compile.progress import progress as show_progress
from skip_attn_compile.schedule import cutoff_for_dense_steps, dense_steps
from skip_attn_compile.state import described
from skip_attn_compile.trial import Trial, stronger
from skip_attn_compile.validate import check_cutoff, is_finite

log = logging.getLogger(__name__)

_DENSE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of the steps, that the gates which are tried keep dense


def sensitivity(
    pipe_or_model: Any,
    run: Callable[..., object],
    items: Iterable[Any] | None = None,
    *,
    config: Configs,
    psnr: float = 30.0,
    peak: float | None = None,
    alone: bool = True,
    gates: Sequence[float] | None = None,
    attention_share: float = 1.0,
    state: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Measure what skipping at the operating point of `config` costs, by layer and step, and find what to leave dense.

    pipe_or_model, run, items: as for `calibrate`. `run` must give the same for the same item, so it seeds its noise. What it returns
        (tensors, arrays, images, a pipeline's output) is compared with the dense run's; where that is nothing, the model's last output.
        For the final latent, let the pipeline return it: output_type="latent".
    config: a SkipConfig, or for a pipeline a dict by component; `Measurement.config` gives one.
    psnr: the least that every item must keep, in dB against the dense run. peak: largest minus smallest value that an output can have;
        None: what the dense output has.
    alone: run once for each layer with it alone sparse. False: layers are compared by their blocks' errors, which one run gives.
    gates: values of disabled_until_timestep to try; None: those that keep 1/8, 1/4, 3/8 and 1/2 of the steps dense.
    attention_share: of the time of a dense run, that the layers which may skip take. With f of the time in attention and a share s of its
        tiles skipped, the speed-up is at most 1 / (1 - f s / 2): scores are always computed, and are half of attention's work. 1, the
        default, gives that of attention alone. What a GPU reaches of it: README, Speed.
    state: a JSON file that is written after each run of all items; where it exists, what it holds is not run again, only the dense run is.
        Another psnr, alone, gates or attention_share may go on from it.

    How: a dense run, in which each block is run again with each of its layers alone sparse. A run with each layer alone sparse. Then for
    each gate, layers become dense in the order of squared error per skipped tile, and bisection finds the fewest that keep `psnr`. Of
    what keeps it, the proposal skips most. In all 2 + layers + gates * log2(layers) runs of every item.
    """
    models, schedule = models_of(pipe_or_model, "sensitivity")
    configs = configs_of(models, config, pipe_or_model, "sensitivity")
    if not is_finite(psnr) or not is_finite(1 if peak is None else peak) or (peak is not None and peak <= 0):
        raise ValueError(f"psnr must be a number of dB, and peak a number > 0 or None, got {psnr!r} and {peak!r}")
    if not is_finite(attention_share) or not 0 < attention_share <= 1:
        raise ValueError(f"attention_share must be in (0, 1], the share of a dense run's time, got {attention_share!r}")
    if isinstance(gates, numbers.Real):
        raise ValueError(f"gates must be a sequence of noise levels, got {gates!r}; write gates=({gates!r},)")
    gates = None if gates is None else [check_cutoff("gates", cutoff) for cutoff in gates]
    todo = items_of(run, items, "sensitivity")
    uncounted = {by.name for by in implementations() if not by.counts_tiles} & {config.implementation for config in configs.values()}
    if uncounted:
        raise ValueError(
            f"sensitivity needs an implementation that counts the tiles it skips, got {', '.join(uncounted)}, which counts none;"
            " measure with implementation='auto', and apply what is found to your config with found.config(config)"
        )
    peak = None if peak is None else float(peak)
    operating_points = {name: repr(config) for name, config in configs.items()}
    about = {"models": described(models), "configs": operating_points, "items": len(todo), "peak": peak}
    outcomes = Outcomes(None if state is None else Path(state), about)
    trial = Trial(models, configs, schedule)
    try:
        return _explore(Comparison(trial, run, todo, peak, outcomes), configs, psnr, alone, gates, attention_share, progress)
    finally:
        for reason, calls in trial.kept.items():
            log.warning("%d attention calls were left as they are: %s", calls, reason)


def _explore(
    runs: Comparison,
    configs: Mapping[str, SkipConfig],
    psnr: float,
    alone: bool,
    gates: Sequence[float] | None,
    attention_share: float,
    show: bool,
) -> Sensitivity:
    runs.run_dense()
    layers, levels, trial = runs.layers, runs.levels, runs.trial
    warn_of_unmatched(configs.values(), trial.seen)
    if not layers and trial.kept:
        raise ValueError(f"sensitivity found no attention call that may skip, for this reason: {'; '.join(trial.kept)}")
    if not layers:
        raise ValueError(
            "sensitivity found no attention call that may skip: the config excludes all layers, or they have fewer than min_kv_len keys"
        )
    cutoffs = _cutoffs(levels, gates, configs)
    most = 1 + len(layers) * alone + len(cutoffs) * (1 + math.ceil(math.log2(len(layers))))
    with show_progress("sensitivity, runs at most", most, show=show) as advance:
        advance("dense")
        errors = []
        for layer in layers:
            found = runs.run((layer,), 0.0) if alone else None
            error, reached = (None, None) if found is None else (found.error, found.psnr)
            errors.append(LayerError(layer, runs.block_error(layer), error, reached, *runs.tiles(layer)))
            if alone:
                advance(f"{layer.full} alone")
        order = [row.layer for row in sorted(errors, key=lambda row: -row.cost)]
        own = _weakest_gate(configs)
        points = [Point(tuple(order), own, 0.0, 1.0, 0.0, math.inf)]  # the dense run

        def measure(dense: int, cutoff: float) -> Point:
            found = runs.run(order[dense:], cutoff)
            share, gate = found.skipped / runs.visited, stronger(own, cutoff)
            points.append(Point(tuple(order[:dense]), gate, share, 1 / (1 - attention_share * share / 2), found.error, found.psnr))
            advance(f"{dense} layers dense, gate {gate:g}: {found.psnr:.1f} dB")
            return points[-1]

        expected = lambda dense, cutoff: runs.expected_share(order[dense:], cutoff)
        search(len(order), cutoffs, expected, measure, psnr)
    steps = tuple(runs.step(level) for level in levels)
    return Sensitivity(tuple(errors), steps, tuple(points), psnr, attention_share, configs)


def search(
    layers: int,
    cutoffs: Sequence[float],
    expected_share: Callable[[int, float], float],
    measure: Callable[[int, float], Point],
    psnr: float,
) -> None:
    """Measure where points lie that keep `psnr` and skip much.

    measure, expected_share: (how many of the worst layers are dense, cutoff) -> a real run, and the share it should skip. cutoffs: the
    weakest gate first. Of each gate, bisection finds the fewest dense layers; what would skip less than a point in hand is not run.
    """
    in_hand = 0.0
    for cutoff in cutoffs:
        high = next((dense for dense in range(layers) if expected_share(dense, cutoff) <= in_hand), layers)
        low, probe = -1, 0  # `low` does not keep psnr, `high` does or is no gain
        while high - low > 1:
            point = measure(probe, cutoff)
            if point.psnr >= psnr:
                high, in_hand = probe, max(in_hand, point.share)
            else:
                low = probe
            probe = (low + high) // 2


def _weakest_gate(configs: Mapping[str, SkipConfig]) -> float:
    """Of the configs' own, the one that keeps fewest steps dense; 0 where one has none."""
    own = [config.disabled_until_timestep for config in configs.values()]
    return max(own) if all(own) else 0.0


def _cutoffs(levels: Sequence[float | None], given: Sequence[float] | None, configs: Mapping[str, SkipConfig]) -> list[float]:
    """0, which leaves the gate to the config, and those that keep more steps dense than it does, the weakest first."""
    known = [level for level in levels if level is not None]
    if given is not None and len(known) < len(levels):
        raise ValueError("gates need the noise level of every call; run the model inside `with skip_attn_compile.timestep(t):`")
    if len(known) < len(levels) or len(known) < 2:
        return [0.0]
    counts = sorted({max(1, round(len(known) * share)) for share in _DENSE_SHARES})
    cutoffs = [cutoff_for_dense_steps(known, n) for n in counts] if given is None else list(given)
    weakest = _weakest_gate(configs)
    dense = {dense_steps(known, stronger(weakest, cutoff)): cutoff for cutoff in reversed(cutoffs)}
    return [0.0] + [cutoff for steps, cutoff in sorted(dense.items()) if steps > dense_steps(known, weakest)]
