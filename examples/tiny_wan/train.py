"""Train the tiny video DiT on videos of bouncing digits, by flow matching.

    python examples/tiny_wan/train.py OUT [--minutes 8] [--init FOLDER] [--lr 1e-3] [--seed 1]

OUT gets config.json and the weights (bfloat16, an exponential moving average over the steps), the loss curve as train_log.json, and
samples.png beside data.png. A GPU is needed for good weights; on a CPU the script runs, slowly.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from any folder: find the package tiny_wan

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from tiny_wan.digits import FRAMES, TEXT_DIM, Glyphs, load_glyphs, make_batch, token_table
from tiny_wan.sampling import SHIFT, sample

CONFIG = {
    "patch_size": (1, 4, 4),
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": TEXT_DIM,
    "freq_dim": 128,
    "ffn_dim": 768,
    "num_layers": 8,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 64,
}


@dataclass(frozen=True)
class Settings:
    """One training run. It ends after `minutes`, or after `steps` steps if that is given."""

    minutes: float = 8.0
    steps: int | None = None
    batch: int = 32
    lr: float = 1e-3
    seed: int = 1
    init: Path | None = None
    frames: int = FRAMES
    compile: bool = True


class Progress:
    """The share of a run that is over, by its step count if it has one, else by the clock."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.start = time.monotonic()
        self.step = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def share(self) -> float:
        if self.settings.steps is not None:
            return self.step / max(1, self.settings.steps)
        return self.seconds / (self.settings.minutes * 60)

    @property
    def learning_rate(self) -> float:
        """200 steps of warm-up, then a cosine from `lr` down to 3 % of it."""
        warm_up = min(1.0, (self.step + 1) / 200)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.share)))
        return self.settings.lr * warm_up * (cosine * 0.97 + 0.03)


def new_model(device: torch.device, init: Path | None) -> WanTransformer3DModel:
    """A model with random weights from seed 0, or with those of the folder `init`; float32."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**CONFIG)
    if init is not None:
        trained = WanTransformer3DModel.from_pretrained(init, torch_dtype=torch.float32)
        model.load_state_dict(trained.state_dict())
    return model.to(device)


def noise_levels(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Sigmas [count] in (0, 1), 1 = pure noise: logit-normal, then the same flow shift as in sampling."""
    u = torch.sigmoid(torch.randn(count, device=device, generator=generator) * 1.2)
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def flow_loss(model: nn.Module, noisy: Tensor, sigma: Tensor, text: Tensor, velocity: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity (noise minus video); bfloat16 autocast on a GPU."""
    with torch.autocast(noisy.device.type, torch.bfloat16, enabled=noisy.device.type == "cuda"):
        predicted = model(hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=text).sample
    return F.mse_loss(predicted.float(), velocity)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int) -> None:
    """Move the running average of the weights towards the model's, faster in the first steps."""
    decay = min(0.999, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def train(settings: Settings, glyphs: Glyphs, device: torch.device) -> tuple[WanTransformer3DModel, list[tuple[int, float, float]]]:
    """Run the training; returns the averaged model and the log: (step, seconds, loss), every 100 steps and at the last."""
    torch.backends.cuda.matmul.allow_tf32 = True
    model = new_model(device, settings.init)
    average = new_model(device, settings.init)
    table = token_table().to(device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)
    loss_of = torch.compile(flow_loss) if settings.compile and device.type == "cuda" else flow_loss
    log: list[tuple[int, float, float]] = []
    progress = Progress(settings)
    while progress.share < 1:
        for group in optimizer.param_groups:
            group["lr"] = progress.learning_rate
        videos, words = make_batch(settings.batch, glyphs, generator, settings.frames)
        sigma = noise_levels(settings.batch, generator, device)
        noise = torch.randn(videos.shape, device=device, generator=generator)
        s = sigma.view(-1, 1, 1, 1, 1)
        loss = loss_of(model, (1 - s) * videos + s * noise, sigma, table[words], noise - videos)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_average(average, model, progress.step)
        progress.step += 1
        if progress.step % 100 == 0 or progress.share >= 1:
            log.append((progress.step, round(progress.seconds, 1), loss.item()))
            print(f"step {progress.step}  {progress.seconds:.0f} s  loss {log[-1][2]:.4f}  lr {progress.learning_rate:.1e}", flush=True)
    return average.eval(), log


def save_clips(videos: Tensor, path: Path) -> None:
    """Write `videos` [count, 3, frames, H, W] in [-1, 1] as a picture: a row per clip, every second frame."""
    from PIL import Image

    pixels = (videos.clamp(-1, 1) + 1) / 2 * 255
    rows = [torch.cat(list(clip[:, ::2].permute(1, 2, 3, 0)), 1) for clip in pixels.cpu()]
    Image.fromarray(torch.cat(rows, 0).round().byte().numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the weights, the log and the pictures")
    parser.add_argument("--minutes", type=float, default=Settings.minutes, help="length of the run (default %(default)s)")
    parser.add_argument("--steps", type=int, help="end after so many steps instead")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="clips per step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=Settings.lr, help="highest learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="seed of the training data (default %(default)s)")
    parser.add_argument("--init", type=Path, help="folder with weights to go on from")
    parser.add_argument("--frames", type=int, default=Settings.frames, help="frames per clip (default %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    parser.add_argument("--preview-steps", type=int, default=24, help="sampling steps of samples.png (default %(default)s; 0: no picture)")
    arguments = vars(parser.parse_args())
    out, preview_steps = arguments.pop("out"), arguments.pop("preview_steps")
    settings = Settings(**arguments)

    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    glyphs = load_glyphs(device)
    model, log = train(settings, glyphs, device)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "train_log.json").write_text(json.dumps(log))
    if preview_steps:
        videos, words = make_batch(4, glyphs, torch.Generator(device).manual_seed(5), settings.frames)
        save_clips(videos, out / "data.png")
        sampled = sample(model.float(), words, steps=preview_steps, frames=settings.frames, device=device)
        save_clips(sampled, out / "samples.png")


if __name__ == "__main__":
    main()
