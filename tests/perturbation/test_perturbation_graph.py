"""The sparse graph of the masks: its shape, what it withstands, and what the server and enough clients see."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import long
from hypothesis import given
from hypothesis import strategies as st
from perturbation_cases import NETS, batches, one_round, plain_gradient, relative_error
from test_perturbation_masks import ROUND, encoded, unmask

from sectorch.protocols.perturbation import ClientMasks, DroppedClientError, MaskError, Scheme, cohort
from sectorch.protocols.perturbation.attacks import fewest_that_cut
from sectorch.protocols.perturbation.masks import neighbours, parts


@given(st.integers(2, 24), st.sampled_from([None, 2, 4, 6]), st.binary(max_size=16))
def test_each_client_has_as_many_neighbours(clients, degree, session):
    graph = neighbours(range(clients), degree, session)
    expected = clients - 1 if degree is None else min(degree, clients - 1)
    assert all(len(near) == expected and client not in near for client, near in graph.items())
    assert all(client in graph[other] for client, near in graph.items() for other in near)
    assert parts(graph) == [list(range(clients))]
    assert graph == neighbours(list(range(clients))[::-1], degree, session), "all clients draw the same"


def test_graphs_of_two_sessions_differ():
    graphs = [neighbours(range(50), 12, bytes([n])) for n in range(20)]
    assert all(a != b for a, b in itertools.combinations(graphs, 2))


def test_every_pair_is_an_edge_as_often():
    """The switches mix: over 400 graphs of 12 clients with 4 neighbours each of the 66 pairs is an edge with 4 / 11,
    within 6 standard deviations."""
    edges = torch.zeros(12, 12)
    for n in range(400):
        for client, near in neighbours(range(12), 4, n.to_bytes(2, "big")).items():
            edges[client, list(near)] += 1
    apart = edges[~torch.eye(12, dtype=torch.bool)]
    assert (apart - 400 * 4 / 11).abs().max() < 6 * (400 * 4 / 11 * 7 / 11) ** 0.5


@pytest.mark.parametrize("clients, degree", [(8, 4), (9, 4), (12, 6)])
def test_fewest_that_cut_are_those_of_trying_all(clients, degree):
    """Menger's count against every set of colluders there is."""
    for session in (b"a", b"b", b"c"):
        graph = neighbours(range(clients), degree, session)
        fewest = fewest_that_cut(graph)
        trials = (set(gone) for size in range(clients - 1) for gone in itertools.combinations(range(clients), size))
        assert fewest == next(len(gone) for gone in trials if len(parts(graph, gone)) > 1)
    assert fewest_that_cut(neighbours(range(clients), None, b"")) == clients - 1


@pytest.mark.parametrize("sessions", [2, *long(10)])
def test_fifty_clients_with_twelve_neighbours_withstand_eleven(sessions: int):
    """What docs/perturbation.md says of 50 clients: of ten sessions' graphs each has connectivity 12."""
    for session in range(sessions):
        assert fewest_that_cut(neighbours(range(50), 12, bytes([session]))) == 12


def seen_of(members: list[ClientMasks], graph, victim: int, colluders: list[int], update: torch.Tensor) -> torch.Tensor:
    """What the server finds of an update when the colluders tell it all their pair seeds of the round."""
    opened = [members[k].open(ROUND, [k, *(c for c in graph if c != victim and c != k)]) for k in colluders]
    found = update.clone()
    for opening in opened:
        if victim in opening.pairs:
            known = type(opening)(victim, ROUND, opening.pairs[victim], {})
            words = unmask(torch.zeros_like(update), [known])  # minus the pair's stream
            found = found + words if opening.client > victim else found - words
    return found


def test_all_neighbours_uncover_a_client_and_all_but_one_do_not():
    """The attack: 7 of 16 clients are honest, and the last neighbour decides. One short, every bit stays even."""
    graph = neighbours(range(16), 4, b"s")
    victim = 5
    values = torch.randn(1 << 14, dtype=torch.float64)
    for missing in (0, 1):
        members = cohort(16, True, b"s", 4)
        own = members[victim].words(ROUND, len(values))
        for member in members:
            if member.client != victim:
                member.words(ROUND, len(values))
        own_mask = members[victim].open(ROUND, range(16))
        update = unmask(own + encoded(values, 1.0), [type(own_mask)(victim, ROUND, own_mask.own, {})])
        colluders = list(graph[victim])[missing:]
        found = seen_of(members, graph, victim, colluders, update)
        assert torch.equal(found, encoded(values, 1.0)) == (missing == 0)
        if missing:
            for bit in range(64):
                ones = int((found >> bit & 1).sum())
                assert abs(ones - (1 << 13)) <= 6 * (1 << 14) ** 0.5 / 2
        assert (len(parts(graph, colluders)) > 1) == (missing == 0)


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


def test_a_sparse_client_survives_its_process():
    member = cohort(9, False, b"x", 4)[3]
    again = ClientMasks.from_secret_state(member.secret_state())
    assert again.peers == member.peers and len(member.peers) == 4
    assert torch.equal(again.words(ROUND, 9), member.words(ROUND, 9))
