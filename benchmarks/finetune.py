"""Seconds, rounds and bytes of a step of LoRA over a secret base, all parties in one process.

    OMP_NUM_THREADS=2 python benchmarks/finetune.py --model bert
    OMP_NUM_THREADS=2 python benchmarks/finetune.py --model gpt2 --layers 2 --check
    python benchmarks/finetune.py --model bert --dry               # bytes and rounds, on shapes

The base is a model of transformers with random weights, of the size of BERT-base or GPT-2 small; A has it. Queries and
values get adapters of rank 8, by peft with `--peft` (if it is installed) and else by the module below. Q has the token
ids, which are secret, as are the labels. The first steps trace their programs and send the masked weights, and are
shown apart. `--check` takes the same steps in the reference and compares losses and adapters bit for bit.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import sectorch
from sectorch import Session
from sectorch.choreography.ledger import Cost

ADAPTED = {"bert": ("query", "value"), "gpt2": ("c_attn",)}
"""The layers that get adapters; GPT-2's computes queries, keys and values."""

TRACED = 2
"""Steps that trace a program or send weights: the first, and the first whose gradients were set before."""


class LoRA(nn.Module):
    """A layer of the base with a low-rank adapter beside it."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.layer, self.scale = layer, 2.0
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x)) * self.scale


def adapted(model: nn.Module, names: tuple[str, ...], rank: int) -> nn.Module:
    """The model, frozen, with adapters for the layers of these names; a classifier of its own is trained."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in names:
                shape = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.T.shape
                setattr(parent, name, LoRA(layer, shape[1], shape[0], rank))
    if hasattr(model, "classifier"):
        model.classifier.requires_grad_()
    return model


def with_peft(model: nn.Module, names: tuple[str, ...], rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    kept = ["classifier"] if hasattr(model, "classifier") else None
    config = LoraConfig(r=rank, target_modules=list(names), modules_to_save=kept, fan_in_fan_out="c_attn" in names)
    return get_peft_model(model, config)


def base(name: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, num_labels=2))
    return GPT2LMHeadModel(GPT2Config(n_layer=layers))


def loss_of(name: str, model: nn.Module, ids: Any, labels: Any) -> torch.Tensor:
    scores = model(input_ids=ids).logits
    if name == "bert":
        return F.cross_entropy(scores, labels)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained(chosen: argparse.Namespace, session: Session, shown: bool) -> dict[str, torch.Tensor]:
    """The losses and what was trained, after some steps."""
    adapters = with_peft if chosen.peft else adapted
    model = adapters(base(chosen.model, chosen.layers), ADAPTED[chosen.model], chosen.rank).eval()
    model = sectorch.shared(model, owner="A", session=session)
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.01)
    words, found, seconds = model.config.vocab_size, {}, []
    for step in range(TRACED + chosen.steps):
        torch.manual_seed(step)
        given = torch.randint(0, words, (chosen.batch, chosen.length)), torch.randint(0, 2, (chosen.batch,))
        ids, labels = (sectorch.share(v, session=session) for v in given)
        start, processor = time.perf_counter(), time.process_time()
        with Cost() as cost, sectorch.step(session):
            optimiser.zero_grad()
            loss = loss_of(chosen.model, model, ids, labels)
            loss.backward()
            optimiser.step()
        found[f"loss {step}"] = loss.reveal()
        seconds.append(time.perf_counter() - start)
        if shown:
            print(
                f"step {step}{', traced' if step < TRACED else ''}: {seconds[-1]:.1f} s, "
                f"{time.process_time() - processor:.1f} s of processors, {cost.rounds} rounds, "
                f"{cost.online_bytes / 1e6:.0f} MB online, {cost.offline_bytes / 1e6:.0f} MB dealt; "
                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GB of memory at most",
                flush=True,
            )
    if shown and chosen.steps:
        print(f"{statistics.median(seconds[TRACED:]):.1f} s a step, the median of {chosen.steps}")
    return found | {name: p.reveal() for name, p in model.named_parameters() if p.requires_grad}


def dry(chosen: argparse.Namespace) -> None:
    """Bytes and rounds of the first two steps, on tensors without content; the second sends no weights."""
    session = Session(dry=True)
    model = adapted(base(chosen.model, chosen.layers), ADAPTED[chosen.model], chosen.rank).eval()
    model = sectorch.shared(model.to("meta"), owner="A", session=session)
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.01)
    for step in range(TRACED):
        shapes = (chosen.batch, chosen.length), (chosen.batch,)
        empty = (torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes)
        ids, labels = (sectorch.share(v, session=session) for v in empty)
        with Cost() as cost, session.call():
            optimiser.zero_grad()
            loss_of(chosen.model, model, ids, labels).backward()
            optimiser.step()
        once, dealt = cost.setup_bytes / 1e9, (cost.offline_bytes - cost.setup_bytes) / 1e9
        print(f"step {step}: {cost.rounds} rounds, {cost.online_bytes / 1e9:.2f} GB online, {dealt:.2f} GB dealt, "
              f"{once:.2f} GB once")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(ADAPTED), default="bert")
    for name, value in (("layers", 12), ("rank", 8), ("batch", 4), ("length", 64), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peft", action="store_true", help="adapters of peft")
    parser.add_argument("--check", action="store_true", help="compare with the reference")
    parser.add_argument("--dry", action="store_true", help="bytes and rounds of two steps, on shapes")
    chosen = parser.parse_args()
    if chosen.dry:
        return dry(chosen)
    found = trained(chosen, Session(), shown=True)
    if chosen.check:
        wanted = trained(chosen, Session(reference=True), shown=False)
        same = all(torch.equal(value, wanted[name]) for name, value in found.items())
        print(f"bit for bit the reference: {same}")


if __name__ == "__main__":
    main()
