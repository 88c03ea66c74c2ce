"""What the perturbation tests share: batches, plain gradients by autograd, one whole round, and random small graphs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn

from sectorch.protocols.perturbation import Federation, Scheme
from sectorch.protocols.perturbation.experiment import DenseNet, ResNet, mlp

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Bounds on the relative error of a recovered gradient. What rounding gives: a recovered entry is a sum of terms T_i of
either sign, each with relative error of about sqrt(depth) u (u = 2^-53 or 2^-24), so its error is about u |T| / |g|.
With the default noise |T| / |g| is below 10^4, which leaves 1e-11 and 1e-3 x 0.6. In float32 a pre-activation within u
of zero may turn its ReLU over, which costs a share of the gradient and no rounding error; scales that are powers of two
keep every sign."""

NETS = {
    "mlp3": (lambda: mlp(3, 12, 4, 16), (12,)),
    "mlp5": (lambda: mlp(5, 12, 4, 16), (12,)),
    "mlp7": (lambda: mlp(7, 12, 4, 16), (12,)),
    "resnet20": (lambda: ResNet(20, 4, width=8), (3, 8, 8)),
    "resnet20 without norms": (lambda: ResNet(20, 4, norm=False, width=8), (3, 8, 8)),
    "resnet20 with LeakyReLU": (lambda: ResNet(20, 4, norm=False, width=8, slope=0.3), (3, 8, 8)),
    "densenet": (lambda: DenseNet(4, growth=4), (3, 8, 8)),
    "densenet without norms": (lambda: DenseNet(4, growth=4, norm=False), (3, 8, 8)),
    "resnet32": (lambda: ResNet(32, 4, width=8), (3, 8, 8)),
    "resnet56": (lambda: ResNet(56, 4, width=8), (3, 8, 8)),
}


def batches(shape: tuple[int, ...], outputs: int, loss: str, clients: int, dtype: torch.dtype) -> list[tuple]:
    """One batch a client, of 4, 5 and 6 samples in turn."""
    found = []
    for client in range(clients):
        size = 4 + client % 3
        target = torch.randn(size, outputs, dtype=dtype) if loss == "mse" else torch.randint(outputs, (size,))
        found.append((torch.randn(size, *shape, dtype=dtype), target))
    return found


def plain_gradient(scheme: Scheme, model: nn.Module, parts: list[tuple], weights: list[float]) -> dict:
    """sum_k N_k/N grad F_k by autograd; the model's running statistics are left as they are."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for (inputs, targets), weight in zip(parts, weights, strict=True):
        loss = scheme.loss_fn(model(inputs), targets)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                total[name] += gradient * (weight / sum(weights))
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    return total


def one_round(
    scheme: Scheme, model: nn.Module, parts: list[tuple], masked: bool = False, double: bool = False, degree=None
):
    """All messages of a round: perturb, every client's step, recover."""
    federation = Federation(scheme, len(parts), masked=masked, double=double, degree=degree)
    return federation.round(model.state_dict(), parts, [len(inputs) for inputs, _ in parts])


def relative_error(found: dict, expected: dict) -> float:
    """Of the whole gradient, in the Euclidean norm."""
    assert set(found) == set(expected)
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    return (difference / size) ** 0.5 if size else difference**0.5


class Program(nn.Module):
    """A random graph: layers made by a list of steps, each on tensors made before. See `programs`."""

    def __init__(self, steps: list[tuple], channels: int, outputs: int):
        super().__init__()
        self.layers = nn.ModuleDict()
        self.steps = steps
        widths = [channels]
        for index, (kind, a, b, extra) in enumerate(steps):
            a, b = a % len(widths), b % len(widths)
            name, width = str(index), widths[a]
            if kind == "conv":
                groups = 2 if extra % 2 and width % 2 == 0 else 1
                self.layers[name] = nn.Conv2d(width, 2 + 2 * (extra % 3), 3, padding=1, groups=groups, bias=extra < 4)
                width = 2 + 2 * (extra % 3)
            elif kind == "norm":
                self.layers[name] = nn.BatchNorm2d(width).train(extra % 2 == 0)
                with torch.no_grad():
                    self.layers[name].running_mean.normal_()
                    self.layers[name].running_var.uniform_(0.5, 2.0)
            elif kind == "act":
                self.layers[name] = (nn.ReLU(), nn.LeakyReLU(0.2), nn.PReLU())[extra % 3]
            elif kind == "pool":
                self.layers[name] = (nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1))[extra % 2]
            elif kind == "cat":
                width += widths[b]
            elif kind == "add" and widths[b] != width:  # Only tensors of one width can be added.
                self.layers[name] = nn.Conv2d(widths[b], width, 1)
            widths.append(width)
        self.widths = widths
        self.head = nn.Linear(widths[-1] * 16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for index, (kind, a, b, _) in enumerate(self.steps):
            a, b = values[a % len(values)], values[b % len(values)]
            if kind == "cat":
                out = torch.cat([a, b], 1)
            elif kind == "add":
                out = a + (self.layers[str(index)](b) if str(index) in self.layers else b)
            else:
                out = self.layers[str(index)](a)
            values.append(out)
        return self.head(values[-1].flatten(1))


_STEP = st.tuples(
    st.sampled_from(["conv", "conv", "act", "add", "add", "cat", "norm", "pool"]),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 6),
)


@st.composite
def programs(draw) -> Program:
    """Two channels of 4x4, a first convolution, 1 to 8 random steps, each on earlier tensors, and a linear layer.

    Layers that the output does not need are left out, as they would be refused."""
    drawn = [("conv", 0, 0, 1), *draw(st.lists(_STEP, min_size=1, max_size=8))]
    used, keep = {len(drawn)}, []
    for index in range(len(drawn), 0, -1):
        if index in used:
            kind, a, b, _ = drawn[index - 1]
            used.add(a % index)
            if kind in ("cat", "add"):
                used.add(b % index)
    place = {0: 0}
    for index in range(1, len(drawn) + 1):
        if index in used:
            kind, a, b, extra = drawn[index - 1]
            keep.append((kind, place[a % index], place.get(b % index, 0), extra))
            place[index] = len(keep)
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    return Program(keep, 2, draw(st.integers(2, 4))).double()
