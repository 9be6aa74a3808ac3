"""The timestep gate on a GPU: t on the host or on the device, eager launches or CUDA graphs, and never a wait for the device."""

import pytest
import torch
from test_compiled import Attention, Model, inputs, reference_sdpa
from torch import Tensor, nn
from torch._dynamo.utils import counters

import skip_attn_compile
from skip_attn_compile import SkipConfig

LEVELS = (1000.0, 980.0, 970.0, 500.0)
DENSE = [True, True, False, False]  # at 0.97: t == D is sparse


class WanTransformer3DModel(Model):
    """Named as one whose argument is known: timesteps up to 1000."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return super().forward(x) + 0 * timestep.to(x.device, x.dtype, non_blocking=True).max()


def reference(model: nn.Module, x: Tensor, threshold: float) -> Tensor:
    with reference_sdpa([threshold]):
        for block in model.blocks:
            x = Attention.forward(block, x)
    return x


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", ["graph input", "hook", "regional", "explicit"])
def test_steps_are_gated_alike_and_nothing_waits(way: str, device: str, mode: str | None) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    model = WanTransformer3DModel().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1, disabled_until_timestep=0.97))
    if way in ("hook", "regional"):
        be.attach(model)
    if way == "regional":
        for block in model.blocks:
            block.compile(backend=be, mode=mode)
        compiled = model
    else:
        compiled = torch.compile(model, backend=be, mode=mode)

    def step(x: Tensor, level: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        if way != "explicit":
            return compiled(x, level).clone()
        with skip_attn_compile.timestep(level / 1000):
            return compiled(x, level).clone()

    x = inputs()
    levels = [torch.tensor([level], device=device) for level in LEVELS]
    with torch.inference_mode():
        for _ in range(3):  # compile, record, replay
            for level in levels:
                step(x, level)
        compiled_graphs = counters["stats"]["unique_graphs"]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = [step(x, level) for level in levels]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [[s.dense for s in run.steps] for run in be.report().runs] == [DENSE] * 4
        assert counters["stats"]["unique_graphs"] == compiled_graphs
        torch._dynamo.config.disable = True
        try:
            for out, dense in zip(outputs, DENSE, strict=True):
                torch.testing.assert_close(out, reference(model, x, 0.0 if dense else 0.1), rtol=2e-2, atol=2e-2)
        finally:
            torch._dynamo.config.disable = False
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert not torch.equal(outputs[0], outputs[2])
    visited, skipped = be.report().visited, be.report().skipped
    assert 0 < skipped < visited / 2, "half of the calls were dense"


def test_the_gate_moves_without_a_new_capture() -> None:
    from torch._inductor.cudagraph_trees import get_container

    torch.compiler.reset()
    model = WanTransformer3DModel().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1, disabled_until_timestep=0.97))
    be.attach(model)
    compiled = torch.compile(model, backend=be, mode="reduce-overhead")
    x, level = inputs(), torch.tensor([900.0], device="cuda")
    with torch.inference_mode():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x, level)
        manager = get_container(torch.cuda.current_device()).get_tree_manager()
        recorded = manager.new_graph_id().id
        before = be.report().skipped
        for cutoff, threshold in ((0.5, 0.1), (0.95, 0.0), (0.95, 0.1), (0.2, 0.1)):
            be.update(disabled_until_timestep=cutoff, threshold=threshold)
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x, level)
            skips, before = be.report().skipped - before, be.report().skipped
            assert (skips > 0) == (cutoff >= 0.9 and threshold > 0)
        assert manager.new_graph_id().id == recorded + 1  # ids count up: none was taken in between
