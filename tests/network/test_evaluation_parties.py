"""An evaluation among parties apart, over TLS: a vendor's model, rows of two owners, metrics that one learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from federation_world import World, each
from torch import nn

import sectorch
from sectorch.choreography.roles import STAR
from sectorch.errors import ArgumentError, DisagreementError
from sectorch.federated.parties import Simulation

PARTIES = {"north": "Q", "vendor": "A", "centre": "S", "south": "south"}
NAMES = {"Q": "Q", "A": "A", "S": "S", "O": ["south"]}
METRICS = ["auroc", "auprc", "accuracy", "log_loss", "brier", "ece", "calibration", "confusion", "gaps"]

pytestmark = pytest.mark.sectorch_long


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("evaluation"), PARTIES)
    yield world
    world.close()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).eval()


def rows(owner: str) -> torch.Tensor:
    """Three numbers, a group and a label for each row."""
    draws = torch.Generator().manual_seed(len(owner))
    x = torch.randn(20, 3, generator=draws)
    label = x[:, :1] + torch.randn(20, 1, generator=draws) > 0
    return torch.cat((x, torch.randint(0, 2, (20, 1), generator=draws), label), 1)


def program(parties: Any, version: str | None = None) -> dict[str, torch.Tensor]:
    with parties.session(STAR, NAMES) as session:
        own = {
            name: sectorch.announced(parties.inputs.get(name), owner=name, session=session) for name in ("Q", "south")
        }
        x = torch.cat([sectorch.share(v[:, :3], owner=name, session=session) for name, v in own.items()])
        codes = torch.cat([sectorch.share(v[:, 3:].long(), owner=name, session=session) for name, v in own.items()])
        with torch.device("meta" if not parties.present("A") else "cpu"):
            model = net() if parties.present("A") else nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).eval()
        found = sectorch.evaluate(sectorch.secure(model, session=session), x, codes[:, 1], METRICS,
                                  {"ward": (codes[:, 0], ("a", "b"))}, version=version)  # fmt: skip
        return {name: one.reveal(to="south").values for name, one in found.items()}


def test_metrics_of_parties_apart_are_those_of_one_process(world):
    inputs = {"Q": rows("Q"), "south": rows("south")}
    expected = program(Simulation(inputs))

    def work(name: str):
        with world.party(name) as party:
            party.inputs = {PARTIES[name]: inputs[PARTIES[name]]} if PARTIES[name] in inputs else {}
            return program(party)

    found = each(PARTIES, work)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    assert all(np.array_equal(found["south"][k], v, equal_nan=True) for k, v in expected.items())
    assert all(v.is_meta for name in ("north", "vendor", "centre") for v in found[name].values())


def test_another_version_of_the_model_at_one_party_ends_the_run_before_anything_is_revealed(world):
    def work(name: str):
        with world.party(name) as party:
            party.inputs = {PARTIES[name]: rows(PARTIES[name])} if name in ("north", "south") else {}
            return program(party, "2" if name == "vendor" else "1")

    found = each(PARTIES, work)
    assert all(isinstance(result, BaseException) for result in found.values()), found
    assert any(isinstance(result, DisagreementError) for result in found.values()), found


def test_labels_of_one_class_are_refused_at_their_owner_before_anything_is_shared(world):
    def work(name: str):
        with world.party(name) as party, party.session(STAR, NAMES) as session:
            here = PARTIES[name] == "south"
            labels = torch.ones(4, dtype=torch.int64, device="cpu" if here else "meta")
            scores = torch.rand(4, device="cpu" if here else "meta")
            return sectorch.evaluate(None, scores, labels, ["auroc"], owner="south", session=session)

    found = each(PARTIES, work)
    assert isinstance(found["south"], ArgumentError) and "one class" in str(found["south"]), found
    assert isinstance(found["centre"], BaseException), found  # which waits for the shares
