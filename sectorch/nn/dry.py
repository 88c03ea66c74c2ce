"""A module run on shapes: every error that depends on shapes, and every message, before anything is shared."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..choreography import Party
from ..choreography.ledger import Profile, alone
from ..choreography.program.trace import PLACE, Program, Tracing
from ..errors import ArgumentError, SecretAccessError
from ..mpc.star.claims import check_proved
from ..ring.scheme import VANISHED
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SharedTensor, share_tensor
from .bind import Weights
from .bounds import Budget
from .eager import watched
from .held import Held, staying
from .inputs import Inputs, flattened, refuse_results
from .samplewise import is_samplewise
from .served import ServedTraces
from .shapes import Traces
from .trace import Trace, run
from .where import place_of


@dataclass
class Checked:
    """What a dry run said about an input shape."""

    profile: Profile = field(repr=False)
    tracing: Tracing | None = field(repr=False)
    outputs: Any = field(repr=False)
    budget: Budget | None = field(repr=False, default=None)
    samplewise: bool = False
    """Whether rows were seen not to meet."""
    dealer: Party | None = None
    """Who has to prove what it deals, if somebody has."""
    vanished: str = ""
    """Which public number counts as 0, and where."""

    @cached_property
    def choreography(self) -> Program:
        """What was traced.

        Raises:
            ArgumentError: there is no one program.
        """
        if self.tracing is None:
            raise ArgumentError("there is no one program: the module runs operation by operation")
        program = self.tracing.program(self.outputs)
        if self.dealer is not None:
            check_proved(program, self.dealer)
        return program


def dry_run(
    program: Trace | None,
    inputs: Inputs,
    weights: Weights,
    traces: Traces | ServedTraces,
    scheme: Scheme,
    limited: bool,
) -> Checked:
    """Share, run and reveal on shapes.

    Args:
        program: None for a module that runs operation by operation.
        inputs: of meta tensors.
        weights: of the session of `traces`, in which nobody is present.
        limited: whether the program comes from another party, and is held to the bounds of `nn/bounds.py`.

    Raises:
        SectorchError: with layer and line.
    """
    session, zero = traces.session, ""
    profile, shapes = Profile(), {}
    budget = Budget(len(program.graph.nodes), scheme.few_rounds) if limited and program is not None else None

    def step(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        nonlocal zero
        place, token = PLACE.set(place_of(node)), VANISHED.set(vanished := [])
        try:
            y = compute(*args, **kwargs) if budget is None else budget.step(node, compute, args, kwargs)
        finally:
            PLACE.reset(place)
            VANISHED.reset(token)
        if vanished and not zero:
            zero = f"{place_of(node)}: {counts_as_zero(vanished[0], scheme)}"
        if isinstance(y, torch.Tensor):
            shapes[node] = tuple(y.shape)
        return y

    try:
        with alone(profile), session.call(traces.party) as net, budget or nullcontext():
            if program is None:
                tracing, outputs = None, watched(traces.bound(), shared_inputs(inputs, session, scheme, traces.party))
            else:
                tracing = net.tracing = Tracing(net.call, traces.setup)
                shared = shared_inputs(inputs, session, scheme, traces.party)
                outputs = run(program, weights.of(program), shared.tensors, step)
            refuse_results(outputs)
            refuse_weights(outputs, program)
            outputs = revealed(outputs) if inputs.learned is None else staying(outputs, inputs.learned)
    except BaseException:
        if isinstance(traces, Traces):
            traces.refused(inputs)
        raise
    if budget is not None and program is not None:
        budget.check_weights(profile)
        given = [node for node in program.graph.nodes if node.op == "placeholder"]
        shapes.update(zip(given, inputs.shapes, strict=True))
    apart = program is not None and inputs.rows is not None and is_samplewise(program, shapes if limited else None)
    return Checked(profile, tracing, outputs, budget, apart, session.dealer if scheme.verified else None, zero)


def counts_as_zero(number: float, scheme: Scheme) -> str:
    """What is said of a public number that its fraction bits take for zero."""
    return (
        f"{number:g} is below the last place {2.0**-scheme.frac_bits:.2g} of the number format and counts as 0; "
        f"torch.where, clamp, maximum and + keep such a number for a logarithm or quotient behind them"
    )


def refuse_weights(results: Any, program: Trace | None) -> None:
    """Refuse a result that does not depend on the input: whoever learns it learns of the weights.

    Args:
        program: which gave it, where there is one.

    Raises:
        SecretAccessError: naming the result, and layer and line that gave it.
    """
    output = None if program is None else next(n for n in program.graph.nodes if n.op == "output").args[0]
    for at, (path, leaf) in enumerate(pytree.tree_flatten_with_path(results)[0]):
        if isinstance(leaf, PrivateTensor):
            node: Any = output[at] if isinstance(output, (list, tuple)) else output
            place = "" if node is None or "where" not in node.meta else f"{place_of(node)}: "
            error = SecretAccessError(
                f"{place}the result{pytree.keystr(path)} is made of weights alone, and whoever learns it learns of "
                f"them; let the model give only what depends on its input (a module around it: return "
                f"self.model(x)[0]), and keep a number that everybody may know as a Python number"
            )
            error.layer = place.removesuffix(": ")
            raise error


def shared_inputs(inputs: Inputs, session: Session, scheme: Scheme, party: Party | None = None) -> Inputs:
    """A module's inputs in shares; a tensor that is in shares already stays what it is.

    Q has checked that they are below the activation limit, if they are no whole numbers.
    """

    def shared(name: str, x: torch.Tensor, held: Held | None) -> torch.Tensor:
        if isinstance(x, SharedTensor):
            return x
        if held is not None:
            return held.again(name, x, session, session.answering_party(party), scheme)
        limit = scheme.activation_limit if scheme.range_check and x.is_floating_point() else None
        return share_tensor(x.detach(), session=session, party=party, scheme=scheme, limit=limit, name=name)

    return inputs.having([shared(*one) for one in zip(inputs.names, inputs.tensors, inputs.held, strict=True)])


def revealed(outputs: Any) -> Any:
    """A result with every secret in it revealed to Q, not yet looked at."""
    leaves, spec = flattened(outputs)
    return pytree.tree_unflatten([y.open() if isinstance(y, SharedTensor) else y for y in leaves], spec)
