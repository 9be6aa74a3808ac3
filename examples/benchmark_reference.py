"""Time the CPU implementation against torch's dense attention, at thresholds that skip more and more tiles.

python examples/benchmark_reference.py [--seq-len 4096 --heads 4 --head-dim 64 --dtype float32 --tile-order own_first]
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from skip_attn_compile.reference import reference_attention
from structured_inputs import structured_qkv


def fastest_ms(*functions: Callable[[], object], repeats: int) -> list[float]:
    """The shortest of `repeats` runs of each, in ms. The functions take turns, so a busy machine slows all of them alike."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats + 1):  # the first round warms up; it is never the fastest
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens, queries and keys alike")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.add_argument("--tile-order", choices=("ascending", "own_first"), default="own_first")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    q, k, v = structured_qkv(args.seq_len, args.heads, args.head_dim, dtype=getattr(torch, args.dtype), device="cpu")

    def sparse(threshold: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return reference_attention(q, k, v, torch.tensor(threshold), tile_order=args.tile_order)

    def dense() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    dense_ms, *times = fastest_ms(dense, *(lambda t=t: sparse(t) for t in args.thresholds), repeats=args.repeats)
    print(f"S={args.seq_len} H={args.heads} D={args.head_dim} {args.dtype}, {args.tile_order}, {torch.get_num_threads()} threads")
    print(f"{'':>10} {'skipped':>8} {'ms':>8} {'/ dense':>8} {'max error':>10}")
    print(f"{'dense SDPA':>10} {'':>8} {dense_ms:8.1f} {1:8.2f}")
    exact = dense().double()
    for threshold, ms in zip(args.thresholds, times, strict=True):
        out, _, counts = sparse(threshold)
        visited, skipped = counts.sum((0, 1)).tolist()
        print(f"{threshold:>10g} {skipped / visited:8.1%} {ms:8.1f} {ms / dense_ms:8.2f} {float((out - exact).abs().max()):10.1e}")


if __name__ == "__main__":
    main()
