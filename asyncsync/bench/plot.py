"""The picture: throughput by system, and every bar.

save_plot(figures, bars, "results.png")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncsync.bench.figures import Bar, Figure, Figures

__all__ = ["save_plot"]


def save_plot(figures: Sequence[Figure], bars: Sequence[Bar], path: str | Path) -> None:
    """Draw what was measured.

    Args:
        figures: those of the throughput section's largest payload are shown, if there are any.
        bars: may be empty.
        path: of the picture; its suffix says which format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure as Picture

    shown = Figures(figures).of("throughput")
    picture = Picture(figsize=(9, 4 + 0.35 * max(len(bars), 4)), layout="constrained")
    FigureCanvasAgg(picture)
    upper, lower = picture.subplots(2, 1, height_ratios=[8, max(len(bars), 4)])
    _throughput(upper, Figures(figure for figure in shown if figure.case == shown[-1].case))
    _ratios(lower, bars)
    picture.savefig(path, dpi=120)


def _throughput(axes: Any, figures: Figures) -> None:
    if not figures:
        axes.set_title("throughput: not measured")
        axes.set_axis_off()
        return
    systems = list(dict.fromkeys(figure.system for figure in figures))
    height = 0.4
    for number, workers in enumerate((1, 2)):
        found = [figures.find("throughput", figures[0].case, workers, system) for system in systems]
        rows = [(position, figure) for position, figure in enumerate(found) if figure is not None]
        medians = np.array([figure.median for _, figure in rows])
        spread = np.abs(np.array([(figure.lower, figure.upper) for _, figure in rows]).T - medians)
        axes.barh(
            [position + (number - 0.5) * height for position, _ in rows],
            medians,
            height,
            xerr=spread,
            color=["tab:blue", "tab:cyan"][number],
            ecolor="0.3",
            label=f"{workers} receiver{'s'[: workers - 1]}",
        )
    axes.set_yticks(range(len(systems)), systems)
    axes.invert_yaxis()
    axes.set_xlabel("ms, median and quartiles")
    axes.set_title(f"{figures[0].case}: send → applied by all")
    axes.legend(loc="best")
    axes.grid(axis="x", alpha=0.2)


def _ratios(axes: Any, bars: Sequence[Bar]) -> None:
    axes.set_title("bars: measured ÷ allowed" if bars else "bars: not measured")
    if not bars:
        axes.set_axis_off()
        return
    shares = [max(bar.ratio / bar.limit, 0.0) for bar in bars]
    colors = ["tab:green" if bar.reached else "tab:red" for bar in bars]
    drawn = axes.barh(range(len(bars)), shares, 0.6, color=colors)
    axes.bar_label(drawn, [f"{share:.2f}" for share in shares], padding=3, fontsize=8)
    axes.axvline(1.0, color="0.2", linewidth=1)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    axes.set_xlim(0, max(1.2, *(share * 1.1 for share in shares)))
    axes.invert_yaxis()
