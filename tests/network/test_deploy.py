"""The files of deploy/: every command in them is one, the files they name are there, and nothing runs as root."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sectorch.cli.main import COMMANDS, run
from sectorch.network.identity.authority import issue
from sectorch.testing.local_network import PROGRAM, free_port

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
MANIFESTS = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in sorted(DEPLOY.glob("kubernetes/*.yaml"))}
FILES, STATE = "/etc/sectorch/", "/var/lib/sectorch/"
READ = ("cert", "key", "ca", "clients_ca", "pins", "model", "inputs", "identity", "store_key")
WRITTEN = ("store", "receipts", "out", "log")


def settings(unit: Path) -> dict[str, list[str]]:
    """What a unit sets, by name."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().replace("\\\n", "").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def pod(kind: str) -> dict:
    (one,) = (m for m in MANIFESTS[kind] if m["kind"] == "StatefulSet")
    return one["spec"]["template"]["spec"]


def commands() -> dict[str, list[str]]:
    """Every command line of the folder, after the word sectorch, by where it stands."""
    found = {f"compose {name}": service["command"] for name, service in COMPOSE["services"].items()}
    for unit in UNITS:
        (line,) = settings(unit)["ExecStart"]
        program, *found[unit.name] = shlex.split(line)
        assert program == "/opt/sectorch/bin/sectorch"
    for kind in MANIFESTS:
        (container,) = pod(kind)["containers"]
        found[f"kubernetes {kind}"] = container["args"]
    for path in (*DEPLOY.rglob("*.yaml"), DEPLOY / "Dockerfile"):
        for line in re.findall(r"^#? *sectorch ((?:[a-z]+ )+.*)$", path.read_text(), re.MULTILINE):
            found[f"{path.name}: {line[:20]}"] = shlex.split(line)
    return found


def parsed(command: list[str], monkeypatch) -> argparse.Namespace:
    """A command line as its own parser takes it; nothing is done."""
    name, *arguments = command
    module, function = COMMANDS[name].split(":")
    module, seen = importlib.import_module(f"sectorch.{module}"), []
    with monkeypatch.context() as patch:
        patch.setattr(module, "command_status", lambda p, given, *_: seen.append(p.parse_args(given)))
        getattr(module, function)(arguments)
    return seen[0]


COMMANDS_HERE = commands()


def places(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """The paths that options of these names have."""
    values = (getattr(options, name, None) for name in names)
    return [
        str(one) for value in values if value is not None for one in (value if isinstance(value, list) else [value])
    ]


RUNNING = {where: command for where, command in COMMANDS_HERE.items() if command[0] in ("server", "answer")}


def test_the_commands_are_found():
    kinds = sorted(command[0] for command in COMMANDS_HERE.values())
    assert kinds == ["answer"] * 3 + ["convert", "keys", "query"] + ["server"] * 3


@pytest.mark.parametrize("where", COMMANDS_HERE)
def test_every_command_line_is_understood_and_its_paths_have_a_place(where, monkeypatch):
    """What is read is in the folder of files, which is read-only, or a model's own; what is written is in the state."""
    options = parsed(COMMANDS_HERE[where], monkeypatch)
    if COMMANDS_HERE[where][0] not in ("server", "answer", "query"):
        return
    assert [path for path in places(options, READ) if not path.startswith((FILES, "/models/"))] == []
    assert [path for path in places(options, WRITTEN) if not path.startswith(STATE)] == []
    assert options.receipts is not None and options.store is not None, "an operator wants both"


@pytest.mark.parametrize("where", RUNNING)
def test_parties_drain_before_they_are_killed_and_are_watched(where, monkeypatch):
    options = parsed(RUNNING[where], monkeypatch)
    grace = {
        "compose": lambda: int(COMPOSE["x-party"]["stop_grace_period"].rstrip("s")),
        "kubernetes": lambda: pod(where.split()[-1])["terminationGracePeriodSeconds"],
    }.get(where.split()[0], lambda: int(settings(DEPLOY / "systemd" / where)["TimeoutStopSec"][0]))()
    assert options.drain + 10 <= grace
    host, _, port = options.manage.rpartition(":")
    assert port == "7101" and options.metrics and not options.metrics_clients and options.log_format == "json"
    assert (host == "127.0.0.1") != options.manage_anywhere and options.manage_anywhere == where.startswith("kube")


# The image and compose.


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_the_image_runs_as_nobody_and_names_no_other_host():
    lines = dockerfile()
    last = max(i for i, (word, _) in enumerate(lines) if word == "FROM")
    final = dict(lines[last:])
    assert final["USER"] == "10001:10001" and final["ENTRYPOINT"] == '["sectorch"]'
    assert not any(word == "ADD" for word, _ in lines)
    text = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"\w+://[^\s'\"]+", text)) == {"http://127.0.0.1:7101/ready"}
    (folder,) = re.findall(r"NUMBA_CACHE_DIR=(\S+)", final["ENV"])
    assert ("RUN", f"/opt/sectorch/bin/sectorch warm --into {folder}") in lines, "and the root file system is read-only"
    assert f"COPY --from=build {Path(folder).parent}" in (DEPLOY / "Dockerfile").read_text()


def test_images_are_named_by_digests():
    """A digest of zeros is refused until its operator names one, as is a variable that is not set."""
    assert COMPOSE["x-party"]["image"].startswith("${SECTORCH_IMAGE:?") and COMPOSE["x-party"]["pull_policy"] == "never"
    for kind in MANIFESTS:
        (container,) = pod(kind)["containers"]
        assert re.fullmatch(r"registry\.example/sectorch@sha256:0{64}", container["image"])
    bases = [rest.split()[0] for word, rest in dockerfile() if word == "FROM"]
    assert set(bases) == {"${PYTHON}"} and ("ARG", "PYTHON=python:3.12-slim") in dockerfile()


VALIDATE = "kubernetes-validate"
"""Of PyPI: it has the JSON schemas of each version of Kubernetes."""


@pytest.mark.skipif(shutil.which(VALIDATE) is None, reason="kubernetes-validate is not installed here")
@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_have_the_form_that_kubernetes_takes(kind):
    checked = subprocess.run(
        [VALIDATE, "--strict", str(DEPLOY / "kubernetes" / f"{kind}.yaml")], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_build_takes_what_is_installed_and_nothing_else():
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {p for w, rest in dockerfile() if w == "COPY" and "--from" not in rest for p in rest.split()[:-1]}
    assert copied == kept and all((ROOT / path).exists() for path in copied) and "*" in lines


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_services_have_no_rights_and_their_own_files(name, tmp_path, monkeypatch, capsys):
    """The files are those that `sectorch keys try`, as the head of compose.yaml says, makes for that party."""
    service = COMPOSE["services"][name]
    assert service["read_only"] is True and service["user"].split(":")[0] not in ("", "0", "root")
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert "ports" not in service and service["pids_limit"] and service["mem_limit"]
    mounts = dict(volume.split(":", 1) for volume in service["volumes"])
    assert mounts == {f"./trial/{name}": "/etc/sectorch:ro", f"{name}-state": "/var/lib/sectorch"}
    assert f"{name}-state" in COMPOSE["volumes"]
    monkeypatch.chdir(tmp_path)
    (keys,) = (command for where, command in COMMANDS_HERE.items() if command[0] == "keys")
    assert run(keys) == 0
    options = parsed(service["command"], monkeypatch)
    for path in places(options, READ):
        if Path(path).name not in ("model.safetensors", "inputs.npy"):
            assert (tmp_path / "deploy" / "trial" / name / Path(path).name).exists(), path


def test_the_hospitals_reach_the_server_and_not_each_other():
    networks = {name: set(service["networks"]) for name, service in COMPOSE["services"].items()}
    assert networks["server"] == networks["hospital-a"] | networks["hospital-b"]
    assert not networks["hospital-a"] & networks["hospital-b"]


# systemd.

HARDENED = {
    "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
    "PrivateDevices": "yes", "CapabilityBoundingSet": "", "StateDirectory": "sectorch", "UMask": "0077",
    "StateDirectoryMode": "0700", "Type": "exec", "Restart": "on-failure", "ExecReload": "/bin/kill -HUP $MAINPID",
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_hardened(unit):
    found = settings(unit)
    assert {name: found.get(name) for name in HARDENED} == {name: [value] for name, value in HARDENED.items()}
    assert found["User"] == ["sectorch"] and "NUMBA_CACHE_DIR=/var/cache/sectorch" in found["Environment"][0]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong(unit, tmp_path):
    """With another program in the place of the installed one, which it looks for."""
    text = unit.read_text().replace("/opt/sectorch/bin/sectorch", sys.executable)
    (tmp_path / unit.name).write_text(text)
    here = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True, text=True, env=here, timeout=60,
    )  # fmt: skip
    assert checked.returncode == 0 and unit.name not in checked.stderr, checked.stderr
    scored = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(tmp_path / unit.name)],
        capture_output=True, text=True, env=here, timeout=60,
    )  # fmt: skip
    assert scored.returncode == 0, scored.stdout[-300:]  # an exposure of at most 2.0 of 10


# Kubernetes.


@pytest.mark.parametrize("kind", MANIFESTS)
def test_pods_have_no_rights_and_only_their_own_files(kind, monkeypatch):
    spec = pod(kind)
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True and rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]} and not rights.get("privileged")
    assert set(container["resources"]["limits"]) >= {"cpu", "memory"} <= set(container["resources"]["requests"])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    secret = volumes["files"]["secret"]
    assert secret["defaultMode"] == 0o400 and {item["mode"] for item in secret["items"]} == {0o400}
    there = {FILES + item["path"] for item in secret["items"]} | {"/models/model.safetensors"}
    options = parsed(container["args"], monkeypatch)
    assert set(places(options, READ)) <= there and str(options.cert).replace(".pem", "-identity.pem") in there
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in stateful(kind)["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in mounts.values()} == {*volumes, *claimed}
    assert mounts["/etc/sectorch"]["readOnly"] and mounts["/var/lib/sectorch"]["name"] in claimed
    assert all(m.get("readOnly") for path, m in mounts.items() if path not in ("/var/lib/sectorch", "/tmp"))


def stateful(kind: str) -> dict:
    return next(m for m in MANIFESTS[kind] if m["kind"] == "StatefulSet")


@pytest.mark.parametrize("kind", MANIFESTS)
def test_probes_labels_and_budgets_meet_their_pods(kind):
    (container,) = pod(kind)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["manage"] == 7101 and ("star" in ports) == (kind == "server")
    for probe, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
        assert container[probe]["httpGet"] == {"path": path, "port": "manage"}
    labels = stateful(kind)["spec"]["template"]["metadata"]["labels"]
    by_kind = {m["kind"]: m for m in MANIFESTS[kind]}
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert stateful(kind)["spec"]["selector"]["matchLabels"] == labels
    assert ("Service" in by_kind) == (kind == "server")
    if kind == "server":
        assert by_kind["Service"]["spec"]["selector"] == labels
        assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} <= set(ports)
    open_ = [port["port"] for rule in by_kind["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(open_) == sorted(ports)
    assert pod(kind)["serviceAccountName"] == by_kind["ServiceAccount"]["metadata"]["name"]


# The commands as processes.

MODEL = """
import torch
from torch import nn


def digits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)).eval()
    return model, torch.rand(8, 1, 8, 8)
"""


def answers(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def until(what, seconds: float = 90) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def shown_by(port: int, authority: Path) -> bytes:
    """The certificate that the server shows to whoever connects."""
    return ssl.get_server_certificate(("localhost", port), ca_certs=str(authority), timeout=10).encode()


# What a container is: another root file system, read-only, of a user without rights. Needs root, and user 10001 to read
# this Python, and is passed over elsewhere.
CONTAINER = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/up /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root
R=/mnt/root
chmod 755 $R/root
mkdir -p $R/etc/sectorch $R/var/lib/sectorch $R/src $R/python
mount --bind "$SRC" $R/src
mount --bind "$VENV" "$R/python"
mount --bind "$FILES" $R/etc/sectorch
mount --bind "$STATE" $R/var/lib/sectorch
mount -t tmpfs -o mode=1777,size=256m tmpfs $R/tmp
mount --rbind /proc $R/proc
mount --rbind /dev $R/dev
for place in src python etc/sectorch; do mount -o remount,bind,ro $R/$place; done
mount -o remount,ro overlay $R || mount -o remount,bind,ro $R
exec chroot $R setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
    env -i PATH=/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/src OMP_NUM_THREADS=1 $KERNELS \
    sh -c 'touch /x /etc/sectorch/x 2>/dev/null && exit 99; cd /var/lib/sectorch; exec "$@"' sh "$@"
"""


@pytest.mark.sectorch_long
@pytest.mark.parametrize(
    "kernels", ["NUMBA_CACHE_DIR=/tmp/numba", "HOME=/nonexistent"],
    ids=["kept", "not kept"],
)  # fmt: skip
def test_the_server_of_compose_runs_on_a_read_only_root_without_rights(kernels, tmp_path, monkeypatch):
    """With the same paths, in a mount namespace; also where no folder for compiled kernels is named."""
    tools = all(shutil.which(tool) for tool in ("unshare", "setpriv", "chroot"))
    if os.geteuid() or not tools or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    monkeypatch.chdir(tmp_path)
    (keys,) = (command for command in COMMANDS_HERE.values() if command[0] == "keys")
    assert run(keys) == 0
    files, state, manage = tmp_path / "deploy" / "trial" / "server", tmp_path / "state", free_port()
    state.mkdir()
    for path in (files, state, *files.iterdir()):
        os.chown(path, 10001, 10001)
    words = [
        word.replace("0.0.0.0:7100", "127.0.0.1:0").replace(":7101", f":{manage}")
        for word in COMPOSE["services"]["server"]["command"]
    ]
    python = ["/python/bin/python", *PROGRAM[1:]]
    places = {"SRC": ROOT, "VENV": sys.prefix, "FILES": files, "STATE": state, "KERNELS": kernels}
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", CONTAINER, "bash", *python, *words],
        env={**os.environ, **{name: str(value) for name, value in places.items()}}, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        assert until(lambda: answers(manage, "/ready") == 200 or process.poll() is not None)
        log.flush()
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        assert {path.name for path in state.iterdir()} == {"store", "store.used", "receipts.jsonl"}
        assert {path.stat().st_uid for path in state.iterdir()} == {10001}
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        log.close()


@pytest.mark.sectorch_long
def test_six_commands_lead_from_nothing_to_a_prediction(tmp_path):
    """As they stand in docs/deploying.md, in an empty folder, with another port; pip is left out: this is installed."""
    text = (ROOT / "docs" / "deploying.md").read_text().partition("### One machine")[2].partition("### Three")[0]
    listing, block = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(listing)
    lines = block.replace("\\\n", "").replace("localhost:7100", f"localhost:{free_port()}").splitlines()
    assert len(lines) == 6 and lines[0] == "pip install ."
    commands_ = [[*PROGRAM, *shlex.split(line)[1:]] for line in lines[1:]]
    here: dict = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    running: list[subprocess.Popen] = []
    found: list[str] = []
    try:
        for command in commands_[:2]:
            subprocess.run(command, check=True, timeout=120, **here)
        for command in commands_[2:4]:
            running.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, **here))
        ask = lambda: subprocess.run([*commands_[4], "--json"], capture_output=True, text=True, timeout=120, **here)
        assert until(lambda: (asked := ask()).returncode == 0 and bool(found.append(asked.stdout) or True)), (
            ask().stderr
        )
        space: dict = {}
        exec(listing, space)
        model, inputs = space["digits"]()
        logits = torch.tensor(json.loads(found[0])["predictions"])
        assert torch.allclose(logits, model(inputs), atol=1e-4)
    finally:
        for process in running:
            process.terminate()
            process.wait(60)


@pytest.mark.sectorch_long
def test_the_commands_of_compose_run_and_a_certificate_is_renewed_in_place(tmp_path, monkeypatch):
    """With folders of the test in the place of /etc/sectorch and /var/lib/sectorch, and free ports."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    port, manage = free_port(), {name: free_port() for name in ("server", "hospital-b")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trial = tmp_path / "deploy" / "trial"

    def line(name: str) -> list[str]:
        own = {FILES: f"{trial / name}/", STATE: f"{tmp_path / 'state' / name}/", "server:7100": f"localhost:{port}"}
        own |= {"0.0.0.0:7100": f"localhost:{port}", ":7101": f":{manage.get(name)}"}
        words = COMPOSE["services"][name]["command"]
        for before, after in own.items():
            words = [word.replace(before, after) for word in words]
        return [*PROGRAM, *words]

    for kind, word in (("keys", "--server=localhost:7100"), ("convert", "mine.py:digits")):
        (command,) = (command for command in COMMANDS_HERE.values() if command[0] == kind)
        changed = [
            word if part in ("server:7100", "FILE.py:FUNCTION") else part for part in command if part != "--server"
        ]
        subprocess.run([*PROGRAM, *changed], check=True, env=environment, timeout=120)
    for name in COMPOSE["services"]:
        (tmp_path / "state" / name).mkdir(parents=True)
    running: dict[str, subprocess.Popen] = {}
    try:
        for name in ("hospital-b", "server"):
            with (tmp_path / f"{name}.log").open("a") as log:
                running[name] = subprocess.Popen(line(name), env=environment, stdout=log, stderr=log)
            if name == "hospital-b":
                assert until(lambda: answers(manage["hospital-b"], "/live") == 200)
                assert answers(manage["hospital-b"], "/ready") == 503, "no server yet"
        assert all(until(lambda name=name: answers(manage[name], "/ready") == 200) for name in running)
        subprocess.run(line("hospital-a"), check=True, env=environment, timeout=120)
        logits = torch.from_numpy(np.load(tmp_path / "state" / "hospital-a" / "logits.npy"))
        space: dict = {}
        exec(MODEL, space)
        model, inputs = space["digits"]()
        assert torch.allclose(logits, model(inputs), atol=1e-4)
        assert (
            "sectorch_queries_total"
            in urllib.request.urlopen(f"http://127.0.0.1:{manage['server']}/metrics", timeout=10).read().decode()
        )

        before = shown_by(port, trial / "pki" / "ca.pem")
        renewed = issue(trial / "pki", (trial / "server" / "server.csr").read_bytes(), hosts=("localhost",), days=60)
        shutil.copy(renewed, trial / "server" / "server.pem")
        running["server"].send_signal(signal.SIGHUP)
        assert until(lambda: shown_by(port, trial / "pki" / "ca.pem") != before)
        assert answers(manage["hospital-b"], "/ready") == 200, "who was connected still is"
        shutil.rmtree(tmp_path / "state" / "hospital-a")
        (tmp_path / "state" / "hospital-a").mkdir()
        subprocess.run(line("hospital-a"), check=True, env=environment, timeout=120)

        running["server"].send_signal(signal.SIGTERM)
        assert running["server"].wait(60) == 0
        assert until(lambda: answers(manage["hospital-b"], "/ready") == 503)
        running["hospital-b"].send_signal(signal.SIGTERM)
        assert running["hospital-b"].wait(60) == 0
    finally:
        for process in running.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("kind", MANIFESTS)
def test_parties_reach_whom_they_need_and_have_the_memory_that_is_measured(kind):
    (policy,) = (m["spec"] for m in MANIFESTS[kind] if m["kind"] == "NetworkPolicy")
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = sorted(port["port"] for rule in policy["egress"] for port in rule["ports"])
    assert ports == ([] if kind == "server" else [53, 53, 7100])
    (container,) = pod(kind)["containers"]
    least = {"server": 2.7, "answer": 4.6}[kind]  # GB of VGG-7 with 20 clients, docs/processes.md
    assert 0.9 * int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 1.074 > least


def test_the_networks_of_compose_have_no_way_out():
    assert all(network == {"internal": True} for network in COMPOSE["networks"].values())
    assert COMPOSE["x-party"]["mem_limit"] == "6g"
