"""A state of training as what is public of it, and what each party holds: of shared tensors its half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..choreography import Party
from ..errors import ArgumentError
from ..ring.scheme import Scheme
from ..session import Session
from ..tensor import SharedTensor
from .cells import Cell, Pool
from .tensor import DifferentiableTensor

_FACTS = ("scale_bits", "bound", "whole_bits")


class Halves:
    """What stands in a state: first all shared tensors and their flags, and the halves of them, then public tensors."""

    def __init__(self, session: Session, party: Party):
        self._session, self._party = session, party
        self._halves: list[tuple[torch.Tensor, ...]] = []
        self._at: dict[int, tuple[int, Any]] = {}
        self._facts: list[dict[str, Any]] = []
        self.public: list[torch.Tensor] = []

    def take(self, value: Any) -> Any:
        """The same tree for JSON, with numbers in the place of tensors.

        Raises:
            ArgumentError: something that is no state, or of another session.
        """
        if isinstance(value, Mapping):
            for key in value:
                if type(key) not in (str, int):
                    raise ArgumentError(f"a state has names or whole numbers as keys, got a {type(key).__name__}")
            return {"keys": list(value), "values": [self.take(entry) for entry in value.values()]}
        if isinstance(value, (list, tuple)):
            return {"tuple" if isinstance(value, tuple) else "list": [self.take(entry) for entry in value]}
        if isinstance(value, (SharedTensor, DifferentiableTensor)):
            return {"shared": self._shared(value)}
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
            self.public.append(value.detach())
            return {"public": len(self.public) - 1}
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return {"float": value.hex() if math.isfinite(value) else str(value)}
        raise ArgumentError(f"a state has tensors, numbers, text, lists and dictionaries, got a {type(value).__name__}")

    def _shared(self, tensor: SharedTensor | DifferentiableTensor) -> int:
        if tensor.session is not self._session or tensor.party != self._party:
            raise ArgumentError("a state has shared tensors of another session than its checkpoints")
        trained = isinstance(tensor, DifferentiableTensor)
        x = tensor.as_shared() if trained else tensor
        with torch._C.DisableTorchFunctionSubclass():
            dtype = str(x.dtype).removeprefix("torch.")
        self._facts.append({
            "half": self._half(x.shares), "flags": [self._half(flag) for flag in x.flags], "dtype": dtype,
            "shape": list(x.shares.shape), **{name: getattr(x, name) for name in _FACTS}, "trained": trained,
            "gradient": trained and tensor.cell.gradient, "scheme": vars(x.scheme),
        })  # fmt: skip
        return len(self._facts) - 1

    def _half(self, value: Any) -> int:
        """The place of a value's halves."""
        if id(value) not in self._at:
            with self._session.operation(self._party) as net:
                self._halves.append(self._session.backend(net, Scheme()).kept(value))
            self._at[id(value)] = len(self._halves) - 1, value
        return self._at[id(value)][0]

    def described(self) -> dict[str, Any]:
        """What is public of the shared tensors, for `joined`."""
        return {"tensors": self._facts, "halves": [[list(h.shape) for h in each] for each in self._halves]}

    def of(self, member: Party) -> list[Any]:
        """What a party keeps: its halves, and all public tensors. The answering party has the first, S the second."""
        at = [self._party, self._session.S].index(member) if member in (self._party, self._session.S) else None
        mine = [each[at] if at is not None and at < len(each) else None for each in self._halves]
        return [*mine, *self.public]


def joined(
    session: Session, party: Party, tree: Any, described: Mapping[str, Any], values: Mapping[Party, list[Any]]
) -> Any:
    """The state that `Halves` took, in a session in which the parties that are here bring what they kept."""
    holders = (party, session.S)
    shapes: list[list[list[int]]] = described["halves"]
    public = next(iter(values.values()))[len(shapes) :]

    def half(place: int, at: int) -> torch.Tensor:
        if holders[at] in values:
            return values[holders[at]][place]
        return torch.empty(shapes[place][at], dtype=torch.int64, device="meta")

    made: dict[int, Any] = {}
    with session.operation(party) as net:
        for place, sizes in enumerate(shapes):
            halves = [half(place, at) for at in range(len(sizes))]
            made[place] = session.backend(net, Scheme()).again(f"kept {place}", halves)
    tensors = [_tensor(session, party, facts, made) for facts in described["tensors"]]

    def built(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "keys" in value:
            return dict(zip(value["keys"], map(built, value["values"]), strict=True))
        ((kind, content),) = value.items()
        if kind == "float":
            return float.fromhex(content) if content not in ("inf", "-inf", "nan") else float(content)
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(built, content))
        return tensors[content] if kind == "shared" else public[content]

    return built(tree)


def _tensor(session: Session, party: Party, facts: Mapping[str, Any], made: Mapping[int, Any]) -> Any:
    scheme, dtype = Scheme(**facts["scheme"]), getattr(torch, facts["dtype"])
    x = SharedTensor(made[facts["half"]], facts["scale_bits"], session, party, scheme, dtype, facts["bound"])
    x.whole_bits, x.flags = facts["whole_bits"], tuple(made[place] for place in facts["flags"])
    if not facts["trained"]:
        return x
    return DifferentiableTensor(Cell(x, facts["gradient"], pool=Pool(x.flags, settled=True)))
