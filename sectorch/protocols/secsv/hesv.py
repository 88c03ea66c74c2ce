"""HESV: one server, models and test data under encryption, Matrix Squaring (SecSV, section 4, Algorithms 1 and 2).

The state of a recurrent layer cannot leave encryption and come back as the shifted copies that Matrix Squaring needs
without a client. It does so under a mask of the server's of 2^12 times its size (docs/secsv.md says what that hides).

C is a client and P the server. First comes what each party computes alone, then the protocols, on located ciphertexts
(`sectorch/ckks/exchange.py`), and last the tester, which `algorithm.test_encrypted` puts together.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ... import ckks
from ...choreography import Located, Message, Net, leaf, protocol, with_shapes
from ...choreography.located import compute, run_in
from ...choreography.net import Runtime
from ...choreography.streams import PairKey, random_secret
from ...ckks.exchange import LocatedCKKSTensor, LocatedKeys
from ...ckks.linalg import EncryptedMatrix, PackedOperand
from ...ckks.scheme.ciphertext import add, times_integers
from ...errors import FixedPointRangeError
from .algorithm import test_encrypted
from .program import Layer, Program, gates, unary
from .settings import Route
from .testers import ONE_SERVER, TOTAL_WEIGHT, SecureTester, TestSet, during, tally, work
from .values import CorruptedCiphertextError, FederationError, members

# What client and server compute alone: Matrix Squaring on encrypted models and samples (SecSV, section 4). Each
# function is a step of the choreography below, and gives the shapes of its results from shapes.

STATE_MASK_BITS = 12
SLOTS = 2048
Model = list
"""A layer of a model: Matrix Squaring's left operand, and the bias as a ciphertext for each block of rows."""


def product(layer: Layer, columns: int) -> ckks.MatrixSquaring:
    """The product of a layer with so many columns."""
    return ckks.MatrixSquaring(layer.rows, layer.inner, columns, SLOTS)


def joint_keys(program: Program) -> ckks.Keys:
    """Relinearisation and rotation keys for the layers; outputs times weights up to 2^18 at one level.

    Scale 2^22 in the smallest ring that is 128-bit secure, as for SecSV.
    """
    steps = {step for layer in program.layers for step in product(layer, 1).rotations()}
    return ckks.keygen(1, degree=2 * SLOTS, scale_bits=22, integer_bits=19, rotations=steps)


def _room(parameters: ckks.Parameters) -> float:
    """What a decrypted value may be: outputs times weights stay below half of it; random residues are far above."""
    return parameters.primes[0] / 2.0**parameters.scale_bits


@with_shapes(lambda *_: None)
def fits(program: Program, room: float, whose: str, x: torch.Tensor, *matrices: torch.Tensor) -> None:
    """Look whether a local model's outputs on the client's own samples fit; see `secsv.fits`.

    Raises:
        FixedPointRangeError: they do not.
    """
    reached, limit = program.run(program.parts(matrices), x)[1], room / 2 / TOTAL_WEIGHT
    if reached >= limit / 2:
        raise FixedPointRangeError(
            f"{whose}'s model reaches {reached:.3g} on its own samples, too close to the limit of "
            f"{limit:.0f}; scale the inputs down"
        )


@work("encryption")
def encrypted(layer: Layer, joined: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys) -> Model:
    """A matrix [d_out, d_in + 1], its bias the last column, encrypted."""
    matrix, bias, layout = joined[:, :-1], joined[:, -1], product(layer, 1)
    height = layout.tile[0]
    padded = F.pad(bias, (0, -len(bias) % height)).view(-1, height)
    spread = padded.repeat_interleave(layout.width, dim=1)
    slots = F.pad(spread, (0, SLOTS - spread.shape[1]))
    return [layout.prepare_left(matrix, keys, None), ckks.encrypt(slots.t(), keys, bound=None).cipher]


@work("encryption")
def encrypted_samples(program: Program, layer: Layer, x: torch.Tensor, keys: Any) -> PackedOperand:
    """Matrix Squaring's right operand for a layer on the samples, behind which a recurrent layer's state is zero."""
    return _right(layer, F.pad(x.double().reshape(len(x), -1).t(), (0, 0, 0, program.state)), keys)


def _right(layer: Layer, values: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys | None) -> PackedOperand:
    matrix = layer.features(values)
    return product(layer, matrix.shape[1]).prepare_right(matrix, keys, None)


@leaf
def coded(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Labels, or predictions, as they are encrypted: in unary, or their numbers where there are no classes."""
    return (unary(labels, classes) if classes else labels.unsqueeze(1)).double()


def _output_shapes(layer: Layer, values: torch.Tensor, *_) -> torch.Tensor:
    return torch.empty(values.shape[1] // layer.columns, *layer.shape, dtype=torch.float64, device="meta")


@leaf(shapes=_output_shapes)
def outputs(layer: Layer, values: torch.Tensor, weight: int, room: float, whose: str) -> torch.Tensor:
    """A layer's outputs [samples, *shape] from its decrypted product [d_out, columns].

    Raises:
        CorruptedCiphertextError: outputs that no honest computation gives.
    """
    if not float(values.abs().max()) <= room:
        raise CorruptedCiphertextError(
            f"{whose} decrypted a value beyond {room:.0f}: a message was corrupted, or the model "
            f"leaves the number format; the batch was not counted: run again from the folder"
        )
    return layer.outputs(values / weight, values.shape[1] // layer.columns)


@work("encryption")
@torch.no_grad()
def activated(layer: Layer, following: Layer, values: torch.Tensor, keys: Any) -> PackedOperand:
    """The next layer's operand."""
    return _right(following, layer.after(values).reshape(len(values), -1).t(), keys)


@work("encryption")
def state_operand(program: Program, following: Layer, state: torch.Tensor, keys: Any = None) -> PackedOperand:
    """A state [hidden * samples], or P's mask of it, as an operand of the next step."""
    padded = F.pad(state.view(program.state, -1), (0, 0, program.features, 0))
    return _right(following, padded, keys)


@work("arithmetic")
def weighted(model: Model, weight: int) -> Model:
    """A client's layer times its aggregation weight."""
    return [weight * model[0], times_integers(model[1], weight)]


@work("arithmetic")
def aggregated(*models: Model) -> Model:
    """The coalition's layer, times the sum of its weights (Algorithm 1, step 6)."""
    lefts, biases = zip(*models, strict=True)
    return [functools.reduce(operator.add, lefts), functools.reduce(add, biases)]


@work("arithmetic")
def linear(layer: Layer, model: Model, operand: PackedOperand, each: bool = False) -> EncryptedMatrix:
    """A layer's outputs, encrypted (Algorithm 2, step 2). each: see `MatrixProduct.multiply`."""
    left, bias = model
    out = product(layer, operand.shape[1]).multiply(left, operand, each)
    rows = [replace(bias, data=data) for data in bias.data.split(1)]
    if not bias.data.is_meta:
        tally(out.counts.products, out.counts.rotations)
    return replace(out, blocks={at: add(c, rows[at[0]]) for at, c in out.blocks.items()})


@work("arithmetic")
def together(*parts: EncryptedMatrix) -> EncryptedMatrix:
    """The first layer's outputs for a coalition from those of its members."""
    return functools.reduce(operator.add, parts)


@with_shapes(lambda count: torch.empty(count, dtype=torch.float64, device="meta"))
def mask(count: int) -> torch.Tensor:
    """rho, uniform below 2^12: float64."""
    words = PairKey(random_secret(), random_secret()).words("hesv mask", 0, 0, count)
    return (words >> 24).double() * 2.0 ** (STATE_MASK_BITS - 39)


@protocol("hesv_samples", "SecSV, Algorithm 1, step 3", [
    Message("samples", "C", "P", "encryption"), Message("labels", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def send_samples(
    net: Net, program: Program, x: Located, labels: Located, classes: int, keys: LocatedKeys
) -> tuple[list[LocatedCKKSTensor], LocatedCKKSTensor]:
    """C's test samples at P, encrypted for the first layer, or for every step of a GRU; and its labels. Rounds 1."""
    C, P = net.C, net.P
    layers = [layer for layer in program.layers if layer.gate] or program.layers[:1]
    operands = [keys.run(C, encrypted_samples, program, layer, x, keys.secrets[C]).to(P, "samples") for layer in layers]
    return operands, _encrypted(keys, coded(labels, classes)).to(P, "labels")


def _encrypted(keys: LocatedKeys, x: Located) -> LocatedCKKSTensor:
    with during("encryption"):
        return keys.encrypt(x, bound=None)


@protocol("hesv_model", "SecSV, Algorithm 1, step 3", [
    Message("model", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def encrypt_model(
    net: Net, program: Program, x: Located, matrices: list[Located], weight: int, keys: LocatedKeys
) -> dict[str, LocatedCKKSTensor]:
    """C's model at P, encrypted and times its aggregation weight, by layer. Rounds 1."""
    net.check(net.C, fits, program, _room(keys.parameters), str(net.C), x, *matrices)
    model = {}
    for (name, layer), matrix in zip(program.weights.items(), matrices, strict=True):
        sealed = keys.run(net.C, encrypted, layer, matrix, keys.secrets[net.C]).to(net.P, "model")
        model[name] = keys.run(net.P, weighted, sealed, weight)
    return model


@protocol("hesv_layer", "SecSV, Algorithm 2, steps 2 and 3", [
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=ONE_SERVER)  # fmt: skip
def evaluate(net: Net, layer: Layer, output: LocatedCKKSTensor, weight: int, fresh: bool = True) -> Located:
    """A layer's outputs [samples, *shape] at C, from P's ciphertexts of them. Rounds 1.

    Args:
        fresh: add encryptions of zero. A client that knows its own model's ciphertexts could else compute with them on
            what it decrypts.
    """
    if fresh:
        with during("encryption"):
            output = output.rerandomise()
    with during("decryption"):
        values = output.decrypt_at(net.C, "layer_output", rerandomised=True)  # 3
    return outputs(layer, values, weight, _room(output.keys.parameters), str(net.C))


@protocol("hesv_features", "SecSV, Algorithm 2, step 5", [
    Message("features", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def encrypt_features(
    net: Net, layer: Layer, following: Layer, values: Located, keys: LocatedKeys
) -> LocatedCKKSTensor:  # fmt: skip
    """The next layer's features, activated by C and encrypted, at P. Rounds 1."""
    return keys.run(net.C, activated, layer, following, values, keys.secrets[net.C]).to(net.P, "features")


@protocol("hesv_state", "docs/secsv.md", [
    Message("gates", "C", "P", "encryption"),
    Message("masked_state", "P", "C", "encryption, which C takes off", "the state under a mask of 2^12 times its size"),
    Message("prepared", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def step(
    net: Net, program: Program, following: Layer, values: Located, h: LocatedCKKSTensor | None,
    x: LocatedCKKSTensor | None, keys: LocatedKeys,
) -> tuple[LocatedCKKSTensor, LocatedCKKSTensor]:  # fmt: skip
    """A GRU's step: the next operand and the next state z h + u, at P, without anyone seeing h. Rounds 3.

    Args:
        h: the state; None at first, when it is zero.
        x: the input of the next step; None after the last.
    """
    C, P = net.C, net.P
    z, u = (_encrypted(keys, v.reshape(-1)).to(P, "gates") for v in compute(gates, values))
    rho = net.fresh(P, mask, program.state * values.shape[0])
    with during("arithmetic"):
        state = u + rho if h is None else z * h + u + rho
        tally(0 if h is None else 1)
    with during("decryption"):
        known = state.decrypt_at(C, "masked_state")
    operand = keys.run(C, state_operand, program, following, known, keys.secrets[C]).to(P, "prepared")
    state = _encrypted(keys, known).to(P, "prepared")
    with during("arithmetic"):
        operand = operand - state_operand(program, following, rho)
        return operand if x is None else operand + x, state - rho


@protocol("hesv_predict", "SecSV, Algorithm 2, step 7", [
    Message("prediction", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def predict(net: Net, classes: int, values: Located, keys: LocatedKeys) -> LocatedCKKSTensor:
    """The predictions, encrypted, at P; in unary where there are classes. Rounds 1."""
    return _encrypted(keys, coded(values.argmax(1), classes)).to(net.P, "prediction")


@protocol("hesv_count", "SecSV, Algorithm 2, steps 8 and 9", [
    Message("matches", "P", "C", "encryption, which C takes off", "which places of a batch are classified correctly"),
    Message("count", "C", "P", "", "how many samples are classified correctly"),
], roles=ONE_SERVER)  # fmt: skip
def count(net: Net, prediction: LocatedCKKSTensor, labels: LocatedCKKSTensor) -> Located:
    """How many predictions and labels agree, int64 [1] at P.

    Their product has a one for each sample that is right, where step 8 has a difference. Rounds 2. C is another client
    than who predicted.
    """
    with during("arithmetic"):
        agree = (prediction * labels).sum(1)
        tally(prediction.shape[1])
    with during("decryption"):
        hits = agree.decrypt_at(net.C, "matches") > 0.5
    return hits.sum().view(1).send(net.C, net.P, "count").at(net.P)


class HESVTester(SecureTester):
    """One server P and the clients. Batches hold one owner's samples; none can be left out."""

    skips, roles = False, ONE_SERVER
    unary = True
    """Labels and predictions are encrypted in unary, so that who counts does not see by how much they differ."""
    fresh = True
    """What a client decrypts is under a fresh encryption of zero."""
    _count = staticmethod(count)

    def __init__(
        self, program: Program, tests: TestSet, keys: ckks.Keys | ckks.PublicKeys, level: str,
        runtime: Runtime | None = None,
    ):  # fmt: skip
        super().__init__(program, tests, keys, level, runtime)
        self._classes = program.classes if self.unary else 0

    def _sample(self, i, x, labels):
        return send_samples(self.nets[i], self.program, x, labels, self._classes, self.keys)

    def _model(self, i, matrices):
        x = self._own_samples(i)[0]
        return encrypt_model(self.nets[i], self.program, x, matrices, self._weights[i], self.keys)

    def correct(self, coalition, samples):
        raise FederationError("HESV counts correct samples and does not name them; use `hits`")

    def test(self, coalition, samples):
        return None, self.hits(coalition)

    def hits(self, coalition: int) -> int:
        """How many of all test samples the coalition's model classifies correctly (Algorithm 2)."""
        net = self.nets[0]
        found = self._tested(self._task(coalition, ()), 0)
        return 0 if found is None else int(net.read(found, net.P))

    def _tested(self, task: Sequence[int], samples: int) -> Located | None:
        coalition = task[0]
        if not coalition:
            return None
        net, owners = self.nets[0], members(coalition)
        shared = {self.program.layers[0].weight} if self.first_once and len(self.program.layers) == 1 else set()
        with run_in(net):
            model = {
                name: self.keys.run(net.P, aggregated, *(self._models[i][name] for i in owners))
                for name in self.program.weights.keys() - shared
            }
            counts = [test_encrypted(self, model, coalition, route) for route in self.routes(coalition)]
            return compute(torch.cat, counts).sum()

    def _first_product(self, i, owner):
        layer = self.program.layers[0]
        return self._product(layer, self._models[i][layer.weight], self._samples[owner][0][0])

    def _product(self, layer: Layer, model: LocatedCKKSTensor, operand: LocatedCKKSTensor) -> LocatedCKKSTensor:
        with run_in(self.nets[0]):
            return self.keys.run(self.nets[0].P, linear, layer, model, operand)

    # The steps of Algorithm 2.

    def features(self, route: Route) -> LocatedCKKSTensor:
        """An owner's samples at P, encrypted for the first layer."""
        return self._samples[route.owners[0]][0][0]

    def labels(self, route: Route) -> LocatedCKKSTensor:
        """Its labels at P, encrypted."""
        return self._samples[route.owners[0]][1]

    def outputs(
        self, model: dict[str, LocatedCKKSTensor], coalition: int, route: Route, layer: Layer, client: int,
        features: LocatedCKKSTensor,
    ) -> Located:  # fmt: skip
        """Steps 2 and 3: a layer's outputs at a client, who decrypts them."""
        net, some = self.nets[client], members(coalition)
        if layer is self.program.layers[0] and self.first_once:
            parts = [self._first(i, route.owners[0]) for i in some]
            output = self.keys.run(net.P, together, *parts)
        else:
            output = self._product(layer, model[layer.weight], features)
        return evaluate(net, layer, output, sum(self._weights[i] for i in some), self.fresh)

    def next_features(
        self, client: int, k: int, values: Located, state: LocatedCKKSTensor | None, route: Route
    ) -> tuple[LocatedCKKSTensor, LocatedCKKSTensor | None]:
        """Step 5: the features of the layer after the k-th, encrypted at P, and a GRU's state."""
        net, layer, following = self.nets[client], *self.program.layers[k : k + 2]
        if not layer.gate:
            return encrypt_features(net, layer, following, values, self.keys), None
        inputs = self._samples[route.owners[0]][0]
        x = inputs[k + 1] if k + 1 < len(inputs) else None
        return step(net, self.program, following, values, state, x, self.keys)

    def predict(self, client: int, values: Located) -> LocatedCKKSTensor:
        """Step 7: a client's predictions, encrypted at P."""
        return predict(self.nets[client], self._classes, values, self.keys)

    def count(
        self, client: int, route: Route, prediction: LocatedCKKSTensor, labels: LocatedCKKSTensor
    ) -> Located:  # fmt: skip
        """Steps 8 and 9: another client than the one who predicted counts; no owner, where there is one."""
        others = [i for i in range(len(self.nets)) if i != client]
        counter = min(others, key=lambda i: i in route.owners)
        return self._count(self.nets[counter], prediction, labels)
