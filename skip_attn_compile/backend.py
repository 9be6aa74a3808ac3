"""The torch.compile backend: find the attention sites, decide, rewrite, hand the graph to the inner compiler, keep lambda live."""

import dataclasses
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from skip_attn_compile.calls import Schedule
from skip_attn_compile.composites import has_composites, open_composites
from skip_attn_compile.config import Caution, SkipConfig
from skip_attn_compile.frames import captured_code, frames_of_graph
from skip_attn_compile.gate import Gate
from skip_attn_compile.layers import Frame, KnownModels, LayerName, unwrap
from skip_attn_compile.live import CompiledGraph, GraphRecord
from skip_attn_compile.report import Report
from skip_attn_compile.rewrite import copy_graph_module, rewrite
from skip_attn_compile.rules import Decision, decide
from skip_attn_compile.settings import Settings
from skip_attn_compile.sites import AttentionSite, find_sites
from skip_attn_compile.summary import KEPT_WHEN_COMPILED, build_report, kept_sites
from skip_attn_compile.timestep import TimestepSpec, check_spec

log = logging.getLogger(__name__)

_INNER = ("inductor", "aot_eager", "eager")
_backends: "weakref.WeakSet[SkipBackend]" = weakref.WeakSet()

Inner = str | Callable[..., Any]


def backend(config: SkipConfig, inner: Inner = "inductor", model: nn.Module | None = None) -> "SkipBackend":
    """A backend for torch.compile that runs attention as skip-softmax attention where `config` says so.

    inner: what compiles the rest, "inductor" | "aot_eager" | "eager" | a callable (graph_module, example_inputs) -> callable.
    model: attached at once, as with `SkipBackend.attach(model)`.
    """
    return SkipBackend(config, inner, model)


class SkipBackend:
    """What `backend` returns. Compared by identity: Dynamo must not take one backend's graphs for another's."""

    __name__ = "skip_attn_compile"

    def __init__(self, config: SkipConfig, inner: Inner = "inductor", model: nn.Module | None = None) -> None:
        if not isinstance(config, SkipConfig):
            raise ValueError(f"backend needs a SkipConfig, got {config!r}; write backend(SkipConfig(threshold=0.1))")
        if not callable(inner) and inner not in _INNER:
            raise ValueError(f"inner must be one of {', '.join(_INNER)} or a callable, got {inner!r}")
        self._inner = inner
        self._settings = Settings(config)
        self._models = KnownModels()
        self._gate = Gate(self._settings)
        self._graphs: list[GraphRecord] = []
        self._resets: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._updating = threading.Lock()  # from the config that is read to the one that replaces it
        self._logged: set[str] = set()
        if model is not None:
            self._attach(model, asker="backend")
        _backends.add(self)

    @property
    def config(self) -> SkipConfig:
        """The config in force, `update`s included."""
        return self._settings.config

    def attach(self, model: nn.Module, name: str = "", *, timestep_spec: TimestepSpec | None = None) -> None:
        """Name the layers of `model`, which is held weakly; `name` is its component, such as "transformer".

        Needed where blocks are compiled one by one, and for a second model of one class on one backend. With disabled_until_timestep
        the model gets a forward hook that sees its noise level; timestep_spec says how it is told, for classes not known here.
        Attach again after modules were added, removed or moved.
        """
        self._attach(model, name, timestep_spec)

    def _attach(
        self,
        model: nn.Module,
        name: str = "",
        spec: TimestepSpec | None = None,
        schedule: Schedule | None = None,
        asker: str = "attach",
    ) -> None:
        if spec is not None:
            check_spec(spec, model)
        self._models.attach(model, name, asker)
        self._gate.attach(model, spec, schedule)

    def update(
        self,
        *,
        threshold: float | None = None,
        target_sparsity: float | None = None,
        disabled_until_timestep: float | None = None,
    ) -> None:
        """Set a new operating point, lambda or a target share, or a new gate, from the next call on, in all threads, without a recompile.

        What is not given stays. Layers whose operating point a rule sets are not affected. Raises ValueError for a target without a
        calibration, and where the change would need a recompile: for a site that was kept because the config had no operating point
        for it, and where every site was kept.
        """
        with self._updating:
            self._use(self._updated(threshold, target_sparsity, disabled_until_timestep))

    def _use(self, config: SkipConfig) -> None:
        self._settings.update(config)
        self._gate.install_hooks()

    def _updated(
        self, threshold: float | None = None, target_sparsity: float | None = None, disabled_until_timestep: float | None = None
    ) -> SkipConfig:
        if threshold is not None and target_sparsity is not None:
            raise ValueError(f"update needs either threshold or target_sparsity, got {threshold!r} and {target_sparsity!r}")
        changes: dict[str, Any] = {}
        if threshold is not None or target_sparsity is not None:
            changes = {"threshold": threshold, "target_sparsity": target_sparsity}
        if disabled_until_timestep is not None:
            changes["disabled_until_timestep"] = disabled_until_timestep
        if not changes:
            raise ValueError("update needs threshold, target_sparsity or disabled_until_timestep, got none of them")
        config = dataclasses.replace(self.config, **changes)
        self._refuse_what_needs_a_recompile(config)
        return config

    def _refuse_what_needs_a_recompile(self, config: SkipConfig) -> None:
        with self._lock:
            graphs = list(self._graphs)
        frozen, all_kept = kept_sites(graphs, config, self._models)
        if frozen:
            raise ValueError(f"update would need a recompile: {', '.join(frozen)} {KEPT_WHEN_COMPILED}")
        if all_kept:
            raise ValueError("update cannot take effect: every site was kept as SDPA when it was compiled; see report() for the reasons")

    def report(self) -> Report:
        """Every site seen so far, and its counts. Reads the device, so it waits for the work that is queued there."""
        with self._lock:
            graphs = list(self._graphs)
        report = build_report(graphs, self.config, self._models)
        report.runs = self._gate.log.runs()
        return report

    def reset(self) -> None:
        """Forget compiled graphs and counts; torch.compiler.reset() calls it. Attached models stay attached."""
        with self._lock:
            self._graphs.clear()
            resets, self._resets = self._resets, []
        self._gate.log.clear()
        for reset in resets:
            reset()

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph that Dynamo captured; mode and options are torch.compile's."""
        inner = self._inner_compiler(mode, options)
        work = copy_graph_module(gm)
        if has_composites(work):
            open_composites(work)
        sites = find_sites(work)
        frames = frames_of_graph([site.module_ids for site in sites], example_inputs, self._models) if sites else []
        for frame in frames:
            frame.timestep_input = self._gate.find_input(work, frame, self._models)
        record = GraphRecord(captured_code(), frames, self._decide(sites, frames))
        self._log(record)
        if not record.rewritten:  # the graph as Dynamo made it: bitwise what plain compile gives
            compiled = inner(gm, list(example_inputs))
            self._remember(record)
            return compiled
        rewritten = [sites[index] for index in record.rewritten]
        record.device = rewritten[0].query.device  # type: ignore[union-attr]
        on_host = [record.decisions[index].implementation.lambda_on_host for index in record.rewritten]  # type: ignore[union-attr]
        record.lambda_on_host = any(on_host)
        control = record.new_control()
        rewrite(work, rewritten, on_host, self.config, control, record.device)
        with torch.compiler.config.patch(cache_key_tag=_cache_key_tag()):  # type: ignore[attr-defined]
            compiled = inner(work, [*example_inputs, control])
        self._remember(record)
        return CompiledGraph(compiled, record, self._settings, self._models, self._gate, example_inputs)

    def _decide(self, sites: Sequence[AttentionSite], frames: Sequence[Frame]) -> list[Decision]:
        layers: dict[int, list[LayerName]] = {}
        for frame in frames:
            for index, path in frame.sites.items():
                layers[index] = [candidate.layer(path) for candidate in frame.candidates(self._models)]
        return [decide(site, layers[index], self.config) for index, site in enumerate(sites)]

    def _inner_compiler(self, mode: str | None, options: dict[str, Any] | None) -> Callable[..., Any]:
        if self._inner == "inductor":
            # What torch.compile itself uses for its default backend: checks and translates mode and options.
            inductor = torch._TorchCompileInductorWrapper(mode, options, None)
            with self._lock:
                self._resets.append(inductor.reset)
            return inductor
        given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
        compiler = self._inner if callable(self._inner) else torch._dynamo.lookup_backend(self._inner)
        return (lambda gm, inputs: compiler(gm, inputs, **given)) if given else compiler

    def _remember(self, record: GraphRecord) -> None:
        # Only now: AOTAutograd may restart the analysis through us, and then this frame is compiled a second time.
        with self._lock:
            self._graphs.append(record)

    def _log(self, record: GraphRecord) -> None:
        """Each reason once; the report has them all. A warning where nothing here can skip, or no curve says how much."""
        kept = len(record.decisions) - len(record.rewritten)
        log.info("graph with %d attention sites: %d rewritten, %d kept", len(record.decisions), len(record.rewritten), kept)
        unserved = {reason for decision in record.decisions if decision.unserved for reason in decision.reasons}
        for row in build_report([record], self.config, self._models).sites:
            for reason in row.reasons:
                if reason not in self._logged:
                    self._logged.add(reason)
                    warns = reason in unserved or isinstance(reason, Caution)
                    log.log(logging.WARNING if warns else logging.INFO, "%s is %s: %s", row.name, row.decision, reason)


def report(compiled: Any) -> Report:
    """The report of the backend behind `torch.compile(model, backend=skip_attn_compile.backend(config))`.

    compiled: what torch.compile returned, a module after `module.compile()`, or any module after it has run.
    Raises ValueError where no backend of ours, or more than one, is behind it.
    """
    found = _backend_of(compiled)
    if found is not None:
        return found.report()
    model = unwrap(compiled) if isinstance(compiled, nn.Module) else None
    behind = [b for b in _backends if model is not None and b._models.holding(model) is not None]
    if len(behind) == 1:
        return behind[0].report()
    raise ValueError(
        f"report needs a model that one skip_attn_compile backend has compiled, got {type(compiled).__name__} with {len(behind)} of them"
        " (a model counts from its first call on); keep the backend object and call its .report()"
    )


def _backend_of(compiled: Any) -> SkipBackend | None:
    """Follow torch.compile's own references from a compiled module or function, or after `module.compile()`, to the backend."""
    call = getattr(compiled, "_compiled_call_impl", None) or compiled
    if inspect.isfunction(call):
        callback = inspect.getclosurevars(call).nonlocals.get("callback")
    else:
        callback = getattr(getattr(call, "dynamo_ctx", None), "callback", None)
    while callback is not None:
        callback = getattr(callback, "compiler_fn", callback)
        if isinstance(callback, SkipBackend):
            return callback
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return None


def _cache_key_tag() -> str:
    """Inductor's caches on disk outlive an upgrade of this package: its version belongs to their key."""
    from skip_attn_compile import __version__

    return f"{torch.compiler.config.cache_key_tag}skip_attn_compile={__version__}"
