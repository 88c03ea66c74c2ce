"""`sectorch shapley` in a federation: training in shares of P and X, and P's values, as one process finds them."""

from __future__ import annotations

import copy

import pytest
import torch
from federation_world import World, each
from network_world import until

from sectorch.errors import FederationError, NetworkError
from sectorch.federated.watch import Watch
from sectorch.protocols.secsv import (
    Settings,
    ShapleyEvaluation,
    Training,
    Valuation,
    build,
    experiment,
    fedavg,
    federation,
)
from sectorch.protocols.secsv.experiment import Part

ROLES = {"north": "c1", "south": "c2", "west": "c3", "hub": "P", "helper": "X"}
QUICK = Settings(skip="saving", compare=False)
TRAINING = Training(epochs=2)
ROUNDS = 2
ATTENDING = {"c2": range(1, 2)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("shapley"), ROLES)
    yield world
    world.close()


@pytest.fixture(scope="module")
def made():
    found = federation("digits", 3, samples=120, tests=24)
    return found, build("logistic", found.shape, found.classes)


def valued(world, made, tmp_path, watch: dict[str, Watch] | None = None, settings: Settings = QUICK) -> dict:
    found, model = made

    def work(name: str):
        role = ROLES[name]
        data = {role: (found.train[role], found.test[role])} if role in found.train else {}
        with world.party(name) as party:
            run = Valuation(
                copy.deepcopy(model), found.shape, list(found.train), data, settings, party, rounds=ROUNDS,
                training=TRAINING, attending=ATTENDING, out=tmp_path / name,
            )  # fmt: skip
            return run.run((watch or {}).get(name, Watch()))

    got = each(ROLES, work)
    assert until(lambda: len(world.server._broker) == 0, 30)
    return got


class Stopped(Watch):
    """Ends a party's run when so many of its parts are done: rounds that it trained, or coalitions that it tested."""

    def __init__(self, parts: int):
        self._left = parts

    def _one(self, *_):
        self._left -= 1
        if not self._left:
            raise FederationError("stopped by the test")

    def step(self, what, parts):
        return self._one

    def finished(self, name, record):
        self._one()


def test_values_of_parties_apart_are_those_of_one_process(world, made, tmp_path):
    """Bit for bit: models are averaged as whole numbers, and of SecSV's decisions only bits reach P. A client is
    stopped in its first round of training, P at a coalition; all start again, and go on."""
    found, model = made
    models, weights = fedavg(model, found.train, ROUNDS, TRAINING, attending=ATTENDING)
    expected = ShapleyEvaluation(model, models, found.test, weights, QUICK).run()

    got = valued(world, made, tmp_path, {"north": Stopped(1)})
    assert isinstance(got["north"], FederationError) and all(
        isinstance(got[n], NetworkError) for n in got if n != "north"
    )
    got = valued(world, made, tmp_path, {"hub": Stopped(2 + 4)})  # its part of two rounds, and then tests
    assert isinstance(got["hub"], FederationError) and all(isinstance(got[n], NetworkError) for n in got if n != "hub")
    (path,) = (tmp_path / "hub").glob("values-*-parts/round-001.jsonl")
    tested = path.read_bytes()
    assert tested.count(b"\n") >= 3
    got = valued(world, made, tmp_path)
    assert not any(isinstance(result, BaseException) for result in got.values()), got
    assert path.read_bytes().startswith(tested), "nothing is tested twice"
    result = got["hub"]
    assert result.values == expected.values and result.intervals == expected.intervals
    for one, other in zip(result.rounds, expected.rounds, strict=True):
        keys = ("right", "samples", "tested", "skipped")
        assert {c: [r[k] for k in keys] for c, r in one.records.items()} == {
            c: [r[k] for k in keys] for c, r in other.records.items()
        }
        assert one.nobody == other.nobody and one.values == other.values
    assert all(isinstance(got[name], Part) for name in ROLES if name != "hub")
    assert all("the weighted sum of the local models" in " ".join(got[name].sentences()) for name in ROLES)
    for name, role in ROLES.items():
        for t in range(ROUNDS):
            paths = list((tmp_path / name).glob(f"round-{t + 1}/*/local-*.pt"))
            assert [path.parent.name for path in paths] == ([role] if role in models[t] else [])
            for path in paths:
                [kept] = torch.load(path, weights_only=True)
                assert all(torch.equal(kept[key], value) for key, value in models[t][role].items())
        shared = bool(list((tmp_path / name).glob("round-*/global-*.pt")))
        assert shared is (role in found.train), "a server has no model"


def test_a_party_that_is_lost_before_it_has_its_keys_ends_it_for_all(world, made, tmp_path, monkeypatch):
    """Also for those that have theirs: they would wait for it, and it, started again, for them."""
    inner = experiment.exchange_keys

    def failing(clients, parties):
        if parties.name == "helper":
            raise FederationError("stopped by the test")
        return inner(clients, parties)

    monkeypatch.setattr(experiment, "exchange_keys", failing)
    got = valued(world, made, tmp_path)
    assert isinstance(got["helper"], FederationError)
    assert all(isinstance(got.get(name), NetworkError) for name in ROLES if name != "helper"), got
    monkeypatch.undo()
    got = valued(world, made, tmp_path)
    assert not any(isinstance(result, BaseException) for result in got.values()), got


def test_other_protocols_are_a_simulations(world, made):
    found, model = made
    with world.party("north") as party:
        for settings in (QUICK.but(protocol="plain"), QUICK.but(processes=2)):
            with pytest.raises(FederationError, match="values by the protocol secsv"):
                Valuation(model, found.shape, list(found.train), {}, settings, party, rounds=1)
