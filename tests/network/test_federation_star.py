"""Secure inference among parties of a federation: several that answer, and a server that neither takes at its word."""

from __future__ import annotations

import copy

import pytest
import torch
from federation_world import World, each
from network_world import until
from torch import nn

import sectorch
from sectorch.choreography.ledger import Profile
from sectorch.choreography.roles import STAR
from sectorch.dp import GNMax
from sectorch.errors import ArgumentError, IdentityError, KeyAgreementError, SectorchError
from sectorch.federated.parties import Simulation
from sectorch.mpc.star import key_agreement as seeding
from sectorch.protocols.capc.ask import Panel, Voter
from sectorch.protocols.privhfl.query import plain_query, secure_query
from sectorch.session import Session

PARTIES = {"north": "C1", "south": "C2", "west": "C3", "hub": "S"}
NAMES = {"Q": "C1", "A": ["C2", "C3"], "S": "S"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("star"), PARTIES)
    yield world
    world.close()


def models() -> dict[str, nn.Module]:
    """Of the two that answer: weights of their own, drawn from the seed of whoever knows it."""
    made = {}
    for name, hidden in (("C2", 5), ("C3", 7)):
        torch.manual_seed(hidden)
        made[name] = nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 3)).eval()
    return made


def lines(profile: Profile) -> set[tuple]:
    return {(m.path, m.label, m.src.name, m.dst.name, tuple(m.shape), m.dtype, m.call) for m in profile.ledger}


def test_a_sum_of_two_models_by_parties_apart(world):
    """Q alone learns the sum; each party has its own weights or images alone; the messages are those of one process."""
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    with Profile() as whole, Simulation().session(STAR, NAMES) as session:
        expected, _ = secure_query(x, list(models().values()), session=session)

    made = models()

    def work(name: str):
        role = PARTIES[name]
        known = [model if n == role else copy.deepcopy(model).to("meta") for n, model in made.items()]
        asked = x if role == "C1" else x.to("meta")
        with Profile() as profile, world.party(name) as party, party.session(STAR, NAMES) as session:
            return secure_query(asked, known, session=session)[0], profile

    found = each(PARTIES, work)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    total = found["north"][0]
    plain = plain_query(x, list(models().values()))
    assert (total - plain).abs().max() < 1e-4 and (total - expected).abs().max() < 1e-4
    assert all(found[name][0].is_meta for name in ("south", "west", "hub"))
    for _, profile in found.values():
        assert {line[:-1] for line in lines(profile)} == {line[:-1] for line in lines(whole)}
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_a_server_that_puts_its_own_key_between_q_and_one_that_answers_is_noticed(world, monkeypatch):
    """The hub plays S, relays the seed protocol, and is a party that the others' file names: its key is not A's."""
    signed = seeding._signed

    def forged(session, role, who, public_q, public_a):
        other = seeding.Identities(who.names, context=who.context)
        return signed(session, role, other, public_q, public_a)  # by a key of the attacker's, rightly signed

    monkeypatch.setattr(seeding, "_signed", forged)

    def work(name: str):
        with world.party(name) as party, party.session(STAR, {"Q": "C1", "A": "C2", "S": "S"}):
            return None

    found = each(("north", "south", "hub"), work)
    assert all(isinstance(error, SectorchError) for error in found.values()), found
    assert any(isinstance(error, IdentityError | KeyAgreementError) for error in found.values()), found


@pytest.mark.parametrize(
    "names", [None, {"Q": "C1", "S": "S"}, {"Q": "C1", "S": "S", "A": []}, {"Q": ["C1"], "S": "S", "A": "C2"},
              {"Q": "C1", "S": "S", "A": ["C2", "C2"]}, {"Q": "C2", "S": "S", "A": "C3"}],
)  # fmt: skip
def test_a_cast_that_is_none_is_refused(world, names):
    with world.party("north") as party, pytest.raises(ArgumentError), party.session(STAR, names):
        raise AssertionError("a session began")


def test_a_simulation_has_as_many_that_answer():
    with Simulation().session(STAR, NAMES) as session:
        assert isinstance(session, Session) and len(session.answering) == 2


@pytest.mark.parametrize("engine", ["shares", "yao"])
def test_a_vote_on_tensors_by_parties_apart(world, engine):
    """Tensors move from two parties to Q and S, S draws, and Q alone learns the labels; as in one process."""
    x, made = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(3)), models()
    noise = torch.randint(-2, 3, (5, 3), generator=torch.Generator().manual_seed(4))

    def vote(session: Session, here: str = "") -> list[torch.Tensor]:
        asked = x if here in ("", "C1") else x.to("meta")
        ballots = []
        for party, (name, model) in zip(session.answering, made.items(), strict=True):
            model = model if here in ("", name) else copy.deepcopy(model).to("meta")
            logits = sectorch.secure(model, session=session, party=party)(
                sectorch.share(asked, session=session, party=party)
            )
            ballots.append(sectorch.one_hot_argmax(logits, engine=engine))
        votes = sectorch.collect(ballots)
        noisy = votes + sectorch.draw("S", lambda shape: noise, (5, 3), session=session, party=session.Q, limit=3)
        return [sectorch.reveal_argmax(noisy, engine=engine), votes.amax(1).reveal()]

    with Profile() as whole, Simulation().session(STAR, NAMES) as session:
        expected = vote(session)
    counts = sum(nn.functional.one_hot(model(x).argmax(1), 3) for model in made.values())
    assert torch.equal(expected[0], (counts + noise).argmax(1)) and torch.equal(expected[1], counts.amax(1))

    def work(name: str):
        with Profile() as profile, world.party(name) as party, party.session(STAR, NAMES) as session:
            return vote(session, PARTIES[name]), profile

    found = each(PARTIES, work)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    assert all(torch.equal(*pair) for pair in zip(found["north"][0], expected, strict=True))
    assert all(value.is_meta for name in ("south", "west", "hub") for value in found[name][0])
    agreed = {line[:-1] for line in lines(found["north"][1])} - {line[:-1] for line in lines(whole)}
    assert {line[0].split("/")[-1] for line in agreed} <= {"agree"}


@pytest.mark.parametrize("argmax", ["shares", "yao"])
def test_labels_by_noisy_vote_of_parties_apart(world, argmax):
    """CaPC, steps 1 to 3: Q alone learns labels, which are those of the votes where the noise is next to none."""
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    made = models()
    plain = sum(nn.functional.one_hot(model(x).argmax(1), 3) for model in made.values())
    quiet = GNMax(0.01)

    def work(name: str):
        role = PARTIES[name]
        voters = [Voter(n, m if n == role else copy.deepcopy(m).to("meta")) for n, m in made.items()]
        with world.party(name) as party, party.session(STAR, NAMES) as session:
            panel = Panel(voters, 3, argmax=argmax, session=session)
            return panel.ask(x if role == "C1" else x.to("meta"), quiet)

    found = each(PARTIES, work)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    labels = found["north"].labels
    assert all(int(votes[label]) == int(votes.max()) for votes, label in zip(plain, labels, strict=True))
    assert all(found[name].labels.is_meta for name in ("south", "west", "hub"))
