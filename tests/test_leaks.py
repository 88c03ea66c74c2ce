"""What our messages are declared to show, and the attack on the one protocol that shows too much.

That nothing else tells anybody anything, and results nothing but what they are, is for `check_protocol` to say: each
protocol is held to it in `testing/test_own_protocols.py`.
"""

from __future__ import annotations

import torch
from helpers import CASES, SHIPPED, play, ring_values, run, world_of
from scipy import stats

from sectorch.choreography.ledger import Transcript
from sectorch.mpc.leaky import leaky_relu_privhfl
from sectorch.mpc.star.relu import relu
from sectorch.session import Session


def test_every_protocol_is_in_the_list():
    ran = set()
    for case in CASES:
        if not case.leaks:
            transcript = Transcript()
            with transcript:
                run(case.program, *case.inputs(64), session=Session(case.answering))
            ran |= {name for line, _ in transcript.lines for name in line.path.split("/")}
    assert ran == {name for name in SHIPPED if not name.startswith("leaky_")}
    assert {case.name for case in CASES if case.leaks} == {"leaky_drelu", "leaky_relu", "leaky_maxpool"}


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
