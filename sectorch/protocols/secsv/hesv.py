"""HESV: one server, models and test data under encryption, Matrix Squaring (SecSV, section 4, Algorithms 1 and 2).

The state of a recurrent layer cannot leave encryption and come back as the shifted copies that Matrix Squaring needs
without a client. It does so under a mask of the server's of 2^12 times its size (docs/secsv.md says what that hides).

C is a client and P the server. First come ciphertexts among parties, then what each party computes alone, then the
protocols, and last the tester, which `algorithm.test_encrypted` puts together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ... import ckks
from ...choreography import Located, Message, Net, Party, located, protocol, with_shapes
from ...choreography.located import run_in
from ...choreography.net import Runtime
from ...choreography.streams import PairKey, random_secret
from ...ckks.exchange import ciphers, map_ciphers
from ...ckks.linalg import EncryptedMatrix, PackedOperand
from ...ckks.scheme.ciphertext import Cipher, add, align_pair, residues, times_integers
from ...ckks.scheme.ntt import plus_
from ...ckks.tensor.ckks_tensor import zeros
from ...errors import FixedPointRangeError
from .algorithm import test_encrypted
from .program import Layer, Program, gates
from .settings import Route, plan
from .testers import ONE_SERVER, TOTAL_WEIGHT, SecureTester, TestSet, tally, work
from .values import CorruptedCiphertextError, FederationError, members

# Ciphertexts in a choreography: what they look like is public, their residues are located and travel as messages.
#
# A ciphertext's level, scale and size follow from the architecture, so everybody works them out: each computation is
# made on shapes as well. What travels is one int64 tensor of residues, [ciphertexts, 2, primes, N].


@dataclass(frozen=True)
class Sealed:
    """Ciphertexts, or keys, that some parties hold.

    Attributes:
        form: a `Cipher`, a `CKKSTensor`, a matrix of them or a tuple, whose residues have no content; or public keys.
        content: the residues, or the keys.
    """

    form: Any
    content: Located

    def send(self, src: Party, dst: Party, label: str) -> Sealed:
        """The same at `dst`; 8 bytes a residue."""
        return Sealed(self.form, self.content.send(src, dst, label).at(dst))


def compute(net: Net, party: Party, f: Callable, *values: Any) -> Any:
    """`party` computes f(*values), with randomness of its own; a `Sealed` where that is ciphertexts.

    Args:
        f: takes ciphertexts where a value is `Sealed`, tensors where it is located. It is called on shapes as well, by
            its attribute `shapes` where it has one.
    """
    forms = [_form(value) for value in values]
    form = getattr(f, "shapes", f)(*forms)
    sealed = next(ciphers(form), None) is not None

    @with_shapes(lambda *_: _residues(form) if sealed else form)
    def taken(*contents: Any) -> Any:
        found = getattr(f, "kernel", f)(*(_opened(v, c) for v, c in zip(values, contents, strict=True)))
        return _residues(found) if sealed else found

    taken.__name__ = getattr(f, "__name__", "f")
    content = net.fresh(party, taken, *(v.content if isinstance(v, Sealed) else v for v in values))
    return Sealed(form, content) if sealed else content


def _form(value: Any) -> Any:
    if isinstance(value, Sealed):
        return value.form
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Located) else value


def _opened(value: Any, content: Any) -> Any:
    if isinstance(value, Sealed) and isinstance(content, torch.Tensor):
        parts = iter(content.split([c.count for c in ciphers(value.form)]))
        return map_ciphers(lambda c: replace(c, data=next(parts)), value.form)
    return content


def _residues(value: Any) -> torch.Tensor:
    parts = [residues(cipher) for cipher in ciphers(value)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# What client and server of HESV compute alone: Matrix Squaring on encrypted models and samples (SecSV, section 4).
#
# Each function is a step of the choreography below, on ciphertexts and on what a client decrypts. All but those
# that decrypt give the shapes of their results from shapes.


STATE_MASK_BITS = 12
SLOTS = 2048


def product(layer: Layer, columns: int) -> ckks.MatrixSquaring:
    """The product of a layer with so many columns."""
    return ckks.MatrixSquaring(layer.rows, layer.inner, columns, SLOTS)


def joint_keys(program: Program) -> ckks.Keys:
    """Relinearisation and rotation keys for the layers; outputs times weights up to 2^18 at one level.

    Scale 2^22 in the smallest ring that is 128-bit secure, as for SecSV.
    """
    steps = {step for layer in program.layers for step in product(layer, 1).rotations()}
    return ckks.keygen(1, degree=2 * SLOTS, scale_bits=22, integer_bits=19, rotations=steps)


def _room(keys: ckks.Keys | ckks.PublicKeys) -> float:
    """What a decrypted value may be: outputs times weights stay below half of it; random residues are far above."""
    return keys.parameters.primes[0] / 2.0**keys.parameters.scale_bits


@with_shapes(lambda *_: None)
def fits(program: Program, keys: ckks.PublicKeys, whose: str, x: torch.Tensor, *matrices: torch.Tensor) -> None:
    """Look whether a local model's outputs on the client's own samples fit; see `client.fits`.

    Raises:
        FixedPointRangeError: they do not.
    """
    reached, limit = program.run(program.parts(matrices), x)[1], _room(keys) / 2 / TOTAL_WEIGHT
    if reached >= limit / 2:
        raise FixedPointRangeError(
            f"{whose}'s model reaches {reached:.3g} on its own samples, too close to the limit of "
            f"{limit:.0f}; scale the inputs down"
        )


@work("encryption")
def encrypted(layer: Layer, joined: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys) -> tuple[PackedOperand, Cipher]:
    """A matrix as Matrix Squaring's left operand, and its bias: a ciphertext for each block of rows."""
    matrix, bias, layout = joined[:, :-1], joined[:, -1], product(layer, 1)
    height = layout.tile[0]
    padded = F.pad(bias, (0, -len(bias) % height)).view(-1, height)
    spread = padded.repeat_interleave(layout.width, dim=1)
    slots = F.pad(spread, (0, SLOTS - spread.shape[1]))
    return layout.prepare_left(matrix, keys, None), ckks.encrypt(slots.t(), keys, bound=None).cipher


@work("encryption")
def encrypted_samples(
    program: Program, layer: Layer, x: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys
) -> PackedOperand:
    """Matrix Squaring's right operand for a layer on the samples, behind which a recurrent layer's state is zero."""
    return _right(layer, F.pad(x.double().reshape(len(x), -1).t(), (0, 0, 0, program.state)), keys)


def _right(layer: Layer, values: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys | None) -> PackedOperand:
    matrix = layer.features(values)
    return product(layer, matrix.shape[1]).prepare_right(matrix, keys, None)


@work("encryption")
def encrypted_labels(labels: torch.Tensor, classes: int, keys: ckks.Keys | ckks.PublicKeys) -> ckks.CKKSTensor:
    """Labels, or predictions: in unary, or their numbers where there are no classes."""
    if not classes:
        return ckks.encrypt(labels.double().unsqueeze(1), keys, bound=None)
    unary = torch.empty(len(labels), classes, device="meta") if labels.is_meta else F.one_hot(labels, classes)
    return ckks.encrypt(unary.double(), keys, bound=None)


def _decrypted_shapes(layer: Layer, output: EncryptedMatrix, *_) -> torch.Tensor:
    return torch.empty(output.shape[1] // layer.columns, *layer.shape, dtype=torch.float64, device="meta")


@work("decryption", _decrypted_shapes)
def decrypted(layer: Layer, output: EncryptedMatrix, weight: int, whose: str, keys: ckks.Keys) -> torch.Tensor:
    """A layer's outputs [samples, *shape].

    Raises:
        CorruptedCiphertextError: outputs that no honest computation gives.
    """
    values = output.decrypt(keys.secret)
    if not float(values.abs().max()) <= _room(keys):
        raise CorruptedCiphertextError(
            f"{whose} decrypted a value beyond {_room(keys):.0f}: a message was corrupted, or the model "
            f"leaves the number format; the batch was not counted: run again from the folder"
        )
    return layer.outputs(values / weight, output.shape[1] // layer.columns)


@work("encryption")
@torch.no_grad()
def activated(layer: Layer, following: Layer, values: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys) -> PackedOperand:
    """The next layer's operand."""
    return _right(following, layer.after(values).reshape(len(values), -1).t(), keys)


@work("encryption")
def both_gates(values: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys) -> tuple[ckks.CKKSTensor, ckks.CKKSTensor]:
    """z and u of a GRU's step."""
    z, u = (ckks.encrypt(v.reshape(-1), keys, bound=None) for v in gates(values))
    return z, u


def _masked_shapes(hidden: int, state: ckks.CKKSTensor, keys: ckks.PublicKeys) -> torch.Tensor:
    return torch.empty(hidden, state.batch // hidden, dtype=torch.float64, device="meta")


@work("decryption", _masked_shapes)
def masked_state(hidden: int, state: ckks.CKKSTensor, keys: ckks.Keys) -> torch.Tensor:
    """The state under P's mask: [hidden, samples]."""
    return state.decrypt(keys.secret).view(hidden, -1)


@work("encryption")
def prepared(
    program: Program, following: Layer, state: torch.Tensor, keys: ckks.Keys | ckks.PublicKeys
) -> tuple[PackedOperand, ckks.CKKSTensor]:
    """The masked state as an operand of the next step, and as a plain vector of slots."""
    padded = F.pad(state, (0, 0, program.features, 0))
    return _right(following, padded, keys), ckks.encrypt(state.reshape(-1), keys, bound=None)


@work("decryption", lambda matches, keys: torch.empty(1, dtype=torch.int64, device="meta"))
def counted(matches: ckks.CKKSTensor, keys: ckks.Keys) -> torch.Tensor:
    """How many places of a batch hold a one, [1]."""
    return (matches.decrypt(keys.secret) > 0.5).sum().view(1)


@work("arithmetic")
def weighted(model: tuple[PackedOperand, Cipher], weight: int) -> tuple[PackedOperand, Cipher]:
    """A client's layer times its aggregation weight."""
    left, bias = model
    blocks = {at: times_integers(left.cipher(at), weight) for at in left.blocks}
    return PackedOperand(left.shape, blocks), times_integers(bias, weight)


@work("arithmetic")
def aggregated(*models: tuple[PackedOperand, Cipher]) -> tuple[PackedOperand, Cipher]:
    """The coalition's layer, times the sum of its weights (Algorithm 1, step 6)."""
    left, _ = models[0]
    blocks = {at: _total([operand.cipher(at) for operand, _ in models]) for at in left.blocks}
    return PackedOperand(left.shape, blocks), _total([bias for _, bias in models])


def _total(parts: list[Cipher]) -> Cipher:
    """Sums of residues below 2^50 fit int64; one reduction."""
    if parts[0].data.is_meta:
        return parts[0]
    data = parts[0].data.clone()
    for part in parts[1:]:
        for j, q in enumerate(part.primes):
            data[:, :, j] = plus_(data[:, :, j].contiguous(), part.data[:, :, j], q)
    return replace(parts[0], data=data)


@work("arithmetic")
def linear(
    layer: Layer, model: tuple[PackedOperand, Cipher], operand: PackedOperand, each: bool = False
) -> EncryptedMatrix:
    """A layer's outputs, encrypted (Algorithm 2, step 2). each: see `MatrixProduct.multiply`."""
    left, bias = model
    out = product(layer, operand.shape[1]).multiply(left, operand, each)
    lowered: dict[int, Cipher] = {}
    for (i, j), block in out.blocks.items():
        if i not in lowered:
            lowered[i] = align_pair(block, replace(bias, data=bias.data[i : i + 1]))[1]
        out.blocks[i, j] = add(block, lowered[i])
    if not bias.data.is_meta:
        tally(out.counts.products, out.counts.rotations)
    return out


@work("arithmetic")
def together(*parts: EncryptedMatrix) -> EncryptedMatrix:
    """The first layer's outputs for a coalition from those of its members."""
    blocks = {at: _total([part.blocks[at] for part in parts]) for at in parts[0].blocks}
    return replace(parts[0], blocks=blocks)


@work("encryption")
def hidden(out: EncryptedMatrix) -> EncryptedMatrix:
    """With fresh encryptions of zero: a client that knows its own model's ciphertexts could else compute with them on
    what it decrypts.
    """
    return replace(out, blocks={at: _fresh(block) for at, block in out.blocks.items()})


def _fresh(c: Cipher) -> Cipher:
    if c.data.is_meta:
        return c
    data, other = c.data.clone(), zeros(c)
    for j, q in enumerate(c.primes):
        data[:, :, j] = plus_(data[:, :, j].contiguous(), other[:, :, j].contiguous(), q)
    return replace(c, data=data)


@with_shapes(lambda count: torch.empty(count, dtype=torch.float64, device="meta"))
def mask(count: int) -> torch.Tensor:
    """rho, uniform below 2^12: float64."""
    words = PairKey(random_secret(), random_secret()).words("hesv mask", 0, 0, count)
    return (words >> 24).double() * 2.0 ** (STATE_MASK_BITS - 39)


@work("arithmetic")
def next_state(gates: tuple, rho: torch.Tensor, *state: ckks.CKKSTensor) -> ckks.CKKSTensor:
    """z h + u + rho, to be decrypted; h is zero at first."""
    z, u = gates
    if not state:
        return u + rho
    if not rho.is_meta:
        tally(1)
    return z * state[0] + u + rho


@work("arithmetic")
def joined(program: Program, following: Layer, dealt: tuple, rho: torch.Tensor, *x: PackedOperand) -> PackedOperand:
    """Take the mask off the state that a client prepared, and join it with the next step's input, if there is one."""
    operand, _ = dealt
    known = x[0].blocks if x else {}
    plain = _right(following, F.pad(rho.view(program.state, -1), (0, 0, program.features, 0)), None)
    blocks = {}
    for at in operand.blocks:
        c = operand.cipher(at)
        state = (ckks.CKKSTensor(c, SLOTS, (c.count,), torch.float64) - plain.plain(at).t()).cipher
        blocks[at] = add(state, x[0].cipher(at)) if at in known else state
    return PackedOperand(operand.shape, blocks)


@work("arithmetic")
def unmasked(dealt: tuple, rho: torch.Tensor) -> ckks.CKKSTensor:
    """The state as a vector of slots."""
    return dealt[1] - rho


@work("arithmetic")
def matches(prediction: ckks.CKKSTensor, labels: ckks.CKKSTensor) -> ckks.CKKSTensor:
    """Whether prediction and label agree, encrypted, a slot for each sample (in place of step 8's difference)."""
    if not prediction.cipher.data.is_meta:
        tally(prediction.shape[1])
    return (prediction * labels).sum(1).smallest_form()


@protocol("hesv_samples", "SecSV, Algorithm 1, step 3", [
    Message("samples", "C", "P", "encryption"), Message("labels", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def send_samples(
    net: Net, program: Program, x: Located, labels: Located, classes: int, keys: Sealed
) -> tuple[list[Sealed], Sealed]:
    """C's test samples at P, encrypted for the first layer, or for every step of a GRU; and its labels. Rounds 1."""
    C, P = net.C, net.P
    layers = [layer for layer in program.layers if layer.gate] or program.layers[:1]
    operands = [compute(net, C, encrypted_samples, program, layer, x, keys).send(C, P, "samples") for layer in layers]
    return operands, compute(net, C, encrypted_labels, labels, classes, keys).send(C, P, "labels")


@protocol("hesv_model", "SecSV, Algorithm 1, step 3", [
    Message("model", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def encrypt_model(
    net: Net, program: Program, x: Located, matrices: list[Located], weight: int, keys: Sealed
) -> dict[str, Sealed]:
    """C's model at P, encrypted and times its aggregation weight, by layer. Rounds 1."""
    net.check(net.C, fits, program, keys.form, str(net.C), x, *matrices)
    model = {}
    for (name, layer), matrix in zip(program.weights.items(), matrices, strict=True):
        sealed = compute(net, net.C, encrypted, layer, matrix, keys).send(net.C, net.P, "model")
        model[name] = compute(net, net.P, weighted, sealed, weight)
    return model


@protocol("hesv_layer", "SecSV, Algorithm 2, steps 2 and 3", [
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=ONE_SERVER)  # fmt: skip
def evaluate(net: Net, layer: Layer, output: Sealed, weight: int, keys: Sealed) -> Located:
    """A layer's outputs [samples, *shape] at C, from P's ciphertexts of them. Rounds 1."""
    output = output.send(net.P, net.C, "layer_output")
    return compute(net, net.C, decrypted, layer, output, weight, str(net.C), keys)  # 3


@protocol("hesv_features", "SecSV, Algorithm 2, step 5", [
    Message("features", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def encrypt_features(net: Net, layer: Layer, following: Layer, values: Located, keys: Sealed) -> Sealed:
    """The next layer's features, activated by C and encrypted, at P. Rounds 1."""
    return compute(net, net.C, activated, layer, following, values, keys).send(net.C, net.P, "features")


@protocol("hesv_state", "docs/secsv.md", [
    Message("gates", "C", "P", "encryption"),
    Message("masked_state", "P", "C", "encryption, which C takes off", "the state under a mask of 2^12 times its size"),
    Message("prepared", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def step(
    net: Net, program: Program, following: Layer, values: Located, h: Sealed | None, x: Sealed | None, keys: Sealed
) -> tuple[Sealed, Sealed]:
    """A GRU's step: the next operand and the next state z h + u, at P, without anyone seeing h. Rounds 3.

    Args:
        h: the state; None at first.
        x: the input of the next step; None after the last.
    """
    C, P, known = net.C, net.P, lambda value: () if value is None else (value,)
    gates = compute(net, C, both_gates, values, keys).send(C, P, "gates")
    rho = net.fresh(P, mask, program.state * values.shape[0])
    hidden = compute(net, P, next_state, gates, rho, *known(h)).send(P, C, "masked_state")
    state = compute(net, C, masked_state, program.state, hidden, keys)
    dealt = compute(net, C, prepared, program, following, state, keys).send(C, P, "prepared")
    return compute(net, P, joined, program, following, dealt, rho, *known(x)), compute(net, P, unmasked, dealt, rho)


@protocol("hesv_predict", "SecSV, Algorithm 2, step 7", [
    Message("prediction", "C", "P", "encryption"),
], roles=ONE_SERVER)  # fmt: skip
def predict(net: Net, classes: int, values: Located, keys: Sealed) -> Sealed:
    """The predictions, encrypted, at P; in unary where there are classes. Rounds 1."""
    with run_in(net):
        labels = values.argmax(1)
    return compute(net, net.C, encrypted_labels, labels, classes, keys).send(net.C, net.P, "prediction")


@protocol("hesv_count", "SecSV, Algorithm 2, steps 8 and 9", [
    Message("matches", "P", "C", "encryption, which C takes off", "which places of a batch are classified correctly"),
    Message("count", "C", "P", "", "how many samples are classified correctly"),
], roles=ONE_SERVER)  # fmt: skip
def count(net: Net, prediction: Sealed, labels: Sealed, keys: Sealed) -> Located:
    """How many predictions and labels agree, int64 [1] at P. Rounds 2. C is another client than who predicted."""
    agree = compute(net, net.P, matches, prediction, labels).send(net.P, net.C, "matches")
    return compute(net, net.C, counted, agree, keys).send(net.C, net.P, "count").at(net.P)


class HESVTester(SecureTester):
    """One server P and the clients. Batches hold one owner's samples; none can be left out."""

    skips, roles = False, ONE_SERVER
    unary = True
    """Labels and predictions are encrypted in unary, so that who counts does not see by how much they differ."""
    first_once = True
    """The first layer is multiplied once for each client's model, and not for each coalition's."""

    def __init__(
        self, program: Program, tests: TestSet, keys: ckks.Keys | ckks.PublicKeys, level: str,
        runtime: Runtime | None = None,
    ):  # fmt: skip
        super().__init__(program, tests, keys, level, runtime)
        self._classes = program.classes if self.unary else 0
        self._outputs: dict[tuple[int, int], Sealed] = {}
        self._sealed_keys = [Sealed(self.public_keys, own) for own in self._keys]

    def _begun(self):
        self._outputs = {}

    def _sample(self, i, x, labels):
        return send_samples(self.nets[i], self.program, x, labels, self._classes, self._sealed_keys[i])

    def _model(self, i, matrices):
        x = self._own_samples(i)[0]
        return encrypt_model(self.nets[i], self.program, x, matrices, self._weights[i], self._sealed_keys[i])

    def routes(self, coalition: int) -> list[Route]:
        """One batch for each owner."""
        everyone = range(len(self.nets))
        layers = len(self.program.layers)
        return plan(everyone, everyone, layers, self.level, members=members(coalition), together=False, turn=coalition)

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
        model = {
            name: compute(net, net.P, aggregated, *(self._models[i][name] for i in owners))
            for name in self.program.weights.keys() - shared
        }
        with run_in(net):
            counts = [test_encrypted(self, model, coalition, route) for route in self.routes(coalition)]
            return located.compute(torch.cat, counts).sum()

    def prepare(self):
        if self.first_once:
            for i in self._models:
                for owner in range(len(self.nets)):
                    self._first(i, owner)

    def _first(self, i: int, owner: int) -> Sealed:
        """The first layer's outputs of client i's model on an owner's samples, at P: made when first asked for."""
        if (i, owner) not in self._outputs:
            layer = self.program.layers[0]
            model, operand = self._models[i][layer.weight], self._samples[owner][0][0]
            self._outputs[i, owner] = self._product(layer, model, operand)
        return self._outputs[i, owner]

    def _product(self, layer: Layer, model: Sealed, operand: Sealed) -> Sealed:
        net = self.nets[0]
        return compute(net, net.P, linear, layer, model, operand)

    # The steps of Algorithm 2.

    def features(self, route: Route) -> Sealed:
        """An owner's samples at P, encrypted for the first layer."""
        return self._samples[route.owners[0]][0][0]

    def labels(self, route: Route) -> Sealed:
        """Its labels at P, encrypted."""
        return self._samples[route.owners[0]][1]

    def outputs(
        self, model: dict[str, Sealed], coalition: int, route: Route, layer: Layer, client: int, features: Sealed
    ) -> Located:
        """Steps 2 and 3: a layer's outputs at a client, who decrypts them."""
        net, some = self.nets[client], members(coalition)
        if layer is self.program.layers[0] and self.first_once:
            parts = [self._first(i, route.owners[0]) for i in some]
            output = compute(self.nets[0], self.nets[0].P, together, *parts)
        else:
            output = self._product(layer, model[layer.weight], features)
        weight = sum(self._weights[i] for i in some)
        return evaluate(net, layer, self._hidden(net, output), weight, self._sealed_keys[client])

    def _hidden(self, net: Net, output: Sealed) -> Sealed:
        return compute(net, net.P, hidden, output)

    def next_features(
        self, client: int, k: int, values: Located, state: Sealed | None, route: Route
    ) -> tuple[Sealed, Sealed | None]:
        """Step 5: the features of the layer after the k-th, encrypted at P, and a GRU's state."""
        net, keys, layer, following = self.nets[client], self._sealed_keys[client], *self.program.layers[k : k + 2]
        if not layer.gate:
            return encrypt_features(net, layer, following, values, keys), None
        inputs = self._samples[route.owners[0]][0]
        x = inputs[k + 1] if k + 1 < len(inputs) else None
        return step(net, self.program, following, values, state, x, keys)

    def predict(self, client: int, values: Located) -> Sealed:
        """Step 7: a client's predictions, encrypted at P."""
        return predict(self.nets[client], self._classes, values, self._sealed_keys[client])

    def count(self, client: int, route: Route, prediction: Sealed, labels: Sealed) -> Located:
        """Steps 8 and 9: another client than the one who predicted counts; no owner, where there is one."""
        others = [i for i in range(len(self.nets)) if i != client]
        counter = min(others, key=lambda i: i in route.owners)
        return self._agreeing(self.nets[counter], prediction, labels, self._sealed_keys[counter])

    def _agreeing(self, net: Net, prediction: Sealed, labels: Sealed, keys: Sealed) -> Located:
        return count(net, prediction, labels, keys)
