"""Three processes: the server, answering and querying parties, over gRPC with mutual TLS. Only the server listens."""

from .answer import answer as answer
from .certificates import Credentials as Credentials
from .client import Connection as Connection
from .client import RemoteModel as RemoteModel
from .client import connect as connect
from .server import Server as Server
