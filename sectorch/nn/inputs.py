"""The inputs and results of a module's call.

`Inputs` holds Q's secret tensors and the public form of a call: containers, public values, and the names of the
tensors. `RetainedResults` are results that stay in shares and may be inputs of a later call.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..backend import RaisedFlags, Value
from ..choreography import Party
from ..deprecation import renamed_attribute
from ..errors import ArgumentError, DtypeError, FixedPointRangeError, ProgramError, UnsupportedOpError
from ..ops.common import as_factor
from ..ring import HEADROOM_BITS
from ..session import Session
from ..tensor import Scheme, SecretTensor, SharedTensor
from ..tensor.secret import dtype_of
from ..tensor.shared import Infinite, with_exact_infinities
from ..tensor.table import Context


@dataclass(frozen=True)
class SharedInputSpec:
    """The public facts on a tensor in shares, beside its shape and dtype.

    Attributes:
        scale_bits, bound, whole_bits: as of `SharedTensor`.
        infinite: whether numbers in it may stand for infinity, without their positions.
    """

    scale_bits: int
    bound: float | None
    whole_bits: int
    infinite: Infinite | None = None

    @classmethod
    def of(cls, x: SharedTensor) -> SharedInputSpec:
        infinite = x.infinite
        if infinite is not None:
            if infinite.unchecked:
                raise FixedPointRangeError(
                    "a tensor that holds infinities, and numbers added to them, goes from one program to another; take "
                    "torch.nan_to_num of it first, or fill with a number in the range"
                )
            infinite = replace(infinite, at=None, certain=False)
        return cls(x.scale_bits, x.bound, x.whole_bits, infinite)

    def to_description(self) -> tuple[int, float | None, int]:
        """The facts as a description holds them.

        Raises:
            ProgramError: the tensor may hold infinities, which descriptions do not cover.
        """
        if self.infinite is not None:
            raise ProgramError("a tensor that may hold infinities does not stay between calls of a served model")
        return self.scale_bits, self.bound, self.whole_bits

    @classmethod
    def from_description(cls, scale_bits: int, bound: float | None, whole_bits: int) -> SharedInputSpec:
        """The facts that a description holds.

        Raises:
            ProgramError: no tensor in the ring has them.
        """
        fits = bound is None or 0 <= bound < 2.0**HEADROOM_BITS
        if not (fits and 0 <= scale_bits <= HEADROOM_BITS and abs(whole_bits) <= 2 * HEADROOM_BITS):
            raise ProgramError("a model description holds a tensor in shares that is not in the ring")
        return cls(scale_bits, bound, whole_bits)

    def tensor(self, shares: Value, session: Session, party: Party, scheme: Scheme, dtype: torch.dtype) -> SharedTensor:
        """A SharedTensor of these shares."""
        made = SharedTensor(shares, self.scale_bits, session, party, scheme, dtype, self.bound)
        made.whole_bits, made.infinite = self.whole_bits, self.infinite
        return made

    def traced_input(self, name: str, x: torch.Tensor, session: Session, party: Party, scheme: Scheme) -> SharedTensor:
        """In a call on shapes, a tensor of an earlier call as an input, of which each party brings its share."""
        half = torch.empty(x.shape, dtype=torch.int64, device="meta")
        shares = session.backend(session.net(party), scheme).import_shares(name, (half, half))
        return self.tensor(shares, session, party, scheme, x.dtype)


class RetainedTensor(NamedTuple):
    """A result of a program that nobody learns: the parties' shares of it, and the public facts."""

    halves: tuple[torch.Tensor, ...]
    spec: SharedInputSpec
    dtype: torch.dtype

    @classmethod
    def of(cls, y: SharedTensor) -> RetainedTensor:
        return cls(y.backend.export_shares(y.shares), SharedInputSpec.of(y), dtype_of(y))


class RetainedResults(NamedTuple):
    """A program's results in shares, and the flags on which all of them depend, joined as far as possible.

    Results that Q learns are `Opening`s, which then hold all flags.
    """

    results: Any
    flags: list[tuple[torch.Tensor, ...]]


def retain_results(outputs: Any, learned: int = 0) -> RetainedResults:
    """The results of a call, in a form that the parties keep. Only rounding and checking a result sends messages.

    A tensor of many fraction bits is rounded as a factor of a product is, and checked against the activation limit, so
    that the next operation need not.

    Args:
        learned: the number of results, from the first on, that Q learns; with them Q learns whether the whole call was
            in range.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    ready = [_ready(y) if isinstance(y, SharedTensor) and at >= learned else y for at, y in enumerate(leaves)]
    leaves = reveal_first(ready, learned)
    raised = dict.fromkeys(flag for y in leaves if isinstance(y, SharedTensor) for flag in y.flags)
    kept, flags = [RetainedTensor.of(y) if isinstance(y, SharedTensor) else y for y in leaves], []
    for dims in sorted({len(flag.shape) for flag in raised}):
        backend = next(y.backend for y in leaves if isinstance(y, SharedTensor))
        alike = [flag for flag in raised if len(flag.shape) == dims]
        flags.append(backend.export_shares(backend.each(_joined, *alike)))
    return RetainedResults(pytree.tree_unflatten(kept, spec), flags)


def reveal_first(results: list[Any], learned: int) -> list[Any]:
    """Open the first results to Q, without reading them, with the flags of all results.

    The other results then carry no flags, since Q goes on only after it has read the flags. With verified dealing this
    does not suffice, and they keep theirs.
    """
    if not learned:
        return results
    flags = tuple(dict.fromkeys(flag for y in results if isinstance(y, SharedTensor) for flag in y.flags))
    results = [
        y.with_flags(flags if at < learned or y.scheme.verified else ()) if isinstance(y, SharedTensor) else y
        for at, y in enumerate(results)
    ]
    return [y.open() if isinstance(y, SharedTensor) and at < learned else y for at, y in enumerate(results)]


def reveal_tree(outputs: Any, learned: int) -> Any:
    """`reveal_first` on a tree of results."""
    leaves, spec = pytree.tree_flatten(outputs)
    return pytree.tree_unflatten(reveal_first(leaves, learned), spec)


def _joined(*flags: torch.Tensor) -> torch.Tensor:
    return torch.cat(flags, -1)


def _ready(y: SharedTensor) -> SharedTensor:
    dtype = dtype_of(y)
    y = with_exact_infinities(y)
    raised = len(y.session.net(y.party).state(RaisedFlags))
    most = None if y.infinite is None else 2 * y.infinite.size
    made = as_factor(Context(y.session, y.party, y.scheme), y, most=most)
    if made is y:
        return y
    made = made.like(made.shares, bound=made.bound, dtype=dtype)
    made.infinite = y.infinite
    made.flags = (*y.flags, *y.session.net(y.party).state(RaisedFlags)[raised:])
    return made


def as_shared(
    staying: RetainedResults, given: list[SharedTensor], session: Session, party: Party, scheme: Scheme
) -> Any:
    """The results of a run as SharedTensors, with the flags of the program and of its inputs.

    Args:
        given: the inputs that were shared before.
    """
    backend = session.backend(session.setup(party), scheme)
    flags = [backend.import_shares("flags", halves) for halves in staying.flags]
    flags += dict.fromkeys(flag for x in given for flag in x.flags)

    def shared(y: Any) -> Any:
        if not isinstance(y, RetainedTensor):
            return y
        made = y.spec.tensor(backend.import_shares("result", y.halves), session, party, scheme, y.dtype)
        made.flags = tuple(flags)
        return made

    return pytree.tree_map(shared, staying.results, is_leaf=lambda y: isinstance(y, RetainedTensor))


_CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, eq=False)
class Public:
    """A tensor that all parties may know, among the arguments of a secure module; two of the same content are equal."""

    value: torch.Tensor

    @cached_property
    def _content(self) -> tuple:
        x = self.value.detach().cpu().contiguous()
        held = x.flatten().view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
        return tuple(x.shape), x.dtype, str(self.value.device), hashlib.sha256(held.numpy().tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Public) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


def public(x: torch.Tensor) -> Public:
    """Mark a tensor argument of a secure module as one that all parties may know: a mask, lengths, an edge list.

    Every other tensor that a secure module is called with is Q's secret. The content of a public tensor is a part of
    the program, as a shape is: another content is another program, which is traced anew. Operations between public
    tensors cost nothing, and public indices, masks and lengths are often much cheaper than secret ones.

    The content, shape and dtype are those of x at this moment: later writes into x change nothing. A forward gets a
    contiguous tensor without gradient.

    Raises:
        ArgumentError: x is secret already.
        DtypeError: x is no tensor, or a sparse one.
    """
    if isinstance(x, Public):
        return x
    if isinstance(x, SecretTensor):
        raise ArgumentError(f"public() marks a plain tensor; a {type(x).__name__} is secret already")
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"public() marks a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        way = "x.to_padded_tensor(0.0)" if x.is_nested else "x.to_dense()"
        raise DtypeError(f"public() marks a dense tensor, got one of {x.layout}; use {way}")
    plain = x.detach().as_subclass(torch.Tensor)
    return Public(plain.clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True)
class CallForm:
    """The public form of a call: the containers, and for each leaf a public value or the name of a secret tensor."""

    spec: Any
    leaves: tuple[Any, ...]
    learned: int | None = None
    """The number of results that Q learns where the others stay in shares; None where Q learns all."""

    def __hash__(self) -> int:
        return hash((str(self.spec), self.leaves, self.learned))

    def __eq__(self, other: object) -> bool:  # 1 and True are equal, and not the same argument
        if not isinstance(other, CallForm) or (self.spec, self.learned) != (other.spec, other.learned):
            return False
        return _typed(self.leaves) == _typed(other.leaves)


def _typed(leaves: tuple[Any, ...]) -> list[tuple[type, Any]]:
    return [(type(leaf), repr(leaf) if isinstance(leaf, float) else leaf) for leaf in leaves]


@dataclass(frozen=True)
class Secret:
    """A secret tensor in a form, by its name in the program.

    Attributes:
        held: the public facts on a tensor that was shared before; None for a plain tensor of Q's.
    """

    name: str
    held: SharedInputSpec | None = None


class Inputs:
    """One call's arguments: `Inputs(x)`, `Inputs(input_ids=ids, attention_mask=sectorch.public(mask))`.

    `secure_model(*args, **kwargs)` makes one of its arguments, and names tensors that are given by place after the
    forward's parameters. `explain`, `diff`, `calibrate`, `program` and `preprocess`, which have arguments of their own,
    take one in place of a tensor.

    Args:
        args, kwargs: of the module's forward: tensors, which are Q's secrets unless marked by `public`; numbers,
            strings, None; and dicts, lists, tuples and dataclasses of them, nested. SharedTensors are secrets that were
            shared before. The shape and dtype of a secret tensor are public. A forward gets it contiguous and without
            gradient, and the caller does not see what the forward writes into it.

    Attributes:
        form: the public form of the call.
        tensors: the secret tensors in their order.

    Raises:
        DtypeError: an argument that is none of these, or no secret tensor among them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        leaves, spec = flatten_tree((args, kwargs))
        found: list[torch.Tensor] = []
        places: list[Any] = []
        names = _names(spec, leaves)
        seen: dict[int, Secret] = {}
        for leaf, name in zip(leaves, names, strict=True):
            if isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, SecretTensor) and (leaf.layout != torch.strided or leaf.is_nested):
                    kind, way = leaf.layout, "x.to_dense()"
                    if leaf.is_nested:
                        kind, way = "ragged rows (torch.nested)", "x.to_padded_tensor(0.0), and a mask of its places"
                    raise DtypeError(f"a secure module takes dense tensors, got one of {kind}; use {way}")
                if id(leaf) not in seen:  # given twice, it is one tensor to the forward as well
                    found.append(leaf)
                    seen[id(leaf)] = Secret(name, SharedInputSpec.of(leaf) if isinstance(leaf, SharedTensor) else None)
                places.append(seen[id(leaf)])
            elif isinstance(leaf, (Public, *_CONSTANTS)):
                places.append(leaf)
            else:
                kinds = "torch tensors, numbers, strings, and dicts, lists, tuples and dataclasses of them"
                way = "; torch.from_numpy(x) makes a tensor of it" if type(leaf).__module__ == "numpy" else ""
                if isinstance(leaf, np.generic):
                    way = "; x.item() is its number, which is public, torch.as_tensor(x) a tensor"
                raise DtypeError(f"a secure module takes {kinds}; got {type(leaf).__name__}{way}")
        if not found:
            given = ", ".join(dict.fromkeys(type(v).__name__ for v in (*args, *kwargs.values()))) or "no argument"
            raise DtypeError(
                f"a secure module takes at least one torch tensor that is secret, got {given}; torch.as_tensor(x) "
                f"makes one of numbers"
            )
        known = any(isinstance(leaf, SharedTensor) for leaf in found)
        self.form, self.tensors = CallForm(spec, tuple(places), 0 if known else None), tuple(found)

    @classmethod
    def of(cls, x: Any) -> Inputs:
        """x itself if it is an `Inputs`, else a call with x as the only argument."""
        return x if isinstance(x, Inputs) else cls(x)

    @classmethod
    def called_with(cls, args: tuple, kwargs: dict[str, Any]) -> Inputs:
        """A call with these arguments; an `Inputs` that is the only argument is the call itself."""
        return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Inputs) else cls(*args, **kwargs)

    def named_by(self, forward: Any) -> Inputs:
        """The same call, where tensors that are given by place have the names of the forward's parameters.

        A single tensor and nothing else stays "x". Tensors in the forward's `*args`, and all tensors of a forward
        without a signature, keep their names.
        """
        if self.single or not pytree.tree_unflatten(list(self.form.leaves), self.form.spec)[0]:
            return self
        try:
            parameters = list(inspect.signature(forward).parameters.values())
        except (TypeError, ValueError):
            return self
        by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names: dict[str, str] = {}
        for leaf, name in zip(self.form.leaves, _names(self.form.spec, list(self.form.leaves), by_place), strict=True):
            if isinstance(leaf, Secret):
                names.setdefault(leaf.name, name)
        swap = lambda leaf: dataclasses.replace(leaf, name=names[leaf.name]) if isinstance(leaf, Secret) else leaf
        return self._in_form(dataclasses.replace(self.form, leaves=tuple(map(swap, self.form.leaves))))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Inputs:
        """A call of the same form with other tensors."""
        return self._in_form(self.form, tensors)

    def _in_form(self, form: CallForm, tensors: Sequence[torch.Tensor] | None = None) -> Inputs:
        made = object.__new__(Inputs)
        made.form, made.tensors = form, self.tensors if tensors is None else tuple(tensors)
        return made

    def arguments(self, forward: Any) -> tuple[Any, list[str]] | None:
        """The values of the forward's parameters, and the names of the secret tensors in the order of the parameters.

        Two calls with the same values, by place or by name, have equal arguments. The result is None where the forward
        takes no such call, or has no signature.
        """
        args, kwargs = pytree.tree_unflatten(list(self.form.leaves), self.form.spec)
        try:
            bound = inspect.signature(forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return None
        leaves, spec = pytree.tree_flatten(bound)
        names = list(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Secret)))
        place = lambda leaf: Secret(str(names.index(leaf.name)), leaf.held) if isinstance(leaf, Secret) else leaf
        return CallForm(spec, tuple(map(place, leaves)), self.form.learned), names

    def as_in(self, other: Inputs, names: list[str], others: list[str]) -> Inputs:
        """These tensors in the form of another call, where the tensor names[i] takes the place of others[i]."""
        own = dict(zip(self.names, self.tensors, strict=True))
        mine = dict(zip(others, names, strict=True))
        return other.with_tensors([own[mine[name]] for name in other.names])

    def describing_shares(self) -> Inputs:
        """The same call with the public facts on its tensors, after they were shared."""
        pairs = zip(self.names, self.tensors, strict=True)
        held = {name: SharedInputSpec.of(x) for name, x in pairs if isinstance(x, SharedTensor)}
        return self.with_shared_inputs(held, 0 if held else None)

    def as_plain_call(self) -> Inputs:
        """The same call on plain tensors with revealed results, for which the module does the same."""
        return self.with_shared_inputs({}, None)

    def with_shared_inputs(self, held: Mapping[str, SharedInputSpec], learned: int | None) -> Inputs:
        """The same call, where the named tensors are in shares, and Q learns so many results."""
        swap = lambda leaf: Secret(leaf.name, held.get(leaf.name)) if isinstance(leaf, Secret) else leaf
        return self._in_form(CallForm(self.form.spec, tuple(map(swap, self.form.leaves)), learned))

    def retaining_results(self, learned: int = 0) -> Inputs:
        """The same call with results that stay in shares, apart from the first ones, which Q learns."""
        return self._in_form(dataclasses.replace(self.form, learned=learned))

    asked = renamed_attribute("asked", "as_plain_call")
    having = renamed_attribute("having", "with_tensors")
    holding = renamed_attribute("holding", "with_shared_inputs")
    known = renamed_attribute("known", "describing_shares")
    staying = renamed_attribute("staying", "retaining_results")

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(shape)} {dtype}" for name, (shape, dtype) in self.described.items())
        return f"Inputs({shapes})"

    def called(self, f: Any, tensors: Sequence[Any] | None = None) -> Any:
        """f(*args, **kwargs) with these tensors in place of the secret ones."""
        secret = dict(zip(self.names, self.tensors if tensors is None else tensors, strict=True))
        # A forward may write into its arguments.
        known = {id(leaf): leaf.value.clone() for leaf in self.form.leaves if isinstance(leaf, Public)}
        given = lambda leaf: secret[leaf.name] if isinstance(leaf, Secret) else known.get(id(leaf), leaf)
        leaves = [given(leaf) for leaf in self.form.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.form.spec)
        try:
            return f(*args, **kwargs)
        except StopIteration as error:
            raise ArgumentError(
                "the forward takes next() of what has no more, as next(module.parameters()) is of a module without "
                "parameters; name the dtype or the device, or take those of the input"
            ) from error

    @property
    def _secrets(self) -> list[Secret]:
        return list(dict.fromkeys(leaf for leaf in self.form.leaves if isinstance(leaf, Secret)))

    @property
    def names(self) -> list[str]:
        """The names of the secret tensors in the program."""
        return [secret.name for secret in self._secrets]

    @property
    def held(self) -> list[SharedInputSpec | None]:
        """The public facts on the secret tensors that were shared before; None for the others."""
        return [secret.held for secret in self._secrets]

    @property
    def public(self) -> list[torch.Tensor]:
        """The tensors that are marked public."""
        return [leaf.value for leaf in self.form.leaves if isinstance(leaf, Public)]

    @property
    def single(self) -> bool:
        """Whether the call has one tensor and nothing else."""
        return self.form == _SINGLE

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_shape, self.tensors))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(map(dtype_of, self.tensors))

    @property
    def described(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each secret tensor by name."""
        return dict(zip(self.names, zip(self.shapes, self.dtypes, strict=True), strict=True))

    @property
    def key(self) -> tuple:
        """What determines the program: form, shapes and dtypes."""
        return self.form, self.shapes, self.dtypes

    @property
    def row(self) -> tuple:
        """The key without the number of rows."""
        return self.form, tuple(shape[1:] for shape in self.shapes), self.dtypes

    @property
    def rows(self) -> int | None:
        """The first dimension of all tensors; None where they share none, or where an argument is a public tensor."""
        sizes = {shape[0] if shape else None for shape in self.shapes}
        return sizes.pop() if len(sizes) == 1 and not self.public else None

    def meta(self, rows: int | None = None) -> Inputs:
        """The same call without content, on the meta device, with another number of rows if one is named."""
        made = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            made.append(torch.empty(shape if rows is None else (rows, *shape[1:]), dtype=dtype, device="meta"))
        return self.with_tensors(made)

    def wide(self) -> Inputs:
        """The same call with its floating-point tensors in float64."""
        return self.with_tensors([x.to(torch.float64) if x.is_floating_point() else x for x in self.tensors])

    def split(self, rows: int) -> tuple[Inputs, ...]:
        """Pieces of so many rows, and one of the rest."""
        return tuple(self.with_tensors(part) for part in zip(*(x.split(rows) for x in self.tensors), strict=True))

    def cycled(self, rows: int) -> Inputs:
        """The call with so many rows, which repeat from the first one if it has fewer."""
        return self.with_tensors([x[torch.arange(rows, device=x.device) % x.shape[0]] for x in self.tensors])

    @property
    def in_shares(self) -> bool:
        """Whether results stay in shares."""
        return self.form.learned is not None

    @property
    def learned(self) -> int | None:
        """The number of results that Q learns; see `CallForm`."""
        return self.form.learned


def flatten_tree(value: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure of a tree. Dataclasses among the leaves are registered as containers."""
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, (Public, type))}
    if not unknown:
        return leaves, spec
    for kind in unknown:
        pytree.register_dataclass(kind)
    return flatten_tree(value)


def refuse_results(results: Any) -> None:
    """Raise `UnsupportedOpError` for a result that cannot be revealed: a complex one, or one in an unknown object."""
    for leaf in flatten_tree(results)[0]:
        if isinstance(leaf, SecretTensor) and leaf.is_complex():
            raise UnsupportedOpError("the model gives a complex tensor: let it give torch.view_as_real(y), or y.abs()")
        if not isinstance(leaf, torch.Tensor) and _holds_secret(leaf, {}):
            raise UnsupportedOpError(
                f"the model gives a tensor inside {type(leaf).__name__}, in which results are not revealed: let it "
                f"give tensors, and dicts, lists, tuples and dataclasses of them"
            )


_NO_CONTAINER = (bool, int, float, complex, str, bytes, type(None), type, np.ndarray, nn.Module)


def _holds_secret(value: Any, seen: dict[int, Any]) -> bool:
    """Whether a value holds a secret tensor, or is an iterator, which may give one."""
    if isinstance(value, (SecretTensor, Iterator)):
        return True
    if isinstance(value, (torch.Tensor, *_NO_CONTAINER)) or id(value) in seen:
        return False
    seen[id(value)] = value
    parts: list[Any] = [getattr(value, "__dict__", None)]
    parts += [getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)]
    if isinstance(value, Mapping):
        parts += dict.values(value) if isinstance(value, dict) else value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque, ValuesView)):
        parts += tuple.__iter__(value) if isinstance(value, tuple) else value
    elif isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    elif isinstance(value, (FunctionType, MethodType)):
        parts += [*inspect.getclosurevars(value).nonlocals.values(), getattr(value, "__self__", None)]
    return any(_holds_secret(part, seen) for part in parts)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _names(spec: Any, leaves: list[Any], by_place: Sequence[str] = ()) -> list[str]:
    """For each leaf an identifier, made of its keyword or place.

    Args:
        by_place: the names of the parameters that take the positional arguments, as far as they are known.
    """
    paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, spec))[0]]
    names: list[str] = []
    for path in paths:
        steps = [str(getattr(step, "key", getattr(step, "name", getattr(step, "idx", "")))) for step in path[1:]]
        place: int | None = getattr(path[1], "idx", None)  # of a keyword argument this is None
        if place is not None and place < len(by_place):
            steps[0] = by_place[place]
        name = re.sub(r"\W+", "_", "_".join(steps)).strip("_").lower()
        if not name[:1].isalpha():
            name = f"x{name.removeprefix('0')}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shares.shape) if isinstance(x, SharedTensor) else tuple(x.shape)


_SINGLE = Inputs(torch.empty(0, device="meta")).form
