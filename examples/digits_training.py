"""Two owners train a CNN on handwritten digits, and nobody sees a picture, a label or a weight.

    python examples/digits_training.py

A has half of the pictures, S the other half. torch's own DataLoader, autograd and Adam train a shared model on both; at
the end Q learns the weights, and nothing was shown to anybody before. Beside it stands plain training with the same
batches. All parties are in this process: it shows what they would compute, send and learn, and protects nothing. The
epochs are computed by the reference of the protocols, which gives the same numbers sooner; a step by the protocols
follows, and says what one costs.
"""

from __future__ import annotations

import copy
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import sectorch

TRAIN, BATCH, EPOCHS, SEED = 1400, 64, 5, 0


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 pictures of 8 x 8 in [0, 1], shuffled."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16, torch.tensor(y)[order]


def shared_rows(x: torch.Tensor, y: torch.Tensor, session: sectorch.Session) -> TensorDataset:
    """Half of the rows is A's, half S's, pictures and labels."""
    parts = [
        [sectorch.share(part, session=session, owner=owner, limit=16.0) for part in (pictures, labels)]
        for owner, pictures, labels in zip("AS", x.chunk(2), y.chunk(2), strict=True)
    ]
    return TensorDataset(*(torch.cat(both) for both in zip(*parts, strict=True)))


def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """One of training, plain or on shares."""
    optimiser.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimiser.step()


def trained(model: nn.Module, data: TensorDataset, epochs: int = EPOCHS) -> nn.Module:
    """By torch, whatever the tensors are."""
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    rows = RandomSampler(data, generator=torch.Generator().manual_seed(SEED))
    loader = DataLoader(data, sampler=BatchSampler(rows, BATCH, drop_last=True), batch_size=None)
    for _ in range(epochs):
        for x, y in loader:
            step(model, optimiser, x, y)
    return model


def main() -> dict[str, float]:
    """Test accuracy of both, and how many messages of a step by the protocols show something."""
    x, y = digits()
    torch.manual_seed(SEED)
    start = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean())

    session = sectorch.Session(reference=True)
    model = trained(sectorch.shared(copy.deepcopy(start), session=session), shared_rows(x[:TRAIN], y[:TRAIN], session))
    learned = copy.deepcopy(start)
    learned.load_state_dict({name: value.reveal(to="Q") for name, value in model.state_dict().items()})
    plain = trained(copy.deepcopy(start), TensorDataset(x[:TRAIN], y[:TRAIN]))
    found = {"in the clear": accuracy(plain), "on shares": accuracy(learned)}

    session = sectorch.Session()
    model = sectorch.shared(copy.deepcopy(start), session=session)
    pictures, labels = shared_rows(x[:BATCH], y[:BATCH], session).tensors
    began = time.perf_counter()
    with sectorch.profile() as seen, session.call():
        step(model, torch.optim.SGD(model.parameters(), 0.1), pictures, labels)
    seconds = time.perf_counter() - began
    found["messages that show something"] = float(sum(bool(line.shows) for line in seen.ledger))

    table = Table(title=f"A CNN on {TRAIN} digits of two owners, {EPOCHS} epochs of Adam")
    for column in ("training", "test accuracy"):
        table.add_column(column)
    for name in ("in the clear", "on shares"):
        table.add_row(name, f"{found[name]:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"A step of {BATCH} pictures by the protocols: {seconds:.1f} s with what is compiled first, {seen.rounds} "
        f"rounds, {seen.online_bytes / 1e6:.1f} MB online and {seen.offline_bytes / 1e6:.1f} MB dealt; "
        f"{found['messages that show something']:.0f} of its messages show anything to anybody."
    )
    console.print("All parties ran in this process, which shows what they would learn and protects nothing.")
    return found


if __name__ == "__main__":
    main()
