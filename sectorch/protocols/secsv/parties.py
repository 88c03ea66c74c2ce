"""Who takes part: clients C1 to Cn and the principal server P, in SecSV the auxiliary server X as well.

A protocol names one client, C, as the paper's figures do; which one plays it differs from call to call. So there is a
net for each client, and values pass from one to the next at the servers, who are the same in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...choreography import Located, Message, Net, Party, Phase, Roles, protocol
from ...choreography.located import compute, running
from ...choreography.roles import Cast
from ...choreography.run.local import LocalRuntime
from ...choreography.steps import Runtime

ONE_SERVER = Roles("C P", edges="C-P")
TWO_SERVERS = Roles("C P X", edges="C-P C-X P-X")


class Parties:
    """The parties of a valuation, all in this process unless a runtime says otherwise.

    Attributes:
        nets: for each client one in which it plays C.
        everyone: all parties.
    """

    def __init__(self, clients: int, roles: Roles, runtime: Runtime | None = None):
        named = [Party(f"C{i + 1}", "C") for i in range(clients)]
        servers = {role: Party(role, role) for role in roles.names if role != "C"}
        self.everyone = frozenset((*named, *servers.values()))
        runtime = runtime or LocalRuntime(self.everyone)
        casts = [Cast(roles, {"C": client, **servers}) for client in named]
        self.nets = [Net(runtime, number, cast, Phase.ONLINE) for number, cast in enumerate(casts)]

    def numbers(self, own: Sequence[float]) -> list[float]:
        """A number of each client, told to all: how many test samples it has, say. float64, exact."""
        told = [
            tell(net, net.own(net.C, torch.tensor([x], dtype=torch.float64)))
            for net, x in zip(self.nets, own, strict=True)
        ]
        with running(self.nets[0]):
            together = compute(torch.cat, told)
        return self._known(together, "numbers").view(torch.float64).tolist()

    def total(self, own: Sequence[int | None]) -> int:
        """The sum of a number of each client, at P, who hears each; 0 elsewhere. None of a client who is elsewhere."""
        empty = torch.empty(1, dtype=torch.int64, device="meta")
        counts = [empty if count is None else torch.tensor([count]) for count in own]
        told = [tell(net, net.own(net.C, count)) for net, count in zip(self.nets, counts, strict=True)]
        net = self.nets[0]
        with running(net):
            together = compute(torch.cat, told).sum()
        found = net.read(together, net.P)
        return 0 if found.is_meta else int(found)

    def task(self, coalition: int, samples: Sequence[int]) -> list[int]:
        """P says which coalition is tested, and on how many samples of each batch: [coalition, *samples], to all."""
        net = self.nets[0]
        return self._known(net.own(net.P, torch.tensor([coalition, *samples])), "task").tolist()

    def _known(self, value: Located, label: str) -> torch.Tensor:
        """A value of P's, published to everyone."""
        for net in self.nets:
            value = publish(net, value, label)
        if "X" in self.nets[0].cast.parties:
            value = publish_X(self.nets[0], value, label)
        return self.nets[0].agreed(value, self.everyone)


@protocol("shapley_tell", "docs/secsv.md", [
    Message("number", "C", "P", "", "C's number of test samples, how many of them the first global model gets right, "
                                    "C's weight, and the size of its largest outputs"),
], roles=ONE_SERVER)  # fmt: skip
def tell(net: Net, number: Located) -> Located:
    """A number of C's, int64, or float64 as the same 64 bits, at P. Rounds 1, bytes 8."""
    return number.view(torch.int64).send(net.C, net.P, "number").at(net.P)


_PUBLIC = {
    "numbers": "these numbers of all clients",
    "task": "which coalition is tested, and on how many samples of each batch",
}


@protocol("shapley_publish", "docs/secsv.md", [
    Message(label, "P", "C", "", shows) for label, shows in _PUBLIC.items()
], roles=ONE_SERVER)  # fmt: skip
def publish(net: Net, value: Located, label: str) -> Located:
    """What everybody is to know, int64 [n], from P at C as well. Rounds 1, bytes 8 n."""
    return value.send(net.P, net.C, label)


@protocol("shapley_publish_X", "docs/secsv.md", [
    Message(label, "P", "X", "", shows) for label, shows in _PUBLIC.items()
], roles=TWO_SERVERS)  # fmt: skip
def publish_X(net: Net, value: Located, label: str) -> Located:
    """The same, from P at X. Rounds 1, bytes 8 n."""
    return value.send(net.P, net.X, label)
