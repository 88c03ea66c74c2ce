"""Tables I to V and Figures 3 and 4 of the perturbation paper, with the paper's figures beside ours.

    python benchmarks/perturbation.py --table cost        client, server and bytes against FedAvg, masked
    python benchmarks/perturbation.py --table 5           Table V: prepare, forward, backward, mask, update
    python benchmarks/perturbation.py --table gradient    recovered gradient against autograd, every net
    python benchmarks/perturbation.py --table 1|2|3|4|figure3|figure4
    python benchmarks/perturbation.py --table gamma       what a client finds of the prediction

Tables I to III and Figure 4 run on scikit-learn's bundled sets at few rounds: the paper's data sets are not here, so
its figures stand beside ours for their pattern (FedAvg against ours), not for their size. `--data cifar100
--data-root DIR` runs Tables II and III on CIFAR-100 where it is there. One thread; `--rounds` makes a table longer.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure
from perturbation_attacks import View, deep_leakage, gamma_from_model, gamma_from_rounds, gamma_from_targets
from perturbation_cost import cost, split
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.func import functional_call

from sectorch.protocols.perturbation import Federation, Scheme, cohort
from sectorch.protocols.perturbation.algorithm import outputs
from sectorch.protocols.perturbation.experiment import DenseNet, ResNet, build, mlp, train
from sectorch.protocols.perturbation.settings import Settings, load

console = Console(width=200)
PAPER = {
    "1 FedAvg": {("mlp3", 1): 0.059, ("mlp3", 5): 0.079, ("mlp3", 10): 0.097, ("mlp5", 1): 0.059, ("mlp5", 5): 0.079,
                 ("mlp5", 10): 0.100, ("mlp7", 1): 0.058, ("mlp7", 5): 0.086, ("mlp7", 10): 0.113,
                 ("resnet20", 1): 0.048, ("resnet20", 5): 0.085, ("resnet20", 10): 0.117},
    "1 ours": {("mlp3", 1): 0.060, ("mlp3", 5): 0.078, ("mlp3", 10): 0.097, ("mlp5", 1): 0.059, ("mlp5", 5): 0.077,
               ("mlp5", 10): 0.101, ("mlp7", 1): 0.059, ("mlp7", 5): 0.082, ("mlp7", 10): 0.114,
               ("resnet20", 1): 0.047, ("resnet20", 5): 0.088, ("resnet20", 10): 0.114},
    "2 FedAvg": {("resnet20", 1): 69.42, ("resnet20", 5): 69.27, ("resnet20", 10): 69.14, ("resnet32", 1): 70.96,
                 ("resnet32", 5): 70.78, ("resnet32", 10): 70.64, ("resnet56", 1): 72.69, ("resnet56", 5): 71.61,
                 ("resnet56", 10): 71.10},
    "2 ours": {("resnet20", 1): 69.33, ("resnet20", 5): 69.29, ("resnet20", 10): 69.22, ("resnet32", 1): 71.05,
               ("resnet32", 5): 70.84, ("resnet32", 10): 70.62, ("resnet56", 1): 72.83, ("resnet56", 5): 71.55,
               ("resnet56", 10): 71.23},
    "3 FedAvg": {("resnet20", 1): 72.35, ("resnet20", 5): 71.68, ("resnet20", 10): 71.44},
    "3 ours": {("resnet20", 1): 72.22, ("resnet20", 5): 71.77, ("resnet20", 10): 71.62},
}  # fmt: skip
PAPER_NETS = ("resnet20", "resnet32", "resnet56")
TABLE_IV = {"DP 1e-4": (0.017, 72.19), "DP 1e-3": (0.092, 69.87), "DP 1e-2": (0.217, 43.55), "DP 1e-1": (0.238, 1.12),
            "ours, masked": (0.235, 72.22)}  # fmt: skip


def gradient(options: argparse.Namespace) -> list[dict]:
    """Relative error of the recovered gradient in the Euclidean norm, masked, at K clients, n_L = 4."""
    rows = []
    nets = {f"mlp{n}": (lambda n=n: mlp(n, 30, 4), (30,)) for n in (3, 5, 7)}
    nets |= {f"resnet{n}": (lambda n=n: ResNet(n, 4), (3, 8, 8)) for n in (20, 32, 56)}
    nets |= {"densenet": (lambda: DenseNet(4), (3, 8, 8))}
    for name, (make, shape) in nets.items():
        for loss, m, exchange in (
            *(("mse", m, None) for m in (1, 2, 4)),
            ("cross_entropy", 1, "shift"),
            *(("cross_entropy", m, "paper") for m in (1, 2, 4)),
        ):
            row = {"net": name, "loss": loss if exchange is None else f"{loss} {exchange}", "m": m}
            for dtype in (torch.float64, torch.float32):
                for clients in (1, 5, 10):
                    torch.manual_seed(0)
                    model = make().to(dtype)
                    row[f"{str(dtype)[6:]} K={clients}"] = gradient_error(
                        model, shape, loss, m, exchange, clients, dtype
                    )
            rows.append(row)
            print(*(f"{v:.1e}" if isinstance(v, float) else v for v in row.values()), flush=True)
    return rows


def gradient_error(model, shape, loss, m, exchange, clients, dtype) -> float:
    scheme = Scheme(model, loss, m, exchange=exchange)
    weights = [4 + k % 3 for k in range(clients)]
    batches, expected = [], None
    parameters = list(model.parameters())
    for weight in weights:
        x = torch.randn(weight, *shape, dtype=dtype)
        y = torch.randn(weight, 4, dtype=dtype) if loss == "mse" else torch.randint(4, (weight,))
        batches.append((x, y))
        part = torch.cat([g.flatten() for g in torch.autograd.grad(scheme.loss_fn(model(x), y), parameters)])
        part = part.double() * (weight / sum(weights))
        expected = part if expected is None else expected + part
    recovered = Federation(scheme, clients).round(model.state_dict(), batches, weights)
    found = torch.cat([g.flatten() for g in recovered.values()]).double()
    return float((found - expected).norm() / expected.norm())


def accuracy(options: argparse.Namespace, table: str, cases: list[tuple[str, str]], loss: str) -> list[dict]:
    """FedAvg's and our final score for each net and K: means and deviations over `--seeds` seeds, and the largest gap
    of any seed's two loss curves."""
    rows = []
    for data_name, model_name in cases:
        data = load(data_name, options.data_root)
        for clients in (1, 5, 10):
            runs = {False: [], True: []}
            for seed in range(options.seeds):
                chosen = Settings(clients, options.rounds, options.batch_size, learning_rate=0.02, loss=loss, seed=seed)
                model = build(model_name, data, torch.float64, seed)
                for perturbed, kept in runs.items():
                    kept.append(train(data, copy.deepcopy(model), chosen, perturbed))
            scores = {perturbed: [run.score for run in kept] for perturbed, kept in runs.items()}
            rows.append({
                "data": data_name, "net": model_name, "K": clients,
                "FedAvg": statistics.mean(scores[False]), "ours": statistics.mean(scores[True]),
                "deviation": statistics.stdev(scores[True]) if options.seeds > 1 else float("nan"),
                "seeds with equal scores": sum(a == b for a, b in zip(scores[False], scores[True], strict=True)),
                "largest gap of the curves": largest_gap(runs),
                "paper FedAvg": PAPER[f"{table} FedAvg"].get((model_name, clients), float("nan")),
                "paper ours": PAPER[f"{table} ours"].get((model_name, clients), float("nan")),
            })  # fmt: skip
            console.print(*(cell(value) for value in rows[-1].values()))
    return rows


def largest_gap(runs: dict) -> float:
    """Of two lists of runs from the same seeds: the largest distance of two loss curves at a step."""
    pairs = zip(runs[False], runs[True], strict=True)
    return max(abs(a - b) for plain, ours in pairs for a, b in zip(plain.losses, ours.losses, strict=True))


CASES_IV = ["plain", *TABLE_IV, "ours, unmasked"]


def attacked(name: str) -> nn.Module:
    """The net that DLG attacks: a small one, or the paper's ResNet-20 without norms. Both have LeakyReLU(0.3): through
    ReLU the attack fails on plain gradients already, and no defence could be told from none (`resnet20-relu`)."""
    torch.manual_seed(0)
    if name.startswith("resnet20"):
        return ResNet(20, 10, 1, norm=False, slope=0.0 if name == "resnet20-relu" else 0.3).double()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.LeakyReLU(0.3), nn.Linear(48, 10)).double()


def reconstructed(model: nn.Module, case: str, x: torch.Tensor, y: torch.Tensor, seed: int) -> torch.Tensor:
    """The image that DLG finds behind what the server sees of one client with one sample."""
    scheme = Scheme(model)
    torch.manual_seed(seed)
    names = list(dict(model.named_parameters()))
    seen = dict(zip(names, torch.autograd.grad(scheme.loss_fn(model(x), y), list(model.parameters())), strict=True))
    if case.startswith("DP"):
        deviation = float(case[3:]) ** 0.5
        seen = {name: g + deviation * torch.randn_like(g) for name, g in seen.items()}
    elif case.startswith("ours"):
        noisy, key = scheme.perturb(model.state_dict())
        mask = cohort(2)[0] if case == "ours, masked" else None
        update = scheme.client_step(noisy, (x, y), masks=mask, share=0.5)
        flat = update.terms[0] if mask is None else update.terms[0].double() * 2.0**-noisy.frac_bits
        parts = (flat * scheme.ratios(key)).split([g.numel() for g in seen.values()])
        seen = {name: part.reshape(g.shape) for (name, g), part in zip(seen.items(), parts, strict=True)}
    found, _ = deep_leakage(model, scheme.loss_fn, seen, tuple(x.shape[1:]), 10, 200)
    return found.clamp(0, 1).nan_to_num(0.5)


def leakage(options: argparse.Namespace) -> list[dict]:
    """Table IV: DLG on one digit, on what the server sees of one client. The metric is the mean squared error of the
    image found (the paper prints "L2 difference", of numbers alike); the median over `--repeats` digits, and how many
    are found to 0.01. The accuracy is that of the small CNN on digits, or of `--model resnet20`, with 5 clients after
    `--rounds` rounds: mean and deviation over `--seeds` seeds."""
    data, rows, model = load("digits"), [], attacked(options.model)
    for case in CASES_IV:
        errors = []
        for repeat in range(options.repeats):
            x, y = data.train[0][repeat : repeat + 1], data.train[1][repeat : repeat + 1]
            errors.append(float((reconstructed(model, case, x, y, repeat) - x).square().mean()))
        variance = float(case[3:]) if case.startswith("DP") else 0.0
        scores = []
        for seed in range(options.seeds):
            chosen = Settings(
                5, options.rounds, options.batch_size, learning_rate=0.02, gradient_variance=variance, seed=seed
            )
            built = build(options.model, data, torch.float64, seed)
            scores.append(train(data, built, chosen, case.startswith("ours")).score)
        paper = TABLE_IV.get(case, (float("nan"),) * 2)
        rows.append({"what the server sees": case, "error of the image": statistics.median(errors),
                     "least": min(errors), "found to 0.01": sum(error < 0.01 for error in errors),
                     "accuracy": statistics.mean(scores),
                     "deviation": statistics.stdev(scores) if options.seeds > 1 else float("nan"),
                     "paper: error": paper[0], "paper: accuracy": paper[1]})  # fmt: skip
        console.print(*(cell(value) for value in rows[-1].values()))
    return rows


def figure3(options: argparse.Namespace) -> list[dict]:
    """The images that DLG finds behind each defence, and each one's error; with --out figure3.png, a row a digit."""
    data, model = load("digits"), attacked(options.model)
    images: dict[str, list[torch.Tensor]] = {"true": [], **{case: [] for case in CASES_IV}}
    for digit in range(options.repeats):
        x, y = data.train[0][digit : digit + 1], data.train[1][digit : digit + 1]
        images["true"].append(x)
        for case in CASES_IV:
            images[case].append(reconstructed(model, case, x, y, digit))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(1.4 * len(images), 1.5 * options.repeats))
        for place, (case, found) in enumerate(images.items()):
            for digit, image in enumerate(found):
                axes = figure.add_subplot(options.repeats, len(images), digit * len(images) + place + 1)
                axes.imshow(image[0, 0], cmap="gray", vmin=0, vmax=1)
                axes.set(xticks=[], yticks=[])
                axes.set_title(case if digit == 0 else "", fontsize=8)
        figure.savefig(options.out / "figure3.png", dpi=120, bbox_inches="tight")
    return [
        {"digit": digit} | {case: float((images[case][digit] - x).square().mean()) for case in CASES_IV}
        for digit, x in enumerate(images["true"])
    ]


def gamma(options: argparse.Namespace) -> list[dict]:
    """What a client finds of the prediction under MSE with the noise on the weights and on the bias, after so many
    steps of plain training: the root mean square error over the predictions' deviation, with gamma taken for zero
    ('noised'), read off the model, found by a batch of 32 targets, and by the same 32 samples in this round and the
    next. Medians of 20 keys; MLP-3; m = 1 and n_L."""
    rows = []
    for name in ("digits", "diabetes"):
        data = load(name)
        model, (x, y) = build("mlp3", data, torch.float64, 0), data.train
        y = data.targets(y, "mse", torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
        loss, done = Scheme(model, "mse").loss_fn, 0
        for steps in (0, 20, 200, 1000):
            for _ in range(done, steps + 1):
                before, chosen = copy.deepcopy(model), torch.randperm(len(x))[: options.batch_size]
                optimizer.zero_grad()
                loss(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
            done = steps + 1
            for m in sorted({1, data.outputs}):
                for place in ("weights", "bias"):
                    tried = [_found(before, model, m, x, y, place) for _ in range(20)]
                    medians = {kind: statistics.median(one[kind] for one in tried) for kind in tried[0]}
                    rows.append({"data": name, "steps": steps, "m": m, "noise on": place} | medians)
    return rows


@torch.no_grad()
def _found(model: nn.Module, after: nn.Module, m: int, x: torch.Tensor, y: torch.Tensor, place: str) -> dict:
    """Of `model`, where `after` is that of the next round."""
    views, layers = [], list(model)
    for one in (model, after):
        noisy, _ = Scheme(one, "mse", m, noise_on=place).perturb(one.state_dict())
        body = {name: t for name, t in noisy.state.items() if int(name.split(".")[0]) < len(layers) - 1}
        features = functional_call(nn.Sequential(*layers[:-1]), body, (x,))
        last = weight, bias = [noisy.state[f"{len(layers) - 1}.{kind}"] for kind in ("weight", "bias")]
        views.append(View(*outputs(features, *last, place), noisy.additive, noisy.partition))
        if one is model:
            off = gamma_from_model(weight if place == "weights" else bias, noisy.additive, noisy.partition)
    now, true, batch = views[0], model(x), torch.randperm(len(x))[:32]
    some = [view._replace(logits=view.logits[batch], alpha=view.alpha[batch]) for view in views]
    targets = gamma_from_targets(some[0].logits, some[0].alpha, y[batch], now.additive, now.partition)
    guesses = {
        "noised": torch.zeros(m, dtype=x.dtype), "off the model": off,
        "by targets": targets, "two rounds": gamma_from_rounds(*some),
    }  # fmt: skip
    found = {
        kind: now.logits - now.alpha[:, None] * guess[now.partition] * now.additive for kind, guess in guesses.items()
    }
    size = float((true - true.mean(0)).square().mean().sqrt())
    errors = {kind: float((one - true).square().mean().sqrt()) / size for kind, one in found.items()}
    if true.shape[1] == 1:
        return errors
    classes = {f"class {kind}": float((one.argmax(1) == true.argmax(1)).double().mean()) for kind, one in found.items()}
    return errors | classes


def figure4(options: argparse.Namespace) -> list[dict]:
    """Mean and standard deviation over seeds of both loss curves; curves.json, and a plot with matplotlib."""
    data, rows, curves = load(options.data or "digits", options.data_root), [], {}
    for clients in (1, 5, 10):
        runs = {False: [], True: []}
        for seed in range(options.repeats):
            chosen = Settings(clients, options.rounds, options.batch_size, learning_rate=0.02, seed=seed)
            model = build(options.model, data, torch.float64, seed)
            for perturbed, kept in runs.items():
                kept.append(train(data, copy.deepcopy(model), chosen, perturbed).losses)
        gap = max(abs(a - b) for p, o in zip(runs[False], runs[True], strict=True) for a, b in zip(p, o, strict=True))
        curves[clients] = {("ours" if k else "FedAvg"): v for k, v in runs.items()}
        last = {k: [curve[-1] for curve in v] for k, v in runs.items()}
        rows.append({"K": clients, "FedAvg last loss": statistics.mean(last[False]),
                     "ours": statistics.mean(last[True]),
                     "std": statistics.pstdev(last[True]), "largest gap": gap})  # fmt: skip
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "curves.json").write_text(json.dumps(curves))
    return rows


def show(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    heads = {head: None for row in rows for head in row}
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*(cell(row.get(head, "")) for head in heads))
    console.print(table)


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.2f}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--table", choices=("cost", "gradient", "1", "2", "3", "4", "5", "figure3", "figure4", "gamma"), default="cost"
    )
    parser.add_argument("--data")
    parser.add_argument("--data-root")
    parser.add_argument("--model", default="cnn", help="for 4, figure3 and figure4; figure3 also takes resnet20-relu")
    parser.add_argument("--nets", nargs="+", help="for cost, 2 and 5: only these")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 10], help="for cost and 5")
    parser.add_argument(
        "--degree", type=int, default=12, help="for cost and 5: neighbours of each of 21 clients or more"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="of a measurement; for 4 and figure3 how many digits")
    parser.add_argument("--seeds", type=int, default=1, help="for 1 to 4: of weights, batches and noise")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    image = options.data or "digits"
    tables = {
        "cost": lambda: cost(options), "5": lambda: split(options), "gradient": lambda: gradient(options),
        "1": lambda: accuracy(options, "1", [(d, f"mlp{n}") for d in ("diabetes", "breast-cancer") for n in (3, 5, 7)]
                              + [(image, "resnet20")], "mse"),
        "2": lambda: accuracy(options, "2", [(image, n) for n in options.nets or PAPER_NETS], "cross_entropy"),
        "3": lambda: accuracy(options, "3", [(image, "resnet20")], "mse"),
        "4": lambda: leakage(options), "figure3": lambda: figure3(options),
        "gamma": lambda: gamma(options), "figure4": lambda: figure4(options),
    }  # fmt: skip
    rows = tables[options.table]()
    show(rows, f"table {options.table}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"table-{options.table}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
