"""A model of another party, as its description gives it: a program for each form of call, and named weights.

`serving/description.py` makes a `RemoteProgram` of a description that it has checked; `SecureModule` runs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import nn
from torch.fx.node import map_aggregate

from ..choreography import Party
from ..choreography.program.trace import ProgramTracer
from ..errors import ArgumentError, ProgramError, ShapeError
from ..session import Session
from ..tensor import PrivateTensor, Scheme
from . import bounds
from .graph import Trace
from .graph_cache import remember
from .inputs import Inputs
from .weights import is_large, private_weight

_Below31 = Annotated[int, Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class Choice:
    """How a token is chosen from a model's scores; public.

    Attributes:
        do_sample: at random, in proportion to exp(score / temperature); else the token of the largest score.
        top_k: only among so many tokens of the largest scores.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: _Below31 | None = None

    def __post_init__(self):
        if type(self.temperature) not in (int, float) or not self.temperature > 0:
            raise ArgumentError(
                f"temperature must be a number above 0, got {self.temperature!r:.40}; do_sample=False takes the largest"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ArgumentError(f"top_k must be a whole number of 1 or more, got {self.top_k!r}")
        if not self.do_sample and (self.temperature != 1.0 or self.top_k is not None):
            raise ArgumentError("temperature and top_k are for do_sample=True")

    def noise(self, rows: int, words: int, generator: torch.Generator | None) -> torch.Tensor | None:
        """Q's randomness for one token of each row: standard Gumbel noise for every score that is left."""
        if not self.do_sample:
            return None
        shape = rows, min(self.top_k or words, words)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ArgumentError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        if generator is not None:
            uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            drawn = np.frombuffer(os.urandom(8 * rows * shape[1]), dtype=np.uint64) >> np.uint64(11)
            uniform = torch.from_numpy(drawn.astype(np.float64) * 2.0**-53).reshape(shape)
        return -torch.log(-torch.log(uniform.clamp(2.0**-54, 1 - 2.0**-53))).float()

    def token(self, scores: Any, noise: Any) -> Any:
        """The chosen token of each row, [rows, 1]: argmax of score / temperature + Gumbel noise (Gumbel, 1954)."""
        if noise is None:
            return scores.argmax(-1, keepdim=True)
        index = None
        if noise.shape[-1] < scores.shape[-1]:
            scores, index = scores.topk(noise.shape[-1])
        chosen = (scores / self.temperature + noise).argmax(-1, keepdim=True)
        return chosen if index is None else index.gather(-1, chosen)


@dataclass(frozen=True)
class TextSettings:
    """How a model continues texts; public.

    Attributes:
        max_new_tokens: how many tokens there is room for.
        words: how many different tokens there are. choice: how one is chosen.
        ends: tokens that end a text. pad: what follows an end.
        masked: whether prompts come with a mask, which says where they are padded.
        until_end: whether tokens stay secret of Q too until all are there.
    """

    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    words: _Below31
    choice: Choice
    ends: Annotated[tuple[_Below31, ...], Meta(max_length=1024)] = ()
    pad: _Below31 = 0
    masked: bool = False
    until_end: bool = False

    def to_description(self) -> dict[str, Any]:
        """The settings as a description holds them."""
        return asdict(self)

    @classmethod
    def from_description(cls, said: Any) -> TextSettings:
        """The settings that a description holds.

        Raises:
            ProgramError: the value is no such settings.
        """
        try:
            made = msgspec.convert(said, cls)
        except msgspec.ValidationError as error:
            raise ProgramError(f"a model description does not say how texts are continued: {error}") from None
        # msgspec passes over the entries of a dataclass that it does not know.
        if set(said) - set(vars(made)) or set(said["choice"]) - set(vars(made.choice)):
            raise ProgramError("a model description says more of how texts are continued than is known here")
        return made


@dataclass(frozen=True)
class RowCount:
    """An argument that is a multiple of the number of rows of the call."""

    times: int


@dataclass(frozen=True)
class WeightSpec:
    """A weight of a description, by its name in errors and model files.

    Attributes:
        dtype: in which it is kept. statistic: whether it is of a BatchNorm, and may be of any size.
        passes: the dtype that it passes for; None for the model's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    statistic: bool
    passes: torch.dtype | None = None


@dataclass(frozen=True)
class RemoteCall:
    """One program of a description.

    Attributes:
        inputs: its call: the form, and names, shapes and dtypes of the secret tensors, without content.
        least: the fewest rows for which it holds; 0 where it holds for the shapes of `inputs` only.
        grown: constants that follow the number of rows: "each D" is the same for each row, along
            dimension D; "count" holds their numbers.
    """

    inputs: Inputs
    least: int
    trace: Trace
    grown: Mapping[str, str]

    def of(self, rows: int) -> Inputs:
        """The inputs of a call of so many rows; of one that holds for its shapes only, 0 are named.

        Raises:
            ShapeError: it does not hold for so many.
        """
        if not self.least and not rows:
            return self.inputs
        if not self.least or rows < self.least:
            raise ShapeError(f"a program for at least {self.least} rows was asked for {rows}")
        return self.inputs.meta(rows)

    def rows(self, inputs: Inputs, any_shares: bool = False) -> int | None:
        """The number of rows for which `of` gives inputs of these shapes; None where this is another call.

        Args:
            any_shares: whether the calls may differ in which tensors and results are in shares.
        """
        form, own = (x.as_plain_call().form if any_shares else x.form for x in (inputs, self.inputs))
        if form != own or inputs.dtypes != self.inputs.dtypes:
            return None
        if not self.least:
            return 0 if inputs.shapes == self.inputs.shapes else None
        fits = inputs.row[1:] == self.inputs.row[1:] and inputs.rows is not None and inputs.rows >= self.least
        return inputs.rows if fits else None

    @property
    def summary(self) -> str:
        """The tensors that the call takes, for people."""
        shown = []
        for name, (shape, dtype) in self.inputs.described.items():
            sizes = ["rows", *shape[1:]] if self.least else shape
            shown.append(f"{name} [{', '.join(map(str, sizes))}] {dtype}")
        more = f", {self.least} rows or more" if self.least > 1 else ""
        return ", ".join(shown) + more


Kind = tuple[int, int]
"""The number of a program in a description, and the rows of the call: 0 where it holds for its own shapes only."""


class RemoteProgram:
    """A description read back: what `SecureModule` runs of another party's model.

    Attributes:
        dtype: what the weights pass for.
        weights: in the order of the description. values: by name, without content where they are another party's.
        texts: of a model that continues texts, how.
        form: fraction bits and bits of the activation limit that hold the weights, where the default ones do not.
    """

    def __init__(
        self, dtype: torch.dtype, weights: list[WeightSpec], values: dict[str, torch.Tensor], calls: list,
        texts: TextSettings | None = None, form: tuple[int, int] | None = None,
    ):  # fmt: skip
        self.form = form
        self.dtype, self.weights, self.values, self.texts = dtype, weights, values, texts
        self.calls: list[RemoteCall] = calls
        self._made: dict[Kind, Trace] = {}
        self._lock = threading.Lock()

    def scheme(self, named: Scheme) -> Scheme:
        """What a question is computed in: as it asks, with the owner's number format where it names none."""
        if self.form is None or not named.chooses:
            return named
        return replace(named, frac_bits=self.form[0], limit_bits=self.form[1])

    def inputs(self, kind: Kind) -> Inputs:
        """The inputs of a call of a kind, without content.

        Raises:
            ShapeError: there is no such call.
        """
        number, rows = kind
        if number >= len(self.calls):
            raise ShapeError(f"the model has {len(self.calls)} programs, and one of number {number} is asked for")
        return self.calls[number].of(rows)

    def find(self, inputs: Inputs, any_shares: bool = False) -> Kind:
        """The kind of a call with such inputs.

        Args:
            any_shares: as of `RemoteCall.rows`.

        Raises:
            ShapeError: there is none.
        """
        for number, call in enumerate(self.calls):
            rows = call.rows(inputs, any_shares)
            if rows is not None:
                return number, rows
        raise ShapeError(f"got {inputs!r}; {self.summary}")

    def general(self, inputs: Inputs) -> bool:
        """Whether the program of these inputs holds for other numbers of rows as well."""
        return self.calls[self.find(inputs)[0]].least > 0

    @property
    def summary(self) -> str:
        """The calls that the model takes, for people, and how to get others."""
        if self.texts is not None:
            prompts = ", ".join(str(list(call.inputs.shapes[0])) for call in self.calls if not any(call.inputs.held))
            room = f"and has room for {self.texts.max_new_tokens} new tokens"
            return f"the model continues prompts [rows, positions] of {prompts}, {room}; its owner can serve others"
        calls = [call for call in self.calls if not call.inputs.in_shares]
        takes = "; or ".join(call.summary for call in calls[:4])
        takes += f"; or {len(calls) - 4} others" if len(calls) > 4 else ""
        return (
            f"the model takes {takes}. Its owner can serve other shapes: save_model(model, [one, another, ...], path)"
        )

    def trace(self, number: int, rows: int) -> Trace:
        """A program for so many rows."""
        with self._lock:
            if (number, rows) not in self._made:
                call = self.calls[number]
                remember(self._made, (number, rows), _with_rows(call, rows) if call.least else call.trace)
            return self._made[number, rows]

    def bind(self, session: Session, party: Party, scheme: Scheme) -> dict[str, PrivateTensor]:
        """The weights as private tensors of a party of a session, by name."""
        made, large = {}, is_large(self.values[weight.name] for weight in self.weights)
        for weight in self.weights:
            value = self.values[weight.name].to("cpu" if session.present(party) else "meta", torch.float64)
            label = f"weight '{weight.name}'"
            made[weight.name] = private_weight(
                value, session, party, scheme, label, weight.passes or self.dtype, statistic=weight.statistic,
                large=large,
            )  # fmt: skip
        return made


class RemoteGraphs:
    """The programs of a description, where another module's come from its recordings (`GraphCache`).

    Args:
        session: in which nobody is present.
    """

    eager_reason: str | None = None

    def __init__(self, served: RemoteProgram, session: Session, party: Party):
        self._served, self.session, self.party = served, session, party
        setup = session.setup(party)
        self.setup = setup.tracing = ProgramTracer(setup.call)

    def of(self, inputs: Inputs) -> Trace:
        """The program for inputs of this form, shape and dtype.

        Raises:
            ShapeError: there is none.
        """
        return self._served.trace(*self._served.find(inputs, any_shares=True))

    recording = of

    def can_split_rows(self, inputs: Inputs, sizes: set[int]) -> bool:
        """Always False: whether rows are independent is known after a dry run, which `SecureModule` makes."""
        return False

    def bound(self) -> nn.Module:
        """An empty module: a description has programs only."""
        return nn.Module()


def _with_rows(call: RemoteCall, rows: int) -> Trace:
    """A program for one number of rows.

    Raises:
        ShapeError: its public constants would be too large.
    """
    made = call.trace.copy()
    put = lambda value: bounds.size(value.times * rows) if isinstance(value, RowCount) else value
    for node in made.graph.nodes:
        node.args, node.kwargs = _each(node.args, put), _each(node.kwargs, put)
    for name, how in call.grown.items():
        one = made.values[name]
        most = bounds.MAX_COUNTED if how == "count" else bounds.MAX_ELEMENTS
        if one.numel() * rows > most:
            raise ShapeError(f"{rows} rows make a public constant of more than {most} elements: ask with fewer")
        dim = 0 if how == "count" else int(how[-1])
        sizes = (*one.shape[:dim], rows, *one.shape[dim + 1 :])
        made.values[name] = torch.arange(rows).reshape(sizes) if how == "count" else one.expand(sizes)
    return replace(made, rows=rows)


def _each(value: Any, put: Callable) -> Any:
    """`put` of every leaf, in slices as well."""
    within = lambda v: slice(put(v.start), put(v.stop), put(v.step)) if isinstance(v, slice) else put(v)
    return map_aggregate(value, within)
