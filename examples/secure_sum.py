"""A protocol with roles of its own: three hospitals and a collector, who learns their sum and nothing else.

    python examples/secure_sum.py
    sectorch run examples/secure_sum.py:program --input H1=a.npy --input H2=b.npy --input H3=c.npy

The second command simulates all parties; with `--federation FILE --as NAME` the same program runs as one of them, with
its own vector, and the others are elsewhere (docs/federation.md).

Each pair of hospitals shares a stream; of each pair one adds what it draws to its vector and the other subtracts it, so
that the masks cancel in the sum (Bonawitz et al., CCS 2017, of whom nobody drops out). The collector sees uniform bits
and their sum; a hospital receives nothing. Two hospitals and the collector together know the third one's vector, as
they do from the sum. One round, 8 bytes per element and hospital. Exact mod 2^64.
"""

from __future__ import annotations

import torch

import sectorch
from sectorch.choreography import Located, Message, Net, Roles, protocol
from sectorch.federated.parties import Parties
from sectorch.ring import decode, encode

HOSPITALS = ("H1", "H2", "H3")
ROLES = Roles("H1 H2 H3 C", edges="H1-H2 H2-H3 H1-H3 H1-C H2-C H3-C")


@protocol("secure_sum", "Bonawitz et al., CCS 2017, 4.0.1", [
    Message(f"masked_{hospital}", hospital, "C", "the streams of the hospitals") for hospital in HOSPITALS
], roles=ROLES)  # fmt: skip
def secure_sum(net: Net, x1: Located, x2: Located, x3: Located) -> Located:
    """x1 + x2 + x3 at C, for int64 tensors of one shape, each at its hospital."""
    H1, H2, H3, C = net.H1, net.H2, net.H3, net.C
    a, b, c = (net.common(p, q, x1.shape, "mask") for p, q in ((H1, H2), (H2, H3), (H3, H1)))
    return (
        (x1 + a - c).send(H1, C, "masked_H1")
        + (x2 + b - a).send(H2, C, "masked_H2")
        + (x3 + c - b).send(H3, C, "masked_H3")
    )


def total(net: Net) -> torch.Tensor:
    """What the collector reads of the hospitals' vectors of four ring elements."""
    vectors = (net.own(getattr(net, name), torch.empty(4, dtype=torch.int64), name=name) for name in HOSPITALS)
    return net.read(secure_sum(net, *vectors), net.C)


def program(parties: Parties) -> dict[str, torch.Tensor]:
    """The sum of the hospitals' vectors of four numbers, at the collector."""
    own = {name: encode(x, 20) for name, x in parties.inputs.items()}
    with parties.session(ROLES, label="secure sum") as session:
        found = session.run(session.trace(total), own)
    return {} if found.is_meta else {"sum": decode(found, 20)}


if __name__ == "__main__":
    session, vectors = sectorch.Session(roles=ROLES), torch.randn(3, 4)
    program = session.trace(total)
    print(program.draw(), program.party("C").code, sep="\n\n")
    found = session.run(program, dict(zip(HOSPITALS, encode(vectors, 20), strict=True)))
    torch.testing.assert_close(decode(found, 20), vectors.sum(0), rtol=0, atol=3 * 2.0**-21)
    print(f"the collector's sum: {decode(found, 20).tolist()}")
