"""One session of three processes, from the side of whichever party this process is.

Q opens it and names what is to be run; S and A follow. All three build the same program from the model's description,
run the seed protocol, and then one call after the other.
"""

from __future__ import annotations

import torch

from ..choreography import Party
from ..errors import FrameError, NetworkError, SectorchError
from ..nn.program import load_program
from ..nn.secure import SecureModule
from ..runtime.party import PartyRuntime
from ..session import Session
from ..tensor import Scheme
from .link import Channel

MAX_ELEMENTS = 1 << 28


class PartySession:
    """This party's part in one session."""

    def __init__(
        self, me: Party, session: bytes, channels: dict[Party, Channel], description: dict, scheme: Scheme,
        weights: dict[str, torch.Tensor] | None = None,
    ):  # fmt: skip
        program = load_program(description, weights)
        self.row, self.dtype = program.row, program.dtype
        self.session = Session(runtime=PartyRuntime(me, session, channels))
        self.secured = SecureModule(program.module, self.session, self.session.answering[0], scheme, None)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model; Q's x has content, the others' only a shape."""
        return self.secured(x)

    def prepare(self, shape: torch.Size) -> int:
        """Make the offline material of one later call."""
        return self.secured.preprocess(shape[0], tuple(shape[1:]))

    def follow(self, request: dict) -> None:
        """Take part in what Q asked for, at A or S.

        Raises:
            FrameError: a request that this version does not know, or of an impossible shape.
        """
        shape = request.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and 0 < n < MAX_ELEMENTS for n in shape):
            raise FrameError("a request without a usable shape")
        if torch.Size(shape).numel() > MAX_ELEMENTS:
            raise FrameError(f"a request for more than {MAX_ELEMENTS} elements")
        if request.get("do") == "predict":
            self.predict(torch.empty(shape, dtype=self.dtype, device="meta"))
        elif request.get("do") == "prepare":
            self.prepare(torch.Size(shape))
        else:
            raise FrameError(f"an unknown request {str(request.get('do'))[:40]!r}")


def scheme_of(request: dict) -> Scheme:
    """The number representation that Q asks for.

    Raises:
        FrameError: not one that exists.
    """
    try:
        frac_bits, value_bits = request.get("frac_bits", 20), request.get("value_bits")
        if type(frac_bits) is not int or type(value_bits) not in (int, type(None)):
            raise FrameError("a scheme of wrong types")
        return Scheme(frac_bits, "exact", value_bits)
    except NetworkError:
        raise
    except SectorchError as error:
        raise FrameError(str(error)) from None


def reason(error: BaseException) -> str:
    """What the other parties are told of an error: its type, and the text of our own kinds, which hold no secret."""
    text = str(error) if isinstance(error, NetworkError) else "see that party's own log"
    return f"{type(error).__name__}: {text}"
