"""The live side of a compiled graph: lambda goes in before each call, counts come out after it, per layer and thread."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.gate import Gate
from skip_attn_compile.layers import Candidate, Frame, KnownModels
from skip_attn_compile.rules import Decision, Policy, policy
from skip_attn_compile.settings import Settings

ATTACH = "call attach(model) on the backend so that its layers have names"
ALIKE = (
    f"{ATTACH}; where they all have, the inputs of the graph do not tell them apart (offloading, a graph break around attention): then give"
    " them one rule"
)

CLAMPED = (
    "%s: at %d keys lambda = %.4g for target_sparsity %g is clamped to 1, and the target will not be met;"
    " calibration curves are fitted below 1: use a lower target or calibrate at this length"
)

DEVICE_GATE = (
    "%s: whether its noise level lies above disabled_until_timestep=%g is known on the device alone, but its attention takes lambda on the"
    " host, so its calls are dense; give the level as a number, `with skip_attn_compile.timestep(t):`, or choose another implementation"
)

_MOST_SIZES = 4096  # remembered as checked, of a graph whose lengths vary

Callers = tuple[Candidate | None, ...]  # for each frame of a graph, the module that is calling


@dataclass(eq=False)
class Slot:
    """Control rows and counts of one graph for one combination of callers in one thread."""

    callers: Callers
    control: torch.Tensor  # float32 [n_rewritten, 2]: lambda = c0 + c1 / kv_len
    dense_control: torch.Tensor  # zeros: what the graph gets in its place while the gate says dense
    counts: torch.Tensor  # int64 [n_rewritten, 3]: tiles visited, tiles skipped, calls whose lambda was clamped to 1
    version: tuple[int, int] = (-1, -1)  # of the settings and of the known models that control was written for
    policies: list[Policy] = field(default_factory=list)
    may_skip: bool = False  # some row of control is not zero
    sizes_checked: set[tuple[int, ...]] = field(default_factory=set)


@dataclass(eq=False)
class GraphRecord:
    """What is known of one compiled graph."""

    code: CodeType | None  # of the Python frame that Dynamo captured
    frames: list[Frame]
    decisions: list[Decision]  # of every site, in the graph's order
    device: torch.device | None = None  # of counts, and of control too unless some kernel takes lambda on the host; None: all kept
    lambda_on_host: bool = False
    slots: dict[tuple[Callers, int], Slot] = field(default_factory=dict)

    @property
    def rewritten(self) -> list[int]:
        return [index for index, decision in enumerate(self.decisions) if not decision.kept]

    def frame_of(self, site: int) -> int:
        return next(n for n, frame in enumerate(self.frames) if site in frame.sites)

    def new_control(self) -> torch.Tensor:
        """Zeros: dense. Not an inference tensor, which could not be written from outside inference mode later."""
        with torch.inference_mode(False):
            return torch.zeros((len(self.rewritten), 2), dtype=torch.float32, device="cpu" if self.lambda_on_host else self.device)


class CompiledGraph:
    """What Dynamo calls: adds the control input, takes the counts off the outputs."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        record: GraphRecord,
        settings: Settings,
        models: KnownModels,
        gate: Gate,
        example_inputs: Sequence[Any],
    ) -> None:
        self._compiled, self._record = compiled, record
        self._settings, self._models, self._gate = settings, models, gate
        symbols = {n: x.node.expr for n, x in enumerate(example_inputs) if isinstance(x, torch.SymInt)}
        lengths = {site: length for site in record.rewritten if isinstance(length := record.decisions[site].host_kv_len, torch.SymInt)}
        used = {symbol for length in lengths.values() for symbol in length.node.expr.free_symbols}
        self._size_inputs = {n: symbol for n, symbol in symbols.items() if symbol in used}  # those that decide a number of keys

    def __call__(self, *args: Any) -> Any:
        callers = tuple(frame.resolve(args, self._models) for frame in self._record.frames)
        key = (callers, threading.get_ident())
        slot = self._record.slots.get(key)
        if slot is None:
            slot = self._record.slots.setdefault(key, self._new_slot(callers))
        sizes = tuple([args[n] for n in self._size_inputs])
        version = (self._settings.version, self._models.generation)
        if slot.version != version:
            self._write_control(slot, version)
        if sizes not in slot.sizes_checked:
            self._check_lambdas(slot, sizes)
        *result, counts = self._compiled(*args, self._control(slot, args))
        slot.counts.add_(counts)
        return result

    def _new_slot(self, callers: Callers) -> Slot:
        with torch.inference_mode(False):
            counts = torch.zeros((len(self._record.rewritten), 3), dtype=torch.int64, device=self._record.device)
        return Slot(callers, self._record.new_control(), self._record.new_control(), counts)

    def _control(self, slot: Slot, args: Sequence[object]) -> torch.Tensor:
        """The rows of the slot, or zeros where the gate says dense. A gate that only a device knows is applied there."""
        if not slot.may_skip or self._gate.cutoff == 0:
            return slot.control
        dense = self._gate.dense(self._record.frames, slot.callers, args)
        if isinstance(dense, torch.Tensor):
            if self._record.lambda_on_host and not dense.is_cpu:
                self._settings.warn_once(DEVICE_GATE, self._record.frames[0].function, self._gate.cutoff, key=())
                return slot.dense_control
            return slot.control.masked_fill(dense.to(slot.control.device, non_blocking=True), 0)
        return slot.dense_control if dense else slot.control

    def _write_control(self, slot: Slot, version: tuple[int, int]) -> None:
        config = self._settings.config
        slot.policies = [self._policy(site, slot.callers, config) for site in self._record.rewritten]
        with torch.inference_mode(False), torch.no_grad():
            # A few bytes from pageable memory: staged at once, so neither side waits for the other.
            slot.control.copy_(torch.tensor([p.control for p in slot.policies], dtype=torch.float32), non_blocking=True)
        slot.may_skip = any(max(p.control) > 0 for p in slot.policies)
        slot.version = version
        slot.sizes_checked = set()

    def _policy(self, site: int, callers: Callers, config: SkipConfig) -> Policy:
        number = self._record.frame_of(site)
        frame, caller = self._record.frames[number], callers[number]
        if caller is not None:
            return policy(config, caller.layer(frame.sites[site]))
        # An unknown caller gets only what every module that it may be would get.
        policies = {policy(config, candidate.layer(frame.sites[site])) for candidate in frame.candidates(self._models)}
        alike = len({p.control for p in policies}) == 1
        effect, remedy = "it gets what all candidates get" if alike else "it stays dense", ALIKE if policies else ATTACH
        self._settings.warn_once("a call of %s comes from a module that is not known, so %s; %s", frame.function, effect, remedy)
        return policies.pop() if alike else Policy()

    def _check_lambdas(self, slot: Slot, sizes: tuple[int, ...]) -> None:
        """Warn, once for each site and length, where a calibrated lambda reaches 1. Lengths under a mask are not known on the host."""
        if len(slot.sizes_checked) >= _MOST_SIZES:
            slot.sizes_checked.clear()
        slot.sizes_checked.add(sizes)
        values = dict(zip(self._size_inputs.values(), sizes, strict=True))
        for site, asked in zip(self._record.rewritten, slot.policies, strict=True):
            kv_len = self._record.decisions[site].host_kv_len
            if isinstance(kv_len, torch.SymInt):
                bound = kv_len.node.expr.subs(values)
                kv_len = int(bound) if bound.is_number else None
            if kv_len and asked.target_sparsity is not None and (threshold := asked.control[1] / kv_len) >= 1:
                number = self._record.frame_of(site)
                caller = slot.callers[number]
                layer = caller.layer(self._record.frames[number].sites[site]).full if caller else "an unknown layer"
                self._settings.warn_once(CLAMPED, layer, kv_len, threshold, asked.target_sparsity)
