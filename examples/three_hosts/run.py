"""The three commands of a deployment, as three processes on this machine.

    python examples/three_hosts/run.py             # LeNet on digits
    python examples/three_hosts/run.py --net vgg7 --rows 64 --batch 32
    python examples/three_hosts/run.py --prepare   # offline phase first, and the online phase after a restart of S

Makes a trial CA, keys and certificates, lets the two clients pin each other, starts `sectorch server` and
`sectorch answer`, and runs `sectorch query`, over TLS on loopback. On three hosts the same commands run with each
party's own folder and the server's host name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import sectorch
from sectorch.cli.main import run as command
from sectorch.network import save_model
from sectorch.nn.models import ZOO

SECTORCH = [sys.executable, "-c", "from sectorch.cli.main import main; main()"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def build(net: str, rows: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """LeNet trained on the digits, or another net of the zoo with random weights and inputs."""
    torch.manual_seed(0)
    construct, shape = ZOO[net]
    model = construct()
    if net != "lenet":
        return model.eval(), torch.randn(rows, *shape)
    data = load_digits()
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, size=28)
    labels = torch.tensor(data.target)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in torch.randint(0, 1500, (60, 64)):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model.eval(), images[1500 : 1500 + rows]


def keys(*args: str | Path) -> str:
    """`sectorch keys` in this process, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if command(["keys", *map(str, args)]):
            raise SystemExit(f"sectorch keys {args[0]} has failed")
    return printed.getvalue()


def enrol(here: Path, name: str) -> str | None:
    """A party makes its keys and a request in its own folder, and the CA hands back a certificate; its fingerprint."""
    own, serves = here / name, name == "server"
    made = json.loads(keys("request", name, "--folder", own, *["--server"] * serves, "--json"))
    keys("issue", here / "pki", made["request"], *["--host", "localhost"] * serves)
    for file in (f"{name}.pem", "ca.pem"):
        shutil.copy(here / "pki" / file, own / file)
    return made.get("fingerprint")


def wait(options: list[str], model: str = "") -> None:
    """Wait until the server answers `sectorch models`, in this process, and lists the model."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            failed = command(["models", *options])
        if not failed and model in printed.getvalue():
            return
        time.sleep(0.5)
    raise SystemExit("the server, or the model, did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="lenet", choices=list(ZOO))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prepare", action="store_true", help="run the offline phase ahead")
    options = parser.parse_args()
    model, x = build(options.net, options.rows)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        run = lambda *args: subprocess.run([*SECTORCH, *map(str, args)], check=True, capture_output=True, text=True)
        keys("init", here / "pki")
        prints = {name: enrol(here, name) for name in ("server", "hospital-b", "alice")}
        for name, other in (("hospital-b", "alice"), ("alice", "hospital-b")):  # as they tell each other by telephone
            keys("pin", other, str(prints[other]), "--pins", here / name / "pins")
        save_model(model, x[:2], here / "model.safetensors")
        np.save(here / "images.npy", x.numpy())
        address = f"localhost:{free_port()}"

        def client(name: str, pins: bool = True) -> list[str]:
            own = here / name
            files = ("--cert", own / f"{name}.pem", "--key", own / f"{name}-key.pem", "--ca", own / "ca.pem")
            known = ("--pins", own / "pins", "--store", own / "store") if pins else ()
            return [*map(str, (*files, *known)), "--server", address]

        own = here / "server"
        files = ("--cert", own / "server.pem", "--key", own / "server-key.pem", "--clients-ca", own / "ca.pem")
        serve = [*SECTORCH, "server", "--listen", address, *map(str, files), "--store", str(own / "store")]
        processes = [subprocess.Popen(serve)]
        try:
            answer = [
                *SECTORCH,
                "answer",
                str(here / "model.safetensors"),
                "--name",
                "hospital-b",
                *client("hospital-b"),
            ]
            wait(client("alice", pins=False))
            processes.append(subprocess.Popen(answer))
            wait(client("alice", pins=False), "hospital-b")
            ask = ("query", "hospital-b", *client("alice"), "--batch", options.batch)
            if options.prepare:
                print(run(*ask, "--prepare", options.rows).stderr.strip().splitlines()[-1])
                processes[0].terminate()
                processes[0].wait(timeout=20)
                processes[0] = subprocess.Popen(serve)
                wait(client("alice", pins=False), "hospital-b")
            asked = run(*ask, here / "images.npy", "--out", here / "logits.npy", "--json")
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(timeout=20)
        figures = json.loads(asked.stdout)
        logits = torch.from_numpy(np.load(here / "logits.npy"))
    with torch.no_grad():
        plain = model(x)
    local = sectorch.secure(model)
    with sectorch.profile() as p:
        for part in x.split(options.batch):
            local(part)
    print(f"same labels as plain: {int((logits.argmax(1) == plain.argmax(1)).sum())} of {len(x)}")
    print(f"largest error {float((logits - plain).abs().max()):.1e}")
    print(f"three processes: {figures['seconds']:.2f} s, {figures['bytes']} bytes; all parties here: {p.bytes} bytes")
    if options.prepare:
        print(f"of {figures['prepared_calls']} prepared calls; online bytes of all parties here: {p.online_bytes}")


if __name__ == "__main__":
    main()
