"""SecretSV: models and test data in shares of the two servers, on sectorch's own protocols (SecSV, appendix A).

Nothing is encrypted and no client decrypts: products, activations and the comparison with the label run on shares mod
2^64 (docs/protocols.md), with exact truncation in place of the paper's, whose error adds up over the steps of a GRU.
The servers are the session's A and S; its Q is a client that deals correlated randomness and learns which samples of a
batch are classified correctly, as the servers do.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...choreography import Phase
from ...choreography.streams import PairKey, random_secret
from ...mpc.star.shares import Shares
from ...ring import encode
from ...session import Session
from ...tensor import Scheme, SharedTensor
from .errors import ShapleyError
from .program import Program, gates
from .public import quantised
from .skip import bits
from .spent import during
from .testing import Tester, TestSet
from .values import members

Halves = tuple[torch.Tensor, torch.Tensor]


def split(x: torch.Tensor, frac_bits: int) -> Halves:
    """Shares mod 2^64 of an owner's tensor: the first uniform."""
    encoded = encode(x, frac_bits) if x.is_floating_point() else x
    mask = PairKey(random_secret(), random_secret()).words("secretsv", 0, 0, encoded.numel()).view(encoded.shape)
    return mask, encoded - mask


class SecretSVTester(Tester):
    """Both servers' halves of everything, and a session that works on them."""

    def __init__(self, program: Program, tests: TestSet):
        super().__init__(program, tests)
        self.scheme = Scheme()
        with during("sharing"):
            self._x = [split(x.reshape(len(x), -1).t(), self.scheme.frac_bits) for x, _ in tests.everywhere]
            self._labels = [split(labels, 0) for _, labels in tests.everywhere]

    def begin(self, models, weights):
        with during("sharing"):
            self._weights = quantised(weights)
            self._models = {
                i: {
                    name: [split(part * self._weights[i], self.scheme.frac_bits) for part in pair]
                    for name, pair in self.program.matrices(model).items()
                }
                for i, model in models.items()
            }

    def correct(self, coalition, samples):
        owners = members(coalition)
        numbers = {i: self.tests.of(i, samples) for i in range(len(self.tests.x))}
        chosen = [i for i, part in numbers.items() if part]
        if not chosen:
            return 0
        with during("arithmetic"):
            session = Session()
            model = {
                name: [
                    self._held(session, _added([self._models[i][name][k] for i in owners]), self.scheme.frac_bits)
                    for k in (0, 1)
                ]
                for name in self._models[owners[0]]
            }
            x = self._held(session, _joined([_taken(self._x[i], numbers[i]) for i in chosen]), self.scheme.frac_bits)
            labels = self._held(session, _joined([_taken(self._labels[i], numbers[i]) for i in chosen]), 0)
            scores = self._scores(model, x, 1 / sum(self._weights[i] for i in owners))
            hits = _revealed(scores.argmax(1) == labels)
        return bits(self.tests.places(chosen, numbers)[np.array(hits, bool)])

    @torch.no_grad()
    def _scores(self, model: dict, values: torch.Tensor, share: float) -> torch.Tensor:
        samples = values.shape[1]
        out, state = values, values[: self.program.state] * 0 if self.program.state else None
        for layer in self.program.layers:
            columns = layer.features(values if state is None else torch.cat([values, state]))
            matrix, bias = model[layer.weight]
            out = layer.outputs((matrix @ columns + bias.unsqueeze(1)) * share, samples)
            if layer.gate and state is not None:
                z, u = gates(out)
                state = u + z * state
            else:
                out = layer.after(out)
                values = out.reshape(samples, -1).t()
        return out

    def _held(self, session: Session, halves: Halves, frac_bits: int) -> SharedTensor:
        party = session.answering[0]
        with session.operation(party) as net:
            shares = Shares(net.own(net.A, halves[0], Phase.ONLINE), net.own(net.S, halves[1], Phase.ONLINE))
        dtype = torch.float32 if frac_bits else torch.int64
        return SharedTensor(shares, frac_bits, session, party, self.scheme, dtype)


def _revealed(x: torch.Tensor) -> list:
    """The numbers of what the model made of shares."""
    if not isinstance(x, SharedTensor):
        raise ShapleyError(f"a model's scores are shared, got a {type(x).__name__}")
    return x.reveal().tolist()


def _added(parts: list[Halves]) -> Halves:
    first, second = (functools.reduce(torch.add, (p[k] for p in parts)) for k in (0, 1))
    return first, second


def _joined(parts: list[Halves]) -> Halves:
    first, second = (torch.cat([p[k] for p in parts], dim=-1) for k in (0, 1))
    return first, second


def _taken(halves: Halves, numbers: list[int]) -> Halves:
    first, second = (half[..., numbers] for half in halves)
    return first, second
