"""The Triton kernel beside PyTorch's FlashAttention-2, on any GPU that it serves.

    python examples/benchmark_triton.py [--rounds 5] [--sweep]

At lambda 0 it should be as fast as FlashAttention-2, and with 70 % of the tiles skipped 1.35 times as fast as itself at lambda 0. Inputs,
lambda and timing are those of `benchmark_attention.py`. --sweep times other configurations than the kernel's table has, to choose its
entries for a GPU: each is a change of one launch, the one that votes (at 70 % skipped) or the dense one (at lambda 0).
Without a CUDA GPU: a message, exit status 2.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmark_attention import ORDER, Shape, machine, time_in_turn
from skip_attn_compile import ops
from skip_attn_compile.kernels import triton, triton_table
from skip_attn_compile.kernels.triton_table import Config

SHAPES = ((24, 8192, 128), (24, 16384, 128), (24, 8192, 64), (24, 16384, 64))
VOTING = tuple(
    Config(64, warps, stages, 128, tma, early)
    for warps, stages in ((4, 1), (4, 2), (4, 3), (8, 2))
    for tma in (False, True)
    for early in (False, True)
)
DENSE = tuple(
    Config(block_q, warps, stages, 128, tma)
    for block_q, warps in ((64, 4), (128, 4), (128, 8))
    for stages in (1, 2, 3)
    for tma in (False, True)
)


class TritonShape(Shape):
    def ours(self) -> tuple[Tensor, Tensor, Tensor]:
        return ops.attention(self.query, self.key, self.value, self.threshold, None, None, False, None, ORDER, "triton")


@contextmanager
def configuration(votes: bool, chosen: Config) -> Iterator[None]:
    """`chosen` in the launch that votes, or in the dense one; the other as in the table."""
    table, is_described = triton_table.config, triton_table.is_described

    def config(capability: tuple[int, int] | None, element_size: int, dim: int, vote: bool, described: bool) -> Config:
        return chosen if vote == votes else table(capability, element_size, dim, vote, described and capability == triton_table.HOPPER)

    triton_table.config = config
    triton_table.is_described = lambda _, *tensors: all(map(triton_table.is_describable, tensors))  # on any GPU
    triton.plans.clear()
    try:
        yield
    finally:
        triton_table.config, triton_table.is_described = table, is_described
        triton.plans.clear()


def measure(shape: TritonShape, rounds: int) -> None:
    flash = shape.dense(SDPBackend.FLASH_ATTENTION)
    shape.threshold.zero_()
    dense, fa2 = (statistics.median(times) for times in time_in_turn([shape.ours, flash], rounds, 0.0))
    shape.set_share(0.7)
    skipped = shape.skipped()
    (times,) = time_in_turn([shape.ours], rounds, 0.0)
    sparse = statistics.median(times)
    print(
        f"H{shape.heads} S{shape.length} D{shape.head_dim}  FlashAttention-2 {fa2:.3f} ms  lambda 0 {dense:.3f} ms = {fa2 / dense:.2f} x  "
        f"{skipped:.1%} skipped {sparse:.3f} ms = {dense / sparse:.2f} x itself",
        flush=True,
    )


def sweep(shape: TritonShape, rounds: int) -> None:
    for vote, candidates in ((False, DENSE), (True, VOTING)):
        if vote:
            shape.set_share(0.7)
        else:
            shape.threshold.zero_()
        for chosen in candidates:
            with configuration(vote, chosen):
                result = attempt(lambda: statistics.median(time_in_turn([shape.ours], rounds, 0.0)[0]))
            print(f"  {'votes' if vote else 'dense'} {chosen}: {result}", flush=True)


def attempt(run: Callable[[], float]) -> str:
    try:
        return f"{run():.3f} ms"
    except RuntimeError as error:  # does not fit this GPU
        return str(error).splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The Triton kernel beside PyTorch's FlashAttention-2.")
    parser.add_argument("--rounds", type=int, default=5, help="timed blocks of each implementation")
    parser.add_argument("--sweep", action="store_true", help="time other configurations, too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU, and there is none here", file=sys.stderr)
        return 2
    print(json.dumps(machine()))
    with torch.no_grad():
        for heads, length, head_dim in SHAPES:
            shape = TritonShape(heads, length, head_dim)
            measure(shape, options.rounds)
            if options.sweep:
                sweep(shape, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
