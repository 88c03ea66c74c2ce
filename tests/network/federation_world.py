"""A federation on this machine: a server, a folder of keys for each party, and the file that all of them have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from sectorch.network import Server
from sectorch.network.federation.party import Federation
from sectorch.network.identity.authority import make_authority
from sectorch.network.identity.identity import fingerprint_of
from sectorch.testing.local_network import enrol


class World:
    """A CA, a server, and parties by name with their roles; those of `serving` are servers, in place of the one."""

    def __init__(self, folder: Path, roles: dict[str, str], serving: Iterable[str] = ()):
        self.folder, self.roles = folder, roles
        make_authority(folder)
        self.credentials = {"server": enrol(folder, "server", hosts=("localhost",))}
        for name in roles:
            self.credentials[name] = enrol(folder, name)
        self.servers = {
            name: Server("localhost:0", enrol(folder, f"{name}-server", hosts=("localhost",))) for name in serving
        }
        self.server = next(iter(self.servers.values()), None) or Server("localhost:0", self.credentials["server"])
        self.path = self.written()

    def written(self, file: str = "federation.toml", **changed: str) -> Path:
        """The federation file; `changed` are the fingerprints of parties that it is to name."""
        lines = ["[federation]", 'name = "tests"']
        lines += [] if self.servers else [f'server = "localhost:{self.server.port}"']
        for name, role in self.roles.items():
            identity = changed.get(name) or fingerprint_of(self.credentials[name].identity or b"")
            lines += [f"[parties.{name}]", f'role = "{role}"', f'identity = "{identity}"']
            lines += [f'address = "localhost:{self.servers[name].port}"'] if name in self.servers else []
        path = self.folder / file
        path.write_text("\n".join(lines) + "\n")
        return path

    def party(self, name: str, path: Path | None = None) -> Federation:
        return Federation(path or self.path, name, patience=60)  # a machine may be busy

    def close(self) -> None:
        for server in (*self.servers.values(), self.server):
            server.stop()


def begun(names: Iterable[str], work: Callable[[str], Any]) -> tuple[dict[str, Any], list[threading.Thread]]:
    """What work(name) gives, or raises, in a thread of each, as soon as it is done; and the threads."""
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        torch.set_num_threads(1)
        try:
            found[name] = work(name)
        except BaseException as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=(name,), name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    return found, threads


def each(names: Iterable[str], work: Callable[[str], Any], seconds: float = 120) -> dict[str, Any]:
    """What work(name) gives, or raises, in a thread of each, for which it waits so long."""
    found, threads = begun(names, work)
    for thread in threads:
        thread.join(seconds)
    waiting = [thread.name for thread in threads if thread.is_alive()]
    assert not waiting, f"{waiting} have nothing after {seconds} s each; of the others: {found}"
    return found
