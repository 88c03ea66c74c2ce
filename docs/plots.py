"""Plots of measured figures as SVG, docs/figures/*.svg: curves of accuracy, and bars of cost by layer.

They are drawn on white, so that they read alike on a light and on a dark page; colours are told apart by the blind to
colour (Okabe and Ito), and each curve has its name at its end or in the legend.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from figures import text
from measured import RESULTS
from measured_capc import series
from measured_capride import SPLITS, curves

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
HEIGHT = 230


@dataclass
class Panel:
    """One pair of axes: curves by name, each of (x, y) or (x, y, spread)."""

    title: str
    x: str
    y: str
    curves: dict[str, Sequence[tuple[float, ...]]]
    ticks: Sequence[float]
    levels: Sequence[float]
    scale: Callable[[float], float] = field(default=float)


def panels(title: str, shown: Sequence[Panel], width: int = 260) -> str:
    """Panels side by side over one legend."""
    whole, parts = width * len(shown), []
    names = list(dict.fromkeys(name for panel in shown for name in panel.curves))
    for k, panel in enumerate(shown):
        left, right, top, bottom = k * width + 46, (k + 1) * width - 14, 56, HEIGHT - 36
        xs = [panel.scale(x) for x in panel.ticks]
        at = lambda x, left=left, right=right, xs=xs, panel=panel: (
            left + (right - left) * (panel.scale(x) - xs[0]) / (xs[-1] - xs[0])
        )
        up = lambda y, top=top, bottom=bottom, panel=panel: (
            bottom - (bottom - top) * (y - panel.levels[0]) / (panel.levels[-1] - panel.levels[0])
        )
        parts.append(text((left + right) / 2, 44, panel.title, font_weight="bold"))
        parts.append(text((left + right) / 2, HEIGHT - 6, panel.x))
        parts.append(text(left - 4, 44, panel.y, text_anchor="end", font_size="11"))
        for y in panel.levels:
            parts.append(f'<path d="M{left} {up(y):.1f}H{right}" class="grid"/>')
            parts.append(text(left - 6, round(up(y) + 4, 1), f"{y:g}", text_anchor="end", font_size="11"))
        parts += [text(round(at(x), 1), bottom + 16, f"{x:g}", font_size="11") for x in panel.ticks]
        for name, points in panel.curves.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            line = "L".join(f"{at(x):.1f} {up(y):.1f}" for x, y, *_ in points)
            parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for x, y, *spread in points if len(points) < 15 else ():
                parts.append(f'<circle cx="{at(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>')
                for s in spread:
                    ends = f"M{at(x):.1f} {up(y - s):.1f}V{up(y + s):.1f}"
                    parts.append(f'<path d="{ends}" stroke="{colour}" stroke-width="1"/>')
    bottom, x = HEIGHT, 20.0
    if len(names) > 1:
        bottom += 22
        for k, name in enumerate(names):
            parts.append(f'<path d="M{x:.0f} {HEIGHT + 8}h18" stroke="{COLOURS[k % len(COLOURS)]}" stroke-width="3"/>')
            parts.append(text(round(x + 24), HEIGHT + 12, name, text_anchor="start"))
            x += 44 + 7.2 * len(name)
    return framed(title, whole, bottom, parts)


def framed(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """The parts under a title, on white."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" '
        'font-size="12" text-anchor="middle" fill="#212121">',
        f"<title>{title}</title><style>.grid{{stroke:#e0e0e0}}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(width / 2, 20, title, font_weight="bold", font_size="14"),
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def capc_gains() -> str:
    """CaPC, Figures 4 and 11."""
    gained, votes = series()
    by_parties = [(count, statistics.mean(values), statistics.stdev(values)) for count, values in gained]
    by_noise = [(max(sigma, 0.5), share) for sigma, share in votes]
    return panels("CaPC on digits", [
        Panel("gain at one noise", "parties", "points", {"": by_parties}, range(20, 101, 20), range(0, 26, 5)),
        Panel("vote of 50 models", "sigma, in votes (left: none)", "%", {"": by_noise}, (0.5, 1, 2, 4, 7, 15, 40, 100),
              (0, 20, 40, 60, 80, 100), math.log),
    ], 320)  # fmt: skip


def capride_rounds() -> str:
    """CaPriDe, Figure 2."""
    names = {"local": "local", "head": "head", "forward": "forward", "default": "default",
             "dml": "DML", "fedavg": "FedAvg"}  # fmt: skip
    levels = {"homogeneous": (80, 85, 90, 95, 100), "heterogeneous": (80, 85, 90, 95, 100),
              "no-overlap": (40, 55, 70, 85, 100)}  # fmt: skip
    return panels("CaPriDe on digits, two parties: accuracy after each round", [
        Panel(split, "round", "%", {said: list(enumerate(curves(split, name))) for name, said in names.items()},
              (0, 5, 10, 15, 20), levels[split])
        for split in SPLITS
    ])  # fmt: skip


LAYERS = {
    "resnet50": "ResNet-50, 224 x 224",
    "bert-base": "BERT-base, 128 tokens: sums over twelve layers, of which one was measured",
}


def layers() -> str:
    """What each part of two models costs: share of the processor's seconds, megabytes ahead and online, rounds."""
    rows = json.loads((RESULTS / "layers.json").read_text(encoding="utf-8"))["rows"]
    columns = {"share of seconds, %": 150, "MB, ahead and online": 330, "rounds": 510}
    parts, y = [text(x, 44, said, text_anchor="start") for said, x in columns.items()], 58
    for model, said in LAYERS.items():
        once = ("embeddings", "pooler") if model == "bert-base" else rows[model]
        times = lambda name, row, once=once: {k: v * (1 if name in once else 12) for k, v in row.items()}
        found = [(name, times(name, row)) for name, row in rows[model].items() if name != "additions"]
        every = sum(row["seconds"] for _, row in found)
        shown = [
            (name, [(100 * row["seconds"] / every,), (row["offline"] / 1e6, row["online"] / 1e6), (row["rounds"],)])
            for name, row in found
        ]
        most = [max(sum(values[k]) for _, values in shown) for k in range(3)]
        y += 20
        parts.append(text(10, y, said, text_anchor="start", font_weight="bold"))
        for name, values in shown:
            y += 18
            parts.append(text(142, y, name, text_anchor="end", font_size="11"))
            for k, x in enumerate(columns.values()):
                at = float(x)
                colours = COLOURS if k == 1 else COLOURS[2:]
                for colour, value in zip(colours, values[k], strict=False):
                    wide = 110 * value / most[k]
                    parts.append(f'<rect x="{at:.1f}" y="{y - 10}" width="{wide:.1f}" height="12" fill="{colour}"/>')
                    at += wide
                total = sum(values[k])
                parts.append(text(round(at + 4), y, f"{total:.0f}", text_anchor="start", font_size="11"))
        y += 8
    parts += [
        f'<rect x="330" y="{y + 4}" width="12" height="12" fill="{COLOURS[0]}"/>',
        text(346, y + 14, "ahead of the query", text_anchor="start", font_size="11"),
        f'<rect x="450" y="{y + 4}" width="12" height="12" fill="{COLOURS[1]}"/>',
        text(466, y + 14, "online", text_anchor="start", font_size="11"),
    ]
    return framed("What each part of a model costs", 680, y + 26, parts)


PLOTS: dict[str, Callable[[], str]] = {"capc-gains": capc_gains, "capride-rounds": capride_rounds, "layers": layers}
