"""CaPriDe with models of your own: two parties with different classes learn from each other on ciphertexts.

    python examples/capride.py

The paper's claim: parties improve each other without a server and without showing data, models or predictions; all
that is decrypted are sums over a whole batch. One round runs on real ciphertexts and is set against the same round in
the clear; then twelve rounds in the clear show where it leads. All parties run in this process: it protects nothing.
No limit is set on what the answers tell of the logits (`leakage=None`): with one, little is learned (docs/capride.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from sectorch.nn import fhe_friendly
from sectorch.protocols.capride import CaPriDe, Party, Settings


def model_of() -> nn.Module:
    """ReLU becomes a polynomial, which homomorphic encryption can evaluate."""
    return fhe_friendly(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))


def main(rounds: int = 12) -> dict[str, float]:
    """Mean accuracies, and how far the encrypted round is from the one in the clear."""
    console = Console()
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1000], order[1000:]
    torch.manual_seed(0)
    owns = [train[labels[train] % 2 == k][:400] for k in (0, 1)]  # even digits, odd digits
    parties = [Party(f"P{k + 1}", model_of(), images[own], labels[own]) for k, own in enumerate(owns)]
    run = lambda how: CaPriDe(parties, (images[test], labels[test]), 10, how).run()

    one = Settings(update="head", head_rank=4, rounds=1, warmup=5, epochs=1, leakage=None)
    encrypted, clear = run(one), run(replace(one, encrypted=False))
    many = Settings(update="forward", directions=128, rounds=rounds, encrypted=False, leakage=None)
    learned, alone = run(many), run(replace(many, method="local"))

    weights = [torch.cat([p.flatten() for p in r.models["P1"][0].parameters()]).detach() for r in (encrypted, clear)]
    apart = float((weights[0] - weights[1]).norm() / weights[1].norm())
    table = Table(
        "mean test accuracy, %", "before", f"after {rounds} rounds", title="Even digits at P1, odd digits at P2"
    )
    for name, result in {"CaPriDe": learned, "local training alone": alone}.items():
        table.add_row(name, f"{100 * result.accuracy(0):.1f}", f"{100 * result.accuracy(-1):.1f}")
    console.print(table)
    console.print(f"One encrypted round: P1's weights are {apart:.0e} of their length off the round in the clear.")
    for sentence in encrypted.statement:
        console.print(f"- {sentence}", markup=False)
    return {"apart": apart, "learned": learned.accuracy(-1), "alone": alone.accuracy(-1), "before": learned.accuracy(0)}


if __name__ == "__main__":
    main()
