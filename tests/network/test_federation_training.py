"""Training among parties of a federation: the script of one process, its bits, and what nobody gets who should not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training_program
from cases import by_turns, long
from federation_world import World, each
from torch import nn

import sectorch
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.roles import STAR
from sectorch.errors import (
    AbortedError,
    ArgumentError,
    DisagreementError,
    DtypeError,
    FrameError,
    RangeExceededError,
    SectorchError,
    ShapeError,
)
from sectorch.federated.parties import Parties, Simulation

PARTIES = {"north": "Q", "east": "A", "south": "S", "mid": "H1", "west": "H2", "helper": "D"}
"""Q, A and S have data, and so have two hospitals that hold no shares; the helper deals."""
NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["H1", "H2"], "D": "D"}
OWNERS = ("Q", "A", "S", "H1", "H2")
FEW = {"north": "Q", "east": "A", "south": "S"}
"""Without owners and dealer: some tests are about these alone."""


@pytest.fixture(scope="module")
def world(tmp_path_factory, patience):
    world = World(tmp_path_factory.mktemp("training"), PARTIES)
    yield world
    world.close()


def data() -> dict[str, torch.Tensor]:
    """Rows of every owner, and their labels in the last column; each has another number of rows."""
    generator = torch.Generator().manual_seed(2)
    found = {owner: torch.rand((3 + i, 5), generator=generator) for i, owner in enumerate(OWNERS)}
    return {owner: torch.cat((x[:, :4], x[:, 4:].round()), 1) for owner, x in found.items()}


FEW_NAMES = {"Q": "Q", "A": "A", "S": "S"}


def train(
    parties: Parties, names: dict[str, Any] = NAMES, rate: float = 0.5, seed: int = 3, adam: bool = False
) -> dict[str, torch.Tensor]:
    """Two steps with dropout on all rows, of a net or, among few, a layer; Q learns the loss, A and H1 the model."""
    owners = [owner for owner in OWNERS if owner in ("Q", "A", "S") or "O" in names]
    with parties.session(STAR, names, label="training") as session:
        own = {o: sectorch.announced(parties.inputs.get(o), owner=o, session=session) for o in owners}
        rows = torch.cat([sectorch.share(x, owner=o, session=session) for o, x in own.items()])
        layers = (nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)) if "O" in names else (nn.Linear(4, 1),)
        model = sectorch.shared(nn.Sequential(*layers), session=session)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.shape) + 0.1 * i)
        momentum = {} if adam else {"momentum": 0.9 if "O" in names else 0.0}
        optimiser = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.05 * rate, **momentum)
        masks = torch.Generator().manual_seed(seed)
        loss: Any = None
        for _ in range(2 if "O" in names else 1):
            optimiser.zero_grad()
            mask = (torch.rand((len(rows), 4), generator=masks) > 0.3).float()
            loss = F.mse_loss(model(rows[:, :4] * mask), rows[:, 4:])
            loss.backward()
            optimiser.step()
        to = ["A", "H1"] if "O" in names else ["A"]
        return {"loss": loss.reveal(), **{k: v.reveal(to=to) for k, v in model.state_dict().items()}}


def apart(world: World, work: Callable[[str, Any], Any], names: dict[str, str] = PARTIES) -> dict[str, Any]:
    """What work gives at each party, with its own rows."""

    def run(name: str) -> Any:
        with world.party(name) as federation:
            mine = {owner: x for owner, x in data().items() if owner == PARTIES[name]}
            return work(name, federation.for_run(mine, ""))

    return each(names, run)


@pytest.mark.parametrize("adam", [False, *long(True)], ids=["sgd", "adam"])
def test_processes_give_the_bits_of_one_process_to_those_who_are_named(world, adam):
    one = train(Simulation(data()), adam=adam)
    found = apart(world, lambda name, parties: train(parties, adam=adam))
    assert not any(isinstance(value, BaseException) for value in found.values()), found
    learn = {"north": {"loss"}, "east": set(one) - {"loss"}, "mid": set(one) - {"loss"}}
    for name, values in found.items():
        learned = {key for key, value in values.items() if not value.is_meta}
        assert learned == learn.get(name, set()), name
        assert all(torch.equal(values[key], one[key]) for key in learned)
        assert {k: v.shape for k, v in values.items()} == {k: v.shape for k, v in one.items()}


def few(world: World, program: Callable, **other: Any) -> dict[str, Any]:
    """What a program of three gives at each; some compute another one."""

    def run(name: str) -> Any:
        with world.party(name) as federation:
            own = {PARTIES[name]: training_program.rows_of(PARTIES[name])}
            return other.get(name, program)(federation.for_run(own, ""))

    return each(FEW, run)


def alone(program: Callable) -> dict[str, torch.Tensor]:
    return program(Simulation({role: training_program.rows_of(role) for role in FEW.values()}))


@pytest.mark.parametrize("name", ["steps", "estimators", "private"])
def test_trainings_of_three_have_the_bits_of_one_process(world, name):
    """Steps from programs, estimators, and DP-SGD; Q learns a loss, A the rest, S nothing."""
    program = getattr(training_program, name)
    one, found = alone(program), few(world, program)
    assert not any(isinstance(value, BaseException) for value in found.values()), found
    for party, learned in {"north": one.keys() & {"loss"}, "east": one.keys() - {"loss"}, "south": set()}.items():
        assert {key for key, value in found[party].items() if not value.is_meta} == learned
        assert all(torch.equal(found[party][key], one[key]) for key in learned)


@by_turns(who=FEW, other=[{"constant": 0.5}, {"power": 4}])
def test_a_party_that_records_another_step_is_found_out_before_anything_of_it_is_sent(world, who, other):
    """Another public number in a program with the same messages, and a program with other ones."""
    seen: list[Transcript] = []

    def noting(parties: Parties, **changed: Any) -> Any:
        with Transcript() as transcript:
            seen.append(transcript)
            return training_program.steps(parties, **changed)

    found = few(world, noting, **{who: partial(noting, **other)})
    assert {type(error) for error in found.values()} <= {DisagreementError, AbortedError}, found
    assert DisagreementError in map(type, found.values())
    sent = {line.protocol for transcript in seen for line, _ in transcript.lines}
    assert sent <= {"seed", "share", "agree", "announce"}, sent


def shown(transcript: Transcript) -> set[str]:
    """What anybody got to see, but for keys and what is public."""
    return {
        line.shows for line, _ in transcript.lines if line.shows and line.protocol not in ("seed", "agree", "announce")
    }


@by_turns(what=["rate", "seed"], who=FEW)
def test_a_party_that_computes_with_another_number_ends_it_and_nothing_is_revealed(world, who, what):
    """Another learning rate, and another seed of the masks, whose shapes and messages are the same."""
    other = {"rate": 0.75} if what == "rate" else {"seed": 4}
    seen: dict[str, Transcript] = {}

    def work(name: str, parties: Parties) -> Any:
        with Transcript() as seen[name]:
            return train(parties, FEW_NAMES, **(other if name == who else {}))

    found = apart(world, work, FEW)
    kinds = {type(error) for error in found.values()}
    assert kinds <= {DisagreementError, AbortedError, FrameError}, found
    assert kinds & ({DisagreementError} if what == "seed" else {DisagreementError, FrameError})
    assert set().union(*map(shown, seen.values())) == set()
    assert all("\n" not in str(error) for error in found.values())


def test_a_value_that_leaves_its_range_is_revealed_to_nobody(world):
    """A and S wait for Q's word: before, A might have been told while Q still looked."""
    seen: dict[str, Transcript] = {}

    def work(name: str, parties: Parties) -> Any:
        with Transcript() as seen[name], parties.session(STAR, FEW_NAMES) as session:
            x = sectorch.share(None, shape=(2,), session=session) if name != "north" else sectorch.share(
                torch.tensor([3000.0, 1.0]), session=session
            )  # fmt: skip
            (torch.relu(x * x) + 0.5).reveal(to="A")

    found = apart(world, work, FEW)
    assert isinstance(found["north"], RangeExceededError)
    assert all(isinstance(found[name], AbortedError) for name in ("east", "south"))
    assert not any(line.protocol == "reveal_to_A" for t in seen.values() for line, _ in t.lines)


def test_inputs_that_do_not_fit_are_refused_where_they_are(world):
    """A shape that all know, and one that is not so at its owner; rows that do not stand beside each other."""
    rows = {"north": torch.rand(3, 2), "east": torch.rand(4, 2)}

    def fails(kind: type[SectorchError], f: Callable[[Any, dict], Any]) -> None:
        def work(name: str, parties: Parties) -> Any:
            with parties.session(STAR, FEW_NAMES) as session:
                f(session, {"Q": rows.get("north") if name == "north" else None,
                            "A": rows.get("east") if name == "east" else None})  # fmt: skip

        found = apart(world, work, FEW)
        assert any(isinstance(error, kind) for error in found.values()), found
        assert all(isinstance(error, kind | AbortedError | None) for error in found.values()), "who waits for nobody"

    def joined(session: Any, own: dict) -> Any:
        both = [sectorch.announced(own[o], owner=o, session=session) for o in ("Q", "A")]
        return torch.cat([sectorch.share(x, owner=o, session=session) for o, x in zip("QA", both, strict=True)], 1)

    fails(ShapeError, joined)
    fails(ShapeError, lambda session, own: sectorch.share(own["Q"], owner="Q", shape=(4, 2), session=session))
    fails(DtypeError, lambda s, own: sectorch.share(own["Q"], owner="Q", shape=(3, 2), dtype=torch.int64, session=s))
    fails(ArgumentError, lambda session, own: sectorch.share(own["Q"], owner="H3", session=session))


def test_owners_are_parties_of_a_session_in_one_process_too():
    session = sectorch.Session(owners=("H1", "H2"), dealer="D")
    rows = {owner: x for owner, x in data().items() if owner.startswith("H")}
    with Transcript() as seen:
        both = torch.cat([sectorch.share(x, owner=o, session=session) for o, x in rows.items()])
        learned = both.reveal(to="H2")
    assert (learned - torch.cat(list(rows.values()))).abs().max() <= 2.0**-21
    sent = {(line.protocol, line.src.name, line.dst.name, line.shows != "") for line, _ in seen.lines}
    assert sent == {
        ("share", "H1", "S", False), ("share", "H2", "S", False),
        ("reveal", "A", "S", False), ("reveal", "S", "H2", True),
    }  # fmt: skip
    for owner in ("H3", "D", 3):
        with pytest.raises(ArgumentError, match="Q, A, H1, H2 or S, got"):
            sectorch.share(torch.rand(2), owner=owner, session=session)
    for owners in (("Q",), ("H1", "H1"), ("D",), ("",)):
        with pytest.raises(ArgumentError, match="each another"):
            sectorch.Session(owners=owners)
    with pytest.raises(ArgumentError, match="has no content"):
        sectorch.share(None, shape=(2, 2), owner="H1", session=session)
    with pytest.raises(ArgumentError, match="name the shape"):
        sectorch.share(None, owner="H1", session=session)
    reference = sectorch.Session(owners=("H1",), reference=True)
    x = sectorch.share(rows["H1"], owner="H1", session=reference)
    assert torch.equal(x.reveal(to="H1"), x.reveal(to="A"))
