"""The server: passes public keys on, sends a noised model each round, recovers the gradient, steps."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from sectorch.protocols.perturbation import DroppedClientError, Update
from sectorch.protocols.perturbation.experiment import score_of

from .task import pack, setup, unpack

app = ServerApp()


def ask(grid: Grid, nodes: list[int], kind: str, content: RecordDict) -> list[Message]:
    """The same message to every node; every answer, or the error that one client met."""
    sent = [Message(content=content, message_type=kind, dst_node_id=node) for node in nodes]
    answers = list(grid.send_and_receive(sent))
    failed = [answer.error for answer in answers if answer.has_error()]
    if failed or len(answers) < len(nodes):
        raise DroppedClientError(
            f"{kind}: {len(answers)} of {len(nodes)} clients answered, {len(failed)} with {failed[:1]}"
        )
    return answers


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings, data, model, scheme = setup(context.run_config)
    while len(nodes := list(grid.get_node_ids())) < settings.clients:
        time.sleep(0.2)
    answers = [a.content["answer"] for a in ask(grid, nodes[: settings.clients], "query.keys", RecordDict())]
    nodes = nodes[: settings.clients]
    answers.sort(key=lambda answer: answer["client"])
    weights = [answer["samples"] for answer in answers]
    publics = ConfigRecord(
        {
            "clients": [answer["client"] for answer in answers],
            "keys": [answer["public"] for answer in answers],
            "session": os.urandom(16),
        }
    )
    ask(grid, nodes, "query.join", RecordDict({"publics": publics}))

    model.train()
    optimizer = torch.optim.SGD(
        model.parameters(), settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay
    )
    for number in range(settings.rounds):
        noisy, key = scheme.perturb(model.state_dict())
        about = {"round": noisy.round, "frac-bits": noisy.frac_bits, "number": number, "samples": sum(weights)}
        tensors = noisy.state | {"additive": noisy.additive, "partition": noisy.partition}
        content = RecordDict({"model": pack(tensors), "round": ConfigRecord(about)})
        updates = [_update(answer) for answer in ask(grid, nodes, "train", content)]
        updates.sort(key=lambda update: update.client)
        scheme.step(model, optimizer, scheme.recover(key, updates, weights))
    score = score_of(model, data)
    print(f"final score after {settings.rounds} rounds: {score:.4f}", flush=True)
    if context.run_config["out"]:
        folder = Path(str(context.run_config["out"]))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps({"score": score, "rounds": settings.rounds}))


def _update(answer: Message) -> Update:
    about = answer.content["about"]
    tensors = unpack(answer.content["terms"])
    return Update(
        about["round"],
        tensors["terms"],
        tensors["statistics"],
        about["samples"],
        about["share"],
        about["client"],
        tuple(about["cohort"]),
    )
