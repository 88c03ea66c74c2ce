"""How a valuation is done, and every check that can be made before anything is encrypted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from . import estimators
from .errors import ShapleyError
from .program import Program
from .routing import LEVELS, require, strongest
from .testing import TestSet, check_model

PROTOCOLS = ("secsv", "hesv", "secretsv", "plain")
PARALLEL = ("subsets", "rounds", "ray")
NOBODY = ("previous", "zero")
MOST = 20
"""Clients whose coalitions can all be tested: a million a round."""


@dataclass(frozen=True)
class Settings:
    """
    Args:
        protocol: one of `PROTOCOLS`.
        estimator: one of `estimators.ESTIMATORS`; "exact" tests every coalition.
        budget: coalitions that an estimator may ask for in a round; 2^n - 1 unless named.
        skip: SampleSkip, where the protocol can leave samples out (all but HESV).
        routing: a level of `routing.LEVELS`; None takes the strongest that the clients allow.
        frac_bits: of features in shares; 12, or what value_bits leaves, unless named.
        value_bits: log2 of the largest output of any layer; unless named, a bit more than the clients need for their
            own models on their own samples. Each of them tells this, a power of two.
        processes: that share the work; 1 forks none.
        parallel: what is divided among them: the coalitions of one size in a round ("subsets"), or whole rounds
            ("rounds"; "ray" on other machines, where Ray is installed).
        compare: compute the values in the clear as well, and show the error. Only a simulation can.
        seed: of the estimators' sampling.
        nobody: the empty coalition's utility: of the global model that the round began with ("previous"), or "zero".
    """

    protocol: str = "secsv"
    estimator: str = "exact"
    budget: int | None = None
    skip: bool = False
    routing: str | None = None
    frac_bits: int | None = None
    value_bits: int | None = None
    processes: int = 1
    parallel: str = "subsets"
    compare: bool = True
    seed: int = 0
    nobody: str = "previous"

    def __post_init__(self):
        for what, value, among in (
            ("protocol", self.protocol, PROTOCOLS),
            ("estimator", self.estimator, estimators.ESTIMATORS),
            ("routing level", self.routing, (None, *LEVELS)),
            ("way to divide the work", self.parallel, PARALLEL),
            ("utility of nobody", self.nobody, NOBODY),
        ):
            if value not in among:
                raise ShapleyError(f"there is no {what} {value!r}; there are {', '.join(filter(None, among))}")
        if self.skip and self.protocol == "hesv":
            raise ShapleyError(
                "HESV encrypts a client's samples into ciphertexts, out of which none can be left; SampleSkip needs "
                "protocol 'secsv', 'secretsv' or 'plain'"
            )
        if self.processes < 1 or (self.budget is not None and self.budget < 1):
            raise ShapleyError(f"processes and budget must be at least 1, got {self.processes} and {self.budget}")
        if not (4 <= (self.frac_bits or 12) <= 20 and 2 <= (self.value_bits or 6) <= 14):
            raise ShapleyError(
                f"frac_bits must be between 4 and 20 and value_bits between 2 and 14, got {self.frac_bits} and "
                f"{self.value_bits}"
            )


def check(
    model: nn.Module,
    rounds: Sequence[Mapping[str, Mapping[str, torch.Tensor]]],
    tests: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[Mapping[str, float]],
    how: Settings,
) -> tuple[Program, TestSet, str]:
    """The program, the numbered test samples and the routing level.

    Raises:
        ShapleyError, RoutingError, UnsupportedOpError: naming the client and the way out.
    """
    names = list(tests)
    if len(names) < 2:
        raise ShapleyError(f"contributions are compared: at least two clients are needed, got {len(names)}")
    if not rounds:
        raise ShapleyError("there is no round to evaluate")
    shapes = set()
    for name, (x, labels) in tests.items():
        if not len(x) or len(x) != len(labels):
            raise ShapleyError(
                f"{name} brings {len(x)} test samples and {len(labels)} labels; every client contributes at least one "
                f"labelled sample (section 3)"
            )
        if not x.is_floating_point() or not bool(torch.isfinite(x).all()) or labels.dtype != torch.int64:
            raise ShapleyError(f"{name}'s test samples must be finite floats, with int64 labels")
        shapes.add(tuple(x.shape[1:]))
    if len(shapes) > 1:
        raise ShapleyError(f"test samples of the clients have different shapes: {sorted(shapes)}")
    program = Program(model, shapes.pop())
    for name, (_, labels) in tests.items():
        if int(labels.min()) < 0 or int(labels.max()) >= program.classes:
            raise ShapleyError(f"{name} has a label outside 0..{program.classes - 1}")
    for t, (models, shares) in enumerate(zip(rounds, weights, strict=True)):
        if not models:
            raise ShapleyError(f"nobody attended round {t + 1}")
        for name, weights_of in models.items():
            if name not in tests:
                raise ShapleyError(f"round {t + 1} has a model of {name}, who brings no test samples")
            check_model(model, weights_of, f"{name} in round {t + 1}")
            if not shares.get(name, 0) > 0:
                raise ShapleyError(f"{name} needs an aggregation weight above 0 in round {t + 1}")
    level = feasible(len(names), program, how)
    return program, TestSet(tuple(x for x, _ in tests.values()), tuple(y for _, y in tests.values())), level


def feasible(clients: int, program: Program, how: Settings) -> str:
    """The level of `routing.LEVELS` that this many clients allow or that was asked for; "none" where nobody decrypts.

    Raises:
        ShapleyError: too many to test all coalitions. RoutingError: too few for the level.
        EstimatorMissingError: the estimator needs a package that is not installed.
    """
    if how.estimator == "exact" and clients > MOST:
        raise ShapleyError(
            f"{clients} clients have 2^{clients} - 1 coalitions, too many to test all; choose another estimator "
            f"(permutation, group-testing, kernel) with a budget, or at most {MOST} clients"
        )
    estimators.require(how.estimator)
    if how.protocol not in ("secsv", "hesv"):
        return "none"
    level = how.routing or strongest(clients, len(program.layers))
    require(clients, len(program.layers), level)
    return level
