"""The server S: relays keys, holds one half of every share, and serves many sessions at once."""

from __future__ import annotations

import logging
import os
import threading

from ..errors import NetworkError, SectorchError
from ..nn.program import load_program
from ..session import A, Q, S
from .certificates import Credentials
from .link import Channel, Link
from .session import PartySession, reason, scheme_of
from .transport import listen

log = logging.getLogger("sectorch.server")
RUNNING = 2
"""Calls that run at the same time; further ones wait their turn, so that memory stays bounded."""


class Server:
    """S as a service. Only S listens; clients dial out and prove their names by certificate.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        running: calls that run at the same time.
    """

    def __init__(self, address: str, credentials: Credentials, running: int = RUNNING):
        self._models: dict[str, tuple[Link, dict]] = {}
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(running)
        self._grpc, self.port = listen(address, credentials, self._welcome)

    def stop(self) -> None:
        """Stop serving; running sessions fail at the clients with a typed error."""
        self._grpc.stop(grace=0.5).wait(timeout=5)

    def wait(self) -> None:
        """Until stopped."""
        self._grpc.wait_for_termination()

    def models(self) -> list[str]:
        """Names of the answering parties that are connected."""
        with self._lock:
            return sorted(name for name, (link, _) in self._models.items() if link.closed is None)

    def _welcome(self, name: str) -> Link:
        log.info("%s connected", name)
        return Link(name, self._request)

    def _request(self, link: Link, request: dict) -> None:
        """A request that belongs to no session, from a client whose certificate says `link.peer`."""
        what, number = request.get("do"), request.get("number")
        try:
            if what == "register":
                answer = self._register(link, request)
            elif what == "models":
                answer = {"models": self.models()}
            elif what == "open":
                answer = self._open(link, request)
            else:
                answer = {"error": "FrameError", "text": "an unknown request"}
        except SectorchError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        link.tell({"do": "reply", "number": number, **answer})

    def _register(self, link: Link, request: dict) -> dict:
        name = str(request.get("name"))
        if name != link.peer:
            text = f"the certificate is for '{link.peer}' and cannot answer as '{name}'"
            return {"error": "IdentityError", "text": text}
        description = request.get("description")
        load_program(description if isinstance(description, dict) else {})
        with self._lock:
            held = self._models.get(name)
            if held is not None and held[0].closed is None and held[0] is not link:
                return {"error": "IdentityError", "text": f"'{name}' is answering already"}
            self._models[name] = (link, description)
        log.info("%s answers", name)
        return {}

    def _open(self, link: Link, request: dict) -> dict:
        name = str(request.get("model"))
        with self._lock:
            held = self._models.get(name)
        if held is None or held[0].closed is not None:
            text = f"no model '{name}' is connected; there are: {', '.join(self.models()) or 'none'}"
            return {"error": "UnknownModelError", "text": text}
        answering, description = held
        scheme_of(request)
        session = os.urandom(16)
        channels = {Q: link.open(session), A: answering.open(session)}
        answering.tell({"do": "serve", "session": session.hex(), "for": link.peer, **_scheme(request)})
        threading.Thread(
            target=self._serve, args=(session, channels, description, request), daemon=True, name=f"{link.peer}-{name}"
        ).start()
        return {"session": session.hex(), "description": description}

    def _serve(self, session: bytes, channels: dict, description: dict, request: dict) -> None:
        """S's side of one session, to its end."""
        try:
            party = PartySession(S, session, channels, description, scheme_of(request))
            while True:
                asked = channels[Q].request()
                if asked.get("do") == "close":
                    channels[A].tell(asked)
                    break
                with self._turns:
                    channels[A].tell(asked)
                    party.follow(asked)
        except Exception as error:
            log.info("session ended: %s", reason(error))
            _abort(channels, error)
        finally:
            for channel in channels.values():
                channel.close()


def _scheme(request: dict) -> dict:
    return {k: request[k] for k in ("frac_bits", "value_bits") if k in request}


def _abort(channels: dict[object, Channel], error: BaseException) -> None:
    for channel in channels.values():
        channel.abort(str(error) if isinstance(error, NetworkError) else reason(error))
