"""Templates over the op table: every operation, in every spelling, against torch."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import by_turns, long, some
from op_rows.base import Data, OpRow, Sample
from op_stage import (
    Stage,
    by_name,
    called,
    check,
    close,
    lines,
    plain_arguments,
    reference,
    reference_stage,
    scale_0,
    scale_3,
    scale_26,
    scale_40,
    secret_arguments,
    spelled,
    stage,
    strided,
    transposed,
)
from op_table import KINDS, ROWS
from torch.utils import _pytree as pytree

import sectorch
from sectorch.choreography.ledger import Profile
from sectorch.errors import SectorchError, SessionMismatchError
from sectorch.session import Session
from sectorch.tensor import SharedTensor, dispatch
from sectorch.tensor.table import HANDLER, TABLE
from sectorch.testing.calls import as_tuple, reveal_leaf

ROLES = {"s": "shared", "p": "private", ".": "public"}
TORCH_SAYS = (
    "Using padding='same' with even kernel",
    "An output with one or more elements was resized",
    "torch.ger is",
    "`nn.functional.upsample",
    "reduction. 'mean' divides",
    "LSTM with projections",
    "size_average and reduce args",
    "The reduce argument of torch.scatter",
    r"index_reduce\(\) is in beta",
    r"scatter_reduce\(\) is in beta",
)
"""Warnings of torch itself about the samples' arguments."""

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}:UserWarning") for text in TORCH_SAYS]


@dataclass(frozen=True)
class Called:
    """One sample of one row in one spelling."""

    row: OpRow
    key: Callable
    number: int
    sample: Sample
    roles: str = ""

    @property
    def bound(self) -> float:
        return self.row.bound(self.sample)

    @property
    def writes(self) -> bool:
        return bool(self.sample.kwargs.get("inplace"))

    def plain(self, **how: Any) -> tuple[tuple, dict]:
        return plain_arguments(self.row, self.number, self.sample, **how)

    def secret(self, **how: Any) -> tuple[tuple, dict]:
        return secret_arguments(self.row, self.number, self.sample, **how)

    def expected(self, **how: Any) -> tuple[Any, Any]:
        return reference(self.key, self.row, self.number, self.sample, **how)

    def check(
        self,
        result: Any,
        expected: tuple[Any, Any],
        factor: float = 1,
        ulps: float = 0,
        revealed_as: list[torch.Tensor] | None = None,
    ) -> None:
        """Within factor times the row's bound, and `ulps` more."""
        bounds = factor * self.bound + ulps, factor * self.row.relative
        check(result, expected, self.row, *bounds, repr(self), revealed_as)

    def __repr__(self) -> str:
        return "-".join(filter(None, (self.row.name, spelled(self.key), str(self.number), self.roles)))


def calls(keys: Callable[[Any], list]) -> list[Called]:
    return [
        Called(ROWS[name], key, number, sample)
        for name in TABLE
        if name in ROWS
        for key in dict.fromkeys(keys(TABLE[name]))
        for number, sample in ROWS[name].samples_of(key)
    ]


DRY = Stage(Session(dry=True))
CALLS = calls(lambda row: row.keys)
IN_PLACE = calls(lambda row: row.in_place)
ONCE = list({(c.row.name, c.number): c for c in reversed(CALLS)}.values())[::-1]
"""Every sample in one spelling."""
_HANDLED = {(c.row.name, HANDLER[c.key], c.number): c for c in reversed(CALLS)}
HANDLED = list(_HANDLED.values())[::-1]
"""Every sample in one spelling for each handler."""
OTHERS = [c for c in CALLS if _HANDLED[c.row.name, HANDLER[c.key], c.number] is not c]
"""Samples in a spelling more of a handler, which `HANDLED` tries on shares. Its protocols compute what the reference
does, bit for bit, and these are run in the reference."""


def by_row(cases: Iterable) -> dict[str, list]:
    rows: dict[str, list] = {}
    for case in cases:
        rows.setdefault(case.row.name, []).append(case)
    return rows


def of_rows(cases: Iterable) -> Any:
    """One test for each row, with its cases."""
    rows = by_row(cases)
    return pytest.mark.parametrize("cases", rows.values(), ids=rows)


def each(cases: Iterable, body: Callable[[Any], None]) -> None:
    """Run the body on every case; one error names every case that failed, and why."""
    failures = []
    for case in cases:
        try:
            body(case)
        except (Exception, pytest.fail.Exception) as error:
            failures.append((case, error))
    if failures:
        said = "\n\n".join(f"{case!r}: {type(error).__name__}: {error}" for case, error in failures)
        raise AssertionError(f"{len(failures)} failed:\n{said}") from failures[0][1]


every_row = pytest.mark.parametrize("row", [row for name, row in ROWS.items() if name in TABLE], ids=lambda r: r.name)


def test_every_operation_has_one_row_and_every_row_an_operation():
    assert set(TABLE) - set(ROWS) == set(), "operations without a row in tests/op_rows"
    assert set(ROWS) - set(TABLE) == set(), "rows without an operation"
    assert sum(len(kind.ROWS) for kind in KINDS) == len(ROWS), "a name has two rows"


@every_row
def test_every_spelling_has_a_sample_and_every_sample_a_spelling(row: OpRow):
    keys = [*TABLE[row.name].keys, *TABLE[row.name].in_place]
    assert [spelled(key) for key in keys if not row.samples_of(key)] == []
    assert {number for key in keys for number, _ in row.samples_of(key)} == set(range(len(row.samples)))
    assert row.why


def takes_a_series(ledger: list) -> bool:
    return any("trigonometric" in line.path for line in ledger)


def opened(case: Called, at: Stage, grid: bool) -> tuple[Any, list[torch.Tensor], Profile]:
    """The result of a call, its revealed leaves, and the ledger of both."""
    args, kwargs = case.secret(at=at, grid=grid)
    with sectorch.profile() as profile:
        result = as_tuple(case.key(*args, **kwargs))
        leaves = [reveal_leaf(leaf) for leaf in pytree.tree_leaves(result)]
    return result, leaves, profile


ENDS: dict[tuple, list[int]] = {}
"""The numbers of the first and the last sample of each handler of a row."""
for _case in HANDLED:
    _ends = ENDS.setdefault((_case.row.name, HANDLER[_case.key]), [_case.number] * 2)
    _ends[:] = min(_ends[0], _case.number), max(_ends[1], _case.number)


def at_an_end(case: Called) -> bool:
    """The first or the last sample of each handler, by turns; the others every run computes in the reference, and long
    runs on shares too."""
    turn = zlib.crc32(f"{case.row.name}-{HANDLER[case.key].__name__}".encode()) % 2
    return case.number == ENDS[case.row.name, HANDLER[case.key]][turn]


@pytest.mark.parametrize("case", some(HANDLED, at_an_end), ids=repr)
def test_result_is_torchs_and_the_references(case: Called):
    """On any numbers, and the dry run has shapes and ledger of that call, and the reference has the same bits: smooth
    functions, too, but for one value in 2^28 (docs/protocols.md). The reference on multiples of 1/8, where a value is
    often met twice; on shares these are in `test_fraction_bits_and_strides_do_not_matter`."""
    result, leaves, profile = opened(case, stage(), grid=False)
    case.check(result, case.expected(grid=False), revealed_as=leaves)
    assert not TABLE[case.row.name].exact or not takes_a_series(profile.ledger)
    _, shapes, dry = opened(case, DRY, grid=False)
    assert [leaf.shape for leaf in shapes] == [leaf.shape for leaf in leaves]
    assert lines(dry) == lines(profile)
    for secure, ideal in zip(leaves, opened(case, reference_stage(), grid=False)[1], strict=True):
        assert torch.equal(secure, ideal) if isinstance(secure, torch.Tensor) else secure == ideal
    result, leaves, _ = opened(case, reference_stage(), grid=True)
    case.check(result, case.expected(), revealed_as=leaves)


@of_rows(OTHERS)
def test_every_spelling_gives_torchs_result(cases: list[Called]):
    def body(case: Called) -> None:
        args, kwargs = case.secret(at=reference_stage(), grid=False)
        case.check(case.key(*args, **kwargs), case.expected(grid=False))

    each(cases, body)


MAKING = (
    "scaled_dot_product_attention",
    "cov",
    "gradient",
    "index_fill",
    "inv",
    "istft",
    "matrix_power",
    "solve",
    "sort",
    "stft",
    "take",
)
"""Rows whose handlers make indices, masks or constants."""


@pytest.mark.parametrize("every", [False, *long(True)], ids=["some", "every"])
@of_rows([case for case in ONCE if case.row.name in MAKING])
def test_what_a_handler_makes_is_asked_for_on_a_device(cases: list[Called], every: bool, monkeypatch):
    """On a CPU this shows that handlers run in the context of a device; `test_cuda.py` has the other devices."""
    asked = []
    monkeypatch.setattr(dispatch, "created_on", lambda device: asked.append(device) or device)

    def body(case: Called) -> None:
        found = opened(case, stage(), grid=False)[1]
        for secure, ideal in zip(found, opened(case, reference_stage(), grid=False)[1], strict=True):
            assert torch.equal(secure, ideal)

    each(cases if every else cases[:2], body)
    assert set(asked) == {torch.device("cpu")}


@pytest.mark.parametrize("name", sorted(row.name for row in TABLE.values() if not row.exact))
def test_smooth_operations_take_a_series(name: str):
    """And others do not: see `test_result_is_torchs_and_the_references`."""
    for case in (c for c in ONCE if c.row.name == name):
        args, kwargs = case.secret(at=DRY)
        with sectorch.profile() as profile:
            case.key(*args, **kwargs)
        if takes_a_series(profile.ledger):
            return
    pytest.fail("no sample takes a series")


@of_rows(IN_PLACE)
def test_in_place_forms_change_their_first_argument_or_nothing(cases: list[Called]):
    each(cases, in_place)


def in_place(case: Called) -> None:
    args, kwargs = case.secret()
    if not isinstance(args[0], SharedTensor):
        before = args[0].clone()
        with contextlib.suppress(SectorchError):  # an operator may also give way to the one that is not in place
            assert case.key(*args, **kwargs) is NotImplemented
        assert torch.equal(args[0], before), "a secret was written into a plain tensor"
        return
    try:
        expected = case.expected()
    except TypeError:
        return  # the in-place function does not take these arguments
    except RuntimeError:  # torch refuses: another dtype, or a larger shape, than the target has
        before = args[0].reveal()
        with pytest.raises(SectorchError):
            case.key(*args, **kwargs)
        close(args[0].reveal(), before, 0, "the target of a refused call")
        return
    result = called(case.key, args, kwargs)
    assert result is args[0]
    case.check(args[0], expected)


@pytest.mark.parametrize("every", [False, *long(True)], ids=["some", "every"])
@of_rows(CALLS)
def test_arguments_may_be_named(cases: list[Called], every: bool):
    """In some runs of each spelling the first sample: which names it takes is the same for all."""
    each(cases if every else {case.key: case for case in reversed(cases)}.values(), named)


def named(case: Called) -> None:
    if case.key is torch.instance_norm:
        return  # torch's own table of names has them in the order of F.instance_norm, which is another
    operator = getattr(case.key, "__name__", "").startswith("__")
    given = None if operator else by_name(case.key, *case.plain())
    try:
        if given is not None and case.key(*given[0], **given[1]) is NotImplemented:
            return
    except (TypeError, RuntimeError):
        given = None  # torch's own function does not take these names
    if given is not None:
        args, kwargs = by_name(case.key, *case.secret(at=reference_stage()))
        case.check(case.key(*args, **kwargs), case.expected())


@of_rows(CALLS)
def test_out_arguments_are_refused(cases: list[Called]):
    each(cases, with_out)


def with_out(case: Called) -> None:
    outputs = [torch.zeros_like(leaf) for leaf in pytree.tree_leaves(case.expected()[1])]
    out = outputs[0] if len(outputs) == 1 else tuple(outputs)
    args, kwargs = case.plain()
    try:
        if case.key(*args, **kwargs, out=out) is NotImplemented:
            return
    except (TypeError, RuntimeError):
        return  # torch's own function has no such argument
    for leaf in outputs:
        leaf.zero_()
    args, kwargs = case.secret()
    with sectorch.profile() as profile, pytest.raises(SectorchError):
        case.key(*args, **kwargs, out=out)
    assert not profile.ledger
    assert not any(bool(leaf.any()) for leaf in outputs), "a refused call wrote to out="


SCALES = {scale_3: 2, scale_26: 2, scale_40: 2, scale_0: 2}
"""How many times the row's bound a result may be off: entries come from the grid, which the first three hold exactly;
but a truncation of an operand errs by one ulp where an encoding errs by a half. Comparisons and integers have no
fraction bits (`scale_0`), and public operands must not be rounded to that."""
STRIDES = {transposed: 1, strided: 1}


def named_so(value: Any) -> str:
    """A row's name, or that of its arrangements."""
    return value[0].row.name if isinstance(value, list) else "strides" if value is STRIDES else "fraction bits"


def arranged(case: Called, arrangements: dict, turn: int, shares: bool, every: bool) -> None:
    """A sample in the arrangement whose turn it is, on shares or in the reference, and in every other in the reference.

    What is on shares is computed by the protocols that the reference's functions stand for, bit for bit. Of fraction
    bits they see how far to shift, which `test_protocols.py` tries from 1 to 32: a row's first sample is on shares.
    """
    arrangements = {a: factor for a, factor in arrangements.items() if a is not scale_0 or case.row.whole}
    for i, (arrange, factor) in enumerate(arrangements.items()):
        in_turn = i == turn % len(arrangements)
        if not in_turn and not every:
            continue
        on_shares = in_turn and shares
        args, kwargs = case.secret(arrange=arrange, at=stage() if on_shares else reference_stage())
        try:
            case.check(case.key(*args, **kwargs), case.expected(rounded=arrange is scale_0), factor=factor)
        except Exception as error:
            raise AssertionError(f"{arrange.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("every", [False, *long(True)], ids=["some", "every"])
@by_turns(ids=named_so, cases=by_row(c for c in ONCE if not c.writes).values(), arrangements=[SCALES, STRIDES])
def test_fraction_bits_and_strides_do_not_matter(cases: list[Called], arrangements: dict, every: bool):
    """A row's first sample in every arrangement, in one on shares, the others in one by turns."""
    turn = zlib.crc32(cases[0].row.name.encode())  # rows of one sample take turns, too
    turns = {repr(case): (turn + i, i == 0) for i, case in enumerate(cases)}

    def body(case: Called) -> None:
        turn, first = turns[repr(case)]
        arranged(case, arrangements, turn, first or (every and arrangements is STRIDES), every or first)

    each(cases, body)


SHAPES = [((0,), (0,)), ((), ()), ((2, 0), (1, 0)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((), (2, 3)), ((2, 3), ()),
          ((1,), (2, 2)), ((0, 3), (3,)), ((1, 1, 2), (2, 1, 1))]  # fmt: skip


@pytest.mark.parametrize("row", [r for n, r in ROWS.items() if r.operands and n in TABLE], ids=lambda r: r.name)
def test_broadcasting_empty_tensors_and_no_dimensions(row: OpRow):
    each(SHAPES, lambda shapes: broadcast(row, shapes))


def broadcast(row: OpRow, shapes: tuple) -> None:
    key = TABLE[row.name].keys[0]
    domain = row.samples[0].args[: row.operands]
    for roles in row.pairs.split() or ["s"]:
        operands = [replace(d, shape=s, role=ROLES[r]) for d, s, r in zip(domain, shapes, roles, strict=False)]
        case = Called(row, key, 0, Sample(tuple(operands), row.samples[0].kwargs))
        args, kwargs = case.secret()
        case.check(key(*args, **kwargs), case.expected())


def placed(case: Called, roles: str) -> Called:
    """The call with its tensors at other parties."""
    chosen = iter(roles)
    args = (replace(a, role=ROLES[next(chosen, "s")]) if isinstance(a, Data) else a for a in case.sample.args)
    return replace(case, roles=roles, sample=replace(case.sample, args=tuple(args)))


PAIRED = [
    placed(c, roles)
    for c in ONCE
    for roles in c.row.pairs.split()
    if sum(isinstance(a, Data) for a in c.sample.args) > 1
]


@of_rows(PAIRED)
def test_operands_of_every_party(cases: list[Called]):
    each(cases, held_by_parties)


def held_by_parties(case: Called) -> None:
    args, kwargs = case.secret(grid=False)
    # A private operand may be prepared in float32 by its owner: at most 8 in magnitude, 8 2^-24 = 1/2 ulp a step.
    case.check(case.key(*args, **kwargs), case.expected(grid=False), ulps=2)


ERRORS = [(row, case, i) for row in ROWS.values() if row.name in TABLE for i, case in enumerate(row.errors)]


@pytest.mark.parametrize(("row", "case", "number"), ERRORS, ids=[f"{r.name}-{i}" for r, _, i in ERRORS])
def test_a_refused_call_is_typed_and_changes_nothing(row: OpRow, case, number: int):
    key = case.key or TABLE[row.name].keys[0]
    args, kwargs = secret_arguments(row, 100 + number, Sample(case.args, case.kwargs))
    secrets = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, SharedTensor)]
    before = [x.reveal() for x in secrets]
    with sectorch.profile() as profile, pytest.raises(case.error, match=case.match) as raised:
        key(*args, **kwargs)
    assert isinstance(raised.value, SectorchError)
    assert not profile.ledger, "a refused call sent messages"
    for x, value in zip(secrets, before, strict=True):
        close(x.reveal(), value, 0, "an input of a refused call")


@pytest.mark.parametrize("row", [r for n, r in ROWS.items() if r.operands == 2 and n in TABLE], ids=lambda r: r.name)
def test_tensors_of_two_sessions_or_parties_cannot_meet(row: OpRow):
    x, two = torch.ones(2, 3), Session(2)
    there = stage().share(x)
    first, second = (sectorch.share(x, session=two, party=party) for party in two.answering)
    for a, b in itertools.permutations((there, first, second), 2):
        with sectorch.profile() as profile, pytest.raises(SessionMismatchError, match="cannot meet"):
            TABLE[row.name].keys[0](a, b)
        assert not profile.ledger
