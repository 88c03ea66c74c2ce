"""CaPriDe in a federation: each with its own connection, over real TLS and with real ciphertexts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from federation_world import World, each
from network_world import until

from sectorch.choreography.ledger import Profile
from sectorch.errors import FederationError, NetworkError, SectorchError
from sectorch.federated.watch import Watch
from sectorch.network.federation.party import Federation
from sectorch.protocols.capride import CaPriDe, Settings, federation

ROLES = {"north": "P1", "south": "P2", "west": "P3"}
QUICK = Settings(rounds=2, warmup=2, scale_bits=28, flood_bits=1.0, head_rank=4, temperature=2.0, leakage=None)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("capride"), ROLES)
    yield world
    world.close()


@pytest.fixture(scope="module")
def made():
    return federation("digits", 3, samples=32, test_samples=200, network="mlp")


class Stopped(Watch):
    """Ends the run when a round is finished."""

    def finished(self, name, record):
        if name == "round-1/P2/model":
            raise FederationError("stopped by the test")


def lines(profile: Profile) -> set[tuple]:
    return {
        (m.path, m.label, m.src.name, m.dst.name, tuple(m.shape), m.dtype)
        for m in profile.ledger
        if not m.protocol.startswith("run_turn")
    }


def weights(result) -> dict[str, torch.Tensor]:
    flat = lambda model: torch.cat([p.detach().flatten() for p in model.parameters()])
    return {name: flat(models[0]) for name, models in result.models.items()}


@pytest.mark.sectorch_long  # `test_paper_equality.py` has the bits
def test_parties_apart_learn_what_they_learn_in_one_process(world, made, tmp_path):
    """Keys, encryption and flooding are fresh in every run: the models agree as two runs in one process do, and the
    messages are the same. One of them is stopped after its first round, all are started again, and all go on.
    """
    with Profile() as whole:
        together = CaPriDe(*made, QUICK).run()
    clear = CaPriDe(*made, replace(QUICK, encrypted=False)).run()
    alone = CaPriDe(*made, replace(QUICK, method="local")).run()

    def work(name: str, watch: Watch):
        mine = [p if p.name == ROLES[name] else p.elsewhere() for p in copy.deepcopy(made[0])]
        with Profile() as profile, world.party(name) as party:
            return CaPriDe(mine, *made[1:], QUICK, out=tmp_path / name, together=party).run(watch), profile

    found = each(ROLES, lambda name: work(name, Stopped() if name == "south" else Watch()))
    assert isinstance(found["south"], FederationError)
    assert all(isinstance(found[name], NetworkError) for name in ("north", "west")), found
    assert until(lambda: len(world.server._broker) == 0, 30)
    found = each(ROLES, lambda name: work(name, Watch()))
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    seen: set[tuple] = set()
    for name, (result, profile) in found.items():
        role = ROLES[name]
        assert list(result.models) == list(result.records) == [role] and len(result.records[role]) == 3
        seen |= lines(profile)
        apart, one, plain, local = (weights(r)[role] for r in (result, together, clear, alone))
        assert 10 * (apart - one).norm() < (local - plain).norm()
        assert 10 * (apart - plain).norm() < (local - plain).norm()
    assert seen == lines(whole)
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_another_temperature_is_refused_before_a_key_is_made(world, made, tmp_path):
    def work(name: str):
        how = replace(QUICK, temperature=3.0) if name == "west" else QUICK
        with Federation(world.path, name, patience=60, wait=5) as party:
            run = CaPriDe(copy.deepcopy(made[0]), *made[1:], replace(how, warmup=0), together=party)
            try:
                return run.run()
            finally:
                assert not run.exchange.owners and not run.stages.received

    assert all(isinstance(error, SectorchError) for error in each(ROLES, work).values())


def test_nothing_is_asked_in_the_clear_by_parties_apart(world, made):
    with world.party("north") as party, pytest.raises(FederationError, match="it protects nothing"):
        CaPriDe(*made, replace(QUICK, encrypted=False), together=party)
