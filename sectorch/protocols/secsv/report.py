"""What a valuation found and what it cost, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from ...choreography import PROTOCOLS
from ...display import Plot
from ...federated.outcome import Outcome, learned, merged, titled
from .settings import Settings
from .testers import communication
from .values import LEVEL, MOST, Gains, error, error_bound, members, of_rounds, total


@dataclass
class Round:
    """One round: who attended, their values, the exact ones in the clear (where compared), and the records."""

    players: list[int]
    values: dict[int, float]
    exact: dict[int, float] | None
    records: dict[int, dict] = field(repr=False)
    begun: list[dict] = field(repr=False)
    wrong: list[int] | None
    """Of each coalition tested, how many samples it was wrongly not tested on; known in the clear."""
    nobody: float
    """The utility of the global model that the round began with."""


@dataclass
class Result(Outcome):
    """The outcome. `values` are the federated Shapley values by client name."""

    names: list[str]
    settings: Settings
    level: str
    rounds: Sequence[Round]
    samples: int
    seconds: float
    training: Sequence[dict] = ()
    """The ledger's rows of the training, where it was part of the run."""

    @property
    def values(self) -> dict[str, float]:
        found = total(r.values for r in self.rounds)
        return {name: found.get(i, 0.0) for i, name in enumerate(self.names)}

    @property
    def exact(self) -> dict[str, float] | None:
        """The same in the clear."""
        if (known := self._compared("exact")) is None:
            return None
        found = total(known)
        return {name: found.get(i, 0.0) for i, name in enumerate(self.names)}

    def _compared(self, name: str) -> list | None:
        """A field of all rounds that is known where these were compared with the clear."""
        known = [getattr(r, name) for r in self.rounds]
        return None if None in known else known

    @property
    def error(self) -> float | None:
        """Euclidean distance from the values in the clear."""
        exact = self.exact
        return None if exact is None else error(self.values, exact)

    @property
    def skipped(self) -> float:
        """The share of samples that SampleSkip left out, over all aggregated models (Figure 8)."""
        return self._share(lambda record: self.samples - record["tested"])

    @property
    def skippable(self) -> float:
        """The share that Algorithm 7 found; more than `skipped` where leaving samples out would have saved nothing."""
        return self._share(lambda record: record["skippable"])

    def _share(self, count: Callable[[dict], int]) -> float:
        some = [r for one in self.rounds for c, r in one.records.items() if c.bit_count() > 1]
        return sum(map(count, some)) / (len(some) * self.samples) if some else 0.0

    @property
    def wrong(self) -> float | None:
        """The share of samples skipped that the model gets wrong in the clear, over all aggregated models."""
        if (known := self._compared("wrong")) is None:
            return None
        some = sum(c.bit_count() > 1 for one in self.rounds for c in one.records)
        return sum(map(sum, known)) / (some * self.samples) if some else 0.0

    @property
    def skip_bound(self) -> float | None:
        """What SampleSkip changed any value by at most (Lemma 6.4), where that is known."""
        if (known := self._compared("wrong")) is None:
            return None
        return error_bound(len(self.rounds), max((max(wrong, default=0) for wrong in known), default=0) / self.samples)

    @cached_property
    def _gains(self) -> list[dict[int, Gains]] | None:
        if any(len(r.players) > MOST for r in self.rounds):
            return None
        rounds = [(r.players, r.records, r.nobody) for r in self.rounds]
        return of_rounds(rounds, self.samples, self.settings.nobody == "previous")

    @cached_property
    def round_intervals(self) -> list[dict[int, tuple[float, float]]] | None:
        """Of each round's values, a 95 % confidence interval over test samples, by client; None for many clients."""
        if self._gains is None:
            return None
        return [{i: one.interval() for i, one in gained.items()} for gained in self._gains]

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]] | None:
        """Of the federated values, by client name; of a client who attended no round, nothing but zero."""
        if self._gains is None:
            return None
        found: dict[int, Gains] = {}
        for i, one in (pair for gained in self._gains for pair in gained.items()):
            found[i] = found[i] + one if i in found else one
        return {n: found[i].interval() if i in found else (0.0, 0.0) for i, n in enumerate(self.names)}

    def spent(self, key: str) -> Counter:
        """Seconds by kind, bytes or messages by edge, over all that was done."""
        found: Counter = Counter()
        for one in self.rounds:
            for record in [*one.begun, *one.records.values()]:
                found.update(record.get(key, {}))
        return found

    def counted(self, key: str) -> int:
        """ "products" or "rotations"."""
        return sum(r.get(key, 0) for one in self.rounds for r in [*one.begun, *one.records.values()])

    def table(self, each_round: bool = True) -> Table:
        """Each client's value per round, if wanted, and in all; with the exact one where it is known."""
        how, rounds = self.settings, self.rounds if each_round else []
        exact, between, skip = self.exact, self.intervals, ", SampleSkip" if how.skipping != "never" else ""
        more = [*([f"{LEVEL:.0%} interval"] if between else []), *(["plain"] if exact else [])]
        heads = ("client", *(f"round {t + 1}" for t in range(len(rounds))), "value", *more)
        shown = titled(f"Shapley values: {how.protocol}, {how.estimator}{skip}", heads, 1)
        for i, name in enumerate(self.names):
            each = [f"{r.values[i]:+.4f}" if i in r.values else "" for r in rounds]
            ends = ["{:+.3f} to {:+.3f}".format(*between[name])] if between else []
            plain = [f"{exact[name]:+.4f}"] if exact else []
            shown.add_row(name, *each, f"{self.values[name]:+.4f}", *ends, *plain)
        return shown

    def headline(self) -> dict[str, float]:
        return dict(self.values)

    def tables(self) -> list[Table]:
        return [self.table()]

    def show(self, console: Console) -> None:
        """The values of each round stand in the table where the console is wide enough for all of it."""
        table, unbound = self.table(), console.options.update(width=1 << 16)
        if console.measure(table, options=unbound).maximum > console.width:
            table = self.table(each_round=False)
            table.caption = "the values of each round are in results.json"
        console.print(table)
        for line in self.sentences():
            console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)

    def sentences(self) -> list[str]:
        seconds = self.spent("seconds")
        size = sum(self.spent("bytes").values())
        parts = ", ".join(f"{kind} {seconds[kind]:.2f}" for kind in sorted(seconds))
        out = [f"{self.counted('products')} homomorphic products, {self.counted('rotations')} rotations"]
        if self.level != "none":
            out.append(f"routing level {self.level} (Proposition 6.8)")
            out.append(
                "every client knows the model of all clients together from training: who decrypts that coalition's "
                "first layer solves for the samples once its outputs, over all rounds, are as many as its inputs "
                "(against Proposition 6.8; protocol='secretsv', --protocol secretsv: nobody sees outputs)"
            )
        if self.error is not None:
            out.append(f"error against plain (Euclidean): {self.error:.2e}")
        if self.settings.skipping != "never":
            wrong = "" if self.wrong is None else f", {100 * self.wrong:.3f} % wrongly"
            out.append(f"SampleSkip left out {100 * self.skipped:.1f} % of the samples of aggregated models{wrong}")
            if self.skippable > self.skipped:
                out.append(
                    f"Algorithm 7 found {100 * self.skippable:.1f} %; testing the rest alone would have taken as many "
                    f"ciphertexts (skip='always', --skip always: leave them out nevertheless)"
                )
            if self.skip_bound is not None:
                out.append(f"SampleSkip changed no value by more than {self.skip_bound:.2e} (Lemma 6.4)")
        elif self.settings.protocol == "secsv":
            out.append("SampleSkip was off (skip='never'): every model was tested on every sample")
        if self.intervals is not None:
            of = "how many" if self.settings.protocol == "hesv" else "which"
            out.append(
                f"each interval holds the value over the populations that the owners' {self.samples} test samples were "
                f"drawn from independently, for any such populations, from {of} samples were classified correctly"
            )
        out.append(
            f"seconds of all parties one after another: {parts}; {size / 1e6:.1f} MB, {communication(size):.2f} s at "
            f"1 Gbit/s"
        )
        for line in self.statement():
            out.append(line)
        return out

    def received(self) -> list[dict]:
        """The ledger's rows, by role and message, of the valuation and of the training before it."""
        sizes, rows = self.spent("bytes"), []
        for key, count in self.spent("messages").items():
            _, role, message = key.split(">")
            name, _, label = message.partition("/")
            declared = PROTOCOLS[name].message(label) if name in PROTOCOLS else None
            hidden, shows = (declared.mask, declared.shows) if declared else ("", "")
            rows.append({
                "role": role, "protocol": name, "message": label, "hidden_by": hidden, "shows": shows,
                "messages": count, "bytes": sizes[key],
            })  # fmt: skip
        return merged([rows, list(self.training)])

    def statement(self) -> list[str]:
        """What each role received and learned, from the ledger."""
        clear = "the valuation was in the clear: whoever computes it has all models and all test samples"
        return [*([clear] if self.settings.protocol == "plain" else []), *told_by(self.received())]

    def as_dict(self) -> dict:
        """For JSON."""
        return dict(
            settings=self.settings.as_dict(),
            routing=self.level,
            clients=self.names,
            values=self.values,
            level=LEVEL,
            intervals=self.intervals,
            exact=self.exact,
            error=self.error,
            skipped=self.skipped,
            skippable=self.skippable,
            wrongly_skipped=self.wrong,
            skip_bound=self.skip_bound,
            samples=self.samples,
            rounds=[
                dict(
                    nobody=r.nobody,
                    values=_named(r.values, self.names),
                    intervals=self.round_intervals and _named(self.round_intervals[t], self.names),
                    exact=r.exact and _named(r.exact, self.names),
                    coalitions=[
                        dict(clients=[self.names[i] for i in members(c)], utility=x["right"] / self.samples,
                             tested=x["tested"])
                        for c, x in r.records.items()
                    ],
                )
                for t, r in enumerate(self.rounds)
            ],
            products=self.counted("products"),
            rotations=self.counted("rotations"),
            seconds=dict(self.spent("seconds")),
            bytes=dict(self.spent("bytes")),
            received=self.received(),
            wall_seconds=self.seconds,
        )  # fmt: skip

    def rows(self) -> dict[str, list[dict]]:
        ends = lambda t, i: self.round_intervals[t][i] if self.round_intervals else (None, None)
        one = lambda t, r, i: dict(
            client=self.names[i], round=t + 1, value=r.values[i], low=ends(t, i)[0], high=ends(t, i)[1],
            plain=(r.exact or {}).get(i),
        )  # fmt: skip
        return {"values": [one(t, r, i) for t, r in enumerate(self.rounds) for i in r.players if i in r.values]}

    def plots(self) -> list[Plot]:
        each = {
            name: {t + 1: r.values[i] for t, r in enumerate(self.rounds) if i in r.values}
            for i, name in enumerate(self.names)
        }
        bars = {self.settings.protocol: self.values, **({"plain": self.exact} if self.exact else {})}
        ends = {self.settings.protocol: self.intervals} if self.intervals else {}
        return [
            Plot("values_by_round", "round", "single-round Shapley value", each),
            Plot("values", "client", "federated Shapley value", bars, kind="bars", ends=ends),
        ]


def told_by(rows: list[dict]) -> list[str]:
    """A sentence for each role that received anything."""
    names = {"C": "A client", "P": "The principal server P", "X": "The auxiliary server X"}
    roles = [str(row["role"]) for row in rows]
    return learned(rows, {role: names.get(role, role) for role in roles}, "nothing")


def _named(values: Mapping[int, Any], names: Sequence[str]) -> dict[str, Any]:
    return {names[i]: v for i, v in values.items()}
