"""What Q, A and S see of the garbled steps: uniform bits, the same for every secret, and no two parts related by Delta.

Messages between Q and A are looked at as they arrive, without the pad against S, which would make anything uniform.
Bounds are those of `sectorch/testing/outcomes.py`: p-values against 10^-12, of which some hundred are computed here.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from garbled_reference import number
from helpers import findings

from sectorch.choreography.ledger import Transcript
from sectorch.garbled import (
    argmax_confident,
    argmax_confident_shares,
    argmax_noisy,
    argmax_noisy_shares,
    argmax_onehot,
    argmax_onehot_shares,
    correlate,
    oblivious_transfer,
    transfer,
)
from sectorch.garbled import circuit as half_gates
from sectorch.garbled.circuit import argmax_circuit, garble, private_words
from sectorch.session import Session
from sectorch.testing.outcomes import not_uniform

CLASSES, BITS = 4, 12


def first_wins(n: int) -> torch.Tensor:
    """All logits zero: ties everywhere, and no vote but the first class."""
    return torch.zeros(n, CLASSES, dtype=torch.int64)


def spread_out(n: int) -> torch.Tensor:
    """As far from zeros as can be: both ends of the range, and every class wins."""
    top = (1 << (BITS - 1)) - 1
    classes = torch.arange(CLASSES) == (torch.arange(n) % CLASSES).unsqueeze(1)
    return torch.where(classes, top, -top)


class View:
    """What arrived at each role, inside the seal, with who sent it in which protocol."""

    def __init__(self, monkeypatch):
        self.seen = defaultdict(list)
        relay, deliver = transfer.relay, transfer.deliver

        def opened(net, value, src, dst):
            arrived = relay(net, value, src, dst)
            path = net._path()
            self.seen[dst.role, f"{path}, {tuple(arrived.shape[1:2])} sealed"].append(net.read(arrived, dst))
            return arrived

        monkeypatch.setattr(transfer, "relay", opened)
        assert deliver.__globals__["relay"] is opened

    def add(self, transcript: Transcript, labels: tuple[str, ...] = ()) -> None:
        for role in "QAS":
            for line, value in transcript.received(role):
                if not line.shows or line.label in labels:
                    self.seen[role, f"{line.path}/{line.label}"].append(value)

    def arrays(self) -> dict[tuple[str, str], np.ndarray]:
        return {k: np.concatenate([v.numpy().reshape(-1) for v in values]) for k, values in self.seen.items()}


def onehot(net, session, pair, values, mask):
    A = net.A
    s, own = argmax_onehot(net, pair(A), net.own(A, mask), net.own(net.Q, values - mask), drop=0, bits=BITS)
    return {"s": net.read(s, net.Q), "s^": net.read(own, A)}


def noisy(net, session, pair, values, mask):
    S = net.S
    net.read(argmax_noisy(net, pair(S), net.own(S, mask), net.own(net.Q, values - mask), drop=0, bits=BITS), net.Q)
    return {}


def onehot_shares(net, session, pair, values, mask):
    s, own = argmax_onehot_shares(net, net.own(net.A, mask), net.own(net.Q, values - mask), drop=0, bits=BITS)
    return {"s": net.read(s, net.Q), "s^": net.read(own, net.A)}


def noisy_shares(net, session, pair, values, mask):
    net.read(argmax_noisy_shares(net, net.own(net.S, mask), net.own(net.Q, values - mask), drop=0, bits=BITS), net.Q)
    return {}


def confident(net, session, pair, values, mask):
    """With a threshold that one of the secrets never reaches and the other does."""
    at_S, at_Q = net.own(net.S, mask), net.own(net.Q, values - mask)
    net.read(argmax_confident(net, pair(net.S), net.own(net.S, mask - 1), at_S, at_Q, bits=BITS + 1), net.Q)
    return {}


def confident_shares(net, session, pair, values, mask):
    at_S, at_Q = net.own(net.S, mask), net.own(net.Q, values - mask)
    net.read(argmax_confident_shares(net, net.own(net.S, mask - 1), at_S, at_Q, bits=BITS + 1), net.Q)
    return {}


def choices(net, session, pair, values, mask):
    """Transfers on both edges, whose choice bits are the secret."""
    for garbler in (net.A, net.S):
        messages = net.own(garbler, torch.stack((mask, mask), -1).unsqueeze(-2).expand(*mask.shape, 2, 2))
        oblivious_transfer(net, pair(garbler), messages, net.own(net.Q, (values > 0).long()))
    return {}


PROGRAMS = [onehot, noisy, onehot_shares, noisy_shares, confident, confident_shares, choices]


def views(program, secret, monkeypatch, runs: int = 3, n: int = 1024) -> dict[tuple[str, str], np.ndarray]:
    """All that arrives in several fresh sessions, outputs that are shares included."""
    with monkeypatch.context() as patch:
        view = View(patch)
        for _ in range(runs):
            session = Session()
            party, pairs = session.answering[0], {}

            def pair(garbler, session=session, party=party, pairs=pairs):
                if garbler not in pairs:
                    pairs[garbler] = correlate(session.setup(party), garbler)
                return pairs[garbler]

            for garbler in (party, session.S):
                pair(garbler)
            view.seen = defaultdict(list, {k: v for k, v in view.seen.items() if "garbled_pair" not in k[1]})
            with Transcript() as transcript, session.call(party) as net:
                for name, half in program(net, session, pair, secret(n), private_words(n, CLASSES)).items():
                    view.seen["output", name].append(half)
            view.add(transcript, labels=("decoding",))
        return view.arrays()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_what_arrives_is_uniform_and_the_same_for_every_secret(program, monkeypatch):
    first, second = (views(program, secret, monkeypatch) for secret in (first_wins, spread_out))
    sizes = {role: sum(v.nbytes for (r, _), v in first.items() if r == role) for role in "QAS"}
    assert sizes["S"] >= 1e5
    assert program in (noisy, confident) or sizes["A"] >= 1e5
    assert program in (noisy_shares, confident_shares) or sizes["Q"] >= 5e4
    # The message that brings Q the sum with its label is masked, but shown; it stands in the core's tests.
    drop = [key for key in first if key[1].endswith("reveal/result")]
    assert findings(*({k: v for k, v in view.items() if k not in drop} for view in (first, second))) == []


def test_every_kind_of_message_is_looked_at(monkeypatch):
    seen = {key for program in PROGRAMS for key in views(program, first_wins, monkeypatch, runs=1, n=8)}
    parts = {(role, path.split(",")[0].split("/")[-1 if "," in path else -2]) for role, path in seen if role in "QAS"}
    assert {
        ("A", "garbled_choices"), ("S", "garbled_choices"), ("Q", "garbled_circuit"), ("Q", "garbled_argmax_onehot"),
        ("Q", "garbled_argmax_noisy"), ("Q", "garbled_argmax_confident"), ("Q", "garbled_transfer"),
        ("S", "garbled_relay"), ("Q", "argmax_onehot_shares"),
    } <= parts  # fmt: skip


def test_a_word_without_its_hash_would_be_found(monkeypatch):
    """The words that correct Q's shares, with the hashes left out, are one or minus one."""
    monkeypatch.setattr(half_gates, "hash_blocks", lambda keys, x: torch.zeros_like(x))
    found = findings(*(views(onehot, secret, monkeypatch, runs=1) for secret in (first_wins, spread_out)))
    assert any("not uniform" in f and "garbled_argmax_onehot" in f for f in found)


@pytest.mark.parametrize(
    ("program", "protocol"), [(noisy, "garbled_argmax_noisy"), (confident, "garbled_argmax_confident")]
)
def test_colours_that_decode_are_uniform_though_the_label_is_shown(program, protocol, monkeypatch):
    view = views(program, first_wins, monkeypatch)
    decoding = view["Q", f"{protocol}/decoding"]
    assert decoding.nbytes >= 500
    assert not_uniform(decoding) == ""


# Delta.


def rows_of_one_element(tables: torch.Tensor, labels: torch.Tensor) -> list[int]:
    """Every ciphertext and active label of the first batch element as a number."""
    return [number(row) for row in torch.cat((tables[:, :, 0].reshape(-1, 2), labels[:, 0]))]


def differences_with(rows: list[int], delta: int) -> int:
    """How many rows differ by Delta from another one."""
    known = set(rows)
    return sum(row ^ delta in known for row in rows)


def garbled_rows(n: int = 2) -> tuple[list[int], int]:
    circuit = argmax_circuit(CLASSES, BITS, False)
    delta, zero = private_words(2), private_words(circuit.inputs, n, 2)
    delta[0] |= 1
    tables, out = garble(circuit, delta, zero, private_words(2))
    return rows_of_one_element(tables, torch.cat((zero, out))), number(delta)


def test_no_two_ciphertexts_or_labels_differ_by_delta():
    rows, delta = garbled_rows()
    assert len(set(rows)) == len(rows)
    assert differences_with(rows, delta) == 0


def test_one_tweak_for_all_gates_would_be_found(monkeypatch):
    """A wire that enters two ANDs is then hashed twice alike, and the two ciphertexts differ by Delta or by nothing."""
    tweaks = half_gates.tweaks
    monkeypatch.setattr(half_gates, "tweaks", lambda nonce, first, count: (tweaks(nonce, 0, 2) * count)[:count])
    rows, delta = garbled_rows()
    assert differences_with(rows, delta) > 0


def test_no_tweak_is_used_for_two_half_gates(monkeypatch):
    """Tweaks of one garbling, its outputs' included, and those of the next are all different."""
    seen, tweaks = [], half_gates.tweaks

    def recorded(*args):
        found = tweaks(*args)
        seen.extend(found)
        return found

    monkeypatch.setattr(half_gates, "tweaks", recorded)
    circuit = argmax_circuit(CLASSES, BITS, False)
    delta = private_words(2)
    for _ in range(2):
        nonce = private_words(2)
        _, out = garble(circuit, delta, private_words(circuit.inputs, 3, 2), nonce)
        half_gates.share_outputs(circuit, delta, out, nonce)
    assert len(seen) == len(set(seen)) == 2 * (2 * circuit.ands + CLASSES)


def test_Q_holds_one_label_of_each_wire():
    """The labels that Q computes are uniform whatever the values are, and the others are not among what it was sent."""
    bits = [torch.zeros(2 * CLASSES * BITS, 500).long(), torch.ones(2 * CLASSES * BITS, 500).long()]
    circuit, outs = argmax_circuit(CLASSES, BITS, False), []
    for values in bits:
        delta, zero, nonce = private_words(2), private_words(circuit.inputs, 500, 2), private_words(2)
        delta[0] |= 1
        tables, out = garble(circuit, delta, zero, nonce)
        active = half_gates.evaluate(circuit, zero ^ ((-values).unsqueeze(-1) & delta), tables, nonce)
        other = {number(label) for label in (active ^ delta).reshape(-1, 2)}
        sent = {number(row) for row in tables.reshape(-1, 2)} | {number(label) for label in active.reshape(-1, 2)}
        assert not other & sent
        outs.append({("Q", "labels"): active.numpy().reshape(-1)})
        assert torch.equal(active ^ out, ((active ^ out)[..., :1] != 0).long().neg() & delta)
    assert findings(*outs) == []
