"""Skip-softmax attention on a trained video DiT: one video twice from the same noise, compiled dense and compiled with skipping.

    python examples/quickstart.py [--threshold 0.3] [--steps 12] [--prompt-digits 3,7] [--frames 16] [--seed 1] [--device cpu]

Prints what was done to every attention, and what it cost in PSNR and SSIM; writes out/quickstart.png under the current folder.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model lies in examples/tiny_wan

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from skimage.metrics import structural_similarity
from torch import Tensor

import skip_attn_compile
from quickstart_picture import draw
from skip_attn_compile import SkipConfig
from skip_attn_compile.report import Report
from tiny_wan.digits import COLORS, FIRST_COLOR_ID, FRAMES
from tiny_wan.sampling import TOKENS_PER_FRAME, load_model, sample

PICTURE = Path("out/quickstart.png")
Video = npt.NDArray[np.float64]  # [frames, height, width, 3] in [0, 1]
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Clock:
    """Seconds of each step of one run; the first one compiles."""

    seconds: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.perf_counter)

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now

    def __str__(self) -> str:
        later = self.seconds[1:]
        mean = f", then {sum(later) / len(later):.2f} s a step" if later else ""
        return f"first step with compilation {self.seconds[0]:.1f} s{mean}"


@dataclass
class SkippedByStep:
    """Tiles visited and skipped per site and step, from reports whose counts are cumulative."""

    steps: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    before: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, report: Report) -> None:
        now = {site.name: (site.visited, site.skipped) for site in report.sites if site.visited}
        zero = (0, 0)
        self.steps.append({name: (v - self.before.get(name, zero)[0], s - self.before.get(name, zero)[1]) for name, (v, s) in now.items()})
        self.before = now

    def share(self) -> tuple[list[str], npt.NDArray[np.float64]]:
        """Site names, and the skipped share [site, step] of the tiles visited."""
        names = list(self.before)
        share = np.full((len(names), len(self.steps)), np.nan)
        for column, counts in enumerate(self.steps):
            for row, name in enumerate(names):
                visited, skipped = counts.get(name, (0, 0))
                if visited:
                    share[row, column] = skipped / visited
        return names, share


def parse_digits(text: str) -> tuple[int, int]:
    """ "3,7" -> (3, 7)."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(len(part) == 1 and part in "0123456789" for part in parts):
        raise typer.BadParameter(f"give two digits from 0 to 9 with a comma between them, as in 3,7; got {text!r}")
    return int(parts[0]), int(parts[1])


def parse_device(text: str) -> torch.device:
    """ "auto" -> the GPU if there is one, else the CPU; anything else must be a device that PyTorch finds here."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise typer.BadParameter(f"PyTorch has no usable device {text!r} here: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"must be auto, cpu or cuda, got {text!r}")
    return device


def make_config(threshold: float) -> SkipConfig:
    try:
        return SkipConfig(threshold=threshold, tile_order="own_first")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--threshold") from None


def describe(digits: tuple[int, int]) -> tuple[Tensor, str]:
    """The four condition ids [1, 4] of the two digits in red and blue, and the same in words."""
    colors = ("red", "blue")
    words = torch.tensor([[*digits, *(FIRST_COLOR_ID + list(COLORS).index(color) for color in colors)]])
    return words, f"digits {digits[0]} and {digits[1]}, colours {colors[0]} and {colors[1]}"


@contextmanager
def progress_bar(label: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar of `steps` steps; yields the function that advances it. It says `compiling` until the first step is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{label:5} compiling", total=steps)
        yield lambda: progress.update(task, advance=1, description=f"{label:5} sampling ")


def to_video(sampled: Tensor) -> Video:
    """[1, 3, frames, H, W] in [-1, 1] -> [frames, H, W, 3] in [0, 1]."""
    return ((sampled[0].double() + 1) / 2).permute(1, 2, 3, 0).numpy()


def psnr(dense: Video, skip: Video) -> float:
    """Peak signal-to-noise ratio in dB over the whole video; inf where both are equal."""
    error = float(np.mean((dense - skip) ** 2))
    return -10 * math.log10(error) if error else math.inf


def ssim(dense: Video, skip: Video) -> float:
    """Structural similarity, mean over the frames; 1 where both are equal."""
    pairs = zip(dense, skip, strict=True)
    return float(np.mean([structural_similarity(a, b, channel_axis=-1, data_range=1.0) for a, b in pairs]))


def main(
    threshold: Annotated[float, typer.Option(help="lambda: a skipped key weighs less than this share of the row's largest weight")] = 0.3,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="sampling steps")] = 12,
    prompt_digits: Annotated[str, typer.Option(help="the two digits to draw, as in 3,7")] = "3,7",
    frames: Annotated[
        int, typer.Option(min=1, max=FRAMES, help=f"video frames, {TOKENS_PER_FRAME} tokens each; below 4 frames attention stays dense")
    ] = FRAMES,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the noise")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Sample one video from the same noise twice, dense and with skip-softmax attention, and compare."""
    digits = parse_digits(prompt_digits)
    place = parse_device(device)
    config = make_config(threshold)
    words, prompt = describe(digits)
    model = load_model(place)
    console.print(f"{prompt}; {frames} frames = {frames * TOKENS_PER_FRAME} tokens, {steps} steps, seed {seed}, on {place}")

    def run(label: str, compiled: Callable[..., object], after_step: Callable[[], None] = lambda: None) -> tuple[Video, Clock]:
        clock = Clock()
        with progress_bar(label, steps) as advance:

            def finish_step(_: int) -> None:
                after_step()  # reading the counts, or any other look at the device, ends the step's work
                clock.tick()
                advance()

            sampled = sample(
                compiled, words, steps=steps, frames=frames, seed=seed, dtype=model.dtype, device=place, after_step=finish_step
            )
        return to_video(sampled), clock

    backend = skip_attn_compile.backend(config)
    backend.attach(model)
    skipped = SkippedByStep()
    wait = torch.cuda.synchronize if place.type == "cuda" else lambda: None
    dense_video, dense_clock = run("dense", torch.compile(model), wait)
    skip_video, skip_clock = run("skip", torch.compile(model, backend=backend), lambda: skipped.take(backend.report()))

    report = backend.report()
    console.print()
    console.print(str(report), markup=False, soft_wrap=True)
    names, share = skipped.share()
    total = report.sparsity or 0.0
    quality = f"PSNR {psnr(dense_video, skip_video):.1f} dB, SSIM {ssim(dense_video, skip_video):.3f}"
    console.print(f"\nskip against dense: {quality}; {total:.1%} of the visited tiles skipped at threshold {threshold:g}")
    console.print(f"dense: {dense_clock}\nskip:  {skip_clock}")
    if place.type == "cpu":
        console.print("On a CPU the reference implementation serves: it shows what is skipped and what that costs in quality, not speed.")

    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    title = f"Skip-softmax attention at threshold {threshold:g}: {total:.1%} of the tiles skipped, {quality}"
    draw(PICTURE, title, dense_video, skip_video, names, share)
    console.print(f"picture: {PICTURE}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
