"""The papers in a federation: each with its own connection, over real TLS, and the same results as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation_world import World, each
from network_world import until

from sectorch.choreography.ledger import Profile
from sectorch.errors import FederationError, SectorchError
from sectorch.federated.watch import Watch
from sectorch.protocols.perturbation import algorithm
from sectorch.protocols.perturbation.experiment import PerturbedFL, build
from sectorch.protocols.perturbation.settings import Settings, load

CLIENTS = {"server-party": "Server", "north": "C0", "south": "C1", "west": "C2"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("papers"), CLIENTS)
    yield world
    world.close()


class Seeded:
    """The system's randomness, for the server's noise, which nobody else draws: the same in every run."""

    def __init__(self):
        self._bits = np.random.default_rng(0)

    def urandom(self, count: int) -> bytes:
        return self._bits.bytes(count)


def lines(profile: Profile) -> set[tuple]:
    return {(m.path, m.label, m.src.role, m.dst.role, tuple(m.shape), m.dtype, m.round, m.call) for m in profile.ledger}


@pytest.mark.parametrize("exchange", ["shift", "paper"])
def test_perturbed_models_are_trained_by_parties_apart_as_by_one_process(world, monkeypatch, tmp_path, exchange):
    """The server's model, bit for bit, or to rounding where clients draw numbers that cancel; the messages that a party
    sees are those of the program in one process.
    """
    how = Settings(clients=3, rounds=4, batch_size=8, exchange=exchange, learning_rate=0.05)
    data = load("digits", None, torch.float64)
    model = build("mlp3", data, torch.float64, 0)
    monkeypatch.setattr(algorithm, "os", Seeded())
    with Profile() as whole:
        expected = PerturbedFL(data, model, how).run()
    monkeypatch.setattr(algorithm, "os", Seeded())

    def work(name: str):
        start = model if name == "server-party" else build("mlp3", data, torch.float64, 7)
        with Profile() as profile, world.party(name) as federation:
            return PerturbedFL(data, start, how, out=tmp_path / name, parties=federation).run(), profile

    found = each(CLIENTS, work)
    history = {name: result[0] for name, result in found.items()}
    for key, value in expected.model.state_dict().items():
        found_here = history["server-party"].model.state_dict()[key]
        if exchange == "shift":
            assert torch.equal(found_here, value), key
        torch.testing.assert_close(found_here, value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(history["north"].model.state_dict()[key], value), "a client has no model"
    assert history["server-party"].score == expected.score
    assert all(loss != loss for loss in history["server-party"].losses), "the training loss is nobody's to know"
    apart = {line for line in lines(found["server-party"][1]) if "run_turn" not in line[0]}
    assert {line[:-1] for line in apart} == {line[:-1] for line in lines(whole)}
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_fedavg_is_no_program_of_parties_apart(world):
    data = load("digits", None, torch.float64)
    with world.party("north") as federation, pytest.raises(FederationError, match="the control of a simulation"):
        PerturbedFL(
            data, build("mlp3", data, torch.float64, 0), Settings(clients=3, method="fedavg"), parties=federation
        )


class Stopped(Watch):
    """Ends the run at a round."""

    def finished(self, name, record):
        if name == "round-14":
            raise FederationError("stopped by the test")


def test_a_stopped_run_goes_on_where_the_server_is(world, tmp_path):
    """A client is stopped between two rounds that are kept, and has kept fewer of them than the server, or none."""
    how = Settings(clients=3, rounds=40, batch_size=8, exchange="shift", learning_rate=0.05)
    data = load("digits", None, torch.float64)
    model = build("mlp3", data, torch.float64, 0)

    def work(name: str, watch: Watch):
        with world.party(name) as party:
            out = None if name == "west" else tmp_path / name
            return PerturbedFL(data, model, how, out=out, parties=party).run(watch)

    found = each(CLIENTS, lambda name: work(name, Stopped() if name == "south" else Watch()))
    assert isinstance(found["south"], FederationError)
    assert all(isinstance(found[name], SectorchError) for name in CLIENTS), found
    assert until(lambda: len(world.server._broker) == 0, 30)
    found = each(CLIENTS, lambda name: work(name, Watch()))
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    assert all(len(history.losses) == 40 for history in found.values())
    whole = PerturbedFL(data, model, how).run()
    assert abs(found["server-party"].score - whole.score) < 10 and whole.score > 50
