"""Choreographies: parties and located values, declared messages, programs, and where they run."""

from .declaration import PROTOCOLS as PROTOCOLS
from .declaration import Message as Message
from .declaration import ProtocolSpec as ProtocolSpec
from .declaration import protocol as protocol
from .located import Located as Located
from .located import leaf as leaf
from .located import shaped as shaped
from .net import Net as Net
from .parties import Party as Party
from .parties import Phase as Phase
from .roles import Roles as Roles
from .steps import Runtime as Runtime
from .steps import Sent as Sent

__all__ = [
    "Located",
    "Message",
    "Net",
    "Party",
    "Phase",
    "ProtocolSpec",
    "Roles",
    "leaf",
    "protocol",
    "shaped",
]
