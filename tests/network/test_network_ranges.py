"""A value that leaves its range in a question over TLS: an error at Q, no result, and nothing that A or S could see."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict

import pytest
import torch
from network_world import Trio, known, until
from torch import nn

import sectorch
from sectorch import Scheme, errors
from sectorch.choreography import Phase
from sectorch.choreography.run.frames import Kind
from sectorch.choreography.run.party import PartyRuntime
from sectorch.network import Server, Store, answer, connect
from sectorch.network.wire.channel import PeerLink

GOOD = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
BAD = GOOD.clone()
BAD[1] = 100.0
"""One row of three overflows behind the first layer, whose weights sum to 120; the limit is 4096."""


def steep(width: int, out: int, weight: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, out)).eval().requires_grad_(False)
    model[0].weight.copy_(torch.full((width, 6), weight) + torch.randn(width, 6, generator=_draws()) / 8)
    return model


def _draws() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(6)
    return steep(8, 3, 20.0)


@pytest.fixture
def trio(pki, model, tmp_path):
    _, made = pki
    trio = Trio(made, model, GOOD, tmp_path)
    yield trio
    trio.close()


def beyond(ask, x=BAD) -> None:
    with pytest.raises(errors.RangeExceededError, match="left the range"):
        ask(x)


def asked(remote, x) -> torch.Tensor | None:
    """The answer to a good question, or None for a bad one, which has none."""
    return beyond(remote) if x is BAD else remote(x)


@pytest.mark.parametrize("network", ["lan", "wan"])
def test_the_session_goes_on_after_questions_without_a_result(trio, model, network):
    """Several after each other, and each that follows is right to the last bit."""
    expected = sectorch.reference(model)
    remote = trio.connection.model("hospital-b", Scheme(network=network))
    for count in (1, 3, 2):
        for _ in range(count):
            beyond(remote)
        assert torch.equal(remote(GOOD + count), expected(GOOD + count))
    beyond(remote, BAD[1:2])
    assert torch.equal(remote(GOOD), expected(GOOD))
    assert trio.server.sessions == 1, "it is the session of the first question"
    assert until(lambda: trio.party.answered == 11, 30), "A has answered all of them"


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_in_pieces_is_run_to_its_end(trio, model, monkeypatch, first):
    """Whichever piece has no result, the others see all pieces."""
    monkeypatch.setattr("sectorch.nn.module.CHUNK_BYTES", 1)
    remote = trio.connection.model("hospital-b")
    good = GOOD[:1].repeat(4, 1)
    bad = good.clone()
    bad[0 if first else 2] = 100.0
    with sectorch.profile() as fine:
        y = remote(good)
    assert len({line.call for line in fine.ledger if line.call}) >= 3, "it was cut"
    with sectorch.profile() as withheld:
        beyond(remote, bad)
    ledger = lambda profile: [(m.path, m.label, m.shape) for m in profile.ledger if m.phase != Phase.SETUP]
    assert ledger(fine) == ledger(withheld)
    assert torch.equal(remote(good), y) and torch.equal(y, sectorch.reference(model)(good))


# What A and S see.


class Views:
    """What A and S receive, send and note while somebody asks."""

    def __init__(self, monkeypatch, trio: Trio, caplog):
        self.trio, self.caplog = trio, caplog
        self.frames, self.ledger = defaultdict(list), defaultdict(list)
        route, transfer, said = PeerLink._route, PartyRuntime.transfer, PeerLink.send

        def routed(link, frame):
            who = "S" if link in trio.server._links else "A" if link is trio.party.connection.link else "Q"
            if who != "Q":
                self.frames[who, link.peer].append(frame)
            route(link, frame)

        def sending(link, data, urgent=False):
            if link is trio.connection.link:
                self.sent.append(len(data))
            said(link, data, urgent)

        def transferred(runtime, line, value):
            if runtime.me.role != "Q":
                mine = (line.path, line.label, line.src.name, line.dst.name, tuple(line.shape), line.round)
                self.ledger[runtime.me.role].append(mine)
            return transfer(runtime, line, value)

        self.sent: list[int] = []
        monkeypatch.setattr(PeerLink, "_route", routed)
        monkeypatch.setattr(PeerLink, "send", sending)
        monkeypatch.setattr(PartyRuntime, "transfer", transferred)

    def _come_to_rest(self) -> None:
        """Wait until no frame came for a while."""
        seen = -1
        while seen != (now := sum(map(len, self.frames.values()))):
            seen = now
            time.sleep(0.2)

    def of(self, ask) -> dict:
        self.frames.clear(), self.ledger.clear(), self.caplog.clear(), self.sent.clear()
        answered = self.trio.party.answered
        ask()
        # Whatever comes late of this question comes before what the server answers to the next request.
        assert self.trio.connection.models() == ["hospital-b"]
        assert until(lambda: self.trio.party.answered > answered, 30)
        self._come_to_rest()  # what the server still tells A goes over another link
        return {
            "frames": {edge: [_shown(f, frames[0]) for f in frames] for edge, frames in sorted(self.frames.items())},
            "ledger": {role: list(lines) for role, lines in sorted(self.ledger.items())},
            "sent by Q": len(self.sent),
            "log": sorted((r.name, _untimed(r.getMessage())) for r in self.caplog.records if not _of_q(r)),
            "status": (self.trio.server.sessions, self.trio.server.models(), self.trio.server.store.used),
            "answered": self.trio.party.answered - answered,
            "store": (self.trio.party.store.used, len(self.trio.party.store.shelves())),
            "open": [link.sessions for who in "SA" for link in self.trio.links(who)],
        }


def _untimed(line: str) -> str:
    """A line without the seconds that it took."""
    return re.sub(r"seconds=[\d.e-]+", "seconds=", line)


def _of_q(record) -> bool:
    """Whether it is the line of a query at Q, which knows nobody's key or certificate by it."""
    said = record.getMessage()
    return said.startswith("query ") and " key=" not in said and " certificate=" not in said


def _shown(frame, first) -> tuple:
    """All of a frame but its content, and the numbers that count calls and messages; all of a request."""
    content = len(frame.payload)
    if frame.kind in (Kind.CONTROL, Kind.ABORT):
        content = bytes(frame.payload)
        if frame.kind == Kind.CONTROL:
            content = {k: v for k, v in json.loads(content).items() if k != "number"}
            for counted_or_random in ("use", "then", "query", "joint"):  # the last two are names, drawn for each call
                content.pop(counted_or_random, None)
    credit = frame.number if frame.kind == Kind.CREDIT else None
    return (
        frame.kind,
        frame.session,
        frame.path,
        frame.label,
        frame.shape,
        frame.part,
        frame.parts,
        credit,
        str(content),
    )


@pytest.mark.parametrize("network", ["lan", "wan"])
def test_a_and_s_see_the_same_of_a_question_without_a_result(trio, monkeypatch, caplog, network):
    caplog.set_level(logging.DEBUG, "sectorch")
    views = Views(monkeypatch, trio, caplog)
    remote = trio.connection.model("hospital-b", Scheme(network=network))
    asks = (lambda: remote(GOOD), lambda: remote(GOOD), lambda: beyond(remote), lambda: remote(GOOD + 1))
    _, good, bad, after = (views.of(ask) for ask in asks)
    assert good == bad == after
    assert all(good["frames"][edge] for edge in (("S", "alice"), ("S", "hospital-b"), ("A", trio_server(trio))))
    assert any(path.startswith("guard") for path, *_ in good["ledger"]["S"]) and len(good["log"]) == 2
    assert all("learned=result outcome=done seconds= bytes=" in line for _, line in good["log"])
    assert not any(frame[0] == Kind.ABORT for frames in bad["frames"].values() for frame in frames)


def trio_server(trio: Trio) -> str:
    return trio.party.connection.link.peer


def test_the_ends_of_sessions_are_the_same(trio, monkeypatch, caplog):
    """What closing tells the others, after a good question and after one without a result."""
    caplog.set_level(logging.DEBUG, "sectorch")
    views = Views(monkeypatch, trio, caplog)
    seen = []
    for x in (GOOD, BAD):
        remote = trio.connection.model("hospital-b")
        views.of(lambda remote=remote: remote(GOOD))  # the session has begun at all parties

        def ask(remote=remote, x=x):
            asked(remote, x)
            remote.close()
            assert until(trio.idle, 30)

        seen.append(views.of(ask))
    without_names = [
        {k: v for k, v in view.items() if k != "frames"}
        | {"frames": {edge: [f[:1] + f[2:] for f in frames] for edge, frames in view["frames"].items()}}
        for view in seen
    ]
    assert without_names[0] == without_names[1]


# Material that was prepared ahead.


def test_prepared_material_is_used_up_and_the_next_is_right(trio, model, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "sectorch")
    remote = trio.connection.model("hospital-b")
    remote.prepare(3, 4)
    views, seen = Views(monkeypatch, trio, caplog), []
    for left, x in ((3, GOOD), (2, BAD), (1, BAD), (0, GOOD)):
        with sectorch.profile() as profile:
            seen.append(views.of(lambda x=x: asked(remote, x)))
        assert profile.offline_bytes == 0 and remote.prepared() == ({(3, 6): left} if left else {})
        seen[-1]["status"], seen[-1]["store"] = seen[-1]["status"][:2], None  # the pieces that are left
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert torch.equal(asked(remote, GOOD), sectorch.reference(model)(GOOD)), "without material"


def test_material_waits_on_disk_over_a_question_without_a_result(trio, model, tmp_path):
    """Q leaves after an overflow and comes back for what is left: the session is taken up, and the answer is right."""
    for left, x in ((2, BAD), (1, GOOD), (0, BAD)):
        trio.connection.close()
        trio.start_querying(Store(tmp_path / "q"))
        remote = trio.connection.model("hospital-b")
        if left == 2:
            remote.prepare(3, 3)
        with sectorch.profile() as profile:
            y = asked(remote, x)
        assert profile.offline_bytes == 0 and sum(remote.prepared().values()) == left
        assert x is BAD or torch.equal(y, sectorch.reference(model)(GOOD))


# Several answering parties.


@pytest.fixture
def group(pki, model, tmp_path):
    """A sum over the steep model and one that never overflows."""
    _, made = pki
    torch.manual_seed(8)
    flat = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval().requires_grad_(False)
    server, pins = Server("localhost:0", made["server"]), known(tmp_path / "pins", made)
    address = f"localhost:{server.port}"
    models = {"hospital-b": model, "bob": flat}
    parties = [answer(address, made[name], m, GOOD, pins=pins) for name, m in models.items()]
    with connect(address, made["alice"], pins=pins) as connection:
        yield connection, models
    for party in parties:
        party.close()
    server.stop()


def test_a_sum_with_one_overflow_has_no_result_and_the_next_is_right(group, monkeypatch):
    connection, models = group
    session = sectorch.Session(2)
    local = [
        sectorch.secure(m, session=session, party=p) for m, p in zip(models.values(), session.answering, strict=True)
    ]

    def here(x):
        return sectorch.aggregate([s(sectorch.share(x, session=session, party=s.party)) for s in local])

    remote, seen = connection.aggregate(list(models)), []
    for x in (GOOD, BAD, BAD, GOOD + 1):
        with sectorch.profile() as profile:
            y = asked(remote, x)
        assert x is BAD or torch.equal(y, here(x))
        seen.append([(m.path, m.label, m.shape, m.round) for m in profile.ledger if m.phase != Phase.SETUP])
    assert all(lines == seen[0] for lines in seen)
    flat = connection.model("bob")
    assert torch.equal(flat(BAD), sectorch.reference(models["bob"])(BAD)), "it was the other one"
    monkeypatch.setattr("sectorch.network.parties.session.PartySession.rows_at_once", lambda self, x: 1)
    with sectorch.profile() as profile:
        beyond(remote)
    assert sum(m.label == "sum" for m in profile.ledger) == 3, "all pieces are asked for"
    assert torch.equal(remote(GOOD), here(GOOD))


# What is asked without a check, and what the owner of a model refuses.


def test_without_the_check_all_parties_run_without_it(trio, model, monkeypatch):
    trio.party._admission._unchecked = True  # as answer(..., unchecked=True) has it
    paths = defaultdict(set)
    transfer = PartyRuntime.transfer

    def transferred(runtime, line, value):
        paths[runtime.me.role].add(line.path.split("/")[0])
        return transfer(runtime, line, value)

    monkeypatch.setattr(PartyRuntime, "transfer", transferred)
    for check in (False, True):
        paths.clear()
        remote = trio.connection.model("hospital-b", Scheme(range_check=check))
        assert torch.equal(remote(GOOD), sectorch.reference(model, sectorch.Scheme(range_check=check))(GOOD))
        assert until(lambda: set(paths) == set("QAS"), 30) and len({frozenset(p) for p in paths.values()}) == 1
        assert ("guard" in paths["A"]) == check
    assert (trio.connection.model("hospital-b", Scheme(range_check=False))(BAD) - model(BAD)).abs().max() < 0.1


def test_a_limit_of_its_own_is_held_by_all(trio, model):
    """With more room above for activations the same question has a result, and with less room an earlier end."""
    wide = trio.connection.model("hospital-b", Scheme(limit_bits=14))
    scheme = sectorch.Scheme(limit_bits=14)
    assert torch.equal(wide(BAD), sectorch.reference(model, scheme)(BAD))
    narrow = trio.connection.model("hospital-b", Scheme(limit_bits=6))
    beyond(narrow, GOOD)
    with pytest.raises(errors.FixedPointRangeError, match="activations are below 64"):
        narrow(BAD)
    with pytest.raises(errors.ArgumentError, match="power of two"):
        trio.connection.aggregate(["hospital-b", "bob"], activation_limit=100)
    with pytest.raises(errors.ArgumentError, match="is not answered over the network"):
        trio.connection.model("hospital-b", Scheme(relu="privhfl"))


def test_an_answering_party_insists_on_the_check_unless_it_says_otherwise(pki, model, tmp_path):
    _, made = pki
    trio = Trio(made, model, GOOD, tmp_path)
    try:
        with pytest.raises(errors.RefusedError, match=r"^'hospital-b' answers with range checks only"):
            trio.connection.model("hospital-b", Scheme(range_check=False))
        assert until(trio.idle, 30)
        assert torch.equal(trio.connection.model("hospital-b")(GOOD), sectorch.reference(model)(GOOD))
        trio.party.close()
        trio.party = answer(trio.address, made["hospital-b"], model, GOOD, pins=trio.pins, unchecked=True)
        unchecked = trio.connection.model("hospital-b", Scheme(range_check=False))
        assert torch.equal(unchecked(GOOD), sectorch.reference(model, sectorch.Scheme(range_check=False))(GOOD))
    finally:
        trio.close()


def test_what_the_owner_refuses_says_nothing_of_the_weights(pki, tmp_path, monkeypatch, caplog):
    """The largest sum is 1234, in the last layer: A's log says so, and nothing that leaves A."""
    _, made = pki
    heavy = steep(8, 3, 1.0)
    heavy[2].weight[1] = 1234.0 / 8
    heavy[2].bias[1] = 6000.0
    caplog.set_level(logging.INFO, "sectorch")
    trio = Trio(made, heavy, GOOD, tmp_path)
    views, said = Views(monkeypatch, trio, caplog), []
    try:
        remote = trio.connection.model("hospital-b")
        for bits in (12, 10):
            remote = trio.connection.model("hospital-b", Scheme(limit_bits=bits))
            views.frames.clear()
            with pytest.raises(errors.RefusedError, match=r"^the model does not fit the number format") as found:
                remote(GOOD)
            said.append(str(found.value))
            assert until(lambda: any(f.kind == Kind.ABORT for f in views.frames["S", "hospital-b"]), 30)
            sent = [f for f in views.frames["S", "hospital-b"] if f.kind not in (Kind.CREDIT, Kind.ABORT)]
            assert sent == [], "A has sent nothing of the call, so that nobody sees which layer it was"
        assert said[0] == said[1], "a weight and a bias that are too large are one refusal"
        words = said[0] + "".join(str(bytes(f.payload)) for fs in views.frames.values() for f in fs)
        heard = re.compile(r"\b(1234|6000|2\.weight|2\.bias)\b")  # as words: a fingerprint may hold 1234 in itself
        assert not heard.search(words)
        log = lambda name: "".join(r.getMessage() for r in caplog.records if r.name == name)
        assert until(lambda: "'2.bias' reaches magnitude 6000" in log("sectorch.answer"), 30)
        assert "'2.weight': the weights of one output sum to magnitude 1234" in log("sectorch.answer")
        assert heard.search(log("sectorch.answer")) and not heard.search(log("sectorch.server"))
        chosen = sectorch.secure(heavy)
        chosen(GOOD)
        assert torch.equal(trio.connection.model("hospital-b")(GOOD), chosen(GOOD)), "in the format that A has chosen"
        fits = trio.connection.model("hospital-b", Scheme(16))
        assert torch.equal(fits(GOOD), sectorch.reference(heavy, sectorch.Scheme(16))(GOOD))
    finally:
        trio.close()
