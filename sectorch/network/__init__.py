"""The server, answering and querying parties as processes, over mutual TLS. Only the server listens."""

from ..nn.model_file import save_model as save_model
from ..nn.texts import save_generation as save_generation
from .identity.certificates import Credentials as Credentials
from .identity.identity import Pins as Pins
from .parties.answer import Answering as Answering
from .parties.answering import answer as answer
from .parties.client import Connection as Connection
from .parties.client import connect as connect
from .parties.group import RemoteGroup as RemoteGroup
from .parties.query import RemoteModel as RemoteModel
from .parties.server import Server as Server
from .parties.texts import RemoteTexts as RemoteTexts
from .store.store import Store as Store

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
