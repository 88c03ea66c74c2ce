"""A model that comes back as another version, and a server that comes back at all."""

from __future__ import annotations

import copy

import pytest
import torch
from network_world import Trio, described, until
from torch import nn

from sectorch import errors
from sectorch.network import Store
from sectorch.network.parties.answer import Answering

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    yield trio
    trio.close()


def retrained(model: nn.Module) -> nn.Module:
    """The same architecture, other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[5].bias += 1
    return other


def comes_back(trio, model: nn.Module, folder) -> None:
    trio.party.close()
    trio.start_answering(Store(folder), described(model, X))


def test_who_asks_is_told_of_another_version(trio, small_model, tmp_path, caplog):
    other = retrained(small_model)
    comes_back(trio, small_model, tmp_path / "a")
    remote = trio.connection.model("hospital-b")
    remote(X)
    first = remote.version
    comes_back(trio, small_model, tmp_path / "a")
    remote(X)
    assert remote.version == first and caplog.messages == []
    comes_back(trio, other, tmp_path / "a")
    assert (remote(X) - other(X)).abs().max() < 1e-4
    assert remote.version != first
    (said,) = caplog.messages
    assert said == f"another version answers model=hospital-b version={remote.version} before={first}"


def losing() -> nn.Module:
    """Its last layer's weights keep two bits."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval().requires_grad_(False)
    model[1].weight.mul_(50)
    model[3].weight.mul_(1e-4)
    return model


def test_an_imprecise_model_is_not_answered_with(trio, pki, small_model, tmp_path):
    """Neither at the start nor in another's place, unless its owner says so; then a warning says what is lost."""
    with pytest.warns(errors.PrecisionWarning, match="layer '3'"):  # as save_model has it
        lost = described(losing(), X)
    party = lambda imprecise: Answering(
        trio.address, pki[1]["hospital-b"], *lost, trio.pins, Store(tmp_path / "s"), imprecise=imprecise
    )
    with pytest.raises(errors.PrecisionError, match=r"'hospital-b' loses digits: layer linear_1: .*--imprecise"):
        party(False)
    with pytest.warns(errors.PrecisionWarning, match=r"'hospital-b' loses digits: layer linear_1"):
        party(True).close()
    before = trio.connection.model("hospital-b").version
    with pytest.raises(errors.PrecisionError, match="loses digits"):
        trio.party.offer(*lost)
    remote = trio.connection.model("hospital-b")
    assert remote.version == before and (remote(X) - small_model(X)).abs().max() < 1e-4


def test_another_architecture_is_another_version_too(trio, tmp_path):
    first = trio.connection.model("hospital-b").version
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval().requires_grad_(False)
    comes_back(trio, bare, tmp_path / "a")
    assert trio.connection.model("hospital-b").version != first


def test_who_asks_for_one_version_gets_no_other(trio, small_model, tmp_path):
    comes_back(trio, small_model, tmp_path / "a")
    version = trio.connection.model("hospital-b").version
    remote = trio.connection.model("hospital-b", version=version)
    assert (remote(X) - small_model(X)).abs().max() < 1e-4
    comes_back(trio, retrained(small_model), tmp_path / "a")
    asked = trio.party.answered
    for ask in (lambda: remote(X), lambda: remote(X), lambda: trio.connection.model("hospital-b", version=version)):
        with pytest.raises(errors.RefusedError, match=f"only {version} is asked for"):
            ask()
    assert trio.party.answered == asked
    assert until(lambda: trio.server.sessions == 0, 30)


def nobody(*_) -> None:
    raise errors.PeerLostError("nobody listens there")


@pytest.mark.parametrize("asked_meanwhile", [True, False])
def test_a_connection_outlives_its_server(trio, small_model, monkeypatch, asked_meanwhile):
    """The first call after the server is back is answered, and nobody has to connect anew."""
    remote = trio.connection.model("hospital-b")
    remote(X)
    trio.server.stop()
    trio.party.close()
    assert until(lambda: trio.connection.link.closed is not None, 30)
    if asked_meanwhile:
        with monkeypatch.context() as patch:
            patch.setattr("sectorch.network.parties.client.dial", nobody)
            with pytest.raises(errors.PeerLostError, match="nobody listens there"):
                remote(X)
    trio.start_server()
    trio.start_answering()
    assert (remote(X) - small_model(X)).abs().max() < 1e-4
    assert trio.connection.models() == ["hospital-b"]


def test_a_connection_that_was_closed_does_not_dial_again(trio):
    trio.connection.close()
    with pytest.raises(errors.PeerLostError):
        trio.connection.models()
    assert until(lambda: len([link for link in trio.server._links if link.closed is None]) == 1, 30)
