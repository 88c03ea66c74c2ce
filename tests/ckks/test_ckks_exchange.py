"""Ciphertexts among parties: in one process and with each party in its own thread, shapes known to everybody."""

from __future__ import annotations

import copy

import pytest
import torch
from distributed_parties import in_threads, runtime_of
from torch import nn

from sectorch import ckks
from sectorch.choreography import Located, Net, Party, Roles, protocol
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.run.local import LocalRuntime
from sectorch.ckks import exchange
from sectorch.ckks.exchange import LocatedCKKSTensor, _words
from sectorch.ckks.linalg import EncodedShare, Reducing, encrypt_matrix, uniform
from sectorch.ckks.linalg import ReducingOperand as Operand
from sectorch.ckks.scheme.encryption import flood_cost
from sectorch.errors import (
    ArgumentError,
    CorruptedCiphertextError,
    MisplacedValueError,
    ShapeError,
    UnsupportedOpError,
)
from sectorch.nn.fhe import Polynomial
from sectorch.session import A, Q, S, Session

TWO = Roles("K L", edges="K-L")
K, L = Party("K", "K"), Party("L", "L")
PARAMETERS = ckks.choose(4, scale_bits=28, degree=8192)
FLOOD = flood_cost(PARAMETERS.degree, PARAMETERS.scales[1], 8.0) + 1e-3


def network() -> nn.Module:
    torch.manual_seed(5)
    layers = nn.Linear(6, 4), Polynomial([0.1, 0.5, 0.25]), nn.Linear(4, 3)
    return nn.Sequential(*layers).eval()


def evaluation(net: Net, x: torch.Tensor, model: nn.Module, owner: Party, evaluator: Party) -> tuple[Located, Located]:
    """A model's logits, and their sums over the batch in two groups, at the owner of the samples."""
    keys = ckks.LocatedKeys(net, owner, PARAMETERS)
    keys.to(evaluator)
    z = keys.encrypt(net.own(owner, x), bound=0.5).to(evaluator).apply(model)
    assert z.owners == {evaluator} and tuple(z.shape) == (len(x), 3)
    weights = keys.encrypt(net.own(owner, torch.ones(len(x), 3)), bound=1.0, level=1).to(evaluator)
    sums = ((weights * z).sum(1) / 2.0).sum(0, groups=2)
    return z.decrypt_at(owner, flood_bits=8), sums.decrypt_at(owner, flood_bits=8)


def test_one_process_and_two_give_the_same():
    """Each party has its own input and shapes of the other's; messages and shapes are the same everywhere."""
    x, model = torch.rand(10, 6) - 0.5, network()
    wanted = model(x)

    def run(session: Session, mine: torch.Tensor, own: nn.Module) -> tuple:
        with Transcript() as transcript, session.call() as net:
            z, sums = (net.read(v, net.K) for v in evaluation(net, mine, own, net.K, net.L))
        lines = [(m.path, m.label, m.src.name, tuple(m.shape), m.round) for m, _ in transcript.lines]
        return z, sums, lines

    def party(me: Party, ends: dict) -> tuple:
        session = Session(roles=TWO, runtime=runtime_of(me, ends))
        blank = copy.deepcopy(model).to("meta")
        return run(session, x if me == K else x.to("meta"), model if me == L else blank)

    whole = run(Session(roles=TWO), x, model)
    found = in_threads([(K, L)], party)
    assert not any(isinstance(v, BaseException) for v in found.values()), found
    for z, sums, lines in (whole, found["K"]):
        assert torch.allclose(z, wanted, atol=FLOOD)
        halves = torch.stack([wanted[i::2].sum() / 2 for i in (0, 1)]).double()
        assert torch.allclose(sums, halves, atol=8 * ckks.sum_noise(PARAMETERS, 2, 8.0, 0.5) + 0.1)
        assert lines == whole[2]
    z, sums, lines = found["L"]
    assert z.is_meta and sums.is_meta and z.shape == wanted.shape and sums.shape == (2,) and lines == whole[2]
    assert [label for _, label, *_ in lines if not label.startswith("key_")] == [
        "keys", "ciphertexts", "ciphertexts_tag", "ciphertexts", "ciphertexts_tag", "answer", "answer_tag", "answer",
        "answer_tag",
    ]  # fmt: skip


def test_by_way_of_the_server_in_the_star():
    x, model, session = torch.rand(4, 6) - 0.5, network(), Session()
    with Transcript() as transcript, session.call() as net:
        found = net.read(evaluation(net, x, model, net.Q, net.A)[0], net.Q)
    assert torch.allclose(found, model(x), atol=FLOOD)
    lines = [
        (m.protocol, m.label, m.src, m.dst, m.learner) for m, _ in transcript.lines if m.label.startswith("answer")
    ]
    assert lines[0] == ("ckks_relay", "answer", A, S, Q) and lines[1][1:4] == ("answer_forwarded", S, Q)


def session_net():
    session = Session(roles=TWO)
    return session, session.call()


def test_damage_and_missing_keys_are_named(monkeypatch):
    _, call = session_net()
    with call as net:
        keys = ckks.LocatedKeys(net, net.K, PARAMETERS)
        e = keys.encrypt(net.own(net.K, torch.rand(3, 2)))
        with pytest.raises(ckks.MissingKeyError, match=r"L has no public keys of K; send them first"):
            e.to(net.L)
        keys.to(net.L)
        transfer = LocalRuntime.transfer

        def damaged(self, line, value):
            if line.label == "ciphertexts":
                value.view(-1)[7] ^= 1  # in place: in one process both ends hold one tensor
            return transfer(self, line, value)

        monkeypatch.setattr(LocalRuntime, "transfer", damaged)
        with pytest.raises(CorruptedCiphertextError, match="P1's inputs arrived damaged"):
            e.to(net.L, what="P1's inputs")
        with pytest.raises(MisplacedValueError, match="L has no secret key"):
            e.decrypt_at(net.L)
        with pytest.raises(ArgumentError, match="flooded before it is sent"):
            monkeypatch.undo()
            e.to(net.L).sum(0).decrypt_at(net.K)


def test_of_a_sum_over_the_batch_nothing_else_leaves():
    """Its slots still hold single samples: it can be decrypted, and neither sent nor computed with."""
    _, call = session_net()
    with call as net:
        keys = ckks.LocatedKeys(net, net.K, PARAMETERS)
        keys.to(net.L)
        e = keys.encrypt(net.own(net.K, torch.rand(8, 2)), level=0).to(net.L)
        with Transcript() as transcript:
            for use in (
                lambda s: s.to(net.K), lambda s: s._sent(net.K, "answer", False, ""), lambda s: s + s,
                lambda s: s.sum(1), lambda s: s.apply(nn.Identity()), lambda s: s.smallest_form(), torch.neg,
            ):  # fmt: skip
                with pytest.raises((UnsupportedOpError, ArgumentError), match="sum over the batch"):
                    use(e.sum(0))
        assert not transcript.lines
        sent = e.sum(0).rerandomise(8).to(net.K)
        assert isinstance(sent.content._value, ckks.BatchSums)


def test_the_owner_of_the_key_gets_nothing_that_was_not_rerandomised():
    _, call = session_net()
    with call as net:
        keys = ckks.LocatedKeys(net, net.K, PARAMETERS)
        keys.to(net.L)
        e = keys.encrypt(net.own(net.K, torch.rand(8, 2)), level=1).to(net.L)
        at_L, at_K = e.content._value.cipher.data, e.to(net.K).content._value.cipher.data
        assert float((at_L == at_K).double().mean()) < 0.01
        once = e.rerandomise()
        assert torch.equal(once.to(net.K).content._value.cipher.data, once.content._value.cipher.data)


def test_a_ledger_refuses_before_anything_is_sent():
    _, call = session_net()
    ledger = ckks.ReleaseLedger("L", least_samples=4, most=0.5)
    with call as net:
        keys = ckks.LocatedKeys(net, net.K, PARAMETERS)
        keys.to(net.L)
        e, few = (keys.encrypt(net.own(net.K, torch.rand(n, 2)), level=0).to(net.L) for n in (8, 3))
        for _ in range(2):
            e.sum(0).decrypt_at(net.K, flood_bits=8, ledger=ledger, about="v")
        with Transcript() as transcript:
            with pytest.raises(ckks.DisaggregationError, match=r"limit of 0\.5 for each is passed"):
                e.sum(0).decrypt_at(net.K, flood_bits=8, ledger=ledger, about="v")
            with pytest.raises(ckks.DisaggregationError, match="no aggregate over 3 samples of K"):
                few.sum(0).decrypt_at(net.K, flood_bits=8, ledger=ledger, about="v")
            with pytest.raises(ckks.DisaggregationError, match="no aggregate over 1 samples of K"):
                e.decrypt_at(net.K, ledger=ledger, about="w")
        assert not transcript.lines
    assert ledger.released == {"L>K@v": [4, 8]}


def test_an_encrypted_matrix_times_another():
    """E @ E, with rotations, and integer multiples and sums of packed matrices: SecSV, section 4.2."""
    torch.manual_seed(1)
    W, V, X = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, 5)
    layout = ckks.MatrixSquaring(3, 8, 5, 2048)
    made = ckks.keygen(1, degree=4096, scale_bits=22, integer_bits=19, rotations=layout.rotations())
    _, call = session_net()
    with call as net:
        keys = ckks.LocatedKeys(net, net.K, made.parameters, made, {net.L: made.public})
        left, other = (
            keys.run(net.K, lambda m, k: layout.prepare_left(m, k, None), net.own(net.K, m), keys.keys).to(net.L)
            for m in (W, V)
        )
        right = keys.run(net.K, lambda m, k: layout.prepare_right(m, k, None), net.own(net.K, X), keys.keys).to(net.L)
        product = (left + 2 * other) @ right
        found = net.read(product.decrypt_at(net.K), net.K)
    assert isinstance(product, LocatedCKKSTensor) and tuple(product.shape) == (3, 5)
    assert torch.allclose(found, ((W + 2 * V) @ X).double(), atol=0.1)


THREE = Roles("C P X", edges="C-P C-X P-X")


@protocol("test_ckks_product", "SecSV, 5.2", ckks.ciphertext_messages("partial", "X", "P", "rerandomised"), roles=THREE)
def product_with_shares(net: Net, keys: ckks.LocatedKeys, W: dict, x: dict) -> LocatedCKKSTensor:
    """E @ share at both servers; X's part goes to P under a fresh encryption of zero."""
    at_X = (W[net.X] @ x[net.X]).rerandomise()
    return W[net.P] @ x[net.P] + at_X.to(net.P, "partial")


def test_an_encrypted_matrix_times_shares():
    """E @ share, no rotation and no product of ciphertexts; int32 words, as the primes are below 2^31."""
    torch.manual_seed(2)
    matrices = [torch.randn(3, 7, dtype=torch.float64) for _ in range(2)]
    x = torch.randint(-999, 999, (7, 20))
    made = ckks.keygen(2, degree=4096)
    primes, layout = made.parameters.primes, Reducing(3, 7, 4096)
    column = torch.tensor(primes).view(-1, 1, 1)
    mask = uniform((7, 20), primes)
    halves = mask, (x - mask).remainder(column)

    def receive(first: torch.Tensor, seed: torch.Tensor, keys: ckks.PublicKeys) -> Operand:
        return Operand.from_seeded(layout, keys, first, seed, 3)

    session = Session(roles=THREE)
    with Transcript() as transcript, session.call() as net:
        keys = ckks.LocatedKeys(net, net.C, made.parameters, made)
        W = {}
        for server in (net.P, net.X):
            keys.to(server)
        sent = [encrypt_matrix(layout, m, made) for m in matrices]
        for server in (net.P, net.X):
            each = [
                keys.run(server, receive, *(net.own(server, v) for v in pair), keys.public(server)) for pair in sent
            ]
            W[server] = keys.run(server, lambda a, b: a + b, *each)
        shares = {p: net.own(p, half) for p, half in zip((net.P, net.X), halves, strict=True)}
        product = product_with_shares(net, keys, W, shares)
        found = net.read(product.decrypt_at(net.C), net.C)
    wanted = 3 * (matrices[0] + matrices[1]) @ x.double()
    assert found.shape == (3, 20) and torch.allclose(found, wanted, rtol=1e-3, atol=2.0)
    assert {m.dtype for m, _ in transcript.lines if m.label in ("partial", "answer")} == {torch.int32}


JOINT = Roles("C D P", edges="C-P D-P")


def test_owners_of_a_joint_key_decrypt_a_list_of_products(monkeypatch):
    """Both owners, and the server in no way; a share is encoded once for two products, and of shapes gives shapes."""
    torch.manual_seed(3)
    made = ckks.keygen(2, degree=4096)
    p, layout, x = made.parameters, Reducing(3, 7, 4096), torch.randint(-999, 999, (7, 20))
    residues = x.remainder(torch.tensor(p.primes).view(-1, 1, 1))
    matrices = [torch.randn(3, 7, dtype=torch.float64) for _ in range(2)]
    with Session(roles=JOINT).call() as net:
        keys = ckks.LocatedKeys(net, net.C, p, made, {net.P: made.public})
        keys.add_owner(net, net.D, made)
        right = net.fresh(net.P, lambda r: EncodedShare.of(layout, r, p.primes), net.own(net.P, residues))
        receive = lambda half, seed, keys: Operand.from_seeded(layout, keys, half, seed)
        sent = [[net.own(net.P, v) for v in encrypt_matrix(layout, m, made)] for m in matrices]
        left = [keys.run(net.P, receive, *pair, keys.public(net.P)) for pair in sent]
        products = keys.run(net.P, lambda r, *ms: [m @ r for m in ms], right, *(e.content for e in left))
        with Transcript() as transcript:
            for owner in (net.C, net.D):
                found = [net.read(v, owner) for v in products.decrypt_at(owner)]
                for got, matrix in zip(found, matrices, strict=True):
                    assert torch.allclose(got, matrix @ x.double(), rtol=1e-3, atol=2.0)
            (_, at_C), (_, at_D) = (line for line in transcript.lines if line[0].label == "answer")
            assert not torch.equal(at_C, at_D), "each under zeros of its own"
            once = products.rerandomise()
            once.decrypt_at(net.C), once.to(net.P).decrypt_at(net.D, rerandomised=True)
        answers = [value for line, value in transcript.lines if line.label == "answer"][2:]
        assert torch.equal(*answers), "what was rerandomised last is sent as it is"
        with pytest.raises(MisplacedValueError, match="P has no secret key"):
            products.decrypt_at(net.P)
        monkeypatch.setattr(exchange, "_check_tag", lambda *_: None)
        monkeypatch.setattr(exchange, "_words", lambda value: _words(value).index_fill(3, torch.tensor([5]), 1 << 30))
        with pytest.raises(CorruptedCiphertextError, match="a word is no residue below its prime"):
            products.decrypt_at(net.C)
    meta = residues.to("meta")
    half, seed = encrypt_matrix(layout, matrices[0].to("meta"), made.public)
    blank = Operand.from_seeded(layout, made.public, half, seed) @ EncodedShare.of(layout, meta, p.primes)
    real = Operand.from_seeded(layout, made.public, *encrypt_matrix(layout, matrices[0], made)) @ residues
    assert blank.cipher.data.is_meta and blank.cipher.data.shape == real.cipher.data.shape


def test_products_of_other_keys_or_layouts_do_not_meet():
    """They gave numbers without an error: noise under two keys, and a part of the columns or of the sum."""
    own, other = (ckks.keygen(2, degree=4096) for _ in range(2))
    p, layout, shorter = own.parameters, Reducing(3, 7, 4096), Reducing(3, 5, 4096)
    x = torch.randint(0, 999, (3, 7, 20))
    make = lambda keys, layout=layout, width=7: Operand.from_seeded(
        layout, keys.public, *encrypt_matrix(layout, torch.ones(3, width, dtype=torch.float64), keys)
    )
    left, right = make(own), EncodedShare.of(layout, x, p.primes)
    product, theirs = left @ right, make(other) @ right
    packed = ckks.MatrixSquaring(3, 7, 5, 2048)
    a, b = packed.prepare_left(torch.ones(3, 7), own.public), packed.prepare_right(torch.ones(7, 5), other.public)
    for mixed in (
        lambda: left + make(other), lambda: product + theirs, lambda: product.decrypt(other),
        lambda: packed.multiply(a, b),
    ):  # fmt: skip
        with pytest.raises(ckks.KeyMismatchError):
            mixed()
    for wrong in (
        lambda: left + make(own, shorter, 5), lambda: product + left @ x[:, :, :9], lambda: left @ x[:, :5],
        lambda: left @ EncodedShare.of(shorter, x[:, :5], p.primes), lambda: left @ x[:2], lambda: left @ x[0],
        lambda: left @ EncodedShare.of(layout, x[:2], p.primes[:2]),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            wrong()


def test_a_packed_matrix_less_a_plain_one():
    """What HESV's server does with a state under its mask."""
    W, V, X, layout = torch.randn(3, 8), torch.randn(8, 5), torch.randn(8, 5), ckks.MatrixSquaring(3, 8, 5, 2048)
    made = ckks.keygen(1, degree=4096, scale_bits=22, integer_bits=19, rotations=layout.rotations())
    right = layout.prepare_right(X + V, made, None) - layout.prepare_right(V, None)
    found = (layout.prepare_left(W, made, None) @ right).decrypt(made.secret)
    assert torch.allclose(found, (W @ X).double(), atol=0.1)
