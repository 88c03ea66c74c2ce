"""Decoys: the same bits; an S that sends anything else is found in every decoy, and an honest one is never accused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from cases import by_turns
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from server_cheats import ACCOUNTABLE, EDGES, flip, messages_of_S, run
from torch import nn

import sectorch
from sectorch import decoys
from sectorch.choreography import Phase
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.net import Sent
from sectorch.choreography.program.projection import Setup
from sectorch.choreography.run import replay
from sectorch.choreography.run.party import PartyRuntime
from sectorch.config import Scheme
from sectorch.decoys import DecoyCheck, Decoys, ServerEvidence, decoy_call, made_up_inputs
from sectorch.errors import ArgumentError, DecoyError, FalseServerError, PeerLostError
from sectorch.mpc.star.statement import DIGESTS, Statement
from sectorch.session import A, Q, S, Session

torch.manual_seed(0)
SMALL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
X = torch.randn(2, 3)
PICTURES = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3), nn.Softmax(-1)
).eval()
ZOO = {"rows": (SMALL, X), "pictures": (PICTURES, torch.randn(2, 1, 6, 6))}


def secured(model=SMALL, scheme=ACCOUNTABLE, **more):
    return sectorch.secure(model, scheme, session=Session(), **more)


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("name", ZOO)
def test_an_accountable_call_gives_the_bits_of_the_reference(name, network):
    model, x = ZOO[name]
    secure = secured(model, Scheme(accountable=True, network=network), chunk=1 if name == "rows" else None)
    plain = sectorch.reference(model)(x)
    assert torch.equal(secure(x), plain)
    secure.preprocess(x)
    secure.preprocess(x)
    with decoy_call():
        made_up = secure(x)
    assert torch.equal(secure(x), plain) and not torch.equal(made_up, plain)
    statements = secure.session.statements
    assert statements.asked == statements.checked == (2 if name == "rows" else 1)  # each piece is a call


def test_parties_apart_check_decoys_and_go_on():
    found = run(SMALL, [(X, False), (X, True), (X, False), (X, True)])
    results, session = found["Q"]
    plain = sectorch.reference(SMALL)(X)
    assert torch.equal(results[0], plain) and torch.equal(results[2], plain)
    assert session.statements.checked == found["A"][1].statements.checked == 2


def test_prepared_calls_are_signed_for_whole():
    """What S sends ahead of the query is covered too."""
    prepared = partial(run, SMALL, prepare=True)
    results, session = prepared([(X, False), (X, True)])["Q"]
    assert torch.equal(results[0], sectorch.reference(SMALL)(X)) and session.statements.checked == 1
    label = [header.label for header in messages_of_S(secured(), X)]
    for number in range(3):  # the messages of the preparation come first, whichever they are
        assert isinstance(prepared([(X, True)], flip({number: [(0, 0)]}))["A"], FalseServerError), label


def evidence_of(found) -> ServerEvidence:
    assert isinstance(found["A"], FalseServerError) and isinstance(found["Q"], FalseServerError)
    return found["A"].evidence


def places(number: int, header) -> list[dict]:
    words = max(1, header.shape.numel())
    return [{number: [(0, 0)]}, {number: [(words - 1, 63)]}, {number: [(w, 63) for w in range(min(words, 5))]}]


def test_every_falsified_message_of_a_decoy_is_found_with_evidence():
    """One bit, bit 63, and changes of several words, in each message; and consistent changes in several messages."""
    headers = messages_of_S(secured(), X)
    changes = [change for number, header in enumerate(headers) for change in places(number, header)]
    changes += [{number: [(0, 63)] for number in range(len(headers))}]
    found = run(SMALL, [(X, True)] * len(changes), [flip(change) for change in changes], goes_on=True)
    program = secured().choreography(X)
    missed = [change for change, error in zip(changes, found["A"][0], strict=True) if not hasattr(error, "evidence")]
    assert not missed and all(isinstance(error, FalseServerError) for error in found["Q"][0])
    for error in found["A"][0][:: len(headers) // 2]:
        error.evidence.check(program)


def line_of(label: str, shape: tuple[int, ...], dtype=torch.int64) -> Sent:
    return Sent("p", label, A, S, Phase.ONLINE, 0, torch.Size(shape), dtype, "", "", None, True, 0)


def digest_of(*messages: tuple[Sent, torch.Tensor], key=bytes(32)) -> bytes:
    digests = replay.CallDigests(b"", 0, {"A": key})
    for line, value in messages:
        digests.message(line, value)
        value.fill_(9)
    return digests.digest(("A", "S"), Phase.ONLINE)


def test_large_messages_are_hashed_beside_the_call(monkeypatch):
    """As they were when they crossed, whatever becomes of their memory, and in their order."""
    monkeypatch.setattr(replay, "LARGE", 0)
    for name, (model, x) in ZOO.items():
        secure = secured(model)
        assert torch.equal(secure(x), sectorch.reference(model)(x)), name
        with decoy_call():
            for _ in range(5):
                secure(x)
        assert secure.session.statements.checked == 5
    assert evidence_of(run(SMALL, [(X, True)], flip({6: [(0, 63)]})))
    line, found = line_of("l", (3,)), []
    for limit in (0, 1 << 60):
        monkeypatch.setattr(replay, "LARGE", limit)
        found.append(digest_of((line, torch.arange(3)), (line, torch.zeros(3, dtype=torch.int64))))
    assert found[0] == found[1] != digest_of()


def test_a_digest_names_every_message_its_place_and_its_order():
    """No two sequences of messages have the same bytes."""
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype)
    a, b = line_of("a", (2,)), line_of("b", (2,))
    sequences = [
        [], [(a, zeros(2))], [(b, zeros(2))], [(a, zeros(2)), (b, zeros(2))], [(b, zeros(2)), (a, zeros(2))],
        [(a, zeros(2)), (a, zeros(2))], [(a, torch.tensor([1, 0]))], [(a, torch.tensor([0, 1]))],
        [(line_of("a", (1, 2)), zeros(1, 2))], [(line_of("a", (16,), torch.uint8), zeros(16, dtype=torch.uint8))],
        [(line_of("a", (4,), torch.int32), zeros(4, dtype=torch.int32))], [(line_of("a", (0,)), zeros(0))],
        [(line_of("a", (1,)), zeros(1)), (line_of("a", (1,)), zeros(1))],
    ]  # fmt: skip
    found = [digest_of(*sequence) for sequence in sequences]
    assert len(set(found)) == len(sequences) and digest_of(*sequences[1], key=bytes(31) + b"1") not in found


def test_nothing_is_found_in_a_call_that_is_no_decoy():
    """Which is why decoys must not be told from other calls."""
    found = run(SMALL, [(X, False)], flip({0: [(0, 20)]}))
    assert not isinstance(found["A"], Exception) and found["A"][1].statements.found is None
    assert not torch.equal(found["Q"][0][0], sectorch.reference(SMALL)(X)), "and Q has a wrong result"


# What S can do with statements and notes.


def statement_changed(monkeypatch, change, label: str) -> None:
    """S sends another statement or note than it should: change(bytes) in messages of this label."""
    own = PartyRuntime.transfer

    def transfer(self, line, value):
        if line.path == "attest" and line.label == label and self.me == S:
            value = torch.frombuffer(bytearray(change(bytes(value.tolist()), line)), dtype=torch.uint8)
        return own(self, line, value)

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)


def signed_anew(key: Ed25519PrivateKey, **fields):
    """A statement with other fields that S signs all the same."""

    def change(message: bytes, line) -> bytes:
        program = secured().choreography(X).digest
        statement = dataclasses.replace(Statement.from_message(bytes(16), program, line.call - 1, message), **fields)
        return dataclasses.replace(statement, signature=key.sign(statement.signed_bytes())).to_message()

    return change


@by_turns(field=["with_Q", "with_A", "setup", *range(len(DIGESTS)), "signature"], decoy=[False, True])
def test_s_that_states_something_else_is_found_in_every_call(field, decoy, monkeypatch):
    key = Ed25519PrivateKey.generate()
    if field == "signature":
        change = lambda message, line: message[:-1] + bytes([message[-1] ^ 1])
        wrong = "has not signed what it states"
    else:
        wrong = "states other messages"

        def change(message, line):
            before = Statement.from_message(bytes(16), "", line.call - 1, message)
            false = {DIGESTS[field]: bytes(32)} if isinstance(field, int) else {}
            fields = {"digests": {**before.digests, **false}} if false else {field: bytes(32)}
            return signed_anew(key, **fields)(message, line)

    at = "A" if "A" in (DIGESTS[field] if isinstance(field, int) else ("A",) if field != "with_Q" else ("Q",)) else "Q"
    statement_changed(monkeypatch, change, f"statement_{at}")

    def begin(session):
        session.statements.key = key if session.present(S) else None

    found = run(SMALL, [(X, decoy)], begin=begin)
    assert isinstance(found[at], FalseServerError) and wrong in str(found[at])
    assert found[at].evidence is None and isinstance(found["Q"], (FalseServerError, PeerLostError))


def test_s_that_states_two_things_is_found_in_every_call(monkeypatch):
    """Each is right for its reader, in digests that the other cannot check."""
    key = Ed25519PrivateKey.generate()

    def change(message, line):
        before = Statement.from_message(bytes(16), "", line.call - 1, message)
        return signed_anew(key, digests={**before.digests, DIGESTS[0]: bytes(32)})(message, line)

    statement_changed(monkeypatch, change, "statement_A")
    found = run(SMALL, [(X, False)], begin=lambda s: setattr(s.statements, "key", key if s.present(S) else None))
    assert isinstance(found["A"], FalseServerError) and "one thing of call 2 to Q, and another to A" in str(found["A"])
    assert isinstance(found["Q"], PeerLostError)


@pytest.mark.parametrize(("label", "at"), [("note_on", "A"), ("report_on", "Q")])
def test_s_that_changes_a_note_is_found_in_every_call(label, at, monkeypatch):
    statement_changed(monkeypatch, lambda message, line: bytes(len(message)), label)
    found = run(SMALL, [(X, False)])
    assert isinstance(found[at], FalseServerError) and "has changed a" in str(found[at])
    assert isinstance(found["Q"], (FalseServerError, PeerLostError)), "Q has no result"


@pytest.mark.parametrize("label", ["statement_Q", "statement_A", "note_on", "report_on"])
def test_s_that_holds_a_message_back_gives_q_no_result(label, monkeypatch):
    """Else it could send something false, and then see to it that no decoy is checked."""
    own = PartyRuntime.transfer

    def transfer(self, line, value):
        if line.path == "attest" and line.label == label and self.me == S:
            raise PeerLostError("S is gone")
        return own(self, line, value)

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)
    found = run(SMALL, [(X, False)])
    assert isinstance(found["Q"], PeerLostError)


def test_s_signs_with_one_key_that_is_looked_at():
    keys = []

    def begin(session):
        session.statements.trust = keys.append

    assert not isinstance(run(SMALL, [(X, False), (X, False)], begin=begin)["Q"], Exception)
    assert len(keys) == 2 and keys[0] == keys[1]

    def refuse(public):
        raise FalseServerError("another key")

    found = run(SMALL, [(X, False)], begin=lambda session: setattr(session.statements, "trust", refuse))
    assert isinstance(found["Q"], FalseServerError)


# Evidence, and who could make it against an honest S.


@pytest.fixture(scope="module")
def evidence():
    return evidence_of(run(SMALL, [(X, True)], flip({6: [(0, 63)]})))


@pytest.fixture(scope="module")
def honest():
    """What A and Q together could show of an honest S's decoy."""
    own, checks = DecoyCheck.run, []
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(DecoyCheck, "note", lambda self: checks.append(self) or own(self))
        secure = secured()
        with decoy_call():
            secure(X)
    (check,) = checks
    with pytest.MonkeyPatch.context() as monkey:
        built = []
        monkey.setattr(decoys, "_same", lambda *_: False)
        monkey.setattr(ServerEvidence, "check", lambda self, program: built.append(self))
        with pytest.raises(FalseServerError):
            own(check)
    return built[0], check, secure.choreography(X)


def test_evidence_convicts(evidence):
    evidence.check(secured().choreography(X))


def test_evidence_against_an_honest_s_is_refused(honest):
    shown, _, program = honest
    with pytest.raises(DecoyError, match="S has sent what the program gives"):
        shown.check(program)


def _other(values: list[torch.Tensor], at: int = 0) -> list[torch.Tensor]:
    changed = [value.clone() for value in values]
    changed[at].view(-1)[0] += 1
    return changed


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (lambda e: {"with_Q": bytes(32)}, "other streams"),
        (lambda e: {"with_A": bytes(32)}, "other streams"),
        (lambda e: {"setup_key": bytes(32)}, "another setup"),
        (lambda e: {"setup": _other(e.setup)}, "another setup"),
        (lambda e: {"setup": e.setup[:1]}, "not those of the program"),
        (lambda e: {"from_Q": _other(e.from_Q)}, "other messages from Q"),
        (lambda e: {"from_Q": _other(e.from_Q, -1)}, "other messages from Q"),
        (lambda e: {"from_A": _other(e.from_A)}, "other messages from A"),
        (lambda e: {"from_A": e.from_A[1:]}, "not those of the program"),
        (lambda e: {"statement": dataclasses.replace(e.statement, call=7)}, "has not signed"),
        (lambda e: {"statement": dataclasses.replace(e.statement, session=bytes(15) + b"1")}, "has not signed"),
        (lambda e: {"statement": dataclasses.replace(e.statement, program="")}, "has not signed"),
        (lambda e: {"statement": dataclasses.replace(e.statement, setup=bytes(32))}, "has not signed"),
        *(
            (
                lambda e, name=name: {
                    "statement": dataclasses.replace(e.statement, digests={**e.statement.digests, name: bytes(32)})
                },
                "has not signed",
            )
            for name in DIGESTS
        ),
    ],
)
def test_evidence_against_an_honest_s_cannot_be_made(fields, why, honest):
    """By changes of any part; keys are named and messages hashed under S's signature."""
    shown, _, program = honest
    with pytest.raises(DecoyError, match=why):
        dataclasses.replace(shown, **fields(shown)).check(program)


def test_evidence_is_of_the_program_that_s_has_signed_for(honest):
    shown, _, _ = honest
    for other in (secured().choreography(X[:1]), secured(nn.Sequential(nn.Linear(3, 2)).eval()).choreography(X)):
        with pytest.raises(DecoyError, match="another program"):
            shown.check(other)


def test_q_that_names_other_keys_or_another_seed_accuses_nobody(honest):
    _, check, _ = honest
    with pytest.raises(DecoyError, match="not that of its streams with S"):
        dataclasses.replace(check, with_Q=bytes(32)).run()
    with pytest.raises(DecoyError, match="something else than its streams and the made-up input give"):
        dataclasses.replace(check, seed=bytes(32)).run()


def test_q_that_deals_falsely_in_a_decoy_accuses_nobody(monkeypatch):
    own = PartyRuntime.transfer

    def transfer(self, line, value):
        false = self.me == Q == line.src and line.label == "v_S"
        return own(self, line, value + 1 if false else value)

    monkeypatch.setattr(PartyRuntime, "transfer", transfer)
    found = run(SMALL, [(X, True)])
    assert isinstance(found["A"], DecoyError) and "Q has sent S something else" in str(found["A"])
    assert isinstance(found["Q"], DecoyError), "Q is told that its decoy does not fit, and nothing of S"


NOTES = {
    "a decoy that was none": (False, lambda c: b"\1" + c[1:]),
    "a decoy that was none, with keys of nothing": (False, lambda c: b"\1" + bytes(range(64)) + c[65:]),
    "another key": (True, lambda c: c[:1] + bytes(32) + c[33:]),
    "the key of another call": (True, lambda c: c[:1] + other_calls_key(c) + c[33:]),
    "another seed": (True, lambda c: c[:33] + bytes(32) + c[65:]),
    "key and seed exchanged": (True, lambda c: c[:1] + c[33:65] + c[1:33] + c[65:]),
    "another statement": (False, lambda c: c[:65] + bytes(32)),
    "another statement of a decoy": (True, lambda c: c[:65] + bytes(32)),
    "the whole of it": (True, lambda c: bytes(255 - byte for byte in c)),
}


def other_calls_key(content: bytes) -> bytes:
    return decoys.derive(content[1:33], b"", "call/1", 32)


@pytest.mark.parametrize("said", NOTES)
def test_whatever_q_says_of_a_call_accuses_nobody(said, monkeypatch):
    """Typed at A and at Q, without evidence; S's part and the messages of the call are right."""
    decoy, change = NOTES[said]
    own = decoys._Call._seal

    def seal(self, name, content):
        return own(self, name, change(content) if name == "note" else content)

    monkeypatch.setattr(decoys._Call, "_seal", seal)
    found = run(SMALL, [(X, decoy)])
    expected = FalseServerError if "statement" in said or "whole" in said else DecoyError
    assert type(found["A"]) is expected and getattr(found["A"], "evidence", None) is None
    assert "Q" in str(found["A"]) and isinstance(found["Q"], (DecoyError, PeerLostError)), "Q has no result"


def test_a_note_of_another_call_is_refused(monkeypatch):
    """It is sealed for one call of one session."""
    own, first = decoys._Call._seal, []

    def seal(self, name, content):
        if name != "note":
            return own(self, name, content)
        first.append(own(self, name, content))
        return first[0]

    monkeypatch.setattr(decoys._Call, "_seal", seal)
    found = run(SMALL, [(X, False), (X, False)])
    assert isinstance(found["A"], FalseServerError) and "not sealed for this call" in str(found["A"])
    assert found["A"].evidence is None and isinstance(found["Q"], PeerLostError)


def test_honest_servers_are_not_accused():
    for name, (model, x) in ZOO.items():
        for network in ("lan", "wan"):
            secure = secured(model, Scheme(accountable=True, network=network))
            for _ in range(3):
                with decoy_call():
                    secure(x)
            assert secure.session.statements.checked == 3, name


@pytest.mark.sectorch_long
def test_an_honest_server_is_not_accused_in_many_calls():
    secure = secured()
    for _ in range(2000):
        with decoy_call():
            secure(X)
    assert secure.session.statements.checked == secure.session.statements.asked == 2000


# What the parties see.


def test_a_decoy_hides_the_question_for_whose_sake_it_is_asked(monkeypatch):
    """Nothing of a question enters a decoy, and nothing that is made up enters a question."""
    own, brought = Session.take_call, []
    monkeypatch.setattr(Session, "take_call", lambda *args: brought.append(args[2]) or own(*args))
    monkeypatch.setattr(decoys, "random_secret", lambda: bytes(range(32)))
    secure = secured()
    for x, decoy in ((X, True), (2 * X - 1, True), (X, False)):
        with decoy_call(decoy):
            secure(x)
    (made_up,) = made_up_inputs(bytes(range(32)), secure.choreography(X), Q).items()
    name, content = made_up
    first, second, question = (inputs[name] for inputs in brought)
    assert torch.equal(first, content) and torch.equal(second, content) and torch.equal(question, X)
    assert content.shape == X.shape and content.abs().max() < 1 and content.dtype == X.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bool, torch.int64, torch.uint8, torch.complex64])
def test_made_up_inputs_are_of_their_type_and_seed(dtype):
    make = lambda seed: decoys._made_up(seed, "x", torch.Size((50, 3)), dtype)
    one, again, other = make(bytes(32)), make(bytes(32)), make(bytes(31) + b"1")
    assert one.dtype == dtype and one.shape == (50, 3) and torch.equal(one, again)
    whole = dtype in (torch.int64, torch.uint8)
    assert torch.equal(one, other) == whole and (whole <= (not one.any()))


def test_calls_and_decoys_look_the_same_on_the_way():
    """Paths, labels, shapes, rounds and bytes of all messages, the note's and the report's included."""

    def sent(decoy):
        secure = secured()
        with Transcript() as transcript, decoy_call(decoy):
            secure(X)
        return [(*dataclasses.astuple(line)[:8], value.numel()) for line, value in transcript.lines]

    assert sent(True) == sent(False)
    assert {shape[-1] for shape in sent(True) if shape[0] == "attest"} == {448, 113, 33}


# Which calls are decoys.


def test_the_coin_has_its_rate_whatever_came_before():
    coin, n = Decoys(0.3), 20_000
    flips = [coin.flip() for _ in range(n)]
    bound = 5 * math.sqrt(0.3 * 0.7 / (0.3 * n))
    assert abs(sum(flips) / n - 0.3) < bound
    after = [b for a, b in itertools.pairwise(flips) if a]
    assert abs(sum(after) / len(after) - 0.3) < bound
    assert not any(Decoys(0).flip() for _ in range(100)) and "0.3" not in repr(coin)


NO_RATES = [1, 1.0, -0.1, math.nan, math.inf, -math.inf, "0.1", "", b"0", True, None, 0.1j, [0.1], torch.tensor(0.1)]


@pytest.mark.parametrize("rate", NO_RATES, ids=repr)
def test_rates_that_are_none(rate):
    with pytest.raises(ArgumentError, match="0 <= decoys < 1"):
        Decoys(rate)


def test_a_rate_without_signatures_is_refused():
    with pytest.raises(ArgumentError, match="accountable=True"):
        Decoys(0.1).check(False)
    Decoys(0.1).check(True)
    Decoys(0).check(False)


# What is not covered is refused.


@pytest.mark.parametrize("more", [{"verified": True}, {"audited": 2}])
def test_accountable_stands_alone(more):
    with pytest.raises(ArgumentError, match="leave audited and verified out"):
        Scheme(accountable=True, **more)


def test_a_session_that_is_resumed_has_no_signed_calls(monkeypatch):
    """Nothing is drawn or sent, and A accuses nobody."""
    monkeypatch.setattr(Session, "_new_setup", lambda self, party: Setup(None))
    for decoy in (False, True):
        secure = secured()
        with Transcript() as transcript, decoy_call(decoy), pytest.raises(ArgumentError, match="that begins now"):
            secure(X)
        assert not [line for line, _ in transcript.lines if line.path != "seed"]
        assert secure.session.statements.found is None and secure.session.statements.asked == 0


def test_what_is_not_covered_is_refused():
    with pytest.raises(ArgumentError, match="accountable is True or False"):
        Scheme(accountable=1)
    with pytest.raises(ArgumentError, match="leave accountable=True out"):
        secured().in_shares(X)
    several = Session(answering=2)
    with pytest.raises(ArgumentError, match="for one answering party"):
        sectorch.secure(SMALL, ACCOUNTABLE, session=several)(X)
    with pytest.raises(ArgumentError, match="where Q deals"):
        sectorch.secure(SMALL, ACCOUNTABLE, session=Session(dealer="D"))(X)
    assert set(EDGES) == {(Q, S), (A, S)}
