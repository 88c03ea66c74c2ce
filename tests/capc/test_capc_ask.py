"""The protocol against the plain mechanism, its messages, and what happens when parties are lost."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capc_cases import CLASSES, Known, KnownNoise, Lost, models, voters, votes_of
from cases import long
from frequencies import fits
from scipy.stats import chisquare
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from sectorch.choreography import Party, Phase
from sectorch.choreography.ledger import Profile, Transcript
from sectorch.ckks.convert import finest_scale
from sectorch.dp import ConfidentGNMax, GNMax, LNMax
from sectorch.federated import FederationError
from sectorch.federated.participants import square
from sectorch.federated.parties import TURN, Simulation, Turns
from sectorch.protocols.capc import Panel, SimulatedPanel, TooFewVotersError, Voter
from sectorch.protocols.capc.questions import Question, all_afford, following
from sectorch.session import S

IMAGES = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
SMALL = dict(classes=CLASSES, sample=IMAGES[:1], batch=8)
ROUTES = [("mpc", "yao"), ("mpc", "shares"), ("open", "yao"), ("open", "shares")]


@pytest.mark.parametrize(("inference", "argmax"), ROUTES)
@pytest.mark.parametrize("scale", [0.5, *long(3.0)])
def test_label_is_the_noisy_argmax(inference, argmax, scale):
    """The label for the very noise that the guardian drew. The models' logits differ by far more than 2^-15."""
    found = models(5)
    mechanism = Known(scale)
    answer = Panel(voters(found), inference=inference, argmax=argmax, **SMALL).ask(IMAGES, mechanism)
    (noise,) = mechanism.drawn
    assert noise.shape == (40, CLASSES) and bool(noise.any())
    assert torch.equal(answer.labels, (votes_of(found, IMAGES) + noise).argmax(1))
    assert answer.voters == 5 and answer.lost == [] and answer.votes is None


@pytest.mark.parametrize(("inference", "argmax"), ROUTES)
@pytest.mark.parametrize("threshold", [2, *long(0, 3, 9)])
def test_confident_label_is_that_of_the_mechanism_in_the_clear(inference, argmax, threshold):
    """For the very noise that was drawn: the largest count without the answer's noise decides, and -1 is no answer."""
    found, drawn = models(5), []
    mechanism = ConfidentGNMax(threshold, 1.0, Known(0.7))
    mechanism.__dict__["noise"] = KnownNoise(mechanism.noise, drawn)
    panel = Panel(voters(found), inference=inference, argmax=argmax, **SMALL)
    with Profile() as profile:
        answer = panel.ask(IMAGES, mechanism)
    votes, (check,), (noise,) = votes_of(found, IMAGES), drawn, mechanism.answer.drawn
    answered = mechanism.answered(votes, check)
    assert check.shape == (40,) and noise.shape == (40, CLASSES)
    assert torch.equal(answer.labels, torch.where(answered, (votes + noise).argmax(1), -1))
    assert threshold != 2 or 0 < int(answered.sum()) < 40
    # Nobody but Q is shown anything of it.
    shown = {m.dst.role for m in profile.ledger if m.shows and m.phase is not Phase.SETUP}
    assert shown <= ({"Q"} if inference == "mpc" else {"A", "Q"})


def weighted(logits, name, weights):
    return weights[name] * F.one_hot(logits.argmax(1), CLASSES)


def top_two(logits, name):
    return F.one_hot(logits.topk(2).indices, CLASSES).sum(1)


def test_a_ballot_in_the_clear_gives_no_more_votes_than_the_noise_covers():
    how = dict(vote=top_two, ballot_votes=1)
    panels = (
        Panel(voters(models(2)), inference="open", **how, **SMALL),
        SimulatedPanel(voters(models(2)), CLASSES, **how),
    )
    for panel in panels:
        with pytest.raises(FederationError, match="gives 2 votes in all, and the noise covers 1"):
            panel.ask(IMAGES[:2], GNMax(1.0))


def approval(logits, name):
    return logits > logits.mean(1, keepdim=True)


VOTES = [functools.partial(weighted, weights={f"v{i}": i for i in range(5)}), top_two, approval]


@pytest.mark.parametrize(("inference", "argmax"), ROUTES)
@pytest.mark.parametrize("vote", VOTES)
def test_a_vote_of_ones_own_is_that_in_the_clear(inference, argmax, vote):
    """The label for the noise that was drawn, on shares as by the same function on plain logits. Nobody but Q is shown
    anything, and a party that is lost is left out."""
    found, mechanism = models(5), Known(1.0)
    panel = Panel(voters(found), inference=inference, argmax=argmax, vote=vote, **SMALL)
    with Profile() as profile:
        answer = panel.ask(IMAGES[:8], mechanism)
    with torch.no_grad():
        ballots = [vote(model(IMAGES[:8]), f"v{i}").long() for i, model in enumerate(found)]
    assert torch.equal(answer.labels, (sum(ballots) + mechanism.drawn[0]).argmax(1))
    plain = SimulatedPanel(voters(found), CLASSES, vote).votes(IMAGES[:8])
    assert torch.equal(plain, sum(ballots)) and not torch.equal(plain, votes_of(found, IMAGES[:8]))
    shown = {m.dst.role for m in profile.ledger if m.shows and m.phase is not Phase.SETUP}
    assert shown <= ({"Q"} if inference == "mpc" else {"A", "Q"})
    with Lost("A2", "collect"):
        rest = panel.ask(IMAGES[:8], mechanism)
    assert rest.lost == ["v1"]
    assert torch.equal(rest.labels, (sum(ballots) - ballots[1] + mechanism.drawn[1]).argmax(1))


@pytest.mark.parametrize(
    ("vote", "text"),
    [
        (lambda logits, name: logits, r"whole numbers \(4, 10\), a row .* got torch.float32 \(4, 10\)"),
        (lambda logits, name: logits.argmax(1), r"got torch.int64 \(4,\)"),
        (lambda logits, name: 1, "a tensor computed from the logits, and this one is a int"),
    ],
)
def test_a_vote_that_is_no_ballot(vote, text):
    for panel in (Panel(voters(models(2)), vote=vote, **SMALL), SimulatedPanel(voters(models(2)), CLASSES, vote)):
        with pytest.raises(FederationError, match=text):
            panel.ask(IMAGES[:4], GNMax(1.0))


def test_confident_answers_are_as_frequent_as_they_should_be():
    found, mechanism = models(9, seed=3), ConfidentGNMax(5, 2.0, GNMax(2.0))
    one = IMAGES[:1]
    panel = Panel(voters(found), argmax="shares", inference="open", **SMALL)
    labels = panel.ask(one.expand(3000, 1, 4, 4), mechanism).labels
    votes = votes_of(found, one)[0]
    answered = math.exp(mechanism.log_answered(votes))
    wanted = np.append(answered * mechanism.answer.distribution(votes), 1 - answered)
    seen = np.append(np.bincount(labels[labels >= 0].numpy(), minlength=CLASSES), (labels < 0).sum())
    assert (wanted * 3000 > 5).all() and fits(seen, wanted)
    assert not fits(seen, np.append(wanted[1:-1], [wanted[0], wanted[-1]])), "the control: the classes moved by one"


def test_several_batches_draw_fresh_noise():
    panel, mechanism = Panel(voters(models(3)), argmax="shares", **SMALL), Known(4.0)
    for batch in IMAGES.split(8):
        panel.ask(batch, mechanism)
    assert len({tuple(noise.flatten().tolist()) for noise in mechanism.drawn}) == 5


@pytest.mark.sectorch_long
def test_ckks_label_is_the_noisy_argmax():
    torch.manual_seed(0)
    found = [square(CLASSES, (1, 4, 4)).eval() for _ in range(2)]
    mechanism = Known(0.7)
    with Profile() as profile:
        answer = Panel(voters(found), inference="ckks", **SMALL).ask(IMAGES[:8], mechanism)
    # The query crosses twice to each of two parties: 16 ciphertexts of two polynomials of N words for each prime.
    sent = [m.bytes for m in profile.ledger if m.protocol == "capc_encrypted_query"]
    keys = [m for m in profile.ledger if m.protocol == "ckks_keys"]
    assert len(sent) == len(keys) == 4 and len(set(sent)) == 1 and sent[0] % (16 * 2 * 4096 * 8) == 0
    assert torch.equal(answer.labels, (votes_of(found, IMAGES[:8]) + mechanism.drawn[0]).argmax(1))


@pytest.mark.parametrize("asked", [False, *long(True)])
def test_keys_of_a_long_chain_are_no_finer_than_shares_take(asked: bool):
    """8,192 slots bring a modulus with room for a scale of 2^40, which 20 fraction bits cannot share."""
    torch.manual_seed(0)
    found, mechanism = [square(CLASSES, (1, 4, 4)).eval()], Known(0.7)
    panel = Panel(voters(found), CLASSES, inference="ckks", sample=IMAGES[:1], batch=8192)
    assert panel._keys.parameters.scale_bits == finest_scale(panel.scheme.frac_bits) < 40
    if not asked:
        return
    answer = panel.ask(IMAGES[:4], mechanism)
    assert torch.equal(answer.labels, (votes_of(found, IMAGES[:4]) + mechanism.drawn[0]).argmax(1))


@pytest.mark.sectorch_long
@pytest.mark.parametrize(("inference", "argmax"), ROUTES)
def test_a_thousand_queries(inference, argmax):
    images = torch.rand(1000, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    found, mechanism = models(20), Known(2.0)
    panel = Panel(voters(found), inference=inference, argmax=argmax, **SMALL)
    labels = torch.cat([panel.ask(batch, mechanism).labels for batch in images.split(250)])
    assert torch.equal(labels, (votes_of(found, images) + torch.cat(mechanism.drawn)).argmax(1))


@pytest.mark.parametrize("kind", [GNMax, LNMax])
def test_label_frequencies_fit_the_mechanism(kind):
    """One query 3,000 times through the secure protocol, with fresh noise each time."""
    found, mechanism = models(9, seed=3), kind(2.0)
    one = IMAGES[:1]
    labels = Panel(voters(found), argmax="shares", inference="open", **SMALL).ask(one.expand(3000, 1, 4, 4), mechanism)
    probabilities = mechanism.distribution(votes_of(found, one)[0])
    seen = np.bincount(labels.labels.numpy(), minlength=CLASSES)
    assert (probabilities * 3000 > 5).all() and fits(seen, probabilities)
    assert not fits(seen, kind(4.0).distribution(votes_of(found, one)[0])), "the control: twice the noise"


def test_simulated_panel_is_the_same_mechanism():
    found = models(5)
    panel, mechanism = SimulatedPanel(voters(found), CLASSES), Known(2.0)
    answer = panel.ask(IMAGES, mechanism)
    assert torch.equal(torch.tensor(answer.votes), votes_of(found, IMAGES))
    assert torch.equal(answer.labels, (votes_of(found, IMAGES) + mechanism.drawn[0]).argmax(1))


def test_scikit_learn_votes_in_the_open():
    labels = torch.arange(200) % CLASSES
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(200, 1, 4, 4, generator=draw) + labels.view(-1, 1, 1, 1)
    fitted = [
        model.fit(images.flatten(1).numpy(), labels.numpy())
        for model in (LogisticRegression(max_iter=2000), DecisionTreeClassifier(random_state=0))
    ]
    mechanism = Known(0.3)
    answer = Panel(voters(fitted), inference="open", **SMALL).ask(images[:20], mechanism)
    votes = sum(nn.functional.one_hot(torch.tensor(m.predict(images[:20].flatten(1).numpy())), CLASSES) for m in fitted)
    assert torch.equal(answer.labels, (votes + mechanism.drawn[0]).argmax(1))
    with pytest.raises(
        FederationError, match="v0's LogisticRegression cannot be evaluated on secrets; use inference='open'"
    ):
        Panel(voters(fitted), **SMALL)


@pytest.mark.parametrize(
    ("inference", "argmax", "protocol"),
    [
        ("mpc", "yao", "mask_weight"), ("mpc", "yao", "garbled_argmax_onehot"),
        *(
            pytest.param("mpc", "yao", protocol, marks=pytest.mark.sectorch_long)
            for protocol in ("open_masked", "garbled_pair", "garbled_inputs", "garbled_result")
        ),
        ("mpc", "shares", "open_masked"), ("mpc", "shares", "collect"), ("open", "yao", "collect"),
    ],
)  # fmt: skip
def test_a_party_that_is_lost_is_left_out_of_both_sums(inference, argmax, protocol):
    """Wherever it goes: the rest answers, with the full noise, and the label is theirs."""
    found, mechanism = models(4), Known(0.4)
    panel = Panel(voters(found), inference=inference, argmax=argmax, **SMALL)
    with Lost("A2", protocol):
        answer = panel.ask(IMAGES[:8], mechanism)
    rest = [model for i, model in enumerate(found) if i != 1]
    assert answer.voters == 3 and answer.lost == ["v1"]
    assert torch.equal(answer.labels, (votes_of(rest, IMAGES[:8]) + mechanism.drawn[0]).argmax(1))
    assert mechanism.drawn[0].shape == (8, CLASSES)
    again = panel.ask(IMAGES[:8], mechanism)
    assert again.voters == 3 and again.lost == ["v1"]


@pytest.mark.parametrize("argmax", ["yao", "shares"])
def test_the_first_party_is_lost(argmax):
    """Another one takes part in step 3 on shares."""
    found, mechanism = models(3), Known(0.4)
    panel = Panel(voters(found), argmax=argmax, **SMALL)
    with Lost("A1", "open_masked"):
        answer = panel.ask(IMAGES[:8], mechanism)
    assert answer.lost == ["v0"]
    assert torch.equal(answer.labels, (votes_of(found[1:], IMAGES[:8]) + mechanism.drawn[0]).argmax(1))


def test_too_few_left_is_refused_before_any_noise():
    found, mechanism = models(3), Known(0.4)
    panel = Panel(voters(found), argmax="shares", **SMALL)
    with Lost("A1", "open_masked"), Lost("A3", "collect"), Transcript() as transcript:
        with pytest.raises(
            TooFewVotersError, match="1 of 3 answering parties voted and an answer needs 2; lost: v0, v2"
        ):
            panel.ask(IMAGES[:4], mechanism, least=2)
    assert mechanism.drawn == []
    assert not [line for line, _ in transcript.lines if line.label == "result"]


def test_nobody_learns_a_vote_but_q_the_label():
    """What the messages of a whole run declare, and that nothing of the histogram is opened."""
    with Profile() as profile:
        Panel(voters(models(3)), **SMALL).ask(IMAGES[:4], GNMax(1.0))
    shown = {(m.dst.role, m.protocol, m.label) for m in profile.ledger if m.shows}
    assert ("Q", "garbled_argmax_noisy", "decoding") in shown
    # What else says that it shows something are public keys and random group elements of the key agreement.
    for role, protocol, _ in shown - {("Q", "garbled_argmax_noisy", "decoding")}:
        assert protocol in ("garbled_pair", "seed"), (role, protocol)
    with Profile() as profile:
        Panel(voters(models(2)), inference="open", **SMALL).ask(IMAGES[:4], GNMax(1.0))
    assert ("A", "capc_open_query", "query_open") in {
        (m.dst.role, m.protocol, m.label) for m in profile.ledger if m.shows
    }


def test_messages_look_uniform_and_differ_between_runs():
    """Every ring element that crosses in steps 1b and 2 is uniform: its top byte, over two runs of one input."""
    views = []
    for _ in range(2):
        panel = Panel(voters(models(4)), **SMALL)
        with Transcript() as transcript:
            panel.ask(IMAGES, GNMax(1.0))
        own = ("garbled_inputs", "garbled_result")
        views.append(torch.cat([value.flatten() for line, value in transcript.lines if line.protocol in own]))
    assert not bool((views[0] == views[1]).any())
    tops = np.bincount((torch.cat(views).numpy() >> 56) & 255, minlength=256)
    assert chisquare(tops).pvalue > 1e-6


def test_cost_of_steps_1b_and_2():
    with Profile() as profile:
        Panel(voters(models(3)), **SMALL).ask(IMAGES, GNMax(1.0))
    cost = lambda name: sum(m.bytes for m in profile.ledger if m.protocol == name)
    assert cost("garbled_inputs") == 3 * 16 * 40 * CLASSES and cost("garbled_result") == 3 * 8 * 40 * CLASSES
    with Profile() as profile:
        Panel(voters(models(3)), argmax="shares", **SMALL).ask(IMAGES, GNMax(1.0))
    assert cost("collect") == 3 * 8 * 40 * CLASSES and not cost("garbled_inputs")


def test_errors():
    found = models(2)
    with pytest.raises(
        FederationError, match="inference is mpc, ckks or open and argmax yao or shares, got 'tee', 'yao'"
    ):
        Panel(voters(found), CLASSES, inference="tee")
    with pytest.raises(FederationError, match="voters of different names"):
        Panel([Voter("a", found[0]), Voter("a", found[1])], CLASSES)
    with pytest.raises(FederationError, match="name sample"):
        Panel(voters(found), CLASSES, inference="ckks")
    with pytest.raises(FederationError, match=r"v0's model gives \(4, 10\) for 4 queries, but 7 classes need \(4, 7\)"):
        Panel(voters(found), 7).ask(IMAGES[:4], GNMax(1.0))
    with pytest.raises(FederationError, match="v0's model cannot be evaluated under encryption"):
        Panel(voters(found), inference="ckks", **SMALL)
    with pytest.raises(FederationError, match="at least one voter"):
        SimulatedPanel([], CLASSES)


def test_every_declared_message_is_sent_and_no_other():
    """The protocols of this package against their own declarations, over all routes."""
    from sectorch.choreography import PROTOCOLS

    with Profile() as profile:
        for inference in ("mpc", "open", "ckks"):
            found = models(2) if inference != "ckks" else [square(CLASSES, (1, 4, 4)).eval()]
            Panel(voters(found), inference=inference, argmax="shares", **SMALL | {"batch": 2}).ask(
                IMAGES[:2], GNMax(1.0)
            )
        names = ["p1", "p2"]
        with Simulation().runtime(TURN, {**{Party(name, "C"): name for name in names}, S: "S"}) as runtime:
            turns, question = Turns(names, runtime), Question(3, "89" * 16, 4)
            assert following(turns, "p2", question, 9) == (question, 9)
            assert all_afford(turns, {"p1": 2, "p2": 4}) == {"p1": 2, "p2": 4}
    sent = {(m.protocol, m.label, m.src.role, m.dst.role) for m in profile.ledger if m.protocol.startswith("capc")}
    specs = [spec for name, spec in PROTOCOLS.items() if name.startswith("capc")]
    assert sent == {(spec.name, m.label, m.src, m.dst) for spec in specs for m in spec.messages}
