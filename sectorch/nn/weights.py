"""Which models `secure` takes, and how their weights become private tensors of their owner."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import fx, nn

from ..choreography import Party, Phase
from ..config import check_limit
from ..errors import (
    ArgumentError,
    DtypeError,
    FixedPointRangeError,
    NonFiniteError,
    SessionMismatchError,
    TrainingModeError,
    UnsupportedOpError,
)
from ..ring import check_encodable
from ..session import Session
from ..tensor import PrivateTensor, Scheme, SecretTensor, SharedTensor, private_tensor
from ..tensor.shared import mask_beyond_range
from .graph import CONSTANT, Trace


def refuse_training(model: nn.Module) -> None:
    """Raise `TrainingModeError`, naming layers, unless the module is in evaluation mode."""
    training = [name or type(model).__name__ for name, layer in model.named_modules() if layer.training]
    if training:
        if "eval" in vars(model):
            raise TrainingModeError(
                "what torch.export's module() gives has no evaluation mode: give the module that was exported, after "
                "model.eval(); secure, save_model and answer take an export that was made so"
            )
        shown = ", ".join(training[:3]) + (", ..." if len(training) > 3 else "")
        raise TrainingModeError(f"the model is in training mode ({shown}); call model.eval() first")


def _made(given: Any) -> str:
    """How to get a module from an object that was given in its place."""
    if isinstance(given, type):
        return f"make one of the class first: {given.__name__}(...)"
    if isinstance(given, dict):
        return "load it into the model: model.load_state_dict(...)"
    if isinstance(given, (list, tuple)):
        return "layers that follow each other are nn.Sequential(*layers); of several models secure each"
    if isinstance(given, (str, bytes)) or hasattr(given, "__fspath__"):
        return "load the model first"
    if callable(given):
        return "a function is the forward of a module of your own, or is called with sectorch.share(x)"
    return "a model of torch, in evaluation mode"


def refuse_scattered(model: nn.Module) -> None:
    """Raise `ArgumentError` for a module that would send its batches to several devices or processes."""
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            place = f"layer '{name}'" if name else "the model"
            raise ArgumentError(
                f"{place} is wrapped in {type(layer).__name__}, which sends batches to other devices; give what it "
                f"wraps: model{'.' * bool(name)}{name}.module"
            )


def refuse_quantised(model: nn.Module) -> None:
    """Raise `UnsupportedOpError` for a module with layers on torch's quantised numbers."""
    for name, layer in model.named_modules():
        floating = any("FloatFunctional" in kind.__name__ for kind in type(layer).__mro__)  # torch's functions alone
        if "quantized" in type(layer).__module__.split(".") and not floating:
            raise UnsupportedOpError(
                f"layer '{name}' ({type(layer).__name__}) is quantised, and computes on whole numbers of torch's own; "
                f"give the model as it was before: fixed-point numbers are what a secure one has anyway"
            )


def check_model(model: Any, device: torch.device) -> None:
    """Raise unless `secure` takes the model on this device."""
    if isinstance(getattr(model, "session", None), Session) or isinstance(model, fx.Interpreter):
        raise ArgumentError("the module is secure already; what is secured, saved and answered with is the plain one")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"secure() takes an nn.Module, got {type(model).__name__}; {_made(model)}")
    for name, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{f'layer {name!r}: ' if name else ''}what torch.jit made has no forward to follow: give the "
                f"nn.Module that it was made from, or what torch.export.export makes of it"
            )
    refuse_scattered(model)
    refuse_quantised(model)
    refuse_training(model)
    tensors = (*model.parameters(), *model.buffers())
    if any(isinstance(t, SecretTensor) for t in tensors):
        raise ArgumentError(
            "the model's weights are in shares, and secure() takes those of one party: reveal them to it into a plain "
            "model, p.reveal(to='A'), or call the shared model as it is"
        )
    if device.type == "meta":  # of an absent party, whose weights are shapes; whole numbers are public, and here
        tensors = tuple(t for t in tensors if t.is_floating_point())
    elsewhere = {str(t.device) for t in tensors} - {str(device)}
    if elsewhere:
        raise ArgumentError(f"the model is on {', '.join(sorted(elsewhere))}, not on {device}: model.to('{device}')")
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if p.is_complex():
            raise DtypeError(
                f"weight '{name}' is complex; keep it as torch.view_as_real(weight), and use "
                f"torch.view_as_complex(self.{name}) in the forward"
            )
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(p, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise UnsupportedOpError(f"parameter '{name}' is uninitialised (a lazy module): run the model once first")


class ModelTensor(NamedTuple):
    """A parameter or buffer of the user's model."""

    dtype: torch.dtype
    tensor: ref[torch.Tensor]


# A copy of a module.
#
# copy.deepcopy takes functions as they are. A hook that is a function inside a method, and stores into `self`, would
# store into the layers of the original, and the copy's forward would find nothing.


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """`copy.deepcopy` of a module, in which hooks and other functions of layers refer to the copy's layers.

    A function finds layers by variables of the function around it, default arguments, bound methods, partials, weak
    references, and lists, tuples and dicts in these. What it finds by global names and classes stays the original.

    Raises:
        ArgumentError: the module holds an object that cannot be copied, such as a generator.
    """
    memo = {} if memo is None else memo
    given = [(id(layer), layer) for layer in model.modules()]
    try:
        made = copy.deepcopy(model, memo)
    except TypeError as error:
        if not str(error).startswith("cannot pickle"):
            raise
        raise ArgumentError(
            f"{type(model).__name__} holds what cannot be copied ({str(error).replace('pickle', 'copy')}); make it "
            f"inside of the forward, or keep a list or a number in its place"
        ) from None
    rebinding = _Rebinding({at: memo[at] for at, layer in given if memo.get(at, layer) is not layer})
    for layer in made.modules():
        rebinding.within(vars(layer))
    return made


class _Rebinding:
    """Functions made anew so that they refer to copies.

    Args:
        copies: by id of the original.
    """

    def __init__(self, copies: dict[int, Any]):
        self._made: dict[int, Any] = dict(copies)
        self._reaches: dict[int, bool] = dict.fromkeys(copies, True)
        self._held: list[Any] = []  # so that an id is not given to another object

    def within(self, held: dict) -> None:
        """Replace the functions in a dict of attributes, and in the dicts and lists in it."""
        for name, value in list(held.items()):
            if isinstance(value, (dict, list)) and name != "_modules":
                # By dict's and list's own methods: a subclass may have others.
                kind: Any = dict if isinstance(value, dict) else list
                entries: Any = dict.items(value) if isinstance(value, dict) else enumerate(list.__iter__(value))
                for key, one in [*entries]:
                    if isinstance(one, _FUNCTIONS) and self._found(one):
                        kind.__setitem__(value, key, self._of(one))
            elif isinstance(value, _FUNCTIONS) and self._found(value):
                held[name] = self._of(value)

    def _parts(self, value: Any) -> list[Any]:
        if isinstance(value, FunctionType):
            cells = value.__closure__ or ()
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if isinstance(value, CellType):
            try:
                return [value.cell_contents]
            except ValueError:  # empty: the variable has no value yet
                return []
        if isinstance(value, MethodType):
            return [value.__self__]
        if isinstance(value, ref):
            return [value()]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if type(value) is dict:
            return list(value.values())
        return list(value) if type(value) in (list, tuple) else []

    def _found(self, value: Any) -> bool:
        """Whether an original is found from a value."""
        known = self._reaches.get(id(value))
        if known is None:
            self._held.append(value)
            self._reaches[id(value)] = False  # for a function that finds itself
            known = self._reaches[id(value)] = any(map(self._found, self._parts(value)))
        return known

    def _of(self, value: Any) -> Any:
        """The value, or one in its place that refers to the copies."""
        if not self._found(value):
            return value
        if id(value) not in self._made:
            self._make(value)
        return self._made[id(value)]

    def _make(self, value: Any) -> None:
        at = id(value)
        if isinstance(value, FunctionType):
            cells = [self._of(cell) for cell in value.__closure__ or ()]
            made = FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells) or None)
            self._made[at] = made
            made.__defaults__ = value.__defaults__ and tuple(map(self._of, value.__defaults__))
            made.__kwdefaults__ = value.__kwdefaults__ and {k: self._of(v) for k, v in value.__kwdefaults__.items()}
            made.__dict__.update(value.__dict__)
            made.__qualname__, made.__module__, made.__doc__ = value.__qualname__, value.__module__, value.__doc__
        elif isinstance(value, CellType):
            self._made[at] = made = CellType()
            made.cell_contents = self._of(value.cell_contents)
        elif isinstance(value, MethodType):
            self._made[at] = MethodType(value.__func__, self._of(value.__self__))
        elif isinstance(value, ref):
            self._made[at] = ref(self._of(value()))
        elif isinstance(value, partial):
            named = {k: self._of(v) for k, v in value.keywords.items()}
            self._made[at] = partial(self._of(value.func), *map(self._of, value.args), **named)
        elif type(value) is dict:
            self._made[at] = made = {}
            made.update({k: self._of(v) for k, v in value.items()})
        elif type(value) is list:
            self._made[at] = made = []
            made += map(self._of, value)
        else:
            self._made[at] = tuple(map(self._of, value))


_FUNCTIONS = (FunctionType, MethodType, partial)


@torch.inference_mode(False)
def copy_model(model: nn.Module) -> tuple[nn.Module, dict[int, ModelTensor]]:
    """A copy of the model in float64 without gradients; and by id of the copy's tensors, the user's tensors.

    Raises:
        ArgumentError: the model holds a tensor that torch cannot copy.
    """
    # Each tensor is copied and converted at once. A copy of the whole model in its own dtype would later be freed in
    # pieces between other blocks, and the C library does not return such memory.
    memo: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()):
        if t.is_inference() and not t.is_floating_point():
            memo[id(t)] = t.clone()
        if t.is_leaf and t.is_floating_point() and type(t) in (nn.Parameter, torch.Tensor):
            value = t.detach().to(torch.float64, copy=True)
            memo[id(t)] = nn.Parameter(value, requires_grad=False) if isinstance(t, nn.Parameter) else value
    given = {
        id(memo[id(t)]): ModelTensor(t.dtype, ref(t)) for t in (*model.parameters(), *model.buffers()) if id(t) in memo
    }
    try:
        return copy_module(model, memo).double().requires_grad_(False), given
    except RuntimeError as error:
        for path, layer in model.named_modules():
            name = next((n for n, v in vars(layer).items() if isinstance(v, torch.Tensor) and not v.is_leaf), None)
            if name is not None and f"{name}_mask" in layer._buffers:
                raise ArgumentError(
                    f"layer '{path}' is pruned: make that lasting first, torch.nn.utils.prune.remove(layer, '{name}')"
                ) from None
        held = [
            (f"{path}.{name}".lstrip("."), v)
            for path, layer in model.named_modules()
            for name, v in vars(layer).items()
        ]
        for name, t in (*model.named_parameters(), *model.named_buffers(), *held):
            if isinstance(t, torch.Tensor) and (t.layout != torch.strided or t.is_nested):
                raise DtypeError(
                    f"'{name}' has layout {t.layout}; sectorch takes dense tensors: use .to_dense()"
                ) from None
            if isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, nn.Parameter):
                raise ArgumentError(
                    f"'{name}' is of the class {type(t).__name__}, of which torch makes no copy; give it as a plain "
                    f"one: nn.Parameter({name}.detach().as_subclass(torch.Tensor))"
                ) from None
        raise ArgumentError(
            "the model holds a tensor that is part of a graph of gradients, which cannot be copied: run it inside "
            f"torch.no_grad(), or take the tensor out ({str(error).splitlines()[0][:80]})"
        ) from None


def device_of(model: Any) -> torch.device:
    """The device of a module's parameters, if they are on one CPU or CUDA device; the CPU otherwise."""
    held = {t.device for t in (*model.parameters(), *model.buffers())} if isinstance(model, nn.Module) else set()
    return held.pop() if len(held) == 1 and next(iter(held)).type in ("cpu", "cuda") else torch.device("cpu")


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a module's first floating-point tensor, which its weights have for the forward."""
    floating = (t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    return next(floating, torch.float32)


def refuse_meta_device() -> None:
    """Raise `ArgumentError` inside `torch.device("meta")`, where new tensors have no content."""
    if torch.get_default_device().type == "meta":
        raise ArgumentError("inside torch.device('meta') no tensor that is made has content: call it outside")


def refuse_unused(unused: dict[str, bool]) -> None:
    """Raise `ArgumentError` naming the options of shares that were given to `backend="ckks"`."""
    named = [name for name, given in unused.items() if given]
    if named:
        raise ArgumentError(
            f"{', '.join(named)}: of shares, and not used by backend='ckks'; its precision and size come from the "
            f"keys (sectorch.ckks.keygen)"
        )


def check_input(
    x: torch.Tensor, session: Session, party: Party, scheme: Scheme, what: str = "the input"
) -> torch.Tensor:
    """An input of a secure module as a plain tensor or a SharedTensor, checked by the party that holds it.

    Raises:
        SessionMismatchError, ArgumentError: a SharedTensor of another session, answering party or scheme; a tensor on
            another device.
        DtypeError, NonFiniteError, FixedPointRangeError: a tensor that cannot be shared.
        UnsupportedOpError: a tensor inside `torch.vmap` or a transform of `torch.func`, which has no content.
    """
    transforms = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue] # torch's stubs lack it
    if not isinstance(x, SharedTensor) and transforms.is_functorch_wrapped_tensor(x):
        raise UnsupportedOpError(
            "a secure module inside torch.vmap or torch.func is not supported: call it on the whole batch, which it "
            "takes as the plain module does"
        )
    if isinstance(x, SharedTensor):
        if x.session is not session or x.party != party:
            raise SessionMismatchError(
                "the tensor was shared in another session, or for another answering party, than the model's; "
                "use sectorch.share(x, session=secure_model.session, party=secure_model.party)"
            )
        if x.scheme != scheme:
            raise ArgumentError(f"the tensor has {x.scheme}, the model {scheme}; share it with the model's scheme")
        return x
    expected = session.device if session.present(session.Q) else torch.device("meta")
    if x.device != expected:
        raise ArgumentError(f"the input is on {x.device}, the secure module on {expected}: use x.to('{expected}')")
    x = x.detach().as_subclass(torch.Tensor)
    check_encodable(x, scheme.frac_bits, what)
    check_limit(x, scheme, what)
    return x


LARGE_MODEL, LARGE_WEIGHT = 1 << 28, 1 << 20
"""Elements. The large weights of a large model are kept in one form only (`PrivateTensor.streamed`): in one process
that takes 20 bytes an element in place of 60, or 24 where a pass folded something into the weight."""


def plain_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The floating-point parameters and buffers of a module by name; a tied one appears by its first name."""
    named = {id(t): (name, t.detach()) for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    return {name: t for name, t in reversed(named.values()) if t.is_floating_point()}


def bind(
    module: nn.Module,
    session: Session,
    party: Party,
    scheme: Scheme,
    dtype: torch.dtype,
    given: Mapping[int, ModelTensor],
) -> tuple[nn.Module, dict[str, PrivateTensor]]:
    """A copy of `module` whose floating-point parameters and buffers are private to `party`, and these by name.

    Args:
        module: in float64, so that folding and encoding round once.
        given: by id of the module's tensors, the user's. A private tensor has the dtype of the user's tensor for the
            forward, and replaces it wherever the forward holds it.
        dtype: the dtype of tensors that are not in `given`.

    Integer and boolean buffers (position indices, attention masks) are part of the architecture and stay public. So do
    masks of floating-point numbers: buffers of zeros and of numbers beyond the range of fixed point.

    Raises:
        NonFiniteError, FixedPointRangeError: naming the parameter. A buffer is checked where it is used; the statistics
            of a BatchNorm, which enter as a factor and a summand, need to be finite.
    """
    named = {id(t): name for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    meta = not session.present(party)
    # Tensors that become private are not copied. Public buffers are, since a forward may write into them.
    memo = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}
    large = is_large(memo.values())
    bound = copy_module(module, memo)
    made: dict[int, PrivateTensor] = {}
    for layer in bound.modules():
        stores: list[Any] = [layer._parameters, layer._buffers]
        for store in stores:
            for name, tensor in list(store.items()):
                if tensor is None or not tensor.is_floating_point():
                    continue
                if store is layer._buffers and is_public_mask(tensor, scheme):
                    store[name] = tensor.detach().to(dtype)
                    continue
                if id(tensor) not in made:
                    value = tensor.detach().to("meta") if meta else tensor.detach()
                    label = f"weight '{named.get(id(tensor), name)}'"
                    user = given.get(id(tensor), ModelTensor(dtype, ref(tensor)))
                    made[id(tensor)] = private_weight(
                        value, session, party, scheme, label, user.dtype, large=large,
                        statistic=is_normalising(layer), read=store is layer._parameters,
                    )  # fmt: skip
                    made[id(tensor)]._is_param = isinstance(tensor, nn.Parameter)
                    made[id(tensor)].stands_for = ref(tensor), user.tensor
                store[name] = made[id(tensor)]
        if isinstance(layer, nn.RNNBase):
            layer.__dict__["_flat_weights"] = [getattr(layer, name) for name in layer._flat_weights_names]
    return bound, {named[i]: tensor for i, tensor in made.items() if i in named}


def is_large(weights: Iterable[torch.Tensor]) -> bool:
    """Whether a model of these weights is large (`LARGE_MODEL`)."""
    return sum(w.numel() for w in weights) >= LARGE_MODEL


def is_normalising(layer: nn.Module) -> bool:
    """Whether a layer is a BatchNorm, whose tensors are finite and of any size."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)


def private_weight(
    x: torch.Tensor,
    session: Session,
    party: Party,
    scheme: Scheme,
    label: str,
    dtype: torch.dtype,
    *,
    statistic: bool,
    large: bool,
    read: bool = True,
) -> PrivateTensor:
    """A private tensor that lasts as long as the session.

    Args:
        x: in float64 (a folded weight of a large model may be in float32), or a shape only where its owner is absent.
        statistic: whether it belongs to a BatchNorm, and may be of any size.
        large: whether the model is large (`is_large`).
        read: whether the forward is known to read it; if not, it is checked where it is read.

    Raises:
        NonFiniteError, FixedPointRangeError: naming the weight.
    """
    if statistic or not read:
        if statistic:
            check_encodable(x if x.is_meta else torch.where(torch.isfinite(x), 0.0, x), scheme.frac_bits, label)
        owned = session.setup(party).own(party, x, Phase.SETUP, label)
        made = PrivateTensor(owned, session, party, scheme, dtype, label)
    else:
        try:
            made = private_tensor(x, session, party, scheme, label, dtype)
        except (NonFiniteError, FixedPointRangeError) as error:
            if not _is_mask(x, scheme):
                raise
            raise type(error)(
                f"{label} holds what stands for minus infinity, as an attention mask does, and no weight is so large; "
                f"keep the mask as a buffer of torch.bool, for x.masked_fill(~mask, float('-inf'))"
            ) from None
    made.lasting = True
    made.streamed = large and x.numel() >= LARGE_WEIGHT
    return made


def _is_mask(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether a tensor consists of negative numbers beyond the range and of small numbers."""
    far = mask_beyond_range(scheme, x)
    return far is not None and bool((far & (x < 0) | ~far & (x.abs() < 2.0**16)).all())


def is_public_mask(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether a buffer holds only zeros and numbers beyond the range, which no weight does."""
    far = mask_beyond_range(scheme, x)
    return far is not None and bool((far | (x == 0)).all())


class Weights:
    """The private tensors that programs name in a session, each made and sent once.

    Args:
        own: the module's weights by name. Passes make further ones, whose names say what they were made of.
        dtype: the dtype of weights for which a program names none. A folded weight is rounded to its dtype (or to
            float32, if that is finer), so that a model file computes the same numbers as the model.
    """

    def __init__(
        self, own: dict[str, PrivateTensor], session: Session, party: Party, scheme: Scheme, dtype: torch.dtype
    ):
        self._made = dict(own)
        with torch._C.DisableTorchFunctionSubclass():
            self._large = is_large(own.values())
        self._session, self._party, self._scheme, self._dtype = session, party, scheme, dtype
        self._lock = threading.Lock()

    def of(self, program: Trace) -> dict[str, torch.Tensor]:
        """The tensors that a program reads; public constants are as they are.

        Raises:
            NonFiniteError, FixedPointRangeError: a folded weight that fixed point cannot hold, by its name.
        """
        with self._lock:
            return {name: self._tensor(program, name) for name in program.values}

    def _tensor(self, program: Trace, name: str) -> torch.Tensor:
        value = program.values[name]
        if name.startswith(CONSTANT) or not value.is_floating_point():
            return value
        if name not in self._made:
            dtype = program.dtypes.get(name, self._dtype)
            value = value.detach().to(torch.promote_types(dtype, torch.float32))
            if self._large:
                program.values[name] = value  # the unrounded value is not needed again
            else:
                value = value.to(torch.float64)
            value = value if self._session.present(self._party) else value.to("meta")
            self._made[name] = private_weight(
                value, self._session, self._party, self._scheme, f"weight '{name}'", dtype,
                statistic=False, large=self._large,
            )  # fmt: skip
        return self._made[name]
