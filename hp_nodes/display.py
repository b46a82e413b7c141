"""What windows, plans and reports look like in a notebook: tables, and pictures of bins over ranks and rounds.

Takes the values of :mod:`hp_nodes.types`, gives HTML with SVG inside, made of text alone: nothing is imported for it,
and nothing is loaded by it. Colours are readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.types import BalanceReport, MicroBatch, PackingPlan, PlanReport, Window

__all__ = [
    "aligned",
    "html_table",
    "micro_batch_html",
    "one_line",
    "plan_html",
    "plan_report_html",
    "report_html",
    "window_html",
]

# Okabe and Ito's eight colours, which people with any colour vision tell apart; black is left to lines.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_SHOWN_RANKS = 32
_SHOWN_SAMPLES = 20
_TITLE_WIDTH = 260
_SVG_STYLE = "font-family:sans-serif;font-size:11px;color:inherit"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text: the first two columns to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), *(line(row) for row in rows)])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", note: str = "") -> str:
    """A table of escaped texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<div>{escape(caption)}</div>" if caption else ""
    below = f"<div>{escape(note)}</div>" if note else ""
    return f"<div>{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"


def one_line(value: Window | MicroBatch | PackingPlan | PlanReport | BalanceReport) -> str:
    """A value in one line, whatever is in it."""
    if isinstance(value, Window):
        return f"{_window_title(value)}; {len(value.keys)} samples; filled: {_filled(value)}"
    if isinstance(value, MicroBatch):
        return f"{_micro_batch_title(value)}; {value.num_tokens} tokens"
    if isinstance(value, PackingPlan):
        return f"{_plan_title(value)}; {one_line(value.report)}"
    if isinstance(value, BalanceReport):
        return f"{one_line(value.plan)}; {value.samples_sent} samples sent, {value.samples_received} received"
    before = "" if value.before is None else f"{value.before:.5g} → "
    kept = "" if value.accepted else ", reference kept"
    return f"{value.objective} {before}{value.after:.5g} (bound {value.lower_bound:.5g}{kept})"


def _window_title(window: Window) -> str:
    rounds = f"round {window.first_round}"
    if window.num_rounds > 1:
        rounds += f" to {window.first_round + window.num_rounds - 1}"
    ends = "ends the epoch" if window.ends_epoch else "ends the step" if window.ends_step else "within the step"
    return f"Window: epoch {window.epoch}, step {window.step}, {rounds}, {ends}"


def _filled(window: Window) -> str:
    fields = ("keys", "reference", "samples", "metadata", "costs", "plan", "assignment", "bins", "packed", "report")
    return " ".join(name for name in fields if getattr(window, name) is not None)


def _plan_title(plan: PackingPlan) -> str:
    ranks, rounds = plan.report.costs_after.shape
    slots = len(plan.oversized) // (ranks * rounds)
    return f"PackingPlan: {len(plan.bins)} samples in {ranks} ranks × {rounds} rounds × {slots} bins"


def _micro_batch_title(batch: MicroBatch) -> str:
    title = f"MicroBatch: epoch {batch.epoch}, step {batch.step}, round {batch.round}"
    ends = [name for name in ("window", "step", "epoch") if getattr(batch, f"ends_{name}")]
    return f"{title}, ends the {' and the '.join(ends)}" if ends else title


def window_html(window: Window) -> str:
    """What is known of a window so far: its place, its samples, this rank's bins, and the plan over all ranks."""
    parts = [f"<b>{escape(_window_title(window))}</b>", f"<div>filled: {_filled(window)}</div>"]
    parts.append(_bins_picture(window))
    if window.plan is not None:
        parts.append(plan_html(window.plan))
    parts.append(_folded(f"{len(window.keys)} samples of this rank", _samples_table(window)))
    return f"<div>{''.join(parts)}</div>"


def plan_html(plan: PackingPlan) -> str:
    """How many samples go into how many bins, and the plan's report."""
    return f"<div><b>{escape(_plan_title(plan))}</b>{plan_report_html(plan.report)}</div>"


def plan_report_html(report: PlanReport) -> str:
    """The figures of a plan, and the work of every rank in every round, before and after."""
    before = report.costs_before
    rows = [
        (f"{report.objective}, before", "" if report.before is None else f"{report.before:.5g}"),
        (f"{report.objective}, after", f"{report.after:.5g}"),
        ("lower bound", f"{report.lower_bound:.5g}"),
        ("gain", "" if report.gain is None else f"{report.gain:.1%}{'' if report.accepted else ' (not used)'}"),
        ("padding", f"{report.padding} tokens"),
        ("planned in", f"{1e3 * report.seconds:.1f} ms"),
    ]
    if report.note:
        rows.append(("limited by", report.note))
    scale = float(max(report.costs_after.max(), 0.0 if before is None else before.max())) or 1.0
    pictures = [] if before is None else [loads_picture(before, "before", scale)]
    pictures.append(loads_picture(report.costs_after, "after", scale))
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:flex-start">'
        f"{html_table(('', ''), rows)}{''.join(pictures)}</div>"
    )


def report_html(report: BalanceReport) -> str:
    """The plan's report, and what this rank sent and received."""
    moved = (
        f"this rank sent {report.samples_sent} samples ({report.bytes_sent} B) and received "
        f"{report.samples_received} ({report.bytes_received} B); skipped {report.skipped}, dropped {report.dropped}"
    )
    return f"<div>{plan_report_html(report.plan)}<div>{escape(moved)}</div></div>"


def micro_batch_html(batch: MicroBatch) -> str:
    """Where a micro-batch stands, and the shapes of what is in it."""
    data = batch.data if isinstance(batch.data, dict) else {"data": batch.data}
    rows = [(str(name), _summary(value)) for name, value in data.items()]
    rows.append(("tokens without padding", str(batch.num_tokens)))
    positions = "on the constructor only" if batch.positions is None else ", ".join(map(str, batch.positions))
    rows.append(("positions of its records", positions))
    report = "" if batch.report is None else _folded("balance report", report_html(batch.report))
    return f"<div><b>{escape(_micro_batch_title(batch))}</b>{html_table(('field', 'value'), rows)}{report}</div>"


# ---- pictures


def loads_picture(costs: NDArray[np.float64], title: str, scale: float) -> str:
    """A bar for each rank in each round; the line across a round is its slowest rank, for which all others wait."""
    ranks, rounds = min(costs.shape[0], _SHOWN_RANKS), costs.shape[1]
    height, bar = 12, 90
    left, top = 46, 32
    parts = [_text(0, 11, f"{title}: work of each rank in each round", bold=True)]
    for column in range(rounds):
        x = left + column * (bar + 12)
        parts.append(_text(x, 26, f"round {column}"))
        slowest = bar * float(costs[:, column].max()) / scale
        for rank in range(ranks):
            width = bar * float(costs[rank, column]) / scale
            says = f"rank {rank}, round {column}: {costs[rank, column]:.5g}"
            parts.append(_rect(x, top + rank * height, width, height - 2, COLOURS[0], says))
        parts.append(_line(x + slowest, top - 2, top + ranks * height))
    parts += [_text(0, top + rank * height + 9, f"rank {rank}") for rank in range(ranks)]
    bottom = top + ranks * height
    if len(costs) > ranks:
        parts.append(_text(0, bottom + 12, f"and {len(costs) - ranks} more ranks"))
        bottom += 14
    return _svg(max(left + rounds * (bar + 12), _TITLE_WIDTH), bottom + 4, parts)


def _bins_picture(window: Window) -> str:
    """This rank's bins, one line each: its samples as wide as their tokens, coloured by the rank they come from."""
    share = window.assignment
    if share is not None:
        bins, tokens, origins = share.bins, share.tokens, share.origins
        title, legend = "bins of this rank, as planned", True
    elif window.reference is not None and window.tokens is not None:
        bins, tokens, origins = window.reference, window.tokens, np.zeros(len(window.keys), np.int32)
        title, legend = "bins of this rank, as sampled", False
    else:
        return ""
    if not len(bins):
        return ""
    numbers = np.unique(bins)
    slots = -(-int(bins.max() + 1) // window.num_rounds)
    longest = max(int(tokens[bins == number].sum()) for number in numbers)
    left, top, height, width = 92, 18, 14, 420
    parts = [_text(0, 11, title, bold=True)]
    for row, number in enumerate(numbers.tolist()):
        y = top + row * height
        parts.append(_text(0, y + 10, f"round {window.first_round + number // slots}, bin {number % slots}"))
        x = float(left)
        for place in np.flatnonzero(bins == number).tolist():
            wide = width * int(tokens[place]) / longest
            says = f"{tokens[place]} tokens" + (f", from rank {origins[place]}" if legend else "")
            parts.append(_rect(x, y, max(wide - 1, 0.5), height - 2, COLOURS[origins[place] % len(COLOURS)], says))
            x += wide
    bottom = top + len(numbers) * height
    if legend:
        shown = np.unique(origins).tolist()[: len(COLOURS)]
        for place, rank in enumerate(shown):
            x, y = left + place % 4 * 96, bottom + 4 + place // 4 * 16
            parts.append(_rect(x, y, 10, 10, COLOURS[rank % len(COLOURS)], ""))
            parts.append(_text(x + 14, y + 9, f"from rank {rank}"))
        bottom += 2 + 16 * -(-len(shown) // 4)
    return _svg(left + width, bottom + 2, parts)


def _samples_table(window: Window) -> str:
    columns: list[tuple[str, Callable[[int], str]]] = [
        ("position", lambda place: str(window.keys[place].position)),
        ("index", lambda place: str(window.keys[place].index)),
        ("part", lambda place: str(window.keys[place].part)),
    ]
    for name in ("tokens", "costs", "reference", "bins"):
        values = getattr(window, name)
        if values is not None and len(values) == len(window.keys):
            columns.append((name, lambda place, values=values: f"{values[place]:g}"))  # type: ignore[misc]
    samples = window.samples
    if samples is not None:
        columns.append(("sample", lambda place: _summary(samples[place])))
    shown = range(min(len(window.keys), _SHOWN_SAMPLES))
    rows = [tuple(tell(place) for _, tell in columns) for place in shown]
    note = f"and {len(window.keys) - len(shown)} more" if len(window.keys) > len(shown) else ""
    return html_table([name for name, _ in columns], rows, note=note)


def _summary(value: Any) -> str:
    """A value in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} {str(getattr(value, 'dtype', '')).removeprefix('torch.')} {list(shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_summary(item)}" for name, item in list(value.items())[:4]) + "}"
    text = repr(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" style="{_SVG_STYLE}">{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, says: str) -> str:
    title = f"<title>{escape(says)}</title>" if says else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{title}</rect>'


def _line(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#D55E00" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor"{weight}>{escape(text)}</text>'
