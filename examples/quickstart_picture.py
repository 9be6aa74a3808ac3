"""The picture of the quickstart: frames dense / skip / |difference|, and the skipped share, block by step."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

FRAMES_SHOWN = 8
Array = npt.NDArray[np.float64]


def draw(path: Path, title: str, dense: Array, skip: Array, sites: list[str], share: Array) -> None:
    """Write the picture to `path`.

    dense, skip: videos [frames, height, width, 3] in [0, 1]; at most FRAMES_SHOWN frames, evenly spaced, are shown.
    sites, share: names, and the skipped share [site, step] in [0, 1] of the visited tiles (NaN: the site visited none).
    """
    chosen = np.unique(np.linspace(0, len(dense) - 1, min(FRAMES_SHOWN, len(dense))).round().astype(int))
    figure = plt.figure(figsize=(13, 9.2), facecolor="white")
    # Columns: one per frame, and a narrow one for the colour bars.
    grid = GridSpec(
        4, len(chosen) + 1, figure, width_ratios=[1] * len(chosen) + [0.14], height_ratios=[1, 1, 1, 2.5],
        left=0.085, right=0.935, top=0.915, bottom=0.065, wspace=0.04, hspace=0.06,
    )  # fmt: skip
    figure.suptitle(title, x=0.085, y=0.975, ha="left", fontsize=13)
    _frame_rows(figure, grid, chosen, dense, skip)
    # Its own grid, so that the heat map stands clear of the frames.
    lower = grid[3, :].subgridspec(2, 2, height_ratios=[0.08, 1], width_ratios=[len(chosen) + 0.04 * len(chosen), 0.14], wspace=0.03)
    axes = figure.add_subplot(lower[1, 0])
    if share.size:
        _heat_map(figure, axes, figure.add_subplot(lower[1, 1]), sites, share)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no attention was made sparse: the report says why", ha="center", va="center", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _frame_rows(figure: Figure, grid: GridSpec, chosen: npt.NDArray[np.int_], dense: Array, skip: Array) -> None:
    difference = np.abs(dense - skip).mean(-1)
    top = max(0.05, float(np.ceil(difference[chosen].max() * 20) / 20))
    shown = None
    for row, label in enumerate(("dense", "skip", "|difference|")):
        for column, frame in enumerate(chosen):
            axes = figure.add_subplot(grid[row, column])
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(False)
            if row < 2:
                axes.imshow((dense, skip)[row][frame], interpolation="nearest")
            else:
                shown = axes.imshow(difference[frame], cmap="magma", vmin=0, vmax=top, interpolation="nearest")
            if row == 0:
                axes.set_title(f"frame {frame}", fontsize=9, color="0.35", pad=4)
            if column == 0:
                axes.set_ylabel(label, fontsize=11)
    assert shown is not None
    bar = figure.colorbar(shown, cax=figure.add_subplot(grid[2, len(chosen)]))
    bar.set_label("mean of R, G, B;\n1 = full range", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _heat_map(figure: Figure, axes: Axes, bar_axes: Axes, sites: list[str], share: Array) -> None:
    top = max(10.0, float(np.ceil(np.nanmax(share) * 10) * 10))
    image = axes.imshow(share * 100, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    steps = share.shape[1]
    axes.set_title("Skipped share of the visited key tiles, in %, block by step", fontsize=11, loc="left", pad=8)
    axes.set_xlabel("sampling step (noise on the left, video on the right)")
    every = max(1, steps // 20)
    axes.set_xticks(range(0, steps, every), [str(step + 1) for step in range(0, steps, every)])
    axes.set_yticks(range(len(sites)), sites, fontsize=9)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if steps <= 25:
        for (row, column), value in np.ndenumerate(share * 100):
            color = "black" if value > 0.6 * top else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    bar = figure.colorbar(image, cax=bar_axes)
    bar.set_label("% skipped", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
