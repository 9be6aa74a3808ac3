"""What `skip-attn` drives: the trained tiny video DiT, and how to sample with it. A curve and a picture of it in two minutes on a CPU:

skip-attn calibrate examples/calibrate_tiny_wan.py:build --target 0.3 --tile-order own_first --picture out/curves.png
skip-attn sensitivity examples/calibrate_tiny_wan.py:build --threshold 0.3 --tile-order own_first --psnr 30 --peak 2
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tiny_wan.digits import COLORS, FIRST_COLOR_ID
from tiny_wan.sampling import load_model, sample

FRAMES, STEPS, VIDEOS = 8, 6, 4


def build() -> tuple[nn.Module, Callable[[int], Tensor], range]:
    """The model, a function that samples video number n the same way each time, and the numbers."""
    model = load_model("cuda" if torch.cuda.is_available() else "cpu")
    place = {"dtype": model.dtype, "device": model.device}

    def run(number: int) -> Tensor:
        words = [number % 10, 3 * number % 10, FIRST_COLOR_ID, FIRST_COLOR_ID + 1 + number % (len(COLORS) - 1)]
        return sample(model, torch.tensor([words]), steps=STEPS, frames=FRAMES, seed=number, **place)

    return model, run, range(VIDEOS)
