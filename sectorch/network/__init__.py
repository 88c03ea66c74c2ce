"""The server, answering and querying parties as processes, over mutual TLS. Only the server listens."""

from ..serving.model_file import save_generation as save_generation
from ..serving.model_file import save_model as save_model
from .identity.identity import Credentials as Credentials
from .identity.identity import Pins as Pins
from .parties.answer import Answering as Answering
from .parties.answer import answer as answer
from .parties.client import Connection as Connection
from .parties.client import connect as connect
from .parties.remote_model import RemoteGroup as RemoteGroup
from .parties.remote_model import RemoteModel as RemoteModel
from .parties.remote_model import RemoteTexts as RemoteTexts
from .parties.server import Server as Server
from .store import Store as Store

__all__ = [
    "Answering",
    "Connection",
    "Credentials",
    "Pins",
    "RemoteGroup",
    "RemoteModel",
    "RemoteTexts",
    "Server",
    "Store",
    "answer",
    "connect",
    "save_generation",
    "save_model",
]
