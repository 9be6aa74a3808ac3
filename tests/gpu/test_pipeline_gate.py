"""compile_pipeline on a GPU with the trained `tiny_wan`: the scheduler's own sigma, on the host or on the device, gates each step."""

from pathlib import Path

import pytest
import torch

import skip_attn_compile
from skip_attn_compile import SkipConfig
from skip_attn_compile.schedule import noise_levels

diffusers = pytest.importorskip("diffusers")

TINY_WAN = Path(__file__).resolve().parents[2] / "examples" / "tiny_wan"
SCHEDULERS = {
    "sigmas on the device": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "sigmas on the host": lambda: diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    ),
}


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_step_is_gated_by_the_schedulers_sigma(scheduler: str, mode: str | None) -> None:
    torch.compiler.reset()
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=SCHEDULERS[scheduler](),
        transformer=diffusers.WanTransformer3DModel.from_pretrained(TINY_WAN),
    ).to("cuda", torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    text = torch.randn(1, 4, 64, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(0))

    def run(steps: int) -> torch.Tensor:
        return pipe(
            prompt_embeds=text,
            height=512,
            width=512,
            num_frames=13,
            guidance_scale=1.0,  # two calls a step would overwrite each other's output under CUDA graphs, compiled plainly too
            num_inference_steps=steps,
            generator=torch.Generator("cuda").manual_seed(0),
            output_type="latent",
        ).frames

    plain = run(6)
    config = SkipConfig(threshold=0.3, tile_order="own_first", disabled_until_timestep=0.9)
    handle = skip_attn_compile.compile_pipeline(pipe, config, **({} if mode is None else {"mode": mode}))
    for n, steps in enumerate((6, 9)):
        run(steps)
        assert pipe.scheduler.sigmas.is_cuda == ("device" in scheduler)
        shown = handle.report().runs[n].steps
        assert [step.t for step in shown] == noise_levels(pipe.scheduler)
        assert [step.dense for step in shown] == [t > 0.9 for t in noise_levels(pipe.scheduler)]
        assert {step.source for step in shown} == {"the scheduler"}
    report = handle.report()
    assert report.graphs == 1
    assert report.site("transformer.blocks.0.attn1").implementation == "sm90"
    assert 0 < report.skipped < report.visited
    handle.uncompile()
    assert torch.equal(run(6), plain)
