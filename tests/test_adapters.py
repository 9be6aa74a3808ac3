"""LoRA and offloading after compile_pipeline: what plain torch.compile gives at each stage, and the same number of compilations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from diffusers_models import WAN
from skip_attn_compile import SkipConfig, backend

INPUTS = WAN.draw()
SITES = {f"blocks.{n}.{attention}" for n in range(2) for attention in ("attn1", "attn2")}
GATED = SkipConfig(threshold=1.0, min_kv_len=0, disabled_until_timestep=0.5)


class Pair:
    """One model compiled plainly and once more by us. `check` runs both at a dense and at a sparse step."""

    def __init__(self, regional: bool) -> None:
        self.models: list[Any] = [WAN.build(), WAN.build()]
        self.counters = [CompileCounterWithBackend("eager"), CompileCounterWithBackend("eager")]
        self.backend = backend(GATED, inner=self.counters[1], model=self.models[1])
        for model, compiler in zip(self.models, (self.counters[0], self.backend), strict=True):
            model.compile_repeated_blocks(backend=compiler) if regional else model.compile(backend=compiler)

    def each(self, change: Callable[[Any], object]) -> None:
        for model in self.models:
            torch.manual_seed(0)
            change(model)

    def check(self, effect: bool = True) -> Tensor:
        """The dense output, which both give; the sparse one of ours differs."""
        with torch.no_grad():
            plain, dense = (model(**{**INPUTS, "timestep": torch.tensor([900.0])}, return_dict=False)[0] for model in self.models)
            torch.testing.assert_close(dense, plain, rtol=1e-4, atol=1e-4)
            before = self.backend.report().skipped
            plain, sparse = (model(**{**INPUTS, "timestep": torch.tensor([100.0])}, return_dict=False)[0] for model in self.models)
        assert self.backend.report().skipped > before
        assert not torch.allclose(sparse, plain, rtol=1e-4, atol=1e-4)
        assert self.counters[0].frame_count == self.counters[1].frame_count
        assert all(site.skipped > 0 for site in self.backend.report().sites if site.name.endswith("attn1"))
        return dense


@pytest.fixture(params=[False, True], ids=["whole", "regional"])
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.compiler.reset()
    return Pair(request.param)


def test_lora_is_loaded_toggled_fused_and_unloaded(pair: Pair) -> None:
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False)
    without = pair.check()
    pair.each(lambda model: model.add_adapter(config, "one"))
    loaded = pair.check()
    assert not torch.allclose(loaded, without, rtol=1e-3, atol=1e-3)
    pair.each(lambda model: model.disable_adapters())
    torch.testing.assert_close(pair.check(), without)
    pair.each(lambda model: model.enable_adapters())
    torch.testing.assert_close(pair.check(), loaded)
    pair.each(lambda model: model.fuse_lora())
    torch.testing.assert_close(pair.check(), loaded, rtol=1e-3, atol=1e-3)
    pair.each(lambda model: model.unfuse_lora())
    torch.testing.assert_close(pair.check(), loaded, rtol=1e-3, atol=1e-3)
    pair.each(lambda model: model.unload_lora())
    torch.testing.assert_close(pair.check(), without, rtol=1e-3, atol=1e-3)
    assert {site.name for site in pair.backend.report().sites} == SITES


def replace_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)


def test_parameters_that_are_replaced_at_every_forward(pair: Pair) -> None:
    """As offloading does, to and from the GPU."""
    before = pair.check()
    for _ in range(2):
        pair.each(replace_parameters)
        torch.testing.assert_close(pair.check(), before)
    assert {site.name for site in pair.backend.report().sites} == SITES


def test_a_model_offloaded_as_a_whole(pair: Pair) -> None:
    """What enable_model_cpu_offload does: accelerate wraps the model's forward."""
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    before = pair.check()
    pair.each(lambda model: cpu_offload_with_hook(model, execution_device="cpu"))
    torch.testing.assert_close(pair.check(), before)
    pair.each(remove_hook_from_module)
    torch.testing.assert_close(pair.check(), before)
    assert {site.name for site in pair.backend.report().sites} == SITES
