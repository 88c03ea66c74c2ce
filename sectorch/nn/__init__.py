"""From an ordinary nn.Module to a secure one: tracing, graph passes, weights, and the models of the papers."""

from .secure import SecureModule as SecureModule
from .secure import secure as secure
