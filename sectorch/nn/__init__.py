"""From an ordinary nn.Module to a secure one: tracing, graph passes, weights, and the models of the papers."""

from typing import TYPE_CHECKING

from .channels import Channels as Channels
from .channels import channels as channels
from .module import SecureModule as SecureModule
from .module import reference as reference
from .module import secure as secure

if TYPE_CHECKING:
    from .fhe import fhe_friendly as fhe_friendly
    from .fhe import fine_tune as fine_tune

__all__ = ["Channels", "SecureModule", "channels", "fhe_friendly", "fine_tune", "reference", "secure"]


def __getattr__(name: str):
    """What needs homomorphic encryption brings SEAL and numba with it, and is loaded when it is asked for."""
    if name not in ("fhe_friendly", "fine_tune"):
        raise AttributeError(f"module 'sectorch.nn' has no attribute '{name}'")
    from . import fhe

    return getattr(fhe, name)
