"""A picture of rows: each ratio (or value) with its spread, next to what is wanted of it. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.record import Row, number

MET, MISSED, PLAIN = "#009E73", "#D55E00", "#0072B2"
"""Told apart by colour-blind readers too (Okabe & Ito 2008)."""


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write the picture. Ratios to their baselines on the left axis; what stands alone, in parts of what is wanted."""
    from matplotlib.figure import Figure

    compared = [row for row in rows if row.ratio is not None and row.judged == row.ratio and 0 < row.ratio < 1e12]
    alone = [row for row in rows if row not in compared and row.limit[0] and row.judged > 0]
    panels = [panel for panel in ((compared, "ratio to the baseline"), (alone, "part of what is wanted")) if panel[0]]
    if not panels:
        return
    heights = [len(shown) + 1 for shown, _ in panels]
    figure = Figure(figsize=(11, 1.2 + 0.34 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (shown, meaning) in zip(axes, panels, strict=True):
        for place, row in enumerate(reversed(shown)):
            draw_row(axis, place, row, relative=shown is alone)
        axis.set_xscale("log")
        axis.axvline(1, color="0.7", linewidth=1, zorder=0)
        axis.set_yticks(range(len(shown)), [label(row) for row in reversed(shown)], fontsize=8)
        axis.set_xlabel(meaning)
    figure.suptitle(f"{title}: dots measured, bars lowest to highest, ticks wanted", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_row(axis: Any, place: int, row: Row, *, relative: bool) -> None:
    limit = row.limit[0]
    scale = limit if relative and limit else 1.0
    colour = PLAIN if row.met is None else MET if row.met else MISSED
    if row.spread is not None and min(row.spread) > 0 and (relative or row.judged == row.ratio):
        axis.plot([end / scale for end in row.spread], [place, place], color=colour, linewidth=2, alpha=0.5)
    axis.plot([row.judged / scale], [place], "o", color=colour, markersize=5)
    if limit is not None:
        arrow = "<" if (row.wanted or "").startswith("≤") else ">"
        axis.plot([limit / scale], [place], "|", color=colour, markersize=14)
        axis.plot([limit / scale], [place], arrow, color=colour, markersize=4)


def label(row: Row) -> str:
    text = row.measured if len(row.measured) <= 70 else row.measured[:69] + "…"
    return f"{text}\n{number(row.value)} {row.unit}" + (f" / {row.baseline}" if row.baseline else "")
