"""Algorithm 1 (CaPriDe, section 3), line by line, with updates computed only from what the protocol releases.

The comments quote the algorithm's lines. What its exchange sends is in `exchange.py`; how a decrypted number becomes an
update of a model is in `training.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...data.seeds import derive, generator
from ...federated.parties import Parties
from ...federated.run import Held, Run, estimated_by, note, progress
from ...federated.training import seconds_of
from ...federated.watch import Estimate
from .exchange import Exchange
from .settings import Party, Settings
from .training import (
    Question,
    State,
    asked_peers,
    averaged,
    combined,
    distillation,
    in_the_clear,
    local_uncertainty,
    open_logits,
    own_part,
    score,
    small,
    subset,
)


@dataclass(frozen=True)
class Inputs:
    """What Algorithm 1 takes: each participant's data, and seed of its own draws, at the participant; what is public.

    Attributes:
        exchange: encrypted, or in the clear (`Simulated`); None for a baseline that asks nobody.
    """

    parties: Sequence[Party]
    data: Mapping[str, Held]
    seed: Mapping[str, Held]
    test: Held
    classes: int
    how: Settings
    exchange: Exchange | None = None

    @property
    def names(self) -> list[str]:
        return [party.name for party in self.parties]


def capride(run: Run, given: Inputs) -> dict[str, Held]:
    """The participants' models and optimisers (`State.tensors`) after all rounds, each at its participant."""
    theta = first_loop(run, given)
    for t in range(1, given.how.rounds + 1):  # for each round t = 1, 2, .., tau do
        theta = round_(run, given, t, theta)
    return theta


def first_loop(run: Run, given: Inputs) -> dict[str, Held]:
    """for each participant k: train the initial model. The encrypted data {E(x_j)} is published with the first question
    (`Exchange.ask`), under keys that live as long as the process."""
    theta = run.each(given.names, initial, lambda k: (given.data[k], given.seed[k], given.how))
    return scored(run, given, 0, theta)


def initial(run: Run, k: str, data: Held, seed: Held, how: Settings) -> Held:
    """Train initial model M_theta_k^0 based on local data D_k."""
    return run.at(k, train_alone, data, seed, how, stage=f"round-0/{k}/model")


def round_(run: Run, given: Inputs, t: int, theta: Mapping[str, Held]) -> dict[str, Held]:
    """One round of all participants, on the models theta^(t-1): first all ask, then each trains."""
    model = {
        k: run.at(k, small, given.data[k], theta[k], given.how, stage=f"round-{t}/{k}/asked",
                  public=party.model, keep=False)
        for k, party in zip(given.names, given.parties, strict=True)
    }  # fmt: skip
    asked, heard = {}, {}
    for k in given.names:  # for each participant k = 1, 2, .., K do
        asked[k], heard[k] = learn(run, given, t, k, theta[k], model)
    theta = run.each(
        given.names, step, lambda k: (t, given.data[k], theta[k], given.seed[k], asked[k], heard[k], given.how)
    )
    if given.how.method.startswith("fedavg"):
        mean = run.among(
            averaged, {"all": given.names}, given.data, theta, given.how, t, at=given.names, roles=None,
            stage=f"round-{t}/mean",
        )  # fmt: skip
        theta = {k: run.at(k, own_part, mean, k, stage=f"round-{t}/{k}/mean", keep=False) for k in given.names}
    return scored(run, given, t, theta)


def learn(
    run: Run, given: Inputs, t: int, k: str, theta: Held, model: Mapping[str, Held]
) -> tuple[Held | None, Held | None]:
    """What participant k asks in a round, and what it hears of the others; None where a method has no such thing."""
    how, others = given.how, [name for name in given.names if name != k]
    if how.method in ("dml", "l2"):
        models, stage = [model[name] for name in others], f"round-{t}/{k}/logits"
        cast = {"Pk": k, "Pl": others}
        return None, run.among(open_logits, cast, given.data[k], models, at=k, stage=stage, roles=None)
    if given.exchange is None:
        return None, None
    # {p_j,(k,k)}, the uncertainty of Equation 11, and what is published beside it (`capride/settings.py`)
    question = run.at(
        k, ask, t, given.data[k], theta, given.seed[k], how, stage=f"round-{t}/{k}/question", keep=False
    )  # fmt: skip
    peers = asked_peers(given.names, k, t, how)
    answers = run.among(
        divergences, {"Pk": k, "Pl": peers}, given.exchange, t, given.data[k], question,
        {peer: model[peer] for peer in peers}, at=k, stage=f"round-{t}/{k}/answers", roles=None,
    )  # fmt: skip
    return question, answers


def step(
    run: Run, k: str, t: int, data: Held, theta: Held, seed: Held, question: Held | None, heard: Held | None,
    how: Settings,
) -> Held:  # fmt: skip
    """theta_k^t: update the local model of participant k using Equation 7."""
    return run.at(k, train_round, t, data, theta, seed, question, heard, how, stage=f"round-{t}/{k}/model")


def scored(run: Run, given: Inputs, t: int, theta: Mapping[str, Held]) -> dict[str, Held]:
    """The same models, after each was measured on the test set."""
    for k in given.names:
        run.at(k, score, given.data[k], theta[k], given.test, given.classes, given.how, stage=f"round-{t}/{k}/accuracy")
    return dict(theta)


# Stages of one participant.


def _training_time(data: Party, epochs: int, how: Settings) -> Estimate:
    models = [data.model, *([data.large] if data.large else [])]
    return Estimate(sum(seconds_of(m, data.images, data.labels, how.local.lasting(epochs)) for m in models))


@estimated_by(lambda data, seed, how: _training_time(data, how.warmup, how))
def train_alone(data: Party, seed: int, how: Settings) -> dict:
    """Local training before the first round."""
    state, tick = State(data, how), progress(how.warmup * (1 + (data.large is not None)))
    for which in range(len(state.models)):
        state.train(which, data, how.local.lasting(how.warmup), derive(seed, data.name, "local"), tick=tick)
    return state.tensors()


def ask(t: int, data: Party, theta: dict, seed: int, how: Settings) -> Question:
    """What participant k publishes, and will make of the answers; with its own view of all its samples."""
    state = State(data, how, theta)
    draws = generator(seed, data.name, t, "directions")
    return Question(data, state.small, subset(data, t, how), how, draws, state.meters)


def divergences(
    _: Parties, exchange: Exchange, t: int, owner: Party, question: Question | None, models: Mapping[str, nn.Module]
) -> dict[str, Any] | None:
    """For each participant l != k: Equation 12 under encryption, and its decryption at k."""
    if question is None:  # the owner is elsewhere, and a party that is here answers
        exchange.ask(t, owner, None, 0, models)
        return None
    published = question.published(len(owner.labels))  # Publish encrypted inferences {E(p_j,(k,k))}
    meters, sigma, told = exchange.measure(t, owner.name, question, published, list(models))
    sizes = {peer: meter.size for peer, meter in meters.items()}
    released = exchange.ask(t, owner, published, len(question.subset), models, sigma, sizes)
    note(
        asked=list(models), samples=len(question.subset), released=len(published), sigma=sigma, leakage=told,
        spent=exchange.spent(),
    )  # fmt: skip
    priors = {peer: [meter.basis, meter.own] for peer, meter in meters.items()}
    return {"released": released, "sigma": sigma, "noise": exchange.sigma(owner, sigma), "priors": priors}


@estimated_by(lambda t, data, theta, seed, question, heard, how: _training_time(data, how.epochs, how))
def train_round(
    t: int, data: Party, theta: dict, seed: int, question: Question | None, heard: Any, how: Settings
) -> dict:  # fmt: skip
    """Local training on L_k = L_CE_k + lambda_k L_DL_k (Equation 6), over the minibatches of `Settings.epochs`."""
    state, extra = State(data, how, theta), None
    for group in (group for steps in state.steps for group in steps.param_groups):
        group["lr"] = how.rate_in(t)
    if question is not None:
        update = combined(state, data, question, heard, how)
        uncertainty = float(local_uncertainty(question.logits.double(), how.temperature))  # Equation 11
        note(distillation_loss=uncertainty - update.loss)  # Equations 5 and 10
        extra = distillation(state.small, data, update, how)
    elif heard is not None:
        extra = in_the_clear(heard, how)
    own = lambda use: derive(seed, data.name, t, use)
    state.train(0, data, how.local, own("round"), extra, progress(how.epochs))
    if data.large is not None:
        state.train(1, data, how.local, own("large"))
        state.mutual(data, how, (t, "mutual"))
    return state.tensors()
