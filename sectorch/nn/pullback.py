"""T backward passes after one forward pass, an own file: a vector-Jacobian product for many cotangents at once.

`torch.autograd.grad` would walk the whole graph once for each of T cotangents. Here a dense layer multiplies all T
cotangents in one product, whose result is written to its place in the update; small networks spend most of their time
there. For a convolution T passes take as long one by one as together, so they run one by one, without autograd's
overhead. Every other layer runs on a graph of its own, which autograd differentiates.

The cotangents of a tensor are one tensor [T, B, ...], or a list of T tensors [B, ...] after a convolution.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..choreography.pages import Spare
from .symbolic_trace import computation

Cotangents = torch.Tensor | list[torch.Tensor]
Backward = Callable[[Cotangents, "UpdateTerms"], Sequence[Cotangents | None]]
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RELUS = {("call_function", F.relu), ("call_function", torch.relu), ("call_method", "relu")}
_SUMS = {("call_function", operator.add), ("call_function", torch.add), ("call_method", "add")}


class UpdateTerms:
    """The rows of an update, float [T, P]: one for each of T cotangents, with the gradients of all parameters."""

    def __init__(self, count: int, parameters: Mapping[str, torch.Tensor], spare: Spare):
        """
        Args:
            count: T.
            parameters: those that are trained, in the order of the update.
            spare: the memory of earlier updates.
        """
        sizes = [p.numel() for p in parameters.values()]
        self.rows = spare.take((count, sum(sizes)), next(iter(parameters.values())))
        parts = self.rows.split(sizes, 1)
        self._open = {n: part.view(count, *p.shape) for (n, p), part in zip(parameters.items(), parts, strict=True)}
        self._full: dict[str, torch.Tensor] = {}

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left[t]^T @ right to a parameter's gradient for each t: left [T, B, out], right [B, in]."""
        left, right = left.mT, right.expand(len(left), *right.shape)
        if (target := self._open.pop(name, None)) is not None:
            torch.bmm(left, right, out=target)
            self._full[name] = target
        elif name in self._full:
            self._full[name].baddbmm_(left, right)

    def put(self, name: str, values: Cotangents) -> None:
        """Add T gradients of a parameter."""
        if (target := self._open.pop(name, None)) is not None:
            if isinstance(values, torch.Tensor):
                target.copy_(values)
            else:
                for into, value in zip(target, values, strict=True):
                    into.copy_(value)
            self._full[name] = target
        elif name in self._full:
            for into, value in zip(self._full[name], values, strict=True):
                into.add_(value)

    def finish(self) -> torch.Tensor:
        """Return the rows, with zeros for parameters without a gradient."""
        for target in self._open.values():
            target.zero_()
        return self.rows


class Pullback:
    """The body of a network, which runs forward once and backward for many cotangents.

    Args:
        body: a graph without in-place operations, with one input tensor and one result.
        trained: the names of the parameters that need gradients.
    """

    def __init__(self, body: fx.GraphModule, trained: Collection[str]):
        self.body, self.trained = body, set(trained)
        (self._last,) = (node.all_input_nodes[0] for node in body.graph.nodes if node.op == "output")
        self._live: set[fx.Node] = set()
        for node in body.graph.nodes:
            if not self._live.isdisjoint(node.all_input_nodes) or self._parameters(node):
                self._live.add(node)

    def _parameters(self, node: fx.Node) -> list[str]:
        if node.op != "call_module":
            return []
        own = (f"{node.target}.{name}" for name, _ in self.body.get_submodule(str(node.target)).named_parameters())
        return [name for name in own if name in self.trained]

    def forward(
        self, state: Mapping[str, torch.Tensor], inputs: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[Cotangents, UpdateTerms], None]]:
        """Run the network forward.

        Args:
            state: parameters and buffers by name.
            inputs: [B, ...].

        Returns:
            The features [B, F], and a function that takes cotangents [T, B, F] and adds the gradients of the parameters
            to `UpdateTerms`. It can be called once.
        """
        values: dict[fx.Node, Any] = {}
        steps: list[tuple[fx.Node, Backward]] = []
        last = self._last
        uses = {node: len(node.users) for node in self.body.graph.nodes}
        with torch.no_grad():
            for node in self.body.graph.nodes:
                if node.op == "output":
                    continue
                if node.op == "placeholder":
                    values[node] = inputs
                    continue
                values[node], backward = self._step(node, values, state)
                if backward is not None:
                    steps.append((node, backward))
                for used in node.all_input_nodes:
                    uses[used] -= 1
                    if not uses[used]:
                        del values[used]

        def pull(cotangents: Cotangents, terms: UpdateTerms) -> None:
            waiting = {last: cotangents}
            with torch.no_grad():
                while steps:
                    node, backward = steps.pop()
                    given = waiting.pop(node, None)
                    if given is None:
                        continue
                    for source, found in zip(self._sources(node), backward(given, terms), strict=True):
                        if found is not None:
                            waiting[source] = _sum(waiting[source], found) if source in waiting else found

        return values[last], pull

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if source in self._live]

    def _step(self, node: fx.Node, values: dict, state: Mapping) -> tuple[Any, Backward | None]:
        """Compute a node's value, and return its backward pass where one is needed.

        The backward pass takes the cotangents of the value, and returns those of the inputs that need one.
        """
        called, name = (node.op, node.target), str(node.target)
        module = self.body.get_submodule(name) if node.op == "call_module" else None
        x = values[node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else None
        if not isinstance(x, torch.Tensor):
            return self._anything(node, module, values, state)
        live = bool(node.args) and node.args[0] in self._live
        if type(module) is nn.Linear and x.dim() == 2:
            return _dense(name, state, x, live)
        if isinstance(module, _ConvNd) and type(module) in _CONVS and module.padding_mode == "zeros":
            padding = module.padding
            if not isinstance(padding, str):
                return _convolve(name, module, padding, state, x, live, self.trained)
        if isinstance(module, _BatchNorm) and x.device.type == "cpu":  # a GPU's kernel saves other values
            return _normalise(name, module, state, x, live, self.trained)
        if type(module) is nn.ReLU or called in _RELUS:
            out = torch.relu(x)
            return out, (lambda g, _: [_relu_back(g, out)]) if live else None
        if called in _SUMS and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
            a, b = (values[source] for source in node.args)
            if isinstance(a, torch.Tensor) and a.shape == b.shape:
                twice = 2 if node.args[0] is node.args[1] else 1
                back = lambda g, _: [_times(g, twice) for _ in self._sources(node)]
                return a + b, back if node in self._live else None
        return self._anything(node, module, values, state)

    def _anything(self, node: fx.Node, module: nn.Module | None, values: dict, state: Mapping):
        """`_step` of any node, on a graph of its own that autograd walks T times."""
        sources, names = self._sources(node), self._parameters(node)
        leaves = {s: values[s].detach().requires_grad_() for s in sources if isinstance(values[s], torch.Tensor)}
        mine: dict[str, torch.Tensor] = {}
        compute = computation(self.body, node)
        if module is not None:
            start = len(str(node.target)) + 1
            mine = {name[start:]: t for name, t in state.items() if name.startswith(f"{node.target}.")}
            mine |= {name[start:]: state[name].detach().requires_grad_() for name in names}
            if mine:
                compute = lambda *args, **kwargs: functional_call(module, mine, args, kwargs)
        found = lambda used: leaves[used] if used in leaves else values[used]
        with torch.enable_grad():
            out = compute(*map_arg(node.args, found), **map_arg(node.kwargs, found))
        if not isinstance(out, torch.Tensor) or not out.requires_grad:
            return out, None
        wanted = [*leaves.values(), *(mine[name[len(str(node.target)) + 1 :]] for name in names)]

        def backward(cotangents: Cotangents, terms: UpdateTerms) -> list[Cotangents | None]:
            each = list(cotangents)
            by_term = [
                torch.autograd.grad(out, wanted, g.reshape(out.shape), index < len(each) - 1, allow_unused=True)
                for index, g in enumerate(each)
            ]
            columns = [None if column[0] is None else list(column) for column in zip(*by_term, strict=True)]
            for name, column in zip(names, columns[len(leaves) :], strict=True):
                if column is not None:
                    terms.put(name, column)
            by_source = dict(zip(leaves, columns, strict=False))
            return [by_source.get(source) for source in sources]

        return out.detach(), backward


def _dense(name: str, state: Mapping, x: torch.Tensor, live: bool) -> tuple[torch.Tensor, Backward]:
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")

    def backward(cotangents: Cotangents, terms: UpdateTerms) -> list[Cotangents]:
        g = torch.stack(cotangents) if isinstance(cotangents, list) else cotangents
        terms.product(f"{name}.weight", g, x)
        if bias is not None:
            terms.put(f"{name}.bias", g.sum(1))
        return [g @ weight] if live else []

    return F.linear(x, weight, bias), backward


def _convolve(
    name: str, module: _ConvNd, padding: Sequence[int], state: Mapping, x: torch.Tensor, live: bool, trained: set[str]
):
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
    form = (module.stride, padding, module.dilation, False, (0,) * len(module.stride), module.groups)
    wanted = [live, f"{name}.weight" in trained, f"{name}.bias" in trained]
    widths = None if bias is None else bias.shape

    def backward(cotangents: Cotangents, terms: UpdateTerms) -> list[Cotangents]:
        found = [torch.ops.aten.convolution_backward(g, x, weight, widths, *form, wanted) for g in cotangents]
        for kind, column, wish in zip(("weight", "bias"), (1, 2), wanted[1:], strict=True):
            if wish:
                terms.put(f"{name}.{kind}", [each[column] for each in found])
        return [[each[0] for each in found]] if live else []

    return torch.convolution(x, weight, bias, *form), backward if any(wanted) else None


def _normalise(name: str, module: _BatchNorm, state: Mapping, x: torch.Tensor, live: bool, trained: set[str]):
    weight, bias = state.get(f"{name}.weight"), state.get(f"{name}.bias")
    mean, variance = state.get(f"{name}.running_mean"), state.get(f"{name}.running_var")
    own = module.training or mean is None
    if own and x.numel() == x.shape[1]:
        raise ValueError(f"'{name}' takes the statistics of its batch, and there is one value a channel")
    momentum = 1.0 if module.momentum is None else module.momentum
    out, *kept = torch.native_batch_norm(x, weight, bias, mean, variance, own, momentum, module.eps)
    wanted = [live, f"{name}.weight" in trained, f"{name}.bias" in trained]

    def backward(cotangents: Cotangents, terms: UpdateTerms) -> list[Cotangents]:
        back = torch.ops.aten.native_batch_norm_backward
        found = [back(g, x, weight, mean, variance, *kept, own, module.eps, wanted) for g in cotangents]
        for kind, column, wish in zip(("weight", "bias"), (1, 2), wanted[1:], strict=True):
            if wish:
                terms.put(f"{name}.{kind}", [each[column] for each in found])
        return [[each[0] for each in found]] if live else []

    return out, backward if any(wanted) else None


def _relu_back(cotangents: Cotangents, out: torch.Tensor) -> Cotangents:
    back = torch.ops.aten.threshold_backward
    return [back(g, out, 0) for g in cotangents] if isinstance(cotangents, list) else back(cotangents, out, 0)


def _times(cotangents: Cotangents, factor: int) -> Cotangents:
    return cotangents if factor == 1 else [factor * g for g in cotangents]


def _sum(a: Cotangents, b: Cotangents) -> Cotangents:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a + b
    return [x + y for x, y in zip(a, b, strict=True)]
