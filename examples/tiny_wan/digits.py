"""Procedurally made videos of two digits that bounce over a soft background, and the four words that describe each of them.

A description is four ids: two digits (0-9) and two colours (10-17, see `COLORS`). The model sees them as rows of `token_table`, without
positions, so it knows which digits and which colours occur, not which digit has which colour.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FRAMES, SIZE = 16, 64
"""Frames of a clip; height and width of a frame, in pixels."""

TEXT_DIM = 64
"""Width of a row of the condition table: the transformer's text_dim."""

GLYPH = 22
"""Height and width of a digit, in pixels."""

COLORS = {
    "red": (1.0, 0.25, 0.2),
    "green": (0.2, 0.9, 0.3),
    "blue": (0.25, 0.45, 1.0),
    "yellow": (1.0, 0.9, 0.2),
    "pink": (1.0, 0.4, 0.9),
    "cyan": (0.2, 0.95, 0.95),
    "orange": (1.0, 0.6, 0.1),
    "white": (0.95, 0.95, 0.95),
}
FIRST_COLOR_ID = 10


def token_table() -> Tensor:
    """The fixed embeddings [18, TEXT_DIM] of the ten digits and the eight colours: the model's whole language."""
    return torch.randn(FIRST_COLOR_ID + len(COLORS), TEXT_DIM, generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Glyphs:
    """Handwritten digits: images [n, 1, GLYPH, GLYPH] in [0, 1] and labels [n]."""

    images: Tensor
    labels: Tensor


def load_glyphs(device: torch.device | str = "cpu") -> Glyphs:
    """The 1797 digits that ship inside scikit-learn (8x8 pixels, enlarged); needed for training only."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
    images = F.interpolate(small, size=(GLYPH, GLYPH), mode="bilinear").clamp(0, 1)
    return Glyphs(images.to(device), torch.tensor(digits.target, device=device))


def make_batch(count: int, glyphs: Glyphs, generator: torch.Generator, frames: int = FRAMES) -> tuple[Tensor, Tensor]:
    """Random clips [count, 3, frames, SIZE, SIZE] in [-1, 1] and their descriptions [count, 4]: two digit ids, two colour ids."""
    device = glyphs.images.device
    videos = _background(count, generator, device)[:, :, None].repeat(1, 1, frames, 1, 1)
    words = torch.empty(count, 4, dtype=torch.long, device=device)
    palette = torch.tensor(list(COLORS.values()), device=device)
    for k in range(2):
        index = torch.randint(0, glyphs.images.shape[0], (count,), device=device, generator=generator)
        color = torch.randint(0, len(COLORS), (count,), device=device, generator=generator)
        words[:, k] = glyphs.labels[index]
        words[:, 2 + k] = color + FIRST_COLOR_ID
        mask = _place(glyphs.images[index], _bounce(count, frames, generator, device))
        videos = videos * (1 - mask) + palette[color].view(count, 3, 1, 1, 1) * mask
    return videos * 2 - 1, words


def _background(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Dark, smooth colour fields [count, 3, SIZE, SIZE] in [0, 1]."""
    coarse = torch.rand(count, 3, 4, 4, device=device, generator=generator) * 0.35
    return F.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic", align_corners=True).clamp(0, 1)


def _bounce(count: int, frames: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Upper left corners [count, frames, 2], in pixels (x, y), of digits that fly straight and bounce off the borders."""
    room = SIZE - GLYPH
    start = torch.rand(count, 2, device=device, generator=generator) * room
    speed = (torch.rand(count, 2, device=device, generator=generator) - 0.5) * 8  # pixels per frame
    straight = start[:, None] + speed[:, None] * torch.arange(frames, device=device)[None, :, None]
    folded = straight % (2 * room)
    return torch.where(folded > room, 2 * room - folded, folded)


def _place(images: Tensor, corners: Tensor) -> Tensor:
    """Coverage [count, 1, frames, SIZE, SIZE] in [0, 1] of `images` [count, 1, GLYPH, GLYPH] moved to `corners`, with subpixel accuracy."""
    count, frames, _ = corners.shape
    zoom = SIZE / GLYPH
    center = (corners.reshape(-1, 2) + GLYPH / 2) / SIZE * 2 - 1
    theta = torch.zeros(count * frames, 2, 3, device=corners.device)
    theta[:, 0, 0] = theta[:, 1, 1] = zoom
    theta[:, :, 2] = -center * zoom
    grid = F.affine_grid(theta, [count * frames, 1, SIZE, SIZE], align_corners=False)
    return F.grid_sample(images.repeat_interleave(frames, 0), grid, align_corners=False).view(count, 1, frames, SIZE, SIZE)
