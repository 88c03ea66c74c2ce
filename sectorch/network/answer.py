"""The answering party A: owns a model, answers queries in as many sessions as are opened."""

from __future__ import annotations

import logging
import threading

import torch
from torch import nn

from ..errors import NetworkError
from ..nn.program import describe, load_program
from ..session import A, S
from .certificates import Credentials
from .client import Connection
from .link import Channel
from .session import PartySession, reason, scheme_of

log = logging.getLogger("sectorch.answer")


class Answering:
    """A running answering party; `close` ends it."""

    def __init__(self, address: str, credentials: Credentials, description: dict, weights: dict[str, torch.Tensor]):
        load_program(description, weights)
        self._description, self._weights = description, weights
        self.connection = Connection(address, credentials, on_serve=self._serve)
        self.answered = 0

    def register(self, name: str) -> None:
        """Be known to the server under `name`, which the certificate must carry."""
        self.connection.ask({"do": "register", "name": name, "description": self._description})

    def close(self) -> None:
        self.connection.close()

    def wait(self) -> None:
        """Until the connection ends.

        Raises:
            PeerLostError: the server is gone.
        """
        ended = threading.Event()
        while self.connection.link.closed is None:
            ended.wait(0.2)
        raise self.connection.link.closed

    def _serve(self, request: dict) -> None:
        """Open this party's end at once, so that no frame is missed, and run the session beside."""
        session = bytes.fromhex(str(request.get("session")))
        channel = self.connection.link.open(session)
        threading.Thread(target=self._session, args=(session, channel, request), daemon=True).start()

    def _session(self, session: bytes, channel: Channel, request: dict) -> None:
        try:
            party = PartySession(A, session, {S: channel}, self._description, scheme_of(request), self._weights)
            while True:
                asked = channel.request()
                if asked.get("do") == "close":
                    break
                party.follow(asked)
                self.answered += asked.get("do") == "predict"
        except Exception as error:
            log.info("session for %s ended: %s", request.get("for"), reason(error))
            if not isinstance(error, NetworkError):
                log.debug("in detail", exc_info=error)
            channel.abort(reason(error))
        finally:
            channel.close()


def answer(
    address: str, credentials: Credentials, model: nn.Module, x: torch.Tensor, name: str | None = None
) -> Answering:
    """Answer queries with `model`.

    Args:
        model: in evaluation mode.
        x: an example batch of at least two rows, for torch.export.
        name: the certificate's common name, which is the default.

    Raises:
        ProgramError: the model cannot be described. IdentityError: the name or the certificate is refused.
    """
    description, weights = describe(model, x)
    running = Answering(address, credentials, description, weights)
    try:
        running.register(name or credentials.name)
    except BaseException:
        running.close()
        raise
    return running
