"""From an ordinary nn.Module to a secure one: tracing, graph passes, weights, and the models of the papers."""

from typing import TYPE_CHECKING

from .channels import Channels, channels
from .module import SecureModule, reference, secure

if TYPE_CHECKING:
    from .fhe import fhe_friendly, fine_tune

__all__ = ["Channels", "SecureModule", "channels", "fhe_friendly", "fine_tune", "reference", "secure"]


def __getattr__(name: str):
    """What needs homomorphic encryption brings SEAL and numba with it, and is loaded when it is asked for."""
    if name not in ("fhe_friendly", "fine_tune"):
        raise AttributeError(f"module 'sectorch.nn' has no attribute '{name}'")
    from . import fhe

    return getattr(fhe, name)
