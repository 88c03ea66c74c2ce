"""The client: makes pair keys, joins the cohort, and answers a noisy model with masked terms."""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from sectorch.protocols.perturbation import ClientMasks, NoisyModel
from sectorch.protocols.perturbation.settings import batch_of, shards

from .task import pack, setup, unpack

app = ClientApp()


@app.query("keys")
def keys(message: Message, context: Context) -> Message:
    """This client's number, its samples, and its public key. The private one stays in the client's own state."""
    settings, data, _, _ = setup(context.run_config)
    client = int(context.node_config["partition-id"])
    masks = ClientMasks(client)
    _keep(context, masks)
    samples = len(shards(len(data.train[0]), settings.clients, settings.seed)[client])
    answer = ConfigRecord({"client": client, "public": masks.public, "samples": samples})
    return Message(RecordDict({"answer": answer}), reply_to=message)


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Agree a secret with every other client from the keys that the server passes on."""
    given = message.content["publics"]
    masks = _masks(context)
    masks.join(dict(zip(given["clients"], given["keys"], strict=True)), given["session"])
    _keep(context, masks)
    return Message(RecordDict(), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round: the noisy gradient and the noise terms of this round's batches, masked."""
    settings, data, _, scheme = setup(context.run_config)
    given = message.content["round"]
    tensors = unpack(message.content["model"])
    public = {name: tensors.pop(name) for name in ("additive", "partition")}
    noisy = NoisyModel(tensors, round=given["round"], frac_bits=given["frac-bits"], **public)
    client = int(context.node_config["partition-id"])
    part = shards(len(data.train[0]), settings.clients, settings.seed)[client]
    batches = []
    for turn in range(settings.local_batches):
        number = given["number"] * settings.local_batches + turn
        index = batch_of(part, client, number, settings.batch_size, settings.seed)
        targets = data.targets(data.train[1][index], settings.loss, data.train[0].dtype)
        batches.append((data.train[0][index], targets))
    masks = _masks(context)
    share = len(part) / given["samples"]
    update = scheme.client_step(noisy, batches, masks=masks, share=share)
    _keep(context, masks)
    content = RecordDict(
        {
            "terms": pack({"terms": update.terms, "statistics": update.statistics}),
            "about": ConfigRecord(
                {
                    "round": update.round,
                    "samples": update.samples,
                    "share": update.share,
                    "client": client,
                    "cohort": list(update.cohort),
                }
            ),
        }
    )
    return Message(content, reply_to=message)


def _keep(context: Context, masks: ClientMasks) -> None:
    context.state["masks"] = ConfigRecord(masks.secret_state())


def _masks(context: Context) -> ClientMasks:
    return ClientMasks.from_secret_state(dict(context.state["masks"]))
