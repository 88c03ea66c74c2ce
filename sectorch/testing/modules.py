"""`check_module`: checks that a module is supported by `secure`, or refused before it runs, and that it is right."""

from __future__ import annotations

import linecache
import math
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import nn
from torch.utils import _pytree as pytree

from ..config import scheme_fields, scheme_of
from ..display import Display
from ..errors import ArgumentError, RangeExceededError, SectorchError
from ..nn.explain import Explanation, explain, values
from ..nn.graph_cache import original
from ..nn.inputs import Inputs
from ..nn.module import SecureModule, reference, secure
from ..nn.weights import copy_module
from ..session import Session
from ..tensor import Scheme
from ..tensor.shared import Opening

AT = re.compile(r"at (\S.*?):(\d+)(?=[:\s]|$)")
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")
"""Folders without code of a model."""


class ModuleFault(AssertionError):
    """A module is refused, or its secure results are wrong; `report` has all findings.

    What to do:
        `report.change` is the first line of the model's code to change; `report.problems` are all, with their layers.
    """

    def __init__(self, report: ModuleReport):
        super().__init__(str(report))
        self.report = report


@dataclass
class ModuleReport(Display):
    """The findings of `check_module`.

    Attributes:
        kind, form: the module's class, and the inputs that the verdict is for.
        supported: whether inputs of this form can be run; known from shapes, before anything is shared.
        problems: the refusals, with layer and line, in the order of the forward; `problem` is the first.
        change: the first line of the model's code to change; empty if it is not known.
        other_rows: the errors of the same inputs with other numbers of rows.
        alone: the reason why the module runs operation by operation; the verdict then holds for this call only.
        explained: the cost, layer by layer.
        learned: the values that Q learns in a call.
        not_run: the reason why no call was made, or empty.
        equal: whether the secure result equals that of `sectorch.reference`, bit for bit (smooth functions: one unit).
        error, plain_error: the distance of the secure result, and of the plain one in its own dtype, from the plain one
            in float64, relative to its largest magnitude.
        ranges: layers by their largest value, the largest first, and the limit of activations.
    """

    kind: str
    form: str
    tolerance: float
    supported: bool = False
    problems: list[str] = field(default_factory=list)
    change: str = ""
    other_rows: dict[int, str] = field(default_factory=dict)
    alone: str = ""
    explained: Explanation | None = field(default=None, repr=False)
    learned: list[str] = field(default_factory=list)
    not_run: str = ""
    equal: bool | None = None
    error: float | None = None
    plain_error: float | None = None
    ranges: list[tuple[str, float]] = field(default_factory=list, repr=False)
    limit: float = math.inf

    @property
    def problem(self) -> str:
        return self.problems[0] if self.problems else ""

    @property
    def passed(self) -> bool:
        """Whether it is supported and, if it was run, equal to the reference and near the plain result."""
        near = self.error is None or self.error <= self.tolerance
        return self.supported and not self.problems and self.equal is not False and near

    def sections(self) -> Iterator[RenderableType]:
        """The verdict, and a line for each finding."""
        yield Text(f"{self.kind}, {self.form}: {'supported' if self.supported else 'not supported'}")
        yield from (Text(f"  {line}") for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"refused: {problem}" for problem in self.problems)
        if self.change:
            yield f"first line to change: {self.change}"
        yield from (f"with {rows} rows: {said}" for rows, said in self.other_rows.items())
        if self.alone:
            yield f"runs operation by operation, since {self.alone}: this is said of one call, another may do otherwise"
        if self.explained is not None:
            p = self.explained
            yield (
                f"cost: {p.rounds} rounds, {p.online_bytes / 1e6:.2f} MB online, {p.offline_bytes / 1e6:.2f} MB offline"
            )
        yield from (f"Q learns {what}" for what in self.learned)
        if self.ranges:
            name, most = self.ranges[0]
            yield f"largest value: {most:.4g} of at most {self.limit:g}, in {name}"
        if self.not_run:
            yield f"not run: {self.not_run}"
        if self.equal is not None:
            yield "equal to sectorch.reference" if self.equal else "differs from sectorch.reference"
        if self.error is not None:
            beside = f"plain {self.plain_error:.1e}; allowed {self.tolerance:g}"
            yield f"error {self.error:.1e} of the largest result ({beside})"

    def __str__(self) -> str:
        return self.table(140)


@scheme_fields
def check_module(
    model: nn.Module,
    example: torch.Tensor | Inputs,
    *,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    tolerance: float = 1e-3,
    run: bool = True,
    rows: tuple[int, ...] = (1, 64),
    megabytes: float = 2000,
    refuse: bool = True,
) -> ModuleReport:
    """Check that `sectorch.secure` supports a module, and that its secure results are right.

    Support is known from shapes and the weights' ranges, without the values of the example. Then the module is run by
    three parties in this process, by `sectorch.reference`, and in plain float64.

    Args:
        model: a module in evaluation mode; it is not changed.
        example: a tensor, or `Inputs(...)` of several. Only the run uses its values.
        scheme: as for `secure`.
        tolerance: the allowed distance of the secure result from plain float64, relative to its largest magnitude.
        run: whether to run the module; else only support is checked.
        rows: other numbers of rows to check for support, if the example's tensors have a common number of rows.
        megabytes: a call that sends more is not run; a core takes about 100 MB a second.
        refuse: raise an error for a failure; else it is only in the report.

    Raises:
        ModuleFault: an AssertionError with the report as its text: the module is refused, differs from the reference,
            leaves the range, or is farther than `tolerance` from plain.
        ArgumentError: no module, an example that the plain module does not take, or a wrong tolerance.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"check_module takes an nn.Module, got a {type(model).__name__}")
    if not tolerance > 0 or not megabytes > 0:
        raise ArgumentError(f"tolerance and megabytes are above 0, got {tolerance} and {megabytes}")
    scheme, inputs = scheme_of("check_module", scheme), Inputs.of(example)
    report = ModuleReport(type(model).__name__, _describe(inputs), tolerance)
    plain = _plain(model, inputs)
    secured = _check_support(model, inputs, scheme, rows, report)
    if secured is not None and run:
        cost = 0.0 if report.explained is None else report.explained.bytes / 1e6
        if cost > megabytes:
            report.not_run = (
                f"a call sends {cost:.3g} MB, above megabytes={megabytes:g}; give a smaller example, or more megabytes"
            )
        else:
            _run(model, plain, secured, inputs, scheme, report)
    if refuse and not report.passed:
        raise ModuleFault(report)
    return report


def _describe(inputs: Inputs) -> str:
    return ", ".join(
        f"{name} {list(s)} of {str(d).removeprefix('torch.')}" for name, (s, d) in inputs.described.items()
    )


@contextmanager
def _noting_errors(report: ModuleReport) -> Iterator[None]:
    """Record an error of the block as a problem of the report, with the line of the model if it is known."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        said = said if isinstance(error, SectorchError) else f"the forward raised {type(error).__name__}: {said}"
        if not any(said in known or known.split(": ", 1)[-1] in said for known in report.problems):
            report.problems.append(said)
        report.change = report.change or _line(_source(error))


def _source(error: Exception) -> str:
    """The file and line of the model where an error arose: from its text, or its innermost frame in the model."""
    place = getattr(error, "layer", "") or getattr(error, "place", "") or str(error)
    if found := AT.search(place):
        return f"{found[1]}:{found[2]}"
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own and not isinstance(error, SectorchError) else ""


def _line(source: str) -> str:
    """FILE:LINE with the text of that line."""
    path, _, number = source.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f"{source}  {text}".strip()


def _check_support(
    model: nn.Module, inputs: Inputs, scheme: Scheme, rows: tuple[int, ...], report: ModuleReport
) -> SecureModule | None:
    """Fill in support, cost and the values that Q learns, from shapes and weights.

    Returns:
        The secure module; None if it is refused.
    """
    secured: SecureModule | None = None
    with _noting_errors(report):
        secured = secure(model, scheme, session=Session())
        with suppress(Exception):  # the block below records the same error
            secured.choose_format(inputs)
        report.limit = secured.scheme.activation_limit
    if secured is None:
        return None
    with _noting_errors(report):
        report.explained = explain(secured, inputs)
        report.alone = secured.graphs.eager_reason or ""
        layers = [layer for layer in report.explained.layers if layer.problem]
        report.problems += [f"{layer.name}: {layer.problem}" for layer in layers]
        report.change = next((_line(layer.source) for layer in layers if layer.source), "")
    with _noting_errors(report):
        secured._check_once(inputs)
        if not report.alone:
            secured.check_weights(inputs)
    report.supported = not report.problems
    if not report.supported:
        return None
    for other in rows:
        if inputs.rows is not None and other != inputs.rows:
            _check_rows(secured, inputs.meta(other), other, report)
    report.learned = _values_learned(secured, inputs, report.explained)
    return secured


def _check_rows(secured: SecureModule, inputs: Inputs, rows: int, report: ModuleReport) -> None:
    try:
        secured._check_once(inputs)
    except Exception as error:  # errors of the forward itself too
        report.other_rows[rows] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def _values_learned(secured: SecureModule, inputs: Inputs, explained: Explanation | None) -> list[str]:
    """The values that Q learns: results, whether all values were in range, and what leaky protocols show."""
    outputs = secured._check(inputs.meta()).outputs
    opened = pytree.tree_leaves(outputs, is_leaf=lambda y: isinstance(y, Opening))
    found = [f"a result of {list(y.plain.shape)}" for y in opened if isinstance(y, Opening)]
    if secured.scheme.range_check:
        found.append("whether every value was in its range: one bit")
    lines = [] if explained is None else explained.profile.ledger
    return found + list(
        dict.fromkeys(
            f"{m.shows} (message {m.label} of {m.protocol})"
            for m in lines
            if m.shows and m.protocol not in ("reveal", "guard")
        )
    )


def _plain(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """The plain result, computed by a copy with the same weights, since a forward may change its module."""
    weights = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        with torch.no_grad():
            return _leaves(inputs.called(copy_module(model, weights), [x.clone() for x in inputs.tensors]))
    except Exception as error:
        said = " ".join(str(error).split())
        raise ArgumentError(
            f"{type(model).__name__} itself does not take {_describe(inputs)} ({type(error).__name__}: {said}); "
            f"give an example that it takes in plain"
        ) from error


def _run(
    model: nn.Module, plain: list[torch.Tensor], secured: SecureModule, inputs: Inputs, scheme: Scheme,
    report: ModuleReport,
) -> None:  # fmt: skip
    given = inputs.wide()
    exact = _leaves(original(secured.plain, given))
    report.ranges = _ranges(secured, inputs, given)
    with _noting_errors(report):
        try:
            found = _leaves(secured(inputs))
        except RangeExceededError as error:
            first = next((name for name, most in report.ranges if most >= report.limit), "a value of no single layer")
            raise RangeExceededError(f"{first}: {error}") from None
        ideal = _leaves(reference(model, scheme)(inputs))
        unit = 2.0**-secured.scheme.frac_bits
        report.equal = len(found) == len(ideal) and all(_near(a, b, unit) for a, b in zip(found, ideal, strict=True))
        report.error = _off(found, exact)
        report.plain_error = _off(plain, exact)


def _leaves(result: Any) -> list[torch.Tensor]:
    return [y for y in pytree.tree_leaves(result) if isinstance(y, torch.Tensor)]


def _near(a: torch.Tensor, b: torch.Tensor, unit: float) -> bool:
    """Whether two results are equal, except for rare values of smooth functions, which may differ by a unit."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    apart = (a.double() - b.double()).abs()
    return bool((apart <= unit).all()) and int((apart > 0).sum()) <= 1 + a.numel() // 2**20


def _off(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest difference over the largest magnitude of a result; infinite if their shapes differ."""
    if [tuple(y.shape) for y in found] != [tuple(y.shape) for y in exact]:
        return math.inf
    worst = 0.0
    for y, true in zip(found, exact, strict=True):
        if true.numel():
            off = float((y.to(true.dtype).double() - true.double()).abs().max())
            worst = max(worst, off / max(float(true.double().abs().max()), 1e-12) if not math.isnan(off) else math.inf)
    return worst


def _ranges(secured: SecureModule, inputs: Inputs, given: Inputs) -> list[tuple[str, float]]:
    sizes = {
        name: float(v.double().abs().nan_to_num(nan=math.inf).max())
        for name, v in values(secured, inputs, given).items()
        if isinstance(v, torch.Tensor) and v.numel() and not v.dtype.is_complex and v.dtype != torch.bool
    }
    return sorted(sizes.items(), key=lambda one: -one[1])
