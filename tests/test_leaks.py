"""What the parties see: uniform bytes, the same for every secret, and no two of them related.

The randomness is cryptographic and cannot be seeded, so bounds are set for sound protocols to fail less than once in
10^6 runs of this file: each chi-square, Kolmogorov-Smirnov and bit-count p-value is compared with 10^-12, and fewer
than 200,000 of them are computed (Bonferroni); each correlation of two bits with eight standard deviations (10^-15),
and fewer than 4 * 10^7 pairs are formed.

What would be found: the count of ones in n bits of one place has a standard deviation of sqrt(n) / 2, and 10^-12 on two
sides is 7.13 of them. A bit that is 1 with probability 1/2 + e/2 is therefore found with probability 0.9999 (3.72
standard deviations more) from e = (7.13 + 3.72) / sqrt(n): 4.9% for the 49,152 elements of a message. Leaks that matter
are far beyond: the paper's DReLU gives p-values of 10^-100 and less.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from helpers import CASES, SHIPPED, SOUND, play, ring_values, run, world_of
from scipy import stats

from sectorch.choreography import Net
from sectorch.choreography.ledger import Transcript
from sectorch.mpc.leaky import leaky_drelu, leaky_relu_privhfl
from sectorch.mpc.star.relu import relu
from sectorch.ring.bitplanes import planes, rows
from sectorch.session import Session

P_VALUE = 1e-12
SIGMAS = 8.0

DEEP = ("relu_fss", "relu_fss_20", "ramps_fss", "ramps_fss_20", "maximum_fss", "signs")
"""Keys of 43 or 63 levels have more bits than a run has elements; `gate_high` is the same protocol in 13 levels."""

# Bytes of every message.


def zeros(shape, bits: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def structured(shape, bits: int) -> torch.Tensor:
    """As far from zeros as can be: both ends of the range in turn, so that signs, sizes and low bits all differ."""
    top = (1 << bits) - 1
    return torch.where(torch.arange(shape.numel()) % 2 == 0, top, -top + 2).view(shape)


def received(case, secret, runs: int, n: int) -> dict[tuple[str, str], np.ndarray]:
    """All that Q, the A's and S are sent in several fresh sessions, but for what is theirs to learn."""
    view = defaultdict(list)
    for _ in range(runs):
        inputs = [secret(torch.Size(shape), case.bits) for shape in case.shapes(n)]
        transcript = Transcript()
        with transcript:
            run(case.program, *inputs, session=Session(case.answering))
        for role in "QAS":
            for line, value in transcript.received(role):
                if not line.shows:
                    view[role, f"{line.path}/{line.label} ({value.dtype})"].append(value.numpy().reshape(-1))
    return {key: np.concatenate(values) for key, values in view.items()}


BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int64)


def histogram(values: np.ndarray) -> np.ndarray:
    """How often each byte stands in each place of a word: [bytes of a word, 256]."""
    words = values.view(np.uint8).reshape(len(values), -1)
    return np.stack([np.bincount(place, minlength=256) for place in words.T])


def most_biased_bit(counts: np.ndarray) -> float:
    """The p-value of the bit of a word whose ones are furthest from a half; of packed bits, all bits are one's."""
    ones = (counts @ BITS).ravel()
    n = np.append(np.full(len(ones), counts[0].sum()), 8 * counts.sum())
    return float(2 * stats.norm.sf((np.abs(2 * np.append(ones, ones.sum()) - n) / np.sqrt(n)).max()))


def findings(first: dict, second: dict) -> list[str]:
    """How two views, of runs on two secrets, give something away; empty for a sound protocol."""
    found = [f"only one secret has {key}" for key in first.keys() ^ second.keys()]
    for key in first.keys() & second.keys():
        places = histogram(first[key]), histogram(second[key])
        a, b = (counts.sum(axis=0) for counts in places)
        for name, counts in zip(("the first", "the second"), places, strict=True):
            if stats.chisquare(counts.sum(axis=0)).pvalue < P_VALUE:
                found.append(f"{key} is not uniform on {name} secret")
            if most_biased_bit(counts) < P_VALUE:
                found.append(f"a bit of {key} is biased on {name} secret")
        used = (a + b) > 0
        if used.sum() > 1 and stats.chi2_contingency(np.stack([a, b])[:, used]).pvalue < P_VALUE:
            found.append(f"bytes of {key} tell the secrets apart")
        samples = (v[: 1 << 17].astype(np.float64) for v in (first[key], second[key]))
        if stats.ks_2samp(*samples, method="asymp").pvalue < P_VALUE:
            found.append(f"values of {key} tell the secrets apart")
    return found


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_messages_are_uniform_and_the_same_for_every_secret(case):
    n = 1 << (14 if case.elementwise else 12)
    views = [received(case, secret, 3 if case.elementwise else 6, n) for secret in (zeros, structured)]
    for view in views:
        size = {role: sum(v.nbytes for (r, _), v in view.items() if r == role) for role in "QAS"}
        assert size["Q"] == 0, "Q is sent nothing but results"
        assert size["S"] >= 1e5
        assert size["A"] == 0 or size["A"] >= 1e5, "A is sent nothing by share and reveal, and enough by the others"
    assert findings(*views) == []


def test_every_protocol_is_among_the_cases():
    ran = set()
    for case in SOUND:
        transcript = Transcript()
        with transcript:
            run(case.program, *case.inputs(64), session=Session(case.answering))
        ran |= {name for line, _ in transcript.lines for name in line.path.split("/")}
    assert ran == {name for name in SHIPPED if not name.startswith("leaky_")}


def test_nothing_but_results_keys_and_paper_mode_is_shown_to_anybody():
    shown = {(spec.name, m.label, m.dst) for spec in SHIPPED.values() for m in spec.messages if m.shows}
    assert {entry for entry in shown if entry[0] != "seed"} == {
        ("reveal", "result", "Q"),
        ("reveal_to_A", "x_S", "A"),
        ("reveal_to_S", "x_A", "S"),
        ("aggregate", "sum", "Q"),
        ("aggregate_noisy", "noisy_sum", "Q"),
        ("guard", "key", "Q"),  # one bit, whether there is a result
        ("leaky_drelu", "z", "Q"),
    }


# The joint view. All elements of a run hold the same secret, so that each is a sample of the same experiment.


class View:
    """The bits of all that a party drew, was sent and sent itself, as vectors over the elements of one run."""

    def __init__(self, n: int):
        self.n = n
        self.drawn_and_received: list[torch.Tensor] = []
        self.sent: list[torch.Tensor] = []

    def vectors(self, planes_of_ring: list[int] | slice, sent: bool = False) -> dict[int, np.ndarray]:
        """Rows of packed bits, by length: of ring elements the named planes, of packed words every row."""
        found = defaultdict(list)
        for value in self.drawn_and_received + (self.sent if sent else []):
            if value.numel() == 0:
                continue
            if value.shape[-2:] == (self.n, 2):  # blocks of two words
                value = value.movedim(-1, 0).contiguous()
            if value.shape[-1] == self.n:
                width = 32 if value.dtype == torch.int32 else 64
                packed = planes(rows(value.to(torch.int64)))[:width][planes_of_ring]
            else:
                packed = value.reshape(-1, value.shape[-1])
            found[64 * packed.shape[-1]].append(packed.numpy())
        return {length: np.concatenate(parts) for length, parts in found.items()}


def views_of(program, inputs, monkeypatch, session: Session, n: int) -> dict[str, View]:
    """Run a program once; what each party knows of it, but for results that are shown to it."""
    views, common = defaultdict(lambda: View(n)), Net.common

    def recorded(net, p, q, *args, **kwargs):
        drawn = common(net, p, q, *args, **kwargs)
        for party in (p, q):
            views[party.name].drawn_and_received.append(drawn._value.clone())
        return drawn

    with monkeypatch.context() as patch, Transcript() as transcript:
        patch.setattr(Net, "common", recorded)
        run(program, *inputs, session=session)
    for line, value in transcript.lines:
        views[line.src.name].sent.append(value)
        if not line.shows:
            views[line.dst.name].drawn_and_received.append(value)
    return views


class Span:
    """Sums mod 2 of bit vectors, the constant one among them."""

    def __init__(self, vectors: np.ndarray):
        self.basis: dict[int, int] = {}
        self.rank = 0
        self.add((1 << 8 * vectors[0].nbytes) - 1)
        for vector in vectors:
            self.rank += self.add(int.from_bytes(vector.tobytes(), "little"))

    def reduced(self, vector: int) -> int:
        while vector and (top := vector.bit_length()) in self.basis:
            vector ^= self.basis[top]
        return vector

    def add(self, vector: int) -> bool:
        vector = self.reduced(vector)
        if vector:
            self.basis[vector.bit_length()] = vector
        return vector != 0


def largest_correlation(vectors: np.ndarray) -> float:
    """Between any two bits, or of any bit with a constant, in standard deviations."""
    signs = np.unpackbits(vectors.view(np.uint8), axis=1).astype(np.float32) * 2 - 1
    signs = np.concatenate([signs, np.ones((1, signs.shape[1]), np.float32)])
    return float(np.abs(np.triu(signs @ signs.T, 1)).max()) / signs.shape[1] ** 0.5


def relations(view: View) -> list[str]:
    """Bits drawn and received that are not independent and uniform.

    v random vectors of m bits are dependent with probability 2^(v - m), here below 2^-64.
    """
    found = []
    for length, vectors in view.vectors(slice(None)).items():
        assert len(vectors) + 64 < length
        if missing := len(vectors) - Span(vectors).rank:
            found.append(f"{missing} of {len(vectors)} bits follow from others")
    for vectors in view.vectors([0, 1, 2, 3, -2, -1]).values():
        if (sigmas := largest_correlation(vectors)) > SIGMAS:
            found.append(f"two bits are correlated by {sigmas:.0f} standard deviations")
    return found


def distinctions(first: View, second: View) -> list[str]:
    """Sums mod 2 of bits that a party knows, its own messages included, that tell two secrets apart.

    What it sends follows in part from what it knows. But the number of such relations may not depend on the secret, and
    over both runs together no sum may be 0 for one secret and 1 for the other.
    """
    found = []
    both = [view.vectors(slice(None), sent=True) for view in (first, second)]
    for length in both[0].keys() | both[1].keys():
        one, other = (vectors[length] for vectors in both)
        assert len(one) + 64 < length
        if (ranks := (Span(one).rank, Span(other).rank)) and ranks[0] != ranks[1]:
            found.append(f"{ranks} independent bits for two secrets")
        # Which run an element belongs to: zeros for the first, ones for the second.
        if Span(np.concatenate([one, other], axis=1)).reduced((1 << 2 * length) - (1 << length)) == 0:
            found.append(f"a sum of {len(one)} bits is the secret")
    return found


ELEMENTWISE = [case for case in SOUND if case.elementwise and case.name not in DEEP]
WIDE = (
    "drelu_thresholds", "ramps", "ramps_20", "normalise", "trigonometric", "trigonometric_wide", "max_tree",
    "gate_high", "truncate_fss",
)  # fmt: skip


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_no_bits_of_a_view_are_related(case, monkeypatch):
    n = 1 << (14 if case.name in WIDE else 12)
    session, secret = Session(case.answering), ((1 << case.bits) - 1) // 3 * 2 + 1
    zero, other = (
        views_of(case.program, [torch.full(s, v) for s in case.shapes(n)], monkeypatch, session, n)
        for v in (0, -secret)
    )
    for party in (*session.answering, session.S):
        assert relations(other[party.name]) == []
        assert distinctions(zero[party.name], other[party.name]) == []


def relu_views(monkeypatch, session: Session, n: int) -> list[dict[str, View]]:
    secrets = (torch.full((n,), 5), torch.full((n,), -(1 << 50)))
    return [views_of(lambda w, x: relu(w.net, x), [x], monkeypatch, session, n) for x in secrets]


def test_a_mask_used_twice_would_be_found(monkeypatch):
    """Masks of one pair that repeat leave every message uniform; only the joint view tells."""
    n, session, held = 1 << 13, Session(), {}
    inner = session.runtime.draw

    def draw(pair, label, call, draw, count):
        if (pair, call) not in held:
            held[pair, call] = inner(pair, label, call, draw, 1 << 20)
        return held[pair, call][:count].clone()

    session.runtime.draw = draw
    views = relu_views(monkeypatch, session, n)[1]
    assert all(any("follow from others" in f for f in relations(views[party])) for party in "AS")


@pytest.mark.parametrize(("label", "party"), [("select/b_A", "S"), ("select/b_S", "A")])
def test_a_mask_left_out_would_be_found(label: str, party: str, monkeypatch):
    """Without b, the message e is a share of the sign: uniform, until the party adds its own share."""
    session = Session()
    inner = session.runtime.draw

    def draw(pair, name, call, draw, count):
        words = inner(pair, name, call, draw, count)
        return words.zero_() if name == label else words

    session.runtime.draw = draw
    views = relu_views(monkeypatch, session, 1 << 12)
    found = distinctions(*(view[party] for view in views))
    assert any("is the secret" in f for f in found)


# The paper's DReLU.


def seen_by_Q(session: Session, program, x: torch.Tensor) -> torch.Tensor:
    """Q's view of the paper's DReLU: the message z, and the mask delta that Q draws itself."""
    deltas, inner = [], session.runtime.draw

    def draw(pair, label, call, draw, count):
        words = inner(pair, label, call, draw, count)
        if label == "leaky_drelu/delta":
            assert session.Q in pair
            deltas.append(words.clone())
        return words

    session.runtime.draw = draw
    transcript = Transcript()
    with transcript, session.call(session.answering[0]) as net:
        play(world_of(session, net), program, [x])
    (z,) = [value for line, value in transcript.received("Q") if line.label == "z"]
    return z.view(-1) + deltas[0]


@pytest.mark.parametrize("program", [lambda w, x: leaky_drelu(w.net, x), lambda w, x: leaky_relu_privhfl(w.net, x, 20)])
def test_paper_mode_does_not_pass(program):
    n = 1 << 14
    first, second = (
        {("Q", "z + delta"): seen_by_Q(Session(), program, secret(torch.Size((n,)), 50)).numpy()}
        for secret in (zeros, structured)
    )
    found = findings(first, second)
    assert any("not uniform on the first" in f for f in found)
    assert any("not uniform on the second" in f for f in found)
    assert any("bytes of" in f and "apart" in f for f in found)
    assert any("values of" in f and "apart" in f for f in found)


def test_two_ordinary_activations_are_told_apart_in_paper_mode():
    """Not only extremes: the same layer on two inputs that differ by a factor of two in size."""
    activations = ring_values((1 << 14,), 48, seed=3)
    program = lambda w, x: leaky_drelu(w.net, x)
    views = [{("Q", "z + delta"): seen_by_Q(Session(), program, x).numpy()} for x in (activations, 2 * activations)]
    assert any("apart" in f for f in findings(*views))


def test_the_attack_on_paper_mode():
    """Q recovers the sign and the zeros of every hidden activation, and their size but for a factor of at most 2^12."""
    generator = torch.Generator().manual_seed(1)
    # Activations as after a linear layer: normal with 40 fraction bits, a tenth of them zero.
    x = (torch.randn(20_000, generator=generator, dtype=torch.float64) * 2.0**40).to(torch.int64)
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    z = seen_by_Q(Session(), lambda w, x: leaky_relu_privhfl(w.net, x, 20), x)
    assert torch.equal(z > 0, x > 0)
    assert torch.equal(z < 0, x < 0)
    assert torch.equal(z == 0, x == 0)
    # log|z| = log|x| + log r: the two have about the same spread (1.1 and 1.0 for a normal x and a uniform r), so the
    # correlation is near 1 / sqrt(2); 20,000 samples leave it an uncertainty of 0.01.
    nonzero = x != 0
    assert stats.spearmanr(z[nonzero].abs().numpy(), x[nonzero].abs().numpy()).statistic > 0.5
    assert ((z.abs() >= x.abs()) & (z.abs() <= x.abs() << 12)).all()


def test_the_exact_relu_shows_Q_nothing_of_it():
    transcript = Transcript()
    with transcript:
        run(lambda w, x: relu(w.net, x, 20), ring_values((100,), 50), session=Session())
    after_seeding = [line for line, _ in transcript.received("Q") if line.protocol != "seed"]
    assert [(line.protocol, line.label) for line in after_seeding] == [("reveal", "result")]
    assert {case.name for case in CASES} - {case.name for case in SOUND} == {"leaky_drelu", "leaky_relu"}
