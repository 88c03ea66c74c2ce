"""`PrivHFL`: Algorithm 1 with its clients, settings, folders and parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from torch import nn

from ...federated.errors import FederationError
from ...federated.folder import Workers, digest
from ...federated.participants import Participant, Samples
from ...federated.parties import Parties, Simulation
from ...federated.run import Experiment, Held, Run
from ...federated.watch import Estimate, Watch
from ...session import S
from .algorithm import Inputs, answering, ask, privhfl
from .controls import control
from .report import Result, accuracies
from .settings import Settings, check


class PrivHFL(Experiment):
    """Heterogeneous federated learning without an auxiliary data set.

    Args:
        clients: each with its private data and a model of its own architecture.
        test: images and labels that accuracies are measured on.
        classes: how many.
        settings: see `Settings`.
        out: a folder for finished stages; a run that was killed goes on from there. None keeps nothing.
        local: a folder for the local training alone, which several runs may share; inside `out` unless named.
        workers: that train and ask for several clients at once, through `out`.
        together: who is here, of the clients by their names and the server S; all of them unless given. Of a client
            elsewhere the name, the number and shape of samples and the architecture are used, nothing else.
        own: seed of what a client draws and nobody else needs to know, its pool, choices and batches; `settings.seed`
            unless given. Apart, it is each client's own secret.

    `run()` gives a `Result`, with the trained models of the clients that are here. With all parties in this process it
    is a simulation. Apart, a run in which one is lost ends for all, and goes on where each was when all start again.

    Raises, before any training starts:
        FederationError, ArchitectureError: naming the client, what came, and the way out.
        FederationError: what protects nothing, among parties apart: controls, and queries in the clear.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self,
        clients: Sequence[Participant],
        test: Samples,
        classes: int,
        settings: Settings | None = None,
        *,
        out: str | Path | None = None,
        local: str | Path | None = None,
        workers: Workers | None = None,
        together: Parties | None = None,
        own: int | None = None,
    ):
        parties, how = together or Simulation(), settings or Settings()
        here = {client.name: parties.present(client.name) for client in clients}
        self.clients = [client if here[client.name] else client.elsewhere() for client in clients]
        self.mine = [client for client in clients if here[client.name]]
        self.test, self.classes, self.settings = test, classes, how
        self._own = how.seed if own is None else own
        self._query = check(self.clients, test, classes, how)
        people = [[c.name, len(c.images), c.shape, str(c.model)] for c in self.clients]
        self.stages = Run(
            {"run": "privhfl", **how.agreed, "people": people, "classes": classes},
            own={
                "clients": {c.name: c.fingerprint() for c in self.clients}, "test": digest(*test),
                "budgets": how.budgets, "budget_epsilon": how.budget_epsilon,
            },
            members=[*here, S.name], parties=parties, out=out, shared=local, workers=workers,
        )  # fmt: skip
        if self.stages.apart and not (how.asks and how.secure):
            raise FederationError("controls, and queries in the clear, are for a simulation: they protect nothing")

    def algorithm(self, run: Run) -> dict[str, Held]:
        how, names = self.settings, [c.name for c in self.clients]
        data = {c.name: run.bring(c.name, c, public=c.elsewhere()) for c in self.clients}
        seed = {name: run.bring(name, self._own) for name in names}
        test, instead = run.public(self.test), None if how.asks else control
        return privhfl(run, Inputs(names, data, seed, test, self.classes, how, instead))

    def run(self, watch: Watch | None = None) -> Result:
        """The whole of Algorithm 1, or the part of it that is not in `out` yet.

        Raises:
            FixedPointRangeError: a trained model leaves the range of the number format on its owner's own data.
        """
        return super().run(watch)  # pyright: ignore[reportReturnType]  as `outcome` gives it

    def outcome(self, found: Mapping[str, Held]) -> Result:
        models: dict[str, nn.Module] = {c.name: found[c.name].value for c in self.mine}
        return Result(
            self.mine, self.classes, self.settings, self.records(), models, len(self.clients), self.stages.apart
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
        names = answering([c.name for c in self.clients], client.name, t, self.settings)
        kept = {name: record[name] for name in ("share", "predict", "aggregate", "chunk", "received") if name in record}
        return {"answering": names, "queries": count, **kept}

    def so_far(self) -> Table:
        """Each client's accuracies as far as the run has come."""
        return accuracies(self.clients, self.records(), self.settings.iterations)

    def estimate(self) -> Estimate | None:
        """What is left: training, from a few batches of each client; asking, from a query to each architecture. None
        among parties apart."""
        return self.stages.estimate(self.algorithm, {ask: self._asking})

    def _asking(self, queries, names: Sequence[str], models: Sequence[nn.Module], *_) -> Estimate:
        measured = [self._query[str(model)] for model in models]
        return sum((session + query * len(queries) for session, query in measured), Estimate(0.0))
