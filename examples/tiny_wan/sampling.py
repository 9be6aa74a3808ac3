"""Load the tiny video DiT that lies beside this file, and sample videos with it."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights and config lie here; nothing is fetched

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from torch import Tensor

from tiny_wan.digits import FRAMES, SIZE, token_table

FOLDER = Path(__file__).resolve().parent
SHIFT = 3.0
"""The flow shift of the noise levels, in training and in sampling."""

TOKENS_PER_FRAME = (SIZE // 4) ** 2
"""Patches of 1 x 4 x 4 pixels: 256 tokens of self-attention per frame."""


def load_model(device: torch.device | str = "cpu", folder: Path = FOLDER) -> WanTransformer3DModel:
    """The trained transformer for inference, float32 on a CPU and bfloat16 elsewhere."""
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype).to(device).eval()


@torch.no_grad()
def sample(
    model: Callable[..., object],
    words: Tensor,
    *,
    steps: int,
    frames: int = FRAMES,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    after_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Videos [count, 3, frames, SIZE, SIZE], float32 on the CPU and clamped to [-1, 1], for the descriptions `words` [count, 4].

    model: the transformer, plain or compiled. The noise depends on `seed` alone, not on the device. `after_step(i)` is called after
    the transformer's step i and before the next.
    """
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(steps, device=device)
    noise = torch.randn(len(words), 3, frames, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    latents = noise.to(device)
    text = token_table()[words.cpu()].to(device, dtype)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = model(
            hidden_states=latents.to(dtype), timestep=timestep.expand(len(words)), encoder_hidden_states=text, return_dict=False
        )[0]  # type: ignore[index]
        latents = scheduler.step(velocity.float(), timestep, latents, return_dict=False)[0]
        if after_step is not None:
            after_step(step)
    return latents.float().clamp(-1, 1).cpu()
