"""Evaluation of a secret model on a secret test set: what comes out are metrics, in shares, and nobody has a score.

The model is an answering party's (`sectorch.secure(model)`), or in shares; rows, labels and groups are in shares, of
any owners. Scores stay in shares. One sort of the scores, with the labels beside them, serves the areas under both
curves of all groups; everything else are comparisons with public thresholds, and sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from ..backend import Value
from ..errors import ArgumentError, DtypeError, NonFiniteError, SessionMismatchError, ShapeError
from ..fitted_models.schema import Schema
from ..nn.module import SecureModule
from ..ops.common import as_factor, check_fits, forbid, limit_at, raise_scale, round_scale
from ..ops.order import sort_rows
from ..ops.smooth import quotient
from ..session import Session, default_session
from ..tensor import SharedTensor, share_tensor
from ..tensor.holders import one_hot_argmax
from ..tensor.secret import dtype_of
from ..tensor.table import Context, one_call
from .statistics import Axis, Statistic, exact_quotient, with_origin, with_source
from .table import Table, rows_of_one

METRICS = ("auroc", "auprc", "accuracy", "log_loss", "brier", "ece", "calibration", "confusion", "gaps")
"""What `evaluate` computes, by name."""

OUTPUTS = ("logits", "probabilities", "classes")

MOST_ROWS = 1 << 18
"""More rows would take the pairs of a positive and a negative one out of the ring."""

_SUM_BITS = 40
"""Fraction bits of the sum of an average precision."""

Output = Literal["logits", "probabilities", "classes"]


@dataclass
class Groups:
    """The groups of an evaluation: all rows, and those of each category of each grouping column.

    Attributes:
        codes: by name of the grouping column, whole numbers [n] in shares.
        labels: by the same name, the categories, which are public.
    """

    codes: dict[str, SharedTensor]
    labels: dict[str, tuple[Any, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """The label of each group: "all", "sex=f", ..."""
        return ("all", *(f"{name}={label}" for name, labels in self.labels.items() for label in labels))

    def places(self) -> dict[str, list[int]]:
        """By grouping column, the numbers of its groups."""
        found, at = {}, 1
        for name, labels in self.labels.items():
            found[name] = list(range(at, at + len(labels)))
            at += len(labels)
        return found


def evaluate(
    model: Any,
    x: Any,
    y: Any,
    metrics: Sequence[str] = ("auroc", "auprc", "brier", "ece"),
    groups: Any = None,
    *,
    owner: Any = None,
    output: Output | None = None,
    classes: Sequence[Any] | None = None,
    threshold: float | None = None,
    bins: int = 10,
    batch_size: int = 1000,
    version: str | None = None,
    session: Session | None = None,
) -> dict[str, Statistic]:
    """Compute metrics of a model on a test set, both secret: in shares, for `sectorch.release` under a policy.

        found = sectorch.evaluate(secure_model, rows.tensor("age", "weight"), rows["died"], ["auroc", "ece"],
                                  groups=rows[["sex"]])
        print(sectorch.release(found["auroc"], policy, to="H1"))

    Args:
        model: what `sectorch.secure` made of a classifier; an estimator or boosted trees in shares; or None, where x
            are the scores.
        x: the rows in shares: [n, columns], a Table, or a mapping of the model's arguments. Of the `owner` also plain.
        y: labels: [n] whole numbers or flags in shares, which are the classes' numbers; or a Table of one column. Of
            the `owner` also plain, and then any of `classes`.
        metrics: any of `METRICS`, see below.
        groups: columns by which each metric is computed as well: a Table of categories and flags, or a mapping of
            names to pairs of codes (as y) and labels. Which row is in which group stays secret.
        owner: the party that has what is plain among x, y and groups; Q unless named. In the processes of other parties
            these are tensors without content (`sectorch.announced`).
        output: what the model gives: "logits" [n], [n, 1] or [n, classes] (of two classes the second one's counts),
            "probabilities" of these shapes, or "classes". It follows from the model where it is known, and is
            "logits" otherwise.
        classes: the classes, in the order of the model's scores; 0, 1, ... unless named, or y's categories.
        threshold: of two classes the least probability of the second one at which it is predicted, for "accuracy" and
            "confusion"; unless named the larger score decides (of equal ones the first class's).
        bins: of "calibration" and "ece": equal parts of 0 to 1, each without its left end but the first.
        batch_size: rows that the model computes at once.
        version: the name of the model's version, which all parties have to agree on (`DisagreementError`) and which
            stands in each result. That of the model, where it has one.
        session: where nothing is in shares and there is no model: that of the parties.

    Returns:
        by name, `Statistic`s: "auroc" of all rows, and with `groups` "auroc by sex" of each category of that column,
        one dimension more. With more than two classes areas, ECE and calibration are of each class against the rest, a
        dimension "class".

        - "auroc", "auprc": scikit-learn's `roc_auc_score` and `average_precision_score`, ties included. The count is
          that of the rarer of the two kinds of rows, since a single positive row's rank is what such an area tells.
        - "accuracy", "log_loss", "brier" (the mean of the squared distances), "ece" (the expected calibration error).
        - "calibration": for each bin the mean probability and the fraction of positive rows.
        - "confusion": rows by actual and predicted class.
        - "gaps": for each other metric of one value a group, and each grouping column: the largest less the smallest
          value of its groups. Its count is the smallest of theirs.

        There is no value, and `Statistic.defined` is 0, where a group has no row, or an area's has one kind of rows.

    Exact are "confusion" and, for the scores that the model computes, AUROC and accuracy: the multiple of 2^-f next to
    the quotient. AUPRC is off by at most n 2^-41 + 2^-f; of groups, and where rows are padded or filtered, by 8 units
    of 2^-f. The others have the errors of `torch.sigmoid`, `softmax` and `softplus` in shares, a few units of 2^-f.
    Nobody learns anything before a result is revealed. Rounds and bytes: docs/tables.md.

    Raises:
        ArgumentError, ShapeError, DtypeError, NonFiniteError: before anything is shared: other lengths, labels that are
            no classes, labels of one class alone, groups without a row or without a label, unknown metrics.
        RangeExceededError: when a result is revealed: a label or a group's code in shares is none.
    """
    names = _checked_metrics(metrics, groups)
    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= 1000:
        raise ArgumentError(f"bins is a whole number from 1 to 1,000, got {bins!r:.40}")
    if threshold is not None and not (isinstance(threshold, (int, float)) and 0 < threshold < 1):
        raise ArgumentError(f"threshold is a probability between 0 and 1, got {threshold!r:.40}")
    if output is not None and output not in OUTPUTS:
        raise ArgumentError(f"output is one of {', '.join(OUTPUTS)}, got {output!r:.40}")
    kind = output or _output_of(model)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ArgumentError(f"batch_size is a number of rows, got {batch_size!r:.40}")
    needing = [name for name in names if name not in ("accuracy", "confusion", "gaps")]
    if kind == "classes" and needing:
        raise ArgumentError(
            f"{', '.join(needing)} need scores, and this model gives classes: take ['accuracy', 'confusion'], or "
            f"secure the model with its probabilities (sectorch.fitted_models.module(model, 'predict_proba'))"
        )
    version = str(getattr(model, "version", "") if version is None else version)
    given = _Given(model, x, y, groups, owner, classes, session)
    settings = names, given.groups.names, given.classes, kind, threshold, bins, version
    given.session.agreement.note(given.party, "evaluate", str(settings))
    scores = _scores(model, given.x, given.rows, batch_size)
    beside = [given.y, *given.groups.codes.values(), *([] if given.present is None else [given.present])]
    with one_call(scores, *beside) as (context, results):
        evaluation = _Evaluation(context, given, scores, kind, threshold, bins)
        found = evaluation.metrics(names)
        found = {name: with_source(one, version) for name, one in found.items()}
        results += [v for one in found.values() for v in (one.values, one.counts, one.defined) if v is not None]
        results += evaluation.results
    return found


# What is given: checked as far as it is known here, and shared.


def _checked_metrics(metrics: Any, groups: Any) -> tuple[str, ...]:
    if isinstance(metrics, str):
        metrics = [metrics]
    names = tuple(dict.fromkeys(metrics)) if isinstance(metrics, Sequence) else ()
    strange = [name for name in names if name not in METRICS]
    if not names or strange:
        raise ArgumentError(f"metrics is a list of {', '.join(METRICS)}, got {(strange or metrics)!r:.60}")
    if "gaps" in names and not groups:
        raise ArgumentError("gaps are between groups: name the columns, groups=table[['sex']]")
    return names


def _output_of(model: Any) -> str:
    """What a model gives, where it says so."""
    plain = getattr(model, "plain", None)
    kind = getattr(getattr(plain, "output", None), "kind", None)
    known = {"class": "classes", "probabilities": "probabilities", "scores": "logits"}
    if isinstance(kind, str):
        if kind not in known:
            raise ArgumentError(f"only a classifier is evaluated, and this model gives '{kind}'")
        return known[kind]
    if not isinstance(model, SecureModule) and not hasattr(model, "decision_function"):
        return "probabilities" if hasattr(model, "predict_proba") else "logits"
    return "logits"


class _Given:
    """Rows, labels and groups in shares, of one session and length.

    Everything that this process can see is checked before the first of them is shared.
    """

    def __init__(
        self, model: Any, x: Any, y: Any, groups: Any, owner: Any, classes: Sequence[Any] | None, session: Any = None
    ):
        label = y
        y, known, present = _column_of(y)
        self.classes = _classes(classes, known, getattr(getattr(model, "plain", None), "classes", None))
        codes, labels = _group_columns(groups)
        rows = _parts_of(x, getattr(getattr(model, "plain", None), "schema", None))
        shared = [v for v in (*rows.values(), y, *codes.values()) if isinstance(v, SharedTensor)]
        session = shared[0].session if shared else getattr(model, "session", None) or session or default_session()
        if any(v.session is not session or v.party != shared[0].party for v in shared):
            raise SessionMismatchError(
                "rows, labels and groups are of one session and answering party; share them in one"
            )
        self.session: Session = session
        self.party = shared[0].party if shared else session.answering_party(getattr(model, "party", None))
        plain_y = None if isinstance(y, SharedTensor) else _plain(y, "y")
        if plain_y is not None:
            plain_y = _as_codes(plain_y, self.classes)
        for name, value in codes.items():
            if not isinstance(value, SharedTensor):
                codes[name] = _as_group_codes(_plain(value, f"the group '{name}'"), name, labels[name])
        rows = {name: v if isinstance(v, SharedTensor) else _plain_rows(v) for name, v in rows.items()}
        lengths = {name: tuple(v.shape)[:1] for name, v in rows.items()}
        for name, value in {"y": y if plain_y is None else plain_y, **codes}.items():
            if value.dim() != 1:
                raise ShapeError(f"{name} is one number a row, got the shape {tuple(value.shape)}")
            lengths[name] = tuple(value.shape)
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name or 'x'} {shape[0] if shape else 'none'}" for name, shape in lengths.items())
            raise ShapeError(f"x, y and groups have one row each for every case, got {said}")
        self.rows = next(iter(lengths.values()))[0]
        if not 2 <= self.rows <= MOST_ROWS:
            raise ShapeError(f"an evaluation is of 2 to {MOST_ROWS:,} rows, got {self.rows}")
        for name, value in {"y": y, **codes}.items():
            if isinstance(value, SharedTensor) and (value.scale_bits or dtype_of(value).is_floating_point):
                raise DtypeError(f"{name} is of whole numbers or flags, got {dtype_of(value)}: share {name}.long()")
        scheme = shared[0].scheme if shared else getattr(model, "scheme", None)
        share = partial(share_tensor, session=session, party=self.party, scheme=scheme, owner=owner)
        self.x = {name: v if isinstance(v, SharedTensor) else share(v, name=name or "x") for name, v in rows.items()}
        self.y = y if plain_y is None else share(plain_y, limit=float(len(self.classes)), name="y")
        for name, value in codes.items():
            if not isinstance(value, SharedTensor):
                codes[name] = share(value, limit=float(len(labels[name])), name=name)
        self.groups = Groups(codes, labels)
        of_tables = [t for t in (label, x, groups) if isinstance(t, Table)]
        self.label = label.columns[0] if isinstance(label, Table) else ""
        sizes = [t.public_rows for t in of_tables]
        self.public_rows = None if None in sizes else self.rows
        self.many = max((*(t.many for t in of_tables), *map(rows_of_one, shared)), default=1)
        tables = [t.present for t in (x, groups) if isinstance(t, Table)]
        tables += [v.counting for v in shared]
        self.present: SharedTensor | None = None
        for flags in {id(p): p for p in (present, *tables) if p is not None}.values():
            both: Any = flags if self.present is None else self.present & flags
            self.present = both


def _column_of(y: Any) -> tuple[Any, tuple[Any, ...] | None, SharedTensor | None]:
    """The labels, their classes where a schema names them, and the rows that count: those whose label is known."""
    if not isinstance(y, Table):
        return y, None, None
    if len(y.columns) != 1:
        raise ArgumentError(f"y is one column, got {', '.join(y.columns)}: table[['died']]")
    (name,) = y.columns
    facts = y.schema[name]
    if facts.kind == "number":
        raise ArgumentError(f"labels are categories, flags or whole numbers, and '{name}' is {facts}")
    known = facts.categories or ((False, True) if facts.kind == "flag" else None)
    return y.filled(name), known, y.known(name)


def _classes(classes: Any, known: tuple[Any, ...] | None, of_model: Any) -> tuple[Any, ...]:
    """The classes, as they are named, or as the labels' column or the model has them."""
    plain = lambda values: tuple(v.item() if isinstance(v, np.generic) else v for v in values)
    of_model = None if of_model is None else plain(of_model)
    found = known or of_model or (0, 1) if classes is None else plain(classes)
    if not 2 <= len(found) <= 1000 or len(set(found)) < len(found):
        raise ArgumentError(f"classes are from 2 to 1,000, each another, got {len(found)}")
    for other, what in ((known, "y has the categories"), (of_model, "the model has the classes")):
        if other is not None and other != found:
            raise ArgumentError(
                f"{what} {', '.join(map(str, other[:10]))}, and here they are {', '.join(map(str, found[:10]))}: share "
                f"y with its categories in the model's order"
            )
    return found


def _group_columns(groups: Any) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    codes: dict[str, Any] = {}
    labels: dict[str, tuple[Any, ...]] = {}
    if groups is None:
        return codes, labels
    if isinstance(groups, Table):
        for name in groups.columns:
            facts = groups.schema[name]
            if facts.kind not in ("category", "flag") or facts.missing:
                raise ArgumentError(f"a group is a category or a flag without missing values, '{name}' is {facts}")
            codes[name], labels[name] = groups.filled(name), facts.categories or (False, True)
        return codes, labels
    if not isinstance(groups, Mapping):
        raise ArgumentError(f"groups is a Table or a mapping of names, got a {type(groups).__name__}")
    for name, value in groups.items():
        if not isinstance(value, tuple) or len(value) != 2 or isinstance(value[1], str):
            raise ArgumentError(f"the group '{name}' is a pair of codes and labels: (codes, ('f', 'm'))")
        codes[str(name)], labels[str(name)] = value[0], tuple(value[1])
        if not labels[str(name)] or len(set(labels[str(name)])) < len(labels[str(name)]):
            raise ArgumentError(f"the group '{name}' has no label, or one twice")
    return codes, labels


def _parts_of(x: Any, schema: Schema | None) -> dict[str, Any]:
    """The arguments of the model by name; "" for a single one."""
    if isinstance(x, Table) and schema is not None:
        return _rows_for(x, schema)
    if isinstance(x, Table):
        if x.missing:
            raise ArgumentError(
                f"rows have missing values ({', '.join(x.missing)}), which this model does not take: leave such rows "
                f"out, rows = table.where(table.known({next(iter(x.missing))!r})), and give "
                f"x=rows.tensor(..., fill=0) with y=rows[[...]]"
            )
        return {"": x.tensor()}
    if isinstance(x, Mapping):
        if not x or not all(isinstance(name, str) for name in x):
            raise ArgumentError("x names the model's arguments: {'x': rows, 'codes': codes}")
        return {name: v for name, v in x.items() if v is not None}
    return {"": x}


def _rows_for(table: Table, schema: Schema) -> dict[str, Any]:
    """A table as the arguments of a fitted model: the columns that its schema names, in its order."""
    names = list(table.columns) if schema.names is None else list(schema.names)
    absent = [name for name in names if name not in table]
    if absent or len(names) != schema.columns:
        raise ArgumentError(
            f"the model takes {schema.columns} columns, and the table "
            f"{f'has no {absent[0]!r}' if absent else f'has {len(names)}'}: give x=table[schema.names]"
        )
    lost = [name for name in names if name in table.missing]
    if lost and not schema.missing:
        raise ArgumentError(f"column {lost[0]!r} has missing values; {schema.way_out_of_missing}")
    for place, known in schema.categories.items():
        facts = table.schema[names[place]]
        if facts.categories != tuple(known):
            raise ArgumentError(
                f"column {names[place]!r} is {facts}, and the model knows other categories, or in another order"
            )
    columns = [table.filled(name).to(torch.float32) for name in names]
    columns = [v * 0 if i in schema.categories else v for i, v in enumerate(columns)]
    made: dict[str, Any] = {"x": torch.stack(columns, 1)}
    if schema.missing:
        flags = [table.missing[n] if n in table.missing else table.filled(n) * 0 for n in names]
        made["missing"] = torch.stack([v.to(torch.float32) for v in flags], 1)
    if schema.categories:
        made["codes"] = torch.stack([table.filled(names[place]) for place in schema.categorical], 1)
    return made


def _plain(value: Any, what: str) -> Any:
    """Plain labels or codes at their owner; a tensor without content elsewhere."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise DtypeError(f"{what} is a tensor, an array or in shares, got a {type(value).__name__}") from None


def _plain_rows(value: Any) -> torch.Tensor:
    try:
        x = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(f"x is a tensor, a Table or in shares, got a {type(value).__name__}") from None
    x = x.detach()
    if not x.is_meta and x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise NonFiniteError("x holds NaN or an infinity")
    return x


def _as_codes(y: Any, classes: tuple[Any, ...]) -> torch.Tensor:
    """The classes' numbers of plain labels.

    Raises:
        ArgumentError: a label that is no class, or labels of one class.
    """
    if isinstance(y, torch.Tensor):
        return torch.empty(y.shape, dtype=torch.int64, device="meta")
    if y.dtype.kind == "f" and not bool(np.isfinite(y).all()):
        raise NonFiniteError("y holds NaN or an infinity, which is no label")
    codes = _positions_among(y, classes)
    if bool((codes < 0).any()):
        raise ArgumentError(
            f"{int((codes < 0).sum())} of {codes.size} labels are none of the {len(classes)} classes; name them, in "
            f"the order of the model's scores: evaluate(..., classes=[...])"
        )
    if codes.size and int(codes.min()) == int(codes.max()):
        raise ArgumentError("all labels are of one class: there is nothing to compare; use a test set with both kinds")
    return torch.from_numpy(codes)


def _as_group_codes(value: Any, name: str, labels: tuple[Any, ...]) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=torch.int64, device="meta")
    known = labels if value.dtype.kind not in "iub" or set(np.unique(value).tolist()) <= set(labels) else None
    codes = _positions_among(value, labels if known is not None else tuple(range(len(labels))))
    if bool((codes < 0).any()):
        raise ArgumentError(f"the group '{name}' holds a value that is none of its {len(labels)} labels")
    without = [label for i, label in enumerate(labels) if not bool((codes == i).any())]
    if without:
        raise ArgumentError(f"the group '{name}' has no row of {len(without)} of its labels; leave these out")
    return torch.from_numpy(codes)


def _positions_among(values: np.ndarray, among: tuple[Any, ...]) -> np.ndarray:
    codes = np.full(values.shape, -1, dtype=np.int64)
    for place, label in enumerate(among):
        codes[values == label] = place
    return codes


# Scores in shares.


def _scores(model: Any, x: dict[str, SharedTensor], rows: int, batch_size: int) -> SharedTensor:
    """The model's scores of all rows, in shares."""
    if model is None:
        found = x.get("")
        if found is None:
            raise ArgumentError("without a model, x is one tensor of scores")
        return found
    score: Callable[..., Any]
    if isinstance(model, SecureModule) or not hasattr(model, "predict"):
        if not callable(model):
            raise ArgumentError(f"a model is what sectorch.secure made, or an estimator in shares, got {type(model)}")
        score = model
    else:
        score = getattr(model, "decision_function", None) or getattr(model, "predict_proba", None) or model.predict
    parts = []
    for first in range(0, rows, batch_size):
        piece = {name: v[first : first + batch_size] for name, v in x.items()}
        found = score(piece[""]) if set(piece) == {""} else score(**piece)
        found = found.as_shared() if hasattr(found, "as_shared") else found
        if not isinstance(found, SharedTensor):
            raise ArgumentError(f"the model gives a {type(found).__name__}, and its scores have to stay in shares")
        parts.append(found)
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # pyright: ignore[reportReturnType]


# Metrics. Counts and codes are whole numbers at scale 0; what is known of their range is said in each line.


class _Evaluation:
    """The metrics of one test set, in one call.

    Values are of n rows, G groups, K classes, and C classes against the rest: of two classes the second alone. They are
    whole numbers up to n unless fraction bits are said; f are those of scores.
    """

    def __init__(
        self, context: Context, given: _Given, scores: SharedTensor, output: str, threshold: float | None, bins: int
    ):
        self.context, self.backend, self.f = context, context.backend, context.frac_bits
        self.output, self.threshold, self.bins = output, threshold, bins
        self.rows, self.classes, self.groups = given.rows, given.classes, given.groups
        self.public_rows, self.many = given.public_rows, given.many
        self.of = given.label, output, threshold, bins
        self.like = self.scores = self._checked(scores)  # [n] of two classes, or [n, K]
        self.codes = [v.shares for v in given.groups.codes.values()]
        self.present = None if given.present is None else given.present.shares
        self.plain = self.present is None and not self.codes  # every row counts, in one group
        self.y = self._one_hot(given.y.shares, len(self.classes))  # [n, K]
        self.weights = self._weights(self.codes, self.present)  # [n, G]
        self.cells = self._weighted(self.weights, self._each(torch.unsqueeze, self.y, dim=1))  # [n, G, K]
        self.by_class = self._sum(self.cells, 0)  # [G, K]
        self.totals = self._sum(self.by_class, 1)  # [G]
        self.rarest = -self.backend.largest(-self._each(torch.t, self.by_class))  # [G], the rows of the rarest class
        self.y_code = given.y.shares
        self.most = 2.0 ** (self.f + context.scheme.activation_bits + 2)
        """A bound of every mean, at f bits."""
        self.results: list[SharedTensor] = []
        self._kept: dict[str, Any] = {}
        self._cells: dict[str, tuple[Any, ...]] = {}
        """By metric of one value a group: values at f bits, counts and flags, [G] or [G, K]."""

    # Scores, predictions and probabilities.

    def _checked(self, scores: SharedTensor) -> SharedTensor:
        """Scores at f fraction bits, within the activation limit; codes of classes as they are.

        Raises:
            ShapeError: not one score, or one for each class, a row.
        """
        shape, count = tuple(scores.shape), len(self.classes)
        fits = [(self.rows,), (self.rows, 1)] if count == 2 or self.output == "classes" else []
        if self.output != "classes":
            fits.append((self.rows, count))
        if shape not in fits:
            raise ShapeError(
                f"of {self.rows} rows and {count} classes a model gives scores of the shape "
                f"{' or '.join(map(str, fits))}, got {shape}; name its classes, or what it gives (output='classes')"
            )
        if shape[1:] == (1,):
            scores = scores.reshape(-1)
        scores = scores.like(scores.shares, bound=scores.bound, dtype=torch.float32)
        if self.output == "classes":
            if scores.scale_bits:
                raise DtypeError("the model's classes are whole numbers; name what it gives: output='logits'")
            return scores
        scores = as_factor(self.context, scores, 0)
        if scores.scale_bits < self.f:
            scores = raise_scale(self.context, check_fits(self.context, scores, 2.0 ** (60 - self.f)), self.f)
        return check_fits(self.context, scores, limit_at(self.context, self.f))

    @property
    def _two(self) -> bool:
        return len(self.classes) == 2

    def _score(self) -> SharedTensor:
        """Of two classes, the number by which rows are in order: a logit or a probability. [n], f bits."""
        if self.scores.dim() == 1:
            return self.scores
        second = self.scores[:, 1]
        return second if self.output == "probabilities" else second - self.scores[:, 0]

    def _probabilities(self) -> SharedTensor:
        """[n, C], f bits."""
        found: Any
        if "probabilities" not in self._kept:
            if self.output == "probabilities":
                found = self._score().unsqueeze(1) if self._two else self.scores
            elif self._two:
                found = torch.sigmoid(self._score()).unsqueeze(1)
            else:
                found = torch.softmax(self.scores, 1)
            self._kept["probabilities"] = round_scale(self.context, found, self.f)
        return self._kept["probabilities"]

    def _ranking(self) -> SharedTensor:
        """[n, C], f bits: scores of two classes, of more the probabilities."""
        return self._score().unsqueeze(1) if self._two else self._probabilities()

    def _predicted(self) -> Any:
        """The predicted class as 0 and 1, [n, K]."""
        if self.output == "classes":
            return self._one_hot(self.scores.shares, len(self.classes))
        if not self._two:
            return one_hot_argmax(self.scores).shares
        if self.threshold is not None:
            cut = self.threshold
            cut = math.log(cut / (1 - cut)) if self.output == "logits" else cut
            # A score is a multiple of 2^-f, so that it reaches the threshold where it reaches the next multiple.
            shares, least = self._score().shares, math.ceil(cut * 2.0**self.f)
        elif self.scores.dim() == 2:
            shares, least = (self.scores[:, 1] - self.scores[:, 0]).shares, 1
        else:
            shares, least = self.scores.shares, (1 << self.f - 1) + 1 if self.output == "probabilities" else 1
        second = self.backend.at_least(shares, (least,))[0]
        return self._each(_side_by_side, -second + 1, second)

    def _losses(self) -> SharedTensor:
        """-log of the actual class's probability, [n], f bits."""
        f = self.f
        if self.output == "logits" and self._two:
            z = self._score()
            towards = self.backend.multiply(torch.mul, z.shares, self.y_code * 2 - 1)
            loss: Any = F.softplus(z.like(-towards, f, z.bound))
            return round_scale(self.context, loss, f)
        if self.output == "logits":
            logs: Any = -torch.log_softmax(self.scores, 1)
        else:
            p: Any = self.scores if self.scores.dim() == 2 else torch.stack((1 - self.scores, self.scores), 1)
            logs = -torch.log(p.clamp(2.0**-f, 1.0))
        logs = round_scale(self.context, logs, f)
        return logs.like(self._multiply("nk,nk->n", logs.shares, self.y), f)

    # Groups and products.

    def _each(self, f: Callable[..., Any], *values: Any, **public: Any) -> Any:
        return self.backend.each(partial(f, **public) if public else f, *values)

    def _sum(self, x: Any, dim: int) -> Any:
        return self._each(torch.sum, x, dim=dim)

    def _multiply(self, equation: str, x: Any, y: Any) -> Any:
        """The products of an `einsum`. Rounds 1."""
        return self.backend.multiply(partial(torch.einsum, equation), x, y)

    def _one_hot(self, codes: Any, count: int) -> Any:
        """Codes from 0 to count - 1 as 0 and 1, in a further dimension; another code ends in a range error."""
        if count == 2:
            other = self.backend.multiply(torch.mul, codes, codes - 1)
            forbid(self.context, -self.backend.is_zero(other) + 1)
            return self._each(_side_by_side, -codes + 1, codes)
        found = self.backend.is_zero(self._each(_repeated, codes, count=count) - torch.arange(count))
        forbid(self.context, -self._each(torch.sum, found, dim=-1) + 1)
        return found

    def _weights(self, codes: Sequence[Any], present: Any) -> Any:
        """1 for each group that a row is in and counts for; a further dimension of G groups, of which all is the first.

        Args:
            codes: by grouping column. present: the rows that count, or None.
        """
        if not codes and present is None:
            return self.backend.embedded(torch.ones((self.rows, 1), dtype=torch.int64))
        labels = list(self.groups.labels.values())
        parts = [self._one_hot(code, len(own)) for code, own in zip(codes, labels, strict=True)]
        if present is None:
            found = self._each(_in_a_row, *parts)
            return self.backend.affine(_with_number_before, found, 1)
        every = self._each(torch.unsqueeze, present, dim=-1)
        if not parts:
            return every
        return self._each(_in_a_row, every, self.backend.multiply(torch.mul, self._each(_in_a_row, *parts), every))

    def _weighted(self, weights: Any, x: Any) -> Any:
        """x [n, 1, ...] for each group, [n, G, ...], and 0 for rows that are not in it."""
        if self.plain:
            return x
        shape = (*weights.shape, *(1,) * (len(x.shape) - 2))
        return self.backend.multiply(torch.mul, self._each(torch.reshape, weights, shape=shape), x)

    def _summed(self, x: SharedTensor) -> Any:
        """The sums of x [n] over the rows of each group, [G], at the scale of x."""
        if self.plain:
            return self._each(torch.sum, x.shares, dim=0, keepdim=True)
        return self._multiply("ng,n->g", self.weights, x.shares)

    # Metrics.

    def metrics(self, names: Sequence[str]) -> dict[str, Statistic]:
        """The metrics of these names, in their order."""
        wanted = [name for name in names if name != "gaps"]
        quotients = _Quotients(self)
        if "auroc" in wanted or "auprc" in wanted:
            self._areas(wanted, quotients)
        if "accuracy" in wanted or "confusion" in wanted:
            pairs = self._multiply("ngk,nj->gkj", self.cells, self._predicted())  # [G, K, K]
            self._kept["confusion"] = pairs
            if "accuracy" in wanted:
                right = self._each(_traces, pairs)
                quotients.add("accuracy", right, 0, self.totals)
        if "log_loss" in wanted:
            quotients.add("log_loss", self._summed(self._losses()), self.f, self.totals)
        if "brier" in wanted:
            self._brier(quotients)
        if "ece" in wanted or "calibration" in wanted:
            self._calibration(wanted, quotients)
        found = quotients.statistics()
        if "confusion" in wanted:
            pairs = self._kept["confusion"]
            axes = Axis("actual", self.classes), Axis("predicted", self.classes)
            found |= self.by_groups("confusion", self._integers(pairs), pairs, None, axes)
        if "gaps" in names:
            found["gaps"] = self._gaps()
        order = [f"{name}{group}" for name in names for group in ("", *(f" by {v}" for v in self.groups.labels))]
        return {name: found[name] for name in order if name in found}

    def by_groups(
        self, name: str, values: SharedTensor, counts: Value, defined: Value | None, axes: tuple[Axis, ...]
    ) -> dict[str, Statistic]:
        """A statistic of all rows, and one of each grouping column, whose groups have no row in common: so a policy
        that withholds a group may withhold another one as well, lest it is the rest of all.

        Args:
            values, counts, defined: [G, ...].
        """
        if name not in TABLES:
            self._cells[name] = values.shares, counts, defined
        found = {}
        for of, places in {"": 0, **{f" by {v}": p for v, p in self.groups.places().items()}}.items():
            dimension = (Axis(of[4:], self.groups.labels[of[4:]]),) if of else ()
            whole = values.dtype == torch.int64
            value = values.like(values.shares[places], bound=values.bound)
            count = value if whole else self._integers(counts[places])
            known = None if defined is None else self._flags(defined[places])
            # Each row is in one bin of every class, and in one cell of all others.
            bins_of_classes = name == "calibration" and not self._two
            made = Statistic(
                value, count, (*dimension, *axes), name, known, 1.0 if whole else None,
                cells="nested" if bins_of_classes else "partition",
            )  # fmt: skip
            rows = self.public_rows if name in PARTITIONED and not bins_of_classes else None
            rest = None if rows is not None else self._filtered()
            columns = int(name == "calibration" or (name == "ece" and not self._two))
            # By the metric of a model that gives one score to all, a reader computes how many rows each class has.
            behind = None
            if name != "confusion":
                behind = self._integers(self._each(_spread, self.rarest[places], shape=tuple(value.shape)))
            found[name + of] = with_origin(
                made,
                (self.of, of, self.classes),
                self.results,
                rows=rows,
                many=self.many,
                columns=columns,
                behind=behind,
                cells=rest,
            )
        return found

    def _areas(self, wanted: Sequence[str], quotients: _Quotients) -> None:
        """Both areas, from one sort of the scores with labels and groups beside them. All values are [n, C, G].

        With T and F the positive and negative rows up to a row, and T' and F' those before the first row of an equal
        score, sums are over the last rows of equal scores, where T - T' rows are positive among the equal ones:

            2 P N AUROC = sum (T - T') (2 N - F - F'),      P AP = sum (T - T') T / (T + F).
        """
        backend, columns = self.backend, 1 if self._two else len(self.classes)
        ranking = self._ranking()
        wide = partial(_expanded, columns=columns)
        labels = self._each(torch.unsqueeze, self.y_code, dim=1) if self._two else self.y
        beside = [
            labels,
            *(self._each(wide, v) for v in (*self.codes, *(() if self.present is None else (self.present,)))),
        ]
        keys, *sorted_ = sort_rows(ranking, *(self._integers(v) for v in beside))
        positive, *rest = (v.shares for v in sorted_)
        present = None if self.present is None else rest.pop()
        positive = self._each(torch.unsqueeze, positive, dim=-1)
        if self.plain:
            one = backend.embedded(torch.ones((self.rows, columns, 1), dtype=torch.int64))
            inside, here = positive, one
        else:
            here = self._weights(rest, present)
            inside = backend.multiply(torch.mul, here, positive)
        sums = self._each(_cumulative, inside, here - inside)  # [n, C, 2 G]: T and F
        ends = backend.is_zero(self._each(_next_differences, keys.shares))
        ends = backend.affine(_with_end, -ends + 1, 1)  # [n, C, 1]
        last, before = self._previous(ends, sums)
        groups = here.shape[-1]
        positives, negatives = sums[..., :groups], sums[..., groups:]
        steps = last[..., :groups] - backend.multiply(torch.mul, ends, before[..., :groups])
        p, n = positives[-1], negatives[-1]  # [C, G]
        mixed = backend.multiply(torch.mul, p, n)
        counts = backend.each(torch.transpose, p - self._relu(p - n), dim0=0, dim1=1)  # the smaller, [G, C]
        flip = lambda v: self._each(torch.transpose, v, dim0=0, dim1=1)
        if "auroc" in wanted:
            above = self._each(_repeated_rows, n * 2, rows=self.rows) - negatives - before[..., groups:]
            area = self._multiply("ncg,ncg->cg", steps, above)
            pairs = max(self.rows**2 // 2, MOST_ROWS + 1)
            quotients.add("auroc", flip(area), 0, flip(mixed * 2), most=pairs, counts=counts, by_class=True)
        if "auprc" not in wanted:
            return
        if self.plain:
            # Of one group that holds all rows T + F is the public number of the row.
            found = backend.multiply(torch.mul, steps, positives)
            factors = torch.round(2.0**_SUM_BITS / torch.arange(1, self.rows + 1, dtype=torch.float64)).to(torch.int64)
            found, bits = self._sum(found * factors.reshape(-1, 1, 1), 0), _SUM_BITS
            found = round_scale(self.context, self.like.like(found, bits, None), self.f + 4)
            found, bits = found.shares, found.scale_bits
        else:
            rows = positives + negatives
            rows = rows + backend.is_zero(rows)
            precision = quotient(self.context, self._integers(positives), self._integers(rows), positive=True)
            precision = round_scale(self.context, precision, self.f)
            found, bits = self._multiply("ncg,ncg->cg", steps, precision.shares), self.f
        quotients.add("auprc", flip(found), bits, flip(p), counts=counts, defined=flip(mixed), by_class=True)

    def _relu(self, x: Any) -> Any:
        return self.backend.where_positive(x, (x,))[0]

    def _integers(self, shares: Any) -> SharedTensor:
        """Whole numbers up to n, as a tensor."""
        return self.like.like(shares, 0, float(self.rows), dtype=torch.int64)

    def _previous(self, ends: Any, sums: Any) -> tuple[Any, Any]:
        """The sums at last rows of equal scores, 0 elsewhere; and for each row those at the last such row before it.

        By doubling: log2 n rounds. A row without an end among the rows looked at takes over what a row before has.
        """
        backend = self.backend
        last = found = backend.multiply(torch.mul, ends, sums)
        seen, step = ends, 1
        while step < self.rows:
            open_ = -seen[step:] + 1
            moved = self._each(_in_a_row, found[:-step], seen[:-step])
            moved = backend.multiply(torch.mul, open_, moved)
            width = found.shape[-1]
            found = self._each(_stacked, found[:step], found[step:] + moved[..., :width])
            seen = self._each(_stacked, seen[:step], seen[step:] + moved[..., width:])
            step *= 2
        return last, self._each(_one_later, found)

    def _brier(self, quotients: _Quotients) -> None:
        """Squared distances of probabilities from 0 and 1: of two classes of the second one's, of more added up."""
        p = self._probabilities().shares
        y = self._each(torch.unsqueeze, self.y_code, dim=1) if self._two else self.y
        squares = self._sum(self.backend.square(p - (y << self.f)), 1)
        total = self.like.like(self._summed(self.like.like(squares, 2 * self.f, None)), 2 * self.f, None)
        total = round_scale(self.context, total, self.f + 4)
        quotients.add("brier", total.shares, total.scale_bits, self.totals)

    def _calibration(self, wanted: Sequence[str], quotients: _Quotients) -> None:
        """Rows, probabilities and positive rows of each bin: products with comparisons with the bins' ends."""
        p, f = self._probabilities(), self.f
        columns = p.shape[1]
        ends = [i / self.bins for i in range(1, self.bins)]
        rows = self._each(torch.unsqueeze, self.weights, dim=2)  # [n, G, 1]
        wide = self._each(_wide, rows, columns=columns)
        probabilities = self._weighted(self.weights, self._each(torch.unsqueeze, p.shares, dim=1))
        actual = self.cells[:, :, 1:] if self._two else self.cells
        content = self._each(_stacked_last, wide, probabilities, actual)  # [n, G, C, 3]
        total = self._each(torch.sum, content, dim=0, keepdim=True)
        if ends:
            # A bin holds the multiples of 2^-f above its left end.
            cuts = tuple(math.floor(end * 2.0**f) + 1 for end in ends)
            over = self.backend.at_least(p.shares, cuts, high=min(63, f + 12))  # [bins - 1, n, C]
            above = self._multiply("bnc,ngcv->bgcv", over, content)
            total = self._each(_bin_sums, total, above)
        inside, summed, right = (total[..., i] for i in range(3))  # [bins, G, C]
        if "ece" in wanted:
            off = summed - (right << f)
            off = self._relu(off) * 2 - off
            totals = self._each(_wide, self._each(torch.unsqueeze, self.totals, dim=1), columns=columns)
            quotients.add("ece", self._sum(off, 0), f, totals, by_class=True)
        if "calibration" in wanted:
            moved = lambda v: self._each(_bins_last, v)  # [G, C, bins]
            counts, tops = moved(inside), self._each(_stacked_last, moved(summed), moved(right << f))
            both = self._each(_stacked_last, counts, counts)
            labels = tuple(
                f"{'[' if i == 0 else '('}{i / self.bins:.4g}, {(i + 1) / self.bins:.4g}]" for i in range(self.bins)
            )
            axes = (Axis("bin", labels), Axis("of", ("probability", "fraction")))
            quotients.add("calibration", tops, f, both, by_class=True, axes=axes)

    def _gaps(self) -> Statistic:
        """The largest less the smallest value of each grouping column's groups, of metrics of one value a group."""
        columns: list[tuple[Any, ...]] = []
        labels: list[str] = []
        for name, parts in self._cells.items():
            if len(parts[0].shape) == 1:
                columns.append(parts)
                labels.append(name)
                continue
            columns += [tuple(v[:, i] for v in parts) for i in range(len(self.classes))]
            labels += [f"{name} {label}" for label in self.classes]
        values, counts, defined = (self._each(_as_columns, *one) for one in zip(*columns, strict=True))
        parts = []
        for places in self.groups.places().values():
            own, every = values[places], self.backend.is_zero(-self._sum(defined[places], 0) + len(places))
            gap = self.backend.largest(own) + self.backend.largest(-own)
            gap = self.backend.multiply(torch.mul, gap, every)
            parts.append((gap, -self.backend.largest(-counts[places]), every))
        gap, count, every = (self._each(_as_columns, *v) for v in zip(*parts, strict=True))
        axes = (Axis("metric", tuple(labels)), Axis("between", tuple(self.groups.labels)))
        value = self.like.like(gap, self.f, self.most, dtype=torch.float32)
        made = Statistic(value, self._integers(count), axes, "gaps", self._flags(every))
        least = [-self.backend.largest(-self.rarest[places]) for places in self.groups.places().values()]
        behind = self._each(torch.Tensor.expand, self._each(_as_row, *least), size=tuple(value.shape))
        return with_origin(
            made,
            (self.of, self.classes),
            self.results,
            many=self.many,
            behind=self._integers(behind),
            cells=self._filtered(),
        )

    def _filtered(self) -> SharedTensor | None:
        """The rows of a public number that do not count, which the digits of an area show; None if all do."""
        if self.public_rows is None or self.present is None:
            return None
        return self._integers(-self.totals[:1] + self.public_rows)

    def _flags(self, shares: Any) -> SharedTensor:
        return self.like.like(shares, 0, 1.0, dtype=torch.bool)


PARTITIONED = ("accuracy", "log_loss", "brier", "ece", "calibration", "confusion")
"""Metrics whose counts are of the rows of each group, each row once (in each of several columns)."""

TABLES = ("calibration", "confusion")
"""Metrics of more than one value a group, which have no gaps."""


@dataclass
class _Quotient:
    """A metric of values top / bottom, [G, ...]; see `_Quotients.add`."""

    top: Value
    scale_bits: int
    bottom: Value
    most: int
    counts: Value
    defined: Value
    by_class: bool
    axes: tuple[Axis, ...]

    @property
    def large(self) -> bool:
        """Whether the divisor is one of pairs of rows, which have twice the bits."""
        return self.most > MOST_ROWS


class _Quotients:
    """Quotients of all metrics, computed together at the end: so many rounds for one as for all."""

    def __init__(self, of: _Evaluation):
        self._of = of
        self._parts: dict[str, _Quotient] = {}

    def add(
        self, name: str, top: Value, scale_bits: int, bottom: Value, *, most: int | None = None,
        counts: Value | None = None, defined: Value | None = None, by_class: bool = False, axes: tuple[Axis, ...] = (),
    ) -> None:  # fmt: skip
        """A metric of values top / bottom.

        Args:
            top: at so many fraction bits, f + 4 at most. bottom: whole numbers up to `most`, n unless named.
            counts: the rows behind each value; bottom unless given.
            defined: of bottom's shape, 0 where there is no value; bottom unless given.
            by_class: whether the second dimension is that of the classes against the rest.
            axes: of further dimensions.
        """
        counts, defined = (bottom if v is None else v for v in (counts, defined))
        self._parts[name] = _Quotient(top, scale_bits, bottom, most or self._of.rows, counts, defined, by_class, axes)

    def statistics(self) -> dict[str, Statistic]:
        """The metrics."""
        of, parts = self._of, list(self._parts.values())
        if not parts:
            return {}
        flat = lambda values: of._each(_flat, *values)
        # A divisor that is zero becomes one, and the value then is zero.
        zero = of.backend.is_zero(flat([*(part.bottom for part in parts), *(part.defined for part in parts)]))
        sizes = [part.top.shape.numel() for part in parts]
        zeros, undefined = zero[: sum(sizes)], zero[sum(sizes) :]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        values: dict[int, Value] = {}
        for large in (False, True):
            chosen = [i for i, part in enumerate(parts) if part.large == large]
            if not chosen:
                continue
            bits = 0 if large else of.f + 4
            top = flat([parts[i].top << bits - parts[i].scale_bits for i in chosen])
            bottom = flat([parts[i].bottom for i in chosen])
            bottom = bottom + flat([zeros[starts[i] : starts[i] + sizes[i]] for i in chosen])
            divisor_bits = max(parts[i].most for i in chosen).bit_length()
            # An area is 1 at most, and a mean of losses below the limit of scores and log of the classes.
            most = 1 if large else of.context.scheme.activation_bits + 2
            found, at = exact_quotient(of.context, top, bottom, bits, most, divisor_bits, of.f), 0
            for i in chosen:
                values[i], at = found[at : at + sizes[i]], at + sizes[i]
        known = -undefined + 1
        product = of.backend.multiply(torch.mul, flat([values[i] for i in range(len(parts))]), known)
        results = {}
        for i, (name, part) in enumerate(self._parts.items()):
            here = slice(starts[i], starts[i] + sizes[i])
            results |= self._statistics(name, part, product[here], known[here])
        return results

    def _statistics(self, name: str, part: _Quotient, values: Value, known: Value) -> dict[str, Statistic]:
        """Values and flags in their dimensions, without that of the classes where there are two."""
        of, shape = self._of, list(part.top.shape)
        classes = (Axis("class", of.classes),) if part.by_class and not of._two else ()
        if part.by_class and of._two:
            del shape[1]
        view = lambda v: of._each(torch.reshape, v, shape=shape)
        found = of.like.like(view(values), of.f, of.most, dtype=torch.float32)
        return of.by_groups(name, found, view(part.counts), view(known), (*classes, *part.axes))


# Local maps, each additive in its values.


def _side_by_side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, y), -1)


def _stacked_last(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values, -1)


def _in_a_row(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values, -1)


def _stacked(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values, 0)


def _as_columns(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values, 1)


def _as_row(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values)


def _spread(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x along the first dimension of a shape, or a single number everywhere."""
    return x.reshape((*x.shape, *(1,) * (len(shape) - x.dim()))).expand(shape)


def _flat(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat([v.reshape(-1) for v in values])


def _repeated(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unsqueeze(-1).expand(*x.shape, count)


def _expanded(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.unsqueeze(1).expand(-1, columns)


def _repeated_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.unsqueeze(0).expand(rows, *x.shape)


def _wide(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.expand(*x.shape[:-1], columns)


def _with_number_before(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat((torch.full_like(x[..., :1], number), x), -1)


def _with_end(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat((x, torch.full_like(x[:1], number))).unsqueeze(-1)


def _next_differences(x: torch.Tensor) -> torch.Tensor:
    return x[:-1] - x[1:]


def _cumulative(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values, -1).cumsum(0)


def _one_later(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


def _traces(x: torch.Tensor) -> torch.Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _bin_sums(total: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """Of the sums of all rows and of those above each end, the sums of each bin."""
    return torch.cat((total, above)) - torch.cat((above, torch.zeros_like(total)))


def _bins_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(0, -1)
