"""Ciphertexts in a choreography: what they look like is public, their residues are located and travel as messages.

A ciphertext's level, scale and size follow from the architecture, so everybody works them out: each computation is made
on shapes as well. What travels is one int64 tensor of residues, [ciphertexts, 2, primes, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...choreography import Located, Net, Party, shaped
from ...ckks import CKKSTensor, EncryptedMatrix
from ...ckks.linalg.matrices import Operand
from ...ckks.scheme.cipher import Cipher
from ...ckks.scheme.leaving import residues


@dataclass(frozen=True)
class Sealed:
    """Ciphertexts, or keys, that some parties hold.

    Attributes:
        form: a `Cipher`, a `CKKSTensor`, a matrix of them or a tuple, whose residues have no content; or public keys.
        content: the residues, or the keys.
    """

    form: Any
    content: Located

    def send(self, src: Party, dst: Party, label: str) -> Sealed:
        """The same at `dst`; 8 bytes a residue."""
        return Sealed(self.form, self.content.send(src, dst, label).at(dst))


def compute(net: Net, party: Party, f: Callable, *values: Any) -> Any:
    """`party` computes f(*values), with randomness of its own; a `Sealed` where that is ciphertexts.

    Args:
        f: takes ciphertexts where a value is `Sealed`, tensors where it is located. It is called on shapes as well, by
            its attribute `shapes` where it has one.
    """
    forms = [_form(value) for value in values]
    form = getattr(f, "shapes", f)(*forms)
    sealed = next(_ciphers(form), None) is not None

    @shaped(lambda *_: _residues(form) if sealed else form)
    def taken(*contents: Any) -> Any:
        found = getattr(f, "kernel", f)(*(_opened(v, c) for v, c in zip(values, contents, strict=True)))
        return _residues(found) if sealed else found

    taken.__name__ = getattr(f, "__name__", "f")
    content = net.fresh(party, taken, *(v.content if isinstance(v, Sealed) else v for v in values))
    return Sealed(form, content) if sealed else content


def _form(value: Any) -> Any:
    if isinstance(value, Sealed):
        return value.form
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Located) else value


def _opened(value: Any, content: Any) -> Any:
    if isinstance(value, Sealed) and isinstance(content, torch.Tensor):
        return _filled(value.form, iter(content.split([c.count for c in _ciphers(value.form)])))
    return content


def _residues(value: Any) -> torch.Tensor:
    parts = [residues(cipher) for cipher in _ciphers(value)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ciphers(value: Any) -> Iterator[Cipher]:
    """All that are in a value, in one order."""
    if isinstance(value, Cipher):
        yield value
    elif isinstance(value, CKKSTensor):
        yield value.cipher
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _ciphers(part)
    elif isinstance(value, Operand | EncryptedMatrix):
        for block in value.blocks.values():
            yield from _ciphers(block)


def _filled(form: Any, parts: Iterator[torch.Tensor]) -> Any:
    """The form with residues."""
    if isinstance(form, Cipher):
        return replace(form, data=next(parts))
    if isinstance(form, CKKSTensor):
        return CKKSTensor(_filled(form.cipher, parts), form.batch, form.row_shape, form.float_dtype)
    if isinstance(form, tuple | list):
        return type(form)(_filled(part, parts) for part in form)
    return replace(form, blocks={at: _filled(block, parts) for at, block in form.blocks.items()})
