"""Certificates are renewed in place: new files are used for new handshakes, and what cannot be used changes nothing."""

from __future__ import annotations

import logging
import shutil
import ssl
import time

import pytest
import torch
from network_world import Trio

from sectorch import errors
from sectorch.network import Credentials, connect
from sectorch.network.identity import certificate_files
from sectorch.network.identity.authority import make_authority
from sectorch.network.identity.certificate_files import Renewal, certificate_end
from sectorch.network.identity.identity import certificate_print
from sectorch.testing.local_network import enrol


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(certificate_files, "SETTLES", 0.0)


@pytest.fixture
def pki(tmp_path):
    make_authority(tmp_path)
    enrol(tmp_path, "alice")
    return tmp_path


def files(folder, name: str = "alice") -> Credentials:
    return Credentials.read(folder / f"{name}.pem", folder / f"{name}-key.pem", folder / "ca.pem")


@pytest.fixture
def looking(pki, caplog):
    caplog.set_level(logging.INFO, "sectorch.certificate")
    used: list[Credentials] = []
    return Renewal(files(pki), lambda: files(pki), used.append), used


def lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "sectorch.certificate"]


def test_new_files_are_used_once_and_the_identity_stays(pki, looking, caplog):
    looking, used = looking
    before = looking.credentials
    assert not looking.look() and used == [] and lines(caplog) == []
    enrol(pki, "alice", days=30)
    shutil.copy(
        pki / "ca-key.pem", pki / "alice-identity.pem"
    )  # whatever comes there, others know the party by the old
    assert looking.look() and not looking.look()
    assert used == [looking.credentials] and used[0].certificate != before.certificate
    assert used[0].identity == before.identity and used[0].key == before.key
    assert len(lines(caplog)) == 1 and "outcome=renewed of=alice until=" in lines(caplog)[0]


def other_key(pki):
    """A certificate came, and its key has not yet."""
    (pki / "alice.pem").unlink()
    key = (pki / "alice-key.pem").read_bytes()
    (pki / "alice-key.pem").unlink()
    enrol(pki, "alice")
    (pki / "alice-key.pem").write_bytes(key)


def half(name: str):
    def cut(pki):
        content = (pki / name).read_bytes()
        (pki / name).write_bytes(content[: len(content) // 2])

    return cut


def gone(pki):
    (pki / "alice-key.pem").unlink()


def empty(pki):
    (pki / "ca.pem").write_bytes(b"")


def of_another(pki):
    for kind in ("", "-key"):
        enrol(pki, "mallory")
        shutil.copy(pki / f"mallory{kind}.pem", pki / f"alice{kind}.pem")


def expired(pki):
    enrol(pki, "alice", days=-1)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (other_key, "do not belong together"),
        (half("alice.pem"), "PEM"),
        (half("alice-key.pem"), "PEM"),
        (half("ca.pem"), "PEM"),
        (gone, "cannot read"),
        (empty, "PEM"),
        (of_another, "mallory"),
        (expired, "valid from"),
    ],
    ids=["mismatch", "half a certificate", "half a key", "half a CA", "no key", "no CA", "another name", "expired"],
)
def test_what_cannot_be_used_keeps_the_old_with_one_line_until_it_is_mended(pki, looking, caplog, spoil, words):
    looking, used = looking
    before = looking.credentials
    spoil(pki)
    assert not looking.look() and not looking.look()
    assert used == [] and looking.credentials is before
    assert len(lines(caplog)) == 1 and "outcome=kept" in lines(caplog)[0] and words in lines(caplog)[0]
    assert "PRIVATE" not in caplog.text
    for path in pki.glob("alice*.pem"):
        path.unlink()
    make_new = pki / "new"
    make_authority(make_new)
    enrol(make_new, "alice")
    for path in make_new.iterdir():
        shutil.copy(path, pki)
    assert looking.look() and len(used) == 1


def test_files_that_change_between_two_readings_are_left_alone(pki, caplog):
    """A writer is at work: the next look finds the end of it."""
    used, reads = [], []

    def read() -> Credentials:
        reads.append(enrol(pki, "alice"))
        return files(pki)

    looking = Renewal(files(pki), read, used.append)
    assert not looking.look() and used == [] and "being written" in caplog.text and len(reads) == 2


def test_what_the_listener_refuses_is_kept_out(pki, caplog):
    def refuse(_: Credentials) -> None:
        raise errors.IdentityError("not usable")

    looking = Renewal(files(pki), lambda: files(pki), refuse)
    before = looking.credentials
    enrol(pki, "alice")
    assert not looking.look() and looking.credentials is before and "not usable" in caplog.text


def test_an_end_that_is_near_is_a_warning_once_a_day(pki, caplog, monkeypatch):
    enrol(pki, "alice", days=13.5)
    looking = Renewal(files(pki), lambda: files(pki), lambda _: None)
    looking.look()
    looking.look()
    assert (
        len(lines(caplog)) == 1 and "certificate expires until=" in lines(caplog)[0] and "days=13" in lines(caplog)[0]
    )
    now = time.monotonic()
    monkeypatch.setattr(certificate_files.time, "monotonic", lambda: now + certificate_files.DAY + 1)
    looking.look()
    assert len(lines(caplog)) == 2
    assert (
        looking.figures()["certificate_expiry_timestamp_seconds"]
        == certificate_end(looking.credentials.certificate).timestamp()
    )


def test_a_ca_with_its_successor_ends_with_the_later_one(pki):
    old = (pki / "ca.pem").read_bytes()
    make_authority(pki / "next", days=700)
    both = old + (pki / "next" / "ca.pem").read_bytes()
    assert (
        certificate_end(both, last=True)
        == certificate_end((pki / "next" / "ca.pem").read_bytes())
        > certificate_end(both)
        == certificate_end(old)
    )


def test_it_looks_at_once_when_it_is_told_to(pki):
    """As after SIGHUP; without that it looks every half minute."""
    used: list[Credentials] = []
    looking = Renewal(files(pki), lambda: files(pki), used.append)
    looking.start()
    try:
        enrol(pki, "alice")
        looking.soon()
        end = time.monotonic() + 30
        while not used and time.monotonic() < end:
            time.sleep(0.01)
        assert used == [files(pki)]
    finally:
        looking.close()


# A server and an answering party that go on.

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def shown_by(port: int) -> bytes:
    """The certificate that the server shows to whoever connects."""
    return ssl.get_server_certificate(("localhost", port), timeout=30).encode()


def test_a_server_shows_its_new_certificate_and_sessions_go_on(tmp_path, small_model):
    """Also of another CA: who comes with a certificate of the new one is let in, and of the old one no more."""
    made, other = tmp_path / "made", tmp_path / "other"
    pki = {}
    for folder in (made, other):
        make_authority(folder)
        names = {"hospital-b": (), "alice": (), "server": ("localhost",)}
        pki[folder] = {name: enrol(folder, name, hosts=hosts) for name, hosts in names.items()}
    trio = Trio(pki[made], small_model, X, tmp_path)
    try:
        remote = trio.connection.model("hospital-b")
        first, before = remote(X), shown_by(trio.port)
        renewed = enrol(made, "server", hosts=("localhost",), days=30)
        trio.server.renew(renewed)
        assert shown_by(trio.port) == renewed.certificate != before
        assert torch.equal(remote(X), first) and trio.server.sessions == 1, "the session is the same"
        connect(trio.address, pki[made]["alice"]).close()
        trio.server.renew(pki[other]["server"])
        assert shown_by(trio.port) == pki[other]["server"].certificate
        assert torch.equal(remote(X), first)
        with pytest.raises(errors.IdentityError):
            connect(trio.address, pki[made]["alice"], patience=2.0)
        connect(trio.address, pki[other]["alice"]).close()
    finally:
        trio.close()


def test_an_answering_party_dials_with_its_new_certificate(tmp_path, small_model, caplog):
    make_authority(tmp_path)
    names = {"hospital-b": (), "alice": (), "server": ("localhost",)}
    trio = Trio({name: enrol(tmp_path, name, hosts=hosts) for name, hosts in names.items()}, small_model, X, tmp_path)
    caplog.set_level(logging.INFO, "sectorch.server")
    try:
        renewed = enrol(tmp_path, "hospital-b", days=30)
        trio.party.renew(renewed)
        assert trio.party.unready() == "", "the connection goes on"
        trio.party.connection.close()
        while True:  # the server may not have noticed yet that the connection ended
            try:
                trio.party.register("hospital-b")
                break
            except errors.BusyError:
                time.sleep(0.05)
        assert f"certificate={certificate_print(renewed.certificate)}" in caplog.text
        assert trio.connection.model("hospital-b")(X).shape == (2, 4)
    finally:
        trio.close()
