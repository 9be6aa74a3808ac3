"""The decision is pure: patterns, their precedence, and all reasons at once."""

import dataclasses

import pytest
import torch

from skip_attn_compile import Rule, SkipConfig, kernels
from skip_attn_compile.layers import LayerName
from skip_attn_compile.masks import MaskReader, Part
from skip_attn_compile.rules import decide, matches, policy
from skip_attn_compile.sites import AttentionSite

LAYER = LayerName("", "blocks.0.attn1")
IN_COMPONENT = LayerName("transformer", "blocks.0.attn1")
ARGUMENTS = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def site(
    q=(1, 2, 512, 16), k=(1, 2, 512, 16), v=None, mask=None, dtype=torch.float32, nested=False, requires_grad=False, **arguments
) -> AttentionSite:
    query, key, value = (torch.empty(shape, dtype=dtype).requires_grad_(requires_grad) for shape in (q, k, v or k))
    given = {**ARGUMENTS, "attn_mask": mask, **arguments}
    key_mask, query_mask = (None, None) if mask is None else parts(mask)
    return AttentionSite(None, given, (), 0, query, key, value, mask, dtype, nested, key_mask, query_mask)


def parts(mask: torch.Tensor) -> tuple[Part | None, Part | None]:
    """Of a mask that is an input of the graph."""
    graph = torch.fx.Graph()
    node = graph.placeholder("mask")
    node.meta["example_value"] = mask
    return MaskReader(graph).key_and_query_mask(node)


def reasons(made: AttentionSite, **fields) -> tuple[str, ...]:
    return decide(made, [LAYER], SkipConfig(**{"threshold": 0.1, "min_kv_len": 0, **fields})).reasons


@pytest.mark.parametrize(
    ("pattern", "layer", "hit"),
    [
        ("*", LAYER, True),
        ("blocks.0.attn1", LAYER, True),
        ("blocks.0.attn1", IN_COMPONENT, True),
        ("transformer.blocks.0.attn1", IN_COMPONENT, True),
        ("transformer.*", LAYER, False),
        ("transformer_2.*", IN_COMPONENT, False),
        ("*.attn1", LAYER, True),
        ("attn1", LAYER, False),
        ("*attn1", LAYER, True),
        ("0.attn1", LAYER, False),
        ("blocks.0", LAYER, False),
        ("blocks.0.*", LAYER, True),
        ("blocks.?.attn1", LAYER, True),
        ("blocks.?.attn1", LayerName("", "blocks.10.attn1"), False),
        ("blocks.[0-2].attn1", LAYER, True),
        ("blocks.[!0]*.attn1", LAYER, False),
        ("blocks.[1-9]*.attn1", LayerName("", "blocks.10.attn1"), True),
        ("Blocks.0.attn1", LAYER, False),
        ("BLOCKS.*", LAYER, False),
        ("blocks*attn1", LAYER, True),
        ("blocks.*.attn1", LayerName("", "blocks.0.inner.attn1"), True),
        ("blocks/0/attn1", LAYER, False),
        ("blocks.0.attn", LAYER, False),
        ("blocks.0.attn[[]1", LayerName("", "blocks.0.attn[1"), True),
    ],
)
def test_patterns(pattern: str, layer: LayerName, hit: bool) -> None:
    assert matches(pattern, layer) is hit


def test_a_dot_is_a_dot() -> None:
    assert not matches("blocks.0.attn1", LayerName("", "blocksx0xattn1"))


def threshold_of(layer: LayerName = LAYER, **fields) -> float | None:
    asked = policy(SkipConfig(**{"threshold": 0.1, **fields}), layer)
    return None if asked.reasons else asked.threshold


def test_include_says_who_takes_part() -> None:
    assert threshold_of(include=("blocks.1.*", "blocks.0.*")) == 0.1
    assert threshold_of(include=("blocks.1.*",)) is None
    assert threshold_of(include=("blocks.1.*",), rules=[Rule("*", threshold=0.5)]) is None, "a rule is no invitation"


def test_later_rules_win() -> None:
    low, high, dense = Rule("blocks.*", threshold=0.2), Rule("*.attn1", threshold=0.5), Rule("blocks.0.*", dense=True)
    assert threshold_of(rules=[low, high]) == 0.5
    assert threshold_of(rules=[high, low]) == 0.2
    assert threshold_of(rules=[low, dense]) is None
    assert threshold_of(rules=[dense, low]) == 0.2
    assert threshold_of(rules=[low, Rule("blocks.1.*", threshold=0.9)]) == 0.2
    assert threshold_of(threshold=None, rules=[low]) == 0.2


def test_zero_is_a_threshold() -> None:
    assert threshold_of(rules=[Rule("*", threshold=0)]) == 0.0
    assert threshold_of(threshold=0) == 0.0


def test_ignore_beats_everything() -> None:
    assert threshold_of(ignore=("*.attn1",), include=("blocks.0.attn1",), rules=[Rule("blocks.0.attn1", threshold=0.5)]) is None
    assert threshold_of(layer=IN_COMPONENT, ignore=("transformer.*",)) is None
    assert threshold_of(layer=LayerName("transformer_2", "blocks.0.attn1"), ignore=("transformer.*",)) == 0.1


def test_all_reasons_of_a_layer() -> None:
    config = SkipConfig(threshold=0.1, include=("a.*",), rules=[Rule("blocks.*", dense=True)], ignore=("*.attn1", "x", "blocks.0.*"))
    assert policy(config, LAYER).reasons == (
        "no include pattern matches",
        "rule 'blocks.*' says dense",
        "ignored by pattern '*.attn1'",
        "ignored by pattern 'blocks.0.*'",
    )


def test_no_operating_point_here() -> None:
    asked = policy(SkipConfig(rules=[Rule("blocks.1.*", threshold=0.5)]), LAYER)
    assert asked.reasons == ("no threshold: none in the config, and no rule gives one here",)


def test_a_plain_call_may_skip() -> None:
    decision = decide(site(), [LAYER], SkipConfig(threshold=0.1, min_kv_len=512))
    assert (decision.kept, decision.reasons, decision.implementation.name) == (False, (), "reference")


def test_all_reasons_of_a_call() -> None:
    made = site(q=(1, 4, 512, 16), requires_grad=True, dropout_p=0.25, nested=True, mask=torch.ones(1, 1, 512, 512))
    assert reasons(made, min_kv_len=513) == (
        "inside a nested graph (checkpoint, cond, ...)",
        "an input requires grad, and skip-softmax attention has no backward",
        "dropout_p is 0.25, must be 0",
        "4 query heads over 2 key heads without enable_gqa",
        "short: 512 keys < min_kv_len 513",
        "mask [1, 1, 512, 512] is not a key mask [batch|1, 1, 1, keys], nor one and-ed with a query mask [batch|1, 1, queries, 1]",
    )


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            site(q=(2, 512, 16), k=(2, 512, 16)),
            "query, key and value must be [batch, heads, tokens, head_dim], got [2, 512, 16], [2, 512, 16], [2, 512, 16]",
        ),
        (
            site(k=(2, 2, 512, 16)),
            "query, key and value must agree in batch and head_dim, heads must divide, got [1, 2, 512, 16], [2, 2, 512, 16]",
        ),
        (site(q=(1, 3, 512, 16)), "query, key and value must agree in batch and head_dim, heads must divide, got [1, 3, 512, 16]"),
        (site(q=(1, 4, 512, 16)), "4 query heads over 2 key heads without enable_gqa"),
        (site(dtype=torch.float8_e4m3fn), "reference takes float32, float64, bfloat16, float16, not float8_e4m3fn"),
        (site(mask=torch.ones(1, 2, 1, 512) > 0), "mask [1, 2, 1, 512] is not a key mask"),
        (site(mask=torch.ones(512, 512) > 0), "mask [512, 512] is not a key mask"),
    ],
    ids=["rank", "batch", "heads", "gqa", "dtype", "mask of heads", "mask of rows"],
)
def test_one_reason(made: AttentionSite, reason: str) -> None:
    (found,) = reasons(made, implementation="reference")
    assert found.startswith(reason)


@pytest.mark.parametrize("shape", [(512,), (1, 512), (1, 1, 512), (1, 1, 1, 512), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_key_masks_may_skip(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert reasons(site(mask=torch.ones(shape, dtype=dtype))) == ()


def test_grouped_queries_may_skip_where_asked_for() -> None:
    assert reasons(site(q=(1, 4, 512, 16), enable_gqa=True)) == ()


REFERENCE = kernels.implementations()[-1]


def limited(**limits) -> kernels.Implementation:
    return dataclasses.replace(REFERENCE, name="limited", **limits)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"head_dims": (64, 128)}, "limited takes head_dim 64, 128, alike for value, not 16 and 16"),
        ({"dtypes": (torch.bfloat16,)}, "limited takes bfloat16, not float32"),
        ({"device_types": ("cuda",)}, "limited runs on cuda, not on cpu"),
        ({"masks": ()}, "limited takes masks of kind , not none"),
        ({"tile_orders": ("own_first",)}, "limited takes tile_order own_first, not ascending"),
        ({"unavailable": lambda problem: "the moon is full"}, "limited is unavailable: the moon is full"),
    ],
    ids=["head_dim", "dtype", "device", "mask", "order", "unavailable"],
)
def test_an_implementations_limits_are_reasons(limits: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "implementations", lambda: (limited(**limits),))
    assert reasons(site()) == (reason,)


def test_the_first_implementation_that_serves_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "implementations", lambda: (limited(head_dims=(64,)), limited(tile_q=32), REFERENCE))
    config = SkipConfig(threshold=0.1, min_kv_len=0)
    assert decide(site(), [LAYER], config).implementation.tile_q == 32
    assert decide(site(), [LAYER], dataclasses.replace(config, implementation="reference")).implementation is REFERENCE


def test_kept_only_where_no_layer_may_ever_skip() -> None:
    config = SkipConfig(threshold=0.1, min_kv_len=0, ignore=("blocks.0.*",))
    other = LayerName("", "blocks.1.attn1")
    assert decide(site(), [LAYER], config).kept
    assert not decide(site(), [LAYER, other], config).kept
    assert not decide(site(), [], config).kept, "a layer that is not known yet may turn out to skip"


def test_deciding_twice_gives_the_same() -> None:
    made, config = site(), SkipConfig(threshold=0.1, min_kv_len=0)
    before = dict(made.arguments)
    assert decide(made, [LAYER], config) == decide(made, [LAYER], config)
    assert made.arguments == before
