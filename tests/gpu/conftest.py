"""Every test here needs a Hopper GPU; elsewhere all of them are skipped, with the reason."""

import pytest
import torch

from skip_attn_compile.kernels import Problem, sm90


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    problem = Problem("cuda", torch.cuda.get_device_capability(), torch.bfloat16, 128, 128, "none", False, False, "ascending", True)
    return sm90.unavailable(problem)
