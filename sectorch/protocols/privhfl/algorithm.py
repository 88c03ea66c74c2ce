"""Algorithm 1 (PrivHFL, appendix C.1), line by line. The numbers in comments are the algorithm's lines."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn

from ...choreography.roles import STAR
from ...data.expansion import expand
from ...data.seeds import derive, generator
from ...data.selection import NEEDS, select
from ...federated.errors import FederationError
from ...federated.folder import RunFolder, Workers, digest, named
from ...federated.outcome import Received
from ...federated.participants import Participant, Samples
from ...federated.parties import Parties, Simulation, Turns, meet
from ...federated.training import accuracy, features, predict, seconds_of, train
from ...federated.watch import Estimate, Watch
from ...session import S
from .query import asks, check_range, plain_query, secure_query, soft_labels
from .report import Result, accuracies
from .settings import Settings, check

Work = tuple[torch.Tensor, torch.Tensor, dict]
"""Images and soft labels that a client retrains on beside its own data, and what it took to get them."""


class PrivHFL:
    """Heterogeneous federated learning without an auxiliary data set.

    Args:
        clients: each with its private data and a model of its own architecture.
        test: images and labels that accuracies are measured on.
        classes: how many.
        settings: see `Settings`.
        out: a folder for checkpoints; a run that was killed goes on from there. None keeps nothing.
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
        self.together = together or Simulation()
        mine = {client.name: self.together.present(client.name) for client in clients}
        self.apart = not (all(mine.values()) and self.together.present(S.name))
        self.clients = [client if mine[client.name] else client.elsewhere() for client in clients]
        self.mine = [client for client in clients if mine[client.name]]
        self.test, self.classes = test, classes
        self.settings, self.workers = settings or Settings(), workers or Workers()
        self._own = self.settings.seed if own is None else own
        if self.apart and not (self.settings.asks and self.settings.secure):
            raise FederationError("controls, and queries in the clear, are for a simulation: they protect nothing")
        if self.apart and self.workers.count > 1:
            raise FederationError("one party of a federation works in one process; leave --processes out")
        self.query = check(self.clients, test, classes, self.settings)
        people = {c.name: c.fingerprint() for c in self.clients}
        known = self.settings.as_dict()
        alone = {"local": known["local"], "seed": known["seed"], "clients": people}
        self.folder = RunFolder(out)
        self.folder.claim({**known, "clients": people, "test": digest(*test)})
        self.local = (RunFolder(local) if local else self.folder.inside("local")).inside(named(alone))
        self.local.claim(alone)
        self.models: dict[str, nn.Module] = {}
        self.records: dict[str, list[dict]] = {}

    def run(self, watch: Watch | None = None) -> Result:
        """The whole of Algorithm 1, or the part of it that is not in `out` yet.

        Raises:
            FixedPointRangeError: a trained model leaves the range of the number format on its owner's own data.
        """
        watch, rounds = watch or Watch(), range(1, self.settings.iterations + 1)
        watch.begins(len(self.mine) * (1 + len(rounds)))
        self.workers.ahead(self._left("local"), self._local_training, self.local)
        for client in self.mine:  # 1
            self.records[client.name] = [self._local_training(client, self.local, watch)]  # 2
            watch.finished(client.name, self.records[client.name])
        with self._joined() as turns:
            for t in rounds:  # 4
                self._round(t, turns, watch)
        return Result(
            self.mine, self.classes, self.settings, self.records, self.models, len(self.clients), self.apart
        )  # fmt: skip

    @contextmanager
    def _joined(self) -> Iterator[Turns | None]:
        """With all parties here there is nobody to meet."""
        if not self.apart:
            yield None
            return
        known = [[c.name, len(c.images), c.shape, str(c.model)] for c in self.clients]
        said = json.dumps([self.settings.as_dict(), known, self.classes])
        names = [client.name for client in self.clients]
        with meet(names, self.together, label="privhfl", agreed=said) as turns:
            yield turns

    def _round(self, t: int, turns: Turns | None, watch: Watch) -> None:
        answering = self.models if self.settings.sequential else dict(self.models)
        if not self.settings.sequential:
            ask = functools.partial(self._iteration_ahead, t, answering)
            self.workers.ahead(self._left(f"round-{t}"), ask, self.folder)
        for client in self.clients:  # 5
            here = client.name in self.records
            asked = turns is not None and asks(turns, client.name, self._wants(t, client) if here else None)
            if here:
                self.records[client.name].append(self._iteration(t, client, answering, self.folder, watch))  # 6-14
                watch.finished(client.name, self.records[client.name])
            elif asked:
                count, _ = self.settings.budget(len(client.images))
                self._total(t, client, torch.empty((count, *client.shape), device="meta"), answering, watch)

    def _wants(self, t: int, client: Participant) -> bool:
        """Whether the answers of this round are not on disk."""
        return all(self.folder.record(f"round-{t}/{client.name}{kind}") is None for kind in ("", ".labels"))

    def so_far(self) -> Table:
        """Each client's accuracies as far as the run has come."""
        return accuracies(self.clients, self.records, self.settings.iterations)

    def estimate(self) -> Estimate | None:
        """What is left: training, from a few batches of each client; asking, from a query to each architecture. None
        among parties apart."""
        if self.apart:
            return None
        how, total = self.settings, Estimate(0.0)
        share = how.answering(len(self.clients)) / max(1, len(self.clients) - 1)
        for client in self._left("local"):
            total += Estimate(seconds_of(client.model, client.images, client.labels, how.local))
        for t in range(1, how.iterations + 1):
            for client in self._left(f"round-{t}"):
                count, _ = how.budget(len(client.images))
                more = (len(client.images) + count) / len(client.images)
                total += Estimate(seconds_of(client.model, client.images, client.labels, how.retraining) * more)
                for other in self.clients:
                    if other.name != client.name:
                        session, query = self.query[str(other.model)]
                        total += (session + query * count) * share
        return total

    def _left(self, stage: str) -> list[Participant]:
        """The clients whose part of a stage is not on disk."""
        where = self.local.record if stage == "local" else lambda name: self.folder.record(f"{stage}/{name}")
        return [client for client in self.mine if where(client.name) is None]

    def _local_training(self, client: Participant, folder: RunFolder, watch: Watch | None = None) -> dict:
        """Line 2: the stand-alone baseline."""
        watch = watch or Watch()
        model = copy.deepcopy(client.model)
        record = self._resume(folder, client.name, model)
        if record is None:
            how, start = self.settings.local, time.perf_counter()
            tick = watch.step(f"{client.name}: local training", how.epochs)
            train(model, client.images, client.labels, how, self._seed(client, "local"), tick)
            record = dict(accuracy=accuracy(model, *self.test), seconds=time.perf_counter() - start)
            folder.keep(client.name, model.state_dict(), record)
        self.models[client.name] = model
        return record

    def _iteration_ahead(self, t: int, models: dict[str, nn.Module], client: Participant, folder: RunFolder) -> None:
        """What a worker does of a round."""
        self._iteration(t, client, models, folder, Watch())

    def _iteration(
        self, t: int, client: Participant, models: dict[str, nn.Module], folder: RunFolder, watch: Watch
    ) -> dict:
        """Lines 6 to 14 for one querying party."""
        name, model = f"round-{t}/{client.name}", copy.deepcopy(self.models[client.name])
        record = self._resume(folder, name, model)
        if record is None:
            if self.settings.asks:
                pool, chosen = self._queries(t, client)  # 6, 7
                labels, asked = self._answers(t, client, pool[chosen], models, folder, watch)  # 8-13
                work = pool[chosen], labels, asked
            else:
                work = self._control(t, client)
            start = time.perf_counter()
            self._retrain(t, client, model, work, watch)  # 14
            record = dict(work[2], accuracy=accuracy(model, *self.test), retraining=time.perf_counter() - start)
            folder.keep(name, model.state_dict(), record)
        self.models[client.name] = model
        return record

    def _queries(self, t: int, client: Participant) -> tuple[torch.Tensor, torch.Tensor]:
        """Lines 6 and 7: expand the private data set to a pool, and choose places of it."""
        how, own = self.settings, self.models[client.name]
        budget, size = how.budget(len(client.images))
        pool, needs = self._expanded(t, client, client.images, size), NEEDS[how.selection]
        chosen = select(
            how.selection,
            budget,
            size=size,
            logits=predict(own, pool) if "logits" in needs else None,
            features=features(own, pool) if "features" in needs else None,
            known=features(own, client.images) if how.selection == "kcenter" else None,
            seed=self._seed(client, t, "select"),
        )
        return pool, chosen

    def _expanded(self, t: int, client: Participant, values: torch.Tensor, size: int) -> torch.Tensor:
        """The client's images, or its labels in the same way, as a pool."""
        how, draw = self.settings, generator(self._own, client.name, t, "pool")
        return expand(values, size, how.expansion, lambdas=how.lambdas, generator=draw)

    def _control(self, t: int, client: Participant) -> Work:
        """What stands in the queries' place where nobody is asked: as many rows, so as many optimiser steps."""
        how, asked = self.settings, dict(answering=[], queries=0)
        count, size = how.budget(len(client.images))
        if how.control == "longer":
            again = torch.arange(count) % len(client.images)
            return client.images[again], self._one_hot(client.labels[again]), asked
        if how.control == "pooled":
            others = [other for other in self.clients if other.name != client.name]
            images, labels = (torch.cat([getattr(o, name) for o in others]) for name in ("images", "labels"))
            order = torch.randperm(len(labels), generator=generator(how.seed, client.name, t, "pooled"))
            chosen = order.repeat(-(-count // len(order)))[:count]
            return images[chosen], self._one_hot(labels[chosen]), asked
        pool, chosen = self._queries(t, client)
        if how.control == "own-mixup":
            mixed = self._expanded(t, client, self._one_hot(client.labels)[:, :, None, None], size)
            return pool[chosen], mixed[chosen].flatten(1), asked
        # As if all who would have answered were the client itself: a sum of as many answers is as sharp.
        parties = how.answering(len(self.clients))
        own = plain_query(pool[chosen], [self.models[client.name]], how.normalise) * parties
        return pool[chosen], self._labels(own, parties), asked

    def _answers(
        self, t: int, client: Participant, queries: torch.Tensor, models: dict[str, nn.Module], folder: RunFolder,
        watch: Watch,
    ) -> tuple[torch.Tensor, dict]:  # fmt: skip
        """Lines 8 to 13: soft labels of the queries, and what it took to get them."""
        name = f"round-{t}/{client.name}.labels"
        kept = folder.record(name)
        if kept is not None:
            return folder.tensors(name), kept
        total, record = self._total(t, client, queries, models, watch)  # 8-13
        labels = self._labels(total, len(record["answering"]))  # 13, Figure 5
        folder.keep(name, labels, record)
        return labels, record

    def _total(
        self, t: int, client: Participant, queries: torch.Tensor, models: dict[str, nn.Module], watch: Watch
    ) -> tuple[torch.Tensor, dict]:
        """The sum of what others answer to a client, who may be elsewhere; who is not in it does nothing."""
        how, answering = self.settings, self._answering(t, client)  # the set C
        record: dict = dict(answering=answering, queries=len(queries))
        if not how.secure:
            asked = [models[name] for name in answering]
            return plain_query(queries, asked, how.normalise, how.sigma, how.frac_bits), record
        if not any(self.together.present(name) for name in (client.name, *answering, S.name)):
            return queries, record
        for other in self.mine:
            if other.name in answering:
                check_range(other.name, models[other.name], other.images[:64], how.frac_bits)
        cast = {"Q": client.name, "A": answering, "S": S.name}
        tick = watch.step(f"{client.name}: asking {len(answering)} parties, round {t}", None)
        with Received() as received, self.together.session(STAR, cast, label=f"privhfl {t} {client.name}") as session:
            total, steps = secure_query(
                queries,
                [models[name] if name in models else self._shapes(name) for name in answering],
                frac_bits=how.frac_bits,
                relu=how.relu,
                normalise=how.normalise,
                sigma=how.sigma,
                chunk=how.chunk,
                tick=tick,
                session=session,
            )
        return total, {**record, **vars(steps), "received": received.rows()}

    def _shapes(self, name: str) -> nn.Module:
        """The architecture of a client elsewhere."""
        return copy.deepcopy(next(c.model for c in self.clients if c.name == name)).to("meta").eval()

    def _labels(self, total: torch.Tensor, parties: int) -> torch.Tensor:
        """Soft labels of a sum over so many parties."""
        how = self.settings
        bits = max(how.label_bits, (self.classes - 1).bit_length()) if how.label_bits else None
        return soft_labels(total, parties, how.normalise, bits, how.temperature * (parties if how.average else 1))

    def _answering(self, t: int, client: Participant) -> list[str]:
        """C of the other clients, in the clients' order."""
        others = [other.name for other in self.clients if other.name != client.name]
        draw = generator(self.settings.seed, client.name, t, "answering")
        chosen = torch.randperm(len(others), generator=draw)[: self.settings.answering(len(self.clients))]
        return [others[i] for i in sorted(chosen.tolist())]

    def _retrain(self, t: int, client: Participant, model: nn.Module, work: Work, watch: Watch) -> None:
        """Line 14: on the private data set and the labelled queries."""
        how = self.settings.retraining
        tick = watch.step(f"{client.name}: retraining, round {t}", how.epochs)
        images = torch.cat([client.images, work[0]])
        targets = torch.cat([self._one_hot(client.labels), work[1]])
        train(model, images, targets, how, self._seed(client, t, "retraining"), tick)

    def _one_hot(self, labels: torch.Tensor) -> torch.Tensor:
        return F.one_hot(labels, self.classes).double()

    def _resume(self, folder: RunFolder, name: str, model: nn.Module) -> dict | None:
        """The record of finished work, with its weights loaded into `model`; None if there is none."""
        record = folder.record(name)
        if record is not None:
            model.load_state_dict(folder.tensors(name))
            model.eval()
        return record

    def _seed(self, client: Participant, *use: object) -> int:
        return derive(self._own, client.name, *use)
