"""What a party computes alone: the losses, from released numbers to an update, its meters, and training."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ... import ckks
from ...ckks.releases import SIGMAS
from ...data.seeds import generator
from ...errors import FederationError
from ...federated import outcome
from ...federated.participants import Samples
from ...federated.parties import Parties
from ...federated.run import note
from ...federated.training import Extra, Training, optimizer_of, predict, train
from .settings import (
    Directions,
    HeadBasis,
    Party,
    Settings,
    contrasts,
    deep_directions,
    deep_parameters,
    draw,
    features_and_logits,
    head_directions,
    head_of,
    of_predictions,
    predictions,
    unflattened,
)

# The distillation losses, Eq. 8 to 12, and what they are compared with. Sums over the batch, as in the paper.
#
# P_k's own prediction is p = softmax(u / T) (Eq. 1), the peer's logits on the same samples are z. All take [n, M].


def local_uncertainty(u: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 11: sum_j p_j . log p_j, which the owner computes alone."""
    logs = (u / temperature).log_softmax(1)
    return (logs.exp() * logs).sum()


def pairwise(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 12: sum_j p_j . z_j / T, what the peer computes under encryption."""
    return ((u / temperature).softmax(1) * z / temperature).sum()


def approximate_kl(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 9 summed as in Eq. 10: the KL divergence of p from the peer's prediction without its normalisation."""
    return local_uncertainty(u, temperature) - pairwise(u, z, temperature)


def true_kl(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 8: D_KL(p || softmax(z / T)).

    The last term is sum_j log C_j: the paper prints M log C, but the M terms p^m log C add up to log C. It does not
    depend on the owner's model, so Eq. 8 and Eq. 9 have the same gradient.
    """
    return approximate_kl(u, z, temperature) + (z / temperature).logsumexp(1).sum()


def l2(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """The L2 distance of the logits (section 2.2), which the paper finds to be of less use."""
    return (u - z).square().sum() / temperature**2


# From released aggregates to an update of P_k's model. Nothing else about a peer enters here.
#
# `released` is sum_j q_rj . z_j / T for the published directions q_r. Three things are made of it:
#
# - `head`: the gradient of Eq. 12 with respect to the head, exactly (`HeadBasis.gradient`); - `deep`: its unbiased
# estimate for the other layers (forward gradients); - `logits`: the agreed logits, P_k's own after that change of its
# parameters, to first order, along the asked directions that agrees with everything released. Their pairwise loss has
# at P_k's current parameters the released derivative in every direction, and is defined for single samples, so that
# local training can take many small steps in a round where one gradient allows one.


@dataclass(frozen=True)
class Update:
    """What P_k learned in a round, on the samples `subset`.

    Attributes:
        loss: L~ of Eq. 12, the mean over peers.
        subset: indices of the samples, [s].
        logits: the agreed logits [s, M]; None in scalar mode.
        head: gradient of L~ with respect to the head's weight and bias, [M, d (+ 1)].
        deep: unbiased estimate of the gradient of L~ with respect to the other parameters, by name; with
            `Settings.plain_forward`, where the agreed logits are of the head alone.
        correction: `deep` less the gradient of these agreed logits, to which training adds it.
    """

    loss: float
    subset: torch.Tensor
    logits: torch.Tensor | None = None
    head: torch.Tensor | None = None
    deep: dict[str, torch.Tensor] | None = None
    correction: dict[str, torch.Tensor] | None = None


def agreed_logits(
    own: torch.Tensor, changes: torch.Tensor, directions: Directions, released: torch.Tensor, temperature: float,
    sigma: float,
) -> torch.Tensor:  # fmt: skip
    """The logits u + sum_r a_r du_r for which the directions give what was released: float64 [n, M].

    With du_r the changes of the logits along the asked directions this is a regression of the peer's z - u on them,
    each sample weighted by diag p - p p^T: its normal equations hold z by way of the released numbers only (a natural
    gradient step, by another name). A peer that is a linear function of P_k's features is found exactly by the head's
    directions, and one that agrees with P_k pulls nowhere.

    Args:
        own: u. changes: du, [R, n, M]. directions: the derivatives of p that belong to them.
        sigma: deviation of the noise in each released number. The change is taken to be of the size of u before any
            answer (Gaussian coefficients of the du_r); noise shrinks it and does not blow it up.
    """
    functions = changes.flatten(1)
    functions = functions * (own - own.mean(1, keepdim=True)).norm() / functions.norm().clamp_min(1e-12)
    system = directions.weights.flatten(1) @ functions.t() / temperature
    missing = released - directions.on(own, temperature)
    square = system.t() @ system
    square.diagonal().add_(sigma**2 + 1e-14 * float(square.diagonal().max()))
    change = torch.linalg.solve(square, system.t() @ missing)
    return own.double() + (change @ functions).view_as(own)


def head_update(basis: HeadBasis, directions: Directions, released: torch.Tensor) -> torch.Tensor:
    """The gradient [M, d (+ 1)] from what was released for `head_directions`."""
    return basis.gradient(released * directions.scales)


def deep_update(
    model: nn.Module, x: torch.Tensor, agreed: torch.Tensor, drawn: torch.Tensor, directions: Directions,
    released: torch.Tensor, temperature: float,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """The forward gradient of L~ for the deep layers, and what it adds to the gradient of the agreed logits.

    g + mean_d (L'_d - g . v_d) v_d is unbiased whatever g is, and its variance is that of the gradient's difference
    from g. The gradient of the agreed logits, known to P_k without any further release, is such a g (a control
    variate).
    """
    parameters = deep_parameters(model)
    with torch.enable_grad():
        live = dict(model.named_parameters())
        loss = pairwise(model(x), agreed.to(x.dtype), temperature)
        known = torch.autograd.grad(loss, [live[name] for name in parameters])
    missing = (released - directions.on(agreed, temperature)) * directions.scales
    correction = unflattened(missing @ drawn / len(drawn), parameters)
    deep = {name: g + correction[name] for (name, g) in zip(parameters, known, strict=True)}
    return deep, correction


def _scale(how: Settings) -> float:
    """lambda_k T^2."""
    if how.weight is None:
        raise FederationError("the weight of a peer is not chosen; `CaPriDe` chooses it, or name weight=")
    return how.weight * how.temperature**2


def distillation(model: nn.Module, party: Party, update: Update, how: Settings) -> Extra:
    """lambda_k L_DL of Eq. 6 on a batch, from what was released.

    Scalar mode: of Eq. 10 only the local uncertainty has a gradient; the decrypted number has none. Otherwise the
    agreed logits stand for the peers' and, in forward mode, the correction is added as a linear function of the
    parameters.
    """
    scale = _scale(how)
    row = torch.full((len(party.labels),), -1)
    row[update.subset] = torch.arange(len(update.subset))
    live = dict(model.named_parameters())

    def extra(batch: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        inside = row[batch] >= 0
        u = logits[inside]
        if update.logits is None:
            loss = local_uncertainty(u, how.temperature)
        else:
            loss = approximate_kl(u, update.logits[row[batch][inside]].to(u.dtype), how.temperature)
        loss = scale * loss / len(batch)
        for name, value in (update.correction or {}).items():
            loss = loss - scale / len(update.subset) * (value * live[name]).sum()
        return loss

    return extra


def in_the_clear(peers: list[torch.Tensor], how: Settings) -> Extra:
    """The baselines that see the peers' logits on the party's samples: the true KL (deep mutual learning), or L2."""
    loss_of = true_kl if how.method == "dml" else l2
    scale = _scale(how) / len(peers)

    def extra(batch: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        found = (loss_of(logits, z[batch], how.temperature) for z in peers)
        return scale * functools.reduce(torch.add, found) / len(batch)

    return extra


def scores(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, classes: int) -> dict:
    """Accuracy over all samples, that of the five largest logits as in the paper, and the accuracy of each class (None
    where it has no sample).
    """
    logits = predict(model, images)
    found = outcome.scores(logits.argmax(1), labels, classes).as_dict()
    near = (logits.topk(min(5, classes), 1).indices == labels[:, None]).any(1)
    return dict(accuracy=found["accuracy"], top5=float(near.double().mean()), per_class=found["per_class"])


@torch.no_grad()
def own_view(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and logits of a model in evaluation mode on all samples."""
    return features_and_logits(model, images)


# What a party asks in a round, and what it makes of the answers (section 3.3).


LEAST_NOISE = 1e-3
"""Released numbers are taken to be no better than this when logits are fitted to them."""


class Question:
    """What a party asks in a round, and what it makes of the answers. Everything here is the party's own and in plain.

    Args:
        subset: the samples that were drawn for the round.
        draws: for the random directions of the deep layers.
        meters: of the peers that were asked before.
    """

    def __init__(
        self, party: Party, model: nn.Module, subset: torch.Tensor, how: Settings, draws: torch.Generator,
        meters: Mapping[str, Meter] | None = None,
    ):  # fmt: skip
        self.how, self.model, self.basis, self.drawn = how, model, None, None
        self.meters, self.view = meters or {}, own_view(model, party.images)
        if how.update == "forward":
            self.drawn = draw(model, how.directions, draws)
        self.subset, self.images = subset, party.images[subset]
        self.directions = self._directions()

    def _directions(self) -> Directions:
        how = self.how
        features, self.logits = own_view(self.model, self.images)
        asked = predictions(self.logits, how.temperature)
        if how.update == "scalar":
            return asked
        bias, classes = head_of(self.model).bias is not None, self.logits.shape[1]
        self.changes, self.basis = head_directions(features, classes, bias, how.head_rank)
        self.numbers = len(self.changes)
        if self.drawn is not None:
            self.changes = torch.cat([self.changes, deep_directions(self.model, self.images, self.drawn)])
        self.moved = Directions.of(of_predictions(self.changes, self.logits, how.temperature))
        return asked.beside(self.moved)

    def published(self, samples: int) -> Directions:
        """The directions over all of the party's samples: zero outside of the subset."""
        weights = torch.zeros(len(self.directions), samples, self.logits.shape[1], dtype=torch.float64)
        weights[:, self.subset] = self.directions.weights
        return Directions(weights, self.directions.scales)

    def update(self, released: torch.Tensor, sigma: float) -> Update:
        """Args:
        released: float64 [R], the mean over the asked peers.
        sigma: of the noise in it.
        """
        loss, t = float(released[0]), self.how.temperature
        if self.basis is None:
            return Update(loss, self.subset)
        answers, n = released[1:], self.numbers
        head = head_update(self.basis, self.moved[:n], answers[:n])
        sigma = max(sigma, LEAST_NOISE)
        agree = lambda part: agreed_logits(self.logits, self.changes[part], self.moved[part], answers[part], t, sigma)
        if self.drawn is None or not self.how.plain_forward:
            return Update(loss, self.subset, agree(slice(None)), head)
        # The control variate must not depend on the drawn directions, else the estimate would be biased.
        of_head = agree(slice(n))
        deep, correction = deep_update(self.model, self.images, of_head, self.drawn, self.moved[n:], answers[n:], t)
        return Update(loss, self.subset, of_head, head, deep, correction)


# The meter: how much of a peer's logits P_k can reconstruct from all its answers so far, known before it asks.
#
# P_k, honest but curious, knows its directions q, its own logits u, and that the peer's model resembles its own. It
# takes the difference d = z - u for a linear function of its features, d_j = W (h_j, 1) with Gaussian W, and z for the
# same in all rounds: the prior of `ckks.LinearMeter`. `tests/capride/test_capride_meter.py` holds it against attacks
# with other priors. P_k can measure before it asks; P_l cannot, who sees ciphertexts. A peer further from P_k than the
# prior reckons with would tell more through the same noise. So P_k states the size of its own logits, P_l scales its
# logits down to it (`exchange.fitted`), and |z - u| <= |z| + |u| is at most twice that size.


SPREAD = 2.0
"""The size of z - u that is reckoned with, in sizes of P_k's own logits about their row means: the most that logits of
no larger size are away; unrelated ones are 1.4 away."""


class Meter(ckks.LinearMeter):
    """What one party can know of one peer.

    Args:
        features: [n, d], of P_k's own model on its own samples. logits: [n, M], its own.
        peer: whose logits; for errors.
    """

    def __init__(self, features: torch.Tensor, logits: torch.Tensor, peer: str):
        h = torch.cat([features.detach().double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
        u = logits.detach().double()
        left, singular, _ = torch.linalg.svd(h, full_matrices=False)
        kept = singular > 1e-9 * singular[0]
        basis, width = left[:, kept] * singular[kept], u.shape[1] - 1
        size = float((u - u.mean(1, keepdim=True)).norm())
        # A model that says the same of everything tells nothing of the size of others' logits.
        size = max(size, float(len(u)) ** 0.5)
        basis *= SPREAD * size / float(basis.norm()) / width**0.5
        self._begin(peer, basis, u)

    def _begin(self, peer: str, basis: torch.Tensor, own: torch.Tensor, *heard: torch.Tensor) -> None:
        super().__init__(basis, own.shape[1] - 1, f"{peer}'s logits")
        self.own, self.contrasts = own, contrasts(own.shape[1])
        self.found, self.learned = heard or (self.known[0], self.known)

    @classmethod
    def of(cls, peer: str, *tensors: torch.Tensor) -> Meter:
        """A meter as `tensors` kept it, of whose questions none is counted."""
        self = cls.__new__(cls)
        self._begin(peer, *tensors)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """The prior, what was answered, and the information in that."""
        return [self.basis, self.own, self.found, self.learned]

    @property
    def size(self) -> float:
        """What logits about their row means may measure for the prior to hold: a root mean square over samples."""
        return float(self.basis.norm()) * (self.width / len(self.basis)) ** 0.5 / SPREAD

    def asked(self, directions: Directions, temperature: float) -> torch.Tensor:
        """Questions as linear functions of the unknown: [R, K]."""
        return self.rows(directions.weights @ self.contrasts) / temperature

    def told(self, directions: Directions, temperature: float) -> torch.Tensor:
        """The information in the answers to one question, under noise of deviation 1: [K, K]."""
        rows = self.asked(directions, temperature)
        return rows.t() @ rows

    def learn(self, directions: Directions, answers: torch.Tensor, sigma: float, temperature: float) -> None:
        """Take in what was answered to a question that `spend` has counted."""
        missing, variance = answers - directions.on(self.own, temperature), max(sigma, SIGMAS[0]) ** 2
        self.found = self.found + self.asked(directions, temperature).t() @ missing / variance
        self.learned = self.learned + self.told(directions, temperature) / variance

    def expected(self, own: torch.Tensor) -> torch.Tensor:
        """The peer's logits given all answers that came, under the prior about P_k's logits of now: float64 [n, M].

        The prior's size is the one under which the answers are likeliest; 0 where noise is all that they hold.
        """
        moved = torch.linalg.lstsq(self.basis, (own.double() - self.own) @ self.contrasts).solution.flatten()
        values, vectors = torch.linalg.eigh(self.learned)
        missing = vectors.t() @ (self.found - self.learned @ moved)
        variance = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-16, 1)]).double().unsqueeze(1)
        grown = 1 + variance * values.clamp_min(0)
        likeliest = int((variance * missing.square() / grown - grown.log()).sum(1).argmax())
        w = vectors @ (variance[likeliest] * missing / grown[likeliest])
        return own.double() + self.basis @ w.view(self.basis.shape[1], -1) @ self.contrasts.t()


# A party's models in training, and its meters.


class State:
    """A party's models and their optimisers, small first, and what it knows of each peer that it has asked.

    Args:
        kept: what `tensors` gave; without, the party's models as they are.
    """

    def __init__(self, party: Party, how: Settings, kept: dict | None = None):
        models = [party.model] if party.large is None else [party.model, party.large]
        self.models = [copy.deepcopy(model).eval() for model in models]
        self.steps = [optimizer_of(model, how.local) for model in self.models]
        self.meters: dict[str, Meter] = {}
        if kept is not None:
            for model, steps, (weights, moments) in zip(self.models, self.steps, kept["models"], strict=True):
                model.load_state_dict(weights)
                steps.load_state_dict(copy.deepcopy(moments))
            self.meters = {peer: Meter.of(peer, *tensors) for peer, tensors in kept["meters"].items()}

    def tensors(self) -> dict:
        """All of it, for the disk."""
        models = [[m.state_dict(), o.state_dict()] for m, o in zip(self.models, self.steps, strict=True)]
        return {"models": models, "meters": {peer: meter.tensors() for peer, meter in self.meters.items()}}

    @property
    def small(self) -> nn.Module:
        return self.models[0]

    def train(
        self, which: int, party: Party, how: Training, seed: int, extra: Extra | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Cross entropy (Eq. 3, as a mean) and `extra`, in place, going on with the model's own optimiser."""
        model, steps = self.models[which], self.steps[which]
        train(model, party.images, party.labels, how, seed, tick, extra=extra, optimizer=steps)

    def mutual(self, party: Party, how: Settings, use: tuple) -> None:
        """One epoch of mutual distillation between a party's two models (section 4.4), each on its labels and on the
        other's predictions (Zhang et al., 2018), on the party's own data and machine.
        """
        order, t = generator(how.seed, party.name, *use), how.temperature
        for model in self.models:
            model.train()
        for batch in torch.randperm(len(party.labels), generator=order).split(how.batch):
            x, y = party.images[batch], party.labels[batch]
            logits = [model(x) for model in self.models]
            targets = [(z.detach() / t).softmax(1) for z in reversed(logits)]
            for model, steps, u, target in zip(self.models, self.steps, logits, targets, strict=True):
                steps.zero_grad(set_to_none=True)
                learned = F.kl_div((u / t).log_softmax(1), target, reduction="batchmean")
                (F.cross_entropy(u, y, label_smoothing=how.smoothing) + t**2 * learned).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps.step()
        for model in self.models:
            model.eval()

    def meet(self, priors: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, Meter]:
        """The meters, with new ones of the peers that are asked for the first time."""
        self.meters = {peer: Meter.of(peer, *tensors) for peer, tensors in priors.items()} | self.meters
        return self.meters


def small(data: Party, theta: dict, how: Settings) -> nn.Module:
    """The model that answers."""
    return State(data, how, theta).small


def combined(state: State, data: Party, question: Question, heard: dict, how: Settings) -> Update:
    """The update of all peers' answers, of which `state` takes notice (Equation 5 is their mean)."""
    released = heard["released"]
    update = question.update(torch.stack(list(released.values())).mean(0), heard["noise"] / len(released) ** 0.5)
    if update.logits is None or not heard["sigma"] > 0:
        state.meet(heard["priors"])
        return update
    published, (_, own) = question.published(len(data.labels)), own_view(state.small, data.images)
    meters = state.meet(heard["priors"])
    for peer, answers in released.items():
        meters[peer].learn(published, answers, heard["noise"], how.temperature)
    known = torch.stack([meters[peer].expected(own.detach()) for peer in released]).mean(0)
    return replace(update, logits=known[question.subset])


def score(data: Party, theta: dict, test: Samples, classes: int, how: Settings) -> float:
    """The accuracy of the large model, if there is one, else of the small one."""
    models = State(data, how, theta).models
    found = scores(models[-1], *test, classes)
    if len(models) > 1:
        found["small_accuracy"] = scores(models[0], *test, classes)["accuracy"]
    note(**found)
    return found["accuracy"]


# What is drawn for a round from the seed that all parties know.


def asked_peers(names: Sequence[str], k: str, t: int, how: Settings) -> list[str]:
    """The peers of a round, in the parties' order; drawn anew each time."""
    others = [name for name in names if name != k]
    if how.peers is None:
        return others
    chosen = torch.randperm(len(others), generator=generator(how.seed, k, t, "peers"))
    return [others[i] for i in sorted(chosen[: how.peers].tolist())]


def subset(data: Party, t: int, how: Settings) -> torch.Tensor:
    """The samples of a round's aggregates; drawn anew each time, from a seed that all parties know (3.3, ii)."""
    order = torch.randperm(len(data.labels), generator=generator(how.seed, data.name, t, "subset"))
    return order[: how.subset(len(data.labels))].sort().values


# Baselines (section 4.2), in one process: they protect nothing. The others are the `losses` above.


def open_logits(_: Parties, data: Party, models: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The peers' logits on a party's samples."""
    return [predict(model, data.images) for model in models]


def averaged(_: Parties, data: Mapping[str, Party], theta: Mapping[str, dict], how: Settings, t: int) -> dict:
    """FedAvg: every model becomes the mean of all by number of samples (McMahan et al., 2016), after each party has,
    for "fedavg-dp", added Gaussian noise of `model_sigma` to every parameter of its own (Wei et al., 2020; the paper
    has 0.01).
    """
    states = {k: State(data[k], how, theta[k]) for k in data}
    total, mean = sum(len(party.labels) for party in data.values()), dict[str, torch.Tensor]()
    for k, party in data.items():
        draw = generator(how.seed, k, t, "model noise")
        for name, value in states[k].small.state_dict().items():
            sent = value.double()
            if how.method == "fedavg-dp" and value.is_floating_point():
                sent = sent + how.model_sigma * torch.randn(value.shape, generator=draw, dtype=torch.float64)
            mean[name] = mean.get(name, 0) + sent * (len(party.labels) / total)
    for model in (state.small for state in states.values()):
        model.load_state_dict({name: value.to(model.state_dict()[name].dtype) for name, value in mean.items()})
    return {k: state.tensors() for k, state in states.items()}


def own_part(mean: dict, k: str) -> dict:
    """A participant's own of `averaged`."""
    return mean[k]
