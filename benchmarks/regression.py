"""Regressions on shares beside scikit-learn's: seconds, what is sent, and how far the coefficients are apart.

    python benchmarks/regression.py [--rows 10000] [--columns 100] [--repeats 1] [--reference] [--json FILE]

Each is fitted twice: by rows of three parties (horizontal) and by columns of three (vertical). Beside the distance
stand two bounds of strong convexity, in columns of unit curvature (docs/estimators.md): the gradient at the
coefficients over the least curvature between the two fits, and the same with what `tol` certifies of it. Data:
scikit-learn's make_classification and make_regression, standardised and rounded to 20 fraction bits.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.linear_model
import torch
from sklearn.datasets import make_classification, make_regression

import sectorch
from sectorch import Session
from sectorch.estimators import LogisticRegression, Ridge

SIGMOID, UNIT, LIMIT = 4e-6, 2.0**-20, 16.0


def data(kind: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Standardised columns, of which a fifth are signal and a fifth made of these, and labels or a scaled target."""
    if kind == "logistic":
        some = {"n_informative": max(2, columns // 5), "n_redundant": columns // 5}
        x, y = make_classification(rows, columns, random_state=0, **some)
    else:
        x, y, *_ = make_regression(rows, columns, noise=10.0, random_state=0)
        y = np.round((y - y.mean()) / y.std() / UNIT) * UNIT
    return np.round((x - x.mean(0)) / x.std(0) / UNIT) * UNIT, y


def bound(
    kind: str, x: np.ndarray, y: np.ndarray, fits: list[tuple[np.ndarray, float]], tol: float
) -> dict[str, float]:
    """How far the two fits are apart in columns of unit curvature, and what strong convexity allows: for the gradient
    that is there, and for the one that is certified."""
    logistic = kind == "logistic"
    kappa, unit, count = (
        (0.25, 1.0, 1 << (len(x) - 1).bit_length()) if logistic else (1.0, 8.0, 1 << (len(x) - 1).bit_length())
    )
    means = x.mean(0)
    scale = np.append((kappa * ((x - means) ** 2).sum(0) / count + 1 / count + 2.0**-14) ** -0.5, kappa**-0.5)
    least = np.ones(len(x))
    for w, b in fits if logistic else []:
        p = 1 / (1 + np.exp(-(x @ w + b)))
        least = np.minimum(least, p * (1 - p))
    columns = np.c_[x - means, np.ones(len(x))] * scale
    curvature = (columns.T * least) @ columns / count + np.diag(np.append(scale[:-1] ** 2 / count, 0))
    (w, b), (best, offset) = fits
    distance = np.linalg.norm(np.append(w - best, b - offset + means @ (w - best)) / scale) / unit
    z = x @ w + b
    rest = (1 / (1 + np.exp(-z)) if logistic else z) - y
    gradient = scale * (np.c_[x - means, np.ones(len(x))].T @ rest + np.append(w, 0)) / count / unit
    standard = np.abs(np.append(w / scale[:-1], 1 / scale[-1])).sum() / unit
    revealed = (np.abs(x).max(0).sum() + np.abs(means).sum() + 2) / unit
    residual = (SIGMOID if logistic else 2.0**-26) + kappa * UNIT * (standard + revealed + 1) / 2
    certified = np.sqrt(len(scale)) * (tol + residual / kappa**0.5 + 2.0**-29)
    smallest = float(np.linalg.eigvalsh(curvature)[0])
    return {
        "distance": float(distance),
        "bound": float(np.linalg.norm(gradient)) / smallest,
        "certified_bound": float(certified) / smallest,
    }


def fitted(kind: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """By rows and by columns of three parties."""
    x, y = data(kind, given.rows, given.columns)
    plain = (
        sklearn.linear_model.LogisticRegression(tol=1e-10, max_iter=10**4, solver="newton-cholesky")
        if kind == "logistic"
        else sklearn.linear_model.Ridge(1.0)
    )
    began = time.perf_counter()
    plain.fit(x, y)
    ordinary, found = time.perf_counter() - began, []
    for layout, axis in (("horizontal", 0), ("vertical", 1)):
        for _ in range(given.repeats):
            session = Session(reference=given.reference)
            estimator: Any = LogisticRegression() if kind == "logistic" else Ridge(1.0)
            began = time.perf_counter()
            with sectorch.profile() as seen:
                parts = [
                    sectorch.share(torch.from_numpy(part), session=session, limit=LIMIT, owner=owner)
                    for owner, part in zip("QAS", np.array_split(x, 3, axis), strict=True)
                ]
                labels = sectorch.share(torch.from_numpy(y), session=session, owner="S", limit=8.0)
                estimator.fit(torch.cat(parts, axis), labels)
            estimator = estimator.revealed()
            seconds = time.perf_counter() - began
            w, b = estimator.coef_.ravel(), float(estimator.intercept_[0])
            best, offset = np.ravel(plain.coef_), float(np.ravel(plain.intercept_)[0])
            bounds = bound(kind, x, y, [(w, b), (best, offset)], estimator.tol)
            found.append(
                {
                    "fit": kind, "layout": layout, "rows": given.rows, "columns": given.columns, "seconds": seconds,
                    "plain_seconds": ordinary, "online_mb": seen.online_bytes / 1e6,
                    "dealt_mb": seen.offline_bytes / 1e6, "rounds": seen.rounds,
                    "largest_difference": float(np.abs(w - best).max()),
                    "largest_coefficient": float(np.abs(best).max()), **bounds,
                    "same_predictions": float(np.mean((x @ w + b > 0) == (x @ best + offset > 0))),
                }
            )  # fmt: skip
            print(
                f"{kind} {layout}, {given.rows} x {given.columns}: {seconds:.1f} s (scikit-learn {ordinary:.2f} s), "
                f"{seen.rounds} rounds, {seen.online_bytes / 1e6:.0f} MB online, "
                f"{seen.offline_bytes / 1e6:.0f} MB dealt; coefficients up to {np.abs(best).max():.3f}, apart by "
                f"{np.abs(w - best).max():.1e} at most; in columns of unit curvature by {bounds['distance']:.1e}, "
                f"allowed are {bounds['bound']:.1e} by the gradient and {bounds['certified_bound']:.1e} by tol",
                flush=True,
            )
    return found


def warm(reference: bool) -> None:
    """What is compiled on the first fit of a process is no part of the seconds."""
    session = Session(reference=reference)
    x, y = torch.randn(64, 4), (torch.arange(64) % 2).float()
    given = [sectorch.share(v, session=session, limit=8.0) for v in (x, y)]
    for estimator in (LogisticRegression(max_iter=6), Ridge(max_iter=3)):
        estimator.fit(*given)


def main() -> None:
    """Prints a line for each fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--reference", action="store_true", help="by the reference of the protocols")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warm(given.reference)
    found = [line for kind in ("logistic", "ridge") for line in fitted(kind, given)]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
