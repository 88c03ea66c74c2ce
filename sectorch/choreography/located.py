"""Located values: tensors that only some parties hold, and the functions that compute with them (`leaf`)."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, FunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
import torch._compile
import torch._decomp

from ..errors import MisplacedValueError, SecretBranchError, SessionMismatchError
from .roles import Party, Phase

# Functions on shapes: a step whose operands are held elsewhere, or by nobody in a dry run, runs on meta tensors.
#
# torch's kernels for meta tensors are written in Python and take 0.1 ms for a sum of two. A trace has thousands of such
# steps, most of them many times, so `run_on_shapes` remembers their results.


# Functions with some of their arguments: the step of a call f(x, 2, dim=1) has only x as an operand.


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """Stands for the operand of this number among the arguments of a `PartialCall`."""

    number: int


@dataclass(frozen=True, slots=True)
class PartialCall:
    """A function with its arguments, in which an `ArgumentSlot` stands for each operand."""

    f: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return getattr(self.f, "__name__", type(self.f).__name__)

    @property
    def shapes(self) -> Callable:
        return PartialCall(getattr(self.f, "shapes", self.f), self.args, self.kwargs)

    def __call__(self, *values: Any) -> Any:
        if not self.kwargs:
            return self.f(*fill_arguments(self.args, values))
        return self.f(
            *fill_arguments(self.args, values), **{k: fill_arguments(v, values) for k, v in self.kwargs.items()}
        )


def fill_arguments(value: Any, values: Sequence[Any]) -> Any:
    """An argument of a `PartialCall` with the operands in place of their slots."""
    kind = type(value)
    if kind is ArgumentSlot:
        return values[value.number]
    return kind([fill_arguments(v, values) for v in value]) if kind is tuple or kind is list else value


# torch's kernels for meta tensors, without an import of torch's compiler.
#
# These kernels are Python functions that torch hides from its compiler. To hide one it imports the compiler, which
# takes two seconds: half of the time of a process up to its first secure call. While the compiler is not imported,
# nothing is compiled, and nothing needs to be hidden. Once it is imported, the kernels behave as torch defines them.


_HIDDEN = "__dynamo_disable"
"""The attribute of a function in which torch keeps the same function hidden from its compiler."""
_hide: Callable[[Callable], Callable] = getattr(torch._compile, "_disable_dynamo", lambda f: f)
_HIDES = getattr(_hide(lambda: None), "__code__", None)
"""The code of every function that torch has hidden and that imports its compiler."""


def spare_the_compiler() -> None:
    """Let kernels run without an import of the compiler. Where torch keeps its kernels elsewhere, nothing changes."""
    seen: set[int] = set()
    for table in getattr(torch._decomp, "global_decomposition_table", {}).values():
        for kernel in table.values():
            spare(kernel, seen)


def spare(f: Callable, seen: set[int] | None = None) -> None:
    """As `spare_the_compiler`, for one function that torch hides, or whose wrappers or parts it hides."""
    for hidden in _hidden_in(f, set() if seen is None else seen):
        if not hasattr(hidden, _HIDDEN):
            setattr(hidden, _HIDDEN, _hidden_later(hidden))


def _hidden_later(f: Callable) -> Callable:
    """f, which is hidden when it first runs after the compiler was imported."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
            return f(*args, **kwargs)
        vars(f).pop(_HIDDEN, None)
        return _hide(f)(*args, **kwargs)

    return call


def _hidden_in(f: Any, seen: set[int]) -> Iterator[FunctionType]:
    """The functions that torch hides among a function and what it calls through its wrappers."""
    if not isinstance(f, FunctionType) or id(f) in seen:
        return
    seen.add(id(f))
    inner = [cell_content(cell) for cell in f.__closure__ or ()]
    if f.__code__ is _HIDES:
        yield from (g for g in inner if isinstance(g, FunctionType))
    for g in (*inner, getattr(f, "__wrapped__", None)):
        yield from _hidden_in(g, seen)


def cell_content(cell: CellType, empty: Any = None) -> Any:
    """The content of a closure's variable; `empty` where it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


spare_the_compiler()

# Shapes of results, which are remembered by function and operands.

MOST = 1 << 13
"""The most results that are remembered."""
_KEPT: dict[tuple, tuple[bool, tuple[_Like, ...]]] = {}


class _Like(NamedTuple):
    """Shape, strides and type of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> _Like:
        return cls(x.shape, x.stride(), x.dtype)

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


FORMS: dict[type, Callable[[Any], Any]] = {}
"""By type, for values that hold tensors (ciphertexts, say): the function that gives a value without its content."""


def shape_of(value: Any) -> Any:
    """A tensor's shape and dtype as a meta tensor, a value of `FORMS` without content; anything else as it is."""
    if (form := FORMS.get(type(value))) is not None:
        return form(value)
    return fresh_shape(value) if isinstance(value, torch.Tensor) and not value.is_meta else value


def fresh_shape(x: torch.Tensor) -> torch.Tensor:
    """Another meta tensor of the same shape and dtype."""
    return _Like.of(x).tensor()


def run_on_shapes(f: Callable, values: Sequence[Any]) -> Any:
    """f(*values) on meta tensors. A result of a function of torch or of a module is remembered.

    The result is always a new tensor, also where f gives a view or its argument.
    """
    key: Any = (_key(f), *[_key_of(v) if type(v) is torch.Tensor else _key(v) for v in values])
    if None in key:
        return f(*values)
    if (known := _KEPT.get(key)) is not None:
        single, parts = known
        return parts[0].tensor() if single else tuple(part.tensor() for part in parts)
    result = f(*values)
    single = type(result) is not tuple
    made = (result,) if single else result
    if all(type(part) is torch.Tensor and part.is_meta for part in made):
        if len(_KEPT) >= MOST:
            _KEPT.clear()
        _KEPT[key] = single, tuple(map(_Like.of, made))
    return result


_NUMBERS = frozenset((int, bool, float, str, type(None), torch.dtype))


def _key_of(x: torch.Tensor) -> Any:
    return (x.shape, x.stride(), x.dtype) if x.is_meta else None


def _key(value: Any) -> Any:
    """What determines the result's shape of a function or an argument; None where that is not known."""
    kind = type(value)
    if kind is torch.Tensor:
        return _key_of(value)
    if kind in _NUMBERS:
        return kind, value  # 1 and True are the same key, and not the same index
    if kind in (tuple, list, torch.Size):
        parts = tuple(map(_key, value))
        return None if None in parts else (kind, parts)
    if kind is slice:
        return _key((slice.__name__, value.start, value.stop, value.step))
    if kind is PartialCall:
        return _key((value.f, value.args, tuple(value.kwargs.items())))
    if kind in (BuiltinFunctionType, MethodDescriptorType, ArgumentSlot):
        return value
    named = kind is FunctionType and value.__closure__ is None and "<locals>" not in value.__qualname__
    return value if named else None


_RUNNING: ContextVar[Any] = ContextVar("the running choreography", default=None)
"""The innermost running `Net`, or None."""


@contextmanager
def run_in(net: Any) -> Iterator[None]:
    """Inside, located values compute in this `Net`."""
    token = _RUNNING.set(net)
    try:
        yield
    finally:
        _RUNNING.reset(token)


innermost = _RUNNING.get
"""The innermost running `Net`, or None."""


def current() -> Any:
    """The innermost running `Net`.

    Raises:
        MisplacedValueError: none is running.
    """
    net = innermost()
    if net is None:
        raise MisplacedValueError(
            "located values compute inside a protocol or a call: `with session.call(party) as net`"
        )
    return net


class Located:
    """A tensor that only its owners hold. Every party knows its shape.

    Operators, `torch` functions, methods and `leaf` functions compute at the parties that hold all operands, and give a
    located value there. Plain numbers and tensors among the operands are public. `send` moves the value. Operations
    that need the content in Python (a branch, an index, a float) are refused.
    """

    __slots__ = ("_origin", "_session", "_value", "owners", "phase", "rounds", "slot")
    _origin: Any
    """The inputs that it was computed from, where they are recorded; see `net.Origins`."""
    made_by = "net.own(party, tensor) brings a party's tensor in"

    def __init__(
        self, value, owners: frozenset[Party], phase: Phase, rounds: Mapping[Party, int], session: bytes,
        slot: Any = None,
    ):  # fmt: skip
        self._value = value
        self.owners = owners
        self.phase = phase
        self.rounds = rounds
        self.slot = slot
        self._session = session

    @property
    def shape(self) -> torch.Size:
        """The shape of a tensor; other values (a key, a prepared matrix) have no dimensions."""
        return getattr(self._value, "shape", torch.Size())

    @property
    def dtype(self) -> torch.dtype:
        return self._value.dtype

    def __repr__(self) -> str:
        names = ", ".join(sorted(p.name for p in self.owners))
        return f"Located({tuple(self.shape)} at {names}, {self.phase.name.lower()})"

    def at(self, who: str | Party) -> Located:
        """The same value at one owner, or at the owners of one role.

        Where a party plays another role than its own in the running call, a role is the party that plays it there.
        """
        net = None if isinstance(who, Party) else innermost()
        player = None if net is None else net.cast.parties.get(who)
        who = player if player is not None and player.role != who else who
        meant = [p for p in self.owners if p.role == who or p == who]
        if len(meant) == len(self.owners):
            return self
        if not meant:
            holding = ", ".join(sorted(p.name for p in self.owners))
            raise MisplacedValueError(
                f"{who} does not hold a value of shape {tuple(self.shape)}, which is at {holding}"
            )
        found = Located(self._value, frozenset(meant), self.phase, self.rounds, self._session, self.slot)
        if (origin := getattr(self, "_origin", None)) is not None:
            found._origin = origin
        return found

    def send(self, src: Party, dst: Party, label: str) -> Located:
        """Send it from `src` to `dst`; both hold the result. See `choreography.Net.send`."""
        return current().send(self, src, dst, label)

    @classmethod
    def __torch_function__(cls, f: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return compute(f, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable:
        method = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if not callable(method):
            halves = "; two halves of a shared value are Shares(at_A, at_S)" if name in ("A", "S") else ""
            raise AttributeError(
                f"a located value has no '{name}': it is a tensor of which only its owners have more{halves}"
            )
        return functools.partial(compute, method, self)

    def _refuse(self, *_, **__):
        raise SecretBranchError(
            "a located value cannot steer Python control flow, be unpacked or written into: most do not hold it. "
            "Compute with it as with a tensor (torch.cat, torch.where), or as arithmetic (sectorch.mpc.star.select)"
        )

    __bool__ = __len__ = __iter__ = __contains__ = __index__ = __float__ = __int__ = __array__ = __setitem__ = _refuse
    __array_ufunc__ = None  # operators of numpy's arrays defer to this class
    __hash__ = object.__hash__

    if TYPE_CHECKING:  # the operators that the table below sets

        def _operator(self, *others: Any) -> Located: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __neg__ = __xor__ = __and__ = __or__ = __invert__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rxor__ = __rand__ = __ror__ = __abs__ = __lshift__ = __rshift__ = _operator
        __getitem__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = __truediv__ = __floordiv__ = __mod__ = _operator

    def __reduce__(self):
        raise SecretBranchError("a located value cannot be copied or pickled")


def dependence(values: Iterable[Any], base: Phase, session: bytes) -> tuple[Phase, Mapping[Party, int]]:
    """The latest phase of values, at least `base`, and the round of this phase at which each party has them all.

    Raises:
        SessionMismatchError: a value is of another session.
    """
    phase, rounds = base, {}
    for value in values:
        if type(value) is Located:
            if value._session != session:
                raise SessionMismatchError("values of two sessions cannot meet: their shares have different keys")
            if value.phase > phase:
                phase, rounds = value.phase, value.rounds
            elif value.phase == phase and value.rounds and value.rounds != rounds:
                rounds = _latest(rounds, value.rounds) if rounds else value.rounds
    return phase, rounds


def _latest(one: Mapping[Party, int], other: Mapping[Party, int]) -> Mapping[Party, int]:
    found = dict(one)
    for party, number in other.items():
        if number > found.get(party, 0):
            found[party] = number
    return found


def _operator(f: Callable, swapped: bool = False) -> Callable:
    """An operator of located values. Operators of two located values need none of the checks of `compute`."""
    if f in (operator.neg, operator.invert, operator.abs):
        return lambda x: current().compute(f, (x,))
    if swapped:
        return lambda x, y: compute(f, _tensor(y), x)
    return lambda x, y: current().compute(f, (x, y)) if type(y) is Located else compute(f, x, _tensor(y))


def _tensor(x: Any) -> Any:
    return torch.from_numpy(x) if type(x) is np.ndarray else x


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "matmul": operator.matmul, "neg": operator.neg,
    "xor": operator.xor, "and": operator.and_, "or": operator.or_, "invert": operator.invert, "abs": operator.abs,
    "lshift": operator.lshift, "rshift": operator.rshift, "getitem": operator.getitem, "pow": operator.pow,
    "truediv": operator.truediv, "floordiv": operator.floordiv, "mod": operator.mod,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_KNOWN = frozenset(_OPERATORS.values())
for _name, _f in _OPERATORS.items():
    setattr(Located, f"__{_name}__", _operator(_f))
    if _name in ("add", "sub", "mul", "matmul", "xor", "and", "or", "truediv", "floordiv", "mod"):
        setattr(Located, f"__r{_name}__", _operator(_f, swapped=True))


def compute(f: Callable, *args: Any, **kwargs: Any) -> Any:
    """f(*args, **kwargs) at the parties that hold all located operands, which may also stand in lists and tuples.

    f must be a pure function of its arguments, since every owner computes it and all must get the same result. It must
    not change its arguments. A tuple result becomes a tuple of located values. f's attribute `shapes`, if it has one,
    computes the result's shapes from the operands' shapes, as meta tensors.

    Raises:
        MisplacedValueError: no party holds all operands, or no choreography is running; raised at every party.
        SecretBranchError: f changes an operand in place.
    """
    f = getattr(f, "kernel", f)
    name, changes = _name_of(getattr(f, "__name__", ""))
    if (changes and not _is_operator(f)) or "out" in kwargs or kwargs.get("inplace"):
        raise SecretBranchError(f"{name} changes a tensor in place; a located value stays what it is")
    if name in _READS and f in (getattr(torch.Tensor, name, None), getattr(torch, name, None)):
        raise SecretBranchError(f"{name} asks for the content of a located value; it is for `net.read`, at one party")
    for a in args:
        if (type(a) is tuple or type(a) is list) and _holds_tensors(a):
            break
    else:
        if not kwargs:
            return current().compute(f, args)
    found: list[Any] = []
    places = _places(args, found), {k: _places(v, found) for k, v in kwargs.items()}
    return current().compute(PartialCall(f, *places), tuple(found))


_READS = frozenset(("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "data_ptr", "untyped_storage"))
_WRITES = frozenset(("setitem", "delitem", "batch_norm", "instance_norm"))


@functools.lru_cache(1 << 10)
def _name_of(name: str) -> tuple[str, bool]:
    """A function's name without overload, and whether by its name it writes into an argument."""
    name = name.split(".")[0]
    bare = name.strip("_")
    in_place = name.endswith("_") and not name.endswith("__")
    return name, in_place or bare in _WRITES or (bare[:1] == "i" and bare[1:] in _OPERATORS)


def _is_operator(f: Callable) -> bool:
    return isinstance(f, BuiltinFunctionType) and f in _KNOWN


def _holds_tensors(values: tuple | list) -> bool:
    return any(
        isinstance(v, (Located, torch.Tensor)) or (type(v) in (tuple, list) and _holds_tensors(v)) for v in values
    )


def _places(value: Any, found: list[Any]) -> Any:
    if isinstance(value, (Located, torch.Tensor)):
        found.append(value)
        return ArgumentSlot(len(found) - 1)
    if type(value) in (tuple, list) and _holds_tensors(value):
        return type(value)([_places(v, found) for v in value])
    return value


F = TypeVar("F", bound=Callable)


def with_shapes(shapes: Callable) -> Callable[[F], F]:
    """Decorate a function of steps with another one that computes the result's shapes from meta operands."""

    def mark(f: F) -> F:
        vars(f)["shapes"] = shapes
        return f

    return mark


@overload
def leaf(f: Callable, *, shapes: Callable | None = None) -> Callable[..., Any]: ...


@overload
def leaf(*, shapes: Callable | None = None) -> Callable[[Callable], Callable[..., Any]]: ...


def leaf(f: Callable | None = None, *, shapes: Callable | None = None) -> Callable[..., Any]:
    """Decorate a kernel: a function of tensors that, called with located values, is one step of the program.

    Args:
        shapes: as in `with_shapes`, where f itself would take long on meta tensors.
    """
    if f is None:
        return lambda f: leaf(f, shapes=shapes)
    kernel = f if shapes is None else with_shapes(shapes)(f)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        for a in args:
            if type(a) is Located:
                return compute(kernel, *args, **kwargs)
        if any(type(a) is Located for a in _flat((args, tuple(kwargs.values())))):
            return compute(kernel, *args, **kwargs)
        return kernel(*args, **kwargs)

    vars(run)["kernel"] = kernel
    return run


def _flat(value: Any) -> Iterable[Any]:
    if type(value) in (tuple, list):
        for v in value:
            yield from _flat(v)
    else:
        yield value
