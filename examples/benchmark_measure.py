"""What calibration costs on a GPU: the time of `measure`, which counts for 32 lambdas at once, beside the dense attention it replaces.

    python examples/benchmark_measure.py [--rounds 5] [--sweep]

Per shape and implementation that measures: at the tiles and in the order that serve, and at ModelOpt's 128 x 128 ascending. The goal is
less than 1.3 times the same implementation at lambda 0; cuDNN is shown beside it. Inputs and timing are those of `benchmark_attention.py`.
--sweep times other configurations than Triton's table has, to choose its entries for a GPU. Without a CUDA GPU: a message, exit status 2.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmark_attention import ORDER, Shape, machine, time_in_turn
from skip_attn_compile import ops
from skip_attn_compile.calibrate import THRESHOLDS
from skip_attn_compile.kernels import Implementation, Problem, implementations, triton, triton_table
from skip_attn_compile.kernels.triton_table import Config, Launch
from skip_attn_compile.results import empty_results

SHAPES = ((24, 8192, 128), (24, 32768, 128), (24, 8192, 64), (24, 32768, 64))
TILES = (((64, 128), ORDER), ((128, 128), "ascending"))
CANDIDATES = tuple(
    Launch(vote, "all", Config(block_q, warps, stages, 128, tma, early=vote and block_q == 64))
    for block_q, warps in ((64, 4), (128, 4), (128, 8))
    for vote in (False, True)
    for stages in (1, 2, 3)
    for tma in (False, True)
)


class Measured(Shape):
    """A shape, its dense attention and its measurement `by` an implementation."""

    def __init__(self, heads: int, length: int, head_dim: int) -> None:
        super().__init__(heads, length, head_dim)
        self.thresholds = torch.tensor(THRESHOLDS, device="cuda")

    def kernels(self) -> list[Implementation]:
        problem = Problem.of(self.query, self.key, self.value, None, False, False, ORDER)
        return [
            x
            for x in implementations()
            if x.name != "reference" and not x.not_supported_reasons(problem._replace(measured_tile=(x.tile_q, x.tile_k)))
        ]

    def at_lambda_0(self, by: Implementation) -> Callable[[], object]:
        self.threshold.zero_()
        return lambda: ops.attention(self.query, self.key, self.value, self.threshold, None, None, False, None, ORDER, by.name)

    def measurement(self, by: Implementation, tile: tuple[int, int], order: str) -> Callable[[], object]:
        def call() -> Tensor:
            out, _, _ = empty_results(self.query, self.value)
            counts = torch.empty(1, self.heads, 1 + len(THRESHOLDS), dtype=torch.int32, device=self.query.device)
            assert by.measure is not None
            results, scale = (out, counts), self.query.shape[3] ** -0.5
            by.measure(self.query, self.key, self.value, self.thresholds, None, None, results, False, scale, order, tile)
            return counts

        return call


def compare(shape: Measured, by: Implementation, rounds: int) -> None:
    calls = [shape.dense(SDPBackend.CUDNN_ATTENTION), shape.at_lambda_0(by)]
    calls += [shape.measurement(by, tile, order) for tile, order in TILES]
    cudnn, dense, *measured = (statistics.median(times) for times in time_in_turn(calls, rounds, 0.0))
    ratios = ", ".join(
        f"{rows} x {keys} {order} {time:.3f} ms = {time / dense:.2f} x" for ((rows, keys), order), time in zip(TILES, measured, strict=True)
    )
    name = f"H{shape.heads} S{shape.length} D{shape.head_dim} {by.name}"
    print(f"{name}: cuDNN {cudnn:.3f} ms, lambda 0 {dense:.3f} ms; measured at {ratios}", flush=True)


def sweep(shape: Measured, rounds: int) -> None:
    table = triton_table.measuring
    for tile, order in TILES:
        for launch in CANDIDATES:
            if launch.config.block_q == tile[0]:
                triton_table.measuring = lambda *_, launch=launch: (launch,)
                triton.plans.clear()
                try:
                    (times,) = time_in_turn([shape.measurement(triton.IMPLEMENTATION, tile, order)], rounds, 0.0)
                    result = f"{statistics.median(times):.3f} ms"
                except Exception as error:  # does not fit this GPU: Triton's OutOfResources is nothing more special
                    result = str(error).splitlines()[0]
                finally:
                    triton_table.measuring = table
                    triton.plans.clear()
                print(f"  {tile[0]} x {tile[1]} {order}, vote {launch.vote}, {launch.config}: {result}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What counting for 32 lambdas costs beside dense attention.")
    parser.add_argument("--rounds", type=int, default=5, help="timed blocks of each call")
    parser.add_argument("--sweep", action="store_true", help="time other configurations of the Triton kernel, too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU, and there is none here", file=sys.stderr)
        return 2
    print(json.dumps(machine()))
    with torch.no_grad():
        for heads, length, head_dim in SHAPES:
            shape = Measured(heads, length, head_dim)
            for by in shape.kernels():
                compare(shape, by, options.rounds)
            if options.sweep and length == SHAPES[0][1]:
                sweep(shape, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
