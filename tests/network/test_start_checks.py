"""What a party starts with: each fault is one line, before a port opens or anything is sent."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import DEVNULL, Command
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from torch import nn

from sectorch import errors
from sectorch.cli.main import run
from sectorch.network import save_model
from sectorch.network.federation.party import Federation
from sectorch.network.identity.certificate_files import check_own_files
from sectorch.testing.local_network import PROGRAM

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Three parties as `keys try` makes them, and a federation of four as `federation try` does."""
    folder = tmp_path_factory.mktemp("ready")
    port = free_port()  # where nobody listens
    assert run(["keys", "try", str(folder / "trial"), "--server", f"localhost:{port}", "--json"]) == 0
    parties = ["north=H1", "south=H2", "west=H3", "collector=C"]
    assert run(["federation", "try", str(folder / "fed"), *parties, "--server", f"localhost:{port}", "--json"]) == 0
    np.save(folder / "a.npy", np.arange(3.0))
    save_model(nn.Linear(3, 2).eval(), torch.zeros(2, 3), folder / "model.safetensors")
    (folder / "port").write_text(str(port))
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def issued(ca: Path, path: Path, first: float, last: float, purpose=None) -> None:
    """The certificate again, valid from `first` to `last` hours from now."""
    by, key = x509.load_pem_x509_certificate((ca / "ca.pem").read_bytes()), (ca / "ca-key.pem").read_bytes()
    old, now = x509.load_pem_x509_certificate(path.read_bytes()), datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder(by.subject, old.subject, old.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now + datetime.timedelta(hours=first))
    made = made.not_valid_after(now + datetime.timedelta(hours=last))
    for extension in old.extensions:
        usage = isinstance(extension.value, x509.ExtendedKeyUsage) and purpose is not None
        made = made.add_extension(x509.ExtendedKeyUsage([purpose]) if usage else extension.value, extension.critical)
    path.write_bytes(made.sign(load_pem_private_key(key, None), SHA256()).public_bytes(Encoding.PEM))


SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
FAULTS = {
    "no certificate": (
        lambda ca, at, name: (at / f"{name}.pem").write_text("hello\n"),
        r"/(server|hospital-.)\.pem does not hold a certificate in PEM",
    ),
    "expired": (lambda ca, at, name: issued(ca, at / f"{name}.pem", -48, -1), "is valid from .* issue a new one"),
    "an hour early": (lambda ca, at, name: issued(ca, at / f"{name}.pem", 1, 48), "is valid from"),
    "purpose": (
        lambda ca, at, name: issued(ca, at / f"{name}.pem", -1, 48, CLIENT if name == "server" else SERVER),
        "good for .* only, and one for .* is needed",
    ),
    "CA expired": (
        lambda ca, at, name: (issued(ca, ca / "ca.pem", -48, -1), shutil.copy(ca / "ca.pem", at / "new.pem"),
                              (at / "new.pem").replace(at / "ca.pem")),
        "the CA's certificate .* is valid from",
    ),
    "CA": (lambda ca, at, name: (at / "ca.pem").write_text("none"), "does not hold the certificate of a CA"),
    "key open": (lambda ca, at, name: (at / f"{name}-key.pem").chmod(0o640), "others can read .*chmod 600"),
    "identity open": (lambda ca, at, name: (at / f"{name}-identity.pem").chmod(0o604), "others can read .*chmod 600"),
    "clock back": (lambda ca, at, name: os.utime(at / f"{name}.pem", (time.time() + 3600,) * 2), "set it \\(NTP\\)"),
    "another's key": (
        lambda ca, at, name: shutil.copy(ca / "ca-key.pem", at / f"{name}-key.pem"), "do not belong together"
    ),
    "no key": (lambda ca, at, name: (at / f"{name}-key.pem").unlink(), "cannot read"),
}  # fmt: skip


def line(folder: Path, party: str) -> list[str]:
    """The command of a party of three, as `keys try` prints it."""
    at, port = folder / "trial" / party, (folder / "port").read_text()
    keys = ["--cert", f"{at}/{party}.pem", "--key", f"{at}/{party}-key.pem"]
    client = [*keys, "--ca", f"{at}/ca.pem", "--server", f"localhost:{port}", "--pins", f"{at}/pins"]
    return {
        "server": ["server", "--listen", f"localhost:{port}", *keys, "--clients-ca", f"{at}/ca.pem"],
        "hospital-a": ["query", "hospital-b", str(folder / "a.npy"), *client],
        "hospital-b": ["answer", str(folder / "model.safetensors"), "--name", party, *client],
    }[party]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_line_at_each_command_and_nothing_was_opened_or_sent(folder, capsys, fault):
    """Nobody listens at the server's port: whoever dialled would say that, and a server would say that it listens."""
    spoil, why = FAULTS[fault]
    for party in ("server", "hospital-a", "hospital-b"):
        at = folder / "trial" / party
        spoil(folder / "trial" / "pki", at, party)
        with pytest.raises((errors.IdentityError, errors.ArgumentError), match=why) as caught:
            check_own_files(at / f"{party}.pem", at / f"{party}-key.pem", at / "ca.pem", serving=party == "server")
        assert run(line(folder, party)) == 1
        assert capsys.readouterr().err == f"error: {caught.value}\n"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('role = "H3"', 'role = "H9"', "nobody in the federation 'fed' is or plays H3"),
        ('"fed"\n', '"fed"\nedges = [["north", "south"]]\n', "has no edge between"),
    ],
    ids=["role", "edge"],
)
def test_a_role_or_an_edge_that_is_not_there_is_a_line_before_whoever_runs_it_dials(folder, capsys, old, new, why):
    path, program = folder / "fed" / "federation.toml", str(ROOT / "examples" / "secure_sum.py") + ":program"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    whole = ["--federation", str(path), "--as", "north", "--input", f"H1={folder}/a.npy"]
    for words in (["run", str(path), program, "--as", "north"], ["run", program, *whole]):
        assert run([*words, "--wait", "1"]) == 1
        err = capsys.readouterr().err
        assert why in err and err.count("\n") == 1 and "connect" not in err


def test_a_paper_that_needs_more_parties_than_there_are_is_a_line(folder, capsys):
    path = str(folder / "fed" / "federation.toml")
    for words in (
        ["capride", "--parties", "2", "--federation", path, "--as", "north"],
        ["run", path, "capride", "--as", "north", "--", "--parties", "2"],
        ["federation", "accept", path, "capride", "--as", "north", "--", "--parties", "2"],
    ):
        assert run(words) == 1
        err = capsys.readouterr().err
        assert "nobody in the federation 'fed' is or plays P1" in err and err.count("\n") == 1
    assert not (folder / "fed" / "north.toml").exists()


def test_a_paper_s_party_says_that_the_server_is_not_up_and_how_to_start_it(folder, capsys, monkeypatch):
    """By the command and in Python; once the server is started by the line in the text, the party gets further."""
    path, port = folder / "fed" / "federation.toml", (folder / "port").read_text()
    path.write_text(path.read_text().replace('"H1"', '"c1"').replace('"H2"', '"c2"').replace('"H3"', '"P"')
                    .replace('"C"', '"X"'))  # fmt: skip
    defaults = {**(Federation.__init__.__kwdefaults__ or {}), "patience": 0.1}
    monkeypatch.setattr(Federation.__init__, "__kwdefaults__", defaults)
    words = ["shapley", "--clients", "2", "--model", "logistic", "--federation", str(path), "--as", "north"]
    assert run([*words, "--out", str(folder / "out")]) == 1
    err = capsys.readouterr().err
    assert f"cannot connect to localhost:{port}" in err and err.count("\n") == 1
    assert "the server 'server' of the federation is not up" in err
    way_out = re.findall("`sectorch (.*)`", err)[0].split()
    assert way_out == ["up", "federation.toml", "--as", "server"]
    hub = Command([*PROGRAM, *way_out], cwd=path.parent, stderr=DEVNULL)
    try:
        with Federation(path, "north", patience=30.0) as parties:
            assert parties.connection.link.closed is None
    finally:
        hub.kill()
        hub.communicate()


@pytest.mark.parametrize("option", ["--store", "--receipts", "--log", "--out"])
def test_a_full_disk_is_a_line(folder, capsys, monkeypatch, option):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for party in ("server", "hospital-a", "hospital-b") if option != "--out" else ("hospital-a",):
        assert run([*line(folder, party), option, str(folder / "full" / "x.npy")]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "No space left on device" in err and f"make room, or name another with {option}" in err
