"""`Run` among parties apart, over TLS: each has what is its own, and a protocol is for all of them or for nobody."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_world import World, each
from network_world import until
from torch import nn

import sectorch
from sectorch.errors import MisplacedValueError, NetworkError, SectorchError
from sectorch.federated import FederationError, Watch
from sectorch.federated.parties import Simulation
from sectorch.federated.run import Held, Run
from sectorch.network.federation.party import Federation

CALLS: list[str] = []
X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 0.25])


def linear(x: torch.Tensor) -> nn.Module:
    layer = nn.Linear(len(x), 1)
    nn.init.constant_(layer.weight, float(x.sum()))
    return layer.eval()


def product(session: sectorch.Session, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    CALLS.append("product")
    [party] = session.answering
    with torch.no_grad():
        shared = sectorch.share(x, session=session, party=party)
        return sectorch.secure(model, session=session, party=party)(shared).reveal()


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("run"), {"alpha": "north", "beta": "south", "gamma": "S"})
    yield world
    world.close()


def apart(
    world: World, folder: Path, work: Callable[[Run, str], Any], what: Callable[[str], dict] | None = None
) -> dict:
    def one(name: str) -> Any:
        with Federation(world.path, name, patience=60, wait=60 if what is None else 5) as party:
            known = {"run": "example"} if what is None else what(name)
            run = Run(known, members=["north", "south", "S"], parties=party, out=folder / name)
            with run:
                return work(run, world.roles[name])

    return each(world.roles, one)


def three(run: Run, role: str) -> dict[str, Held]:
    like = torch.empty(3, device="meta")
    a = run.bring("north", X if role == "north" else None, public=like)
    b = run.bring("south", Y if role == "south" else None, public=like)
    model = run.at("south", linear, b, stage="model", into=nn.Linear(3, 1))
    out = run.among(
        product, {"Q": "north", "A": "south", "S": "S"}, a, model, at="north", stage="product",
        public=torch.empty(1, device="meta"),
    )  # fmt: skip
    return {"out": out, "model": model}


def test_parties_apart_get_what_is_theirs_and_ask_once(world, tmp_path: Path):
    found = apart(world, tmp_path, three)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    assert found["alpha"]["out"].present and not found["alpha"]["model"].present
    assert found["beta"]["model"].present and not found["beta"]["out"].present and not found["gamma"]["out"].present
    with pytest.raises(MisplacedValueError, match="north holds this value, and is not in this process"):
        _ = found["gamma"]["out"].value
    first, times = found["alpha"]["out"].value, CALLS.count("product")
    assert times == 3, "all of them take part"
    again = apart(world, tmp_path, three)
    assert torch.equal(again["alpha"]["out"].value, first) and CALLS.count("product") == times
    for name in ("beta", "gamma"):  # killed before they kept their part: nobody waits for what north has
        next((tmp_path / name).glob("product-*.json")).unlink()
    again = apart(world, tmp_path, three)
    assert torch.equal(again["alpha"]["out"].value, first) and CALLS.count("product") == times
    next((tmp_path / "alpha").glob("product-*.json")).unlink()  # what one lacks is computed again by all
    found = apart(world, tmp_path, three)
    assert CALLS.count("product") == 2 * times and torch.equal(found["alpha"]["out"].value.round(), first.round())
    assert until(lambda: len(world.server._broker) == 0, 30)


def sent(run: Run, role: str) -> dict[str, Held]:
    a = run.bring("south", Y if role == "south" else None, public=torch.empty(3, device="meta"))
    return {"given": run.send(a, ["north", "S"], stage="given")}


def test_a_party_gives_away_what_it_holds(world, tmp_path: Path):
    for _ in range(2):
        found = apart(world, tmp_path, sent)
        assert all(torch.equal(result["given"].value, Y) for result in found.values()), found
    next((tmp_path / "gamma").glob("given-*.json")).unlink()
    assert torch.equal(apart(world, tmp_path, sent)["gamma"]["given"].value, Y)
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_parties_that_disagree_are_refused_before_anything_is_computed(world, tmp_path: Path):
    found = apart(world, tmp_path, three, lambda name: {"run": "example", "rounds": 3 + (name == "beta")})
    assert all(isinstance(result, SectorchError) for result in found.values()) and CALLS == []
    assert until(lambda: len(world.server._broker) == 0, 30)


@pytest.mark.sectorch_long  # the tests above have the parts of it
def test_the_example_ends_with_the_same_bits_after_a_stop(tmp_path: Path, monkeypatch):
    """examples/averaging.py as four parties, of which one stops in the fifth round."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "averaging.py"))
    rows = torch.cat((torch.rand(60, 64), torch.randint(10, (60, 1))), 1)
    parts = dict(zip(example["CLIENTS"], rows.split(20), strict=True))
    whole = example["program"](Simulation(parts, tmp_path / "whole"))["model"]
    world = World(tmp_path, {"north": "C0", "south": "C1", "west": "C2", "hub": "Server"})
    finished, stopping = Watch.finished, True

    def stop(self: Watch, name: str, record: Any) -> None:
        finished(self, name, record)
        if stopping and name == "5/C1" and threading.current_thread().name == "south":
            raise FederationError("stopped by the test")

    monkeypatch.setattr(Watch, "finished", stop)

    def one(name: str) -> Any:
        inputs = {world.roles[name]: parts[world.roles[name]]} if name != "hub" else {}
        with Federation(world.path, name, patience=60, inputs=inputs) as party:
            return example["program"](party)

    found = each(world.roles, one)
    assert isinstance(found["south"], FederationError), found
    assert all(isinstance(found[name], NetworkError) for name in ("north", "west", "hub")), found
    stopping = False
    assert until(lambda: len(world.server._broker) == 0, 30)
    assert torch.equal(each(world.roles, one)["hub"]["model"], whole)
    world.close()
