"""Bad input is refused before any training starts, with what came, what was expected and the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sectorch.data import PartitionError
from sectorch.errors import SectorchError
from sectorch.federated import ArchitectureError, FederationError, Training
from sectorch.protocols.privhfl import PrivHFL, Settings, federation
from sectorch.protocols.privhfl import algorithm as algorithm_module

HOW = Settings(queries=10, local=Training("sgd", 0.1, 10, 1), retraining=Training("adam", 2e-3, 16, 1))


@pytest.fixture(scope="module")
def made():
    return federation("digits", 3, samples=20, test_samples=20)


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    def train(*_):
        raise AssertionError("training started")

    monkeypatch.setattr(algorithm_module, "train", train)


def changed(client, **changes):
    return replace(client, **changes)


def refused(made, error, text, *, first=None, how=HOW, test=None, classes=10):
    clients, own_test, _ = made
    clients = [changed(clients[0], **first), *clients[1:]] if first else clients
    with pytest.raises(error, match=text) as caught:
        PrivHFL(clients, test or own_test, classes, how)
    assert isinstance(caught.value, SectorchError) and "\n" not in str(caught.value)


def test_one_class(made):
    first = dict(labels=torch.full((20,), 7))
    refused(made, FederationError, "c1 has samples of class 7 only .* give it another class", first=first)


def test_fewer_samples_than_a_batch(made):
    how = replace(HOW, local=Training("sgd", 0.1, 21, 1))
    refused(made, FederationError, "c1 has 20 samples, fewer than one batch of 21; give it more, or lower", how=how)


def test_more_queries_than_the_pool(made):
    with pytest.raises(FederationError, match="101 queries of a pool of 100: enlarge the pool or ask fewer"):
        Settings(queries=101, pool=100)
    text = "c1: 21 queries were asked of 20 images in the private data set; expand it .* ask fewer"
    refused(made, FederationError, text, how=replace(HOW, queries=21, expansion="private"))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan")])
def test_fraction(fraction):
    with pytest.raises(FederationError, match="fraction must be above 0 and at most 1, got"):
        Settings(fraction=fraction)


def test_unknown_architecture():
    with pytest.raises(ArchitectureError, match="there is no architecture 'vgg19'; there are vgg7, resnet8, "):
        federation("digits", 3, architectures=["vgg19"])


def test_architecture_that_does_not_fit():
    with pytest.raises(ArchitectureError, match=r"resnet8 does not take images \(1, 8, 8\).* such as vgg7-small"):
        federation("digits", 3, architectures=["resnet8"])


def test_model_that_cannot_be_asked(made):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(64, 10)

        def forward(self, x):
            return self.last(torch.erfinv(x.flatten(1) / 2))

    refused(
        made,
        ArchitectureError,
        "c1's odd cannot be asked securely: .*erfinv",
        first=dict(model=Odd(), architecture="odd"),
    )


def test_logits_of_another_number(made):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    refused(made, ArchitectureError, r"gives \(2, 7\) .* \(2, 10\) were expected", first=dict(model=model))


def test_clients(made):
    clients, test, classes = made
    with pytest.raises(FederationError, match="at least two are needed, got 1"):
        PrivHFL(clients[:1], test, classes, HOW)
    with pytest.raises(FederationError, match="clients must be at least 2, got 1"):
        federation("digits", 1)
    refused(made, FederationError, "clients need different names", first=dict(name="c2"))
    refused(made, FederationError, "clients need different names", first=dict(name="../c1"))
    with pytest.raises(PartitionError, match="10 clients with 200 samples each need 2000, but there are 1347"):
        federation("digits", 10, samples=200)


def test_data(made):
    images, labels = made[0][0].images, made[0][0].labels
    for first, text in (
        (dict(images=images.double()), "c1: images must be float32"),
        (dict(images=images[:0], labels=labels[:0]), "c1: images must be float32"),
        (dict(labels=labels[:-1]), r"c1: labels must be int64 \[20\]"),
        (dict(labels=labels + 1), "c1: labels go from 1 to 10, but there are 10 classes"),
        (dict(images=images * torch.nan), "c1: images hold NaN or infinity"),
        (dict(images=images[..., :7]), r"c1 has images \(1, 8, 7\), the test set \(1, 8, 8\)"),
        (dict(images=images * 20000), "c1: pixels must stay below 4096 with 20 fraction bits"),
    ):
        refused(made, FederationError, text, first=first)
    refused(made, FederationError, "the test set: labels go from", classes=5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(expansion="rotate"), "no expansion 'rotate'; there are mixup"),
        (dict(selection="best"), "no selection 'best'; there are random"),
        (dict(relu="fast"), "no relu 'fast'; there are exact"),
        (dict(iterations=0), "iterations must be at least 1, got 0"),
        (dict(queries=0), "queries must be at least 1, got 0"),
        (dict(chunk=0), "chunk must be at least 1, got 0"),
        (dict(label_bits=-1), "label_bits must be at least 0, got -1"),
        (dict(frac_bits=30), "frac_bits must be at least 1 and at most 26, got 30"),
        (dict(lambdas=()), "at least one coefficient"),
    ],
)
def test_settings(options, text):
    with pytest.raises(FederationError, match=text):
        Settings(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(optimizer="lion"), "no optimizer 'lion'; there are sgd, adam"),
        (dict(batch_size=1), "batch_size must be at least 2, got 1"),
        (dict(epochs=-1), "epochs must be at least 0, got -1"),
        (dict(lr=0.0), "lr must be above 0 and below inf, got 0.0"),
    ],
)
def test_training(options, text):
    with pytest.raises(FederationError, match=text):
        Training(**{"optimizer": "sgd", "lr": 0.1, "batch_size": 10, "epochs": 1, **options})
