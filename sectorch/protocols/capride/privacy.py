"""(epsilon, delta) of the Gaussian noise on aggregates, and a run's statement in words.

**What it is stated for.** Neighbours are two models of P_l whose logits on one of P_k's samples differ, by at most
`logit_change` in the largest entry, while the others agree. P_k divides each direction so that a sample enters an
aggregate with weights whose magnitudes add up to at most 1 (`Directions.of`; P_l cannot see that, it relies on an
honest P_k). Such a change moves each of the R numbers of a round by at most logit_change / T, and their vector by
sqrt(R) times that in the L2 norm. Rounds add up in Renyi divergence; the conversion to (epsilon, delta) is
`sectorch.dp`'s.

It is a statement on P_l's logits, not on P_l's training data. The flooding of `flood_bits` is not counted.
"""

from __future__ import annotations

import math

from .settings import Settings


def epsilon(records: dict[str, list[dict]], how: Settings) -> float | None:
    """The largest epsilon of any party asked about any of its peers, over all rounds; None without noise."""
    asked = [r["sigma"] for found in records.values() for r in found if "sigma" in r]
    if not asked or min(asked) == 0:
        return None
    # dp-accounting is needed for runs with noise only.
    from ...dp.renyi import epsilon_of, gaussian_curve

    change = how.logit_change / how.temperature
    worst = 0.0
    for found in records.values():
        for peer in {name for r in found for name in r.get("asked", ())}:
            asked = [r for r in found if peer in r.get("asked", ())]
            curves = [gaussian_curve(r["sigma"], change * math.sqrt(r["released"])) for r in asked]
            worst = max(worst, epsilon_of(sum(curves[1:], curves[0]), how.delta)) if asked else worst
    return worst


def statement(
    size: int, numbers: int, how: Settings, eps: float | None, leakage: float, apart: bool = False
) -> list[str]:
    """What each party got to know, in words.

    Args:
        size: bytes of all messages.
        numbers: that the guards counted.
        leakage: the largest that any party measured of any of its peers.
    """
    if not how.asks:
        seen = {
            "local": "Nothing was exchanged.",
            "fedavg": "Every party's model was open to the averaging.",
            "fedavg-dp": f"Every party's model was open to the averaging but for noise of {how.model_sigma:g}.",
        }.get(how.method, "Every party's logits on every other party's samples were open.")
        return [f"A baseline, which protects nothing of what it exchanges. {seen}"]
    if not how.encrypted:
        return [
            f"Simulated in the clear: {numbers} aggregates that an encrypted run would have released. Protects nothing."
        ]
    out = [
        f"{size / 1e6:.1f} MB of ciphertexts and public keys travelled; {numbers} numbers were released to the owners "
        f"of the samples, who alone can decrypt them, all of them aggregates over a batch.",
        f"Each decrypted number is a linear equation on a peer's logits. All together explain up to {leakage:.3g} of "
        f"what sets them apart from the owner's own on a sample (measured by the owner before it asked; "
        + ("NO limit was set)." if how.leakage is None else f"limit {how.leakage:g})."),
    ]
    if how.update == "scalar":
        out.append("Scalar mode: the decrypted number has no gradient. No model learned anything from a peer.")
    if eps is not None:
        out.append(
            f"With the noise on each aggregate: ({eps:.3g}, {how.delta:g})-DP for a change of one sample's "
            f"logits by at most {how.logit_change:g}."
        )
    return [
        *out,
        "Public: shapes, architectures' depths, who asks whom, which samples (by number) a round is over.",
        "Not covered: parties that cheat, what the trained models show, and pairs of models unlike the meter's prior.",
        "Each party ran in a process of its own."
        if apart
        else "All parties ran in one process, which therefore protected nothing: this is a simulation of the parties.",
    ]
