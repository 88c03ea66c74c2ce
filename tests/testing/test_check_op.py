"""What `check_op` is for: each fault that is planted into an operation is found, and shown by a small call."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import sectorch
from sectorch.choreography import Message, protocol
from sectorch.choreography.declaration import PROTOCOLS
from sectorch.errors import ArgumentError, ShapeError
from sectorch.mpc.star.broadcast import broadcast
from sectorch.tensor import SharedTensor
from sectorch.testing import Call, ProtocolFault, check_op, check_program

KEPT = PROTOCOLS["guard"]
X, Y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind()
near = lambda y: 1e-5 * (1 + y.abs())


def secret(x) -> bool:
    return isinstance(x, SharedTensor)


@pytest.mark.parametrize(
    ("f", "samples"),
    [
        (torch.relu, [X, X[0]]),
        (torch.mul, [Call(X, Y), Call(X, Y[0]), Call(X, 2.5)]),
        (torch.softmax, [Call(X, 1)]),
        (torch.matmul, [Call(X, Y.mT)]),
        (torch.sort, [Call(X, 1, True)]),
        (F.triplet_margin_loss, [Call(X, Y, Y + 1)]),
        (torch.Tensor.__setitem__, [Call(X, (slice(None), 1), Y[:, 0])]),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_operations_of_the_library_keep_what_they_promise(f, samples: list):
    assert check_op(f, samples, error=near, errors=[(Call(X, torch.randn(5, 7)), sectorch.errors.SectorchError)]) < 1e-5


def ours(x):
    return x * 2 + 1


def test_a_function_of_ones_own():
    assert check_op(ours, [X], error=3e-6) < 3e-6
    assert check_op(ours, [X], error=3e-6, reference=lambda v: 2 * v + 1) < 3e-6
    for sample in (Call(X), X, (X,)):
        check_op(torch.abs, [sample], error=3e-6)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]  # the factor 2 is missing


def wrong_value(x):
    return x * 2 + (x > 1) * 0.001


def wrong_dtype(x):
    return (x * 2).double() if secret(x) else x * 2


def wrong_shape(x):
    return (x * 2).flatten() if secret(x) else x * 2


def wrong_gradient(x):
    return x * x if secret(x) else Square.apply(x)


def written_out(x, out=None):
    y = x * 2
    return y if out is None else out.copy_(y.reveal() if secret(y) else y)


def forgotten_out(x, out=None):
    return x * 2 if out is None or secret(x) else out.copy_(x * 2)


def revealing(x, y):
    if secret(x):
        x.reveal()
    return x + y


DRAWN = itertools.count()


def drawing(x):
    """Another number in each call, and never one so near to that of the call before that both round to one."""
    return x * 2 + next(DRAWN) * 37 % 100 * 9e-6


def foreign(x):
    return {}["nothing"] if secret(x) else x


def lenient(x, y):
    return x if secret(x) and x.shape != y.shape else x + y


@pytest.mark.parametrize(
    ("f", "samples", "reference", "said"),
    [
        (wrong_value, [X], lambda v: v * 2, r"wrong_value\(tensor\(\[\[2\.\]\]\)\): wrong: .* off by 0.001"),
        (
            wrong_dtype,
            [X],
            None,
            r"wrong_dtype\(tensor\(\[\[0\.\]\]\)\): wrong: torch.float64 .* instead of torch.float32",
        ),
        (wrong_shape, [X], None, r"of shape \(1,\) instead of .* \(1, 1\)"),
        (wrong_gradient, [X], None, "gradient for argument 0 is off by 1 from that of differences"),
        (wrong_gradient, [X], torch.square, "gradient for argument 0 is off by 1 from the reference's"),
        (written_out, [X], None, "with out=: it is not refused"),
        (forgotten_out, [X], None, "with out=: it is not refused"),
        (revealing, [Call(X, Y)], None, "an operation reveals nothing"),
        (drawing, [X], None, "three parties differ from the reference"),
        (foreign, [X], None, "foreign error: KeyError"),
        (lenient, [Call(X, Y)], None, "it is not refused with SectorchError"),
        (torch.erfinv, [X / 9], None, "refused: UnsupportedOpError"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_is_planted_is_found(f, samples: list, reference, said: str):
    with pytest.raises(AssertionError, match=said) as raised:
        check_op(f, samples, error=1e-3 if f is drawing else 3e-5, reference=reference)
    assert len(str(raised.value)) < (600 if f is revealing else 300), "the call is small"


def wraps(x):
    """Right below 2^11, and wrapped around beyond, since it says that its result is small."""
    if secret(x):
        with x.session.call(x.party):
            return x.like(x.shares * 2**34, x.scale_bits, bound=x.bound)
    return x * 2**34


def test_a_result_that_wraps_around_is_found():
    """The error is stated as a part of the result, so that only what large operands do is wrong."""
    with pytest.raises(AssertionError, match="neither right nor withheld"):
        check_op(wraps, [torch.ones(1) * 2.0**-19], error=lambda y: 1e-3 * (1 + y.abs()))


def test_an_in_place_form_that_forgets_its_target(monkeypatch):
    from sectorch.tensor import dispatch

    monkeypatch.setattr(dispatch, "_assign", lambda target, result: result)
    with pytest.raises(AssertionError, match=r"relu_.*: (in place, it gives another tensor|wrong)"):
        check_op(torch.relu, [X], error=2e-6)


def test_a_wrong_spelling_is_found(monkeypatch):
    from sectorch.tensor import dispatch

    handler = dispatch.HANDLER[torch.Tensor.relu]
    monkeypatch.setitem(dispatch.HANDLER, torch.Tensor.relu, lambda context, x: handler(context, x) + 1)
    with pytest.raises(AssertionError, match=r"Tensor.relu\(.*: wrong"):
        check_op(torch.relu, [X], error=2e-6)


@pytest.mark.parametrize(
    ("f", "samples", "how", "said"),
    [
        (torch.relu, [X], {}, "takes error="),
        (ours, None, {}, "was not registered .* or give check_op samples"),
        (torch.relu, [torch.zeros(300, 300)], {"error": 1}, "90000 elements, above elements=65536"),
        (lambda x: x.no_such(), [X], {"error": 1}, "no reference"),
        (torch.relu, [Call(X, Y)], {"error": 1}, "no reference for torch.relu"),
    ],
)
def test_checks_that_cannot_be_made(f, samples, how: dict, said: str):
    with pytest.raises(ArgumentError, match=said):
        check_op(f, samples, **how)


def test_errors_are_of_the_kind_that_is_named():
    check_op(torch.matmul, [Call(X, Y.mT)], error=1e-4, errors=[(Call(X, Y), ShapeError), Call(X, Y)])
    with pytest.raises(AssertionError, match="ShapeError instead of DtypeError"):
        check_op(torch.matmul, [], error=1e-4, errors=[(Call(X, Y), sectorch.errors.DtypeError)])
    with pytest.raises(AssertionError, match="is not refused"):
        check_op(ours, [], error=1e-4, errors=[Call(X)])
    assert check_op(torch.erfinv, [X / 9], error=1e-5, refusals=True) == 0


def common(a, b):
    s = torch.cat((a, b)).sort().values
    return (s[1:] == s[:-1]).sum()


def leaking(a, b):
    top = torch.cat((a, b)).max()
    if secret(top):
        top.reveal()  # the leak
    return common(a, b)


def by_a_guard_of_its_own(a):
    with a.session.operation(a.party) as net:
        broadcast(net, "guard", net.S, a.shares.S._value)
        own_guard(net, a.shares.S)


@protocol("guard", "a name of the package's", [Message("key", "S", "Q", "nothing")])
def own_guard(net, x):
    return x.send(net.S, net.Q, "key")


PROTOCOLS["guard"] = KEPT
IDS = torch.tensor([3, 1, 4, 7]), torch.tensor([1, 5, 9])
LINE = leaking.__code__.co_firstlineno + 3


def test_what_is_revealed_inside_an_operation_is_found():
    with pytest.raises(
        AssertionError, match=rf"Q learns a value of shape \(\) computed from .*{LINE}: an operation re"
    ):
        check_op(leaking, [Call(*IDS)], error=0, reference=common)


def test_a_program_is_held_to_what_it_says_that_it_reveals():
    assert check_program(common, IDS).looked["reveals"].startswith("0 in common")
    check_program(leaking, IDS, reveals=[("Q", ())])
    with pytest.raises(ProtocolFault, match=rf"Q learns a value of shape \(\) computed from input 0, input 1 .*{LINE}"):
        check_program(leaking, IDS)
    with pytest.raises(ProtocolFault, match=r"S is to learn a value of shape \(3,\), which is not revealed"):
        check_program(common, IDS, reveals=[("S", [3])])
    both = lambda a, b: (common(a, b).reveal(to=["A", "S"]), b[1:].reveal(to="A"), a.sum() + 1.5)
    with pytest.raises(
        ProtocolFault, match=r"^reveals: A learns a value of shape \(2,\) that is input 1 itself [^\n]*$"
    ):
        check_program(both, IDS, owners=["A", "S"], reveals=[("A", ()), ("S", ())])
    fractions = lambda x: (x * x).exp().reveal()  # a range is checked: that says nothing of a value
    check_program(fractions, torch.rand(3), reveals=[("Q", (3,))])
    check_program(lambda x: x.clamp(0, 1).reveal(to="A"), torch.rand(0, 2), reveals=[("A", (0, 2))])
    check_program(lambda x: sectorch.aggregate([x]), torch.rand(2), owners=["H"], reveals=[("Q", (2,))])
    with pytest.raises(ProtocolFault, match=r"(?s)A learns a value .*to_A of guard.*Q learns a value .*key of guard"):
        check_program(by_a_guard_of_its_own, IDS[:1])
    with pytest.raises(ArgumentError, match="a reveal is declared as who learns it"):
        check_program(common, IDS, reveals=["Q"])
    with pytest.raises(ArgumentError, match="3 owners are named, of 2 tensors"):
        check_program(common, IDS, owners=["Q", "A", "S"])
