"""Algorithm 1 (PrivHFL, appendix C.1). The numbers in comments are the algorithm's lines."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ...data.expansion import expand
from ...data.seeds import derive, generator
from ...data.selection import NEEDS, select
from ...errors import FixedPointRangeError
from ...nn.calibrate import ranges, recorded
from ...ring.scheme import Scheme
from .checkpoint import Store
from .query import plain_query, secure_query, soft_labels
from .report import Result
from .settings import Client, Settings, check
from .statement import Received
from .training import accuracy, features, predict, train
from .watch import Watch


class PrivHFL:
    """Heterogeneous federated learning without an auxiliary data set.

    Args:
        clients: each with its private data and a model of its own architecture.
        test: images and labels that accuracies are measured on.
        classes: how many.
        settings: see `Settings`.
        out: a folder for checkpoints; a run that was killed goes on from there. None keeps nothing.
        local: a folder for the local training alone, which several runs may share; inside `out` unless named.

    `run()` gives a `Result`, with the trained models. All parties are in this process: it is a simulation.

    Raises, before any training starts:
        PrivHFLError, ArchitectureError: naming the client, what came, and the way out.
        CheckpointError: `out` holds another run.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        test: tuple[torch.Tensor, torch.Tensor],
        classes: int,
        settings: Settings | None = None,
        *,
        out: str | Path | None = None,
        local: str | Path | None = None,
    ):
        self.clients, self.test, self.classes = list(clients), test, classes
        self.settings = settings or Settings()
        check(self.clients, test, classes, self.settings)
        self.store = Store(Path(out) if out else None, Path(local) if local else None)
        known = {c.name: (c.images, c.labels, *c.model.state_dict().values()) for c in self.clients}
        self.store.claim(known, test, asdict(self.settings))
        self.models: dict[str, nn.Module] = {}

    def run(self, watch: Watch | None = None) -> Result:
        """The whole of Algorithm 1, or the part of it that is not in `out` yet.

        Raises:
            FixedPointRangeError: a trained model leaves the range of the number format on its owner's own data.
        """
        watch = watch or Watch()
        records: dict[str, list[dict]] = {}
        for client in self.clients:  # 1
            records[client.name] = [self._local_training(client, watch)]  # 2
            watch.finished(client, records[client.name])
        for t in range(1, self.settings.iterations + 1):  # 4
            answering = self.models if self.settings.sequential else dict(self.models)
            for client in self.clients:  # 5
                records[client.name].append(self._iteration(t, client, answering, watch))  # 6-14
                watch.finished(client, records[client.name])
        return Result(self.clients, self.classes, self.settings, records, self.models)

    def _local_training(self, client: Client, watch: Watch) -> dict:
        """Line 2: the stand-alone baseline."""
        model = copy.deepcopy(client.model)
        record = self._resume("local", client, model)
        if record is None:
            how, start = self.settings.local, time.perf_counter()
            tick = watch.step(f"{client.name}: local training", how.epochs)
            train(model, client.images, client.labels, how, self._seed(client, "local"), tick)
            record = dict(accuracy=accuracy(model, *self.test), seconds=time.perf_counter() - start)
            self.store.keep("local", client.name, model.state_dict(), record)
        self.models[client.name] = model
        return record

    def _iteration(self, t: int, client: Client, answering: dict[str, nn.Module], watch: Watch) -> dict:
        """Lines 6 to 14 for one querying party."""
        stage = f"round-{t}"
        model = copy.deepcopy(self.models[client.name])
        record = self._resume(stage, client, model)
        if record is None:
            if self.settings.control:
                queries, labels, asked = self._own(client)
            else:
                queries = self._queries(t, client)  # 6, 7
                labels, asked = self._answers(t, client, queries, answering, watch)  # 8-13
            start = time.perf_counter()
            self._retrain(t, client, model, queries, labels, watch)  # 14
            record = dict(asked, accuracy=accuracy(model, *self.test), retraining=time.perf_counter() - start)
            self.store.keep(stage, client.name, model.state_dict(), record)
        self.models[client.name] = model
        return record

    def _own(self, client: Client) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """The control: the private samples again and again, as many as there would be queries."""
        count, _ = self.settings.budget(len(client.images))
        again = torch.arange(count) % len(client.images)
        return client.images[again], self._one_hot(client.labels[again]), dict(answering=[], queries=0)

    def _queries(self, t: int, client: Client) -> torch.Tensor:
        """Lines 6 and 7: expand the private data set to a pool, and choose from it."""
        how, own = self.settings, self.models[client.name]
        budget, size = how.budget(len(client.images))
        draw = generator(how.seed, client.name, t, "pool")
        pool = expand(client.images, size, how.expansion, lambdas=how.lambdas, generator=draw)
        needs = NEEDS[how.selection]
        chosen = select(
            how.selection,
            budget,
            size=len(pool),
            logits=predict(own, pool) if "logits" in needs else None,
            features=features(own, pool) if "features" in needs else None,
            known=features(own, client.images) if how.selection == "kcenter" else None,
            seed=self._seed(client, t, "select"),
        )
        return pool[chosen]

    def _answers(
        self, t: int, client: Client, queries: torch.Tensor, models: dict[str, nn.Module], watch: Watch
    ) -> tuple[torch.Tensor, dict]:
        """Lines 8 to 13: soft labels of the queries, and what it took to get them."""
        how, stage = self.settings, f"round-{t}"
        kept = self.store.record(stage, f"{client.name}.labels")
        if kept is not None:
            return self.store.tensors(stage, f"{client.name}.labels"), kept
        answering = self._answering(t, client)  # the set C
        asked = [models[name] for name in answering]
        record: dict = dict(answering=answering, queries=len(queries))
        if how.secure:
            for name, model in zip(answering, asked, strict=True):
                self._check_range(name, model)
            tick = watch.step(f"{client.name}: asking {len(asked)} parties, round {t}", None)
            with Received() as received:
                total, steps = secure_query(
                    queries,
                    asked,
                    frac_bits=how.frac_bits,
                    relu=how.relu,
                    normalise=how.normalise,
                    chunk=how.chunk,
                    tick=tick,
                )  # 8-13
            record.update(vars(steps), received=received.rows())
        else:
            total = plain_query(queries, asked, how.normalise)
        bits = max(how.label_bits, (self.classes - 1).bit_length()) if how.label_bits else None
        labels = soft_labels(total, len(asked), how.normalise, bits)  # y <- softmax(y), Figure 5
        self.store.keep(stage, f"{client.name}.labels", labels, record)
        return labels, record

    def _answering(self, t: int, client: Client) -> list[str]:
        """C of the other clients, in the clients' order."""
        others = [other.name for other in self.clients if other is not client]
        draw = generator(self.settings.seed, client.name, t, "answering")
        chosen = torch.randperm(len(others), generator=draw)[: self.settings.answering(len(self.clients))]
        return [others[i] for i in sorted(chosen.tolist())]

    def _check_range(self, name: str, model: nn.Module) -> None:
        """An answering party looks, on its own data, whether its activations fit the number format."""
        own = next(client.images for client in self.clients if client.name == name)[:64]
        program = recorded(model, own)
        if program is None:
            return
        largest, where = ranges(program, own)
        limit = Scheme(self.settings.frac_bits).activation_limit
        if 2 * largest >= limit:
            raise FixedPointRangeError(
                f"{name}'s model reaches {largest:.4g} at {where}, too close to the limit {limit:.0f} of "
                f"{self.settings.frac_bits} fraction bits; choose fewer fraction bits"
            )

    def _retrain(
        self, t: int, client: Client, model: nn.Module, queries: torch.Tensor, labels: torch.Tensor, watch: Watch
    ) -> None:
        """Line 14: on the private data set and the labelled queries."""
        how = self.settings.retraining
        tick = watch.step(f"{client.name}: retraining, round {t}", how.epochs)
        images, targets = torch.cat([client.images, queries]), torch.cat([self._one_hot(client.labels), labels])
        train(model, images, targets, how, self._seed(client, t, "retraining"), tick)

    def _one_hot(self, labels: torch.Tensor) -> torch.Tensor:
        return F.one_hot(labels, self.classes).double()

    def _resume(self, stage: str, client: Client, model: nn.Module) -> dict | None:
        """The record of finished work, with its weights loaded into `model`; None if there is none."""
        record = self.store.record(stage, client.name)
        if record is not None:
            model.load_state_dict(self.store.tensors(stage, client.name))
            model.eval()
        return record

    def _seed(self, client: Client, *use: object) -> int:
        return derive(self.settings.seed, client.name, *use)
