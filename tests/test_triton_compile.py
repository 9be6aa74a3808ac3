"""The Triton kernel compiled for GPUs that are not here; and the package without Triton. Each test in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def python(script: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_the_package_imports_without_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch, skip_attn_compile
from skip_attn_compile import kernels
problem = kernels.Problem("cuda", (8, 0), torch.bfloat16, 128, 128, "none", False, False, "ascending", True)
print(kernels.choose(problem))
print(kernels.implementations()[-1])
"""
    done = python(script)
    assert "triton is unavailable: the package triton is not installed; pip install triton" in done.stdout, done.stderr


ABSENT_GPU = """
import torch, triton
from triton.backends.compiler import GPUTarget
from skip_attn_compile.kernels import triton as implementation

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

triton.runtime.driver.set_active(Driver())
kernel = implementation._kernel()
implementation._capability = lambda query: divmod(capability, 10)
"""
COMPILE = """
class Compiler:
    def __getitem__(self, grid):
        return lambda *args, **options: compiled.append(kernel.warmup(*args, grid=grid, **options).metadata.shared)

implementation._kernel = Compiler
for capability, head_dim, rows, causal, measured, limit in PROBLEMS:
    compiled = []
    kernel.device_caches.clear()
    implementation.plans.clear()
    query = torch.empty(1, rows, 8, head_dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    results = torch.empty_like(query), torch.empty(1, 8, rows, device="meta"), torch.empty(1, 8, 2, dtype=torch.int32, device="meta")
    implementation.run(query, query, query, torch.empty((), device="meta"), None, None, results, causal, 0.1, "own_first")
    thresholds, counts = torch.empty(32, device="meta"), torch.empty(1, 8, 33, dtype=torch.int32, device="meta")
    results = torch.empty_like(query), counts
    implementation.measure(query, query, query, thresholds, None, None, results, causal, 0.1, "own_first", (measured, 128))
    assert len(compiled) == 3 - causal
    assert max(compiled) <= limit, (capability, head_dim, compiled)
"""
PROBLEMS = [
    (80, 128, 1000, False, 128, 166912),
    (86, 256, 1000, True, 128, 101376),
    (90, 128, 1000, False, 128, 232448),
    (90, 128, 1, True, 64, 232448),
    (90, 256, 1000, True, 128, 232448),
    (100, 128, 1000, True, 64, 232448),
    (120, 64, 1000, True, 64, 101376),
]


def test_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """From source to machine code, within the GPU's shared memory in bytes. Nothing is run."""
    done = python(f"PROBLEMS = {PROBLEMS}\n{ABSENT_GPU}{COMPILE}", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]


LENGTHS = """
class Compiler:
    def __getitem__(self, grid):
        return lambda *args, **options: kernel.warmup(*args, grid=grid, **options) and None

implementation._kernel = Compiler
for heads, rows, keys in [(8, 512, 1024), (3, 333, 1152), (1, 1, 128)]:
    query, key = (torch.empty(1, length, heads, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for length in (rows, keys))
    counts = torch.empty(1, heads, 2, dtype=torch.int32, device="meta")
    results = torch.empty_like(query), torch.empty(1, heads, rows, device="meta"), counts
    implementation.run(query, key, key, torch.empty((), device="meta"), None, None, results, False, 0.1, "own_first")
print(sum(len(cache[0]) for cache in kernel.device_caches.values()))
"""


def test_one_compilation_serves_all_lengths_and_numbers_of_heads(tmp_path: Path) -> None:
    done = python(f"capability = 90\n{ABSENT_GPU}{LENGTHS}", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["2"], (done.stdout, done.stderr[-2000:])  # with votes, and without
