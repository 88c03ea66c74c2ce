"""Clients that a party knows from its federation's file, in place of a file of pins."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import IdentityError
from ..identity.identity import Pins, fingerprint


class Listed(Pins):
    """Fingerprints by name, of those alone that may ask, or be asked.

    Args:
        where: the file that says so, for messages.
    """

    def __init__(self, known: Mapping[str, str], where: str):
        super().__init__(where)
        self._known = dict(known)

    def known(self) -> dict[str, str]:
        return dict(self._known)

    def check(self, name: str, public: bytes) -> None:
        wanted, came = self._known.get(name), fingerprint(public)
        if wanted is None:
            raise IdentityError(
                f"{self.path} does not list '{ascii(name)[1:-1][:64]}'",
                told=f"the other party has not accepted that '{ascii(name)[1:-1][:64]}' asks",
            )
        if came != wanted:
            raise IdentityError(
                f"the federation file names the key {wanted} for '{name}', and this one is {came}: somebody may stand "
                f"in between",
                told=f"the other party's federation file names another key for '{name}' than {came}",
            )
