"""Public values that parties tell each other through S: what they have computed, an input's shape, what they keep.

They say nothing of anybody's secrets: a program has them in common, or may go by them. A party tells S, and S all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...choreography import Message, Net, Party, ProtocolSpec

_SHOWN = "what is public in the program"


def clients(net: Net) -> dict[str, Party]:
    """All parties but S, by a role that each plays."""
    found: dict[Party, str] = {}
    for role, party in net.cast.parties.items():
        found.setdefault(party, role)
    return {role: party for party, role in found.items() if party != net.S}


@contextmanager
def _telling(net: Net, name: str) -> Iterator[dict[str, Party]]:
    """Inside, every party may tell S something, and S it."""
    others = clients(net)
    messages = [Message(f"from_{role}", role, "S", "nothing", _SHOWN) for role in others]
    messages += [Message(f"to_{role}", "S", role, "nothing", _SHOWN) for role in others]
    spec = ProtocolSpec(name, "sectorch.mpc.star.broadcast", tuple(messages), "Public values.", net.cast.roles)
    with net.declared(spec):
        yield others


def compare_public_values(
    net: Net, own: torch.Tensor, check: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """All parties find out whether they have the same.

    Args:
        own: what this process's parties have: uint8, of one length at all.
        check: called where a party looks: with the other's name, its own and what came; raises where they differ.

    Rounds 2, bytes twice those of `own` for each party but S. No party goes on before all have told.
    """
    with _telling(net, "agree") as others:
        at_S = net.own(net.S, own)
        for role, party in others.items():
            came = net.own(party, own).send(party, net.S, f"from_{role}")
            net.check(net.S, _Check(party.name, check), at_S, came)
        for role, party in others.items():
            came = at_S.send(net.S, party, f"to_{role}")
            net.check(party, _Check(net.S.name, check), net.own(party, own), came)


class _Check:
    """A check of what a party has and what came of another."""

    def __init__(self, other: str, check: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]):
        self.other, self.check = other, check

    def __call__(self, own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        return self.check(self.other, own, came)

    @staticmethod
    def shapes(own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        return own


def broadcast(net: Net, name: str, by: Party, value: torch.Tensor) -> torch.Tensor:
    """What one party has, as all learn it: of a shape and type that all know. Rounds 2 (1 of S), its bytes to each."""
    with _telling(net, name) as others:
        found = net.own(by, value, name=name)
        for role, party in others.items():
            if party == by:
                found = found.send(by, net.S, f"from_{role}")
        for role, party in others.items():
            if party != by:
                found = found.send(net.S, party, f"to_{role}")
        return net.agreed(found, {net.S, *others.values()})


def choose_and_broadcast(net: Net, name: str, own: torch.Tensor, choose: Callable[..., torch.Tensor]) -> torch.Tensor:
    """choose(what each party has, ...), at S, as all learn it: of the shape and type of what each has.

    Rounds 2, bytes twice those of `own` for each party but S.
    """
    with _telling(net, name) as others:
        all_ = [net.own(net.S, own, name=name)]
        for role, party in others.items():
            all_.append(net.own(party, own, name=name).send(party, net.S, f"from_{role}"))
        chosen = net.fresh(net.S, _Chosen(choose), *(value.at(net.S) for value in all_))
        for role, party in others.items():
            chosen = chosen.send(net.S, party, f"to_{role}")
        return net.agreed(chosen, {net.S, *others.values()})


class _Chosen:
    """What S chooses of what all have."""

    def __init__(self, choose: Callable[..., torch.Tensor]):
        self.choose = choose

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        return self.choose(*values)

    @staticmethod
    def shapes(*values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values[0], device="meta")
