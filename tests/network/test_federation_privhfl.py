"""PrivHFL in a federation: each client asks in its turn and answers the others, through a server that adds up."""

from __future__ import annotations

import copy

import pytest
import torch
from federation_world import World, each
from network_world import until
from torch import nn

from sectorch.errors import FederationError, NetworkError, SectorchError
from sectorch.federated.training import Training
from sectorch.federated.watch import Watch
from sectorch.network.federation.party import Federation
from sectorch.protocols.privhfl import PrivHFL, Settings, federation

ROLES = {"north": "c1", "south": "c2", "west": "c3", "hub": "S"}
SHORT = Training(epochs=2, batch_size=16)
QUICK = Settings(queries=12, iterations=2, local=SHORT, retraining=SHORT)
UNSEEN = QUICK.but(labels="shares", iterations=1, retraining=Training("sgd", 0.3, 128, 2))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("privhfl"), ROLES)
    yield world
    world.close()


@pytest.fixture(scope="module")
def made():
    clients, test, classes = federation("digits", 3, samples=60, test_samples=200)
    generator = torch.Generator().manual_seed(0)
    for number, client in enumerate(clients):
        client.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6 + number), nn.ReLU(), nn.Linear(6 + number, 10))
        for parameter in client.model.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return clients, test, classes


class Stopped(Watch):
    """Ends the run when a client has finished a round."""

    def __init__(self, client: str, t: int):
        self._at = f"round-{t}/{client}/accuracy"

    def finished(self, name, record):
        if name == self._at:
            raise FederationError("stopped by the test")


def others_elsewhere(made, role: str):
    clients, test, classes = copy.deepcopy(made)
    return [c if c.name == role else c.elsewhere() for c in clients], test, classes


@pytest.mark.sectorch_long  # `test_paper_equality.py` has the bits, CaPC's sibling the stop
@pytest.mark.parametrize("how", [QUICK, UNSEEN], ids=["labels that Q learns", "labels that stay in shares"])
def test_clients_apart_end_where_they_end_in_one_process(world, made, tmp_path, how):
    """Shares are fresh in every run: sums differ by some 2^-20, a rounded label by a unit, and models as little.
    One client is stopped in the middle, all start again, and nothing that was answered is asked again.
    """
    first = {client.name: copy.deepcopy(client.model.state_dict()) for client in made[0]}
    together = PrivHFL(*made, how).run()

    def work(name: str, watch: Watch):
        with world.party(name) as party:
            run = PrivHFL(*others_elsewhere(made, ROLES[name]), how, out=tmp_path / name, together=party)
            return run.run(watch)

    found = each(ROLES, lambda name: work(name, Stopped("c2", 1) if name == "south" else Watch()))
    assert isinstance(found["south"], FederationError), found
    assert all(isinstance(found[name], NetworkError) for name in ("north", "west", "hub")), found
    labels = lambda name: next((tmp_path / name).glob(f"round-1/{ROLES[name]}/labels-*.pt")).read_bytes()
    kept = {name: labels(name) for name in ("north", "south")}
    assert until(lambda: len(world.server._broker) == 0, 30)
    found = each(ROLES, lambda name: work(name, Watch()))
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    for name, content in kept.items():
        assert labels(name) == content
    for name, role in ROLES.items():
        result = found[name]
        assert list(result.models) == list(result.records) == ([role] if role != "S" else [])
        if role != "S":
            for key, value in together.models[role].state_dict().items():
                torch.testing.assert_close(result.models[role].state_dict()[key], value, rtol=0, atol=1e-4)
                assert (value - first[role][key]).abs().max() > 2e-3, "training moves weights by much more"
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_other_settings_are_refused_before_anybody_asks(world, made):
    """Who comes when the others were refused and have gone would wait for them for ever."""

    def work(name: str):
        how = QUICK.but(frac_bits=16) if name == "west" else QUICK
        with Federation(world.path, name, wait=2.0) as party:
            return PrivHFL(*others_elsewhere(made, ROLES[name]), how, together=party).run()

    found = each(ROLES, work)
    assert set(found) == set(ROLES) and all(isinstance(error, SectorchError) for error in found.values())


def test_what_protects_nothing_is_no_program_of_parties_apart(world, made):
    with world.party("north") as party:
        for how in (QUICK.but(secure=False), QUICK.but(control="longer")):
            with pytest.raises(FederationError, match="they protect nothing"):
                PrivHFL(*made, how, together=party)
