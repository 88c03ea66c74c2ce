"""The command: train with FedAvg and with perturbed models from the same seed, and show both.

python -m sectorch.protocols.perturbation.cli --data digits --clients 5 --rounds 100
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from .data import NAMES, Data, load
from .errors import PerturbationError
from .federated import History, Settings, train
from .models import DenseNet, ResNet, mlp

MODELS = ("mlp3", "mlp5", "mlp7", "cnn", "resnet20", "resnet32", "resnet56", "densenet")


def build(name: str, data: Data, dtype: torch.dtype, seed: int) -> nn.Module:
    """A net for the data's shape, with weights from `seed`."""
    torch.manual_seed(seed)
    inputs = torch.Size(data.shape).numel()
    channels = data.shape[0]
    if name.startswith("mlp"):
        body = mlp(int(name[3:]), inputs, data.outputs)
        return (nn.Sequential(nn.Flatten(), *body) if len(data.shape) > 1 else body).to(dtype)
    if len(data.shape) != 3:
        raise PerturbationError(f"{name} takes images; {data.name} has inputs of shape {list(data.shape)}; use mlp3")
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(128, data.outputs),
        ).to(dtype)  # fmt: skip
    if name == "densenet":
        return DenseNet(data.outputs, channels).to(dtype)
    return ResNet(int(name[6:]), data.outputs, channels).to(dtype)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="sectorch perturbed-fl", description=__doc__.splitlines()[0])
    out.add_argument("--data", choices=NAMES, default="digits")
    out.add_argument("--root", help="folder of cifar100, or of train/ and test/ image folders")
    out.add_argument("--model", choices=MODELS, help="cnn for images, mlp3 for tables, by default")
    out.add_argument("--loss", choices=("cross_entropy", "mse"), help="cross_entropy for classes by default")
    out.add_argument("--clients", type=int, default=5)
    out.add_argument("--rounds", type=int, default=100)
    out.add_argument("--batch-size", type=int, default=32)
    out.add_argument("--local-batches", type=int, default=1)
    out.add_argument("--partitions", type=int, default=1, help="m, 1 to the number of outputs")
    out.add_argument("--exchange", choices=("shift", "paper"), help="for cross-entropy")
    out.add_argument("--learning-rate", type=float, default=0.05)
    out.add_argument("--momentum", type=float, default=0.9)
    out.add_argument("--weight-decay", type=float, default=0.0)
    out.add_argument("--float32", action="store_true", help="float64 otherwise")
    out.add_argument("--no-masks", action="store_true", help="the server then sees each client's gradient")
    out.add_argument("--no-baseline", action="store_true", help="leave FedAvg out")
    out.add_argument("--threads", type=int, default=1, help="torch threads; more than one rarely helps nets this small")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--out", type=Path, default=None, help="folder for results.json and curve.png")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 2 with the reason for arguments that do not fit, or 130 where it was interrupted."""
    options = parser().parse_args(argv)
    console = Console()
    torch.set_num_threads(max(1, options.threads))
    try:
        runs, settings = _run(options, console)
    except PerturbationError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {error}")
        return 2
    except KeyboardInterrupt:
        console.print("stopped; nothing was written")
        return 130
    console.print(_table(options, runs))
    if not options.no_baseline:
        gap = max(abs(a - b) for a, b in zip(runs["FedAvg"].losses, runs["perturbed"].losses, strict=True))
        console.print(f"largest difference of the two loss curves: {gap:.2e}")
    if options.out is not None:
        _write(options.out, runs, settings, console)
    return 0


def _run(options: argparse.Namespace, console: Console) -> tuple[dict[str, History], Settings]:
    dtype = torch.float32 if options.float32 else torch.float64
    data = load(options.data, options.root, dtype)
    loss = options.loss or ("mse" if data.regression else "cross_entropy")
    if data.regression and loss != "mse":
        raise PerturbationError(f"{data.name} is a regression; use --loss mse")
    model = build(options.model or ("cnn" if len(data.shape) == 3 else "mlp3"), data, dtype, options.seed)
    settings = Settings(
        options.clients, options.rounds, options.batch_size, options.local_batches, options.learning_rate,
        options.momentum, options.weight_decay, loss, options.partitions, options.exchange, not options.no_masks,
        options.seed,
    )  # fmt: skip
    methods = ["perturbed"] if options.no_baseline else ["FedAvg", "perturbed"]
    runs = {}
    with Progress(console=console, transient=True) as progress:
        for method in methods:
            task = progress.add_task(method, total=settings.rounds)
            torch.manual_seed(settings.seed)
            runs[method] = train(
                data, model, settings, method == "perturbed", lambda _, task=task: progress.advance(task)
            )
    return runs, settings


def _table(options: argparse.Namespace, runs: dict[str, History]) -> Table:
    table = Table(title=f"{options.data}, {options.clients} clients, {options.rounds} rounds")
    table.add_column("")
    regression = options.data == "diabetes"
    heads = ("test MSE" if regression else "test accuracy", "last loss", "client s", "server s", "MB down", "MB up")
    for head in heads:
        table.add_column(head, justify="right")
    for name, run in runs.items():
        cells = (f"{run.score:.4f}" if regression else f"{run.score:.2f}", f"{run.losses[-1]:.5f}")
        cells += (f"{run.client_seconds:.2f}", f"{run.server_seconds:.2f}")
        table.add_row(name, *cells, f"{run.down_bytes / 1e6:.2f}", f"{run.up_bytes / 1e6:.2f}")
    return table


def _write(folder: Path, runs: dict[str, History], settings: Settings, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shown = {k: {n: v for n, v in vars(run).items() if n != "model"} for k, run in runs.items()}
    (folder / "results.json").write_text(json.dumps({"settings": vars(settings), "runs": shown}, indent=1))
    console.print(f"wrote {folder / 'results.json'}")
    try:
        from matplotlib import pyplot
    except ImportError:
        console.print("no plot: matplotlib is not installed", style="dim")
        return
    figure, axes = pyplot.subplots()
    for name, run in runs.items():
        axes.plot(run.losses, label=name, linestyle="--" if name == "perturbed" else "-")
    axes.set(xlabel="round", ylabel="training loss")
    axes.legend()
    figure.savefig(folder / "curve.png", dpi=120)
    pyplot.close(figure)
    console.print(f"wrote {folder / 'curve.png'}")


if __name__ == "__main__":
    raise SystemExit(main())
