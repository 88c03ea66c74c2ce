"""Before running: what a module will cost and what it lacks (`explain`); after: where it diverges (`diff`)."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..choreography import Phase
from ..choreography.ledger import Profile, alone
from ..errors import SectorchError, UnsupportedOpError
from ..ring.scheme import named_scheme
from ..session import Session
from ..tensor import Scheme, SharedTensor, share_tensor
from .bind import Weights
from .check import original, plain
from .dry import shared_input
from .eager import watched
from .module import SecureModule
from .secure import secure
from .trace import Trace, run
from .where import Place, place_of

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
        written = io.StringIO()
        console = Console(file=written, width=150)
        table = Table(title="layer by layer" if self.traced else "as a whole: the module runs operation by operation")
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
        return written.getvalue()


def explain(model: nn.Module, x: torch.Tensor, scheme: Scheme | str | None = None, **old: Any) -> Explanation:
    """What `secure(model)(x)` will send, layer by layer, without sharing anything.

    Args:
        model: a plain module in evaluation mode, or a secure one.
        x: only its shape and dtype are used.
        scheme: that of `secure`, for a plain module.
        old: its fields as keywords, for this release.

    A batch that is run in pieces is listed by its first piece, and counted whole.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, named_scheme("explain", scheme, old))
    scheme = secured.scheme
    x = torch.empty_like(x, device="meta")
    session = Session(dry=True)
    module, weights = secured.bind(session, session.answering[0])
    layers: list[Layer] = []
    whole = Profile()
    traced = secured.program(x) is not None
    for piece in _pieces(secured, x) if traced else [x]:
        with alone(whole), session.call(session.answering[0]):
            if not traced:
                layers = [_whole(module, shared_input(piece, session, scheme))]
                continue
            found = _layers(secured.program(piece), weights, piece, session, scheme)
        layers = layers or found
    return Explanation(layers, whole, traced)


def _layers(program: Trace, weights: Weights, piece: torch.Tensor, session: Session, scheme: Scheme) -> list[Layer]:
    """Run a program on shapes, node by node."""
    watch = _Watch(scheme)
    with Profile() as first:
        shared = shared_input(piece, session, scheme)
    watch.add(Layer("(the input is shared)", "", "", tuple(piece.shape), first))
    y = run(program, weights.of(program), shared, step=watch)
    with Profile() as last:
        pytree.tree_map(lambda v: v.reveal() if isinstance(v, SharedTensor) else v, y)
    watch.add(Layer("(the result is revealed)", "", "", _shape(y), last))
    return watch.layers


def _pieces(secured: SecureModule, x: torch.Tensor) -> list[torch.Tensor]:
    try:
        return list(secured.pieces(x))
    except UnsupportedOpError:
        return [x]


def _whole(module: nn.Module, shared: SharedTensor) -> Layer:
    """The one row of a module that runs operation by operation."""
    profile = Profile()
    try:
        with profile:
            y = watched(module, shared)
            pytree.tree_map(lambda v: v.reveal() if isinstance(v, SharedTensor) else v, y)
    except SectorchError as error:
        return Layer(type(module).__name__, "", "", (), profile, str(error), profile.rounds)
    return Layer(type(module).__name__, "", "", _shape(y), profile, rounds=profile.rounds)


def _shape(value: Any) -> tuple:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(tensors[0].size()) if tensors else ()


class _Watch:
    """Collects one `Layer` a node. An unsupported node is noted, and replaced by a tensor of the shape torch gives."""

    def __init__(self, scheme: Scheme):
        self.scheme = scheme
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
            y = self._stand_in(compute, args, kwargs)
        where = node.meta.get("where", Place())
        name, kind = (where.layer or where.kind, where.kind) if where.kind else (node.name, node.name)
        if isinstance(y, SharedTensor) or problem or profile.ledger:
            self.add(Layer(name, kind, where.source, _shape(y), profile, problem))
        return y

    def _stand_in(self, compute: Any, args: tuple, kwargs: dict) -> Any:
        secrets = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, SharedTensor)]
        session = secrets[0].session

        def on_meta(v: Any) -> Any:
            return torch.empty(v.size(), dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v

        with torch.no_grad():
            y = compute(*pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs))
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
        written = io.StringIO()
        console = Console(file=written, width=120)
        console.print(table)
        first = self.first
        console.print("no layer diverges" if first is None else f"the first layer that diverges: {first.name}")
        return written.getvalue()


def diff(
    model: nn.Module, x: torch.Tensor, scheme: Scheme | str | None = None, *, tolerance: float = 1e-3, **old: Any
) -> Difference:
    """Run plain and secure side by side and compare every layer: for development, since every value is revealed.

    The plain values are the module's own, in float64: of each function that its forward calls, and the result of the
    module itself. Of a module that runs operation by operation the layers are its submodules.

    Args:
        scheme: that of `secure`, for a plain module.
        tolerance: of the largest magnitude of the layer's plain output.
        old: the scheme's fields as keywords, for this release.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, named_scheme("diff", scheme, old))
    given = x.to(torch.float64) if x.is_floating_point() else x
    program = secured.program(x)
    layers: list[Divergence] = []
    with secured.session.call(secured.party):
        shared = shared_input(x, secured.session, secured.scheme, secured.party)
        module, weights = secured.bind(secured.session, secured.party)
        if program is None:
            y, expected = _submodules(secured.plain, module, given, shared, layers, tolerance)
        else:
            own = _values(secured, x, given)

            def compare(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
                y = compute(*args, **kwargs)
                _compare(place_of(node).removeprefix("layer "), y, own.get(node.meta.get("value")), layers, tolerance)
                return y

            y, expected = run(program, weights.of(program), shared, step=compare), original(secured.plain, given)
        for a, b in zip(pytree.tree_leaves(y), pytree.tree_leaves(expected), strict=True):
            _compare("(the result)", a, b, layers, tolerance)
    return Difference(layers, tolerance)


def _values(secured: SecureModule, x: torch.Tensor, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """The value of each function that the module's forward calls, in float64, by the name of its node."""
    own: dict[str, torch.Tensor] = {}

    def remember(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        own[node.name] = y = compute(*args, **kwargs)
        return y

    plain(secured.recorded(x), given, step=remember)
    return own


def _submodules(
    module: nn.Module, bound: nn.Module, given: torch.Tensor, shared: SharedTensor, layers: list, tolerance: float
) -> tuple[Any, Any]:
    """Run a module and its bound form with a hook on each of their submodules; gives both results."""
    module = copy.deepcopy(module)
    own: list[Any] = []
    names = {id(layer): (name, type(layer).__name__) for name, layer in bound.named_modules()}
    for name, layer in module.named_modules():
        if name:
            layer.register_forward_hook(lambda m, i, y: own.append(y))
    expected = original(module, given)
    values = iter(own)

    def compare(layer: nn.Module, _: Any, y: Any) -> None:
        name, kind = names[id(layer)]
        _compare(f"'{name}' ({kind})", y, next(values, None), layers, tolerance)

    for name, layer in bound.named_modules():
        if name:
            layer.register_forward_hook(compare)
    return watched(bound, shared), expected


def _compare(name: str, y: Any, expected: Any, layers: list[Divergence], tolerance: float) -> None:
    """Add a row for a secret value and its plain one."""
    if not isinstance(y, SharedTensor) or not isinstance(expected, torch.Tensor) or not expected.numel():
        return
    expected = expected.to(torch.float64)
    if tuple(y.size()) != tuple(expected.shape):
        layers.append(Divergence(name, tuple(y.size()), math.nan, math.nan, math.inf, True))
        return
    worst, largest = float((y.reveal().to(torch.float64) - expected).abs().max()), float(expected.abs().max())
    beyond = not worst <= tolerance * max(largest, 1e-12)
    low, high = float(expected.min()), float(expected.max())
    layers.append(Divergence(name, tuple(expected.shape), low, high, worst, beyond))
