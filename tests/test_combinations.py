"""What users put on a model besides us: quantised weights, offloading by groups, layerwise casting, a cache of the first block, another
attention backend, sdpa_kernel; and models that do not come from diffusers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusers_models import WAN
from models import dit, skip_config, tokens
from skip_attn_compile import SkipConfig, backend
from skip_attn_compile.backend import SkipBackend
from skip_attn_compile.report import UNKNOWN_LAYER

CONFIG = SkipConfig(threshold=1.0, min_kv_len=0)  # skips what it can: random weights, and the effect must be visible
INPUTS = WAN.draw()


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_wan(change: Callable[[Any], object], regional: bool, config: SkipConfig = CONFIG) -> tuple[Any, SkipBackend]:
    model = WAN.build()
    change(model)
    be = backend(config, inner="aot_eager", model=model)
    model.compile_repeated_blocks(backend=be) if regional else model.compile(backend=be)
    return model, be


def run(model: Any, inputs: dict[str, Any] = INPUTS) -> Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def plain_wan(change: Callable[[Any], object], regional: bool) -> Tensor:
    """What plain torch.compile gives for the same changed model."""
    model = WAN.build()
    change(model)
    model.compile_repeated_blocks(backend="aot_eager") if regional else model.compile(backend="aot_eager")
    out = run(model)
    torch.compiler.reset()
    return out


def assert_served(change: Callable[[Any], object], regional: bool) -> None:
    """At lambda 0 what plain compile gives; at lambda 1 every layer of self-attention skips, under its own name."""
    plain = plain_wan(change, regional)
    model, be = compiled_wan(change, regional)
    sparse = run(model)
    sites = {site.name: site for site in be.report().sites}
    assert set(sites) == {f"blocks.{n}.{attention}" for n in range(2) for attention in ("attn1", "attn2")}
    assert all(site.skipped > 0 for name, site in sites.items() if name.endswith("attn1"))
    be.update(threshold=0.0)
    dense = run(model)
    torch.testing.assert_close(dense, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(sparse, plain, rtol=1e-4, atol=1e-4)


both = pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])


# Quantised weights


# torchao is no part of the `dev` extra, since importing diffusers beside it prints warnings; .ci/run installs it.


def int8(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def float8(model: nn.Module) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig())


@both
@pytest.mark.parametrize("quantise", [int8, float8], ids=lambda quantise: quantise.__name__)
def test_quantised_linears(quantise: Callable[[nn.Module], None], regional: bool) -> None:
    pytest.importorskip("torchao")
    assert_served(quantise, regional)


# Memory


@both
def test_layerwise_casting(regional: bool) -> None:
    assert_served(lambda m: m.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32), regional)


@both
def test_group_offload(regional: bool) -> None:
    cpu = torch.device("cpu")
    assert_served(
        lambda m: m.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="block_level", num_blocks_per_group=1),
        regional,
    )


@pytest.mark.parametrize("regional", [False, True])
def test_offload_of_each_layer_says_why_it_is_not_served(regional: bool) -> None:
    """Its hooks hide the Parameters from the graphs and use up Dynamo's variants: right results, and the report says what to do."""
    cpu = torch.device("cpu")
    expected = run(WAN.build())
    offload = lambda m: m.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    model, be = compiled_wan(offload, regional)
    be.update(threshold=0.0)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)
    be.update(threshold=0.3)
    run(model)
    report = be.report()
    if regional:
        unknown = report.site(UNKNOWN_LAYER)
        assert unknown.visited
        assert "give them one rule" in unknown.reasons[0]
        assert not any("no compiled graph has served" in note for note in report.notes)
    else:
        assert not report.visited
        assert any("compiled variants that Dynamo allows: any further one runs eager" in note for note in report.notes)


def test_first_block_cache() -> None:
    """It decides from values whether to run the blocks, so Dynamo cannot hold the model in one graph; the blocks it runs are served."""
    from diffusers import FirstBlockCacheConfig

    def cached(model: Any) -> None:
        model.enable_cache(FirstBlockCacheConfig(threshold=0.0))

    def run_cached(model: Any) -> Tensor:
        with model.cache_context("cond"):
            return run(model)

    plain = WAN.build()
    cached(plain)
    expected = run_cached(plain)
    model, be = compiled_wan(cached, regional=True)
    run_cached(model)
    assert {site.name for site in be.report().sites if site.skipped} >= {"blocks.0.attn1", "blocks.1.attn1"}
    be.update(threshold=0.0)
    torch.testing.assert_close(run_cached(model), expected, rtol=1e-4, atol=1e-4)


# Other attention


def test_another_attention_backend_of_diffusers_is_named_in_the_report() -> None:
    model, be = compiled_wan(lambda m: None, regional=False)
    with attention_backend("flex"):  # set_attention_backend would leave it on for all models of the process
        run(model)
    report = be.report()
    assert report.sites == []
    assert "no scaled_dot_product_attention call was seen" in report.notes[0]
    assert "another attention backend of diffusers" in report.notes[-1]


def test_sdpa_kernel_around_the_call_is_harmless() -> None:
    model, be = compiled_wan(lambda m: None, regional=False)
    with sdpa_kernel(SDPBackend.MATH):
        inside = run(model)
    torch.testing.assert_close(inside, run(model), rtol=1e-4, atol=1e-4)
    assert all(site.skipped > 0 for site in be.report().sites if site.name.endswith("attn1"))


def test_sdpa_kernel_inside_the_model_is_harmless() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dit = dit()

        def forward(self, x: Tensor) -> Tensor:
            with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
                return self.dit(x)

    model, be = Wrapped(), backend(skip_config(0.3), inner="aot_eager")
    out = torch.compile(model, backend=be)(tokens())
    assert be.report().skipped > 0
    be.update(threshold=0.0)
    dense = torch.compile(model, backend=be)(tokens())
    torch.testing.assert_close(dense, model(tokens()), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out, dense)


# Models that do not come from diffusers


def test_an_encoder_of_transformers() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=512
    )
    config._attn_implementation = "sdpa"
    model = transformers.BertModel(config).eval().requires_grad_(False)
    for layer in model.encoder.layer:
        layer.attention.self.query.weight.mul_(2000)  # so that the levels differ by more than lambda = 1 allows
    ids = torch.tensor([3, 9, 20, 40]).repeat_interleave(128).expand(2, -1)  # a level for each tile
    mask = (torch.arange(512) < torch.tensor([[512], [300]])).long()
    expected = model(ids, attention_mask=mask).last_hidden_state
    be = backend(skip_config(0.0), inner="aot_eager")
    compiled = torch.compile(model, backend=be)
    with torch.no_grad():
        out = compiled(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(out[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[1, :300], expected[1, :300], rtol=1e-4, atol=1e-4)
    report = be.report()
    assert [site.name for site in report.sites] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert all(site.decision == "dense now" and site.visited for site in report.sites)
    be.update(threshold=1.0)
    with torch.no_grad():
        compiled(ids, attention_mask=mask)
    assert all(site.skipped for site in be.report().sites)


def test_functions_without_a_module() -> None:
    be = backend(skip_config(0.0), inner="aot_eager")
    q, k, v = torch.randn(3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0))
    function = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2, backend=be)
    torch.testing.assert_close(function(q, k, v), F.scaled_dot_product_attention(q, k, v) * 2)
    assert be.report().visited == 2 * 8 * 4
