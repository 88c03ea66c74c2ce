"""Proposition 6.8 as properties of routes, and refusals."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sectorch.protocols.secsv.settings import LEVELS, Route, plan, require_route, route_is_feasible, strongest
from sectorch.protocols.secsv.values import RoutingError


@given(
    st.integers(2, 7), st.integers(1, 12), st.sampled_from(LEVELS), st.booleans(), st.integers(0, 40), st.data()
)  # fmt: skip
def test_routes_keep_the_rules(n, layers, level, together, turn, data):
    inside = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    owner = min(inside) if len(inside) == 1 else None
    if not route_is_feasible(n, layers, level):
        with pytest.raises(RoutingError, match=r"Proposition 6\.8"):
            require_route(n, layers, level)
        return
    routes = plan(range(n), range(n), layers, level, members=inside, together=together, turn=turn)
    assert sorted(i for r in routes for i in r.owners) == list(range(n)), "every sample is in one batch"
    for route in routes:
        assert len(route.clients) == layers
        assert owner not in route.clients
        assert not {route.clients[0], route.clients[-1]} & set(route.owners)
        assert all(a != b for a, b in zip(route.clients, route.clients[1:], strict=False))
        if level == "multi-layer":
            assert len({*route.clients, *route.owners}) == layers + len(route.owners)
        if not together:
            assert len(route.owners) == 1


@given(st.integers(1, 12))
def test_the_strong_level_takes_l_plus_2_clients(layers):
    assert route_is_feasible(layers + 2, layers, "multi-layer")
    assert not route_is_feasible(layers + 1, layers, "multi-layer")


@given(st.integers(1, 12))
def test_the_weak_level_takes_three_clients_or_four(layers):
    """Three where the number of layers is odd; with an even one, two of the three would meet at the end: four."""
    assert route_is_feasible(4, layers, "single-layer")
    assert route_is_feasible(3, layers, "single-layer") == (layers % 2 == 1)
    assert not route_is_feasible(2, layers, "single-layer")


def test_the_weaker_level_is_offered_by_name():
    with pytest.raises(RoutingError, match=r"need 6 clients .* there are 5; level 'single-layer'"):
        require_route(5, 4, "multi-layer")
    assert strongest(5, 4) == "single-layer"
    assert strongest(6, 4) == "multi-layer"
    with pytest.raises(RoutingError, match=r"bring more clients"):
        strongest(2, 1)


@pytest.mark.parametrize(
    ("route", "level", "owner", "why"),
    [
        (Route((0,), (0, 1)), "single-layer", None, "owns samples of the batch"),
        (Route((0,), (1, 0)), "single-layer", None, "owns samples of the batch"),
        (Route((0,), (1, 1)), "single-layer", None, "both the input and the output"),
        (Route((0,), (1, 2)), "single-layer", 2, "owns the model"),
        (Route((0,), (1, 2, 1)), "multi-layer", None, "are different"),
        (Route((0,), (1, 0, 2)), "multi-layer", None, "no owner of the batch"),
    ],
)
def test_a_route_that_breaks_a_rule_is_refused(route, level, owner, why):
    with pytest.raises(RoutingError, match=why):
        route.check(level, owner)


@given(st.integers(3, 7), st.integers(0, 40), st.data())
def test_clients_outside_the_coalition_come_first(n, turn, data):
    """One layer, each owner's batch alone: a member decrypts only where no other client is left."""
    inside = data.draw(st.sets(st.integers(0, n - 1), min_size=2))
    for route in plan(range(n), range(n), 1, "single-layer", members=inside, together=False, turn=turn):
        others = set(range(n)) - inside - set(route.owners)
        assert route.clients[0] not in inside or not others


def allowed(route: Route, level: str, owner: int) -> bool:
    try:
        route.check(level, owner)
    except RoutingError:
        return False
    return True


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clients", [2, 3, 4, 5])
def test_the_bounds_hold_over_all_routes(clients, level):
    """Proposition 6.8 by trying every route of client 0's samples through client 1's model: L + 2 clients for the
    strong level, and no three for an even number of layers at the weak one, whatever the search does.
    """
    for layers in range(1, 6):
        every = product(range(clients), repeat=layers)
        found = any(allowed(Route((0,), way), level, 1) for way in every)
        least = layers + 2 if level == "multi-layer" else 3 + (layers % 2 == 0)
        assert found == route_is_feasible(clients, layers, level) == (clients >= least)
