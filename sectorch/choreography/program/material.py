"""Offline material: everything of a call that does not depend on the query, made ahead of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import MaterialError


@dataclass
class Material:
    """What a party keeps of the offline steps of one call. Its repr shows no content.

    Attributes:
        call: the call that it is for.
        session: the session that it is of.
        program: the digest of its program.
        setup: the number of the setup that it was made with, which is one model's.
        values: what the online steps use, in the order of the program.
    """

    call: int
    session: bytes
    program: str
    setup: int | None
    values: list[Any] | None = field(repr=False)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """What was brought into it; not kept on disk, where a party has one model."""
    _claimed: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def take(self, session: bytes, program: str, setup: int | None) -> list[Any]:
        """Its values, once: its masks hide one query. Whoever is refused leaves it as it was.

        Args:
            setup: None where a session has one model only, and was taken up again.

        Raises:
            MaterialError: it is of another session, program or model, or was used already.
        """
        if self.session != session:
            raise MaterialError("the prepared material belongs to another session")
        if self.program != program:
            raise MaterialError("the material was prepared for another program, other shapes or other arguments")
        if setup is not None and self.setup != setup:
            raise MaterialError("the material was prepared for another model, or for other weights")
        if not self._claimed.acquire(blocking=False):
            raise MaterialError(f"the material of call {self.call} was used already; prepare it again")
        values, self.values = self.values or [], None
        return values

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        held = {v.untyped_storage().data_ptr(): v for v in self.values or () if isinstance(v, torch.Tensor)}
        return sum(v.untyped_storage().nbytes() for v in held.values())
