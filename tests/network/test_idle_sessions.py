"""Sessions that nobody asks in: closed with a word, and opened again by whoever asks next."""

from __future__ import annotations

import pytest
import torch
from network_world import Trio, until

from sectorch.network import Store

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    trio.server._serving._idle = 0.3
    yield trio
    trio.close()


def test_an_idle_session_ends_and_the_next_call_opens_another(trio, small_model):
    remote = trio.connection.model("hospital-b")
    for _ in range(2):
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
        assert until(lambda: trio.server.sessions == trio.party.connection.link.sessions == 0, 30)
    told = [opened.channel._failure for opened in remote._sessions.values()]
    assert {type(error).__name__ for error in told} == {"SessionOverError"}
    assert "nothing was asked for 0.3 s" in str(told[0])


@pytest.mark.parametrize("lasting", [False, True])
def test_what_would_be_lost_keeps_a_session(trio, tmp_path, lasting):
    """Material that Q keeps only while the session is open; with a lasting store, it is taken up again."""
    if lasting:
        trio.connection.close()
        trio.start_querying(Store(tmp_path / "q"))
    remote = trio.connection.model("hospital-b")
    remote.prepare(X.shape, 1)
    assert until(lambda: trio.server.sessions == 0, 1.5) == lasting
    remote(X)
    assert remote.prepared() == {}
    assert until(lambda: trio.server.sessions == 0, 30)
