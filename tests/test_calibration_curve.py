"""The curve from a target sparsity to lambda, its inverse, and what it refuses."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skip_attn_compile import Calibration

WAN = Calibration(a=2822.6209952221557, b=4.388250623520793)  # nvidia/Wan2.2-T2V-A14B-Diffusers-FP8, transformer


@pytest.mark.parametrize(
    ("target", "kv_len", "threshold"),
    [(0.7, 75600, 0.806), (0.75, 75600, 1.003), (0.7, 32760, 1.86), (0.7, 512, 119.0), (0.5, 75600, 0.335)],
)
def test_real_numbers(target, kv_len, threshold) -> None:
    assert WAN.threshold_at(target, kv_len) == pytest.approx(threshold, rel=2e-3)
    assert WAN.threshold_at(target, kv_len) == WAN.scale_factor(target) / kv_len


def test_at_zero_the_factor_is_a() -> None:
    assert WAN.scale_factor(0) == WAN.a


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.floats(1e-3, 1e6), st.floats(-20, 20).filter(lambda b: abs(b) > 1e-3), st.floats(0, 1), st.integers(1, 10**7))
def test_inverse(a, b, target, kv_len) -> None:
    curve = Calibration(a, b)
    threshold = curve.threshold_at(target, kv_len)
    back = curve.sparsity_at(threshold, kv_len)
    assert 0 <= back <= 1
    if threshold <= 1:  # lambda acts as 1 above, so the target is out of reach there
        assert back == pytest.approx(target, abs=1e-9)


@pytest.mark.parametrize(
    ("threshold", "kv_len", "sparsity"),
    [(0.806, 75600, 0.7), (0.0, 75600, 0.0), (1.0, 75600, 0.749), (5.0, 75600, 0.749), (1.0, 512, 0.0), (1e-300, 75600, 0.0)],
)
def test_inverse_at_the_edges(threshold, kv_len, sparsity) -> None:
    assert WAN.sparsity_at(threshold, kv_len) == pytest.approx(sparsity, abs=1e-3)


EXTREME = [Calibration(1e300, 1e-5), Calibration(1e-300, -1e300), Calibration(5e-324, 1e300), Calibration(1, 5e-324), Calibration(1, 0)]


@pytest.mark.parametrize("curve", EXTREME, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 1e-6, 0.5, 1.0])
def test_extreme_curves_stay_within_their_range(curve, threshold) -> None:
    assert 0 <= curve.sparsity_at(threshold, 1) <= 1
    assert curve.scale_factor(1.0) >= 0


def test_a_quotient_below_a_float() -> None:
    assert Calibration(1e300, 1.0).sparsity_at(5e-324, 1) == 0.0


def test_a_factor_beyond_a_float_is_infinite() -> None:
    assert Calibration(1, 1e6).scale_factor(1) == math.inf
    assert Calibration(1, 1e6).threshold_at(1, 75600) == math.inf


NO_NUMBERS = [None, "2822", True, [1], 1j, math.nan, math.inf, -math.inf, 10**400, torch.tensor(1.0), np.float64("nan")]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: repr(v)[:20])
def test_coefficients_must_be_finite_numbers(value) -> None:
    with pytest.raises(ValueError, match="a must be a finite number, got "):
        Calibration(a=value, b=1)
    with pytest.raises(ValueError, match="b must be a finite number, got "):
        Calibration(a=1, b=value)


@pytest.mark.parametrize("a", [0, -0.0, -1, -1e-300])
def test_a_must_be_positive(a) -> None:
    with pytest.raises(ValueError, match="a must be a finite number > 0, got "):
        Calibration(a, 1)


@pytest.mark.parametrize("arguments", [(), (1,)])
def test_both_coefficients_are_needed(arguments) -> None:
    with pytest.raises(ValueError, match="must be a finite number, got nan"):
        Calibration(*arguments)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"tile": 128}, "tile must be integers > 0, got 128"),
        ({"tile": (64,)}, "tile must be 2 integers > 0"),
        ({"tile": (64, 128, 1)}, "tile must be 2 integers > 0"),
        ({"tile": (64, 0)}, "tile must be integers > 0"),
        ({"tile": (64.0, 128)}, "tile must be integers > 0"),
        ({"tile": "64x128"}, "tile must be integers > 0, got '64x128'"),
        ({"tile_order": "descending"}, "tile_order must be one of ascending, own_first, or None, got 'descending'"),
        ({"sparsity_range": 0.5}, "sparsity_range must be two numbers"),
        ({"sparsity_range": (0.9, 0.1)}, "sparsity_range must be two numbers"),
        ({"sparsity_range": (0, 1.1)}, "sparsity_range must be two numbers"),
        ({"sparsity_range": (math.nan, 1)}, "sparsity_range must be two numbers"),
        ({"kv_lens": 4096}, "kv_lens must be integers > 0, got 4096"),
        ({"kv_lens": (-1,)}, "kv_lens must be integers > 0"),
        ({"tiles": (64, 128)}, "did you mean tile"),
    ],
    ids=repr,
)
def test_wrong_facts_are_named(facts, text) -> None:
    with pytest.raises(ValueError, match=text):
        Calibration(1, 1, **facts)


def test_facts_are_kept_as_tuples() -> None:
    curve = Calibration(1, 2, tile=[64, 128], tile_order="own_first", sparsity_range=[0, 1], kv_lens=[1, 2])
    assert curve == Calibration(1.0, 2.0, tile=(64, 128), tile_order="own_first", sparsity_range=(0.0, 1.0), kv_lens=(1, 2))
    assert hash(pickle.loads(pickle.dumps(curve))) == hash(curve)
    with pytest.raises(dataclasses.FrozenInstanceError):
        curve.a = 2
