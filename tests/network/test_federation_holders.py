"""Tensors of two parties that are neither Q nor S, whom S deals for, among processes over real TLS."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from federation_world import World, each
from network_world import until

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.errors import ArgumentError, RangeExceededError, SectorchError
from sectorch.federated.parties import Simulation

PARTIES = {"north": "A1", "south": "A2", "west": "Q", "hub": "S", "east": "T"}
X, Y = torch.tensor([1.5, -2.0, 3.25]), torch.tensor([2.0, 0.5, -1.0])


def program(parties, wrong: bool = False, large: float = 1.0, dealer: str = "S") -> torch.Tensor:
    """relu(x y) of A1's x and A2's y in halves of these two; then in halves of A1 and S, opened to Q."""
    mine = lambda role, x: x if parties.present(role) else x.to("meta")
    with ExitStack() as stack:
        product = None
        if any(map(parties.present, (dealer, "A1", "A2"))):
            cast = {"Q": dealer, "A": "A1", "S": "A2"}  # it deals, as Q does elsewhere
            pair = stack.enter_context(parties.session(STAR, cast, label="pair"))
            x = sectorch.share(mine("A1", large * X), owner="A", session=pair, limit=4.0 * large)
            product = (x * sectorch.share(mine("A2", Y), owner="S", session=pair, limit=4.0)).relu()
        star = None
        if any(map(parties.present, ("Q", "S", "A1", "A2"))):
            cast = {"Q": "Q", "A": "A1", "S": "S", "O": ["A2"]}
            star = stack.enter_context(parties.session(STAR, cast, label="star"))
        elif product is None:
            return torch.empty(3, device="meta")
        owners = ("A2", "A") if wrong else ("A", "A2")
        moved = sectorch.reshare(product, star, owners, shape=(3,), limit=64.0 * large)
        return torch.empty(3, device="meta") if star is None else (moved + 1).reveal(to="Q")


def test_two_parties_hold_a_tensor_and_give_it_to_others(tmp_path: Path):
    world = World(tmp_path, PARTIES)

    def work(name: str, **how) -> torch.Tensor:
        with world.party(name) as party:
            return program(party, **how)

    found = each(PARTIES, work)
    assert torch.equal(found["west"], program(Simulation())), found
    assert torch.equal(found["west"], (X * Y).relu() + 1)
    assert all(found[name].is_meta for name in ("north", "south", "hub", "east")), found
    refused = each(PARTIES, lambda name: work(name, wrong=True))
    assert isinstance(refused["north"], ArgumentError) and isinstance(refused["south"], ArgumentError), refused
    assert until(lambda: len(world.server._broker) == 0, 30)
    withheld = each(
        PARTIES, lambda name: work(name, large=4000.0, dealer="T")
    )  # who hears of it is not there to tell Q
    assert isinstance(withheld["east"], RangeExceededError), withheld
    assert all(isinstance(withheld[name], SectorchError) for name in PARTIES), withheld
    world.close()
