"""Several models, versions and processes of one answering party."""

from __future__ import annotations

import copy
import logging
import signal
import threading

import pytest
import torch
from network_world import Trio, described, until
from test_network_versions import retrained

import sectorch
from sectorch import errors
from sectorch.network import Store
from sectorch.network.commands.serve import models_by_name, reload_models
from sectorch.network.names import model_name
from sectorch.network.parties.answer import Answering
from sectorch.network.parties.server import Registry
from sectorch.serving.model_file import save_model
from sectorch.testing.local_network import Stage

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    yield trio
    trio.close()


def close(one, other) -> bool:
    return bool((one - other).abs().max() < 1e-4)


def replica(trio, folder, model, name: str = "") -> Answering:
    credentials, known = trio.made["hospital-b"], trio.pins
    party = Answering(trio.address, credentials, *described(model, X), known, Store(folder), replica=True, model=name)
    party.register("hospital-b")
    return party


def test_one_process_answers_with_several_models(trio, small_model):
    other = retrained(small_model)
    assert trio.party.offer(*described(other, X), "later")
    assert trio.connection.models() == ["hospital-b", "hospital-b/later"]
    assert close(trio.connection.model("hospital-b/later")(X), other(X))
    assert close(trio.connection.model("hospital-b")(X), small_model(X))
    with pytest.raises(errors.FrameError, match="models of different parties"):
        trio.connection.aggregate(["hospital-b", "hospital-b/later"])
    with pytest.raises(
        errors.UnknownModelError, match="no model 'hospital-b/none' is connected; there are: hospital-b"
    ):
        trio.connection.model("hospital-b/none")


def test_while_a_party_starts_whoever_asks_is_told_to_ask_again():
    with pytest.raises(errors.UnknownModelError, match=r"'b/c' is connected; nor any other\..*if 'b' was, ask again"):
        Registry().find("b/c")


def test_a_server_cannot_pass_one_model_off_as_another(trio, small_model, monkeypatch):
    """Of one party, and of one architecture: which of them it is, is signed."""
    trio.party.offer(*described(retrained(small_model), X), "later")
    registry = trio.server._registry
    find = registry.find
    monkeypatch.setattr(registry, "find", lambda name, *args: find("hospital-b", *args))
    with pytest.raises((errors.KeyAgreementError, errors.SessionOverError)):
        trio.connection.model("hospital-b/later")
    monkeypatch.setattr(trio.party._offers, "find", lambda name, edition: trio.party._offers.latest()[0])
    with pytest.raises(errors.KeyAgreementError):
        trio.connection.model("hospital-b/later")


@pytest.mark.parametrize(
    "name", ["hospital-c", "hospital-c/later", "hospital-b/", "hospital-b/a/b", "/a", "hospital-b/a b"]
)
def test_a_certificate_is_for_its_party_and_the_models_after_it(trio, name):
    description, _ = trio.described
    with pytest.raises(errors.IdentityError):
        trio.party.connection.ask({"do": "register", "name": name, "description": description, "edition": "e"})
    assert model_name("a/b", "it") == "a/b"


def test_another_version_is_taken_in_the_place_of_one_that_is_asked(trio, small_model, caplog):
    """Sessions of the old one end by themselves, and the next call is answered with the new one; a warning says so."""
    remote, other = trio.connection.model("hospital-b"), retrained(small_model)
    first = remote.version
    remote.prepare(X.shape, 2)
    assert close(remote(X), small_model(X))
    assert not trio.party.offer(*described(small_model, X)), "the same again"
    assert trio.party.offer(*described(other, X))
    assert close(remote(X), other(X))
    assert remote.version != first
    assert any("another version answers" in message for message in caplog.messages)
    old = trio.connection.model("hospital-b", version=remote.version)
    trio.party.offer(*described(small_model, X))
    with pytest.raises(errors.RefusedError):
        old(X)


def test_calls_that_run_while_the_version_changes_end(trio, small_model):
    other, wrong = retrained(small_model), []
    remotes, stop = [trio.connection.model("hospital-b") for _ in range(3)], threading.Event()

    def ask(remote):
        while not stop.is_set():
            found = remote(X)
            if not close(found, small_model(X)) and not close(found, other(X)):
                wrong.append(found)

    failed = []
    threads = [threading.Thread(target=lambda r=r: _kept(ask, r, failed)) for r in remotes]
    for thread in threads:
        thread.start()
    for n in range(4):
        before = trio.party.answered
        trio.party.offer(*described(small_model if n % 2 else other, X))
        assert until(lambda before=before: trio.party.answered > before + 3 or failed, 60)
    stop.set()
    for thread in threads:
        thread.join()
    assert (wrong, failed) == ([], [])


def _kept(ask, remote, failed) -> None:
    try:
        ask(remote)
    except errors.SectorchError as error:
        failed.append(error)


def test_replicas_share_the_sessions_and_one_that_dies_is_not_missed(trio, small_model, tmp_path):
    trio.party.close()
    parties = [replica(trio, tmp_path / name, small_model) for name in "ab"]
    try:
        remotes = [trio.connection.model("hospital-b") for _ in range(4)]
        for remote in remotes:
            assert close(remote(X), small_model(X))
        assert until(lambda: [party.answered for party in parties] == [2, 2], 30)
        parties[0].connection._stream.close()
        for remote in remotes:
            assert close(remote(X), small_model(X))
        assert until(lambda: parties[1].answered == 6, 30)
    finally:
        for party in parties:
            party.close()


def test_what_was_prepared_at_a_replica_is_used_at_that_one(trio, small_model, tmp_path):
    trio.party.close()
    trio.connection.close()
    trio.start_querying(Store(tmp_path / "q"))
    parties = [replica(trio, tmp_path / name, small_model) for name in "ab"]
    try:
        remote = trio.connection.model("hospital-b")
        remote.prepare(X.shape, 2)
        remote.close()
        (at,) = [party for party in parties if party.store.used]
        busy = [trio.connection.model("hospital-b", version=remote.version) for _ in range(2)]
        before = at.answered
        assert len(busy) == 2
        again = trio.connection.model("hospital-b")
        assert close(again(X), small_model(X))
        assert until(lambda: at.answered == before + 1, 30) and sum(again.prepared().values()) == 1
        again.close()
        at.close()  # it is away: the other one answers, and what was prepared stays
        assert until(lambda: len(trio.server._registry._offers["hospital-b"]) > 0 and len([
            o for o in trio.server._registry._offers["hospital-b"] if o.open]) == 1, 30)  # fmt: skip
        again = trio.connection.model("hospital-b")
        assert close(again(X), small_model(X)) and sum(again.prepared().values()) == 1
        back = replica(trio, at.store.folder, small_model)
        parties.append(back)
        assert close(again(X), small_model(X))
        assert until(lambda: back.answered == 1, 30) and sum(again.prepared().values()) == 0
    finally:
        for party in parties:
            party.close()


def test_versions_roll_over_replicas(trio, small_model, tmp_path):
    """Two versions at once: new sessions have the later one, and who asks for the other one gets that."""
    trio.party.close()
    other = retrained(small_model)
    parties = [replica(trio, tmp_path / name, small_model) for name in "ab"]
    try:
        first = trio.connection.model("hospital-b")
        parties[1].offer(*described(other, X))
        assert close(trio.connection.model("hospital-b")(X), other(X))
        kept = trio.connection.model("hospital-b", version=first.version)
        assert close(kept(X), small_model(X))
        parties[0].offer(*described(other, X))
        with pytest.raises(errors.RefusedError):
            kept(X)
    finally:
        for party in parties:
            party.close()


def test_a_second_process_that_is_no_replica_is_refused(trio, small_model, tmp_path):
    with pytest.raises(errors.BusyError, match="is answering already; replicas of it are all started as such"):
        replica(trio, tmp_path / "a", small_model)
    with pytest.raises(errors.ArgumentError, match="a replica has a store of its own"):
        Answering(trio.address, trio.made["hospital-b"], *trio.described, replica=True)


def test_files_with_names(tmp_path):
    assert {k: str(v) for k, v in models_by_name(["m.safetensors"]).items()} == {"": "m.safetensors"}
    assert {k: str(v) for k, v in models_by_name(["a=x", "b=y=z"]).items()} == {"a": "x", "b": "y=z"}
    odd = tmp_path / "a=b"
    odd.write_bytes(b"")
    assert models_by_name([str(odd)]) == {"": odd}
    for wrong in (["x", "y"], ["a=x", "a=y"], ["a=x", "y"]):
        with pytest.raises(errors.ArgumentError, match="NAME=FILE"):
            models_by_name(wrong)


def test_a_model_file_that_cannot_be_read_changes_nothing(trio, small_model, tmp_path, caplog):
    file = tmp_path / "m.safetensors"
    with caplog.at_level(logging.INFO):
        file.write_bytes(b"half of a file")
        reload_models(trio.party, {"": file})
        assert "the model before it goes on" in caplog.text
        save_model(retrained(small_model), X, file)
        reload_models(trio.party, {"": file})
    assert close(trio.connection.model("hospital-b")(X), retrained(small_model)(X))


class Both(Stage):
    """Two processes that answer under one name, with one file of limits."""

    def start_answering(self, name: str) -> None:
        limits = self.folder / "limits.toml"
        limits.write_text("[default]\nrows_in_all = 12\n")
        files = (*self._files(name, "--ca"), "--pins", str(self.pins.path), "--server", f"localhost:{self.port}")
        for i in range(2):
            own = ("--replica", "--store", str(self.folder / f"store-{name}-{i}"), "--limits", str(limits))
            self._start(
                f"{name}-{i}", ["answer", str(self.folder / f"{name}.safetensors"), "--name", name, *files, *own]
            )


@pytest.mark.sectorch_long
def test_two_processes_of_one_name_share_limits_one_dies_and_both_get_another_model(small_model, tmp_path):
    """Right whoever answers, also after kill -9 of one; SIGHUP brings the new file; 12 rows in all, whoever counted."""
    torch.manual_seed(9)
    other = copy.deepcopy(small_model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    expected, anew = sectorch.reference(small_model)(X), sectorch.reference(other)(X)
    with Both({"hospital-b": (small_model, X)}) as stage, stage.connect("alice") as connection, torch.no_grad():
        model = connection.model("hospital-b")
        assert torch.equal(model(X), expected)
        lost = stage.processes.pop("hospital-b-0")
        lost.kill()
        lost.wait()
        assert torch.equal(model(X), expected)
        first = model.version
        save_model(other, X, stage.folder / "hospital-b.safetensors")
        stage.processes["hospital-b-1"].send_signal(signal.SIGHUP)

        def version() -> str:
            found = connection.model("hospital-b")
            found.close()
            return found.version

        assert until(lambda: version() != first, 60)
        model = connection.model("hospital-b")
        answers = []
        with pytest.raises(errors.QuotaError, match="12 rows in all"):
            for _ in range(12):
                answers.append(torch.equal(model(X), anew))
        assert answers == [True] * 4, "two were asked of the first version"
