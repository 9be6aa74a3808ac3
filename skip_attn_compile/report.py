"""What happened: every attention site, the decision, all reasons, and the tiles it visited and skipped so far."""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skip_attn_compile.steps import Run

_SHOWN_RUNS = 6  # by str(report); to_dict has all that are remembered

UNKNOWN_LAYER = "unknown layer (attach the model)"

_DECISIONS = ("sparse", "dense now", "kept")  # when several graphs hold one layer, the first of these that applies is shown


@dataclass
class SiteReport:
    """One attention call of one layer.

    name: the module's qualified name, with #1, #2 ... for its second, third ... call.
    decision: "sparse"; "dense now", the operator at lambda 0, which may become sparse without a recompile; or "kept", SDPA untouched.
    reasons: all reasons why it is not sparse.
    threshold: lambda in force, None where kept, or where it depends on a length that is not static.
    target_sparsity: the share asked for, None where lambda is given directly.
    expected: the share that the calibration curve expects at this lambda and length, None without one.
    kv_lens: numbers of keys it was compiled for, as text ("4096", or "s0" where symbolic).
    implementation: what serves it, None where kept. tile: (query rows, keys) of the unit that is skipped.
    visited, skipped: tiles so far, over batch, heads and row groups.
    clamped: graph calls so far in which lambda was 1 or more and acted as 1.
    """

    name: str
    decision: str
    reasons: tuple[str, ...] = ()
    threshold: float | None = None
    target_sparsity: float | None = None
    expected: float | None = None
    kv_lens: tuple[str, ...] = ()
    implementation: str | None = None
    tile: tuple[int, int] | None = None
    visited: int = 0
    skipped: int = 0
    clamped: int = 0

    @property
    def sparsity(self) -> float | None:
        """Skipped share of the visited tiles, None before any tile was visited."""
        return self.skipped / self.visited if self.visited else None

    def merge(self, other: "SiteReport") -> None:
        """Take in what another graph says of the same call."""
        if _DECISIONS.index(other.decision) < _DECISIONS.index(self.decision):
            self.decision, self.threshold = other.decision, other.threshold
            self.target_sparsity, self.expected = other.target_sparsity, other.expected
            self.implementation, self.tile = other.implementation, other.tile
        self.reasons = tuple(dict.fromkeys(self.reasons + other.reasons))
        self.kv_lens = tuple(dict.fromkeys(self.kv_lens + other.kv_lens))
        self.visited += other.visited
        self.skipped += other.skipped
        self.clamped += other.clamped


@dataclass(frozen=True)
class UnmatchedPattern:
    """A pattern of the config that matched no attention layer, and the names that come nearest."""

    field: str
    pattern: str
    nearest: tuple[str, ...]

    def __str__(self) -> str:
        hint = f"; nearest: {', '.join(self.nearest)}" if self.nearest else ""
        return f"{self.field} pattern {self.pattern!r} matched no attention layer{hint}"


@dataclass
class Report:
    """Sites in call order; `str()` is a table, `to_dict()` and `to_json()` are for machines.

    runs: what the timestep gate did, in order. implementations: by name, what each that serves a site publishes about itself.
    """

    sites: list[SiteReport]
    unmatched: list[UnmatchedPattern] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    implementations: dict[str, str] = field(default_factory=dict)
    graphs: int = 0

    @property
    def visited(self) -> int:
        return sum(site.visited for site in self.sites)

    @property
    def skipped(self) -> int:
        return sum(site.skipped for site in self.sites)

    @property
    def sparsity(self) -> float | None:
        """Skipped share of all visited tiles, None before any tile was visited."""
        return self.skipped / self.visited if self.visited else None

    def site(self, name: str) -> SiteReport:
        """The site called `name`; KeyError with the nearest names where there is none."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(f"no attention site {name!r}; nearest: {', '.join(nearest(name, (s.name for s in self.sites))) or 'none'}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "sites": [{**asdict(site), "sparsity": site.sparsity} for site in self.sites],
            "unmatched": [asdict(unmatched) for unmatched in self.unmatched],
            "notes": list(self.notes),
            "runs": [asdict(run) for run in self.runs],
            "implementations": dict(self.implementations),
            "graphs": self.graphs,
            "visited": self.visited,
            "skipped": self.skipped,
            "sparsity": self.sparsity,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        header = ("site", "decision", "keys", "lambda", "expected", "tiles", "skipped", "reasons")
        rows: list[tuple[str, ...]] = [header, *map(_row, self.sites)]
        if all(site.expected is None for site in self.sites):
            rows = [row[:4] + row[5:] for row in rows]
        lines = table(rows)
        total = f"{_count(self.sites)} in {self.graphs} graph{'s' * (self.graphs != 1)}; {self.skipped:,} of {self.visited:,} tiles skipped"
        if self.sparsity is not None:
            total += f" ({self.sparsity:.1%})"
        lines.append(total)
        lines += [f"run by {name}: {published}" for name, published in sorted(self.implementations.items())]
        return "\n".join([*lines, *_shown_runs(self.runs), *map(str, self.unmatched), *self.notes])


def _shown_runs(runs: Sequence[Run]) -> list[str]:
    earlier = len(runs) - _SHOWN_RUNS
    return ([f"{earlier} earlier run{'s' * (earlier != 1)} under the gate"] if earlier > 0 else []) + [
        str(run) for run in runs[-_SHOWN_RUNS:]
    ]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with the columns of `rows` aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def nearest(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Up to three of `names` that come nearest to `name`."""
    return tuple(difflib.get_close_matches(name, list(dict.fromkeys(names)), 3, cutoff=0.4))


def _row(site: SiteReport) -> tuple[str, ...]:
    threshold = "" if site.threshold is None else f"{site.threshold:.4g}"
    expected, share = ("" if value is None else f"{value:.1%}" for value in (site.expected, site.sparsity))
    keys, reasons = ",".join(site.kv_lens), "; ".join(site.reasons)
    return (site.name, site.decision, keys, threshold, expected, f"{site.visited:,}", share, reasons)


def _count(sites: list[SiteReport]) -> str:
    parts = [f"{n} {decision}" for decision in _DECISIONS if (n := sum(site.decision == decision for site in sites))]
    return f"{len(sites)} site{'s' * (len(sites) != 1)}" + (f" ({', '.join(parts)})" if parts else "")
