"""The paper's lemmas, one by one, on the functions of `algorithm.py` and against torch's autograd."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from perturbation_cases import NETS
from torch.func import functional_call

from sectorch.protocols.perturbation import Key, Scheme, algorithm

PAGE = Path(__file__).parents[2] / "docs" / "perturbation.md"
B, OUTPUTS = 6, 4


class Case:
    """A net, its noised weights, a batch, and what the client and the true net compute of it."""

    def __init__(self, name: str = "mlp3", m: int = 2):
        torch.manual_seed(m)
        make, shape = NETS[name]
        self.model = make().double().eval()
        self.scheme = Scheme(self.model, "mse", m)
        noisy, self.key = self.scheme.perturb(self.model.state_dict())
        self.names = list(dict(self.model.named_parameters()))
        self.noisy = {n: t.clone().requires_grad_(n in self.names) for n, t in noisy.state.items()}
        self.x, head = torch.randn(B, *shape, dtype=torch.float64), self.scheme.plan.head
        of_body = lambda state: {n: t for n, t in state.items() if not n.startswith(f"{head}.")}
        self.body = lambda state: functional_call(self.scheme.plan.body, of_body(state), (self.x,))
        self.features = self.body(self.noisy)
        weight, bias = self.noisy[f"{head}.weight"], self.noisy[f"{head}.bias"]
        self.y, self.alpha = algorithm.outputs(self.features, weight, bias, "weights")
        self.true = self.model(self.x)

    @property
    def members(self) -> torch.Tensor:
        return F.one_hot(self.key.partition).T.double()

    def gradients(self, q: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        """Of sum q o y^ + sum a alpha by the noised weights."""
        value = (q * self.y).sum() + (a * self.alpha).sum()
        weights = [self.noisy[name] for name in self.names]
        found = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]

    def over_ratios(self, gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """1 / R o the true gradients."""
        ratios = {name: torch.ones_like(g) for name, g in zip(self.names, gradients, strict=True)}
        algorithm.times_ratios(self.scheme.plan.channels, self.key.scales, ratios)
        return [g / ratios[name] for name, g in zip(self.names, gradients, strict=True)]


@pytest.mark.parametrize("name", ["mlp3", "mlp7", "resnet20", "densenet without norms"])
def test_lemmas_1_and_2(name):
    """Eqs. 10 and 17: every hidden channel is r times the true one. Eqs. 11 and 18: y^ = y + alpha r."""
    case = Case(name)
    r = case.key.scales[case.scheme.plan.channels.parameters[f"{case.scheme.plan.head}.weight"].columns]
    torch.testing.assert_close(case.features, r * case.body(case.model.state_dict()))
    torch.testing.assert_close(case.y, case.true + case.alpha[:, None] * case.key.shift)
    torch.testing.assert_close(case.alpha, case.features.sum(1) + 1)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_lemma_3(m):
    """Eq. 19: the noisy gradient is 1/R o the true one + sum_s gamma_s sigma_s - v beta."""
    case, target = Case(m=m), torch.randn(B, OUTPUTS, dtype=torch.float64)
    q, a = algorithm.squared_terms(case.y.detach(), case.alpha.detach(), target, case.key.additive, case.members)
    noisy, *sigma, beta = (case.gradients(*term) for term in zip(q, a, strict=True))
    loss = (case.true - target).square().sum() / 2
    expected = case.over_ratios(torch.autograd.grad(loss, list(case.model.parameters())))
    for i, plain in enumerate(expected):
        mixed = sum(gamma * s[i] for gamma, s in zip(case.key.gamma, sigma, strict=True)) - case.key.energy * beta[i]
        torch.testing.assert_close(noisy[i], plain + mixed)


def exchange(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y* and y~* of the exchange, and log(1 / exp(delta)), which the server alone has."""
    *asked, secret = algorithm.ask(case.y, case.alpha)
    reply = algorithm.answer(case.key, *asked)
    star, tilde = algorithm.finish(*reply, secret)
    return star, tilde, -torch.log1p(-reply[2] * case.key.xi[case.key.partition])


@pytest.mark.parametrize("m", [1, 2, 4])
def test_lemma_4_and_the_exchange(m):
    """Eq. 21: dL/dy = softmax(y) - target. Eqs. 22 to 24: y* = softmax(y) / exp(delta), whatever lambda is."""
    case = Case(m=m)
    y, target = case.true.detach().requires_grad_(), torch.randint(OUTPUTS, (B,))
    (found,) = torch.autograd.grad(F.cross_entropy(y, target, reduction="sum"), y)
    torch.testing.assert_close(found, torch.softmax(y, 1) - F.one_hot(target, OUTPUTS))
    star, tilde, minus_delta = exchange(case)
    torch.testing.assert_close(star, torch.softmax(y, 1) * torch.exp(minus_delta))
    xi = case.key.xi[case.key.partition]
    torch.testing.assert_close(star, torch.softmax(y, 1) + xi * tilde)  # the first step of Lemma 5's proof


@pytest.mark.parametrize("m", [1, 2, 4])
def test_lemma_5(m):
    """Eq. 26: the noisy gradient is 1/R o the true one + sum_s gamma_s sigma_s - gamma_s xi_s beta_s + xi_s psi_s."""
    case, target = Case(m=m), torch.randint(OUTPUTS, (B,))
    star, tilde, _ = exchange(case)
    dense = F.one_hot(target, OUTPUTS).double()
    q, a = algorithm.exchanged_terms(star, tilde, dense, case.key.additive, case.members)
    noisy, *rest = (case.gradients(*term) for term in zip(q, a, strict=True))
    loss = F.cross_entropy(case.true, target, reduction="sum")
    expected = case.over_ratios(torch.autograd.grad(loss, list(case.model.parameters())))
    key: Key = case.key
    factors = torch.cat([key.gamma, -key.gamma * key.xi, key.xi])
    for i, plain in enumerate(expected):
        torch.testing.assert_close(noisy[i], plain + sum(f * term[i] for f, term in zip(factors, rest, strict=True)))
    torch.testing.assert_close(algorithm.coefficients(key, "cross_entropy", "paper", "weights")[1:], -factors)


def test_the_page_names_what_there_is():
    """Each function of the table is in `algorithm.py`, each public one is in the table, and each test exists."""
    section = PAGE.read_text(encoding="utf-8").split("## Section III, line by line")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines() if line.startswith("|")][
        2:
    ]
    assert len(rows) == 10
    named = {name for _, here, _ in rows for name in re.findall(r"`(\w+)`", here)}
    source = Path(algorithm.__file__).read_text(encoding="utf-8")
    functions = set(re.findall(r"^def (\w+)\(", source, re.MULTILINE)) - {"uniform", "signs"}
    assert named == functions and len(source.splitlines()) < 250
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for _, _, found in rows:
        for name in re.findall(r"`([^`]+)`", found):
            assert f"def {name}(" in tests or (Path(__file__).parents[2] / name).is_file(), name
