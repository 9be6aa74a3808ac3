"""Which model calls were dense under the timestep gate, at which noise level, and who said so: kept for the report, read only by it."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from skip_attn_compile.timestep import Reading, host_level

_KEPT_STEPS = 1000  # of each model and thread; a level on a device holds 512 bytes there until the report is read


@dataclass(frozen=True)
class Step:
    """The calls of a model at one noise level. t: 1 = pure noise, None where it was not known; source: where t was read."""

    t: float | None
    dense: bool
    source: str


@dataclass(frozen=True)
class Run:
    """The steps of a model from a high noise level to a low one; where t rises, the next run begins."""

    model: str
    steps: tuple[Step, ...]

    @property
    def dense_steps(self) -> int:
        return sum(step.dense for step in self.steps)

    def __str__(self) -> str:
        """`transformer: 20 steps, 5 dense (t = 1 ... 0.971), 15 sparse (t = 0.968 ... 0.21); t from the scheduler`."""
        total = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        parts = [_part(word, [s for s in self.steps if s.dense is dense]) for word, dense in (("dense", True), ("sparse", False))]
        sources = ", ".join(dict.fromkeys(step.source for step in self.steps))
        return f"{self.model}: {', '.join([total, *parts])}; t from {sources}"


def _part(word: str, steps: list[Step]) -> str:
    known = [f"{step.t:.4g}" for step in steps if step.t is not None]
    ends = " ... ".join(dict.fromkeys((known[0], known[-1]))) if known else ""
    return f"{len(steps)} {word}" + (f" (t = {ends})" if ends else "")


@dataclass(frozen=True, eq=False)
class _Entry:
    reading: Reading
    dense: bool | torch.Tensor

    def same_step(self, other: "_Entry") -> bool:
        a, b = self.reading, other.reading
        on_host = not isinstance(a.level, torch.Tensor) and not isinstance(b.level, torch.Tensor)
        return on_host and (a.level, a.source, self.dense) == (b.level, b.source, other.dense)


class StepLog:
    """What the gate decided, in order, for each model and thread. Adding to it waits for nothing; `runs` reads devices."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], deque[_Entry]] = {}
        self._lock = threading.Lock()

    def add(self, model: str, reading: Reading, dense: bool | torch.Tensor) -> None:
        key = (model, threading.get_ident())
        entries = self._entries.get(key)
        if entries and entries[-1].reading is reading and entries[-1].dense is dense:  # the blocks of a model share one
            return
        entry = _Entry(reading, dense)
        with self._lock:
            entries = self._entries.setdefault(key, deque(maxlen=_KEPT_STEPS))
            if entries and entry.same_step(entries[-1]):
                entries[-1] = entry  # so that the blocks of this call find it: 0.3 us, not 2
            else:
                entries.append(entry)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def runs(self) -> list[Run]:
        """Every run that is remembered: the last 1000 steps of each model and thread."""
        with self._lock:
            logs = [(model, list(entries)) for (model, _), entries in self._entries.items()]
        return [Run(model, steps) for model, entries in logs for steps in _split(_read(entries))]


def _read(entries: list[_Entry]) -> list[Step]:
    """On the host, steps that are alike and in a row made one: the calls of classifier-free guidance, the blocks of a model."""
    for device in {e.dense.device for e in entries if isinstance(e.dense, torch.Tensor) and e.dense.is_cuda}:
        torch.cuda.synchronize(device)  # other streams may still be writing
    steps = [Step(host_level(e.reading.level), bool(e.dense), e.reading.source) for e in entries]
    return [step for step, _ in groupby(steps)]


def _split(steps: list[Step]) -> Iterator[tuple[Step, ...]]:
    run: list[Step] = []
    for step in steps:
        if run and _begins_run(run[-1].t, step.t):
            yield tuple(run)
            run = []
        run.append(step)
    if run:
        yield tuple(run)


def _begins_run(before: float | None, t: float | None) -> bool:
    return (before is None) != (t is None) or (before is not None and t is not None and t > before)
