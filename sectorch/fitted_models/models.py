"""Scalers, encoders, dense layers, kernels, outputs: an own file of torch code, of which `convert` has none.

What a model learned is a parameter, and so A's secret: means, deviations, coefficients, support vectors. Categories,
classes, and the kinds of steps are public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import NonFiniteError
from .schema import Schema
from .trees import Trees, check_rows


def secret(x: np.ndarray) -> nn.Parameter:
    """A parameter in float64."""
    return nn.Parameter(torch.tensor(np.array(x, np.float64)), requires_grad=False)


class TableRows(NamedTuple):
    """TableRows on their way through a model.

    Attributes:
        x: [rows, columns]. missing: [rows, columns], 1 where a number is missing and x holds 0; or None.
        codes: by raw column [rows], the category; the number of categories for any other.
    """

    x: Tensor
    missing: Tensor | None
    codes: dict[int, Tensor]


class Affine(nn.Module):
    """x * factor + shift, column by column: a scaler that no later layer could take into its weights."""

    def __init__(self, factor: np.ndarray, shift: np.ndarray):
        super().__init__()
        self.factor, self.shift = secret(factor), secret(shift)

    def forward(self, rows: TableRows) -> TableRows:
        return rows._replace(x=rows.x * self.factor + self.shift)


class Impute(nn.Module):
    """A statistic of A's for each missing number."""

    def __init__(self, statistics: np.ndarray):
        super().__init__()
        self.statistics = secret(statistics)

    def forward(self, rows: TableRows) -> TableRows:
        if rows.missing is None:
            return rows
        return rows._replace(x=rows.x + rows.missing.to(torch.float64) * self.statistics, missing=None)


class Select(nn.Module):
    """Some of the columns, by public numbers."""

    def __init__(self, columns: Sequence[int]):
        super().__init__()
        self.columns = tuple(columns)

    def forward(self, rows: TableRows) -> TableRows:
        pick = lambda v: None if v is None else v[:, list(self.columns)]
        return TableRows(rows.x[:, list(self.columns)], pick(rows.missing), rows.codes)


class Encode(nn.Module):
    """Categories as numbers: a public row of `table` for each category, and for any other."""

    def __init__(self, columns: Sequence[int], tables: Sequence[np.ndarray]):
        super().__init__()
        self.columns, self.tables = tuple(columns), [torch.tensor(table, dtype=torch.float64) for table in tables]

    def forward(self, rows: TableRows) -> TableRows:
        parts = []
        for column, table in zip(self.columns, self.tables, strict=True):
            code = F.one_hot(rows.codes[column], len(table)).to(torch.float64)
            parts.append(torch.matmul(code, table.to(rows.x.device)))
        return TableRows(torch.cat(parts, 1), None, rows.codes)


class Concatenation(nn.Module):
    """Several steps' columns, side by side."""

    def __init__(self, steps: Sequence[nn.Module]):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, rows: TableRows) -> TableRows:
        made = [step(rows) for step in self.steps]
        missing = None
        if any(part.missing is not None for part in made):
            missing = torch.cat([torch.zeros_like(p.x) if p.missing is None else p.missing for p in made], 1)
        return TableRows(torch.cat([part.x for part in made], 1), missing, rows.codes)


class Chain(nn.Module):
    """Steps one after another."""

    def __init__(self, *steps: nn.Module):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, rows: TableRows) -> TableRows:
        for step in self.steps:
            rows = step(rows)
        return rows


class Layers(nn.Module):
    """Dense layers with one activation between them: of linear models one, without any."""

    ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
        "identity": lambda x: x, "relu": torch.relu, "tanh": torch.tanh, "logistic": torch.sigmoid,
    }  # fmt: skip

    def __init__(self, weights: Sequence[np.ndarray], biases: Sequence[np.ndarray], activation: str = "identity"):
        super().__init__()
        self.weights = nn.ParameterList([secret(w) for w in weights])
        self.biases = nn.ParameterList([secret(b) for b in biases])
        self.activation = activation

    def forward(self, rows: TableRows) -> Tensor:
        x = rows.x
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = F.linear(x if i == 0 else self.ACTIVATIONS[self.activation](x), weight, bias)
        return x


class Project(nn.Module):
    """Columns as a linear map of A's gives them, such as principal components."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray):
        super().__init__()
        self.weight, self.bias = secret(weight), secret(bias)

    def forward(self, rows: TableRows) -> TableRows:
        return TableRows(F.linear(rows.x, self.weight, self.bias), None, rows.codes)


class Kernel(nn.Module):
    """A support vector machine: coefficients [outputs, vectors] of the kernel with each support vector."""

    def __init__(
        self, kind: str, vectors: np.ndarray, coefficients: np.ndarray, bias: np.ndarray, gamma: float, coef0: float,
        degree: int,
    ):  # fmt: skip
        super().__init__()
        self.kind, self.degree, self.gamma, self.coef0 = kind, degree, gamma, coef0
        self.vectors, self.squares = secret(vectors), secret((vectors**2).sum(1))
        self.coefficients, self.bias = secret(coefficients), secret(bias)

    def forward(self, rows: TableRows) -> Tensor:
        product = F.linear(rows.x, self.vectors)
        if self.kind == "rbf":
            distance = (rows.x * rows.x).sum(1, keepdim=True) + self.squares - 2 * product
            product = torch.exp(distance * -self.gamma)
        elif self.kind == "poly":
            product = (product * self.gamma + self.coef0) ** self.degree
        elif self.kind == "sigmoid":
            product = torch.tanh(product * self.gamma + self.coef0)
        return F.linear(product, self.coefficients, self.bias)


class TreeScores(nn.Module):
    """Trees at the end of a model; which raw column each categorical one of theirs is, is public."""

    def __init__(self, trees: Trees, raw: dict[int, int]):
        super().__init__()
        self.trees, self.raw = trees, [raw[column] for column in sorted(trees.sizes)]

    def forward(self, rows: TableRows) -> Tensor:
        return self.trees(rows.x, rows.missing, [rows.codes[column] for column in self.raw])


# What a model gives of its scores [rows, outputs].


def probabilities(scores: Tensor, link: str) -> Tensor:
    """The classes' probabilities of scores, [rows, classes]."""
    if link == "softmax":
        return torch.softmax(scores, 1)
    if link == "ovr" and scores.shape[1] > 1:  # s_k / sum s_j of sigmoids s, which may be too small to divide by a sum
        return torch.softmax(F.logsigmoid(scores), 1)
    if link == "mean":
        return scores if scores.shape[1] > 1 else torch.cat([1 - scores, 1 + scores], 1) / 2
    second = torch.sigmoid(scores * 2 if link == "sigmoid2" else scores)
    return torch.cat([1 - second, second], 1)


class Output(nn.Module):
    """What a model gives, of its scores [rows, outputs].

    Args:
        kind: "class" (its number among `classes`, int64), "probabilities", "scores", "value" of a regression, or
            "inlier" (1, or -1 for an outlier).
        link: "identity", "exp", "sigmoid", "sigmoid2" (of twice the score), "softmax", "ovr", "mean" of
            probabilities (of two classes their difference), "votes" of pairs of classes, or "depth" of isolation trees.
        inclusive: whether a binary score of exactly 0 is the second class.
        cut: of the kind "inlier", the least score of an inlier.
        keeps_columns: whether a single value of a row stays a column, [rows, 1], as where the targets were one.
    """

    def __init__(
        self, kind: str, link: str, classes: int = 0, inclusive: bool = False, cut: float = 0.0,
        keeps_columns: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.kind, self.link, self.classes, self.inclusive = kind, link, classes, inclusive
        self.keeps_columns = keeps_columns
        self.cut = secret(np.array([cut]))

    def forward(self, scores: Tensor) -> Tensor:
        if self.kind == "class":
            return self._class(scores)
        if self.kind == "probabilities":
            return probabilities(scores, self.link)
        if self.kind == "inlier":
            return (scores.squeeze(1) >= self.cut).to(torch.int64) * 2 - 1
        if self.link == "depth":
            return -(2.0 ** -scores.squeeze(1))
        if self.kind == "value" and self.link in ("exp", "sigmoid"):
            scores = torch.exp(scores) if self.link == "exp" else torch.sigmoid(scores)
        return scores.squeeze(1) if scores.shape[1] == 1 and not self.keeps_columns else scores

    def _class(self, scores: Tensor) -> Tensor:
        if self.link == "votes" and scores.shape[1] > 1:
            pairs = [(i, j) for i in range(self.classes) for j in range(i + 1, self.classes)]
            won = (scores > 0).to(torch.int64)
            table = torch.zeros((len(pairs), self.classes), dtype=torch.int64, device=scores.device)
            lost = torch.zeros(self.classes, dtype=torch.int64, device=scores.device)
            for row, (i, j) in enumerate(pairs):  # each pair's vote is i's, or else j's
                table[row, i] += 1
                table[row, j] -= 1
                lost[j] += 1
            return (torch.matmul(won, table) + lost).argmax(1)
        if scores.shape[1] == 1:
            score = scores.squeeze(1)
            return (score >= 0 if self.inclusive else score > 0).to(torch.int64)
        return scores.argmax(1)


class TabularModel(nn.Module):
    """A fitted model as an ordinary module: of rows [rows, columns] as `schema.rows` makes them of a table.

    Attributes:
        schema: the public facts on the columns, with which the querying party encodes its rows.
        classes: of a classifier, what the numbers that it gives stand for.
    """

    def __init__(self, schema: Schema, steps: nn.Module, scores: nn.Module, output: Output, classes: np.ndarray | None):
        super().__init__()
        self.schema, self.classes = schema, classes
        self.steps, self.scores, self.output = steps, scores, output

    def forward(self, x: Tensor, missing: Tensor | None = None, codes: Tensor | None = None) -> Tensor:
        """The model's output for numbers [rows, columns], with marks of those that are missing and categories."""
        schema = self.schema
        check_rows(x, schema.columns)
        if missing is None and bool(torch.isnan(x).any()):  # in plain: in shares nothing is NaN
            if not schema.missing:
                raise NonFiniteError(f"the input holds NaN; {schema.way_out_of_missing}")
            missing = torch.isnan(x)
        x = torch.where(missing.to(torch.bool), 0.0, x) if missing is not None and missing.dtype == torch.bool else x
        x = x.to(torch.float32).to(torch.float64) if schema.single else x.to(torch.float64)
        given = {} if codes is None else {column: codes[:, i] for i, column in enumerate(schema.categorical)}
        if not given and schema.categorical:
            raise NonFiniteError("this model has categorical columns: call it with **model.schema.rows(table)")
        return self.output(self.scores(self.steps(TableRows(x, missing, given))))
