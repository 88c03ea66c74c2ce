"""Where in a model a node comes from: the layer and the line, for errors and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import fx

from ..errors import (
    FixedPointRangeError,
    KeyAgreementError,
    MaterialError,
    NetworkError,
    RangeExceededError,
    SectorchError,
    ShapeError,
)
from ..tensor.shared import BY_SIZE, BY_ZERO, LEFT_RANGE
from .nodes import op_name

_TORCH = Path(torch.__file__).parent
_LAYERS = f"{_TORCH / 'nn' / 'modules'}{os.sep}"
_CALL = str(_TORCH / "nn" / "modules" / "module.py")
_OWN = ("capture.py", "eager.py", "padding.py", "written.py")
_SKIPPED = (f"{_TORCH}{os.sep}", str(Path(__file__)), *(str(Path(__file__).with_name(name)) for name in _OWN), "<")


@dataclass(frozen=True)
class SourceLocation:
    """What was running when a node was recorded.

    Attributes:
        layer, kind: path and type of the layer of torch's own that called the function; empty in a model's own code.
        module: path of the innermost module, of whatever kind.
        source: file and line of the model.
    """

    layer: str = ""
    kind: str = ""
    module: str = ""
    source: str = ""

    @staticmethod
    def now(layers: dict[int, str], innermost: FrameType | None = None) -> SourceLocation:
        """Of the frames that are running now, out to the call of the whole module.

        Args:
            layers: path by id of each module.
            innermost: of an error that has come out of its frames, the one that raised it.
        """
        frame, source, owner, layer = innermost or sys._getframe(1), "", None, False
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _CALL and code.co_name == "_call_impl":
                module = frame.f_locals.get("self")
                if id(module) in layers:
                    if owner is None:  # no code of the model's own on the way: a layer of torch's
                        owner, layer = module, not source
                    if not layers[id(module)]:
                        break
            elif not source and not code.co_filename.startswith(_SKIPPED):
                source = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        path = "" if owner is None else layers[id(owner)]
        if not layer:
            return SourceLocation(module=path, source=source)
        return SourceLocation(path, type(owner).__name__, path, source)

    def text(self, name: str = "") -> str:
        """For people: the layer's name and type, or the operation's, and the line."""
        if self.kind:
            name = f"'{self.layer}' ({self.kind})" if self.layer else self.kind
        return " ".join(["layer", *([name] if name else []), *([f"at {self.source}"] if self.source else [])])


def place_of(node: fx.Node) -> str:
    """The layer's name and type and the line of the model, for people."""
    where = node.meta.get("where")
    return SourceLocation().text(node.name) if where is None else where.text(node.name)


def raise_located(error: SectorchError, place: str) -> NoReturn:
    """Raise the error with the place before its text; as it is where it has a place, or belongs to none.

    No error is its own cause: it would keep itself alive, and with it the frames that hold the shares.
    """
    if not place or error.layer or isinstance(error, (NetworkError, KeyAgreementError, MaterialError)):
        raise error
    named = type(error)(f"{place}: {error}")
    named.layer = place
    if isinstance(error, FixedPointRangeError) and isinstance(named, FixedPointRangeError):
        named.needs = error.needs
    raise named from error


_ABOVE_ZERO = (
    "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "pow", "xlogy", "logit", "atanh", "acosh"
)  # fmt: skip
"""Functions whose argument, or a part of it, has to be above zero, or away from it."""


@contextmanager
def range_advice(program: Any) -> Iterator[None]:
    """A range error's text names the lines of the program that a guard may mend, or none where there is none such.

    Args:
        program: what was run, a `Trace`; None where the module runs operation by operation.
    """
    try:
        yield
    except RangeExceededError:
        if program is None:
            raise
        places = [
            f"{op_name(node)} in {place_of(node)}"
            for node in program.graph.nodes
            if op_name(node) in _ABOVE_ZERO and any(isinstance(a, fx.Node) for a in node.args[-1:])
        ]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        named = f"; {BY_ZERO} (here: {', '.join(places[:3])}{more})" if places else ""
        raise RangeExceededError(LEFT_RANGE + BY_SIZE + named) from None


@contextmanager
def layers_refusals(layers: dict[int, str]) -> Iterator[None]:
    """What a layer of torch's says of its input before it calls any function, as an error that names the layer.

    BatchNorm looks at the number of dimensions, a recurrent layer at the size of a state. What the model's own code
    raises stays as it is.

    Args:
        layers: path by id of each module.

    Raises:
        ShapeError: in torch's words.
    """
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or isinstance(error, SectorchError):
            raise
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LAYERS) or file == _CALL:
            raise
        raise ShapeError(f"{SourceLocation.now(layers, trace.tb_frame).text()}: {error}") from None


@contextmanager
def located_errors() -> Iterator[None]:
    """Errors of a program's steps, which know their place in the model, as errors that name it."""
    try:
        yield
    except SectorchError as error:
        if not error.place:
            raise
        raise_located(error, error.place)
