"""A join among parties of a federation: the rows of one process, what each is sent, and refusals that all hear of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import join_program
import numpy as np
import pytest
import torch
from both_ways import run_both_ways
from cases import long
from federation_world import World, each

import sectorch
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.roles import STAR
from sectorch.errors import (
    AbortedError,
    ArgumentError,
    DisagreementError,
    FrameError,
    NetworkError,
    RangeExceededError,
    RefusedError,
)
from sectorch.federated.parties import Parties, Simulation
from sectorch.network.federation.config import read_federation
from sectorch.network.federation.programs import dry_run_source
from sectorch.network.federation.reveals import Ledger, bounds_of

PARTIES = {"north": "Q", "east": "A", "south": "S", "mid": "H1", "west": "H2", "helper": "D"}
DEALT = {**join_program.NAMES, "D": "D"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, patience):
    world = World(tmp_path_factory.mktemp("join"), PARTIES)
    yield world
    world.close()


def own_rows(name: str) -> dict[str, torch.Tensor]:
    role = PARTIES[name]
    return {role: join_program.rows_of(role)} if role in join_program.OWNERS else {}


def apart(world: World, work: Any, helper: bool = True) -> dict[str, Any]:
    def start(name: str) -> Any:
        with world.party(name) as federation:
            return work(name, federation.for_run(own_rows(name), ""))

    return each([name for name in PARTIES if helper or name != "helper"], start)


def check_rows(found: Any) -> None:
    wanted = sorted(join_program.EXPECTED.values())
    assert sorted(np.asarray(found).astype(int).tolist()) == wanted


@pytest.mark.parametrize("dealer", [True, *long(False)])
def test_parties_get_the_rows_of_one_process_and_are_sent_nothing_else(world, dealer):
    names = DEALT if dealer else join_program.NAMES
    one = join_program.program(Simulation({o: join_program.rows_of(o) for o in join_program.OWNERS}), names)
    check_rows(one["rows"])
    assert int(one["count"]) == 8 and int(one["without"]) == 48
    seen: dict[str, Transcript] = {}

    def work(name: str, parties: Parties) -> Any:
        with Transcript() as seen[name]:
            return join_program.program(parties, names)

    found = apart(world, work, dealer)
    assert not any(isinstance(value, BaseException) for value in found.values()), found
    check_rows(found["west"]["rows"])
    assert int(found["west"]["count"]) == 8 and int(found["north"]["without"]) == 48
    learned = {name: {key for key, value in values.items() if not value.is_meta} for name, values in found.items()}
    assert learned == {name: set() for name in found} | {"west": {"rows", "count"}, "north": {"without"}}
    received = {
        (line.dst.name, line.label) for t in seen.values() for line, _ in t.lines if line.protocol.startswith("join_")
    }
    assert {label for dst, label in received if dst in ("A", "Q", "D")} == (
        {"rows", "to_A", "to_Q"} | ({"to_D"} if dealer else set())
    )
    assert {dst for dst, label in received if label == "secret"} == {"H1", "H2"}


def test_a_refused_table_ends_the_run_at_all_parties_before_anything_is_shared(world):
    """Keys that repeat, at their owner; keys of another type, at all."""
    seen: dict[str, Transcript] = {}

    def repeated(name: str, parties: Parties) -> Any:
        with Transcript() as seen[name], parties.session(STAR, join_program.NAMES, label="repeated") as session:
            inputs = {o: torch.cat((x, x[:1])) for o, x in parties.inputs.items()} if name == "west" else parties.inputs
            tables = join_program.tables(type("Own", (), {"inputs": inputs})(), session)
            sectorch.join(*tables, on="id")

    found = apart(world, repeated, False)
    assert isinstance(found["west"], ArgumentError) and "keys repeat in the table of H2" in str(found["west"])
    assert all(isinstance(found[name], AbortedError) for name in ("north", "east", "south", "mid"))
    sent = {line.protocol for t in seen.values() for line, _ in t.lines}
    assert sent <= {"seed", "table", "table_size", "join_keys", "agree"}, sent

    def typed(name: str, parties: Parties) -> Any:
        with parties.session(STAR, join_program.NAMES, label="typed") as session:
            tables = []
            for owner in ("H1", "H2"):
                own = parties.inputs.get(owner)
                ids = (
                    [] if own is None else own[:, 0].tolist() if owner == "H1" else [f"{i}" for i in own[:, 0].tolist()]
                )
                frame = None if own is None else {"id": np.array(ids), owner: own[:, 1]}
                tables.append(sectorch.owned(frame, owner=owner, session=session, columns=[owner]))
            sectorch.join(*tables, on="id")

    found = apart(world, typed, False)
    # A party may learn by a lost connection, or by a frame of another step, that the others have ended.
    assert all(isinstance(error, (ArgumentError, NetworkError)) for error in found.values()), found
    assert any("whole numbers at H1, text at H2" in str(error) for error in found.values()), found


def test_parties_that_name_other_arguments_are_found_out(world):
    """Before anything is opened; a bound that is too small is heard of by all, without a result."""

    seen: dict[str, Transcript] = {}

    def other(name: str, parties: Parties) -> Any:
        with Transcript() as seen[name], parties.session(STAR, join_program.NAMES, label="other") as session:
            tables = join_program.tables(parties, session)
            bound = 30 if name == "mid" else 40
            return sectorch.join(*tables, on="id", bound=bound).tensor("h1").reveal()

    found = apart(world, other, False)
    assert all(isinstance(error, (DisagreementError, AbortedError, FrameError)) for error in found.values()), found
    shown = {line.protocol for t in seen.values() for line, _ in t.lines if line.shows}
    assert not any(name.startswith("reveal") for name in shown)

    def small(name: str, parties: Parties) -> Any:
        with parties.session(STAR, join_program.NAMES, label="small") as session:
            sectorch.join(*join_program.tables(parties, session), on="id", bound=7)

    found = apart(world, small, False)
    assert isinstance(found["north"], RangeExceededError) and "more rows match than bound=7" in str(found["north"])
    assert all(isinstance(found[name], AbortedError) for name in ("east", "south", "mid", "west"))


@pytest.mark.sectorch_long
def test_a_join_as_processes(tmp_path: Path, capsys):
    """Five commands and a server: `sectorch run` of the same program."""
    parties = {name: role for name, role in PARTIES.items() if role != "D"}
    own = {name: ["--input", f"{role}={role}.npy"] for name, role in parties.items() if role in join_program.OWNERS}
    for owner in join_program.OWNERS:
        np.save(tmp_path / f"{owner}.npy", join_program.rows_of(owner).numpy())
    found = run_both_ways(f"{Path(join_program.__file__)}:program", parties, own, tmp_path, capsys)
    learned = found.learned["west"]
    check_rows(learned["rows"])
    assert int(learned["count"]) == 8
    assert int(found.learned["north"]["result"]) == 48  # all that north learns
    assert int(found.wanted["count"]) == 8 and int(found.wanted["without"]) == 48
    print(found.line("west"))


def with_consent(world: World, bounds: list[str]) -> tuple[dict[str, Any], dict[str, Ledger]]:
    """What each party's run of the program gives if it has agreed to these bounds, and its ledger."""
    file, names = read_federation(world.path), [name for name in PARTIES if name != "helper"]
    rehearsal = dry_run_source(join_program.program, file)
    written = bounds_of([*(f"{name}=2000" for name in names), *bounds], lambda name: file.member_named(name).name)
    ledgers = {name: Ledger(name, rehearsal.reveals, written, rehearsal.sessions) for name in names}

    def start(name: str) -> Any:
        with world.party(name) as federation:
            return join_program.program(federation.for_run(own_rows(name), "", ledger=ledgers[name]))

    return each(ledgers, start), ledgers


def test_parties_that_are_up_agree_to_a_join_by_bounds(world):
    """Each is told the marks of 60 and of 80 rows, and owners without shares three secrets of four words."""
    marks = [f"join_rows:{name}=140" for name in ("north", "east", "mid", "west")]
    found, ledgers = with_consent(world, [*marks, "join_secret:mid=12", "join_secret:west=12", "reveal_to_S:south=140"])
    assert not any(isinstance(value, BaseException) for value in found.values()), found
    check_rows(found["west"]["rows"])
    assert "which of a join's shuffled rows it has: their number" in ledgers["south"].text
    found, _ = with_consent(world, ["join_rows:mid=139"])
    assert isinstance(found["south"], RefusedError) and "mid learns [80] uint8" in str(found["south"])
    assert all(isinstance(error, (AbortedError, RefusedError)) for error in found.values()), found
