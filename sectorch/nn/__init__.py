"""From an ordinary nn.Module to a secure one: tracing, graph passes, weights, and the models of the papers."""

from .fhe import fhe_friendly as fhe_friendly
from .fhe import fine_tune as fine_tune
from .secure import SecureModule as SecureModule
from .secure import secure as secure
