"""What the papers' commands have in common: how a run ends, and whether there will be plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from ..errors import PlotError, SectorchError


def ended(options: argparse.Namespace, run: Callable[[argparse.Namespace, Console], int]) -> int:
    """`run(options, console)`'s exit status: 0, 1 for an error in data or settings, 130 when stopped by Ctrl-C.

    Args:
        options: with `json` (whether standard output is for JSON alone) and `out` (the run's folder).
    """
    try:
        return run(options, Console(stderr=options.json))
    except SectorchError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"stopped; what is finished is in {options.out}, and the same command goes on from there"
        )
        return 130


def require() -> Any:
    """matplotlib, drawing to files.

    Raises:
        PlotError: it is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install matplotlib, or leave them out (--no-plots)") from error
    return Figure, FigureCanvasAgg


def plotting(options: argparse.Namespace, console: Console) -> bool:
    """Whether plots are wanted and matplotlib is there; says so where it is not."""
    if options.no_plots:
        return False
    try:
        require()
    except PlotError as error:
        console.print(f"no plots: {error}", style="yellow", markup=False)
        return False
    return True
