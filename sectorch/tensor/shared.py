"""SharedTensor, a tensor in additive shares that computes like a torch tensor, and how one is shared and revealed.

`share_tensor` makes one, `SharedTensor.reveal` opens it. `ComplexShared` is a complex tensor of two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..backend import MAX_SHIFT, Backend, RaisedFlags, Value
from ..choreography import Party, Phase, leaf
from ..choreography.declaration import plain
from ..choreography.located import compute
from ..config import Scheme as Scheme
from ..config import scheme_of
from ..deprecation import renamed_attribute
from ..display import Facts
from ..errors import ArgumentError, DtypeError, FixedPointRangeError, RangeExceededError, ShapeError
from ..ring import HEADROOM_BITS, check_encodable, decode, encode, range_limit, reaches
from ..session import Session, default_session
from .secret import SecretTensor, dtype_of

# Numbers that stand for infinity (stand-ins), and the public mark of a shared tensor that may hold some.
#
# Fixed point has no infinity, and no number from 2^(62 - 2 f) on. A public one that a program chooses (`masked_fill`,
# `where`, a mask that is added) becomes a number of magnitude `size_of` in shares, beyond every activation. The tensor
# is marked by an `Infinite`: the signs that may occur, and what they stand for. The mark is public, like a shape.
# `ops/infinity.py` has the rules of the operations.


UNKNOWN = math.nan
"""The meaning of stand-ins that stand for several numbers, or for one that was not computed."""


@dataclass(frozen=True)
class Infinite:
    """The mark of a shared tensor that may hold stand-ins.

    Attributes:
        low, high: the meaning of the negative and of the positive stand-ins: an infinity, a public number beyond the
            range, or `UNKNOWN`; None if there are none.
        size: the magnitude of a stand-in if `exact`; otherwise a lower bound.
        threshold: between numbers and stand-ins: a lower bound of these, and above the magnitude of every number.
        exact: whether no stand-in was scaled or added to.
        at: public positions, boolean and of the tensor's shape, outside of which there are none; None if they may be
            anywhere.
        certain: whether each of these positions holds one.
        unchecked: shared summands of these stand-ins that have not been checked against the activation limit yet.
    """

    low: float | None = None
    high: float | None = None
    size: float = 0.0
    threshold: float = 0.0
    exact: bool = True
    at: torch.Tensor | None = None
    certain: bool = False
    unchecked: tuple[Any, ...] = ()

    def with_changes(self, **changes: Any) -> Infinite | None:
        """A copy with other attributes; None if no sign is left."""
        changed = replace(self, **changes)
        return None if changed.low is None and changed.high is None else changed

    @property
    def known(self) -> tuple[str, str, float, bool]:
        """The attributes that a program depends on."""
        return repr(self.low), repr(self.high), self.size, self.exact


def size_of(scheme: Scheme, dtype: torch.dtype) -> float:
    """The magnitude of stand-ins in a tensor of this dtype.

    Four times the activation limit, or less where a scale does not hold that; among whole numbers the largest one.
    """
    if not dtype.is_floating_point:
        return range_limit(scheme.frac_bits) - 1
    return min(4 * scheme.activation_limit, 2.0 ** (HEADROOM_BITS - 8 - 2 * scheme.frac_bits))


def mask_beyond_range(scheme: Scheme, value: Any) -> torch.Tensor | None:
    """A mask of the entries of a public operand that are beyond the range of fixed point; None if there are none."""
    limit = range_limit(scheme.frac_bits)
    if isinstance(value, (bool, complex, SecretTensor)):
        return None
    if isinstance(value, (int, float)):
        return torch.tensor(True) if abs(value) >= limit - 0.5 * 2.0**-scheme.frac_bits else None
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or value.is_complex() or value.is_quantized:
        return None
    if value.is_meta or value.layout != torch.strided or not value.numel():
        return None
    with torch._C.DisableTorchFunction():
        value = value.detach()
        found = (value >= limit) | (value <= -limit)
        return found if bool(found.any()) else None


def common_value(values: torch.Tensor) -> float | None:
    """The value that all entries have; `UNKNOWN` if they differ, None if there are none."""
    if not values.numel():
        return None
    first = float(values.flatten()[0])
    return first if bool((values == values.flatten()[0]).all()) else UNKNOWN


def _either(x: float | None, y: float | None) -> float | None:
    """The meaning of the stand-ins of two tensors together."""
    return y if x is None else x if y is None or x == y else UNKNOWN


def join_infinite(*parts: Infinite | None, at: torch.Tensor | None = None, certain: bool = False) -> Infinite | None:
    """The mark of a tensor that consists of elements of several tensors."""
    made: Infinite | None = None
    for part in parts:
        if part is None:
            continue
        if made is None:
            made = replace(part, at=None)
            continue
        made = replace(
            made,
            low=_either(made.low, part.low),
            high=_either(made.high, part.high),
            size=min(made.size, part.size),
            threshold=min(made.threshold, part.threshold),
            exact=made.exact and part.exact and made.size == part.size,
            unchecked=made.unchecked + part.unchecked,
        )
    return None if made is None else replace(made, at=at, certain=certain)


def infinite_of(x: Any) -> Infinite | None:
    """The mark of a tensor; None for a number, and for a tensor without stand-ins."""
    return getattr(x, "infinite", None) if isinstance(x, SecretTensor) else None


def refuse_infinite(x: Any, what: str) -> None:
    """Refuse a tensor that may hold stand-ins, for operations without a rule.

    Raises:
        FixedPointRangeError: x is marked.
    """
    if infinite_of(x) is not None:
        raise FixedPointRangeError(
            f"{what} takes no tensor that may hold infinities or numbers beyond the range; bound it first: "
            f"x.clamp(-1000, 1000)"
        )


def round_to_dtype(value: float, dtype: torch.dtype) -> float:
    """A number as a tensor of this dtype holds it: an infinity if it is too large."""
    return float(torch.tensor(value, dtype=dtype)) if dtype.is_floating_point else value


def exact_infinite(scheme: Scheme, dtype: torch.dtype, low: float | None, high: float | None) -> Infinite | None:
    """The mark of exact stand-ins in a tensor of this dtype; None without a sign."""
    size = size_of(scheme, dtype)
    return Infinite(low, high, size, size / 2 if dtype.is_floating_point else size).with_changes()


def of_public(scheme: Scheme, value: Any, dtype: torch.dtype) -> tuple[Infinite | None, Any]:
    """The mark of a public operand, and the operand with stand-ins for what is beyond the range."""
    found = mask_beyond_range(scheme, value)
    if found is None:
        return None, value
    size = size_of(scheme, dtype)
    if not isinstance(value, torch.Tensor):
        number = (size if dtype.is_floating_point else int(size)) * (1 if value > 0 else -1)
        stands = round_to_dtype(float(value), dtype)
        low, high = (stands, None) if value < 0 else (None, stands)
        return exact_infinite(scheme, dtype, low, high), number
    with torch._C.DisableTorchFunction():
        value = value.detach()
        low, high = (common_value(value[found & side]) for side in (value < 0, value > 0))
        low, high = (None if v is None else round_to_dtype(v, dtype) for v in (low, high))
        put = torch.where(found, value.sign() * size, value).to(value.dtype)
    made = exact_infinite(scheme, dtype, low, high)
    return (None if made is None else replace(made, at=found, certain=True)), put


_rules: tuple[Callable[..., Any], Callable[..., Any], frozenset[str]]
"""What `ops/infinity.py` brings: the rules, the conversion to exact stand-ins, and the operations with a rule for
public numbers beyond the range."""


def set_rules(apply: Callable[..., Any], with_exact: Callable[..., Any], takes_public: frozenset[str]) -> None:
    """Called by `ops/infinity.py` when it is imported; `tensor` may not import `ops`."""
    global _rules
    _rules = apply, with_exact, takes_public


def apply_rule(context: Any, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """The result of a user's call that meets stand-ins or numbers beyond the range; NotImplemented for any other.

    Args:
        name: of the function's row in the table.
    """
    apply, _, takes_public = _rules
    leaves = pytree.tree_leaves((args, kwargs))
    marks = [mark for leaf in leaves if (mark := infinite_of(leaf)) is not None]
    if not marks and (
        name not in takes_public or all(mask_beyond_range(context.scheme, leaf) is None for leaf in leaves)
    ):
        return NotImplemented
    return apply(context, func, name, args, kwargs, marks)


def with_exact_infinities(x: Any) -> Any:
    """x with exact stand-ins, if any, so that it can be revealed."""
    return x if x.infinite is None or x.infinite.exact else _rules[1](x)


class SharedTensor(SecretTensor):
    """A tensor in additive shares mod 2^64 between an answering party, or Q (`sectorch.collect`), and the server.

    `scale_bits` is the number of fraction bits that the ring elements carry now. A linear layer leaves twice
    `scheme.frac_bits`; the next non-linear step brings them back at no cost.
    """

    shares: Value
    scale_bits: int
    aliased: bool
    """Whether other tensors share its memory in an unknown way."""
    layout_in_memory: Any
    """The position of its entries in memory that other tensors share (`dispatch.Layout`), or None."""
    bound: float | None
    """An upper bound of the elements' magnitudes, as ring elements; None inside a handler that vouches for it."""
    whole_bits: int
    """The number of lowest bits that are known to be zero: all fraction bits of a whole number."""
    infinite: Infinite | None
    """The mark of a tensor that may hold numbers that stand for infinity (`Infinite`), or None."""
    given: bool
    """Whether it is a party's own input as it was shared, or a view, a sum or a difference of such inputs."""
    constant: tuple[int, float] | None
    """(n, v): ring elements equal to n stand for the public number v, of which n has too few digits; or None."""
    counting: SharedTensor | None
    """Of a column of a filtered table: which entries of dimension 0 count. Calls that would count all are refused."""
    flags: tuple[Value, ...]
    """XOR-shared words: zero unless a value on which this one depends left its range (`mpc/star/guard.py`). Those that
    an answering party still holds of a tensor that Q holds are `CollectedFlag`s."""

    @staticmethod
    def __new__(
        cls, shares: Value, scale_bits: int, session: Session, party: Party, scheme: Scheme, dtype,
        bound: float | None = None,
    ):  # fmt: skip
        scheme.check_trusting()
        self = torch.Tensor._make_wrapper_subclass(cls, shares.shape, dtype=dtype, device=session.device)
        self.shares = shares
        self.scale_bits = scale_bits
        self.session = session
        self.party = party
        self.scheme = scheme
        self.aliased = False
        self.layout_in_memory = None
        self.bound = bound
        self.whole_bits = 0
        self.infinite = None
        self.given = False
        self.constant = None
        self.counting = None
        self.flags = ()
        return self

    if TYPE_CHECKING:  # torch's stubs say that these give a Tensor; of a shared one they give a shared one
        __add__: Callable[..., SharedTensor]
        __radd__: Callable[..., SharedTensor]
        __sub__: Callable[..., SharedTensor]
        __mul__: Callable[..., SharedTensor]
        __truediv__: Callable[..., SharedTensor]
        __neg__: Callable[..., SharedTensor]
        __getitem__: Callable[..., SharedTensor]
        abs: Callable[..., SharedTensor]
        clamp: Callable[..., SharedTensor]
        exp: Callable[..., SharedTensor]
        expand: Callable[..., SharedTensor]
        flatten: Callable[..., SharedTensor]
        mean: Callable[..., SharedTensor]
        reshape: Callable[..., SharedTensor]
        rsqrt: Callable[..., SharedTensor]
        sigmoid: Callable[..., SharedTensor]
        sum: Callable[..., SharedTensor]
        unsqueeze: Callable[..., SharedTensor]

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"SharedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, scale_bits={self.scale_bits})"

    def _repr_html_(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = tuple(self.shape), self.dtype
        most = "vouched for" if self.bound is None else f"at most {self.bound * 2.0**-self.scale_bits:.6g}"
        facts = {
            "shape, dtype": f"{shape}, {dtype}", "fraction bits": self.scale_bits, "magnitude": most,
            "held by": f"{self.party.name} and the server, half each; neither knows it",
        }  # fmt: skip
        return Facts("SharedTensor", facts)._repr_html_()

    @property
    def backend(self) -> Backend:
        """The protocols of the running call, as in `x.like(x.backend.square(x.shares), 2 * x.scale_bits)`."""
        return self.session.backend(self.session.net(self.party), self.scheme)

    def like(
        self,
        shares: Value,
        scale_bits: int | None = None,
        bound: float | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> SharedTensor:
        """These shares as a tensor of the same session, answering party, scheme and flags.

        Args:
            scale_bits, dtype: this tensor's unless given; with fraction bits a whole-number dtype becomes float32.
            bound: an upper bound of the elements' magnitudes, as ring elements; None if the caller vouches for them.
        """
        dtype = dtype or dtype_of(self)
        scale_bits = self.scale_bits if scale_bits is None else scale_bits
        dtype = torch.float32 if scale_bits and not dtype.is_floating_point else dtype
        made = SharedTensor(shares, scale_bits, self.session, self.party, self.scheme, dtype, bound)
        made.flags = self.flags
        return made

    @property
    def is_integral(self) -> bool:
        """Whether it is known to hold whole numbers, in any dtype: a comparison, a count, a mask."""
        return self.whole_bits >= self.scale_bits

    whole = renamed_attribute("whole", "is_integral")

    def bounded(self, bound: float | None) -> SharedTensor:
        """The same shares with another bound."""
        return self.like(self.shares, bound=bound)

    def with_flags(self, flags: tuple[Value, ...]) -> SharedTensor:
        """The same tensor with other range flags."""
        made = self.bounded(self.bound)
        made.whole_bits, made.infinite, made.flags = self.whole_bits, self.infinite, flags
        return made

    def unchecked(self) -> SharedTensor:
        """The same tensor without its range check: a value that left its range gives a wrong result without an error.

        For a result that is noised for privacy: whether a value left its range would be told without noise.
        """
        made = self.like(self.shares, bound=self.bound)
        made.whole_bits, made.flags = self.whole_bits, ()
        return made

    def reveal(self, to: Any = None) -> torch.Tensor:
        """The plain tensor, learned by Q and by nobody else. Rounds 2, bytes 16 per element (`mpc/star/shares.py`).

        A tensor that Q and S hold is opened as one for A: one round and 8 bytes per element, after `check_range`.

        Fraction bits beyond `frac_bits` are rounded away first (`mpc/star/truncate.py`, one round more): they would
        show the exact sums of a last linear layer.

        Args:
            to: the party that learns it, or several: a party of the session or its role ("Q", "A", "S"); Q by default.
                For A or S one round and 8 bytes per element, after `check_range`; for another owner as for Q.

        Between processes, the parties first compare what they have computed (`Agreement.compare`). A process of a
        party that does not learn the result gets a tensor without content (on the device "meta").

        Raises:
            RangeExceededError: a value on which this one depends left its range. Q learns that and nothing else.
            ArgumentError: no party of the session, or one that cannot learn a result.
            DisagreementError: the parties have not computed the same; nothing was revealed.
        """
        parties = self.session.parties_named(to, self.party)
        if self.party == self.session.Q and set(parties) & set(self.session.owners):
            raise ArgumentError(
                f"a tensor of {self.party} and the server is revealed to one of them, not to {to!r:.40}"
            )
        if parties == [self.session.Q] != [self.party]:
            self.session.agreement.note(self.party, "reveal", self)
            self.session.agreement.compare(self.party)
            return unwrap_openings(self.open())
        self.check_range()
        self.session.agreement.note(self.party, "reveal", self, [party.name for party in parties])
        self.session.agreement.compare(self.party)  # after Q's check: if Q stops, nobody goes on
        dtype, x = dtype_of(self), with_exact_infinities(self)
        with self.session.operation(self.party) as net:
            backend = self.session.backend(net, self.scheme)
            shares, scale_bits = round_shares(backend, x.shares, x.scale_bits, self.scheme)
            flags = x.flags if self.scheme.verified else ()  # otherwise Q's check is enough
            opened = [
                backend.reveal(shares, flags, party)
                if party != self.party and party in (self.session.Q, *self.session.owners)
                else (backend.reveal_to(shares, party), None)
                for party in parties
            ]
            plain = [
                Opening(
                    net.read(_decode_opened(x, y, scale_bits, dtype), party),
                    None if right is None else net.read(right, party),
                )
                for (y, right), party in zip(opened, parties, strict=True)
            ]
        plain = unwrap_openings(plain)
        return next((value for value in plain if not value.is_meta), plain[0])

    def check_range(self) -> None:
        """Check now, at Q, whether a value on which this tensor depends left its range: before shares leave sectorch.

        Rounds 2, bytes 48, if anything had to be checked; for a tensor that Q and S hold 48 for each answering party
        that it was collected from. The other parties see whether Q goes on.

        Raises:
            RangeExceededError: a value left its range.
        """
        if not self.flags:
            return
        if self.party != self.session.Q:
            self.flatten()[:0].reveal()
            return
        raised = [flag for flag in self.flags if not isinstance(flag, CollectedFlag)]
        of_party: dict[Party, list[Value]] = {self.session.answering[0]: []} if raised else {}
        for flag in self.flags:
            if isinstance(flag, CollectedFlag):
                of_party.setdefault(flag.party, []).append(flag.value)
        with ExitStack() as calls:
            own = self.session.backend(calls.enter_context(self.session.call(self.party)), self.scheme)
            nets = [calls.enter_context(self.session.call(party)) for party in of_party]
            others = [self.session.backend(net, self.scheme) for net in nets]
            right = own.check_flags(raised, list(zip(others, of_party.values(), strict=True)))
            right = None if right is None else nets[0].read(right, self.session.Q)
        unwrap_openings(Opening(torch.empty(0), right))

    def open(self) -> Opening:
        """The opened tensor with its range check, which `unwrap_openings` evaluates. `reveal` does both."""
        dtype = dtype_of(self)
        Q, x = self.session.Q, with_exact_infinities(self)
        with self.session.operation(self.party) as net:
            backend = self.session.backend(net, self.scheme)
            shares, scale_bits = round_shares(backend, x.shares, x.scale_bits, self.scheme)
            opened, right = backend.reveal(shares, x.flags)
            plain = _decode_opened(x, opened, scale_bits, dtype)
            return Opening(net.read(plain, Q), None if right is None else net.read(right, Q))


def _decode_opened(x: SharedTensor, opened: Value, scale_bits: int, dtype: torch.dtype) -> Any:
    """The opened elements of x as plain numbers, at the party that reads them."""
    mark = x.infinite
    if mark is None:
        return compute(decode, opened, scale_bits, dtype)
    if any(v is not None and math.isnan(v) for v in (mark.low, mark.high)):
        if not dtype.is_floating_point:
            raise FixedPointRangeError(
                "a result may hold whole numbers beyond the range of fixed point, which keep no digits; take "
                "Scheme(frac_bits=1, limit_bits=59), or add large numbers after revealing"
            )
        raise FixedPointRangeError(
            "a result may hold numbers beyond the range of fixed point that do not all stand for the same one, and "
            "which of them it is nobody knows; fill with one number, or with one that is in the range (-1e4, say)"
        )
    return compute(decode_infinite, opened, scale_bits, dtype, repr(mark.low), repr(mark.high), mark.size)


def decode_infinite(
    elements: torch.Tensor, scale_bits: int, dtype: torch.dtype, low: str, high: str, size: float
) -> torch.Tensor:
    """As `decode`, for elements of which those of magnitude `size` stand for numbers beyond the range."""
    plain = decode(elements, scale_bits, dtype)
    for sign, text in ((-1, low), (1, high)):
        if text != "None":
            found = elements == sign * round(size * 2.0**scale_bits)
            if dtype.is_floating_point:
                value = torch.tensor(float(text), dtype=torch.float64).to(dtype)
            elif dtype == torch.bool:
                value = torch.tensor(True)
            else:  # 2^63, as a float has the largest number, is one too many
                least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
                value = torch.tensor(max(least, min(most, int(float(text)))), dtype=dtype)
            plain = torch.where(found, value, plain)
    return plain


class CollectedFlag(NamedTuple):
    """A range flag of a tensor that Q holds, which an answering party and S hold since before it was collected."""

    party: Party
    value: Value


class Opening(NamedTuple):
    """A revealed tensor at its reader, and whether it is right: one bit, or None if there was nothing to check."""

    plain: torch.Tensor
    right: torch.Tensor | None


LEFT_RANGE = (
    "a value between input and result left the range in which results are right, so there is no result (which value "
    "it was, nobody learned). "
)
BY_SIZE = (
    "If a value is too large: scale the input down, or choose a format for such inputs, secure(model, calibrate=batch) "
    "or Scheme(frac_bits=..., limit_bits=...)"
)
BY_ZERO = (
    "if a logarithm, root, inverse or quotient is of a number that is zero or less, or gives one beyond the limit, "
    "guard it, as in log(x.clamp(min=1e-6)) and x / (y + 1e-3)"
)


def unwrap_openings(outputs: Any) -> Any:
    """Replace each `Opening` in a tree by its plain tensor.

    Raises:
        RangeExceededError: a value on which one of them depends left its range.
    """

    def plain(y: Any) -> Any:
        if not isinstance(y, Opening):
            return y
        if y.right is not None and not y.right.is_meta and not bool(y.right):
            raise RangeExceededError(LEFT_RANGE + BY_SIZE + f"; or {BY_ZERO}")
        return y.plain

    return pytree.tree_map(plain, outputs, is_leaf=lambda y: isinstance(y, Opening))


def round_shares(backend: Backend, shares: Value, scale_bits: int, scheme: Scheme) -> tuple[Value, int]:
    """Shares rounded to at most the scheme's fraction bits, and their fraction bits."""
    while scale_bits > scheme.frac_bits:
        shift = min(MAX_SHIFT, scale_bits - scheme.frac_bits)
        shares, scale_bits = backend.truncate(shares, shift), scale_bits - shift
    return shares, scale_bits


@leaf(shapes=lambda value, *_: value.new_empty(value.shape, dtype=torch.int64))
def encoded_input(value: torch.Tensor, frac_bits: int, scale_bits: int, limit: float | None) -> torch.Tensor:
    """At its owner: an input as ring elements, after a check against the program's bound."""
    check_encodable(value, frac_bits, "the input")
    if limit is not None and value.numel() and reaches(float(value.abs().max()), limit, scale_bits):
        raise FixedPointRangeError(f"the input reaches {float(value.abs().max()):.6g}; it has to be below {limit:g}")
    return encode(value, scale_bits)


def bound_of_limit(limit: float | None, scheme: Scheme, scale_bits: int, largest: float) -> float | None:
    """The public bound of a tensor's ring elements, from the limit that its owner names; None without a range check.

    Args:
        largest: the limit where none is named, and what a larger one would not tell.

    Raises:
        ArgumentError: a limit that bounds nothing, such as NaN, with which no later check of the range would fail.
    """
    if limit is not None and not (isinstance(limit, Real) and 0 < limit < math.inf):
        raise ArgumentError(f"limit is a number above 0 that all values stay below, got {limit!r:.40}")
    return min(largest, limit or largest) * 2.0**scale_bits if scheme.range_check else None


def _check_declared(x: Any, shape: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """x, checked against a public shape and dtype; a tensor of these without content if x is None."""
    if x is None:
        if shape is None:
            raise ArgumentError("share() has neither a tensor nor its shape: name the shape, or announce it")
        return torch.empty(tuple(shape), dtype=dtype or torch.float32, device="meta")
    try:
        x = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(f"share() takes a torch tensor, or numbers that make one, got {type(x).__name__}") from None
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ShapeError(f"share() was told a tensor of shape {tuple(shape)}, and got one of {tuple(x.shape)}")
    if (dtype or shape is not None) and x.dtype != (dtype or torch.float32):
        raise DtypeError(f"share() was told a tensor of {dtype or torch.float32}, and got one of {x.dtype}")
    return x


def share_tensor(
    x: torch.Tensor | None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    limit: float | None = None,
    name: str = "x",
    owner: Any = None,
    shape: Any = None,
    dtype: torch.dtype | None = None,
) -> SharedTensor:
    """Secret-share a tensor of Q's, or another owner's, between an answering party and S (Pi_Share, PrivHFL Figure 2).

    Args:
        x: any shape; floating point, integer or bool; finite and below 2^(62 - 2 frac_bits) in magnitude. If the owner
            is in another process, a tensor without content, or None with a `shape`.
        session: the session; by default the process's own on x's device.
        party: the answering party; by default the session's first.
        scheme: the number representation, or the network, "lan" or "wan"; by default 20 fraction bits.
        limit: a public upper bound of |x|, for all x that may ever be shared by this program.
        name: of x in a traced program.
        owner: the party whose tensor it is; Q by default. A tensor of the answering party's or of S's takes no message:
            the other half is zero. An owner that holds no share (`Session(owners=)`) shares it as Q does.
        shape, dtype: a declared shape and dtype of x, to which x is held; the dtype is float32 by default.

    Rounds 1, bytes 8 per element. A learns nothing; S receives uniform bits. Error at most 2^-(frac_bits + 1). With
    `Scheme(verified=True)` A and S check by a comparison that an x of another party's is within its bound; if not, a
    reveal raises `RangeExceededError`.

    Raises:
        DtypeError, NonFiniteError, FixedPointRangeError: before anything is sent.
        ArgumentError: `party` is not an answering party of the session (it would learn x, or nobody could use it); the
            owner is not of the session; no tensor at its owner; a tensor that requires a gradient; a limit that is no
            number above 0.
        ShapeError, DtypeError: x does not have the declared shape or dtype.
    """
    if isinstance(x, SecretTensor):
        raise ArgumentError(f"share() takes a plain tensor, got a {type(x).__name__}")
    if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "share() takes a tensor that requires no gradient, since none would come to it: share(x.detach()), and for "
            "the gradient of an input DifferentiableTensor(share(x.detach()), requires_grad=True)"
        )
    x = _check_declared(plain(x) if isinstance(x, torch.Tensor) else x, shape, dtype)
    session = session or default_session("cpu" if x.is_meta else x.device)
    if x.device not in (session.device, torch.device("meta")):
        raise ArgumentError(f"the tensor is on {x.device}, its session on {session.device}: x.to('{session.device}')")
    scheme = scheme_of("share", scheme)
    party = session.answering_party(party)
    check_encodable(x, scheme.frac_bits, "the input")
    scale_bits = scheme.frac_bits if x.is_floating_point() else 0
    (holder,) = session.parties_named(owner, party)
    if x.is_meta and session.present(holder):
        raise ArgumentError(f"'{name}' of {holder.name}, which is here, has no content; give share() the tensor")
    bound = bound_of_limit(limit, scheme, scale_bits, min(range_limit(scheme.frac_bits), largest_of(x.dtype)))
    facts = (tuple(x.shape), x.dtype, holder.name, name, limit, str(scheme))
    session.agreement.note(party, "share", facts)
    with session.operation(party) as net:
        encoded = encoded_input(net.own(holder, x, Phase.ONLINE, name), scheme.frac_bits, scale_bits, limit)
        backend = session.backend(net, scheme)
        if holder == session.Q:
            shares = backend.share(encoded, not x.is_floating_point())
        else:
            shares = backend.owned(encoded, holder)
        made = SharedTensor(shares, scale_bits, session, party, scheme, x.dtype, bound)
        made.given = True
        looked_at = scheme.verified and holder in (session.Q, *session.owners)
        return _check_bound(made, bound) if looked_at and bound is not None else made


def largest_of(dtype: torch.dtype) -> float:
    """A number above which no magnitude of the dtype lies: 2^7 for int8, 2^8 for uint8, infinity for fractions."""
    if dtype.is_floating_point or dtype == torch.bool:
        return math.inf
    return torch.iinfo(dtype).max + 1.0


def _check_bound(x: SharedTensor, bound: float) -> SharedTensor:
    """Check that every element of x is within the bound: if not, nothing that depends on x is revealed."""
    raised, bits = x.session.net(x.party).state(RaisedFlags), max(0, math.ceil(math.log2(bound)))
    before, (middle, half) = len(raised), _dtype_range(x.dtype, bits)
    x.backend.flag_outside(x.shares - middle if middle else x.shares, half, everywhere=True)
    x.bound, x.flags = 2.0**bits, tuple(raised[before:])
    return x


def _dtype_range(dtype: torch.dtype, bits: int) -> tuple[int, int]:
    """(m, k): every number of the dtype that has at most so many bits lies in [m - 2^k, m + 2^k)."""
    if dtype.is_floating_point:
        return 0, bits
    own = 1 if dtype == torch.bool else torch.iinfo(dtype).bits
    if dtype.is_signed:
        return 0, min(bits, own - 1)
    half = max(0, min(bits, own) - 1)
    return 1 << half, half


class ComplexShared(SecretTensor):
    """A complex tensor in shares: two SharedTensors, the real and the imaginary part.

    A complex number is no ring element, so the tensor itself has no fraction bits and no bound; its parts have.
    """

    parts: tuple[SharedTensor, SharedTensor]

    @staticmethod
    def __new__(cls, real: Any, imag: Any):
        with torch._C.DisableTorchFunctionSubclass():
            dtype = real.dtype if real.dtype.is_floating_point else torch.float32
            shape, device = real.shape, real.device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype.to_complex(), device=device)
        self.parts = real, imag
        self.session, self.party, self.scheme = real.session, real.party, real.scheme
        return self

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"ComplexShared(shape={tuple(self.shape)}, dtype={self.dtype})"

    def reveal(self) -> torch.Tensor:
        """The plain tensor, learned by Q and by nobody else: both parts, each by `SharedTensor.reveal`."""
        return torch.complex(*(part.reveal() for part in self.parts))
