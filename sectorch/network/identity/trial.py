"""`sectorch keys try`: a CA and three parties, each with a folder that could be its own machine, to try it out."""

from __future__ import annotations

import argparse
from pathlib import Path

from ... import files
from ...errors import ArgumentError
from .authority import enrol, make_authority
from .identity import Pins, fingerprint_of, new_identity

Made = tuple[dict[str, str], str]
"""What was made, for JSON and in words."""


def try_out(options: argparse.Namespace) -> Made:
    """Make the folders, and say what to run next."""
    folder, asking, answering = options.folder, options.asking, options.answering
    host, colon, port = options.server.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ArgumentError(f"--server is HOST:PORT, got {ascii(options.server)[:80]}")
    if len({asking, answering, "server", "pki"}) < 4:
        raise ArgumentError(f"the parties have different names, and none is 'server' or 'pki': {asking}, {answering}")
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(f"{folder} is not empty; name a new folder")
    own = {name: folder / name for name in ("pki", "server", asking, answering)}
    for path in own.values():
        path.mkdir(mode=0o700, parents=True)
    make_authority(own["pki"])
    enrol(own["server"], "server", hosts=(host.strip("[]"),), pki=own["pki"])
    files.write(own["server"] / "server-identity.pem", new_identity(), 0o600)  # for --receipts
    prints = {}
    for name in (asking, answering):
        enrol(own[name], name, pki=own["pki"])
        prints[name] = fingerprint_of((own[name] / f"{name}-identity.pem").read_bytes())
    Pins(own[asking] / "pins").pin(answering, prints[answering])
    Pins(own[answering] / "pins").pin(asking, prints[asking])
    made = {name: str(path) for name, path in own.items()}
    commands = _commands(own, asking, answering, options.server, port)
    words = (
        f"{folder}: a folder for each party, and pki for the CA. Whoever made them has all keys: for trying out.\n"
        f"A model file and a file of inputs are yours to bring, as by\n  {commands['convert']}\n"
        f"then, each in a terminal of its own:\n  {commands['server']}\n  {commands['answer']}\n  {commands['query']}"
    )
    return {**made, **{f"{name}_command": line for name, line in commands.items()}}, words


def _commands(own: dict[str, Path], asking: str, answering: str, server: str, port: str) -> dict[str, str]:
    def client(name: str) -> str:
        at = own[name]
        return (
            f"--server {server} --cert {at}/{name}.pem --key {at}/{name}-key.pem --ca {at}/ca.pem --pins {at}/pins "
            f"--store {at}/store"
        )

    s, a, b = own["server"], own[asking], own[answering]
    local = server if server.startswith(("localhost:", "127.")) else f"0.0.0.0:{port}"
    return {
        "convert": f"sectorch convert FILE.py:FUNCTION {b}/model.safetensors --trust --inputs {a}/inputs.npy",
        "server": f"sectorch server --listen {local} --cert {s}/server.pem --key {s}/server-key.pem "
        f"--clients-ca {s}/ca.pem --store {s}/store",
        "answer": f"sectorch answer {b}/model.safetensors --name {answering} {client(answering)}",
        "query": f"sectorch query {answering} {a}/inputs.npy {client(asking)}",
    }
