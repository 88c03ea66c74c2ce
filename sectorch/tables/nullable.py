"""Columns with missing values, and elementwise functions of them: three-valued, as pandas' nullable types are.

A comparison with a missing value is neither true nor false, and `~` leaves it so; a filter takes rows that are true.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..config import Scheme
from ..errors import NonFiniteError, SecretAccessError, ShapeError
from ..session import Session
from ..tensor import SharedTensor
from ..tensor.secret import dtype_of
from ..tensor.table import IN_PLACE, one_call, row_of, spell

_WITH_POLES = frozenset(
    ("div", "floor_divide", "fmod", "log", "log10", "log2", "pow", "reciprocal", "remainder", "rsqrt")
)
"""Functions that have no value at some numbers: they see 1 where a value is missing."""

_ELEMENTWISE = _WITH_POLES | {
    "abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "eq", "exp", "exp2", "expm1", "floor", "frac",
    "ge", "gt", "heaviside", "isclose", "le", "log1p", "logical_and", "logical_not", "logical_or", "logical_xor", "lt",
    "maximum", "minimum", "mul", "ne", "neg", "positive", "relu", "round", "rsub", "sigmoid", "sign", "sqrt", "square",
    "sub", "tanh", "to", "trunc",
}  # fmt: skip


class NullableColumn:
    """A column (n,) of a table whose values may be missing; a comparison of one; a result of elementwise functions.

        adults = table.where(table["age"] >= 18)            # without the rows that have no age, as in pandas
        others = table.where(~(table["age"] >= 18))         # likewise
        table = table.with_columns(bmi=table["weight"] / table["height"] ** 2)  # missing where one of the two is
        known = table.filled("age", 0)                      # a SharedTensor

    It is no tensor: torch's elementwise functions and Python's operators take it, and what would count a missing value
    as a number (a mean, a model) refuses it. As in pandas a sum leaves missing values out, and `isin` is false there;
    `torch.where` takes its last argument.

    Beside the function's own cost: rounds 1 for a comparison, for two columns, and where a quotient or a power is of a
    computed column; 4 for `&` and `|`. Nobody learns where values are missing.

    Attributes:
        values: SharedTensor (n,); a flag is 0 where it is missing.
        absent: SharedTensor (n,), bool: where it is.
    """

    differentiable = True  # SharedTensors leave calls with one to `__torch_function__` below
    __array_ufunc__ = None  # numpy leaves operators to this class

    def __init__(self, values: SharedTensor, absent: SharedTensor, zeroed: bool = False):
        """
        Args:
            zeroed: whether values are known to be 0 where they are missing.
        """
        self.values, self.absent, self._zeroed = values, absent, zeroed

    @property
    def session(self) -> Session:
        """The session of its shares."""
        return self.values.session

    @property
    def party(self) -> Party:
        """The answering party of its shares."""
        return self.values.party

    @property
    def scheme(self) -> Scheme:
        """The number format of its shares."""
        return self.values.scheme

    @property
    def shape(self) -> torch.Size:
        """(n,)."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """As of its values."""
        return dtype_of(self.values)

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        return f"NullableColumn({len(self)} rows, {self.dtype}; in shares, with missing values)"

    def filled(self, value: float = 0) -> SharedTensor:
        """The column with a public number where it is missing, and no further trace of that. Rounds 1; 0 for an
        owner's column and a comparison with the value 0."""
        if self._zeroed and not value:
            return self.values
        return torch.where(self.absent, value, self.values)  # pyright: ignore[reportReturnType]

    def reveal(self, to: Any = None) -> torch.Tensor:
        """The values, NaN where they are missing, learned by the named parties; as `SharedTensor.reveal`, twice."""
        values, absent = self.filled().reveal(to), self.absent.reveal(to)
        if values.is_meta or not absent.any():
            return values
        return torch.where(absent, math.nan, values if values.is_floating_point() else values.double())

    def _refuse(self, what: str) -> NoReturn:
        raise NonFiniteError(
            f"{what} takes no column that may have missing values: statistics leave these out (sectorch.tables.mean), "
            f"table.known(name) says where they are not, and .filled(number) puts a number there"
        )

    def __bool__(self) -> bool:
        raise SecretAccessError("whether a secret column is true would take its content out; table.where filters rows")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("numpy")

    def __iter__(self) -> Any:
        self._refuse("a loop")

    def __getitem__(self, key: Any) -> Any:
        self._refuse("indexing")

    def __getattr__(self, name: str) -> Any:
        func = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if not callable(func):
            raise AttributeError(f"a NullableColumn has no {name!r}")
        return partial(_call, func, self)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs or {}))
        columns = [leaf for leaf in leaves if isinstance(leaf, NullableColumn)]
        row, first = row_of(func), columns[0]
        name = "" if row is None or func in IN_PLACE else row.name

        def call(of_column: Callable[[NullableColumn], Any]) -> Any:
            own = [of_column(leaf) if isinstance(leaf, NullableColumn) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(own, structure)
            return func(*args, **kwargs)

        if name == "isin" and len(columns) == 1 and args and args[0] is first:
            return call(lambda x: x.values) & ~first.absent
        for x in leaves:
            if isinstance(x, (torch.Tensor, NullableColumn)) and tuple(x.shape) not in ((), (1,), tuple(first.shape)):
                if name in _ELEMENTWISE:
                    raise ShapeError(f"{spell(func)} of a column of {len(first)} rows takes columns of as many and "
                                     f"numbers, got the shape {tuple(x.shape)}")  # fmt: skip
                first._refuse(spell(func))
        if name == "sum":
            return call(lambda x: x.filled())
        if name == "where" and len(args) == 3:
            return _choice(*args)
        if name not in _ELEMENTWISE:
            first._refuse(spell(func))
        if name.startswith("logical_") and name != "logical_xor" and all(x.dtype == torch.bool for x in columns):
            return _logic(name, *args)
        poles = name in _WITH_POLES
        found = call(lambda x: x.values if not poles else x.values + x.absent if x._zeroed else x.filled(1))
        return _with_absent(found, _union(columns))


def _call(func: Callable, *args: Any, **kwargs: Any) -> Any:
    args = tuple(torch.as_tensor(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in args)
    return NullableColumn.__torch_function__(func, (), args, kwargs)


def _operator(func: Callable, reflected: bool = False) -> Callable:
    def run(self: NullableColumn, *other: Any) -> Any:
        if not all(isinstance(x, (int, float, torch.Tensor, np.ndarray, np.generic, NullableColumn)) for x in other):
            return NotImplemented
        return _call(func, *other, self) if reflected else _call(func, self, *other)

    return run


for _name, _func in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide, "pow": torch.pow,
    "floordiv": torch.floor_divide, "mod": torch.remainder, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}.items():  # fmt: skip
    setattr(NullableColumn, f"__{_name}__", _operator(_func))
    setattr(NullableColumn, f"__r{_name}__", _operator(_func, reflected=True))
for _name, _func in {
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne, "neg": torch.neg,
    "abs": torch.abs, "invert": torch.bitwise_not, "pos": torch.positive,
}.items():  # fmt: skip
    setattr(NullableColumn, f"__{_name}__", _operator(_func))


def _union(columns: list[NullableColumn]) -> SharedTensor:
    """Where one of the columns is missing."""
    found: Any = None
    for absent in {id(x.absent.shares): x.absent for x in columns}.values():
        found = absent if found is None else found | absent
    return found


def _with_absent(found: Any, absent: SharedTensor) -> NullableColumn:
    if dtype_of(found) != torch.bool:
        return NullableColumn(found, absent)
    return NullableColumn(found & ~absent, absent, zeroed=True)


def _neither(x: SharedTensor, y: SharedTensor) -> Any:
    """Rows of neither x nor y, of which no row is both. Local."""
    with one_call(x, y) as (_, results):
        found = x.like(-(x.shares + y.shares) + 1, bound=1.0, dtype=torch.bool)
        results.append(found)
    return found


def _sides(x: Any) -> tuple[Any, Any]:
    """Where a condition is true, and where it is false."""
    if isinstance(x, NullableColumn):
        return x.values, _neither(x.values, x.absent)
    return x, torch.logical_not(x) if isinstance(x, torch.Tensor) else not x


def _condition(true: Any, false: Any) -> NullableColumn:
    return NullableColumn(true, _neither(true, false), zeroed=True)


def _logic(name: str, x: Any, y: Any = None) -> NullableColumn:
    """`~`, `&` and `|` of three values (Kleene): false and missing is false, true or missing is true."""
    true, false = _sides(x)
    if name == "logical_not":
        return NullableColumn(false, x.absent, zeroed=True)
    other, unless = _sides(y)
    if name == "logical_and":
        return _condition(true & other, false | unless)
    return _condition(true | other, false & unless)


def _choice(condition: Any, x: Any, y: Any) -> Any:
    """torch.where: y where the condition is false or missing."""
    condition = condition.filled() if isinstance(condition, NullableColumn) else condition
    if not any(isinstance(v, NullableColumn) for v in (x, y)):
        return torch.where(condition, x, y)
    values = [v.values if isinstance(v, NullableColumn) else v for v in (x, y)]
    absent = [v.absent if isinstance(v, NullableColumn) else False for v in (x, y)]
    lost: Any = torch.where(condition, *absent)
    return _with_absent(torch.where(condition, *values), lost)
