"""The operator's host side on a Hopper GPU: time, allocations, streams, devices, and what its memory of past calls must not hide."""

import contextlib
import time

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from skip_attn_compile import ops
from skip_attn_compile.reference import reference_attention

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
THRESHOLD = 0.3


def inputs(tokens: int = 512, device: str = "cuda:0", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = (torch.randn(2, tokens, 4, 64, generator=generator, device=device).bfloat16().transpose(1, 2) for _ in range(3))
    key[:, :, : tokens // 4] *= 3  # so that tiles are skipped
    return query, key, value, torch.tensor(THRESHOLD, device=device)


def attend(
    query: Tensor, key: Tensor, value: Tensor, threshold: Tensor, mask: Tensor | None = None, implementation: str = "sm90"
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        return ops.attention(query, key, value, threshold, mask, None, False, None, "own_first", implementation)


def assert_right(results: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, threshold: Tensor) -> None:
    out, lse, counts = results
    wanted = reference_attention(query.double(), key.double(), value.double(), threshold, tile_order="own_first")
    assert torch.equal(counts, wanted[2])
    assert counts[..., 1].sum() > 0
    torch.testing.assert_close(out.double(), wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-4, atol=1e-3)


def best_us(call, calls: int = 100, rounds: int = 20) -> float:
    """Host time of one call, in us: the best round, each begun with an idle device."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def test_host_time_of_a_call(capsys: pytest.CaptureFixture) -> None:
    """20 us is the goal; the bound here only catches a call that works everything out anew (60 us more)."""
    given = inputs(128)
    attend(*given)
    with torch.inference_mode():
        call = lambda: ops.attention(*given, None, None, False, None, "ascending", "auto")
        took = best_us(call)
        sdpa = best_us(lambda: torch.nn.functional.scaled_dot_product_attention(*given[:3]))
    with capsys.disabled():
        print(f"\nhost time of one operator call: {took:.1f} us (SDPA {sdpa:.1f})")
    assert took < 60


def test_calls_are_queued_without_waiting() -> None:
    query = torch.randn(1, 24, 8192, 128, device="cuda", dtype=torch.bfloat16)
    threshold = torch.tensor(0.0, device="cuda")
    attend(query, query, query, threshold)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        attend(query, query, query, threshold)
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    assert queued < (time.perf_counter() - start) / 2


def test_nothing_but_the_results_is_allocated() -> None:
    given = inputs()
    attend(*given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    results = attend(*given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 3
    assert len({x.untyped_storage().data_ptr() for x in results}) == 3


@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "sliced", "one row", "one head"])
def test_fake_and_real_have_the_same_strides(layout: str) -> None:
    query = {
        "BSHD": lambda: torch.randn(2, 300, 4, 64).transpose(1, 2),
        "BHSD": lambda: torch.randn(2, 4, 300, 64),
        "sliced": lambda: torch.randn(2, 300, 4, 192)[..., 64:128].transpose(1, 2),
        "one row": lambda: torch.randn(2, 1, 4, 64).transpose(1, 2),
        "one head": lambda: torch.randn(2, 300, 1, 64).transpose(1, 2),
    }[layout]().to("cuda", torch.bfloat16)
    given = (query, query, query, torch.tensor(0.1, device="cuda"))
    with FakeTensorMode() as mode:
        fakes = attend(*map(mode.from_tensor, given))
    for _ in range(2):  # worked out, and remembered
        for fake, real in zip(fakes, attend(*given), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)


def test_a_side_stream_keeps_its_order() -> None:
    stream = torch.cuda.Stream()
    query, key, value, threshold = inputs()
    with torch.cuda.stream(stream):  # whatever the first call loads
        torch.cuda._sleep(1)
        attend(query, key * 2, value, threshold.fill_(THRESHOLD))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # 0.3 s: a kernel on any other stream would read the keys before they are written
        key = key * 2
        threshold.fill_(0.1)
        results = attend(query, key, value, threshold)
    assert not stream.query()
    stream.synchronize()
    assert_right(results, query, key, value, threshold)


def test_a_remembered_call_is_checked_all_the_same() -> None:
    query, key, value, threshold = inputs()
    mask = torch.ones(1, 1, 1, 512, dtype=torch.bool, device="cuda")
    attend(query, key, value, threshold)
    attend(query, key, value, threshold, mask)
    for wrong, message in (
        ((query, key, value, threshold.cpu()), "threshold must be float32 on cuda:0, got torch.float32 on cpu"),
        ((query, key, value, threshold.double()), "threshold must be float32 on cuda:0, got torch.float64"),
        ((query, key, value, threshold.expand(3)), r"threshold must be \[\] or \[batch\] = \[2\], got \[3\]"),
        ((query, key.half(), value, threshold), "key must be torch.bfloat16"),
        ((query, key, value.half(), threshold), "value must be torch.bfloat16"),
        ((query, key[:, :, :500], value, threshold), "value must have key's number of keys 500"),
        ((query, key, value, threshold, mask.cpu()), "attn_mask must be on cuda:0"),
        ((query, key, value, threshold, mask.int()), "attn_mask must be boolean"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*wrong)
    assert_right(attend(query, key, value, threshold), query, key, value, threshold)


def test_a_misaligned_view_of_a_remembered_layout_is_noticed() -> None:
    query, key, value, threshold = inputs()
    attend(query, key, value, threshold)
    memory = torch.empty(value.numel() + 4, dtype=value.dtype, device="cuda")
    shifted = memory[4:].as_strided(value.shape, value.stride(), 4).copy_(value)
    assert shifted.data_ptr() % 16 == 8
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        attend(query, key, shifted, threshold)
    assert_right(attend(query, key, shifted, threshold, implementation="auto"), query, key, shifted, threshold)


@TWO_GPUS
@pytest.mark.parametrize("stream", [False, True], ids=["default stream", "side stream"])
def test_a_device_that_is_not_current(stream: bool) -> None:
    """Layouts are the same on both, so what is remembered of one must not serve the other."""
    torch.cuda.set_device(0)
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        query, key, value, threshold = inputs(device=device, seed=5)
        torch.cuda.synchronize(device)
        # The outer context makes the side stream current on its device, the inner one another device current.
        outer = torch.cuda.stream(torch.cuda.Stream(device)) if stream else contextlib.nullcontext()
        with outer, torch.cuda.device(0):
            value = value * 0.5
            results = attend(query, key, value, threshold)
        torch.cuda.synchronize(device)
        assert torch.cuda.current_device() == 0
        assert {str(x.device) for x in results} == {device}
        assert_right(results, query, key, value, threshold)


@TWO_GPUS
def test_both_devices_at_once() -> None:
    torch.cuda.set_device(0)
    given = {device: inputs(2048, device) for device in ("cuda:0", "cuda:1")}
    results = [(device, attend(*given[device])) for _ in range(20) for device in given]
    for device, result in results[-4:]:
        assert_right(result, *given[device])
    first = {device: next(r for d, r in results if d == device) for device in given}
    assert all(torch.equal(a, b) for device, result in results for a, b in zip(result, first[device], strict=True))


@TWO_GPUS
def test_tensors_of_two_devices_are_an_error() -> None:
    query, key, value, threshold = inputs()
    attend(query, key, value, threshold)
    for wrong in ((query, key.to("cuda:1"), value, threshold), (query, key, value, threshold.to("cuda:1"))):
        with pytest.raises(ValueError, match="on cuda:0"):
            attend(*wrong)


@TWO_GPUS
def test_compiled_on_a_device_that_is_not_current() -> None:
    torch.cuda.set_device(0)
    torch.compiler.reset()
    run = torch.compile(lambda *given: attend(given[0] * 1.0, *given[1:]))
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        given = inputs(device=device)
        assert_right(run(*given), *given)
        assert torch.cuda.current_device() == 0
