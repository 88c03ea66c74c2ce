"""`check_program`: checks that tensor code reveals the declared values and no others."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..choreography.net import Origins, Sent
from ..choreography.roles import STAR
from ..choreography.run.local import LocalRuntime
from ..config import Scheme
from ..errors import ArgumentError
from ..session import Q, Session, members_of
from ..tensor import share_tensor
from .calls import Call, call_name
from .protocols import Finding, ProtocolFault, ProtocolReport

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_SKIPPED = (_PACKAGE, str(Path(torch.__file__).parent) + os.sep, "<")
_SUMS = f"{_PACKAGE}tensor{os.sep}aggregation.py"
_HOLDERS = f"{_PACKAGE}tensor{os.sep}holders.py"
_NO_VALUES = {("guard", "key"), ("garbled_pair", "point"), ("garbled_pair", "points")}
"""Whether a result was withheld; and random points of base oblivious transfers."""
_SHARED = f"{_PACKAGE}tensor{os.sep}shared.py"


@dataclass(frozen=True)
class RevealedValue:
    """A value that a function reveals: its receiver, shape, message and protocol, and the line of code."""

    to: str
    shape: tuple[int, ...]
    message: str
    inputs: tuple[str, ...]
    same: bool
    line: str

    def __str__(self) -> str:
        of = f"computed from {', '.join(self.inputs)}" if self.inputs else "that was computed"
        of = f"that is {', '.join(self.inputs)} itself" if self.same and self.inputs else of
        return f"{self.to} learns a value of shape {self.shape} {of} ({self.message}), at {self.line}"


class _RecordingRuntime(LocalRuntime):
    """All parties in this process; records each message by which a party learns a value."""

    def __init__(self, owners: Sequence[str]):
        super().__init__(members_of(1, Q.name, owners, STAR, None, False).parties)
        self.origins: Origins | None = None
        self.revealed: list[RevealedValue] = []

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if line.learner == line.dst and not (line.from_package and (line.protocol, line.label) in _NO_VALUES):
            self._note(line)
        return super().transfer(line, value)

    def _note(self, line: Sent) -> None:
        shape, where, frame = tuple(line.shape), "", sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _SHARED and code.co_name == "check_range":
                return  # this opens only whether a value left its range
            if code.co_filename == _SHARED and code.co_name in ("reveal", "open"):
                with torch._C.DisableTorchFunctionSubclass():
                    shape = tuple(frame.f_locals["self"].shape)  # the shape without the flags of the range check
            if code.co_filename == _SUMS and code.co_name == "aggregate":
                shape = tuple(frame.f_locals["first"].shares.shape)
            if code.co_filename == _HOLDERS and code.co_name == "reveal_argmax":
                shape = tuple(frame.f_locals["x"].shares.shape[:-1])
            if not where and not code.co_filename.startswith(_SKIPPED):
                where = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        inputs, same, _ = (self.origins and self.origins.current) or (frozenset(), False, b"")
        names = tuple(sorted(name for _, name in inputs))
        self.revealed.append(RevealedValue(str(line.dst), shape, f"{line.label} of {line.path}", names, same, where))


def revealed_by(
    f: Callable, call: Call, owners: Sequence[str] = (), scheme: Scheme | None = None
) -> list[RevealedValue]:
    """The values that f reveals on a call's tensors, each shared by its owner, by default Q."""
    further = [name for name in dict.fromkeys(owners) if name not in ("Q", "A", "S")]
    noting = _RecordingRuntime(further)
    session = Session(owners=further, runtime=noting)
    session.origins = noting.origins = Origins()
    noting.revealed.clear()
    owned = iter([*owners, *[Q.name] * (len(call.tensors) - len(owners))])
    count = iter(range(len(call.tensors)))

    def share(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name, owner, plain = f"input {next(count)}", next(owned), leaf.detach()
        if plain.is_complex():
            parts = (part.contiguous() for part in (plain.real, plain.imag))
            return torch.complex(
                *(share_tensor(p, session=session, owner=owner, scheme=scheme, name=name) for p in parts)
            )
        return share_tensor(plain, session=session, owner=owner, scheme=scheme, name=name)

    call.map(share).on(f)
    return noting.revealed


def check_program(
    f: Callable,
    inputs: Any,
    *,
    reveals: Iterable[tuple[str, Sequence[int]]] = (),
    owners: Sequence[str] = (),
    scheme: Scheme | None = None,
) -> ProtocolReport:
    """Check that tensor code reveals the declared values and no others.

    The function runs once among three parties in this process, on these inputs, which are shared. A result in shares
    is not revealed. Each `reveal`, aggregate, opened result or message by which a party learns a value in it counts,
    whatever the function does with the value.

    Args:
        f: a function of tensors that may be `SharedTensor`s.
        inputs: a `Call`, a tensor or a tuple of arguments; all tensors are shared.
        reveals: exactly the values that f may reveal, each as its receiver ("Q", "A", "S", an owner) and its shape.
        owners: the owners of the tensors, in order; by default Q.
        scheme: the number representation.

    Returns:
        A report, if f reveals the declared values and nothing else.

    Raises:
        ProtocolFault: a value is revealed and not declared (the text has its receiver, shape, inputs and line), or
            declared and not revealed. An AssertionError.
        ArgumentError: more owners than tensors, or a wrong declaration.
        SectorchError: f itself is refused.

    Code that depends on a revealed value is checked for these inputs only, so give inputs of each kind. A session that
    f makes itself is not checked. All halves are in this process; f must not read them.
    """
    start, call = time.monotonic(), Call.of(inputs)
    if len(owners) > len(call.tensors):
        raise ArgumentError(f"{len(owners)} owners are named, of {len(call.tensors)} tensors")
    wanted = Counter(_parse_declaration(said) for said in reveals)
    found = revealed_by(f, call, owners, scheme)
    report = ProtocolReport(looked={"reveals": f"{len(found)} in {call_name(f)}, {wanted.total()} declared"})
    left = wanted.copy()
    for value in found:
        if left[value.to, value.shape]:
            left[value.to, value.shape] -= 1
        else:
            report.findings.append(Finding("reveals", f"{value}, which is not declared"))
    for to, shape in left.elements():
        report.findings.append(Finding("reveals", f"{to} is to learn a value of shape {shape}, which is not revealed"))
    report.seconds = time.monotonic() - start
    if report.findings:
        raise ProtocolFault(report)
    return report


def _parse_declaration(said: Any) -> tuple[str, tuple[int, ...]]:
    try:
        to, shape = said
        return str(to), tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        raise ArgumentError(
            f'a reveal is declared as who learns it and its shape, ("Q", (3,)); got {said!r:.80}'
        ) from None
