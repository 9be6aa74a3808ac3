"""FlashInfer's skip-softmax attention for Blackwell data-centre GPUs (compute capability 10.0 and 10.3), behind a thin adapter.

Written against flashinfer-python 0.7.4. No such GPU was at hand: what is tested is that the call fits the installed package's signature and
what is made of its results, not the kernel. It takes lambda as a number on the host, masks nothing, and counts no tiles (counts stay 0),
so "auto" takes it only where nothing else serves. FlashInfer's kernels for other GPUs are not used: the one for 9.0 ignores strides and
wants Skv <= Sq, and for 12.0 only fp8 inputs can skip.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from skip_attn_compile.kernels import Implementation, Problem, Results, words

CAPABILITIES = ((10, 0), (10, 3))


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    results: Results,
    is_causal: bool,
    scale: float,
    tile_order: str,
) -> None:
    """Shapes as in `ops.py`, threshold on the CPU; asynchronous, on the current stream."""
    from flashinfer.attention.cute_dsl import cute_dsl_fmha_ragged_prefill

    with torch.cuda.device(query.device):
        attend(cute_dsl_fmha_ragged_prefill, query, key, value, threshold, results, scale)


def attend(
    prefill: Callable[..., object], query: Tensor, key: Tensor, value: Tensor, threshold: Tensor, results: Results, scale: float
) -> None:
    out, lse, counts = results
    counts.zero_()
    if out.numel() == 0 or key.shape[2] == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    given = arguments(query, key, value, threshold, out, scale)
    prefill(**given)
    batch, heads, rows, value_dim = out.shape
    if given["o"].data_ptr() != out.data_ptr():
        out.copy_(given["o"].view(batch, rows, heads, value_dim).transpose(1, 2))
    torch.mul(given["lse"].view(batch, rows, heads).transpose(1, 2), math.log(2), out=lse)  # base 2 there, e here


def arguments(query: Tensor, key: Tensor, value: Tensor, threshold: Tensor, out: Tensor, scale: float) -> dict[str, Any]:
    """What `cute_dsl_fmha_ragged_prefill` gets. Its tensors are [tokens, heads, dim], the samples one after the other."""
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    lambdas = {min(max(x, 0.0), 1.0) if x == x else 0.0 for x in threshold.reshape(-1).tolist()}
    if len(lambdas) > 1:
        raise ValueError(f"flashinfer takes one lambda for the whole batch, got {sorted(lambdas)}; call it once for each")
    (threshold_of_all,) = lambdas
    return {
        "q": _packed(query),
        "k": _packed(key),
        "v": _packed(value),
        "o": _packed(out),
        "qo_indptr": torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=query.device),
        "kv_indptr": torch.arange(0, (batch + 1) * keys, keys, dtype=torch.int32, device=query.device),
        "is_causal": False,
        "sm_scale": scale,
        "lse": torch.empty((batch * rows, heads), dtype=torch.float32, device=query.device),
        "max_qo_len": rows,  # both would be read from the device if they were missing
        "max_kv_len": keys,
        "skip_softmax_threshold_scale_factor": threshold_of_all * keys or None,  # lambda = factor / max_kv_len; None: dense
    }


def _packed(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B * S, H, D] contiguous: a view of the [B, S, H, D] memory that diffusers makes, else a copy."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def unavailable(problem: Problem) -> str | None:
    """Why it cannot run such a call on this machine, or None."""
    if problem.capability not in CAPABILITIES:
        built = "its skip-softmax kernels for 16-bit inputs are built for compute capability 10.0 and 10.3"
        return f"{built}, this device has {words(problem.capability)}"
    if problem.is_causal:
        return "its causal mask is aligned to the last key, not to the first"
    if problem.query_mask:
        return "it cannot leave rows out of its votes"
    return "the package flashinfer is not installed; pip install flashinfer-python" if find_spec("flashinfer") is None else None


IMPLEMENTATION = Implementation(
    name="flashinfer",
    device_types=("cuda",),
    tile_q=128,
    tile_k=128,
    tile_orders=("ascending",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(64, 128),
    masks=("none",),
    run=run,
    capability="10.0 or 10.3",
    unavailable=unavailable,
    lambda_on_host=True,
    counts_tiles=False,
)
