"""Client masks: they cancel exactly, hide what they should, and dropouts are met as the module says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from perturbation_cases import NETS, batches, one_round, plain_gradient, relative_error

from sectorch.errors import FixedPointRangeError
from sectorch.protocols.perturbation import (
    ClientMasks,
    DroppedClientError,
    Federation,
    MaskError,
    Scheme,
    WeightError,
    cohort,
)

ROUND = b"r" * 16


def setup(clients: int = 3, double: bool = False, frac_bits: int = 40):
    torch.manual_seed(6)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model, "mse", frac_bits=frac_bits)
    parts = batches((12,), 4, "mse", clients, torch.float64)
    weights = [len(x) for x, _ in parts]
    noisy, key = scheme.perturb(model.state_dict())
    masks = cohort(clients, double)
    updates = [
        scheme.client_step(noisy, part, masks=mask, share=weight / sum(weights))
        for part, mask, weight in zip(parts, masks, weights, strict=True)
    ]
    return model, scheme, parts, weights, noisy, key, masks, updates


def test_double_masks_give_the_gradient():
    torch.manual_seed(7)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model)
    parts = batches((12,), 4, "cross_entropy", 4, torch.float64)
    expected = plain_gradient(scheme, model, parts, [len(x) for x, _ in parts])
    assert relative_error(one_round(scheme, model, parts, masked=True, double=True), expected) <= 1e-6


def test_a_dropped_client_is_recovered_by_revealing_seeds():
    model, scheme, parts, weights, _, key, masks, updates = setup(4, double=True)
    openings = [masks[k].open(key.round, [0, 2, 3]) for k in (0, 2, 3)]
    chosen = [0, 2, 3]
    found = scheme.recover(key, [updates[k] for k in chosen], [weights[k] for k in chosen], openings)
    expected = plain_gradient(scheme, model, [parts[k] for k in chosen], [weights[k] for k in chosen])
    assert relative_error(found, expected) <= 1e-6


def test_a_dropped_client_without_double_masks_is_a_redo():
    model, scheme, _, weights, _, key, _, updates = setup(3)
    with pytest.raises(DroppedClientError, match=r"clients \[1\] sent nothing.*redo the round without them"):
        scheme.recover(key, [updates[0], updates[2]], [weights[0], weights[2]])
    parts = batches((12,), 4, "mse", 2, torch.float64)
    found = one_round(scheme, model, parts, masked=True)
    assert relative_error(found, plain_gradient(scheme, model, parts, [4, 5])) <= 1e-6


def test_openings_are_asked_for():
    _, scheme, _, weights, _, key, masks, updates = setup(3, double=True)
    with pytest.raises(DroppedClientError, match="need this round's opening of each"):
        scheme.recover(key, updates, weights)
    openings = [mask.open(key.round, [0, 1, 2]) for mask in masks]
    with pytest.raises(DroppedClientError, match=r"with the dropped \[1\]"):
        scheme.recover(key, [updates[0], updates[2]], [weights[0], weights[2]], [openings[0], openings[2]])


def test_a_round_is_masked_and_opened_once():
    _, scheme, parts, _, noisy, key, masks, _ = setup(3, double=True)
    with pytest.raises(MaskError, match="masked already"):
        scheme.client_step(noisy, parts[0], masks=masks[0], share=0.5)
    masks[0].open(key.round, [0, 1])
    with pytest.raises(MaskError, match="opened already"):
        masks[0].open(key.round, [0, 2])
    with pytest.raises(MaskError, match="single survivor"):
        masks[1].open(key.round, [1])
    with pytest.raises(MaskError, match="took part in and survived"):
        masks[1].open(key.round, [0, 2])
    with pytest.raises(MaskError, match="took part in and survived"):
        masks[1].open(b"x" * 16, [0, 1])


def test_mixtures_and_wrong_weights_are_refused():
    _, scheme, parts, weights, noisy, key, _, updates = setup(3)
    plain = scheme.client_step(noisy, parts[0])
    with pytest.raises(MaskError, match="some updates are masked"):
        scheme.recover(key, [plain, *updates[1:]], weights)
    with pytest.raises(MaskError, match="each once"):
        scheme.recover(key, [updates[0], updates[0], updates[2]], weights)
    with pytest.raises(WeightError, match="masked its update for a share"):
        scheme.recover(key, updates, [1, 1, 1])
    with pytest.raises(MaskError, match="one cohort"):
        scheme.recover(key, [*updates[:2], replace(updates[2], cohort=(0, 1, 2, 3))], weights)
    with pytest.raises(WeightError, match=r"in \(0, 1\]"):
        scheme.client_step(noisy, parts[0], masks=cohort(2)[0], share=0.0)


def test_a_term_beyond_the_ring_is_refused_and_uses_no_mask():
    model, _, parts, *_ = setup(2)
    scheme = Scheme(model, "mse", frac_bits=60)
    members = cohort(2)
    noisy, _ = scheme.perturb(model.state_dict())
    with pytest.raises(FixedPointRangeError, match="60 fraction bits"):
        scheme.client_step(noisy, (parts[0][0] * 1e3, parts[0][1]), masks=members[0], share=0.5)
    members[0].words(noisy.round, 1)


def test_the_next_round_uses_what_was_drawn_ahead():
    """A federation's clients: from the second round on no stream is drawn between a model and its update."""
    model, scheme, parts, weights, *_ = setup(3)
    federation = Federation(scheme, 3)
    for drawn in (3, 0, 0):
        with pytest.MonkeyPatch.context() as patch:
            calls, own = [], ClientMasks._drawn
            patch.setattr(ClientMasks, "_drawn", lambda self, *a, own=own, c=calls: c.append(self) or own(self, *a))
            patch.setattr(
                Federation, "_prepare", lambda self, *a, f=Federation._prepare, c=calls: c.append(None) or f(self, *a)
            )
            found = federation.round(model.state_dict(), parts, weights)
        assert calls.index(None) == drawn
        assert len(calls) == drawn + 1 + 3
        assert relative_error(found, plain_gradient(scheme, model, parts, weights)) <= 1e-6


def test_a_sparse_round_with_who_drops_out():
    """Survivors open only what they shared with the dropped, and the gradient is that of the survivors."""
    torch.manual_seed(3)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model, "mse")
    shares = batches((12,), 4, "mse", 9, torch.float64)
    weights = [len(x) for x, _ in shares]
    noisy, key = scheme.perturb(model.state_dict())
    masks = cohort(9, True, b"", 4)
    for member in masks[::2]:
        scheme.prepare(noisy, member)
    updates = [
        scheme.client_step(noisy, part, masks=mask, share=weight / sum(weights))
        for part, mask, weight in zip(shares, masks, weights, strict=True)
    ]
    came = [0, 1, 3, 4, 6, 7, 8]
    openings = [masks[k].open(key.round, came) for k in came]
    assert sorted({peer for opening in openings for peer in opening.pairs}) == [2, 5]
    assert any(len(opening.pairs) < 2 for opening in openings)
    found = scheme.recover(key, [updates[k] for k in came], [weights[k] for k in came], openings)
    expected = plain_gradient(scheme, model, [shares[k] for k in came], [weights[k] for k in came])
    assert relative_error(found, expected) <= 1e-6
    short = [type(o)(o.client, o.round, o.own, {}) for o in openings]
    with pytest.raises(DroppedClientError, match="that it shared a mask with"):
        scheme.recover(key, [updates[k] for k in came], [weights[k] for k in came], short)


def test_a_federation_with_a_sparse_graph():
    torch.manual_seed(4)
    model = NETS["mlp3"][0]().double()
    scheme = Scheme(model)
    shares = batches((12,), 4, "cross_entropy", 8, torch.float64)
    expected = plain_gradient(scheme, model, shares, [len(x) for x, _ in shares])
    for double in (False, True):
        assert relative_error(one_round(scheme, model, shares, True, double, degree=4), expected) <= 1e-6
    with pytest.raises(MaskError, match="an even number of neighbours"):
        one_round(scheme, model, shares, True, degree=3)
