"""From encrypted to secret-shared and back: linear layers under CKKS, ReLUs on shares.

Both directions mask statistically (CaPC 4.1; MP2ML). A CKKS message is a polynomial m whose slots are sum_k m_k
cos(...), a real linear map; with that map as a fixed matrix of integers, both sides apply it to their own masked
integers, exactly mod 2^64 or mod the primes, so that masks of any size cancel to the last bit and only the matrix's
rounding is left as an error.

CKKS -> shares: A adds a polynomial r of uniform coefficients (and a fresh encryption of zero), Q decrypts m + r and
sends its half to S. Shares -> CKKS: A and S open x + r to Q, who encrypts it, and A takes r off under encryption.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from tenseal import sealapi

from ..backend import MAX_SHIFT
from ..choreography import Located, Message, Net, Party, protocol
from ..choreography.located import compute
from ..choreography.streams import PairKey, random_secret
from ..config import scheme_of
from ..errors import (
    ArgumentError,
    FixedPointRangeError,
    KeyMismatchError,
    NonFiniteError,
    ScaleError,
    SlotError,
    UnsupportedOpError,
)
from ..mpc.star.shares import Shares
from ..mpc.star.truncate import truncate
from ..ring import products
from ..session import Session, default_session
from ..tensor import Scheme, SharedTensor
from ..tensor.shared import refuse_infinite
from .linalg import uniform
from .scheme.ciphertext import (
    SIGMAS,
    Cipher,
    check_capacity,
    clear_pending_factor,
    drop_to,
    fresh_error,
    residues,
    settle,
)
from .scheme.keys import Keys, PublicKeys, SecretKey
from .scheme.ntt import dot, minus_, plus_, times_, transform
from .tensor.ckks_tensor import CKKSTensor, zeros

EXTRA_BITS = 8
"""Fraction bits of converted shares beyond 2f: the matrix of the map is rounded to them."""
_LOW = 62
_WORDS = 2 * _LOW
"""The most bits of a mask: it is held as two words."""
_OPENED = 61
"""The most bits of the mask of an element of Z_2^64, such that x + r stays below 2^62."""


def mask_bits(width: int, count: int, security_bits: int) -> int:
    """Bits of the uniform masks that hide `count` integers below 2^width in magnitude within 2^-security_bits.

    Returns:
        m = width + security_bits + ceil(log2(count)).

    Derivation. For r uniform on 2^m integers in a row, x + r and r differ in total variation by exactly |x| / 2^m, as
    long as that is below one: |x| places at one end and |x| at the other. Masks are drawn apart, and distances of
    independent values add up at most: count |x| / 2^m < count 2^(width - m) <= 2^-security_bits.

    Raises:
        ArgumentError: bits that hide nothing, or that are no whole numbers.
    """
    for what, bits in (("value_bits and fraction bits together", width), ("security_bits", security_bits)):
        if type(bits) is not int or bits < 1:
            raise ArgumentError(f"{what} must be a whole number from 1 on, got {bits!r}; leave them at their defaults")
    return width + security_bits + (max(count, 1) - 1).bit_length()


def finest_scale(frac_bits: int) -> int:
    """log2 of the finest scale, in whole bits, that `to_shares` takes with so many fraction bits."""
    return 2 * frac_bits + EXTRA_BITS - 12


def random_words(count: int) -> torch.Tensor:
    """Uniform int64 of one party's own, from a stream under a fresh key of the operating system."""
    return PairKey(random_secret(), random_secret()).words("ckks mask", 0, 0, count)


def _cosines(degree: int, slots: int) -> torch.Tensor:
    """cos(pi k 3^j / N), float64 [slots, N]: how coefficient k enters slot j."""
    powers, value = [], 1
    for _ in range(slots):
        powers.append(value)
        value = value * 3 % (2 * degree)
    angles = torch.tensor(powers)[:, None] * torch.arange(degree) % (2 * degree)
    return torch.cos(angles.double() * (math.pi / degree))


def _mask(shape: tuple[int, int], bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform integers of so many bits as (high, low): high 2^62 + low."""
    words = random_words(2 * math.prod(shape)).view(2, *shape)
    low = words[0] & ((1 << min(bits, _LOW)) - 1)
    high = words[1] & ((1 << (bits - _LOW)) - 1) if bits > _LOW else torch.zeros_like(low)
    return high, low


@protocol(
    "ckks_to_shares",
    "CaPC, 4.1",
    [
        Message("masked", "A", "S", "encrypted; r of A"),
        Message("forwarded", "S", "Q", "r of A, statistically"),
        Message("half", "Q", "S", "r of A, statistically"),
    ],
)
def _open_masked(net: Net, masked: Located, decrypt) -> Located:
    """A's masked ciphertexts go to Q by way of S; Q decrypts and sends S its half."""
    at_Q = masked.send(net.A, net.S, "masked").send(net.S, net.Q, "forwarded").at("Q")
    return compute(decrypt, at_Q).send(net.Q, net.S, "half")


def to_shares(
    e: CKKSTensor,
    secret: SecretKey,
    *,
    session: Session | None = None,
    party: Party | None = None,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    value_bits: int | None = None,
    security_bits: int = 30,
) -> SharedTensor:
    """An encrypted tensor at A becomes shares of A and S. Q's secret key is used at Q only.

    Args:
        value_bits: every value is below 2^value_bits in magnitude; what the tensor's own bound says unless named.
        security_bits: what Q and S see of this call is within 2^-security_bits of independent of the values, in total
            variation over all coefficients of all ciphertexts together (`mask_bits`). Calls add up.

    Rounds 3; bytes: the ciphertexts from A to S and on to Q, 8 an element from Q to S. Q and S learn nothing but
    shapes, and that the masks are as wide as A's bound on the values asks for; the fresh encryption of zero hides A's
    weights from Q. Error: 2.4 |x| D 2^-(2f + EXTRA_BITS) for the scale D, beside that of the ciphertext: the entries
    of the map's matrix are rounded to that many bits, and meet a polynomial of the norm |x| D (8 standard deviations).

    Raises:
        ScaleError: a scale so fine that this error is above 2^-10 |x|; take more fraction bits, or a smaller scale.
        ScaleError: the modulus that is left has no room for the mask; keep a level or two (keygen with more depth).
        KeyMismatchError: the secret key of another set.
        UnsupportedOpError: a scheme with verified=True.
    """
    session, scheme = session or default_session(), scheme_of("to_shares", scheme)
    _check_trusting(scheme)
    if secret.identity != e.keys.identity:
        raise KeyMismatchError(f"the tensor is under keys {e.keys.identity[:8]}, the key is of {secret.identity[:8]}")
    party = session.answering_party(party)
    c = settle(clear_pending_factor(e.cipher))
    check_capacity(c, "a conversion to shares")
    if math.isnan(c.largest):
        raise ScaleError(
            "the tensor was encrypted with bound=None; declare one with e.bounded(...) before it is shared"
        )
    known = max(1, math.ceil(math.log2(max(1.0, c.largest + c.error))))
    value_bits = known if value_bits is None else value_bits
    if value_bits < known:
        raise ScaleError(
            f"the tensor may hold values up to 2^{known}, more than the 2^{value_bits} that value_bits names: they "
            f"would be masked less well; leave value_bits out, or declare a smaller bound with e.bounded(...)"
        )
    offset_bits = math.ceil(math.log2(c.scale)) + value_bits
    coefficients = c.count * c.keys.parameters.degree
    bits = mask_bits(offset_bits, coefficients, security_bits)
    while c.level and math.log2(math.prod(c.primes[: c.level])) > bits + 2:
        c = drop_to(c, c.level - 1)
    room = math.log2(math.prod(c.primes))
    if room <= bits + 2 or bits > _WORDS:
        raise ScaleError(
            f"a mask of {bits} bits, for {coefficients} coefficients within 2^-{security_bits} together, does not fit "
            f"{f'the {room:.0f} bits of modulus that are left' if room <= bits + 2 else f'{_WORDS} bits'}; make keys "
            f"with more depth, so that two or three levels remain, or lower value_bits or security_bits"
        )
    scale_bits = 2 * scheme.frac_bits + EXTRA_BITS
    if SIGMAS / math.sqrt(12) * c.scale > 2.0 ** (scale_bits - 10):
        raise ScaleError(
            f"a scale of 2^{math.log2(c.scale):.0f} is too fine for shares of {scheme.frac_bits} fraction bits; make "
            f"keys with scale_bits={finest_scale(scheme.frac_bits)} or less, or share with more fraction bits "
            f"(Scheme(frac_bits=...))"
        )
    context, p = c.keys.context, c.keys.parameters
    matrix = (_cosines(p.degree, e.batch) * (2.0**scale_bits * c.factor / c.scale)).round_().to(torch.int64).t()
    shape = e.full_shape

    def to_share(integers: torch.Tensor) -> torch.Tensor:
        return products.matmul(integers, matrix).t().reshape(shape).contiguous()

    def mask(data: torch.Tensor, fresh: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        data = data.clone()
        for j, q in enumerate(c.primes):
            residues = times_(high.remainder(q), (1 << _LOW) % q, q)
            residues = plus_(plus_(residues, low.remainder(q), q), torch.tensor((1 << offset_bits) % q), q)
            data[:, :, j] = plus_(data[:, :, j].contiguous(), fresh[:, :, j], q)
            data[:, 0, j] = plus_(data[:, 0, j].contiguous(), transform(p.degree, q).forward(residues), q)
        return data

    def half(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return to_share(-((high << _LOW) + low + (1 << offset_bits)))  # mod 2^64; the offset keeps m + r above zero

    def decrypt(masked: torch.Tensor) -> torch.Tensor:
        plain, rows = sealapi.Plaintext(), []
        for one in masked:
            secret.decryptor.decrypt(context.write(one, c.scale), plain)
            rows.append(torch.from_numpy(np.array(context.parse_plain(plain, c.level))))
        values = torch.stack(rows)
        return to_share(_lift([transform(p.degree, q).inverse(values[:, j]) for j, q in enumerate(c.primes)], c.primes))

    with session.operation(party) as net:
        high, low = net.fresh(net.A, _mask, (c.count, p.degree), bits)
        fresh = net.fresh(net.A, zeros, c)
        at_S = _open_masked(net, compute(mask, net.own(net.A, residues(c)), fresh, high, low), decrypt)
        at_A = compute(half, high, low)
        return SharedTensor(Shares(at_A, at_S), scale_bits, session, party, scheme, e.float_dtype)


def _lift(residues: list[torch.Tensor], primes: tuple[int, ...]) -> torch.Tensor:
    """The integer in [0, product of the primes) with these residues, mod 2^64 (Garner: mixed radix digits)."""
    digits: list[torch.Tensor] = []
    for j, q in enumerate(primes):
        rest = residues[j].clone()
        weight = 1
        for digit, below in zip(digits, primes, strict=False):
            rest = minus_(rest, times_(digit.remainder(q), weight % q, q), q)
            weight *= below
        digits.append(times_(rest, pow(weight, -1, q), q))
    total, weight = torch.zeros_like(residues[0]), 1
    for digit, q in zip(digits, primes, strict=True):
        wrapped = weight % (1 << 64)
        total += digit * (wrapped - (1 << 64) if wrapped >= 1 << 63 else wrapped)
        weight *= q
    return total


@protocol(
    "shares_to_ckks",
    "CaPC, 4.1",
    [
        Message("masked_half", "A", "S", "r of A, uniform"),
        Message("masked", "S", "Q", "r of A, statistically"),
        Message("sealed", "Q", "S", "encrypted"),
        Message("forwarded", "S", "A", "encrypted"),
    ],
)
def _sealed_by_Q(net: Net, x: Shares, r: Located, encrypt: Callable) -> Located:
    """x + r goes to Q, who encrypts it; its ciphertexts go to A."""
    half = (x.A + r).send(net.A, net.S, "masked_half")
    opened = (half + x.S).send(net.S, net.Q, "masked").at("Q")
    return net.fresh(net.Q, encrypt, opened).send(net.Q, net.S, "sealed").send(net.S, net.A, "forwarded").at("A")


def from_shares(
    x: SharedTensor,
    keys: PublicKeys | Keys,
    *,
    value_bits: int = 8,
    security_bits: int = 30,
    frac_bits: int | None = None,
) -> CKKSTensor:
    """Convert shares of A and S to a tensor at A, encrypted under Q's key. It uses one level of the chain.

    Args:
        value_bits: every value is below 2^value_bits in magnitude.
        security_bits: the view of S and Q in this call is within 2^-security_bits of independent of x, in total
            variation over all its elements together (`mask_bits`). Calls add up.
        frac_bits: fraction bits to convert; further ones are rounded away first. The default is all of x.

    Rounds 4, one more for rounding and two to see whether x left its range; bytes: 16 an element to Q, and Q's
    ciphertexts to S and on to A.

    Error: 2.4 sqrt(N B) |x| 2^F / (D q) for B samples of F
    fraction bits, D the scale and q the prime of the level that is used, for the entries of the map's matrix are
    rounded (8 standard deviations); beside it that of a fresh encryption, and 2^-frac_bits where it was rounded. The
    ciphertexts' bound is 2^value_bits.

    Raises:
        ScaleError: value_bits, the fraction bits, security_bits and log2 of the number of elements, rounded up, are
            more than 61 together, as x + r has to stay below 2^62; it says what would do. Nothing was sent.
        SlotError: more samples than slots.
        RangeExceededError: a value on which x depends left its range; A and S see that no message follows.
        UnsupportedOpError: of a scheme with verified=True.
    """
    _check_trusting(x.scheme)
    refuse_infinite(x, "an encryption of shares")
    x.session.answering_party(x.party)
    public = keys.public if isinstance(keys, Keys) else keys
    p = public.parameters
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = x.shares.shape, x.dtype
    if not len(shape) or not shape[0] or shape[0] > p.slots:
        raise SlotError(f"a tensor of shape {tuple(shape)} does not fit {p.slots} slots, a batch in dimension 0")
    if frac_bits is not None and (type(frac_bits) is not int or frac_bits < 0):
        raise ArgumentError(f"frac_bits must be a whole number from 0 on, got {frac_bits!r}; leave it out to keep all")
    scale_bits = x.scale_bits if frac_bits is None else min(x.scale_bits, frac_bits)
    width = scale_bits + value_bits
    bits = mask_bits(width, math.prod(shape), security_bits)
    if bits > _OPENED:
        raise ScaleError(_without_room(math.prod(shape), value_bits, scale_bits, security_bits))
    if p.depth < 1:
        raise ArgumentError("the keys need a depth of at least one")
    scale = p.scales[p.depth - 1] * p.primes[p.depth]
    x.check_range()
    matrix = (_cosines(p.degree, shape[0]) * (scale / 2.0**scale_bits * 2 / p.degree)).round_().to(torch.int64).t()
    rows = math.prod(shape[1:])
    form = Cipher(torch.empty(rows, 2, p.depth + 1, p.degree, dtype=torch.int64), public)

    def add_to_message(data: torch.Tensor, value: torch.Tensor, change: Callable) -> torch.Tensor:
        data = data.clone()
        for j, q in enumerate(p.primes):
            columns = value.reshape(shape[0], rows).remainder(q).contiguous()
            message = dot(matrix.contiguous(), columns, q).t().contiguous()
            data[:, 0, j] = change(data[:, 0, j].contiguous(), transform(p.degree, q).forward(message), q)
        return data

    with x.session.operation(x.party) as net:
        shares, excess = x.shares, x.scale_bits - scale_bits
        if not isinstance(shares, Shares):
            raise ArgumentError("a tensor of a reference session is in nobody's shares; there is nothing to encrypt")
        while excess:
            shift = min(MAX_SHIFT, excess)
            shares, excess = truncate(net, shares, shift), excess - shift
        r = net.fresh(net.A, lambda: (random_words(math.prod(shape)).view(shape) & ((1 << bits) - 1)) + (1 << width))
        sealed = _sealed_by_Q(net, shares, r, lambda opened: add_to_message(zeros(form).contiguous(), opened, plus_))
        data = net.read(compute(add_to_message, sealed, r, minus_), net.A)  # A takes its mask off
    largest = 2.0**value_bits
    matrix_error = SIGMAS * math.sqrt(p.degree * shape[0] / 12) * largest * 2.0**scale_bits / scale
    error = fresh_error(p.degree, p.scales[p.depth - 1]) + matrix_error + 2.0**-scale_bits
    known = check_capacity(replace(form, data=data, pending=1, largest=largest, error=error), "a conversion")
    return CKKSTensor(known, shape[0], tuple(shape[1:]), dtype)


def _check_trusting(scheme: Scheme) -> None:
    """Raise UnsupportedOpError where Q is not trusted, since nothing proves what it sends in a conversion."""
    if scheme.verified:
        raise UnsupportedOpError("with verified=True there is no proof of what Q sends in a conversion to or from CKKS")


def _without_room(count: int, value_bits: int, scale_bits: int, security_bits: int) -> str:
    """The text of the error for masks that do not fit, with the ways out."""
    spare = _OPENED - value_bits - scale_bits - security_bits
    fitting = _OPENED - value_bits - security_bits - (count - 1).bit_length()
    ways = [f"convert at most {1 << spare} elements a call"] if spare >= 0 else []
    ways += [f"round first with frac_bits={fitting}"] if fitting >= 0 else []
    bits = mask_bits(scale_bits + value_bits, count, security_bits)
    return (
        f"{count} elements of {value_bits} value and {scale_bits} fraction bits, hidden within 2^-{security_bits} "
        f"together, need masks of {bits} bits, and x + r has room for {_OPENED}; "
        f"{', or '.join([*ways, 'lower value_bits or security_bits'])}"
    )


# Additive shares modulo the ciphertext modulus, beside those mod 2^64: the factor of `E @ share`.
#
# x = x' + x'' mod Q, x' uniform. Sharing modulo the modulus of the encryption, and not modulo a field of its own, makes
# enc(w) x' + enc(w) x'' = enc(w) x hold exactly: a mask costs no precision, and nothing of the wrapped sum is left for
# the party that decrypts (the "modulo" step of SecSV, section 5.1, is not needed). Source: SecSV, section 2.


@dataclass(frozen=True)
class ResidueRing:
    """Integers modulo Q as residues int64 [primes, ...], and fixed-point numbers with so many fraction bits in them.

    Its functions give shapes of shapes.
    """

    primes: tuple[int, ...]
    frac_bits: int

    @property
    def first(self) -> ResidueRing:
        """The first prime alone: enough for labels, and a third of the work."""
        return ResidueRing(self.primes[:1], self.frac_bits)

    @property
    def bits(self) -> float:
        return math.log2(math.prod(self.primes))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        """[primes, ...] modulo each prime, in place."""
        return x.remainder_(torch.tensor(self.primes, device=x.device).view(-1, *[1] * (x.dim() - 1)))

    def reduce(self, integers: torch.Tensor) -> torch.Tensor:
        """Integers [...] -> residues [primes, ...]."""
        return self._reduced(integers.repeat(len(self.primes), *[1] * integers.dim()))

    def encode(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        """round(x * 2^(times * frac_bits)) as residues. Error: half a unit.

        Raises:
            NonFiniteError, FixedPointRangeError: NaN or infinity; |x| of 2^14 and more.
        """
        if x.is_meta:
            return self.reduce(x.to(torch.int64))
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError("a feature is NaN or infinite")
        if x.numel() and float(x.abs().max()) >= 2.0**14:
            raise FixedPointRangeError(f"features must stay below 2^14, got {float(x.abs().max()):.3g}; scale them")
        return self.reduce((x.double() * 2.0 ** (times * self.frac_bits)).round().to(torch.int64))

    def share(self, residues: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two halves, the first uniform."""
        if residues.is_meta:
            return torch.empty_like(residues), torch.empty_like(residues)
        mask = uniform(tuple(residues.shape[1:]), self.primes)
        return mask, self._reduced(residues - mask)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._reduced(x + y)

    def subtract(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._reduced(x - y)

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Element by element; primes below 2^31 keep products in int64."""
        return self._reduced(x * y)

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Residues [primes, k, m] -> their sums over k."""
        return self._reduced(x.sum(dim=1))

    def small(self, residues: torch.Tensor) -> torch.Tensor:
        """The integers in [-q_0/2, q_0/2) that have these residues, from the first prime; int64."""
        q = self.primes[0]
        return torch.where(residues[0] > q // 2, residues[0] - q, residues[0])

    def mask(self, shape: tuple[int, ...]) -> torch.Tensor:
        """rho for `truncate`: residues of integers uniform in [0, Q/4), as mixed-radix digits (see `shifted`)."""
        digits = uniform(shape, self.primes)
        digits[-1] //= 4
        return self._residues(digits)

    def _residues(self, digits: torch.Tensor) -> torch.Tensor:
        """d_0 + q_0 d_1 + q_0 q_1 d_2 + .. as residues."""
        total, weight = torch.zeros_like(digits), 1
        for digit, prime in zip(digits, self.primes, strict=True):
            factors = torch.tensor([weight % q for q in self.primes]).view(-1, *[1] * digit.dim())
            total = self.add(total, self.multiply(self.reduce(digit), factors.expand_as(total)))
            weight *= prime
        return total

    def shifted(self, residues: torch.Tensor) -> torch.Tensor:
        """floor(v / 2^frac_bits) of the integer v in [0, Q) with these residues, as residues.

        v = d + q_0 D with D < Q / q_0 < 2^46. With q_0 = a 2^f + b, floor(v / 2^f) = a D + floor((b D + d) / 2^f): the
        second term fits int64, and a D does too where Q < 2^76.
        """
        q, f = self.primes[0], self.frac_bits
        digits = self._digits(residues)
        rest, weight = torch.zeros_like(digits[0]), 1
        for digit, prime in zip(digits[1:], self.primes[1:], strict=True):
            rest = rest + digit * weight
            weight *= prime
        a, b = q >> f, q & ((1 << f) - 1)
        return self.reduce(a * rest + ((b * rest + digits[0]) >> f))

    def _digits(self, residues: torch.Tensor) -> list[torch.Tensor]:
        """Garner's mixed-radix digits."""
        digits: list[torch.Tensor] = []
        for j, q in enumerate(self.primes):
            rest, weight = residues[j].clone(), 1
            for digit, below in zip(digits, self.primes, strict=False):
                rest = (rest - digit.remainder(q) * (weight % q)).remainder_(q)
                weight *= below
            digits.append((rest * pow(weight, -1, q)).remainder_(q))
        return digits
