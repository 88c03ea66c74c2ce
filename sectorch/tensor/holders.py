"""Tensors and their holders: collected, drawn by one party, reshared, summed at Q; and the argmax by either engine.

A SharedTensor is two halves, one at `x.party` and one at S. `x.party` is an answering party, or Q. All operations run
on tensors of Q and S, too: Q then plays the answering party, and the first answering party deals
(`session.Members.cast`). So no two of Q, S and that party may collude. Two other parties hold a tensor in a session of
their own, and `reshare` moves it. Yao's protocol (`engine="yao"`) runs between two parties alone.

Source: CaPC, 3.2, steps 1b to 3.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import reduce
from math import prod
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from ..backend import Backend, RaisedFlags, Value
from ..choreography import Party, with_shapes
from ..choreography.located import run_in
from ..config import scheme_of
from ..errors import (
    ArgumentError,
    DtypeError,
    FixedPointRangeError,
    NetworkError,
    SessionMismatchError,
    ShapeError,
)
from ..ring import HEADROOM_BITS, decode, range_limit
from ..session import Session, default_session
from .secret import SecretTensor, dtype_of
from .shared import (
    CollectedFlag,
    Opening,
    Scheme,
    SharedTensor,
    bound_of_limit,
    encoded_input,
    refuse_infinite,
    round_shares,
    unwrap_openings,
)
from .table import LARGEST

ENGINES = ("shares", "yao")


def _garbled() -> Any:
    """`sectorch.garbled`, whose libraries are loaded when they are asked for."""
    from .. import garbled

    return garbled


def collect(
    tensors: Sequence[SharedTensor], *, lost: Callable[[Party, NetworkError], None] | None = None
) -> SharedTensor:
    """The sum of several answering parties' tensors in halves of Q and S, of a single one the tensor; not opened.

    Args:
        tensors: of one session, of any shapes that add up. Those that Q and S hold already are not moved.
        lost: called with a party that is lost before S has its part, whose tensor is then left out of both halves;
            without it the error is raised. Between processes the loss of a party ends the session.

    Returns:
        A tensor whose `party` is Q. If a value on which it depends left its range, its reveal says so.

    Rounds 1, bytes 8 per element from each answering party to S. Exact. Nobody learns anything: S receives uniform
    bits, Q nothing.

    Raises:
        ArgumentError: no tensors, all parties are lost, or a scheme that is audited or verified.
        SessionMismatchError: tensors of several sessions.
        FixedPointRangeError: a tensor that may hold infinities.
    """
    if not tensors or not all(isinstance(x, SharedTensor) for x in tensors):
        raise ArgumentError("collect() takes a non-empty list of SharedTensors")
    session = tensors[0].session
    if any(x.session is not session for x in tensors):
        raise SessionMismatchError("collect() adds tensors of one session; these are of several")
    for x in tensors:
        _check_holders(x.scheme)
        refuse_infinite(x, "collect()")
    count, moved = len(tensors), []
    for x in tensors:
        try:
            moved.append(x if x.party == session.Q else _moved(x, count))
        except NetworkError as error:
            if lost is None or not session.complete:
                raise
            lost(x.party, error)
    if not moved:
        raise ArgumentError(f"collect() has nothing to add: all {count} answering parties were lost")
    return functools.reduce(operator.add, moved)


def _moved(x: SharedTensor, count: int) -> SharedTensor:
    """x in halves of Q and S; yes and no among several summands is a count."""
    session, dtype = x.session, dtype_of(x)
    with session.call(x.party) as net:
        backend = session.backend(net, x.scheme)
        with session.call(session.Q) as to:
            shares = backend.collect(x.shares, session.backend(to, x.scheme))
    dtype = torch.int64 if dtype == torch.bool and count > 1 else dtype
    return _held_by_Q(x, shares, x.scale_bits, x.bound, dtype, x.whole_bits)


def _held_by_Q(
    x: SharedTensor, shares: Any, scale_bits: int, bound: float | None, dtype: torch.dtype, whole_bits: int
) -> SharedTensor:
    made = SharedTensor(shares, scale_bits, x.session, x.session.Q, x.scheme, dtype, bound)
    made.whole_bits = whole_bits
    flags: Any = tuple(f if x.party == x.session.Q else CollectedFlag(x.party, f) for f in x.flags)
    made.flags = flags
    return made


def _check_holders(scheme: Scheme) -> None:
    if scheme.verified or scheme.audited != 1:
        raise ArgumentError(
            "tensors of Q and S are dealt by an answering party, which proves nothing and is not audited: use a scheme "
            "without verified=True and audited"
        )


def draw(
    owner: Any,
    f: Callable[[torch.Size], torch.Tensor],
    shape: Sequence[int],
    *,
    session: Session | None = None,
    party: Party | None = None,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    dtype: torch.dtype = torch.int64,
    limit: float | None = None,
) -> SharedTensor:
    """A value that one party draws and nobody else knows, as a tensor in shares: a summand, such as noise.

        noisy = votes + sectorch.draw("S", noise.sample, votes.shape, session=votes.session, party=votes.party)

    Args:
        owner: one of the two holders of the tensor.
        f: from a shape to a plain tensor of that shape and of `dtype`, called at the owner alone, in each call anew.
        shape: public, as is the dtype.
        session: the process's own by default.
        party: the holder beside S: an answering party, by default the session's first, or `session.Q`.
        scheme, limit: as of `sectorch.share`; a drawn value must be below the limit.

    No message. Error: at most 2^-(frac_bits + 1), and none for whole numbers.

    Raises:
        ArgumentError: an owner that does not hold the tensor.
        ShapeError, DtypeError, FixedPointRangeError: at the owner, f gave something else.
    """
    session, scheme = session or default_session(), scheme_of("draw", scheme)
    party, server = session.holders(party)
    if party == session.Q:
        _check_holders(scheme)
    (holder,) = session.parties_named(owner, party)
    if holder not in (party, server):
        raise ArgumentError(
            f"what {holder.name} draws is no half of a tensor of {party.name} and {server.name}: share it "
            f"(sectorch.share(x, owner={holder.name!r})), or let {party.name} or {server.name} draw"
        )
    shape, floating = torch.Size(shape), dtype.is_floating_point
    like, bits = torch.empty(shape, dtype=dtype, device="meta"), scheme.frac_bits if floating else 0
    bound = bound_of_limit(limit, scheme, bits, range_limit(scheme.frac_bits))
    session.agreement.note(party, "draw", (tuple(shape), dtype, holder.name, limit, str(scheme)))
    with session.operation(party) as net:
        drawn = net.fresh(holder, with_shapes(lambda: like)(functools.partial(_checked_draw, f, like)))
        encoded = encoded_input(drawn, scheme.frac_bits, bits, limit)
        shares = session.backend(net, scheme).owned(encoded, holder)
    return SharedTensor(shares, bits, session, party, scheme, dtype, bound)


def _checked_draw(f: Callable[[torch.Size], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    x = f(like.shape)
    if not isinstance(x, torch.Tensor) or x.shape != like.shape:
        found = tuple(x.shape) if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ShapeError(f"draw() was told a tensor of shape {tuple(like.shape)}, and its function gave {found}")
    if x.dtype != like.dtype:
        raise DtypeError(f"draw() was told a tensor of {like.dtype}, and its function gave one of {x.dtype}")
    return x


def reshare(
    x: SharedTensor | None,
    session: Session | None,
    owners: Sequence[Any],
    *,
    party: Party | None = None,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    limit: float | None = None,
) -> SharedTensor:
    """A tensor of one session as a tensor of another, whose parties play other roles; not opened.

        with parties.session(STAR, {"Q": "S", "A": "north", "S": "south"}, label="pair") as pair:  # halves of these two
            squares = sectorch.share(x, owner="A", session=pair, limit=8).square()
            with parties.session(STAR, {"Q": "Q", "A": "north", "S": "S", "O": ["south"]}) as star:
                found = sectorch.reshare(squares, star, ("A", "south"), limit=128).reveal(to="Q")

    Two holders of a session are an answering party or Q, and S. Which party plays S, and who deals, is the session's
    cast; so a tensor of any two parties is one of a session in which these play A and S, and a third deals. The two
    share their halves with the new holders; a half of a new holder stays there.

    Args:
        x: of a session of its own; None at a party that takes no part in that, which names `shape` and `dtype`.
        session: the new one; None at a party of x's session alone, which is given x back.
        owners: who in the new session the two holders of x are, `x.party` first: Q, `party`, S or an owner.
        party: the new holder beside S: the session's first answering party unless given.
        scheme: of the new tensor; x's, where that is here.
        limit: what x may not reach; the largest of the scheme unless given. It is public and the same everywhere.

    Rounds 1, bytes 8 per element for each half that moves; those of a range check of x before, and of the truncation to
    `frac_bits` where x has more fraction bits. Exact but for that. New holders receive uniform bits. Whether a value on
    which x depends left its range, the Q of x's session learns; between processes its parties compare what they have
    computed before a half moves (2 rounds). No two of the three parties of either session may
    collude. In the new session x is an input of the two owners: from whose inputs it was computed is not followed.

    Raises:
        ArgumentError: x is of the new session, or of another kind; owners who are one party, or have no half; no shape;
            a limit that is no number above 0.
        FixedPointRangeError: x may reach the limit. RangeExceededError: a value on which x depends left its range.
    """
    if x is not None and not isinstance(x, SharedTensor):
        raise ArgumentError(f"reshare() takes a SharedTensor, got a {type(x).__name__}")
    scheme = x.scheme if x is not None else scheme_of("reshare", scheme)
    if scheme.verified or scheme.audited != 1:
        raise ArgumentError(
            "halves that come from another session are proved by nobody there: use a scheme without verified=True and "
            "audited"
        )
    dtype, shape = (dtype, shape) if x is None else (dtype_of(x), x.shares.shape)
    if shape is None or not isinstance(owners, (list, tuple)) or len(owners) != 2 or owners[0] == owners[1]:
        raise ArgumentError(f"reshare() moves halves of two parties, of a shape that all know, got {owners}, {shape}")
    bits, halves = scheme.frac_bits if dtype.is_floating_point else 0, (None, None)
    bound = bound_of_limit(range_limit(scheme.frac_bits) if limit is None else limit, scheme, bits, _most(bits))
    party = None if session is None else session.answering_party(party)
    holders = [] if session is None or party is None else [session.parties_named(o, party)[0] for o in owners]
    if len(set(holders)) == 1:
        raise ArgumentError(f"reshare() moves halves of two parties, and {owners} are one: {holders[0].name}")
    if x is not None:
        if x.session is session or (session is not None and x.session.reference != session.reference):
            raise ArgumentError("reshare() takes a tensor of another session, and both or none are references")
        refuse_infinite(x, "reshare()")
        if bound is not None and (x.bound is None or x.bound * 2.0 ** (bits - x.scale_bits) > bound):
            raise FixedPointRangeError("a tensor that may reach the limit is not moved; clamp it, or name limit= above")
        halves = halves_of(x)
    if session is None or party is None:
        if x is None:
            raise ArgumentError("reshare() is called by the parties of either session, and this one is of neither")
        return x
    return from_halves(halves, session, owners, shape=shape, party=party, scheme=scheme, dtype=dtype, limit=limit)


def from_halves(
    halves: Sequence[torch.Tensor | None], session: Session, owners: Sequence[Any], *, shape: Sequence[int],
    party: Party | None = None, scheme: Scheme, dtype: torch.dtype = torch.float32, limit: float | None = None,
) -> SharedTensor:  # fmt: skip
    """A tensor of a session from two parties' halves of it (`halves_of`); see `reshare`.

    Args:
        halves: of `owners`, with the fraction bits of the scheme, and none of whole numbers; None of a party elsewhere.

    Raises:
        ArgumentError: a half is missing, or here and another party's.
    """
    party, bits = session.answering_party(party), scheme.frac_bits if dtype.is_floating_point else 0
    holders = [session.parties_named(owner, party)[0] for owner in owners]
    bound = bound_of_limit(range_limit(scheme.frac_bits) if limit is None else limit, scheme, bits, _most(bits))
    like = torch.empty(tuple(shape), dtype=torch.int64, device="meta")
    session.agreement.note(party, "reshare", (tuple(shape), dtype, *(p.name for p in holders), limit, str(scheme)))
    with session.operation(party) as net:
        backend, parts = session.backend(net, scheme), []
        for holder, half in zip(holders, halves, strict=True):
            half = like if half is None else half
            if half.is_meta == session.present(holder):
                raise ArgumentError(f"{holder.name} has no half of this tensor here, or another party has; name owners")
            own = net.own(holder, half, name=f"half of {holder.name}")
            parts.append(backend.share(own, True) if holder == session.Q else backend.owned(own, holder))
        shares = parts[0] + parts[1]
    return SharedTensor(shares, bits, session, party, scheme, dtype, bound)


def _most(bits: int) -> float:
    return 2.0 ** (HEADROOM_BITS - bits)


def halves_of(x: SharedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves of x at `x.party` and S, int64 mod 2^64, to be kept; without content elsewhere. See `from_halves`.

    They have the fraction bits of the scheme, and none of whole numbers. Rounds, bytes, and who learns what are those
    of `reshare` before a half moves.
    """
    bits = x.scheme.frac_bits if dtype_of(x).is_floating_point else 0
    with x.session.operation(x.party) as net:
        backend, raised = x.session.backend(net, x.scheme), () if x.session.reference else net.state(RaisedFlags)
        before = len(raised)
        shares, found = round_shares(backend, x.shares, x.scale_bits, x.scheme)
        shares = shares << bits - found if found < bits else shares
        rounded = SharedTensor(shares, bits, x.session, x.party, x.scheme, dtype_of(x), x.bound)
        rounded.flags = (*x.flags, *tuple(raised)[before:])
    if rounded.flags:
        rounded.check_range()
    x.session.agreement.note(x.party, "reshare", x)
    x.session.agreement.compare(x.party)  # no half moves before the party that hears of the range has confirmed
    with x.session.operation(x.party) as net:
        return x.session.backend(net, x.scheme).halves(shares)


# Engines: the argmax by Yao's protocol between two holders, or on three-party shares.


def one_hot_argmax(
    x: SharedTensor, *, engine: Literal["shares", "yao"] = "shares", frac_bits: int = 16, bits: int | None = None
) -> SharedTensor:
    """The one-hot code of the largest entry of the last dimension, in shares.

    Args:
        x: [..., classes].
        engine: "shares": by comparisons of the star; the result has x's holders. "yao": by a garbled circuit between an
            answering party and Q, or between S and Q; Q and S hold the result. Then no party deals, so that Q may
            collude with answering parties (CaPC, A.1).
        frac_bits: with "yao", so many fraction bits are compared; entries that differ by less than 2^(1 - frac_bits)
            may come out in either order.
        bits: with "yao", so many bits are compared in all, fraction bits and sign among them: 32 of fractions, and of
            whole numbers what their bound needs. Larger numbers wrap around.

    Returns:
        int64 [..., classes] of 0 and 1; the first of equal entries, exactly, with "shares" and for whole numbers.

    With "shares" the rounds of ceil(log2 C) comparisons and of as many products; with "yao" 7 rounds (2 where Q holds
    x), bytes as of `sectorch.garbled.argmax_onehot`, and 24 per entry. Nobody learns anything.

    Raises:
        ArgumentError: another engine, fewer than two classes, or bits that do not exist.
    """
    _check_entries("one_hot_argmax", x, engine)
    session, drop = x.session, max(0, x.scale_bits - frac_bits) if engine == "yao" else 0
    bits = _checked_bits((32 if x.scale_bits else _bits_of(x)) if bits is None else bits, drop)
    if session.reference:
        with session.operation(x.party):
            plain: Any = x.shares
            shares = F.one_hot((plain >> drop).argmax(-1), plain.shape[-1])
    elif engine == "shares":
        high = 63 if x.bound is None else min(63, int(x.bound).bit_length() + 1)
        with session.operation(x.party) as net:
            shares = _garbled().one_hot_of_classes(net, x.shares, high)
        return x.like(shares, 0, 1.0, dtype=torch.int64)
    else:
        answering = None if x.party == session.Q else x.party
        pair = _pair(session, answering)
        with session.call(answering) as net:
            halves = _garbled().onehot_of_shares(net, pair, x.shares, drop=drop, bits=bits)
        with session.call(session.Q) as net:
            shares = session.backend(net, x.scheme).from_halves(*halves)
    return _held_by_Q(x, shares, 0, 1.0, torch.int64, 0)


def reveal_argmax(
    x: SharedTensor, *, where: SharedTensor | None = None, engine: Literal["shares", "yao"] = "shares",
    bits: int | None = None, party: Party | None = None,
) -> torch.Tensor:  # fmt: skip
    """The position of the largest entry of the last dimension, learned by Q, who learns nothing else.

    Args:
        x: [..., classes], whole numbers that Q and S hold (`collect`); the first of equal entries counts.
        where: of x's shape: -1 where no entry of it is at least zero.
        engine: "yao": one garbled circuit between S and Q. "shares": with an answering party; no two of Q, S and that
            party may collude.
        bits: all entries lie in [-2^(bits - 1), 2^(bits - 1)); what their bounds say unless named.
        party: that answering party; the session's first unless given.

    Returns:
        int64 [...], at Q; elsewhere a tensor without content.

    With "yao" 2 rounds, bytes as of `sectorch.garbled.argmax_noisy` and `argmax_confident`. Exact. Between processes
    the parties first compare what they have computed.

    Raises:
        ArgumentError: a tensor that an answering party holds, fractions, or another engine.
        ShapeError: `where` has another shape.
        RangeExceededError: a value on which x or `where` depends left its range; nothing was revealed.
    """
    _check_entries("reveal_argmax", x, engine)
    session, both = x.session, [x] if where is None else [x, where]
    for v in both:
        if not isinstance(v, SharedTensor) or v.session is not session or v.party != session.Q or v.scale_bits:
            raise ArgumentError(
                "reveal_argmax() takes whole numbers that Q and S hold; sectorch.collect([x]) moves a tensor there"
            )
    if where is not None and where.shares.shape != x.shares.shape:
        raise ShapeError(f"'where' is of shape {tuple(where.shares.shape)}, and x of {tuple(x.shares.shape)}")
    for v in both:
        v.check_range()
    bits = _checked_bits(max(map(_bits_of, both)) if bits is None else bits)
    session.agreement.note(session.Q, "reveal_argmax", *both, engine, bits)
    session.agreement.compare(session.Q)
    with session.call(party) as net:
        if session.reference:
            plain: list[Any] = [v.shares for v in both]
            label = plain[0].argmax(-1)
            return label if where is None else torch.where((plain[1] >= 0).any(-1), label, _garbled().UNANSWERED)
        pair = _pair(session, None) if engine == "yao" else None
        label = _garbled().label_of_shares(net, pair, x.shares, None if where is None else where.shares, bits=bits)
        return net.read(label, session.Q)


def _check_entries(name: str, x: Any, engine: str) -> None:
    if not isinstance(x, SharedTensor) or not x.dim() or x.shares.shape[-1] < 2:
        found = f"one of shape {tuple(x.shape)}" if isinstance(x, SharedTensor) else f"a {type(x).__name__}"
        raise ArgumentError(f"{name}() takes a SharedTensor [..., classes] of at least two classes, got {found}")
    if engine not in ENGINES:
        raise ArgumentError(f"an engine is {' or '.join(ENGINES)}, got {engine!r:.40}")
    refuse_infinite(x, f"{name}()")
    if engine == "yao":
        _check_holders(x.scheme)


def _checked_bits(bits: int, drop: int = 0) -> int:
    if type(bits) is not int or not 2 <= bits <= 64 - drop:
        raise ArgumentError(f"an argmax compares 2 to {64 - drop} bits above {drop} that it drops, got {bits!r:.40}")
    return bits


def _bits_of(x: SharedTensor) -> int:
    return 63 if x.bound is None else min(63, max(2, int(x.bound).bit_length() + 1))


_PAIRS: WeakKeyDictionary[Session, dict[Party | None, Any]] = WeakKeyDictionary()


def _pair(session: Session, answering: Party | None) -> Any:
    """The base oblivious transfers of an answering party, or of S for None, with Q; once a session."""
    pairs = _PAIRS.setdefault(session, {})
    if answering not in pairs:
        garbler = answering or session.holders()[1]
        pairs[answering] = _garbled().correlate(session.setup(answering), garbler)
    return pairs[answering]


def _check_sum_fits(backend: Backend, shares: Value, x: SharedTensor, scale_bits: int, times: int) -> None:
    """Flag entries of x, rounded to so many fraction bits, that `times` such terms could take out of the ring."""
    bound = x.bound and x.bound / 2.0 ** (x.scale_bits - scale_bits) + 1
    if bound and bound * times > 2.0**HEADROOM_BITS and x.scheme.range_check:
        backend.flag_outside(shares, HEADROOM_BITS - (times - 1).bit_length())


def aggregate(
    tensors: Sequence[SharedTensor], noise: Callable[[Sequence[int], int], torch.Tensor] | None = None
) -> torch.Tensor:
    """The sum of several answering parties' tensors, learned by Q, who learns nothing else about the summands.

    Args:
        tensors: one of each answering party of one session, all of one shape. PrivHFL, Figure 5 (Pi_Agg). Of a single
            one the sum is the tensor itself, as with `reveal`.
        noise: what S adds to the sum before Q gets it: a function of a shape and a number of fraction bits f that S
            alone calls, for int64 multiples of 2^-f, such as `functools.partial(sectorch.dp.on_grid, sigma)`. Whether
            the sum left the number format's range is not noised.

    Rounds 2, bytes 8 per element and answering party, and 8 per element from S to Q.

    Raises:
        SessionMismatchError, ArgumentError, ShapeError: nothing was sent.
    """
    if not tensors or not all(isinstance(x, SharedTensor) for x in tensors):
        raise ArgumentError("aggregate() takes a non-empty list of SharedTensors")
    first = tensors[0]
    if any(x.session is not first.session for x in tensors):
        raise SessionMismatchError("aggregate() adds tensors of one session; these are of several")
    if len({first.session.answering_party(x.party) for x in tensors}) < len(tensors):
        raise ArgumentError("aggregate() takes one tensor of each answering party; add a party's own tensors up first")
    if any(x.shares.shape != first.shares.shape for x in tensors):
        raise ShapeError(f"aggregate() needs equal shapes, got {[tuple(x.shares.shape) for x in tensors]}")
    for x in tensors:
        refuse_infinite(x, "aggregate()")
    calls, scales, guarded = [], [], any(x.scheme.range_check for x in tensors)
    with ExitStack() as open_calls:
        for x in tensors:
            net = open_calls.enter_context(x.session.call(x.party))
            backend = x.session.backend(net, x.scheme)
            shares, bits = round_shares(backend, x.shares, x.scale_bits, x.scheme)
            calls.append((net, backend, shares))
            scales.append(bits)
        scale, terms = max(scales), []
        for (net, backend, shares), bits, x in zip(calls, scales, tensors, strict=True):
            with run_in(net):
                _check_sum_fits(backend, shares, x, bits, len(tensors) << scale - bits)
                terms.append((backend, shares << scale - bits, (*x.flags, *net.state(RaisedFlags))))
        # An answering party does not know the others' flags: all sums are guarded, or none.
        net, backend, _ = calls[0]
        drawn = None if noise is None else lambda shape: noise(shape, scale)
        opened, right = backend.aggregate(terms, guarded, drawn)
        right = None if right is None else net.read(right, first.session.Q)
        elements = unwrap_openings(Opening(net.read(opened, first.session.Q), right))
    with torch._C.DisableTorchFunctionSubclass():
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
        dtype = torch.int64 if dtype == torch.bool and len(tensors) > 1 else dtype  # a sum of yes and no is a count
    return torch.empty_like(elements, dtype=dtype) if elements.is_meta else decode(elements, scale, dtype)


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_DIMS = 12


def announced(
    x: torch.Tensor | None, *, owner: Any, session: Session | None = None, party: Party | None = None
) -> torch.Tensor:
    """x at its owner, and at every other party a tensor without content. The shape and the dtype of x become public.

        rows = sectorch.announced(parties.inputs.get("H1"), owner="H1", session=session)
        shared = sectorch.share(rows, owner="H1", session=session)

    Args:
        x: the owner's tensor, of at most 12 dimensions; ignored at other parties.
        owner, session, party: as of `sectorch.share`.

    Between processes 2 rounds (1 if S is the owner), and 112 bytes from the owner to S and from S to each party.

    Raises:
        ArgumentError: no tensor at its owner, an owner that is not of the session, or a rehearsal, in which nobody
            has an input.
        ShapeError: the owner's message is not a shape.
    """
    session = session or default_session()
    party = session.answering_party(party)
    (holder,) = session.parties_named(owner, party)
    here = session.present(holder)
    if here and (not isinstance(x, torch.Tensor) or isinstance(x, SecretTensor) or x.is_meta):
        raise ArgumentError(f"{holder.name}, which is here, announces no plain tensor: a {type(x).__name__}")
    if here and x is not None and (x.dim() > _DIMS or x.dtype not in _DTYPES):
        raise ArgumentError(f"{holder.name} announces {x.dim()} dimensions of {x.dtype}, which cannot be shared")
    if here and x is not None and session.complete:
        return x
    message = torch.zeros(_DIMS + 2, dtype=torch.int64)
    if here and x is not None:
        message = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *x.shape, *(_DIMS - x.dim()) * (0,)])
    received = session.agreement.broadcast(party, "announce", holder, message)
    if received.is_meta:
        raise ArgumentError(f"the shape of what {holder.name} brings is not known in a rehearsal")
    kind, count, *sizes = received.tolist()
    # The message comes from another party: a false one may not make this party allocate a tensor of any size.
    if not (0 <= kind < len(_DTYPES) and 0 <= count <= _DIMS and min(sizes) >= 0 and prod(sizes[:count]) < LARGEST):
        raise ShapeError(f"{holder.name} announced what is no shape: {sizes[: max(0, count)]}")
    like = torch.empty(sizes[:count], dtype=_DTYPES[kind], device="meta")
    session.agreement.note(party, "announced", holder.name, like)
    return x if here and x is not None else like
