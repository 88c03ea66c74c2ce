"""Random modules as people write them: branches on public values, hooks, tied weights, code in place, more arguments.

A module is a list of steps that its forward runs. It is made by running it: each step is drawn to fit what came before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

C, SIDE = 4, 4
WIDTH = 6


class Steps(nn.Module):
    """A forward made of steps (state, h) -> h; `state` holds what the forward keeps in local variables."""

    def __init__(self):
        super().__init__()
        self.steps: list[Callable] = []
        self.layers: Any = nn.ModuleList()

    def forward(self, x, labels=None, *rest, scale=None):
        if not torch.is_tensor(x):
            x = x["image"]
        kept: dict[str, torch.Tensor] = {}
        for step in self.steps:
            x = step(self, kept, x)
        if labels is not None or rest:
            x = x * 100
        return x if scale is None else x * scale

    def alternative(self, x):
        """For whoever replaces forward."""
        return Steps.forward(self, x) * 2


def _norm(draw: random.Random, norm: Any) -> nn.Module:
    for name in ("running_mean", "weight", "bias"):
        if getattr(norm, name, None) is not None:
            value = [draw.uniform(0.5, 1.5) for _ in range(getattr(norm, name).numel())]
            getattr(norm, name).data = torch.tensor(value).reshape(getattr(norm, name).shape)
    if getattr(norm, "running_var", None) is not None:
        norm.running_var.data = torch.tensor([draw.uniform(0.5, 4) for _ in range(norm.running_var.numel())])
    return norm


def _layer(model: Steps, draw: random.Random, make: Callable) -> Callable:
    """A step that calls a layer: a new one, or in one of four cases one of that kind that is there already."""
    made = make()
    same = [i for i, layer in enumerate(model.layers) if type(layer) is type(made) and str(layer) == str(made)]
    if same and draw.random() < 0.25:
        at = draw.choice(same)
    else:
        at = len(model.layers)
        if same and hasattr(made, "weight") and draw.random() < 0.3:
            made.weight = model.layers[same[0]].weight  # tied
        model.layers.append(made)
    return lambda m, kept, h: m.layers[at](h)


def _anywhere(model: Steps, draw: random.Random, h: torch.Tensor) -> Callable:
    """Steps that fit any shape."""
    number = draw.choice([0.3, -1.7, 2.0, 0.5, 3.0, -1.0, 1.25])
    inplace, rows = draw.random() < 0.4, len(h)
    name = draw.choice(["a", "b"])

    def keep(m, kept, h):
        kept[name] = h
        return h

    def keep_view(m, kept, h):
        kept[name] = h.flatten(1) if h.dim() > 1 else h
        return h

    def join(m, kept, h):
        other = kept.get(name)
        return h + other if other is not None and other.shape == h.shape else h

    def join_in_place(m, kept, h):
        other = kept.get(name)
        if other is not None and other.shape == h.shape:
            h += other
        return h

    def product(m, kept, h):
        other = kept.get(name)
        return h * other.clamp(-1, 1) if other is not None and other.shape == h.shape else h

    def times_in_place(m, kept, h):
        h *= number
        return h

    def branch(m, kept, h):
        return h * number if h.shape[0] > 1 else h + 0.25

    def counted(m, kept, h):
        return h + torch.arange(h.shape[-1]) * 0.01

    def by_row(m, kept, h):
        return h + torch.arange(h.shape[0]).reshape(-1, *[1] * (h.dim() - 1)) * 0.1

    def restore(m, kept, h):
        other = kept.get(name)
        return torch.cat([other, h], 1)[:, : h.shape[1]] if other is not None and other.dim() == h.dim() > 1 and (
            other.shape[0] == h.shape[0] and other.shape[2:] == h.shape[2:]
        ) else h  # fmt: skip

    def halves(m, kept, h):
        a, b = h.chunk(2, 1)
        return torch.cat([b.relu(), a], 1)

    def written(m, kept, h):
        mask = torch.zeros(h.shape[-1])
        mask[0] = 1
        mask += 0.5
        return h * mask

    plain = [
        keep, keep, keep_view, join, join, join_in_place, product, times_in_place, branch, counted, by_row, restore,
        written,
        lambda m, kept, h: F.relu(h, inplace=inplace),
        lambda m, kept, h: h.relu_() if inplace else h.relu(),
        lambda m, kept, h: h * number,
        lambda m, kept, h: number * h,
        lambda m, kept, h: h / number,
        lambda m, kept, h: F.dropout(h, 0.5, m.training),
        lambda m, kept, h: h.clone(),
        lambda m, kept, h: h.contiguous(),
        lambda m, kept, h: h + h.mean(0, keepdim=True) if rows > 1 else h,
        lambda m, kept, h: F.leaky_relu(h, 0.5),
        _layer(model, draw, lambda: nn.ReLU(inplace)),
        _layer(model, draw, lambda: nn.ReLU6(inplace)),
        _layer(model, draw, nn.Dropout),
        _layer(model, draw, nn.Identity),
    ]  # fmt: skip
    if h.dim() > 1 and h.shape[1] % 2 == 0:
        plain.append(halves)
    return draw.choice(plain)


def _image(model: Steps, draw: random.Random, h: torch.Tensor) -> Callable:
    """Steps on [rows, channels, side, side]."""
    channels = h.shape[1]
    bias = draw.random() < 0.5
    choices = [
        lambda: _layer(model, draw, lambda: nn.Conv2d(channels, C, 3, padding=1, bias=bias)),
        lambda: _layer(model, draw, lambda: nn.Conv2d(channels, C, 1)),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm2d(channels))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm2d(channels))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.GroupNorm(2, channels))),
        lambda: lambda m, kept, h: h.flatten(1),
        lambda: lambda m, kept, h: h.view(h.size(0), -1),
        lambda: lambda m, kept, h: h.flatten(2).transpose(1, 2),
    ]
    if h.shape[-1] >= 3:
        choices += [
            lambda: _layer(model, draw, lambda: nn.MaxPool2d(2)),
            lambda: lambda m, kept, h: F.max_pool2d(h, 3, 1, 1),
            lambda: _layer(model, draw, lambda: nn.AvgPool2d(3, 1)),
            lambda: lambda m, kept, h: F.avg_pool2d(h, 2),
        ]
    return draw.choice(choices)()


def _rows(model: Steps, draw: random.Random, h: torch.Tensor) -> Callable:
    """Steps on [..., features]."""
    width, bias = h.shape[-1], draw.random() < 0.5
    linears = [i for i, layer in enumerate(model.layers) if type(layer) is nn.Linear]
    choices = [
        lambda: _layer(model, draw, lambda: nn.Linear(width, WIDTH, bias)),
        lambda: _layer(model, draw, lambda: nn.Linear(width, WIDTH, bias)),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.LayerNorm(width))),
        lambda: _layer(model, draw, lambda: nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Sequential(
            nn.Linear(WIDTH, WIDTH), _norm(draw, nn.BatchNorm1d(WIDTH if h.dim() == 2 else h.shape[1]))))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm1d(h.shape[1]))),
        lambda: _layer(model, draw, lambda: _norm(draw, nn.BatchNorm1d(h.shape[1]))),
    ]  # fmt: skip
    for at in linears:
        weight = model.layers[at].weight
        if weight.shape[0] == width:
            choices.append(lambda at=at: lambda m, kept, h: F.linear(h, m.layers[at].weight.t()))
            choices.append(lambda at=at: lambda m, kept, h: h @ m.layers[at].weight[:, :WIDTH] * 0.5)
        if weight.shape[1] == width:
            choices.append(lambda at=at: lambda m, kept, h: F.linear(h, m.layers[at].weight * 0.5))
            choices.append(lambda at=at: lambda m, kept, h: F.linear(h, m.layers[at].weight[:3].repeat(2, 1)))
    if h.dim() == 3 and h.shape[1] == h.shape[2]:
        choices.append(lambda: lambda m, kept, h: h + h.transpose(1, 2))
    return draw.choice(choices)()


HOOKS = (
    lambda m, i, o: o * 3,
    lambda m, i, o: o.relu(),
    lambda m, i, o: None,
    lambda m, i, o: (o + i[0]) if isinstance(i[0], torch.Tensor) and i[0].shape == o.shape else o - 0.5,
)
PRE_HOOKS = (lambda m, i: (i[0] * 0.5,), lambda m, i: None, lambda m, i: (i[0] + 0.125,))


def random_module(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A module in evaluation mode without gradients, and an input that it takes."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = draw.choice([(C, SIDE, SIDE), (C, SIDE, SIDE), (WIDTH,), (3, WIDTH), (WIDTH, WIDTH)])
        x = torch.randn(draw.choice([1, 2, 3, 4]), *shape)
        model = Steps().eval()
        for _ in range(draw.randint(3, 12)):
            _grow(model, draw, x)
        for layer in list(model.layers):
            if draw.random() < 0.12:
                layer.register_forward_hook(draw.choice(HOOKS))
            if draw.random() < 0.06:
                layer.register_forward_pre_hook(draw.choice(PRE_HOOKS))
        if draw.random() < 0.1:
            model.register_forward_hook(draw.choice(HOOKS))
        if draw.random() < 0.1:
            vars(model)["forward"] = model.alternative
        model = model.eval().requires_grad_(False)
        if draw.random() < 0.2:
            model = nn.Sequential(model, nn.Identity())
        return model.eval(), x


def _grow(model: Steps, draw: random.Random, x: torch.Tensor) -> None:
    with torch.no_grad():
        try:
            h = Steps.forward(model.eval(), x.clone())
        except (RuntimeError, IndexError):
            model.steps.pop()  # the last step does not fit in place
            return
        kind = draw.random()
        if kind < 0.5:
            model.steps.append(_anywhere(model, draw, h))
        elif h.dim() == 4:
            model.steps.append(_image(model, draw, h))
        else:
            model.steps.append(_rows(model, draw, h))
        try:
            model.eval()
            y = Steps.forward(model, x.clone())
            if not y.numel() or float(y.abs().max()) > 100:
                model.steps.pop()
        except (RuntimeError, IndexError):
            model.steps.pop()
