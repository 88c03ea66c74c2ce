"""The server, answering and querying parties as processes, over gRPC with mutual TLS. Only the server listens."""

from ..nn.model_file import save_model as save_model
from .answer import Answering as Answering
from .answer import answer as answer
from .certificates import Credentials as Credentials
from .client import Connection as Connection
from .client import connect as connect
from .group import RemoteGroup as RemoteGroup
from .identity import Pins as Pins
from .query import RemoteModel as RemoteModel
from .server import Server as Server
from .store import Store as Store
