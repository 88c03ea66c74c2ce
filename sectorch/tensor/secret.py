"""SecretTensor, the base class of tensors with secret content: a shape and a dtype, but no storage.

`__torch_function__` hands every torch call to `dispatch.call`; `__torch_dispatch__` refuses what bypasses it. A plain
subclass of `torch.Tensor` would run `relu` on raw shares without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import numpy as np
import torch

from ..choreography import Located, Net, Party, Phase, leaf
from ..choreography.located import run_in
from ..config import NEEDS, WeightNeed
from ..config import Scheme as Scheme
from ..errors import FixedPointRangeError, SecretAccessError, UnsupportedOpError
from ..ring import check_encodable, encode
from ..session import Session

_dispatch: Callable[..., Any]


def set_dispatch(call: Callable) -> None:
    """Called by `dispatch.py` when it is imported: it needs the subclasses of SecretTensor."""
    global _dispatch
    _dispatch = call


def _public(x: Any) -> Any:
    """An operand of a numpy function as torch takes it: an array as a tensor, a scalar as a Python number."""
    if isinstance(x, np.generic):
        return x.item()
    return torch.as_tensor(x) if isinstance(x, np.ndarray) else x


def dtype_of(x: Any) -> torch.dtype:
    """The dtype that a secret tensor has for torch."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype


def bypassed_dispatch(func: Any) -> str:
    """The text of an error for code whose calls do not reach the dispatch."""
    name = str(getattr(func, "__name__", func)).partition(".")[0].strip("_")
    asked = "a Python number was asked for" if name == "local_scalar_dense" else f"'{name}' was called"
    return (
        f"{asked} on the content of a secret tensor, by code that does not pass its calls on to Python (torch.func, "
        f"torch.jit, C++ of a library); nothing was computed. Call torch's functions on the tensor itself: "
        f"sectorch.supported_ops() lists what works"
    )


class SecretTensor(torch.Tensor):
    """The base of SharedTensor and PrivateTensor. Its content can be reached by declared operations alone."""

    session: Session
    party: Party
    scheme: Scheme
    passes_as: type | None = None
    """The value of `x.__class__` inside `compile_mode.as_plain`."""
    differentiable = False
    """Whether autograd records it. Such a class takes the calls in which its tensors meet others."""

    def __init__(self, *_args, **_kwargs):
        super().__init__()

    @property
    def __class__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.passes_as or type(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        called: Any = cls._handle_call
        if torch.compiler.is_dynamo_compiling():  # torch.compile does not follow the call
            called = torch.compiler.disable(called)
        return called(func, types, args, kwargs or {})

    @classmethod
    def _handle_call(cls, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if any(getattr(kind, "differentiable", False) for kind in types):
            return NotImplemented
        return _dispatch(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise UnsupportedOpError(bypassed_dispatch(func))

    def on_meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype without content, on which torch itself computes what a call gives."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Run torch's function of the same name, as in `array + secret`, with arrays as public tensors."""
        computed = getattr(torch, "pow" if ufunc is np.power else str(ufunc.__name__), None)
        if computed is None or method != "__call__" or kwargs:
            raise UnsupportedOpError(
                f"numpy.{ufunc.__name__} of a secret tensor: use torch's, or torch.from_numpy(array)"
            )
        return computed(*(_public(x) for x in inputs))

    def __format__(self, spec: str) -> str:
        """`repr` in an f-string. A format for numbers would need the content and is refused."""
        return repr(self) if not spec else super().__format__(spec)

    def __dir__(self) -> list[str]:
        """The names for completion in a notebook, without a call of torch."""
        return sorted({*dir(type(self)), *self.__dict__})

    def __reduce_ex__(self, protocol) -> NoReturn:
        raise SecretAccessError(
            f"a {type(self).__name__} cannot be pickled, copied or saved: it would carry secrets; .reveal() gives the "
            f"values to who may know them, and sectorch.Checkpoints keeps what nobody may"
        )

    def __deepcopy__(self, memo) -> NoReturn:
        self.__reduce_ex__(2)

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)


# PrivateTensor: a tensor that one answering party owns, such as a model's weight.


class PrivateTensor(SecretTensor):
    """A plain tensor that one answering party owns: a model's weight.

    Operations among private tensors of one party run at that party, on floating-point numbers, once a session. An
    operation with a SharedTensor runs a protocol. A model's own tensors cannot be changed in place; a `clone` can.

    Attributes:
        value: the content, at its owner.
        label: its name in errors.
        derived: a cache of what was computed from the value: encodings, its masked form, checks, other weights. Copies
            share it.
        lasting: whether results that are derived from it are cached, too.
        streamed: whether it is too large for its encoding and its mask to be kept (`mpc/star/linear.py`).
        is_inverse: whether it was computed by a quotient or a power, and so may be small beside the other factor.
        origin: for a view, the tensor that it is a view of, and the view as a function.
        copied: whether it is a copy with memory of its own.
        family: the list of all tensors that share the memory of a copy.
        stands_for: the plain tensors of the model that this one replaces.
    """

    value: Located
    label: str
    derived: dict[Any, Any]
    lasting: bool
    streamed: bool
    is_inverse: bool
    origin: tuple[PrivateTensor, Callable] | None
    copied: bool
    family: list[ref] | None
    stands_for: tuple[ref, ...]
    _is_param = False
    """Whether it stands for an nn.Parameter of a model, which isinstance(x, nn.Parameter) then confirms."""

    @staticmethod
    def __new__(cls, value: Located, session: Session, party: Party, scheme: Scheme, dtype, name: str = "a weight"):
        self = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=dtype, device=session.device)
        self.value = value
        self.session = session
        self.party = party
        self.scheme = scheme
        self.label = name
        self.derived = {}
        self.lasting = False
        self.streamed = False
        self.is_inverse = False
        self.origin = None
        self.copied = False
        self.family = None
        self.stands_for = ()
        return self

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"PrivateTensor(shape={tuple(self.shape)}, dtype={self.dtype}, at {self.party})"

    def encoded(self, scale_bits: int, limit: float | None = None) -> Located:
        """The tensor as ring elements, at its owner.

        Raises:
            FixedPointRangeError: at the owner: it does not fit the ring, or as a summand is not below the limit.
        """
        setup, how = self.session.setup(self.party), ("encoded", scale_bits, limit)
        with setup.lock, run_in(setup):
            if how not in self.derived:
                self.derived[how] = _encoded(self.value, scale_bits, self.scheme.frac_bits, limit, self.label)
        return self.derived[how]

    @property
    def weight_bits(self) -> int:
        """Fraction bits as an operand: those of the scheme, or none for whole numbers."""
        return self.scheme.frac_bits if dtype_of(self).is_floating_point else 0

    def become(self, value: Located, derived: dict[Any, Any] | None = None) -> None:
        """Replace the value by another of the same shape, as an operation in place does, and forget what was derived.

        Args:
            derived: the cache of the new value, if it is a lasting one.
        """
        self.value, self.derived, self.lasting = value, {} if derived is None else derived, derived is not None

    def weight(self) -> Any:
        """The operand of linear maps at `weight_bits`. Its masked form is sent to S on first use, and kept.

        The masked form of a view (a transpose, a slice) is a view of the weight's masked form; nothing is sent.
        """
        setup, how = self.session.setup(self.party), ("masked", self.weight_bits)
        with setup.lock:  # of several threads one masks and sends it
            if how not in self.derived:
                self.derived[how] = self._masked(setup)
        return self.derived[how]

    def _masked(self, setup: Net) -> Any:
        backend = self.session.backend(setup, self.scheme)
        if self.origin is None:
            if self.streamed:
                return backend.streamed(self.value, EncodedNumbers(self.weight_bits))
            return backend.weight(self.encoded(self.weight_bits))
        parent, view = self.origin
        return backend.viewed(parent.weight(), view)


@dataclass(frozen=True)
class EncodedNumbers:
    """Encodes numbers that were checked before, with these fraction bits."""

    scale_bits: int

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return encode(value, self.scale_bits)


def _encoded_shapes(value: torch.Tensor, scale_bits: int, frac_bits: int, _limit: Any, label: str) -> torch.Tensor:
    check_encodable(value, frac_bits, label)
    return encode(value, scale_bits)


@leaf(shapes=_encoded_shapes)
def _encoded(value: torch.Tensor, scale_bits: int, frac_bits: int, limit: float | None, label: str) -> torch.Tensor:
    needs = NEEDS.get()
    if needs is not None:
        needs.append(_need(value, label, limit is not None))
        return torch.zeros_like(value, dtype=torch.int64)
    check_encodable(value, frac_bits, label)
    if limit is not None and value.numel() and float(value.to(torch.float64).abs().max()) >= limit:
        need = _need(value, label, True)
        way = Scheme(frac_bits, limit_bits=math.frexp(limit)[1] - 1).way_out([need])
        error = FixedPointRangeError(
            f"{label} reaches magnitude {need.summand:.6g} as a summand; activations are below {limit:g} at "
            f"{frac_bits} fraction bits; {way}"
        )
        error.needs = (need,)
        raise error
    return encode(value, scale_bits)


def _need(value: torch.Tensor, label: str, added: bool) -> WeightNeed:
    largest = float(value.to(torch.float64).abs().max()) if value.numel() else 0.0
    return WeightNeed(label, summand=largest) if added else WeightNeed(label, total=largest)


def private_tensor(
    x: torch.Tensor, session: Session, party: Party, scheme: Scheme, name: str, dtype: torch.dtype | None = None
) -> PrivateTensor:
    """A's own tensor, checked to fit the fixed-point range. Nothing is sent.

    Args:
        name: its name in errors.
        dtype: its dtype for torch; that of x by default.

    Raises:
        DtypeError, NonFiniteError, FixedPointRangeError: naming the tensor.
    """
    try:
        check_encodable(x, scheme.frac_bits, name)
    except FixedPointRangeError as error:
        need = _need(x, name, False)
        size = x.detach().abs().to(torch.float64)  # in most layers the weights of an output, which sum up, are a row
        sums = (
            [float(size.transpose(0, d).flatten(1).sum(1).max()) for d in range(min(2, x.dim()))] if x.dim() > 1 else []
        )
        way = scheme.way_out([need._replace(total=max([need.total, *sums]))])
        named = FixedPointRangeError(f"{str(error).partition('; ')[0]}; {way}")
        named.needs = (need,)
        raise named from None
    setup = session.setup(party)
    return PrivateTensor(
        setup.own(party, x.detach(), Phase.SETUP, name), session, party, scheme, dtype or x.dtype, name
    )
