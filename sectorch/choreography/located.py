"""Located values: tensors that only some parties hold, and the functions that compute with them (`leaf`)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch

from ..errors import MisplacedValueError, SecretBranchError, SessionMismatchError
from .roles import Party, Phase
from .shapes import ArgumentSlot, PartialCall

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
