"""The live side of a compiled graph: lambda goes in before each call, counts come out after it, per layer and thread."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.layers import Candidate, Frame, KnownModels
from skip_attn_compile.rules import Decision, policy

log = logging.getLogger(__name__)

ATTACH = "call attach(model) on the backend so that its layers have names"

Callers = tuple[Candidate | None, ...]  # for each frame of a graph, the module that is calling


class Settings:
    """The config in force, shared by all threads. `version` tells a graph that its control rows are out of date."""

    def __init__(self, config: SkipConfig) -> None:
        self.config = config
        self.version = 0
        self._lock = threading.Lock()

    def update(self, config: SkipConfig) -> None:
        with self._lock:
            self.config = config
            self.version += 1


@dataclass(eq=False)
class Slot:
    """Control rows and counts of one graph for one combination of callers in one thread."""

    callers: Callers
    control: torch.Tensor  # float32 [n_rewritten, 2]: lambda = c0 + c1 / kv_len
    counts: torch.Tensor  # int64 [n_rewritten, 2]: tiles visited, tiles skipped
    version: int = -1


@dataclass(eq=False)
class GraphRecord:
    """What is known of one compiled graph."""

    frames: list[Frame]
    decisions: list[Decision]  # of every site, in the graph's order
    slots: dict[tuple[Callers, int], Slot] = field(default_factory=dict)

    @property
    def rewritten(self) -> list[int]:
        return [index for index, decision in enumerate(self.decisions) if not decision.kept]

    def frame_of(self, site: int) -> int:
        return next(n for n, frame in enumerate(self.frames) if site in frame.sites)


def new_control(rows: int, device: torch.device) -> torch.Tensor:
    """Zeros: dense. Not an inference tensor, which could not be written from outside inference mode later."""
    with torch.inference_mode(False):
        return torch.zeros((rows, 2), dtype=torch.float32, device=device)


class CompiledGraph:
    """What Dynamo calls: adds the control input, takes the counts off the outputs."""

    def __init__(
        self, compiled: Callable[..., Any], record: GraphRecord, settings: Settings, models: KnownModels, device: torch.device
    ) -> None:
        self._compiled, self._record, self._device = compiled, record, device
        self._settings, self._models = settings, models

    def __call__(self, *args: Any) -> Any:
        callers = tuple(frame.resolve(args, self._models) for frame in self._record.frames)
        key = (callers, threading.get_ident())
        slot = self._record.slots.get(key)
        if slot is None:
            slot = self._record.slots.setdefault(key, self._new_slot(callers))
        if slot.version != self._settings.version:
            self._write_control(slot)
        *result, counts = self._compiled(*args, slot.control)
        slot.counts.add_(counts)
        return result

    def _new_slot(self, callers: Callers) -> Slot:
        rows = len(self._record.rewritten)
        with torch.inference_mode(False):
            counts = torch.zeros((rows, 2), dtype=torch.int64, device=self._device)
        return Slot(callers, new_control(rows, self._device), counts)

    def _write_control(self, slot: Slot) -> None:
        version, config = self._settings.version, self._settings.config
        rows = [self._row(site, slot.callers, config) for site in self._record.rewritten]
        with torch.inference_mode(False), torch.no_grad():
            # A few bytes from pageable memory: staged at once, so neither side waits for the other.
            slot.control.copy_(torch.tensor(rows, dtype=torch.float32), non_blocking=True)
        slot.version = version

    def _row(self, site: int, callers: Callers, config: SkipConfig) -> tuple[float, float]:
        """(c0, c1) of lambda = c0 + c1 / kv_len; (0, 0) is dense."""
        number = self._record.frame_of(site)
        frame, caller = self._record.frames[number], callers[number]
        # An unknown caller gets only what every module that it may be would get.
        possible = frame.candidates(self._models) if caller is None else (caller,)
        thresholds = {policy(config, candidate.layer(frame.sites[site])).threshold or 0.0 for candidate in possible}
        if caller is None and not frame.warned:
            frame.warned = True
            effect = "it gets what all candidates get" if len(thresholds) == 1 else "it stays dense"
            log.warning("a call of %s comes from a module that is not known, so %s; %s", frame.function, effect, ATTACH)
        return (thresholds.pop(), 0.0) if len(thresholds) == 1 else (0.0, 0.0)
