"""Calls of a served model: what an asker passes, checked against the forms that its description holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, DtypeError, SectorchError, ShapeError
from ..nn.inputs import Inputs, Public, Secret
from ..nn.remote_program import RemoteCall, RemoteProgram
from ..tensor import SecretTensor


def match_call(served: RemoteProgram, args: tuple, kwargs: dict[str, Any]) -> Inputs:
    """The inputs of a call, in the form of the program that it asks for.

    Arguments without a secret tensor in them (a public mask, a flag) are part of a program: who leaves one out gets
    the program's own, and who passes one has to pass an equal one.

    Raises:
        ArgumentError: a missing or unexpected argument, or a public one that is another than the program's.
        DtypeError: no tensor, or one of another dtype. ShapeError: of another shape.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Inputs):
        args, kwargs = _arguments(args[0])
    errors: list[SectorchError] = []
    for call in _plain(served):
        try:
            return _inputs(call, args, kwargs)
        except (ArgumentError, DtypeError, ShapeError) as error:
            errors.append(error)
    # The program whose form the call has says most: its shapes were looked at.
    ranks = lambda e: (ShapeError, DtypeError, ArgumentError).index(type(e)) + str(e).startswith(("missing", "unexp"))
    said = min(errors, key=ranks)
    raise type(said)(f"{said}; {served.summary}") from None


def _plain(served: RemoteProgram) -> list[RemoteCall]:
    """The calls whose results Q learns.

    Raises:
        ArgumentError: there are none.
    """
    calls = [call for call in served.calls if not call.inputs.in_shares]
    if not calls:
        raise ArgumentError("the model is served for generation: ask it by generate(input_ids)")
    return calls


Like = int | tuple[int, ...] | torch.Tensor | Inputs


def like_inputs(served: RemoteProgram, inputs: Like) -> Inputs:
    """Inputs without content, of a later call.

    Args:
        inputs: like the later ones; or their number of rows, where the model takes any number of them in one form
            only; or the shape of its only tensor.

    Raises:
        ArgumentError, DtypeError, ShapeError: the model does not take such.
    """
    if isinstance(inputs, Inputs) and inputs.in_shares:
        return served.inputs(served.find(inputs))
    first = _plain(served)[0]
    if isinstance(inputs, int):
        if inputs < 1 or len(served.calls) > 1 or not first.least:
            raise ArgumentError(f"{inputs} rows say nothing of a call here: pass Inputs(...); {served.summary}")
        return match_call(served, (first.inputs.meta(inputs),), {})
    if isinstance(inputs, (tuple, list)):
        if len(first.inputs.tensors) > 1:
            raise ArgumentError(f"a shape says nothing of a call with several tensors; {served.summary}")
        try:
            x = torch.empty(tuple(inputs), dtype=first.inputs.dtypes[0], device="meta")
        except (TypeError, RuntimeError):
            raise ArgumentError(f"{inputs} is no shape; {served.summary}") from None
        inputs = first.inputs.with_tensors([x])
    return match_call(served, (inputs,), {}).meta()


def match_named(served: RemoteProgram, tensors: Mapping[str, torch.Tensor]) -> Inputs:
    """The inputs of a call whose tensors are given by the names that the description has for them.

    Raises:
        ArgumentError: other names. DtypeError, ShapeError: as of `called`.
    """
    errors: list[SectorchError] = []
    for call in _plain(served):
        if set(call.inputs.names) != set(tensors):
            continue
        try:
            return _fitting(call, [tensors[name] for name in call.inputs.names])
        except (DtypeError, ShapeError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])(f"{errors[0]}; {served.summary}") from None
    raise ArgumentError(f"got inputs named {', '.join(sorted(tensors)) or 'nothing'}; {served.summary}")


def _arguments(inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    given = dict(zip(inputs.names, inputs.tensors, strict=True))
    leaves = [given[leaf.name] if isinstance(leaf, Secret) else leaf for leaf in inputs.form.leaves]
    return pytree.tree_unflatten(leaves, inputs.form.spec)


def _inputs(call: RemoteCall, args: tuple, kwargs: dict[str, Any]) -> Inputs:
    form, found = call.inputs.form, {}
    wanted_args, wanted = pytree.tree_unflatten(list(form.leaves), form.spec)
    if len(args) > len(wanted_args):
        raise ArgumentError(f"takes {len(wanted_args)} arguments by place and {len(args)} were given")
    for place, value in enumerate(wanted_args):
        if place < len(args):
            _match(value, args[place], f"argument {place + 1}", found)
        elif _secret(value):
            raise ArgumentError(f"missing argument {place + 1}")
    _match_named(wanted, kwargs, "", found)
    return _fitting(call, [found[name] for name in call.inputs.names])


def _match(wanted: Any, given: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    """Take the secret tensors out of an argument; raise where it is not of the form that is wanted."""
    if isinstance(wanted, Secret):
        if isinstance(given, Public):
            raise ArgumentError(f"{path} is secret in this model, and was marked public; pass the tensor itself")
        if isinstance(given, SecretTensor) or not isinstance(given, torch.Tensor):
            raise DtypeError(f"{path}: expected a torch tensor, got {type(given).__name__}")
        if found.setdefault(wanted.name, given) is not given:
            raise ArgumentError(f"{path} is the same tensor as another argument in this model; pass that one")
    elif isinstance(wanted, Public):
        if not isinstance(given, Public) or given != wanted:
            raise ArgumentError(
                f"{path} is public in this model and part of its program; leave it out, or pass sectorch.public() of "
                f"an equal tensor"
            )
    elif isinstance(wanted, dict):
        _match_named(wanted, given, path, found)
    elif isinstance(wanted, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
            came = f"{len(given)}" if isinstance(given, (list, tuple)) else type(given).__name__
            raise ArgumentError(f"{path}: expected a {type(wanted).__name__} of {len(wanted)}, got {came}")
        for place, (value, other) in enumerate(zip(wanted, given, strict=True)):
            _match(value, other, f"{path}[{place}]", found)
    elif isinstance(given, (torch.Tensor, Public)) or type(given) is not type(wanted) or given != wanted:
        shown = type(given).__name__ if isinstance(given, (torch.Tensor, Public)) else f"{given!r:.40}"
        raise ArgumentError(f"{path} is {wanted!r:.40} in this model, got {shown}; leave it out")


def _match_named(wanted: dict[str, Any], given: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if dataclasses.is_dataclass(given) and not isinstance(given, (type, Mapping)):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{path}: expected a dictionary, got {type(given).__name__}")
    said = lambda name: f"{path}['{name}']" if path else f"argument '{name}'"
    for name in given:
        if name not in wanted:
            raise ArgumentError(f"unexpected {said(name)}")
    for name, value in wanted.items():
        if name in given:
            _match(value, given[name], said(name), found)
        elif _secret(value):
            raise ArgumentError(f"missing {said(name)}")


def _secret(wanted: Any) -> bool:
    return any(isinstance(leaf, Secret) for leaf in pytree.tree_leaves(wanted))


def _fitting(call: RemoteCall, tensors: list[torch.Tensor]) -> Inputs:
    for (name, (shape, dtype)), x in zip(call.inputs.described.items(), tensors, strict=True):
        if x.dtype != dtype:
            raise DtypeError(f"'{name}' is of {dtype} in this model, got {x.dtype}; use x.to({dtype})")
        if not call.least and tuple(x.shape) != shape:
            raise ShapeError(f"'{name}' is of shape {list(shape)} in this model, got {list(x.shape)}")
        if call.least and (x.dim() != len(shape) or tuple(x.shape[1:]) != shape[1:]):
            sizes = ", ".join(["rows", *map(str, shape[1:])])
            raise ShapeError(f"'{name}' is of shape [{sizes}] in this model, got {list(x.shape)}")
    inputs = call.inputs.with_tensors([x.detach().as_subclass(torch.Tensor) for x in tensors])
    if call.least and (inputs.rows is None or inputs.rows < call.least):
        rows = ", ".join(f"{name}: {len(x)}" for name, x in zip(inputs.names, tensors, strict=True))
        raise ShapeError(f"the inputs have one number of rows, {call.least} or more; got {rows}")
    return inputs
