"""Choreographies: parties and located values, declared messages, programs, and where they run."""

from ..deprecation import renamed_names
from .declaration import PROTOCOLS as PROTOCOLS
from .declaration import Message as Message
from .declaration import ProtocolSpec as ProtocolSpec
from .declaration import protocol as protocol
from .located import Located as Located
from .located import leaf as leaf
from .located import with_shapes as with_shapes
from .net import Net as Net
from .net import Runtime as Runtime
from .net import Sent as Sent
from .roles import Party as Party
from .roles import Phase as Phase
from .roles import Roles as Roles

__all__ = ["Located", "Message", "Net", "Party", "Phase", "ProtocolSpec", "Roles", "leaf", "protocol", "with_shapes"]

__getattr__ = renamed_names(__name__, shaped="with_shapes")
