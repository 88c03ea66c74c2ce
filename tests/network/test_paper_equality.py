"""The papers apart and in one process, bit for bit: where each party draws the same, all that it learns is the same.

Who draws is replaced for these tests (`seeded_system.py`); every session is over real TLS, in a thread of each party.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import long
from federation_world import World, each
from network_world import until
from seeded_system import repeating

from sectorch.federated.outcome import merged
from sectorch.federated.training import Training
from sectorch.protocols import capc, capride, privhfl
from sectorch.protocols.perturbation.experiment import PerturbedFL, build
from sectorch.protocols.perturbation.settings import Settings as Perturbed
from sectorch.protocols.perturbation.settings import load

PARTIES = {
    "capc": {"north": "p1", "south": "p2", "west": "p3", "hub": "S"},
    "privhfl": {"north": "c1", "south": "c2", "west": "c3", "hub": "S"},
    "capride": {"north": "P1", "south": "P2", "west": "P3"},
    "perturbed": {"hub": "Server", "north": "C0", "south": "C1", "west": "C2"},
}
SHORT = Training("sgd", 0.1, 16, 2)


@pytest.fixture
def world(request, tmp_path):
    world, threads = World(tmp_path, PARTIES[request.param]), torch.get_num_threads()
    torch.set_num_threads(1)  # as `each` has it: sums of two threads are rounded otherwise
    yield world
    torch.set_num_threads(threads)
    assert until(lambda: len(world.server._broker) == 0, 30)
    world.close()


def apart(world: World, work: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What each role has learned."""

    def one(name: str) -> Any:
        with world.party(name) as party:
            return work(world.roles[name], party)

    with repeating() as draws:
        found = each(world.roles, one)
    assert draws.count and not any(isinstance(result, BaseException) for result in found.values()), found
    return {world.roles[name]: result for name, result in found.items()}


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def apart_from_agreeing(rows: list[dict]) -> list[dict]:
    """A ledger, but for what a federation compares before a reveal."""
    return [row for row in rows if row["protocol"] != "agree"]


def flat(clients: list, seed: int = 0) -> None:
    """Small models in the place of the data set's."""
    generator = torch.Generator().manual_seed(seed)
    for number, client in enumerate(clients):
        client.model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 6 + number), torch.nn.ReLU(), torch.nn.Linear(6 + number, 10)
        )
        for parameter in client.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)


@pytest.mark.parametrize("labels", ["open", *long("shares")])
@pytest.mark.parametrize("world", ["privhfl"], indirect=True)
def test_privhfl(world, labels):
    clients, test, classes = privhfl.federation("digits", 3, samples=60, test_samples=100)
    flat(clients)
    how = privhfl.Settings(queries=8, iterations=2, local=SHORT, retraining=SHORT, label_bits=0)
    if labels == "shares":
        how = how.but(labels=labels, iterations=1, retraining=SHORT.but(batch_size=128))
    with repeating():
        whole = privhfl.PrivHFL(clients, test, classes, how).run()

    def work(role, party):
        mine = [c if c.name == role else c.elsewhere() for c in copy.deepcopy(clients)]
        return privhfl.PrivHFL(mine, test, classes, how, together=party).run()

    found = apart(world, work)
    for name, model in whole.models.items():
        assert same(found[name].models[name], model)
        assert apart_from_agreeing(found[name].received) == merged(r.get("received", []) for r in whole.records[name])


@pytest.mark.parametrize(("argmax", "labels"), [("shares", "open"), *long(("yao", "open"), ("yao", "shares"))])
@pytest.mark.parametrize("world", ["capc"], indirect=True)
def test_capc(world, argmax, labels):
    parties, test, classes = capc.collaboration("digits", 3, querying=2, pool=6)
    flat(parties)
    how = capc.Settings(
        epsilon=60.0, queries=4, chunk=2, argmax=argmax, local=SHORT if labels == "open" else SHORT.but(batch_size=512),
        reliability=0.01, labels=labels,
    )  # fmt: skip
    with repeating():
        whole = capc.CaPC(parties, test, classes, how).run()

    def work(role, party):
        mine = [p if p.name == role else p.elsewhere() for p in copy.deepcopy(parties)]
        return capc.CaPC(mine, test, classes, how, together=party).run()

    found = apart(world, work)
    for name, record in whole.records.items():
        assert torch.equal(found[name].records[name].labels, record.labels)
        assert same(found[name].records[name].model, record.model)
        assert list(map(apart_from_agreeing, found[name].records[name].received)) == record.received


@pytest.mark.sectorch_long
@pytest.mark.parametrize("world", ["capride"], indirect=True)
def test_capride(world):
    """Each party's keys are SEAL's and the same in both runs; ciphertexts, noise and flooding are drawn again."""
    made = capride.federation("digits", 3, samples=32, test_samples=100, network="mlp")
    how = capride.Settings(
        rounds=2, warmup=2, scale_bits=28, flood_bits=1.0, head_rank=4, temperature=2.0, leakage=0.99, peers=1
    )  # fmt: skip
    with repeating():
        whole = capride.CaPriDe(*copy.deepcopy(made), how).run()

    def work(role, party):
        mine = [p if p.name == role else p.elsewhere() for p in copy.deepcopy(made[0])]
        return capride.CaPriDe(mine, *made[1:], how, together=party).run()

    found = apart(world, work)
    for name, (model, *_) in whole.models.items():
        assert same(found[name].models[name][0], model)
        assert [r["accuracy"] for r in found[name].records[name]] == [r["accuracy"] for r in whole.records[name]]


@pytest.mark.parametrize("exchange", ["shift", "paper"])
@pytest.mark.parametrize("world", ["perturbed"], indirect=True)
def test_perturbed_models(world, exchange):
    how = Perturbed(clients=3, rounds=4, batch_size=8, exchange=exchange, learning_rate=0.05)
    data = load("digits", None, torch.float64)
    model = build("mlp3", data, torch.float64, 0)
    with repeating():
        whole = PerturbedFL(data, model, how).run()

    def work(role, party):
        start = model if role == "Server" else build("mlp3", data, torch.float64, 7)
        return PerturbedFL(data, start, how, parties=party).run()

    found = apart(world, work)["Server"].model
    assert isinstance(found, torch.nn.Module) and isinstance(whole.model, torch.nn.Module)
    assert same(found, whole.model)
    other = PerturbedFL(data, model, how).run().model
    assert isinstance(other, torch.nn.Module) and not same(other, whole.model), "what is drawn is in the bits"
