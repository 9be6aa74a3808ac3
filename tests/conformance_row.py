"""One row of the conformance table: a diffusers model under plain torch.compile, under our backend, and eager with the reference.

`conform` runs a model and `Row.faults` says what is wrong with it. For test_diffusers_conformance.py and examples/conformance.py.
"""

import contextlib
import copy
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import skip_attn_compile
from checks import tolerance
from diffusers_models import Case, Inputs, poisoned, run, run_exact
from skip_attn_compile import SkipConfig
from skip_attn_compile.kernels.reference import TILE_K
from skip_attn_compile.reference import reference_attention

THRESHOLD = 0.3


@dataclass
class Call:
    """One attention call of an eager model."""

    keys: int
    mask: tuple[int, ...] | None
    visited: int = 0
    skipped: int = 0

    @property
    def has_general_mask(self) -> bool:
        return self.mask is not None and any(size != 1 for size in self.mask[1:-1])


@dataclass(frozen=True)
class Row:
    """One model, compiled in one way, "full" or "regional". Pairs are (ours, plain torch.compile); errors are in units of the tolerance."""

    model: str
    way: str
    calls: dict[str, Call]  # all of them, eager with the reference at THRESHOLD in place of those that were rewritten
    tiles: dict[str, tuple[int, int]]  # of the rewritten ones in the compiled model: (visited, skipped)
    kept: dict[str, tuple[str, ...]]  # name -> reasons
    graphs: tuple[int, int]
    breaks: tuple[int, int]
    recompiles: tuple[int, int]  # at another resolution and back
    dense_error: float  # threshold 0 against plain torch.compile, or against the eager model where that is only counted
    sparse_error: float  # THRESHOLD against `calls`
    effect: float  # of skipping
    padding_error: float  # THRESHOLD with large numbers in place of masked text against THRESHOLD
    notes: list[str]  # of the report
    outside: list[str]  # the calls that no graph holds, as under plain torch.compile
    lost: list[str]  # those of them that a graph should hold
    attends: bool  # by scaled_dot_product_attention

    @property
    def faults(self) -> list[str]:
        pairs = {"graphs": self.graphs, "graph breaks": self.breaks, "recompiles": self.recompiles}
        found = [f"{ours} {what}, plain compile has {plain}" for what, (ours, plain) in pairs.items() if ours != plain]
        errors = {"threshold 0 and plain compile": self.dense_error, f"threshold {THRESHOLD} and the reference": self.sparse_error}
        if not self.calls and self.attends:
            found.append("the eager model calls no attention: is another attention backend of diffusers left on?")
        errors["outputs with and without masked text"] = self.padding_error
        found += [f"{what} differ by {error:.3g} times the tolerance" for what, error in errors.items() if not error <= 1]
        found += [
            f"{name}: {tiles} tiles, but it is not called" for name, tiles in self.tiles.items() if name not in self.calls and any(tiles)
        ]
        for name, call in self.calls.items():
            if name in self.kept and (not self.kept[name] or not call.has_general_mask):
                found.append(f"{name} is kept because {self.kept[name]}")
            if name in self.tiles and self.tiles[name] != (call.visited, call.skipped):
                found.append(f"{name}: {self.tiles[name]} tiles visited and skipped, the reference has {call.visited, call.skipped}")
        found += [f"{name} is in no graph" for name in self.lost]
        found += [f"no note on {name}" for name in self.outside if not any(_pattern(name) in note for note in self.notes)]
        several_tiles = any(call.keys > TILE_K for name, call in self.calls.items() if name in self.tiles)
        if several_tiles and not self.effect > 10:  # else the comparisons would not notice a threshold that is not applied
            found.append(f"skipping changes the output by {self.effect:.3g} times the tolerance")
        return found


class Traced(NamedTuple):
    """What Dynamo did to a model."""

    graphs: int
    breaks: int
    recompiles: int  # at other sizes, and back at the first


def trace_plain(case: Case, way: str) -> Traced:
    """Under plain torch.compile. All of this is Dynamo's, so nothing needs to compile the graphs."""
    counter = CompileCounterWithBackend("eager")
    return _run_and_trace(_compiled(case.build(), way, counter), _sizes(case), counter)[1]


def conform(case: Case, way: str, inner: str = "aot_eager", plain: Traced | None = None) -> Row:
    """Compile `case` and run it at two thresholds, and at another size too, for `recompiles`.

    plain: what `trace_plain` returns, if known. Else the model is compiled by plain torch.compile, too, and threshold 0 is compared with
    that; with `plain` it is compared with the eager model.
    """
    model, sizes = case.build(), _sizes(case)
    inputs = sizes[0]
    expected = None
    if plain is None:
        counter = CompileCounterWithBackend(inner)
        expected, plain = _run_and_trace(_compiled(model, way, counter), sizes, counter)

    counter = CompileCounterWithBackend(inner)
    be = skip_attn_compile.backend(SkipConfig(threshold=0.0, min_kv_len=0), inner=counter)
    compiled = _compiled(model, way, be)
    be.attach(compiled)
    dense, traced = _run_and_trace(compiled, sizes, counter)
    before = be.report()
    if any(site.decision != "kept" for site in before.sites):
        be.update(threshold=THRESHOLD)
    sparse = run(compiled, inputs)
    report = be.report()
    padded = run(compiled, poisoned(case, inputs)) if case.mask else sparse

    tiles = {site.name: (site.visited, site.skipped) for site in report.sites if site.decision != "kept"}
    kept = {site.name: site.reasons for site in report.sites if site.decision == "kept"}
    for site in before.sites:
        if site.name in tiles:
            visited, skipped = tiles[site.name]
            tiles[site.name] = visited - site.visited, skipped - site.skipped

    double = copy.deepcopy(model).double()
    eager, exact = run(model, inputs), run_exact(double, inputs)  # only now: some models keep tables that their first call makes
    thresholds = dict.fromkeys(tiles, THRESHOLD)
    with attention_by_reference(model, thresholds) as calls:
        reference = run(model, inputs)
    with attention_by_reference(double, thresholds):
        reference_exact = run_exact(double, inputs)
    bounds = [tolerance(a, b, torch.float32) for a, b in zip(eager, exact, strict=True)]
    sparse_bounds = [tolerance(a, b, torch.float32) for a, b in zip(reference, reference_exact, strict=True)]
    outside = [name for name in calls if name not in tiles and name not in kept]
    return Row(
        model=str(case),
        way=way,
        calls=calls,
        tiles=tiles,
        kept=kept,
        graphs=(traced.graphs, plain.graphs),
        breaks=(traced.breaks, plain.breaks),
        recompiles=(counter.frame_count - traced.graphs, plain.recompiles),
        dense_error=_error(dense, expected or eager, bounds),
        sparse_error=_error(sparse, reference, sparse_bounds),
        effect=_error(reference, eager, [a + b for a, b in zip(bounds, sparse_bounds, strict=True)]),
        padding_error=_error(padded, sparse, sparse_bounds),
        notes=report.notes,
        outside=outside,
        lost=[name for name in outside if not _eager_anyway(case, model, way, name)],
        attends=case.attends,
    )


def ways(case: Case) -> tuple[str, ...]:
    """How the model can be compiled."""
    return ("full", "regional") if getattr(case.model_class, "_repeated_blocks", None) else ("full",)


def _eager_anyway(case: Case, model: Any, way: str, name: str) -> bool:
    """Does plain torch.compile leave this call to eager Python, too?"""
    parts = name.split("#")[0].split(".")
    above = {type(model.get_submodule(".".join(parts[:n]))).__name__ for n in range(len(parts) + 1)}
    not_in_a_block = way == "regional" and above.isdisjoint(model._repeated_blocks)
    return not_in_a_block or any(fnmatch.fnmatchcase(name, pattern) for pattern in case.outside)


def _compiled(model: Any, way: str, backend: object) -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    model = copy.deepcopy(model)
    if way == "full":
        model.compile(backend=backend)
    else:
        model.compile_repeated_blocks(backend=backend)
    return model


def _sizes(case: Case) -> list[Inputs]:
    return [case.draw(), case.draw(rows=24)]


def _run_and_trace(model: nn.Module, sizes: Sequence[Inputs], counter: CompileCounterWithBackend) -> tuple[list[Tensor], Traced]:
    """The outputs at the first of `sizes`; recompiles are further graphs when the others are run, and the first again."""
    outputs = run(model, sizes[0])
    graphs, breaks = counter.frame_count, sum(counters["graph_break"].values())
    counter.backend = "eager"  # further graphs are only counted
    for inputs in (*sizes[1:], sizes[0]):
        run(model, inputs)
    return outputs, Traced(graphs, breaks, counter.frame_count - graphs)


def _error(actual: Sequence[Tensor], expected: Sequence[Tensor], bounds: Sequence[float]) -> float:
    """Of all outputs, the largest difference in units of the output's bound."""
    differences = [float((a.double() - b.double()).abs().max()) for a, b in zip(actual, expected, strict=True)]
    return max(difference / bound if bound else float(difference > 0) for difference, bound in zip(differences, bounds, strict=True))


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name.split("#")[0])


@contextlib.contextmanager
def attention_by_reference(model: nn.Module, thresholds: Mapping[str, float]) -> Iterator[dict[str, Call]]:
    """Inside, the eager model's attention calls that `thresholds` names are the reference at that lambda; the others stay SDPA.

    A name is the module's, with #1, #2 ... for its second, third ... call. Yields a dict that gets every call.
    """
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []
    made: Counter[str] = Counter()
    calls: dict[str, Call] = {}
    original = F.scaled_dot_product_attention

    def replaced(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        module = running[-1]
        name = f"{module}#{made[module]}" if made[module] else module
        made[module] += 1
        call = calls[name] = Call(key.shape[2], None if attn_mask is None else tuple(attn_mask.shape))
        if name not in thresholds:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        assert dropout_p == 0
        threshold = torch.tensor(thresholds[name])
        out, _, tiles = reference_attention(query, key, value, threshold, attn_mask, is_causal=is_causal, scale=scale)
        call.visited, call.skipped = tiles.sum((0, 1)).tolist()
        return out

    def enter(module: nn.Module, _: object) -> None:
        running.append(names.get(module, running[-1] if running else ""))  # flex_attention runs modules of its own

    def leave(*_: object) -> None:
        running.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    F.scaled_dot_product_attention = replaced
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = original
        for hook in hooks:
            hook.remove()
