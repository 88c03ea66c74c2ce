"""What a garbler and Q make once a session: Delta, and the seeds of the correlated oblivious transfers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choreography import Located, Message, Net, Party, protocol, shaped
from ..errors import TopologyError
from . import baseot
from .hashing import private_words
from .sealing import deliver

TRANSFERS = 128
"""Base transfers: one for each bit of a label."""


@dataclass(frozen=True)
class Pair:
    """A garbler (an answering party, or S) and the evaluator Q. Serves any number of calls of one session.

    Attributes:
        delta: [2] at the garbler, its lowest bit one.
        seeds: [128, 2] at the garbler: of the two seeds in each row of Q's, the one that Delta's bit chooses.
        both_seeds: [128, 2, 2] at Q.
    """

    garbler: Party
    delta: Located
    seeds: Located
    both_seeds: Located


@protocol(
    "garbled_pair",
    "Chou, Orlandi 2015, Figure 1; Ishai, Kilian, Nissim, Petrank 2003",
    [
        Message("point", "Q", "S", "a public key", "a random point A of Ed25519"),
        Message("points", "S", "Q", "b G for each", "128 random points of Ed25519"),
    ],
)
def correlate(net: Net, garbler: Party) -> Pair:
    """Base oblivious transfers between Q, who sends, and `garbler`, whose choice bits are its Delta.

    Args:
        net: the setup net of an answering party (`session.setup(A)`); its base phase makes this a part of the setup.
        garbler: that answering party for step 1c, or S for step 3.

    Rounds 2 with S, 4 with A (through S, sealed); bytes 32 + 4096, with A on both edges. The messages are random group
    elements. Neither learns anything: Q has two seeds a row and not Delta, the garbler has one of each.

    Raises:
        TopologyError: the garbler is neither S nor this net's answering party.
        KeyAgreementError: a point that came is not a point of the group.
    """
    if garbler not in (net.A, net.S):
        raise TopologyError(f"{garbler} cannot garble for {net.Q} in a call with {net.A} and {net.S}")
    Q, session = net.Q, net.runtime.session
    delta = net.fresh(garbler, _delta)
    secret, point = net.fresh(Q, baseot.start)
    answers, seeds = net.fresh(garbler, _chosen, delta, deliver(net, point, Q, garbler, "point"), session)
    answers = deliver(net, answers, garbler, Q, "points")
    return Pair(garbler, delta, seeds, baseot.finish(secret, point, answers, session))


def _delta() -> torch.Tensor:
    """A fresh Delta."""
    words = private_words(2)
    words[0] |= 1
    return words


@shaped(lambda _delta, point, _session: (point.new_empty(TRANSFERS, baseot.POINT_WORDS), point.new_empty(TRANSFERS, 2)))
def _chosen(delta: torch.Tensor, point: torch.Tensor, session: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The garbler's answers [128, 4] and its seeds [128, 2]: Delta's bits are its choices."""
    return baseot.choose(point, [int(word) >> i & 1 for word in delta for i in range(64)], session)
