"""Before running: what a module will cost and what it lacks (`explain`); after: where it diverges (`diff`)."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..choreography import Phase
from ..errors import ArgumentError, SectorchError, UnsupportedOpError
from ..runtime.ledger import Profile, alone
from ..session import Session
from ..tensor import Scheme, SharedTensor, share_tensor
from .bind import bind
from .secure import SecureModule, secure
from .trace import computation, run, where

NETWORKS = {"LAN": (10e9 / 8, 0.2e-3), "WAN": (100e6 / 8, 50e-3)}
"""Bytes a second and seconds a round."""


@dataclass
class Layer:
    """One node of the graph and what its protocols send.

    `rounds` are those that it adds to the program: the messages of layers that do not wait for each other are as one.
    """

    name: str
    kind: str
    source: str
    shape: tuple
    profile: Profile = field(repr=False)
    problem: str = ""
    rounds: int = 0


@dataclass
class Explanation:
    """What `explain` found.

    `bytes`, `rounds`, `setup_bytes`, `offline_bytes` and `online_bytes` are those that `sectorch.profile()` measures on
    a first call, which sends the masked weights.
    """

    layers: list[Layer]
    profile: Profile = field(repr=False)
    traced: bool

    @property
    def supported(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        return [f"{layer.name}: {layer.problem}" for layer in self.layers if layer.problem]

    def __getattr__(self, name: str) -> Any:
        if name in ("bytes", "rounds", "setup_bytes", "offline_bytes", "online_bytes"):
            return getattr(self.profile, name)
        raise AttributeError(name)

    def seconds(self, network: str) -> dict[str, float]:
        """Seconds that the messages take on a network of `NETWORKS`, computation not counted.

        Each client has a link of that rate to S, and the busier link counts.
        """
        rate, latency = NETWORKS[network]
        out = {}
        for name, phases in (("ahead", (Phase.SETUP, Phase.OFFLINE)), ("online", (Phase.ONLINE,))):
            busiest = max(sum(self.profile.bytes_between(c, "S", p) for p in phases) for c in ("Q", "A"))
            out[name] = busiest / rate + latency * sum(self.profile.rounds_of(p) for p in phases)
        return out

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150)
        table = Table(title="layer by layer" if self.traced else "as a whole: fx could not trace the module")
        for column in ("layer", "what", "result", "ahead kB", "online kB", "rounds", "line"):
            numeric = column in ("ahead kB", "online kB", "rounds")
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for layer in self.layers:
            p = layer.profile
            style = "red" if layer.problem else None
            table.add_row(
                layer.name, layer.kind, str(layer.shape), f"{p.offline_bytes / 1e3:.1f}", f"{p.online_bytes / 1e3:.1f}",
                str(layer.rounds), layer.problem or layer.source, style=style,
            )  # fmt: skip
        console.print(table)
        p = self.profile
        console.print(
            f"{p.rounds} online rounds; {p.online_bytes / 1e6:.2f} MB online, {p.offline_bytes / 1e6:.2f} MB ahead "
            f"({p.setup_bytes / 1e6:.2f} of it once a session)"
        )
        for network in NETWORKS:
            s = self.seconds(network)
            console.print(f"messages on a {network}: {s['online']:.2f} s online, {s['ahead']:.2f} s ahead")
        for problem in self.problems:
            console.print(f"not supported: {problem}", style="red")
        return console.file.getvalue()


def explain(
    model: nn.Module, x: torch.Tensor, relu: str = "exact", frac_bits: int = 20, network: str = "lan"
) -> Explanation:
    """What `secure(model)(x)` will send, layer by layer, without sharing anything.

    Args:
        model: a plain module in evaluation mode, or a secure one.
        x: only its shape and dtype are used.
        relu, frac_bits, network: those of `secure`.

    A batch that is run in pieces is listed by its first piece, and counted whole.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, relu, frac_bits, network=network)
    scheme = secured.scheme
    x = torch.empty_like(x, device="meta")
    session = Session(dry=True)
    module = bind(secured.source, session, session.answering[0], scheme, secured.dtype)
    layers: list[Layer] = []
    whole = Profile()
    for piece in [x] if secured.graph is None else _pieces(secured, x):
        watch = None if secured.graph is None else _Watch(secured.graph, scheme)
        with alone(whole), session.call(session.answering[0]):
            if watch is None:
                layers = [_whole(module, secured.share(piece, session))]
                continue
            with Profile() as first:
                shared = secured.share(piece, session)
            watch.add(Layer("(the input is shared)", "", "", tuple(piece.shape), first))
            y = run(module, shared, step=watch)
            with Profile() as last:
                pytree.tree_map(lambda v: v.reveal() if isinstance(v, SharedTensor) else v, y)
            watch.add(Layer("(the result is revealed)", "", "", _shape(y), last))
        layers = layers or watch.layers
    return Explanation(layers, whole, secured.graph is not None)


def _pieces(secured: SecureModule, x: torch.Tensor) -> list[torch.Tensor]:
    try:
        return list(secured.pieces(x))
    except UnsupportedOpError:
        return [x]


def _whole(module: nn.Module, shared: SharedTensor) -> Layer:
    """The one row of a module that could not be traced."""
    profile = Profile()
    try:
        with profile:
            y = module(shared)
            pytree.tree_map(lambda v: v.reveal() if isinstance(v, SharedTensor) else v, y)
    except SectorchError as error:
        return Layer(type(module).__name__, "", "", (), profile, str(error), profile.rounds)
    return Layer(type(module).__name__, "", "", _shape(y), profile, rounds=profile.rounds)


def _shape(value: Any) -> tuple:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(tensors[0].size()) if tensors else ()


class _Watch:
    """Collects one `Layer` a node. An unsupported node is noted, and replaced by a tensor of the shape torch gives."""

    def __init__(self, graph: fx.GraphModule, scheme: Scheme):
        self.graph, self.scheme = graph, scheme
        self.layers: list[Layer] = []
        self._deepest = 0

    def add(self, layer: Layer) -> None:
        """The next layer of the program."""
        deepest = max(self._deepest, layer.profile.rounds)
        layer.rounds, self._deepest = deepest - self._deepest, deepest
        self.layers.append(layer)

    def __call__(self, node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        profile, problem = Profile(), ""
        try:
            with profile:
                y = compute(*args, **kwargs)
        except UnsupportedOpError as error:
            problem = str(error)
            y = self._stand_in(node, args, kwargs)
        name = str(node.target) if node.op == "call_module" else node.name
        kind = type(self.graph.get_submodule(node.target)).__name__ if node.op == "call_module" else node.name
        if isinstance(y, torch.Tensor) or problem or profile.ledger:
            self.add(Layer(name, kind, node.meta.get("source", ""), _shape(y), profile, problem))
        return y

    def _stand_in(self, node: fx.Node, args: tuple, kwargs: dict) -> Any:
        secrets = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, SharedTensor)]
        session = secrets[0].session

        def on_meta(v: Any) -> Any:
            return torch.empty(v.size(), dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v

        plain = computation(self.graph, node)
        if isinstance(plain, nn.Module):
            plain = plain.to("meta", secrets[0].dtype)
        with torch.no_grad():
            y = plain(*pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs))
        share = lambda v: share_tensor(v, session=session, scheme=self.scheme)
        with alone(Profile()):
            return pytree.tree_map(lambda v: share(v) if isinstance(v, torch.Tensor) else v, y)


@dataclass
class Divergence:
    """One layer of `diff`: the plain values' range, and the largest error of the secure ones."""

    name: str
    shape: tuple
    low: float
    high: float
    error: float
    beyond: bool


@dataclass
class Difference:
    """What `diff` found; `first` is the first layer beyond the tolerance, or None."""

    layers: list[Divergence]
    tolerance: float

    @property
    def first(self) -> Divergence | None:
        return next((layer for layer in self.layers if layer.beyond), None)

    def __str__(self) -> str:
        table = Table(title=f"secure against plain, tolerance {self.tolerance:g} of the largest value of a layer")
        for column in ("layer", "shape", "smallest", "largest", "error"):
            table.add_column(column, justify="left" if column == "layer" else "right")
        for layer in self.layers:
            style = "red" if layer is self.first else None
            numbers = (f"{layer.low:.4g}", f"{layer.high:.4g}", f"{layer.error:.2e}")
            table.add_row(layer.name, str(layer.shape), *numbers, style=style)
        console = Console(file=io.StringIO(), width=120)
        console.print(table)
        first = self.first
        console.print("no layer diverges" if first is None else f"the first layer that diverges: {first.name}")
        return console.file.getvalue()


def diff(
    model: nn.Module, x: torch.Tensor, relu: str = "exact", frac_bits: int = 20, tolerance: float = 1e-3
) -> Difference:
    """Run plain and secure side by side and compare every layer: for development, since every value is revealed.

    Args:
        tolerance: of the largest magnitude of the layer's plain output.

    Raises:
        ArgumentError: fx could not trace the module, so there are no layers to compare.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, relu, frac_bits)
    if secured.graph is None:
        raise ArgumentError("diff() compares the layers of a traced module; fx could not trace this one")
    plain: dict[str, Any] = {}

    def remember(node, compute, args, kwargs):
        plain[node.name] = y = compute(*args, **kwargs)
        return y

    with torch.no_grad():
        run(secured.graph, x.to(torch.float64) if x.is_floating_point() else x, step=remember)
    layers: list[Divergence] = []

    def compare(node, compute, args, kwargs):
        y = compute(*args, **kwargs)
        if isinstance(y, SharedTensor):
            expected = plain[node.name].to(torch.float64)
            error = (y.reveal().to(torch.float64) - expected).abs()
            if expected.numel():
                largest = float(expected.abs().max())
                worst = float(error.max())
                beyond = worst > tolerance * max(largest, 1e-12)
                low, high = float(expected.min()), float(expected.max())
                name = where(node, secured.graph).removeprefix("layer ")
                layers.append(Divergence(name, tuple(expected.shape), low, high, worst, beyond))
        return y

    with secured.session.call(secured.party):
        shared = secured.share(x)
        run(secured.bound, shared, step=compare)
    return Difference(layers, tolerance)
