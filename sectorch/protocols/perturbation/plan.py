"""How a module is perturbed: the scale of each weight's rows and columns, found by walking its graph.

Source: III-A (Eqs. 6 to 8 for linear layers, Eqs. 13 to 16 for convolutions), widened from chains and concatenations to
any graph of positively homogeneous layers, with biases, residual additions and normalisation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx, nn

from ...nn.symbolic import symbolic_trace, where
from .errors import NotPerturbableError
from .functional import functional
from .rules import function_rule, module_rule
from .scales import ONE, Located
from .walk import Walk


@dataclass(frozen=True)
class Scaled:
    """R of one parameter or buffer: entry [k, c, ...] is scale[rows[k]] / scale[columns[k, c]].

    Attributes:
        rows: representatives of the output channels, int64 [out], or None for scale 1.
        columns: representatives of the input channels, int64 [out, in / groups] or [1, in]; None for scale 1.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None = None

    def scale_(self, values: torch.Tensor, scales: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
        """Multiply by R in place; scales and their inverses are of the dtype of `values`, indexed by channel."""
        if self.rows is not None:
            values *= scales[self.rows].view(-1, *(1,) * (values.dim() - 1))
        if self.columns is not None:
            values *= inverses[self.columns].view(*self.columns.shape, *(1,) * (values.dim() - 2))
        return values


@dataclass
class Plan:
    """Everything about a model that does not depend on its weights.

    Attributes:
        body: the graph up to the features that enter the last linear layer.
        head: name of that layer; its rows have scale 1 and take the additive noise instead.
        outputs: n_L, the width of the head.
        features: n_{L-1}.
        parameters: the scaling of each trainable or frozen parameter.
        batch_norms: name -> whether it uses the batch's statistics (train) or its running ones (eval).
        norm_inputs: name -> representatives of the channels that enter a batch norm in eval mode.
        scale_count: how many channel numbers there are; `roots` are those that are drawn.
        roots: int64 [S], the distinct representatives other than ONE.
    """

    body: fx.GraphModule
    head: str
    outputs: int
    features: int
    head_bias: bool
    parameters: dict[str, Scaled] = field(default_factory=dict)
    batch_norms: dict[str, bool] = field(default_factory=dict)
    norm_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    scale_count: int = 1
    roots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def make_plan(model: nn.Module, channels: int | None = None) -> Plan:
    """Walk the graph of `model` (a copy of it; the model itself is left alone).

    Args:
        channels: width of the input's dimension 1, for a model whose first layer does not tell it.

    Raises:
        NotPerturbableError: names the layer that cannot carry a scale, and says why.
    """
    if not isinstance(model, nn.Module):
        raise NotPerturbableError(f"a Scheme takes a torch.nn.Module, got {type(model).__name__}")
    model = copy.deepcopy(model)
    graph = symbolic_trace(model)
    if graph is None:
        raise NotPerturbableError(
            f"the forward of {type(model).__name__} has control flow that torch.fx cannot see through, so the scale of "
            f"its layers is not known; write it without branches on tensor values"
        )
    functional(graph)
    shared = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    if len(shared) != len(list(model.named_parameters())):
        raise NotPerturbableError("two layers of the model share one parameter; give each its own")
    return _Planner(graph, model, channels).plan()


class _Planner(Walk):
    """The walk itself: every node by its rule, then the result with one number for each distinct scale."""

    def __init__(self, graph: fx.GraphModule, model: nn.Module, width: int | None):
        super().__init__(graph)
        self.model, self.width = model, width
        self.called: dict[str, tuple[Located, Located]] = {}

    def plan(self) -> Plan:
        nodes = list(self.graph.graph.nodes)
        head = self._head(nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise NotPerturbableError(f"the model takes {len(inputs)} inputs; one tensor [N, ...] was expected")
        for node in nodes:
            if node.op == "placeholder":
                self.known[node] = self._input(node)
            elif node.op == "get_attr":
                raise self.refuse(node, "it uses a parameter outside a layer; use an nn module for it")
            elif node is head:
                self._enter_head(node)
            elif node.op == "call_module":
                self.known[node] = self._call_module(node)
            elif node.op != "output":
                self.known[node] = function_rule(self, node)
        missing = [name for name, _ in self.model.named_parameters() if name not in self.scaled]
        if missing:
            raise NotPerturbableError(f"parameters that no layer of the graph uses: {', '.join(missing)}; remove them")
        return self._finish(head)

    def _head(self, nodes: list[fx.Node]) -> fx.Node:
        node = nodes[-1].args[0]
        while isinstance(node, fx.Node) and node.op == "call_module":
            module = self.module(node)
            if type(module) is nn.Linear:
                users = [n for n in nodes if n.op == "call_module" and n.target == node.target]
                if len(users) > 1 or len(node.users) > 1:
                    raise self.refuse(node, "the last linear layer is used in more than one place")
                return node
            if type(module) is not nn.Identity:
                break
            node = node.args[0]
        name = where(node, self.graph) if isinstance(node, fx.Node) else f"a {type(node).__name__}"
        raise NotPerturbableError(
            f"the model ends in {name}; it has to end in an nn.Linear, which takes the additive noise (Eq. 8). Leave "
            f"softmax to the loss"
        )

    def _input(self, node: fx.Node) -> Located:
        """The input has scale 1; its width is that of the first layer that takes it, where there is one."""
        if self.width is not None:
            return Located(np.full(self.width, ONE))
        for user in node.users:
            if user.op == "call_module":
                module = self.module(user)
                width = next(
                    (w for a in ("in_features", "in_channels", "num_features") if (w := getattr(module, a, None))), None
                )
                if isinstance(width, int):
                    return Located(np.full(width, ONE), spatial=False if hasattr(module, "in_features") else None)
        return Located(None)

    def _call_module(self, node: fx.Node) -> Located | None:
        source = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            raise self.refuse(node, "its input is not a tensor that the walk has seen")
        name = str(node.target)
        out = module_rule(self, node, self.module(node), source)
        before = self.called.get(name)
        if before is not None:  # A layer that is used twice has one weight, so one scale on either side.
            self.same(node, before[0], source)
            self.same(node, before[1], out)
        self.called[name] = (source, out)
        return out

    def _enter_head(self, node: fx.Node) -> None:
        module, entering = self._linear(node), node.args[0]
        source = self.known.get(entering) if isinstance(entering, fx.Node) else None
        if source is None or source.spatial:
            raise self.refuse(node, "the last linear layer takes [N, features]; flatten or pool before it")
        self.scaled[f"{node.target}.weight"] = (None, self.columns(node, source, module.in_features)[None])
        if module.bias is not None:
            self.scaled[f"{node.target}.bias"] = (None, None)

    def _linear(self, head: fx.Node) -> nn.Linear:
        module = self.module(head)
        if not isinstance(module, nn.Linear):
            raise self.refuse(head, "the model has to end in an nn.Linear")
        return module

    def _roots(self, channels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.channels.roots(channels.ravel()).reshape(channels.shape))

    def _finish(self, head: fx.Node) -> Plan:
        module = self._linear(head)
        final = lambda channels: None if channels is None else self._roots(channels)
        scaled = {name: Scaled(final(rows), final(columns)) for name, (rows, columns) in self.scaled.items()}
        norm_inputs = {name: self._roots(channels) for name, channels in self.norm_inputs.items()}
        roots = [s for scale in scaled.values() for s in (scale.rows, scale.columns) if s is not None]
        flat = [torch.zeros(0, dtype=torch.int64), *map(torch.ravel, roots), *norm_inputs.values()]
        distinct = torch.unique(torch.cat(flat))
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.graph_copy(self.graph.graph, copies)
        graph.output(copies[head.all_input_nodes[0]])
        body = fx.GraphModule(self.graph, graph)
        body.graph.eliminate_dead_code()
        return Plan(
            body=fx.GraphModule(body, body.graph),  # once more: the head's weights are not carried along
            head=str(head.target),
            outputs=module.out_features,
            features=module.in_features,
            head_bias=module.bias is not None,
            parameters={name: scaled[name] for name, _ in self.model.named_parameters()},
            batch_norms=self.batch_norms,
            norm_inputs=norm_inputs,
            scale_count=len(self.channels),
            roots=distinct[distinct != ONE],
        )
