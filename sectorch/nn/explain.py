"""Before running: what a module will cost and what it lacks."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..choreography import Phase
from ..choreography.ledger import Profile, alone
from ..deprecation import deprecate
from ..errors import SecretAccessError, SectorchError, UnsupportedOpError
from ..plots import Plot
from ..ring.scheme import VANISHED, scheme_fields, scheme_of
from ..session import Session
from ..shown import Shown
from ..tensor import Scheme, SharedTensor, share_tensor
from . import bounds
from .bind import Weights
from .dry import counts_as_zero, refuse_weights, shared_inputs
from .eager import watched
from .inputs import Inputs, refuse_results
from .module import SecureModule
from .nodes import function_of, name_of
from .secure import secure
from .trace import Trace, run
from .where import Place

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


class _Seconds(dict[str, float]):
    """Seconds by phase, which give "offline" by its old name "ahead" too, for this release."""

    def __missing__(self, key: str) -> float:
        if key != "ahead":
            raise KeyError(key)
        deprecate('seconds(...)["ahead"]', 'seconds(...)["offline"]')
        return self["offline"]


@dataclass
class Explanation(Shown):
    """What `explain` found.

    `bytes`, `rounds`, `setup_bytes`, `offline_bytes` and `online_bytes` are those that `sectorch.profile()` measures on
    a first call, which sends the masked weights.
    """

    layers: list[Layer]
    profile: Profile = field(repr=False)
    traced: bool
    number_format: str = ""
    """Fraction bits and activation limit, and why they are not the default ones."""

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
        """Seconds that the messages take on a network of `NETWORKS`, computation not counted: "offline" and "online".

        Each client has a link of that rate to S, and the busier link counts.
        """
        rate, latency = NETWORKS[network]
        out = _Seconds()
        for name, phases in (("offline", (Phase.SETUP, Phase.OFFLINE)), ("online", (Phase.ONLINE,))):
            busiest = max(sum(self.profile.bytes_between(c, "S", p) for p in phases) for c in ("Q", "A"))
            out[name] = busiest / rate + latency * sum(self.profile.rounds_of(p) for p in phases)
        return out

    def __str__(self) -> str:
        return self.table(150)

    def plot(self, ax: Any = None) -> Any:
        """Draw what each layer sends, offline and online, into matplotlib's Axes, and give them.

        Args:
            ax: where; those of a new figure unless given.

        Raises:
            PlotError: matplotlib is not installed.
        """
        return self.as_plot().plot(ax)

    def as_plot(self) -> Plot:
        """What `plot` draws, as data."""
        sent = {
            f"{layer.name}\n{layer.kind}".strip(): (layer.profile.offline_bytes / 1e3, layer.profile.online_bytes / 1e3)
            for layer in self.layers
        }
        series = {
            when: {name: sizes[i] for name, sizes in sent.items()} for i, when in enumerate(("offline", "online"))
        }
        return Plot("cost", "layer", "kB sent", series, kind="bars")

    def shown(self) -> Iterator[RenderableType]:
        """A row for each layer, the totals, and what is not supported."""
        table = Table(title="layer by layer" if self.traced else "as a whole: the module runs operation by operation")
        for column in ("layer", "what", "result", "offline kB", "online kB", "rounds", "line"):
            numeric = column in ("offline kB", "online kB", "rounds")
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for layer in self.layers:
            p = layer.profile
            style = "red" if layer.problem else None
            table.add_row(
                Text(layer.name), layer.kind, str(layer.shape), f"{p.offline_bytes / 1e3:.1f}",
                f"{p.online_bytes / 1e3:.1f}", str(layer.rounds), Text(layer.problem or layer.source), style=style,
            )  # fmt: skip
        yield table
        p = self.profile
        yield (
            f"{p.rounds} online rounds; {p.online_bytes / 1e6:.2f} MB online, {p.offline_bytes / 1e6:.2f} MB offline "
            f"({p.setup_bytes / 1e6:.2f} of it once a session)"
        )
        yield Text(self.number_format)
        for network in NETWORKS:
            s = self.seconds(network)
            yield f"messages on a {network}: {s['online']:.2f} s online, {s['offline']:.2f} s offline"
        yield from (Text(f"not supported: {problem}", style="red") for problem in self.problems)


@scheme_fields
def explain(
    model: nn.Module, x: torch.Tensor | Inputs, scheme: Scheme | Literal["lan", "wan"] | None = None
) -> Explanation:
    """What `secure(model)(x)` will send, layer by layer, without sharing anything.

    Args:
        model: a plain module in evaluation mode, or a secure one.
        x: a tensor, or `Inputs(...)` of several; only form, shapes and dtypes are used.
        scheme: that of `secure`, for a plain module.

    A batch that is run in pieces is listed by its first piece, and counted whole.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, scheme_of("explain", scheme))
    inputs = secured.inputs_of(x).meta()
    with suppress(SectorchError):  # which a row says, or a call
        secured.choose_format(inputs)
    scheme = secured.scheme
    session = Session(dry=True)
    module, weights = secured.bind(session, session.answering[0])
    layers: list[Layer] = []
    whole = Profile()
    traced = secured.program(inputs) is not None
    for piece in _pieces(secured, inputs) if traced else [inputs]:
        with alone(whole), session.call(session.answering[0]):
            program = secured.program(piece) if traced else None
            if program is None:
                layers = [_whole(module, shared_inputs(piece, session, scheme))]
                continue
            found = _layers(program, weights, piece, session, scheme)
        layers = layers or found
    said = f"{scheme.frac_bits} fraction bits, activations below {scheme.activation_limit:g}"
    return Explanation(layers, whole, traced, f"{said}, {secured.format_reason}".removesuffix(", "))


def _layers(program: Trace, weights: Weights, piece: Inputs, session: Session, scheme: Scheme) -> list[Layer]:
    """Run a program on shapes, node by node."""
    watch = _Watch(scheme)
    with Profile() as first:
        shared = shared_inputs(piece, session, scheme)
    watch.add(Layer("(the input is shared)", "", "", piece.shapes[0], first))
    y = run(program, weights.of(program), shared.tensors, step=watch)
    problem = ""
    try:
        refuse_weights(y, program)
    except SecretAccessError as error:
        problem = str(error)
    with Profile() as last:
        pytree.tree_map(lambda v: v.reveal() if isinstance(v, SharedTensor) else v, y)
    watch.add(Layer("(the result is revealed)", "", "", _shape(y), last, problem))
    return watch.layers


def _pieces(secured: SecureModule, x: Inputs) -> list[Inputs]:
    try:
        return list(secured.pieces(x))
    except (UnsupportedOpError, SecretAccessError):
        return [x]


def _whole(module: nn.Module, shared: Inputs) -> Layer:
    """The one row of a module that runs operation by operation."""
    profile = Profile()
    try:
        with profile:
            y = watched(module, shared)
            refuse_results(y)
            refuse_weights(y, None)
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
        token = VANISHED.set(vanished := [])
        try:
            with profile:
                y = compute(*args, **kwargs)
        except UnsupportedOpError as error:
            problem = str(error)
            y = self._stand_in(compute, args, kwargs)
        finally:
            VANISHED.reset(token)
        problem = problem or (counts_as_zero(vanished[0], self.scheme) if vanished else "")
        where = node.meta.get("where", Place())
        kind = where.kind or name_of(function_of(node.target))
        name = (where.layer or where.kind) if where.kind else node.name
        picks = node.target in (operator.getitem, bounds.item)  # of a node's several results, which has a row
        if (isinstance(y, SharedTensor) and not picks) or problem or profile.ledger:
            self.add(Layer(name, kind, where.source, _shape(y), profile, problem))
        return y

    def _stand_in(self, compute: Any, args: tuple, kwargs: dict) -> Any:
        secrets = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, SharedTensor)]
        session = secrets[0].session

        def on_meta(v: Any) -> Any:
            return torch.empty(v.size(), dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v

        with torch.no_grad():
            y = compute(*pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs))
        share = lambda v: share_tensor(v.detach(), session=session, scheme=self.scheme)
        with alone(Profile()):
            return pytree.tree_map(lambda v: share(v) if isinstance(v, torch.Tensor) else v, y)
