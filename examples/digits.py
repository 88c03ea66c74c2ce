"""Train a small CNN on handwritten digits, then classify the test images without anybody seeing them.

    make demo          or          python examples/digits.py

All three parties run in this process: it shows what they would compute, send and learn, and protects nothing.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import sectorch

console = Console()


def load() -> tuple[torch.Tensor, ...]:
    """scikit-learn's bundled 8x8 digits: training and test images in [0, 1], and their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    parts = train_test_split(images.numpy(), labels.numpy(), test_size=0.25, random_state=0, stratify=labels)
    return tuple(torch.from_numpy(p) for p in parts)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in track(range(epochs), "training in the clear (at the answering party)", console=console):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()


def timed(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, float]:
    with torch.no_grad():
        start = time.perf_counter()
        logits = model(images)
        return logits, time.perf_counter() - start


def main(epochs: int = 30) -> None:
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = load()
    model = network()
    train(model, train_images, train_labels, epochs)

    timed(model, test_images[:32])
    plain, plain_seconds = timed(model, test_images)
    secure_model = sectorch.secure(model)
    secure_model(test_images[:32])  # the masked weights are sent once a session
    with sectorch.profile() as profile:
        secure, secure_seconds = timed(secure_model, test_images)

    n = len(test_images)
    table = Table(title=f"{n} test images")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("secure", justify="right")
    accuracies = [f"{(logits.argmax(1) == test_labels).float().mean():.4f}" for logits in (plain, secure)]
    table.add_row("accuracy", *accuracies)
    table.add_row("milliseconds per image", f"{1e3 * plain_seconds / n:.3f}", f"{1e3 * secure_seconds / n:.3f}")
    same = int((plain.argmax(1) == secure.argmax(1)).sum())
    table.add_row("same label as plain", f"{n}", f"{same}")
    table.add_row("largest logit error", "", f"{(plain - secure).abs().max():.1e}")
    table.add_row("kB per image, ahead of the query", "", f"{profile.offline_bytes / n / 1e3:.1f}")
    table.add_row("kB per image, online", "", f"{profile.online_bytes / n / 1e3:.1f}")
    console.print(table)
    console.print(profile.edges())
    console.print(profile.learned())
    console.print(
        "Q learns the logits above. A and S receive uniform bits only; they know the architecture and the shapes.\n"
        "All parties ran in this process, which therefore protects nothing: it is for development.",
        style="dim",
    )


if __name__ == "__main__":
    main()
