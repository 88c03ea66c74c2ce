"""The join of several owners' tables by a key: rows of one table beside those of others that have the same key.

The first table's owner L asks, and each further owner R answers, by a key-value store (`mpc/okvs.py`):

    A draws a secret, fresh in each join, and sends it to L and R under their streams;   S never has it.
    R sends S its store, the rows under pads of their keys;                              to S it is uniform.
    L sends S the hash of each of its keys;                                              to S they are uniform.
    L shares its own rows and the pads of its keys;                                      A and S receive uniform halves.
    S looks up each hash. What it finds, less the shared pads, is R's row in shares, beside one word that is 0 if the
    key is R's. Whether it is 0 is computed in shares.

So nobody learns which rows match, or how many, until the number is asked for. At last all rows are shuffled into an
order that nobody knows (`mpc/star/shuffle.py`), and of an inner join without a bound it is opened which of the shuffled
rows matched: how many, and nothing else.

The alternative of tags that S compares shows S how many rows match, and of several tables how many each two have in
common; here no such number exists. S must not collude with an owner in either.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ..backend import Backend, RaisedFlags
from ..choreography import Located, Message, Net, Party, Roles, leaf, protocol
from ..choreography.located import with_shapes
from ..choreography.roles import STAR
from ..choreography.streams import SECRET_BYTES, derive, random_secret
from ..config import Scheme
from ..errors import (
    ArgumentError,
    DtypeError,
    NonFiniteError,
    RangeExceededError,
    SessionMismatchError,
    UnsupportedOpError,
)
from ..mpc import okvs
from ..mpc.star.broadcast import clients
from ..ring import encode
from ..tensor import SharedTensor
from .table import Column, OwnedTable, Table, _columns_of, _Plain, _read

On = str | Sequence[str] | Mapping[str, str | Sequence[str]]

# Keys: a row's key columns as one digest. Equal keys have equal digests, whatever types their columns are of.

NORMALISATIONS = ("text", "digits")
_KINDS = ("nothing but missing keys", "whole numbers", "text", "booleans", "times", "times of a zone",
          "lengths of time", "keys of several types")  # fmt: skip
_WHOLE, _TEXT, _BOOL, _TIME, _ZONED, _LENGTH, _MIXED = range(1, 8)
_MISSING = -1
KEY_WORDS = 5
"""Words of a key: four of its SHA-256 digest, and 1 where it is present."""


def _text(value: str, normalise: Sequence[str]) -> tuple[int, bytes]:
    if "text" in normalise:
        # Folding may undo the form, and the form the folding: Unicode's caseless match does both twice.
        value = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
        value = " ".join(unicodedata.normalize("NFKC", value.casefold()).split())
    if "digits" in normalise and value.strip().isascii() and value.strip().isdigit():
        return _WHOLE, (value.strip().lstrip("0") or "0").encode()
    return _TEXT, value.encode("utf-8", "surrogatepass")


def _part(name: str, value: Any, normalise: Sequence[str]) -> tuple[int, bytes]:
    """The kind of a key column's value, and the value as bytes; times are not among these.

    Raises:
        DtypeError, NonFiniteError: the value is no key.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return _text(value, normalise)
    if isinstance(value, bool):
        return _BOOL, b"1" if value else b"0"
    if isinstance(value, int):
        return _WHOLE, str(value).encode()
    if value is None:
        return _MISSING, b""
    if isinstance(value, float):
        if value != value:
            return _MISSING, b""
        if math.isinf(value):
            raise NonFiniteError(f"key column {name!r} holds infinite numbers, which identify nothing")
        if value != math.floor(value):
            raise DtypeError(
                f"key column {name!r} holds numbers that are not whole, which are hardly ever equal: round them to "
                f"whole units first"
            )
        if abs(value) >= 1 << 53:
            raise DtypeError(
                f"key column {name!r} holds floats of 2^53 or more, of which several whole numbers make one: bring it "
                f"as whole numbers or text"
            )
        return _WHOLE, str(int(value)).encode()
    if type(value).__name__ in ("NAType", "NaTType"):
        return _MISSING, b""
    raise DtypeError(
        f"key column {name!r} holds a {type(value).__name__}; keys are whole numbers, text, booleans and times: "
        f"convert it to text first"
    )


def _parts(table: OwnedTable, name: str, normalise: Sequence[str]) -> tuple[list[tuple[int, bytes]], int]:
    """Each row's part of one key column, and the kind of all."""
    columns = _columns_of(table.frame)
    if name not in columns:
        raise ArgumentError(f"the table of {table.owner} has no key column {name!r:.60}; it has {', '.join(columns)}")
    plain = _read_key(name, columns[name])
    values, missing = plain.values, plain.missing
    if plain.categories is not None:
        values = np.array([*plain.categories, None], dtype=object)[values]
    if values.dtype.kind in "Mm":
        none = np.isnat(values)
        missing = none if missing is None else missing | none
        parts = _times(name, values, _zoned(columns[name]))
    else:
        if values.dtype.kind not in "biufOUT":
            raise DtypeError(f"key column {name!r} is of type {values.dtype}; convert it to text first")
        if (
            values.dtype.kind == "f"
            and values.itemsize < 8
            and (np.abs(values) >= 2.0 ** (digits := np.finfo(values.dtype).nmant + 1)).any()
        ):
            raise DtypeError(
                f"key column {name!r} holds {values.dtype} of 2^{digits} or more, of which several whole numbers make "
                f"one: bring it as whole numbers or text"
            )
        parts = [_part(name, value, normalise) for value in values.tolist()]
    if missing is not None:
        parts = [(_MISSING, b"") if none else part for part, none in zip(parts, missing.tolist(), strict=True)]
    kinds = {kind for kind, _ in parts} - {_MISSING}
    return parts, 0 if not kinds else kinds.pop() if len(kinds) == 1 else _MIXED


_NANOSECONDS = {"W": 7 * 86400 * 10**9, "D": 86400 * 10**9, "h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9,
                "ms": 10**6, "us": 1000, "ns": 1}  # fmt: skip


def _zoned(column: Any) -> bool:
    """Whether a column's times are points in time of any clock, and not what some clock shows."""
    kind: Any = getattr(column, "dtype", getattr(column, "type", None))
    return any(getattr(kind, name, None) is not None for name in ("tz", "time_zone"))


def _times(name: str, values: np.ndarray, zoned: bool) -> list[tuple[int, bytes]]:
    """Points in time, or lengths of it, in nanoseconds: equal in whatever unit a column has them."""
    unit, count = np.datetime_data(values.dtype)
    if unit in ("Y", "M") and values.dtype.kind == "M":
        values, unit, count = values.astype("M8[D]"), "D", 1
    if unit not in _NANOSECONDS:
        raise DtypeError(f"key column {name!r} has times in the unit {unit}; convert it to nanoseconds or longer ones")
    step, letter = count * _NANOSECONDS[unit], values.dtype.kind
    sort = _LENGTH if letter == "m" else _ZONED if zoned else _TIME
    return [(sort, f"{step * value}".encode()) for value in values.astype(np.int64).tolist()]


def _read_key(name: str, column: Any) -> Any:
    """As `table._read`, and times: those with a zone in UTC."""
    kind: Any = getattr(column, "dtype", getattr(column, "type", None))
    module = type(column).__module__.split(".")[0]
    if (module == "polars" and kind.is_temporal()) or (module == "pyarrow" and "timestamp" in str(kind)):
        return _Plain(column.to_numpy())
    if module == "pyarrow" and str(kind).startswith("date"):
        return _Plain(column.to_numpy().astype("M8[ns]"))
    if getattr(getattr(column, "dtype", None), "tz", None) is not None and hasattr(column, "dt"):
        column = column.dt.tz_convert("UTC").dt.tz_localize(None)
    return _read(name, column)


def key_digests(table: OwnedTable, columns: Sequence[str], normalise: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
    """The keys of a table that is here: int64 [n, `KEY_WORDS`], and the kind of each key column.

    A digest is that of all parts, each with its kind and its length, so that ("ab", "c") is not ("a", "bc"). A row that
    misses one part has no key.
    """
    read = [_parts(table, name, normalise) for name in columns]
    digests, sha = [], hashlib.sha256
    present = np.ones(len(table), dtype=np.int64)
    for i, row in enumerate(zip(*(parts for parts, _ in read), strict=True)):
        if any(kind == _MISSING for kind, _ in row):
            present[i] = 0
        digests.append(sha(b"".join(b"%d %d:%b" % (kind, len(part), part) for kind, part in row)).digest())
    found = np.frombuffer(bytearray(b"".join(digests)), dtype=np.int64).reshape(-1, KEY_WORDS - 1)
    return torch.from_numpy(np.concatenate((found, present[:, None]), 1)), [kind for _, kind in read]


def _occurrences(keys: np.ndarray) -> np.ndarray:
    """For each row how many rows above have its key; 0 for rows without one."""
    view = np.ascontiguousarray(keys[:, : KEY_WORDS - 1]).view([("", np.int64)] * (KEY_WORDS - 1)).reshape(-1)
    _, inverse, counts = np.unique(view, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    out = np.empty(len(keys), dtype=np.int64)
    out[order] = np.arange(len(keys)) - starts
    return np.where(keys[:, -1] == 1, out, 0)


def _check_repeats(table: OwnedTable, keys: torch.Tensor, many: int, first: bool) -> None:
    """Raises ArgumentError where keys repeat too often, at the owner, without a word on which."""
    own = keys.numpy()
    if len(own) and int(_occurrences(own).max()) >= many:
        way = (
            f"at most many={many} rows of the first table may have one key: name a larger many (rows of the other "
            f"tables are stored that often), or remove duplicates"
            if first
            else "each key stands once in every table but the first: remove duplicates, or put this table first "
            "(join(visits, patients, on=..., many=20))"
        )
        raise ArgumentError(f"keys repeat in the table of {table.owner}: {way}")


# Protocols. An owner plays Q where it shares a stream with A, and O where it sends to S.

OWNER = Roles("O S", edges="O-S")


@protocol(
    "join_secret",
    "docs/tables.md",
    [
        Message("masked_secret", "A", "S", "r of k_QA", opens="Q"),
        Message("secret", "S", "Q", "r of k_QA", "the secret of this join, which its owners and A have"),
    ],
)
def send_secret(net: Net, secret: Located) -> Located:
    """Send an owner, who plays Q, a secret that A has. Rounds 2, bytes 16 per element. S receives uniform bits."""
    r = net.common(net.Q, net.A, secret.shape, "r")
    return (secret ^ r).send(net.A, net.S, "masked_secret").send(net.S, net.Q, "secret") ^ r


@protocol(
    "join_store",
    "Kolesnikov et al., CCS 2017",
    [Message("store", "O", "S", "pads under the secret that S does not have")],
    roles=OWNER,
)
def send_store(net: Net, store: Located) -> Located:
    """Send S a key-value store. Rounds 1, bytes 8 per word. It is uniform to S (`mpc/okvs.py`)."""
    return store.send(net.O, net.S, "store")


@protocol(
    "join_hashes",
    "Kolesnikov et al., CCS 2017",
    [Message("hashes", "O", "S", "a function under the secret that S does not have")],
    roles=OWNER,
)
def send_hashes(net: Net, hashes: Located) -> Located:
    """Send S the hashes of different keys. Rounds 1, bytes 20 per row. They are uniform to S (`mpc/okvs.py`)."""
    return hashes.send(net.O, net.S, "hashes")


@protocol(
    "join_rows",
    "docs/tables.md",
    [Message("rows", "S", "O", "nothing", "which of a join's shuffled rows it has: their number")],
    roles=OWNER,
)
def send_rows(net: Net, marks: Located) -> Located:
    """Send a party, who plays O, which rows of a shuffled table S was shown to be in the join.

    Rounds 1, bytes 1 per row. Their order is uniform, so that the party learns how many they are.
    """
    return marks.send(net.S, net.O, "rows")


@with_shapes(lambda: torch.empty(SECRET_BYTES // 8, dtype=torch.int64, device="meta"))
def _secret() -> torch.Tensor:
    return torch.frombuffer(bytearray(random_secret()), dtype=torch.int64)


def _of_table(secret: torch.Tensor, number: int) -> bytes:
    """The secret of the lookup in the table of this number."""
    return derive(secret.cpu().numpy().tobytes(), b"", f"join/{number}", SECRET_BYTES)


def _on(device: torch.device, x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(device)


def _store_shape(keys: torch.Tensor, words: torch.Tensor, _secret: Any, _number: int, many: int) -> torch.Tensor:
    return words.new_empty((okvs.length(many * len(keys)), 1 + words.shape[1]))


@leaf(shapes=_store_shape)
def _store(keys: torch.Tensor, words: torch.Tensor, secret: torch.Tensor, number: int, many: int) -> torch.Tensor:
    """At R: the store of its rows, each under its key and a count from 0 to many - 1, for as many rows of L."""
    own, rows = keys.cpu().numpy(), len(keys) * many
    here = np.flatnonzero(own[:, -1])
    named = [key.tobytes() + i.to_bytes(8, "little") for i in range(many) for key in own[here, :-1]]
    hashes, pads = okvs.hashes_and_pads(_of_table(secret, number), named, 1 + words.shape[1])
    values = np.zeros((len(named), 1 + words.shape[1]), dtype=np.int64)
    values[:, 1:] = np.tile(words.cpu().numpy()[here], (many, 1))
    return _on(words.device, okvs.encode(hashes, values + pads, rows))


def _question_shape(keys: torch.Tensor, _secret: Any, _number: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    hashes = keys.new_empty((len(keys), okvs.HASH_WORDS), dtype=torch.int32)
    return hashes, keys.new_empty((len(keys), 1 + width))


@leaf(shapes=_question_shape)
def _question(keys: torch.Tensor, secret: torch.Tensor, number: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """At L: the hashes of its keys and the pads of what they find. A row without a key has a random one."""
    own = keys.cpu().numpy()
    named = [
        key[:-1].tobytes() + i.to_bytes(8, "little") if key[-1] else random_secret()
        for key, i in zip(own, _occurrences(own).tolist(), strict=True)
    ]
    hashes, pads = okvs.hashes_and_pads(_of_table(secret, number), named, 1 + width)
    return _on(keys.device, hashes), _on(keys.device, pads)


@leaf(shapes=lambda hashes, store, _rows: store.new_empty((len(hashes), store.shape[1])))
def _found(hashes: torch.Tensor, store: torch.Tensor, rows: int) -> torch.Tensor:
    """At S: what each hash finds."""
    return _on(store.device, okvs.decode(hashes.cpu().numpy(), store.cpu().numpy(), rows))


@leaf
def _beside(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values, 1)


def _above(*values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values)


def _times_flags(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return flags * values


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((x, x.new_zeros((rows, x.shape[1]))))


def _columns(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return x[:, start:stop]


# Columns as words: what a row consists of in the ring, and the tensors that these words are.


@dataclass(frozen=True)
class _Words:
    """The words of one table's rows: a column each, then a flag for each column that may be missing."""

    table: OwnedTable
    names: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if self.table.schema[name].missing]

    @property
    def width(self) -> int:
        return len(self.names) + len(self.missing)

    def content(self) -> torch.Tensor:
        """int64 [n, width]; without content where the owner is elsewhere."""
        held = self.table._content
        if held is None:
            return torch.empty((len(self.table), self.width), dtype=torch.int64, device="meta")
        device = self.table.session.device
        columns = []
        for name in self.names:
            values = torch.from_numpy(np.ascontiguousarray(held[name][0]).copy())
            number = self.table.schema[name].kind == "number"
            columns.append(encode(values.double(), self.table.scheme.frac_bits) if number else values.long())
        for name in self.missing:
            absent = held[name][1]
            none = np.zeros(len(self.table), dtype=bool) if absent is None else absent
            columns.append(torch.from_numpy(none.astype(np.int64)))
        empty = torch.empty((len(self.table), 0), dtype=torch.int64)
        return (torch.stack(columns, 1) if columns else empty).to(device)


class _Rows:
    """Rows in shares, and the tensors of their columns."""

    def __init__(self, session: Any, party: Party, scheme: Scheme, shares: Any, flags: tuple[Any, ...] = ()):
        self.session, self.party, self.scheme, self.shares, self.flags = session, party, scheme, shares, flags

    def tensor(self, at: int, column: Column) -> SharedTensor:
        """One column as a tensor."""
        kinds = {"number": torch.float32, "flag": torch.bool}
        bits = self.scheme.frac_bits if column.kind == "number" else 0
        bound = None if column.bound is None or not self.scheme.range_check else column.bound * 2.0**bits
        shares = self.shares[:, at]
        made = SharedTensor(
            shares, bits, self.session, self.party, self.scheme, kinds.get(column.kind, torch.int64), bound
        )
        made.flags = self.flags
        return made


FLAG = Column("flag")


def join(
    left: OwnedTable,
    right: OwnedTable,
    *more: OwnedTable,
    on: On,
    how: Literal["inner", "left"] = "inner",
    many: int = 1,
    bound: int | None = None,
    normalise: str | Sequence[str] = (),
    suffixes: Sequence[str] | None = None,
) -> Table:
    """Join tables of different owners by a key: one row for each row of `left` whose key every other table has.

        patients = sectorch.owned(frame, owner="H1", session=session, columns=["age", "weight"])
        results = sectorch.owned(frame, owner="H2", session=session, columns=["marker"])
        table = sectorch.join(patients, results, on="id")
        table["marker"][table["age"] > 60]          # columns of both, in an order that nobody knows

    The keys are columns of the owners' frames, and need not be among the columns that they share.

    Args:
        left, right, more: `sectorch.owned` tables of one session. S owns none of them. In `right` and `more` each key
            stands once.
        on: the key column, or several; or, where owners call them otherwise, a mapping of each owner's name to these.
        how: "inner", or "left": every row of `left`, with missing flags and zeros where another table lacks its key.
        many: the most rows of `left` that have one key. The other tables are stored that often, and neither the
            multiplicities nor whether a key repeats is visible to anybody.
        bound: of an inner join, a public number that the rows are padded to, with `present` in shares; then nobody
            learns how many rows match. With a bound of len(left) or more the result has len(left) rows.
        normalise: "text": text is compared in Unicode's form NFKC, without case, and with one space between words;
            "digits": text of decimal digits is the whole number, without leading zeros. One or both; none by default.
        suffixes: of each table, for columns whose name another table has, too: `("_1", "_2")`. Without it such names
            are refused. A key column of another table than the first is left out of its columns.

    Keys: whole numbers are equal to floats of the same value; other floats are refused. Booleans, times, times of a
    zone and lengths of time are equal to their own kind only. A missing key (None, NaN, NaT) matches nothing. Two
    different keys match with a probability of 2^-64 a row.

    Returns:
        A `Table`, whose rows are in an order that nobody knows. Its length is public: the number of matches of an inner
        join, `bound` or len(left).

    Rounds 2 ahead, for the secret, and 8; 9 of a left join, some 15 with a bound. Bytes, for n rows of l and m of r
    words (a word is a column or a missing flag): 8 * 1.33 m (1 + r) many for the store, 8 n (l + r + 1) + 20 n for the
    question, some 60 n for the equality, and 24 n (l + r + 1) for the shuffle; a left join 24 n r + 16 n more, and one
    with a bound b 24 n (l + r) + 24 b (l + r + 2) and some 80 b. Exact.

    What each party learns: lengths, column names and the kinds of keys (text, numbers) are announced, so all parties
    know them. Of an inner join without a bound all parties learn the number of rows. Beyond that nobody learns
    anything: S receives a store, hashes and halves that are uniform as long as it does not collude with an owner, A
    receives halves. A and the owners know the secret of the join, and see nothing computed under it. With S an owner
    could try out keys for the others' tables, so no owner may collude with S. A refused table (keys that repeat) tells
    the others that.

    Raises:
        ArgumentError: S as an owner, tables of one owner, no such column, keys that repeat, keys of different types, or
            arguments that fit no join. SessionMismatchError: tables of several sessions or number formats. DtypeError,
            NonFiniteError: values that are no keys. All before anything is shared.
        UnsupportedOpError: `Scheme(verified=True)`, since a shuffle is not proved.
        RangeExceededError: more rows match than `bound`; that is all that anybody learns.

    Sources: Kolesnikov et al., CCS 2017; Pinkas, Schneider, Tkachenko, Yanai, "Efficient circuit-based PSI with linear
    communication", EUROCRYPT 2019 (a lookup whose result is in shares); Mohassel, Rindal, Rosulek, "Fast database joins
    and PSI for secret shared data", CCS 2020 (three parties).
    """
    tables = (left, right, *more)
    session, party = _checked(tables, how, many, bound)
    normalise = _normalisations(normalise)
    keys_of = [_key_columns(table, on, tables) for table in tables]
    if len({len(columns) for columns in keys_of}) > 1:
        raise ArgumentError("on names several numbers of key columns; each owner has as many as the others")
    words, names = _names(tables, keys_of, suffixes)
    keys = [_keys(table, columns, normalise) for table, columns in zip(tables, keys_of, strict=True)]
    for i, (table, (own, _)) in enumerate(zip(tables, keys, strict=True)):
        if not own.is_meta:
            _check_repeats(table, own, many if i == 0 else 1, i == 0)
    described = [(x.table.owner, len(x.table), names, x.names) for x, names in zip(words, keys_of, strict=True)]
    session.agreement.note(party, "join", described, how, many, bound, normalise, str(left.scheme))
    _compare_kinds(session, party, tables, keys, len(keys_of[0]))
    return _Join(session, party, left.scheme, words, names, [own for own, _ in keys], how, many, bound).table()


class _Join:
    """One join whose arguments were checked."""

    def __init__(
        self, session: Any, party: Party, scheme: Scheme, words: list[_Words], names: list[dict[str, str]],
        keys: list[torch.Tensor], how: str, many: int, bound: int | None,
    ):  # fmt: skip
        self.session, self.party, self.scheme, self.words, self.names = session, party, scheme, words, names
        self.keys, self.how, self.many, self.bound = keys, how, many, bound
        self.owners = [session.parties_named(own.table.owner, party)[0] for own in words]
        self.rows = len(words[0].table)

    def table(self) -> Table:
        with self.session.operation(self.party) as net:
            backend = self.session.backend(net, self.scheme)
            own, found = self._lookups(net, backend)
            matches = backend.is_zero(backend.each(_beside, *(backend.each(_columns, x, 0, 1) for x in found)))
            found = [
                backend.each(_columns, x, 1, 1 + part.width) for x, part in zip(found, self.words[1:], strict=True)
            ]
            if self.how == "left":
                return self._left(backend, own, found, matches)
            present = backend.each(_columns, matches, 0, 1)
            for i in range(1, len(found)):
                present = backend.multiply(torch.mul, present, backend.each(_columns, matches, i, i + 1))
            if self.bound is not None:
                found = [backend.multiply(_times_flags, present, x) if x.shape[1] else x for x in found]
                own = backend.multiply(_times_flags, present, own) if own.shape[1] else own
            rows = backend.each(_beside, own, *found, present)
            if self.bound is None:
                return self._opened(self._shuffled(backend, rows))
            if self.bound >= self.rows:
                return self._made(self._shuffled(backend, rows), present=True)
            marked, flags = self._dummies(net, backend, rows, present)
            mixed = self._shuffled(backend, marked)
        return self._opened(mixed, flags)

    def _lookups(self, net: Net, backend: Backend) -> tuple[Any, list[Any]]:
        """L's own words, and for each other table what L's keys find in it less their pads: [n, 1 + r], in shares."""
        reference = self.session.reference
        secret = net.fresh(net.A, _secret)
        secrets = {net.A: secret}
        for owner in self.owners:
            if owner not in secrets:
                secrets[owner] = self._sent(net, secret, owner)
        keys = [
            net.own(owner, own, name=f"keys of {owner.name}") for owner, own in zip(self.owners, self.keys, strict=True)
        ]
        words = [
            net.own(owner, own.content(), name=f"table of {owner.name}")
            for owner, own in zip(self.owners, self.words, strict=True)
        ]
        first, shared, at_S = self.owners[0], [words[0]], []
        for i, owner in enumerate(self.owners[1:], 1):
            store = net.fresh(owner, _Step(_store, i, self.many), keys[i], words[i], secrets[owner])
            hashes, pads = net.fresh(first, _Step(_question, i, self.words[i].width), keys[0], secrets[first])
            shared.append(pads)
            if not reference:
                with net.playing(OWNER, O=owner, S=net.S):
                    store = send_store(net, store)
                with net.playing(OWNER, O=first, S=net.S):
                    hashes = send_hashes(net, hashes)
            else:
                store, hashes = (net.own(net.S, net.read(x, p)) for x, p in ((store, owner), (hashes, first)))
            at_S.append(_found(hashes.at(net.S), store.at(net.S), self.many * len(self.words[i].table)))
        whole = _beside(*shared)
        mine = backend.share(whole, False) if first == net.Q else backend.owned(whole, first)
        own, start, found = backend.each(_columns, mine, 0, self.words[0].width), self.words[0].width, []
        for x in at_S:
            found.append(backend.owned(x, net.S) - backend.each(_columns, mine, start, start + x.shape[1]))
            start += x.shape[1]
        return own, found

    def _sent(self, net: Net, secret: Located, owner: Party) -> Located:
        if self.session.reference:
            return net.own(owner, net.read(secret, net.A))
        with net.playing(STAR, Q=owner, A=net.A, S=net.S, D=net.D):
            return send_secret(net, secret)

    def _shuffled(self, backend: Backend, rows: Any) -> Any:
        return backend.shuffled(rows) if rows.shape[0] > 1 else rows

    def _left(self, backend: Backend, own: Any, found: list[Any], matches: Any) -> Table:
        flags = [backend.each(_columns, matches, i, i + 1) for i in range(len(found))]
        found = [
            backend.multiply(_times_flags, flag, x) if x.shape[1] else x for flag, x in zip(flags, found, strict=True)
        ]
        return self._made(self._shuffled(backend, backend.each(_beside, own, *found, matches)), matched=True)

    def _dummies(self, net: Net, backend: Backend, rows: Any, present: Any) -> tuple[Any, tuple[Any, ...]]:
        """The rows with `bound` empty ones, and a last column that marks `bound` of all: the matches and some of these.

        What is opened later, the marks in a secret order, is the same for any number of matches.
        """
        bound = self.bound or 0
        count = backend.each(torch.sum, present, dim=0, keepdim=True)
        numbers = torch.arange(bound + 1, dtype=torch.int64, device=self.session.device).unsqueeze(1)
        # [bound - count - 1 - j >= 0] for j = -1 .. bound - 1: the first says whether all fit.
        room = backend.each(_repeated, -count, rows=bound + 1) + (bound - numbers)
        some = backend.at_least(room)[0]
        raised = net.state(RaisedFlags)
        before = len(raised)
        backend.flag(-some[:1] + 1)
        marks = backend.each(_above, present, some[1:])
        return backend.each(_beside, backend.each(_padded, rows, bound), marks), tuple(raised[before:])

    def _opened(self, rows: Any, flags: tuple[Any, ...] | None = None) -> Table:
        """The rows whose last column is 1, which all parties learn."""
        session, last = self.session, rows.shape[1] - 1
        with session.operation(self.party):
            marks = _Rows(session, self.party, self.scheme, rows, flags or ()).tensor(last, FLAG)
        try:
            marks.check_range()
        except RangeExceededError:
            raise RangeExceededError(
                f"more rows match than bound={self.bound}, so there is no result, and nobody learned by how many: "
                f"name a larger bound, or none"
            ) from None
        session.agreement.note(self.party, "join rows", marks)
        session.agreement.compare(self.party)  # after Q's check: if Q stops, nobody goes on
        with session.operation(self.party) as net:
            at_S = session.backend(net, self.scheme).reveal_to(marks.shares, net.S)
            kept = net.read(at_S, net.S) if session.reference else self._broadcast(net, _as_bytes(at_S))
        if kept.is_meta:
            raise ArgumentError("how many rows match is not known in a rehearsal; name a bound")
        at = kept.nonzero().squeeze(1)
        with session.operation(self.party) as net:
            chosen = session.backend(net, self.scheme).each(torch.index_select, rows, 0, at.to(session.device))
        return self._made(chosen, present=flags is not None)

    def _broadcast(self, net: Net, marks: Located) -> torch.Tensor:
        everybody = clients(net).values()
        for party in everybody:
            with net.playing(OWNER, O=party, S=net.S):
                marks = send_rows(net, marks)
        return net.agreed(marks, {net.S, *everybody})

    def _made(self, rows: Any, present: bool = False, matched: bool = False) -> Table:
        """The table of these rows."""
        with self.session.operation(self.party):
            return self._named(_Rows(self.session, self.party, self.scheme, rows), present, matched)

    def _named(self, made: _Rows, present: bool, matched: bool) -> Table:
        columns, schema, missing, at = {}, {}, {}, 0
        flags_at = sum(part.width for part in self.words)
        for i, (part, names) in enumerate(zip(self.words, self.names, strict=True)):
            for name in part.names:
                schema[names[name]] = part.table.schema[name]
                columns[names[name]] = made.tensor(at, part.table.schema[name])
                at += 1
            for name in part.missing:
                missing[names[name]] = made.tensor(at, FLAG)
                at += 1
            if matched and i:
                flag = made.tensor(flags_at + i - 1, FLAG)
                for name in part.names:
                    own = missing.get(names[name])
                    # The flag of a row without a match is 0, so the two never are 1 together.
                    absent = flag.like(-flag.shares + 1 if own is None else own.shares - flag.shares + 1, bound=1.0)
                    missing[names[name]] = absent
        flags = made.tensor(flags_at, FLAG) if present else None
        found = Table(columns, schema, present=flags, missing=missing, checked=True)
        found._owned = frozenset(columns)
        return found.with_many(self.many)


@leaf
def _as_bytes(marks: torch.Tensor) -> torch.Tensor:
    return marks.to(torch.uint8)


def _repeated(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.expand(rows, 1)


class _Step:
    """A kernel with its public arguments, as one party's own step."""

    def __init__(self, f: Callable, *public: Any):
        kernel = f.kernel  # pyright: ignore[reportFunctionMemberAccess]  `leaf` sets it
        self._f, self._shapes, self._public = kernel, kernel.shapes, public

    def __call__(self, *values: Any) -> Any:
        return self._f(*values, *self._public)

    def shapes(self, *values: Any) -> Any:
        return self._shapes(*values, *self._public)


# Checks of arguments, before anything is shared.


def _checked(tables: Sequence[Any], how: Any, many: Any, bound: Any) -> tuple[Any, Party]:
    """The session and party of the tables."""
    for table in tables:
        if not isinstance(table, OwnedTable):
            raise ArgumentError(
                f"join() takes tables that their owners have in the clear, made by sectorch.owned, got a "
                f"{type(table).__name__}"
            )
    first = tables[0]
    for table in tables:
        if table.session is not first.session or table.party != first.party or table.scheme != first.scheme:
            raise SessionMismatchError("join() takes tables of one session, answering party and number format")
        if table.owner == first.session.S.name:
            raise ArgumentError(
                "S looks up keys for the owners and must not know their secret, so it owns no table of a join: let "
                "another party play S, or open the session with this owner as one more party (owners=[...])"
            )
    owners = [table.owner for table in tables]
    if len(set(owners)) < len(owners):
        raise ArgumentError("two tables of a join are of one owner: let it join them itself, and bring the result")
    if how not in ("inner", "left"):
        raise ArgumentError(f"how is 'inner' or 'left', got {how!r:.40}")
    if type(many) is not int or not 1 <= many < 1 << 20:
        raise ArgumentError(f"many is the most rows of one key in the first table, from 1, got {many!r:.40}")
    if bound is not None and (type(bound) is not int or bound < 1):
        raise ArgumentError(f"bound is a number of rows, from 1, got {bound!r:.40}")
    if bound is not None and how == "left":
        raise ArgumentError("a left join has as many rows as its first table: leave out bound")
    if max(len(table) for table in tables[1:]) * many >= 1 << 28:
        raise ArgumentError(
            f"the rows of another table than the first are stored many={many} times, which makes 2^28 or more: name a "
            f"smaller many"
        )
    if first.scheme.verified:
        raise UnsupportedOpError(
            "a join shuffles its rows, for whose dealing there is no proof: use a scheme without verified=True"
        )
    return first.session, first.party


def _normalisations(given: Any) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given)
    if not set(found) <= set(NORMALISATIONS):
        raise ArgumentError(f"normalise is one or several of {', '.join(NORMALISATIONS)}, got {given!r:.60}")
    return tuple(sorted(set(found)))


def _key_columns(table: OwnedTable, on: Any, tables: Sequence[OwnedTable]) -> tuple[str, ...]:
    if isinstance(on, Mapping):
        owners = {other.owner for other in tables}
        if set(on) != owners:
            raise ArgumentError(f"on names the key columns of {', '.join(sorted(map(str, on)))}, and the tables are of "
                                f"{', '.join(sorted(owners))}")  # fmt: skip
        on = on[table.owner]
    columns = (on,) if isinstance(on, str) else tuple(on) if isinstance(on, Sequence) else ()
    if not columns or not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
        raise ArgumentError("on is a key column's name, a list of several, or a mapping of owners to these")
    return columns


def _names(
    tables: Sequence[OwnedTable], keys_of: Sequence[tuple[str, ...]], suffixes: Sequence[str] | None
) -> tuple[list[_Words], list[dict[str, str]]]:
    """The columns of each table that are joined, and their names in the result."""
    words = [
        _Words(table, tuple(name for name in table.columns if i == 0 or name not in columns))
        for i, (table, columns) in enumerate(zip(tables, keys_of, strict=True))
    ]
    if suffixes is not None and (
        isinstance(suffixes, str) or len(suffixes) != len(tables) or not all(isinstance(s, str) for s in suffixes)
    ):
        raise ArgumentError(f"suffixes are {len(tables)} texts, one for each table")
    used = [name for part in words for name in part.names]
    names = [
        {name: name + suffixes[i] if suffixes and used.count(name) > 1 else name for name in part.names}
        for i, part in enumerate(words)
    ]
    result = [name for of_table in names for name in of_table.values()]
    twice = sorted({name for name in result if result.count(name) > 1})
    if twice:
        raise ArgumentError(
            f"two tables have a column {', '.join(map(repr, twice))}: name suffixes=(...), one for each table, or "
            f"rename them"
        )
    if not result:
        raise ArgumentError("the tables share no column besides the keys: name one more")
    return words, names


def _keys(table: OwnedTable, columns: Sequence[str], normalise: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
    if table.frame is None:
        return torch.empty((len(table), KEY_WORDS), dtype=torch.int64, device="meta"), []
    found, kinds = key_digests(table, columns, normalise)
    return found.to(table.session.device), kinds


def _compare_kinds(
    session: Any, party: Party, tables: Sequence[OwnedTable], keys: Iterable[tuple[torch.Tensor, list[int]]], count: int
) -> None:
    """Refuse key columns of different types, which all parties learn: nothing would match, without a word."""
    kinds = []
    for table, (_, found) in zip(tables, keys, strict=True):
        if not session.complete:
            (holder,) = session.parties_named(table.owner, party)
            own_kinds = torch.tensor(found if found else [0] * count, dtype=torch.int64)
            found = session.agreement.broadcast(party, "join_keys", holder, own_kinds).tolist()
        kinds.append(found)
    for column in zip(*kinds, strict=True):
        known = {kind for kind in column if 0 < kind < _MIXED}
        if len(known) > 1:
            said = ", ".join(
                f"{_KINDS[kind]} at {table.owner}"
                for table, kind in zip(tables, column, strict=True)
                if 0 < kind <= _MIXED
            )
            raise ArgumentError(
                f"a key column is {said}, of which none is equal to another: convert one of them, or name "
                f"normalise='digits' where text of digits is meant as numbers"
            )
