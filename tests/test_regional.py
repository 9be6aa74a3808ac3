"""Diffusers models that are compiled in parts: each layer has its own rule and counts, with no more compilations than plain compile."""

import copy
import fnmatch
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import skip_attn_compile
from checks import assert_within, tolerance
from conformance_row import attention_by_reference
from diffusers_models import CASES, Case, run, run_exact
from skip_attn_compile import Rule, SkipConfig

MODELS = {str(case): case for case in CASES}


def lists_of_blocks(model: nn.Module) -> Iterator[nn.ModuleList]:
    return (child for child in model.children() if isinstance(child, nn.ModuleList))


def repeated_blocks(model: nn.Module, backend: object) -> None:
    model.compile_repeated_blocks(backend=backend)


def each_block(model: nn.Module, backend: object) -> None:
    for blocks in lists_of_blocks(model):
        for block in blocks:
            block.compile(backend=backend)


def each_block_wrapped(model: nn.Module, backend: object) -> None:
    for blocks in lists_of_blocks(model):
        for n, block in enumerate(blocks):
            blocks[n] = torch.compile(block, backend=backend)


def whole(model: nn.Module, backend: object) -> None:
    model.compile(backend=backend)


TOKEN_REPLACE = Case(  # whose blocks are of other classes than `_repeated_blocks` lists
    "HunyuanVideoTransformer3DModel",
    {**MODELS["HunyuanVideoTransformer3DModel"].config, "image_condition_type": "token_replace"},
    MODELS["HunyuanVideoTransformer3DModel"].inputs,
    variant="token-replace",
)
# Flux and HunyuanVideo have two classes of blocks, and the first single block gets other strides than the next: 3 graphs of 3 blocks.
# Dynamo skips the frames of HunyuanVideo15, HunyuanImage and HiDream, and compiles what they call.
# The third column: attention that is not compiled.
WAYS = [
    (MODELS["FluxTransformer2DModel"], repeated_blocks, ""),
    (MODELS["FluxTransformer2DModel"], each_block, ""),
    (MODELS["FluxTransformer2DModel"], each_block_wrapped, ""),
    (MODELS["HunyuanVideoTransformer3DModel"], each_block, "context_embedder.*"),
    (TOKEN_REPLACE, repeated_blocks, "*transformer_blocks.*"),
    (TOKEN_REPLACE, each_block, "context_embedder.*"),
    (MODELS["SD3Transformer2DModel"], each_block_wrapped, ""),
    (MODELS["HunyuanVideo15Transformer3DModel"], whole, ""),
    (MODELS["HunyuanImageTransformer2DModel"], whole, ""),
    (MODELS["HiDreamImageTransformer2DModel"], whole, ""),
]

CONFIG = SkipConfig(
    threshold=0.3,
    min_kv_len=0,
    ignore=("*transformer_blocks.0.*",),
    rules=(Rule("*blocks.1.*", threshold=0.9), Rule("*single*", threshold=0.6)),
)


def lambda_of(name: str) -> float:
    """What CONFIG says, without the package."""
    if "transformer_blocks.0." in name:
        return 0.0
    return 0.6 if "single" in name else 0.9 if "blocks.1." in name else 0.3


@pytest.mark.parametrize(("case", "compile_parts", "eager"), WAYS, ids=[f"{case}-{way.__name__}" for case, way, _ in WAYS])
def test_each_layer_has_its_rule_and_its_counts(case: Case, compile_parts: Callable[[nn.Module, object], None], eager: str) -> None:
    model, inputs = case.build(), case.draw()

    plain_counter, counter = CompileCounterWithBackend("eager"), CompileCounterWithBackend("aot_eager")
    plain = copy.deepcopy(model)
    compile_parts(plain, plain_counter)
    run(plain, inputs)

    torch._dynamo.reset()
    compiled = copy.deepcopy(model)
    be = skip_attn_compile.backend(CONFIG, inner=counter, model=compiled)
    compile_parts(compiled, be)
    outputs = run(compiled, inputs)
    assert counter.frame_count == plain_counter.frame_count

    report = be.report()
    in_graphs = {site.name for site in report.sites if site.decision != "kept"}
    double = copy.deepcopy(model).double()
    with attention_by_reference(model, {name: lambda_of(name) for name in in_graphs}) as calls:
        expected = run(model, inputs)
    with attention_by_reference(double, {name: lambda_of(name) for name in in_graphs}):
        exact = run_exact(double, inputs)
    for actual, reference, reference_exact in zip(outputs, expected, exact, strict=True):
        assert_within(actual, reference, tolerance(reference, reference_exact, torch.float32))

    assert {site.name for site in report.sites} <= calls.keys()
    for site in report.sites:
        call = calls[site.name]
        if lambda_of(site.name) == 0:  # a graph that serves no other layer keeps SDPA, and counts nothing
            assert (site.decision, site.skipped) in {("dense now", 0), ("kept", 0)}, site
        elif site.decision == "kept":
            assert call.has_general_mask, site
        else:
            assert (site.decision, site.visited, site.skipped) == ("sparse", call.visited, call.skipped), site
    left_out = calls.keys() - {site.name for site in report.sites}
    assert left_out == set(fnmatch.filter(calls, eager))
    assert bool(left_out) == any("no compiled graph has served" in note for note in report.notes)
