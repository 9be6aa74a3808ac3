"""Every way of calling SDPA is found, with its arguments by name; nothing else is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as aliased
from torch.utils.checkpoint import checkpoint

from graphs import recording_backend, targets
from models import TILES, Attention, dit, leveled, reference_sdpa, skip_config, tokens
from skip_attn_compile import composites
from skip_attn_compile.composites import has_composites
from skip_attn_compile.sites import AttentionSite, find_sites

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Q = leveled()


def captured(function, *inputs, **keywords) -> list[AttentionSite]:
    """The sites of every graph that Dynamo makes of `function`."""
    sites: list[AttentionSite] = []

    def inner(gm, example_inputs):
        sites.extend(find_sites(gm))
        return gm.forward

    torch.compile(function, backend=inner, **keywords)(*inputs)
    return sites


CALLS = {
    "positional": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, 0.0, False),
    "keywords": lambda q, k, v, m: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m, dropout_p=0.0, is_causal=False),
    "shuffled": lambda q, k, v, m: F.scaled_dot_product_attention(value=v, attn_mask=m, key=k, query=q),
    "mixed": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, value=v, attn_mask=m),
    "torch.nn.functional": lambda q, k, v, m: torch.nn.functional.scaled_dot_product_attention(q, k, v, m),
    "aliased": lambda q, k, v, m: aliased(q, k, v, m),
    "torch._C._nn": lambda q, k, v, m: torch._C._nn.scaled_dot_product_attention(q, k, v, m),
    "aten": lambda q, k, v, m: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, m),
    "aten packet": lambda q, k, v, m: torch.ops.aten.scaled_dot_product_attention(q, k, v, m),
}


@pytest.mark.parametrize("how", CALLS)
def test_every_way_of_calling_is_one_site(how: str) -> None:
    mask = torch.ones(1, 1, 1, 512, dtype=torch.bool)
    (site,) = captured(CALLS[how], Q, Q + 1, Q + 2, mask)
    assert set(site.arguments) == {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    assert [site.arguments[name].target for name in ("query", "key", "value", "attn_mask")] == ["L_q_", "L_k_", "L_v_", "L_m_"]
    assert (site.arguments["dropout_p"], site.arguments["is_causal"], site.arguments["scale"]) == (0.0, False, None)
    assert (site.kv_len, site.dtype, site.mask.shape, site.module_ids, site.nested) == (512, torch.float32, mask.shape, (), False)


@pytest.mark.parametrize("how", CALLS)
def test_every_way_of_calling_skips(how: str) -> None:
    mask = torch.arange(512)[None, None, None] < 500
    be, _ = recording_backend(skip_config())
    out = torch.compile(CALLS[how], backend=be)(Q, 2 * Q, Q, mask)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, F.scaled_dot_product_attention(Q, 2 * Q, Q, mask), **CLOSE)
    (site,) = be.report().sites
    assert (site.visited, site.skipped) == tiles[0]
    assert site.skipped > 0


def test_options_are_read() -> None:
    (site,) = captured(lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], None, 0.5, True, scale=0.25, enable_gqa=True), Q)
    assert [site.arguments[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")] == [0.5, True, 0.25, True]


def test_calls_in_one_module_are_numbered() -> None:
    class Two(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q) + F.scaled_dot_product_attention(q, q, 2 * q)

    assert [site.call_index for site in captured(Two(), Q)] == [0, 1]
    be, _ = recording_backend(skip_config())
    torch.compile(nn.Sequential(Two(), Two()), backend=be)(Q)
    assert [site.name for site in be.report().sites] == ["0", "0#1", "1", "1#1"]


def test_a_plain_function_is_named_after_itself() -> None:
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    be, _ = recording_backend(skip_config(ignore=("nothing",)))
    torch.compile(attend, backend=be)(Q)
    (site,) = be.report().sites
    assert (site.name, site.decision) == ("attend", "sparse")


def test_modules_are_those_of_the_call_innermost_first() -> None:
    model = dit(1)
    (site,) = captured(model, tokens())
    assert site.module_ids[:2] == (id(model.blocks[0].attn1), id(model.blocks[0]))


def test_shapes_of_cross_attention() -> None:
    self_site, cross = captured(dit(1, cross=True), tokens(), tokens(length=77), torch.ones(1, 1, 1, 77, dtype=torch.bool))
    assert (self_site.kv_len, cross.kv_len) == (512, 77)
    assert cross.mask.shape == (1, 1, 1, 77)


def test_a_symbolic_length_stays_symbolic() -> None:
    (site,) = captured(lambda q: F.scaled_dot_product_attention(q, q, q), Q, dynamic=True)
    assert isinstance(site.kv_len, torch.SymInt)


def _dispatch(q: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout_p)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_a_number_that_dynamic_shapes_make_symbolic_is_the_constant_it_is(dropout_p: float) -> None:
    """Most attention of diffusers passes through a function with such a default."""
    (site,) = captured(lambda q, p: _dispatch(q, dropout_p=p), Q, dropout_p, dynamic=True)
    assert site.arguments["dropout_p"] == dropout_p


def test_dtype_is_that_of_the_result_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (site,) = captured(lambda q: F.scaled_dot_product_attention(q, q, q), Q)
    assert (site.query.dtype, site.dtype) == (torch.float32, torch.bfloat16)


def test_calls_in_a_checkpointed_graph_are_found_and_kept() -> None:
    attention = Attention().requires_grad_(False)

    def run(x):
        return checkpoint(attention, x, use_reentrant=False)

    x = tokens().requires_grad_()
    be, _ = recording_backend(skip_config())
    out = torch.compile(run, backend=be)(x)
    torch.testing.assert_close(out, attention(x))
    (site,) = be.report().sites
    assert site.decision == "kept"
    assert "inside a nested graph (checkpoint, cond, ...)" in site.reasons


def test_calls_inside_cond_are_found_and_kept() -> None:
    def run(q, flag):
        return torch.cond(flag, lambda q: F.scaled_dot_product_attention(q, q, q), lambda q: q.clone(), (q,))

    be, _ = recording_backend(skip_config())
    out = torch.compile(run, backend=be)(Q, torch.tensor(True))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(Q, Q, Q))
    assert ["inside a nested graph (checkpoint, cond, ...)" in site.reasons for site in be.report().sites] == [True]


# torch's own attention modules.


class WithMha(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(32, 2, batch_first=True, **options)
        with torch.no_grad():
            self.mha.in_proj_bias[:32] = 12.0
            self.mha.in_proj_weight[32:64] *= 8

    def forward(self, x, **options):
        return self.mha(x, x, x, **options)[0]


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_without_weights_is_a_site(training: bool) -> None:
    model = WithMha().requires_grad_(False).train(training)
    be, recorder = recording_backend(skip_config())
    out = torch.compile(lambda x: model(x, need_weights=False), backend=be)(tokens())
    (site,) = be.report().sites
    assert (site.name, site.decision, site.visited) == ("mha", "sparse", TILES)
    assert site.skipped > 0
    assert "multi_head_attention_forward" not in targets(recorder.graphs[0])
    be.update(threshold=0.0)
    dense = torch.compile(lambda x: model(x, need_weights=False), backend=be)(tokens())
    torch.testing.assert_close(dense, model(tokens(), need_weights=False), **CLOSE)
    assert (out - dense).abs().max() > 1e-3


def test_multihead_attention_with_a_padding_mask() -> None:
    model = WithMha().requires_grad_(False).train()
    padding = torch.arange(512)[None] >= 400
    be, _ = recording_backend(skip_config(0))
    run = lambda x: model(x, need_weights=False, key_padding_mask=padding)
    torch.testing.assert_close(torch.compile(run, backend=be)(tokens()), run(tokens()), **CLOSE)
    assert [site.name for site in be.report().sites] == ["mha"]


def test_multihead_attention_with_weights_makes_no_sdpa_call() -> None:
    model = WithMha().requires_grad_(False).train()
    be, _recorder = recording_backend(skip_config())
    out = torch.compile(lambda x: model(x, need_weights=True), backend=be)(tokens())
    torch.testing.assert_close(out, model(tokens(), need_weights=True))
    assert be.report().sites == []


def test_multihead_attention_in_training_is_kept_and_trains() -> None:
    model = WithMha(dropout=0.1).train()
    be, _ = recording_backend(skip_config())
    torch.compile(lambda x: model(x, need_weights=False), backend=be)(tokens()).sum().backward()
    assert model.mha.in_proj_weight.grad is not None
    assert [site.decision for site in be.report().sites] == ["kept"]


def test_multihead_attention_under_autocast() -> None:
    model = WithMha().requires_grad_(False).train()
    run = lambda x: model(x, need_weights=False)
    be, _ = recording_backend(skip_config(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, plain = torch.compile(run, backend=be)(tokens()), torch.compile(run, backend="eager")(tokens())
    assert out.dtype == plain.dtype
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.05)


def test_multihead_attention_with_dynamic_lengths() -> None:
    model = WithMha().requires_grad_(False).train()
    run = lambda x: model(x, need_weights=False)
    be, recorder = recording_backend(skip_config(0))
    compiled = torch.compile(run, backend=be, dynamic=True)
    for length in (512, 400, 700):
        torch.testing.assert_close(compiled(tokens(length=length)), run(tokens(length=length)), **CLOSE)
    assert len(recorder.graphs) == 1


def test_a_transformer_encoder_layer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).requires_grad_(False).train()
    be, _ = recording_backend(skip_config(0))
    torch.testing.assert_close(torch.compile(layer, backend=be)(tokens()), layer(tokens()), **CLOSE)
    assert [site.name for site in be.report().sites] == ["self_attn"]


def test_heads_repeated_as_transformers_does() -> None:
    """transformers expands key and value heads, makes them contiguous, and passes is_causal and an explicit scale."""

    def run(q, k, v):
        k, v = (x[:, :, None].expand(1, 1, 2, 512, 16).reshape(1, 2, 512, 16).contiguous() for x in (k, v))
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, scale=0.25, is_causal=True).transpose(1, 2).contiguous()
        )

    be, _ = recording_backend(skip_config(0))
    torch.testing.assert_close(torch.compile(run, backend=be)(Q, Q[:, :1], Q[:, :1]), run(Q, Q[:, :1], Q[:, :1]), **CLOSE)
    assert be.report().visited == 2 * sum(math.ceil(64 * (group + 1) / 128) for group in range(8))


# Near misses.


def softmax_attention(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def own_scaled_dot_product_attention(q, k, v):
    return softmax_attention(q, k, v)


own_scaled_dot_product_attention.__name__ = "scaled_dot_product_attention"

NOT_SDPA = {
    "written out": softmax_attention,
    "of the same name": own_scaled_dot_product_attention,
    "flash for cpu": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
    "math": lambda q, k, v: torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0],
    "linear": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
}


@pytest.mark.parametrize("how", NOT_SDPA)
def test_what_only_looks_like_sdpa_stays(how: str) -> None:
    be, recorder = recording_backend(skip_config())
    run = NOT_SDPA[how]
    assert torch.equal(torch.compile(run, backend=be)(Q, Q, Q), run(Q, Q, Q))
    assert be.report().sites == []
    assert not any("skip_attn" in target for target in targets(recorder.graphs[0]))


def test_flex_attention_stays() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    be, _ = recording_backend(skip_config())
    torch.compile(lambda q: flex_attention(q, q, q), backend=be)(Q)
    assert be.report().sites == []


def test_a_graph_without_modules_has_no_composites() -> None:
    graph = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q))
    assert not has_composites(graph)
    (site,) = find_sites(graph)
    assert (site.query, site.dtype, site.kv_len) == (None, None, None)


def test_multi_head_attention_that_cannot_be_opened_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composites, "_open", lambda gm, node: None)
    be, _ = recording_backend(skip_config())
    model = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval().requires_grad_(False)
    torch.compile(lambda x: model(x, x, x, need_weights=False)[0], backend=be)(tokens())
    (site,) = be.report().sites
    assert site.decision == "kept"
    assert site.reasons == ("the graph does not record the shapes of the call",)
