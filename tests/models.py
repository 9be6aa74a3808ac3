"""Small diffusion transformers in plain PyTorch, shared by the tests, and how to run them without compiling anything.

Random weights skip nothing, because all 64 rows of a group must agree. So queries share a direction (a large bias of `to_q`), and keys
are large: then key tiles differ in their largest score by several nats, for all rows alike.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skip_attn_compile import SkipConfig
from skip_attn_compile.reference import reference_attention

TOKENS = 512  # four key tiles
DIM, HEADS = 32, 2
TILES = HEADS * (TOKENS // 64) * (TOKENS // 128)  # visited by one call at batch size 1


class Attention(nn.Module):
    """Self- or cross-attention as diffusers' processors write it: [B,S,H,D] projections, permuted views into SDPA."""

    def __init__(self, dim: int = DIM, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        with torch.no_grad():
            self.to_q.bias.fill_(3.0)
            self.to_k.weight.mul_(8.0)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        query = self.to_q(x).unflatten(2, (self.heads, -1)).permute(0, 2, 1, 3)
        key, value = (p(context).unflatten(2, (self.heads, -1)).permute(0, 2, 1, 3) for p in (self.to_k, self.to_v))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return self.to_out(out.permute(0, 2, 1, 3).flatten(2, 3))


class Block(nn.Module):
    """`attn1` over the tokens, `attn2` over the context if there is one, a feed-forward layer."""

    def __init__(self, dim: int = DIM, heads: int = HEADS, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1 = Attention(dim, heads)
        self.attn2 = Attention(dim, heads) if cross else None
        self.ff = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        if self.attn2 is not None:
            x = x + self.attn2(x, context, mask)
        return x + self.ff(self.norm2(x))


class Dit(nn.Module):
    """Blocks in a row. forward(x [B,S,32], context [B,T,32] and key mask [B,1,1,T] for cross-attention) -> [B,S,32]."""

    def __init__(self, blocks: int = 2, cross: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(cross=cross) for _ in range(blocks))
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, context, mask)
        return self.proj(x)


def dit(blocks: int = 2, cross: bool = False, seed: int = 0) -> Dit:
    """A model in evaluation mode without gradients, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Dit(blocks, cross).eval().requires_grad_(False)


def tokens(batch: int = 1, length: int = TOKENS, seed: int = 0) -> Tensor:
    """[batch, length, 32]"""
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed))


def leveled() -> Tensor:
    """[1, 2, 512, 16] to be query, key and value at once: each key tile has its own level, the first the highest, so the others skip."""
    x = 0.3 * torch.randn(1, HEADS, TOKENS, 16, generator=torch.Generator().manual_seed(0))
    x[..., 0] += torch.tensor([8.0, 2.0, 5.0, 1.0]).repeat_interleave(128)
    return x


# Masks as diffusers' models make them of m [B, S], True where there is a token.


def hunyuan_video_15(m: Tensor) -> Tensor:
    """[B,1,S,S], as the processor of every block makes it."""
    batch, size = m.shape
    rows = m.bool().view(batch, 1, 1, size).repeat(1, 1, size, 1)
    return (rows & rows.transpose(2, 3)).bool()


def chroma(m: Tensor) -> Tensor:
    """[B,1,S,S], as every block makes it; of floating-point numbers if m is."""
    return m[:, None, None, :] * m[:, None, :, None]


def ltx(m: Tensor) -> Tensor:
    """[B,H,1,S], as Attention.prepare_attention_mask and the processors of LTX, PixArt, Sana ... make it."""
    bias = ((1 - m.to(torch.float32)) * -10000.0).unsqueeze(1)
    return bias.repeat_interleave(HEADS, dim=0, output_size=bias.shape[0] * HEADS).view(m.shape[0], HEADS, -1, m.shape[1])


def skip_config(threshold: float | None = 0.3, **fields: object) -> SkipConfig:
    """Without the length limit, which is far above the lengths that the tests can afford."""
    return SkipConfig(threshold=threshold, **{"min_kv_len": 0, **fields})


@contextlib.contextmanager
def reference_sdpa(*thresholds: float | Tensor, tile_order: str = "ascending") -> Iterator[list[tuple[int, int]]]:
    """F.scaled_dot_product_attention is the reference inside, at thresholds[n % len] in the n-th call.

    Yields a list that gets the (visited, skipped) tiles of each call.
    """
    counts: list[tuple[int, int]] = []
    original = F.scaled_dot_product_attention

    def replaced(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if torch.is_autocast_enabled(query.device.type):
            cast = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(cast), key.to(cast), value.to(cast)
        threshold = torch.as_tensor(thresholds[len(counts) % len(thresholds)])
        out, _, tiles = reference_attention(
            query, key, value, threshold, attn_mask, is_causal=is_causal, scale=scale, tile_order=tile_order
        )
        counts.append(tuple(tiles.sum((0, 1)).tolist()))
        return out

    F.scaled_dot_product_attention = replaced
    try:
        yield counts
    finally:
        F.scaled_dot_product_attention = original
