"""Graphs as text before and after, and the near misses that must stay as they are, each with its reason."""

import dataclasses

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs import graph_text, recording_backend, targets
from models import dit, leveled, reference_sdpa, skip_config, tokens
from skip_attn_compile import Rule, kernels

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
OP = "skip_attn_compile.attention"
Q = leveled()


class Block(nn.Module):
    """The least that is a block: queries scaled by a Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x, mask=None):
        return x + F.scaled_dot_product_attention(x * self.scale, x, x, attn_mask=mask)


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x


def any_length(x: torch.Tensor) -> torch.Tensor:
    """A copy of x [B,H,S,D] whose S Dynamo must take for symbolic."""
    x = x.clone()
    torch._dynamo.mark_dynamic(x, 2)
    return x


def after(model: nn.Module, *inputs, **fields) -> str:
    be, recorder = recording_backend(skip_config(**fields))
    torch.compile(model, backend=be)(*inputs)
    (graph,) = recorder.graphs
    return graph_text(graph)


class TestGraphs(expecttest.TestCase):
    """`EXPECTTEST_ACCEPT=1 pytest tests/test_rewrite.py` writes the expected texts anew."""

    def setUp(self) -> None:
        torch._dynamo.reset()

    def test_two_blocks_before(self) -> None:
        self.assertExpectedInline(
            after(TwoBlocks(), Q, ignore=("*",)),
            """\
blocks_0_scale: f32[16]
x: f32[1, 2, 512, 16]
blocks_1_scale: f32[16]
mul: f32[1, 2, 512, 16] = mul(x, blocks_0_scale)
scaled_dot_product_attention: f32[1, 2, 512, 16] = scaled_dot_product_attention(mul, x, x, attn_mask=None)
x_: f32[1, 2, 512, 16] = add(x, scaled_dot_product_attention)
mul_1: f32[1, 2, 512, 16] = mul(x_, blocks_1_scale)
scaled_dot_product_attention_1: f32[1, 2, 512, 16] = scaled_dot_product_attention(mul_1, x_, x_, attn_mask=None)
x_1: f32[1, 2, 512, 16] = add(x_, scaled_dot_product_attention_1)
return x_1""",
        )

    def test_two_blocks_after(self) -> None:
        self.assertExpectedInline(
            after(TwoBlocks(), Q),
            """\
blocks_0_scale: f32[16]
x: f32[1, 2, 512, 16]
blocks_1_scale: f32[16]
skip_attn_control: f32[2, 2]
mul: f32[1, 2, 512, 16] = mul(x, blocks_0_scale)
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
truediv = truediv(select_1, 512)
add = add(select, truediv)
ge = ge(add, 1)
select_2 = select(add, 0, 0)
attention_default = skip_attn_compile.attention(mul, x, x, select_2, None, None, False, None, 'ascending', 'auto')
getitem: f32[1, 2, 512, 16] = getitem(attention_default, 0)
getitem_1 = getitem(attention_default, 2)
sum_1 = sum(getitem_1, [0, 1])
x_: f32[1, 2, 512, 16] = add(x, getitem)
mul_1: f32[1, 2, 512, 16] = mul(x_, blocks_1_scale)
select_3 = select(add, 0, 1)
attention_default_1 = skip_attn_compile.attention(mul_1, x_, x_, select_3, None, None, False, None, 'ascending', 'auto')
getitem_2: f32[1, 2, 512, 16] = getitem(attention_default_1, 0)
getitem_3 = getitem(attention_default_1, 2)
sum_2 = sum(getitem_3, [0, 1])
x_1: f32[1, 2, 512, 16] = add(x_, getitem_2)
stack = stack([sum_1, sum_2])
select_4 = select(ge, 0, 0)
select_5 = select(ge, 0, 1)
stack_1 = stack([select_4, select_5])
unsqueeze = unsqueeze(stack_1, 1)
cat = cat([stack, unsqueeze], 1)
return x_1, cat""",
        )

    def test_one_block_ignored(self) -> None:
        self.assertExpectedInline(
            after(TwoBlocks(), Q, ignore=("blocks.0",)),
            """\
blocks_0_scale: f32[16]
x: f32[1, 2, 512, 16]
blocks_1_scale: f32[16]
skip_attn_control: f32[1, 2]
mul: f32[1, 2, 512, 16] = mul(x, blocks_0_scale)
scaled_dot_product_attention: f32[1, 2, 512, 16] = scaled_dot_product_attention(mul, x, x, attn_mask=None)
x_: f32[1, 2, 512, 16] = add(x, scaled_dot_product_attention)
mul_1: f32[1, 2, 512, 16] = mul(x_, blocks_1_scale)
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
truediv = truediv(select_1, 512)
add = add(select, truediv)
ge = ge(add, 1)
select_2 = select(add, 0, 0)
attention_default = skip_attn_compile.attention(mul_1, x_, x_, select_2, None, None, False, None, 'ascending', 'auto')
getitem: f32[1, 2, 512, 16] = getitem(attention_default, 0)
getitem_1 = getitem(attention_default, 2)
sum_1 = sum(getitem_1, [0, 1])
x_1: f32[1, 2, 512, 16] = add(x_, getitem)
stack = stack([sum_1])
select_3 = select(ge, 0, 0)
stack_1 = stack([select_3])
unsqueeze = unsqueeze(stack_1, 1)
cat = cat([stack, unsqueeze], 1)
return x_1, cat""",
        )

    def test_key_mask(self) -> None:
        self.assertExpectedInline(
            after(Block(), Q, torch.ones(1, 1, 1, 512) > 0),
            """\
scale: f32[16]
x: f32[1, 2, 512, 16]
mask: b8[1, 1, 1, 512]
skip_attn_control: f32[1, 2]
mul: f32[1, 2, 512, 16] = mul(x, scale)
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
sum_1 = sum(mask, -1)
clamp_min = clamp_min(sum_1, 1)
reshape = reshape(clamp_min, [])
truediv = truediv(select_1, reshape)
add_1 = add(select, truediv)
ge = ge(add_1, 1)
select_2 = select(add_1, 0, 0)
attention_default = skip_attn_compile.attention(mul, x, x, select_2, mask, None, False, None, 'ascending', 'auto')
getitem: f32[1, 2, 512, 16] = getitem(attention_default, 0)
getitem_1 = getitem(attention_default, 2)
sum_2 = sum(getitem_1, [0, 1])
add: f32[1, 2, 512, 16] = add(x, getitem)
stack = stack([sum_2])
select_3 = select(ge, 0, 0)
stack_1 = stack([select_3])
unsqueeze = unsqueeze(stack_1, 1)
cat = cat([stack, unsqueeze], 1)
return add, cat""",
        )

    def test_key_mask_per_item(self) -> None:
        self.assertExpectedInline(
            after(Block(), torch.cat([Q, Q]), torch.zeros(2, 1, 1, 512)),
            """\
scale: f32[16]
x: f32[2, 2, 512, 16]
mask: f32[2, 1, 1, 512]
skip_attn_control: f32[1, 2]
mul: f32[2, 2, 512, 16] = mul(x, scale)
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
gt = gt(mask, -inf)
sum_1 = sum(gt, -1)
clamp_min = clamp_min(sum_1, 1)
reshape = reshape(clamp_min, [-1])
unsqueeze = unsqueeze(select, 1)
unsqueeze_1 = unsqueeze(select_1, 1)
truediv = truediv(unsqueeze_1, reshape)
add_1 = add(unsqueeze, truediv)
amax = amax(add_1, 1)
ge = ge(amax, 1)
select_2 = select(add_1, 0, 0)
attention_default = skip_attn_compile.attention(mul, x, x, select_2, mask, None, False, None, 'ascending', 'auto')
getitem: f32[2, 2, 512, 16] = getitem(attention_default, 0)
getitem_1 = getitem(attention_default, 2)
sum_2 = sum(getitem_1, [0, 1])
add: f32[2, 2, 512, 16] = add(x, getitem)
stack = stack([sum_2])
select_3 = select(ge, 0, 0)
stack_1 = stack([select_3])
unsqueeze_2 = unsqueeze(stack_1, 1)
cat = cat([stack, unsqueeze_2], 1)
return add, cat""",
        )

    def test_symbolic_length(self) -> None:
        self.assertExpectedInline(
            after(Block(), any_length(Q), min_kv_len=400),
            """\
scale: f32[16]
s53
x: f32[1, 2, s53, 16]
skip_attn_control: f32[1, 2]
mul: f32[1, 2, s53, 16] = mul(x, scale)
size = size(x, 2)
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
truediv = truediv(select_1, size)
add_1 = add(select, truediv)
sub = sub(size, 399)
sym_max = sym_max(sub, 0)
sym_min = sym_min(sym_max, 1)
mul_1 = mul(add_1, sym_min)
ge = ge(mul_1, 1)
select_2 = select(mul_1, 0, 0)
attention_default = skip_attn_compile.attention(mul, x, x, select_2, None, None, False, None, 'ascending', 'auto')
getitem: f32[1, 2, s53, 16] = getitem(attention_default, 0)
getitem_1 = getitem(attention_default, 2)
sum_1 = sum(getitem_1, [0, 1])
add: f32[1, 2, s53, 16] = add(x, getitem)
stack = stack([sum_1])
select_3 = select(ge, 0, 0)
stack_1 = stack([select_3])
unsqueeze = unsqueeze(stack_1, 1)
cat = cat([stack, unsqueeze], 1)
return add, cat""",
        )


def test_min_kv_len_of_one_or_less_costs_no_node() -> None:
    assert "sym_min" in after(Block(), any_length(Q), min_kv_len=2)
    torch._dynamo.reset()
    assert "sym_min" not in after(Block(), any_length(Q), min_kv_len=1)


def test_one_length_is_computed_once_for_all_sites() -> None:
    be, recorder = recording_backend(skip_config())
    torch.compile(dit(4), backend=be)(tokens())
    called = targets(recorder.graphs[0])
    assert called.count(OP) == 4
    assert called.count("truediv") == 1


def kept(run, *inputs, reasons: tuple[str, ...], **fields) -> None:
    """`run` stays bitwise what it is, in the very graph that Dynamo made, and the report gives these reasons for its one site."""
    given = []
    be, recorder = recording_backend(skip_config(**fields))

    def spy(gm, example_inputs):
        given.append(gm)
        return be(gm, example_inputs)

    out = torch.compile(run, backend=spy)(*inputs)
    assert torch.equal(out, run(*inputs))
    assert [id(gm) for gm in recorder.graphs] == [id(gm) for gm in given]
    assert OP not in targets(recorder.graphs[0])
    (site,) = be.report().sites
    assert (site.decision, site.reasons) == ("kept", reasons)
    assert (site.threshold, site.implementation, site.visited) == (None, None, 0)


def attend(q, k=None, v=None, mask=None, **options):
    return F.scaled_dot_product_attention(q, q if k is None else k, q if v is None else v, mask, **options)


def test_ignored_stays() -> None:
    kept(Block(), Q, reasons=("ignored by pattern '*'",), ignore=("*",))


def test_not_included_stays() -> None:
    kept(attend, Q, reasons=("no include pattern matches",), include=("blocks.*",))


def test_dense_rule_stays() -> None:
    kept(attend, Q, reasons=("rule 'att*' says dense",), rules=(Rule("att*", dense=True),))


def test_no_operating_point_stays() -> None:
    reasons = ("no threshold: none in the config, and no rule gives one here",)
    kept(attend, Q, reasons=reasons, threshold=None, rules=(Rule("blocks.*", threshold=0.1),))


def test_short_keys_stay() -> None:
    kept(attend, Q, reasons=("short: 512 keys < min_kv_len 513",), min_kv_len=513)


def test_short_keys_under_long_queries_stay() -> None:
    short = Q[:, :, :77]
    kept(attend, Q, short, short, reasons=("short: 77 keys < min_kv_len 100",), min_kv_len=100)


def test_a_required_gradient_stays() -> None:
    reason = "an input requires grad, and skip-softmax attention has no backward"
    for n in range(3):
        torch._dynamo.reset()
        kept(attend, *(Q.clone().requires_grad_(n == i) for i in range(3)), reasons=(reason,))


def test_a_learned_additive_mask_stays() -> None:
    mask = torch.zeros(1, 1, 1, 512, requires_grad=True)
    kept(attend, Q, Q, Q, mask, reasons=("an input requires grad, and skip-softmax attention has no backward",))


def test_dropout_stays() -> None:
    def run(q):
        torch.manual_seed(0)
        return attend(q, dropout_p=0.5)

    be, recorder = recording_backend(skip_config())
    torch.compile(lambda q: attend(q, dropout_p=0.5), backend=be)(Q)
    (site,) = be.report().sites
    assert (site.decision, site.reasons) == ("kept", ("dropout_p is 0.5, must be 0",))
    assert OP not in targets(recorder.graphs[0])


@pytest.mark.parametrize("shape", [(1, 1, 512, 512), (512, 512), (1, 2, 1, 512), (1, 2, 512, 512)], ids=str)
def test_a_general_mask_stays(shape: tuple[int, ...]) -> None:
    reason = f"mask {list(shape)} is not a key mask [batch|1, 1, 1, keys], nor one and-ed with a query mask [batch|1, 1, queries, 1]"
    kept(attend, Q, Q, Q, torch.ones(shape, dtype=torch.bool), reasons=(reason,))


def test_three_dimensions_stay() -> None:
    reason = "query, key and value must be [batch, heads, tokens, head_dim], got [2, 512, 16], [2, 512, 16], [2, 512, 16]"
    kept(attend, Q[0], reasons=(reason,))


def test_heads_that_broadcast_without_gqa_stay() -> None:
    kept(attend, Q, Q[:, :1], Q[:, :1], reasons=("2 query heads over 1 key heads without enable_gqa",))


def test_grouped_queries_are_rewritten() -> None:
    be, _ = recording_backend(skip_config())
    key = Q[:, :1]
    out = torch.compile(lambda q, k: attend(q, k, k, enable_gqa=True), backend=be)(Q, key)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, attend(Q, key, key), **CLOSE)
    (site,) = be.report().sites
    assert (site.visited, site.skipped) == tiles[0]
    assert site.skipped > 0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"head_dims": (64, 128)}, "limited takes head_dim 64, 128, alike for value, not 16 and 16"),
        ({"dtypes": (torch.bfloat16, torch.float16)}, "limited takes bfloat16, float16, not float32"),
        ({"device_types": ("cuda",)}, "limited runs on cuda, not on cpu"),
    ],
    ids=["head_dim", "dtype", "device"],
)
def test_what_no_implementation_takes_stays(limits: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = dataclasses.replace(kernels.implementations()[-1], name="limited", **limits)
    monkeypatch.setattr(kernels, "implementations", lambda: (limited,))
    kept(attend, Q, reasons=(reason,))


def test_causal_attention_is_rewritten() -> None:
    be, _ = recording_backend(skip_config())
    out = torch.compile(lambda q: attend(q, is_causal=True), backend=be)(Q)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, attend(Q, is_causal=True), **CLOSE)
    (site,) = be.report().sites
    assert (site.visited, site.skipped) == tiles[0]
    assert site.skipped > 0


@pytest.mark.parametrize("shape", [(1, 512), (1, 1, 512), (1, 1, 1, 512), (2, 1, 1, 512), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_key_masks_are_rewritten(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.cat([Q, 2 * Q])
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.8 if shape[-1] > 1 else torch.ones(shape) > 0
    mask = keep if dtype == torch.bool else torch.zeros(shape).masked_fill(~keep, float("-inf"))
    be, _ = recording_backend(skip_config())
    out = torch.compile(attend, backend=be)(x, x, x, mask)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, attend(x, x, x, mask), **CLOSE)
    (site,) = be.report().sites
    assert (site.visited, site.skipped) == tiles[0]
    assert site.skipped > 0


def test_an_implementation_and_a_tile_order_asked_for_are_in_the_graph() -> None:
    text = after(Block(), Q, tile_order="own_first", implementation="reference")
    assert "'own_first', 'reference'" in text


def test_tile_order_acts() -> None:
    model, x = dit(1), tokens()
    seen = set()
    for order in ("ascending", "own_first"):
        torch._dynamo.reset()
        be, _ = recording_backend(skip_config(tile_order=order))
        torch.compile(model, backend=be)(x)
        with reference_sdpa(0.3, tile_order=order) as tiles:
            model(x)
        assert be.report().skipped == tiles[0][1]
        seen.add(tiles[0][1])
    assert len(seen) == 2


def test_dynamos_own_graph_is_not_changed() -> None:
    texts = []

    def spy(gm, example_inputs):
        texts.append(graph_text(gm))
        run = be(gm, example_inputs)
        texts.append(graph_text(gm))
        return run

    be, _ = recording_backend(skip_config())
    torch.compile(TwoBlocks(), backend=spy)(Q)
    assert texts[0] == texts[1]


def test_two_key_lengths_and_masks_do_not_share_a_lambda() -> None:
    def run(q, k, mask):
        return attend(q) + attend(q, k, k, mask) + attend(q, k, k)

    be, recorder = recording_backend(skip_config())
    key, mask = Q[:, :, :300], torch.arange(300)[None, None, None] < 200
    out = torch.compile(run, backend=be)(Q, key, mask)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, run(Q, key, mask), **CLOSE)
    assert [(site.visited, site.skipped) for site in be.report().sites] == tiles
    assert tiles[-1][1] > 0
    assert targets(recorder.graphs[0]).count("truediv") == 3


def test_a_mask_that_broadcasts_over_two_lengths() -> None:
    """[batch, 1, 1, 1] says nothing of a length: each call has its own."""

    def run(q, k, mask):
        return attend(q, k, k, mask) + attend(q, q, q, mask)

    be, _ = recording_backend(skip_config(min_kv_len=400))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    out = torch.compile(run, backend=be)(any_length(Q), any_length(Q[:, :, :300]), mask)
    with reference_sdpa(0.0, 0.3) as tiles:
        torch.testing.assert_close(out, run(Q, Q[:, :, :300], mask), **CLOSE)
    assert [(site.visited, site.skipped) for site in be.report().sites] == tiles
    assert tiles[-1][1] > 0


@pytest.mark.parametrize(
    "chain", [lambda q: attend(attend(q)), lambda q: attend(q, attend(q)), lambda q: attend(q, q, attend(q))], ids=["q", "k", "v"]
)
def test_attention_of_attention(chain) -> None:
    """A site whose argument is the very result of another one."""
    be, _ = recording_backend(skip_config())
    out = torch.compile(chain, backend=be)(any_length(Q))
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, chain(Q), **CLOSE)
    assert [(site.visited, site.skipped) for site in be.report().sites] == tiles
    assert tiles[0][1] > 0
