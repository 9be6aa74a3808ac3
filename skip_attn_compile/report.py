"""What happened: every attention site, the decision, all reasons, and the tiles it visited and skipped so far."""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.layers import Candidate, Frame, KnownModels, LayerName
from skip_attn_compile.live import ATTACH, GraphRecord
from skip_attn_compile.rules import Decision, matches, policy

UNKNOWN_LAYER = "unknown layer (attach the model)"

_DECISIONS = ("sparse", "dense now", "kept")  # when several graphs hold one layer, the first of these that applies is shown


@dataclass
class SiteReport:
    """One attention call of one layer.

    name: the module's qualified name, with #1, #2 ... for its second, third ... call.
    decision: "sparse"; "dense now", the operator at lambda 0, which may become sparse without a recompile; or "kept", SDPA untouched.
    reasons: all reasons why it is not sparse.
    threshold: lambda in force, None where kept.
    kv_lens: numbers of keys it was compiled for, as text ("4096", or "s0" where symbolic).
    implementation: what serves it, None where kept. tile: (query rows, keys) of the unit that is skipped.
    visited, skipped: tiles so far, over batch, heads and row groups.
    """

    name: str
    decision: str
    reasons: tuple[str, ...] = ()
    threshold: float | None = None
    kv_lens: tuple[str, ...] = ()
    implementation: str | None = None
    tile: tuple[int, int] | None = None
    visited: int = 0
    skipped: int = 0

    @property
    def sparsity(self) -> float | None:
        """Skipped share of the visited tiles, None before any tile was visited."""
        return self.skipped / self.visited if self.visited else None

    def merge(self, other: "SiteReport") -> None:
        """Take in what another graph says of the same call."""
        if _DECISIONS.index(other.decision) < _DECISIONS.index(self.decision):
            self.decision, self.threshold = other.decision, other.threshold
            self.implementation, self.tile = other.implementation, other.tile
        self.reasons = tuple(dict.fromkeys(self.reasons + other.reasons))
        self.kv_lens = tuple(dict.fromkeys(self.kv_lens + other.kv_lens))
        self.visited += other.visited
        self.skipped += other.skipped


@dataclass(frozen=True)
class UnmatchedPattern:
    """A pattern of the config that matched no attention layer, and the names that come nearest."""

    field: str
    pattern: str
    nearest: tuple[str, ...]


@dataclass
class Report:
    """Sites in call order; `str()` is a table, `to_dict()` and `to_json()` are for machines."""

    sites: list[SiteReport]
    unmatched: list[UnmatchedPattern] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
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
            "graphs": self.graphs,
            "visited": self.visited,
            "skipped": self.skipped,
            "sparsity": self.sparsity,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = [("site", "decision", "keys", "lambda", "tiles", "skipped", "reasons"), *map(_row, self.sites)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = f"{_count(self.sites)} in {self.graphs} graph{'s' * (self.graphs != 1)}; {self.skipped:,} of {self.visited:,} tiles skipped"
        if self.sparsity is not None:
            total += f" ({self.sparsity:.1%})"
        lines.append(total)
        for unmatched in self.unmatched:
            hint = f"; nearest: {', '.join(unmatched.nearest)}" if unmatched.nearest else ""
            lines.append(f"{unmatched.field} pattern {unmatched.pattern!r} matched no attention layer{hint}")
        return "\n".join(lines + self.notes)


def build_report(graphs: Sequence[GraphRecord], config: SkipConfig, models: KnownModels) -> Report:
    """One row for each layer and call, whichever graphs serve it, and what the user should know besides."""
    rows: dict[object, SiteReport] = {}
    layers: dict[LayerName, None] = {}

    def add(key: object, row: SiteReport) -> None:
        if key in rows:
            rows[key].merge(row)
        else:
            rows[key] = row

    for graph in graphs:
        counts = read_counts(graph)
        for frame in graph.frames:
            candidates = frame.candidates(models)
            for candidate in candidates:
                for site, path in frame.sites.items():
                    decision, layer = graph.decisions[site], candidate.layer(path)
                    layers[layer] = None
                    visited, skipped = counts.pop((site, candidate), (0, 0))
                    add((id(candidate.model), layer, decision.call_index), _site_row(decision, layer, config, visited, skipped))
            for site, path in frame.sites.items() if not candidates else ():
                add((id(frame), site), _unknown_row(graph.decisions[site], frame, path))
        visited, skipped = (sum(column) for column in zip((0, 0), *counts.values(), strict=True))  # what no candidate took
        if visited:
            add(UNKNOWN_LAYER, SiteReport(UNKNOWN_LAYER, "dense now", (ATTACH,), visited=visited, skipped=skipped))
    report = Report(list(rows.values()), graphs=len(graphs))
    if rows:
        report.unmatched = _unmatched(config, list(layers))
    else:
        report.notes.append(f"no scaled_dot_product_attention call was seen in {len(graphs)} compiled graphs")
    return report


def read_counts(graph: GraphRecord) -> dict[tuple[int, Candidate | None], tuple[int, int]]:
    """(site, caller) -> tiles (visited, skipped), over all threads."""
    totals: dict[tuple[int, Candidate | None], tuple[int, int]] = {}
    for slot in list(graph.slots.values()):
        if slot.counts.is_cuda:
            torch.cuda.synchronize(slot.counts.device)  # other streams may still be adding
        for site, (visited, skipped) in zip(graph.rewritten, slot.counts.tolist(), strict=True):
            key = (site, slot.callers[graph.frame_of(site)])
            before = totals.get(key, (0, 0))
            totals[key] = (before[0] + visited, before[1] + skipped)
    return totals


def _site_row(decision: Decision, layer: LayerName, config: SkipConfig, visited: int, skipped: int) -> SiteReport:
    asked = policy(config, layer)
    row = SiteReport(_shown(layer.full, decision.call_index), "kept", decision.reasons + asked.reasons, None, (decision.kv_len,))
    if decision.kept:
        if not row.reasons:
            row.reasons = ("kept when it was compiled, for the layers known then; torch.compiler.reset() compiles it anew",)
        return row
    row.threshold = asked.threshold or 0.0
    row.decision = "sparse" if row.threshold > 0 else "dense now"
    if not row.reasons and row.threshold == 0:
        row.reasons = ("threshold is 0",)
    if decision.implementation is not None:
        row.implementation, row.tile = decision.implementation.name, (decision.implementation.tile_q, decision.implementation.tile_k)
    row.visited, row.skipped = visited, skipped
    return row


def _unknown_row(decision: Decision, frame: Frame, path: str) -> SiteReport:
    root = frame.function if frame.root_class is None else frame.root_class.__name__
    name = _shown(f"{root}:{path}" if path else root, decision.call_index)
    return SiteReport(name, "kept" if decision.kept else "dense now", (*decision.reasons, ATTACH), kv_lens=(decision.kv_len,))


def _shown(name: str, call_index: int) -> str:
    return name if call_index == 0 else f"{name}#{call_index}"


def _unmatched(config: SkipConfig, layers: list[LayerName]) -> list[UnmatchedPattern]:
    fields = {"include": config.include, "ignore": config.ignore, "rules": [rule.pattern for rule in config.rules]}
    patterns = [(where, pattern) for where, given in fields.items() for pattern in given]
    names = [layer.full for layer in layers]
    return [UnmatchedPattern(where, p, nearest(p, names)) for where, p in patterns if not any(matches(p, layer) for layer in layers)]


def nearest(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Up to three of `names` that come nearest to `name`."""
    return tuple(difflib.get_close_matches(name, list(dict.fromkeys(names)), 3, cutoff=0.4))


def _row(site: SiteReport) -> tuple[str, ...]:
    threshold = "" if site.threshold is None else f"{site.threshold:.4g}"
    share = "" if site.sparsity is None else f"{site.sparsity:.1%}"
    return (site.name, site.decision, ",".join(site.kv_lens), threshold, f"{site.visited:,}", share, "; ".join(site.reasons))


def _count(sites: list[SiteReport]) -> str:
    parts = [f"{n} {decision}" for decision in _DECISIONS if (n := sum(site.decision == decision for site in sites))]
    return f"{len(sites)} sites" + (f" ({', '.join(parts)})" if parts else "")
