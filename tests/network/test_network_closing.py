"""A session that ends lets go of its secrets at each party, and does not look through the whole heap for them."""

from __future__ import annotations

import gc

import pytest
import torch
from network_world import Trio, until

from sectorch import errors
from sectorch.choreography.streams import PairKey
from sectorch.network.parties.session import PartySession, load_loops
from sectorch.nn.graph import located_errors

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def uncollected():
    """Nothing is collected but what somebody asks for, which is counted."""
    asked = []
    load_loops()  # which collects, once
    gc.collect()
    gc.disable()
    gc.callbacks.append(callback := lambda phase, info: asked.append(info["generation"]) if phase == "start" else None)
    yield asked
    gc.callbacks.remove(callback)
    gc.unfreeze()
    gc.enable()


def secrets() -> int:
    """Pair keys, and tensors with content, that have come since the last freeze."""
    full = lambda x: issubclass(type(x), torch.Tensor) and x.device.type != "meta" and x.numel() > 0
    return sum(type(x) is PairKey or full(x) for x in gc.get_objects())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a module of torch, for being looked at
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_session_that_ends_lets_go_of_its_secrets_at_once(
    pki, small_model, tmp_path, monkeypatch, uncollected, request, ends
):
    trio = Trio(pki[1], small_model, X, tmp_path)
    request.addfinalizer(trio.close)
    trio.connection.model("hospital-b")(X)  # what lasts as long as the process is there then
    trio.connection.close()
    assert until(lambda: trio.server.sessions == 0, 30)
    trio.start_querying()
    gc.freeze()
    remote = trio.connection.model("hospital-b")
    remote.prepare(2)
    assert secrets() > 0
    if ends == "well":
        remote(X)
        remote(X)
    else:
        fail = lambda self, *_: 1 / 0 if self._me.role == "A" else predict(self, *_)
        predict = PartySession.predict
        monkeypatch.setattr(PartySession, "predict", fail)
        with pytest.raises(errors.NetworkError, match="ZeroDivisionError"):
            remote(X)
    remote.close()
    del remote
    assert until(trio.idle, 30)
    assert until(lambda: secrets() == 0, 30)
    assert uncollected == []


def test_a_collection_passes_over_what_was_loaded_before_a_connection():
    """It holds the interpreter's lock, and signs of life wait for it: with many clients on few cores, for too long."""
    load_loops.__wrapped__()
    assert gc.get_freeze_count() > 100_000
    assert len(gc.get_objects()) < 5000


@pytest.mark.parametrize("error", [errors.PeerLostError("lost"), errors.ShapeError("ragged")])
def test_an_error_with_a_place_does_not_keep_itself_alive(error):
    """Its frames hold shares: where it were its own cause, they would stay until the next collection."""
    error.place = "layer '0' (Linear)"
    with pytest.raises(type(error)) as caught, located_errors():
        raise error
    assert caught.value.__cause__ is not caught.value
    assert caught.value.__context__ is not caught.value
