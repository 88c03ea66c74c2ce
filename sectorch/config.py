"""How values are represented, which protocols compute on them, and what range they keep to."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch

from .deprecation import deprecate
from .errors import ArgumentError, FixedPointRangeError
from .ring.fixed_point import FRAC_BITS, reaches

LEAST_FRAC_BITS = 10
"""Fewer fraction bits than this are not worth computing with, and none is chosen so."""
LEAST_CHOSEN = 16
"""Fewer than this are taken only where they are named: results may lose digits that matter."""
LEAST_GAIN_BITS = 6
"""Bits that a format that is chosen leaves to sums of products: averages add so many, and their weights sum to one."""


class WeightNeed(NamedTuple):
    """What a weight asks of a number format."""

    label: str
    total: float = 0.0
    """What the weights of one output sum to in magnitude."""
    summand: float = 0.0
    """The largest magnitude of what is added to activations."""


def reason_of(needs: Sequence[WeightNeed]) -> str:
    """Why these weights need another format, by the one that needs most."""
    most = max(needs, key=lambda need: max(need.total, need.summand))
    if most.summand >= most.total:
        return f"since {most.label}, which is added to activations, reaches {most.summand:.4g}"
    return f"since {most.label} sums to {most.total:.4g} in magnitude over the weights of one output"


NEEDS: ContextVar[list[WeightNeed] | None] = ContextVar("needs", default=None)
VANISHED: ContextVar[list[float] | None] = ContextVar("vanished", default=None)
"""Where the public numbers are noted that count as 0, since they are below half the last place."""
"""Where the owner's checks note what its weights need, in place of an error for the first that does not fit."""

RELU_MODES = ("exact", "privhfl")
MOST_AUDITED = 64


@dataclass(frozen=True)
class Link:
    """The connection of each party to S, by its round trip and its rate.

    Args:
        rtt_ms: milliseconds of a round trip, 0.001 to 60,000. A message takes half of it.
        mbit: millions of bits a second in each direction, 0.01 to 1,000,000.

    Raises:
        ArgumentError: no number, or one out of its range.
    """

    rtt_ms: float
    mbit: float

    def __post_init__(self):
        for name, unit, low, high in (("rtt_ms", "ms", 0.001, 60e3), ("mbit", "Mbit/s", 0.01, 1e6)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:  # nan is in no range
                raise ArgumentError(f"{name} of a link is a number of {unit} from {low:g} to {high:g}, got {value!r}")
            object.__setattr__(self, name, float(value))  # 50 and 50.0 are one link in text too

    def __str__(self) -> str:
        return f"{self.rtt_ms:.4g} ms, {self.mbit:.4g} Mbit/s"

    @property
    def round_bytes(self) -> int:
        """The bytes that one message less on the way is worth: those that both directions carry while it travels."""
        return round(self.rtt_ms * self.mbit * 125)

    def seconds(self, rounds: int, size: int) -> float:
        """Seconds of a chain of `rounds` messages, of which the busiest direction carries `size` bytes in all."""
        return rounds * self.rtt_ms / 2e3 + 8 * size / (1e6 * self.mbit)


LINKS = {"lan": Link(rtt_ms=0.5, mbit=1048.576), "wan": Link(rtt_ms=50, mbit=100)}
"""The links that have names. A round of "lan" is worth 2^16 bytes."""
LEAST_RTT_MS = 5.0
"""Where a round trip is shorter, the processor takes longer for the protocols of few rounds than they save."""


def link_of(network: str, rtt_ms: float | None = None, mbit: float | None = None) -> Link:
    """The link of a name, with other numbers where they are given.

    Raises:
        ArgumentError: no name of a link, or numbers that are out of their range.
    """
    if not isinstance(network, str) or network not in LINKS:
        raise ArgumentError(
            f"network must be one of {', '.join(LINKS)} or a Link(rtt_ms=..., mbit=...), got {network!r}"
        )
    named = LINKS[network]
    return Link(named.rtt_ms if rtt_ms is None else rtt_ms, named.mbit if mbit is None else mbit)


@dataclass(frozen=True)
class Scheme:
    """How values are represented and which protocols compute on them; travels with every tensor.

    Where neither `frac_bits` nor `limit_bits` is named (20 and none), a secure module whose weights 20 fraction bits do
    not hold beside activations below 4096 takes fewer fraction bits, 16 at least. All parties learn that.

    Args:
        frac_bits: fraction bits f of the fixed-point numbers. Errors of a layer are of the order of 2^-f.
        relu: "exact" (leak-free) or "privhfl", the paper's protocol, which shows Q the sign and the size of every
            activation. Only `relu` itself changes: maxima and clamps stay exact. Every activation below the limit is
            right, as with "exact", and a check beside each ReLU sees to that.
        network: the parties' link, `Link(rtt_ms=..., mbit=...)`, or the name of one: "lan" (0.5 ms and 1 Gbit/s) or
            "wan" (50 ms and 100 Mbit/s). It decides between bytes and rounds: where a round trip takes 5 ms or more and
            carries more than 64 KiB, ReLU, max-pooling and truncation take half the rounds, and the offline phase sends
            some five times as many bytes for them; with "wan" up to 1,024 elements are compared by function secret
            sharing. Results are the same on every link; `explain` estimates the seconds of each. All parties learn it.
        range_check: check, securely, that activations stay below the limit: where one does not, Q gets
            `RangeExceededError` and no result, and A and S learn nothing. Without it model and inputs are trusted: a
            value beyond the range gives a wrong result without an error, which also depends on the parties' masks.
        limit_bits: inputs and activations stay below 2^limit_bits in magnitude, which is public; 12 with 20 fraction
            bits unless named, which leaves the weights of one output a sum of 2^9 (`gain`), as A checks. Without range
            checks a limit that is named is taken for granted: comparisons look at no plane above it.
        audited: of how many calls that Q promises to deal one is used: A and S draw which, and A recomputes the others
            before. A Q that deals falsely is caught with a probability of 1 - 1/audited, with evidence that it has
            signed. 1: Q is trusted to deal as it should. See docs/audited.md.
        verified: Q proves to A and S what it deals, before anything that depends on it is shown to Q: a Q that deals
            falsely is found out but for a probability of 2^-40. For linear layers, convolutions, ReLU, maxima, pooling
            and truncation in the lan protocols; anything else is refused. With range checks Q's input is checked as
            activations are, whatever Q shares. See docs/verified.md.
        accountable: S signs what it receives and sends in each call, and each call has keys of its own, so that Q can
            mix calls on made-up inputs among its own (`decoys`) and A computes S's messages of those again. An S that
            computes wrongly is found out with the rate of decoys, with evidence that it has signed. For whole calls of
            a secure module whose result Q learns, with one answering party and a trusted Q. See docs/decoys.md.

    Raises:
        ArgumentError: a field that is out of its range, or fields that leave no room for products.
        TypeError: a field that there is none of, with the nearest.
    """

    frac_bits: int = FRAC_BITS
    relu: str = "exact"
    network: str | Link = "lan"
    range_check: bool = True
    limit_bits: int | None = None
    audited: int = 1
    verified: bool = False
    accountable: bool = False

    def __post_init__(self):
        bits = (self.frac_bits, 1 if self.limit_bits is None else self.limit_bits)
        if any(type(value) is not int for value in bits):
            raise ArgumentError(f"frac_bits and limit_bits are whole numbers, got {bits[0]!r} and {bits[1]!r}")
        if not 1 <= self.frac_bits <= 26:
            raise ArgumentError(
                f"frac_bits must be between 1 and 26 (products need twice as many), got {self.frac_bits}"
            )
        if self.relu not in RELU_MODES:
            raise ArgumentError(f"relu must be one of {', '.join(RELU_MODES)}, got {self.relu!r}")
        if not isinstance(self.network, Link):
            link_of(self.network)
        elif self.network in LINKS.values():  # one scheme for one link: parties compare it
            object.__setattr__(self, "network", next(name for name, link in LINKS.items() if link == self.network))
        if type(self.audited) is not int or not 1 <= self.audited <= MOST_AUDITED:
            raise ArgumentError(f"audited is a whole number of calls, 1 to {MOST_AUDITED}, got {self.audited!r}")
        if type(self.verified) is not bool or (self.verified and self.audited != 1):
            raise ArgumentError(
                f"verified is True or False, and proves what audited=n only looks at: name one of the two, got "
                f"verified={self.verified!r} and audited={self.audited}"
            )
        if self.verified and (self.few_rounds or self.relu != "exact"):
            raise ArgumentError(
                f"verified=True covers the exact protocols of fast links such as network='lan', got "
                f"network={self.network!r} and "
                f"relu={self.relu!r}; audited=n covers all"
            )
        if type(self.accountable) is not bool or (self.accountable and (self.verified or self.audited != 1)):
            raise ArgumentError(
                f"accountable is True or False, and Q is trusted to deal then: leave audited and verified out, got "
                f"accountable={self.accountable!r}, verified={self.verified!r} and audited={self.audited}"
            )
        if self.limit_bits is not None and not 1 <= self.limit_bits <= 61 - 2 * self.frac_bits:
            raise ArgumentError(
                f"activations below 2^{self.limit_bits} leave no room for weights beside 2 x {self.frac_bits} fraction "
                f"bits: limit_bits is between 1 and {61 - 2 * self.frac_bits}"
            )

    @property
    def activation_bits(self) -> int:
        """`limit_bits`, or four of seven of the bits that products leave to whole numbers: 12 with 20 fraction bits.

        Functions and norms are right for arguments below 2^(56 - 2f); no more than that, where nothing is named.
        """
        bits = min((61 - 2 * self.frac_bits) * 4 // 7, 56 - 2 * self.frac_bits)
        return bits if self.limit_bits is None else self.limit_bits

    @property
    def activation_limit(self) -> float:
        """What every activation is below in magnitude; beyond it there is an error, and no result."""
        return 2.0**self.activation_bits

    @property
    def gain(self) -> float:
        """What the weights of one output may sum to in magnitude: then no sum of products leaves the ring."""
        return 2.0 ** (61 - 2 * self.frac_bits - self.activation_bits) * 63 / 64

    @property
    def chooses(self) -> bool:
        """Whether no format was named: then a module takes the most precise one that holds its weights."""
        return self.frac_bits == FRAC_BITS and self.limit_bits is None

    def holding(self, needs: Iterable[WeightNeed]) -> Scheme | None:
        """The scheme itself if it holds these weights, or one of fewer fraction bits, which has the same activation
        limit or a larger one; None where less than `LEAST_FRAC_BITS` would be left."""
        needs = list(needs)
        total = max((need.total for need in needs), default=0.0)
        summand = max((need.summand for need in needs), default=0.0)
        if total <= self.gain and summand < self.activation_limit:
            return self
        room = max(LEAST_GAIN_BITS, math.ceil(math.log2(max(total, 1.0) * 64 / 63)))
        limit = max(self.activation_bits, math.frexp(summand)[1])
        bits = min(self.frac_bits, (61 - limit - room) // 2)
        if bits < LEAST_FRAC_BITS:
            return None
        return replace(self, frac_bits=bits, limit_bits=limit)

    def chosen(self, needs: Iterable[WeightNeed]) -> Scheme | None:
        """What a module takes for these weights where no format was named; None where somebody has to name it."""
        made = self.holding(needs)
        return made if made is not None and made.frac_bits >= min(self.frac_bits, LEAST_CHOSEN) else None

    def way_out(self, needs: Iterable[WeightNeed]) -> str:
        """What to do about weights that this format does not hold."""
        made = self.holding(needs)
        if made is None:
            return (
                f"normalise these layers: no format of {LEAST_FRAC_BITS} fraction bits or more holds them beside "
                f"activations below {self.activation_limit:g}"
            )
        return f"use Scheme(frac_bits={made.frac_bits}, limit_bits={made.limit_bits}), or normalise the layer"

    def check_trusting(self) -> None:
        """Raise ArgumentError where Q or S is not trusted, for what is not checked."""
        if self.accountable:
            raise ArgumentError(
                "S signs what it computes in whole calls of a secure module whose result Q learns; with tensors in "
                "shares, operation by operation, in training and among several answering parties it is trusted: leave "
                "accountable=True out"
            )
        if self.audited != 1:
            raise ArgumentError(
                "dealing is audited in whole calls of a secure module whose result Q learns; with tensors in shares, "
                "operation by operation, in training and among several answering parties Q is trusted: audited=1"
            )

    @property
    def link(self) -> Link:
        """The link that `network` is, or names."""
        return self.network if isinstance(self.network, Link) else LINKS[self.network]

    @property
    def few_rounds(self) -> bool:
        """Whether few rounds count for more than few bytes that are sent ahead."""
        return self.link.rtt_ms >= LEAST_RTT_MS and self.link.round_bytes > LINKS["lan"].round_bytes

    def fields(self) -> dict[str, Any]:
        """The fields as JSON has them; `scheme_of_fields` reads them."""
        return asdict(self)


def unexpected_keyword(call: str, name: str) -> str:
    """What a TypeError says of a keyword argument that a call does not take, with the nearest field of a scheme."""
    near = difflib.get_close_matches(name, Scheme.__dataclass_fields__, 1)
    way = f"; did you mean Scheme({near[0]}=...)?" if near else ""
    return f"{call}() got an unexpected keyword argument '{name}'{way}"


def _with_nearest_field(made: Callable[..., None]) -> Callable[..., None]:
    """Scheme's `__init__`, which names the nearest field where a keyword is misspelt; its signature is the fields'."""
    made.__annotations__ = get_type_hints(made)  # types in place of their names, for whoever asks for the signature

    @functools.wraps(made)
    def init(self: Scheme, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in Scheme.__dataclass_fields__:
                raise TypeError(unexpected_keyword("Scheme", name))
        made(self, *args, **kwargs)

    return init


Scheme.__init__ = _with_nearest_field(Scheme.__init__)


def scheme_of_fields(fields: Mapping[str, Any]) -> Scheme:
    """The scheme of these fields, which another process sent or wrote: a link is a table of its numbers there.

    Raises:
        ArgumentError: there is no such scheme.
    """
    network = fields.get("network", "lan")
    return Scheme(**{**fields, "network": Link(**network) if isinstance(network, Mapping) else network})


def scheme_of(call: str, scheme: Scheme | str | None) -> Scheme:
    """The scheme that a call names: the default one, a Scheme, or that of a network.

    Raises:
        ArgumentError: neither.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if scheme is None:
        return Scheme()
    if not isinstance(scheme, str):
        raise ArgumentError(f"{call}() takes a Scheme, got a {type(scheme).__name__}; write Scheme(frac_bits=...)")
    if scheme not in LINKS:
        raise ArgumentError(f"{call}() takes a Scheme, or a network: {' or '.join(LINKS)}; got {scheme!r}")
    return Scheme(network=scheme)


OLD_KEYWORDS = ("relu", "frac_bits", "network", "range_check", "activation_limit")
F = TypeVar("F", bound=Callable[..., Any])


def scheme_fields(f: F) -> F:
    """Let a function with a parameter `scheme` take what 0.1 took in its place, with a warning.

    That is fields of the scheme as keywords, and the ReLU as a string. The signature does not show them.

    Raises (by the function that is made):
        ArgumentError: a Scheme and old keywords beside it.
        TypeError: a keyword that never was.

    Warns (by the function that is made):
        DeprecationWarning: with what to write instead.
    """
    call, names = f.__name__, list(inspect.signature(f).parameters)
    place = names.index("scheme")

    @functools.wraps(f)
    def taking(*args: Any, **kwargs: Any) -> Any:
        old = {name: kwargs.pop(name) for name in list(kwargs) if name not in names}
        scheme = args[place] if len(args) > place else kwargs.get("scheme")
        if not old and not (isinstance(scheme, str) and scheme in RELU_MODES):
            return f(*args, **kwargs)
        if kwargs.get("backend") == "ckks":
            raise ArgumentError(f"{', '.join(old) or 'scheme'}: of shares, and not used by backend='ckks'")
        made = _of_old_form(call, scheme, old)
        if len(args) > place:
            return f(*args[:place], made, *args[place + 1 :], **kwargs)
        return f(*args, **kwargs | {"scheme": made})

    return taking  # pyright: ignore[reportReturnType]


def _of_old_form(call: str, scheme: Any, old: dict[str, Any]) -> Scheme:
    for name in old:
        if name not in OLD_KEYWORDS:
            raise TypeError(unexpected_keyword(call, name))
    fields = {name: value for name, value in old.items() if name != "activation_limit"}
    if old.get("activation_limit") is not None:
        fields["limit_bits"] = limit_bits_of(old["activation_limit"])
    wrote = [f"{name}=" for name in old]
    if isinstance(scheme, str) and scheme in RELU_MODES and "relu" not in old:
        scheme, fields, wrote = None, {"relu": scheme, **fields}, [repr(scheme), *wrote]
    if scheme is not None:
        raise ArgumentError(f"{call}() was given a Scheme and {', '.join(old)} beside it; name them in the Scheme")
    named = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    deprecate(f"{call}(..., {', '.join(wrote)})", f"{call}(..., Scheme({named}))", stacklevel=4)
    return Scheme(**fields)


def limit_bits_of(limit: float) -> int:
    """The bits of an activation limit.

    Raises:
        ArgumentError: no power of two from 2 on.
    """
    if not isinstance(limit, (int, float)) or limit < 2 or math.frexp(limit)[0] != 0.5:
        raise ArgumentError(f"activation_limit is a power of two from 2 on, got {limit!r}")
    return math.frexp(limit)[1] - 1


def check_limit(x: torch.Tensor, scheme: Scheme, what: str = "the input") -> None:
    """Raise `FixedPointRangeError` unless an input is below the activation limit; whole numbers may be anything."""
    if scheme.range_check and x.is_floating_point() and x.numel() and not x.is_meta:
        largest = float(x.abs().max())
        if reaches(largest, scheme.activation_limit, scheme.frac_bits):
            bits = math.frexp(largest * (1 + 2.0**-20))[1]
            less = scheme.frac_bits - (bits - scheme.activation_bits + 1) // 2  # then weights have the room they had
            way = f", or take Scheme(frac_bits={less}, limit_bits={bits})" if less >= LEAST_FRAC_BITS else ""
            raise FixedPointRangeError(
                f"{what} reaches magnitude {largest:.6g}, and activations are below {scheme.activation_limit:g} "
                f"with {scheme.frac_bits} fraction bits; scale it down{way}; secure(model, calibrate=batch) chooses a "
                f"format by typical inputs"
            )
