"""The settings of a run, and its data: scikit-learn's bundled sets, the paper's own, and a folder of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...data import datasets
from ...errors import DatasetMissingError
from ...federated.command import Options, option
from ...optional_deps import required_imports
from .errors import BatchMismatchError, NoiseError, WeightError

if TYPE_CHECKING:  # it needs the accounting's packages
    from ...dp import GaussianShares

PAPERS_DATA = ("ubmd", "aptos", "ldc", "cifar100")
"""Section V-A: of the registry of `sectorch.data`."""
NAMES = ("digits", "breast-cancer", "diabetes", *PAPERS_DATA, "images")
REGRESSIONS = ("diabetes", "ubmd", "aptos")
"""Their targets are numbers, as in the paper's Table I."""


@dataclass(frozen=True)
class Data:
    """Inputs and targets, split; targets are class numbers, or [N, 1] numbers for a regression."""

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    outputs: int

    @property
    def regression(self) -> bool:
        return self.train[1].is_floating_point()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.train[0].shape[1:])

    def targets(self, which: torch.Tensor, loss: str, dtype: torch.dtype) -> torch.Tensor:
        """Targets as the loss takes them: one-hot for a classification under mse."""
        if self.regression:
            return which.to(dtype)
        return torch.nn.functional.one_hot(which, self.outputs).to(dtype) if loss == "mse" else which


def load(name: str, root: str | None = None, dtype: torch.dtype = torch.float64) -> Data:
    """One data set. The bundled ones are split 4:1, the same every time, and columns of tables are standardised.

    Raises:
        BatchMismatchError: an unknown name, or a folder of images that is not there.
        DatasetMissingError: files are not there (nothing is downloaded), or scikit-learn or torchvision is missing.
    """
    if name not in NAMES:
        raise BatchMismatchError(f"data {name!r} is not known; there are {', '.join(NAMES)}")
    if name == "images":
        return _images(root, dtype)
    if name in PAPERS_DATA:
        found = datasets.load(name, root)
        parts = [part.take() for part in (found.train, found.test)]
        number = lambda y: y.to(dtype)[:, None] if name in REGRESSIONS else y
        train, test = ((x.to(dtype), number(y)) for x, y in parts)
        return Data(name, train, test, 1 if name in REGRESSIONS else found.classes)
    with required_imports(name, "scikit-learn", DatasetMissingError):
        from sklearn import datasets as bundled
        from sklearn.model_selection import train_test_split

    x, y = getattr(bundled, f"load_{name.replace('-', '_')}")(return_X_y=True)
    x, y = torch.tensor(x, dtype=dtype), torch.tensor(y)
    x = x.view(-1, 1, 8, 8) / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    if name == "diabetes":
        y = y.to(dtype)[:, None]
        y = (y - y.mean()) / y.std()
    classes = None if name in REGRESSIONS else y
    train, test = train_test_split(range(len(x)), test_size=0.2, random_state=0, stratify=classes)
    return Data(name, (x[train], y[train]), (x[test], y[test]), 1 if classes is None else int(y.max()) + 1)


def _images(root: str | None, dtype: torch.dtype) -> Data:
    if root is None or not Path(root).is_dir():
        none = "" if root is None else f"; {root} is none"
        raise BatchMismatchError(
            f"data 'images' is read from a folder that is there already: name it with --data-root{none}"
        )
    with required_imports("images", "torchvision", DatasetMissingError):
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import Compose, Resize, ToTensor
    shrink = Compose([Resize((64, 64)), ToTensor()])
    try:
        sets = [ImageFolder(Path(root) / part, transform=shrink) for part in ("train", "test")]
    except (RuntimeError, OSError) as error:
        raise BatchMismatchError(
            f"data 'images' is not in {root}, which should hold train/ and test/ with a folder of images for each class"
        ) from error
    loaded = []
    for part in sets:
        pairs = [part[i] for i in range(len(part))]
        loaded.append((torch.stack([x for x, _ in pairs]).to(dtype), torch.tensor([y for _, y in pairs])))
    return Data("images", loaded[0], loaded[1], int(loaded[0][1].max()) + 1)


LOSSES = ("cross_entropy", "mse")
EXCHANGES = ("shift", "paper")
PLACES = ("weights", "bias")
"""Where the last layer takes the additive noise: on every weight and its bias (Eq. 6), or on its bias alone."""
METHODS = ("perturbed", "fedavg")


@dataclass(frozen=True)
class Settings(Options):
    """One run."""

    clients: int = option(5, "how many", least=1, several=True)
    rounds: int = option(100, "of training, one server step each", least=1)
    batch_size: int = option(32, "of a client", least=1)
    local_batches: int = option(1, "averaged before an update is sent", least=1)
    learning_rate: float = option(0.1, "of the server's step", above=0, below=math.inf)
    momentum: float = option(0.9, "of the server's step", least=0, below=1)
    weight_decay: float = option(0.0, "of the server's step", least=0, below=math.inf)
    loss: str = option("cross_entropy", "cross_entropy for classes, mse for numbers", among=LOSSES)
    partitions: int = option(1, "m, 1 to the number of outputs", least=1, several=True)
    exchange: str | None = option(None, "for cross-entropy (default: shift)", among=EXCHANGES)
    masked: bool = option(True, "with masks", flag="no-masks", off="the server then sees each client's gradient")
    seed: int = option(0, "of weights, batches and noise", least=0, several=True)
    gradient_variance: float = option(
        0.0, "of the Gaussian noise which every FedAvg client adds to its gradient: the baseline of Table IV, not a "
        "calibrated mechanism", least=0, below=math.inf,
    )  # fmt: skip
    noise_on: str = option("weights", "where the noise is; bias: m + 1 terms, and hides less", among=PLACES)
    degree: int | None = option(None, "with how many others a client shares masks, even (default: all)", least=2)
    method: str = option("perturbed", "this scheme, or fedavg", among=METHODS)
    clip: float | None = option(
        None, "of a batch's gradient, in norm, at a client of mean weight; each client then adds a share of Gaussian "
        "noise, and the statement has the epsilon of a record", above=0, below=math.inf,
    )  # fmt: skip
    noise_multiplier: float = option(
        1.0, "deviation of the honest clients' noise over what one batch adds to the sum", above=0, below=math.inf
    )
    colluding: int = option(0, "clients that may work with the server, whose noise does not count", least=0)
    delta: float = option(1e-5, "of (epsilon, delta)", above=0, below=1)

    @property
    def private(self) -> GaussianShares | None:
        """The noise of a round's sum, where gradients are clipped."""
        if self.clip is None or self.method != "perturbed":
            return None
        from ...dp import GaussianShares

        if not self.clients - self.colluding > 0:
            raise WeightError(f"{self.colluding} of {self.clients} clients collude, and none is left to be protected")
        clip = self.clip / (self.clients * self.local_batches)
        return GaussianShares(self.noise_multiplier * clip, clip, self.clients - self.colluding, self.colluding)

    def sums_of_a_record(self, samples: Sequence[int], rounds: int, first: int = 0) -> int:
        """How often so many rounds add a record's batch to a private sum, at most; twice in one round counts four
        times.

        Batches of an epoch are disjoint, so it is once an epoch; in a round that reaches into several epochs, once in
        each of these.

        Args:
            samples: of each client.
            first: the first of these rounds.
        """
        found = 0
        for count in samples:
            turns, epoch = self.local_batches, max(1, count // self.batch_size)
            epochs = ((first + rounds) * turns - 1) // epoch - first * turns // epoch + 1  # that the rounds reach into
            together = 1 if epoch % turns == 0 else (turns + epoch - 2) // epoch + 1  # epochs that a round reaches into
            found = max(found, epochs * min(epochs, together))
        return found

    @property
    def exchange_used(self) -> str | None:
        """The exchange of the cross-entropy; None for mse."""
        return exchange_of(self.loss, self.partitions, self.exchange)


def exchange_of(loss: str, partitions: int, exchange: str | None) -> str | None:
    """The exchange of a scheme with these settings: "shift" for m = 1 unless named, where the paper's shows the client
    no less and the server far more."""
    return None if loss == "mse" else exchange or ("shift" if partitions == 1 else "paper")


@dataclass(frozen=True)
class Noise:
    """How large the noise is. Sizes are a trade of hiding against rounding: the server recovers a gradient as a
    difference of terms that grow with the square of `additive`.

    Attributes:
        spread: channel scales are log-uniform in [1/spread, spread]; above 1, and 2 or more for powers of two.
        additive: gamma_s is +-uniform in [additive/2, 2 additive]; the public r_a is uniform in [1/2, 3/2] times the
            root mean square of the last layer's scaled weights. At 1 what is added to a weight is of the weight's own
            size, and what is added to a logit about sqrt(n_{L-1}) times the logit. Positive. None: 1 for float64 and
            1/4 for float32, where a deep net's terms would else be a thousand times the gradient.
        powers_of_two: whether channel scales are powers of two. Floating point then rounds the noised pass exactly as
            the plain one, so no ReLU near zero turns over, but the digits of every weight stand open and a scale is
            one of 2 log2(spread) + 1. None: for float32, where one turned ReLU can cost a hundredth of a deep net's
            gradient; float64 has digits enough for any real scale.
    """

    spread: float = 4.0
    additive: float | None = None
    powers_of_two: bool | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.spread) and self.spread > 1):
            raise NoiseError(f"the spread of the channel scales has to be finite and above 1, got {self.spread}")
        if self.additive is not None and not (math.isfinite(self.additive) and self.additive > 0):
            raise NoiseError(f"the size of the additive noise has to be finite and positive, got {self.additive}")
        if self.powers_of_two and self.spread < 2:
            raise NoiseError(f"powers of two need a spread of 2 or more, got {self.spread}; or powers_of_two=False")

    def size(self, dtype: torch.dtype) -> float:
        """`additive` for weights of `dtype`."""
        return self.additive or (0.25 if dtype == torch.float32 else 1.0)

    def exact(self, dtype: torch.dtype) -> bool:
        """Whether weights of `dtype` get powers of two."""
        return self.spread >= 2 and dtype == torch.float32 if self.powers_of_two is None else self.powers_of_two


def shards(count: int, clients: int, seed: int) -> list[torch.Tensor]:
    """Sample numbers of each client: shuffled, sizes in proportion 1 : 2 : 1 : 2 ... so that weights differ."""
    if not 1 <= clients <= count // 2:
        raise WeightError(f"{clients} clients for {count} samples; between 1 and {count // 2} are possible")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = torch.tensor([1 + client % 2 for client in range(clients)]).cumsum(0)
    cuts = [int(count * part / parts[-1]) for part in parts[:-1]]
    return list(torch.tensor_split(order, cuts))


def batch_of(shard: torch.Tensor, client: int, turn: int, size: int, seed: int) -> torch.Tensor:
    """The `turn`-th batch of a client's shard; the epoch's order depends on the seed, client and epoch alone."""
    per_epoch = max(1, len(shard) // size)
    generator = torch.Generator().manual_seed(hash((seed, client, turn // per_epoch)) % (1 << 62))
    order = torch.randperm(len(shard), generator=generator)
    return shard[order[(turn % per_epoch) * size :][:size]]
