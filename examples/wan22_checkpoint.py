"""A calibrated two-expert checkpoint (Wan2.2) from disk to report: plan, schedule table, compile_pipeline, one run.

    python examples/wan22_checkpoint.py                                    tiny random weights, any CPU, a minute
    python examples/wan22_checkpoint.py --model DIR --device cuda          a real Wan2.2 pipeline folder

With random weights a pipeline folder is written to out/wan22, each expert with a ModelOpt calibration (V1) in its config.json. The curves
are made up for these weights. A real folder without a calibration needs --threshold.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model lies on disk

import torch
import typer
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

import skip_attn_compile
from skip_attn_compile import SkipConfig

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
}
CURVES = {"transformer": (500.0, 1.2), "transformer_2": (450.0, 1.4)}  # a [keys], b


def main(
    model: Annotated[Path | None, typer.Option(help="folder of a Wan2.2 pipeline; without it, tiny random weights")] = None,
    prompt: str = "a cat walks over a frozen lake",
    steps: int = 12,
    threshold: Annotated[float | None, typer.Option(help="lambda, instead of the checkpoint's target share")] = None,
    target_sparsity: Annotated[float | None, typer.Option(help="share of the tiles, instead of the checkpoint's")] = None,
    cutoff: Annotated[float | None, typer.Option(help="disabled_until_timestep, instead of the checkpoint's")] = None,
    regional: Annotated[bool, typer.Option(help="compile the repeated blocks instead of whole models")] = False,
    inner: Annotated[str, typer.Option(help="inductor, aot_eager or eager")] = "inductor",
    device: str = "cpu",
) -> None:
    if model is None:
        parts: dict[str, Any] = {"text_encoder": None, "tokenizer": None, "vae": None}
        folder, min_kv_len = write_tiny_pipeline(Path("out/wan22")), 0
    else:
        folder, parts, min_kv_len = model, {"dtype": torch.bfloat16}, 1024
    given = {"threshold": threshold, "target_sparsity": target_sparsity, "disabled_until_timestep": cutoff}
    configs = SkipConfig.from_checkpoint(folder, tile_order="own_first", min_kv_len=min_kv_len, **given)
    pipe = WanPipeline.from_pretrained(folder, **parts).to(device)
    for name, config in configs.items():
        print(f"\n{name}\n{skip_attn_compile.plan(getattr(pipe, name), config, name)}")

    cutoffs = {1.0, 0.97, 0.93, 0.86, *(config.disabled_until_timestep for config in configs.values())}
    print(f"\n{skip_attn_compile.schedule_table(pipe, steps, sorted(cutoffs, reverse=True))}")

    handle = skip_attn_compile.compile_pipeline(pipe, configs, regional=regional, inner=inner)
    call = tiny_call() if model is None else {"prompt": prompt, "height": 480, "width": 832, "num_frames": 81}
    latents = pipe(**call, num_inference_steps=steps, generator=torch.Generator().manual_seed(0), output_type="latent").frames
    print(f"\nlatents {list(latents.shape)}\n{handle.report()}")


def write_tiny_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    experts = {name: tiny_expert() for name in CURVES}
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, boundary_ratio=0.875, **experts)
    pipe.save_pretrained(folder)
    for name, (a, b) in CURVES.items():
        path = folder / name / "config.json"
        group = {
            "algorithm": "skip_softmax",
            "targets": ["WanAttention"],
            "ignore": ["blocks.*.attn2"],
            "threshold_scale_factor": {"formula": "a * exp(b * target_sparsity)", "coefficients": {"a": a, "b": b}},
            "target_sparsity": 0.3,
            "disabled_until_timestep": 0.93,
        }
        config = json.loads(path.read_text()) | {"sparse_attention_config": {"config_groups": {"group_0": group}}}
        path.write_text(json.dumps(config, indent=2))
    return folder


def tiny_expert() -> WanTransformer3DModel:
    """Random weights skip nothing, since all 64 rows of a group must agree: so all queries of a head point one way, and far."""
    model = WanTransformer3DModel(**TINY).eval().requires_grad_(False)
    for block in model.blocks:
        block.attn1.to_q.bias.copy_(16 * torch.randn(block.attn1.to_q.out_features))
        block.attn1.norm_q.weight.mul_(8)
    return model


def tiny_call() -> dict[str, object]:
    text = torch.randn(2, 1, 8, TINY["text_dim"], generator=torch.Generator().manual_seed(1))
    return {"prompt_embeds": text[0], "negative_prompt_embeds": text[1], "height": 256, "width": 256, "num_frames": 9}


if __name__ == "__main__":
    typer.run(main)
