"""A graph network on secret people, with friendships that everybody knows, or that are secret too.

    python examples/graph.py

Zachary's karate club: 34 members, 78 friendships, and the side that each took when the club split (networkx has them;
Zachary 1977). A graph convolutional network (Kipf and Welling 2017) of the answering party's is trained in the clear
on four members' sides; the querying party asks it for the sides of all, once with public friendships and once with
secret ones. All three parties run in this process: it shows what they would compute and send, and protects nothing.
"""

from __future__ import annotations

import networkx as nx
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import sectorch

console = Console()
KNOWN = (0, 33, 1, 32)
"""Whose sides the training sees: two of each side."""


class GraphNetwork(nn.Module):
    """Two graph convolutions: each member's features become those of its friends and itself, then a linear layer."""

    def __init__(self, features: int, width: int, classes: int):
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, friends: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: features [members, features]. friends: 1 where two are friends, or one and the same [members, members].
        """
        degree = friends.sum(1).rsqrt()
        spread = degree[:, None] * friends * degree
        return spread @ self.last(torch.relu(spread @ self.first(x)))


def club() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, friendships and sides: what is known of a member is its number of friends and of triangles."""
    graph = nx.karate_club_graph()
    friends = torch.tensor(nx.to_numpy_array(graph, weight=None), dtype=torch.float32) + torch.eye(len(graph))
    sides = torch.tensor([graph.nodes[member]["club"] == "Officer" for member in graph]).long()
    own = torch.eye(len(graph))
    known = torch.tensor([[graph.degree[member], count] for member, count in nx.triangles(graph).items()])
    return torch.cat((own, known / 10), 1), friends, sides


def main() -> dict[str, float]:
    """Returns the accuracy in the clear, the largest error of each way, and their megabytes."""
    torch.manual_seed(0)
    x, friends, sides = club()
    model = GraphNetwork(x.shape[1], 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x, friends)[list(KNOWN)], sides[list(KNOWN)]).backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    plain = model(x, friends)
    found = {"accuracy": float((plain.argmax(1) == sides).double().mean())}

    secure_model = sectorch.secure(model)
    table = Table(title=f"{len(x)} members, {int(friends.sum() - len(x)) // 2} friendships")
    for head in ("friendships", "right sides", "largest error", "online MB", "offline MB", "rounds"):
        table.add_column(head, justify="right")
    table.add_row("in the clear", f"{found['accuracy']:.0%}")
    for name, given in (("public", sectorch.public(friends)), ("secret", friends)):
        secure_model(x, given)  # traces, and masks the weights
        with sectorch.profile() as spent:
            y = secure_model(x, given)
        found[f"{name} error"], found[f"{name} MB"] = float((y - plain).abs().max()), spent.bytes / 1e6
        right = f"{float((y.argmax(1) == sides).double().mean()):.0%}"
        megabytes = f"{spent.online_bytes / 1e6:.2f}", f"{spent.offline_bytes / 1e6:.2f}"
        table.add_row(name, right, f"{found[f'{name} error']:.1e}", *megabytes, str(spent.rounds))
    console.print(table)
    console.print("the querying party learned the scores; the others learned shapes, and public friendships")
    return found


if __name__ == "__main__":
    main()
