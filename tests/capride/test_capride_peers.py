"""P_k and P_l as two processes: the same numbers and messages as in one process, and nothing that is not declared."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from capride_attacks import Steps
from cases import long
from distributed_parties import PROCESSES, Pipe, forked
from test_capride_protocol import error_bound
from torch import nn

import sectorch
from sectorch import ckks
from sectorch.choreography import PROTOCOLS, Message, protocol
from sectorch.choreography import Party as Member
from sectorch.choreography.ledger import Profile, Transcript
from sectorch.choreography.run.party import PartyRuntime
from sectorch.errors import ArgumentError, TopologyError, UndeclaredMessageError
from sectorch.federated.parties import Simulation
from sectorch.protocols.capride import DisaggregationError, Party, Settings
from sectorch.protocols.capride.algorithm import subset
from sectorch.protocols.capride.exchange import PEERS, Exchange, announce, fitted
from sectorch.protocols.capride.training import Question

NAMES = {"Pk": "P1", "Pl": "P2"}
SIZES = {"P2": 0.1}
"""What P1 states of its logits: P2's are larger, and are scaled down to it."""


def lines(profile: Profile) -> list[tuple]:
    return [(m.path, m.label, m.src.name, m.dst.name, tuple(m.shape), str(m.dtype), m.round) for m in profile.ledger]


class One(Simulation):
    """The parties of one session: those that are in its runtime."""

    def __init__(self, session: sectorch.Session):
        super().__init__()
        self._session, self._here = session, {p.name for p in session.parties if session.present(p)}

    def present(self, party: str) -> bool:
        return party in self._here

    @contextmanager
    def session(self, *_, **__):
        yield self._session


def residues_of(x: ckks.LocatedCKKSTensor) -> torch.Tensor:
    return x.content._value.cipher.data


def one_peer(role: str, end, parties: list[Party], classes, parameters, how: Settings, question, model, told) -> None:
    """A process that is P1 in the role Pk, or P2 in the role Pl: it asks, or answers, and once more."""
    torch.set_num_threads(1)
    me, other = (Member(NAMES[r], r) for r in (role, "Pl" if role == "Pk" else "Pk"))
    with Profile() as profile:
        session = sectorch.Session(roles=PEERS, names=NAMES, runtime=PartyRuntime(me, bytes(16), {other: Pipe(end)}))
        exchange = Exchange(parties, classes, parameters, how, One(session))
        ask = lambda samples: exchange.ask(1, parties[0], question[0], samples, {"P2": model}, sizes=SIZES)["P2"]
        found = ask(question[1])
        held = (
            sorted(exchange.owners),
            sorted(peer for (_, peer), (*_, x) in exchange._published.items() if not residues_of(x[0]).is_meta),
        )
        seen, count = lines(profile), dict(exchange.peers["P2"].ledger.released)
        told.send((None if found.is_meta else found.tolist(), held, seen, count))
        try:
            ask(15)
        except (DisaggregationError, EOFError, ConnectionError) as error:
            again = exchange.peers["P2"].ledger.released
            told.send((isinstance(error, DisaggregationError), str(error), lines(profile)[len(seen) :], again))


def apart(run, question: Question, how: Settings) -> dict[str, list[tuple]]:
    """What each of the two processes says of its two questions. Neither is given what is the other's."""
    p1, p2 = run.parties
    blank = copy.deepcopy(run.states["P2"].small).to("meta")
    absent = lambda p: Party(p.name, None, p.images.to("meta"), p.labels.to("meta"))
    given = {
        "Pk": ([Party("P1", None, p1.images, p1.labels), absent(p2)],
               (question.published(len(p1.labels)), len(question.subset)), blank),
        "Pl": ([absent(p1), Party("P2", None, p2.images, p2.labels)], (None, 0), run.states["P2"].small),
    }  # fmt: skip
    ends = dict(zip(given, PROCESSES.Pipe(), strict=True))
    processes, heard = [], {}
    for role, (parties, asked, model) in given.items():
        heard[role], told = PROCESSES.Pipe(duplex=False)
        arguments = (role, ends[role], parties, run.run.classes, run.run.parameters, how, asked, model, told)
        processes.append(forked(one_peer, arguments))
        processes[-1].start()
        told.close()
        ends[role].close()
    try:
        return {role: [end.recv(), end.recv()] for role, end in heard.items()}
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def asked(run, how: Settings) -> Question:
    draws = torch.Generator().manual_seed(0)
    return Question(run.parties[0], run.states["P1"].small, subset(run.parties[0], 1, how), how, draws)


@pytest.mark.sectorch_long  # `test_paper_equality.py` has processes
def test_one_exchange_as_two_processes(made, quick):
    """P1 asks P2 about 48 digits, twice. Keys, encryption and flooding are fresh in every run: the numbers agree within
    twice the bound that one run has, and with the plain ones within once; the messages agree in everything. The second
    time they are 15, and P2 refuses before it computes: P1 sees that nothing comes, and no message says so.
    """
    how = replace(quick, scale_bits=40, leakage=0.5)
    run = Steps(made, how)
    question, p1, p2 = asked(run, how), run.parties[0], run.states["P2"].small
    directions = question.published(len(p1.labels))
    with Profile() as together:
        session = sectorch.Session(roles=PEERS, names=NAMES)
        one = Exchange(run.parties, run.run.classes, run.run.parameters, how, One(session))
        found = one.ask(1, p1, directions, len(question.subset), {"P2": p2}, sizes=SIZES)["P2"]
    said = apart(run, question, how)
    (numbers, at_P1, sent, _), (nothing, at_P2, seen, counts) = said["Pk"][0], said["Pl"][0]
    assert at_P1 == (["P1"], []) and at_P2 == ([], ["P2"]) and nothing is None
    smaller = fitted(p2, run.parties[1].images, SIZES["P2"])
    assert smaller is not p2
    with torch.no_grad():
        plain = directions.on(smaller(p1.images), how.temperature)
    bound = error_bound(smaller, p1.images, one.layouts["P1"].count, run.run.parameters, how)
    assert 1000 * bound < float(plain.abs().median()), "else the comparison would say little"
    numbers = torch.tensor(numbers, dtype=torch.float64)
    torch.testing.assert_close(numbers, plain, rtol=0, atol=bound)
    torch.testing.assert_close(numbers, found, rtol=0, atol=2 * bound)
    assert sent == seen == lines(together)
    paths = [line[0] for line in sent]
    assert paths == ["agree", *3 * ["capride_publish"], "capride_announce", *4 * ["capride_divergence"]]
    assert counts == one.peers["P2"].ledger.released and len(counts) == 1

    (waited, _, sent, _), (refused, text, seen, again) = said["Pk"][1], said["Pl"][1]
    assert refused and "P2 releases no aggregate over 15 samples of P1" in text and again == counts
    assert not waited and [line[1] for line in seen] == ["size"]
    assert "aggregates" not in [line[1] for line in sent]


def test_more_samples_than_were_published_are_refused(made, quick):
    """A lie of P_k's, told in the one message that P_l reads."""
    run = Steps(made, quick)
    question = asked(run, quick)
    exchange = run.exchange
    with (
        Transcript() as transcript,
        pytest.raises(DisaggregationError, match="P1 asks about 49 samples"),
    ):
        exchange.ask(1, run.parties[0], question.published(48), 49, {"P2": run.states["P2"].small})
    assert [line.label for line, _ in transcript.lines if line.call][-1] == "size" and not run.run.released


def test_every_declared_message_is_sent_and_no_other(made, quick):
    """Of three parties' round in one process: each sends along its own pairs what is declared, once."""
    p1, p2 = made[0]
    run = Steps(([p1, p2, replace(p1, name="P3")], *made[1:]), quick)
    with Profile() as profile:
        run.exchange.ask(1, p1, asked(run, quick).published(48), 48, {n: run.states[n].small for n in ("P2", "P3")})
    specs = [s for name, s in PROTOCOLS.items() if name.startswith("capride")]
    own = [m for m in profile.ledger if m.protocol.startswith("capride")]
    assert {(m.protocol, m.label, m.src.role, m.dst.role) for m in own} == {
        (spec.name, m.label, m.src, m.dst) for spec in specs for m in spec.messages
    }
    assert {m.protocol for m in profile.ledger} - {spec.name for spec in specs} == {"agree"}
    pairs = [(m.src.name, m.dst.name) for m in own if m.label == "inputs"]
    assert pairs == [("P1", "P2"), ("P1", "P3")], "what P1 asks with; others publish when they ask"
    assert [(m.src.name, m.dst.name) for m in own if m.label == "aggregates"] == [("P2", "P1"), ("P3", "P1")]
    assert all(m.dtype in (torch.int64, torch.uint8) for m in own)
    layout = run.exchange.layouts["P1"]
    rounds = {"size": 1, "directions": 1, "directions_tag": 1, "aggregates": 2, "aggregates_tag": 2}
    assert {m.label: m.round for m in own} == {**rounds, **dict.fromkeys(("keys", "inputs", "inputs_tag"), 1)}
    sizes = {m.label: m.bytes for m in own}
    assert sizes["keys"] == ckks.PublicKeys.message_bytes(run.run.parameters)
    p = run.run.parameters
    assert sizes["inputs"] == 64 * 16 * p.degree * (p.depth + 1)
    assert sizes["directions"] == 10 * layout.blocks(37) * 32 * p.degree
    assert sizes["aggregates"] == layout.blocks(37) * (8 * p.degree + 16 * layout.count)


def test_what_is_not_declared_is_not_sent():
    session = sectorch.Session(roles=PEERS, names=NAMES)
    size = torch.tensor([1, 48])
    with session.call() as net, pytest.raises(UndeclaredMessageError, match="outside a protocol"):
        net.own(net.Pk, size).send(net.Pk, net.Pl, "size")
    attempts = {
        "accuracy": lambda net, x: x.send(net.Pk, net.Pl, "accuracy"),
        "size": lambda net, x: x.send(net.Pk, net.Pl, "size").send(net.Pl, net.Pk, "size"),
    }
    before = dict(PROTOCOLS)
    try:
        for label, attempt in attempts.items():
            tried = protocol("capride_tried", "here", announce.spec.messages, roles=PEERS)(attempt)
            with session.call() as net, pytest.raises(UndeclaredMessageError, match=label):
                tried(net, net.own(net.Pk, size))
        with pytest.raises(TopologyError, match="no edge from Pl to Pm"):
            protocol("capride_tried", "here", [Message("x", "Pl", "Pm", "")], roles=PEERS)(attempts["size"])
    finally:
        PROTOCOLS.clear()
        PROTOCOLS.update(before)


class Scaled(nn.Module):
    """By a weight of a single number, which under CKKS waits at P_l for weights that do not come."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("last", [Scaled, *long(nn.Identity)])
def test_a_model_that_needs_fewer_levels_than_the_chain_has(made, quick, last):
    """What P_k is sent has one scale, whatever the depth of P_l's model: nothing beside it is needed to decrypt."""
    how = replace(quick, levels=7, scale_bits=34)
    run = Steps(made, how)
    assert run.run.parameters.depth == 7
    directions = asked(run, how).published(48)
    small = run.states["P2"].small
    model = nn.Sequential(small, last())
    found = run.exchange.ask(1, run.parties[0], directions, 48, {"P2": model})["P2"]
    with torch.no_grad():
        plain = directions.on(model(run.parties[0].images), how.temperature)
    layout = run.exchange.layouts["P1"]
    bound = error_bound(small, run.parties[0].images, layout.count, run.run.parameters, how)
    bound *= 1 if last is nn.Identity else 4  # three times the error, and a rescale more
    assert 10 * bound < float(plain.abs().median()), "else the comparison would say little"
    torch.testing.assert_close(found, plain, rtol=0, atol=bound)


def test_public_keys_as_a_message():
    """As long as their parameters say, and the keys of the same identity at whoever receives them."""
    for depth in (1, 3):
        keys = ckks.keygen(depth, degree=8192, scale_bits=28).public
        message = keys.message()
        assert message.dtype == torch.uint8 and message.shape == (ckks.PublicKeys.message_bytes(keys.parameters),)
        found = ckks.PublicKeys.from_message(keys.parameters, message)
        assert found.identity == keys.identity
        assert (found.relin.residues == keys.relin.residues).all()
        for damage in (0, len(message) // 2):
            with pytest.raises(ckks.SerialisationError):
                _ = ckks.PublicKeys.from_message(keys.parameters, message[damage + 1 :]).relin


def test_names_of_roles():
    session = sectorch.Session(roles=PEERS, names=NAMES)
    assert {(p.name, p.role) for p in session.parties} == {("P1", "Pk"), ("P2", "Pl")}
    program = session.trace(lambda net: net.read(announce(net, net.own(net.Pk, torch.ones(2).long())), net.Pl))
    assert [p.name for p in program.parties] == ["P1", "P2"]
    assert session.run(program, {"x": torch.tensor([5, 48])}).tolist() == [5, 48]
    for names in ({"Pk": "P1", "Pl": "P1"}, {"Pm": "P1"}, {"Pk": "Pl"}):
        with pytest.raises(ArgumentError, match="names are of different parties"):
            sectorch.Session(roles=PEERS, names=names)
    with pytest.raises(ArgumentError, match="names are of different parties"):
        sectorch.Session(names={"Q": "me"})
