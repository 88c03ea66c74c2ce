"""An encrypted model with Q, A and S apart: each with inputs of its own, and what A has of the keys is a message."""

from __future__ import annotations

import pytest
import torch
from cases import by_turns
from distributed_parties import in_threads, runtime_of
from test_ckks_weight_secrecy import MODELS, filled
from torch import nn

import sectorch
from sectorch import ckks
from sectorch.choreography import Phase
from sectorch.choreography.ledger import Profile, Transcript
from sectorch.ckks.module import ask, send_keys
from sectorch.ckks.scheme.keys import PublicKeys
from sectorch.errors import ArgumentError, MisplacedValueError, PeerLostError
from sectorch.session import A, Party, Q, S

EDGES = [(Q, S), (A, S)]


def lines(profile: Profile) -> list[tuple]:
    """What went along the edges of the model's messages: who, what, and how many bytes, in which phase and round."""
    found = [m for m in profile.ledger if m.protocol.startswith("ckks")]
    return [(m.path, m.label, m.src.role, m.dst.role, m.phase, m.round, tuple(m.shape), m.bytes) for m in found]


def brought(make, x: torch.Tensor, model: nn.Module) -> dict[str, tuple]:
    """The module and the input that each party has: weights at A, values at Q, shapes elsewhere."""
    with torch.device("meta"):
        blank = make().eval()
    return {"Q": (blank, x), "A": (model, x.to("meta")), "S": (blank, x.to("meta"))}


@by_turns(name=["all kinds", "numbers in a row", "layers"], given=[False, True])
def test_q_a_and_s_apart(name, given):
    """Two calls give the results and the ledger of one process. Keys, encryption and rerandomisation are fresh in each
    run, so that values agree as far as they are exact.
    """
    make, shape = MODELS[name]
    x, model = torch.rand(5, *shape) - 0.5, filled(make(), 4)
    keys = ckks.keygen(ckks.explain(model, x).depth, integer_bits=20) if given else None
    with Profile() as together:
        one = ckks.CKKSModule(model, keys, session=sectorch.Session())
        expected = one(x), one(x)
    has = brought(make, x, model)

    def party(me: Party, ends: dict) -> tuple:
        with Profile() as profile:
            session = sectorch.Session(runtime=runtime_of(me, ends))
            plain, values = has[me.name]
            known = None if keys is None else keys if me == Q else keys.parameters
            module = ckks.CKKSModule(plain, known, session=session)
            results = module(values), module(values)
        return results, module.keys, module._public, lines(profile)

    found = in_threads(EDGES, party)
    assert not any(isinstance(value, BaseException) for value in found.values()), found
    (results, made, at_Q, _), (nothing, none, public, _) = found["Q"], found["A"]
    assert all(y.is_meta for y in nothing) and all(y.is_meta for y in found["S"][0])
    for y, wanted in zip(results, expected, strict=True):
        assert torch.allclose(y, model(x), atol=1e-2) and torch.allclose(y, wanted, atol=1e-2)
    assert at_Q is None and none is None and found["S"][1:3] == (None, None)
    assert public is not made.public and public.identity == made.public.identity
    assert all(value[3] == lines(together) for value in found.values()) and len(lines(together)) == 10 + 2 * (not given)


def test_the_keys_are_a_message_of_the_setup():
    """Once, with the bytes that are sent; A computes with what it is made of, and not with Q's own."""
    model, x = nn.Linear(3, 2).eval(), torch.rand(4, 3)
    module = sectorch.secure(model, backend="ckks", session=sectorch.Session())
    with Transcript() as transcript:
        module(x)
        module(x)
    sent = [(line, value) for line, value in transcript.lines if line.protocol == "ckks_keys"]
    assert [(line.label, line.src.role, line.dst.role) for line, _ in sent] == [
        ("keys", "Q", "S"), ("keys_forwarded", "S", "A"),
    ]  # fmt: skip
    size = PublicKeys.message_bytes(module.keys.parameters)
    for line, value in sent:
        assert line.phase == Phase.SETUP and line.bytes == value.nbytes == size
        assert PublicKeys.from_message(module.keys.parameters, value).identity == module.keys.public.identity
    assert module._public is not module.keys.public


def test_who_has_no_keys_does_nothing():
    """Where A was sent no keys, every party says so before a message."""
    model, x = nn.Linear(2, 2).eval(), torch.rand(3, 2)
    keys, has = ckks.keygen(1), brought(lambda: nn.Linear(2, 2), x, model)

    def party(me: Party, ends: dict) -> torch.Tensor:
        session = sectorch.Session(runtime=runtime_of(me, ends))
        plain, values = has[me.name]
        with session.call(session.answering[0]) as net:
            own = ckks.LocatedKeys(net, net.Q, keys.parameters, keys if me == Q else keys.parameters)
            return net.read(ask(net, own.encrypt(net.own(net.Q, values)), plain), net.Q)

    found = in_threads(EDGES, party)
    assert all(isinstance(found[name], ckks.MissingKeyError) for name in "QAS"), found
    assert "A has no public keys of Q; send them first" in str(found["A"])


def test_keys_that_were_not_sent_are_not_at_a():
    session, keys = sectorch.Session(), ckks.keygen(1)
    setup = session.setup(session.answering[0])
    mine = setup.own(session.Q, keys.public.message(), Phase.SETUP, "keys")
    with pytest.raises(MisplacedValueError):
        setup.read(mine, session.answering[0])


@pytest.mark.parametrize("wrong", ["other bytes", "none"])
def test_what_is_no_key_is_refused_by_a(wrong):
    """A message of the right length that holds no keys, and a Q that leaves before it sends them."""
    model, x = nn.Linear(2, 2).eval(), torch.rand(3, 2)
    keys, has = ckks.keygen(1), brought(lambda: nn.Linear(2, 2), x, model)

    def party(me: Party, ends: dict) -> list:
        session = sectorch.Session(runtime=runtime_of(me, ends))
        plain, values = has[me.name]
        if me == Q:
            if wrong == "other bytes":
                setup, size = session.setup(session.answering[0]), PublicKeys.message_bytes(keys.parameters)
                send_keys(setup, setup.own(Q, torch.ones(size, dtype=torch.uint8), Phase.SETUP, "keys"))
            raise ConnectionError
        module = ckks.CKKSModule(plain, keys.parameters, session=session)
        try:
            module(values)
        except (ckks.SerialisationError, PeerLostError) as error:
            for end in ends.values():
                end.close()
            return [type(error), module._public, module.queries]
        return []

    found = in_threads(EDGES, party)
    assert found["A"] == [ckks.SerialisationError if wrong == "other bytes" else PeerLostError, None, []]


def test_keys_are_what_a_process_may_have():
    model, keys = nn.Linear(2, 2).eval(), ckks.keygen(1)
    for given in (keys.public, keys.parameters, keys.secret):
        with pytest.raises(ArgumentError, match="keys are Q's Keys"):
            ckks.CKKSModule(model, given, session=sectorch.Session())
    with pytest.raises(ArgumentError, match="a party in this process"):
        ckks.CKKSModule(model, keys.parameters, session=sectorch.Session(dry=True))
