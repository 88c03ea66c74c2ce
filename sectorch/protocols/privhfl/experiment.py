"""`PrivHFL`: Algorithm 1 with its clients, settings, folders and parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from torch import nn

from ...federated.errors import FederationError
from ...federated.participants import FederatedExperiment, Participant
from ...federated.run import Held, Run
from ...federated.watch import Estimate
from ...session import S
from .algorithm import Inputs, answering, ask, privhfl
from .controls import control
from .report import Result, accuracies
from .settings import Settings, check


class PrivHFL(FederatedExperiment[Result, Participant, Settings]):
    """Heterogeneous federated learning without an auxiliary data set; the parties are its clients.

    See `FederatedExperiment` for the arguments. `run()` does all of Algorithm 1, or the part of it that is not in `out`
    yet, and gives a `Result` with the trained models of the clients that are here.

    Raises:
        FixedPointRangeError: on a run: a trained model leaves the range of the number format on its owner's own data.
    """

    label, servers, whose = "privhfl", (S.name,), "clients"

    def _checked(self, settings: Settings | None, complete: bool) -> Settings:
        how = settings or Settings()
        if not (complete or (how.asks and how.secure)):
            raise FederationError("controls, and queries in the clear, are for a simulation: they protect nothing")
        self._query = check(self.parties, self.test, self.classes, how)
        return how

    def algorithm(self, run: Run) -> dict[str, Held]:
        (data, seed), instead = self._brought(run), None if self.settings.asks else control
        given = Inputs(list(data), data, seed, run.public(self.test), self.classes, self.settings, instead)
        return privhfl(run, given)

    def outcome(self, found: Mapping[str, Held]) -> Result:
        models: dict[str, nn.Module] = {c.name: found[c.name].value for c in self.mine}
        return Result(
            self.mine, self.classes, self.settings, self.records(), models, len(self.parties), self.stages.apart
        )

    def records(self) -> dict[str, list[dict]]:
        """Of each client that is here, as far as it has come: a record of local training and one of each round."""
        done = {record["stage"]: record for record in self.stages.records}
        found: dict[str, list[dict]] = {}
        for client in self.mine:
            for t in range(self.settings.iterations + 1):
                stage = f"round-{t}/{client.name}"
                if f"{stage}/accuracy" not in done:
                    break
                record = {"accuracy": done[f"{stage}/accuracy"]["value"]}
                if t == 0:
                    record["seconds"] = done[f"local/{client.name}"]["seconds"]
                else:
                    record |= self._asked(client, t, done.get(f"{stage}/labels", {}))
                    record["retraining"] = done[f"{stage}/model"]["seconds"]
                found.setdefault(client.name, []).append(record)
        return found

    def _asked(self, client: Participant, t: int, record: Mapping) -> dict:
        """Who answered in a round, and what it took."""
        if not self.settings.asks:
            return {"answering": [], "queries": 0}
        count, _ = self.settings.budget(len(client.images))
        names = answering([c.name for c in self.parties], client.name, t, self.settings)
        kept = {name: record[name] for name in ("share", "predict", "aggregate", "chunk", "received") if name in record}
        return {"answering": names, "queries": count, **kept}

    def so_far(self) -> Table:
        """Each client's accuracies as far as the run has come."""
        return accuracies(self.parties, self.records(), self.settings.iterations)

    def estimate(self) -> Estimate | None:
        """What is left: training, from a few batches of each client; asking, from a query to each architecture. None
        in a federation."""
        return self.stages.estimate(self.algorithm, {ask: self._asking})

    def _asking(self, queries, names: Sequence[str], models: Sequence[nn.Module], *_) -> Estimate:
        measured = [self._query[str(model)] for model in models]
        return sum((session + query * len(queries) for session, query in measured), Estimate(0.0))
