"""From measured shares to a calibration curve, and how far it can be trusted. Pure: numbers in, numbers out."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from skip_attn_compile.config import Calibration

SHARES = (0.02, 0.95)  # of the points that are fitted: outside, a tile more or less moves a share by more than lambda does
FEWEST_POINTS = 5
NEAR = 0.05  # how far from the target a share may lie to count for a curve that is to hold there: one standard deviation of the weights


@dataclass(frozen=True)
class MeasuredCurve:
    """The share of tiles that each lambda would skip at kv_len keys, mean over layers and steps. thresholds and shares ascend."""

    kv_len: int
    thresholds: tuple[float, ...]
    shares: tuple[float, ...]

    def share_at(self, threshold: float) -> float:
        """The share that lambda `threshold` would skip: linear in ln(lambda) between what was measured, the ends beyond."""
        if threshold <= self.thresholds[0]:
            return self.shares[0] if threshold == self.thresholds[0] else 0.0
        if threshold >= self.thresholds[-1]:
            return self.shares[-1]
        n = bisect_left(self.thresholds, threshold)
        low, high = math.log(self.thresholds[n - 1]), math.log(self.thresholds[n])
        weight = (math.log(threshold) - low) / (high - low)
        return self.shares[n - 1] + weight * (self.shares[n] - self.shares[n - 1])


@dataclass(frozen=True)
class Fit:
    """A fitted curve and its quality.

    r2: share of the points' variance that the curve explains. residuals: measured minus expected share, for each point.
    points: how many. reach: the largest share that lambda = 1 skips at every length measured.
    """

    calibration: Calibration
    r2: float
    residuals: tuple[float, ...]
    points: int
    reach: float

    def deviation(self, curve: MeasuredCurve, target: float) -> float:
        """Achieved minus asked share on `curve`, if `target` is asked for at its length."""
        return curve.share_at(min(self.calibration.threshold_at(target, curve.kv_len), 1.0)) - target

    def __str__(self) -> str:
        c = self.calibration
        low, high = c.sparsity_range or (math.nan, math.nan)
        lengths = ", ".join(f"{n:,}" for n in c.kv_lens)
        return (
            f"lambda = {c.a:.6g} * exp({c.b:.4g} * s) / L from {self.points} points, R2 {self.r2:.4f}, largest residual"
            f" {max(map(abs, self.residuals)):.1%}; holds for s = {low:.0%} ... {high:.0%} at L = {lengths}"
        )


def fit_curves(curves: Sequence[MeasuredCurve], *, tile: tuple[int, int], tile_order: str, target: float | None = None) -> Fit:
    """The a and b of lambda = a * exp(b * s) / L that expect the measured shares best; with `target`, those near it.

    In log space: s = (ln(lambda * L) - ln a) / b, least squares in s, which is what a user asks for (ModelOpt regresses ln(lambda * L)
    on s; the curves agree where the law holds). Points with shares outside 2 to 95 % are left out. No model follows the law over its whole
    range: on the trained tiny_wan one curve for all shares misses by up to 11 points, one that is fitted near its target by up to 1.2
    (by 4 with weights twice as wide).
    ValueError where the points cannot carry a curve; the message says what to collect.
    """
    points = [
        (math.log(threshold * curve.kv_len), share)
        for curve in curves
        for threshold, share in zip(curve.thresholds, curve.shares, strict=True)
        if SHARES[0] <= share <= SHARES[1] and threshold > 0
    ]
    if len(points) < FEWEST_POINTS:
        raise ValueError(_too_few(curves, len(points)))
    weights = [1.0 if target is None else math.exp(-(((s - target) / NEAR) ** 2) / 2) for _, s in points]
    mean = lambda values: math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
    x0, s0 = mean([x for x, _ in points]), mean([s for _, s in points])
    covariance = mean([(x - x0) * (s - s0) for x, s in points])
    variance_x, variance_s = mean([(x - x0) ** 2 for x, _ in points]), mean([(s - s0) ** 2 for _, s in points])
    if variance_x <= 0 or variance_s <= 0 or covariance <= 0:
        raise ValueError(
            f"calibration needs shares that grow with lambda, got {len(points)} points whose shares do not"
            f" ({min(s for _, s in points):.1%} to {max(s for _, s in points):.1%}); collect calls with real inputs, at several lambdas"
        )
    b = variance_x / covariance
    a = math.exp(x0 - b * s0)
    residuals = [s - (x - math.log(a)) / b for x, s in points]
    far = [0.0 if target is None else abs(s - target) for _, s in points]
    within = max(2 * NEAR, sorted(far)[2])  # where points are sparse, the three nearest carry the curve
    near = [n for n, distance in enumerate(far) if distance <= within]
    shares = [points[n][1] for n in near]
    calibration = Calibration(
        a,
        b,
        tile=tile,
        tile_order=tile_order,
        sparsity_range=(min(shares), max(shares)),
        kv_lens=tuple(sorted({curve.kv_len for curve in curves})),
    )
    reach = min(curve.share_at(1.0) for curve in curves)
    r2 = 1 - mean([r * r for r in residuals]) / variance_s
    return Fit(calibration, r2, tuple(residuals[n] for n in near), len(near), reach)


def _too_few(curves: Sequence[MeasuredCurve], found: int) -> str:
    shares = [share for curve in curves for share in curve.shares]
    seen = f"{min(shares):.1%} to {max(shares):.1%}" if shares else "none"
    if shares and max(shares) < SHARES[0]:
        remedy = (
            "even lambda = 1 skips next to nothing: calibrate at longer sequences, with tile_order='own_first', or leave this model dense"
        )
    elif shares and min(shares) > SHARES[1]:
        remedy = "every lambda skips nearly all: add smaller thresholds"
    else:
        remedy = "give more thresholds between those measured, or more calls"
    needed = f"at least {FEWEST_POINTS} points with shares of {SHARES[0]:.0%} to {SHARES[1]:.0%}"
    return f"calibration needs {needed}, got {found} (shares {seen}); {remedy}"
