"""Three parties in threads, of which S (or another) falsifies what it sends; S signs for what it has sent."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from distributed_parties import Pipe, in_threads, runtime_of
from torch import nn

import sectorch
from sectorch.choreography import Phase
from sectorch.choreography.net import Move, Sent
from sectorch.choreography.run.party import PartyRuntime
from sectorch.config import Scheme
from sectorch.decoys import decoy_call
from sectorch.errors import FalseServerError, RangeExceededError
from sectorch.session import A, Q, S, Session

ACCOUNTABLE = Scheme(accountable=True)
EDGES = ((Q, S), (A, S))
Falsify = Callable[[int, Sent, torch.Tensor], torch.Tensor]
"""The number of a message of S's in its call, its line and its content -> what S sends."""


def messages_of_S(secure: Any, x: torch.Tensor) -> list[Any]:
    """The headers of S's messages in a call."""
    moves = [node.step.header for node in secure.choreography(x).call if isinstance(node.step, Move)]
    return [header for header in moves if header.src == S]


def flip(words: dict[int, Sequence[tuple[int, int]]]) -> Falsify:
    """S flips bits of its messages: by the number of the message, places (word, bit)."""

    def falsify(number: int, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if number not in words:
            return value
        changed = value.clone().reshape(-1)
        for word, bit in words[number]:
            bits = 8 * changed.element_size()
            unit = torch.tensor(1, dtype=torch.int64) << (bit % bits)
            at = word % len(changed)
            changed[at] = (changed[at].to(torch.int64) ^ unit).to(changed.dtype)
        return changed.view(value.shape)

    return falsify


class CheatingRuntime(PartyRuntime):
    """A party's runtime, which sends what `falsify` makes of messages of a call; S's digests are of what it sends."""

    falsify: Falsify | None = None
    seen: list[tuple[int, Sent, torch.Tensor]] | None = None
    """Where it is a list: call, line and content of each message that the party receives in calls."""
    clock: list[tuple[int, int, int, float]] | None = None
    """Where it is a list: call, bytes, direction and time of each of S's messages until its statement."""
    _count: dict[int, int]

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if line.src == self.me and line.phase != Phase.SETUP and line.path not in ("seed", "attest"):
            self._count = getattr(self, "_count", {})
            number = self._count[line.call] = self._count.get(line.call, -1) + 1
            if self.falsify is not None:
                value = self.falsify(number, line, value)
        moved = super().transfer(line, value)
        if self.seen is not None and line.dst == self.me and line.phase != Phase.SETUP and line.path != "seed":
            self.seen.append((line.call, line, moved.clone()))
        if self.clock is not None and self.me in (line.src, line.dst) and line.path != "attest":
            self.clock.append((line.call, line.bytes, int(line.src == self.me), time.perf_counter()))
        return moved


def run(
    model: nn.Module, calls: Sequence[tuple[torch.Tensor, bool]], falsify: Falsify | Sequence[Falsify] | None = None,
    scheme: Scheme = ACCOUNTABLE, begin: Callable[[Session], None] = lambda session: None, prepare: bool = False,
    goes_on: bool = False, cheater: Any = S, seen: list | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What each party has of these calls (input, whether it is a decoy): results and session, or the error at its end.

    Args:
        falsify: what S does to its messages, in all calls or one for each.
        begin: called with each party's session.
        prepare: whether all calls are prepared first.
        goes_on: whether calls go on after S was found out, whose error is then in the place of a result.
        cheater: the party that falsifies. seen: takes what it receives.
    """

    with torch.device("meta"):
        blank = copy.deepcopy(model).to("meta")

    def work(party: Any, ends: Any) -> Any:
        if party == cheater:
            runtime = CheatingRuntime(party, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})
            runtime.falsify, runtime.seen = falsify, seen
        else:
            runtime = runtime_of(party, ends)
        session = Session(runtime=runtime)
        begin(session)
        secure = sectorch.secure(model if party == A else blank, scheme, session=session)
        found = []
        if prepare:
            for x, _ in calls:
                secure.preprocess(len(x), tuple(x.shape[1:]))
        for x, decoy in calls:
            if party == cheater:
                runtime.falsify = falsify if callable(falsify) or falsify is None else falsify[len(found)]
            with decoy_call(decoy and party == Q):
                try:
                    found.append(secure(x if party == Q else x.to("meta")))
                except (FalseServerError, RangeExceededError) as error:
                    if not goes_on:
                        raise
                    found.append(error)
                    session.statements.found = None
        return found, session

    return in_threads(EDGES, work)
