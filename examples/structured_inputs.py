"""Attention inputs with the structure of a video DiT: local in space, returning every frame, a few sink tokens.

Random normal q and k have no tiles worth skipping. These have: most of a query's weight lies near its own place, less at the same
place in other frames, every query attends to the first `sinks` keys, and heads differ in how peaked they are.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def structured_qkv(
    seq_len: int,
    heads: int,
    head_dim: int,
    *,
    seed: int = 0,
    latent_dim: int = 16,
    correlation: int = 128,
    low: float = 14.0,
    high: float = 26.0,
    noise: float = 0.45,
    drift: float = 1.0,
    frames: int = 16,
    sinks: int = 96,
    sink_share: float = 0.75,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value, each [1, heads, seq_len, head_dim], views of [1, seq_len, heads, head_dim] memory as diffusers makes them.

    correlation: tokens over which a place becomes another; low, high: the first and the last head's largest score, in nats, at the
    default scale 1/sqrt(head_dim); drift: weight of what tells frames apart; sink_share: a sink's score as a share of the largest.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    def smooth_walk(length: int) -> Tensor:  # [heads, latent_dim, length]
        return F.interpolate(randn(heads, latent_dim, length // correlation + 2), size=length, mode="linear", align_corners=True)

    period = min(seq_len, max(seq_len // frames, 1024))
    within_frame = smooth_walk(period).repeat(1, 1, -(-seq_len // period))[..., :seq_len]
    latent = F.normalize(within_frame, dim=1) + drift * F.normalize(smooth_walk(seq_len), dim=1)
    latent = F.normalize(latent.transpose(1, 2), dim=-1)  # [heads, seq_len, latent_dim]

    basis = torch.linalg.qr(randn(heads, head_dim, latent_dim + 1))[0].transpose(1, 2)  # [heads, latent_dim + 1, head_dim]
    peak = torch.linspace(low, high, heads, device=device) * math.sqrt(head_dim)
    place = peak.sqrt()[:, None, None] * (latent @ basis[:, :latent_dim])
    sink = (sink_share * peak).sqrt()[:, None, None] * basis[:, latent_dim:]

    query = place + sink + noise * randn(heads, seq_len, head_dim)
    key = place + noise * randn(heads, seq_len, head_dim)
    key[:, :sinks] = sink + noise * randn(heads, min(sinks, seq_len), head_dim)
    value = randn(heads, seq_len, head_dim)
    query, key, value = (x.transpose(0, 1).contiguous().to(dtype)[None].transpose(1, 2) for x in (query, key, value))
    return query, key, value
