"""What a call has dealt and still has to prove: noted where it is dealt, and proved before anything is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...choreography import Located, Net, Party, Phase
from ...choreography.program.nodes import Node
from ...choreography.program.trace import Program
from ...choreography.steps import Compute, Move
from ...errors import UnsupportedOpError
from .halves import Halves, Words
from .prove import prove
from .rows import Products

NOTED = ("deal", "deal_bits")
"""Protocols whose messages are claimed, and proved later."""
PROVED = (*NOTED, "prove", "deal_product", "check_places", "check_channels")
"""Those in which a dealer may send where dealing is proved: `deal_product` has its own looked at at once."""

MOST = 1 << 22
"""Words of claims that are kept before they are proved: a proof works on some 500 MiB for them, of all parties."""

Claim = Callable[[Halves], None]
"""Notes what has to hold of a value that was dealt in these halves."""


@dataclass
class Claims:
    """What is not proved yet."""

    products: list[Products] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)
    masks: dict[Located, tuple[Halves, Halves]] = field(default_factory=dict)
    """The bits of masks, and the planes of their halves, by the half that A has; see `proved.py`."""

    @property
    def size(self) -> int:
        """Words of all claims."""
        return sum(sum(p.words) for p in self.products) + sum(w.base.shape.numel() for w in self.words)


def claims_of(net: Net) -> Claims:
    """Those of a call."""
    if net.claims is None:
        net.claims = Claims()
    return net.claims


def noted(net: Net, claim: Claim | None, dealt: Halves) -> None:
    """Note the claim of a dealt value, where dealing is proved.

    Raises:
        UnsupportedOpError: it has none.
    """
    if claim is None:
        check_unproved(net)
    elif net.verified and dealt.shape.numel():
        claim(dealt)
        if claims_of(net).size > MOST:
            settle(net)


def check_unproved(net: Net) -> None:
    """Raise UnsupportedOpError where dealing is proved, in a protocol that deals what has no proof."""
    if net.verified:
        raise UnsupportedOpError(
            "with verified=True every dealt value is proved, and there is no proof of what this operation deals; "
            "audited=n covers all operations"
        )


def settle(net: Net) -> None:
    """Prove what is not proved yet. Whatever shows a result, or anything of one, does this first."""
    found = net.claims
    if found is not None and found.size:
        net.claims = Claims(masks=found.masks)
        prove(net, found.products, found.words)


def check_proved(program: Program, dealer: Party) -> None:
    """Look once more at a program that was traced with verified=True, whoever wrote what is in it.

    Raises:
        UnsupportedOpError: the dealer sends what is not among what is proved, or something goes to others than A and S
            that depends on what was dealt after the last proof before it.
    """
    latest: dict[Any, int] = {}
    """The last step of dealing that a value depends on."""
    proof = -1
    for i, node in enumerate(program.call):
        depends = max((latest.get(slot, -1) for slot in node.taken), default=-1)
        header = node.step.header if isinstance(node.step, Move) else None
        if _is_proof(node):
            proof = i
        elif header is not None and header.src == dealer and header.phase != Phase.ONLINE:
            if header.protocol not in PROVED:
                raise UnsupportedOpError(f"'{header.path}' deals '{header.label}', which is not proved; use audited=n")
            depends = i if header.protocol in NOTED and header.bytes else depends
        elif (
            header is not None and header.dst.role not in ("A", "S") and header.protocol != "prove" and depends > proof
        ):
            raise UnsupportedOpError(f"'{header.path}' sends '{header.label}' to {header.dst} before all is proved")
        latest.update(dict.fromkeys(node.slots, depends))


def _is_proof(node: Node) -> bool:
    return isinstance(node.step, Compute) and not node.step.pure and node.step.path.split("/")[-1] == "prove"
