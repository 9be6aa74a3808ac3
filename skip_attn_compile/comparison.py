"""Runs of all items with some layers sparse, compared with the dense run; what they gave outlasts the process in a state file."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skip_attn_compile.files import check_writable, write_whole
from skip_attn_compile.frontier import StepError, root_mean
from skip_attn_compile.json_values import load
from skip_attn_compile.layers import LayerName
from skip_attn_compile.state import digest
from skip_attn_compile.timestep import is_dense
from skip_attn_compile.trial import Difference, Tally, Trial, tensors

_FORMAT = 1
_SAME = 1e-3  # relative difference of outputs that are the same: 60 dB
_ELSEWHERE = "give another state file, or remove it"


class Outcome(NamedTuple):
    """Of one run of all items: its relative error, PSNR of the worst item in dB, tiles skipped."""

    error: float
    psnr: float
    skipped: int


class Outcomes:
    """What was tried, and what came of it. `path`: a JSON file that holds it, and is read at the start."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """about: what the outcomes depend on. ValueError for a file of anything else, or that cannot be written."""
        self._path = path
        self._about: dict[str, Any] = {}
        self._found: dict[tuple[tuple[str, ...], float], Outcome] = {}
        if path is not None:
            check_writable("state", path)
            if path.exists():
                self._read(path)
        for name, value in about.items():
            self.depend_on(name, value)

    def depend_on(self, name: str, value: Any) -> None:
        """ValueError where what was read has another value."""
        before = self._about.get(name) if self._found else self._about.setdefault(name, value)
        if before != value:
            raise ValueError(f"{self._path} holds runs with {name} {before!r}, here it is {value!r}; {_ELSEWHERE}")

    def depend_on_outputs(self, samples: list[list[float]]) -> None:
        """Of the dense run: inputs, weights and sampling all show in them. ValueError where those that were read are others.

        Not to the bit, which not every GPU repeats.
        """
        before = self._about.get("outputs") if self._found else self._about.setdefault("outputs", samples)
        alike = lambda a, b: len(a) == len(b) and math.dist(a, b) <= _SAME * math.hypot(*a)
        if before is None or len(before) != len(samples) or not all(map(alike, before, samples)):
            what = "the dense run gives another output: inputs, weights or sampling have changed"
            raise ValueError(f"{self._path} holds runs of something else, {what}; {_ELSEWHERE}")

    def get(self, sparse: Sequence[LayerName], cutoff: float) -> Outcome | None:
        return self._found.get(_key(sparse, cutoff))

    def add(self, sparse: Sequence[LayerName], cutoff: float, outcome: Outcome) -> None:
        self._found[_key(sparse, cutoff)] = outcome
        if self._path is not None:
            rows = [[*tried, *found] for tried, found in self._found.items()]
            write_whole(self._path, json.dumps({"skip_attn_compile_sensitivity": _FORMAT, "about": self._about, "outcomes": rows}))

    def _read(self, path: Path) -> None:
        try:
            data = load(path)
            if (version := data["skip_attn_compile_sensitivity"]) != _FORMAT:
                raise ValueError(f"format {version!r}, where this version reads {_FORMAT}")
            for names, cutoff, error, psnr, skipped in data["outcomes"]:
                self._found[tuple(map(str, names)), float(cutoff)] = Outcome(float(error), float(psnr), int(skipped))
            self._about = dict(data["about"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"state must be a file that sensitivity(state=...) wrote, got {str(path)!r}, which is not"
            raise ValueError(f"{text}: {type(error).__name__}: {error}; give another path") from error


def _key(sparse: Sequence[LayerName], cutoff: float) -> tuple[tuple[str, ...], float]:
    return tuple(sorted(layer.full for layer in sparse)), cutoff


class Comparison:
    """Runs of all items, compared with the dense one."""

    def __init__(
        self, trial: Trial, run: Callable[..., object], items: list[tuple[Any, ...]], peak: float | None, outcomes: Outcomes
    ) -> None:
        self.trial, self._run, self._items, self._peak, self._outcomes = trial, run, items, peak, outcomes
        self._dense: list[tuple[Tensor | None, list[Tensor]]] = []  # first input and output of each item, on the CPU
        self._tallies: dict[tuple[LayerName, float | None], Tally] = {}

    def run_dense(self) -> None:
        for item in self._items:
            with self.trial.running(compare_blocks=True):
                output = self._run(*item)
            first, output = self._ends(output)
            if not output:
                raise ValueError("run must return the tensors to compare, or call the model, and did neither; return the latents")
            if not all(bool(tensor.isfinite().all()) for tensor in output):
                raise ValueError(
                    "run must give finite numbers where all is dense, and gave NaN or infinity: nothing can be compared with them"
                )
            self._dense.append((first, output))
        self._tallies = {where: tally for where, tally in self.trial.tallies.items() if tally.visited}
        self._outcomes.depend_on("tiles", self.visited)
        self._outcomes.depend_on("first inputs", digest(first for first, _ in self._dense))
        self._outcomes.depend_on_outputs([_sampled(outputs) for _, outputs in self._dense])

    def run(self, sparse: Sequence[LayerName], cutoff: float) -> Outcome:
        """All items with these layers sparse, unless that is known already."""
        found = self._outcomes.get(sparse, cutoff)
        if found is None:
            found = self._try(sparse, cutoff)
            self._outcomes.add(sparse, cutoff, found)
        return found

    def _try(self, sparse: Sequence[LayerName], cutoff: float) -> Outcome:
        trial = self.trial
        trial.tallies.clear()
        trial.sparse, trial.cutoff = frozenset(sparse), cutoff
        squares, worst = [], math.inf
        try:
            for number, item in enumerate(self._items):
                with trial.running():
                    output = self._run(*item)
                first, output = self._ends(output)
                first_before, dense = self._dense[number]
                if first is not None and first_before is not None and not torch.equal(first, first_before):
                    raise ValueError(
                        f"run must give the model the same input for the same item, and item {number} began with another; seed its noise"
                    )
                if [tensor.shape for tensor in output] != [tensor.shape for tensor in dense]:
                    raise ValueError(
                        f"run must give as much for the same item each time, and item {number} gave {_shapes(output)}, not {_shapes(dense)}"
                    )
                difference = Difference.of(dense, output)
                squares.append(difference.relative**2)
                worst = min(worst, difference.psnr(self._peak or _range(dense)))
        finally:
            trial.sparse, trial.cutoff = (), 0.0
        error = root_mean(squares)
        return Outcome(math.inf if error is None else error, worst, sum(tally.skipped for tally in trial.tallies.values()))

    def _ends(self, output: object) -> tuple[Tensor | None, list[Tensor]]:
        outputs = tensors(output) or tensors(self.trial.last_output)
        return self.trial.first_input, [tensor.to("cpu", copy=True) for tensor in outputs]

    @property
    def layers(self) -> list[LayerName]:
        return list(dict.fromkeys(layer for layer, _ in self._tallies))

    @property
    def levels(self) -> list[float | None]:
        """From noise to the clean sample, None last."""
        return sorted({level for _, level in self._tallies}, key=lambda level: math.inf if level is None else -level)

    @property
    def visited(self) -> int:
        return sum(tally.visited for tally in self._tallies.values())

    def block_error(self, layer: LayerName) -> float | None:
        return root_mean([square for (name, _), tally in self._tallies.items() if name == layer for square in tally.block_errors])

    def tiles(self, layer: LayerName) -> tuple[int, int]:
        own = [tally for (name, _), tally in self._tallies.items() if name == layer]
        return sum(tally.visited for tally in own), sum(tally.skipped for tally in own)

    def step(self, level: float | None) -> StepError:
        own = [tally for (_, at), tally in self._tallies.items() if at == level]
        error = root_mean([square for tally in own for square in tally.block_errors])
        return StepError(level, error, sum(tally.skipped for tally in own) / sum(tally.visited for tally in own))

    def expected_share(self, sparse: Sequence[LayerName], cutoff: float) -> float:
        """Of all tiles, as far as the dense run's trajectory tells."""
        left = [
            t.skipped for (name, level), t in self._tallies.items() if name in sparse and (level is None or not is_dense(level, cutoff))
        ]
        return sum(left) / self.visited


def _sampled(output: Sequence[Tensor]) -> list[float]:
    """Some 64 values of each tensor."""
    return [value for tensor in output for value in tensor.flatten()[:: max(1, tensor.numel() // 64)].double().tolist()]


def _shapes(output: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in output) or "nothing"


def _range(output: Sequence[Tensor]) -> float:
    return float(max(tensor.max() for tensor in output) - min(tensor.min() for tensor in output)) or 1.0
