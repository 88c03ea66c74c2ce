"""Every protocol that is shipped is held to its word by `check_protocol`, and faults that we know of are found in them.

A result is the reference's for whatever anybody draws, so it tells Q nothing beyond it even with all that Q holds; each
message and each view is the same for secrets that may not be told apart; and each party does its part alone.

In the normal profile a bit of a message that is 1 with probability 1/2 + e/2 is found from e = 8.5% on, with two pairs
of secrets for each party, where elements are experiments; in the long one from 4%, with all pairs and more bits of each
view together, and with 512 runs of a secret where each run is one experiment.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import some
from helpers import STAND_FOR_THEIRS
from own import OWN, Own

from sectorch.mpc.leaky import leaky_drelu, leaky_maxpool_privhfl, leaky_relu_privhfl
from sectorch.mpc.star import truncate as truncate_module
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.shares import concatenate, each
from sectorch.mpc.star.truncate import truncate
from sectorch.testing import Given, ProtocolFault, check_protocol

ANY = Given(low=-(1 << 63), high=(1 << 63) - 1)


def short_options(own: Own) -> dict:
    """Some 16,000 elements of each message of an elementwise protocol; of others, whose runs are experiments, 500 to
    4,000: what they are made of is elementwise, and the long profile has 18,000 of each."""
    fewer = {"exhaustive": 0 if len(own.given) > 3 else 2 if own.deep else 3, "seconds": 1e6} | own.options
    if own.options.get("elementwise", True):
        return fewer | {"elements": 1024, "runs": 16, "pairs": 1 if own.deep else 2}
    return fewer | {"elements": 32 if own.deep else 256 if "guarded" in own.name else 48, "runs": 16, "pairs": 1}


CHEAP = ("share", "reveal", "reveal_to_S", "select", "verified_conv2d")
NORMAL = [own for own in OWN if own.name in (*STAND_FOR_THEIRS, *CHEAP) and not own.deep]
"""One of each kind, and what is cheap. Deep function keys take minutes: a truncation by keys stands for what they
serve. The long profile has all."""


DEAR = {
    "argmax_confident_shares": "maximum", "max_by_fours": "maximum", "guarded_joined": "guarded_limit",
    "normalise": "trigonometric", "truncate_fss": "relu_20", "drelu_thresholds": "relu_20", "ramps_20": "relu_20",
    "verified_relu_20": "guarded_relu", "reveal": "reveal_to_A",
}  # fmt: skip
"""What takes seconds, and is made of what its sibling is made of, which every run has."""
assert set(DEAR) | set(DEAR.values()) <= {own.name for own in NORMAL} and not set(DEAR) & set(DEAR.values())


@pytest.mark.parametrize("own", some(NORMAL, lambda own: own.name not in DEAR), ids=lambda own: own.name)
def test_a_protocol_holds_its_word(own):
    report = check_protocol(own.protocol, own.given, own.reference, **{"seconds": 1e6} | short_options(own))
    assert report.findings == [] and report.false_alarms < 1e-6


@pytest.mark.sectorch_long
@pytest.mark.parametrize("own", OWN, ids=lambda own: own.name)
def test_a_protocol_holds_its_word_in_many_runs(own):
    options = {"exhaustive": 0, "seconds": 1e6} | own.options
    if own.options.get("elementwise", True):
        options |= {"elements": 4096, "runs": 18}
    report = check_protocol(own.protocol, own.given, own.reference, **options)
    assert report.findings == [] and report.false_alarms < 1e-6


# Faults that we know of.


def found_in(protocol, reference, *given, **options) -> dict[str, str]:
    """What is found in it, by check."""
    with pytest.raises(ProtocolFault) as caught:
        check_protocol(protocol, given or [ANY], reference, elements=1024, pairs=2, exhaustive=0, **options)
    return {finding.check: finding.text for finding in caught.value.report.findings}


def drawing(change):
    """A ReLU, of which each draw is what `change` makes of it."""

    def protocol(net, x):
        inner = net.common
        net.common = lambda *place: change(inner, *place)
        return relu(net, x)

    return protocol


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


def test_a_mask_used_twice_is_found():
    """Masks of one pair that repeat leave every message uniform; only the joint view tells."""
    held = {}

    def change(draw, p, q, shape, label, dtype=torch.int64):
        shape = torch.Size(shape)
        if (place := (draw, p, q, shape, dtype)) not in held:
            held[place] = draw(p, q, shape, label, dtype)
        return held[place]

    assert "tells" in found_in(drawing(change), positive)["view"]


@pytest.mark.parametrize(("left_out", "party"), [("b_A", "S"), ("b_S", "A")])
def test_a_mask_left_out_is_found(left_out: str, party: str):
    """Without b, the message e is a share of the sign: uniform, until the party adds its own share."""

    def change(draw, p, q, shape, label, *dtype):
        drawn = draw(p, q, shape, label, *dtype)
        return drawn & 0 if label == left_out else drawn

    assert found_in(drawing(change), positive)["view"].startswith(f"{party} tells")


@pytest.mark.parametrize("name", ["_borrow", "borrow_as_number"])
def test_the_rounding_of_former_versions_is_found(name: str, monkeypatch):
    """Without the borrow a truncation is the floor, or one more, as Q's mask decides."""
    borrow, program = getattr(truncate_module, name), partial(truncate, shift=20, number=name != "_borrow")
    monkeypatch.setattr(truncate_module, name, lambda *v: each(torch.zeros_like, borrow(*v)))
    text = found_in(program, lambda x: (x + (1 << 19)) >> 20, Given(low=-(1 << 60), high=1 << 60))
    assert "which Q knows, decides it" in text["draws"]


def larger(net, x, y):
    """The paper's max-pooling of two values."""
    return leaky_maxpool_privhfl(net, each(concatenate, x[None], y[None]), 51)


@pytest.mark.parametrize(
    ("protocol", "result", "inputs"),
    [
        (leaky_drelu, lambda x: (x >= 0).long(), 1),
        (partial(leaky_relu_privhfl, shift=20), lambda x: ((x + (1 << 19)) >> 20).clamp(min=0), 1),
        (larger, torch.maximum, 2),
    ],
    ids=["drelu", "relu", "maxpool"],
)
def test_paper_mode_does_not_pass(protocol, result, inputs):
    """Two ordinary activations are told apart, not only extremes (against PrivHFL's Theorems 3 to 5)."""
    small = Given(low=-(1 << 50) + 1, high=(1 << 50) - 1)
    text = found_in(protocol, result, *[small] * inputs, uniform=False)
    assert text["view"].startswith("Q tells")
