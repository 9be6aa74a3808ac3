"""A dry run: what a config would do to a model, without compiling it."""

from dataclasses import dataclass

from torch import nn

from skip_attn_compile.config import SkipConfig
from skip_attn_compile.layers import KnownModels, LayerName
from skip_attn_compile.report import UnmatchedPattern, table
from skip_attn_compile.rules import Policy, policy
from skip_attn_compile.summary import unmatched_patterns


@dataclass(frozen=True)
class PlannedLayer:
    """One attention module: its qualified name, its class, and what the config says of it."""

    name: str
    module_class: str
    policy: Policy

    @property
    def decision(self) -> str:
        """Either "sparse": calls may skip, or "kept": none ever will."""
        return "kept" if self.policy.reasons else "sparse"

    @property
    def operating_point(self) -> str:
        """lambda, or how it follows from the number of keys L."""
        c0, c1 = self.policy.control
        return "" if self.policy.reasons else f"{c1:.4g} / L" if self.policy.target_sparsity is not None else f"{c0:.4g}"


@dataclass(frozen=True)
class Plan:
    """`str()` is a table. Whether a call in a "sparse" layer skips also depends on what only a graph shows: its length, mask, dtype."""

    layers: tuple[PlannedLayer, ...]
    unmatched: tuple[UnmatchedPattern, ...]
    min_kv_len: int
    disabled_until_timestep: float = 0.0

    def __str__(self) -> str:
        header = ("layer", "class", "decision", "lambda", "reasons")
        rows = [(x.name, x.module_class, x.decision, x.operating_point, "; ".join(x.policy.reasons)) for x in self.layers]
        lines = table([header, *rows]) if rows else ["no module whose class name says attention was found"]
        lines.append(f"sparse layers stay dense in calls with fewer than {self.min_kv_len} keys")
        if self.disabled_until_timestep > 0:
            lines.append(f"and at noise levels above {self.disabled_until_timestep:g}; schedule_table says how many steps that are")
        return "\n".join([*lines, *map(str, self.unmatched)])


def plan(model: nn.Module, config: SkipConfig, name: str = "") -> Plan:
    """Every attention module of `model` by name, what `config` would do there and why, and the patterns that match none.

    A module counts as attention when its class name says so (Attention, Attn) and no module inside it does. Nothing is run.
    name: the component that the model will be attached as, such as "transformer".
    Raises ValueError where model is no torch.nn.Module or config no SkipConfig.
    """
    if not isinstance(config, SkipConfig):
        raise ValueError(f"plan needs a SkipConfig, got {config!r}; write plan(model, SkipConfig(threshold=0.1))")
    names = {
        LayerName(name, path): module_class for path, module_class in KnownModels().attach(model, name, "plan").attention_modules().items()
    }
    layers = tuple(PlannedLayer(layer.full, module_class, policy(config, layer)) for layer, module_class in names.items())
    return Plan(layers, tuple(unmatched_patterns(config, list(names))), config.min_kv_len, config.disabled_until_timestep)
