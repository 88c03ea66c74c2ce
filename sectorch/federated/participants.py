"""Who takes part with which data, and the checks that all federations make before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import nn

from .errors import ArchitectureError, FederationError
from .folder import digest

NAME = re.compile(r"[\w-]{1,64}")
Samples = tuple[torch.Tensor, torch.Tensor]
"""Images [N, C, H, W] float32 and labels [N] int64."""

P = TypeVar("P", bound="Participant")


@dataclass
class Participant:
    """A private data set and a local model.

    `images` [N, C, H, W] float32, `labels` [N] int64; on the meta device those of a participant elsewhere, of whom
    shapes and the model's architecture are known. The model is copied and never changed. `architecture` is a name for
    tables.
    """

    name: str
    model: nn.Module = field(repr=False)
    images: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)
    architecture: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image, without its batch."""
        return tuple(self.images.shape[1:])

    def elsewhere(self: P) -> P:
        """What others know of it: its name, how many samples it has, and the architecture of its model."""
        return replace(self, images=self.images.to("meta"), labels=self.labels.to("meta"))

    def fingerprint(self) -> str:
        """What a run folder recognises it by: its data and its model's first weights, where they are here."""
        if self.images.is_meta:
            return digest(self.images, self.labels)
        return digest(self.images, self.labels, *self.model.state_dict().values())


def check_names(names: Sequence[str], who: str) -> None:
    """At least two, each a name of its own that can be a file's.

    Raises:
        FederationError: otherwise.
    """
    if len(names) < 2:
        raise FederationError(f"{who} learn from each other: at least two are needed, got {len(names)}")
    if len(set(names)) < len(names) or not all(NAME.fullmatch(name) for name in names):
        raise FederationError(f"{who} need different names of letters, digits, '-' and '_', got {list(names)}")


def check_samples(whose: str, samples: Samples, classes: int) -> None:
    """Images [N, C, H, W] float32, all finite, and labels of the classes there are.

    Raises:
        FederationError: otherwise, saying what came.
    """
    images, labels = samples
    if images.dim() != 4 or images.dtype != torch.float32 or not len(images):
        raise FederationError(
            f"{whose}: images must be float32 [N, C, H, W], got {images.dtype} of shape {tuple(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
        raise FederationError(
            f"{whose}: labels must be int64 [{len(images)}], got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if images.is_meta:  # of a participant elsewhere its shapes are known
        return
    if not bool(images.isfinite().all()):
        raise FederationError(f"{whose}: images hold NaN or infinity")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise FederationError(f"{whose}: labels go from {low} to {high}, but there are {classes} classes")


def check_federation(people: Iterable[tuple[str, Samples]], test: Samples, classes: int, who: str) -> None:
    """Names, everybody's samples, the test set's, and that all have images of one shape.

    Raises:
        FederationError: naming whose data it is, and the way out.
    """
    people = list(people)
    check_names([name for name, _ in people], who)
    if classes < 2:
        raise FederationError(f"at least two classes are needed, got {classes}")
    check_samples("the test set", test, classes)
    for name, samples in people:
        check_samples(name, samples, classes)
        if samples[0].shape[1:] != test[0].shape[1:]:
            raise FederationError(
                f"{name} has images {tuple(samples[0].shape[1:])}, the test set {tuple(test[0].shape[1:])}; resize one "
                f"of them"
            )


def check_fits(model: nn.Module, name: str, shape: Sequence[int], classes: int, way_out: str = "") -> None:
    """The model takes two such images and gives two rows of logits.

    Args:
        way_out: what could be done about one that does not.

    Raises:
        ArchitectureError: naming what came out, or torch's own message.
    """
    training = model.training
    try:
        with torch.no_grad():
            out = model.eval()(torch.zeros((2, *shape)))
    except RuntimeError as error:
        raise ArchitectureError(
            f"{name} does not take images {tuple(shape)}: {str(error).splitlines()[0]}{way_out and f'; {way_out}'}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(out, torch.Tensor) or out.shape != (2, classes):
        what = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ArchitectureError(f"{name} gives {what} for two images, but logits (2, {classes}) were expected")
