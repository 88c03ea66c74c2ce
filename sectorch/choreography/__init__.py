"""Choreographies: parties and located values, declared messages, programs, and where they run."""

from ..deprecation import renamed_names
from .declaration import PROTOCOLS as PROTOCOLS
from .declaration import Message, ProtocolSpec, protocol
from .located import Located, leaf, with_shapes
from .net import Net
from .net import Runtime as Runtime
from .net import Sent as Sent
from .roles import Party, Phase, Roles

__all__ = ["Located", "Message", "Net", "Party", "Phase", "ProtocolSpec", "Roles", "leaf", "protocol", "with_shapes"]

__getattr__ = renamed_names(__name__, shaped="with_shapes")
