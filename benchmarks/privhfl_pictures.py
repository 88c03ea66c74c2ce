"""PrivHFL's figures that are pictures, with the numbers behind them, and its table of properties.

`benchmarks/privhfl.py fig10 | fig11ab | fig14 | table6` runs it; pictures (matplotlib) go to --work.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from privhfl_paper import PAPER
from rich.table import Table

from sectorch.cli.command import require
from sectorch.data import load, partition
from sectorch.data.seeds import generator
from sectorch.data.selection import expand
from sectorch.federated.training import features, train
from sectorch.protocols.privhfl import PRESETS, federation

KINDS = ("mixup", "cutmix", "cutout", "flip", "noise")
ALPHAS = (0.5, 1.0, 100.0)


def fig10(o: argparse.Namespace) -> list[dict]:
    """Four images of a client and what each expansion makes of them."""
    clients, *_ = federation(o.data, o.clients, root=o.data_root, samples=o.samples, seed=o.seeds[0])
    images = clients[0].images[:4]
    rows = {"original": images, **{k: expand(images, 4, k, generator=generator(o.seeds[0], "fig10")) for k in KINDS}}
    figure_of, canvas = require()
    figure = figure_of(figsize=(6, 8), layout="constrained")
    canvas(figure)
    axes = figure.subplots(len(rows), 4)
    for line, (kind, shown) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, shown, strict=True):
            axis.imshow(image.clamp(0, 1).permute(1, 2, 0).squeeze(-1), cmap="gray")
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(kind)
    return [dict(kind=kind, images=len(shown), written=_written(o, figure, "fig10")) for kind, shown in rows.items()]


def fig11ab(o: argparse.Namespace) -> list[dict]:
    """Whether queries lie where unseen images are, in the features of the model that its owner has trained.

    `nearer`: the share of test images to which some query is nearer than every private image; `left`: the mean distance
    to the nearest of both, as a part of that to the nearest private image. The paper has scatter plots and no number.
    """
    size, found, points = o.queries[-1], {kind: [] for kind in KINDS}, {}
    for seed in o.seeds:
        clients, (test, _), _ = federation(o.data, o.clients, root=o.data_root, samples=o.samples, seed=seed)
        first = clients[0]
        train(first.model, first.images, first.labels, PRESETS[o.data].local.lasting(o.local_epochs), seed)
        own, unseen = (features(first.model, images) for images in (first.images, test[: o.test_samples]))
        before = torch.cdist(unseen, own).min(1).values
        for kind in KINDS:
            pool = features(first.model, expand(first.images, size, kind, generator=generator(seed, "fig11")))
            after = torch.cdist(unseen, pool).min(1).values
            left = torch.minimum(before, after).mean() / before.mean()
            found[kind].append((float((after < before).double().mean()), float(left)))
            points.setdefault(kind, (own, pool))
    written = _scatter(o, *points["mixup"])
    shown = Table(title=f"Figure 11(a, b): {size} queries in feature space, {o.data}, {len(o.seeds)} seeds, %")
    for column in ("expansion", "test images with a query nearer", "distance left"):
        shown.add_column(column)
    rows = []
    for kind, values in found.items():
        nearer, left = ([100 * v for v in column] for column in zip(*values, strict=True))
        shown.add_row(kind, *(_spread(v) for v in (nearer, left)))
        rows.append(dict(kind=kind, nearer=nearer, left=left, queries=size, written=written))
    o.console.print(shown)
    return rows


def fig14(o: argparse.Namespace) -> list[dict]:
    """Samples of each class at each client, by alpha, clients' shares of a class from Dir(alpha)."""
    labels = load(o.data, o.data_root).train.labels
    figure_of, canvas = require()
    figure = figure_of(figsize=(12, 4), layout="constrained")
    canvas(figure)
    rows = []
    for axis, alpha in zip(figure.subplots(1, len(ALPHAS), sharey=True), ALPHAS, strict=True):
        parts = partition(labels, o.clients, o.samples, kind="dirichlet-classes", alpha=alpha, seed=o.seeds[0])
        counts = torch.stack([labels[part].bincount(minlength=int(labels.max()) + 1) for part in parts])
        client, name = counts.nonzero(as_tuple=True)
        axis.scatter(client, name, s=200 * counts[client, name] / counts.max(), alpha=0.6)
        axis.set_title(f"alpha = {alpha:g}")
        axis.set_xlabel("client")
        axis.set_ylabel("class")
        sizes = counts.sum(1)
        rows.append(dict(alpha=alpha, counts=counts.tolist(), least=int(sizes.min()), most=int(sizes.max()),
                         empty=int((counts == 0).sum())))  # fmt: skip
    written = _written(o, figure, "fig14")
    shown = Table(title=f"Figure 14: {o.data}, {o.clients} clients, classes cut by Dir(alpha); {written}")
    for column in ("alpha", "samples of the smallest client", "of the largest", "classes that a client lacks, of all"):
        shown.add_column(column, justify="right")
    for row in rows:
        cells = len(row["counts"]) * len(row["counts"][0])
        shown.add_row(f"{row['alpha']:g}", str(row["least"]), str(row["most"]), f"{row['empty']} of {cells}")
    o.console.print(shown)
    return rows


def table6(o: argparse.Namespace) -> list[dict]:
    """The paper's own marks; nothing of it is measured here."""
    head = ("data", "model", "other architectures", "no auxiliary data", "GPU", "fast protocol")
    shown = Table(title="Table 6, as the paper has it: what is kept private, and what can be used")
    for column in ("framework", *head):
        shown.add_column(column)
    for name, marks in PAPER["table6"].items():
        shown.add_row(name, *marks)
    o.console.print(shown)
    return [dict(framework=name, **dict(zip(head, marks, strict=True))) for name, marks in PAPER["table6"].items()]


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" + (f" +- {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def _scatter(o: argparse.Namespace, own: torch.Tensor, pool: torch.Tensor) -> str:
    """Both on the two main axes of the queries."""
    centre = pool.mean(0)
    axes_of = torch.linalg.svd(pool - centre, full_matrices=False).Vh[:2].T
    figure_of, canvas = require()
    figure = figure_of(figsize=(5, 4), layout="constrained")
    canvas(figure)
    axis = figure.add_subplot()
    for values, label, colour in ((pool, "mixup queries", "lightblue"), (own, "private images", "red")):
        axis.scatter(*((values - centre) @ axes_of).T, s=12, label=label, color=colour)
    axis.legend()
    return _written(o, figure, "fig11ab")


def _written(o: argparse.Namespace, figure, name: str) -> str:
    o.work.mkdir(parents=True, exist_ok=True)
    figure.savefig(o.work / f"{name}.png", dpi=120)
    return f"{name}.png"
