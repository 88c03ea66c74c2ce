"""Training on shares beside plain training with the same batches: test accuracy on scikit-learn's digits, by seed.

    python benchmarks/training.py [--model mlp|cnn|lenet|transformer|lstm] [--frac-bits 20] [--seeds 5] [--secure]
    python benchmarks/training.py --model lenet --moved 24      how far two plain trainings get apart by themselves

The steps are those of the fixed-point reference, whose bits a secure step gives (tests/training/); with --secure the
parties compute, each step as one call, and what the last one sent is printed.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any, cast

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import sectorch
from sectorch import Scheme, Session


class Sequence(nn.Module):
    """A picture's rows one after the other, [n, 1, 8, 8], through a layer for sequences; scores of their mean."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.scores = layer, nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 10]."""
        y = self.layer(x.squeeze(1))
        return self.scores((y[0] if isinstance(y, tuple) else y).mean(1))


def transformer() -> nn.Module:
    """A block of LayerNorm, attention with two heads, GELU, and no dropout."""
    block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True)
    return Sequence(nn.Sequential(nn.Linear(8, 16), block))


def lenet(own: bool = False) -> nn.Module:
    """Of pictures of 28 x 28, begun as He et al. (ICCV 2015): from torch's `own` start it stays at a tenth for long."""
    made = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    for layer in () if own else made:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(cast(torch.Tensor, layer.bias))
    return made


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    ),
    "lenet": lenet,
    "lenet-torch": lambda: lenet(own=True),
    "transformer": transformer,
    "lstm": lambda: Sequence(nn.LSTM(8, 16, batch_first=True)),
}
OPTIMISERS = {
    "sgd": lambda p, rate: torch.optim.SGD(p, rate or 0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p, rate: torch.optim.Adam(p, rate or 0.003),
}


def digits(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 pictures of size x size in [0, 1], shuffled; of 8 x 8, and larger ones by interpolation."""
    found: Any = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    x = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    x = x if size == 8 else F.interpolate(x, size=size, mode="bilinear")
    return x, torch.tensor(found.target)[order]


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """In per cent, of a plain model."""
    with torch.no_grad():
        return 100 * float((model.eval()(x).argmax(1) == y).float().mean())


def revealed(model: nn.Module, plain: nn.Module) -> nn.Module:
    """The shared model's values in a plain module of the same form."""
    state = {
        k: v.reveal() if isinstance(v, sectorch.DifferentiableTensor) else v for k, v in model.state_dict().items()
    }
    made = copy.deepcopy(plain)
    made.load_state_dict(state)
    return made


def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One of training, plain or on shares; its loss."""
    optimiser.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimiser.step()
    return loss.detach()


def trained(seed: int, given: argparse.Namespace) -> tuple[float, float, float, float]:
    """Test accuracy of both, the seconds of a shared step, and how far losses that are read were apart at most."""
    x, y = digits(28 if given.model.startswith("lenet") else 8)
    train, test = (x[:1400], y[:1400]), (x[1400:], y[1400:])
    session, scheme = Session(reference=not given.secure), Scheme(frac_bits=given.frac_bits)
    torch.manual_seed(seed)
    plain = MODELS[given.model]()
    model = sectorch.shared(copy.deepcopy(plain), session=session, scheme=scheme)
    optimisers = [OPTIMISERS[given.optimiser](m.parameters(), given.rate) for m in (plain, model)]
    seconds, steps, sent, apart = 0.0, 0, "", 0.0
    for _ in range(given.epochs):
        for rows in torch.randperm(len(train[0])).split(given.batch)[: given.steps]:
            pictures, labels = train[0][rows], train[1][rows]
            loss = step(plain, optimisers[0], pictures, labels)
            began = time.perf_counter()
            with sectorch.profile() as seen, sectorch.step(session):
                secret = sectorch.share(pictures, session=session, scheme=scheme, limit=2.0)
                made = step(model, optimisers[1], secret, labels)
            seconds, steps = seconds + time.perf_counter() - began, steps + 1
            sent = f"a step: {seen.rounds} rounds, {seen.online_bytes:,} bytes online, {seen.offline_bytes:,} dealt"
            if given.losses and isinstance(made, sectorch.DifferentiableTensor):
                apart = max(apart, abs(float(made.reveal() - loss)))
    if given.secure:
        print(sent)
    return accuracy(plain, *test), accuracy(revealed(model, plain), *test), seconds / steps, apart


def moved(seed: int, given: argparse.Namespace) -> tuple[float, float]:
    """Test accuracy of a plain training, and of the same one whose weights begin 2^-`moved` apart at most."""
    x, y = digits(28 if given.model.startswith("lenet") else 8)
    found = []
    for size in (0.0, 2.0**-given.moved):
        torch.manual_seed(seed)
        model, generator = MODELS[given.model](), torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(size * (2 * torch.rand(p.shape, generator=generator) - 1))
        optimiser = OPTIMISERS[given.optimiser](model.parameters(), given.rate)
        for _ in range(given.epochs):
            for rows in torch.randperm(1400).split(given.batch)[: given.steps]:
                step(model, optimiser, x[rows], y[rows])
        found.append(accuracy(model, x[1400:], y[1400:]))
    return found[0], found[1]


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """What is trained and how, from a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--optimiser", choices=list(OPTIMISERS), default="sgd")
    parser.add_argument("--rate", type=float, help="learning rate; 0.1 of sgd and 0.003 of adam unless named")
    parser.add_argument("--frac-bits", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=None, help="steps of an epoch; all of its batches unless named")
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--losses", action="store_true", help="read the loss of each step, and compare it")
    parser.add_argument("--moved", type=int, help="of plain training alone: with weights that are moved by 2^-MOVED")
    return parser.parse_args(argv)


def main() -> None:
    """Prints a line for each seed, and the means."""
    given, found = options(), []
    for seed in range(given.seeds):
        if given.moved is not None:
            plain, other = moved(seed, given)
            print(
                f"seed {seed}: plain {plain:.2f} %, its weights moved {other:.2f} %, {other - plain:+.2f}", flush=True
            )
            continue
        plain, shared, seconds, apart = trained(seed, given)
        found.append((plain, shared))
        read = f", losses within {apart:.1e}" if given.losses else ""
        print(
            f"seed {seed}: plain {plain:.2f} %, shared {shared:.2f} %, {1e3 * seconds:.0f} ms a step{read}", flush=True
        )
    if given.moved is not None:
        return
    plain, shared = (sum(column) / len(found) for column in zip(*found, strict=True))
    print(f"mean: plain {plain:.2f} %, shared {shared:.2f} %, difference {shared - plain:+.2f} points")


if __name__ == "__main__":
    main()
