"""A picture of a measurement: for each component the points, the curve and where it holds, and the shares by layer and step.

Needs matplotlib, which the extra `cli` brings.
"""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from skip_attn_compile.files import check_writable
from skip_attn_compile.fit import Fit
from skip_attn_compile.measurement import Measurement
from skip_attn_compile.timestep import is_dense


def draw(measurement: Measurement, path: str | os.PathLike[str], target_sparsity: float | None = None, cutoff: float = 0.0) -> None:
    """Write the picture at `target_sparsity` under a gate at `cutoff`; without a target, at half of what can be reached."""
    check_picture(path)
    figure(measurement, target_sparsity, cutoff).savefig(path, dpi=120)


def check_picture(path: str | os.PathLike[str]) -> None:
    """ValueError where no picture can be drawn into `path`."""
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise ValueError(f"picture must end in one of .{', .'.join(kinds)}, got {str(path)!r}; write {Path(path).stem}.png")
    check_writable("picture", Path(path))


def figure(measurement: Measurement, target_sparsity: float | None = None, cutoff: float = 0.0) -> Figure:
    """Two panels in a row for each component. ValueError where the measurement cannot carry a curve."""
    components = measurement.components
    tall = max((len(measurement.layers(component)) for component in components), default=1)
    page = Figure(figsize=(13, len(components) * max(4.0, 1.5 + 0.2 * tall)), layout="constrained")
    for row, component in enumerate(components):
        cutoff_left = measurement.cutoff_left(component, cutoff)
        reach = measurement.fit(component, cutoff=cutoff_left).reach
        target = reach / 2 if target_sparsity is None else target_sparsity
        fitted = measurement.fit(component, target=target, cutoff=cutoff_left)
        left, right = (page.add_subplot(len(components), 2, 2 * row + column) for column in (1, 2))
        _draw_curve(left, measurement, component, fitted, target, cutoff_left)
        _draw_layers(right, measurement, component, fitted, target, cutoff)
    return page


def _draw_curve(axes: Axes, measurement: Measurement, component: str, fitted: Fit, target: float, cutoff: float) -> None:
    """The skipped share against lambda * L, which is where one curve serves all lengths."""
    for held_out in (False, True):
        for number, points in enumerate(measurement.curves(component, cutoff=cutoff, held_out=held_out)):
            label = f"{points.kv_len:,} keys{', held out' * held_out}"
            style: dict[str, Any] = {"color": f"C{number % 10}", "markerfacecolor": "none" if held_out else None, "label": label}
            axes.semilogx([t * points.kv_len for t in points.thresholds], [100 * s for s in points.shares], "o", ms=4, **style)
    curve = fitted.calibration
    low, high = curve.sparsity_range or (0.0, 1.0)
    axes.axhspan(100 * low, 100 * high, color="0.93", zorder=0, label="where the curve holds")
    shares = np.linspace(0, min(1.0, fitted.reach + 0.05), 100)
    inside = (shares >= low) & (shares <= high)
    factors = np.array([curve.scale_factor(share) for share in shares])
    axes.semilogx(factors, 100 * shares, "k:", lw=1)
    axes.semilogx(factors[inside], 100 * shares[inside], "k-", lw=2, label=f"{curve.a:.4g} exp({curve.b:.3g} s), R2 {fitted.r2:.3f}")
    axes.plot(curve.scale_factor(target), 100 * target, "r*", ms=13, label=f"target {target:.0%}")
    axes.set(title=component or "model", xlabel="lambda x number of keys", ylabel="skipped share of the tiles, %")
    axes.legend(fontsize=8, loc="upper left")


def _draw_layers(axes: Axes, measurement: Measurement, component: str, fitted: Fit, target: float, cutoff: float) -> None:
    """The skipped share at the target, layers down, noise on the left; steps that the gate keeps dense are hatched."""
    shares = measurement.shares(component, fitted.calibration, target)
    layers = measurement.layers(component)
    levels = sorted({t for _, t in shares}, key=lambda t: math.inf if t is None else -t)
    image = np.array([[100 * shares.get((layer, t), math.nan) for t in levels] for layer in layers])
    shown = axes.imshow(image, aspect="auto", cmap="viridis", vmin=0, vmax=max(10.0, float(np.nanmax(image))), interpolation="nearest")
    dense = sum(t is not None and bool(is_dense(t, cutoff)) for t in levels)
    if dense:
        axes.axvspan(-0.5, dense - 0.5, facecolor="none", edgecolor="white", hatch="//", label="dense by the gate")
    every = max(1, len(levels) // 12)
    names = ["?" if t is None else f"{t:.2f}" for t in levels]
    axes.set_xticks(range(0, len(levels), every), names[::every], fontsize=8)
    axes.set_yticks(range(len(layers)), layers, fontsize=max(4, min(9, 320 // max(1, len(layers)))))
    axes.set(title=f"skipped at the target {target:.0%}, by layer and step, %", xlabel="noise level t")
    axes.figure.colorbar(shown, ax=axes)
