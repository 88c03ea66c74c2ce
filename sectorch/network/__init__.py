"""The server, answering and querying parties as processes, over mutual TLS. Only the server listens."""

from ..serving.model_file import save_generation, save_model
from .identity.identity import Credentials, Pins
from .parties.answer import Answering, answer
from .parties.client import Connection, connect
from .parties.remote_model import RemoteGroup, RemoteModel, RemoteTexts
from .parties.server import Server
from .store import Store

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
