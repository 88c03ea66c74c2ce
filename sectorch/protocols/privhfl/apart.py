"""Clients and the server in processes apart: whose turn it is to ask, and whether it still asks."""

from __future__ import annotations

import torch

from ...choreography import Located, Message, Net, protocol
from ...federated.turns import TURN, Turns

_WANTED = "whether the client whose turn it is asks, or has its answers from before"


@protocol("privhfl_turn", "Algorithm 1, line 5", [Message("wanted", "C", "S", "nothing", _WANTED)], roles=TURN)
def tell(net: Net, wanted: Located) -> Located:
    """A client that was stopped may have its answers: they are not asked for twice. int64 [1]. Rounds 1, bytes 8."""
    return wanted.send(net.C, net.S, "wanted").at(net.S)


@protocol("privhfl_told", "Algorithm 1, line 5", [Message("told", "S", "C", "nothing", _WANTED)], roles=TURN)
def told(net: Net, wanted: Located) -> Located:
    """The same, to another client. Rounds 1, bytes 8."""
    return wanted.send(net.S, net.C, "told")


def asks(turns: Turns, client: str, wanted: bool | None = None) -> bool:
    """Whether the client whose turn it is asks; `wanted` where it is here. Everybody hears the same."""
    said = None if wanted is None else torch.tensor([int(wanted)])
    return bool(turns.hear(client, said, 1, tell, told))
