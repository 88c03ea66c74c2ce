"""Who takes part, the settings of a run, and every check that can be made before any training starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...data.datasets import IMAGES, Dataset
from ...data.partition import PARTITIONS, partition
from ...data.seeds import derive, generator
from ...data.selection import SELECTIONS
from ...dp import MECHANISMS, ConfidentGNMax, NoisyMax
from ...errors import FederationError
from ...federated import participants
from ...federated.command import BudgetOptions, Options, option
from ...federated.folder import digest
from ...federated.participants import NAME, Participant, Samples, build, check_federation, check_fits
from ...federated.shared_training import LABELS
from ...federated.training import Training

INFERENCE = ("mpc", "ckks", "open", "simulated")
ARGMAX = ("yao", "shares")
CONTROLS = ("longer", "own-labels", "true-labels", "no-noise")
Vote = Callable[[Any, str], Any]
"""A party's ballots [N, classes], whole numbers from 0, of its logits [N, classes] and its name: tensor code that runs
on shares and on plain tensors alike."""


@dataclass
class Party(Participant):
    """P_i: a private data set D_i and a model M_i of its own kind.

    `model` is an untrained nn.Module that gives logits, or an unfitted scikit-learn classifier (then Settings.inference
    is "open" or "simulated"). `pool` [M, C, H, W] are the unlabelled images that it may ask about; without one it only
    answers. `organisation`: parties of one name belong together (virtual parties): the privacy unit is the
    organisation. `truth` [M] are the pool's true labels, where an experiment has them; the report alone sees them.
    """

    model: Any = field(repr=False)
    pool: torch.Tensor | None = field(repr=False, default=None)
    organisation: str | None = None
    truth: torch.Tensor | None = field(repr=False, default=None)

    @property
    def questions(self) -> torch.Tensor:
        """The pool; empty for a party that only answers."""
        return self.images[:0] if self.pool is None else self.pool

    @property
    def owner(self) -> str:
        return self.organisation or self.name

    @property
    def facts(self) -> list:
        return [self.name, self.owner, len(self.images), self.shape, len(self.questions), str(self.model)]

    def elsewhere(self) -> Party:
        """What others know of it: beside the architecture, how many samples and images to ask about it has."""
        pool = None if self.pool is None else self.pool.to("meta")
        return replace(super().elsewhere(), pool=pool, truth=None)

    def fingerprint(self) -> str:
        if self.images.is_meta:
            return digest(self.images, self.labels, self.questions)
        known = isinstance(self.model, nn.Module)
        # A scikit-learn model is recognised by its printed form.
        model = self.model.state_dict().values() if known else [torch.tensor(list(repr(self.model).encode()))]
        return digest(self.images, self.labels, self.questions, *model)


@dataclass(frozen=True)
class Preset:
    """The paper's setting of a data set (4.2, F.1), with pools and delta of the authors' code; ours for digits. `pool`
    is for each querying party. `queries` are those that the paper's noise (sigma 40, and 7 for CIFAR10) allows within
    `epsilon`, whatever the votes; the paper has some 550, by a data-dependent figure. None: the whole pool."""

    architectures: tuple[str, ...]
    parties: int
    pool: int
    weak: tuple[int, ...]
    kept: float
    """Of the weak classes' samples in skewed data."""
    training: Training
    delta: float = 1e-5
    epsilon: float = 10.0
    queries: int | None = None

    def settings(self, **changes: Any) -> Settings:
        """The settings of the data set, which are the defaults of the command."""
        known = {"local": self.training, "delta": self.delta, "epsilon": self.epsilon, "queries": self.queries}
        return Settings(**{**known, **changes})


_SVHN = Preset(("vgg7",), 250, 3333, (1, 2), 0.1, Training("adam", 1e-3, 64, 60), 1e-6, 2.0, 141)
_MNIST = Preset(("lenet",), 250, 3000, (1, 2), 0.1, Training("adam", 1e-3, 32, 60), 1e-5, 2.35, 231)
PRESETS: dict[str, Preset] = {
    # All samples in one batch: a last batch of a sample or two would cost points, and which numbers have one is chance.
    "digits": Preset(("cnn",), 50, 75, (1, 2), 0.1, Training("adam", 1e-2, 256, 120)),
    "mnist": _MNIST,
    "fashion-mnist": replace(_MNIST, epsilon=3.89, queries=568),
    "svhn": _SVHN,
    "svhn-extra": _SVHN,
    "cifar10": Preset(("vgg5",), 50, 3000, (7, 8, 9), 0.2, Training("adam", 1e-3, 64, 60), 1e-5, 20.0, 264),
}


@dataclass(frozen=True)
class Settings(BudgetOptions):
    """How a run goes. `vote` and `noise` take a function and a mechanism of one's own (docs/capc.md)."""

    epsilon: float = option(
        10.0, "of each querying party: what it may learn about any organisation", above=0, below=math.inf, several=True
    )
    noise: str | NoisyMax | ConfidentGNMax = option(
        "gaussian", "its law; in Python also a mechanism, whose noise it is then", among=tuple(MECHANISMS),
        several=True, objects=(NoisyMax, ConfidentGNMax),
    )  # fmt: skip
    vote: str | Vote = option(
        "argmax", "a party's ballot, the one-hot argmax of its logits; in Python also a function: shared logits "
        "[N, classes] and the party's name -> whole numbers [N, classes], none below 0", among=("argmax",), hidden=True,
        objects=(Callable,),
    )  # fmt: skip
    ballot_votes: int = option(
        1, "votes that such a ballot gives to all classes together, at most; the noise covers them", least=1,
        hidden=True,
    )  # fmt: skip
    queries: int | None = option(
        None, "of each querying party (default: its whole pool); fewer where the budget ends first", least=1,
        several=True,
    )  # fmt: skip
    planned: bool = option(
        False, "choose how many of them by the right answers to expect beyond the asker's own (`forecast`)", flag="plan"
    )
    voter_accuracy: float | None = option(
        None, "that forecasts assume of each voter (default: what the asker's own cross-validation finds of itself)",
        above=0, below=1,
    )  # fmt: skip
    correlation: float = option(0.25, "that forecasts assume between two voters' being right", above=0, below=1)
    scale: float | None = option(
        None, "of the noise, in votes (default: the least that the queries allow)", above=0, below=math.inf,
        several=True,
    )  # fmt: skip
    threshold: int | None = option(
        None, "votes that the largest count, with noise, must reach for an answer (Confident-GNMax)", least=0,
        several=True,
    )  # fmt: skip
    check_scale: float | None = option(
        None, "of that noise (default: twice the answer's)", above=0, below=math.inf, several=True
    )
    colluding: int = option(
        1, "organisations that pool what they see with a querying party; the noise grows with it", least=1, short="C"
    )
    inference: str = option(
        "mpc", "step 1a: on shares, encrypted, with the queries open to who answers (any predictor), or everything in "
        "the clear for learning curves", among=INFERENCE,
    )  # fmt: skip
    argmax: str = option("yao", "steps 1c and 3: garbled circuits, or the core's shares", among=ARGMAX)
    labels: str = option(
        "open", "the querying party learns its labels (open), or they stay in shares and so does its retraining "
        "(shares): it learns its retrained model", among=LABELS, several=True,
    )  # fmt: skip
    selection: str = option("random", "which images of a larger pool are asked", among=SELECTIONS, several=True)
    least: int = option(2, "answering parties that a query needs; with fewer it is refused", least=1)
    reliability: float = option(
        0.5, "a run is refused where a unanimous vote would come out less probably", above=0, below=1
    )
    local: Training = option(PRESETS["digits"].training, "training; retraining from scratch is the same")
    chunk: int = option(25, "queries that are charged and asked at once", least=1)
    frac_bits: int = option(20, "fraction bits of the secure inference", least=1, most=26)
    control: str | None = option(
        None, "in the answers' place come as many private samples again (longer), the party's own model's labels "
        "(own-labels), the true ones (true-labels), or the vote in the clear (no-noise)", among=CONTROLS,
    )  # fmt: skip
    seed: int = option(0, "of everything but keys, shares and noise", least=0, several=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is None and self.check_scale is not None:
            raise FederationError("check_scale is the noise of a check, which a run without a threshold does not make")
        if self.threshold is not None and self.noise != "gaussian":
            raise FederationError(f"a threshold is checked under gaussian noise (Confident-GNMax), not {self.noise}")
        if self.labels == "shares" and (self.control is not None or self.inference in ("open", "simulated")):
            raise FederationError("labels stay in shares (labels='shares') where nobody sees queries or votes: leave "
                                  "control out, and take inference='mpc' or 'ckks'")  # fmt: skip
        if self.labels == "shares" and (self.threshold is not None or isinstance(self.noise, ConfidentGNMax)):
            raise FederationError(
                "which queries a threshold answers the asker learns: leave it out, or labels='shares'"
            )
        if not isinstance(self.noise, str) and (self.scale is not None or self.threshold is not None or self.planned):
            raise FederationError("a mechanism has its own noise; leave scale, threshold and planned out")
        if self.planned and (self.threshold is not None or self.scale is not None or self.vote != "argmax"):
            raise FederationError("a plan chooses the noise of plain votes; leave scale, threshold and vote out")


@dataclass(frozen=True)
class Collaboration(Options):
    """Parties made of one data set: disjoint, equal shares of the training split. The first party of each of `querying`
    organisations has a pool from the test split; what is left of that measures accuracy (CaPC, 4.2)."""

    data: str = option("digits", "data set", among=IMAGES)
    parties: int | None = option(None, "how many (default: the paper's; digits 50)", least=2, several=True)
    querying: int = option(3, "organisations that ask, one after another", least=1)
    pool: int | None = option(None, "unlabelled images of each (default: the data set's)", least=1, several=True)
    architectures: tuple[str, ...] = option((), "names, in turn (default: the data set's)")
    skewed: bool = option(False, "few samples of the weak classes where it is asked; the others have them all")
    partition: str = option("iid", "who has which classes", among=tuple(PARTITIONS))
    models_each: int = option(1, "parties that belong to one organisation (virtual parties)", least=1, several=True)
    seed: int = option(0, "of everything but keys, shares and noise", least=0, several=True)


def collaboration(
    data: str | Dataset = "digits", parties: int | None = None, *, root=None, **known
) -> tuple[list[Party], Samples, int]:
    """Parties, test set and number of classes: what `CaPC` takes, of one data set.

    Args:
        data: a name, or a data set.
        root: where data sets lie.
        known: other fields of `Collaboration`.

    Raises:
        FederationError, ArchitectureError: options, or parties, pools and architectures that do not fit together.
        DataError: a data set or a partition that cannot be had; its relatives say which.
    """
    return divided(participants.dataset_of(data, root), Collaboration(parties=parties, **known))


def divided(dataset: Dataset, how: Collaboration, own: int | None = None) -> tuple[list[Party], Samples, int]:
    """The same, by a `Collaboration`.

    Args:
        own: seed of the first weights, in place of the collaboration's.
    """
    preset = PRESETS.get(dataset.name, PRESETS["digits"])
    count, pool = how.parties or preset.parties, how.pool or preset.pool
    asking = how.querying * how.models_each
    if asking > count:
        raise FederationError(
            f"of {count} parties {how.querying} are to ask, with {how.models_each} models to an organisation"
        )
    if how.querying * pool >= len(dataset.test):
        raise FederationError(
            f"{how.querying} pools of {pool} need more than the {len(dataset.test)} images of the test split, some of "
            f"which must be left to measure accuracy; take smaller pools"
        )
    hands = partition(dataset.train.labels, count, kind=how.partition, seed=how.seed)
    if how.skewed:
        weak = torch.isin(dataset.train.labels, torch.tensor(preset.weak))
        keep = ~weak | (torch.rand(len(weak), generator=generator(how.seed, "weak classes")) < preset.kept)
        hands = [hand[keep[hand]] if i < asking else hand for i, hand in enumerate(hands)]
    order = torch.randperm(len(dataset.test), generator=generator(how.seed, "pools"))
    names, made = how.architectures or preset.architectures, []
    for i, hand in enumerate(hands):
        name, architecture = f"p{i + 1}", names[i % len(names)]
        model = build(
            architecture, dataset.shape, dataset.classes, derive(how.seed if own is None else own, name, "weights")
        )
        asked = truth = None
        turn, first = divmod(i, how.models_each)
        if not first and turn < how.querying:
            asked, truth = dataset.test.take(order[turn * pool : (turn + 1) * pool])
        organisation = f"o{turn + 1}" if how.models_each > 1 else None
        made.append(Party(name, model, *dataset.train.take(hand), architecture, asked, organisation, truth))
    return made, dataset.test.take(order[how.querying * pool :]), dataset.classes


def check(parties: Sequence[Party], test: Samples, classes: int, how: Settings) -> None:
    """Names, data, models and pools.

    Raises:
        FederationError, ArchitectureError: naming the party and the way out.
    """
    check_federation([(p.name, (p.images, p.labels)) for p in parties], test, classes, "parties")
    asking = [party for party in parties if len(party.questions)]
    if not asking:
        raise FederationError("no party has a pool of images to ask about; give one at least a pool")
    seen: set[str] = set()
    for party in parties:
        if (key := str(party.model)) not in seen:
            seen.add(key)
            _check_model(party, classes, how)
    for party in parties:
        if how.budgets is not None and not NAME.fullmatch(party.owner):
            raise FederationError(
                f"the organisation {party.owner!r} has a budget file: use letters, digits, '-' and '_'"
            )
    for party in asking:
        if how.labels == "shares" and not isinstance(party.model, nn.Module):
            raise FederationError(
                f"{party.name}'s {type(party.model).__name__} is not trained on shares; take an nn.Module"
            )
        if party.truth is None and how.control == "true-labels":
            raise FederationError(f"{party.name}'s pool has no true labels, which the control true-labels trains on")


def check_apart(parties: Sequence[Party], how: Settings) -> None:
    """What parties in processes apart can do.

    Raises:
        FederationError: a control, an inference that protects nothing or needs all of them in one place, a budget that
            several parties would keep.
    """
    if how.control is not None or how.inference != "mpc":
        raise FederationError(
            "in a federation the inference is mpc; controls, and queries that others see, are for a simulation"
        )
    owners = [party.owner for party in parties]
    if how.budgets is not None and len(set(owners)) < len(owners):
        raise FederationError("an organisation with several parties has one budget, which one of them could not keep "
                              "for the others; give it one party, or leave --budgets out")  # fmt: skip


def _check_model(party: Party, classes: int, how: Settings) -> None:
    if isinstance(party.model, nn.Module):
        way_out = "all parties vote on the same classes"
        check_fits(party.model, f"{party.name}'s model", party.images.shape[1:], classes, way_out)
    elif not (hasattr(party.model, "fit") and hasattr(party.model, "predict")):
        raise FederationError(f"{party.name}'s model is neither an nn.Module nor a classifier with fit and predict")
    elif how.inference not in ("open", "simulated"):
        raise FederationError(
            f"{party.name}'s {type(party.model).__name__} cannot be evaluated on secrets; use inference='open', "
            f"which shows the queries to the answering parties"
        )


# What is CaPC's own to go wrong; the rest is `sectorch.federated.FederationError`.


class TooFewVotersError(FederationError):
    """Fewer answering parties than the mechanism can serve, before a run or because some were lost in the middle.

    Example:
        4 answering parties, and an answer needs 5

    What to do:
        Wait for those that were lost and ask again: nothing was revealed. Or plan with fewer
        voters and more noise, before the run.
    """
