"""measure: the counts are those of one run for each lambda, and the output is dense."""

import dataclasses
import inspect
import logging

import pytest
import torch
import torch.nn.functional as F

from models import leveled
from skip_attn_compile import calibrate, kernels, ops
from skip_attn_compile.kernels import Problem, choose, reference, sm90, triton
from skip_attn_compile.measure import measure
from skip_attn_compile.reference import reference_attention

THRESHOLDS = torch.logspace(-6, 0, 32)


def draw(sq: int, skv: int, heads: int = 2, kv_heads: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each key tile has a level of its own, 0 to 10 nats, so that every lambda skips another share."""
    generator = torch.Generator().manual_seed(seed)
    query = 0.3 * torch.randn(2, heads, sq, 16, generator=generator)
    key, value = (torch.randn(2, kv_heads, skv, 16, generator=generator) for _ in range(2))
    query[..., 0] = 4.0
    key[..., 0] = (10 * torch.rand(2, kv_heads, -(-skv // 128), generator=generator)).repeat_interleave(128, -1)[..., :skv]
    return query, key, value


CASES = {
    "plain": (draw(256, 512), {}),
    "ragged": (draw(200, 333), {}),
    "own_first": (draw(256, 512), {"tile_order": "own_first"}),
    "tiles of ModelOpt": (draw(300, 512), {"tile_q": 128}),
    "grouped heads": (draw(128, 512, heads=4), {}),
    "causal": (draw(512, 512), {"is_causal": True, "tile_order": "own_first"}),
    "key mask": (draw(256, 512), {"attn_mask": (torch.arange(512) < torch.tensor([[512], [300]]))[:, None, None]}),
    "query mask": (draw(256, 512), {"query_mask": (torch.arange(256) < torch.tensor([[256], [150]]))[:, None, :, None]}),
}


@pytest.mark.parametrize(("inputs", "options"), CASES.values(), ids=CASES)
def test_counts_are_those_of_one_run_for_each_lambda(inputs, options) -> None:
    given = {
        "attn_mask": None,
        "query_mask": None,
        "is_causal": False,
        "scale": None,
        "tile_order": "ascending",
        "tile_q": 64,
        "tile_k": 128,
    }
    given |= options
    out, counts = measure(*inputs, THRESHOLDS, *given.values())
    for number, threshold in enumerate(THRESHOLDS):
        expected_out, _, expected = reference_attention(*inputs, threshold, **given)
        assert torch.equal(counts[..., 0], expected[..., 0])
        assert torch.equal(counts[..., 1 + number], expected[..., 1])
    dense, _, _ = reference_attention(*inputs, torch.tensor(0.0), **given)
    assert torch.equal(out, dense)
    assert not torch.equal(out, expected_out), "lambda 1 skips something"
    assert bool((counts.diff(dim=-1)[..., 1:] >= 0).all()), "a larger lambda skips more"
    assert len(set(counts[..., 1:].sum((0, 1)).tolist())) > 4


def test_output_is_that_of_sdpa_in_its_layout() -> None:
    x = leveled().transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = measure(x, x, x, THRESHOLDS, None, None, False, None, "ascending", 64, 128)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x))
    assert out.stride() == x.stride()


def test_it_is_a_well_behaved_operator() -> None:
    query, key, value = draw(128, 256)
    arguments = (query, key, value, THRESHOLDS[:3], None, None, False, None, "own_first", 64, 128)
    torch.library.opcheck(measure, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("thresholds", "tiles", "text"),
    [
        (torch.tensor(0.1), (64, 128), r"thresholds must be float32 \[n\] with 1 to 32 lambdas, got shape \(\)"),
        (torch.rand(33), (64, 128), r"got shape \(33,\)"),
        (torch.rand(0), (64, 128), r"got shape \(0,\)"),
        (torch.rand(3).double(), (64, 128), "threshold must be float32"),
        (torch.rand(3), (0, 128), "tile_q must be at least 1, got 0"),
        (torch.rand(3), (64, -1), "tile_k must be at least 1, got -1"),
    ],
)
def test_wrong_arguments_are_named(thresholds, tiles, text) -> None:
    with pytest.raises(ValueError, match=text):
        measure(*draw(128, 256), thresholds, None, None, False, None, "ascending", *tiles)


HOPPER = Problem("cuda", (9, 0), torch.bfloat16, 128, 128, "none", False, False, "own_first", True)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU where everything is installed and nothing has failed."""
    monkeypatch.setattr(kernels, "_failures", {})
    monkeypatch.setattr(triton, "find_spec", lambda name: object())
    monkeypatch.setattr("skip_attn_compile.build.unavailable", lambda: None)


def measures(problem: Problem, tile: tuple[int, int]) -> str:
    chosen = choose(problem._replace(measured_tile=tile), explicit_call=True)
    assert isinstance(chosen, kernels.Implementation)
    return chosen.name


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_serves_on_a_gpu_is_measured_at_its_tiles(libraries: None, capability: tuple[int, int], head_dim: int) -> None:
    problem = HOPPER._replace(capability=capability, head_dim=head_dim, value_dim=head_dim)
    serving = choose(problem)
    assert isinstance(serving, kernels.Implementation)
    tile = serving.tile_q, serving.tile_k
    assert tile == inspect.signature(calibrate).parameters["tile"].default
    assert measures(problem, tile) != "reference"
    assert measures(problem._replace(tile_order="ascending"), (128, 128)) != "reference", "ModelOpt's"
    assert measures(problem, (32, 64)) == "reference"


def test_the_kernel_that_serves_measures_where_it_can(libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    able = dataclasses.replace(sm90.IMPLEMENTATION, measure=sm90.measure)
    monkeypatch.setattr(kernels, "implementations", lambda: (able, triton.IMPLEMENTATION, reference.IMPLEMENTATION))
    for tile in ((64, 128), (128, 128)):
        assert measures(HOPPER, tile) == "sm90"
        assert measures(HOPPER._replace(aligned=False), tile) == "triton"
    unable = dataclasses.replace(able, measure=None)
    monkeypatch.setattr(kernels, "implementations", lambda: (unable, triton.IMPLEMENTATION, reference.IMPLEMENTATION))
    assert choose(HOPPER) is unable
    assert measures(HOPPER, (64, 128)) == "triton"


def test_the_reference_says_why_it_measures(libraries: None, caplog: pytest.LogCaptureFixture) -> None:
    ops._warn_slow.cache_clear()
    problem = Problem("cuda", (8, 0), torch.bfloat16, 128, 128, "none", False, False, "ascending", True, (32, 64))
    for _ in range(2):
        assert ops.start(problem, "auto", lambda by: None) is reference.IMPLEMENTATION
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("skip-softmax attention runs on the slow reference implementation: sm90 ")
    assert "triton measures tiles of 64 x 128, 128 x 128, not 32 x 64" in said


def test_one_that_fails_to_measure_gives_way_and_still_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("ptxas died")

    monkeypatch.setattr(kernels, "_failures", {})
    broken = dataclasses.replace(reference.IMPLEMENTATION, name="broken", measure=fail)
    monkeypatch.setattr(kernels, "implementations", lambda: (broken, reference.IMPLEMENTATION))
    query, key, value = draw(128, 256)
    for _ in range(2):
        _, counts = measure(query, key, value, THRESHOLDS[-1:], None, None, False, None, "ascending", 64, 128)
    assert len(calls) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "implementation 'broken' could not be started, attention runs on the next one: RuntimeError: ptxas died"
    assert choose(Problem.of(query, key, value, None, False, False, "ascending")) is broken
    assert torch.equal(counts, reference_attention(query, key, value, THRESHOLDS[-1])[2])
