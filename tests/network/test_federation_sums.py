"""`secure_sum` among parties over real TLS: the server's sum, a client that goes, and a stage of a run."""

from __future__ import annotations

import copy

import pytest
import torch
from federation_world import World, each
from network_world import until
from torch import nn

import sectorch
from sectorch.dp import epsilon_of
from sectorch.errors import DroppedClientError, NonFiniteError
from sectorch.federated.parties import Simulation, client_sessions
from sectorch.federated.run import Held, Run
from sectorch.protocols.perturbation import BatchMismatchError, Federation, Scheme, Settings
from sectorch.protocols.perturbation.experiment import PerturbedFL
from sectorch.protocols.perturbation.settings import load
from sectorch.ring import encode
from sectorch.secure_sum import star_roles

PARTIES = {"hub": "Server", "north": "C0", "south": "C1", "west": "C2"}
CLIENTS = ("C0", "C1", "C2")
VALUES = {c: torch.randn(4, 5, generator=torch.Generator().manual_seed(k)) for k, c in enumerate(CLIENTS)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("sums"), PARTIES)
    yield world
    assert until(lambda: len(world.server._broker) == 0, 30)
    world.close()


def expected(clients=CLIENTS) -> torch.Tensor:
    return sum(encode(VALUES[c].double(), 40) for c in clients).double() * 2.0**-40


def program(parties, values, drop_outs: bool = False) -> sectorch.SecureSum:
    mine = lambda c: values[c] if parties.present(c) else torch.empty(4, 5, device="meta")
    if drop_outs:
        with client_sessions(parties, CLIENTS) as sessions:
            return sectorch.secure_sum({c: mine(c) for c in CLIENTS}, sessions, drop_outs=True)
    with parties.session(star_roles(CLIENTS)) as session:
        return sectorch.secure_sum({c: mine(c) for c in CLIENTS}, session)


@pytest.mark.parametrize("drop_outs", [False, True])
def test_the_server_alone_has_the_sum(world, drop_outs):
    def work(name: str) -> sectorch.SecureSum:
        with world.party(name) as party:
            return program(party, VALUES, drop_outs)

    found = each(PARTIES, work)
    assert torch.equal(found.pop("hub").total, expected())
    assert all(one.total.is_meta and one.clients == CLIENTS for one in found.values())
    assert torch.equal(program(Simulation(), VALUES, drop_outs).total, expected())


@pytest.mark.parametrize("drop_outs", [False, True])
def test_a_client_that_goes(world, drop_outs):
    """Its number is not finite, and its process leaves. The others' sum is opened, or nobody learns one."""

    def work(name: str) -> sectorch.SecureSum:
        values = VALUES | ({"C1": VALUES["C1"] * float("nan")} if name == "south" else {})
        with world.party(name) as party:
            return program(party, values, drop_outs)

    found = each(PARTIES, work)
    assert isinstance(found["south"], NonFiniteError)
    if not drop_outs:
        assert isinstance(found["hub"], DroppedClientError) and "'south' gave up" in str(found["hub"])
        return
    assert torch.equal(found["hub"].total, expected(("C0", "C2"))) and found["hub"].clients == ("C0", "C2")
    assert found["north"].clients == found["west"].clients == ("C0", "C2")


def test_a_perturbed_model_goes_on_without_a_client(world):
    """Over TLS with double masks: C1's batch does not fit in the second round, and the other two go on in a third."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).double()
    scheme = lambda: Scheme(copy.deepcopy(model), "mse")
    parts = [(torch.randn(n, 6).double(), torch.randn(n, 3).double()) for n in (4, 5, 6)]
    wrong = (parts[1][0][:, 1:], parts[1][1])

    def rounds(session, present) -> list:
        federation, found = Federation(scheme(), 3, double=True, session=session), []
        for number in range(3):
            own = [parts[0], wrong if number else parts[1], parts[2]]
            shown = [b if present(c) else tuple(t.to("meta") for t in b) for c, b in zip(CLIENTS, own, strict=True)]
            state = model.state_dict() if present("Server") else None
            found.append(federation.round(state, shown, [4, 5, 6]))
        return found

    def work(name: str) -> list:
        with world.party(name) as party, client_sessions(party, CLIENTS) as sessions:
            return rounds(sessions, party.present)

    found = each(PARTIES, work)
    assert isinstance(found["south"], BatchMismatchError) and found["north"] == found["west"] == [None] * 3

    def plain(there: list[int]) -> dict:
        loss = sum(scheme().loss_fn(model(parts[k][0]), parts[k][1]) * len(parts[k][0]) for k in there)
        size = sum(len(parts[k][0]) for k in there)
        names, values = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss / size, values), strict=True))

    for got, there in zip(found["hub"], ([0, 1, 2], [0, 2], [0, 2]), strict=True):
        assert all(torch.allclose(got[n], gradient, atol=1e-7) for n, gradient in plain(there).items())


# A round of FedAvg with clipped updates, of which the server learns the sum: stages of a run.


def local_update(weights: torch.Tensor, data: torch.Tensor, limit: float) -> torch.Tensor:
    step = (data - weights).mean(0)
    return step * min(1.0, limit / float(step.norm()))


def sum_of_updates(session: sectorch.Session, updates: list[torch.Tensor]) -> torch.Tensor:
    return sectorch.secure_sum(dict(zip(CLIENTS, updates, strict=True)), session).total


def averaged(weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return weights + total / len(CLIENTS)


def fedavg(run: Run, data: dict[str, torch.Tensor | None]) -> Held:
    like, weights, cast = torch.empty(5, device="meta"), torch.zeros(5), {name: name for name in ("Server", *CLIENTS)}
    own = {c: run.bring(c, data[c]) for c in CLIENTS}
    updates = [run.at(c, local_update, weights, own[c], 0.5, stage=f"update/{c}", public=like) for c in CLIENTS]
    total = run.among(sum_of_updates, cast, updates, at="Server", stage="sum", roles=star_roles(CLIENTS))
    return run.at("Server", averaged, weights, total, stage="model")


def test_a_stage_of_a_run_in_one_process_and_apart(world, tmp_path):
    with Run({"run": "fedavg"}, members=["Server", *CLIENTS]) as run:
        whole = fedavg(run, VALUES).value

    def work(name: str):
        with (
            world.party(name) as party,
            Run({"run": "fedavg"}, members=["Server", *CLIENTS], parties=party, out=tmp_path / name) as run,
        ):
            found = fedavg(run, {c: VALUES[c] if party.present(c) else None for c in CLIENTS})
            return found.value if found.present else None

    for _ in range(2):  # and again from disk, where nobody but the server needs a result
        found = each(PARTIES, work)
        assert torch.equal(found.pop("hub"), whole) and list(found.values()) == [None] * 3
        for path in (tmp_path / "north").rglob("sum-*"):
            path.unlink()


@pytest.mark.sectorch_long  # `tests/perturbation/test_perturbation_private.py` has it in one process
def test_clients_count_the_sums_that_they_send_again(world, tmp_path):
    """A private run whose server has lost its rounds: clients, who have kept all, send them again and say so."""
    how = Settings(clients=3, rounds=4, batch_size=1, local_batches=4, clip=1.0, noise_multiplier=4.0)
    data, model = load("breast-cancer"), nn.Sequential(nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 2)).double()

    def work(name: str) -> float | None:
        with world.party(name) as party:
            return PerturbedFL(data, model, how, out=tmp_path / name, parties=party).run().epsilon

    first = each(PARTIES, work)
    assert until(lambda: len(world.server._broker) == 0, 30)
    assert each(PARTIES, work) == first and len(set(first.values())) == 1
    assert until(lambda: len(world.server._broker) == 0, 30)
    for file in (*(tmp_path / "hub").glob("round-*"), *(tmp_path / "hub").glob("score*")):
        file.unlink()
    again = each(PARTIES, work)
    assert len(set(again.values())) == 1
    once = epsilon_of(how.private.curve, how.delta)
    assert first["north"] == once and again["north"] == epsilon_of(5 * how.private.curve, how.delta), "all four rounds"
