"""SecSV's secure testing: encrypted models, shared test data, two servers (SecSV, section 5.1, Algorithms 3 and 4).

C is a client, P the principal and X the auxiliary server; `client.py` and `server.py` have what each computes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ... import ckks
from ...choreography import Located, Message, Net, protocol
from ...choreography.located import running
from ...choreography.steps import Runtime
from . import client, server
from .errors import FederationError
from .pairs import Both, multiply, open_matches, sent, to_both, truncate
from .parties import TWO_SERVERS
from .program import Layer, Program
from .public import Format, Public
from .routing import Route, plan
from .secure import SecureTester
from .skip import bits
from .testing import TestSet
from .values import members

SUMMED = 0.5
"""An estimate, of a whole ciphertext's cost: to add up, hide and decrypt one whose products are made. It decides only
whether leaving samples out of a test pays.
"""


def joint_keys() -> ckks.Keys:
    """The clients' keys: the smallest ring of 128-bit security, 2048 slots, 74 bits of modulus; no rotations."""
    return ckks.keygen(2, degree=4096)


def joint_parameters() -> ckks.Parameters:
    """Of the clients' keys."""
    return ckks.choose(2, degree=4096)


def named_format(value_bits: int | None, frac_bits: int | None) -> Format | None:
    """A number format for outputs below 2^value_bits under the joint keys; None where the clients are to agree on it.

    Raises:
        LevelError: the modulus chain is too short.
    """
    return None if value_bits is None else _format(value_bits, frac_bits)


def _format(value_bits: int, frac_bits: int | None) -> Format:
    parameters = joint_parameters()
    return Format.fitting(parameters.primes, parameters.scale_bits, value_bits, frac_bits)


@protocol("secsv_samples", "SecSV, Algorithm 3, step 3", [
    Message("features_P", "C", "P", "a share mod Q"), Message("features_X", "C", "X", "a share mod Q"),
    Message("labels_P", "C", "P", "a share mod Q"), Message("labels_X", "C", "X", "a share mod Q"),
], roles=TWO_SERVERS)  # fmt: skip
def share_samples(net: Net, public: Public, x: Located, labels: Located) -> tuple[Both, Both]:
    """C's features and its labels in unary, shared. Rounds 1; 12 bytes a feature and 4 a class, to each server."""
    features_P, labels_P, features_X, labels_X = net.fresh(net.C, client.shared, public, x, labels)
    return to_both(net, features_P, features_X, "features"), to_both(net, labels_P, labels_X, "labels")


@protocol("secsv_model", "SecSV, Algorithm 3, step 3", [
    Message("model_P", "C", "P", "encryption"), Message("model_X", "C", "X", "encryption"),
    Message("seed_P", "C", "P", "encryption, the seed of its uniform half"),
    Message("seed_X", "C", "X", "encryption, the seed of its uniform half"),
], roles=TWO_SERVERS)  # fmt: skip
def encrypt_model(net: Net, public: Public, x: Located, matrices: list[Located], weight: int, keys: Located) -> dict:
    """C's model at both servers, encrypted and times its aggregation weight, by layer.

    Rounds 1; d_in + 1 halves of ciphertexts a layer to each server, and the seed of the others, which are uniform.
    x, C's own samples, show C whether the format holds.
    """
    net.check(net.C, client.fits, public, str(net.C), x, *matrices)
    model = {}
    for (name, layer), matrix in zip(public.program.weights.items(), matrices, strict=True):
        half, seed = net.fresh(net.C, client.encrypted, public, layer, matrix, keys)
        got = (
            (half.send(net.C, net.P, "model_P").at(net.P), seed.send(net.C, net.P, "seed_P").at(net.P)),
            (half.send(net.C, net.X, "model_X").at(net.X), seed.send(net.C, net.X, "seed_X").at(net.X)),
        )
        model[name] = Both(*(server.prepared(public, layer, *m, weight) for m in got))
    return model


@protocol("secsv_choose", "SecSV, Algorithm 6", [
    Message("tested", "P", "X", "", "which samples are tested: not those that it saw classified correctly"),
], roles=TWO_SERVERS)  # fmt: skip
def choose(net: Net, tested: Located) -> Located:
    """The set of samples that are tested, as a bitmap at P and X. Rounds 1, bits 1 a sample."""
    return tested.send(net.P, net.X, "tested")


@protocol("secsv_layer", "SecSV, Algorithm 4, steps 4 to 7", [
    Message("partial_output", "X", "P", "encryption, with a fresh encryption of zero"),
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=TWO_SERVERS)  # fmt: skip
def evaluate(
    net: Net, public: Public, layer: Layer, samples: int, model: Both, right: Both, weights: list[int], keys: Located
) -> Located:
    """A layer's outputs [samples, *shape] at C. Rounds 2; two messages of ceil(columns / 2W) ciphertexts."""
    what = public, layer, samples
    at_X = net.fresh(net.X, server.linear_hidden, *what, model.X, right.X)  # 5
    at_X = sent(at_X, net.X, net.P, "partial_output")
    at_P = server.linear(*what, model.P, right.P)  # 4
    output = sent(server.combined(public, at_P, at_X), net.P, net.C, "layer_output").at(net.C)  # 6
    return client.decrypted(public, layer, output, sum(weights), (samples,), str(net.C), keys)  # 7


@protocol("secsv_first", "SecSV, Algorithm 4, steps 4 to 6", [
    Message("partial_output", "X", "P", "encryption, with a fresh encryption of zero"),
], roles=TWO_SERVERS)  # fmt: skip
def evaluate_first(net: Net, public: Public, samples: int, model: Both, right: Both) -> Located:
    """The first layer's outputs of one client's model on one client's samples, encrypted, at P, to be added up there.

    A coalition's model is the sum of its members', and the first layer's outputs are linear in the model. Rounds 1;
    ceil(columns / 2W) ciphertexts.
    """
    what = public, public.program.layers[0], samples
    at_X = net.fresh(net.X, server.linear_hidden, *what, model.X, right.X)  # 5
    at_X = sent(at_X, net.X, net.P, "partial_output")
    return server.combined(public, server.linear(*what, model.P, right.P), at_X)  # 4, 6


@protocol("secsv_first_sum", "SecSV, Algorithm 4, steps 6 and 7", [
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=TWO_SERVERS)  # fmt: skip
def open_first(
    net: Net, public: Public, samples: list[int], parts: list[list[Located]], weights: list[int], keys: Located
) -> Located:
    """The first layer's outputs [samples, *shape] of a coalition's model at C. Rounds 1; as many ciphertexts.

    Args:
        samples: of each owner in the batch.
        parts: for each owner what `evaluate_first` gave of each member of the coalition.
    """
    every = [part for of_owner in parts for part in of_owner]
    output = net.fresh(net.P, server.joined, public, len(weights), *every)
    output = sent(output, net.P, net.C, "layer_output").at(net.C)
    layer = public.program.layers[0]
    return client.decrypted(public, layer, output, sum(weights), samples, str(net.C), keys)


@protocol("secsv_features", "SecSV, Algorithm 4, step 9", [
    Message("features_P", "C", "P", "a share mod Q"), Message("features_X", "C", "X", "a share mod Q"),
], roles=TWO_SERVERS)  # fmt: skip
def share_features(net: Net, public: Public, layer: Layer, values: Located) -> Both:
    """The next layer's features, activated by C and shared. Rounds 1; 12 bytes a feature to each server."""
    at_P, at_X = net.fresh(net.C, client.activated, public, layer, values)
    return to_both(net, at_P, at_X, "features")


class SecSVTester(SecureTester):
    """Two servers P and X, and the clients. See docs/secsv.md for what each learns."""

    roles = TWO_SERVERS

    def __init__(
        self, program: Program, tests: TestSet, keys: ckks.Keys | ckks.PublicKeys, form: Format | None, level: str,
        runtime: Runtime | None = None,
    ):  # fmt: skip
        super().__init__(program, tests, keys, level, runtime)
        if form is not None:
            form.check(keys.parameters.scale_bits)
            self.public = Public(program, form, self.public_keys)
        self._aggregated: tuple[int, dict[str, Both]] = 0, {}
        self._sums = {name: Both(server.Aggregation(), server.Aggregation()) for name in program.weights}
        self._encoded: list[Both] = []
        self._outputs: dict[tuple[int, int], Located] = {}

    def agree(self, value_bits: Sequence[int], frac_bits: int | None) -> None:
        """The clients settle on a number format: each says what its models need, and the most is taken.

        Raises:
            LevelError: the modulus chain is too short.
        """
        needed = int(max(self.parties.numbers(value_bits)))
        self.public = Public(self.program, _format(needed, frac_bits), self.public_keys)

    def _begun(self):
        self._aggregated = 0, {}
        self._outputs = {}
        for sums in self._sums.values():
            sums.P.begun()
            sums.X.begun()

    def _sample(self, i, x, labels):
        return share_samples(self.nets[i], self.public, x, labels)

    def _model(self, i, matrices):
        x = self._own_samples(i)[0]
        return encrypt_model(self.nets[i], self.public, x, matrices, self._weights[i], self._keys[i])

    def routes(self, coalition: int) -> list[Route]:
        """Batches and their clients for a coalition's model."""
        everyone = range(len(self.nets))
        return plan(
            everyone, everyone, len(self.program.layers), self.level, members=members(coalition), turn=coalition
        )

    def cost(self, coalition, samples):
        total = 0.0
        for route in self.routes(coalition):
            count = self.tests.count(route.owners, samples)
            first, *others = [(layer, self.public.layout(layer)) for layer in self.program.layers]
            total += sum(layout.tiles(layer.columns * count) for layer, layout in others if count)
            whole, (layer, layout) = count == self._size(route), first
            if whole:
                total += SUMMED * sum(layout.tiles(layer.columns * self.tests.sizes[i]) for i in route.owners)
            elif count:
                total += layout.tiles(layer.columns * count) * (1 + layout.encoding_cost)
        return total

    def _size(self, route: Route) -> int:
        """All samples of its owners, on which P has every client's first outputs."""
        return sum(self.tests.sizes[i] for i in route.owners)

    def correct(self, coalition, samples):
        routes = self.routes(coalition)
        task = self._task(coalition, [self.tests.count(route.owners, samples) for route in routes])
        found = 0
        for route, matches in self._tested(task, samples) or ():
            numbers = {i: self.tests.of(i, samples) for i in route.owners}
            hits = self.nets[0].read(matches, self.nets[0].P).bool().numpy()
            found |= bits(self.tests.places(route.owners, numbers)[hits])
        return found

    def _tested(self, task: Sequence[int], samples: int) -> list[tuple[Route, Located]] | None:
        coalition, *counts = task
        if not coalition:
            return None
        net, routes = self.nets[0], self.routes(coalition)
        tested = None
        if any(0 < count < self._size(route) for route, count in zip(routes, counts, strict=False)):
            tested = choose(net, net.own(net.P, self.tests.bitmap(samples), name="tested"))
        return [
            (route, self._batch(coalition, route, count, tested))
            for route, count in zip(routes, counts, strict=False)
            if count
        ]

    def _aggregate(self, coalition: int, name: str) -> Both:
        """A layer of the coalition's model, times the sum of its weights (Algorithm 3)."""
        if coalition != self._aggregated[0]:
            self._aggregated = coalition, {}
        model = self._aggregated[1]
        if name not in model:
            net, sums = self.nets[0], self._sums[name]
            some = members(coalition)
            layers = [self._models[i][name] for i in some]
            model[name] = Both(
                net.fresh(net.P, sums.P, self.public, some, *(m.P for m in layers)),
                net.fresh(net.X, sums.X, self.public, some, *(m.X for m in layers)),
            )
        return model[name]

    def _batch(self, coalition: int, route: Route, count: int, tested: Located | None) -> Located:
        """Algorithm 4 for one batch; the numbers in comments are its steps."""
        public, field, tested = self.public, self.public.field, None if count == self._size(route) else tested
        weights = [self._weights[i] for i in members(coalition)]
        labels = self._taken(1, route, count, tested)
        *before, (last, at) = zip(self.program.layers, route.clients, strict=True)
        features: Both | None = None
        if tested is not None or self.program.state:
            features = self._stated(self._taken(0, route, count, tested))

        def outputs(net: Net, layer: Layer, number: int) -> Located:
            if layer is self.program.layers[0] and tested is None:
                sizes = [self.tests.sizes[i] for i in route.owners]
                parts = [[self._first(i, owner) for i in members(coalition)] for owner in route.owners]
                return open_first(net, public, sizes, parts, weights, self._keys[number])  # 6, 7
            model, right = self._aggregate(coalition, layer.weight), self._encode(layer, _there(features))
            return evaluate(net, public, layer, count, model, right, weights, self._keys[number])  # 4-7

        for layer, number in before:
            net = self.nets[number]
            values = outputs(net, layer, number)
            if layer.gate:
                features = self._next_state(net, _there(features), values)
            else:
                features = share_features(net, public, layer, values)  # 9
        net = self.nets[at]
        values = outputs(net, last, at)
        material = net.fresh(net.C, client.match_material, public, values)  # 11
        return open_matches(net, field.first, multiply(net, field.first, material, labels))  # 12-14

    def _next_state(self, net: Net, features: Both, values: Located) -> Both:
        """A GRU's features with the state z h + u, behind the input, in place of h."""
        field, hidden = self.public.field, self.program.state
        with running(net):
            state, inputs = (Both(*(f[:, part] for f in features)) for part in (slice(-hidden, None), slice(-hidden)))
            material = net.fresh(net.C, client.gate_material, self.public, values)
            state = truncate(net, field, multiply(net, field, material, state))
            return Both(*(torch.cat(parts, dim=1) for parts in zip(inputs, state, strict=True)))

    def _taken(self, what: int, route: Route, count: int, tested: Located | None) -> Both:
        """The servers' shares of the features (0) or labels (1) of a batch: of all its samples, or of those tested."""
        shares = zip(*(self._samples[i][what] for i in route.owners), strict=True)
        with running(self.nets[0]):
            if tested is None:
                return Both(*(torch.cat(halves, dim=2) for halves in shares))
            places = [(self.tests.first[i], self.tests.sizes[i]) for i in route.owners]
            return Both(*(server.chosen(tested, places, count, *halves) for halves in shares))

    def prepare(self):
        for i in self._models:
            for owner in range(len(self.nets)):
                self._first(i, owner)

    def _first(self, i: int, owner: int) -> Located:
        """The first layer's outputs of client i's model on an owner's samples, at P: made when first asked for."""
        first = self.program.layers[0]
        if not self._encoded:
            self._encoded = [self._encode(first, self._stated(features)) for features, _ in self._samples]
        if (i, owner) not in self._outputs:
            size, model = self.tests.sizes[owner], self._models[i][first.weight]
            self._outputs[i, owner] = evaluate_first(self.nets[0], self.public, size, model, self._encoded[owner])
        return self._outputs[i, owner]

    def _stated(self, features: Both) -> Both:
        """Features with a recurrent layer's state behind them, which is zero at first."""
        if not self.program.state:
            return features
        with running(self.nets[0]):
            return Both(*(F.pad(half, (0, 0, 0, self.program.state)) for half in features))

    def _encode(self, layer: Layer, features: Both) -> Both:
        with running(self.nets[0]):
            return Both(*(server.encoded(self.public, layer, half) for half in features))


def _there(features: Both | None) -> Both:
    """The features of a batch of which P has no first outputs."""
    if features is None:
        raise FederationError("internal error: a batch whose first outputs are known was asked for its features")
    return features
