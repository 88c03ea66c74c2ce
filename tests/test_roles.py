"""Roles of one's own, edges, and the dealer: what is refused before anything is sent, and what runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from cases import some
from distributed_parties import in_processes, runtime_of
from helpers import CASES, stands, traced
from torch import nn

import sectorch
from sectorch import Scheme, errors
from sectorch.choreography import Message, Party, Phase, Roles, protocol
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.net import Draw
from sectorch.choreography.roles import STAR, Cast

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from secure_sum import HOSPITALS, ROLES, secure_sum, total


def vectors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator) for name in HOSPITALS}


# Roles of one's own.


def test_a_protocol_of_four_parties():
    session = sectorch.Session(roles=ROLES)
    program, inputs = session.trace(total), vectors()
    for x in (inputs, vectors(1)):
        assert torch.equal(session.run(program, x), sum(x.values()))
    with Transcript() as transcript:
        session.run(program, inputs, session.prepare(program, {}))
    sent = [(line.src.name, line.dst.name, line.label, line.bytes) for line, _ in transcript.lines]
    assert sent == [(name, "C", f"masked_{name}", 32) for name in HOSPITALS]
    assert not any(torch.equal(value, x) for _, value in transcript.lines for x in inputs.values())
    assert program.party("H1").code.count("io.draw") == 2 and "io.draw" not in program.party("C").code
    assert [p.name for p in program.parties] == ["C", *HOSPITALS]


def one_party(me: str, ends: dict, inputs: dict) -> tuple:
    """A process that is one party, with its own value and its ends of its edges."""
    runtime = runtime_of(Party(me, me), {Party(name, name): end for name, end in ends.items()})
    own = sectorch.Session(roles=ROLES, runtime=runtime)
    program = own.trace(total)
    result = own.run(program, {me: inputs[me]} if me in inputs else {})
    return program.digest, None if result.is_meta else result.tolist()


@pytest.mark.sectorch_long  # `test_federation_processes.py` has such, over TLS
def test_a_protocol_of_four_parties_as_four_processes():
    inputs = vectors()
    said = in_processes(map(sorted, ROLES.edges), one_party, inputs)
    assert {digest for digest, _ in said.values()} == {sectorch.Session(roles=ROLES).trace(total).digest}
    assert said["C"][1] == sum(inputs.values()).tolist()
    assert [said[name][1] for name in HOSPITALS] == [None] * 3, "only the collector learns anything"


@pytest.mark.parametrize(
    ("names", "edges", "message"),
    [
        ("", "", "different names"),
        ("P P", "", "different names"),
        ("P Q", "P-R", "'P-R' is no pair"),
        ("P Q", "P-P", "'P-P' is no pair"),
        ("P Q", "P", "'P' is no pair"),
        ("P 1", "", "different names"),
    ],
)
def test_roles_that_are_none(names: str, edges: str, message: str):
    with pytest.raises(errors.ArgumentError, match=message):
        Roles(names, edges)


def test_a_message_along_no_edge_is_refused_where_it_is_declared():
    with pytest.raises(errors.TopologyError, match="no edge from Q to A"):
        protocol("straight", "", [Message("x", "Q", "A", "")])(lambda net: None)
    with pytest.raises(errors.TopologyError, match="no edge from H1 to H4"):
        protocol("away", "", [Message("x", "H1", "H4", "")], roles=ROLES)(lambda net: None)


def test_what_a_net_of_other_roles_refuses():
    """When it is traced: nothing was sent."""
    session = sectorch.Session(roles=ROLES)
    x = torch.ones(4, dtype=torch.int64)

    def refused(f, error, message):
        with sectorch.profile() as profile, pytest.raises(error, match=message):
            session.trace(f)
        assert not profile.ledger

    refused(lambda net: net.own(net.Q, x), AttributeError, "a net has no 'Q', and the roles are H1 H2 H3 C")
    refused(lambda net: net.common(net.H1, net.H1, (2,), "x"), errors.TopologyError, "share no stream")
    refused(
        lambda net: secure_sum(net, *(net.own(net.H1, x, name=n) for n in "abc")),
        errors.MisplacedValueError,
        "nobody holds all",
    )
    refused(lambda net: net.read(net.own(net.H1, x), net.C), errors.MisplacedValueError, "cannot read")
    from sectorch.mpc.star.shares import share

    refused(lambda net: share(net, net.own(net.H1, x)), errors.MisplacedValueError, "'share' has a role Q")
    for f in (
        lambda: sectorch.share(torch.ones(2), session=session),
        lambda: session.call(session.parties).__enter__(),
    ):
        with pytest.raises(errors.ArgumentError, match="secure inference needs the roles"):
            f()
    with pytest.raises(errors.ArgumentError, match="secure inference needs the roles"):
        sectorch.secure(nn.Linear(2, 2).eval(), session=session)
    with pytest.raises(errors.ArgumentError, match="were given parties for"):
        Cast(STAR, {"Q": Party("Q", "Q")})


def test_a_session_of_other_roles_takes_no_options_of_secure_inference():
    for options in ({"answering": 2}, {"dealer": "D"}, {"reference": True}):
        with pytest.raises(errors.ArgumentError, match="are for secure inference"):
            sectorch.Session(roles=ROLES, **options)
    with pytest.raises(errors.ArgumentError, match="pairs that share a stream need an edge"):
        sectorch.Session(roles=Roles("P Q R", "P-Q Q-R", "P-R"))


def test_two_of_many_play_a_protocol_of_two():
    """Written once, between roles that parties of the call play one after the other."""
    pair = Roles("Here There", edges="Here-There")
    told = protocol("told", "here", [Message("x", "There", "Here", "", "all")], roles=pair)(
        lambda net, x: x.send(net.There, net.Here, "x")
    )
    session, inputs = sectorch.Session(roles=ROLES), vectors()
    try:
        with Transcript() as transcript, session.call() as net:
            own, heard = net.cast, []
            for name in HOSPITALS:
                who = getattr(net, name)
                brought = net.own(who, inputs[name])
                with net.playing(pair, Here=net.C, There=who):
                    heard.append(told(net, brought))
                with pytest.raises(errors.MisplacedValueError), net.playing(pair, Here=who, There=net.C):
                    told(net, brought)
                assert net.cast is own
            assert torch.equal(net.read(sum(heard), net.C), sum(inputs.values()))
            with pytest.raises(errors.TopologyError), net.playing(pair, Here=net.C, There=Party("H4", "H4")):
                pass
            with pytest.raises(errors.ArgumentError), net.playing(pair, Here=net.C):
                pass
        assert [(line.src.name, line.dst.name) for line, _ in transcript.lines] == [(n, "C") for n in HOSPITALS]
    finally:
        from sectorch.choreography import PROTOCOLS

        del PROTOCOLS["told"]


# The dealer.


@pytest.mark.parametrize("case", some((case for case in CASES if case.answering == 1), stands), ids=str)
def test_every_protocol_with_a_dealer_of_its_own(case):
    """The same result; the dealer is sent nothing, but coins where it proves what it deals, and brings nothing, and Q
    knows no mask that is dealt with."""
    session, inputs = sectorch.Session(dealer="D"), case.inputs(70)
    program, brought = traced(session, case.program, inputs)
    outputs = session.run(program, brought)
    case.check(inputs, outputs)
    sent = {m.label for m in program.messages if m.dst.name == "D"}
    assert sent == (
        {"coin"} if "verified" in case.name and "prove" in {m.protocol for m in program.messages} else set()
    )
    assert not [i for i in program.inputs if i.party.name == "D"]
    assert {m.dst.name for m in program.messages if m.src.name == "D"} <= {"S"}
    assert all(m.phase <= Phase.OFFLINE for m in program.messages if m.src.name == "D"), "it deals ahead of the query"
    by_Q = {n.step.name.split("/")[0] for n in program.nodes if isinstance(n.step, Draw) and session.Q in n.step.owners}
    assert by_Q <= {"share", "reveal", "guard", "leaky_relu", "leaky_drelu", "leaky_maxpool"}, (
        "its input, its result, the paper's ReLU"
    )


MODELS = {
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)),
        torch.randn(2, 1, 8, 8)),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
    "tokens": lambda: (nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2), nn.Softmax(-1)),
                       torch.randint(0, 9, (2, 4))),
}  # fmt: skip


WAYS = [*((name, "lan") for name in MODELS), ("convolutions", "wan")]


@pytest.mark.parametrize(("name", "network"), some(WAYS, [("tokens", "lan"), ("convolutions", "wan")]))
def test_models_with_a_dealer_of_its_own(name: str, network: str):
    model, x = MODELS[name]()
    model.eval()
    secured = sectorch.secure(model, Scheme(network=network), session=sectorch.Session(dealer="D"))
    wanted = sectorch.reference(model)(x)
    assert torch.equal(secured(x), wanted)
    secured.preprocess(len(x))
    with sectorch.profile() as online:
        assert torch.equal(secured(x), wanted)
    assert "D" not in {p.name for m in online.ledger for p in (m.src, m.dst)}, "it has no part in what is online"
    usual = sectorch.program(model, x)
    assert secured.choreography(x).cost["online"] == usual.cost["online"] or network == "wan"


def test_several_models_and_a_dealer():
    session, model, x = sectorch.Session(2, dealer="D"), nn.Linear(3, 2).eval(), torch.randn(4, 3)
    shared = [sectorch.share(x, session=session, party=party) for party in session.answering]
    parts = [sectorch.secure(model, session=session, party=y.party)(y) for y in shared]
    torch.testing.assert_close(sectorch.aggregate(parts), 2 * model(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dealer", ["S", "A", "B", "", None, 3])
def test_who_cannot_deal(dealer):
    with pytest.raises(errors.ArgumentError, match="the dealer is Q, or D"):
        sectorch.Session(dealer=dealer)


# Payloads.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int16])
def test_a_payload_of_the_wrong_type_is_refused_when_traced(dtype):
    session = sectorch.Session()
    sends = protocol("sends", "here", [Message("x", "Q", "S", "")])(lambda net, x: x.send(net.Q, net.S, "x"))
    try:
        with pytest.raises(errors.DtypeError, match="'x' carries"):
            session.trace(lambda net: net.read(sends(net, net.own(net.Q, torch.ones(2, dtype=dtype))), net.S))
    finally:
        from sectorch.choreography import PROTOCOLS

        del PROTOCOLS["sends"]


def test_played_from_above_as_well():
    """Verb by verb, without a program."""
    session, inputs = sectorch.Session(roles=ROLES), vectors()
    with session.call() as net:
        brought = [net.own(getattr(net, name), inputs[name]) for name in HOSPITALS]
        assert torch.equal(net.read(secure_sum(net, *brought), net.C), sum(inputs.values()))


def test_the_net_of_a_running_call_is_found_without_a_name():
    for session in (sectorch.Session(), sectorch.Session(2), sectorch.Session(roles=ROLES)):
        with session.call() as net:
            assert session.net() is net
            with session.operation(session.answering[0] if session.answering else None) as found:
                assert found is net
