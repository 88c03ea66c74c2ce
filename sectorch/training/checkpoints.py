"""`sectorch.Checkpoints`: each party stores its own half of a training's state, sealed under its own key.

    FOLDER/PARTY/key                 32 bytes
    FOLDER/PARTY/000000000012.state  its half of step 12: AES-256-GCM, its associated data name the party and the step

A save begins when all parties have reached it, so no party is more than one save ahead, and each party keeps the last
two states. After any party was killed, there is therefore a newest state that all parties have, and all resume from it.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cryptography.exceptions import InvalidTag

from .. import files
from ..choreography import Party
from ..config import Scheme, scheme_of_fields
from ..errors import ArgumentError, CheckpointError
from ..sealed import SealedHead, key_of, read_tensors, seal, unseal, write_tensors
from ..session import Session, default_session
from ..tensor import SharedTensor
from .autograd_values import Cell, Pool
from .tensor import DifferentiableTensor

# A state as its public facts and each party's halves of shared tensors.


_FACTS = ("scale_bits", "bound", "whole_bits")


class StateShares:
    """The contents of a state: facts and halves of the shared tensors and their flags, and the public tensors."""

    def __init__(self, session: Session, party: Party):
        self._session, self._party = session, party
        self._halves: list[tuple[torch.Tensor, ...]] = []
        self._at: dict[int, tuple[int, Any]] = {}
        self._facts: list[dict[str, Any]] = []
        self.public: list[torch.Tensor] = []

    def take(self, value: Any) -> Any:
        """The same tree for JSON, with numbers in place of tensors.

        Raises:
            ArgumentError: a value that a state cannot hold, or a tensor of another session.
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
        if isinstance(tensor, DifferentiableTensor) and tensor.cell.own:
            raise ArgumentError(
                "a state holds no frozen weight, which its owner has: save {k: p for k, p in model.named_parameters() "
                "if p.requires_grad}, and load it by model.load_state_dict(state, strict=False)"
            )
        x = tensor.as_shared() if trained else tensor
        with torch._C.DisableTorchFunctionSubclass():
            dtype = str(x.dtype).removeprefix("torch.")
        self._facts.append({
            "half": self._half(x.shares), "flags": [self._half(flag) for flag in x.flags], "dtype": dtype,
            "shape": list(x.shares.shape), **{name: getattr(x, name) for name in _FACTS}, "trained": trained,
            "gradient": trained and tensor.cell.gradient, "scheme": x.scheme.fields(),
        })  # fmt: skip
        return len(self._facts) - 1

    def _half(self, value: Any) -> int:
        """The position of a value's halves in `_halves`."""
        if id(value) not in self._at:
            with self._session.operation(self._party) as net:
                self._halves.append(self._session.backend(net, Scheme()).export_shares(value))
            self._at[id(value)] = len(self._halves) - 1, value
        return self._at[id(value)][0]

    def described(self) -> dict[str, Any]:
        """The public facts of the shared tensors, for `join_state`."""
        return {"tensors": self._facts, "halves": [[list(h.shape) for h in each] for each in self._halves]}

    def of(self, member: Party) -> list[Any]:
        """The tensors that a party stores: its halves, and all public tensors. A has the first half, S the second."""
        at = [self._party, self._session.S].index(member) if member in (self._party, self._session.S) else None
        mine = [each[at] if at is not None and at < len(each) else None for each in self._halves]
        return [*mine, *self.public]


def join_state(
    session: Session, party: Party, tree: Any, described: Mapping[str, Any], values: Mapping[Party, list[Any]]
) -> Any:
    """The state that `StateShares` took, from the tensors that the parties of this process stored."""
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
            made[place] = session.backend(net, Scheme()).import_shares(f"kept {place}", halves)
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
    scheme, dtype = scheme_of_fields(facts["scheme"]), getattr(torch, facts["dtype"])
    x = SharedTensor(made[facts["half"]], facts["scale_bits"], session, party, scheme, dtype, facts["bound"])
    x.whole_bits, x.flags = facts["whole_bits"], tuple(made[place] for place in facts["flags"])
    if not facts["trained"]:
        return x
    return DifferentiableTensor(Cell(x, facts["gradient"], pool=Pool(x.flags, one_way=True)))


_NAME = re.compile(r"(\d{12})\.state")
_NOTHING, _LOST = -1, -2


class Checkpoint(NamedTuple):
    """A state that all parties have, and the step after which it was saved."""

    step: int
    state: dict[str, Any]


class Checkpoints:
    """The states of a training, in a folder of each party's own.

        checkpoints = sectorch.Checkpoints(parties.folder, session=session)
        if (found := checkpoints.newest()) is not None:
            model.load_state_dict(found.state["model"]), optimiser.load_state_dict(found.state["optimiser"])
        ...
        checkpoints.save(step, {"model": model.state_dict(), "optimiser": optimiser.state_dict()})

    Args:
        folder: the folder of the parties of this process; each has its own folder in it.
        session, party: as of `sectorch.share`.

    A party stores its half of each shared tensor, the flags on which the tensor depends, and its public facts; and the
    values of public numbers and tensors. A party without a half stores what is public. A and S learn nothing of each
    other's halves. Whoever has both folders and both keys has the model.

    Raises:
        ArgumentError: the folder cannot be used.
    """

    def __init__(self, folder: str | Path, *, session: Session | None = None, party: Party | None = None):
        self._session = session or default_session()
        self._party = self._session.answering_party(party)
        self._last: int | None = None
        self._shelves = {
            member: _Shelf(Path(folder) / member.name, member.name)
            for member in sorted(self._session.parties, key=lambda p: p.name)
            if self._session.present(member)
        }

    def __repr__(self) -> str:
        return f"Checkpoints({', '.join(member.name for member in self._shelves)})"

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Store the state after this step; the one before stays too. After the return a power cut does not undo it.

        Args:
            step: a number, larger with each save.
            state: dictionaries, lists, numbers, strings, public tensors, shared tensors: `state_dict()`s, say.

        Between processes: 3 rounds, and 80 bytes for each party but S.

        Raises:
            ArgumentError: a value that a state cannot hold; nothing was written.
            DisagreementError: the parties have not computed the same.
            CheckpointError: the state cannot be written here.
        """
        if type(step) is not int or not 0 <= step < 10**12 or (self._last is not None and step <= self._last):
            raise ArgumentError(f"a step is a whole number above that of the last save ({self._last}), got {step!r}")
        halves = StateShares(self._session, self._party)
        tree = halves.take(state)
        self._session.agreement.note(self._party, "save", step, tree, halves.public)
        self._session.agreement.compare(self._party)
        nonce = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.int64).clone()
        (drawn,) = self._session.agreement.broadcast(self._party, "save", self._session.S, nonce).tolist()
        for member, shelf in self._shelves.items():
            head = {"nonce": drawn, "first": self._last is None, "tree": tree, "shares": halves.described()}
            shelf.put(step, head, halves.of(member), keep=self._last)
        self._last = step

    def newest(self) -> Checkpoint | None:
        """The newest state that all parties have; None if the parties have not saved one yet.

        Between processes: 2 rounds and 64 bytes for each party but S.

        Raises:
            CheckpointError: the parties have saved states, and have none in common: a folder was lost, or belongs to
                another training.
        """
        kept = [shelf.kept() for shelf in self._shelves.values()]
        if len(kept) == 1:
            own = torch.tensor(kept[0], dtype=torch.int64)
        else:  # all parties are here
            own = _newest(*(torch.tensor(one, dtype=torch.int64) for one in kept))
        step, nonce, *_ = self._session.agreement.choose_and_broadcast(self._party, "resume", own, _newest).tolist()
        if step == _LOST:
            raise CheckpointError(
                "no state is there at all parties, though they have saved some: look for the folder that is missing, "
                "or remove those of all parties to begin anew"
            )
        self._session.agreement.note(self._party, "resume", step, nonce)
        if step == _NOTHING:
            return None
        self._last = step
        found = {member: shelf.get(step) for member, shelf in self._shelves.items()}
        head = next(iter(found.values()))[0]
        facts = {"nonce": head.nonce, "tree": head.tree, "shares": head.shares}
        self._session.agreement.note(self._party, "resumed", facts)
        values = {member: values for member, (_, values) in found.items()}
        return Checkpoint(step, join_state(self._session, self._party, head.tree, head.shares, values))


def _newest(*kept: torch.Tensor) -> torch.Tensor:
    """The newest state that all parties have: [step, nonce, no step, 0, count].

    Args:
        kept: of each party [step, nonce, step, nonce, count], its last two states and whether it saved none, one or
            more.
    """
    lists = [party.tolist() for party in kept]
    states = [{(step, nonce) for step, nonce in ((k[0], k[1]), (k[2], k[3])) if step >= 0} for k in lists]
    common = sorted(set.intersection(*states))
    lost = any(k[4] > 1 or k[0] == _LOST for k in lists)
    step, nonce = common[-1] if common else (_LOST if lost else _NOTHING, 0)
    return torch.tensor([step, nonce, _NOTHING, 0, max(k[4] for k in lists)], dtype=torch.int64)


class StateHead(SealedHead, frozen=True, kw_only=True):
    """The facts of a state: a draw that names the save, whether it was the first, and the forms of the values."""

    nonce: int
    first: bool
    tree: Any
    shares: Any


class _Shelf:
    """The sealed states of one party."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._key = key_of(folder / "key")
        except OSError as error:
            raise ArgumentError(f"cannot keep a state in {folder}: {error.strerror}") from None

    def kept(self) -> list[int]:
        """Step and nonce of the last two complete states, and the number of saves: 0, 1 or 2 for more."""
        states: list[int] = []
        saves = 0
        for step in self._steps():
            with suppress(CheckpointError):
                head, _ = self.get(step)
                states += [step, head.nonce]
                saves = max(saves, 1 if head.first else 2)
        states = states[-4:]
        return [*states, *(4 - len(states)) // 2 * [_NOTHING, 0], saves]

    def put(self, step: int, head: dict[str, Any], values: list[Any], keep: int | None) -> None:
        parts, _ = write_tensors(head, values)
        try:
            files.write(self._path(step), b"".join(seal(self._key, parts, self._about(step))), 0o600)
            for other in self._steps():
                if other not in (step, keep):
                    self._path(other).unlink()
        except OSError as error:
            raise CheckpointError(f"cannot keep the state of step {step} in {self._folder}: {error.strerror}") from None

    def get(self, step: int) -> tuple[StateHead, list[Any]]:
        """Head and tensors of a state. Raises CheckpointError if it is incomplete, or another party's."""
        try:
            content = self._path(step).read_bytes()
            return read_tensors(unseal(self._key, io.BytesIO(content), len(content), self._about(step)), StateHead)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path(step)}: {error.strerror}") from None
        except (InvalidTag, ValueError):
            raise CheckpointError(f"{self._path(step)} is not whole, or was sealed by another party") from None

    def _steps(self) -> list[int]:
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:012d}.state"

    def _about(self, step: int) -> bytes:
        return f"sectorch v1/state/{self._name}/{step}".encode()
