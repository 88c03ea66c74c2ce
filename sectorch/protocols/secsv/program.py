"""A classifier as a list of linear layers, and what the decrypting client does between them (SecSV, section 2).

A layer is Y = A X + b with A [d_out, d_in] of the model and X [d_in, columns * samples] gathered from the features: one
column a sample for a fully connected layer, one for each position of a convolution. What follows a layer up to the next
(activations, pooling, flattening) has no parameters and is done by the client who decrypts Y.

A recurrent layer is a step of a GRU: its four blocks of outputs [32 each] are the arguments of the reset and update
gates and both parts of the candidate; the client returns z and u = (1 - z) n, and the next state u + z h is made
without anyone seeing h. Features are then the input and, after it, the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import UnsupportedOpError
from ...nn.models import Square
from .values import FederationError

# The classifiers of SecSV's experiments (appendix C, Tables 5 to 8).
#
# | name | layers |
# | --- | --- |
# | logistic | linear (the paper: 48 -> 2 on BANK, 300 -> 4 on AGNEWS) |
# | cnn | conv(1 -> 4, 7x7, stride 3), square, 256 -> 64, square, 64 -> 10 on 28x28 |
# | dnn | 1 to 7 hidden layers with ReLU |
# | rnn | GRU 64 -> 32 over 10 steps, linear |
#
# The paper's tables lost their sizes in print; those here are the ones that its repository and Jiang et al. (2018)
# have.


MODELS = ("logistic", "cnn", "dnn", "rnn")
STEPS = 10
RATES = {"logistic": 1e-2, "cnn": 3e-3, "dnn": 5e-3, "rnn": 1e-2}
"""Learning rates with which the bundled data trains well and a square activation's outputs stay within the format."""


class GRUClassifier(nn.Module):
    """A GRU over the steps of a sequence, and a linear layer on its last state. Input [N, steps * features]."""

    def __init__(self, features: int = 64, hidden: int = 32, classes: int = 2, steps: int = STEPS):
        super().__init__()
        self.steps = steps
        self.gru = nn.GRU(features, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, classes]."""
        states, _ = self.gru(x.reshape(len(x), self.steps, -1))
        return self.fc(states[:, -1])


def logistic(features: int, classes: int) -> nn.Module:
    """A logistic classifier: the sigmoid (or softmax) changes no prediction and is left out."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def cnn(classes: int = 10) -> nn.Module:
    """Jiang et al. (2018) on [1, 28, 28]."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 7, stride=3), Square(), nn.Flatten(), nn.Linear(256, 64), Square(), nn.Linear(64, classes)
    )


def dnn(features: int, classes: int, hidden: int = 3, width: int = 64) -> nn.Module:
    """An input layer, `hidden` hidden layers of a width with ReLU, an output layer; none is a logistic classifier."""
    if not 0 <= hidden <= 7:
        raise FederationError(f"a DNN has 0 to 7 hidden layers here, got {hidden}")
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(hidden):
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, classes))


def build(name: str, shape: tuple[int, ...], classes: int, *, hidden: int = 3, seed: int = 0) -> nn.Module:
    """A model by name for samples of a shape.

    Raises:
        FederationError: an unknown name, or samples that do not fit it.
    """
    features = math.prod(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "logistic":
            return logistic(features, classes)
        if name == "dnn":
            return dnn(features, classes, hidden)
        if name == "cnn":
            if tuple(shape) != (1, 28, 28):
                raise FederationError(
                    f"the CNN takes images [1, 28, 28], got {tuple(shape)}; load the data with image=28"
                )
            return cnn(classes)
        if name == "rnn":
            if features % STEPS:
                raise FederationError(f"{features} features do not divide into {STEPS} steps; pad them to a multiple")
            return GRUClassifier(features // STEPS, 32, classes)
    raise FederationError(f"there is no model {name!r}; there are {', '.join(MODELS)}")


ELEMENTWISE = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh, Square)
BETWEEN = (*ELEMENTWISE, nn.Flatten, nn.MaxPool2d, nn.AvgPool2d, nn.Identity, nn.Dropout)


@dataclass(frozen=True, eq=False)
class Layer:
    """One linear layer.

    Attributes:
        weight: which matrix of the model; steps of a recurrent layer share one.
        rows, inner: d_out and d_in.
        gather: int64 [d_in, columns], which feature enters where; -1 is zero (padding).
        shape: of the outputs of one sample, before `after`.
        after: the modules between this layer and the next, run by the client on [samples, *shape].
        gate: whether this is a step of a GRU.
    """

    weight: str
    rows: int
    inner: int
    gather: torch.Tensor = field(repr=False)
    shape: tuple[int, ...]
    after: nn.Sequential = field(repr=False)
    gate: bool = False

    @property
    def columns(self) -> int:
        """Columns of X for each sample."""
        return self.gather.shape[1]

    def features(self, values: torch.Tensor) -> torch.Tensor:
        """X [.., d_in, columns * samples] from features [.., d, samples]; position first, then sample."""
        if values.is_meta:
            return values.new_empty(*values.shape[:-2], self.inner, self.columns * values.shape[-1])
        padded = F.pad(values, (0, 0, 0, 1)) if bool((self.gather < 0).any()) else values
        index = torch.where(self.gather < 0, padded.shape[-2] - 1, self.gather)
        taken = padded.index_select(-2, index.flatten())
        return taken.view(*values.shape[:-2], self.inner, self.columns * values.shape[-1])

    def outputs(self, values: torch.Tensor, samples: int) -> torch.Tensor:
        """[samples, *shape] from Y [d_out, columns * samples]."""
        return values.view(self.rows, self.columns, samples).permute(2, 0, 1).reshape(samples, *self.shape)


def unary(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Labels in unary, int64 [samples, classes]; the shape of a shape."""
    if labels.is_meta:
        return torch.empty(len(labels), classes, dtype=torch.int64, device="meta")
    return F.one_hot(labels, classes)


def gates(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z and u = (1 - z) n, each [hidden, samples], from a GRU step's outputs [samples, 4 hidden]."""
    reset, update, fresh, hidden = outputs.chunk(4, dim=1)
    z = update.sigmoid()
    n = torch.tanh(fresh + reset.sigmoid() * hidden)
    return z.t(), ((1 - z) * n).t()


class Program:
    """The layers of a module for samples of a shape.

    Raises:
        UnsupportedOpError: a layer that is neither linear nor free of parameters.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...]):
        self.shape = tuple(shape)
        self.features = int(torch.Size(shape).numel())
        self.state = model.gru.hidden_size if isinstance(model, GRUClassifier) else 0
        self.layers = self._recurrent(model) if isinstance(model, GRUClassifier) else self._sequential(model)
        with torch.no_grad():
            self.classes = model(torch.zeros(1, *shape)).shape[1]

    @property
    def weights(self) -> dict[str, Layer]:
        """A layer for each distinct weight, in the order of `matrices`."""
        return {layer.weight: layer for layer in self.layers}

    def parts(self, joined: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """`matrices` of those that have the bias as their last column."""
        return {name: (m[:, :-1], m[:, -1]) for name, m in zip(self.weights, joined, strict=True)}

    def matrices(self, weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The matrix [d_out, d_in] and bias [d_out] of each distinct weight, float64, from a state_dict."""
        if self.state:
            return self._recurrent_matrices(weights)
        out = {}
        for layer in self.layers:
            matrix = weights[f"{layer.weight}.weight"].detach().double().reshape(layer.rows, layer.inner)
            bias = weights.get(f"{layer.weight}.bias")
            out[layer.weight] = (matrix, torch.zeros(layer.rows).double() if bias is None else bias.detach().double())
        return out

    def _sequential(self, model: nn.Module) -> list[Layer]:
        if not isinstance(model, nn.Sequential):
            raise UnsupportedOpError(
                f"a model is an nn.Sequential of linear layers and activations, or a GRUClassifier; got "
                f"{type(model).__name__}"
            )
        layers: list[Layer] = []
        x, after = torch.zeros(1, *self.shape), nn.Sequential()
        for name, module in model.named_children():
            if isinstance(module, nn.Linear | nn.Conv2d):
                layers.append(_linear(name, module, x, after := nn.Sequential()))
            elif isinstance(module, BETWEEN):
                after.append(module)
            else:
                raise UnsupportedOpError(
                    f"layer {name!r}: {type(module).__name__} is neither linear nor one that a client can do alone; "
                    f"fold it into a linear layer or use one of {', '.join(sorted(m.__name__ for m in BETWEEN))}"
                )
            with torch.no_grad():
                x = module(x)
        if not layers or x.dim() != 2:
            raise FederationError(f"a classifier ends in scores [samples, classes], this one in {list(x.shape)}")
        return layers

    def _recurrent(self, model: GRUClassifier) -> list[Layer]:
        if model.gru.num_layers != 1 or model.gru.bidirectional or not model.gru.bias:
            raise UnsupportedOpError("a recurrent classifier has one GRU layer in one direction, with biases")
        size, hidden = model.gru.input_size, self.state
        past = torch.arange(self.features, self.features + hidden)
        layers = []
        for step in range(model.steps):
            index = torch.cat([torch.arange(step * size, (step + 1) * size), past]).unsqueeze(1)
            layers.append(Layer("gru", 4 * hidden, size + hidden, index, (4 * hidden,), nn.Sequential(), True))
        classes = model.fc.out_features
        return [*layers, Layer("fc", classes, hidden, past.unsqueeze(1), (classes,), nn.Sequential())]

    def _recurrent_matrices(self, weights: Mapping[str, torch.Tensor]) -> dict:
        w, u = (weights[f"gru.weight_{k}_l0"].detach().double() for k in ("ih", "hh"))
        b, c = (weights[f"gru.bias_{k}_l0"].detach().double() for k in ("ih", "hh"))
        hidden, zero = self.state, torch.zeros
        both = torch.cat([w[: 2 * hidden], u[: 2 * hidden]], dim=1)
        fresh = torch.cat([w[2 * hidden :], zero(hidden, u.shape[1])], dim=1)
        past = torch.cat([zero(hidden, w.shape[1]), u[2 * hidden :]], dim=1)
        bias = torch.cat([b[: 2 * hidden] + c[: 2 * hidden], b[2 * hidden :], c[2 * hidden :]])
        last = weights["fc.weight"].detach().double(), weights["fc.bias"].detach().double()
        return {"gru": (torch.cat([both, fresh, past]), bias), "fc": last}

    @torch.no_grad()
    def run(self, matrices: Mapping[str, tuple], x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Scores [samples, classes] in the clear in float64, layer by layer, and the largest output of any layer."""
        samples, largest = len(x), 0.0
        out = x.double().reshape(samples, -1)
        values = out.t()
        if self.state:
            values = torch.cat([values, torch.zeros(self.state, samples, dtype=torch.float64)])
        for layer in self.layers:
            matrix, bias = matrices[layer.weight]
            y = matrix @ layer.features(values) + bias[:, None]
            largest = max(largest, float(y.abs().max()) if y.numel() else 0.0)
            out = layer.outputs(y, samples)
            if layer.gate:
                z, u = gates(out)
                values[self.features :] = u + z * values[self.features :]
            else:
                out = layer.after(out)
                values = out.reshape(samples, -1).t()
        return out, largest


def _linear(name: str, module: nn.Linear | nn.Conv2d, x: torch.Tensor, after: nn.Sequential) -> Layer:
    if isinstance(module, nn.Linear):
        if x.dim() != 2:
            raise FederationError(f"layer {name!r} gets samples of shape {list(x.shape[1:])}; flatten them first")
        index = torch.arange(module.in_features).unsqueeze(1)
        return Layer(name, module.out_features, module.in_features, index, (module.out_features,), after)
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise UnsupportedOpError(f"layer {name!r}: convolutions in groups or with {module.padding!r} padding")
    numbers = torch.arange(1.0, x[0].numel() + 1).view(1, *x.shape[1:])
    patches = F.unfold(numbers, module.kernel_size, module.dilation, module.padding, module.stride)
    shape = tuple(module(x).shape[1:])
    return Layer(name, module.out_channels, patches.shape[1], patches[0].long() - 1, shape, after)
