"""Queries through three parties over mutual TLS: the local runtime's results and bytes, and what can go wrong."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from network_world import until
from torch import nn

import sectorch
from sectorch import Scheme, errors
from sectorch.choreography.ledger import Transcript
from sectorch.cli.main import run
from sectorch.network import Pins, Server, Store, answer, connect
from sectorch.network.commands.array_files import write_arrays
from sectorch.network.commands.ask import Question, ResultFiles, digest
from sectorch.network.identity.authority import make_authority
from sectorch.network.identity.identity import Credentials
from sectorch.network.parties.remote_model import RemoteModel
from sectorch.network.wire.tls_stream import Stream
from sectorch.testing.local_network import enrol

X = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_a_query_is_the_local_run(star):
    address, made, model = star
    local = sectorch.secure(model, session=sectorch.Session())
    local(X)
    with sectorch.profile() as here:
        local(X)
    with connect(address, made["alice"]) as connection:
        assert connection.models() == ["hospital-b"]
        remote = connection.model("hospital-b")
        remote(X)
        with sectorch.profile() as there:
            y = remote(X)
        remote.close()
    assert (y - model(X)).abs().max() < 1e-4
    assert (there.bytes, there.online_bytes, there.rounds) == (here.bytes, here.online_bytes, here.rounds)


def test_prepared_queries_need_the_online_phase_only(star):
    address, made, model = star
    with connect(address, made["alice"]) as connection:
        remote = connection.model("hospital-b")
        remote(X)
        remote.prepare(3)
        assert remote.prepared() == {(3, 1, 8, 8): 1}
        with sectorch.profile() as p:
            y = remote(X)
        assert remote.prepared() == {}
    assert (y - model(X)).abs().max() < 1e-4
    assert p.offline_bytes == 0


def test_several_queries_at_once(star):
    address, made, model = star
    results: dict[int, torch.Tensor] = {}

    def ask(i: int) -> None:
        with connect(address, made["alice" if i % 2 else "bob"]) as connection:
            results[i] = connection.model("hospital-b")(X + i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        assert (results[i] - model(X + i)).abs().max() < 1e-3


def test_what_a_client_receives_is_uniform(star):
    """Q receives nothing but the result under its own mask, and the key to it; over the wire that is uniform too."""
    address, made, _ = star
    with connect(address, made["alice"]) as connection:
        remote = connection.model("hospital-b")
        remote(X)
        with Transcript() as transcript:
            remote(X)
    received = transcript.received("Q")
    assert {(line.path, line.label) for line, _ in received if line.path != "reveal"} == {("guard", "key")}


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.zeros(1, 1, 7, 8), errors.ShapeError),
        (torch.zeros(1, 1, 8, 8, dtype=torch.float64), errors.DtypeError),
        (torch.full((1, 1, 8, 8), float("nan")), errors.NonFiniteError),
        (torch.full((1, 1, 8, 8), 1e9), errors.FixedPointRangeError),
        ([1.0], errors.DtypeError),
    ],
)
def test_bad_input_is_refused_here_and_the_session_goes_on(star, x, error):
    address, made, model = star
    with connect(address, made["alice"]) as connection:
        remote = connection.model("hospital-b")
        with pytest.raises(error):
            remote(x)
        assert (remote(X) - model(X)).abs().max() < 1e-4


def test_unknown_model(star):
    address, made, _ = star
    with connect(address, made["alice"]) as connection, pytest.raises(errors.UnknownModelError, match="hospital-b"):
        connection.model("hospital-c")


def test_one_name_cannot_answer_as_another(star):
    address, made, model = star
    with pytest.raises(errors.IdentityError, match="cannot answer as 'hospital-c'"):
        answer(address, made["alice"], model, X, name="hospital-c")
    with pytest.raises(errors.BusyError, match="answering already"):
        answer(address, made["hospital-b"], model, X)


def test_a_client_of_another_ca_is_refused(star, tmp_path):
    address, made, _ = star
    make_authority(tmp_path)
    stranger = enrol(tmp_path, "alice")
    with pytest.raises(errors.IdentityError, match="does not accept this party's certificate"):
        connect(address, replace(stranger, authority=made["alice"].authority), patience=2)
    with pytest.raises(errors.IdentityError, match="not of the CA that --ca names"):
        connect(address, replace(made["alice"], authority=stranger.authority), patience=2)


def test_an_expired_certificate_is_refused(star, pki):
    address, _, _ = star
    folder, _ = pki
    expired = enrol(folder, "late", days=-1 / 24)
    with pytest.raises(errors.IdentityError, match=r"'late' is valid from .* to .* UTC, and it is"):
        connect(address, expired, patience=2)
    with pytest.MonkeyPatch.context() as patch:  # a client that does not look at its own dates
        patch.setattr(Credentials, "check_dates", lambda self: None)
        with pytest.raises(errors.IdentityError, match="does not accept this party's certificate"):
            connect(address, expired, patience=2)


def test_an_expired_server_or_one_of_another_host_is_refused(pki):
    folder, made = pki
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Credentials, "check_dates", lambda self: None)
        late = Server("localhost:0", enrol(folder, "late-server", hosts=("localhost",), days=-1 / 24))
    other = Server("localhost:0", enrol(folder, "elsewhere", hosts=("example.org",)))
    for server, said in ((late, "certificate has expired"), (other, "for another host name")):
        with pytest.raises(errors.IdentityError, match=said):
            connect(f"localhost:{server.port}", made["alice"], patience=2)
        server.stop()


@pytest.mark.parametrize(
    "name", ["", "..", "../evil", "a/b", "/tmp/evil", ".hidden", "a\\b", "a\n", "x" * 65, "ca", "alice-key"]
)
def test_a_name_that_is_no_plain_one_is_issued_nothing(tmp_path, name):
    """Neither outside the folder nor over another's files."""
    folder = tmp_path / "pki"
    make_authority(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(errors.ArgumentError, match=r"a party's name is 1 to 64|cannot be called"):
        enrol(folder, name)
    assert before == {path: path.read_bytes() for path in folder.iterdir()} and list(tmp_path.iterdir()) == [folder]


def test_a_key_of_another_certificate_is_refused_at_reading(pki, tmp_path):
    folder, made = pki
    read = lambda certificate, key: Credentials.read(folder / certificate, key, folder / "ca.pem")
    assert read("alice.pem", folder / "alice-key.pem") == made["alice"]
    with pytest.raises(errors.IdentityError) as refused:
        read("alice.pem", folder / "bob-key.pem")
    assert f"{folder / 'alice.pem'} and the key {folder / 'bob-key.pem'} do not belong together" in str(refused.value)
    (tmp_path / "key.pem").write_text("no key")
    for wrong in (tmp_path / "key.pem", folder / "alice.pem"):
        with pytest.raises(errors.IdentityError, match=f"the key file {wrong} does not hold"):
            read("alice.pem", wrong)


def test_a_client_cannot_pose_as_the_server(pki):
    _, made = pki
    posing = Server("localhost:0", made["alice"])
    try:
        with pytest.raises(errors.IdentityError, match="a client may be posing as the server"):
            connect(f"localhost:{posing.port}", made["bob"], patience=2)
    finally:
        posing.stop()


@pytest.mark.parametrize("after", [0, 1, 5, 10])
def test_an_answering_party_that_dies_is_an_error_and_the_next_query_works(pki, small_model, after):
    """A's connection is cut after so many of its messages: Q gets a typed error at once, S lives."""
    _, made = pki
    server = Server("localhost:0", made["server"])
    address = f"localhost:{server.port}"
    model = small_model
    party = answer(address, made["hospital-b"], model, torch.randn(2, 1, 8, 8))
    link, sent = party.connection.link, [0]
    send = link.send

    def dying(data: bytes, urgent: bool = False) -> None:
        sent[0] += 1
        if sent[0] > after:
            party.close()
        send(data, urgent)

    link.send = dying
    try:
        with connect(address, made["alice"]) as connection:
            start = time.monotonic()
            with pytest.raises(errors.NetworkError):
                connection.model("hospital-b")(X)
            assert time.monotonic() - start < 60  # a bound against hanging for ever; typical is well under a second
            again = answer(address, made["hospital-b"], model, torch.randn(2, 1, 8, 8))
            assert (connection.model("hospital-b")(X) - model(X)).abs().max() < 1e-4
            again.close()
    finally:
        server.stop()


def test_a_querying_party_that_leaves_does_not_harm_the_others(star):
    address, made, model = star
    leaving = connect(address, made["alice"])
    remote = leaving.model("hospital-b")
    remote(X)
    leaving.close()
    with pytest.raises(errors.NetworkError):
        remote(X)
    with connect(address, made["bob"]) as connection:
        assert (connection.model("hospital-b")(X) - model(X)).abs().max() < 1e-4


def test_a_last_word_reaches_the_server_over_a_slow_connection(pki, small_model, monkeypatch, caplog):
    """A client that closes has its sessions closed at once; no party writes down that it was lost."""
    _, made = pki
    caplog.set_level(logging.INFO)
    write = Stream._write

    def slowly(stream, data):
        time.sleep(0.3 * (b'"close"' in data))
        return write(stream, data)

    monkeypatch.setattr(Stream, "_write", slowly)
    server = Server("localhost:0", made["server"])
    party = answer(f"localhost:{server.port}", made["hospital-b"], small_model, X)
    try:
        with connect(f"localhost:{server.port}", made["alice"]) as client:
            model = client.model("hospital-b")
            model(X)
        assert until(lambda: not server.sessions and not party.connection.link.sessions, 30)
    finally:
        party.close()
        server.stop()
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "ended" in text and "alice" in text], "others of the module may come late"


def test_nobody_listens(pki):
    _, made = pki
    with pytest.raises(errors.PeerLostError, match="cannot connect to localhost:1"):
        connect("localhost:1", made["alice"], patience=1)


def test_the_protocols_of_few_rounds_over_the_wire(star):
    """network="wan": fewer online rounds, also with prepared material."""
    address, made, _ = star
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(3, 6)
    party = answer(address, made["bob"], model, x)
    with connect(address, made["alice"]) as connection:
        remote = connection.model("bob", Scheme(network="wan"))
        with sectorch.profile() as few:
            assert (remote(x) - model(x)).abs().max() < 1e-4
        remote.prepare(3)
        assert (remote(x) - model(x)).abs().max() < 1e-4
        with sectorch.profile() as many:
            connection.model("bob")(x)
    party.close()
    assert few.rounds < many.rounds


def test_a_file_of_many_rows_takes_few_queries(star, pki, monkeypatch, tmp_path):
    """`sectorch query` asks as many rows at once as take little memory, and those that were named, prepared or begun.

    Where the model's owner looks into calls, 32: what that shows depends on their rows.
    """
    address, made, model = star
    folder, x = pki[0], torch.rand(200, 1, 8, 8)
    write_arrays(x, tmp_path / "x.npy")
    own = [f"--{n}={folder / f}" for n, f in (("cert", "alice.pem"), ("key", "alice-key.pem"), ("ca", "ca.pem"))]
    own += [f"--server={address}", f"--store={tmp_path / 'store'}", f"--pins={Pins().path}"]
    asked, ask = [], RemoteModel.ask
    monkeypatch.setattr(RemoteModel, "ask", lambda self, inputs: (asked.append(inputs.rows), ask(self, inputs))[1])

    def rows(*options: str) -> list[int]:
        asked.clear()
        out = tmp_path / "y.npy"
        assert run(["query", "hospital-b", str(tmp_path / "x.npy"), f"--out={out}", *own, *options]) == 0
        assert (torch.from_numpy(np.load(out)) - model(x)).abs().max() < 1e-4
        return list(asked)

    assert rows() == [200]
    assert rows("--batch=150") == [150, 50]
    monkeypatch.setattr("sectorch.network.commands.ask.BATCH_MEMORY", 1)
    assert rows() == [32] * 6 + [8]
    monkeypatch.undo()
    monkeypatch.setattr(RemoteModel, "ask", lambda self, inputs: (asked.append(inputs.rows), ask(self, inputs))[1])
    assert rows("--audited=2")[:-1] == [32] * 6
    about = Question(inputs=digest(tmp_path / "x.npy"), model="hospital-b", version=version_of(address, made), batch=90,
                     network=str(Scheme().network), limit=None, checked=True)  # fmt: skip
    ResultFiles(tmp_path / "y.npy", about)  # of a job that was killed
    assert rows() == [90, 90, 20]
    with connect(address, made["alice"], store=Store(tmp_path / "store")) as connection:
        connection.model("hospital-b").prepare(32)
    assert rows()[0] == 32


def version_of(address: str, made: dict) -> str:
    with connect(address, made["alice"]) as connection:
        return connection.model("hospital-b").version
