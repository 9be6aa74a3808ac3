"""The Hopper kernel's calls for compute-sanitizer: small shapes, both loops, both orders, every mask, measuring too.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Not a test by itself: under the tools a call takes seconds.
"""

import itertools

import torch

from skip_attn_compile import ops
from skip_attn_compile.kernels import sm90
from skip_attn_compile.measure import measure

SHAPES = ((1, 2, 1, 200, 300), (1, 1, 1, 64, 500), (1, 2, 2, 256, 512))  # B, Hq, Hkv, Sq, Skv; the first and last run in clusters


def main() -> None:
    torch.manual_seed(0)
    calls = 0
    for head_dim, shape, order in itertools.product((128, 64), SHAPES, ("ascending", "own_first")):
        batch, heads, kv_heads, rows, keys = shape
        query = torch.randn(batch, heads, rows, head_dim, device="cuda", dtype=torch.bfloat16)
        key, value = torch.randn(2, batch, kv_heads, keys, head_dim, device="cuda", dtype=torch.bfloat16)
        key_mask = torch.rand(batch, 1, 1, keys, device="cuda") < 0.5
        row_mask = torch.rand(batch, 1, rows, 1, device="cuda") < 0.5
        forms = ((None, None, False), (None, None, True), (key_mask, None, False), (key_mask.to(query.dtype), row_mask, False))
        for attn_mask, query_mask, causal in forms:
            for threshold in (0.0, 5e-3, 0.5):
                lam = torch.tensor(threshold, device="cuda")
                ops.attention(query, key, value, lam, attn_mask, query_mask, causal, None, order, "sm90")
                calls += 1
            if sm90.IMPLEMENTATION.measure is not None:
                trials = torch.logspace(-6, 0, 32, device="cuda")
                measure(query, key, value, trials, attn_mask, query_mask, causal, None, order, 64, 128)
                measure(query, key, value, trials, attn_mask, query_mask, causal, None, "ascending", 128, 128)
                calls += 2
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
