"""An operation held to its samples, each shown as small as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import ArgumentError, SectorchError
from ..ops.registry import REGISTERED
from ..session import Session
from ..tensor import Scheme
from ..tensor.table import row_of
from .calls import FOREIGN, INVALID, REFUSED, RIGHT, WRONG, Allowed, Call, Outcome, judged
from .forms import (
    problems_of_cost,
    problems_of_errors,
    problems_of_gradient,
    problems_of_out,
    problems_of_range,
    problems_of_spellings,
    refused,
    spellings,
)
from .revealing import revealed_by
from .smaller import smallest


@dataclass(frozen=True)
class Checked:
    """A function with its reference; `error_of` and `refuses` raise AssertionError with the smallest failing call."""

    func: Callable
    allowed: Allowed
    reference: Callable | None
    domain: tuple[float, float]
    refusals: bool

    @cached_property
    def real(self) -> Session:
        return Session()

    @cached_property
    def ideal(self) -> Session:
        return Session(reference=True)

    @cached_property
    def dry(self) -> Session:
        return Session(dry=True)

    def error_of(self, call: Call) -> float:
        """The largest error of a call, all of whose promises hold."""
        outcome = self._judged(call)
        if outcome.kind == INVALID:
            raise ArgumentError(
                f"there is no reference for {call.text(self.func)}: it does not run on plain tensors ({outcome.text}); "
                f"give reference=, or a sample that it takes"
            )
        bad = (WRONG, FOREIGN) if self.refusals else (WRONG, FOREIGN, REFUSED)
        if outcome.kind in bad:
            self._shown(call, outcome.kind)
        if outcome.kind != RIGHT:
            return 0.0
        for kind in (WRONG, FOREIGN):
            for which in self._patterns(call):
                if self._judged(call, which).kind == kind:
                    self._shown(call, kind, which)
        if row_of(self.func) is None or self.func in REGISTERED:
            self._reveals_nothing(call)
        for problems in self._problems():
            if next(problems(call), None) is not None:
                small = smallest(call, lambda c, p=problems: next(p(c), None) is not None)
                raise AssertionError(next(problems(small)))
        return outcome.error

    def _reveals_nothing(self, call: Call) -> None:
        """An operation gives shares, and opens nothing on the way."""
        for value in revealed_by(self.func, call):
            raise AssertionError(
                f"{call.text(self.func)}: {value}: an operation reveals nothing; give its result back in shares, or "
                f"hold it to what it reveals with check_program(f, inputs, reveals=)"
            )

    def refuses(self, pair: Any) -> float:
        """A call that must be refused, alone or with the kind of its error."""
        pair = tuple(pair) if isinstance(pair, (tuple, list)) else (pair,)
        kind = pair[-1] if len(pair) > 1 and isinstance(pair[-1], type) else SectorchError
        call = Call.of(pair[0])
        if (said := next(refused(self.func, call, self.real, kind), None)) is not None:
            raise AssertionError(said)
        return 0.0

    def _judged(self, call: Call, which: Callable = lambda i: True, at: Session | None = None) -> Outcome:
        return judged(self.func, call, at or self.real, self.allowed, which=which, reference=self.reference)

    def _shown(self, call: Call, kind: str, which: Callable = lambda i: True) -> None:
        small = smallest(call, lambda c: self._judged(c, which).kind == kind)
        outcome = self._judged(small, which)
        raise AssertionError(f"{small.text(self.func)}: {outcome.kind}: {outcome.text}")

    def _patterns(self, call: Call) -> list[Callable]:
        """Which tensors are shared, beside all of them."""
        return [lambda i: i == 0, lambda i: i > 0] if len(call.tensors) > 1 else []

    def _problems(self) -> Iterator[Callable[[Call], Iterator[str]]]:
        yield self._as_reference
        if len(spellings(self.func)) > 1:
            yield lambda c: problems_of_spellings(self.func, c, self.ideal, self.allowed)
        yield lambda c: problems_of_out(self.func, c, self.real)
        yield lambda c: problems_of_errors(self.func, c, self.real)
        yield lambda c: problems_of_cost(self.func, c, self.real, self.dry)
        if self.domain == (-float("inf"), float("inf")):
            yield lambda c: problems_of_range(self.func, c, self.ideal, self.reference)
        yield lambda c: problems_of_gradient(self.func, c, self.reference)

    def _as_reference(self, call: Call) -> Iterator[str]:
        """The session's reference has the bits of three parties; of a series, to a unit in one value of many."""
        found, ideal = self._judged(call).found, self._judged(call, at=self.ideal).found
        row = row_of(self.func)
        unit = 0.0 if row is not None and row.exact else 2.0 ** -Scheme().frac_bits
        for one, other in zip(found, ideal, strict=False):
            if isinstance(one, torch.Tensor) and one.numel():
                off = (one.double() - other.double()).abs()
                if bool((off > unit).any()) or int((off > 0).sum()) > 1:
                    yield (
                        f"{call.text(self.func)}: three parties differ from the reference by {float(off.max()):.3g}; "
                        f"a result is a function of its operands, and of no draw"
                    )
                    return
