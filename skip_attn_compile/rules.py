"""The decision, pure: may a call skip in a layer, and at which lambda, or why not. All reasons are collected, none is silent."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skip_attn_compile import kernels
from skip_attn_compile.config import Calibration, SkipConfig
from skip_attn_compile.layers import LayerName
from skip_attn_compile.sites import AttentionSite
from skip_attn_compile.sizes import Size, same_size

# Every reason that this module gives, as users see it; implementations add theirs (kernels.Implementation.not_supported_reasons).
# The README's support table is made from these texts.
REASONS = {
    "ignored": "ignored by pattern {pattern!r}",
    "ignored by checkpoint": "ignored by the checkpoint's pattern {pattern!r}",
    "not included": "no include pattern matches",
    "dense rule": "rule {pattern!r} says dense",
    "no operating point": "no threshold: none in the config, and no rule gives one here",
    "no calibration": "target_sparsity {target} without a calibration here",
    "short kv": "short: {kv_len} keys < min_kv_len {min_kv_len}",
    "gradient": "an input requires grad, and skip-softmax attention has no backward",
    "dropout": "dropout_p is {dropout_p}, must be 0",
    "general mask": "mask {shape} is not a key mask [batch|1, 1, 1, keys], nor one and-ed with a query mask [batch|1, 1, queries, 1]",
    "rank": "query, key and value must be [batch, heads, tokens, head_dim], got {shapes}",
    "shapes": "query, key and value must agree in batch and head_dim, heads must divide, got {shapes}",
    "gqa": "{heads} query heads over {kv_heads} key heads without enable_gqa",
    "symbolic": "{what} is symbolic, must be static",
    "not constant": "{argument} is computed in the graph, must be a constant",
    "unknown shapes": "the graph does not record the shapes of the call",
    "nested": "inside a nested graph (checkpoint, cond, ...)",
}


@dataclass(frozen=True)
class Policy:
    """What the config says of one layer: its operating point, or the reasons why the layer never skips."""

    threshold: float | None = None  # lambda, given
    target_sparsity: float | None = None  # or a share, which `calibration` turns into lambda
    calibration: Calibration | None = None
    reasons: tuple[str, ...] = ()

    @property
    def control(self) -> tuple[float, float]:
        """(c0, c1) of lambda = c0 + c1 / L, with L the number of keys; (0, 0) is dense."""
        if self.threshold is not None:
            return self.threshold, 0.0
        if self.target_sparsity is not None and self.calibration is not None:
            return 0.0, self.calibration.scale_factor(self.target_sparsity)
        return 0.0, 0.0


@dataclass(frozen=True)
class Decision:
    """Whether one SDPA call is rewritten, for good.

    reasons: why the call is kept whatever its layer; the reasons that depend on the layer are in its `Policy`.
    unserved: nothing but the lack of an implementation keeps it.
    """

    kept: bool
    reasons: tuple[str, ...]
    call_index: int
    kv_len: Size | None
    masked: bool
    implementation: kernels.Implementation | None
    unserved: bool

    @property
    def host_kv_len(self) -> Size | None:
        """The number of keys that lambda is derived from, where the host can know it: under a mask it is counted on the device."""
        return None if self.masked else self.kv_len


def decide(site: AttentionSite, layers: Sequence[LayerName], config: SkipConfig) -> Decision:
    """Rewrite, or keep because the call cannot skip, or because no layer it serves ever may.

    layers: those that may run this call; empty where none is known yet: then it is rewritten, and dense until one is.
    """
    of_call, chosen = _reasons_to_keep(site, config)
    of_implementations, implementation = (chosen, None) if isinstance(chosen, list) else ([], chosen)
    never = bool(layers) and all(policy(config, layer).reasons for layer in layers)
    reasons = (*of_call, *of_implementations)
    unserved = bool(of_implementations) and not of_call and not never
    masked = site.key_mask is not None
    return Decision(bool(reasons) or never, reasons, site.call_index, site.kv_len, masked, implementation, unserved)


def policy(config: SkipConfig, layer: LayerName) -> Policy:
    """include says who takes part, rules (later wins, value by value) change values, ignore removes and beats everything."""
    threshold, target, calibration, dense = config.threshold, config.target_sparsity, config.calibration, None
    for rule in config.rules:
        if matches(rule.pattern, layer):
            calibration = rule.calibration or calibration
            dense = rule.pattern if rule.dense else None
            if rule.threshold is not None or rule.target_sparsity is not None:
                threshold, target = rule.threshold, rule.target_sparsity
    reasons = []
    if not any(matches(pattern, layer) for pattern in config.include):
        reasons.append(REASONS["not included"])
    if dense is not None:
        reasons.append(REASONS["dense rule"].format(pattern=dense))
    elif threshold is None and target is None:
        reasons.append(REASONS["no operating point"])
    elif threshold is None and calibration is None:
        reasons.append(REASONS["no calibration"].format(target=target))
    reasons += [REASONS["ignored"].format(pattern=pattern) for pattern in config.ignore if matches(pattern, layer)]
    reasons += [REASONS["ignored by checkpoint"].format(pattern=pattern) for pattern in config.checkpoint_ignore if matches(pattern, layer)]
    return Policy(reasons=tuple(reasons)) if reasons else Policy(threshold, target, calibration)


def matches(pattern: str, layer: LayerName) -> bool:
    """fnmatchcase on the full name and on the component-relative name, never on a block-relative one."""
    return fnmatch.fnmatchcase(layer.full, pattern) or fnmatch.fnmatchcase(layer.path, pattern)


def _reasons_to_keep(site: AttentionSite, config: SkipConfig) -> tuple[list[str], kernels.Implementation | list[str]]:
    """Why the call itself, whatever its layer, must stay SDPA; and what would run it, or why nothing can."""
    query, key, value = site.query, site.key, site.value
    unknown_mask = site.arguments["attn_mask"] is not None and site.mask is None
    if query is None or key is None or value is None or site.dtype is None or unknown_mask:
        return [REASONS["unknown shapes"]], []
    computed = [name for name in ("dropout_p", "is_causal", "enable_gqa") if isinstance(site.arguments[name], torch.fx.Node)]
    reasons = [REASONS["not constant"].format(argument=name) for name in computed]
    if site.nested:
        reasons.append(REASONS["nested"])
    reasons += reasons_of_call(query, key, value, site.mask, site.arguments["dropout_p"], site.arguments["enable_gqa"])
    if isinstance(site.kv_len, int) and site.kv_len < config.min_kv_len:
        reasons.append(REASONS["short kv"].format(kv_len=site.kv_len, min_kv_len=config.min_kv_len))
    return reasons, _implementation(site, config)


def reasons_of_call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: Any, enable_gqa: Any) -> list[str]:
    """Why no SDPA call of these tensors and flags can skip. Tensors may be fake; of flags that are nodes of a graph nothing is known."""
    shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
    if not query.dim() == key.dim() == value.dim() == 4:
        return [REASONS["rank"].format(shapes=shapes)]
    reasons = []
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, mask) if t is not None):
        reasons.append(REASONS["gradient"])
    if isinstance(dropout_p, float | int) and dropout_p != 0:
        reasons.append(REASONS["dropout"].format(dropout_p=dropout_p))
    (batch, heads), (kv_batch, kv_heads) = query.shape[:2], key.shape[:2]
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        reasons.append(REASONS["symbolic"].format(what="the number of heads"))
    elif (
        not same_size(batch, kv_batch)
        or not same_size(kv_batch, value.shape[0])
        or kv_heads != value.shape[1]
        or not kv_heads
        or heads % kv_heads
    ):
        reasons.append(REASONS["shapes"].format(shapes=shapes))
    elif heads != kv_heads and enable_gqa is not True:
        reasons.append(REASONS["gqa"].format(heads=heads, kv_heads=kv_heads))
    return reasons


def _implementation(site: AttentionSite, config: SkipConfig) -> kernels.Implementation | list[str]:
    query, key, value = site.query, site.key, site.value
    assert query is not None and key is not None and value is not None and site.dtype is not None
    if not query.dim() == key.dim() == value.dim() == 4:
        return []
    if not isinstance(query.shape[3], int) or not isinstance(value.shape[3], int):
        return [REASONS["symbolic"].format(what="head_dim")]
    if site.mask is not None and site.key_mask is None and site.query_mask is None:
        return [REASONS["general mask"].format(shape=list(site.mask.shape))]
    key_mask = None if site.key_mask is None else site.key_mask.example
    is_causal = site.arguments["is_causal"] is True
    problem = kernels.Problem.of(query, key, value, key_mask, site.query_mask is not None, is_causal, config.tile_order)
    return kernels.choose(problem._replace(dtype=site.dtype), config.implementation)
