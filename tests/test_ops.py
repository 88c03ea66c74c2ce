"""Templates over the op table: every operation, in every spelling, against torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from op_rows.base import Data, OpRow, Sample
from op_stage import (
    Stage,
    by_name,
    check,
    close,
    lines,
    listed,
    plain_arguments,
    reference,
    reference_stage,
    revealed,
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
from sectorch.errors import SectorchError, SessionMismatchError
from sectorch.session import Session
from sectorch.table import HANDLER, SMOOTH, TABLE
from sectorch.tensor import SharedTensor

ROLES = {"s": "shared", "p": "private", ".": "public"}
TORCH_SAYS = (
    "Using padding='same' with even kernel",
    "An output with one or more elements was resized",
    "torch.ger is",
    "`nn.functional.upsample",
    "reduction. 'mean' divides",
    "size_average and reduce args",
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

    def check(self, result: Any, expected: tuple[Any, Any], factor: float = 1, ulps: float = 0) -> None:
        """Within factor times the row's bound, and `ulps` more."""
        check(result, expected, self.row, factor * self.bound + ulps, factor * self.row.relative, repr(self))

    def __repr__(self) -> str:
        return f"{self.row.name}-{spelled(self.key)}-{self.number}"


def calls(keys: Callable[[Any], list]) -> list[Called]:
    return [
        Called(ROWS[name], key, number, sample)
        for name in TABLE
        if name in ROWS
        for key in dict.fromkeys(keys(TABLE[name]))
        for number, sample in ROWS[name].samples_of(key)
    ]


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

every_call = pytest.mark.parametrize("case", CALLS, ids=repr)
every_sample = pytest.mark.parametrize("case", [c for c in ONCE if not c.writes], ids=repr)
every_row = pytest.mark.parametrize("row", [row for name, row in ROWS.items() if name in TABLE], ids=lambda r: r.name)
elementwise = pytest.mark.parametrize(
    "row", [r for n, r in ROWS.items() if r.operands and n in TABLE], ids=lambda r: r.name
)


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


@pytest.mark.parametrize("grid", [True, False], ids=["grid", "uniform"])
@pytest.mark.parametrize("case", HANDLED, ids=repr)
def test_result_is_torchs(case: Called, grid: bool):
    expected = case.expected(grid=grid)
    args, kwargs = case.secret(grid=grid)
    case.check(case.key(*args, **kwargs), expected)


@pytest.mark.parametrize("case", OTHERS, ids=repr)
def test_every_spelling_gives_torchs_result(case: Called):
    for grid in (True, False):
        args, kwargs = case.secret(at=reference_stage(), grid=grid)
        case.check(case.key(*args, **kwargs), case.expected(grid=grid))


@every_sample
def test_results_are_the_references_bit_for_bit(case: Called):
    """Equality where results are exact; smooth functions, too, but for one value in 2^28 (docs/protocols.md)."""
    both = []
    for at in (stage(), reference_stage()):
        args, kwargs = case.secret(at=at, grid=False)
        both.append([revealed(v) for v in pytree.tree_leaves(listed(case.key(*args, **kwargs)))])
    for secure, ideal in zip(*both, strict=True):
        assert torch.equal(secure, ideal) if isinstance(secure, torch.Tensor) else secure == ideal


def takes_a_series(ledger: list) -> bool:
    return any("trigonometric" in line.path for line in ledger)


@pytest.mark.parametrize("name", sorted(SMOOTH))
def test_smooth_operations_take_a_series(name: str):
    """And others do not: see `test_dry_run_has_the_ledger_of_the_local_run`."""
    at = Stage(Session(dry=True))
    for case in (c for c in ONCE if c.row.name == name):
        args, kwargs = case.secret(at=at)
        with sectorch.profile() as profile:
            case.key(*args, **kwargs)
        if takes_a_series(profile.ledger):
            return
    pytest.fail("no sample takes a series")


def test_smooth_operations_are_listed():
    assert {op["name"] for op in sectorch.supported_ops() if not op["exact"]} == SMOOTH


@pytest.mark.parametrize("case", IN_PLACE, ids=repr)
def test_in_place_forms_change_their_first_argument_or_nothing(case: Called):
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
    result = case.key(*args, **kwargs)
    assert result is args[0]
    case.check(args[0], expected)


@every_call
def test_arguments_may_be_named(case: Called):
    if case.key is torch.instance_norm:
        return  # torch's own table of names has them in the order of F.instance_norm, which is another
    operator = getattr(case.key, "__name__", "").startswith("__")
    named = None if operator else by_name(case.key, *case.plain())
    try:
        if named is not None and case.key(*named[0], **named[1]) is NotImplemented:
            return
    except (TypeError, RuntimeError):
        named = None  # torch's own function does not take these names
    if named is not None:
        args, kwargs = by_name(case.key, *case.secret(at=reference_stage()))
        case.check(case.key(*args, **kwargs), case.expected())


@every_call
def test_out_arguments_are_refused(case: Called):
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


def in_turn(arrangements: list) -> Any:
    """Every sample in each arrangement: on shares in one, as samples take turns, and in the reference in the others.

    What is on shares is computed by the protocols that the reference's functions stand for, bit for bit.
    """
    every = [
        pytest.param(case, f, stage if i % len(arrangements) == at else reference_stage, id=f"{case!r}-{f.__name__}")
        for i, case in enumerate(c for c in ONCE if not c.writes)
        for at, f in enumerate(arrangements)
    ]
    return pytest.mark.parametrize(("case", "arrange", "at"), every)


@in_turn([scale_3, scale_26, scale_40])
def test_any_number_of_fraction_bits(case: Called, arrange, at):
    """Entries come from the grid, which all of these scales hold exactly; but a truncation of an operand errs by one
    ulp where an encoding errs by a half, so the bound doubles."""
    args, kwargs = case.secret(arrange=arrange, at=at())
    case.check(case.key(*args, **kwargs), case.expected(), factor=2)


@pytest.mark.parametrize("case", [c for c in ONCE if not c.writes and c.row.whole], ids=repr)
def test_whole_numbers_that_pass_for_floats(case: Called):
    """Comparisons and integers have no fraction bits. Public operands must not be rounded to that."""
    args, kwargs = case.secret(arrange=scale_0)
    case.check(case.key(*args, **kwargs), case.expected(rounded=True), factor=2)


@in_turn([transposed, strided])
def test_strides_do_not_matter(case: Called, arrange, at):
    args, kwargs = case.secret(arrange=arrange, at=at())
    case.check(case.key(*args, **kwargs), case.expected())


SHAPES = [((0,), (0,)), ((), ()), ((2, 0), (1, 0)), ((2, 1), (1, 3)), ((2, 3), (3,)), ((), (2, 3)), ((2, 3), ()),
          ((1,), (2, 2)), ((0, 3), (3,)), ((1, 1, 2), (2, 1, 1))]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@elementwise
def test_broadcasting_empty_tensors_and_no_dimensions(row: OpRow, shapes):
    key = TABLE[row.name].keys[0]
    domain = row.samples[0].args[: row.operands]
    for roles in row.pairs.split() or ["s"]:
        operands = [replace(d, shape=s, role=ROLES[r]) for d, s, r in zip(domain, shapes, roles, strict=False)]
        case = Called(row, key, 0, Sample(tuple(operands), row.samples[0].kwargs))
        args, kwargs = case.secret()
        case.check(key(*args, **kwargs), case.expected())


PAIRED = [
    (c, roles) for c in ONCE for roles in c.row.pairs.split() if sum(isinstance(a, Data) for a in c.sample.args) > 1
]


@pytest.mark.parametrize(("case", "roles"), PAIRED, ids=[f"{c!r}-{roles}" for c, roles in PAIRED])
def test_operands_of_every_party(case: Called, roles: str):
    chosen = iter(roles)
    placed = (replace(a, role=ROLES[next(chosen, "s")]) if isinstance(a, Data) else a for a in case.sample.args)
    case = replace(case, sample=replace(case.sample, args=tuple(placed)))
    args, kwargs = case.secret(grid=False)
    # A private operand may be prepared in float32 by its owner: at most 8 in magnitude, 8 2^-24 = 1/2 ulp a step.
    case.check(case.key(*args, **kwargs), case.expected(grid=False), ulps=2)


@every_sample
def test_dry_run_has_the_ledger_of_the_local_run(case: Called):
    ledgers = []
    for at in (stage(), Stage(Session(dry=True))):
        args, kwargs = case.secret(at=at)
        with sectorch.profile() as profile:
            result = listed(case.key(*args, **kwargs))
            shapes = [tuple(revealed(leaf).shape) for leaf in pytree.tree_leaves(result)]
        ledgers.append((shapes, lines(profile)))
        assert case.row.name in SMOOTH or not takes_a_series(profile.ledger)
    assert ledgers[0] == ledgers[1]


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
