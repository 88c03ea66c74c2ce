"""HESV: one server, models and test data under encryption, Matrix Squaring (SecSV, section 4, Algorithms 1 and 2).

The state of a recurrent layer cannot leave encryption and come back as the shifted copies that Matrix Squaring needs
without a client. It does so under a mask of the server's of 2^12 times its size (docs/secsv.md says what that hides).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from ... import ckks
from ...ckks.cipher import Cipher, add, aligned, times_integers
from ...ckks.matrices import Operand
from ...ckks.modular import plus_
from ...ckks.rerandomise import zeros
from ...errors import FixedPointRangeError
from ...randomness import PairKey, random_secret
from .channel import CLIENT, PRINCIPAL, Address, Channel
from .client import TOTAL_WEIGHT
from .clock import Clock
from .errors import CorruptedCiphertextError, ShapleyError
from .program import Layer, Program, gates
from .reducing import Counts
from .routing import Route, plan
from .testing import Tester, TestSet
from .values import members

STATE_MASK_BITS = 12


def squaring(layer: Layer, columns: int, slots: int) -> ckks.MatrixSquaring:
    """The product of a layer with so many columns."""
    return ckks.MatrixSquaring(layer.rows, layer.inner, columns, slots)


def joint_keys(program: Program) -> ckks.Keys:
    """Relinearisation and rotation keys for the layers; outputs times weights up to 2^18 at one level.

    Scale 2^22 in the smallest ring that is 128-bit secure, as for SecSV.
    """
    slots = 2048
    steps = {step for layer in program.layers for step in squaring(layer, 1, slots).rotations()}
    return ckks.keygen(1, degree=2 * slots, scale_bits=22, integer_bits=19, rotations=steps)


class Client:
    """An organisation under HESV: its samples and models, the joint keys, and the layers that it decrypts."""

    def __init__(self, name: str, keys: ckks.Keys, program: Program, x: torch.Tensor, labels: torch.Tensor):
        self.address = Address(name, CLIENT)
        self._keys, self._program, self._x, self._labels = keys, program, x, labels
        self._slots = keys.parameters.slots

    def __repr__(self) -> str:
        return f"Client({self.address.name})"

    def encrypt_model(self, weights: Mapping[str, torch.Tensor], clock: Clock) -> dict[str, tuple[Operand, Cipher]]:
        """Each matrix as Matrix Squaring's left operand, and its bias: a ciphertext for each block of rows."""
        layers = {layer.weight: layer for layer in self._program.layers}
        out = {}
        matrices = self._program.matrices(weights)
        reached = self._program.run(matrices, self._x)[1]
        limit = self._keys.parameters.primes[0] / 2.0**self._keys.parameters.scale_bits / 2 / TOTAL_WEIGHT
        if reached >= limit / 2:
            raise FixedPointRangeError(
                f"{self.address.name}'s model reaches {reached:.3g} on its own samples, too close to the limit of "
                f"{limit:.0f}; scale the inputs down"
            )
        with clock.during("encryption"):
            for name, (matrix, bias) in matrices.items():
                product = squaring(layers[name], 1, self._slots)
                height = product.tile[0]
                padded = F.pad(bias, (0, -len(bias) % height)).view(-1, height)
                slots = torch.zeros(len(padded), self._slots, dtype=torch.float64)
                spread = padded.repeat_interleave(product.width, dim=1)
                slots[:, : spread.shape[1]] = spread
                out[name] = (
                    product.left(matrix, self._keys, None),
                    ckks.encrypt(slots.t(), self._keys, bound=None).cipher,
                )
        return out

    def encrypt_samples(self, clock: Clock) -> tuple[list[Operand], ckks.CKKSTensor]:
        """Matrix Squaring's right operand for the first layer (or for every step of a GRU), and the labels in unary."""
        values = self._x.double().reshape(len(self._x), -1).t()
        if self._program.state:
            values = F.pad(values, (0, 0, 0, self._program.state))
        layers = [layer for layer in self._program.layers if layer.gate] or self._program.layers[:1]
        with clock.during("encryption"):
            unary = F.one_hot(self._labels, self._program.classes).double()
            return [self._right(layer, values) for layer in layers], ckks.encrypt(unary, self._keys, bound=None)

    def activate(self, layer: Layer, following: Layer | None, output: ckks.EncryptedMatrix, weight: int, clock: Clock):
        """Decrypt a layer's outputs: the next layer's encrypted operand, both gates, or the prediction in unary."""
        samples = output.shape[1] // layer.columns
        with clock.during("decryption"):
            decrypted = output.decrypt(self._keys.secret)
        # Honest outputs times weights stay below half the room of the last prime; random residues are far above it.
        room = self._keys.parameters.primes[0] / 2.0**self._keys.parameters.scale_bits
        if not float(decrypted.abs().max()) <= room:
            raise CorruptedCiphertextError(
                f"{self.address.name} decrypted a value beyond {room:.0f}: a message was corrupted, or the model "
                f"leaves the number format; the batch was not counted: run again from the folder"
            )
        values = layer.outputs(decrypted / weight, samples)
        with torch.no_grad(), clock.during("encryption"):
            if layer.gate:
                return tuple(ckks.encrypt(v.reshape(-1), self._keys, bound=None) for v in gates(values))
            if following is None:
                unary = F.one_hot(values.argmax(1), self._program.classes).double()
                return ckks.encrypt(unary, self._keys, bound=None)
            return self._right(following, layer.after(values).reshape(samples, -1).t())

    def prepare_state(self, following: Layer, masked: ckks.CKKSTensor, clock: Clock):
        """The masked state, decrypted, as an operand of the next step and as a plain vector of slots."""
        hidden = self._program.state
        with clock.during("decryption"):
            state = masked.decrypt(self._keys.secret).view(hidden, -1)
        with clock.during("encryption"):
            padded = F.pad(state, (0, 0, self._program.features, 0))
            return self._right(following, padded), ckks.encrypt(state.reshape(-1), self._keys, bound=None)

    def count(self, matches: ckks.CKKSTensor, clock: Clock) -> int:
        """How many places of a batch hold a one."""
        with clock.during("decryption"):
            return int((matches.decrypt(self._keys.secret) > 0.5).sum())

    def _right(self, layer: Layer, values: torch.Tensor) -> Operand:
        matrix = layer.features(values)
        return squaring(layer, matrix.shape[1], self._slots).right(matrix, self._keys, None)


class Server:
    """The one server: ciphertexts and public keys."""

    def __init__(self, public: ckks.PublicKeys, program: Program):
        self.address = Address(PRINCIPAL, PRINCIPAL)
        self._public, self._program, self._slots = public, program, public.parameters.slots
        self._models: dict[int, dict] = {}
        self._weights: dict[int, int] = {}
        self._samples: dict[int, tuple] = {}
        self._model: dict[str, tuple[Operand, Cipher]] = {}
        self.counts = Counts()

    def __repr__(self) -> str:
        return "Server()"

    def receive_samples(self, owner: int, operands: list[Operand], labels: ckks.CKKSTensor) -> None:
        """A client's encrypted test samples."""
        self._samples[owner] = operands, labels

    def receive_model(self, owner: int, layers: dict, weight: int) -> None:
        """A client's encrypted model, kept times its aggregation weight."""
        self._models[owner] = {
            name: (
                Operand(left.shape, {at: times_integers(c, weight) for at, c in left.blocks.items()}),
                times_integers(bias, weight),
            )
            for name, (left, bias) in layers.items()
        }
        self._weights[owner] = weight

    def forget_models(self) -> None:
        """A round is over."""
        self._models, self._weights = {}, {}

    def aggregate(self, coalition: int, clock: Clock) -> int:
        """Algorithm 1, step 6; the sum of the weights."""
        owners = members(coalition)
        with clock.during("arithmetic"):
            self._model = {}
            for name, (left, _) in self._models[owners[0]].items():
                parts = [self._models[i][name] for i in owners]
                blocks = {at: _total([p[0].blocks[at] for p in parts]) for at in left.blocks}
                self._model[name] = Operand(left.shape, blocks), _total([p[1] for p in parts])
        return sum(self._weights[i] for i in owners)

    def load(self, owner: int) -> None:
        """Take up one owner's samples."""
        self._operands, self._labels = self._samples[owner]
        self._step, self._operand, self._state = 0, self._operands[0], None

    def receive_features(self, operand: Operand) -> None:
        """The next layer's operand, from the client who activated."""
        self._operand = operand

    def linear(self, layer: Layer, clock: Clock) -> ckks.EncryptedMatrix:
        """A layer's outputs, encrypted (Algorithm 2, step 2)."""
        left, bias = self._model[layer.weight]
        product = squaring(layer, self._operand.shape[1], self._slots)
        with clock.during("arithmetic"):
            out = product.multiply(left, self._operand)
            lowered: dict[int, Cipher] = {}
            for (i, j), block in out.blocks.items():
                if i not in lowered:
                    lowered[i] = aligned(block, replace(bias, data=bias.data[i : i + 1]))[1]
                out.blocks[i, j] = add(block, lowered[i])
        with clock.during("encryption"):
            out.blocks = {at: fresh(block) for at, block in out.blocks.items()}
        self.counts.add(Counts(out.counts.products, out.counts.rotations))
        return out

    def masked_state(self, gates: tuple, clock: Clock) -> ckks.CKKSTensor:
        """z h + u + rho, to be decrypted; rho uniform below 2^12."""
        z, u = gates
        words = PairKey(random_secret(), random_secret()).words("hesv mask", 0, 0, z.shape[0])
        self._rho = (words >> 24).double() * 2.0 ** (STATE_MASK_BITS - 39)
        with clock.during("arithmetic"):
            if self._state is None:
                return u + self._rho
            self.counts.products += 1
            return z * self._state + u + self._rho

    def receive_state(self, following: Layer, operand: Operand, state: ckks.CKKSTensor, clock: Clock) -> None:
        """Take the mask off what the client encrypted, and join the state with the next step's input."""
        self._step += 1
        with clock.during("arithmetic"):
            self._state = state - self._rho
            rho = F.pad(self._rho.view(self._program.state, -1), (0, 0, self._program.features, 0))
            plain = squaring(following, operand.shape[1], self._slots).right(following.features(rho), None)
            blocks = {}
            for at, c in operand.blocks.items():
                joined = ckks.CKKSTensor(c, self._slots, (c.count,), torch.float64) - plain.blocks[at].t()
                known = self._operands[self._step].blocks[at] if self._step < len(self._operands) else None
                blocks[at] = joined.cipher if known is None else add(joined.cipher, known)
            self._operand = Operand(operand.shape, blocks)

    def matches(self, prediction: ckks.CKKSTensor, clock: Clock) -> ckks.CKKSTensor:
        """Whether prediction and label agree, encrypted, a slot for each sample (in place of step 8's difference)."""
        with clock.during("arithmetic"):
            self.counts.products += self._program.classes
            return (prediction * self._labels).sum(1).settled()


def fresh(c: Cipher) -> Cipher:
    """c with a fresh encryption of zero added: a client that knows its own model's ciphertexts could else compute with
    them on what it decrypts.
    """
    data, other = c.data.clone(), zeros(c)
    for j, q in enumerate(c.primes):
        data[:, :, j] = plus_(data[:, :, j].contiguous(), other[:, :, j].contiguous(), q)
    return replace(c, data=data)


def _total(parts: list[Cipher]) -> Cipher:
    """Sums of residues below 2^50 fit int64; one reduction."""
    data = parts[0].data.clone()
    for part in parts[1:]:
        for j, q in enumerate(part.primes):
            data[:, :, j] = plus_(data[:, :, j].contiguous(), part.data[:, :, j], q)
    return replace(parts[0], data=data)


class HESVTester(Tester):
    """One server S and the clients. Batches hold one owner's samples; none can be left out."""

    skips = False

    def __init__(self, program: Program, tests: TestSet, channel: Channel, keys: ckks.Keys, level: str):
        super().__init__(program, tests, channel)
        self.level = level
        self.clients = [
            Client(f"client {i}", keys, program, x, y)
            for i, (x, y) in enumerate(zip(tests.x, tests.labels, strict=True))
        ]
        self.S = Server(keys.public, program)
        self._sent = False

    def begin(self, models, weights):
        if not self._sent:
            for i, client in enumerate(self.clients):
                encrypted = client.encrypt_samples(self.clock)
                self.S.receive_samples(i, *self.channel.send(client.address, self.S.address, "test data", encrypted))
            self._sent = True
        self.S.forget_models()
        for i, model in models.items():
            client = self.clients[i]
            encrypted = self.channel.send(
                client.address, self.S.address, "model", client.encrypt_model(model, self.clock)
            )
            with self.clock.during("arithmetic"):
                self.S.receive_model(i, encrypted, weights[i])

    def routes(self, coalition: int) -> list[Route]:
        """One batch for each owner."""
        everyone = range(len(self.clients))
        layers = len(self.program.layers)
        return plan(everyone, everyone, layers, self.level, members=members(coalition), together=False, turn=coalition)

    def correct(self, coalition, samples):
        raise ShapleyError("HESV counts correct samples and does not name them; use `hits`")

    def hits(self, coalition: int) -> int:
        """How many of all test samples the coalition's model classifies correctly (Algorithm 2)."""
        weight = self.S.aggregate(coalition, self.clock)
        total = 0
        for route in self.routes(coalition):
            self.S.load(route.owners[0])
            for k, layer in enumerate(self.program.layers):
                client = self.clients[route.clients[k]]
                following = self.program.layers[k + 1] if k + 1 < len(self.program.layers) else None
                output = self.S.linear(layer, self.clock)
                output = self.channel.send(self.S.address, client.address, "layer output", output)
                answer = client.activate(layer, following, output, weight, self.clock)
                self._continue(route, k, following, client, answer)
            total += self._count(route, answer)
        return total

    def _continue(self, route: Route, k: int, following: Layer | None, client: Client, answer) -> None:
        if following is None:
            self.channel.send(client.address, self.S.address, "prediction", answer)
            return
        got = self.channel.send(client.address, self.S.address, "features", answer)
        if not isinstance(got, tuple):
            self.S.receive_features(got)
            return
        masked = self.S.masked_state(got, self.clock)
        masked = self.channel.send(self.S.address, client.address, "masked output", masked)
        prepared = client.prepare_state(following, masked, self.clock)
        prepared = self.channel.send(client.address, self.S.address, "features", prepared)
        self.S.receive_state(following, *prepared, self.clock)

    def _count(self, route: Route, prediction) -> int:
        """Another client than the one who predicted counts (Algorithm 2, step 9); no owner, where there is one."""
        others = [i for i in range(len(self.clients)) if i != route.clients[-1]]
        counter = self.clients[min(others, key=lambda i: i in route.owners)]
        matches = self.S.matches(prediction, self.clock)
        matches = self.channel.send(self.S.address, counter.address, "matches", matches)
        count = counter.count(matches, self.clock)
        return self.channel.send(counter.address, self.S.address, "count", count)
