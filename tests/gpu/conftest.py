"""Tests of the Hopper kernel need a Hopper GPU, those of Triton any GPU that it serves; elsewhere they are skipped, with the reason."""

import pytest
import torch

from skip_attn_compile.kernels import Problem, sm90, triton

TRITON_SERVES = ("test_triton_kernel.py", "test_measure_kernels.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if (reason := _why_not(triton if item.path.name in TRITON_SERVES else sm90)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(kernel) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    problem = Problem("cuda", torch.cuda.get_device_capability(), torch.bfloat16, 128, 128, "none", False, False, "ascending", True)
    return kernel.unavailable(problem)
