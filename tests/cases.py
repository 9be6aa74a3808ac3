"""The case table of the operator: what to call it with, by name.

`Case.inputs()` builds tensors whose skip decisions are exact in every dtype: q and k hold small integers, the scale is a power of two,
and so every score is a multiple of 1/4, computed without rounding; ln(lambda) of every threshold here lies well between two of those.
Kernel and oracle must then agree on counts to the last tile.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

THRESHOLDS = (0.0, 1e-4, 1e-2, 0.1, 0.5, 1.0, 3.0)
LENGTHS = (1, 63, 64, 65, 127, 129, 1000)
ORDERS = ("ascending", "own_first")
MASKS = ("none", "key_bool", "key_add", "general_bool", "general_add")
HIGHEST_LEVEL = 12  # nats between the key tiles of the largest and the smallest scores


class Inputs(NamedTuple):
    query: Tensor  # [B, Hq, Sq, D]
    key: Tensor  # [B, Hkv, Skv, D]
    value: Tensor  # [B, Hkv, Skv, Dv]
    threshold: Tensor  # float32 [] or [B]
    attn_mask: Tensor | None
    query_mask: Tensor | None


@dataclass(frozen=True)
class Case:
    name: str
    B: int = 2
    Hq: int = 2
    Hkv: int = 2
    Sq: int = 129
    Skv: int = 520
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    causal: bool = False
    query_mask: bool = False
    threshold: float | tuple[float, ...] = 0.1
    tile_order: str = "ascending"
    tile_q: int = 64
    tile_k: int = 128
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def scale(self) -> float:
        """1/sqrt(D) for D = 16; a power of two always, so that scaling is exact."""
        return 0.25

    def inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)
        draw = lambda low, high, *size: torch.randint(low, high + 1, size, generator=generator).double()
        query = draw(-1, 1, self.B, self.Hq, self.Sq, self.D)
        key = draw(-1, 1, self.B, self.Hkv, self.Skv, self.D)
        # Even groups look at the first channel, odd ones at the second, and there each key tile has its own level, in nats: all rows of
        # a group agree on most tiles, and groups differ from each other.
        group = torch.arange(self.Sq) // self.tile_q
        query[..., 0] = 4.0 * (group % 2 == 0)
        query[..., 1] = 4.0 * (group % 2 == 1)
        levels = draw(0, HIGHEST_LEVEL, self.B, self.Hkv, -(-self.Skv // self.tile_k), 2)
        key[..., :2] = levels.repeat_interleave(self.tile_k, dim=2)[:, :, : self.Skv]
        value = torch.randn(self.B, self.Hkv, self.Skv, self.Dv, generator=generator, dtype=torch.float64)
        return Inputs(
            *(x.to(self.dtype) for x in (query, key, value)),
            torch.tensor(self.threshold, dtype=torch.float32),
            self._attn_mask(generator),
            torch.rand(self.B, 1, self.Sq, 1, generator=generator) < 0.6 if self.query_mask else None,
        )

    def _attn_mask(self, generator: torch.Generator) -> Tensor | None:
        """Half random, and a tile masked whole; general masks also have a row and a block of rows without any key."""
        if self.mask == "none":
            return None
        general = self.mask.startswith("general")
        shape = (self.B, self.Hq, self.Sq, self.Skv) if general else (self.B, 1, 1, self.Skv)
        keep = torch.rand(shape, generator=generator) < 0.5
        keep[-1, ..., self.tile_k : 2 * self.tile_k] = False
        if general:
            keep[0, :, self.Sq // 2] = False
            keep[-1, -1, : self.tile_q] = False
        if self.mask.endswith("bool"):
            return keep
        bias = torch.randint(-8, 1, shape, generator=generator) / 4
        bias[..., ::7] = -10000.0  # a score like any other, however low
        return bias.masked_fill(~keep, -math.inf)


def _length_pairs() -> list[tuple[int, int]]:
    equal = [(n, n) for n in LENGTHS]
    return [
        *equal,
        *((1, n) for n in LENGTHS[1:]),
        *((n, 1) for n in LENGTHS[1:]),
        (63, 1000),
        (129, 1000),
        (1000, 129),
        (1000, 65),
        (300, 777),
    ]


LENGTH_CASES = [Case(f"{q}x{k}", B=1, Sq=q, Skv=k, seed=i) for i, (q, k) in enumerate(_length_pairs())]

FEATURE_CASES = [
    Case("plain", Sq=200, Skv=1000),
    Case("gqa_4_to_1", Hq=8, Hkv=2, Skv=600),
    Case("mqa", Hq=4, Hkv=1, Skv=600),
    Case("value_dim_24", Dv=24),
    Case("head_dim_40", D=40, Dv=8),
    Case("head_dim_odd", D=17, Dv=5),
    Case("one_row", Sq=1, Skv=1000),
    Case("one_key", Skv=1),
    Case("causal", Sq=500, Skv=500, causal=True),
    Case("causal_more_keys", Sq=300, Skv=900, causal=True),
    Case("causal_start_past_diagonal", Sq=500, Skv=1500, causal=True),  # own_first: start at tiles that causal masking cuts off
    Case("causal_more_rows", Sq=900, Skv=300, causal=True),
    Case("causal_key_mask", Sq=500, Skv=500, causal=True, mask="key_bool"),
    Case("causal_gqa_general_mask", Hq=4, Sq=300, Skv=300, causal=True, mask="general_add"),
    *(Case(f"mask_{mask}", mask=mask) for mask in MASKS[1:]),
    Case("gqa_general_mask", Hq=4, mask="general_bool"),
    Case("query_mask", Sq=200, query_mask=True),
    Case("query_mask_key_mask", Sq=200, query_mask=True, mask="key_add"),
    Case("threshold_per_item", B=3, Skv=1000, threshold=(0.0, 0.01, 0.5)),
    *(Case(f"tiles_{q}x{k}", Sq=150, tile_q=q, tile_k=k) for q, k in ((16, 32), (128, 64), (32, 256), (24, 40))),
    Case("tiles_1x1", B=1, Sq=20, Skv=30, tile_q=1, tile_k=1),
    *(Case(f"{dtype}".removeprefix("torch."), Sq=200, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    Case("bf16_causal_mask", Sq=300, Skv=300, dtype=torch.bfloat16, causal=True, mask="key_bool"),
]

CASES = [*LENGTH_CASES, *FEATURE_CASES]
