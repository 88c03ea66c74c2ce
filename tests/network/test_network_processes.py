"""The commands as real processes: Ctrl-C at each of them, material that waits on disk, restarts, and clear errors."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import long
from commands import PIPE, Command, run_command
from network_world import logs_as_in_a_new_process, pieces_in, until
from torch import nn

import sectorch
from sectorch.cli.main import run
from sectorch.network.identity.identity import fingerprint_of
from sectorch.testing.local_network import PROGRAM, Stage, example


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def stage(model):
    with Stage({"hospital-b": (model, torch.randn(2, 6))}) as stage:
        yield stage


def command(stage: Stage, *arguments: str, name: str = "alice") -> list[str]:
    stage.credentials(name)
    files = stage._files(name, "--ca")
    return [*PROGRAM, *arguments, *files, "--server", f"localhost:{stage.port}"]


def query(stage: Stage, *arguments: str) -> list[str]:
    kept = ("--pins", str(stage.pins.path), "--store", str(stage.folder / "store-cli"))
    return command(stage, "query", "hospital-b", *arguments, *kept)


def in_process(arguments: list[str]) -> subprocess.CompletedProcess:
    """A command of the querying party in a process of its own."""
    return run_command(arguments, timeout=240)


def here(arguments: list[str]) -> subprocess.CompletedProcess:
    """The same command line in this process: the server and the answering party are processes all the same."""
    out, said = io.StringIO(), io.StringIO()
    stop = signal.getsignal(signal.SIGTERM)
    try:
        with logs_as_in_a_new_process(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            status = run(arguments[len(PROGRAM) :])
    except SystemExit as ended:  # --help
        status = ended.code
    finally:
        signal.signal(signal.SIGTERM, stop)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), said.getvalue())


def done(arguments: list[str], code: int = 0, way: Callable = here) -> str:
    ended = way(arguments)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout + ended.stderr


def printed(arguments: list[str], way: Callable = here):
    """Standard output, which is JSON and nothing else."""
    ended = way(arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def answered(stage: Stage, model, x) -> bool:
    with stage.connect("visitor") as connection:
        if "hospital-b" not in connection.models():
            return False
        return bool((connection.model("hospital-b")(x) - model(x)).abs().max() < 1e-4)


def test_a_query_of_processes_has_the_labels_and_bytes_of_the_local_run(stage, model):
    x = torch.randn(5, 6)
    np.save(stage.folder / "x.npy", x.numpy())
    out = stage.folder / "y.npy"
    done(query(stage, str(stage.folder / "x.npy"), "--out", str(out)), way=in_process)
    local = sectorch.secure(model, session=sectorch.Session())
    assert torch.equal(torch.from_numpy(np.load(out)), local(x)), "three processes compute the same bits as one"
    assert torch.equal(torch.from_numpy(np.load(out)), sectorch.reference(model)(x))
    with sectorch.profile() as here:
        local(x)
    with stage.connect("alice") as connection:
        remote = connection.model("hospital-b")
        remote(x)
        with sectorch.profile() as there:
            remote(x)
        remote.close()
    assert (there.bytes, there.online_bytes) == (here.bytes, here.online_bytes)


@pytest.mark.parametrize("level", ["--audited 2", *long("--verified")])
def test_a_process_that_insists_on_a_level_answers_such_questions_only(stage, model, level):
    stage.credentials("strict")
    files = (*stage._files("strict", "--ca"), "--pins", str(stage.pins.path))
    own = ("--name", "strict", "--server", f"localhost:{stage.port}", "--store", str(stage.folder / "store-strict"))
    stage._start("strict", ["answer", str(stage.folder / "hospital-b.safetensors"), *own, *files, *level.split()])
    try:
        with stage.connect("visitor") as connection:
            assert until(lambda: "strict" in connection.models(), 60)
        x = torch.randn(3, 6)
        np.save(stage.folder / "x.npy", x.numpy())
        out = stage.folder / f"{level.split()[0][2:]}.npy"
        kept = ("--pins", str(stage.pins.path), "--store", str(stage.folder / "store-cli"), "--out", str(out))
        ask = command(stage, "query", "strict", str(stage.folder / "x.npy"), *kept)
        assert f"or {level}" in done(ask, 1)
        done([*ask, *level.split()])
        assert torch.equal(torch.from_numpy(np.load(out)), sectorch.reference(model)(x))
        if level == "--verified":
            done(command(stage, "query", "strict", "--prepare", "3", "--batch", "3", *kept[:4], level))
            used = command(stage, "query", "strict", str(stage.folder / "x.npy"), *kept[:4], "--json", level)
            assert '"prepared_calls": 1' in done(used)
    finally:
        process = stage.processes.pop("strict")
        process.terminate()
        process.wait(30)


def test_prepared_rows_are_topped_up_and_used(stage, model):
    pieces = lambda: pieces_in(stage.folder / "store-s")
    assert "10 rows are prepared" in done(query(stage, "--prepare", "10", "--batch", "4"))
    assert pieces() == 3
    done(query(stage, "--prepare", "10", "--batch", "4"))
    assert pieces() == 3, "what is at hand counts"
    kept = ("--store", str(stage.folder / "store-cli"))
    assert done(command(stage, "models", *kept)) == "hospital-b  3 calls prepared\n"
    assert printed(command(stage, "models", "--json", *kept)) == {"hospital-b": 3}
    assert "there is no store at" in done(command(stage, "models", "--store", str(stage.folder / "none")), 1)
    np.save(stage.folder / "x.npy", torch.randn(10, 6).numpy())
    said = done(
        query(stage, str(stage.folder / "x.npy"), "--batch", "4", "--json", "--out", str(stage.folder / "new" / "y"))
    )
    assert '"offline_bytes": 0' in said
    assert '"prepared_calls": 3' in said
    assert pieces() == 0


def test_results_as_json(stage, model):
    assert printed(command(stage, "models", "--json")) == ["hospital-b"]
    x = torch.randn(3, 6)
    np.save(stage.folder / "x.npy", x.double().numpy())
    found = printed(query(stage, str(stage.folder / "x.npy"), "--json"), way=in_process)
    assert found["rows"] == 3 and found["bytes"] > 0
    assert float((torch.tensor(found["predictions"]) - model(x)).abs().max()) < 1e-4
    prepared = printed(query(stage, "--prepare", "1", "--json"))
    assert prepared == {"prepared_rows": 1, "version": found["version"]}


@pytest.mark.sectorch_long
def test_bench_as_json(tmp_path):
    options = ("--nets", "lenet", "--batches", "1", "--repeats", "1", "--out", str(tmp_path / "bench"))
    found = printed([*PROGRAM, "bench", *options, "--json"], way=in_process)
    assert found == json.loads((tmp_path / "bench" / "results.json").read_text())
    assert found["rows"][0]["net"] == "lenet" and found["rows"][0]["error"] < 1e-3


def test_ctrl_c_at_the_querying_party_ends_it_cleanly_and_preparing_goes_on(stage, model):
    running = Command(query(stage, "--prepare", "100000", "--batch", "1"), stdout=PIPE, stderr=PIPE)
    pieces = lambda: pieces_in(stage.folder / "store-cli")
    assert until(lambda: pieces() > 3, 60)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=20)
    assert running.returncode == 130
    assert "stopped" in said
    assert "Traceback" not in said
    kept = pieces()
    assert kept >= 3, "the one that was under way is dropped"
    assert answered(stage, model, torch.randn(2, 6))
    assert f"{kept + 2} rows are prepared" in done(query(stage, "--prepare", str(kept + 2), "--batch", "1"))
    assert pieces() == kept + 2


@pytest.mark.sectorch_long
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("who", ["hospital-b", "server"])
def test_ctrl_c_at_the_others_ends_them_cleanly_and_they_come_back(stage, model, who, sign):
    with stage.connect("alice") as connection:
        remote = connection.model("hospital-b")
        remote(torch.randn(2, 6))
        stage.processes[who].send_signal(sign)
        assert stage.processes[who].wait(timeout=20) == 0
        with pytest.raises(ConnectionError):
            for _ in range(100):
                remote(torch.randn(2, 6))
                time.sleep(0.05)
    log = (stage.folder / f"{who}.log").read_text()
    assert "stopping" in log
    assert "Traceback" not in log
    stage.start_server() if who == "server" else stage.start_answering(who)
    assert until(lambda: answered(stage, model, torch.randn(2, 6)), 60)


@pytest.mark.sectorch_long
@pytest.mark.parametrize("who", ["hospital-b", "server"])
def test_a_process_that_is_killed_or_stopped_is_an_error_in_time(stage, model, who):
    """SIGSTOP: the process is there and says nothing; the keep-alive of the connection notices, long before 60 s."""
    assert until(lambda: answered(stage, model, torch.randn(2, 6)), 60)
    with stage.connect("alice") as connection:
        remote = connection.model("hospital-b")
        remote(torch.randn(2, 6))
        stage.processes[who].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(ConnectionError):
                remote(torch.randn(2, 6))
        finally:
            stage.processes[who].send_signal(signal.SIGCONT)
        assert time.monotonic() - start < 30, "the patience for a silent peer ended it, and not the keep-alive"
    assert until(lambda: answered(stage, model, torch.randn(2, 6)), 60)


def test_errors_are_one_line_and_a_code(stage):
    said = done(asked_nobody(stage), 1, way=in_process)
    assert "no model 'nobody' is connected; there are: hospital-b" in said and "compiles first" in said
    assert "cannot read" in done(query(stage, str(stage.folder / "none.npy")), 1)
    assert "name a file" in done(query(stage), 1)
    missing = [a.replace("alice.pem", "none.pem") for a in query(stage, "--prepare", "1")]
    assert "cannot read the certificate" in done(missing, 1)


def asked_nobody(stage: Stage) -> list[str]:
    return [a.replace("hospital-b", "nobody") for a in query(stage, "--prepare", "1")]


def test_whom_the_pins_do_not_name_is_refused_with_the_command_that_pins_it(stage, tmp_path):
    pins, wanted = tmp_path / "own pins", fingerprint_of((stage.folder / "hospital-b-identity.pem").read_bytes())
    ask = command(stage, "query", "hospital-b", "--prepare", "1", "--store", str(tmp_path / "q"), "--pins", str(pins))
    for required in ((), ("--require-pin",)):
        said = done([*ask, *required], 1)
        assert f"'hospital-b' is not in {pins} and pins are required; its key is {wanted}" in said
        assert ("--require-pin is the default now" in said) == bool(required)
        assert not pins.exists()
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    way_out = shlex.split(line[line.index("sectorch keys pin") :])
    assert way_out == ["sectorch", "keys", "pin", "hospital-b", wanted, "--pins", str(pins)]
    done([*PROGRAM, *way_out[1:]])
    assert "1 rows are prepared" in done(ask)


def test_trust_on_first_use_has_to_be_asked_for(stage, tmp_path):
    pins = tmp_path / "pins"
    ask = command(stage, "query", "hospital-b", "--prepare", "1", "--store", str(tmp_path / "q"), "--pins", str(pins))
    said = done([*ask, "--trust-on-first-use"])
    assert "'hospital-b' is new: trusting its key SHA256:" in said and "1 rows are prepared" in said
    assert "exclude each other" in done([*ask, "--trust-on-first-use", "--require-pin"], 1)


def test_the_options_of_pins_are_those_of_every_client(stage):
    """One line of options serves them all; the list of models itself needs no pin."""
    listed = command(stage, "models", "--pins", str(stage.pins.path), "--require-pin")
    assert done(listed).splitlines()[-1] == "--require-pin is the default now and will be removed; leave it out"
    assert "hospital-b" in done(listed)
    for command_ in ("answer", "query", "models"):
        assert "--trust-on-first-use" in done([*PROGRAM, command_, "--help"])


def test_keys_are_made_shown_and_pinned(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keys = lambda *a: done([*PROGRAM, "keys", *a])
    file = str(tmp_path / "alice-identity.pem")
    made = keys("identity", file)
    shown = keys("show", file).strip()
    assert shown.startswith("SHA256:")
    assert shown in made.replace("\n", "")
    assert (tmp_path / "alice-identity.pem").stat().st_mode & 0o077 == 0
    keys("pin", "alice", shown)
    assert (tmp_path / "sectorch" / "pins").read_text() == f"alice {shown}\n"


@pytest.mark.sectorch_long
@pytest.mark.parametrize(("net", "batch"), [("lenet", 1), ("lenet", 32), ("vgg7", 1), ("vgg7", 32)])
def test_the_nets_of_the_papers_have_the_labels_and_bytes_of_the_local_run(net, batch):
    net_, x = example(net, batch)
    x = x[:batch]
    local = sectorch.secure(net_, session=sectorch.Session())
    local(x)
    with sectorch.profile() as here:
        expected = local(x)
    with Stage({net: (net_, x.expand(max(2, batch), *x.shape[1:]))}) as stage, stage.connect("alice") as connection:
        remote = connection.model(net)
        remote(x)
        with sectorch.profile() as there:
            whole = remote(x)
        remote.prepare(tuple(x.shape))
        with sectorch.profile() as online:
            prepared = remote(x)
        remote.close()
    assert torch.equal(whole.argmax(1), expected.argmax(1))
    assert torch.equal(prepared.argmax(1), expected.argmax(1))
    assert (there.bytes, there.online_bytes, there.rounds) == (here.bytes, here.online_bytes, here.rounds)
    assert (online.bytes, online.rounds) == (here.online_bytes, here.rounds)


def test_a_batch_without_a_result_and_the_others_are_asked_all_the_same(stage, model):
    """The three processes: nan for the rows of one batch, one line, exit code 1; A and S write down and do the same."""
    rows, logs = torch.randn(12, 6), ("server", "hospital-b")
    wide = rows.clone()
    wide[5] = 4000.0 * model[0].weight[int(model[0].weight.abs().sum(1).argmax())].sign()
    expected = sectorch.reference(model)(rows)
    said, pieces = [], lambda: pieces_in(stage.folder / "store-s")
    others = pieces()
    done(query(stage, "--prepare", "24", "--batch", "4"))
    for x, left in ((wide, 3), (rows, 0)):
        np.save(stage.folder / "x.npy", x.numpy())
        before = {name: len((stage.folder / f"{name}.log").read_text()) for name in logs}
        out = ("--batch", "4", "--json", "--out", str(stage.folder / "y.npy"))
        ended = (in_process if x is wide else here)(query(stage, str(stage.folder / "x.npy"), *out))
        assert ended.returncode == (x is wide), ended.stderr
        assert ("no predictions for rows 4 to 7, which are nan" in ended.stderr) == (x is wide)
        assert pieces() == others + left, "every batch has used its material"
        figures, y = json.loads(ended.stdout), torch.from_numpy(np.load(stage.folder / "y.npy"))
        kept = torch.ones(12, dtype=torch.bool)
        kept[4:8] = x is not wide
        assert torch.equal(y[kept], expected[kept]) and bool(y[~kept].isnan().all())
        lines = [(stage.folder / f"{name}.log").read_text()[before[name] :].splitlines() for name in logs]
        told = [
            [re.sub(r"by=\S+|seconds=\S+", "", line.split(" ", 2)[2]) for line in of] for of in lines
        ]  # but for port and seconds
        said.append((told, figures["bytes"], figures["rounds"]))
    assert said[0] == said[1]
    assert "activations are below 2 " in done(query(stage, str(stage.folder / "x.npy"), "--activation-limit", "2"), 1)
    refused = done(query(stage, str(stage.folder / "x.npy"), "--no-range-check"), 1)
    assert "'hospital-b' answers with range checks only" in refused
