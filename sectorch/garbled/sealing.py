"""What Q and A say to each other goes through S, sealed end to end."""

from __future__ import annotations

from ..choreography import Located, Message, Net, Party, protocol


@protocol(
    "garbled_relay",
    "PrivHFL, C.5 (CaPC without a channel between clients)",
    [
        Message("from_A", "A", "S", "pad of k_QA", opens="Q", outermost=True),
        Message("to_Q", "S", "Q", "pad of k_QA; within it, see the protocol that sends it", opens="Q", outermost=True),
        Message("from_Q", "Q", "S", "pad of k_QA", opens="A", outermost=True),
        Message("to_A", "S", "A", "pad of k_QA; within it, see the protocol that sends it", opens="A", outermost=True),
    ],
)
def relay(net: Net, value: Located, src: Party, dst: Party) -> Located:
    """`value` goes from Q to A or back through S, under a one-time pad from the stream of their pair key.

    Args:
        value: int64 at `src`, any shape.
        src, dst: Q and A, in the direction of the message.

    Returns:
        the value, at `dst`.

    Rounds 2; the bytes of the value, on both edges. S receives uniform bits. The pad hides; it does not authenticate:
    S, which is honest but curious, could flip bits.
    """
    away = src == net.A
    pad = net.common(net.Q, net.A, value.shape, "pad")
    sealed = (value.at(src.role) ^ pad).send(src, net.S, "from_A" if away else "from_Q")
    sealed = sealed.send(net.S, dst, "to_Q" if away else "to_A")
    return sealed.at(dst.role) ^ pad


def deliver(net: Net, value: Located, src: Party, dst: Party, label: str) -> Located:
    """`value` of `src` becomes known to `dst`: over their edge where one is S, else by `relay`."""
    if net.S in (src, dst):
        return value.send(src, dst, label)
    return relay(net, value, src, dst)
