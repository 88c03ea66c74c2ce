"""A server and an answering party with real TLS on loopback, in threads of this process."""

from __future__ import annotations

from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest
import torch
from commands import PIPE, Command
from network_world import known
from torch import nn

from sectorch.network import Pins, Server, answer
from sectorch.network.identity.authority import make_authority
from sectorch.testing.local_network import enrol


@pytest.fixture(scope="session", autouse=True)
def settings_of_the_tests(tmp_path_factory):
    """Identity keys are pinned here and not in the settings of whoever runs the tests; a stage's processes have nothing
    to import."""
    programs = SimpleNamespace(Popen=Command, PIPE=PIPE, TimeoutExpired=TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sectorch.testing.local_network.subprocess", programs)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(scope="module")
def patience():
    """A party is lost when its connection closes: threads of one busy process may well be silent for four seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sectorch.network.wire.tls_stream.SILENT", 60)
        yield


@pytest.fixture(autouse=True)
def no_line_is_left_out(monkeypatch):
    """Each test begins a minute of its own, in which so many refused connections have a line."""
    monkeypatch.setattr("sectorch.network.log._LINE_LIMITS", {})


@pytest.fixture(scope="session")
def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
    ).eval().requires_grad_(False)  # fmt: skip


@pytest.fixture(scope="session")
def pki(tmp_path_factory):
    """A folder with a CA, and the certificates of a server and three clients, who know each other's identity keys."""
    folder = tmp_path_factory.mktemp("pki")
    make_authority(folder)
    made = {"server": enrol(folder, "server", hosts=("localhost",))}
    for name in ("hospital-b", "alice", "bob"):
        made[name] = enrol(folder, name)
    known(Pins().path, made)
    return folder, made


@pytest.fixture(scope="module")
def star(pki, small_model):
    """(address, credentials by name, the model): a running server with 'hospital-b' answering."""
    _, made = pki
    server = Server("localhost:0", made["server"])
    address = f"localhost:{server.port}"
    model = small_model
    party = answer(address, made["hospital-b"], model, torch.randn(2, 1, 8, 8))
    yield address, made, model
    party.close()
    server.stop()
