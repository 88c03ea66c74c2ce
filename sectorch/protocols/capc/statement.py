"""The privacy statement of a run in words: what each role learned, from the ledger, and what the figures promise."""

from __future__ import annotations

from typing import Any

from ...dp import ConfidentGNMax, epsilon_of
from .record import STEPS


def sentences(result: Any) -> list[str]:
    """What a reader of the figures (a `report.Result`) must know beside them."""
    how, out = result.settings, []
    if not result.records:
        out.append("This party asked nothing: what each role received stands in the results of those that asked.")
    elif how.control is not None:
        out.append(f"Nobody was asked by the protocol: a control ({how.control}).")
    elif how.inference == "simulated":
        out.append(
            "This run computed all votes in the clear (inference='simulated'): labels are drawn from the same "
            "mechanism as in the secure run, and nothing was protected."
        )
    else:
        out += _learned(result)
        seconds = [sum(r.seconds[step] for r in result.records.values()) for step in STEPS]
        out.append("Seconds, all parties one after another: step 1a {:.1f}, 1b-1c {:.1f}, 2-3 {:.1f}.".format(*seconds))
    if how.control is None:
        out += [warning for name, f in result.forecasts.items() if (warning := f.warning(name))]
        for record in result.records.values():
            out += _spending(record)
        if len(result.records) > 1:
            out.append(
                f"If all {len(result.records)} querying parties pool their labels, the figures add up: epsilon "
                f"{result.epsilon_of_all:.3f} for an organisation that answered all of them."
            )
    repeated = "what repeated runs add up to (each starts a new budget)"
    if result.lasting:
        out.append(_lasting(result))
        repeated = "what organisations answered in runs that did not name their budgets"
    return [
        *out,
        "Public: model architectures, shapes, who asks, how many queries, the classes, the scale of the noise.",
        f"Not covered: {repeated}, the guardian colluding with anybody,"
        " parties that cheat, the query choice of a party (a party's own data are not protected from itself).",
        "Each party ran in a process of its own."
        if result.apart
        else "All parties ran in one process, which therefore protected nothing: this is a simulation.",
    ]


def _lasting(result: Any) -> str:
    """The organisations' own budgets: of the one that has least left, and how many there are."""
    owner, least = min(result.lasting.items(), key=lambda pair: pair[1].remaining)
    return (
        f"The {len(result.lasting)} answering organisations have budgets of their own, over all runs and askers that "
        f"were charged to them: {owner}, which has least left, has spent epsilon {least.spent:.3f} of {least.limit:g} "
        f"at delta {least.delta:g}."
    )


def _learned(result: Any) -> list[str]:
    """What each role received and learned, from the ledger's rows."""
    out = []
    for role, who in (("A", "Answering parties"), ("S", "The privacy guardian"), ("Q", "Querying parties")):
        mine = [row for row in result.received if row["role"] == role]
        size = sum(row["bytes"] for row in mine) / 1e6
        shown = sorted({f"{row['shows']} ({row['protocol']})" for row in mine if row["shows"]})
        out.append(f"{who} received {size:.2f} MB and learned: {'; '.join(shown) or 'nothing: masked values only'}.")
    if result.settings.inference == "open":
        out.append("The answering parties saw every query in plain (inference='open').")
    return out


def _spending(r: Any) -> list[str]:
    """What a party (a `report.Record`) got for which epsilon."""
    m = r.mechanism
    out = [
        f"{r.name}: {r.answered} labels by {type(m).__name__} with scale {m.scale:g}; ({r.budget.spent:.3f}, "
        f"{r.budget.delta:g})-DP for a change of all data of an organisation ({m.moved} "
        f"{'vote' if m.moved == 1 else 'votes'}), whatever the votes were."
    ]
    if isinstance(m, ConfidentGNMax):
        out.append(
            f"{r.name}: {len(r.asked) - r.answered} of {len(r.asked)} queries were not answered, for want of "
            f"{m.threshold} votes under noise of scale {m.sigma1:g}; their checks are in the figure."
        )
    if r.oracle is not None:
        out.append(
            f"{r.name}: the data-dependent epsilon would be {epsilon_of(r.oracle, r.budget.delta):.3f}. It depends "
            f"on the votes and is NOT private itself, and in the secure protocol nobody could compute it."
        )
    if r.lost:
        out.append(f"{r.name}: lost on the way: {', '.join(r.lost)}; the rest answered, with the same noise.")
    if r.stopped:
        out.append(f"{r.name}: stopped by its budget. {r.stopped}.")
    return out
