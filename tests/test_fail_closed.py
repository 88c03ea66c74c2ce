"""Nothing but `.reveal()` gives a value: every other way out of a secret tensor raises, and shows nothing.

An error that is not a SectorchError counts as a failure too: it says that a call got further than the table.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import pprint

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import by_turns
from content_access import ALIASES, FOREIGN, PRIVATE, SCALAR, TENSOR, VALUES, WRITES
from op_stage import stage

import sectorch
from sectorch.errors import SecretAccessError, SectorchError, UnsupportedOpError
from sectorch.tensor import PrivateTensor, SecretTensor, SharedTensor

pytestmark = [  # torch and numpy warn of other things before they ask for the content
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def shared() -> SharedTensor:
    return stage().share(VALUES)


def private() -> PrivateTensor:
    return stage().private(VALUES)


def refuses(f, x: SecretTensor) -> None:
    with sectorch.profile() as profile, pytest.raises(SectorchError) as raised:
        f(x)
    for value in VALUES.flatten().tolist():
        assert str(value) not in str(raised.value), "the error shows a value"
    assert all(not line.shows for line in profile.ledger), "something was revealed"


@pytest.mark.parametrize("make", [shared, private])
@pytest.mark.parametrize("way", FOREIGN)
def test_ways_that_are_closed_anyway(way: str, make):
    x = make()[0, 0] if way == "round" else make()
    with sectorch.profile() as profile, pytest.raises((TypeError, RuntimeError)) as raised:
        FOREIGN[way](x)
    assert all(not line.shows for line in profile.ledger)
    if way != "assert_close":  # it prints the plain tensor that it was given
        assert not profile.ledger
        assert not any(str(value) in str(raised.value) for value in VALUES.flatten().tolist())


@pytest.mark.parametrize("way", SCALAR)
def test_a_secret_number_is_no_python_number(way: str):
    refuses(SCALAR[way], shared()[0, 0])


@pytest.mark.parametrize("way", TENSOR)
def test_a_secret_tensor_does_not_leave(way: str):
    x = shared()
    refuses(TENSOR[way], x)
    assert torch.equal(x.reveal(), VALUES)


@pytest.mark.parametrize("way", PRIVATE)
def test_a_private_tensor_does_not_leave(way: str):
    refuses(TENSOR[way], private())


@pytest.mark.parametrize("way", SCALAR)
def test_a_private_number_is_no_python_number(way: str):
    refuses(SCALAR[way], private()[0, 0])


@pytest.mark.parametrize("make", [shared, private])
@pytest.mark.parametrize(
    "show", [repr, str, ascii, "{!r}".format, lambda x: f"{x!s}", lambda x: "%s" % x, pprint.pformat,  # noqa: UP031
             lambda x: repr([x]), lambda x: repr({"x": x}), lambda x: str((x, 1))],
)  # fmt: skip
def test_printing_shows_no_value(make, show):
    text = show(make())
    assert "shape=(2, 3)" in text
    shown = [value for value in VALUES.flatten().tolist() if str(value) in text]
    assert shown == []


def test_no_way_of_looking_shows_shares(caplog: pytest.LogCaptureFixture):
    """Nor does logging, a traceback's locals, or the repr of what a secret tensor holds."""
    x, w = shared(), private()
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%s and %r", x, w)
    text = caplog.text + repr(vars(x)) + repr(vars(w)) + repr(w.weight()) + repr(x.session)
    halves = [x.session.net(x.party).read(half, owner) for half, owner in
              ((x.shares.A, x.party), (x.shares.S, x.session.S))]  # fmt: skip
    for number in itertools.chain(*(h.flatten().tolist() for h in halves), VALUES.flatten().tolist()):
        assert str(number) not in text


def test_metadata_is_public():
    x, w = shared(), private()
    for secret in (x, w):
        assert secret.shape == (2, 3)
        assert (len(secret), secret.dim(), secret.ndim, secret.numel(), secret.size(0)) == (2, 2, 2, 6, 2)
        assert secret.dtype == torch.float32
        assert secret.device.type == "cpu"
        assert secret.is_floating_point()
        assert not secret.requires_grad
        assert secret.grad is None
        assert torch.is_tensor(secret)
        assert isinstance(hash(secret), int)


def test_iteration_gives_secret_rows():
    rows = list(shared())
    assert [type(row) for row in rows] == [SharedTensor, SharedTensor]
    assert torch.equal(torch.stack([row.reveal() for row in rows]), VALUES)
    first, second = shared()
    assert torch.equal((first + second).reveal(), VALUES.sum(0))
    assert len([type(row) for row in private()]) == 2


def test_a_length_or_a_dimension_that_is_not_there_raises_as_torch_does():
    with pytest.raises(TypeError, match="0-d"):
        len(shared()[0, 0])
    with pytest.raises(IndexError, match="Dimension out of range"):
        shared().size(5)


def test_in_place_writes_reach_views_and_what_they_view():
    x, plain = shared(), VALUES.clone()
    row, plain_row = x[0], plain[0]
    for write in (
        lambda x, row: x.add_(1), lambda x, row: row.mul_(2), lambda x, row: F.relu(x, inplace=True),
        lambda x, row: row.sub_(x[1]), lambda x, row: F.relu(row, inplace=True), lambda x, row: row[1:].zero_(),
        lambda x, row: operator.setitem(x, (slice(None), 0), row[2]),
    ):  # fmt: skip
        write(x, row)
        write(plain, plain_row)
        assert torch.equal(x.reveal(), plain)
        assert torch.equal(row.reveal(), plain_row)


def test_a_refused_write_changes_neither_a_tensor_nor_its_views():
    x = shared()
    line, wide = x.reshape(-1), x[:1].expand(2, 3)
    for write in (lambda: line.add_(1), lambda: wide.mul_(2), lambda: F.relu(line, inplace=True)):
        with pytest.raises(SectorchError, match=r"view|out of place|more than one"):
            write()
    assert torch.equal(x.reveal(), VALUES)
    assert torch.equal(line.reveal(), VALUES.reshape(-1))


@by_turns(alias=ALIASES, written=["the result", "the argument"], write=WRITES)
def test_a_write_through_an_alias_is_seen_or_refused(alias: str, written: str, write: str):
    """Where torch gives the tensor itself, or a view, an in-place write must reach the other name, or be refused."""
    plain, secret = VALUES.clone(), shared()
    plain_alias, secret_alias = ALIASES[alias](plain), ALIASES[alias](secret)
    try:
        if written == "the result":
            secret_alias = WRITES[write](secret_alias)
        else:
            secret = WRITES[write](secret)
    except UnsupportedOpError:
        return
    WRITES[write](plain_alias if written == "the result" else plain)
    assert torch.equal(secret_alias.reveal(), plain_alias)
    assert torch.equal(secret.reveal(), plain)


def test_a_plain_tensor_is_not_written_by_an_operator():
    """`plain += secret` may make the name a secret tensor; the memory of the plain one stays."""
    for write in (operator.iadd, operator.imul, operator.isub, operator.itruediv):
        plain = torch.ones(2, 3)
        kept = plain
        with contextlib.suppress(SectorchError):
            assert isinstance(write(plain, shared()), SharedTensor)
        assert torch.equal(kept, torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_private_result_is_not_written_into_plain_memory(dtype: torch.dtype):
    w = stage().private(VALUES.to(dtype))
    for write in (torch.add, torch.mul, torch.maximum):
        out = torch.zeros(2, 3, dtype=dtype)
        with contextlib.suppress(SectorchError):
            write(w, torch.ones(2, 3, dtype=dtype), out=out)
        assert not out.any(), "A's weight was written into a public tensor"


def test_results_of_private_operations_are_not_mixed_up():
    """They are kept by function and arguments; arguments that differ in name, kind or identity alone must differ."""
    w, zero = private(), stage().share(torch.zeros(2, 3))

    def value(p):
        return (zero + p).reveal()

    assert torch.equal(value(w.clamp(max=0.5)), VALUES.clamp(max=0.5))
    assert torch.equal(value(w.clamp(min=0.5)), VALUES.clamp(min=0.5))
    assert torch.equal(value(torch.add(w, w, alpha=2)), 3 * VALUES)
    assert torch.equal(value(torch.sub(w, w, alpha=2)), -VALUES)
    for number in range(20):
        other = stage().private(torch.full((2, 3), float(number)))
        assert torch.equal(value(w + other), VALUES + number)
        del other


def test_nothing_secret_hides_in_a_plain_result():
    x = shared()
    for plain in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), x.new_zeros(2, 2)):
        assert type(plain) is torch.Tensor
        assert plain.unique().numel() == 1


def test_errors_name_the_way_out():
    with pytest.raises(SecretAccessError, match=r"\.reveal\(\)"):
        shared().numpy()
    with pytest.raises(UnsupportedOpError, match=r"torch\.erfinv\(SharedTensor\(2, 3\)\).*supported_ops\(\)"):
        torch.erfinv(shared())


def test_numpy_scalars_are_python_numbers():
    """np.float64 is a float and np.float32 is not: neither may be taken for a whole number."""
    for scalar in (np.float64(0.3), np.float32(0.3), np.float16(0.25), np.int64(3), np.int32(3), np.bool_(True)):
        x = shared()
        for result, expected in ((x * scalar, VALUES * scalar.item()), (x + scalar, VALUES + scalar.item())):
            assert torch.allclose(result.reveal(), expected, atol=1e-5)
        whole = sectorch.share(torch.tensor([1, 2]), session=x.session)
        assert torch.allclose((whole * scalar).reveal().float(), torch.tensor([1, 2]) * float(scalar), atol=1e-5)
        assert torch.allclose((whole + scalar).reveal().float(), torch.tensor([1, 2]) + float(scalar), atol=1e-5)
