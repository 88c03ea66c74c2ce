"""`explain`, the cost of a module before it runs, and `diff`, its errors against the plain module after it ran."""

from __future__ import annotations

import math
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
from ..choreography.ledger import Profile, sole_observer
from ..config import LINKS, VANISHED, Link, link_of, scheme_fields, scheme_of
from ..deprecation import deprecate
from ..display import Display, Plot
from ..errors import SecretAccessError, SectorchError, UnsupportedOpError
from ..session import Session
from ..tensor import Scheme, SharedTensor, share_tensor
from . import bounds
from .capture import run_eagerly
from .dry_run import counts_as_zero, refuse_weights, shared_inputs
from .graph import SourceLocation, Trace, function_of, name_of, place_of, run
from .graph_cache import original, plain
from .inputs import Inputs, refuse_results
from .module import SecureModule, secure
from .weights import Weights, copy_module


@dataclass
class Layer:
    """One node of the graph and the messages of its protocols.

    `rounds` are the rounds that it adds to the program: layers that do not wait for each other share rounds.
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
class Explanation(Display):
    """The result of `explain`.

    `bytes`, `rounds`, `setup_bytes`, `offline_bytes` and `online_bytes` are those that `sectorch.profile()` measures on
    a first call, which sends the masked weights.
    """

    layers: list[Layer]
    profile: Profile = field(repr=False)
    traced: bool
    number_format: str = ""
    """Fraction bits and activation limit, and the reason if they are not the default ones."""
    link: Link = LINKS["lan"]
    """That of the scheme."""

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

    def seconds(self, network: str | Link) -> dict[str, float]:
        """Seconds that the messages take over a link, without computation: see `Profile.seconds_over`.

        For the computation too, profile a call in one process, and ask its `seconds_over(link)`.

        Args:
            network: a `Link`, or the name of one.
        """
        if isinstance(network, str) and network in ("LAN", "WAN"):
            deprecate(f'seconds("{network}")', f'seconds("{network.lower()}")')
            network = network.lower()
        return _Seconds(self.profile.seconds_over(network if isinstance(network, Link) else link_of(network)))

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

    def sections(self) -> Iterator[RenderableType]:
        """A row for each layer, the totals, and the unsupported operations."""
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
        for link in dict.fromkeys([*LINKS.values(), self.link]):
            s = self.seconds(link)
            yield f"messages over {link}: {s['online']:.2f} s online, {s['offline']:.2f} s offline"
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
    with suppress(SectorchError):  # a row says so below, or a call
        secured.choose_format(inputs)
    scheme = secured.scheme
    session = Session(dry=True)
    module, weights = secured.bind(session, session.answering[0])
    layers: list[Layer] = []
    whole = Profile()
    traced = secured.program(inputs) is not None
    for piece in _pieces(secured, inputs) if traced else [inputs]:
        with sole_observer(whole), session.call(session.answering[0]):
            program = secured.program(piece) if traced else None
            if program is None:
                layers = [_whole(module, shared_inputs(piece, session, scheme))]
                continue
            found = _layers(program, weights, piece, session, scheme)
        layers = layers or found
    said = f"{scheme.frac_bits} fraction bits, activations below {scheme.activation_limit:g}"
    return Explanation(layers, whole, traced, f"{said}, {secured.format_reason}".removesuffix(", "), scheme.link)


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
    """The single row of a module that runs operation by operation."""
    profile = Profile()
    try:
        with profile:
            y = run_eagerly(module, shared)
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
    """Collects a `Layer` for each node. An unsupported node gives a tensor of the shape that torch gives."""

    def __init__(self, scheme: Scheme):
        self.scheme = scheme
        self.layers: list[Layer] = []
        self._deepest = 0

    def add(self, layer: Layer) -> None:
        """Add the next layer of the program."""
        online = (line.round for line in layer.profile.ledger if line.phase == Phase.ONLINE)
        deepest = max(self._deepest, *online, 0)
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
        where = node.meta.get("where", SourceLocation())
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
        with sole_observer(Profile()):
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
class Difference(Display):
    """The result of `diff`; `first` is the first layer beyond the tolerance, or None."""

    layers: list[Divergence]
    tolerance: float

    @property
    def first(self) -> Divergence | None:
        return next((layer for layer in self.layers if layer.beyond), None)

    def __str__(self) -> str:
        return self.table(120)

    def sections(self) -> Iterator[RenderableType]:
        """A row for each layer, and which is the first that diverges."""
        table = Table(title=f"secure against plain, tolerance {self.tolerance:g} of the largest value of a layer")
        for column in ("layer", "shape", "smallest", "largest", "error"):
            table.add_column(column, justify="left" if column == "layer" else "right")
        for layer in self.layers:
            style = "red" if layer is self.first else None
            numbers = (f"{layer.low:.4g}", f"{layer.high:.4g}", f"{layer.error:.2e}")
            table.add_row(Text(layer.name), str(layer.shape), *numbers, style=style)
        yield table
        first = self.first
        yield Text("no layer diverges" if first is None else f"the first layer that diverges: {first.name}")


@scheme_fields
def diff(
    model: nn.Module,
    x: torch.Tensor | Inputs,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    tolerance: float = 1e-3,
) -> Difference:
    """Run plain and secure side by side and compare every layer: for development, since every value is revealed.

    The plain values are the module's own, in float64: of each function that its forward calls, and the result of the
    module itself. Of a module that runs operation by operation the layers are its submodules.

    Args:
        scheme: that of `secure`, for a plain module.
        tolerance: of the largest magnitude of the layer's plain output.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, scheme_of("diff", scheme))
    inputs = secured.inputs_of(x)
    secured.choose_format(inputs)
    given = inputs.wide()
    program = secured.program(inputs)
    layers: list[Divergence] = []
    with secured.session.call(secured.party):
        shared = shared_inputs(inputs, secured.session, secured.scheme, secured.party)
        module, weights = secured.bind(secured.session, secured.party)
        if program is None:
            y, expected = _submodules(secured.plain, module, given, shared, layers, tolerance)
        else:
            own = values(secured, inputs, given)

            def compare(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
                y = compute(*args, **kwargs)
                plain = own.get(node.meta.get("value", ""))
                _compare(place_of(node).removeprefix("layer "), y, plain, layers, tolerance)
                return y

            y, expected = (
                run(program, weights.of(program), shared.tensors, step=compare),
                original(secured.plain, given),
            )
        for a, b in zip(pytree.tree_leaves(y), pytree.tree_leaves(expected), strict=True):
            _compare("(the result)", a, b, layers, tolerance)
    return Difference(layers, tolerance)


def values(secured: SecureModule, inputs: Inputs, given: Inputs) -> dict[str, torch.Tensor]:
    """The float64 value of each function that the module's forward calls, by the name of its node."""
    own: dict[str, torch.Tensor] = {}

    def remember(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        own[node.name] = y = compute(*args, **kwargs)
        return y

    recorded = secured.recording(inputs)
    if recorded is not None:
        plain(recorded, given, step=remember)
    return own


def _submodules(
    module: nn.Module, bound: nn.Module, given: Inputs, shared: Inputs, layers: list, tolerance: float
) -> tuple[Any, Any]:
    """Run a module and its bound form with hooks on their submodules, and return both results."""
    module = copy_module(module)
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
    return run_eagerly(bound, shared), expected


def _compare(name: str, y: Any, expected: Any, layers: list[Divergence], tolerance: float) -> None:
    """Add a row for a secret value and the plain one."""
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
