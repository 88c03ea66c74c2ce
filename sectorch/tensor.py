"""SharedTensor and PrivateTensor: secrets that look like torch tensors and fail closed.

Both are wrapper subclasses: they have a shape and a dtype, and no storage. `__torch_function__` hands every torch call
to the dispatch table; `__torch_dispatch__` refuses whatever got past it. A plain subclass would run `relu` on raw
shares without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from .choreography import Located, Net, Party, Phase, leaf
from .errors import (
    ArgumentError,
    FixedPointRangeError,
    RangeExceededError,
    SecretAccessError,
    UnsupportedOpError,
)
from .located import compute, running
from .mpc.guard import guard, unpadded
from .mpc.linear import Weight, mask_weight
from .mpc.share import encoded_input, reveal, share
from .mpc.shares import Shares
from .mpc.truncate import MAX_SHIFT, truncate
from .ring import check_encodable, decode, encode, range_limit
from .scheme import Scheme as Scheme
from .session import Session, default_session

_dispatch: Callable | None = None


def set_dispatch(call: Callable) -> None:
    """The dispatch table plugs itself in here when it is imported."""
    global _dispatch
    _dispatch = call


class SecretTensor(torch.Tensor):
    """What SharedTensor and PrivateTensor have in common: no way to the content but the declared ones."""

    session: Session
    party: Party
    scheme: Scheme

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedOpError(
            f"{func} reached the content of a {cls.__name__} past the dispatch table; nothing was computed. "
            f"sectorch.supported_ops() lists what works"
        )

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise SecretAccessError(f"a {type(self).__name__} cannot be pickled, copied or saved: it would carry secrets")

    __deepcopy__ = __reduce_ex__

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)


class SharedTensor(SecretTensor):
    """A tensor in additive shares mod 2^64 between an answering party and the server.

    `scale_bits` is the number of fraction bits that the ring elements carry now. A linear layer leaves twice
    `scheme.frac_bits`; the next non-linear step brings them back at no cost.
    """

    @staticmethod
    def __new__(
        cls, shares: Shares, scale_bits: int, session: Session, party: Party, scheme: Scheme, dtype,
        bound: float | None = None,
    ):  # fmt: skip
        self = torch.Tensor._make_wrapper_subclass(cls, shares.shape, dtype=dtype, device=session.device)
        self.shares = shares
        self.scale_bits = scale_bits
        self.session = session
        self.party = party
        self.scheme = scheme
        self.aliased = False
        self.bound = bound
        """The largest magnitude that an element may have, as a whole number of the ring; None if vouched for."""
        self.flags: tuple[Shares, ...] = ()
        """XOR-shared words that are zero unless a value on which this one depends left its range (`mpc/guard.py`)."""
        return self

    def __init__(self, *_args, **_kwargs):
        super().__init__()

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"SharedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, scale_bits={self.scale_bits})"

    def like(
        self,
        shares: Shares,
        scale_bits: int | None = None,
        dtype: torch.dtype | None = None,
        bound: float | None = None,
    ) -> SharedTensor:
        """These shares as a tensor beside this one: of its session, answering party, scheme and flags.

        Args:
            scale_bits, dtype: this tensor's unless named.
            bound: what every element's magnitude is at most, as a whole number of the ring; None vouches for that.
        """
        with torch._C.DisableTorchFunctionSubclass():
            dtype = dtype or self.dtype
        scale_bits = self.scale_bits if scale_bits is None else scale_bits
        made = SharedTensor(shares, scale_bits, self.session, self.party, self.scheme, dtype, bound)
        made.flags = self.flags
        return made

    def reveal(self) -> torch.Tensor:
        """The plain tensor, learned by Q and by nobody else. Rounds 2, bytes 16 per element (`mpc/share.py`).

        More than `frac_bits` fraction bits are rounded away first (`mpc/truncate.py`, one round more): they would show
        the exact sums of a last linear layer.

        Raises:
            RangeExceededError: a value on which this one depends left its range. Q learns that and nothing else.
        """
        return unwrapped(self.open())

    def check_range(self) -> None:
        """Q learns now whether a value on which this tensor depends left its range, for shares that go elsewhere.

        Rounds 2, bytes 48, if anything had to be checked. Who else takes part sees whether Q goes on.

        Raises:
            RangeExceededError: one did.
        """
        if self.flags:
            self.flatten()[:0].reveal()

    def open(self) -> Opening:
        """What `reveal` gives, not yet looked at."""
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        Q = self.session.Q
        with self.session.operation(self.party) as net:
            shares, scale_bits = rounded(net, self.shares, self.scale_bits, self.scheme)
            right = None
            if self.flags:
                padded, key = guard(net, shares, self.flags)
                opened, right = unpadded(reveal(net, padded), shares.shape, key)
            else:
                opened = reveal(net, shares)
            plain = compute(decode, opened, scale_bits, dtype)
            return Opening(net.read(plain, Q), None if right is None else net.read(right, Q))


class Opening(NamedTuple):
    """A revealed tensor at Q, and whether it is right: [1], or None where nothing could be wrong."""

    plain: torch.Tensor
    right: torch.Tensor | None


def unwrapped(outputs: Any) -> Any:
    """A tree of what was revealed, with plain tensors in the place of each `Opening`.

    Raises:
        RangeExceededError: one of them is not right.
    """

    def plain(y: Any) -> Any:
        if not isinstance(y, Opening):
            return y
        if y.right is not None and not y.right.is_meta and not bool(y.right):
            raise RangeExceededError(
                "a value between input and result left the range in which results are right, so there is no result "
                "(which value it was, nobody learned); scale the input or the model down, or use fewer fraction bits"
            )
        return y.plain

    return pytree.tree_map(plain, outputs, is_leaf=lambda y: isinstance(y, Opening))


def rounded(net: Net, shares: Shares, scale_bits: int, scheme: Scheme) -> tuple[Shares, int]:
    """At most the scheme's fraction bits."""
    while scale_bits > scheme.frac_bits:
        shift = min(MAX_SHIFT, scale_bits - scheme.frac_bits)
        shares, scale_bits = truncate(net, shares, shift, scheme.fss), scale_bits - shift
    return shares, scale_bits


class PrivateTensor(SecretTensor):
    """A plain tensor that one answering party owns: a model's weight.

    Operations among private tensors of one party run at that party, on floating-point numbers, once a session. An
    operation with a SharedTensor runs a protocol. A model's own tensors are not changed in place; a copy (`clone`) is.

    Attributes:
        origin: of a view, what it is a view of, and how.
        copied: whether this is a copy of its own memory.
        family: of a copy and of everything that shares its memory, one list of them all.
    """

    @staticmethod
    def __new__(cls, value: Located, session: Session, party: Party, scheme: Scheme, dtype, name: str = "a weight"):
        self = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=dtype, device=session.device)
        self.value = value
        self.session = session
        self.party = party
        self.scheme = scheme
        self.label = name
        self.derived: dict[Any, Any] = {}
        """What was made of the value, by how: encodings, its masked form, checks, other weights. Copies share it."""
        self.lasting = False
        self.origin: tuple[PrivateTensor, Callable] | None = None
        self.copied = False
        self.family: list[ref] | None = None
        return self

    def __init__(self, *_args, **_kwargs):
        super().__init__()

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"PrivateTensor(shape={tuple(self.shape)}, dtype={self.dtype}, at {self.party})"

    def encoded(self, scale_bits: int, limit: float | None = None) -> Located:
        """The tensor as ring elements, at its owner.

        Raises:
            FixedPointRangeError: at the owner: it does not fit the ring, or is not below the limit as a summand.
        """
        setup, how = self.session.setup(self.party), ("encoded", scale_bits, limit)
        with setup.lock, running(setup):
            if how not in self.derived:
                self.derived[how] = _encoded(self.value, scale_bits, self.scheme.frac_bits, limit, self.label)
        return self.derived[how]

    @property
    def weight_bits(self) -> int:
        """Fraction bits as an operand: those of the scheme, or none for whole numbers."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.scheme.frac_bits if self.dtype.is_floating_point else 0

    def become(self, value: Located, derived: dict[Any, Any] | None = None) -> None:
        """Take another value of the same shape: an operation in place. What was derived from the old one is not its.

        Args:
            derived: what was made of the new value before, if it is one that lasts.
        """
        self.value, self.derived, self.lasting = value, {} if derived is None else derived, derived is not None

    def weight(self) -> Weight:
        """The masked operand of linear protocols at `weight_bits`, sent to S on first use and kept.

        A view of a weight (a transpose, a slice) is a view of its masked form and sends nothing.
        """
        setup, how = self.session.setup(self.party), ("masked", self.weight_bits)
        with setup.lock:  # another thread may have made it meanwhile: it is masked and sent once
            if how not in self.derived:
                self.derived[how] = self._masked(setup)
        return self.derived[how]

    def _masked(self, setup: Net) -> Weight:
        if self.origin is None:
            return mask_weight(setup, self.encoded(self.weight_bits))
        parent, view = self.origin
        whole = parent.weight()
        with running(setup):
            return Weight(*(compute(view, w) for w in (whole.omega, whole.a, whole.masked)))


def _encoded_shapes(value: torch.Tensor, scale_bits: int, frac_bits: int, _limit: Any, label: str) -> torch.Tensor:
    check_encodable(value, frac_bits, label)
    return encode(value, scale_bits)


@leaf(shapes=_encoded_shapes)
def _encoded(value: torch.Tensor, scale_bits: int, frac_bits: int, limit: float | None, label: str) -> torch.Tensor:
    check_encodable(value, frac_bits, label)
    if limit is not None and value.numel() and float(value.abs().max()) >= limit:
        raise FixedPointRangeError(
            f"{label} reaches magnitude {float(value.abs().max()):.6g} as a summand; activations are below {limit:g} "
            f"at {frac_bits} fraction bits"
        )
    return encode(value, scale_bits)


def share_tensor(
    x: torch.Tensor,
    *,
    session: Session | None = None,
    party: Party | None = None,
    scheme: Scheme | None = None,
    limit: float | None = None,
) -> SharedTensor:
    """Secret-share Q's tensor between an answering party and S (Pi_Share, PrivHFL Figure 2).

    Args:
        x: any shape; floating point, integer or bool; finite and below 2^(62 - 2 frac_bits) in magnitude.
        session: where; the process's default session on x's device if none is named.
        party: which answering party of the session; the first if none is named.
        scheme: the number representation; 20 fraction bits if none is named.
        limit: what the caller has found x to be below in magnitude, for all x that may ever come here: it is public.

    Rounds 1, bytes 8 per element. A learns nothing; S receives uniform bits. Error at most 2^-(frac_bits + 1).

    Raises:
        DtypeError, NonFiniteError, FixedPointRangeError: before anything is sent.
        ArgumentError: a party that is none of the session's answering ones: it would learn x, or nobody could use it.
    """
    if isinstance(x, SecretTensor):
        raise ArgumentError(f"share() takes a plain tensor, got a {type(x).__name__}")
    x = torch.as_tensor(x)
    session = session or default_session("cpu" if x.is_meta else x.device)
    if x.device not in (session.device, torch.device("meta")):
        raise ArgumentError(f"the tensor is on {x.device}, its session on {session.device}: x.to('{session.device}')")
    scheme = scheme or Scheme()
    party = session.answering_party(party)
    check_encodable(x, scheme.frac_bits, "the input")
    scale_bits = scheme.frac_bits if x.is_floating_point() else 0
    with session.operation(party) as net:
        encoded = encoded_input(net.own(session.Q, x, Phase.ONLINE), scheme.frac_bits, scale_bits, limit)
        shares = share(net, encoded)
        if not x.is_floating_point():
            shares = replace(shares, Q=encoded)
        bound = (limit or range_limit(scheme.frac_bits)) * 2.0**scale_bits if scheme.range_check else None
        return SharedTensor(shares, scale_bits, session, party, scheme, x.dtype, bound)


def private_tensor(
    x: torch.Tensor, session: Session, party: Party, scheme: Scheme, name: str, dtype: torch.dtype | None = None
) -> PrivateTensor:
    """A's own tensor, checked to fit the fixed-point range. Nothing is sent.

    Args:
        name: how errors call it.
        dtype: what it passes for in type promotion; its own unless named.

    Raises:
        DtypeError, NonFiniteError, FixedPointRangeError: naming the tensor.
    """
    check_encodable(x, scheme.frac_bits, name)
    setup = session.setup(party)
    return PrivateTensor(
        setup.own(party, x.detach(), Phase.SETUP, name), session, party, scheme, dtype or x.dtype, name
    )
