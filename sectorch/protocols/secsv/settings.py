"""How a valuation is done, and every check that can be made before anything is encrypted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...deprecation import deprecate
from ...federated.command import Options, option
from ...optional_deps import required_imports
from .program import Program
from .values import EstimatorMissingError, FederationError, RoutingError, TestSet, coalition, coalitions, shapley

# Shapley values from fewer coalitions than all: permutation sampling, group testing, KernelSHAP.
#
# Permutation sampling and KernelSHAP are shapiq's; group testing (Jia et al., 2019) is not in it and is written here.
# All ask for lists of coalitions through one cached function, so that a coalition is tested once, and small ones of a
# list first, which SampleSkip profits from.


Ask = Callable[[list[int]], dict[int, float]]
"""Utilities of a list of coalitions; 0 is nobody."""


def estimate(name: str, players: Sequence[int], ask: Ask, *, budget: int | None = None, seed: int = 0) -> dict:
    """A value for each player.

    Args:
        name: one of `ESTIMATORS`.
        players: numbers of the clients of the round.
        ask: gives utilities.
        budget: coalitions to ask for; 2^n - 1 unless named. Repeated ones cost nothing.
        seed: of the sampling.

    Raises:
        EstimatorMissingError: the estimator's library is not installed.
        FederationError: an unknown estimator, or too small a budget.
    """
    if name not in ESTIMATORS:
        raise FederationError(f"there is no estimator {name!r}; there are {', '.join(ESTIMATORS)}")
    if len(players) == 1 and name != "exact":
        name = "exact"
    return ESTIMATORS[name](players, ask, budget or 2 ** len(players) - 1, seed)


def require(name: str) -> None:
    """Raises:
    EstimatorMissingError: before a run starts.
    """
    if name in ("permutation", "kernel"):
        _shapiq()


def _exact(players: Sequence[int], ask: Ask, budget: int, seed: int) -> dict[int, float]:
    value = ask([0, *coalitions(players)])
    return shapley(players, lambda mask: value[mask])


def _shapiq() -> Any:
    way = "or use estimator 'exact' or 'group-testing'"
    with required_imports("permutation sampling or KernelSHAP", "shapiq", EstimatorMissingError, way):
        import shapiq
    return shapiq


def _with_shapiq(kind: str) -> Callable:
    def run(players: Sequence[int], ask: Ask, budget: int, seed: int) -> dict[int, float]:
        shapiq = _shapiq()
        n = len(players)
        if budget < n + 1:
            raise FederationError(f"{kind} for {n} clients needs a budget of at least {n + 1} coalitions, got {budget}")

        def game(rows: np.ndarray) -> np.ndarray:
            masks = [
                coalition(p for p, there in zip(players, row, strict=True) if there) for row in np.atleast_2d(rows)
            ]
            value = ask(sorted(set(masks), key=lambda m: (m.bit_count(), m)))
            return np.array([value[m] for m in masks])

        approximator = getattr(shapiq, kind)(n=n, random_state=seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Not all budget is required", UserWarning)
            found = approximator.approximate(budget=budget, game=game).get_n_order_values(1)
        return {player: float(v) for player, v in zip(players, found, strict=True)}

    return run


def _group_testing(players: Sequence[int], ask: Ask, budget: int, seed: int) -> dict[int, float]:
    """Jia et al. (2019), Algorithm 1: sizes k with probability ~ 1/k + 1/(n-k); u = Z/T sum of v (b_i - b_j).

    v is counted from v of nobody on, as there, where that is 0.

    The values are those with the right sum whose differences are nearest to u in least squares, which for a full matrix
    of differences is the mean difference plus the mean value.
    """
    n = len(players)
    sizes = np.arange(1, n)
    weights = 1 / sizes + 1 / (n - sizes)
    z = weights.sum()
    draw = np.random.default_rng(seed)
    rows = np.zeros((budget, n))
    for row, size in zip(rows, draw.choice(sizes, budget, p=weights / z), strict=True):
        row[draw.choice(n, size, replace=False)] = 1
    masks = [coalition(p for p, there in zip(players, row, strict=True) if there) for row in rows]
    whole = coalition(players)
    value = ask(sorted({0, *masks, whole}, key=lambda m: (m.bit_count(), m)))
    utilities = np.array([value[m] - value[0] for m in masks])
    weighted = z / budget * utilities @ rows
    differences = weighted - weighted.mean()
    return {p: float(d + (value[whole] - value[0]) / n) for p, d in zip(players, differences, strict=True)}


ESTIMATORS: dict[str, Callable] = {
    "exact": _exact,
    "permutation": _with_shapiq("PermutationSamplingSV"),
    "group-testing": _group_testing,
    "kernel": _with_shapiq("KernelSHAP"),
}


# Who decrypts which layer, as data (SecSV, section 6.1.3, Proposition 6.8).
#
# Layer l takes features that client i_l holds (i_1: the owners of the batch) and gives outputs that client i_(l+1)
# decrypts and activates. Levels:
#
# single-layer (3 clients and more), against a client solving for one layer, for test data, membership, retraining:
#     i_(l+1) is not i_l; the first and the last decrypting client own no sample of the batch; nobody decrypts for a
#     model that is its own.
# multi-layer (L + 2 clients), against solving for several layers at once as well: besides, all decrypting clients are
#     different and own no sample.
#
# A model is someone's own when it is one client's local model; nobody owns an aggregated one.


LEVELS = ("multi-layer", "single-layer")
"""The stronger first."""


@dataclass(frozen=True)
class Route:
    """A batch and its way: the clients whose samples it holds, and who decrypts each layer's outputs."""

    owners: tuple[int, ...]
    clients: tuple[int, ...]

    def check(self, level: str, model_owner: int | None = None) -> None:
        """Hold the route against the rules of its level.

        Raises:
            RoutingError: naming the rule and the client.
        """
        first, last = self.clients[0], self.clients[-1]
        for client, which in ((first, "first"), (last, "last")):
            if client in self.owners:
                raise RoutingError(f"client {client} owns samples of the batch and may not decrypt its {which} outputs")
        if model_owner in self.clients:
            raise RoutingError(f"client {model_owner} owns the model under test and may not decrypt its outputs")
        for before, after in zip(self.clients, self.clients[1:], strict=False):
            if before == after:
                raise RoutingError(f"client {before} would hold both the input and the output of a layer")
        if level == "multi-layer":
            if len(set(self.clients)) < len(self.clients):
                raise RoutingError("at the multi-layer level all decrypting clients of a batch are different")
            if set(self.clients) & set(self.owners):
                raise RoutingError("at the multi-layer level no owner of the batch decrypts any of its outputs")


def plan(
    clients: Sequence[int], owners: Sequence[int], layers: int, level: str, *, members: Collection[int] = (),
    together: bool = True, turn: int = 0,
) -> list[Route]:  # fmt: skip
    """Routes that cover all owners of test samples, in as few batches as the level allows.

    Args:
        clients: all who may decrypt.
        owners: whose samples are to be tested.
        layers: L.
        level: one of `LEVELS`.
        members: whose local models are in the model. One alone is its owner. Of several, one that decrypts for this
            coalition and for the same without itself would learn its own model's outputs from the difference: clients
            outside the coalition come first where there are any.
        together: whether samples of several clients may share a batch (shares allow it, HESV's ciphertexts do not).
        turn: shifts who decrypts first, so that the work is spread.

    Raises:
        RoutingError: too few clients.
    """
    if level not in LEVELS:
        raise RoutingError(f"there is no routing level {level!r}; there are {', '.join(LEVELS)}")
    model_owner = next(iter(members)) if len(members) == 1 else None
    shift = lambda i: (i + turn) % len(clients)
    order = sorted(clients, key=lambda i: (i in members, shift(i)))
    # Members decrypt nothing or come last: in the largest batch they cost no further client.
    left = sorted(owners, key=lambda i: (i not in members, shift(i)))
    routes = []
    while left:
        for size in range(len(left) if together else 1, 0, -1):
            found = _way(order, left[:size], layers, level, model_owner)
            if found:
                break
        else:
            raise RoutingError(_refusal(len(clients), layers, level))
        routes.append(Route(tuple(sorted(left[:size])), found))
        left = left[size:]
    for route in routes:
        route.check(level, model_owner)
    return routes


def strongest(clients: int, layers: int) -> str:
    """The strongest level that so many clients allow.

    Raises:
        RoutingError: none does.
    """
    for level in LEVELS:
        if route_is_feasible(clients, layers, level):
            return level
    raise RoutingError(_refusal(clients, layers, LEVELS[-1]))


def route_is_feasible(clients: int, layers: int, level: str) -> bool:
    """Whether a batch of one owner and the model of another client can be routed."""
    return clients >= 2 and bool(_way(range(clients), [0], layers, level, 1))


def require_route(clients: int, layers: int, level: str) -> None:
    """Raises:
    RoutingError: too few clients for the level; the weaker one is offered where it would do.
    """
    if level not in LEVELS:
        raise RoutingError(f"there is no routing level {level!r}; there are {', '.join(LEVELS)}")
    if not route_is_feasible(clients, layers, level):
        raise RoutingError(_refusal(clients, layers, level))


def _refusal(clients: int, layers: int, level: str) -> str:
    least = next(n for n in range(2, layers + 4) if route_is_feasible(n, layers, level))
    text = f"{layers} layers at the {level} level need {least} clients (Proposition 6.8), and there are {clients}"
    weaker = [name for name in LEVELS[LEVELS.index(level) + 1 :] if route_is_feasible(clients, layers, name)]
    if weaker:
        return f"{text}; level '{weaker[0]}' (routing='{weaker[0]}', --routing {weaker[0]}) takes {clients}"
    return f"{text}; bring more clients, or a model with fewer layers"


def _way(clients, batch, layers: int, level: str, model_owner: int | None) -> tuple[int, ...] | None:
    """Decrypting clients of the layers, found layer by layer; None if there are none."""
    may = [i for i in clients if i != model_owner]
    outside = [i for i in may if i not in batch]
    if level == "multi-layer":
        return tuple(outside[:layers]) if len(outside) >= layers else None

    def extend(way: tuple[int, ...]) -> tuple[int, ...] | None:
        if len(way) == layers:
            return way
        edge = len(way) in (0, layers - 1)
        for client in outside if edge else [*outside, *(i for i in may if i in batch)]:
            longer = extend((*way, client)) if not way or client != way[-1] else None
            if longer:
                return longer
        return None

    return extend(())


PROTOCOLS = ("secsv", "hesv", "secretsv", "plain")
PARALLEL = ("subsets", "rounds", "ray")
NOBODY = ("previous", "zero")
SKIPPING = ("always", "saving", "never")
MOST = 20
"""Clients whose coalitions can all be tested: a million a round."""


@dataclass(frozen=True)
class Settings(Options):
    """How a valuation is done."""

    protocol: str = option("secsv", "how coalitions are tested", among=PROTOCOLS, several=True)
    estimator: str = option(
        "exact", "of the Shapley value; exact tests every coalition", among=tuple(ESTIMATORS), several=True
    )
    budget: int | None = option(None, "coalitions that an estimator may ask for in a round (default 2^n - 1)", least=1)
    skip: str | None = option(
        None, "SampleSkip: leave out what two parts classify correctly, always (Algorithm 6) or where it saves "
        "ciphertexts (default: saving for secsv, never for its baselines; HESV cannot)", among=SKIPPING, bare="saving",
    )  # fmt: skip
    routing: str | None = option(None, "who may decrypt (default: the strongest the clients allow)", among=LEVELS)
    frac_bits: int | None = option(
        None, "of features in shares (default: 12, or what value_bits leaves)", least=4, most=20
    )
    value_bits: int | None = option(
        None, "log2 of the largest output of any layer (default: a bit more than the clients need for their own "
        "models on their own samples; each tells this, a power of two)", least=2, most=14,
    )  # fmt: skip
    processes: int = option(1, "that share the work", least=1, hidden=True)
    parallel: str = option(
        "subsets", "what processes share: coalitions of one size in a round, or whole rounds", among=PARALLEL,
        flag="divide",
    )  # fmt: skip
    compare: bool = option(
        True, "compare with the values in the clear", flag="no-compare",
        off="do not compute the values in the clear as well",
    )  # fmt: skip
    seed: int = option(0, "of the estimators' sampling", least=0, several=True)
    nobody: str = option(
        "previous",
        "the empty coalition's utility: of the global model that the round began with, or zero",
        among=NOBODY,
    )

    def __post_init__(self) -> None:
        if isinstance(self.skip, bool):
            word = "saving" if self.skip else "never"
            deprecate(f"Settings(skip={self.skip})", f"Settings(skip={word!r})", stacklevel=4)
            object.__setattr__(self, "skip", word)
        super().__post_init__()
        if self.skipping != "never" and self.protocol == "hesv":
            raise FederationError(
                "HESV encrypts a client's samples into ciphertexts, out of which none can be left; SampleSkip needs "
                "protocol 'secsv', 'secretsv' or 'plain'"
            )

    @property
    def skipping(self) -> str:
        """One of `SKIPPING`: what `skip` says, or else the paper's, which has SampleSkip in SecSV alone."""
        return self.skip or ("saving" if self.protocol == "secsv" else "never")


def check(
    model: nn.Module, rounds: Sequence[Mapping[str, Mapping[str, torch.Tensor]]],
    tests: Mapping[str, tuple[torch.Tensor, torch.Tensor]], weights: Sequence[Mapping[str, float]], how: Settings,
) -> tuple[Program, TestSet, str]:  # fmt: skip
    """The program, the numbered test samples and the routing level.

    Raises:
        FederationError, RoutingError, UnsupportedOpError: naming the client and the way out.
    """
    names = list(tests)
    if len(names) < 2:
        raise FederationError(f"contributions are compared: at least two clients are needed, got {len(names)}")
    if not rounds:
        raise FederationError("there is no round to evaluate")
    shapes = set()
    for name, (x, labels) in tests.items():
        if not len(x) or len(x) != len(labels):
            raise FederationError(
                f"{name} brings {len(x)} test samples and {len(labels)} labels; every client contributes at least one "
                f"labelled sample (section 3)"
            )
        if not x.is_floating_point() or not bool(torch.isfinite(x).all()) or labels.dtype != torch.int64:
            raise FederationError(f"{name}'s test samples must be finite floats, with int64 labels")
        shapes.add(tuple(x.shape[1:]))
    if len(shapes) > 1:
        raise FederationError(f"test samples of the clients have different shapes: {sorted(shapes)}")
    program = Program(model, shapes.pop())
    for name, (_, labels) in tests.items():
        if int(labels.min()) < 0 or int(labels.max()) >= program.classes:
            raise FederationError(f"{name} has a label outside 0..{program.classes - 1}")
    for t, (models, shares) in enumerate(zip(rounds, weights, strict=True)):
        if not models:
            raise FederationError(f"nobody attended round {t + 1}")
        for name, weights_of in models.items():
            if name not in tests:
                raise FederationError(f"round {t + 1} has a model of {name}, who brings no test samples")
            check_model(model, weights_of, f"{name} in round {t + 1}")
            if not shares.get(name, 0) > 0:
                raise FederationError(f"{name} needs an aggregation weight above 0 in round {t + 1}")
    level = feasible(len(names), program, how)
    return program, TestSet(tuple(x for x, _ in tests.values()), tuple(y for _, y in tests.values())), level


def check_model(model: nn.Module, weights: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raises:
    FederationError: a state_dict of another shape than the model, or one with NaN or infinity.
    """
    expected = {name: tuple(v.shape) for name, v in model.state_dict().items()}
    came = {name: tuple(v.shape) for name, v in weights.items()}
    if came != expected:
        name = next(k for k in [*expected, *came] if came.get(k) != expected.get(k))
        raise FederationError(
            f"{whose} has a model of another shape: {name} is {came.get(name, 'missing')}, expected "
            f"{expected.get(name, 'nothing')}; all local models of a run have one architecture"
        )
    bad = [name for name, v in weights.items() if not bool(torch.isfinite(v).all())]
    if bad:
        raise FederationError(
            f"{whose} has a model with NaN or infinity in {bad[0]}; leave that client out of the round"
        )


def feasible(clients: int, program: Program, how: Settings) -> str:
    """The level of `routing.LEVELS` that this many clients allow or that was asked for; "none" where nobody decrypts.

    Raises:
        FederationError: too many to test all coalitions. RoutingError: too few for the level.
        EstimatorMissingError: the estimator needs a package that is not installed.
    """
    if how.estimator == "exact" and clients > MOST:
        raise FederationError(
            f"{clients} clients have 2^{clients} - 1 coalitions, too many to test all; choose another estimator "
            f"(permutation, group-testing, kernel) with a budget, or at most {MOST} clients"
        )
    require(how.estimator)
    if how.protocol not in ("secsv", "hesv"):
        return "none"
    level = how.routing or strongest(clients, len(program.layers))
    require_route(clients, len(program.layers), level)
    return level
