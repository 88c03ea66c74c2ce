"""An aggregate over the batch out of ciphertexts whose slots hold single samples, without rotations.

The slots of a CKKS ciphertext are the values of its message m at the roots x of X^N = -1. The 2C coefficients of m
at the multiples of g = N / 2C are those of a polynomial in Y = X^g whose value at y is the mean of m over the g slots
with x^g = y. SEAL's slot i lies at x = zeta^(3^i), and 3^i mod 4C repeats after C slots: slot i is in group i mod C. So

    the sums over C groups of slots are 2C coefficients, and the others need not be sent.

`seal` sends these 2C coefficients of the first polynomial c_0 and the whole of the second, c_1 (an LWE ciphertext where
C = 1). Decryption, c_0 + c_1 s, gives the owner of the key the sums; every other coefficient of c_0 stays with the
sender, so that of single samples nothing is there to be decrypted. A sum over the slots by rotations would give the
same, for log2(N/2) rotations of each ciphertext and a set of rotation keys.

A party's n samples are published C times, sample j in the slots j C .. j C + C - 1, with C the largest power of two
that fits: encrypted inference costs the same for all slots, and each ciphertext then carries C aggregates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tenseal import sealapi

from ... import ckks
from ...ckks.bounds import fresh_error
from ...ckks.cipher import Cipher, drop_to
from ...ckks.flood import coefficient_error
from ...ckks.ntt import transform
from .errors import CorruptedCiphertextError

TERMS = 64
"""The error of an aggregate is taken to be that of so many fresh ciphertexts added up, as in `sectorch.ckks.flood`."""


def copies(samples: int, slots: int) -> int:
    """C: how often a batch is laid into the slots. A power of two, at least 1."""
    return 1 << max(0, (slots // samples).bit_length() - 1)


def spread(x: torch.Tensor, count: int) -> torch.Tensor:
    """[n, ...] -> [n C, ...], each sample C times in a row."""
    return x.repeat_interleave(count, dim=0)


def blocks(directions: torch.Tensor, count: int) -> torch.Tensor:
    """Directions [R, n, M] -> [n C, B, M] with B = ceil(R / C): copy c of a sample meets the directions b C + c."""
    missing = -len(directions) % count
    padded = torch.cat([directions, directions.new_zeros(missing, *directions.shape[1:])])
    blocked = padded.unflatten(0, (-1, count)).permute(2, 1, 0, 3)
    return blocked.reshape(-1, blocked.shape[2], blocked.shape[3])


def encrypt_low(x: torch.Tensor, keys: ckks.Keys, level: int = 1) -> ckks.CKKSTensor:
    """x [n, ...] encrypted by the owner of the key with the primes of one level only.

    What an inner product needs is two primes, and an encryption's time and size go with their number. The scale is the
    level's canonical one, the error that of any fresh encryption.
    """
    p, context = keys.parameters, keys.public.context
    columns = x.double().flatten(1).t()
    data = torch.empty(len(columns), 2, level + 1, p.degree, dtype=torch.int64)
    for row, column in zip(data, columns, strict=True):
        ciphertext = sealapi.Ciphertext(context.seal)
        keys.secret.encryptor.encrypt_symmetric(context.encode(column.tolist(), level, p.scales[level]), ciphertext)
        row.copy_(torch.from_numpy(np.array(context.read(ciphertext)[0])))
    cipher = Cipher(data, keys.public, largest=math.nan, error=fresh_error(p.degree, p.scales[level]))
    return ckks.CKKSTensor(cipher, len(x), tuple(x.shape[1:]), torch.float64)


def fingerprint(*tensors: torch.Tensor) -> str:
    """A digest of the residues of ciphertexts, by which damage on the way is seen. No defence against a liar."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(memoryview(tensor.detach().contiguous().numpy()).cast("B"))
    return found.hexdigest()


@dataclass(frozen=True)
class Published:
    """Ciphertexts that their owner hands to every peer, and the digest that they left with."""

    owner: str
    what: str
    parts: tuple[ckks.CKKSTensor, ...] = field(repr=False)
    digest: str

    @classmethod
    def of(cls, owner: str, what: str, parts: Sequence[ckks.CKKSTensor]) -> Published:
        return cls(owner, what, tuple(parts), fingerprint(*(part.cipher.data for part in parts)))

    @property
    def nbytes(self) -> int:
        return sum(part.ciphertext_bytes for part in self.parts)

    def checked(self) -> tuple[ckks.CKKSTensor, ...]:
        """The ciphertexts, as they were sent.

        Raises:
            CorruptedCiphertextError: they are not.
        """
        if fingerprint(*(part.cipher.data for part in self.parts)) != self.digest:
            raise CorruptedCiphertextError(
                f"{self.owner}'s {self.what} arrived damaged: the ciphertexts do not have the digest that they were "
                f"sent with; ask {self.owner} to publish them again"
            )
        return self.parts


@dataclass(frozen=True)
class Sealed:
    """B C aggregates on their way to the owner of the key, who alone can open them.

    `constants` int64 [B, 2C] and `body` int64 [B, N] are residues mod q_0.
    """

    sender: str
    identity: str
    constants: torch.Tensor = field(repr=False)
    body: torch.Tensor = field(repr=False)
    factor: float
    digest: str

    @property
    def nbytes(self) -> int:
        return 8 * (self.constants.numel() + self.body.numel())

    @property
    def numbers(self) -> int:
        """Aggregates that it holds; what is decrypted is at most these."""
        return self.constants.numel() // 2


def seal(products: ckks.CKKSTensor, count: int, sender: str, flood_bits: float) -> Sealed:
    """Aggregate over the batch: products [n C, B] -> B C sums over n samples each.

    The ciphertexts are rerandomised (a fresh encryption of zero: the body is then pseudo-random to the owner as well)
    and flooded by 2^flood_bits times the error's standard deviation, so that the error, which depends on the sender's
    weights, is hidden. Costs: settles B ciphertexts, B encryptions of zero, B inverse transforms.
    """
    lowest = ckks.rerandomised(products, flood_bits=flood_bits).cipher
    c = drop_to(replace(lowest, largest=math.nan), 0)  # what fits was the sender's to see to: `_check_range`
    degree, q = c.data.shape[3], c.primes[0]
    stride = degree // (2 * count)
    constants = transform(degree, q).inverse(c.data[:, 0, 0].contiguous())[:, ::stride].contiguous()
    body = c.data[:, 1, 0].contiguous()
    return Sealed(sender, c.keys.identity, constants, body, c.factor, fingerprint(constants, body))


def unseal(sealed: Sealed, keys: ckks.Keys) -> torch.Tensor:
    """The aggregates, float64 [B C], at the owner of the key.

    Raises:
        KeyMismatchError: sealed under other keys.
        CorruptedCiphertextError: damaged on the way.
    """
    if sealed.identity != keys.public.identity:
        raise ckks.KeyMismatchError(
            f"the aggregates of {sealed.sender} are under keys {sealed.identity[:8]}, given were "
            f"{keys.public.identity[:8]}"
        )
    if fingerprint(sealed.constants, sealed.body) != sealed.digest:
        raise CorruptedCiphertextError(
            f"the aggregates of {sealed.sender} arrived damaged: they do not have the digest that they were sent with; "
            f"ask for the round again"
        )
    p, context = keys.parameters, keys.public.context
    q, count = p.primes[0], sealed.constants.shape[1] // 2
    stride = p.degree // (2 * count)
    first = torch.zeros_like(sealed.body)
    first[:, ::stride] = sealed.constants
    residues = torch.stack([transform(p.degree, q).forward(first), sealed.body], 1).unsqueeze(2)
    plain, rows = sealapi.Plaintext(), []
    for one in residues:
        keys.secret.decryptor.decrypt(context.write(one.contiguous(), p.scales[0]), plain)
        rows.append(torch.from_numpy(np.array(context.parse_plain(plain, 0)[0])))
    message = transform(p.degree, q).inverse(torch.stack(rows))[:, ::stride]
    message = torch.where(message > q // 2, message - q, message).double()
    means = message @ _cosines(count).t() * (sealed.factor / p.scales[0])
    return (means * stride).reshape(-1)


def _cosines(count: int) -> torch.Tensor:
    """cos(pi k 3^c / 2C), float64 [C, 2C]: how coefficient k of the polynomial in Y enters group c."""
    powers = torch.tensor([pow(3, c, 4 * count) for c in range(count)])
    angles = powers[:, None] * torch.arange(2 * count) % (4 * count)
    return torch.cos(angles.double() * (math.pi / (2 * count)))


def noise_of(parameters: ckks.Parameters, count: int, flood_bits: float, factor: float = 1.0) -> float:
    """Standard deviation of an aggregate's noise under `flood_bits`: iid Gaussian coefficients of deviation t give the
    group's mean t sqrt(C), and its sum g times that.
    """
    deviation = 2.0**flood_bits * coefficient_error(parameters.degree, TERMS)
    stride = parameters.degree / (2 * count)
    return abs(factor) * stride * math.sqrt(count) * deviation / parameters.scales[0]


def flood_for(parameters: ckks.Parameters, count: int, sigma: float, factor: float, least: float) -> float:
    """The flood_bits with which aggregates carry noise of at least this standard deviation, and of `least` bits."""
    unit = noise_of(parameters, count, 0.0, factor)
    return max(least, math.log2(sigma / unit)) if sigma > 0 else least
