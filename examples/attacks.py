# %% [markdown]
# # Three attacks by parties that follow the protocol
#
#     python examples/attacks.py [FOLDER]
#
# Everybody here does what the protocol says and studies what it is sent. Each attack works against a paper's letter
# and fails against what sectorch does by default. Editors open this file as a notebook, cell by cell; as a program it
# writes three plots. All parties run in this process.

# %%
from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import sectorch
from sectorch.choreography.ledger import Transcript
from sectorch.errors import LeakyProtocolWarning
from sectorch.nn import SecureModule, fhe_friendly
from sectorch.protocols.capride import DisaggregationError, Settings
from sectorch.protocols.capride.settings import Directions, features_and_logits
from sectorch.protocols.capride.training import Meter
from sectorch.protocols.perturbation import Scheme

DATA = load_digits()
IMAGES, LABELS = torch.tensor(DATA.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(DATA.target)


def trained(model: nn.Module, rate: float = 5e-3) -> nn.Module:
    """A model that somebody trained on the digits and wants to keep to himself."""
    optimizer = torch.optim.Adam(model.parameters(), rate, weight_decay=1e-3)
    for rows in torch.randint(0, 1200, (300, 64)):
        optimizer.zero_grad()
        F.cross_entropy(model(IMAGES[rows]), LABELS[rows]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def show(panel, title: str, row: torch.Tensor) -> None:
    """A unit's 64 weights as a picture."""
    panel.imshow(row.detach().view(8, 8).numpy(), cmap="RdBu")
    panel.set(title=title, xticks=[], yticks=[])


# %% [markdown]
# ## 1. PrivHFL's ReLU shows the asker the answering party's first layer
#
# `relu="privhfl"` is Figure 4 of the paper: Q receives r x for every activation x, with a small positive r that is
# fresh every time. Its sign is that of x. And of twenty answers to one question the greatest common divisor is x
# itself, to the last bit: 65 questions give the first layer's weights. `relu="exact"`, the default, sends Q the
# result and nothing else.


# %%
def activations_seen(model: SecureModule, session: sectorch.Session, questions: torch.Tensor) -> torch.Tensor:
    """What Q works out from the messages that it receives and from its own half of the streams: r x."""
    drawn, draw = [], session.runtime.draw

    def noting(pair, label, call, number, count):
        words = draw(pair, label, call, number, count)
        if label == "leaky_drelu/delta":  # a stream that Q and A have in common
            drawn.append(words.clone())
        return words

    session.runtime.draw = noting
    try:
        with Transcript() as transcript:
            model(questions)
    finally:
        session.runtime.draw = draw
    received = [value for line, value in transcript.received("Q") if line.label == "z"]
    return received[0] + drawn[0].view(received[0].shape) if received else torch.empty(0, dtype=torch.int64)


def signs_from_paper_mode(folder: Path) -> dict[str, float]:
    """Shares of signs and weights that Q finds in paper mode, and how many messages of the safe mode could tell any."""
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)))  # A's secret
    session = sectorch.Session()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeakyProtocolWarning)
        paper = sectorch.secure(model, sectorch.Scheme(relu="privhfl"), session=session)
    seen = activations_seen(paper, session, IMAGES[:200])
    hidden = model[0](IMAGES[:200])  # what Q should not know
    signs = float((seen.sign() == hidden.sign()).double().mean())

    questions = torch.cat([torch.zeros(1, 64), torch.eye(64)])
    answers = activations_seen(paper, session, questions.repeat(20, 1)).view(20, 65, 16)
    size = answers[0].abs()
    for again in answers[1:]:
        size = torch.gcd(size, again)
    exact = (size * answers[0].sign()).double() / 2**40  # 40 fraction bits after a product
    found = (exact[1:] - exact[0]).T
    weights = float(((found - model[0].weight).abs() < 1e-5).double().mean())

    safe = sectorch.secure(model, session=session)
    with Transcript() as transcript:
        safe(IMAGES[:200])
    others = [line.label for line, _ in transcript.received("Q") if line.label not in ("key", "result")]

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    axes[0].loglog(hidden.abs().flatten().numpy(), (seen.double().abs() / 2**40).flatten().numpy(), ".", markersize=2)
    axes[0].set(title="what Q sees of each activation", xlabel="|activation|, A's secret", ylabel="|r x|, seen by Q")
    pictures = {"weights of A's first unit": model[0].weight, "as Q found them": found}
    for panel, (title, rows) in zip(axes[1:], pictures.items(), strict=True):
        show(panel, title, rows[0])
    figure.savefig(folder / "attack_signs.png")
    print(f"paper mode: Q knows {signs:.1%} of the signs, and {weights:.1%} of the first layer's weights to 1e-5")
    print(f"safe mode: Q received the result, its key, and {len(others)} other messages")
    return {"signs": signs, "weights": weights, "other messages": len(others)}


# %% [markdown]
# ## 2. Enough of CaPriDe's decrypted numbers are a peer's logits
#
# Every number that P1 decrypts is a linear equation on P2's logits on P1's samples. With as many numbers as unknowns
# P1 solves for them. The paper releases without noise; here P1's meter says before it asks how much the answers would
# explain, with what P1's own model knows, and P2 adds the noise that keeps it below the limit.


# %%
def logits_from_released_numbers(folder: Path) -> dict[str, float]:
    """Errors of the recovered logits (0: all found, 1: nothing) without noise, and with the noise of the meter."""
    torch.manual_seed(0)
    samples, temperature = 40, 5.0
    peer, own = (trained(fhe_friendly(nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))) for _ in "12")
    mine = IMAGES[1500 : 1500 + samples]
    true = peer(mine).double().detach()
    draws = torch.randn(samples * 10, samples, 10, dtype=torch.float64)
    asked = Directions.of(draws - draws.mean(2, keepdim=True))
    numbers = asked.on(true, temperature)  # what P1 decrypts, one number a direction
    meter = Meter(*features_and_logits(own, mine), "P2")
    question = meter.told(asked, temperature)
    try:
        meter.spend("P1", question, 0.0, Settings().leakage)
    except DisaggregationError as error:
        print(f"the meter: {error}")
    sigma = meter.sigma_for(question, Settings().leakage or 1.0)
    noisy = numbers + sigma * torch.randn(len(numbers), dtype=torch.float64)

    def attack(answers: torch.Tensor, count: int) -> torch.Tensor:
        """The least-squares solution of smallest norm, about its row means."""
        system, right = asked.weights[:count].flatten(1), temperature * answers[:count].unsqueeze(1)
        found = torch.linalg.lstsq(system, right, driver="gelsd").solution.view(samples, 10)
        return found - found.mean(1, keepdim=True)

    counts = [*range(20, samples * 9, 40), samples * 9, len(numbers)]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    centred, errors = true - true.mean(1, keepdim=True), {}
    for panel, (title, answers) in zip(axes[1:], {"without noise": numbers, "with it": noisy}.items(), strict=True):
        found = {count: attack(answers, count) for count in counts}
        errors[title] = [float((found[count] - centred).norm() / centred.norm()) for count in counts]
        axes[0].semilogy([count / (samples * 9) for count in counts], errors[title], marker=".", label=title)
        panel.plot(centred.flatten().numpy(), found[counts[-1]].flatten().numpy(), ".", markersize=3)
        panel.set(title=title, xlabel="P2's logits", ylabel="as P1 solves for them")
    axes[0].set(xlabel="numbers per unknown", ylabel="error of the logits")
    axes[0].legend()
    figure.savefig(folder / "attack_logits.png")
    free, metered = errors["without noise"][-1], min(errors["with it"])
    print(f"without noise: error {free:.0e} from {len(numbers)} numbers on {samples * 9} unknowns")
    print(f"with noise of {sigma:.3g}: error {metered:.2f} at best")
    return {"free": free, "metered": metered}


# %% [markdown]
# ## 3. Perturbed weights keep their ratios
#
# The server scales every channel of a model by a secret number before clients see it (Feng et al.). The ratios of the
# weights in a row of the first layer do not change, so a client sees every row but for one factor. The safe setting
# is not to send weights at all: in `sectorch.secure` what leaves A is masked in the ring, uniform whatever the
# weights are.


# %%
def ratios_in_perturbed_weights(folder: Path) -> dict[str, float]:
    """Cosines between true rows and what others see of them: perturbed by the paper, masked by sectorch."""
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))).double()
    true = model[0].weight.detach()
    noisy, _ = Scheme(model.requires_grad_(True)).perturb(model.state_dict())
    perturbed = noisy.state["0.weight"]

    session = sectorch.Session()
    with Transcript() as transcript:
        sectorch.secure(model, session=session)(IMAGES[:2].double())
    sent = [value for line, value in transcript.received("S") if value.numel() == true.numel() and line.src.role == "A"]
    masked = sent[0].double().reshape(true.shape) / 2.0**63

    cosine = lambda rows: float(F.cosine_similarity(rows, true, dim=1).abs().mean())
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    for panel, (title, rows) in zip(
        axes, {"a row of A's weights": true, "perturbed": perturbed, "masked": masked}.items(), strict=True
    ):
        show(panel, title, rows[0])
    figure.savefig(folder / "attack_ratios.png")
    print(f"perturbed rows: cosine {cosine(perturbed):.6f} with the true ones, at other lengths")
    print(f"masked rows: cosine {cosine(masked):.2f}, as of random directions")
    return {"perturbed": cosine(perturbed), "masked": cosine(masked)}


# %%
def main(folder: Path = Path("runs/attacks")) -> dict[str, dict[str, float]]:
    folder.mkdir(parents=True, exist_ok=True)
    attacks = (signs_from_paper_mode, logits_from_released_numbers, ratios_in_perturbed_weights)
    found = {attack.__name__: attack(folder) for attack in attacks}
    print(f"written: {folder}: {', '.join(sorted(path.name for path in folder.glob('attack_*.png')))}")
    return found


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
