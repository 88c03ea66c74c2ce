"""A's own check of precision: on numbers that A draws, fixed point gives what the model gives, to a part of its digits.

A program runs in float64. Each linear layer, convolution and matrix product runs a second time on the same numbers with
its weights as fixed point has them. It is lost where the results differ by more than `PART` of their size (both by
root mean square) and by more than `FLOOR_BITS` above the last place: the last place is a large part of the
weights then, and the inputs carry it into the result.

On request the fixed-point reference of all operations runs beside as well, which takes several times as long. There an
operation is lost by the same measure, if rounding does not explain it: `SLACK` times as much as the result moves where
each operation's result is changed by a unit of the last place and as large a part of itself at random.

Programs are looked at over one or two rows and, where they are large, over their first operations: `WORK` elements of
results and weights. The check reads the weights, so only A makes it, and what it finds stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from ..ring.scheme import Scheme
from ..session import Session
from ..tensor import SharedTensor
from .bind import Weights
from .check import plain, sample
from .dry import shared_inputs
from .inputs import Inputs
from .nodes import op_name
from .trace import Trace, run
from .where import place_of

PART, FLOOR_BITS, SLACK = 2.0**-8, 6, 64.0
WORK, SMALL = 1 << 21, 1 << 17
"""Elements that are computed: of all, and of programs that are looked at for large inputs, too."""
LARGEST = 1024.0


Lost = tuple[fx.Node, float, float]
"""An operation, its error and its result's size."""


class _Enough(Exception):
    """What was to be looked at is computed."""


def loss(
    program: Trace, bind: Callable[[Session], Weights], scheme: Scheme, inputs: Inputs, everything: bool
) -> str | None:
    """Which operation of a program loses digits, and how many; None where none does, or where it cannot be said.

    Args:
        program: with its weights.
        bind: gives what its names stand for in a session.
        inputs: only their form, shapes and dtypes are used.
        everything: whether the fixed-point reference runs as well.
    """
    if (
        any(0 in shape for shape in inputs.shapes)
        or any(v.is_meta for v in program.values.values())
        or inputs.in_shares
    ):
        return None
    drawn = sample(inputs, torch.device("cpu"))
    scaled = lambda scale: inputs.having([
        (x * scale).to(dtype) if x.is_floating_point() else x
        for x, dtype in zip(drawn.tensors, inputs.dtypes, strict=True)
    ])  # fmt: skip
    given = scaled(1.0)
    exact, work, lost = _exact(program, given.wide(), scheme)
    known = (*given.tensors, *exact.values())
    largest = max((float(x.abs().max()) for x in known if x.is_floating_point() and x.numel()), default=0.0)
    scales = [1.0]
    if work <= SMALL and 0 < largest < scheme.activation_limit / 16:
        scales.append(min(LARGEST, 2.0 ** math.floor(math.log2(scheme.activation_limit / 8 / largest))))
    for scale in scales:
        given = scaled(scale)
        if scale != 1.0:
            exact, _, lost = _exact(program, given.wide(), scheme)
        if lost is None and everything:
            lost = _first(program, bind, scheme, given, exact)
        if lost is not None:
            node, error, size = lost
            return (
                f"{place_of(node)}: with {scheme.frac_bits} fraction bits the result is off by {error:.2g} of "
                f"{size:.2g} on numbers that were drawn"
            )
    return None


def _exact(program: Trace, given: Inputs, scheme: Scheme) -> tuple[dict[fx.Node, torch.Tensor], int, Lost | None]:
    """What the first operations give in float64, until a value leaves the range, how much work that is, and the first
    of them that its weights' last place spoils."""
    found: dict[fx.Node, torch.Tensor] = {}
    secret: set[fx.Node] = {node for node in program.graph.nodes if node.op == "placeholder"}
    work, lost = 0, None
    unit = 2.0**-scheme.frac_bits

    def remember(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        nonlocal work, lost
        y = compute(*args, **kwargs)
        if not any(n in secret for n in node.all_input_nodes):
            return y
        secret.add(node)
        if isinstance(y, torch.Tensor):
            weights = sum(x.numel() for n, x in zip(node.args, args, strict=False) if _is_weight(n))
            work += y.numel() + weights
            if y.is_floating_point():
                if not bool((y.abs() < scheme.activation_limit).all()):
                    raise _Enough
                found[node] = y.double()
                if lost is None and op_name(node) in _PRODUCTS:
                    own = [
                        (x / unit).round() * unit if _is_private(n, x, secret) else x
                        for n, x in zip(node.args, args, strict=False)
                    ]
                    size, error = _size(y), _size(compute(*own, **kwargs) - y)
                    lost = (node, error, size) if _spoilt(error, size, scheme) else None
        if work > WORK or lost is not None:
            raise _Enough
        return y

    with suppress(_Enough):
        plain(program, given, step=remember)
    return found, work, lost


_PRODUCTS = ("linear", "conv1d", "conv2d", "conv3d", "matmul")


def _spoilt(error: float, size: float, scheme: Scheme) -> bool:
    return error > PART * size and error > 2.0 ** (FLOOR_BITS - scheme.frac_bits)


def _is_private(n: Any, x: Any, secret: set[fx.Node]) -> bool:
    """Whether an argument is a weight, or was made of weights; not a bias, which has twice the fraction bits."""
    return isinstance(n, fx.Node) and n not in secret and isinstance(x, torch.Tensor) and x.dim() > 1


def _is_weight(n: Any) -> bool:
    return isinstance(n, fx.Node) and n.op == "get_attr"


def _first(
    program: Trace,
    bind: Callable[[Session], Weights],
    scheme: Scheme,
    given: Inputs,
    exact: dict[fx.Node, torch.Tensor],
) -> Lost | None:
    """The first operation of the fixed-point reference that rounding alone does not explain."""
    session = Session(reference=True)
    weights, party = bind(session), session.answering[0]
    last = next(reversed(exact), None)
    found: list[Lost] = []

    def compare(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        y = compute(*args, **kwargs)
        if node in exact and isinstance(y, SharedTensor):
            shares: Any = y.shares
            decoded = shares.to(torch.float64) * 2.0**-y.scale_bits
            size, error = _size(exact[node]), _size(decoded - exact[node])
            if _spoilt(error, size, scheme):
                found.append((node, error, size))
        if node is last or found:
            raise _Enough
        return y

    if last is None:
        return None
    with suppress(_Enough), session.call(party), torch.no_grad():
        shared = shared_inputs(given, session, scheme, party)
        run(program, weights.of(program), shared.tensors, step=compare)
    if not found:
        return None
    node, error, _ = found[0]
    return None if error <= SLACK * _reached(program, given.wide(), scheme, node, exact[node]) else found[0]


def _reached(program: Trace, given: Inputs, scheme: Scheme, last: fx.Node, exact: torch.Tensor) -> float:
    """How far rounding of each operation's result moves that of the last."""
    draw, found = torch.Generator().manual_seed(2), math.inf
    unit = 2.0**-scheme.frac_bits

    def move(y: torch.Tensor) -> torch.Tensor:
        random = torch.rand(y.shape, generator=draw, dtype=torch.float64)
        return y + unit * (1 + y.abs()) * (2 * random - 1)

    def step(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        nonlocal found
        y = compute(*args, **kwargs)
        y = move(y.double()) if isinstance(y, torch.Tensor) and y.is_floating_point() else y
        if node is last:
            found = _size(y - exact)
            raise _Enough
        return y

    moved = given.having([move(x) if x.is_floating_point() else x for x in given.tensors])
    with suppress(_Enough):
        plain(program, moved, step=step)
    return found


def _size(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
