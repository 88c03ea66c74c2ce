"""The largest error of every smooth function, norm and reduction over its whole domain, against torch in float64.

python benchmarks/domains.py                       # functions, and rows of 1 to 10^6 entries
python benchmarks/domains.py functions --points 20000 --frac-bits 24
python benchmarks/domains.py rows --sizes 1 768 1000000 --json rows.json

Functions: magnitudes from the last place to the limit of activations, evenly in the exponent, of both signs. Rows: each
size with standard deviations from the last place to the limit, centred and beside an offset of 300, with one entry at
the limit, constant, and of two values. Inputs are multiples of the last place. A place counts where torch's result is
finite and below the limit; elsewhere a range error is due. A place, or a row with an entry, above a quarter of the
limit may end in a range error as well: `withheld` counts these; below that an error stops the benchmark.

`near`: the largest error where |result| <= 1, in units of the last place. `far`: the largest relative error beyond.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sectorch
from sectorch.errors import RangeExceededError
from sectorch.tensor import Scheme

FUNCTIONS: dict[str, Callable] = {
    **{f.__name__: f for f in (
        torch.exp, torch.expm1, torch.exp2, torch.sinh, torch.cosh, torch.sigmoid, torch.tanh, torch.erf, torch.erfc,
        F.gelu, F.softplus, F.logsigmoid, F.silu, F.mish, F.elu, F.celu, F.selu, F.softsign, F.tanhshrink, F.hardswish,
        F.hardsigmoid, torch.sin, torch.cos, torch.atan, torch.asin, torch.acos, torch.asinh, torch.acosh, torch.atanh,
        torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal,
    )},
    "x^2": torch.square, "x^3": lambda x: x**3, "x^5": lambda x: x**5, "x^-2": lambda x: x**-2,
    "x^0.7": lambda x: x**0.7, "x^2.5": lambda x: x**2.5, "x^-1.5": lambda x: x**-1.5, "3^x": lambda x: 3**x,
    "x * 1e4": lambda x: x * 1e4, "x / 3": lambda x: x / 3, "x / 1e-3": lambda x: x / 1e-3,
    "softplus(x, 3)": lambda x: F.softplus(x, 3.0), "celu(x, 0.01)": lambda x: F.celu(x, 0.01),
    "x / (|x| + 1e-3)": lambda x: x / (x.abs() + 2.0**-10), "atan2(x, 3)": lambda x: torch.atan2(x, x * 0 + 3),
    "log(relu(x) + 1e-8)": lambda x: torch.log(x.relu() + 1e-8),
}  # fmt: skip

ROWS: dict[str, Callable] = {
    **{f"layer_norm, eps {e:g}": (lambda x, e=e: F.layer_norm(x, x.shape[-1:], eps=e)) for e in (1e-12, 1e-5, 1.0)},
    "rms_norm, eps 1e-6": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "group_norm": lambda x: F.group_norm(x.reshape(x.shape[0], 1, -1), 1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, torch.linspace(-1, 2, x.shape[-1]).expand(x.shape), dim=-1),
    "mean": lambda x: x.mean(-1), "sum": lambda x: x.sum(-1), "var": lambda x: x.var(-1), "std": lambda x: x.std(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(x.shape)),
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "rms_norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
}  # fmt: skip
SQUARES = ("var", "mse_loss", "rms_norm by hand")
"""Whose results, or squares on the way to them, leave the range before the rows do."""


def grid(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return (x.double() * 2.0**scheme.frac_bits).round() * 2.0**-scheme.frac_bits


def limit(scheme: Scheme) -> float:
    return scheme.activation_limit


def places(points: int, scheme: Scheme) -> torch.Tensor:
    ends = -scheme.frac_bits, math.log2(limit(scheme)) - 1e-6
    sizes = 2.0 ** torch.linspace(*ends, points, dtype=torch.float64)
    return grid(torch.cat((sizes, -sizes, torch.zeros(1))), scheme)


def rows(n: int, scheme: Scheme, sizes: int, squares: bool) -> Iterator[torch.Tensor]:
    """Rows [1, n] of every kind."""
    top = limit(scheme) - 1
    high = math.log2(top) / 2 - 1 if squares else math.log2(top)
    generator = torch.Generator().manual_seed(n)
    for exponent in torch.linspace(-scheme.frac_bits, high, sizes).tolist():
        x = torch.randn(1, n, generator=generator, dtype=torch.float64) * 2.0**exponent
        outlier, edge = x.clone(), 100.0 if squares else top
        outlier[:, 0] = edge
        offset = 100.0 if squares else 300.0
        for kind in (x, x + offset, outlier, torch.full_like(x, 2.0**exponent), (x > 0) * 2.0**exponent):
            yield grid(kind.clamp(-edge, edge), scheme)


def errors(function: Callable, x: torch.Tensor, scheme: Scheme, single: bool) -> tuple[float, float, int]:
    """near, far, withheld. `single`: each entry is a place of its own, and those beyond the domain are left out."""
    y = function(x)
    here = y.isfinite() & (y.abs() < limit(scheme))
    if single:
        x, y = x[here], y[here]
    elif not bool(here.all()):
        return 0.0, 0.0, 0
    if not y.numel():
        return 0.0, 0.0, 0
    try:
        found = function(sectorch.share(x, scheme=scheme)).reveal()
    except RangeExceededError:
        if float(x.abs().max()) <= limit(scheme) / 4:
            raise
        if not single or len(x) == 1:
            return 0.0, 0.0, 1
        parts = [errors(function, part, scheme, True) for part in x.split((len(x) + 1) // 2)]
        near, far, withheld = zip(*parts, strict=True)
        return max(near), max(far), sum(withheld)
    off = (found - y).abs()
    small = y.abs() <= 1
    near = float(torch.where(small, off, 0).max()) * 2.0**scheme.frac_bits
    return near, float(torch.where(small, 0, off / y.abs().clamp(min=1)).max()), 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "functions", "rows"], default="all")
    parser.add_argument("--points", type=int, default=2000, help="of a function, of each sign")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 100, 768, 4096, 65_536, 1_000_000])
    parser.add_argument("--spreads", type=int, default=10, help="standard deviations of rows; a quarter from 10^5 on")
    parser.add_argument("--frac-bits", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[""], help="functions whose names begin so")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scheme = Scheme(options.frac_bits, limit_bits=56 - 2 * options.frac_bits)
    found: list[dict] = []

    def measured(name: str, n: int | None, near: float, far: float, withheld: int) -> None:
        found.append({"name": name, "n": n, "near_ulps": near, "far_relative": far, "withheld": withheld})
        if options.json:  # after each: the large sizes take an hour
            options.json.write_text(json.dumps(found, indent=1) + "\n")

    def chosen(table: dict[str, Callable]) -> list[tuple[str, Callable]]:
        return [(name, f) for name, f in table.items() if name.startswith(tuple(options.only))]

    if options.what != "rows":
        for name, function in track(chosen(FUNCTIONS), "functions"):
            measured(name, None, *errors(function, places(options.points, scheme), scheme, True))
    if options.what != "functions":
        for name, function in track(chosen(ROWS), "rows"):
            for n in options.sizes:
                if n == 1 and name in ("var", "std", "group_norm"):  # torch gives NaN, or refuses
                    continue
                spreads = max(3, options.spreads // 4) if n > 100_000 else options.spreads
                every = [errors(function, x, scheme, False) for x in rows(n, scheme, spreads, name in SQUARES)]
                near, far, withheld = zip(*every, strict=True)
                measured(name, n, max(near), max(far), sum(withheld))
    table = Table(title=f"Largest errors over the whole domain, {options.frac_bits} fraction bits")
    for column in ("function", "n", "near, last places", "far, relative", "withheld"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for row in found:
        near, far = f"{row['near_ulps']:.1f}", f"{row['far_relative']:.1e}"
        table.add_row(row["name"], str(row["n"] or ""), near, far, str(row["withheld"] or ""))
    Console().print(table)


if __name__ == "__main__":
    main()
