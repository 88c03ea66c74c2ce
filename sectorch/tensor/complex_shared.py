"""ComplexShared: a complex tensor in shares, as two SharedTensors, its real and its imaginary part."""

from __future__ import annotations

from typing import Any

import torch

from .secret import SecretTensor
from .shared import SharedTensor


class ComplexShared(SecretTensor):
    """What Fourier transforms give, and what comes back from them; everything is computed on the two parts.

    There is no ring element for a complex number, so it has no fraction bits and no bound: its parts have.
    """

    parts: tuple[SharedTensor, SharedTensor]

    @staticmethod
    def __new__(cls, real: Any, imag: Any):
        with torch._C.DisableTorchFunctionSubclass():
            dtype = real.dtype if real.dtype.is_floating_point else torch.float32
            shape, device = real.shape, real.device
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype.to_complex(), device=device)
        self.parts = real, imag
        self.session, self.party, self.scheme = real.session, real.party, real.scheme
        return self

    def __init__(self, *_args, **_kwargs):
        super().__init__()

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"ComplexShared(shape={tuple(self.shape)}, dtype={self.dtype})"

    def reveal(self) -> torch.Tensor:
        """The plain tensor, learned by Q and by nobody else: both parts, each as `SharedTensor.reveal` does it."""
        return torch.complex(*(part.reveal() for part in self.parts))
