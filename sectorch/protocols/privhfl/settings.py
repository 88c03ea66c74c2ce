"""The clients and settings of a run, and every check that can be made before any training starts."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...data.expansion import EXPANSIONS, LAMBDAS, PAIRED
from ...data.selection import SELECTIONS
from ...errors import SectorchError
from ...nn.secure import secure
from ...ring.scheme import RELU_MODES, Scheme
from ...session import Session
from .architectures import check_fits
from .errors import ArchitectureError, PrivHFLError
from .training import PRESETS, Training

NAME = re.compile(r"[\w-]{1,64}")


@dataclass
class Client:
    """P_j: a private data set D_j and a customised local model M_j.

    `images` [N, C, H, W] float in [0, 1] (or any finite range below 2^14), `labels` [N] int64. The model is copied and
    never changed. `architecture` is a name for tables.
    """

    name: str
    architecture: str
    model: nn.Module = field(repr=False)
    images: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Settings:
    """Algorithm 1's inputs, with the paper's defaults but for the data set's own training settings.

    Args:
        queries: B, for each querying party and iteration; None takes 500, or all private samples for "private".
        pool: images in the expanded pool; None takes `queries` for random selection and four times that otherwise.
        fraction: C, of the other clients, drawn anew for each querying party and iteration; at least one answers.
        iterations: iter; in each, every client queries once.
        expansion, lambdas, selection: see `sectorch.data`.
        local, retraining: see `training.py`.
        normalise: aggregate softmax outputs and not logits (Figure 13).
        secure: False computes the same in the clear, as an ablation; it protects nothing.
        frac_bits: of the shares; 20, as the paper has. More make a secure and a plain run differ by less, and leave
            activations and weights less room: see `sectorch.Scheme`.
        relu: "exact", or the paper's leaky "privhfl".
        label_bits: Q rounds soft labels to multiples of 2^-label_bits; 0 leaves them. See `query.soft_labels`.
        chunk: queries that cross a session at once; by memory unless named.
        control: nobody is asked. Instead of queries, as many private samples come with their own labels, so that
            retraining takes the same optimiser steps: what a run gains over this one comes from the answers.
        sequential: clients that query later in an iteration ask models that were retrained in it, as Algorithm 1 reads
            word for word. Otherwise all ask the models of the iteration's start, and their order does not matter.
        seed: of everything but the shares' randomness.
    """

    queries: int | None = None
    pool: int | None = None
    fraction: float = 1.0
    iterations: int = 1
    expansion: str = "mixup"
    lambdas: tuple[float, ...] = LAMBDAS
    selection: str = "random"
    local: Training = PRESETS["digits"].local
    retraining: Training = PRESETS["digits"].retraining
    normalise: bool = False
    secure: bool = True
    frac_bits: int = 20
    relu: str = "exact"
    label_bits: int = 6
    chunk: int | None = None
    control: bool = False
    sequential: bool = False
    seed: int = 0

    def __post_init__(self):
        _choice("expansion", self.expansion, EXPANSIONS)
        _choice("selection", self.selection, SELECTIONS)
        _choice("relu", self.relu, RELU_MODES)
        if not 0 < self.fraction <= 1:
            raise PrivHFLError(
                f"C, the fraction of the others that answer, must be above 0 and at most 1, got {self.fraction}"
            )
        for name, least in (("queries", 1), ("pool", 1), ("iterations", 1), ("chunk", 1), ("label_bits", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise PrivHFLError(f"{name} must be at least {least}, got {value}")
        if not 1 <= self.frac_bits <= 26:
            raise PrivHFLError(f"frac_bits must be between 1 and 26, got {self.frac_bits}")
        if self.expansion == "mixup" and (not self.lambdas or not all(0 <= v <= 1 for v in self.lambdas)):
            raise PrivHFLError(f"mixup coefficients must lie in [0, 1], got {list(self.lambdas)}")
        if self.pool is not None and self.queries is not None and self.queries > self.pool:
            raise PrivHFLError(f"{self.queries} queries of a pool of {self.pool}: enlarge the pool or ask fewer")

    def budget(self, samples: int) -> tuple[int, int]:
        """Queries and pool of a client with so many private samples."""
        if self.expansion == "private":
            return self.queries or samples, samples
        queries = self.queries or min(500, self.pool or 500)
        return queries, self.pool or (queries if self.selection == "random" else 4 * queries)

    def answering(self, clients: int) -> int:
        """How many of the other clients answer one: C of them, rounded, and at least one."""
        return max(1, round(self.fraction * (clients - 1)))


def _choice(what: str, value: str, among) -> None:
    if value not in among:
        raise PrivHFLError(f"there is no {what} {value!r}; there are {', '.join(among)}")


def check(clients: Sequence[Client], test: tuple[torch.Tensor, torch.Tensor], classes: int, how: Settings) -> None:
    """Everything that can be known before any training starts.

    Raises:
        PrivHFLError, ArchitectureError: naming the client and the way out.
        SectorchError: a model that `sectorch.secure` does not take.
    """
    if len(clients) < 2:
        raise PrivHFLError(f"a client learns from others: at least two clients are needed, got {len(clients)}")
    names = [client.name for client in clients]
    if len(set(names)) < len(names) or not all(NAME.fullmatch(name) for name in names):
        raise PrivHFLError(f"clients need different names of letters, digits, '-' and '_', got {names}")
    if classes < 2:
        raise PrivHFLError(f"at least two classes are needed, got {classes}")
    _check_data("the test set", *test, classes)
    for client in clients:
        _check_client(client, classes, how)
        if client.images.shape[1:] != test[0].shape[1:]:
            raise PrivHFLError(
                f"{client.name} has images {tuple(client.images.shape[1:])}, the test set {tuple(test[0].shape[1:])}; "
                f"resize one of them"
            )
    seen = set()
    for client in clients:
        if (key := str(client.model)) not in seen:
            seen.add(key)
            check_fits(client.model, f"{client.name}'s {client.architecture}", client.images.shape[1:], classes)
            _check_secure(client, how)


def _check_data(whose: str, images: torch.Tensor, labels: torch.Tensor, classes: int) -> None:
    if images.dim() != 4 or images.dtype != torch.float32 or not len(images):
        raise PrivHFLError(
            f"{whose}: images must be float32 [N, C, H, W], got {images.dtype} of shape {tuple(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
        raise PrivHFLError(
            f"{whose}: labels must be int64 [{len(images)}], got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if not bool(images.isfinite().all()):
        raise PrivHFLError(f"{whose}: images hold NaN or infinity")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise PrivHFLError(f"{whose}: labels go from {low} to {high}, but there are {classes} classes")


def _check_client(client: Client, classes: int, how: Settings) -> None:
    _check_data(client.name, client.images, client.labels, classes)
    n = len(client.images)
    own = client.labels.unique()
    if len(own) < 2:
        raise PrivHFLError(
            f"{client.name} has samples of class {int(own[0])} only and would learn to answer nothing else; give it "
            f"another class (a larger alpha or classes_each, or another seed of the partition)"
        )
    if n < how.local.batch:
        raise PrivHFLError(
            f"{client.name} has {n} samples, fewer than one batch of {how.local.batch}; give it more, or lower the "
            f"local batch"
        )
    queries, pool = how.budget(n)
    if queries > pool:
        more = "the private data set; expand it (mixup, cutmix, cutout)" if how.expansion == "private" else "its pool"
        raise PrivHFLError(f"{client.name}: {queries} queries were asked of {pool} images in {more}; ask fewer")
    if how.expansion in PAIRED and n < 2:
        raise PrivHFLError(f"{client.name}: {how.expansion} pairs images and needs at least two, got {n}")
    limit = Scheme(how.frac_bits).activation_limit
    if how.secure and float(client.images.abs().max()) >= limit:
        raise PrivHFLError(f"{client.name}: pixels must stay below {limit:.0f} with {how.frac_bits} fraction bits")


def _check_secure(client: Client, how: Settings) -> None:
    """The model can be asked securely: two black images, with all that comes before and after."""
    try:
        session = Session()
        secured = secure(copy.deepcopy(client.model).eval(), Scheme(how.frac_bits), session=session)
        with torch.no_grad():
            secured(torch.zeros((2, *client.images.shape[1:])))
    except SectorchError as error:
        raise ArchitectureError(
            f"{client.name}'s {client.architecture} cannot be asked securely: {str(error).splitlines()[0]}"
        ) from error
