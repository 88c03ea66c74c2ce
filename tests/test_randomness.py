"""Pair streams: equal at both ends, different everywhere else, never drawn twice; and the key agreement."""

from __future__ import annotations

import copy
import hashlib
import hmac
import itertools
import os
import pickle
from unittest import mock

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from helpers import CASES, case_session, run, traced
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded_tests import Stream, fresh

from sectorch.choreography import streams
from sectorch.choreography.streams import SECRET_BYTES, PairKey, agree, derive, keypair, random_secret
from sectorch.errors import KeyAgreementError, StreamReuseError
from sectorch.session import Session

SECRET, SESSION = bytes(range(32)), bytes(range(100, 116))
LABELS = st.sampled_from(["share/x_A", "truncate/r_A", "r", "", "a label of no protocol: ü"])
COUNTER = st.integers(0, (1 << 32) - 1)


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 from the standard library."""
    key, out, block = hmac.new(salt, secret, hashlib.sha256).digest(), b"", b""
    for i in range(1, -(-length // 32) + 1):
        block = hmac.new(key, block + info + bytes([i]), hashlib.sha256).digest()
        out += block
    return out[:length]


def stream(secret: bytes, session: bytes, label: str, call: int, draw: int, count: int) -> torch.Tensor:
    """The documented stream a second time: every counter block on its own through the bare block cipher."""
    key = hkdf(secret, session, b"sectorch v1/stream/" + label.encode(), 16)
    blocks = b"".join(
        call.to_bytes(4, "big") + draw.to_bytes(4, "big") + i.to_bytes(8, "big") for i in range(2, 2 + -(-count // 2))
    )
    # ECB is what the block cipher does to one block; here it is the reference for counter mode.
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    data = encryptor.update(blocks) + encryptor.finalize()
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little", signed=True) for i in range(count)]
    return torch.tensor(words, dtype=torch.int64)


def test_known_answer():
    # Made with Python's hmac for the key and `openssl enc -aes-128-ecb -nopad` on the two counter blocks
    # 00000007 00000003 0000000000000002 and ...03, read as little-endian signed words.
    words = PairKey(SECRET, SESSION).words("truncate/r_A", 7, 3, 4)
    assert words.tolist() == [1233580915757833505, -4139161503133549976, 6417146803485347157, -441748211433907628]


def test_hkdf_of_the_rfc():
    # RFC 5869, test case 1, for the second implementation above.
    okm = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert okm.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )  # fmt: skip
    assert derive(SECRET, SESSION, "pair secret", 32) == hkdf(SECRET, SESSION, b"sectorch v1/pair secret", 32)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16), LABELS, COUNTER, COUNTER,
       st.sampled_from([0, 1, 2, 3, 64, 65]))  # fmt: skip
def test_the_stream_is_the_documented_one(secret, session, label, call, draw, count):
    words = PairKey(secret, session).words(label, call, draw, count)
    assert words.dtype == torch.int64
    assert torch.equal(words, stream(secret, session, label, call, draw, count))


def test_a_draw_longer_than_one_piece_of_plaintext():
    count = (1 << 15) + 5  # 256 KiB and a bit
    assert torch.equal(PairKey(SECRET, SESSION).words("r", 1, 2, count), stream(SECRET, SESSION, "r", 1, 2, count))


@given(st.binary(min_size=16, max_size=16), LABELS, COUNTER, COUNTER, st.lists(st.integers(0, 5000), max_size=4))
def test_gcm_and_ctr_make_the_same_streams(seed, label, call, draw, pieces):
    made = []
    for chosen in (False, True):
        with mock.patch.object(streams, "by_gcm", lambda length, chosen=chosen: chosen):
            running, found = streams.KeyStream(seed, SESSION, label), []
            for piece in pieces:
                found.append(bytearray(piece))
                running.fill(memoryview(found[-1]))
            words = PairKey(SECRET, SESSION).words(label, call, draw, sum(pieces))
            alone = streams.key_stream(torch.frombuffer(bytearray(seed), dtype=torch.int64), sum(pieces))
            made.append((b"".join(found), words.tolist(), alone.tolist()))
    assert made[0] == made[1]


def test_a_thread_may_draw_long_and_short_in_turn():
    key, counts = PairKey(SECRET, SESSION), [3, (1 << 16) + 1, 5, 1 << 15, 1 << 13, (1 << 13) - 1]
    for draw, count in enumerate(counts):
        assert torch.equal(key.words("r", 1, draw, count), stream(SECRET, SESSION, "r", 1, draw, count))


def test_both_ends_draw_the_same_in_whatever_order_of_labels():
    one, other = PairKey(SECRET, SESSION), PairKey(SECRET, SESSION)
    places = [(label, call, draw) for label in ("a", "b") for call in (0, 5) for draw in (0, 3)]
    first = {place: one.words(*place, 9) for place in places}
    # The other end runs ahead: all calls of one label first, later calls before earlier ones.
    for label, call in itertools.product(("b", "a"), (5, 0)):
        for draw in (0, 3):
            assert torch.equal(other.words(label, call, draw, 9), first[label, call, draw])


def test_every_part_of_the_address_matters():
    base = dict(secret=SECRET, session=SESSION, label="r", call=1, draw=1)
    others = [dict(secret=bytes(32)), dict(session=bytes(16)), dict(label="s"), dict(call=2), dict(draw=2)]
    drawn = []
    for change in [{}, *others, dict(call=1 << 31), dict(draw=1 << 31)]:
        at = base | change
        drawn.append(PairKey(at["secret"], at["session"]).words(at["label"], at["call"], at["draw"], 64))
    # 64 bits agree by chance in one of 2^64 places: none of the 8 * 64 words may appear twice.
    assert torch.cat(drawn).unique().numel() == 64 * len(drawn)


def test_a_place_is_drawn_once():
    key = PairKey(SECRET, SESSION)
    key.words("r", 0, 1, 4)
    key.words("r", 0, 2, 4)
    key.words("r", 1, 0, 4)
    key.words("s", 0, 1, 4)
    for draw in (2, 1, 0):
        with pytest.raises(StreamReuseError, match=f"draw {draw} of 'r' in call 0 was made already"):
            key.words("r", 0, draw, 4)
    with pytest.raises(StreamReuseError):
        key.words("r", 0, 2, 0)
    key.words("r", 0, 3, 4)


@pytest.mark.parametrize(("call", "draw"), [(1 << 32, 0), (0, 1 << 32), (-1, 0), (0, -1)])
def test_counters_do_not_wrap(call: int, draw: int):
    with pytest.raises(StreamReuseError, match="open a new session"):
        PairKey(SECRET, SESSION).words("r", call, draw, 1)


def test_forgetting_a_call_frees_its_bookkeeping_only():
    key = PairKey(SECRET, SESSION)
    key.words("r", 0, 0, 1)
    key.words("r", 1, 0, 1)
    key.forget(0)
    key.forget(99)
    assert set(key._latest) == {1}
    with pytest.raises(StreamReuseError):
        key.words("r", 1, 0, 1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_key_cannot_be_copied(duplicate):
    with pytest.raises(StreamReuseError, match="cannot be copied or pickled"):
        duplicate(PairKey(SECRET, SESSION))


def test_a_key_shows_nothing():
    key = PairKey(SECRET, SESSION)
    key.words("r", 0, 0, 1)
    assert repr(key) == str(key) == f"{key}" == "PairKey(...)"


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_secrets_of_a_wrong_length(length: int):
    with pytest.raises(KeyAgreementError, match=f"32 bytes, got {length}"):
        PairKey(bytes(length), SESSION)


def test_secrets_are_compared_by_content():
    key = PairKey(SECRET, SESSION)
    assert key.same_secret(PairKey(SECRET, bytes(16)))
    assert not key.same_secret(PairKey(SECRET[::-1], SESSION))
    assert len({random_secret() for _ in range(100)}) == 100
    assert len(random_secret()) == SECRET_BYTES


def test_both_ends_agree():
    (a, public_a), (b, public_b) = keypair(), keypair()
    secret = agree(a, public_a, public_b, SESSION)
    assert secret == agree(b, public_b, public_a, SESSION)
    assert len(secret) == SECRET_BYTES
    assert secret != agree(a, public_a, public_b, bytes(16)), "another session, another secret"


def test_agreement_known_answer():
    # RFC 7748, 6.1: both private keys, both public keys and the shared point; then the documented derivation.
    alice = X25519PrivateKey.from_private_bytes(
        bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    )
    public_alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    public_bob = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert alice.public_key().public_bytes_raw() == public_alice
    expected = hkdf(shared, SESSION + public_alice + public_bob, b"sectorch v1/pair secret", 32)
    assert agree(alice, public_alice, public_bob, SESSION) == expected


def test_a_relay_that_swaps_a_key_ends_with_two_secrets():
    (a, public_a), (b, public_b), (m, public_m) = keypair(), keypair(), keypair()
    at_a, at_b = agree(a, public_a, public_m, SESSION), agree(b, public_b, public_m, SESSION)
    assert at_a != at_b
    # The relay knows both; that is why long-term identities exist. It still cannot make them equal.
    assert at_a == agree(m, public_m, public_a, SESSION)


# The canonical points of small order on Curve25519: order 4 (0), 1, the two of order 8, p - 1, p, p + 1.
P = (1 << 255) - 19
LOW_ORDER = [
    *(0, 1, P - 1, P, P + 1),
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused(point: int):
    private, public = keypair()
    with pytest.raises(KeyAgreementError, match="not valid"):
        agree(private, public, point.to_bytes(32, "little"), SESSION)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_public_keys_of_a_wrong_length_are_refused(length: int):
    private, public = keypair()
    with pytest.raises(KeyAgreementError):
        agree(private, public, bytes(length), SESSION)


class Places(list):
    """Records every draw of a session: who, where and what."""

    def __init__(self, session: Session):
        super().__init__()
        inner = session.runtime.draw

        def draw(pair, label, call, draw, count):
            words = inner(pair, label, call, draw, count)
            self.append((pair, label, call, draw, words.clone()))
            return words

        session.runtime.draw = draw


def test_no_place_is_drawn_twice_in_a_whole_program():
    for answering in (1, 3):
        session = Session(answering)
        places = Places(session)
        for case in CASES:
            if case.answering == answering:
                for _ in range(2):
                    run(case.program, *case.inputs(70), session=session)
        if answering == 1:
            _prepare_and_replay(session)
        addresses = [(pair, label, call, draw) for pair, label, call, draw, _ in places]
        assert len(addresses) == len(set(addresses)) > 3
        # Within one call of one pair even the draw number alone is new, whatever the label.
        assert len(addresses) == len({(pair, call, draw) for pair, _, call, draw in addresses})
        words = torch.cat([words for *_, words in places])
        # n words have a repetition with probability n^2 / 2^65: below 10^-8 for 500,000 of them.
        assert words.unique().numel() == words.numel() < 500_000


def _prepare_and_replay(session: Session):
    case = next(c for c in CASES if c.name == "relu_20")
    inputs = case.inputs(70)
    for _ in range(2):
        program, brought = traced(session, case.program, inputs)
        case.check(inputs, session.run(program, brought, session.prepare(program, {})))


def test_a_net_that_outlives_its_call_draws_nothing_twice():
    session = Session()
    places = Places(session)
    with session.call(session.answering[0]) as net:
        net.common(net.Q, net.S, (3,), "r")
    net.common(net.Q, net.S, (3,), "r")
    first, second = places
    assert first[:4] != second[:4]
    assert not torch.equal(first[4], second[4])


def test_draws_of_int32_use_half_the_words():
    places = Places(session := Session())
    with session.call(session.answering[0]) as net:
        drawn = net.read(net.common(net.Q, net.A, (5,), "w", torch.int32), net.A)
    assert drawn.dtype == torch.int32
    assert drawn.shape == (5,)
    assert [words.numel() for *_, words in places] == [3]
    assert torch.equal(drawn, places[0][4].view(torch.int32)[:5])


def test_all_keys_of_a_session_differ():
    session = Session(3)
    secrets = [key._secret for key in session.runtime.keys._keys.values()]
    # Q-S once, and Q-A and S-A for each answering party.
    assert len(secrets) == len(set(secrets)) == 7
    assert case_session(CASES[0]).runtime.session != session.runtime.session


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_test_draws_the_same_in_every_run_and_a_process_that_it_forks_does_not():
    assert Stream("a")(40) == Stream("a")(40) != Stream("b")(40)
    assert isinstance(os.urandom, Stream) is settings.default.derandomize
    child = os.fork()
    if not child:
        os._exit(int(os.urandom is fresh))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
