"""A Q that reads the model by dealing falsely: what it gets where nobody looks, and where A does.

It deals codes of another mask, so that every unit's sign is +, and bits and products with them of its own choice, so
that what stands in the place of ReLU is alpha x + beta with its own alpha and beta for each unit and row. Only what Q
deals is false. The cheat is that of a program that was written for this; nothing of the package helps it.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import sectorch
from sectorch.audits import _Here
from sectorch.choreography import Phase, leaf
from sectorch.choreography.ledger import Transcript
from sectorch.config import Scheme
from sectorch.errors import FalseDealingError
from sectorch.mpc.star import compare, select, truncate
from sectorch.ring import logical_shift
from sectorch.session import Session

D, H, K, F = 4, 5, 3, 20
ONE, FAR = 1 << 10, 1 << 10
"""alpha, and the size of an input: powers of two."""


class Thief:
    """Q's plan for one call of `rows` rows: its inputs, alpha and beta."""

    def __init__(self):
        self.rows = 1 + H + H * (D + 1)
        self.x = torch.zeros(self.rows, D)
        self.alpha, self.beta = (torch.zeros(self.rows, H, dtype=torch.int64) for _ in range(2))
        self.dealing = False
        for i in range(H):
            self.beta[1 + i, i] = ONE << F
            for k in range(D + 1):
                row = 1 + H + i * (D + 1) + k
                self.alpha[row, i] = ONE
                if k < D:
                    self.x[row, k] = FAR

    def read(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Weights and biases of both layers from the results."""
        y = y.double()
        second = (y[1 : 1 + H] - y[0]).T / ONE
        part = ((y[1 + H :] - y[0]) / ONE).view(H, D + 1, K)
        best = second.abs().argmax(0)
        pre = part[torch.arange(H), :, best] / second[best, torch.arange(H)].unsqueeze(1)
        return (pre[:, :D] - pre[:, D:]) / FAR, pre[:, D], second, y[0]

    @contextmanager
    def at_work(self):
        """Q deals by its plan, promises what it deals, and nobody else is touched."""
        codes, bits, operands = compare.masked_codes, select.bits_less, truncate.operands_less
        seen = [torch.empty(0)]
        promise, look = _Here.promise, _Here.look

        @leaf(shapes=codes.kernel.shapes)
        def masked_codes(r, spans, tops, v_A):
            return codes(r - (1 << 62) if self.dealing and r.shape == self.alpha.shape else r, spans, tops, v_A)

        @leaf(shapes=operands.kernel.shapes)
        def operands_less(first, second, shape, copies, at, r, chosen, shift, v_A):
            out = operands(first, second, shape, copies, at, r, chosen, shift, v_A)
            if self.dealing and chosen and shape == self.alpha.shape:
                seen[0] = r
                s, R = select.per_element(first, second, shape, 1)[0] != 0, logical_shift(r, shift)
                mine = self.alpha * R - self.beta
                out[1] = torch.where(s, self.alpha, 1 - self.alpha) - v_A[1]  # of the sign, which is 1
                out[3] = torch.where(s, mine, R - mine) - v_A[3]
            return out

        @leaf(shapes=bits.kernel.shapes)
        def bits_less(first, second, shape, copies, at, v_A):
            out = bits(first, second, shape, copies, at, v_A)
            if self.dealing and shape == self.alpha.shape:
                # of a wrap-around that codes of another mask make where r is small: nothing is to come of it
                b, (r,) = select.per_element(first, second, shape, copies, at)[0] != 0, seen
                out[0] = ((r >= 0) & (r < 1 << 62) ^ b).to(v_A.dtype) - v_A[0]
            return out

        def promised(here):
            self.dealing = True
            return promise(here)

        def looked(here, *what):
            self.dealing = False  # A works with the package as it is
            try:
                return look(here, *what)
            finally:
                self.dealing = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "masked_codes", masked_codes)
            patch.setattr(select, "bits_less", bits_less)
            patch.setattr(truncate, "operands_less", operands_less)
            patch.setattr(_Here, "promise", promised)
            patch.setattr(_Here, "look", looked)
            yield


@pytest.fixture
def secret() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, K)).eval()


def stolen(model: nn.Module, found: tuple[torch.Tensor, ...]) -> float:
    """The largest error of what was read, in last places of the weights."""
    true = (model[0].weight, model[0].bias, model[2].weight, model[2].bias)
    return max(float((a - b.detach().double()).abs().max()) for a, b in zip(found, true, strict=True)) * 2**F


def test_where_nobody_looks_one_call_gives_the_model(secret):
    """The control: otherwise the next test would show nothing."""
    thief = Thief()
    with thief.at_work():
        secure = sectorch.secure(secret, Scheme(range_check=False), session=Session())
        thief.dealing = True
        y = secure(thief.x)
    # A result is right to a last place, and so are the weights of the second layer; a unit's value is read by dividing
    # by one of them.
    smallest = float(secret[2].weight.detach().abs().max(0).values.min())
    assert stolen(secret, thief.read(y)) < 4 / smallest


def test_where_it_is_proved_no_attempt_gives_anything(secret):
    thief = Thief()
    with thief.at_work(), Transcript() as transcript:
        secure = sectorch.secure(secret, Scheme(range_check=False, verified=True), session=Session())
        thief.dealing = True
        for _ in range(12):
            with pytest.raises(FalseDealingError):
                secure(thief.x)
    to_Q = {line.label for line, _ in transcript.lines if line.dst.role == "Q" and line.phase != Phase.SETUP}
    assert to_Q == {"coin"}


@pytest.mark.parametrize("of", [2, 3])
def test_where_a_looks_it_is_found_out_or_was_lucky(secret, of):
    thief, lucky, caught = Thief(), 0, 0
    with thief.at_work():
        secure = sectorch.secure(secret, Scheme(range_check=False, audited=of), session=Session())
        for _ in range(12):
            try:
                secure(thief.x)
                lucky += 1
            except FalseDealingError as error:
                caught += 1
                error.evidence.promise.check(error.evidence.public)
    assert (lucky, caught) == (0, 12), "all of its calls are false, and one that is looked at is enough"
