"""SecSV's secure testing: encrypted models, shared test data, two servers (SecSV, section 5.1, Algorithms 3 and 4).

The functions here move messages between parties, and compute nothing on what is in them.
"""

from __future__ import annotations

import numpy as np

from ... import ckks
from .channel import AUXILIARY, PRINCIPAL, Address, Channel
from .client import TOTAL_WEIGHT, Client, Format
from .program import Layer, Program
from .reducing import Reducing
from .routing import Route, plan
from .server import Server
from .skip import bits
from .testing import Tester, TestSet
from .values import members


def joint_keys() -> ckks.Keys:
    """The clients' keys: the smallest ring of 128-bit security, 2048 slots, 74 bits of modulus; no rotations."""
    return ckks.keygen(2, degree=4096)


class SecSVTester(Tester):
    """Two servers P and H, and the clients. See docs/secsv.md for what each learns."""

    def __init__(self, program: Program, tests: TestSet, channel: Channel, keys: ckks.Keys, form: Format, level: str):
        super().__init__(program, tests, channel)
        parameters = keys.parameters
        form.check(parameters.scale_bits)
        self.level = level
        self.clients = [
            Client(f"client {i}", keys, program, form, x, y)
            for i, (x, y) in enumerate(zip(tests.x, tests.labels, strict=True))
        ]
        self.P, self.H = (
            Server(Address(role, role), keys.public, form.field, program.state) for role in (PRINCIPAL, AUXILIARY)
        )
        self.layouts = {layer.weight: Reducing(layer.rows, layer.inner, parameters.degree) for layer in program.layers}
        self._shared = False

    def begin(self, models, weights):
        if not self._shared:
            for i, client in enumerate(self.clients):
                for server, half in zip((self.P, self.H), client.share_samples(self.clock), strict=True):
                    server.receive_samples(i, *self.channel.send(client.address, server.address, "test share", half))
            self._shared = True
        self.P.forget_models()
        self.H.forget_models()
        for i, model in models.items():
            encrypted = self.clients[i].encrypt_model(model, self.clock)
            for server in (self.P, self.H):
                got = self.channel.send(self.clients[i].address, server.address, "model", encrypted)
                with self.clock.during("arithmetic"):
                    server.receive_model(i, got, weights[i], self.layouts)

    def routes(self, coalition: int) -> list[Route]:
        """Batches and their clients for a coalition's model."""
        everyone = range(len(self.clients))
        return plan(
            everyone, everyone, len(self.program.layers), self.level, members=members(coalition), turn=coalition
        )

    def cost(self, coalition, samples):
        total = 0.0
        for route in self.routes(coalition):
            numbers = {i: self.tests.of(i, samples) for i in route.owners}
            count = sum(map(len, numbers.values()))
            tiles = [self.layouts[x.weight].tiles(x.columns * count) if count else 0 for x in self.program.layers]
            total += sum(tiles)
            if not (self.program.state or self._whole(route, numbers)):
                total += tiles[0] * self.layouts[self.program.layers[0].weight].encoding_cost
        return total

    def _whole(self, route: Route, numbers: dict[int, list[int]]) -> bool:
        """Whether a batch holds all samples of its owners; servers have its first layer encoded then."""
        return all(len(numbers[i]) == self.tests.sizes[i] for i in route.owners)

    def correct(self, coalition, samples):
        for server in (self.P, self.H):
            weight = server.aggregate(coalition, self.clock)
        found = 0
        for route in self.routes(coalition):
            numbers = {i: self.tests.of(i, samples) for i in route.owners}
            if any(numbers.values()):
                found |= self._batch(coalition, weight, route, numbers)
        return found

    def _batch(self, coalition: int, weight: int, route: Route, numbers: dict[int, list[int]]) -> int:
        """Algorithm 4 for one batch; the numbers in comments are its steps."""
        whole = self._whole(route, numbers)
        count = sum(map(len, numbers.values()))
        for server in (self.P, self.H):
            server.load(route.owners, None if whole else numbers)
        for layer, decryptor in zip(self.program.layers, route.clients, strict=True):
            last = layer is self.program.layers[-1]
            client = self.clients[decryptor]
            other = self.H.linear(layer, self.clock, fresh=True)  # 5
            other = self.channel.send(self.H.address, self.P.address, "partial output", other)
            own = self.P.linear(layer, self.clock, fresh=False)  # 4
            output = self.P.combine(own, other, self.clock)  # 6
            output = self.channel.send(self.P.address, client.address, "layer output", output)
            dealt = client.activate(layer, last, output, weight, count, self.clock)  # 7, 9, 11
            hits = self._continue(client, layer, last, dealt)
        return bits(self.tests.places(route.owners, numbers)[np.array(hits, bool)])

    def _continue(self, client: Client, layer: Layer, last: bool, dealt: tuple[dict, dict]) -> list[int]:
        """What the servers do with what a client dealt; the correct places of the batch after the last layer."""
        if not layer.gate and not last:
            for server, half in zip((self.P, self.H), dealt, strict=True):
                got = self.channel.send(client.address, server.address, "feature share", half["features"])
                server.receive_features(got)
            return []
        material = [
            self.channel.send(client.address, server.address, "product material", half)
            for server, half in zip((self.P, self.H), dealt, strict=True)
        ]
        what = "labels" if last else "state"
        with self.clock.during("sharing"):
            at_P, at_H = self.P.masked(material[0], what), self.H.masked(material[1], what)
            to_H = self.channel.send(self.P.address, self.H.address, "masked state", at_P)
            to_P = self.channel.send(self.H.address, self.P.address, "masked state", at_H)
            at_P = self.P.times(material[0], at_P, to_P, what)
            at_H = self.H.times(material[1], at_H, to_H, what)
            if last:  # 12-14, but only equality is opened and not the difference of labels
                return self._open(at_P, at_H)
            masked, half = self.H.mask_sum(at_H)
            masked = self.channel.send(self.H.address, self.P.address, "masked sum", masked)
            self.P.receive_state(self.P.quotient(at_P, masked))
            self.H.receive_state(half)
        return []

    def _open(self, at_P, at_H) -> list[int]:
        """Both servers learn for each place whether prediction and label agree."""
        halves = [server.matches(value) for server, value in ((self.P, at_P), (self.H, at_H))]
        self.channel.send(self.P.address, self.H.address, "correct share", halves[0])
        got = self.channel.send(self.H.address, self.P.address, "correct share", halves[1])
        return self.P.opened(halves[0], got)


def quantised(weights: dict[int, float], everyone: float) -> dict[int, int]:
    """Aggregation weights as integers of at most TOTAL_WEIGHT together: exact where they are integers and fit.

    Args:
        everyone: the sum of the weights over all clients of the run.

    Error otherwise: 2^-11 of the largest possible sum, for each weight.
    """
    if everyone <= TOTAL_WEIGHT and all(float(w).is_integer() for w in weights.values()):
        return {i: int(w) for i, w in weights.items()}
    return {i: max(1, round(w * (TOTAL_WEIGHT - len(weights)) / everyone)) for i, w in weights.items()}
