"""Which implementation serves what, and what happens when one cannot be started."""

import dataclasses
import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode

from skip_attn_compile import SkipConfig, backend, kernels, ops
from skip_attn_compile.config import IMPLEMENTATIONS
from skip_attn_compile.kernels import Problem, choose, reference, sm90, triton
from skip_attn_compile.reference import reference_attention

HOPPER = Problem("cuda", (9, 0), torch.bfloat16, 128, 128, "none", False, False, "own_first", True)
Q = torch.zeros(2, 4, 70, 8)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are there, nothing has failed, nothing has been logged."""
    monkeypatch.setattr(kernels, "_failures", {})
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(triton, "find_spec", lambda name: object())
    monkeypatch.setattr("skip_attn_compile.build.unavailable", lambda: None)
    kernels._log_choice.cache_clear()


def chosen(problem: Problem, name: str = "auto") -> str | list[str]:
    found = choose(problem, name)
    return found if isinstance(found, list) else found.name


def test_the_config_knows_every_implementation() -> None:
    assert set(IMPLEMENTATIONS) == {"auto", *(x.name for x in kernels.implementations())}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "sm90"),
        ({"head_dim": 64, "value_dim": 64}, "sm90"),
        ({"head_dim": 256, "value_dim": 256}, "triton"),
        ({"head_dim": 72, "value_dim": 72}, "triton"),
        ({"value_dim": 64}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        ({"aligned": False}, "triton"),
        ({"mask": "key", "query_mask": True, "is_causal": True}, "sm90"),
        *(({"capability": x}, "triton") for x in ((8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0))),
        ({"device_type": "cpu", "capability": None}, "reference"),
    ],
    ids=str,
)
def test_auto_prefers_the_fastest_that_serves(change: dict, name: str) -> None:
    assert chosen(HOPPER._replace(**change)) == name


def test_a_problem_is_read_off_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cuda_capability", lambda index: (8, 0))
    with FakeTensorMode():
        query = torch.empty(1, 4, 2000, 256, device="cuda", dtype=torch.float16)
        mask = torch.empty(1, 1, 1, 2000, device="cuda", dtype=torch.bool)
        problem = Problem.of(query, query, query, mask, False, False, "ascending")
    assert problem == Problem("cuda", (8, 0), torch.float16, 256, 256, "key", False, False, "ascending", True)
    assert chosen(problem) == "triton"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 320}, "triton takes head_dim up to 256, not 320 and 128"),
        ({"dtype": torch.float64}, "triton takes bfloat16, float16, float32, not float64"),
        ({"mask": "general"}, "triton takes masks of kind none, key, not general"),
        ({"capability": (7, 5)}, "triton is unavailable: it needs compute capability 8.0 or newer, this device has 7.5"),
    ],
    ids=str,
)
def test_what_no_kernel_serves_has_reasons_of_all(change: dict, reason: str) -> None:
    reasons = chosen(HOPPER._replace(**change))
    assert reason in reasons
    assert any(text.startswith("sm90 ") for text in reasons)
    assert "reference serves cuda only when asked for by name" in reasons


def test_a_name_takes_that_one_or_none() -> None:
    assert chosen(HOPPER, "triton") == "triton"
    assert chosen(HOPPER._replace(capability=(8, 0)), "sm90") == [
        "sm90 is unavailable: it is built for compute capability 9.0 (H100, H200), this device has 8.0"
    ]
    assert chosen(HOPPER._replace(device_type="cpu", capability=None), "triton") == ["triton runs on cuda, not on cpu"]
    assert SkipConfig(threshold=0.1, implementation="triton").implementation == "triton"


def test_auto_says_once_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="skip_attn_compile")
    for problem in (HOPPER, HOPPER, HOPPER._replace(head_dim=256, value_dim=256)):
        choose(problem)
    choose(HOPPER, "triton")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "sm90 (compute capability 9.0, tiles of 64 rows and 128 keys, ascending or own_first)" in said[0]
    assert "triton (compute capability 8.0 or newer, tiles of 64 rows and 128 keys, ascending or own_first)" in said[1]


class Broken:
    """An implementation that is preferred on the CPU and fails: when it is loaded, or when it runs on problems of one head_dim."""

    def __init__(self, *, load: Exception | None = None, run: Exception | None = None, head_dim: int = 8) -> None:
        self.load_error, self.run_error, self.head_dim = load, run, head_dim
        self.loads = self.runs = 0

    def load(self) -> None:
        self.loads += 1
        if self.load_error is not None:
            raise self.load_error

    def run(self, query, key, value, threshold, attn_mask, query_mask, results, *rest) -> None:
        self.runs += 1
        results[0].fill_(7)
        if self.run_error is not None and query.shape[3] == self.head_dim:
            raise self.run_error

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = dataclasses.replace(reference.IMPLEMENTATION, name="broken", run=self.run, load=self.load, checks_arguments=True)
        monkeypatch.setattr(kernels, "implementations", lambda: (made, reference.IMPLEMENTATION))


def call(query: torch.Tensor = Q, name: str = "auto") -> torch.Tensor:
    return ops.attention(query, query, query, torch.tensor(0.1), None, None, False, None, "ascending", name)[0]


def assert_reference(out: torch.Tensor, query: torch.Tensor) -> None:
    assert torch.equal(out, reference_attention(query, query, query, torch.tensor(0.1))[0])


def test_one_that_does_not_load_gives_way_to_the_next_for_good(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken(load=OSError("libcuda.so: wrong ELF class"))
    broken.install(monkeypatch)
    for query in (torch.randn(2, 4, 70, 8), torch.randn(2, 4, 70, 8), torch.randn(1, 2, 70, 16)):
        assert_reference(call(query), query)
    assert (broken.loads, broken.runs) == (1, 0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == ("implementation 'broken' could not be started, attention runs on the next one: OSError: libcuda.so: wrong ELF class")
    report = str(backend(SkipConfig(threshold=0.1)).report())
    assert "broken could not be started, so the next implementation ran in its place: OSError: libcuda.so: wrong ELF class" in report


def test_one_that_fails_on_a_problem_still_serves_others(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As where the compiler of a kernel runs out of shared memory for one head_dim."""
    broken = Broken(run=RuntimeError("out of resource: shared memory"))
    broken.install(monkeypatch)
    query = torch.randn(2, 4, 70, 8)
    for _ in range(3):
        assert_reference(call(query), query)
    assert broken.runs == 1
    assert call(torch.randn(2, 4, 70, 16)).eq(7).all()
    assert sum("shared memory" in record.getMessage() for record in caplog.records) == 1


def test_one_that_fails_after_it_ran_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for lengths that differ in what it can assume of them."""
    broken = Broken()
    broken.install(monkeypatch)
    query = torch.randn(2, 4, 70, 8)
    assert call(query).eq(7).all()
    broken.run_error = RuntimeError("ptxas died")
    assert_reference(call(query), query)
    assert_reference(call(query), query)
    assert broken.runs == 3  # once well, once remembered, once to see whether it was the arguments


@pytest.mark.parametrize("how", ["load", "run"])
def test_one_asked_for_by_name_raises(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(**{how: RuntimeError("no C compiler")})
    broken.install(monkeypatch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="implementation 'broken' could not be started: RuntimeError: no C compiler"):
            call(name="broken")


def test_a_failure_is_a_reason_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Broken(load=RuntimeError("no C compiler")).install(monkeypatch)
    call()
    with pytest.raises(ValueError, match="broken failed before: RuntimeError: no C compiler"):
        call(name="broken")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("key is odd")], ids=["memory", "arguments"])
def test_what_is_not_its_fault_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    Broken(run=error).install(monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        call()
    assert not kernels._failures


def test_a_failing_reference_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(kernels, "implementations", lambda: (dataclasses.replace(reference.IMPLEMENTATION, run=fail),))
    with pytest.raises(RuntimeError, match="a bug"):
        call()


def test_the_kernels_name_what_they_load() -> None:
    assert sm90.IMPLEMENTATION.load is sm90._attention
    assert triton.IMPLEMENTATION.load is triton._kernel
