"""At an answering party: the models that it has, by name, each as it is now and as older sessions know it."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...choreography.run.frames import raw
from ...choreography.streams import derive
from ...errors import SessionOverError
from ...nn.precision import check_served
from ...nn.program import load_program
from ..store.store import fingerprint, version
from ..wire.channel import Channel
from .known import Known

RESTING = 2.0
"""Seconds without a call after which a session of an older version is ended."""


@dataclass(eq=False)
class Offer:
    """A model under a name, as it was given.

    Attributes:
        name: PARTY or PARTY/MODEL. edition: this party's name for the weights.
        made: when it was given, in microseconds; the latest version is the one that answers.
        over: whether another one has taken its place.
    """

    name: str
    description: dict
    weights: dict[str, torch.Tensor] = field(repr=False)
    edition: str
    made: int
    programs: Known = field(default_factory=Known, repr=False)
    over: bool = False

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.description)

    @property
    def version(self) -> str:
        return version(self.description, self.edition)


class Offers:
    """The models of one answering party, and the sessions in which they are asked.

    Args:
        party: its name. identity: its long-term key, from which its names for weights come: they are the same at all
            processes of the party, and say nothing about the weights to others.
        imprecise: whether models that lose digits in fixed point are offered, with a warning.
    """

    def __init__(self, party: str, identity: Ed25519PrivateKey, imprecise: bool = False):
        self._party, self._key, self._imprecise = party, identity.private_bytes_raw(), imprecise
        self._lock = threading.Lock()
        self._offers: dict[str, list[Offer]] = {}
        self._asked: dict[Channel, tuple[Offer, float | None]] = {}

    def give(self, model: str, description: dict, weights: dict[str, torch.Tensor]) -> Offer | None:
        """From now on this is the model; None if it was so already. What it takes the place of stays until `retire`.

        Args:
            model: its name after the party's; empty for the party's own.

        Raises:
            ProgramError: it is no description, or the weights do not fit it. Nothing changes.
            PrecisionError: it loses digits in fixed point. Nothing changes.

        Warns:
            PrecisionWarning: it does, and such models are offered.
        """
        served, name = load_program(description, weights), f"{self._party}/{model}" if model else self._party
        check_served(served, name, self._imprecise)
        edition = derive(self._key, _digest(weights), "edition", 16).hex()
        new = Offer(name, description, weights, edition, _now())
        with self._lock:
            held = self._offers.setdefault(new.name, [])
            if held and held[-1].version == new.version:
                return None
            held.append(new)
        return new

    def retire(self) -> None:
        """End the sessions of models whose place others have taken, as soon as they have no running call."""
        with self._lock:
            for held in self._offers.values():
                for offer in held[:-1]:
                    offer.over = True
                del held[:-1]
        threading.Thread(target=self._part, daemon=True, name="retiring").start()

    def _part(self) -> None:
        """A session has ended its call some time after this party has done its part: the server goes on with it."""
        while True:
            with self._lock:
                left = [(channel, *asked) for channel, asked in self._asked.items() if asked[0].over]
            for channel, offer, since in left:
                if since is not None and time.monotonic() - since > RESTING:
                    channel.fail(_over(offer))
                    self.end(channel)
            if not left:
                return
            time.sleep(RESTING / 4)

    def all(self) -> list[Offer]:
        """As they are now."""
        with self._lock:
            return [held[-1] for held in self._offers.values()]

    def find(self, name: object, edition: object) -> Offer:
        """The model that a session is opened with.

        Raises:
            SessionOverError: another version has taken its place, or there is none of that name.
        """
        with self._lock:
            found = next((o for o in self._offers.get(str(name), []) if o.edition == edition), None)
        if found is None:
            raise SessionOverError(f"'{self._party}' has another version now; ask again")
        return found

    def begin(self, channel: Channel, offer: Offer) -> None:
        """A call of a session begins.

        Raises:
            SessionOverError: another version has taken the model's place; nothing of the call was done.
        """
        with self._lock:
            if offer.over:
                raise _over(offer)
            self._asked[channel] = offer, None

    def rest(self, channel: Channel, offer: Offer) -> None:
        """A session has no call now."""
        with self._lock:
            self._asked[channel] = offer, time.monotonic()

    def end(self, channel: Channel) -> None:
        """A session has ended."""
        with self._lock:
            self._asked.pop(channel, None)


def _over(offer: Offer) -> SessionOverError:
    return SessionOverError(f"'{offer.name}' has another version now; asking again opens a session with that one")


def _now() -> int:
    return time.time_ns() // 1000


def _digest(weights: dict[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(raw(value))
    return digest.digest()
