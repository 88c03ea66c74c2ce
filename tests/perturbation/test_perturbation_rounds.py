"""A round as messages: distributed parties compute what one process computes, and nothing undeclared leaves."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distributed_parties import in_processes, in_threads, runtime_of
from hypothesis import given, settings
from hypothesis import strategies as st
from perturbation_cases import NETS, batches, one_round, plain_gradient, relative_error

import sectorch
from sectorch.choreography import PROTOCOLS, Message, Party, protocol
from sectorch.errors import ArgumentError, PeerLostError, TopologyError, UndeclaredMessageError
from sectorch.protocols.perturbation import (
    BatchMismatchError,
    DroppedClientError,
    Federation,
    NonFiniteGradientError,
    Reply,
    Request,
    Scheme,
    WeightError,
)
from sectorch.protocols.perturbation import algorithm as noise_module
from sectorch.protocols.perturbation import protocol as federation_module
from sectorch.protocols.perturbation.messages import packed, unpacked
from sectorch.protocols.perturbation.protocol import PAIR, SERVER, roles_of

CASES = {
    "mse": ("mlp3", "mse", 2, None, True, False),
    "mse without masks": ("mlp3", "mse", 1, None, False, False),
    "shift": ("resnet20", "cross_entropy", 1, "shift", True, True),
    "paper": ("mlp3", "cross_entropy", 2, "paper", True, True),
    "paper without masks": ("mlp3", "cross_entropy", 2, "paper", False, False),
}
CLIENTS = 3
SETUP = threading.Lock()


class Seeded:
    """The system's randomness, for the noise of one party: what is drawn is the same in every run."""

    def __init__(self, seed: int):
        self._bits = np.random.default_rng(seed)

    def urandom(self, count: int) -> bytes:
        return self._bits.bytes(count)


def setup(case: str) -> tuple[torch.nn.Module, Scheme, list, list[int]]:
    """The model, everybody's scheme, and each client's two batches."""
    name, loss, m, exchange, *_ = CASES[case]
    make, shape = NETS[name]
    with SETUP:  # torch has one generator for all threads
        torch.manual_seed(3)
        model = make().double()
        parts = batches(shape, 4, loss, 2 * CLIENTS, torch.float64)
    own = [parts[2 * k : 2 * k + 2] for k in range(CLIENTS)]
    return model, Scheme(model, loss, m, exchange=exchange), own, [sum(len(x) for x, _ in b) for b in own]


def federation(case: str, scheme: Scheme, session: sectorch.Session | None = None) -> Federation:
    *_, masked, double = CASES[case]
    return Federation(scheme, CLIENTS, masked=masked, double=double, session=session)


def together(case: str) -> dict:
    """What the server has after two rounds with all parties in one process."""
    model, scheme, parts, weights = setup(case)
    whole = federation(case, scheme)
    whole.round(model.state_dict(), parts, weights)
    return whole.round(model.state_dict(), parts, weights)


def alone(case: str, me: Party, ends: dict) -> dict | None:
    """The same at one party, which has its own inputs, and of the others' their shapes."""
    model, scheme, parts, weights = setup(case)
    state = model.state_dict() if me == SERVER else None
    if me != SERVER:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # a client has the architecture
    shown = [own if me.name == f"C{k}" else [(x.to("meta"), y.to("meta")) for x, y in own]
             for k, own in enumerate(parts)]  # fmt: skip
    session = sectorch.Session(roles=roles_of(CLIENTS), runtime=runtime_of(me, ends))
    whole = federation(case, scheme, session)
    whole.round(state, shown, weights)
    found = whole.round(state, shown, weights)
    return None if found is None else {name: tensor.clone() for name, tensor in found.items()}


EDGES = [(SERVER, Party(f"C{k}", f"C{k}")) for k in range(CLIENTS)]


def expected(case: str) -> dict:
    model, scheme, parts, weights = setup(case)
    each = [plain_gradient(scheme, model, own, [len(x) for x, _ in own]) for own in parts]
    return {n: sum(w * g[n] for w, g in zip(weights, each, strict=True)) / sum(weights) for n in each[0]}


@pytest.mark.parametrize("case", CASES)
def test_parties_in_threads_of_their_own(case, monkeypatch):
    """The same numbers bit for bit where the server alone draws noise, for masks cancel exactly; in the paper's
    exchange clients draw too, in an order of their own, and the gradient is that of every noise, within 1e-6.
    """
    monkeypatch.setattr(noise_module, "os", Seeded(1))
    whole = together(case)
    monkeypatch.setattr(noise_module, "os", Seeded(1))
    found = in_threads(EDGES, lambda me, ends: alone(case, me, ends))
    apart = found.pop("Server")
    assert list(found.values()) == [None] * CLIENTS, "the server alone has the gradient"
    if "paper" in case:
        assert relative_error(apart, whole) <= 1e-6
    else:
        assert all(torch.equal(apart[name], whole[name]) for name in whole)
    assert relative_error(apart, expected(case)) <= 1e-6


def process(me: str, ends: dict, case: str) -> dict | None:
    noise_module.os = Seeded(1) if me == "Server" else SimpleNamespace(urandom=os.urandom)
    parties = {name: Party(name, name) for name in (me, *ends)}
    found = alone(case, parties[me], {parties[name]: end for name, end in ends.items()})
    return None if found is None else {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.sectorch_long
def test_parties_in_processes_of_their_own(monkeypatch):
    monkeypatch.setattr(noise_module, "os", Seeded(1))
    whole = together("mse")
    found = in_processes([(p.name, q.name) for p, q in EDGES], process, "mse")
    assert found["Server"] == {name: tensor.tolist() for name, tensor in whole.items()}
    assert [found[f"C{k}"] for k in range(CLIENTS)] == [None] * CLIENTS


@pytest.mark.parametrize("double", [True, False])
def test_a_client_that_goes_is_left_out(double):
    """It fails between the model and its update. With double masks the others' gradient is recovered."""
    case = "mse"
    model, scheme, parts, weights = setup(case)

    def work(me: Party, ends: dict) -> dict | None:
        model, scheme, parts, weights = setup(case)
        session = sectorch.Session(roles=roles_of(CLIENTS), runtime=runtime_of(me, ends))
        shown = [[(x.to("meta"), y.to("meta")) for x, y in own] if me.name != f"C{k}" else own
                 for k, own in enumerate(parts)]  # fmt: skip
        if me.name == "C1":
            shown[1] = [(x[:, 1:], y) for x, y in parts[1]]
        whole = Federation(scheme, CLIENTS, double=double, session=session)
        found = whole.round(model.state_dict() if me == SERVER else None, shown, weights)
        return None if found is None else dict(found)

    found = in_threads(EDGES, work)
    if not double:
        said = str(found["Server"])
        assert isinstance(found["Server"], DroppedClientError)
        assert "C1 sent nothing" in said and "; C1: " in said, "and why"
        return
    each = [plain_gradient(scheme, model, parts[k], [len(x) for x, _ in parts[k]]) for k in (0, 2)]
    both = {n: (weights[0] * each[0][n] + weights[2] * each[1][n]) / (weights[0] + weights[2]) for n in each[0]}
    assert relative_error(found["Server"], both) <= 1e-6
    assert found["C0"] is None and found["C2"] is None and isinstance(found["C1"], BatchMismatchError)


def test_a_client_hears_that_the_server_is_gone():
    def work(me: Party, ends: dict) -> None:
        if me == SERVER:
            raise KeyboardInterrupt
        alone("mse", me, ends)

    found = in_threads(EDGES, work)
    assert all(isinstance(found[f"C{k}"], PeerLostError) for k in range(CLIENTS))


@pytest.mark.parametrize("case", CASES)
def test_all_messages_of_a_round_and_their_bytes(case):
    model, scheme, parts, weights = setup(case)
    *_, exchange, masked, double = CASES[case]
    with sectorch.profile() as once:
        whole = federation(case, scheme)
    with sectorch.profile() as profile:
        whole.round(model.state_dict(), parts, weights)
    names = [f"C{k}" for k in range(CLIENTS)]
    line = lambda m: (m.label, m.src.name, m.dst.name, m.bytes)
    keys = [line(m) for m in once.ledger if m.protocol != "agree"]
    assert keys == masked * [*[("public", c, "Server", 32) for c in names],
                             *[("publics", "Server", c, 32 * CLIENTS + 16) for c in names]]  # fmt: skip
    noisy, _ = scheme.perturb(model.state_dict())
    wanted = [("model", "Server", c, noisy.nbytes) for c in names]
    terms, trained, statistics = scheme.counts
    for name, own in zip(names, parts, strict=True):
        if exchange == "paper":
            for x, _ in own:
                wanted += [
                    ("request", name, "Server", 8 * len(x) * (4 * 3 + 1)),
                    ("reply", "Server", name, 24 * len(x) * 4),
                ]
        wanted.append(("masked" if masked else "update", name, "Server", 8 * (terms * trained + statistics)))
    if double:
        wanted += [("survivors", "Server", c, CLIENTS) for c in names]
        wanted += [("opening", c, "Server", 32 * CLIENTS) for c in names]
    assert [line(m) for m in profile.ledger] == wanted
    assert all(m.shape.numel() * m.dtype.itemsize == m.bytes for m in profile.ledger)


def test_what_is_not_declared_does_not_leave(monkeypatch):
    model, scheme, parts, weights = setup("mse")
    careless = protocol("careless", "here", [Message("masked", "Client", "Server", "")], roles=PAIR)
    try:
        for label in ("gradient", "masked"):
            send = lambda net, update, label=label: update.send(net.Client, net.Server, label)
            monkeypatch.setattr(federation_module, "send_masked", careless(send) if label == "gradient" else send)
            with sectorch.profile() as profile, pytest.raises(UndeclaredMessageError):
                federation("mse", scheme).round(model.state_dict(), parts, weights)
            assert {m.label for m in profile.ledger if m.protocol != "agree"} == {"public", "publics", "model"}
    finally:
        del PROTOCOLS["careless"]
    whole = federation("mse", scheme)
    clients = [Party(f"C{k}", f"C{k}") for k in range(2)]
    with (
        whole.session.call() as net,
        pytest.raises(TopologyError),
        net.playing(PAIR, Server=clients[0], Client=clients[1]),
    ):
        pass


def test_a_federation_of_others_is_refused():
    model, scheme, parts, weights = setup("mse")
    with pytest.raises(ArgumentError, match="at least one client"):
        Federation(scheme, 0)
    with pytest.raises(ArgumentError, match="has the roles Server C0 C1"):
        Federation(scheme, 2, session=sectorch.Session())
    whole = federation("mse", scheme)
    with sectorch.profile() as profile:
        with pytest.raises(WeightError, match="3 clients have as many"):
            whole.round(model.state_dict(), parts[:2], weights)
        with pytest.raises(WeightError, match="a positive number"):
            whole.round(model.state_dict(), parts, [1, -1, 1])
    assert not profile.ledger


def test_a_failed_round_is_followed_by_another():
    model, scheme, parts, weights = setup("shift")
    whole = federation("shift", scheme)
    broken = [parts[0], [(x * float("nan"), y) for x, y in parts[1]], parts[2]]
    with pytest.raises(NonFiniteGradientError, match="not finite"):
        whole.round(model.state_dict(), broken, weights)
    assert relative_error(whole.round(model.state_dict(), parts, weights), expected("shift")) <= 1e-6


def test_one_client_has_no_masks():
    model, scheme, parts, _ = setup("mse")
    with sectorch.profile() as profile:
        found = one_round(scheme, model, [parts[0][0]], masked=True)
    assert relative_error(found, plain_gradient(scheme, model, [parts[0][0]], [1])) <= 1e-6
    assert [m.label for m in profile.ledger if m.protocol != "agree"] == ["model", "update"]


def test_messages_are_their_bytes():
    """Bit for bit, whatever the floats."""
    words = torch.tensor([0x7FF8000000000001, -1, 1 << 63 - 1, 0, 1 << 62]).view(torch.float64)
    for like in ([words, words.float(), torch.tensor(3), torch.ones(3, dtype=torch.bool), words[:2]], [words[:0]]):
        for one, back in zip(like, unpacked(packed(like), like), strict=True):
            assert one.shape == back.shape and one.dtype == back.dtype
            assert torch.equal(packed([one]), packed([back]))
    _, scheme, *_ = setup("shift")
    noisy, _ = scheme.perturb(setup("shift")[0].state_dict())
    blank = scheme.blank()
    assert all(t.is_meta for t in blank.state.values()) and blank.nbytes == noisy.nbytes == noisy.packed().nbytes
    back = blank.unpacked(noisy.packed(), torch.device("cpu"))
    assert back.round == noisy.round and back.state.keys() == noisy.state.keys()
    assert all(torch.equal(back.state[name], noisy.state[name]) for name in noisy.state)
    assert torch.equal(back.additive, noisy.additive) and torch.equal(back.partition, noisy.partition)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 1 << 30))
def test_requests_and_replies_are_their_bytes(batch, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    request = Request(b"r" * 16, drawn(batch, outputs, outputs), drawn(batch))
    assert request.packed().nbytes == request.nbytes == Request.size(batch, outputs)
    back = Request.unpacked(request.packed(), request.round, outputs)
    apart = ~torch.eye(outputs, dtype=torch.bool)
    assert torch.equal(back.log_mu[:, apart], request.log_mu[:, apart]) and torch.equal(back.alpha, request.alpha)
    reply = Reply(b"r" * 16, *drawn(3, batch, outputs))
    assert reply.packed().nbytes == reply.nbytes == Reply.size(batch, outputs)
    back = Reply.unpacked(reply.packed(), reply.round, outputs, torch.device("cpu"))
    assert all(torch.equal(getattr(back, n), getattr(reply, n)) for n in ("log_total", "log_mask", "factor"))
