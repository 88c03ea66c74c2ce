"""Ciphertexts among parties: who holds them, how they travel, and who decrypts what.

    keys = ckks.LocatedKeys(net, net.Pk, parameters)       # made at Pk, which keeps the secret
    keys.to(net.Pl)                                        # once
    x = keys.encrypt(samples).to(net.Pl)                   # samples: located at Pk; x: at Pl
    z = x.apply(model)                                     # at Pl, where the model's weights are
    total = z.sum(0).decrypt_at(net.Pk, flood_bits=16)     # located at Pk, and nothing else of z

A ciphertext's shape, level, scale and factor follow from public facts, so every party works them out: each step runs
on ciphertexts where they are held, and on ciphertexts without residues elsewhere (`choreography.located.FORMS`).
Residues travel as words. Where the protocol declares `LABEL_tag` beside `LABEL` (`ciphertext_messages`), a digest goes
with them, and the receiver checks it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tenseal import sealapi
from torch import nn

from ..choreography import Located, Message, Net, Party, Phase, Roles, protocol, with_shapes
from ..choreography.located import FORMS, compute, current, run_in, shape_of
from ..errors import (
    ArgumentError,
    CorruptedCiphertextError,
    KeyMismatchError,
    LevelError,
    MisplacedValueError,
    MissingKeyError,
    UnsupportedOpError,
)
from .linalg import EncodedShare, EncryptedColumns, EncryptedMatrix, PackedOperand, ReducingOperand
from .releases import ReleaseLedger
from .scheme.ciphertext import Cipher, residues
from .scheme.encryption import coefficient_error
from .scheme.keys import Keys, PublicKeys, SecretKey, keys_for
from .scheme.ntt import transform
from .scheme.seal import VALUE_BOUND, Parameters
from .tensor.ckks_tensor import BlankKeys, CKKSTensor, blank_encryption, encrypt, rerandomise_cipher

# Sums over the batch, without rotations: of a ciphertext's slots, only their sums can be decrypted.
#
# The slots of a CKKS ciphertext are the values of its message m at the roots x of X^N = -1. The 2C coefficients of m at
# the multiples of g = N / 2C are those of a polynomial in Y = X^g whose value at y is the mean of m over the g slots
# with x^g = y. SEAL's slot i lies at x = zeta^(3^i), and 3^i mod 4C repeats after C slots: slot i is in group i mod C.
# So
#
#     the sums over C groups of slots are 2C coefficients, and the others need not be sent.
#
# `sum_batch` gives these 2C coefficients of the first polynomial c_0 and the whole of the second, c_1 (an LWE
# ciphertext where C = 1). Decryption, c_0 + c_1 s, gives the owner of the key the sums; every other coefficient of c_0
# stays with the sender, so that of single slots nothing is there to be decrypted. A sum over the slots by rotations
# would give the same, for log2(N/2) rotations of each ciphertext and a set of rotation keys.

TERMS = 64
"""The error of a sum is taken to be that of so many fresh ones added up (`scheme/encryption.py`)."""


@dataclass(frozen=True)
class BatchSums:
    """Sums over groups of slots, encrypted. See the comment above.

    Attributes:
        data: int64 [B, 2C + N], residues of the first prime.
        groups: C; slot i is in group i mod C.
        factor: a public number that the sums are multiplied by.
        shape: of the decrypted sums without the groups; its product is B.
    """

    data: torch.Tensor
    keys: Any
    groups: int
    factor: float
    shape: tuple[int, ...]

    @property
    def full_shape(self) -> torch.Size:
        """Of the decrypted sums: `shape`, and the groups behind it where there are several."""
        return torch.Size(self.shape if self.groups == 1 else (*self.shape, self.groups))

    def decrypt(self, secret: SecretKey) -> torch.Tensor:
        """The sums, float64 of `full_shape`."""
        p, count = self.keys.parameters, self.groups
        if secret.identity != self.keys.identity:
            raise KeyMismatchError(f"the sums are under keys {self.keys.identity[:8]}, not {secret.identity[:8]}")
        q, stride, context = p.primes[0], p.degree // (2 * count), self.keys.context
        first = torch.zeros(len(self.data), p.degree, dtype=torch.int64)
        first[:, ::stride] = self.data[:, : 2 * count]
        pairs = torch.stack([transform(p.degree, q).forward(first), self.data[:, 2 * count :]], 1).unsqueeze(2)
        plain, rows = sealapi.Plaintext(), []
        for one in pairs:
            secret.decryptor.decrypt(context.write(one.contiguous(), p.scales[0]), plain)
            rows.append(torch.from_numpy(np.array(context.parse_plain(plain, 0)[0])))
        message = transform(p.degree, q).inverse(torch.stack(rows))[:, ::stride]
        message = torch.where(message > q // 2, message - q, message).double()
        # How coefficient k of the polynomial in Y enters group c: cos(pi k 3^c / 2C).
        powers = torch.tensor([pow(3, c, 4 * count) for c in range(count)])
        angles = powers[:, None] * torch.arange(2 * count) % (4 * count)
        cosines = torch.cos(angles.double() * (math.pi / (2 * count)))
        means = message @ cosines.t() * (self.factor / p.scales[0])
        return (means * stride).view(self.full_shape)


def sum_batch(e: CKKSTensor, groups: int = 1, flood_bits: float = 1.0) -> BatchSums:
    """Sums over the slots of each group, rerandomised and flooded, so that the owner of the key learns nothing else.

    Slots beyond the batch count as well; after a product with a fresh encryption they hold zeros. A fresh encryption of
    zero makes the second polynomial pseudo-random to the owner, and noise of 2^flood_bits times the error's standard
    deviation hides the error, which depends on the sender's weights. Costs: B rescales, encryptions of zero and inverse
    transforms. Error: `sum_noise`, beside that of `e` for every slot of a group.

    Args:
        groups: C, a power of two.

    Raises:
        LevelError: more than one level is left to be rescaled by.
    """
    c = rerandomise_cipher(e.cipher, flood_bits)
    if c.level:
        raise LevelError(f"aggregates are of one prime, and {c.level + 1} are left; multiply at the first level")
    degree, q = c.keys.parameters.degree, c.primes[0]
    if c.data.is_meta:
        data = torch.empty(c.count, 2 * groups + degree, dtype=torch.int64, device="meta")
    else:
        data = residues(c)
        constants = transform(degree, q).inverse(data[:, 0, 0].contiguous())[:, :: degree // (2 * groups)]
        data = torch.cat([constants, data[:, 1, 0]], 1)
    return BatchSums(data, c.keys, groups, c.factor, e.row_shape)


def sum_noise(parameters: Parameters, groups: int, flood_bits: float, factor: float = 1.0) -> float:
    """The standard deviation of a sum's noise under `flood_bits`.

    Coefficients of deviation t give the group's mean t sqrt(C), and its sum N / 2C times that.
    """
    deviation = 2.0**flood_bits * coefficient_error(parameters.degree, TERMS)
    return abs(factor) * parameters.degree / (2 * groups) * math.sqrt(groups) * deviation / parameters.scales[0]


def flood_bits_for(parameters: Parameters, groups: int, sigma: float, factor: float, least: float) -> float:
    """The flood_bits with which sums carry noise of at least this standard deviation, and of `least` bits."""
    unit = sum_noise(parameters, groups, 0.0, factor)
    return max(least, math.log2(sigma / unit)) if sigma > 0 else least


# Values with ciphertexts in them: their residues, and what they are without.


def ciphers(value: Any) -> Iterator[Any]:
    """The `Cipher`s and `BatchSums` in a value, in a fixed order."""
    if isinstance(value, Cipher | BatchSums):
        yield value
    elif isinstance(value, CKKSTensor | EncryptedColumns):
        yield value.cipher
    elif isinstance(value, tuple | list):
        for part in value:
            yield from ciphers(part)
    elif isinstance(value, PackedOperand | EncryptedMatrix):
        for block in value.blocks.values():
            yield from ciphers(block)


def map_ciphers(f: Callable[[Any], Any], value: Any) -> Any:
    """The value with f(c) in the place of each of its `ciphers`."""
    if isinstance(value, Cipher | BatchSums):
        return f(value)
    if isinstance(value, CKKSTensor):
        return CKKSTensor(f(value.cipher), value.batch, value.row_shape, value.float_dtype)
    if isinstance(value, EncryptedColumns):
        return replace(value, cipher=f(value.cipher))
    if isinstance(value, ReducingOperand):  # it stays with its holder
        keys: Any = BlankKeys(value.keys.parameters)
        return replace(value, keys=keys, parts=[shape_of(part) for part in value.parts])
    if isinstance(value, tuple | list):
        return type(value)([map_ciphers(f, part) for part in value])
    if isinstance(value, PackedOperand | EncryptedMatrix):
        blocks = {at: map_ciphers(f, block) for at, block in value.blocks.items()}
        return replace(value, blocks=blocks, **({"encoded": {}} if isinstance(value, PackedOperand) else {}))
    return shape_of(value)


def _blank(c: Any) -> Any:
    """Ciphers as parties take them that do not hold them: no residues, keys or bounds."""
    keys: Any = BlankKeys(c.keys.parameters)
    data = c.data if c.data.is_meta else torch.empty(c.data.shape, dtype=c.data.dtype, device="meta")
    if isinstance(c, BatchSums):
        return replace(c, data=data, keys=keys)
    # A pending factor stays: the next step of whoever has it multiplies it in, which takes a level.
    return replace(c, data=data, keys=keys, largest=math.nan, error=0.0, declared=False)


FORMS.update(
    dict.fromkeys(
        (BatchSums, CKKSTensor, Cipher, EncryptedColumns, EncryptedMatrix, PackedOperand, ReducingOperand, list),
        functools.partial(map_ciphers, _blank),
    )
)

FORMS[EncodedShare] = lambda share: replace(share, parts=[shape_of(part) for part in share.parts])  # it stays, too

TAG_BYTES = 32
"""Of the digest that goes with ciphertexts: half is the identity of their keys."""


def ciphertext_messages(label: str, src: str, dst: str, mask: str, shows: str = "", opens: str = "") -> list[Message]:
    """The declared messages of ciphertexts that go from one role to another: residues, and their digest."""
    return [
        Message(label, src, dst, mask, shows, opens),
        Message(f"{label}_tag", src, dst, "a digest of what is encrypted"),
    ]


def _words(value: Any) -> torch.Tensor:
    """Residues as they are sent: int64, and int32 where all primes are below 2^31."""
    parts = [c.data if isinstance(c, BatchSums) else residues(c) for c in ciphers(value)]
    words = parts[0] if len(parts) == 1 else torch.cat(parts)
    return words.to(torch.int32) if max(next(ciphers(value)).keys.parameters.primes) < 1 << 31 else words


def _digest(words: torch.Tensor, identity: str) -> torch.Tensor:
    found = hashlib.blake2b(words.contiguous().numpy().data.cast("B"), digest_size=TAG_BYTES // 2)
    return torch.frombuffer(bytearray(bytes.fromhex(identity) + found.digest()), dtype=torch.uint8)


@with_shapes(lambda value, words: torch.empty(TAG_BYTES, dtype=torch.uint8, device="meta"))
def _tag(value: Any, words: torch.Tensor) -> torch.Tensor:
    """The identity of the keys and a digest of the residues. It shows damage, and is no defence against a liar."""
    return _digest(words, next(ciphers(value)).keys.identity)


def _check_tag(what: str, words: torch.Tensor, tag: torch.Tensor, keys: PublicKeys) -> None:
    expected = _digest(words, keys.identity)
    if not torch.equal(tag[: TAG_BYTES // 2], expected[: TAG_BYTES // 2]):
        came = bytes(tag[:4].tolist()).hex()
        raise KeyMismatchError(f"{what} are under keys {came}, expected were {keys.identity[:8]}")
    if not torch.equal(tag, expected):
        raise CorruptedCiphertextError(
            f"{what} arrived damaged: they do not have the digest that they were sent with; ask for them again"
        )


# Keys and ciphertexts of a choreography.


class LocatedKeys:
    """The CKKS keys of a choreography: the secret key with its owner, the public ones with whoever got them.

    Args:
        owner: who makes the keys, and decrypts.
        parameters: known to everybody.
        keys: the owner's, where it has them already: `Keys` at the owner, anything elsewhere.
        known: the public keys at parties that have them already, with rotation keys perhaps; anything elsewhere.
    """

    def __init__(
        self, net: Net, owner: Party, parameters: Parameters, keys: Keys | PublicKeys | Parameters | None = None,
        known: Mapping[Party, PublicKeys | Parameters | None] | None = None,
    ):  # fmt: skip
        self.parameters, self.owner, self.secrets = parameters, owner, dict[Party, Located]()
        self._public = {party: net.own(party, public, Phase.SETUP, "keys") for party, public in (known or {}).items()}
        if keys is None:
            made = net.fresh(owner, with_shapes(lambda: None)(functools.partial(keys_for, parameters)))
        else:
            made = net.own(owner, keys, Phase.SETUP, "keys")
        self._add_owner(net, owner, made)

    def _add_owner(self, net: Net, party: Party, keys: Located) -> None:
        self.secrets[party] = keys
        with run_in(net):
            self._public[party] = compute(_public_half, keys)

    def add_owner(self, net: Net, party: Party, keys: Keys | PublicKeys | Parameters | None) -> None:
        """Let another party decrypt, which has the same keys already: a group of owners with a joint key.

        Args:
            net: one in which the party takes part.
            keys: `Keys` at the party, anything elsewhere.
        """
        self._add_owner(net, party, net.own(party, keys, Phase.SETUP, "keys"))

    @property
    def keys(self) -> Located:
        """The owner's keys."""
        return self.secrets[self.owner]

    def to(self, party: Party, label: str | None = None) -> None:
        """Send the public keys to a party, once. Rounds 1 (2 by way of a server); `PublicKeys.message_bytes` bytes.

        Args:
            label: of the running protocol's message. Without, the protocol is `ckks_send` or `ckks_relay`.

        Raises:
            SerialisationError: at the party: what arrived are no keys of these parameters.
        """
        if party not in self._public:
            blank = lambda _: torch.empty(PublicKeys.message_bytes(self.parameters), dtype=torch.uint8, device="meta")
            message = compute(with_shapes(blank)(lambda keys: keys.message()), self._public[self.owner])
            arrived = _send(current(), message, self.owner, party, label or "keys", label is not None)
            self._public[party] = compute(functools.partial(_received_keys, self.parameters), arrived)

    def public(self, party: Party) -> Located:
        """The public keys at a party.

        Raises:
            MissingKeyError: they were not sent there; raised at every party.
        """
        if party not in self._public:
            raise MissingKeyError(f"{party} has no public keys of {self.owner}; send them first: keys.to({party})")
        return self._public[party]

    def encrypt(self, x: Located, *, bound: float | None = VALUE_BOUND, level: int | None = None) -> LocatedCKKSTensor:
        """Encrypt a located tensor [batch, ...] at its holder, who has the public keys; see `ckks.encrypt`."""
        (party,) = x.owners
        f = functools.partial(_encrypt, bound, level)
        blank = lambda x, _: blank_encryption(x, self.parameters, bound, level)
        content = current().fresh(party, with_shapes(blank)(_named(f, "encrypt")), x, self.public(party))
        return LocatedCKKSTensor(content, self)

    def bring(self, party: Party, value: Any) -> LocatedCKKSTensor:
        """Ciphertexts under these keys that a party has already; elsewhere their form (`blank_encryption`)."""
        return self.wrap(current().own(party, value))

    def run(self, party: Party, f: Callable, *values: Any) -> Any:
        """`party` computes f(*values) with randomness of its own; ciphertexts for `LocatedCKKSTensor`s among them.

        Returns:
            A `LocatedCKKSTensor` where the result is ciphertexts, else a located value.
        """
        return self.wrap(current().fresh(party, f, *(_contents(value, []) for value in values)))

    def wrap(self, found: Any) -> Any:
        """Located ciphertexts as a `LocatedCKKSTensor`; anything else as it is."""
        if type(found) is tuple:
            return tuple(map(self.wrap, found))
        value = found._value if type(found) is Located else None
        sealed = isinstance(value, ReducingOperand) or next(ciphers(value), None) is not None
        return LocatedCKKSTensor(found, self) if sealed else found


class LocatedCKKSTensor:
    """Ciphertexts that some parties hold and others know the form of: a tensor, a packed matrix, or a list of them.

    Operators, torch functions and methods compute at the parties that hold all operands, as with `Located` values. `to`
    sends, `apply` evaluates a model, `decrypt_at` rerandomises, sends to the owner of the key, and decrypts there.
    Nothing goes to the owner of the key that was not rerandomised, and of a sum over the batch nothing but the sums.

    Attributes:
        content: the located ciphertexts.
        keys: the keys that they are under.
        groups: of a sum over the batch (`sum(0)`), which can be rerandomised and decrypted only; None elsewhere.
        fresh: whether they were rerandomised last.
    """

    def __init__(self, content: Located, keys: LocatedKeys, groups: int | None = None, fresh: bool = False):
        self.content, self.keys, self.groups, self.fresh = content, keys, groups, fresh

    def __repr__(self) -> str:
        return f"LocatedCKKSTensor({self.content!r})"

    @property
    def shape(self) -> torch.Size:
        return self.content.shape

    @property
    def owners(self) -> frozenset[Party]:
        """The parties that hold the ciphertexts."""
        return self.content.owners

    def at(self, who: str | Party) -> LocatedCKKSTensor:
        """The same ciphertexts at one of their holders."""
        return LocatedCKKSTensor(self.content.at(who), self.keys, self.groups, self.fresh)

    def to(self, party: Party, label: str | None = None, what: str = "the ciphertexts") -> LocatedCKKSTensor:
        """Send the ciphertexts to a party that has the keys. Rounds 1 (2 by way of a server).

        Args:
            label: of the running protocol's message. Without, the protocol is `ckks_send` or `ckks_relay`. To the owner
                of the key they are rerandomised first, unless they were.
            what: they are, in the text of an error.

        Bytes: 8 a residue (4 where all primes are below 2^31), and 32 for the digest.

        Raises:
            CorruptedCiphertextError, KeyMismatchError: at the party: they arrived damaged, or are under other keys.
        """
        if party in self.owners:
            return self.at(party)
        if party in self.keys.secrets:
            return (self if self.fresh else self.rerandomise())._sent(party, label or "answer", label is not None, what)
        return self._sent(party, label or "ciphertexts", label is not None, what)

    def _sent(self, party: Party, label: str, declared: bool, what: str) -> LocatedCKKSTensor:
        net, src = current(), min(self.owners, key=str)
        content, keys = _contents(self, []).at(src), self.keys.public(party)
        form = content._value
        words = compute(_words, content)
        tag = compute(_tag, content, words) if not declared or net.declares(f"{label}_tag") else None
        arrived = _send(net, words, src, party, label, declared)
        if tag is not None:
            tag = _send(net, tag, src, party, f"{label}_tag", declared)
            check = functools.partial(_check_tag, what)
            net.check(party, with_shapes(lambda *_: None)(_named(check, "check_tag")), arrived, tag, keys)
        blank = lambda *_: shape_of(form)
        restore = with_shapes(blank)(_named(functools.partial(_restore, form, what), "restore"))
        return LocatedCKKSTensor(compute(restore, arrived, keys), self.keys)

    def apply(self, model: nn.Module) -> LocatedCKKSTensor:
        """Evaluate a model on the ciphertexts, at their holder, which has its weights.

        Elsewhere only the model's architecture is used.
        """

        @with_shapes(lambda e: _evaluate(on_shapes(model), e))
        def evaluate(e: CKKSTensor) -> CKKSTensor:
            return _evaluate(model, e)

        return self.keys.wrap(compute(evaluate, _contents(self, [])))

    def smallest_form(self) -> LocatedCKKSTensor:
        """Rescaled to at most two primes, at the holder; see `CKKSTensor.smallest_form`."""
        return self.keys.wrap(compute(CKKSTensor.smallest_form, _contents(self, [])))

    def sum(self, dim: int | Sequence[int], keepdim: bool = False, groups: int = 1) -> LocatedCKKSTensor:
        """Sums over dimensions. Over the batch, dimension 0, it is what `decrypt_at` decrypts instead of the slots.

        Args:
            groups: for the batch: the sums over the slots i, i + groups, ..; a power of two.
        """
        content = _contents(self, [])
        if dim == 0:
            return LocatedCKKSTensor(content, self.keys, groups)
        return self.keys.wrap(compute(torch.Tensor.sum, content, dim, keepdim))

    def decrypt_at(
        self, party: Party, label: str | None = None, *, flood_bits: float | None = None, what: str = "the ciphertexts",
        ledger: ReleaseLedger | None = None, about: str = "", rerandomised: bool = False,
    ) -> Any:  # fmt: skip
        """The decrypted value, located at a party that has the secret key; of a list of ciphertexts a tuple of values.

        Ciphertexts that it does not hold are rerandomised, unless they were last, and sent, so that it learns the
        values with the size of their error, and with `flood_bits` no more of the sender's weights than
        `ckks.flood_distance` says.

        Args:
            label, what: as in `to`.
            rerandomised: they hold a fresh encryption of zero already, as one summand from another party: the owner of
                the key gets it with these ciphertexts and with no others.
            flood_bits: of noise over the error; needed for a sum over the batch.
            ledger: the sender's count of what it has released; a release beyond its limit is refused before anything is
                sent.
            about: what the numbers are of, for the ledger: the weights' digest, say.
        """
        if party not in self.keys.secrets:
            raise MisplacedValueError(
                f"{party} has no secret key of these ciphertexts; {self.keys.owner} decrypts them"
            )
        if party in self.owners:
            return compute(_decrypted, _contents(self, []).at(party), self.keys.secrets[party])
        if ledger is not None:
            samples, numbers = (self.shape[0], self.groups) if self.groups else (1, self.shape[0])
            count = functools.partial(ledger.release, str(party), about, numbers * self.shape[1:].numel(), samples)
            current().check(min(self.owners, key=str), with_shapes(lambda _: None)(lambda _: count()), self.content)
        hidden = (rerandomised or self.fresh) and flood_bits is None and self.groups is None
        sent = (self if hidden else self.rerandomise(flood_bits))._sent(
            party, label or "answer", label is not None, what
        )
        return compute(_decrypted, sent.content, self.keys.secrets[party])

    def rerandomise(self, flood_bits: float | None = None) -> LocatedCKKSTensor:
        """With fresh encryptions of zero, and noise if asked, at the holder; see `ckks.rerandomise`."""
        f = functools.partial(rerandomise_value, flood_bits=flood_bits)
        if self.groups is not None:
            if flood_bits is None:
                raise ArgumentError(
                    "a sum over the batch is flooded before it is sent: decrypt_at(party, flood_bits=16)"
                )
            f = functools.partial(sum_batch, groups=self.groups, flood_bits=flood_bits)
        content = current().fresh(min(self.owners, key=str), _named(f, "rerandomise"), self.content)
        return LocatedCKKSTensor(content, self.keys, fresh=True)

    @classmethod
    def __torch_function__(cls, f: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found: list[LocatedKeys] = []
        args, kwargs = _contents(args, found), {name: _contents(v, found) for name, v in (kwargs or {}).items()}
        return found[0].wrap(compute(f, *args, **kwargs))

    def __getattr__(self, name: str) -> Callable:
        method = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"located ciphertexts have no '{name}'")
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)

    if TYPE_CHECKING:  # the operators that are set below

        def _operator(self, *others: Any) -> LocatedCKKSTensor: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _operator
        __neg__ = __getitem__ = _operator


for _name in ("add", "sub", "mul", "truediv", "matmul", "neg", "getitem"):
    _f = getattr(operator, _name)
    setattr(LocatedCKKSTensor, f"__{_name}__", lambda *xs, f=_f: LocatedCKKSTensor.__torch_function__(f, (), xs))
    if _name in ("add", "sub", "mul"):
        swapped = lambda x, y, f=_f: LocatedCKKSTensor.__torch_function__(f, (), (y, x))
        setattr(LocatedCKKSTensor, f"__r{_name}__", swapped)


def _contents(value: Any, found: list[LocatedKeys]) -> Any:
    """Located ciphertexts in the place of `LocatedCKKSTensor`s, whose keys are noted.

    Raises:
        UnsupportedOpError: a sum over the batch, whose slots still hold single samples.
    """
    if isinstance(value, LocatedCKKSTensor):
        if value.groups is not None:
            raise UnsupportedOpError("a sum over the batch can only be decrypted: decrypt_at(party, flood_bits=16)")
        found.append(value.keys)
        return value.content
    return type(value)([_contents(v, found) for v in value]) if type(value) in (tuple, list) else value


# Steps of the parties, and what others know of their results.


def _public_half(keys: Any) -> Any:
    return keys.public if isinstance(keys, Keys) else keys


def _received_keys(parameters: Parameters, message: torch.Tensor) -> PublicKeys | None:
    return None if message.is_meta else PublicKeys.from_message(parameters, message)


def _encrypt(bound: float | None, level: int | None, x: torch.Tensor, keys: PublicKeys) -> CKKSTensor:
    return encrypt(x, keys, bound=bound, level=level)


def _restore(form: Any, what: str, words: torch.Tensor, keys: PublicKeys) -> Any:
    """Ciphertexts of this form from the words of a message, under the receiver's keys; bounds are the declared ones.

    Raises:
        CorruptedCiphertextError: a word is no residue.
    """
    parts = iter(words.to(torch.int64).split([len(c.data) for c in ciphers(form)]))
    primes = torch.tensor(next(ciphers(form)).keys.parameters.primes)
    limits = primes[: words.shape[2]].view(-1, 1) if words.dim() == 4 else primes[:1]
    if bool(((words < 0) | (words >= limits)).any()):
        raise CorruptedCiphertextError(
            f"{what} arrived damaged: a word is no residue below its prime; ask for them again"
        )

    def filled(c: Any) -> Any:
        if isinstance(c, BatchSums):
            return replace(c, data=next(parts), keys=keys)
        known = dict(largest=c.largest, error=c.error) if c.declared else dict(largest=math.nan, error=0.0)
        return replace(c, data=next(parts), keys=keys, pending_factor=None, **known)

    return map_ciphers(filled, form)


def rerandomise_value(value: Any, flood_bits: float | None = None) -> Any:
    """Ciphertexts with fresh encryptions of zero added; see `ckks.rerandomise`."""
    return map_ciphers(functools.partial(rerandomise_cipher, flood_bits=flood_bits), value)


def _plain_form(value: Any, keys: Any) -> Any:
    if isinstance(value, list):
        return tuple(_plain_form(part, keys) for part in value)
    if isinstance(value, CKKSTensor):
        return torch.empty(value.full_shape, dtype=value.float_dtype, device="meta")
    if isinstance(value, EncryptedColumns):
        shape = value.layout.rows, value.columns
    else:
        shape = value.full_shape if isinstance(value, BatchSums) else value.shape
    return torch.empty(shape, dtype=torch.float64, device="meta")


@with_shapes(_plain_form)
def _decrypted(value: Any, keys: Keys) -> Any:
    if isinstance(value, list):
        return tuple(_decrypted(part, keys) for part in value)
    return value.decrypt(keys if isinstance(value, EncryptedColumns) else keys.secret)


def on_shapes(model: nn.Module) -> nn.Module:
    """A copy of a model with meta tensors as parameters and floating-point buffers, which is its public part."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return copy.deepcopy(model, {id(t): _meta(t) for t in tensors})


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    blank = torch.empty_like(tensor, device="meta")
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


@torch.no_grad()
def _evaluate(model: nn.Module, e: CKKSTensor) -> CKKSTensor:
    return model(e)


def _named(f: functools.partial, name: str) -> Callable:
    """A partial function with a name, for errors, and with attributes of its own."""
    f.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
    return f


# The messages of ciphertexts and keys that no protocol of a paper declares for itself.

_ENCRYPTED, _SHOWN = "encrypted", "the decrypted values, with the size of their error"
PAIR = Roles("Sender Receiver", edges="Sender-Receiver")
RELAY = Roles("Sender S Receiver", edges="Sender-S S-Receiver")


def _messages(roles: Roles) -> list[Message]:
    """Of keys, ciphertexts and answers, each with its digest, between two parties or by way of a server."""
    out = []
    for label, mask, shows in (
        ("keys", "a public key", "the owner's public keys"), ("ciphertexts", _ENCRYPTED, ""),
        ("ciphertexts_tag", "a digest of what is encrypted", ""), ("answer", "rerandomised", _SHOWN),
        ("answer_tag", "a digest of what is encrypted", ""),
    ):  # fmt: skip
        if roles is PAIR:
            out.append(Message(label, "Sender", "Receiver", mask, shows))
        else:
            hidden = label == "answer"
            out.append(Message(label, "Sender", "S", _ENCRYPTED if hidden else mask, "" if hidden else shows,
                               opens="Receiver" if hidden else ""))  # fmt: skip
            out.append(Message(f"{label}_forwarded", "S", "Receiver", mask, shows))
    return out


@protocol("ckks_send", "CaPriDe, Figure 1", _messages(PAIR), roles=PAIR)
def _send_directly(net: Net, words: Located, label: str) -> Located:
    """Send keys, ciphertexts or an answer from one party to another. Rounds 1."""
    return words.send(net.Sender, net.Receiver, label)


@protocol("ckks_relay", "CaPriDe, Figure 1", _messages(RELAY), roles=RELAY)
def _send_by_server(net: Net, words: Located, label: str) -> Located:
    """Send keys, ciphertexts or an answer from one party to another by way of the server. Rounds 2."""
    return words.send(net.Sender, net.S, label).send(net.S, net.Receiver, f"{label}_forwarded")


def _send(net: Net, words: Located, src: Party, dst: Party, label: str, declared: bool) -> Located:
    """Send by the running protocol's message of this label, or by `ckks_send` and `ckks_relay`.

    Parties without an edge send by way of S; the second message is LABEL_forwarded.
    """
    if declared:
        if not net.cast.has_edge(src, dst):
            src, words, label = net.S, words.send(src, net.S, label), f"{label}_forwarded"
        return words.send(src, dst, label).at(dst)
    if net.cast.has_edge(src, dst):
        with net.playing(PAIR, Sender=src, Receiver=dst):
            return _send_directly(net, words, label).at(dst)
    with net.playing(RELAY, Sender=src, S=net.S, Receiver=dst):
        return _send_by_server(net, words, label).at(dst)
