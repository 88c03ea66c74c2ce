"""Algorithm 1's inputs, who takes part, and every check that can be made before any training starts."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...config import RELU_MODES, Scheme
from ...data.datasets import Dataset
from ...data.selection import EXPANSIONS, LAMBDAS, PAIRED, SELECTIONS
from ...dp.noise import epsilon_of, gaussian_curve
from ...errors import ArchitectureError, FederationError, SectorchError
from ...federated import participants
from ...federated.command import BudgetOptions, option
from ...federated.outcome import first_and_later
from ...federated.participants import FAMILIES, Participant, Samples, build, check_federation, check_fits
from ...federated.shared_training import LABELS
from ...federated.training import Training
from ...federated.watch import Estimate
from ...nn.module import secure
from ...session import Session

CONTROLS = ("longer", "own-labels", "own-mixup", "pooled")


@dataclass(frozen=True)
class Preset:
    """The training settings of a data set, and private samples of each client."""

    local: Training
    retraining: Training
    samples: int


def _retraining(batch: int) -> Training:
    """Appendix F: Adam, 50 epochs, learning rate 2e-3, "decayed by a factor of 0.1 on 25 epochs"."""
    return Training("adam", 2e-3, batch, 50, (25,))


PRESETS: dict[str, Preset] = {
    "svhn": Preset(Training("sgd", 0.5, 256, 250), _retraining(256), 1465),
    "cifar10": Preset(Training("sgd", 0.1, 64, 500), _retraining(64), 1000),
    "tiny-imagenet": Preset(Training("sgd", 0.01, 64, 500), _retraining(64), 10000),
    "digits": Preset(Training("sgd", 0.1, 10, 150), _retraining(64), 30),
}
"""Table 7 for the paper's data sets (momentum is not in the table, and is taken as none); ours for digits."""


@dataclass(frozen=True)
class Settings(BudgetOptions):
    """Algorithm 1's inputs, with the paper's defaults but for the data set's own training settings."""

    queries: int | None = option(
        None, "B, for each querying party and iteration (default 500; all private samples for private)", least=1,
        several=True,
    )  # fmt: skip
    pool: int | None = option(None, "images in the expanded pool (default: queries; four times, if selected)", least=1)
    fraction: float = option(
        1.0, "C, of the other clients, drawn anew for each querying party and iteration", above=0, most=1, short="C",
        several=True,
    )  # fmt: skip
    iterations: int = option(1, "in each, every client queries once", least=1)
    expansion: str = option("mixup", "what queries are made of", among=tuple(EXPANSIONS), several=True)
    lambdas: tuple[float, ...] = option(LAMBDAS, "mixup's coefficients, drawn from", least=0, most=1)
    selection: str = option("random", "which of the pool are asked", among=tuple(SELECTIONS), several=True)
    local: Training = option(PRESETS["digits"].local, "line 2")
    retraining: Training = option(PRESETS["digits"].retraining, "line 14")
    normalise: bool = option(False, "aggregate softmax outputs and not logits (Figure 13)")
    sigma: float = option(
        0.0, "standard deviation of the noise that the server adds to each class of a sum; 1 is one party's whole "
        "vote. Takes normalise; never seeded, so that no two runs are alike", least=0, most=1024, several=True,
    )  # fmt: skip
    average: bool = option(False, "Q divides the sum by the number of answers before its softmax")
    temperature: float = option(1.0, "that Q divides the logits by", above=0)
    secure: bool = option(
        True, "by the protocol", flag="plain", off="the same in the clear, as an ablation; protects nothing"
    )
    frac_bits: int = option(20, "fraction bits of the shares, 20 in the paper", least=1, most=26)
    relu: str = option("exact", "exact, or the paper's leaky privhfl", among=tuple(RELU_MODES))
    label_bits: int = option(6, "Q rounds soft labels to multiples of 2^-label_bits; 0 leaves them", least=0)
    labels: str = option(
        "open", "Q learns the soft labels (open), or they stay in shares and so does line 14 (shares), unrounded: Q "
        "learns its retrained model", among=LABELS, several=True,
    )  # fmt: skip
    chunk: int | None = option(None, "queries that cross a session at once (default: by memory)", least=1)
    control: str | None = option(
        None,
        "nobody is asked; in the queries' place come as many private samples (longer), queries with the client's own "
        "model's labels (own-labels) or with mixed true labels (own-mixup), or everybody's samples (pooled)",
        among=CONTROLS,
    )
    sequential: bool = option(
        False, "later clients ask models retrained in the same iteration, as Algorithm 1 reads word for word"
    )
    seed: int = option(0, "of everything but the shares' randomness", least=0, several=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expansion == "mixup" and not self.lambdas:
            raise FederationError("mixup needs at least one coefficient in lambdas")
        if self.pool is not None and self.queries is not None and self.queries > self.pool:
            raise FederationError(f"{self.queries} queries of a pool of {self.pool}: enlarge the pool or ask fewer")
        if self.control == "own-mixup" and self.expansion not in ("mixup", "private"):
            raise FederationError(f"only mixup and private queries have labels of their own, not {self.expansion}")

        if self.sigma and self.relu == "privhfl":
            raise FederationError("noise (sigma) hides nothing beside relu='privhfl', which shows Q the activations")
        if self.sigma and not self.normalise:
            raise FederationError("noise (sigma) needs normalise: only a probability vector has a size that is known")

        if self.labels == "shares" and not (self.secure and self.asks and self.relu == "exact"):
            raise FederationError("labels stay in shares (labels='shares') in secure runs with relu='exact' only")

        if self.labels == "shares" and self.sigma:
            raise FederationError("noise (sigma) is on sums that Q learns: leave it out, or take labels='open'")

        if self.budgets is not None and not (self.noised and self.secure):
            raise FederationError("budgets are of secure runs with noise: name sigma, and normalise")

    def budget(self, samples: int) -> tuple[int, int]:
        """Queries and pool of a client with so many private samples."""
        if self.expansion == "private":
            return self.queries or samples, samples
        queries = self.queries or min(500, self.pool or 500)
        return queries, self.pool or (queries if self.selection == "random" else 4 * queries)

    def answering(self, clients: int) -> int:
        """How many of the other clients answer one: C of them, rounded, and at least one."""
        return max(1, round(self.fraction * (clients - 1)))

    @property
    def noised(self) -> bool:
        """Whether sums get noise."""
        return self.sigma > 0 and self.asks

    @property
    def asks(self) -> bool:
        """Whether others are asked at all."""
        return self.control is None


def federation(
    data: str | Dataset = "digits", clients: int = 10, *, root=None, **known
) -> tuple[list[Participant], Samples, int]:
    """Clients, test set and number of classes: what `PrivHFL` takes, of one data set (section 4.1).

    Args:
        data: a name, or a data set.
        root: where data sets lie.
        known: other fields of `sectorch.federated.FederatedData`.

    Raises:
        FederationError, ArchitectureError, DataError, PartitionError: naming what does not fit.
    """
    dataset = participants.dataset_of(data, root)
    return divided(dataset, participants.FederatedData(clients=clients, **known))


def divided(
    dataset: Dataset, how: participants.FederatedData, own: int | None = None
) -> tuple[list[Participant], Samples, int]:
    """The same, by a `Federation`; `own` is the seed of the first weights, in place of the federation's."""
    names = how.architectures or FAMILIES.get(dataset.name, FAMILIES["digits"])
    samples = how.samples or PRESETS.get(dataset.name, PRESETS["digits"]).samples
    return participants.participants(dataset, how, samples, names, build, own=own)


def check(
    clients: Sequence[Participant], test: Samples, classes: int, how: Settings
) -> dict[str, tuple[Estimate, Estimate]]:
    """Everything that can be known before any training starts.

    Returns:
        what a session with each architecture and what a query in it take, by its text; nothing where nobody is asked
        securely.

    Raises:
        FederationError, ArchitectureError: naming the client and the way out.
    """
    check_federation([(c.name, (c.images, c.labels)) for c in clients], test, classes, "clients")
    for client in clients:
        if not client.images.is_meta:
            _check_client(client, how)
    found: dict[str, tuple[Estimate, Estimate]] = {}
    for client in clients:
        if (key := str(client.model)) not in found:
            way_out = f"choose an architecture for that size, such as {', '.join(FAMILIES['digits'])}"
            check_fits(client.model, f"{client.name}'s {client.architecture}", test[0].shape[1:], classes, way_out)
            found[key] = _asked(client, how) if how.secure and how.asks else (Estimate(0.0), Estimate(0.0))
    return found


def _check_client(client: Participant, how: Settings) -> None:
    n = len(client.images)
    own = client.labels.unique()
    if len(own) < 2:
        raise FederationError(
            f"{client.name} has samples of class {int(own[0])} only and would learn to answer nothing else; give it "
            f"another class (a larger alpha or classes_each, or another seed of the partition)"
        )
    if n < how.local.batch_size:
        raise FederationError(
            f"{client.name} has {n} samples, fewer than one batch of {how.local.batch_size}; give it more, or lower "
            f"the local batch size"
        )
    queries, pool = how.budget(n)
    if queries > pool:
        more = "the private data set; expand it (mixup, cutmix, cutout)" if how.expansion == "private" else "its pool"
        raise FederationError(f"{client.name}: {queries} queries were asked of {pool} images in {more}; ask fewer")
    if how.expansion in PAIRED and n < 2:
        raise FederationError(f"{client.name}: {how.expansion} pairs images and needs at least two, got {n}")
    limit = Scheme(how.frac_bits).activation_limit
    if how.secure and float(client.images.abs().max()) >= limit:
        raise FederationError(f"{client.name}: pixels must stay below {limit:.0f} with {how.frac_bits} fraction bits")


def _asked(client: Participant, how: Settings, rows: int = 8) -> tuple[Estimate, Estimate]:
    """What a session with this model and then each query take, measured on black images.

    A model that cannot be asked is refused.
    """
    black = torch.zeros((rows, *client.images.shape[1:]))
    try:
        secured = secure(copy.deepcopy(client.model).eval(), Scheme(how.frac_bits, how.relu), session=Session())
        with torch.no_grad():
            session, queries = first_and_later(lambda: secured(black))
    except SectorchError as error:
        raise ArchitectureError(
            f"{client.name}'s {client.architecture} cannot be asked securely: {str(error).splitlines()[0]}"
        ) from error
    return session, queries * (1 / rows)


# What noise at the server costs and gives: (epsilon, delta) for an answering party's model and the data in it.
#
# With `normalise`, a party's part of the sum that Q learns is a probability vector, and another model of it changes the
# sum by at most sqrt(2) in the L2 norm. S adds discrete Gaussian noise on the ring's grid to each sum. Neighbouring
# runs differ in everything that one party trained on.


def change(classes: int) -> float:
    """How far one party's answer moves the sum: sqrt(2), and twice the error of softmax on shares (docs/ops.md)."""
    return math.sqrt(2) + 2 * math.sqrt(classes) * (1e-5 + 2e-6 * math.sqrt(classes))


@dataclass(frozen=True)
class NoisySums:
    """The mechanism that a budget is charged for: one sum with noise, to a party that answered it."""

    how: Settings
    classes: int

    @property
    def curve(self) -> np.ndarray:
        """Its Renyi cost."""
        return curve(self.how, self.classes, 1)


def curve(how: Settings, classes: int, queries: int) -> np.ndarray:
    """The Renyi cost of so many sums with noise of `sigma` to a party that answered all of them."""
    return queries * gaussian_curve(how.sigma, change(classes))


def epsilon(how: Settings, classes: int, queries: int) -> float:
    """`curve` as an epsilon at the settings' delta."""
    return epsilon_of(curve(how, classes, queries), how.delta)


def spent(records: dict[str, list[dict]], how: Settings, classes: int) -> dict[str, float]:
    """Epsilon of the party that answered most, towards one querying party and towards all together.

    In a second round other models have learned from its answers, so what one party sees then comes from all of them:
    only the figure towards all holds.
    """
    rounds = [record for of_one in records.values() for record in of_one[1:]]
    names = {name for record in rounds for name in record["answering"]}
    answered = [sum(r["queries"] for r in rounds if name in r["answering"]) for name in names]
    found = {"all": epsilon(how, classes, max(answered))}
    if how.iterations == 1 and not how.sequential:
        found["one"] = epsilon(how, classes, max(r["queries"] for r in rounds))
    return found


def sentences(found: dict[str, float], how: Settings) -> Sequence[str]:
    """The guarantee in words."""
    one = f"epsilon {found['one']:.4g} towards one querying party and " if "one" in found else ""
    return [
        f"The server added discrete Gaussian noise of sigma {how.sigma:g} to every class of every sum. For everything "
        f"that a party trained on, its answers to all queries of the run are {one}epsilon {found['all']:.4g} towards "
        f"all others together, at delta {how.delta:g} (Renyi composition).",
        "The noise protects from who does not know it: the server does, and is trusted to add it. The bit whether a "
        "value left the number format's range is not noised.",
    ]
