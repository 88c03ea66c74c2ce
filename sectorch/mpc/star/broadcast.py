"""Broadcast of public values through S: a party sends S its value, and S sends it to all others.

The values are public in the program: digests of what parties computed, the shape of an input, decisions that all
parties have to take alike. They do not depend on secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...choreography import Message, Net, Party, ProtocolSpec

_SHOWN = "what is public in the program"


def clients(net: Net) -> dict[str, Party]:
    """All parties except S, each by one of the roles that it plays."""
    found: dict[Party, str] = {}
    for role, party in net.cast.parties.items():
        found.setdefault(party, role)
    return {role: party for party, role in found.items() if party != net.S}


@contextmanager
def _declare_broadcast(net: Net, name: str) -> Iterator[dict[str, Party]]:
    """Declare a protocol in which every other party may send S a public value, and S every other party."""
    others = clients(net)
    messages = [Message(f"from_{role}", role, "S", "nothing", _SHOWN) for role in others]
    messages += [Message(f"to_{role}", "S", role, "nothing", _SHOWN) for role in others]
    spec = ProtocolSpec(name, "sectorch.mpc.star.broadcast", tuple(messages), "Public values.", net.cast.roles)
    with net.declared(spec):
        yield others


def compare_public_values(
    net: Net, own: torch.Tensor, check: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Let all parties check that they have the same public value: each against S's.

    Args:
        own: the value of this process's parties: uint8, of the same length at all parties.
        check: called at each party that compares, with the other party's name, its own value and the received one;
            returns its own value, or raises where they differ.

    Rounds 2, bytes twice those of `own` for each party except S. No party continues before S has all values.
    """
    with _declare_broadcast(net, "agree") as others:
        at_S = net.own(net.S, own)
        for role, party in others.items():
            received = net.own(party, own).send(party, net.S, f"from_{role}")
            net.check(net.S, _Check(party.name, check), at_S, received)
        for role, party in others.items():
            received = at_S.send(net.S, party, f"to_{role}")
            net.check(party, _Check(net.S.name, check), net.own(party, own), received)


class _Check:
    """A step that checks a party's own value against the one received from another party."""

    def __init__(self, other: str, check: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]):
        self.other, self.check = other, check

    def __call__(self, own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return self.check(self.other, own, received)

    @staticmethod
    def shapes(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return own


def broadcast(net: Net, name: str, by: Party, value: torch.Tensor) -> torch.Tensor:
    """Send a party's public value to all parties, and return it as all have it.

    Args:
        name: of the protocol and of the input.
        by: the party that has the value.
        value: the value; at other parties any tensor of its shape and type, which all know.

    Rounds 2, or 1 where `by` is S; the value's bytes from `by` to S and from S to each other party.
    """
    with _declare_broadcast(net, name) as others:
        result = net.own(by, value, name=name)
        for role, party in others.items():
            if party == by:
                result = result.send(by, net.S, f"from_{role}")
        for role, party in others.items():
            if party != by:
                result = result.send(net.S, party, f"to_{role}")
        return net.agreed(result, {net.S, *others.values()})


def choose_and_broadcast(net: Net, name: str, own: torch.Tensor, choose: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Let S choose a public value from those of all parties, and send the choice to all.

    Args:
        name: of the protocol and of the inputs.
        own: the value of this process's parties, of one shape and type at all parties.
        choose: called at S with the values, S's first; returns a tensor of their shape and type.

    Rounds 2, bytes twice those of `own` for each party except S.
    """
    with _declare_broadcast(net, name) as others:
        values = [net.own(net.S, own, name=name)]
        for role, party in others.items():
            values.append(net.own(party, own, name=name).send(party, net.S, f"from_{role}"))
        chosen = net.fresh(net.S, _Choice(choose), *(value.at(net.S) for value in values))
        for role, party in others.items():
            chosen = chosen.send(net.S, party, f"to_{role}")
        return net.agreed(chosen, {net.S, *others.values()})


class _Choice:
    """The step in which S chooses among the values of all parties."""

    def __init__(self, choose: Callable[..., torch.Tensor]):
        self.choose = choose

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        return self.choose(*values)

    @staticmethod
    def shapes(*values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values[0], device="meta")
