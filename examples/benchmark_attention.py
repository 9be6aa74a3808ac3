"""Skip-softmax attention on a Hopper GPU, beside PyTorch's dense attention, and FlashInfer's skip-softmax attention where it is installed.

    python examples/benchmark_attention.py [--out examples/results/h200.json] [--quick]

Inputs have the structure of a video transformer (local in space, returning every frame, a few sink tokens); lambda is chosen for a share
of skipped tiles, and the share in the results is the one that the kernel counted. cuDNN and the kernel are timed in turn, block by block,
so that both see the same temperature and clocks; a row gives the median of its blocks and their spread. `sustained`: the card is busy all
the time and runs at its power limit. `burst`: half a second of rest before each block. FlashInfer gets the same lambda; it counts nothing.

Writes JSON and, beside it, a picture of speedup against skipped share. Without a Hopper GPU: a message, exit status 2.
"""

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skip_attn_compile import ops
from skip_attn_compile.kernels import Problem, sm90
from structured_inputs import structured_qkv

SHARES = (0.0, 0.5, 0.7, 0.9)
TABLE = tuple(("table", 24, length, 128) for length in (16384, 32768, 65536))
MODELS = (
    ("Flux", 24, 4608, 128),
    ("LTX", 32, 30720, 64),
    ("table", 24, 32768, 64),
    ("Wan 14B 720p", 40, 75600, 128),
    ("HunyuanVideo", 24, 118800, 128),
)
ORDER = "own_first"


class Shape:
    """One problem: its inputs, and the calls to time."""

    def __init__(self, heads: int, length: int, head_dim: int) -> None:
        self.heads, self.length, self.head_dim = heads, length, head_dim
        self.query, self.key, self.value = structured_qkv(length, heads, head_dim)
        self.threshold = torch.zeros((), device="cuda")

    def ours(self) -> tuple[Tensor, Tensor, Tensor]:
        return ops.attention(self.query, self.key, self.value, self.threshold, None, None, False, None, ORDER, "sm90")

    def dense(self, backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(self.query, self.key, self.value)

        return call

    def flashinfer(self) -> Callable[[], Tensor]:
        """FlashInfer's kernel for this GPU at the present lambda, on copies, since it reads no strides."""
        from flashinfer.prefill import trtllm_fmha_v2_prefill

        packed = tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in (self.query, self.key, self.value))
        ends = torch.tensor([0, self.length], dtype=torch.int32, device="cuda")
        given = {
            "qkv": packed,
            "input_layout": "SEPARATE_Q_K_V",
            "workspace_buffer": torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
            "seq_lens": ends[1:],
            "max_q_len": self.length,
            "max_kv_len": self.length,
            "bmm1_scale": self.head_dim**-0.5,
            "bmm2_scale": 1.0,
            "batch_size": 1,
            "cum_seq_lens_q": ends,
            "cum_seq_lens_kv": ends,
            "out": torch.empty_like(packed[0]),
            "mask_mode": "padding",
            "skip_softmax_threshold_scale_factor": float(self.threshold) * self.length,
        }
        return lambda: trtllm_fmha_v2_prefill(**given)

    def skipped(self) -> float:
        visited, skipped = self.ours()[2].sum((0, 1)).tolist()
        return skipped / visited

    def set_share(self, share: float) -> float:
        """Choose lambda for a share of skipped tiles, within half a point; returns lambda."""
        low, high = math.log(1e-12), 0.0
        self.threshold.zero_()
        while share > 0 and high - low > 1e-3:
            self.threshold.fill_(math.exp((low + high) / 2))
            have = self.skipped()
            if abs(have - share) < 0.005:
                break
            low, high = ((low + high) / 2, high) if have < share else (low, (low + high) / 2)
        return float(self.threshold)

    @property
    def operations(self) -> float:
        return 4.0 * self.heads * self.length**2 * self.head_dim


def time_in_turn(calls: Sequence[Callable[[], object]], rounds: int, rest: float) -> list[list[float]]:
    """Milliseconds a call, per call and round. Blocks of about 60 ms, in turn."""
    repeats = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        repeats.append(max(1, round(60 / _block(call, 1))))
    if not rest:
        for call, count in zip(calls, repeats, strict=True):  # to the temperature that it stays at
            _block(call, 4 * count)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for i, (call, count) in enumerate(zip(calls, repeats, strict=True)):
            time.sleep(rest)
            times[i].append(_block(call, count))
    return times


def _block(call: Callable[[], object], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measure(shape: Shape, name: str, shares: Sequence[float], mode: str, rounds: int, *, flash: bool) -> list[dict]:
    rows = []
    dense_calls = {"cudnn": SDPBackend.CUDNN_ATTENTION, **({"flash": SDPBackend.FLASH_ATTENTION} if flash else {})}
    for share in shares:
        threshold = shape.set_share(share)
        skipped = shape.skipped() if share else 0.0
        calls = {"sm90": shape.ours, **{key: shape.dense(backend) for key, backend in dense_calls.items() if key == "cudnn" or not share}}
        if importlib.util.find_spec("flashinfer") is not None:
            calls["flashinfer"] = shape.flashinfer()
        times = dict(zip(calls, time_in_turn(list(calls.values()), rounds, 0.5 if mode == "burst" else 0.0), strict=True))
        cudnn = statistics.median(times["cudnn"])
        for key, blocks in times.items():
            ms = statistics.median(blocks)
            row = {
                "implementation": key,
                "shape": name,
                "dtype": "bfloat16",
                "B": 1,
                "H": shape.heads,
                "Sq": shape.length,
                "Skv": shape.length,
                "D": shape.head_dim,
                "lambda": threshold if key in ("sm90", "flashinfer") else None,
                "tile_order": ORDER if key == "sm90" else None,
                "causal": False,
                "skipped": round(skipped, 4) if key == "sm90" else None if key == "flashinfer" else 0.0,
                "ms": round(ms, 4),
                "spread": round((max(blocks) - min(blocks)) / ms, 4),
                "tflops": round(shape.operations / ms * 1e-9, 1),
                "ratio_cudnn": round(cudnn / ms, 4),
                "mode": mode,
            }
            rows.append(row)
            counted = "not counted" if row["skipped"] is None else f"{row['skipped']:.1%}"
            print(
                f"{name:14s} H{shape.heads} S{shape.length:<7d} D{shape.head_dim:<4d} {mode:9s} {key:10s} skipped {counted:12s} "
                f"{ms:9.3f} ms +-{row['spread']:5.1%}  {row['tflops']:7.1f} TFLOP/s  {row['ratio_cudnn']:.3f} x cuDNN",
                flush=True,
            )
    return rows


def machine() -> dict:
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    values = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout
    card = dict(zip(query.split(","), (x.strip() for x in values.splitlines()[0].split(",")), strict=False)) if values else {}
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
    }
    return {"card": card, "versions": versions, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def draw(rows: list[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    limit = [i / 100 for i in range(101)]
    axes.plot(limit, [1 / (1 - s / 2) for s in limit], "k--", linewidth=1, label="FLOP limit at cuDNN's dense speed: 1 / (1 - s/2)")
    for length in sorted({row["Sq"] for row in rows}):
        points = sorted((row["skipped"], row["ratio_cudnn"]) for row in rows if row["Sq"] == length and row["implementation"] == "sm90")
        dense, voted = [p for p in points if p[0] == 0], [p for p in points if p[0] > 0]
        (line,) = axes.plot([p[0] for p in voted], [p[1] for p in voted], "o-", label=f"{length} tokens")
        axes.plot([p[0] for p in dense], [p[1] for p in dense], "s", color=line.get_color())  # apart: between them is no line, but a step
    axes.axhline(1, color="gray", linewidth=0.5)
    axes.set(
        xlabel="share of tiles skipped",
        ylabel="speed relative to dense cuDNN attention",
        title="bfloat16, 24 heads of 128, sustained; squares: lambda 0, no votes",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(path)


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "this benchmark needs a Hopper GPU (compute capability 9.0), and there is no CUDA GPU here"
    capability = torch.cuda.get_device_capability()
    return sm90.unavailable(Problem("cuda", capability, torch.bfloat16, 128, 128, "none", False, False, ORDER, True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Skip-softmax attention beside dense attention on a Hopper GPU.")
    parser.add_argument("--out", type=Path, default=Path("h200.json"), help="JSON to write; the picture lies beside it")
    parser.add_argument("--rounds", type=int, default=7, help="timed blocks of each implementation a row")
    parser.add_argument("--quick", action="store_true", help="the table of 24 heads of 128 alone")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    before = machine()
    print(json.dumps(before))
    rows: list[dict] = []
    other: list[dict] = []
    with torch.no_grad():
        for name, heads, length, head_dim in TABLE:
            measured = measure(Shape(heads, length, head_dim), name, SHARES, "sustained", options.rounds, flash=length == 16384)
            rows += [row for row in measured if row["implementation"] == "sm90"]
            other += [row for row in measured if row["implementation"] != "sm90"]
        if not options.quick:
            other += measure(Shape(24, 16384, 128), "table", (0.0, 0.7), "burst", options.rounds, flash=False)
            for name, heads, length, head_dim in MODELS:
                shares = SHARES if length < 40000 else (0.0, 0.7)
                other += measure(
                    Shape(heads, length, head_dim), name, shares, "sustained", min(options.rounds, 3 if length > 40000 else 7), flash=False
                )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**before, "after": machine()["card"], "rows": rows, "other": other}, indent=1) + "\n")
    print(options.out)
    draw(rows, options.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
