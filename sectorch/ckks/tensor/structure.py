"""Handlers that only move ciphertexts: shapes, selections, joins. None costs a level or changes an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...errors import UnsupportedOpError
from ...tensor.table import spell
from ..scheme.arithmetic import alike
from ..scheme.bounds import most
from ..scheme.cipher import empty_like
from .encrypted import CKKSTensor
from .packing import index_of, taken
from .table import implements, wrap

_T = torch.Tensor


def _refuse(func: Any) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{spell(func)} would move samples between slots or take some away; the batch (dimension 0) stays as it is. "
        f"Encrypt the batch that is meant, or decrypt first"
    )


def _moved(func: Callable, x: CKKSTensor, *args: Any, **kwargs: Any) -> Any:
    """func on the numbers of the ciphertexts, for a batch of two: samples must neither mix nor move."""
    index = index_of(x)
    pair = torch.stack([index, index + index.numel()])
    results = func(pair, *args, **kwargs)
    many = isinstance(results, (tuple, list))
    out = []
    for result in results if many else [results]:
        if result.dim() < 1 or result.shape[0] != 2 or not torch.equal(result[0] + index.numel(), result[1]):
            raise _refuse(func)
        if result[0].numel() and int(result[0].max()) >= index.numel():
            raise _refuse(func)
        out.append(wrap(x, taken(x.cipher, result[0]), result.shape[1:]))
    return (tuple(out) if isinstance(results, tuple) else out) if many else out[0]


def _mover(name: str, *functions: Any) -> None:
    for function in functions:
        implements(name, function)(lambda x, *args, _f=function, **kwargs: _moved(_f, x, *args, **kwargs))


_mover("permute", torch.permute, _T.permute)
_mover("transpose", torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes)
_mover("movedim", torch.movedim, _T.movedim)
_mover("unsqueeze", torch.unsqueeze, _T.unsqueeze)
_mover("flip", torch.flip, _T.flip)
_mover("roll", torch.roll, _T.roll)
_mover("narrow", torch.narrow, _T.narrow)
_mover("select", torch.select, _T.select)
_mover("index_select", torch.index_select, _T.index_select)
_mover("unflatten", torch.unflatten, _T.unflatten)
_mover("chunk", torch.chunk, _T.chunk)
_mover("split", torch.split, _T.split)
_mover("unbind", torch.unbind, _T.unbind)
_mover("unfold", _T.unfold)
_mover("getitem", _T.__getitem__)
_mover("pixel_shuffle", torch.pixel_shuffle)
_mover("channel_shuffle", torch.channel_shuffle)


def _reshaped(x: CKKSTensor, meta: torch.Tensor, func: Callable) -> CKKSTensor:
    if meta.dim() < 1 or meta.shape[0] != x.batch:
        raise _refuse(func)
    return wrap(x, x.cipher, meta.shape[1:])


def _reshaper(name: str, *functions: Any) -> None:
    def handler(x: CKKSTensor, *args: Any, _f: Any, **kwargs: Any) -> CKKSTensor:
        with torch._C.DisableTorchFunctionSubclass():
            meta = _f(torch.empty(x.full_shape, device="meta"), *args, **kwargs)
        return _reshaped(x, meta, _f)

    for function in functions:
        implements(name, function)(lambda x, *args, _f=function, **kwargs: handler(x, *args, _f=_f, **kwargs))


_reshaper("reshape", torch.reshape, _T.reshape, _T.view)
_reshaper("flatten", torch.flatten, _T.flatten)
_reshaper("squeeze", torch.squeeze, _T.squeeze)


@implements("expand", _T.expand)
@implements("broadcast_to", torch.broadcast_to, _T.broadcast_to)
def expand(x: CKKSTensor, *sizes: Any) -> CKKSTensor:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if len(sizes) != len(x.full_shape) or sizes[0] not in (-1, x.batch):
        raise _refuse(_T.expand)
    index = index_of(x).expand(*sizes[1:])
    return wrap(x, taken(x.cipher, index), index.shape)


@implements("contiguous", _T.contiguous)
@implements("detach", _T.detach, torch.detach)
@implements("clone", _T.clone, torch.clone)
@implements("to", _T.to, _T.float, _T.double, _T.cpu)
def contiguous(x: CKKSTensor, *args: Any, **kwargs: Any) -> CKKSTensor:
    with torch._C.DisableTorchFunctionSubclass():
        dtype = (
            torch.empty(0, dtype=x.float_dtype).to(*args).dtype
            if args and isinstance(args[0], torch.dtype)
            else x.float_dtype
        )
    return (
        wrap(x, x.cipher, x.row_shape) if dtype == x.float_dtype else CKKSTensor(x.cipher, x.batch, x.row_shape, dtype)
    )


def _joined(tensors: Any, join: Callable, func: Any) -> CKKSTensor:
    if not all(isinstance(t, CKKSTensor) for t in tensors):
        raise UnsupportedOpError(f"{spell(func)} of encrypted and plain tensors; encrypt the plain ones first")
    first = tensors[0]
    indices, start = [], 0
    for t in tensors:
        if t.keys.identity != first.keys.identity or t.batch != first.batch:
            raise _refuse(func)
        indices.append(index_of(t) + start)
        start += indices[-1].numel()
    index = join([torch.stack([i, i + start]) for i in indices])
    if index.shape[0] != 2 or not torch.equal(index[0] + start, index[1]):
        raise _refuse(func)
    ciphers = [t.cipher for t in tensors]
    form = lambda c: (c.level, c.pending, c.factor, c.withheld, c.size)
    if any(form(c) != form(ciphers[0]) for c in ciphers):
        ciphers = alike(ciphers)
    data = empty_like(ciphers[0].data, "a join", start)
    if not data.is_meta:
        torch.cat([c.data for c in ciphers], out=data)
    largest, error = most(c.largest for c in ciphers), most(c.error for c in ciphers)
    declared = all(c.declared for c in ciphers)
    whole = replace(ciphers[0], data=data, largest=largest, error=error, declared=declared)
    return wrap(first, taken(whole, index[0]), index.shape[1:])


@implements("cat", torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Any, dim: int = 0) -> CKKSTensor:
    return _joined(tensors, lambda parts: torch.cat(parts, dim), torch.cat)


@implements("stack", torch.stack)
def stack(tensors: Any, dim: int = 0) -> CKKSTensor:
    return _joined(tensors, lambda parts: torch.stack(parts, dim), torch.stack)
