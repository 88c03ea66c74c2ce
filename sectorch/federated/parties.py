"""Who takes part in a program: all parties in this process, or one of them, whose others are elsewhere.

A program among parties is a function of `Parties`. It opens sessions by their roles, brings in what the parties that
are here have, and returns what they learned. The same function runs as a simulation (`Simulation`) and as one party of
a federation (`sectorch.network.federation.party.Federation`), with the same results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..choreography import Party, Roles
from ..choreography.roles import STAR
from ..choreography.run.local import LocalRuntime
from ..choreography.steps import Runtime
from ..errors import ArgumentError
from ..session import Session

Names = Mapping[str, str | Sequence[str]]
"""Of the parties that play each role; several in a list."""


class Parties(Protocol):
    """What a program among parties is given.

    `inputs` are the tensors that the parties that are here bring, by name. `folder` is where they keep what a later run
    goes on with (`sectorch.Checkpoints`); it need not be there.
    """

    inputs: Mapping[str, torch.Tensor]
    folder: Path

    def present(self, party: str) -> bool:
        """Whether that party's values are in this process."""
        ...

    def session(
        self, roles: Roles, names: Names | None = None, *, label: str = ..., agreed: str = ...
    ) -> AbstractContextManager[Session]:
        """A session of these roles, which ends with the block.

        Args:
            names: of the parties that play them, by role; they go by their roles' names unless given. In secure
                inference (`STAR`) A may be several, in a list: they are the session's `answering`, in that order; D may
                be a dealer, and O a list of owners that hold no shares (`Session(owners=)`).
            label: of two sessions of the same parties at the same time, each has its own.
            agreed: settings, or a program's digest, that must be the same at all parties.
        """
        ...

    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = ..., agreed: str = ...
    ) -> AbstractContextManager[Runtime]:
        """What a session runs on: for protocols in which several parties play one role, on nets of their own.

        Args:
            parties: everyone, with the name that it goes by among the parties.
        """
        ...


class Simulation:
    """All parties in this process: for development and as the oracle of tests. It protects nothing."""

    def __init__(self, inputs: Mapping[str, torch.Tensor] | None = None, folder: str | Path = "kept"):
        self.inputs: Mapping[str, torch.Tensor] = dict(inputs or {})
        self.folder = Path(folder)

    def present(self, party: str) -> bool:
        return True

    @contextmanager
    def session(
        self, roles: Roles, names: Names | None = None, *, label: str = "session", agreed: str = ""
    ) -> Iterator[Session]:
        if roles is STAR:
            yield star(names or {})
        else:
            yield Session(roles=roles, names={role: str(name) for role, name in (names or {}).items()})

    @contextmanager
    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = "session", agreed: str = ""
    ) -> Iterator[Runtime]:
        yield LocalRuntime(frozenset(parties))


def listed(names: str | Sequence[str]) -> list[str]:
    """One name, or several."""
    return [names] if isinstance(names, str) else list(names)


def star(names: Names, dry: bool = False) -> Session:
    """A session of secure inference in one process; see `Parties.session`."""
    dealer, owners = "D" if "D" in names else "Q", listed(names.get("O", ()))
    return Session(answering=len(listed(names.get("A", "A"))), dealer=dealer, owners=owners, dry=dry)


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """What a program returned, by name: a tensor, a mapping of tensors, or nothing. What others learned is left out.

    Raises:
        ArgumentError: something else.
    """
    if result is None:
        return {}
    named = {"result": result} if isinstance(result, torch.Tensor) else result
    if not isinstance(named, Mapping) or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise ArgumentError(f"a program returns a tensor, tensors by name, or nothing, got a {type(result).__name__}")
    return {str(name): value for name, value in named.items() if not value.is_meta}
