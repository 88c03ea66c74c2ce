"""What a party agrees to is all that its run reveals: attacked by programs whose only aim is to hide a reveal."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
from queue import Queue

import numpy as np
import pytest
import torch
from commands import PIPE, Command
from federation_world import World, each
from network_world import until

import sectorch
from sectorch import ckks, errors
from sectorch.choreography import Message, protocol
from sectorch.choreography.declaration import PROTOCOLS, ProtocolSpec
from sectorch.choreography.ledger import Observer, Transcript, sole_observer
from sectorch.choreography.roles import STAR, Roles
from sectorch.ckks.module import ask
from sectorch.cli.main import run as command
from sectorch.garbled.transfer import deliver
from sectorch.mpc.star.broadcast import compare_public_values
from sectorch.mpc.star.linear import mask_streamed_weight
from sectorch.mpc.star.shares import reveal_to_A
from sectorch.network.audit import audit, page
from sectorch.network.federation.config import credentials, read_federation, read_party_config
from sectorch.network.federation.party import Federation
from sectorch.network.federation.policy import AcceptancePolicy
from sectorch.network.federation.programs import DryParties, dry_run_source
from sectorch.network.federation.reveals import Ledger, bounds_of, word_counts
from sectorch.network.federation.service import PartyService, ProgramStart, RunParties, describe_proposal
from sectorch.network.parties.session import abort_reason
from sectorch.testing.local_network import PROGRAM as COMMAND
from sectorch.testing.local_network import free_port

PARTIES = {"alpha": "A", "beta": "S", "gamma": "Q"}
NAMES = {"Q": "Q", "A": "A", "S": "S"}
IDS = torch.tensor([811.0, 245.0, 377.0])
OWN = {"alpha": {"A": torch.tensor([1.0, 2.0, 3.0])}, "beta": {"S": IDS}, "gamma": {}}
SCHEME = sectorch.Scheme(range_check=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("consent"), PARTIES)
    yield world
    world.close()


def shares(parties, session):
    """Both hospitals' tensors, in shares."""
    return [
        sectorch.share(parties.inputs.get(n), owner=n, session=session, scheme=SCHEME, shape=(3,)) for n in ("A", "S")
    ]


def honest(parties):
    with parties.session(STAR, NAMES) as session:
        a, s = shares(parties, session)
        return {"sum": (a + s).sum().reveal(to="A")}


def attack(reveal, before=None):
    """A program that reveals by this function of its parties, its session and S's tensor in shares."""

    def program(parties):
        with parties.session(STAR, NAMES) as session:
            a, s = shares(parties, session)
            found = {"sum": (a + s).sum().reveal(to="A")}
            reveal(parties, session, s)
        return found

    return program


@protocol("statistics", "a claim", [Message("noise", "S", "A", "a mask of k_SA")])
def statistics(net, x):
    return x.send(net.S, net.A, "noise")


PROTOCOLS.pop("statistics")  # it is none of the package's


def by_own_protocol(parties, session, s):
    with session.call() as net:
        statistics(net, s.shares.S)


def by_declaring(parties, session, s):
    spec = ProtocolSpec("multiply", "x", (Message("masked", "S", "A", "c_S of k_DS"),))
    with session.call() as net, net.declared(spec):
        s.shares.S.send(net.S, net.A, "masked")


def with_no_observer(parties, session, s):
    with sole_observer(Observer()):
        s.reveal(to="A")


def when_somebody_is_here(parties, session, s):
    if session.runtime.here:
        s.reveal(to="A")


def in_the_place_of_another(parties, session, s):
    (s if session.runtime.here else s * 0).sum().reveal(to="A")


def in_a_loop(parties, session, s):
    for i in range(3):
        s[i].reveal(to="A")


def by_aggregate(parties, session, s):
    sectorch.aggregate([s])


def by_trace(parties, session, s):
    own = lambda net: net.own(net.S, torch.empty(3, dtype=torch.int64), name="ids")
    program = session.trace(lambda net: net.read(statistics(net, own(net)), net.A))
    session.run(program, {"ids": IDS.long()} if parties.present("S") else {})


def by_trace_of_ours(parties, session, s):
    program = session.trace(functools.partial(_revealed, other=session))
    session.run(program, {"ids": IDS.long()} if parties.present("S") else {})


def _revealed(net, other):
    x = net.own(net.S, torch.empty(3, dtype=torch.int64), name="ids")
    zero = net.public(net.A, torch.zeros((), dtype=torch.int64)).expand((3,))
    return net.read(reveal_to_A(net, type(sectorch.share(torch.ones(1)).shares)(zero, x)), net.A)


def by_telling(parties, session, s):
    said = IDS.long() if parties.present("S") else torch.zeros(3, dtype=torch.int64)
    session.agreement.broadcast(session.answering[0], "settings", session.S, said)


class Planted(torch.nn.Module):
    """A program's own module."""

    def forward(self, x):
        return x


def by_encryption(parties, session, s):
    """A CKKS query to a module of the program, which may give any half that A has."""
    with session.call() as net:
        parameters = ckks.choose(1)
        keys = ckks.LocatedKeys(net, net.Q, parameters, parameters, {net.A: parameters})
        ask(net, keys.encrypt(net.own(net.Q, torch.zeros(3, 1))), Planted())


def by_a_garbled_relay(parties, session, s):
    with session.call() as net:
        deliver(net, s.shares.A, net.A, net.Q, "tables")


def by_comparing(parties, session, s):
    own = torch.zeros(32, dtype=torch.uint8)
    if parties.present("S"):
        own[:3] = (IDS % 251).byte()
    with session.call() as net:
        compare_public_values(net, own, lambda other, mine, came: mine)


class Shown:
    """A number that its mask does nothing to; callable, as what encodes it."""

    shape, dtype = torch.Size((3,)), torch.int64

    def __init__(self, x=None):
        self.x = x

    def __call__(self, x):
        return Shown(x)

    def __add__(self, _):
        return self.x


def by_a_step_of_ours(parties, session, s):
    """A protocol of the package that the package itself calls, in a step that it was handed."""
    with session.call() as net:
        own = net.own(net.A, OWN["alpha"]["A"].long() if parties.present("A") else torch.zeros(3, dtype=torch.int64))
        net.fresh(net.A, functools.partial(mask_streamed_weight, net, own), net.fresh(net.A, lambda x: Shown(), own))


def by_a_streamed_weight(parties, session, s):
    """The package calls its own protocol, with a function of the program's that leaves nothing to mask."""
    with session.operation(s.party) as net:
        own = net.own(net.A, OWN["alpha"]["A"].long() if parties.present("A") else torch.zeros(3, dtype=torch.int64))
        s.backend.streamed(own, Shown())


def by_halves_without_masks(parties, session, s):
    with session.operation(s.party):
        s.backend.square(s.backend.each(Shown(), s.shares))


SHOWN = {
    "streamed": (by_a_streamed_weight, "beta is sent .*'omega_masked' of .* code of the program"),
    "halves": (by_halves_without_masks, "alpha is sent .* code of the program"),
    "own protocol": (by_own_protocol, "alpha is sent .* code of the program, which says: 'hidden by a mask of k_SA'"),
    "declaring": (by_declaring, "alpha is sent .* code of the program"),
    "no observer": (with_no_observer, r"alpha learns \[3\] int64 .* the input 'x' of beta"),
    "loop": (in_a_loop, r"alpha learns \[\] int64 .* the input 'x' of beta.*, 3 times"),
    "aggregate": (by_aggregate, r"gamma learns \[3\] int64 .* of beta"),
    "trace": (by_trace, "alpha is sent .* code of the program"),
    "trace of ours": (by_trace_of_ours, r"alpha (learns|is sent) \[3\] int64"),
    "encryption": (by_encryption, "beta is sent .* code of the program"),
    "step of ours": (by_a_step_of_ours, "beta is sent .*'omega_masked' of .* code of the program"),
    "relay": (by_a_garbled_relay, r"gamma learns \[3\] int64 \('to_Q' of 'garbled_relay'"),
}


def test_a_program_broadcasts_nothing_in_the_packages_name(world):
    found = dry_run_source(attack(by_telling), read_federation(world.path))
    assert not found.complete and "only sectorch's own code broadcasts" in found.stopped


@pytest.mark.parametrize("name", SHOWN)
def test_a_reveal_that_is_in_the_program_is_in_the_consent_and_changes_the_digest(world, name):
    reveal, why = SHOWN[name]
    file = read_federation(world.path)
    found, plain = dry_run_source(attack(reveal), file), dry_run_source(attack(lambda *_: None), file)
    assert found.complete, found.stopped
    assert any(re.search(why, line) for line in found.learned), found.learned
    assert len(found.reveals) > len(plain.reveals) and found.traced != plain.traced


def runs(world, program, bounds=(), label="run"):
    """What each party's run gave, and its ledger; each agreed to what the dry run has found, and to the bounds."""
    file = read_federation(world.path)
    found = dry_run_source(program, file)
    written = bounds_of(bounds, lambda name: file.member_named(name).name)
    ledgers = {
        name: Ledger(name, found.reveals, written, found.sessions, digests=found.digests, messages=found.messages)
        for name in PARTIES
    }

    def work(name):
        with world.party(name) as party:
            run = party.for_run(OWN[name], f"{label} {id(program)}", ledger=ledgers[name])
            return program(RunParties(run))

    return each(PARTIES, work), ledgers, found


PAIR = Roles("A S", edges="A-S", streams="A-S")


@protocol("statistics", "a claim", [Message("sum", "S", "A", "nothing", "the sum")], roles=PAIR)
def told_sum(net, x):
    return x.send(net.S, net.A, "sum")


PROTOCOLS.pop("statistics")


def among_two(other):
    def program(parties):
        if parties.present("Q"):
            return {}
        with parties.session(PAIR) as session:
            sums = []
            for i in range(2):
                with session.call() as net:
                    ids = net.own(net.S, IDS.long() if parties.present("S") else torch.zeros(3, dtype=torch.int64))
                    sums.append(ids.sum() * i)
            with session.call() as net:
                return {"sum": net.read(told_sum(net, sums[other and bool(session.runtime.here)]), net.A)}

    return program


def test_roles_of_its_own(world):
    results, ledgers, found = runs(world, among_two(False))
    assert found.complete and results["alpha"]["sum"] == 0 and "the sum" in ledgers["beta"].text, results
    results, ledgers, _ = runs(world, among_two(True))
    assert "has not agreed to this" in str(results["beta"]) and ledgers["beta"].text == "nothing"


def test_what_was_agreed_to_runs_and_the_ledger_has_it(world):
    """A shape that is public is no secret; every party's own part is there, and nothing else."""
    results, ledgers, found = runs(world, honest)
    assert results["alpha"]["sum"] == 6 + IDS.sum() and ledgers["gamma"].text == "nothing"
    assert word_counts(ledgers["beta"].sent) == [line for line in found.learned if line.startswith("alpha learns")]
    results, ledgers, found = runs(world, attack(in_a_loop))
    assert not [r for r in results.values() if isinstance(r, BaseException)], results
    assert any(
        "the input 'x' of beta" in line and line.endswith("3 times") for line in word_counts(ledgers["beta"].sent)
    )


def by_comparing_what_it_has_noted(parties, session, s):
    """The digest is the session's own, of few numbers; nobody looks whether the others have it too."""
    with session.call() as net:
        session.agreement.note(net.A, IDS[0].item() if parties.present("S") else 0.0)
        digest = torch.frombuffer(bytearray(session.agreement._digests[net.A]), dtype=torch.uint8)
        compare_public_values(net, digest, lambda other, mine, came: mine)


def of_other_rows(parties, session, s):
    rows = [s[0], s[1], s[2]]
    rows[int(IDS[0]) % 3 if session.runtime.here else 0].reveal(to="A")


def of_the_other_choice(parties, session, s):
    first, second = (torch.where(torch.tensor(3 * [one]), s, s * 2) for one in (True, False))
    (second if session.runtime.here else first).reveal(to="A")


def of_the_other_product(parties, session, s):
    products = (s + 1) * s, (s + 2) * s
    products[bool(session.runtime.here)].sum().reveal(to="A")


def of_shares_that_were_changed(parties, session, s):
    x, y = s * 2, s * 3
    if session.runtime.here:
        x.shares, y.shares = y.shares, x.shares
    x.reveal(to="A")


HIDDEN = {
    "compared note": by_comparing_what_it_has_noted,
    "other rows": of_other_rows,
    "other choice": of_the_other_choice,
    "other product": of_the_other_product,
    "changed shares": of_shares_that_were_changed,
    "when somebody is here": when_somebody_is_here,
    "in the place of another": in_the_place_of_another,
    "comparing": by_comparing,
}


def in_another_session(parties):
    honest(parties)
    if not isinstance(parties, DryParties):
        with parties.session(STAR, NAMES, label="more") as session:
            shares(parties, session)[1].reveal(to="A")


def again_after_a_refusal(parties):
    with parties.session(STAR, NAMES) as session:
        s = shares(parties, session)[1]
        if session.runtime.here:
            with contextlib.suppress(errors.RefusedError):
                s.reveal(to="A")
        s.sum().reveal(to="A")


@pytest.mark.parametrize("name", [*HIDDEN, "another session", "after a refusal"])
def test_a_reveal_that_a_dry_run_cannot_see_is_refused_at_the_party_whose_half_it_is(world, name):
    own = {"another session": in_another_session, "after a refusal": again_after_a_refusal}
    program = own.get(name) or attack(HIDDEN[name])
    results, ledgers, found = runs(world, program)
    assert found.complete
    check_refused(results, ledgers)


def check_refused(results, ledgers):
    """By a party that does something else than its dry run; beta's half stays where it is."""
    refused = [error for error in results.values() if isinstance(error, errors.RefusedError)]
    own = [error for error in refused if "has not agreed to this, and nothing of it was sent" in str(error)]
    assert own and isinstance(results["beta"], errors.SectorchError)
    assert not any("[3]" in text or "the input" in text for text in ledgers["beta"].sent)
    assert all(
        "see its own log" in abort_reason(error, "'beta'") and "811" not in abort_reason(error, "'beta'")
        for error in own
    )


def masked_shape(parties):
    """What Q deals is not waited for: others see its size."""
    with parties.session(STAR, NAMES) as session:
        s = shares(parties, session)[1]
        shape = (811 if parties.present("Q") else 3,)
        sectorch.share(torch.zeros(shape), owner="Q", session=session, scheme=SCHEME, shape=shape)
        s.sum().reveal(to="A")


def test_a_shape_of_a_masked_message_tells_nothing(world):
    results, _, _ = runs(world, masked_shape)
    assert "has not agreed to this" in str(results["gamma"]) and "[811]" in str(results["gamma"])
    assert all(isinstance(e, errors.SectorchError) and "811" not in str(e) for n, e in results.items() if n != "gamma")
    assert "811" not in abort_reason(results["gamma"], "'gamma'")


class Unmasked(torch.Tensor):
    """Computes as it likes: a mask is not subtracted from it."""

    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = f(*args, **(kwargs or {}))
            if f.__name__ in ("sub", "__sub__", "add", "__add__", "rsub", "__rsub__"):
                found = next(a for a in args if isinstance(a, cls)).clone()
            return found.as_subclass(cls) if isinstance(found, torch.Tensor) else found


class Dispatched(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        return f(*args, **(kwargs or {}))


def test_a_class_of_tensors_has_no_say_in_what_is_sent():
    session, plain = sectorch.Session(), torch.tensor([811.0, 245.0, 377.0])
    with Transcript() as seen:
        x = sectorch.share(plain.as_subclass(Unmasked), session=session)
        y = sectorch.share(plain, session=session) * torch.ones(3).as_subclass(Unmasked)
        assert ((x * y).reveal() - plain**2).abs().max() < 0.5
    ring = sectorch.ring.encode(plain, 20)
    assert not any(torch.isin(found.long(), ring).any() for line, found in seen.lines if line.learner is None)
    with pytest.raises(errors.ArgumentError, match=r"plain torch\.Tensor"):
        sectorch.share(plain.as_subclass(Dispatched), session=session)


def announcing(leak):
    def program(parties):
        with parties.session(STAR, NAMES) as session:
            own = {n: sectorch.announced(parties.inputs.get(n), owner=n, session=session) for n in ("A", "S")}
            a, s = (sectorch.share(own[n], owner=n, session=session, scheme=SCHEME) for n in ("A", "S"))
            found = {"sum": (a + s).sum().reveal(to="A")}
            if leak:
                s.reveal(to="A")
            return found

    return program


def by_an_announced_shape(parties):
    with parties.session(STAR, NAMES) as session:
        sectorch.announced(parties.inputs.get("A"), owner="A", session=session)
        for _ in range(2):
            shape = [int(x) for x in IDS] if parties.present("S") else []
            sectorch.announced(torch.empty(shape[:1], dtype=torch.bool), owner="S", session=session)


def test_bounds_are_held_where_a_dry_run_ends_at_an_announced_shape(world):
    bounds = ["reveal_to_A:A=1", "announce:alpha=14", "announce:S=14", "announce:gamma=14"]
    results, _, found = runs(world, announcing(False), bounds)
    assert not found.complete and not found.traced and results["alpha"]["sum"] == 6 + IDS.sum()
    results, _, _ = runs(world, announcing(True), bounds)
    assert isinstance(results["beta"], errors.RefusedError) and "alpha learns [3]" in str(results["beta"])
    assert isinstance(results["alpha"], errors.SectorchError)
    assert isinstance(runs(world, announcing(True), ["alpha=18", "beta=14", "gamma=14"])[0]["alpha"], dict)
    results, _, _ = runs(world, by_an_announced_shape, bounds)
    assert isinstance(results["beta"], errors.RefusedError)


def test_what_a_program_says_to_others_beside_its_messages_holds_nothing(world):
    """Names and shapes of results, texts and kinds of errors, labels, the connection."""
    with world.party("beta") as party:
        given = RunParties(party.for_run(OWN["beta"], "x"))
        assert not hasattr(given, "connection") and not hasattr(given, "give_up")
    for kind in (errors.RefusedError, type("IDs811", (errors.RefusedError,), {})):
        try:
            raise kind("811 245 377")
        except errors.RefusedError as error:
            assert "811" not in abort_reason(error, "'beta'")


PROGRAM = """
import sectorch, torch
from sectorch.choreography.roles import STAR
NAMES = {"Q": "Q", "A": "A", "S": "S"}
scheme = sectorch.Scheme(range_check=False)

def program(parties):
    with parties.session(STAR, NAMES) as session:
        own = parties.inputs
        a, s = (sectorch.share(own.get(n), owner=n, session=session, scheme=scheme, shape=(3,)) for n in ("A", "S"))
        found = {"sum": (a + s).sum().reveal(to="A"), "debug": s.reveal(to="A")}
        for i in range(5):
            s[0].reveal(to="A")
        return {**found, **({"811": a[:1].reveal(to="S")} if 1 else {})}

def announced(parties):
    with parties.session(STAR, NAMES) as session:
        return sectorch.announced(parties.inputs.get("A"), owner="A", session=session)
"""


HIDING = """
def hiding(parties):
    with parties.session(STAR, NAMES) as session:
        own = {n: sectorch.announced(parties.inputs.get(n), owner=n, session=session) for n in ("A", "S")}
        a, s = (sectorch.share(own[n], owner=n, session=session, scheme=scheme) for n in ("A", "S"))
        return {"sum": (a + s).sum().reveal(to="A"), "debug": s.reveal(to="A")}
"""


def test_consent_receipts_log_and_page_of_parties_that_are_up(world, capsys, caplog, tmp_path):
    (world.folder / "work.py").write_text(PROGRAM)
    np.save(world.folder / "A.npy", OWN["alpha"]["A"].numpy())
    np.save(world.folder / "S.npy", IDS.numpy())
    what, running = f"{world.folder}/work.py:program", []
    for name, role in PARTIES.items():
        (world.folder / f"{name}.toml").write_text(f'[files]\nreceipts = "{name}-receipts"\n')
        (world.folder / f"{name}.toml").chmod(0o600)
        own = [] if role == "Q" else ["--input", f"{role}={world.folder}/{role}.npy"]
        assert command(["federation", "accept", str(world.path), what, "--as", name, *own, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")
    assert any("alpha learns [3] int64" in line and "the input 'x' of beta" in line for line in said["learned"])
    refused = ["federation", "accept", str(world.path), what.replace(":program", ":announced"), "--as", "beta"]
    assert command(refused) == 1 and "--reveals PARTY=ELEMENTS" in capsys.readouterr().err
    assert command([*refused, "--reveals", "everybody=3"]) == 1
    assert command([*refused, "--reveals", "alpha=3", "announce:gamma=14"]) == 0
    assert 'reveals = ["alpha=3", "announce:gamma=14"]' in (world.folder / "beta.toml").read_text()
    with caplog.at_level("INFO", "sectorch.query"):
        for name in PARTIES:
            file, own = read_federation(world.path), read_party_config(world.path, name)
            policy = AcceptancePolicy(own, file, name)
            policy.check()
            party = PartyService(world.path, file, own, policy, credentials(file, name, own.folder))
            stopped = threading.Event()
            thread = threading.Thread(target=party.keep, args=(stopped, lambda _: None), daemon=True)
            thread.start()
            running.append((party, stopped, thread))
            assert until(lambda name=name: world.server._broker.notes.token(name), 30)
        notes: Queue[dict] = Queue()
        with Federation(world.path, "gamma", on_note=notes.put) as federation:
            ended = ProgramStart(federation, describe_proposal(federation.file, "gamma", what), notes).run(5.0)
        for party, stopped, thread in running:
            stopped.set()
            party.stop()
            thread.join(30)
    assert {said["outcome"] for said in ended.values()} == {"done"}
    assert ended["alpha"]["learned"] == {"sum": [], "debug": [3]}
    found = audit(next((world.folder / "beta-receipts").glob("*")))
    (query,) = found.queries
    assert [(o.to, o.most) for o in query.opened] == [("alpha", 1), ("alpha", 1), ("alpha", 8)]
    assert "[3] int64" in query.opened[1].what and "the input 'x' of beta" in query.opened[1].what
    assert query.opened[1].what.replace("'", "&#39;") in page(found, True)
    assert "revealed=" in caplog.text and "the input 'x' of beta" in caplog.text
    assert command(["audit", str(found.path)]) == 0
    assert "revealed to alpha: alpha learns [3] int64" in capsys.readouterr().out
    record = json.loads(next((world.folder / "beta-results").glob("*/run.json")).read_bytes())
    assert len(record["revealed"]) == 3


def test_a_reveal_without_a_receipt_does_not_leave(world):
    def full(*_):
        raise errors.ReceiptError("no receipt can be written (the disk is full)")

    file, found = read_federation(world.path), None
    found = dry_run_source(honest, file)
    ledgers = {name: Ledger(name, found.reveals, (), found.sessions) for name in PARTIES}
    ledgers["beta"] = Ledger("beta", found.reveals, (), found.sessions, full)

    def work(name):
        with world.party(name) as party:
            return honest(RunParties(party.for_run(OWN[name], "receipts", ledger=ledgers[name])))

    results = each(PARTIES, work)
    assert isinstance(results["beta"], errors.ReceiptError) and isinstance(results["alpha"], errors.SectorchError)


@pytest.mark.parametrize("text", ["", "alpha", "alpha=", "alpha=-1", "a:b:c=1", "alpha=1.5", "reveal:=1", 3])
def test_a_bound_that_is_none_is_refused(text):
    with pytest.raises(errors.ArgumentError, match="a bound of reveals is"):
        bounds_of([text], str)
    with pytest.raises(errors.ArgumentError, match="two bounds"):
        bounds_of(["alpha=1", "alpha=2"], str)


@pytest.mark.sectorch_long
def test_processes_that_hide_a_reveal(tmp_path, capsys):
    """A process each: what is in the consent is in the receipts, and what is beyond a bound does not leave."""
    (tmp_path / "work.py").write_text(PROGRAM + HIDING)
    file, processes = tmp_path / "trial" / "federation.toml", {}
    roles = [f"{name}={role}" for name, role in PARTIES.items()]
    assert command(["federation", "try", str(tmp_path / "trial"), *roles, "--server", f"localhost:{free_port()}"]) == 0
    bounds = ["--reveals", *(f"announce:{name}=28" for name in PARTIES), "alpha=1"]
    for name, role in PARTIES.items():
        for function in ("program", "hiding"):
            own = [] if role == "Q" else ["--input", f"{role}={tmp_path}/{role}.npy"]
            if own:
                np.save(tmp_path / f"{role}.npy", OWN[name][role].numpy())
            more = bounds if function == "hiding" else []
            what = ["federation", "accept", str(file), f"{tmp_path}/work.py:{function}", "--as", name, *own, *more]
            assert command(what) == 0
        own_file = tmp_path / "trial" / f"{name}.toml"
        own_file.write_text(f'[files]\nreceipts = "{name}-receipts"\n' + own_file.read_text())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        for name in ("server", *PARTIES):
            with (tmp_path / f"{name}.log").open("w") as log:
                up = [*COMMAND, "up", str(file), "--as", name]
                processes[name] = Command(up, cwd=tmp_path, stdout=log, stderr=log, env=environment)
        for function, right in (("program", True), ("hiding", False)):
            start = ["run", str(file), f"{tmp_path}/work.py:{function}", "--as", "gamma", "--json", "--wait", "240"]
            starter = processes[function] = Command(
                [*COMMAND, *start], cwd=tmp_path, stdout=PIPE, stderr=PIPE, env=environment
            )
            _, said = starter.communicate(timeout=300)
            assert (starter.returncode == 0) is right, said
        for name in PARTIES:
            processes[name].terminate()
            processes[name].wait(60)
        queries = audit(next((tmp_path / "trial" / "beta-receipts").glob("*"))).queries
        assert [q.outcome for q in queries] == ["done", "RefusedError"]
        assert "[3] int64" in queries[0].opened[1].what and not any("[3] int64" in o.what for o in queries[1].opened)
        assert "has not agreed to this" in (tmp_path / "beta.log").read_text()
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
