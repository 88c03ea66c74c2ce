"""What `secure` takes: a module in evaluation mode, whole, on one device."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import fx, nn

from ..choreography import Party
from ..errors import ArgumentError, DtypeError, SessionMismatchError, TrainingModeError, UnsupportedOpError
from ..ring import check_encodable
from ..ring.scheme import check_limit
from ..session import Session
from ..tensor import Scheme, SecretTensor, SharedTensor


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
    """How a module comes from what was given in its place."""
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
    """Raise `UnsupportedOpError` for a module with layers that compute on torch's quantised numbers."""
    for name, layer in model.named_modules():
        floating = any("FloatFunctional" in kind.__name__ for kind in type(layer).__mro__)  # torch's functions alone
        if "quantized" in type(layer).__module__.split(".") and not floating:
            raise UnsupportedOpError(
                f"layer '{name}' ({type(layer).__name__}) is quantised, and computes on whole numbers of torch's own; "
                f"give the model as it was before: fixed-point numbers are what a secure one has anyway"
            )


def check_model(model: Any, device: torch.device) -> None:
    """Raise unless the model can be made secure on this device."""
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


class Given(NamedTuple):
    """A parameter or buffer of the user's model."""

    dtype: torch.dtype
    tensor: ref[torch.Tensor]


@torch.inference_mode(False)
def copied(model: nn.Module) -> tuple[nn.Module, dict[int, Given]]:
    """A copy of the model in float64, of its own memory, without gradients; and by id of its tensors, the user's.

    Raises:
        ArgumentError: it holds a tensor that torch cannot copy.
    """
    # Each tensor is copied and converted at once: a copy of the whole model in its own dtype would be freed in pieces
    # between others, and the C library does not give such memory back.
    memo: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()):
        if t.is_inference() and not t.is_floating_point():
            memo[id(t)] = t.clone()
        if t.is_leaf and t.is_floating_point() and type(t) in (nn.Parameter, torch.Tensor):
            value = t.detach().to(torch.float64, copy=True)
            memo[id(t)] = nn.Parameter(value, requires_grad=False) if isinstance(t, nn.Parameter) else value
    given = {id(memo[id(t)]): Given(t.dtype, ref(t)) for t in (*model.parameters(), *model.buffers()) if id(t) in memo}
    try:
        return copy.deepcopy(model, memo).double().requires_grad_(False), given
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
    """Where a module's parameters are, if they are on one device that can compute; the CPU otherwise."""
    held = {t.device for t in (*model.parameters(), *model.buffers())} if isinstance(model, nn.Module) else set()
    return held.pop() if len(held) == 1 and next(iter(held)).type in ("cpu", "cuda") else torch.device("cpu")


def dtype_of(model: nn.Module) -> torch.dtype:
    """What a module's weights pass for: the dtype of its first floating-point tensor."""
    floating = (t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    return next(floating, torch.float32)


def refuse_meta_device() -> None:
    """Raise `ArgumentError` inside `torch.device("meta")`, where tensors that are made have no content."""
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
    """An input of a secure module as a plain tensor or a SharedTensor, looked at by whoever holds it.

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
