"""What a querying party has to know to encode a table for a model: its columns, categories, and missing numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, DtypeError, NonFiniteError, ShapeError

UNSEEN = ("error", "other")


@dataclass
class Schema:
    """The public facts on a model's columns. The model's owner publishes it, as a tokenizer is published for texts.

    Attributes:
        columns: their number. names: their names, or None.
        categories: by categorical column its categories in the order of their codes.
        unseen: by categorical column what a category that is not among them is: "error", or "other", which the model
            treats as its library does.
        missing: whether NaN is taken. zero_missing: whether 0 counts as missing.
        complete: the columns that lack no numbers even where `missing` holds, since the model fills none of theirs.
        single: whether numbers are rounded to float32 first, as the model's library does.
    """

    columns: int
    names: list[str] | None = None
    categories: dict[int, list[Any]] = field(default_factory=dict)
    unseen: dict[int, str] = field(default_factory=dict)
    missing: bool = False
    zero_missing: bool = False
    single: bool = False
    complete: list[int] = field(default_factory=list)

    way_out_of_missing = (
        "its owner takes missing numbers with sectorch.fitted_models.module(model, missing=True), where the model "
        "does, or fill them"
    )

    @property
    def categorical(self) -> list[int]:
        """The categorical columns."""
        return sorted(self.categories)

    def rows(self, table: Any) -> dict[str, torch.Tensor]:
        """A table as the arguments of a model: `secure_model(**schema.rows(table))`. Runs at the querying party.

        Args:
            table: a DataFrame (pandas, polars), a NumPy array, a tensor or a list of rows, [rows, columns].

        Returns:
            "x", [rows, columns] float64, with 0 for categories and missing numbers; "missing", the marks of missing
            numbers, where the model takes them; "codes", [rows, categorical columns], where there are any.

        Raises:
            ShapeError, ArgumentError: another number of columns, other names, or a category that is not known.
            NonFiniteError: NaN where the model takes none, or infinity. DtypeError: a number that is none.
        """
        columns = self._columns(table)
        count = len(columns[0]) if columns else 0
        x, missing = np.zeros((count, self.columns)), np.zeros((count, self.columns))
        codes = np.zeros((count, len(self.categories)), np.int64)
        for i, column in enumerate(columns):
            name = self._name(i)
            if i in self.categories:
                codes[:, self.categorical.index(i)] = self._codes(i, column)
                continue
            try:
                if np.asarray(column).dtype.kind in "cmM":
                    raise TypeError
                numbers = np.asarray(column, np.float64)
            except (TypeError, ValueError):
                raise DtypeError(f"{name} holds what is no number; the model takes numbers there") from None
            lost = np.isnan(numbers)
            if lost.any() and i in self.complete:
                raise NonFiniteError(f"{name} holds NaN in {int(lost.sum())} rows, and the model fills none there")
            if lost.any() and not self.missing:
                raise NonFiniteError(f"{name} holds NaN in {int(lost.sum())} rows; {self.way_out_of_missing}")
            if np.isinf(numbers).any():
                raise NonFiniteError(f"{name} holds infinity; leave these rows out, or name the largest number")
            lost = lost | (np.abs(numbers) <= 1e-35) if self.zero_missing else lost
            x[:, i], missing[:, i] = np.where(lost, 0.0, numbers), lost
        x = x.astype(np.float32).astype(np.float64) if self.single else x
        made = {"x": torch.from_numpy(x)}
        if self.missing:
            made["missing"] = torch.from_numpy(missing)
        if self.categories:
            made["codes"] = torch.from_numpy(codes)
        return made

    def _columns(self, table: Any) -> list[Any]:
        """The table's columns."""
        if hasattr(table, "columns") and hasattr(table, "shape"):
            names = [str(name) for name in table.columns]
            if len(names) != self.columns:
                raise ShapeError(f"the model was fitted on {self.columns} columns, and the table has {len(names)}")
            if self.names is not None and names != list(self.names):
                wrong = next(i for i, (a, b) in enumerate(zip(names, self.names, strict=True)) if a != b)
                raise ArgumentError(
                    f"column {wrong} of the table is '{names[wrong]}', and the model's is '{self.names[wrong]}': give "
                    f"the columns in the model's order, table[schema.names]"
                )
            return [np.asarray(table[name]) for name in table.columns]
        array = np.asarray(table)
        if array.ndim != 2 or array.shape[1] != self.columns:
            raise ShapeError(f"the model was fitted on {self.columns} columns, and the table is {list(array.shape)}")
        return list(array.T)

    def _codes(self, column: int, values: Any) -> np.ndarray:
        known = self.categories[column]
        place = {_key(value): code for code, value in enumerate(known)}
        found = np.array([place.get(_key(value), len(known)) for value in np.asarray(values, object)], np.int64)
        lost = found == len(known)
        if lost.any() and self.unseen.get(column, "error") == "error":
            raise ArgumentError(
                f"{self._name(column)} has {int(lost.sum())} rows of a category that the model does not know; it knows "
                f"{len(known)}, which schema.categories[{column}] lists"
            )
        return found

    def _name(self, column: int) -> str:
        return f"column {column}" if self.names is None else f"column '{self.names[column]}'"

    def to_json(self) -> str:
        """The schema as text, to be published."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """The schema of a text.

        Raises:
            ArgumentError: the text is no schema.
        """
        try:
            given = json.loads(text)
            for name in ("categories", "unseen"):
                given[name] = {int(column): value for column, value in given[name].items()}
            made = cls(**given)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ArgumentError("this is no schema of a model's columns: Schema.to_json writes one") from None
        sound = (
            isinstance(made.columns, int) and made.columns > 0
            and (made.names is None or len(made.names) == made.columns)
            and all(0 <= c < made.columns and isinstance(v, list) for c, v in made.categories.items())
            and all(v in UNSEEN for v in made.unseen.values())
        )  # fmt: skip
        if not sound:
            raise ArgumentError("a schema's columns, names and categories do not fit each other")
        return made


def _key(value: Any) -> Any:
    """A category as a key: numbers by their value, and one key for whatever is missing."""
    number = isinstance(value, (float, np.floating))
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (number and math.isnan(value)):
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)  # equal to a float of this value, and exact beyond 2^53
    if isinstance(value, (float, np.number)):
        return float(value)
    return str(value)
