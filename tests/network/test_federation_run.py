"""`Run` in a federation, over TLS: each has what is its own, and a protocol is for all of them or for nobody."""

from __future__ import annotations

import re
import runpy
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import long
from federation_world import World, each
from network_world import until
from torch import nn

import sectorch
from sectorch import files
from sectorch.errors import ArgumentError, MisplacedValueError, NetworkError, RefusedError, SectorchError
from sectorch.federated import CheckpointError, FederationError, Watch
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


def swapped(run: Run, role: str) -> dict[str, Held]:
    a, b = (run.bring("north", x if role == "north" else None, public=torch.empty(3, device="meta")) for x in (X, Y))
    stages = {"weights": a, "scores": b}
    names = sorted(stages, reverse=role == "south")
    return {name: run.send(stages[name], ["south", "S"], stage=name) for name in names}


def other_setting(run: Run, role: str) -> Held:
    a, like = run.bring("north", X if role == "north" else None, public=torch.empty(3, device="meta")), None
    cast, k = {"Q": "north", "A": "south", "S": "S"}, 1 + (role == "south")
    return run.among(first, cast, a, k, at="north", stage="weights", public=like)


def first(session: sectorch.Session, x: torch.Tensor, k: int) -> torch.Tensor:
    CALLS.append("first")
    return sectorch.share(x, session=session, owner="Q")[:k].reveal(to="Q")


def other_holder(run: Run, role: str) -> Held:
    here = "south" if role == "south" else "north"
    a = run.bring(here, X if role == here else None, public=torch.empty(3, device="meta"))
    return run.send(a, "S", stage="weights")


@pytest.mark.parametrize("lines", [swapped, other_setting, other_holder])
def test_parties_whose_lines_differ_are_refused_before_a_stage(world, tmp_path: Path, lines):
    """Found by attack: two swapped lines of one party gave it scores for weights, without an error."""
    found = apart(world, tmp_path, lines)
    assert CALLS == [] and not list(tmp_path.glob("*/*.pt"))
    for error in found.values():
        assert isinstance(error, RefusedError) and re.search(r"stage '(weights|scores)' at .*: south is at", str(error))
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_a_folder_goes_on_with_the_same_inputs(world, tmp_path: Path):
    """Found by attack: north kept what was made of south's older input, and nobody heard of it."""

    def lines(run: Run, role: str, more: float = 0.0) -> Held:
        b = run.bring("south", Y + more if role == "south" else None, public=torch.empty(3, device="meta"))
        return run.send(b, "north", stage="given")

    assert torch.equal(apart(world, tmp_path, lines)["alpha"].value, Y)
    found = apart(world, tmp_path, lambda run, role: lines(run, role, 1.0))
    assert isinstance(found["beta"], CheckpointError) and "begun with another input of south" in str(found["beta"])
    assert all(isinstance(found[name], NetworkError) for name in ("alpha", "gamma"))
    shutil.rmtree(tmp_path / "beta")  # an empty folder beside others' goes on
    assert torch.equal(apart(world, tmp_path, lines)["alpha"].value, Y)
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_parties_that_may_be_elsewhere_are_named(world):
    with (
        Federation(world.path, "alpha", patience=60) as party,
        pytest.raises(ArgumentError, match="parties may be elsewhere: name all of them"),
    ):
        Run({"run": "example"}, parties=party)


WRITES = [("alpha", 5), ("alpha", 6), ("beta", 4), ("beta", 5), ("gamma", 2)]  # around the protocol's result


@pytest.mark.parametrize("lost, write", [*WRITES, *long(*(("alpha", n) for n in (2, 3, 4)), ("beta", 2), ("beta", 3))])
def test_a_write_that_fails_ends_the_run_for_all_and_it_goes_on(world, tmp_path: Path, monkeypatch, lost, write):
    """A full disk at each write of a party: nobody waits, what north has is not asked again, the bits are the same."""
    real, count, failing = files.move, dict.fromkeys(world.roles, 0), True

    def move(partial: Path, path: Path) -> None:
        if (name := threading.current_thread().name) in count:
            count[name] += 1
            if failing and name == lost and count[name] == write:
                raise OSError(28, "No space left on device")
        real(partial, path)

    monkeypatch.setattr(files, "move", move)
    found = apart(world, tmp_path, sums)
    assert isinstance(found[lost], CheckpointError) and "(No space left on device)" in str(found[lost])
    failing, has, _ = False, bool(list((tmp_path / "alpha").glob("sum-*.json"))), CALLS.clear()
    assert until(lambda: len(world.server._broker) == 0, 30)
    assert torch.equal(apart(world, tmp_path, sums)["alpha"].value, (X + Y) * 2) and has == (CALLS == [])
    assert until(lambda: len(world.server._broker) == 0, 30)


def sums(run: Run, role: str) -> Held:
    like = torch.empty(3, device="meta")
    a = run.bring("north", X if role == "north" else None, public=like)
    b = run.bring("south", Y if role == "south" else None, public=like)
    cast = {"Q": "north", "A": "south", "S": "S"}
    twice = [
        run.at(name, torch.mul, x, 2, stage=f"{name}/twice", public=like) for name, x in (("north", a), ("south", b))
    ]
    return run.among(add, cast, *twice, at="north", stage="sum", public=like)


def add(session: sectorch.Session, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    CALLS.append("add")
    return sum(sectorch.share(one, session=session, owner=who) for one, who in ((x, "Q"), (y, "A"))).reveal(to="Q")


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


def test_public_queries_have_the_same_labels_apart(tmp_path: Path):
    """examples/public_queries.py with two voters as four parties: the noise of one process, which was kept, in both."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "public_queries.py"))
    example["program"].__globals__["VOTERS"] = ("V1", "V2")
    torch.manual_seed(0)
    rows = torch.cat((torch.rand(60, 64), torch.randint(10, (60, 1))), 1)
    parts = dict(zip(("Q", "V1", "V2"), rows.split(20), strict=True))
    noise = example["MECHANISM"].draw(example["COUNT"], 10)
    vars(example["MECHANISM"])["draw"] = lambda *_: noise
    found = example["program"](Simulation(parts, tmp_path / "together"))
    world = World(tmp_path, {"north": "Q", "south": "V1", "west": "V2", "hub": "S"})

    def one(name: str) -> Any:
        role = world.roles[name]
        with Federation(world.path, name, patience=60, inputs={role: parts[role]} if role in parts else {}) as party:
            return example["program"](party)

    apart = each(world.roles, one)
    assert all(apart[name] == {} for name in ("south", "west", "hub")), apart
    assert {k: v.tolist() for k, v in apart["north"].items()} == {k: v.tolist() for k, v in found.items()}
    world.close()
