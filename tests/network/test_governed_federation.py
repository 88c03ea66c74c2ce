"""Parties whose own files have a policy: what no release covers is refused, and each release is charged once."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from commands import PIPE, Command, run_command
from federation_world import World
from network_world import until

from sectorch.cli.main import run as command
from sectorch.errors import ArgumentError
from sectorch.network.audit import audit, page
from sectorch.network.federation.config import credentials, read_federation, read_party_config
from sectorch.network.federation.party import Federation
from sectorch.network.federation.policy import AcceptancePolicy
from sectorch.network.federation.programs import dry_run_source
from sectorch.network.federation.reveals import uncovered_reveals
from sectorch.network.federation.service import PartyService, ProgramStart, describe_proposal
from sectorch.testing.local_network import PROGRAM as COMMAND
from sectorch.testing.local_network import free_port

PARTIES = {"alpha": "A", "beta": "S", "gamma": "Q"}
COUNTS = {"A": [5, 30, 1, 12], "S": [7, 11, 2, 18]}

HEAD = '''
import contextlib, os, signal, sys
import torch
import sectorch
from sectorch.choreography.ledger import Observer, sole_observer
from sectorch.choreography.roles import STAR

NAMES = {"Q": "Q", "A": "A", "S": "S"}
POLICY = sectorch.Policy(%s)


def counted(parties, session):
    a, s = (
        sectorch.share(parties.inputs.get(n), owner=n, session=session, shape=(4,), dtype=torch.int64) for n in "AS"
    )
    return a + s


def governed(parties, name="wards", policy=POLICY):
    with parties.session(STAR, NAMES) as session:
        counts = counted(parties, session)
        found = sectorch.release(counts, policy, counts=counts, name=name, to="Q", cells_per_row=1)
        return {"counts": found.values}


def renamed(parties):
    return governed(parties, "wards again")


def other_policy(parties):
    return governed(parties, "others", sectorch.Policy(minimum=2))


def plain(parties):
    with parties.session(STAR, NAMES) as session:
        return {"counts": counted(parties, session).reveal(to="Q")}


def beside(parties):
    with parties.session(STAR, NAMES) as session:
        counts = counted(parties, session)
        found = sectorch.release(counts, POLICY, counts=counts, name="beside", to="Q", ledger=parties.folder)
        return {"counts": found.values, "small": counts[2].reveal(to="Q")}


def announced(parties):
    with parties.session(STAR, NAMES) as session:
        own = sectorch.announced(parties.inputs.get("A"), owner="A", session=session)
        a = sectorch.share(own, owner="A", session=session)
        return {"counts": a.reveal(to="Q")}


def of_a_table(parties, names="ward"):
    with parties.session(STAR, NAMES) as session:
        counts = parties.inputs.get("A")
        frame = None if counts is None else {"ward": torch.arange(4).repeat_interleave(counts)}
        columns = {"ward": sectorch.tables.Column("category", categories=(0, 1, 2, 3))}
        table = sectorch.owned(frame, owner="A", session=session, columns=columns).share()
        wards = sectorch.tables.count(table, by="ward")
        if names == "attacked":
            session.governor = None
            to = Later(["Q"], lambda: table["ward"].reveal(to="Q"))
            found = sectorch.release(wards, POLICY, name="a", to=to, ledger=parties.folder + "/own")
            sectorch.release(wards, POLICY, name="b", to="Q", ledger=parties.folder + "/another")
        else:
            found = sectorch.release(wards, POLICY, name="wards", to="Q")
        return {"counts": found.values}


def attacked(parties):
    return of_a_table(parties, "attacked")


class Later(list):
    """Learners whose second reading is a reveal."""

    def __init__(self, names, then):
        super().__init__(names)
        self.then, self.read = then, 0

    def __iter__(self):
        self.read += 1
        return super().__iter__() if self.read == 1 else iter([self.then()])


def of_an_owner(parties, kept=False):
    """The first rows of a table whose owner holds no shares."""
    with parties.session(STAR, {"Q": "Q", "A": ["A"], "S": "S", "O": ["delta"]}) as session:
        ward = parties.inputs.get("O")
        columns = {"ward": sectorch.tables.Column("category", categories=(0, 1, 2, 3))}
        frame = None if ward is None else {"ward": ward}
        table = sectorch.owned(frame, owner="delta", session=session, columns=columns).share()
        if kept:
            wards, own = sectorch.tables.count(table, by="ward"), parties.folder  # of parties that have no policy
            return {"counts": sectorch.release(wards, POLICY, name="w", to=["Q", "A"], ledger=own).values}
        return {"counts": table["ward"][:4].reveal(to=["Q", "A"])}


def kept_by_an_owner(parties):
    return of_an_owner(parties, True)


class Stopped(Exception):
    pass


class Watch(Observer):
    def __init__(self, then):
        self.message = lambda line, value: then() if line.protocol == "reveal" else None


class Mode(torch.overrides.TorchFunctionMode):
    def __init__(self, then):
        self.then = then

    def __torch_function__(self, f, types, args=(), kwargs=None):
        self.then()
        return f(*args, **(kwargs or {}))


def hooked(parties, way="operation"):
    """The program's code runs where a release opens its cells, and ends it after a reveal of its own."""
    with parties.session(STAR, NAMES) as session:
        column = sectorch.share(parties.inputs.get("A"), owner="A", session=session, shape=(4,), dtype=torch.int64)
        facts = sectorch.tables.Column("category", categories=tuple(range(99)))
        wards = sectorch.tables.count(sectorch.Table({"ward": column}, {"ward": facts}), by="ward")
        found, operation, reveal = [], session.operation, sectorch.SharedTensor.reveal.__code__

        def steal():
            frame, opens = sys._getframe(1), False
            while frame is not None:
                opens, frame = opens or frame.f_code is reveal, frame.f_back
            if opens and not found:
                found.append(None)
                found[0] = column.reveal(to="Q")
                raise Stopped

        def then(*arguments):
            steal()
            return operation(*arguments)

        with contextlib.ExitStack() as stack, contextlib.suppress(Stopped):
            if way == "operation":
                session.operation = then
            elif way == "profiler":
                sys.setprofile(lambda *_: steal())
                stack.callback(sys.setprofile, None)
            elif way == "observer":
                stack.enter_context(sole_observer(Watch(steal)))
            elif way == "mode":
                stack.enter_context(Mode(steal))
            sectorch.release(wards, POLICY, name="wards", to="Q")
        return {"counts": found[0]} if found else {}


def dies(parties):
    """As `governed`; the party whose folder has the file `die` kills itself once it is charged."""
    if parties.present("S") and os.path.exists("die"):
        os.remove("die")
        sectorch.SharedTensor.reveal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return governed(parties)
'''
EXACT = "minimum=10, rounding=5, plain=True"
NOISY = "minimum=10, epsilon=2.0, delta=1e-5, budget=2.5, plain=True"


def written(folder: Path, policy: str) -> Path:
    (folder / "work.py").write_text(HEAD % policy)
    (folder / "policy.toml").write_text(policy.replace(", ", "\n").replace("True", "true"))
    for role, counts in COUNTS.items():
        np.save(folder / f"{role}.npy", np.array(counts))
    return folder / "work.py"


def accept(folder: Path, file: Path, function: str, name: str, *more: str) -> int:
    own = [] if PARTIES[name] == "Q" else ["--input", f"{PARTIES[name]}={folder}/{PARTIES[name]}.npy"]
    return command(["federation", "accept", str(file), f"{folder}/work.py:{function}", "--as", name, *own, *more])


def own_file(folder: Path, name: str, ledger: str = "") -> None:
    path = folder / f"{name}.toml"
    path.write_text(
        f'[files]\nreceipts = "{name}-receipts"\n\n[governed]\npolicy = "policy.toml"\n'
        f'ledger = "{ledger or name}-ledger"\n'
    )
    path.chmod(0o600)


class Up:
    """Parties that are up, in threads of this process."""

    def __init__(self, world: World):
        self.world, self.running = world, []
        for name in world.roles:
            file, own = read_federation(world.path), read_party_config(world.path, name)
            policy = AcceptancePolicy(own, file, name)
            policy.check()
            party = PartyService(world.path, file, own, policy, credentials(file, name, own.folder))
            stopped = threading.Event()
            thread = threading.Thread(target=party.keep, args=(stopped, lambda _: None), daemon=True)
            thread.start()
            self.running.append((party, stopped, thread))
            assert until(lambda name=name: world.server._broker.notes.token(name), 30)

    def run(self, function: str) -> dict:
        notes: Queue = Queue()
        with Federation(self.world.path, "gamma", on_note=notes.put) as federation:
            what = f"{self.world.folder}/work.py:{function}"
            return ProgramStart(federation, describe_proposal(federation.file, "gamma", what), notes).run(5.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for party, stopped, thread in self.running:
            stopped.set()
            party.stop()
            thread.join(30)


def results(world: World) -> list[np.ndarray]:
    return [np.load(p) for p in sorted((world.folder / "gamma-results").glob("*/counts.npy"))]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "one", PARTIES)
    yield made
    made.close()


def test_a_program_that_no_release_covers_is_neither_accepted_nor_run(world, capsys):
    written(world.folder, EXACT)
    own_file(world.folder, "beta")
    assert accept(world.folder, world.path, "governed", "beta") == 0
    for function, text in [
        ("plain", "does not cover"), ("beside", "does not cover"), ("other_policy", "does not cover"),
        ("announced", "--reveals PARTY=ELEMENTS"),
    ]:  # fmt: skip
        capsys.readouterr()
        assert accept(world.folder, world.path, function, "beta") == 1
        assert text in capsys.readouterr().err
    # An announced shape may have a bound of its own; a result has none, by whatever bound.
    assert accept(world.folder, world.path, "announced", "beta", "--reveals", "gamma=99", "reveal:gamma=99") == 1
    bounds = ["announce:alpha=14", "announce:beta=14", "announce:gamma=14"]
    assert accept(world.folder, world.path, "announced", "beta", "--reveals", *bounds) == 0
    # What was accepted before the policy came is refused when the party comes up.
    (world.folder / "alpha.toml").write_text("")
    assert accept(world.folder, world.path, "plain", "alpha") == 0
    before = (world.folder / "alpha.toml").read_text()
    own_file(world.folder, "alpha")
    with open(world.folder / "alpha.toml", "a") as file:
        file.write("\n" + before)
    own = read_party_config(world.path, "alpha")
    with pytest.raises(ArgumentError, match="does not cover"):
        AcceptancePolicy(own, read_federation(world.path), "alpha").check()
    (world.folder / "policy.toml").write_text("minimum = 1")
    with pytest.raises(ArgumentError, match="whole number from 2"):
        AcceptancePolicy(own, read_federation(world.path), "alpha")
    for table in ("[governed]\n", '[governed]\npolicy = "policy.toml"\n', "[governed]\nminimum = 10\n"):
        (world.folder / "alpha.toml").write_text(table)
        with pytest.raises(ArgumentError, match=r"\[governed\]"):
            read_party_config(world.path, "alpha")


@pytest.mark.parametrize("plain", [True, False])
def test_counts_of_the_programs_own_are_refused_or_said(world, capsys, plain):
    written(world.folder, EXACT if plain else EXACT.replace(", plain=True", ""))
    own_file(world.folder, "beta")
    assert accept(world.folder, world.path, "governed", "beta") == int(not plain)
    said = capsys.readouterr()
    assert "the program's word" in said.out if plain else "plain = true" in said.err


def test_a_table_is_released_under_the_partys_own_policy_and_ledger(world):
    """The default policy, which believes no counts of the program's: a table's, within bounds for what it announces.

    A program that takes the session's policy away, reveals rows within a release and names ledgers of its own is not
    run to its end.
    """
    written(world.folder, "minimum=10")
    bounds = [f"{protocol}:{name}={n}" for protocol, n in (("table_size", 1), ("table", 200)) for name in PARTIES]
    bounds += [f"{name}=40" for name in PARTIES]
    for function in ("of_a_table", "attacked"):
        for name in PARTIES:
            own_file(world.folder, name, f"{function}-{name}")
            assert accept(world.folder, world.path, function, name, "--reveals", *bounds) == 0
        with Up(world) as up:
            ended = {said["outcome"] for said in up.run(function).values()}
        assert (ended == {"done"}) == (function == "of_a_table"), ended
    for name in PARTIES:
        ledger = json.loads((world.folder / f"of_a_table-{name}-ledger" / "releases.json").read_text())
        assert list(ledger["releases"]) == ["wards"]
    assert not list(world.folder.rglob("another")) and not list(world.folder.rglob("own"))
    (found,) = results(world)  # 5, 30, 1 and 12
    assert np.array_equal(found, [np.nan, 30, np.nan, np.nan], equal_nan=True)


def test_an_owner_that_holds_no_shares_confirms_releases_alone(tmp_path, caplog):
    """It sends nothing of a reveal; the others, which have no policy, wait for its word that all computed alike."""
    roles = {**PARTIES, "delta": "O"}
    world = World(tmp_path / "one", roles)
    try:
        written(world.folder, "minimum=10")
        np.save(world.folder / "O.npy", np.repeat(np.arange(4), [5, 30, 1, 12]))
        bounds = [f"{protocol}:{name}={n}" for protocol, n in (("table_size", 1), ("table", 200)) for name in roles]
        wide = [*bounds, *(f"{name}=400" for name in roles)]
        for name in roles:
            (world.folder / f"{name}.toml").write_text("")
        own_file(world.folder, "delta")
        for function in ("of_an_owner", "kept_by_an_owner"):
            for name in roles:
                more = ["--input", f"O={world.folder}/O.npy"] if name == "delta" else []
                what = f"{world.folder}/work.py:{function}"
                arguments = [str(world.path), what, "--as", name, *more, "--reveals", *wide]
                assert command(["federation", "accept", *arguments]) == 0
        with caplog.at_level("INFO"), Up(world) as up:
            ended = up.run("of_an_owner")
            assert "done" not in {said["outcome"] for said in ended.values()}, ended
            assert "it is not confirmed" in caplog.text and results(world) == []
            assert {said["outcome"] for said in up.run("kept_by_an_owner").values()} == {"done"}
        assert np.array_equal(results(world)[0], [np.nan, 30, np.nan, np.nan], equal_nan=True)
    finally:
        world.close()


def test_a_paper_and_a_run_without_consent_are_refused_where_a_policy_is(world, capsys):
    written(world.folder, EXACT)
    own_file(world.folder, "gamma")
    arguments = ["run", f"{world.folder}/work.py:governed", "--federation", str(world.path), "--as", "gamma"]
    assert command(arguments) == 1 and "[governed]" in capsys.readouterr().err


def test_the_dry_run_finds_which_reveals_a_release_covers(world):
    written(world.folder, EXACT)
    namespace: dict = {}
    exec((world.folder / "work.py").read_text(), namespace)
    file, policy = read_federation(world.path), namespace["POLICY"].digest
    for function, count in (("governed", 0), ("plain", None), ("beside", None), ("other_policy", None)):
        found = dry_run_source(namespace[function], file)
        assert found.complete, found.stopped
        left = uncovered_reveals(found.reveals, policy, ())
        assert (len(left) == 0) if count == 0 else left
    assert all("under the policy" in text for text in dry_run_source(namespace["governed"], file).learned)


@pytest.mark.parametrize("way", ["none", "operation", "profiler", "observer", "mode"])
def test_no_code_of_a_program_reveals_within_a_release(world, way):
    """Attributes of the session, profilers, observers and modes of torch run where cells are opened."""
    written(world.folder, "minimum=10")
    namespace: dict = {}
    exec((world.folder / "work.py").read_text(), namespace)
    found = dry_run_source(lambda parties: namespace["hooked"](parties, way), read_federation(world.path))
    left = uncovered_reveals(found.reveals, namespace["POLICY"].digest, ())
    assert found.reveals and (way == "none") == (not left), (found.stopped, left)
    assert way == "none" or any(reveal.same or "A" in str(reveal.inputs) for reveal in left)


def test_a_governed_run_is_charged_once_receipted_and_repeats_bit_for_bit(world, capsys):
    written(world.folder, NOISY)
    for name in PARTIES:
        own_file(world.folder, name)
        assert accept(world.folder, world.path, "governed", name) == 0
        assert accept(world.folder, world.path, "renamed", name) == 0
    with Up(world) as up:
        for _ in range(2):
            assert {said["outcome"] for said in up.run("governed").values()} == {"done"}
        ended = up.run("renamed")
        assert "BudgetExhaustedError" in " ".join(said["outcome"] for said in ended.values())
    with Up(world) as up:  # other processes of the same parties
        assert {said["outcome"] for said in up.run("governed").values()} == {"done"}
    first, *again = results(world)
    assert len(again) == 2 and all(np.array_equal(x, first, equal_nan=True) for x in again)
    for name in PARTIES:
        ledger = json.loads((world.folder / f"{name}-ledger" / "releases.json").read_text())
        assert list(ledger["releases"]) == ["wards"]
        budget = json.loads((world.folder / f"{name}-ledger" / "budget.json").read_text())
        assert list(budget["charges"]) == ["wards"] and budget["spent"] <= 2.0
        found = audit(next((world.folder / f"{name}-receipts").glob("*")))
        (release, *more), *_ = [query.releases for query in found.queries if query.releases]
        assert (release.name, release.to, release.cells, release.epsilon) == ("wards", "Q", 4, 2.0)
        assert [r.withheld for r in more] == ([int(np.isnan(first).sum())] if name == "gamma" else [])
        assert "wards" in page(found, True)
        capsys.readouterr()
        assert command(["audit", str(found.path)]) == 0
        assert "released to Q: 'wards'" in " ".join(capsys.readouterr().out.split())


def test_two_federations_charge_one_ledger(tmp_path):
    worlds = [World(tmp_path / name, PARTIES) for name in ("one", "two")]
    try:
        for number, world in enumerate(worlds):
            written(world.folder, EXACT)
            for name in PARTIES:
                own_file(world.folder, name, ledger=f"{tmp_path}/{name}")
                assert accept(world.folder, world.path, ("governed", "renamed")[number], name) == 0
        with Up(worlds[0]) as up:
            assert {said["outcome"] for said in up.run("governed").values()} == {"done"}
        with Up(worlds[1]) as up:
            ended = up.run("renamed")
            assert all(said["outcome"] != "done" for said in ended.values()), ended
        assert np.array_equal(results(worlds[0])[0], [np.nan, 40, np.nan, 30], equal_nan=True)
        assert results(worlds[1]) == []
    finally:
        for world in worlds:
            world.close()


def test_a_reveal_outside_of_a_release_does_not_leave_at_run_time(world, monkeypatch, caplog):
    """A program that the policy's own check would not pass, with a rule that was written by hand."""
    written(world.folder, EXACT)
    for name in PARTIES:
        (world.folder / f"{name}.toml").write_text("")
        assert accept(world.folder, world.path, "beside", name) == 0
    rule = (world.folder / "beta.toml").read_text()
    own_file(world.folder, "beta")
    with open(world.folder / "beta.toml", "a") as file:
        file.write("\n" + rule)
    monkeypatch.setattr(AcceptancePolicy, "check", lambda self: None)
    with caplog.at_level("INFO"), Up(world) as up:
        ended = up.run("beside")
    assert "RefusedError" in ended["beta"]["outcome"] and ended["gamma"]["outcome"] != "done", ended
    assert "in no release under this party's policy" in caplog.text
    assert results(world) == []


@pytest.mark.sectorch_long
@pytest.mark.parametrize("policy", [EXACT, NOISY])
def test_a_party_that_is_killed_between_charge_and_release_is_charged_once(tmp_path, capsys, policy):
    """Processes over mutual TLS; beta is killed (-9) once it is charged and has stored its half."""
    folder, started = tmp_path / "trial", []

    def start(*arguments: str) -> Command:
        started.append(Command(
            [*COMMAND, *arguments], cwd=folder, stdout=PIPE, stderr=PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ))  # fmt: skip
        return started[-1]

    entries = [f"{name}={role}" for name, role in PARTIES.items()]
    file = folder / "federation.toml"
    assert command(["federation", "try", str(folder), *entries, "--server", f"localhost:{free_port()}"]) == 0
    written(folder, policy)
    for name in PARTIES:
        own_file(folder, name)
        assert accept(folder, file, "dies", name) == 0
    try:
        start("up", str(file), "--as", "server")
        parties = {name: start("up", str(file), "--as", name) for name in PARTIES}
        (folder / "die").write_text("")
        ask = lambda: run_command(
            [*COMMAND, "run", str(file), "work.py:dies", "--as", "gamma", "--wait", "60"], cwd=folder, timeout=300
        )
        lost = ask()
        assert lost.returncode != 0, lost.stdout
        assert parties["beta"].wait(timeout=60) == -signal.SIGKILL
        assert not list((folder / "gamma-results").glob("*/counts.npy"))
        halves = {p: p.read_bytes() for p in folder.glob("*-ledger/*.release")}
        start("up", str(file), "--as", "beta")
        for _ in range(2):
            done = ask()
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for process in started:
            process.kill()
            process.communicate()
    first, again = (np.load(p) for p in sorted((folder / "gamma-results").glob("*/counts.npy")))
    assert np.array_equal(first, again, equal_nan=True)
    assert np.isnan(first[2]) and (policy == NOISY or np.array_equal(first, [np.nan, 40, np.nan, 30], equal_nan=True))
    assert (halves and {p: p.read_bytes() for p in halves} == halves) or len(halves) < 2
    for name in PARTIES:
        assert list(json.loads((folder / f"{name}-ledger" / "releases.json").read_text())["releases"]) == ["wards"]
        assert command(["audit", str(next((folder / f"{name}-receipts").glob("*")))]) == 0
