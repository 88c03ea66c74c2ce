"""Tables: equal-length columns of several owners, in shares, with public names, kinds, categories and lengths."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..choreography import Party
from ..config import Scheme, scheme_of
from ..errors import ArgumentError, DtypeError, FixedPointRangeError, NonFiniteError, SessionMismatchError, ShapeError
from ..ops.common import forbid
from ..optional_deps import required_imports
from ..ring import range_limit
from ..session import Session, default_session
from ..tensor import SharedTensor, share_tensor
from ..tensor.secret import dtype_of
from ..tensor.table import LARGEST, one_call
from .nullable import NullableColumn

Kind = Literal["number", "integer", "category", "flag"]
KINDS = get_args(Kind)

_DTYPES = {"number": torch.float64, "integer": torch.int64, "category": torch.int64, "flag": torch.bool}
"""In which the owner shares a column. Numbers are float32 tensors from then on, as models take them; their fixed-point
numbers keep the digits of float64."""

_LABELS = _DTYPES | {"number": torch.float32}

_ANNOUNCED_BYTES = 1 << 24
"""The most bytes of an announced schema: it comes from another party, and may not take any amount of memory."""


@dataclass(frozen=True)
class Column:
    """Public facts of a column.

    Args:
        kind: "number" (fixed point), "integer" (exact, without fraction bits), "category" (whole codes from 0, in the
            order of `categories`), or "flag" (0 or 1).
        categories: of a "category": its values, which are text, whole numbers or booleans. They become public.
        missing: whether values may be missing. Their value is 0, and a secret flag says where they are.
        limit: of a number or an integer: all magnitudes are below it. None stands for the number format's activation
            limit (4,096 with 20 fraction bits). Narrow limits make comparisons cheaper and products finer.

    Raises:
        ArgumentError: an unknown kind, categories that repeat or of another kind, or a limit that bounds nothing.
    """

    kind: Kind
    categories: tuple[Any, ...] | None = None
    missing: bool = False
    limit: float | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ArgumentError(f"a column's kind is one of {', '.join(KINDS)}, got {self.kind!r:.40}")
        if (self.kind == "category") != (self.categories is not None):
            raise ArgumentError(
                f"a column of kind 'category' names its categories and no other does, got {self.kind!r} and "
                f"{'none' if self.categories is None else len(self.categories)}"
            )
        if self.categories is not None:
            values = tuple(v.item() if isinstance(v, np.generic) else v for v in self.categories)
            if not values or not all(isinstance(v, (str, int, bool)) for v in values):
                raise ArgumentError("categories are text, whole numbers or booleans, and there is at least one")
            if len(set(values)) < len(values):
                raise ArgumentError("a category is named twice (True is 1, and False is 0)")
            object.__setattr__(self, "categories", values)
        if type(self.missing) is not bool:
            raise ArgumentError(f"missing is True or False, got {self.missing!r:.40}")
        counted = self.kind in ("number", "integer")
        if self.limit is not None and not (
            counted and isinstance(self.limit, (int, float)) and 0 < self.limit < math.inf
        ):
            raise ArgumentError(f"limit is a number above 0, of a number or an integer, got {self.limit!r:.40}")

    @property
    def bound(self) -> float | None:
        """The largest magnitude of a value, as far as it is known: the most that one row adds to a sum."""
        if self.kind == "flag":
            return 1.0
        return len(self.categories) - 1.0 if self.categories is not None else self.limit

    def __str__(self) -> str:
        words = [self.kind]
        if self.categories is not None:
            shown = ", ".join(map(str, self.categories[:4])) + (", ..." if len(self.categories) > 4 else "")
            words.append(f"({shown})")
        elif self.limit is not None:
            words.append(f"below {self.limit:g}")
        return " ".join(words + (["may be missing"] if self.missing else []))


ColumnSpec = Column | str | Sequence[Any] | None
"""How a user names a column's facts: a Column, a kind, its categories, or None for what the frame says."""


# Frames: what the owner has in the clear, as numpy arrays. Nothing is imported for a frame that is there already.


@dataclass(frozen=True)
class _Plain:
    """A column of a frame: values, where they are missing, and the categories to which codes refer."""

    values: np.ndarray
    missing: np.ndarray | None = None
    categories: tuple[Any, ...] | None = None


def _package(x: Any) -> str:
    return type(x).__module__.split(".")[0]


def _columns_of(frame: Any) -> dict[str, Any]:
    """The columns of a frame by name, unread.

    Raises:
        ArgumentError: no frame, or names that are no text or stand twice.
        ShapeError: columns of different lengths.
    """
    package = _package(frame)
    if package == "pandas" and hasattr(frame, "columns"):
        names = list(frame.columns)
        columns = [frame.iloc[:, i] for i in range(len(names))]
    elif package == "polars" and hasattr(frame, "get_columns"):
        columns = frame.get_columns()
        names = [column.name for column in columns]
    elif package == "pyarrow" and hasattr(frame, "column_names"):
        names, columns = list(frame.column_names), list(frame.columns)
    elif isinstance(frame, np.ndarray) and frame.dtype.names is not None and frame.ndim == 1:
        names = list(frame.dtype.names)
        columns = [frame[name] for name in names]
    elif isinstance(frame, Mapping):
        names, columns = list(frame), list(frame.values())
    elif hasattr(frame, "__arrow_c_stream__"):
        with required_imports(f"a table of {type(frame).__name__}", "pyarrow", ArgumentError):
            import pyarrow
        return _columns_of(pyarrow.table(frame))
    elif package == "polars" and hasattr(frame, "collect"):
        raise ArgumentError("owned() takes a polars DataFrame, got a LazyFrame: frame.collect()")
    else:
        raise ArgumentError(
            f"owned() takes a DataFrame of pandas or polars, an Arrow table or a dict of numpy arrays, got a "
            f"{type(frame).__name__}"
        )
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError("a column's name is text; rename the columns first")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"two columns have one name: {', '.join(map(repr, twice))}")
    if len({len(column) for column in columns}) > 1:
        raise ShapeError("the columns of a table have one length; these have several")
    return dict(zip(names, columns, strict=True))


def _read(name: str, column: Any) -> _Plain:
    """A column as numpy arrays: numbers, booleans, codes with their categories, or objects; without a needless copy.

    Raises:
        DtypeError: of a type that is none of these.
    """
    package = _package(column)
    if package == "pandas":
        return _read_pandas(name, column)
    if package == "polars":
        import polars

        if column.dtype == polars.Enum:
            own = column.dtype.categories
            return _Plain(column.to_physical().cast(polars.Int64).fill_null(-1).to_numpy(), _nulls(column), tuple(own))
        if column.dtype == polars.Categorical:  # its categories are those of every column of the process
            column = column.cast(polars.String)
        if column.dtype == polars.String:
            return _Plain(column.to_numpy(), _nulls(column))
        if not (column.dtype.is_integer() or column.dtype.is_float() or column.dtype == polars.Boolean):
            raise _no_type(name, str(column.dtype))
        nulls = _nulls(column)
        zero = False if column.dtype == polars.Boolean else 0
        return _Plain((column if nulls is None else column.fill_null(zero)).to_numpy(), nulls)
    if package == "pyarrow":
        return _read_arrow(name, column)
    if isinstance(column, torch.Tensor) and type(column) is torch.Tensor and not column.is_meta:
        column = column.detach().cpu().numpy() if column.dtype != torch.bfloat16 else column.detach().float().numpy()
    values = np.asarray(column)
    if values.ndim != 1:
        raise ShapeError(f"a column has one dimension; {name!r} has {values.ndim}")
    if isinstance(column, np.ma.MaskedArray):
        return _Plain(column.filled(0), np.ma.getmaskarray(column))
    return _Plain(values)


def _nulls(column: Any) -> np.ndarray | None:
    return column.is_null().to_numpy() if column.null_count() else None


def _read_pandas(name: str, column: Any) -> _Plain:
    dtype = column.dtype
    if hasattr(dtype, "categories") and hasattr(column, "cat"):
        codes = column.cat.codes.to_numpy()
        return _Plain(codes, codes < 0 if (codes < 0).any() else None, tuple(dtype.categories.tolist()))
    if isinstance(dtype, np.dtype):
        return _Plain(column.to_numpy())
    missing = column.isna().to_numpy()
    missing = missing if missing.any() else None
    kind = getattr(dtype, "kind", "O")
    if kind in "biuf":
        whole = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}[kind]
        return _Plain(column.to_numpy(dtype=whole, **({} if missing is None else {"na_value": whole(0)})), missing)
    if kind in "OTU":
        return _Plain(column.to_numpy(dtype=object), missing)
    raise _no_type(name, str(dtype))


def _read_arrow(name: str, column: Any) -> _Plain:
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(column, pyarrow.ChunkedArray):
            column = pyarrow.concat_arrays(column.chunks)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    types, kind = pyarrow.types, column.type
    if types.is_dictionary(kind):
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return _Plain(codes, missing, tuple(column.dictionary.to_pylist()))
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        filled = column if missing is None else column.fill_null(False if types.is_boolean(kind) else 0)
        return _Plain(filled.to_numpy(zero_copy_only=False), missing)
    if types.is_string(kind) or types.is_large_string(kind):
        return _Plain(column.to_numpy(zero_copy_only=False), missing)
    raise _no_type(name, str(kind))


def _no_type(name: str, dtype: str) -> DtypeError:
    return DtypeError(
        f"column {name!r} is of type {dtype}; a table has numbers, whole numbers, booleans and categories: convert it "
        f"first (a date to days since a public day), or leave it out (columns=[...])"
    )


_OF_DTYPE: dict[str, Kind] = {"b": "flag", "i": "integer", "u": "integer", "f": "number"}


def _column_of(name: str, plain: _Plain, spec: ColumnSpec, missing: bool, scheme: Scheme) -> Column:
    """The facts of an owner's column, from what the user says of it and else from its type."""
    if isinstance(spec, Column):
        column = spec
    elif isinstance(spec, (list, tuple)):
        column = Column("category", tuple(spec))
    elif spec == "category":
        if plain.categories is None:
            raise ArgumentError(
                f"column {name!r} does not bring its categories; they become public, so name them: "
                f"columns={{{name!r}: (...)}}"
            )
        column = Column("category", plain.categories)
    elif spec is not None:
        column = Column(spec)  # pyright: ignore[reportArgumentType]
    elif plain.categories is not None:
        raise ArgumentError(
            f"column {name!r} is categorical, and its categories would become public: name them, "
            f"columns={{{name!r}: (...)}}, or say that those of its type may be public, "
            f"columns={{{name!r}: 'category'}}"
        )
    elif plain.values.dtype.kind in _OF_DTYPE:
        column = Column(_OF_DTYPE[plain.values.dtype.kind])
    elif plain.values.dtype.kind in "OUST":
        raise ArgumentError(
            f"column {name!r} is text: name its categories, columns={{{name!r}: (...)}}, which become public, or leave "
            f"it out (columns=[...])"
        )
    else:
        raise _no_type(name, str(plain.values.dtype))
    return resolve_limit(replace(column, missing=column.missing or missing), scheme, name)


def resolve_limit(column: Column, scheme: Scheme, name: str) -> Column:
    """The column with a number for its limit.

    Raises:
        FixedPointRangeError: a limit beyond the fixed point's range.
    """
    if column.kind not in ("number", "integer"):
        return column
    largest = range_limit(scheme.frac_bits)
    limit = min(scheme.activation_limit, largest) if column.limit is None else float(column.limit)
    if limit > largest:
        raise FixedPointRangeError(
            f"column {name!r} names the limit {limit:g}, and with {scheme.frac_bits} fraction bits values are below "
            f"{largest:g}: use another unit, or fewer fraction bits (scheme=Scheme(frac_bits=...))"
        )
    return replace(column, limit=limit)


def _content(name: str, plain: _Plain, column: Column) -> tuple[np.ndarray, np.ndarray | None]:
    """The values of a column as it is shared, 0 where they are missing, and where that is; after every check.

    The texts of errors name the column and no value of it: another party may read them.

    Raises:
        DtypeError, ArgumentError, NonFiniteError, FixedPointRangeError: the column is not what its facts say.
    """
    values, missing = plain.values, plain.missing
    if column.kind == "category":
        values, unknown = _codes(name, plain, column)
        missing = unknown if unknown.any() else None
    elif plain.categories is not None or values.dtype.kind not in "biuf":
        raise DtypeError(
            f"column {name!r} is declared {column.kind!r} and holds {'categories' if plain.categories else 'text'}"
        )
    else:
        if values.dtype.kind == "f" and np.isnan(values).any():
            nan = np.isnan(values)
            missing, values = nan if missing is None else missing | nan, np.where(nan, 0, values)
        whole = values.dtype.kind != "f" or (np.isfinite(values).all() and (values == np.floor(values)).all())
        if column.kind in ("integer", "flag") and not whole:
            raise DtypeError(f"column {name!r} is declared {column.kind!r} and holds numbers that are not whole")
        if column.kind == "flag" and values.dtype.kind != "b":
            if ((values != 0) & (values != 1)).any():
                raise ArgumentError(f"column {name!r} is declared 'flag' and holds other numbers than 0 and 1")
            values = values != 0
        if column.kind in ("number", "integer"):
            if values.dtype.kind == "f" and np.isinf(values).any():
                raise NonFiniteError(f"column {name!r} holds infinite numbers; clip them, or mark them as missing")
            limit = column.limit or 0.0
            low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
            if max(-low, high) >= limit - (2.0**-30 if column.kind == "number" else 0):
                raise FixedPointRangeError(
                    f"column {name!r} holds values that are not below {limit:g} in magnitude; name its limit, which is "
                    f"public: columns={{{name!r}: Column({column.kind!r}, limit=...)}}"
                )
    if missing is not None and not missing.any():
        missing = None
    if missing is not None and not column.missing:
        raise NonFiniteError(
            f"column {name!r} has missing values (NaN, null); say that it may: missing=[{name!r}], or fill them first"
        )
    if missing is not None and column.kind != "category":
        values = np.where(missing, values.dtype.type(0), values)
    return values, missing


def _codes(name: str, plain: _Plain, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The codes of a category, 0 where it is missing, and where that is."""
    known = {value: i for i, value in enumerate(column.categories or ())}
    absent = np.zeros(len(plain.values), bool) if plain.missing is None else plain.missing
    if plain.categories is not None:  # a code for each of the type's own categories; the last entry is for none
        table = np.array([known.get(value, -1) for value in plain.categories] + [0], dtype=np.int64)
        at = np.where(absent, len(plain.categories), plain.values)
        codes = table[at]
    else:
        values = plain.values
        if values.dtype.kind == "f":
            absent = absent | np.isnan(values)
        distinct, inverse = _distinct(values)
        empty = np.array([v is None or v != v for v in distinct], dtype=bool)
        absent = absent | empty[inverse]
        table = np.array([0 if e else known.get(v, -1) for v, e in zip(distinct, empty, strict=True)], dtype=np.int64)
        codes = np.where(absent, 0, table[inverse] if len(table) else inverse)
    if (codes < 0).any():
        raise ArgumentError(
            f"column {name!r} holds a value that is none of its {len(known)} categories; name it among them, or mark "
            f"it as missing"
        )
    return codes, absent


def _distinct(values: np.ndarray) -> tuple[list[Any], np.ndarray]:
    """The distinct values, as Python has them, and the place of each entry among them."""
    places: dict[Any, int] = {}
    none = object()
    at = [places.setdefault(none if v is None or v != v else v, len(places)) for v in values.tolist()]
    return [None if v is none else v for v in places], np.array(at, dtype=np.int64)


class OwnedTable:
    """Rows that one party has in the clear. Elsewhere only names, kinds, categories and the length are known.

    Made by `sectorch.owned`.

    Attributes:
        frame: what the owner gave, and None at other parties.
        owner: the party's name.
        schema: the public facts of each column.
    """

    def __init__(
        self, frame: Any, owner: str, session: Session, party: Party, scheme: Scheme, rows: int,
        schema: dict[str, Column], content: dict[str, tuple[np.ndarray, np.ndarray | None]] | None,
    ):  # fmt: skip
        self.frame, self.owner, self.session, self.party, self.scheme = frame, owner, session, party, scheme
        self.schema, self._rows, self._content = schema, rows, content

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are shared."""
        return tuple(self.schema)

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"OwnedTable({self.owner}: {_described(self._rows, self.schema)})"

    def content(self, name: str) -> np.ndarray | None:
        """A column's values as they are shared, codes of categories; None at other parties."""
        return None if self._content is None else self._content[name][0]

    def absent(self, name: str) -> np.ndarray | None:
        """Where a column's values are missing, bool; None where none is, and at other parties."""
        return None if self._content is None else self._content[name][1]

    def values(self, name: str) -> np.ndarray | None:
        """A column of the owner's frame as a numpy array, whether it is shared or not; None at other parties.

        Raises:
            ArgumentError: the frame has no such column.
        """
        if self.frame is None:
            return None
        columns = _columns_of(self.frame)
        if name not in columns:
            raise ArgumentError(f"the table of {self.owner} has no column {name!r:.60}; it has {', '.join(columns)}")
        plain = _read(name, columns[name])
        if plain.categories is None:
            return plain.values
        return np.array([*plain.categories, None], dtype=object)[plain.values]

    def share(self) -> Table:
        """The table in shares. Rounds 1, bytes 8 for each value and missing flag; none for an owner that is A or S.

        A column that may be missing brings a flag for each row. A and S receive uniform bits.
        """
        columns, missing = {}, {}
        with self.session.operation(self.party):
            for name, column in self.schema.items():
                values, absent = (None, None) if self._content is None else self._content[name]
                dtype = _DTYPES[column.kind]
                own = None if values is None else _tensor(values, dtype)
                columns[name] = self._shared(own, dtype, _LABELS[column.kind], name, column.bound)
                if column.missing:
                    flags = np.zeros(self._rows, bool) if absent is None else absent
                    own = None if values is None else _tensor(flags, torch.bool)
                    missing[name] = self._shared(own, torch.bool, torch.bool, f"{name} is missing", 1.0)
        found = Table(columns, self.schema, missing=missing, checked=True)
        found._owned = frozenset(columns)
        return found

    def _shared(
        self, own: torch.Tensor | None, dtype: torch.dtype, label: torch.dtype, name: str, bound: float | None
    ) -> SharedTensor:
        limit = bound if dtype.is_floating_point or bound is None else math.ceil(bound) + 1
        limit = None if dtype == torch.bool else limit
        made = share_tensor(
            own, session=self.session, party=self.party, scheme=self.scheme, owner=self.owner, shape=(self._rows,),
            dtype=dtype, limit=limit, name=name,
        )  # fmt: skip
        if made.bound is not None and bound is not None:
            made.bound = min(made.bound, bound * 2.0**made.scale_bits)
        if label == dtype:
            return made
        given, made = made.given, made.like(made.shares, bound=made.bound, dtype=label)
        made.given = given
        return made


def _tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """An array as a tensor, on the same memory where its type allows it."""
    wanted = {torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}[dtype]
    values = np.ascontiguousarray(values, dtype=wanted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes to it
        return torch.from_numpy(values)


def owned(
    frame: Any,
    *,
    owner: Any,
    session: Session | None = None,
    columns: Sequence[str] | Mapping[str, ColumnSpec] | None = None,
    missing: Sequence[str] | bool = (),
    party: Party | None = None,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
) -> OwnedTable:
    """A table of one party's rows, which only that party sees. Names, kinds, categories and its length become public.

        patients = sectorch.owned(frame, owner="H1", session=session, columns={"age": None, "sex": ("f", "m")})
        table = patients.share()

    Args:
        frame: a DataFrame of pandas or polars, an Arrow table or record batch, a structured numpy array, or a mapping
            of names to one-dimensional arrays; anything at other parties, such as None. It is read without a copy
            where its types allow it.
        owner, session, party, scheme: as of `sectorch.share`.
        columns: the columns to share, all by default. A mapping gives each name a `Column`, a kind, its categories as a
            tuple, or None for what the frame's type says: booleans are flags, whole numbers integers, other numbers
            numbers. Text has to name its categories. A categorical type's own become public by "category".
        missing: the columns that may have missing values (NaN, None, null), or True for all. Where the flags are is
            secret.

    Between processes the facts are sent in 4 rounds (2 if S is the owner), as text. Nobody learns a value. A category
    that no row has is public, too, so name categories from what is known of the kind of data.

    Raises:
        ArgumentError: no frame at its owner, unknown or repeated names, or a value that is none of the categories.
        ShapeError: columns of several lengths.
        DtypeError: a column of a type that is no number, boolean or category, or of another one than is declared.
        NonFiniteError: missing or infinite values in a column that does not say that it may have them.
        FixedPointRangeError: a value at the column's limit or beyond, or a limit beyond the number format's range.
            All of these before anything is sent or shared; their texts hold no value of the table.
    """
    session = session or default_session()
    party, scheme = session.answering_party(party), scheme_of("owned", scheme)
    (holder,) = session.parties_named(owner, party)
    if not session.present(holder):
        rows, schema = _announce(session, party, holder, None)
        return OwnedTable(None, holder.name, session, party, scheme, rows, schema, None)
    raw = _columns_of(frame)
    if isinstance(columns, str) or not (columns is None or isinstance(columns, (Sequence, Mapping))):
        raise ArgumentError(f"columns is a list of names or a mapping of names, got a {type(columns).__name__}")
    specs: dict[str, ColumnSpec] = (
        dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(raw if columns is None else columns)
    )
    if isinstance(columns, Sequence) and len(specs) < len(columns):
        raise ArgumentError("columns names a column twice")
    if isinstance(missing, str) or (not isinstance(missing, bool) and not isinstance(missing, Sequence)):
        raise ArgumentError(f"missing is a list of names, or True for all, got {missing!r:.60}")
    may_miss = set(specs) if missing is True else set(missing or ())
    for word, names in (("columns", set(specs)), ("missing", may_miss)):
        unknown = sorted(map(str, names - (set(raw) if word == "columns" else set(specs))))
        if unknown:
            raise ArgumentError(f"{word} names {', '.join(unknown)}, and the table has {', '.join(raw) or 'no column'}")
    if not specs:
        raise ArgumentError("a table has at least one column")
    schema, content = {}, {}
    for name, spec in specs.items():
        plain = _read(name, raw[name])
        schema[name] = _column_of(name, plain, spec, name in may_miss, scheme)
        content[name] = _content(name, plain, schema[name])
    rows = len(next(iter(raw.values())))
    _announce(session, party, holder, (rows, schema))
    return OwnedTable(frame, holder.name, session, party, scheme, rows, schema, content)


def _announce(
    session: Session, party: Party, holder: Party, facts: tuple[int, dict[str, Column]] | None
) -> tuple[int, dict[str, Column]]:
    """The length and the facts of an owner's columns, which all parties learn.

    Raises:
        ArgumentError: a rehearsal, in which nobody has a table, or facts that are none.
    """
    text = b""
    if facts is not None:
        text = json.dumps([facts[0], {name: asdict(column) for name, column in facts[1].items()}]).encode()
        if len(text) > _ANNOUNCED_BYTES:
            raise ArgumentError("the names and categories of the columns take more than 16 MiB; share fewer categories")
        if session.complete:
            return facts
    size = session.agreement.broadcast(party, "table_size", holder, torch.tensor([len(text)]))
    if size.is_meta:
        raise ArgumentError(f"the columns that {holder.name} brings are not known in a rehearsal")
    if not 0 < int(size) <= _ANNOUNCED_BYTES:
        raise ArgumentError(f"{holder.name} announced a table of no known size")
    message = torch.zeros(int(size), dtype=torch.uint8)
    if text:
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = bytes(session.agreement.broadcast(party, "table", holder, message).tolist())
    session.agreement.note(party, "table", holder.name, received)
    return facts if facts is not None else _parsed(received, holder)


def _parsed(text: bytes, holder: Party) -> tuple[int, dict[str, Column]]:
    """The facts that another party announced, checked: a false one may not take this party's memory or its time."""
    try:
        rows, columns = json.loads(text)
        schema = {}
        for name, fields in columns.items():
            own = fields.pop("categories")
            schema[name] = Column(categories=None if own is None else tuple(own), **fields)
        if type(rows) is not int or not 0 <= rows < LARGEST or not schema:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ArgumentError(f"{holder.name} announced what is no table") from None
    return rows, schema


class Table:
    """Columns of equal length in shares, by name. Names, kinds, categories and the length are public.

        table = sectorch.owned(frame, owner="H1", session=session).share()
        older = table.where(table["age"] >= 65)         # which rows these are, and how many, stays secret
        features = older.tensor("age", "weight")        # SharedTensor (rows, 2)

    Args:
        columns: SharedTensors (n,) by name, of one session.
        schema: the facts of columns; for others they follow from their tensors: bool is a flag, whole numbers are
            integers, other numbers numbers.
        present: 0 or 1 for each row: the rows that count, where rows are padded or filtered in secret. All by default.
        missing: flags (n,) by name, 1 where a column's value is missing. The value there becomes 0, in a round.
        checked: whether whole numbers that the schema calls codes of a category or a flag are known to be some. If not,
            a comparison checks it in secret, and another code ends in `RangeExceededError`.

    Raises:
        ArgumentError: no column, a plain tensor (every party would know it), or facts for no column.
        ShapeError: a tensor that is no column of this length.
        SessionMismatchError: tensors of several sessions or number formats.
    """

    def __init__(
        self,
        columns: Mapping[str, SharedTensor],
        schema: Mapping[str, Column] | None = None,
        *,
        present: SharedTensor | None = None,
        missing: Mapping[str, SharedTensor] | None = None,
        checked: bool = False,
    ):
        self._columns = dict(columns)
        self.missing: dict[str, SharedTensor] = dict(missing or {})
        for own in {
            id(own): own for x in columns.values() if (own := getattr(x, "counting", None)) is not None
        }.values():
            if present is not None and not _within(present, own):
                raise ArgumentError("the columns of a table are of tables of several filters: take them of one")
            present = own if present is None else present
        self.present = present
        self._public_rows: int | None = None
        self._many = max(map(rows_of_one, columns.values()), default=1)
        self._owned: frozenset[str] = frozenset()
        given = dict(schema or {})
        if not self._columns:
            raise ArgumentError("a table has at least one column")
        if set(given) - set(self._columns) or set(self.missing) - set(self._columns):
            raise ArgumentError("facts or missing flags are given for a column that the table does not have")
        first = next(iter(self._columns.values()))
        for name, x in {
            **self._columns,
            **self.missing,
            **({"present": present} if present is not None else {}),
        }.items():
            if not isinstance(name, str) or not isinstance(x, SharedTensor):
                raise ArgumentError(
                    f"a table has SharedTensors by name, got a {type(x).__name__} as {name!r:.40}; share it: "
                    f"sectorch.share(x, session=..., owner=...)"
                )
            if x.dim() != 1 or len(x) != len(first):
                raise ShapeError(f"columns of a table of {first.shape[0]} rows are ({first.shape[0]},), got "
                                 f"{tuple(x.shape)} for {name!r:.40}")  # fmt: skip
            if x.session is not first.session or x.party != first.party or x.scheme != first.scheme:
                raise SessionMismatchError("the columns of a table are of one session, party and number format")
        self.schema: dict[str, Column] = {}
        for name, x in self._columns.items():
            facts = given.get(name) or _facts_of(x)
            self.schema[name] = replace(facts, missing=name in self.missing)
            self._columns[name] = x = _counting(x, None)
            if not checked:
                if name in self.missing:
                    x = NullableColumn(x, self.missing[name]).filled()
                self._columns[name] = _as_codes(x, facts)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    @property
    def session(self) -> Session:
        """The session of its tensors."""
        return next(iter(self._columns.values())).session

    @property
    def public_rows(self) -> int | None:
        """The number of rows before any filter, where it is public: None where rows are padded, as those of a join."""
        return len(self) if self.present is None else self._public_rows

    @property
    def many(self) -> int:
        """The most rows of one person: 1 unless the table is of a join with `many`."""
        return self._many

    @property
    def owned(self) -> frozenset[str]:
        """The columns that are as their owners shared them; all others were computed by a program."""
        return self._owned

    def _with_rows_of(self, before: Table) -> Table:
        self._public_rows = before.public_rows
        self._owned = before._owned & set(self._columns)
        return self.with_many(before.many)

    def with_many(self, many: int) -> Table:
        """This table, one person of which may have so many rows; its columns remember it."""
        self._many = many
        for x in self._columns.values() if many > 1 else ():
            _rows_of_one[x] = many
        return self

    def __len__(self) -> int:
        """The number of rows, which is public; with padding or a filter the number with those that do not count."""
        return next(iter(self._columns.values())).shape[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        return f"Table({_described(len(self), self.schema)}{', filtered' if self.present is not None else ''})"

    def __getitem__(self, name: Any) -> Any:
        """One column as a SharedTensor (n,), or a Table of several: `t["age"]`, `t[["age", "sex"]]`.

        A column that may have missing values is a `NullableColumn`: comparisons and arithmetic keep in mind where.
        A column of a filtered table has all rows, and what would count those that do not count is refused: sums,
        orders, and other columns that are not of this filter. `filled` gives it without that.

        Raises:
            ArgumentError: no such column, or row numbers, which would move rows: `where` filters.
        """
        if isinstance(name, str):
            x, absent = _counting(self.filled(name), self.present), self.missing.get(name)
            return x if absent is None else NullableColumn(x, absent, zeroed=True)
        if not isinstance(name, (list, tuple)) or not all(isinstance(n, str) for n in name):
            raise ArgumentError(
                f"t[...] takes a column's name or a list of names, got {name!r:.40}; t.where filters rows"
            )
        return Table(
            {n: self._columns[self.checked(n)] for n in name},
            {n: self.schema[n] for n in name},
            present=self.present,
            missing={n: self.missing[n] for n in name if n in self.missing},
            checked=True,
        )._with_rows_of(self)

    def checked(self, name: str) -> str:
        """The name of a column, checked.

        Raises:
            ArgumentError: there is no such column.
        """
        if name not in self._columns:
            raise ArgumentError(f"the table has no column {name!r:.60}; it has {', '.join(self._columns)}")
        return name

    def filled(self, name: str, value: float = 0) -> SharedTensor:
        """One column as a SharedTensor (n,), with a public number where a value is missing. Rounds 0, or 1 where the
        number is not 0.

        Raises:
            ArgumentError: no such column.
        """
        x = self._columns[self.checked(name)]
        return x if not value or name not in self.missing else NullableColumn(x, self.missing[name]).filled(value)

    def tensor(self, *names: str, fill: float | None = None) -> SharedTensor:
        """Columns beside each other as a float32 SharedTensor (n, columns): all of them, or those named. Local.

        Args:
            fill: a number in place of missing values; rounds 1 where it is not 0.

        Raises:
            NonFiniteError: a column may have missing values, and `fill` names no number.
        """
        chosen = names or self.columns
        lost = [name for name in chosen if name in self.missing]
        if lost and fill is None:
            raise NonFiniteError(
                f"a tensor has no missing values, and {', '.join(lost)} may have some: name a number in their place, "
                f"tensor(..., fill=0), and leave such rows out by where(t.known({lost[0]!r})) if they are not to count"
            )
        chosen = [self.filled(name, fill or 0) for name in chosen]
        return _counting(torch.stack([x.to(torch.float32) for x in chosen], 1), self.present)

    def known(self, *names: str) -> SharedTensor | None:
        """1 for each row that counts and has a value in each of these columns, bool (n,); None if all have.

        Rounds: one for each column that may be missing.

        Args:
            names: columns; none for the rows that count.
        """
        found: Any = self.present
        for name in names:
            absent = self.missing.get(self.checked(name))
            if absent is not None:
                own: Any = ~absent
                found = own if found is None else found & own
        return found

    def where(self, condition: SharedTensor | NullableColumn | torch.Tensor) -> Table:
        """The same rows, of which only those count that meet the condition. Nothing moves; nobody learns which, or how
        many.

        Args:
            condition: bool (n,) in shares, such as `t["age"] > 60`, or public. Rows for which it is missing do not
                count: neither `t["age"] > 60` nor `~(t["age"] > 60)` has those without an age.

        Rounds 1 if rows were filtered before, otherwise none.

        Raises:
            DtypeError: not of 0 and 1 by its type.
            ShapeError: of another shape.
        """
        if isinstance(condition, NullableColumn) and condition.dtype == torch.bool:
            condition = condition.filled()
        if not isinstance(condition, torch.Tensor) or dtype_of(condition) != torch.bool:
            raise DtypeError("a filter is a bool tensor, such as t['age'] > 60")
        if tuple(condition.shape) != (len(self),):
            raise ShapeError(f"a filter of a table of {len(self)} rows is ({len(self)},), got {tuple(condition.shape)}")
        present: Any = condition
        if not isinstance(condition, SharedTensor):
            present = embed_public(self.filled(self.columns[0]), condition)
        own, present = getattr(condition, "counting", None), _counting(present, None)
        wider = list({id(x): x for x in (self.present, own) if x is not None}.values())
        for filtered in wider:
            present = filtered & present
        _wider[present] = [*wider, *(x for filtered in wider for x in _wider.get(filtered, ()))]
        return Table(self._columns, self.schema, present=present, missing=self.missing, checked=True)._with_rows_of(
            self
        )

    def with_columns(self, **columns: Any) -> Table:
        """The table with more columns, or others in place of those of the same name.

        Args:
            columns: SharedTensors or `NullableColumn`s (n,) by name, or a pair of one and its `Column`.
        """
        made, schema = dict(self._columns), dict(self.schema)
        missing = dict(self.missing)
        for name, value in columns.items():
            x, facts = value if isinstance(value, tuple) else (value, None)
            missing.pop(name, None)
            schema.pop(name, None)
            if isinstance(x, NullableColumn):
                x, missing[name] = x.filled(), x.absent
            own = getattr(x, "counting", None)
            if own is not None and not _within(self.present, own):
                raise ArgumentError(f"column {name!r:.60} is of a table with another filter: take it of this one")
            made[name] = x
            if facts is not None:
                schema[name], made[name] = facts, _as_codes(x, facts)
        found = Table(made, schema, present=self.present, missing=missing, checked=True)._with_rows_of(self)
        marks = lambda table, name: [id(x[name].shares) for x in (table._columns, table.missing) if name in x]
        known = [marks(self, name) for name in self._owned]  # a column that is filled is not as its owner shared it
        found._owned = frozenset(name for name in made if marks(found, name) in known)
        return found

    def with_absent_row(self) -> Table:
        """The table with one row more, which does not count. Local."""
        rows = len(self)

        def longer(x: SharedTensor, value: int = 0) -> SharedTensor:
            more = embed_public(x, torch.full((1,), value, dtype=torch.int64))
            more = x.like(more.shares << x.scale_bits if x.scale_bits else more.shares, bound=x.bound)
            with x.session.operation(x.party):
                shares = x.backend.each(_joined, x.shares, more.shares)
            made = x.like(shares, bound=x.bound)
            made.whole_bits = x.whole_bits
            return made

        first = self.filled(self.columns[0])
        present = self.present
        if present is None:
            present = embed_public(first, torch.ones(rows, dtype=torch.bool))
        return Table(
            {name: longer(x) for name, x in self._columns.items()},
            self.schema,
            present=longer(present),
            missing={name: longer(x) for name, x in self.missing.items()},
            checked=True,
        )._with_rows_of(self)

    @staticmethod
    def concat(tables: Sequence[Table]) -> Table:
        """The rows of several tables of the same columns, one table after the other: a horizontal partition. Local.

        Raises:
            ArgumentError: columns of other names, kinds or categories.
            SessionMismatchError: tables of several sessions.
        """
        if not tables or not all(isinstance(table, Table) for table in tables):
            raise ArgumentError("concat takes a list of at least one Table")
        first = tables[0]
        for table in tables[1:]:
            if set(table.columns) != set(first.columns):
                raise ArgumentError(
                    f"tables have other columns: {', '.join(first.columns)} and {', '.join(table.columns)}"
                )
            for name, facts in first.schema.items():
                other = table.schema[name]
                if (other.kind, other.categories) != (facts.kind, facts.categories):
                    raise ArgumentError(f"column {name!r} is of another kind or other categories in one of the tables")
            if table.session is not first.session:
                raise SessionMismatchError("the tables are of several sessions")
        columns, schema, missing = {}, {}, {}
        for name in first.columns:
            columns[name] = torch.cat([table.filled(name) for table in tables])
            facts = [table.schema[name] for table in tables]
            limits = [column.limit for column in facts]
            limit = None if None in limits else max(limit for limit in limits if limit is not None)
            schema[name] = replace(facts[0], limit=limit)
            if any(name in table.missing for table in tables):
                missing[name] = _joined_flags([table.missing.get(name) for table in tables], tables, False)
        present = None
        if any(table.present is not None for table in tables):
            present = _joined_flags([table.present for table in tables], tables, True)
        made = Table(columns, schema, present=present, missing=missing, checked=True)
        known = [table.public_rows for table in tables]
        made._public_rows = None if None in known else sum(rows for rows in known if rows is not None)
        numbers = [table.many for table in tables]
        made._owned = frozenset.intersection(*(table._owned for table in tables))
        return made.with_many(sum(numbers) if max(numbers) > 1 else 1)  # a person of several tables has the rows of all


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def _joined_flags(flags: Sequence[SharedTensor | None], tables: Sequence[Table], value: bool) -> SharedTensor:
    """Flags of several tables, one after the other; those that a table does not have are public."""
    parts = [torch.full((len(t),), value) if flag is None else flag for flag, t in zip(flags, tables, strict=True)]
    return torch.cat(parts)  # pyright: ignore[reportReturnType]


_rows_of_one: MutableMapping[Any, int] = WeakIdKeyDictionary()
"""By the tensor of a column: the most rows of one person, where a join has several."""


_wider: MutableMapping[Any, list[SharedTensor]] = WeakIdKeyDictionary()
"""By a filter: those that it was made of, whose rows include its own."""


def _within(present: SharedTensor | None, other: SharedTensor) -> bool:
    """Whether rows that count by one filter are known to count by another."""
    return present is not None and any(x is other for x in (present, *_wider.get(present, ())))


def _counting(x: Any, present: SharedTensor | None) -> Any:
    """The same tensor as a column of a table with this filter."""
    if not isinstance(x, SharedTensor) or x.counting is present:
        return x
    made = x.like(x.shares, bound=x.bound)
    made.whole_bits, made.infinite, made.given, made.constant = x.whole_bits, x.infinite, x.given, x.constant
    made.counting = present
    if (many := rows_of_one(x)) > 1:
        _rows_of_one[made] = many
    return made


def rows_of_one(x: Any) -> int:
    """The most rows of one person in a column that is taken out of a table as it is; 1 of other tensors."""
    return _rows_of_one.get(x, 1) if isinstance(x, SharedTensor) else 1


def embed_public(like: SharedTensor, x: torch.Tensor) -> SharedTensor:
    """A public tensor of bools or whole numbers as shares beside others of a session. Local."""
    with like.session.operation(like.party):
        elements = x.to(torch.int64)
        largest = float(elements.abs().max()) if x.numel() and not x.is_meta else 1.0
        made = like.like(like.backend.embedded(elements), 0, max(1.0, largest), dtype=x.dtype)
    made.flags = ()
    return made


def _as_codes(x: SharedTensor, facts: Column) -> SharedTensor:
    """Whole numbers that are to be codes of a category or a flag, checked in secret. Rounds 6."""
    if facts.kind not in ("category", "flag") or not isinstance(x, SharedTensor) or dtype_of(x) == torch.bool:
        return x
    count = 2 if facts.categories is None else len(facts.categories)
    with one_call(x) as (context, results):
        reached = context.backend.at_least(x.shares, (0, count << x.scale_bits))
        forbid(context, reached[1] - reached[0] + 1)
        found = x.like(x.shares, bound=float(count - 1 << x.scale_bits))
        results.append(found)
    return found


def _facts_of(x: SharedTensor) -> Column:
    """The facts of a tensor that no schema names."""
    dtype = dtype_of(x)
    if dtype == torch.bool:
        return Column("flag")
    limit = None if x.bound is None or x.bound <= 0 else x.bound * 2.0**-x.scale_bits
    return Column("number" if dtype.is_floating_point else "integer", limit=limit)


def _described(rows: int, schema: Mapping[str, Column]) -> str:
    return f"{rows} rows; " + ", ".join(f"{name}: {column}" for name, column in schema.items())
