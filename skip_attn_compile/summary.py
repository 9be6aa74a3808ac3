"""From what the compiled graphs recorded to the report: one row for each layer and call, whichever graphs serve it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType

import torch

from skip_attn_compile import kernels
from skip_attn_compile.config import SkipConfig
from skip_attn_compile.layers import Candidate, Frame, KnownModel, KnownModels, LayerName, is_within, join
from skip_attn_compile.live import ALIKE, ATTACH, GraphRecord
from skip_attn_compile.report import UNKNOWN_LAYER, Report, SiteReport, UnmatchedPattern, nearest
from skip_attn_compile.rules import Decision, Policy, matches, policy
from skip_attn_compile.sizes import Size

KEPT_WHEN_COMPILED = "kept when it was compiled, by the config and for the layers known then; torch.compiler.reset() compiles it anew"

IN_NO_GRAPH = (
    "such attention has not run, runs in eager Python (not compiled, or behind a graph break, which TORCH_LOGS=graph_breaks shows; where"
    " sizes depend on values, skip_attn_compile.capture(model) may help), or does not call scaled_dot_product_attention (linear"
    " attention, another attention backend of diffusers)"
)

NOT_RUN = "has not run: its class shares the graph"

Counts = tuple[int, int, int]  # tiles visited, tiles skipped, calls clamped


def build_report(graphs: Sequence[GraphRecord], config: SkipConfig, models: KnownModels) -> Report:
    """One row for each layer and call, whichever graphs serve it, and what the user should know besides."""
    rows: dict[object, SiteReport] = {}
    layers: dict[LayerName, None] = {}
    seen: dict[KnownModel, set[str]] = {}
    ran: set[object] = set()

    def add(key: object, row: SiteReport) -> None:
        if key in rows:
            rows[key].merge(row)
        else:
            rows[key] = row

    for graph in graphs:
        counts = read_counts(graph)
        untold = {site for site, caller in counts if caller is None}  # whoever called may be any of the candidates
        for frame in graph.frames:
            candidates = frame.candidates(models)
            for candidate in candidates:
                for site, path in frame.sites.items():
                    decision, layer = graph.decisions[site], candidate.layer(path)
                    layers[layer] = None
                    key = id(candidate.model), layer, decision.call_index
                    if decision.kept or (site, candidate) in counts or site in untold:
                        seen.setdefault(candidate.model, set()).add(layer.path)
                        ran.add(key)
                    add(key, _site_row(decision, layer, config, counts.pop((site, candidate), (0, 0, 0))))
            for site, path in frame.sites.items() if not candidates else ():
                add((id(frame), site), _unknown_row(graph.decisions[site], frame, path))
                ran.add((id(frame), site))
        visited, skipped, clamped = (sum(column) for column in zip((0, 0, 0), *counts.values(), strict=True))  # what no candidate took
        if visited:
            now, remedy = "sparse" if skipped else "dense now", ALIKE if layers else ATTACH
            add(UNKNOWN_LAYER, SiteReport(UNKNOWN_LAYER, now, (remedy,), visited=visited, skipped=skipped, clamped=clamped))
            ran.add(UNKNOWN_LAYER)
    for row_key in rows.keys() - ran:
        rows[row_key].reasons += (NOT_RUN,)
    report = Report(list(rows.values()), graphs=len(graphs))
    served_by = (decision.implementation for graph in graphs for decision in graph.decisions if not decision.kept)
    report.implementations = {x.name: x.published for x in served_by if x is not None}
    if layers:  # else no layer has a name yet, and no pattern can have missed one
        report.unmatched = unmatched_patterns(config, list(layers))
    missed = _in_no_graph(seen, models) if graphs else []
    if not rows:
        seen_in = f"no scaled_dot_product_attention call was seen in {len(graphs)} compiled graph{'s' * (len(graphs) != 1)}"
        nothing = "; nothing has run compiled yet, or Dynamo runs it eager past its recompile limit: then call torch.compiler.reset()"
        report.notes.append(seen_in + (nothing if not graphs else "" if missed else f": {IN_NO_GRAPH}"))
    report.notes += missed
    report.notes += dict.fromkeys(kernels.failures())
    report.notes += at_recompile_limit({graph.code: graph.code.co_name for graph in graphs if graph.code is not None})
    return report


def _in_no_graph(seen: Mapping[KnownModel, set[str]], models: KnownModels) -> list[str]:
    """A note where a known model has attention modules that no graph has served. seen: the paths of those that one has."""
    missed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for known in models.live():
        paths = seen.get(known, set())
        if seen and not paths:
            continue  # it may not have run yet
        for path, module_class in known.attention_modules().items():
            alike = f"{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', join(known.name, path))} ({module_class})"
            total[alike] += 1
            missed[alike] += not any(is_within(path, other) or is_within(other, path) for other in paths)
    shown = [f"{missed[alike]} of {total[alike]} {alike}" for alike in missed if missed[alike]]
    return [f"no compiled graph has served {', '.join(shown)}: {IN_NO_GRAPH}"] if shown else []


def at_recompile_limit(functions: Mapping[CodeType, str]) -> list[str]:
    """A note for each function with as many compiled variants as Dynamo allows: it runs the next one eager, and only logs that."""
    from torch._dynamo import config
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return [
        f"{function} has the {config.recompile_limit} compiled variants that Dynamo allows: any further one runs eager, with plain"
        " attention; raise torch._dynamo.config.recompile_limit, compile with dynamic=True where lengths vary, or call"
        " torch.compiler.reset() where backends that nobody uses any more hold them"
        for code, function in functions.items()
        if len(_debug_get_cache_entry_list(code)) >= config.recompile_limit
    ]


def kept_sites(graphs: Sequence[GraphRecord], config: SkipConfig, models: KnownModels) -> tuple[list[str], bool]:
    """(names of the sites that `config` would have skip, but that were kept when compiled; whether every site was). Reads no counts."""
    frozen = [
        _name(layer, decision.call_index)
        for graph in graphs
        for frame in graph.frames
        for site, path in frame.sites.items()
        if (decision := graph.decisions[site]).kept and not decision.reasons
        for layer in (candidate.layer(path) for candidate in frame.candidates(models))
        if not policy(config, layer).reasons
    ]
    decisions = [decision for graph in graphs for decision in graph.decisions]
    return frozen, bool(decisions) and all(decision.kept for decision in decisions)


def read_counts(graph: GraphRecord) -> dict[tuple[int, Candidate | None], Counts]:
    """(site, caller) -> counts, over all threads."""
    totals: dict[tuple[int, Candidate | None], Counts] = {}
    for slot in list(graph.slots.values()):
        if slot.counts.is_cuda:
            torch.cuda.synchronize(slot.counts.device)  # other streams may still be adding
        for site, row in zip(graph.rewritten, slot.counts.tolist(), strict=True):
            key = (site, slot.callers[graph.frame_of(site)])
            before = totals.get(key, (0, 0, 0))
            totals[key] = (before[0] + row[0], before[1] + row[1], before[2] + row[2])
    return totals


def _site_row(decision: Decision, layer: LayerName, config: SkipConfig, counts: Counts) -> SiteReport:
    asked = policy(config, layer)
    name, reasons = _name(layer, decision.call_index), decision.reasons + asked.reasons
    row = SiteReport(name, "kept", reasons, kv_lens=(str(decision.kv_len),))
    if decision.kept:
        if not row.reasons:
            row.reasons = (KEPT_WHEN_COMPILED,)
        return row
    row.decision = "sparse" if max(asked.control) > 0 else "dense now"
    row.target_sparsity = asked.target_sparsity
    kv_len = decision.host_kv_len
    if isinstance(kv_len, int) or asked.target_sparsity is None:
        c0, c1 = asked.control
        row.threshold = min(c0 + (c1 / kv_len if isinstance(kv_len, int) and kv_len else 0.0), 1.0)
        if asked.calibration is not None and isinstance(kv_len, int):
            row.expected = asked.calibration.sparsity_at(row.threshold, kv_len)
    if decision.implementation is not None:
        row.implementation, row.tile = decision.implementation.name, (decision.implementation.tile_q, decision.implementation.tile_k)
    row.visited, row.skipped, clamped = counts
    row.clamped = clamped if asked.target_sparsity is not None else 0
    if not isinstance(decision.kv_len, int) and config.min_kv_len > 1 and row.decision == "sparse":
        row.reasons += (f"dense in calls with fewer than {config.min_kv_len} keys",)
    row.reasons += tuple(_remarks(row, asked, config, kv_len))
    if decision.implementation is not None and not decision.implementation.counts_tiles:
        row.reasons += (f"{row.implementation} counts no tiles",)
    return row


def _remarks(row: SiteReport, asked: Policy, config: SkipConfig, kv_len: Size | None) -> Iterator[str]:
    """What the user should know of a rewritten site besides its numbers."""
    if row.decision == "dense now" and not asked.reasons:
        yield "threshold is 0"
    if row.clamped:
        yield f"lambda was 1 or more in {row.clamped} calls and acted as 1: the target is out of the curve's reach there"
    curve = asked.calibration
    if curve is None or row.target_sparsity is None:
        return
    fitted = (curve.tile or row.tile, curve.tile_order or config.tile_order)
    if fitted != (row.tile, config.tile_order):
        yield f"the curve was fitted at tiles {fitted[0]}, {fitted[1]}; here they are {row.tile}, {config.tile_order}"
    yield from curve.extrapolates(row.target_sparsity, kv_len if isinstance(kv_len, int) else None)


def _unknown_row(decision: Decision, frame: Frame, path: str) -> SiteReport:
    root = frame.function if frame.root_class is None else frame.root_class.__name__
    name = _shown(f"{root}:{path}" if path else root, decision.call_index)
    return SiteReport(name, "kept" if decision.kept else "dense now", (*decision.reasons, ATTACH), kv_lens=(str(decision.kv_len),))


def _name(layer: LayerName, call_index: int) -> str:
    return _shown(layer.full or "(root)", call_index)


def _shown(name: str, call_index: int) -> str:
    return name if call_index == 0 else f"{name}#{call_index}"


def unmatched_patterns(config: SkipConfig, layers: Sequence[LayerName]) -> list[UnmatchedPattern]:
    """The patterns of `config` that select none of `layers`."""
    rules = [rule.pattern for rule in config.rules]
    fields = {"include": config.include, "ignore": config.ignore, "checkpoint_ignore": config.checkpoint_ignore, "rules": rules}
    patterns = [(where, pattern) for where, given in fields.items() for pattern in given]
    names = [layer.full for layer in layers]
    return [UnmatchedPattern(where, p, nearest(p, names)) for where, p in patterns if not any(matches(p, layer) for layer in layers)]
