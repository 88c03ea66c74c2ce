"""Parties that are up: what they accept, what they are asked, and what others may try."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue

import msgspec
import numpy as np
import pytest
import torch
from federation_world import World, each
from msgspec.structs import replace
from network_world import until

from sectorch import errors
from sectorch.cli.main import run as command
from sectorch.federated.parties import Simulation, tensors
from sectorch.network import messages
from sectorch.network.federation import service as starts
from sectorch.network.federation import service as ups
from sectorch.network.federation.config import credentials, read_federation, read_party_config
from sectorch.network.federation.party import Federation
from sectorch.network.federation.policy import (
    AcceptancePolicy,
    Proposal,
    ProposalNote,
    open_note,
    proposal_of,
    sign_note,
)
from sectorch.network.federation.programs import source_of
from sectorch.network.federation.service import PartyService, ProgramStart, describe_proposal
from sectorch.network.messages import Delivery, SignedNote

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
PROGRAM = """
import sys, torch
from sectorch.choreography import Message, Roles, protocol

ROLES = Roles("L R", edges="L-R")

@protocol("difference", "this test", [Message("masked", "L", "R", "the stream that both draw from")], roles=ROLES)
def difference(net, x, y):
    pad = net.common(net.L, net.R, x.shape, "pad")
    return (x + pad).send(net.L, net.R, "masked") - pad - y

def work(net):
    x, y = (net.own(role, torch.empty(3, dtype=torch.int64), name=name) for role, name in ((net.L, "x"), (net.R, "y")))
    return net.read(difference(net, x, y), net.R)

def program(parties):
    with parties.session(ROLES, label="difference") as session:
        found = session.run(session.trace(work), parties.inputs)
    return {} if found.is_meta else {"difference": found}
"""
STUCK = (
    PROGRAM
    + """
import threading
HELD, THERE = threading.Event(), threading.Event()

def stuck(parties):
    with parties.session(ROLES, label="stuck") as session:
        if parties.present("L") and parties.inputs:
            THERE.set()
            HELD.wait(60)
        return session.run(session.trace(work), parties.inputs)
"""
)
PARTIES = {"left": "L", "right": "R"}


class Ups(World):
    """Two parties with a folder of their own each, that are up in this process."""

    def __init__(self, folder: Path):
        super().__init__(folder, {**PARTIES, "third": ""})
        self.running: dict[str, tuple[PartyService, threading.Event, threading.Thread]] = {}
        self.program = folder / "difference.py"
        self.program.write_text(STUCK)
        for name in ("x", "y"):
            np.save(folder / f"{name}.npy", np.arange(3) + ord(name))

    def accept(self, name: str, *more: str, function: str = "program") -> int:
        own = {"left": ("--input", f"x={self.folder}/x.npy"), "right": ("--input", f"y={self.folder}/y.npy")}[name]
        what = f"{self.program}:{function}"
        return command(["federation", "accept", str(self.path), what, "--as", name, *own, *more, "--json"])

    def up(self, name: str) -> PartyService:
        file, own = read_federation(self.path), read_party_config(self.path, name)
        policy = AcceptancePolicy(own, file, name)
        policy.check()
        party, stopped = (
            PartyService(self.path, file, own, policy, credentials(file, name, own.folder)),
            threading.Event(),
        )
        thread = threading.Thread(target=party.keep, args=(stopped, lambda _: None), daemon=True)
        thread.start()
        self.running[name] = party, stopped, thread
        assert until(lambda: self.server._broker.notes.token(name), 30)
        return party

    def down(self, name: str) -> None:
        party, stopped, thread = self.running.pop(name)
        stopped.set()
        party.stop()
        thread.join(30)
        assert not thread.is_alive() and until(lambda: not self.server._broker.notes.token(name), 30)

    def start(self, by: str = "right", function: str = "program", change=lambda p: p) -> dict:
        notes: Queue[dict] = Queue()
        with Federation(self.path, by, on_note=notes.put) as federation:
            proposal = change(describe_proposal(federation.file, by, f"{self.program}:{function}"))
            return ProgramStart(federation, proposal, notes).run(5.0)

    def results(self, name: str) -> list[dict]:
        folder = self.folder / f"{name}-results"
        return [json.loads(path.read_bytes()) for path in sorted(folder.glob("*/run.json"))]

    def close(self) -> None:
        for name in list(self.running):
            self.down(name)
        super().close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One world of keys for all tests of the module; each has its own files."""
    world = Ups(tmp_path_factory.mktemp("up"))
    yield world
    world.close()


@pytest.fixture
def world(made):
    made.program.write_text(STUCK)
    yield made
    for name in list(made.running):
        made.down(name)
    for name in PARTIES:
        (made.folder / f"{name}.toml").unlink(missing_ok=True)
        shutil.rmtree(made.folder / f"{name}-results", ignore_errors=True)


def test_a_program_among_parties_that_are_up(world, capsys):
    """Equal to one process, kept where each party's own file says, with a record of who started it."""
    assert world.accept("left", "--from", "right") == world.accept("right") == 0
    shown = json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")
    assert (
        shown["learned"][0] == "right reads a result"
        and "right is sent [3] int64" in shown["learned"][1]
        and shown["cost"]["rounds"] == 1
    )
    for name in PARTIES:
        world.up(name)
    found = world.start()
    assert [said["outcome"] for said in found.values()] == ["done", "done"] and found["left"]["learned"] == {}
    inputs = {name: torch.from_numpy(np.load(world.folder / f"{name}.npy")) for name in "xy"}
    alone = tensors(source_of(f"{world.program}:program").load()(Simulation(inputs)))
    kept = list((world.folder / "right-results").glob("*/difference.npy"))
    np.testing.assert_array_equal(np.load(kept[0]), alone["difference"].numpy())
    assert not list((world.folder / "left-results").glob("*/*.npy"))
    records = [world.results(name)[0] for name in PARTIES]
    assert [r["by"] for r in records] == ["right"] * 2 and records[0]["digest"] == records[1]["digest"]
    assert found["right"]["online_bytes"] == 24


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: replace(p, source="0" * 64), "has accepted difference.py:program with source"),
        (lambda p: replace(p, traced="0" * 64), "and the proposal says"),
        (lambda p: replace(p, function="stuck"), "has accepted no program"),
        (lambda p: replace(p, kind="paper", name="capride"), "has accepted no paper 'capride'"),
        (lambda p: replace(p, version="0.0"), "and the proposal is of 0.0"),
        (lambda p: replace(p, time=time.time() - 3600), "set the clocks"),
        (lambda p: replace(p, time=time.time() + 3600), "ahead of this party's clock"),
        (lambda p: replace(p, parties=("left", "right", "third")), "did not come up"),
        (lambda p: replace(p, nonce="x"), "nonce: expected `str` matching"),
        (lambda p: replace(p, job="../.."), "of no form"),
    ],
    ids=["source", "steps", "function", "paper", "version", "old", "future", "parties", "nonce", "job"],
)
def test_what_was_not_accepted_is_refused_and_nothing_is_run(world, change, why, monkeypatch):
    monkeypatch.setattr(starts, "LOOK", 0.1)
    assert world.accept("left") == world.accept("right") == 0
    for name in PARTIES:
        world.up(name)
    if "parties" in str(why) or "come up" in why:
        with pytest.raises(errors.PeerLostError, match="third did not come up"):
            notes: Queue[dict] = Queue()
            with Federation(world.path, "right", on_note=notes.put) as federation:
                proposal = change(describe_proposal(federation.file, "right", f"{world.program}:program"))
                ProgramStart(federation, proposal, notes).run(0.2)
        return
    with pytest.raises(errors.RefusedError, match="nothing was run") as caught:
        world.start(change=change)
    assert why in str(caught.value) and "left:" in str(caught.value)
    assert not world.results("left") and not world.results("right")


def test_a_party_that_the_policy_does_not_name_starts_nothing(world):
    assert world.accept("left", "--from", "left") == world.accept("right") == 0
    for name in PARTIES:
        world.up(name)
    with pytest.raises(errors.RefusedError, match="'left' does not let 'right' start it, but left"):
        world.start("right")
    with pytest.raises(errors.RefusedError, match="'left' does not let 'third' start it"):
        world.start("third")
    assert not world.results("left")


def test_a_file_that_was_changed_since_is_refused_at_the_start_and_while_up(world):
    assert world.accept("left") == world.accept("right") == 0
    world.up("left"), world.up("right")
    kept = describe_proposal(read_federation(world.path), "right", f"{world.program}:program")
    world.program.write_text(STUCK + "\n# one more line\n")
    with pytest.raises(errors.RefusedError, match="left: RefusedError: 'left' cannot run it: its own log says why"):
        _started(world, kept)
    world.down("left")
    with pytest.raises(errors.ArgumentError, match="was changed since 'left' accepted it"):
        world.up("left")


def _started(world: Ups, proposal: Proposal) -> dict:
    notes: Queue[dict] = Queue()
    with Federation(world.path, proposal.by, on_note=notes.put) as federation:
        return ProgramStart(federation, replace(proposal, time=time.time()), notes).run(5.0)


def test_a_replayed_proposal_is_refused_also_after_a_restart(world):
    """By whoever replays it: its starter, another party, or the server, at a party that was killed meanwhile."""
    assert world.accept("left") == world.accept("right") == 0
    world.up("left"), world.up("right")
    kept = describe_proposal(read_federation(world.path), "right", f"{world.program}:program")
    assert _started(world, kept)["left"]["outcome"] == "done"
    for _ in range(2):
        with pytest.raises(errors.RefusedError, match="has had this proposal before"):
            _started(world, kept)
        world.down("left")
        world.up("left")
    assert len(world.results("left")) == 1


def test_a_limit_of_runs_counts_those_before_a_restart(world):
    assert world.accept("left", "--runs", "1") == world.accept("right") == 0
    world.up("left"), world.up("right")
    world.start()
    world.down("left")
    world.up("left")
    with pytest.raises(errors.RefusedError, match="has run it 1 times"):
        world.start()


RECORD = ups.RunRecord(run="n", accepted="p d", by="a", program="p", digest="d", proposal={"job": "1"})


def test_records_of_earlier_runs_are_of_their_declared_type(tmp_path):
    """A run is counted whatever became of it; what is not a record is not passed over, since it could stand for one."""
    path = tmp_path / "first" / "run.json"
    path.parent.mkdir()
    done = replace(RECORD, outcome="done", seconds=1.5, learned={"y": [2]}, rounds=1, online_bytes=8, offline_bytes=0)
    for record in (RECORD, replace(RECORD, outcome="PeerLostError: x", seconds=0.1), replace(done, revealed=["y"])):
        good = msgspec.to_builtins(record)
        path.write_text(json.dumps(good, indent=1))
        assert ups._earlier_runs(tmp_path) == ({"n"}, {"p d": 1})
    wrong = [{**good, "run": 3}, {**good, "more": 1}, {**good, "revealed": 1}, [good], {}, {**good, "proposal": "x"}]
    texts = [*map(json.dumps, wrong), "", json.dumps(good)[:-1], "[" * 100_000, '"\\ud800"']
    for text in texts:
        path.write_text(text)
        with pytest.raises(errors.ArgumentError, match="is not of a run"):
            ups._earlier_runs(tmp_path)


def test_what_the_server_makes_up_or_changes_is_no_proposal(world, caplog):
    """It has no party's key: a changed body, another signer, another's note, another kind are refused and logged."""
    assert world.accept("left") == 0
    party = world.up("left")
    file = read_federation(world.path)
    right, third = (Federation(world.path, name).connection.identity for name in ("right", "third"))
    proposal = replace(describe_proposal(file, "right", f"{world.program}:program"), parties=("left", "right"))
    body = {**proposal.body(), "by": "right", "federation": file.digest}
    true = sign_note("proposal", body, right)
    begin = {"by": "right", "federation": file.digest, "run": proposal.nonce, "proposal": proposal.digest}
    made_up = [
        (replace(true, body=true.body.replace('"job":"1"', '"job":"2"')), "signature is not right"),
        (sign_note("proposal", body, third), "another key has signed"),
        (replace(true, key=true.key[:-2]), "a note that is none"),
        (replace(true, body="[]"), "signature is not right"),
        (sign_note("begin", begin, right), "has not proposed"),
        (sign_note("nonsense", body, right), "of no form"),
    ]
    for note, why in made_up:
        caplog.clear()
        party._queue_note(Delivery(note=note, sender="right"))
        assert until(lambda why=why: why in caplog.text, 30), why
    caplog.clear()
    party._queue_note(Delivery(note=true, sender="third"))
    assert until(lambda: "came from another" in caplog.text, 30)
    party._queue_note(Delivery(note=true, sender="right"))
    assert until(lambda: party._agreed, 30) and not world.results("left"), "a yes alone runs nothing"
    party._queue_note(Delivery(note=sign_note("begin", {**begin, "proposal": "0" * 64}, right), sender="right"))
    party._queue_note(Delivery(note=sign_note("begin", {**begin, "by": "third"}, third), sender="third"))
    assert until(lambda: caplog.text.count("has not proposed") == 2, 30) and party._agreed
    assert not world.results("left")


def test_proposals_round_trip_and_their_digest_covers_every_field(world):
    proposal = describe_proposal(read_federation(world.path), "right", f"{world.program}:program")
    with Federation(world.path, "right") as federation:
        note = sign_note(
            "proposal", {**proposal.body(), "federation": proposal.federation}, federation.connection.identity
        )
    assert proposal_of(open_note(note, read_federation(world.path))) == proposal
    for field in Proposal.__struct_fields__:
        value = getattr(proposal, field)
        other = 0.0 if field == "time" else ("a",) if isinstance(value, tuple) else f"{value}x"
        assert replace(proposal, **{field: other}).digest != proposal.digest


WORDS = [None, True, 1, 1.5, -1, 10**400, math.nan, math.inf, "", "\ud800", "x\n", "a b", [], [1], ["a b"], {}]


def test_a_proposal_of_another_form_is_none():
    """Each entry, missing or of another kind, is refused, or is a proposal of another digest."""
    texts = {"source": "0f", "function": "f", "traced": "0e", "arguments": ("--rounds", "2"), "nonce": "0f" * 16}
    proposal = Proposal("fed", "by", ("p", "q"), "program", "name", **texts, time=12.5)
    body = json.loads(json.dumps({**proposal.body(), "by": "by"}))
    of = lambda body: proposal_of(messages.parse_message(ProposalNote, {**body, "body": body}))
    assert of(body) == proposal
    for name in body:
        with pytest.raises(errors.FrameError):
            of({k: v for k, v in body.items() if k != name})
        for wrong in WORDS:
            try:
                assert of({**body, name: wrong}).digest != proposal.digest, (name, wrong)
            except errors.FrameError as refused:
                assert str(refused).isprintable() and len(str(refused)) < 400
    with pytest.raises(errors.FrameError, match="unknown field"):
        of({**body, "more": 1})


def test_one_that_is_lost_ends_the_run_at_the_others_and_the_next_one_is_right(world):
    assert world.accept("left", function="stuck") == world.accept("right", function="stuck") == 0
    assert world.accept("left") == world.accept("right") == 0
    world.up("left"), world.up("right")
    stuck = source_of(f"{world.program}:stuck").load().__globals__
    found = {}
    thread = threading.Thread(target=lambda: found.update(each(["x"], lambda _: world.start(function="stuck"))))
    thread.start()
    assert stuck["THERE"].wait(60)
    began = time.monotonic()
    world.running["left"][0]._federation.connection.link.close(errors.PeerLostError("killed"))
    thread.join(60)
    assert "PeerLostError" in found["x"]["right"]["outcome"] or "'left'" in found["x"]["right"]["outcome"]
    assert time.monotonic() - began < 30
    stuck["HELD"].set()
    assert until(lambda: world.server._broker.notes.token("left"), 30)
    assert until(lambda: not any(party._runs for party, *_ in world.running.values()), 30)
    assert world.start()["right"]["outcome"] == "done"
    stuck["HELD"].clear(), stuck["THERE"].clear()


def test_its_starter_stops_it_and_a_stopping_party_takes_part_in_nothing(world):
    assert world.accept("left", function="stuck") == world.accept("right", function="stuck") == 0
    left = world.up("left")
    world.up("right")
    stuck = source_of(f"{world.program}:stuck").load().__globals__
    notes: Queue[dict] = Queue()
    with Federation(world.path, "right", on_note=notes.put) as federation:
        start = ProgramStart(federation, describe_proposal(federation.file, "right", f"{world.program}:stuck"), notes)

        def interrupted(*_):
            assert stuck["THERE"].wait(60)
            raise KeyboardInterrupt

        start._collect_reports = interrupted
        with pytest.raises(KeyboardInterrupt):
            start.run(5.0)
    assert until(lambda: "stopped it" in (world.results("right") or [{"outcome": ""}])[0]["outcome"], 30)
    stuck["HELD"].set()
    assert until(lambda: not left._runs, 30)
    stuck["HELD"].clear(), stuck["THERE"].clear()
    assert left.drain(5.0)
    with pytest.raises(errors.RefusedError, match="'left' is stopping"):
        world.start(function="stuck")


def test_two_processes_of_one_name_are_not_up_at_once(world):
    assert world.accept("left") == 0
    world.up("left")
    with world.party("left") as again, pytest.raises(errors.BusyError, match="is up already, in another process"):
        again.connection.ask({"do": "up", "time": time.time()})
    with world.party("left") as again, pytest.raises(errors.RefusedError, match="set the clock"):
        again.connection.ask({"do": "up", "time": time.time() - 3600})


def test_a_flood_of_notes_is_dropped_and_the_next_is_read(world, monkeypatch):
    assert world.accept("left") == world.accept("right") == 0
    left = world.up("left")
    world.up("right")
    for _ in range(2 * ups.NOTES):
        left._queue_note(Delivery(note=SignedNote("{}", "0" * 64, "0" * 128), sender="third"))
    assert until(lambda: left._notes.empty(), 30)
    assert world.start()["left"]["outcome"] == "done"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[x]", "has no 'x'"),
        ("[limits]\nruns = 0", "runs in \\[limits\\] is a whole number above 0"),
        ("[files]\nresults = 3", "results in \\[files\\] is a path"),
        ("[[accept]]\nprogram = 3", "names one of program, paper, model"),
        ('[[accept]]\nprogram = "a.py:f"\nsource = "x"', "source in an .* is of 64 digits"),
        ('[[accept]]\npaper = "nothing"', "there is no paper"),
        ('[[accept]]\nmodel = "m"\nclients = ["nobody"]', "has no party 'nobody'"),
        ('accept = "x"', "accept in a party's own file is a list of tables"),
    ],
)
def test_an_own_file_that_is_not_right_is_a_line(world, text, why):
    path = world.folder / "left.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(errors.ArgumentError, match=why) as caught:
        AcceptancePolicy(read_party_config(world.path, "left"), read_federation(world.path), "left")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_what_others_may_write_or_a_full_disk_is_a_line(world, monkeypatch, capsys):
    assert world.accept("left") == 0
    (world.folder / "left.toml").chmod(0o622)
    with pytest.raises(errors.IdentityError, match=r"others can write .*chmod go-w"):
        world.up("left")
    (world.folder / "left.toml").chmod(0o600)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for line in (["federation", "check"], ["up"]):
        assert command([*line, str(world.path), "--as", "left"]) == 1
        assert "No space left on device" in (said := capsys.readouterr().err.strip().replace("\n", " "))
        assert "make room, or name another with results in [files] of" in said


@pytest.mark.parametrize("takes", ["", "net, x", "*, net"])
def test_a_program_that_takes_something_else_than_the_federation(tmp_path, monkeypatch, takes):
    monkeypatch.chdir(tmp_path)
    Path("study.py").write_text(f"def study({takes}):\n    return {{}}\n")
    with pytest.raises(errors.ArgumentError, match="is called with the federation that it runs in, and nothing"):
        source_of("study.py:study").load()
