"""The picture at the end: return and version lag over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncsync.demo.record import EPISODES, Record


def save_plot(record: Record, path: str | Path) -> None:
    """Draw a record.

    Args:
        record: with at least one episode.
        path: of the picture; its suffix says which format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])

    seconds, returns = np.array(record.episodes).T
    upper.scatter(seconds, returns, s=5, alpha=0.25, linewidths=0, color="tab:blue", label="episode")
    upper.plot(seconds, _running_mean(returns, EPISODES), color="tab:blue", label=f"mean of {EPISODES} episodes")
    upper.axhline(record.target, color="tab:green", linestyle="--", linewidth=1, label=f"target {record.target:g}")
    upper.set_ylabel("episode return")
    upper.set_title(f"PPO on CartPole-v1, {record.workers} workers: {record.phase}, {record.versions} versions")
    for handle in upper.legend(loc="lower right").legend_handles:
        handle.set_alpha(1)

    for worker in range(record.workers):
        points = [(at, lag) for at, index, lag in record.lags if index == worker]
        if points:
            at, lags = np.array(points).T
            lower.plot(at, lags, marker=".", markersize=4, linewidth=0.8, label=f"worker {worker}")
    lower.set_ylabel("version lag of the data")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("seconds since the start")
    lower.legend(loc="lower right")
    for axes in (upper, lower):
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def _running_mean(values: np.ndarray, count: int) -> np.ndarray:
    total = np.concatenate([[0.0], np.cumsum(values, dtype=float)])
    upto = np.arange(1, len(values) + 1)
    start = np.maximum(upto - count, 0)
    mean: np.ndarray = (total[upto] - total[start]) / (upto - start)
    return mean
