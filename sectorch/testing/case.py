"""What is checked, and against what: the one list of what `check_protocol` and `mutate_protocol` may be told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict, TypeVar, get_type_hints

import torch

from ..choreography import Roles
from ..choreography.program.trace import Program
from ..choreography.roles import STAR
from ..choreography.steps import Compute
from ..errors import ArgumentError
from .known import is_tests
from .notes import LINEAR
from .played import Given, Protocol

Reference = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]


class Options(TypedDict, total=False):
    """How a protocol is checked, and how its faults are looked for.

    Attributes:
        roles: of the protocol's parties; Q, A and S by default.
        dealer: as of `sectorch.Session`; "Q".
        answering: how many parties answer; 1. Of more the protocol is f(nets, *values), with a net for each, and the
            inputs that are shared are shared by each of them in turn.
        elementwise: whether each element of a result depends on the same element of each input, and of each draw,
            alone; then the elements of one run are as many experiments. Otherwise each run is one: small shapes find
            more. True.
        error: how far a result may be from the reference, in ring elements; 0.
        varies: how far two results for the same inputs may be apart; 0.
        uniform: whether messages have to be uniform; ciphertexts and statistical masks are not. True.
        sorts: labels of draws that rows are sorted by: their lowest bits hardly ever change anything. None.
        elements: about so many in one run; 4096.
        pairs: of secrets that each party is compared for, at most; 7.
        runs: of each secret, for less time; as many as give 16,384 elements of a message, or 512 where each run is one
            experiment.
        seed: of inputs and draws; the same seed finds the same. 0.
        exhaustive: bits of the small domains that are tried in all combinations, where inputs and results have n
            elements each; and draws near powers of two are tried too. 0 for less time, or for a protocol that may be
            wrong under draws that hardly ever come, as a hash is under a key that is zero. 3.
    """

    roles: Roles
    dealer: str
    answering: int
    elementwise: bool
    error: int
    varies: int
    uniform: bool
    sorts: Collection[str]
    elements: int
    pairs: int
    runs: int | None
    seed: int
    exhaustive: int


@dataclass(frozen=True)
class Case:
    """A protocol with its inputs, what it has to compute, and the `Options` that hold for it."""

    protocol: Callable
    given: Sequence[Given]
    reference: Reference
    roles: Roles = STAR
    dealer: str = "Q"
    answering: int = 1
    elementwise: bool = True
    error: int = 0
    varies: int = 0
    uniform: bool = True
    sorts: Collection[str] = ()
    elements: int = 4096
    pairs: int = 7
    runs: int | None = None
    seed: int = 0
    exhaustive: int = 3

    @classmethod
    def of(
        cls, protocol: Callable, given: Sequence[Given], reference: Reference, options: Options
    ) -> Case:  # fmt: skip
        """The case.

        Raises:
            ArgumentError: no reference; an option that there is not.
        """
        if not callable(reference):
            raise ArgumentError("a check needs a reference: what the protocol computes, as a function of plain tensors")
        strange = sorted(set(options) - set(Options.__annotations__))
        if strange:
            raise ArgumentError(f"there is no option '{strange[0]}'; there are {', '.join(Options.__annotations__)}")
        if not isinstance(count := options.get("elements", 1), int) or count < 1:
            raise ArgumentError(f"elements is how many there are in one run, a whole number from 1 on; got {count!r}")
        try:
            if isinstance(given, Sequence):  # which `Protocol` asks for
                inspect.signature(reference).bind(*given)
        except TypeError as error:
            raise ArgumentError(
                f"the reference is called with the protocol's inputs as plain tensors, {len(given)} of them: {error}"
            ) from None
        except ValueError:  # of a builtin
            pass
        return cls(protocol, given, reference, **options)

    def traced(self) -> Protocol:
        """The protocol, traced; errors as of `Protocol`.

        Raises:
            ArgumentError: its elements are said to be experiments of their own, and share a value.
        """
        found = Protocol(self.protocol, self.given, self.roles, self.elements, self.dealer, self.answering)
        if self.elementwise and (said := shared_by_elements(found.program, found.n)):
            raise ArgumentError(
                f"all elements share {said}, so they are no experiments of their own: pass elementwise=False, and "
                f"small shapes"
            )
        return found


F = TypeVar("F", bound=Callable)


def with_options(f: F) -> F:
    """Give a function that takes `**options: Unpack[Options]` a signature with each of them and its default."""
    signature, defaults = inspect.signature(f), {field.name: field.default for field in fields(Case)}
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kinds = get_type_hints(Options)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in kinds.items()
    ]
    f.__signature__ = signature.replace(parameters=[*own, *named])  # pyright: ignore[reportFunctionMemberAccess]
    return f


def shared_by_elements(program: Program, n: int) -> str:
    """A value of a few numbers that a step takes beside one of n elements, or of their packed bits; of a sum or a
    difference it tells nothing of its own. Such a product is even in all elements where the few numbers are."""
    sizes = {i.slot: i.shape.numel() for i in program.inputs}
    for node in program.nodes:
        for slot, y in zip(node.slots, node.results, strict=True):
            sizes[slot] = y.numel() if isinstance(y, torch.Tensor) else 0
        step = node.step
        if isinstance(step, Compute) and step.f not in LINEAR and not is_tests(step.path):
            taken = [sizes[slot] for slot in node.taken if sizes[slot]]
            if taken and max(taken) >= n and min(taken) < -(-n // 64):
                return f"a value of {min(taken)} in a step of {step.path or 'the protocol'}"
    return ""
