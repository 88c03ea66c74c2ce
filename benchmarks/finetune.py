"""Seconds, rounds and bytes of a step of LoRA over a secret base, all parties in one process.

    OMP_NUM_THREADS=2 python benchmarks/finetune.py --model bert
    OMP_NUM_THREADS=2 python benchmarks/finetune.py --model gpt2 --layers 2 --check
    python benchmarks/finetune.py --model bert --dry               # bytes and rounds, on shapes
    python benchmarks/finetune.py --accuracy 5                     # right answers, in plain and on shares, five seeds
    python benchmarks/finetune.py --attack 16                      # who was among the data of a revealed adapter?

The base is a model of transformers with random weights, of the size of BERT-base or GPT-2 small; A has it. Queries and
values get adapters of rank 8, by peft with `--peft` (if it is installed) and else by the module below. Q has the token
ids, which are secret, as are the labels. The first steps trace their programs and send the masked weights, and are
shown apart. `--check` takes the same steps in the reference and compares losses and adapters bit for bit.

`--accuracy` is a task with an outcome. A small BERT is trained in plain on sentences of docstrings, to say hidden
words. Then it is A's, and adapters learn on shares which package a sentence is from: NumPy, torch, or Python's own
library. The same initial adapters and batches learn in plain float32, and once more with initial adapters moved by
2^-20, which says how far two plain runs are apart. On shares the arithmetic is that of the reference.

`--attack` asks what an adapter that is revealed tells of the sentences that it learned. So many adapters learn each
from a random half of the sentences, with and without differential privacy; of each sentence the attacker says whether
it was in that half. It has the model and the sentences with their packages. In a second attack, of the kind of LiRA
(Carlini et al., S&P 2022), it also has all the other adapters with their halves, and compares their confidence in a
sentence. All is in plain; on shares adapters differ in their last digits. The noise is that of
`sectorch.dp.PrivateGradients`: that of two parties, while epsilon counts one party's.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import copy
import math
import re
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import sectorch
from sectorch import Session
from sectorch.choreography.ledger import Cost
from sectorch.dp.noise import epsilon_of, sampled_curve

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


# A task: which package is a sentence from?

SOURCES = {
    "NumPy": (np, 1, ("*/*.py",)),
    "torch": (torch, 1, ("nn/**/*.py", "optim/*.py", "distributions/*.py", "utils/data/**/*.py")),
    "Python": (asyncio, 2, ("*.py", "[a-eg-z]*/*.py")),
}
"""A module, how far above its file its folder is, and the files whose docstrings are read."""

WORDS, LENGTH, HIDDEN = 1000, 16, 32
"""The vocabulary, the words of a sentence, and the width of the model."""

PADDING, UNKNOWN, MASK = range(3)


def sentences(folder: Path, patterns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The different sentences of eight different words or more in the docstrings of these files, cut to `LENGTH`."""
    found = set()
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                parts = (re.findall(r"[a-z]+", s.lower())[:LENGTH] for s in re.split(r"(?<=[.])\s|\n\n", text))
                found |= {tuple(words) for words in parts if len(set(words)) >= 8}
    return sorted(found)


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The words' numbers [sentences, LENGTH], and the number of each one's package."""
    texts = [sentences(Path(str(m.__file__)).parents[up - 1], names) for m, up, names in SOURCES.values()]
    frequent = Counter(word for text in texts for sentence in text for word in sentence).most_common(WORDS - 3)
    number = {word: i + 3 for i, (word, _) in enumerate(frequent)}
    coded = [[number.get(w, UNKNOWN) for w in s] + [PADDING] * (LENGTH - len(s)) for text in texts for s in text]
    return torch.tensor(coded), torch.tensor([i for i, text in enumerate(texts) for _ in text])


def small(**more: Any) -> BertConfig:
    sizes = {"vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2}
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertConfig(**sizes, **drop, num_attention_heads=2, max_position_embeddings=LENGTH, **more)


def vendor(ids: torch.Tensor, steps: int = 2500) -> dict[str, torch.Tensor]:
    """The weights of a BERT that learned to say hidden words, one in five."""
    torch.manual_seed(0)
    model = BertForMaskedLM(small())
    optimiser = torch.optim.AdamW(model.parameters(), 0.004)
    for _ in range(steps):
        x = ids[torch.randint(len(ids), (64,))]
        hidden = (torch.rand(x.shape) < 0.2) & (x > MASK)
        optimiser.zero_grad()
        F.cross_entropy(model(input_ids=x.masked_fill(hidden, MASK)).logits[hidden], x[hidden]).backward()
        optimiser.step()
    return {name[5:]: value for name, value in model.state_dict().items() if name.startswith("bert.")}


def with_adapters(weights: dict[str, torch.Tensor], seed: int) -> nn.Module:
    """The vendor's model with fresh adapters and a fresh classifier."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification(small(num_labels=len(SOURCES)))
    model.bert.load_state_dict(weights, strict=False)
    return adapted(model, ADAPTED["bert"], 8).eval()


def fine_tuned(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, seed: int, session: Session | None,
               steps: int = 100) -> nn.Module:  # fmt: skip
    """A plain model with what was trained, in plain or on shares, in batches of 32."""
    batches, given, model = torch.Generator().manual_seed(seed), model, copy.deepcopy(model)
    if session is not None:
        model = sectorch.shared(model, owner="A", session=session)
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.005)
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: min((n + 1) / 10, (steps - n) / (steps - 10)))
    for _ in range(steps):
        rows = torch.randint(len(ids), (32,), generator=batches)
        x, y = (v[rows] if session is None else sectorch.share(v[rows], session=session) for v in (ids, labels))
        with contextlib.nullcontext() if session is None else sectorch.step(session):
            optimiser.zero_grad()
            F.cross_entropy(model(input_ids=x).logits, y).backward()
            optimiser.step()
        rate.step()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = copy.deepcopy(given)
    found.load_state_dict({n: p.detach() if session is None else p.reveal() for n, p in trained.items()}, strict=False)
    return found


def balanced(labels: torch.Tensor, each: int, seed: int) -> torch.Tensor:
    """So many rows of each package, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.nonzero(labels == k)[:, 0] for k in range(len(SOURCES))]
    rows = torch.cat([found[torch.randperm(len(found), generator=generator)[:each]] for found in rows])
    return rows[torch.randperm(len(rows), generator=generator)]


def accuracy(seeds: int) -> None:
    ids, labels = corpus()
    weights = vendor(ids)
    differences = []
    for seed in range(seeds):
        rows = balanced(labels, 1200, seed)
        learned, asked = rows[:1600], rows[1600:]
        model, right, start = with_adapters(weights, seed), [], time.perf_counter()
        moved = copy.deepcopy(model)
        for p in moved.parameters():
            p.data += 2.0**-20 * p.requires_grad
        for given, session in ((model, None), (moved, None), (model, Session(reference=True))):
            found = fine_tuned(given, ids[learned], labels[learned], seed, session)
            with torch.no_grad():
                answers = found(input_ids=ids[asked]).logits.argmax(1)
            right.append(100 * float((answers == labels[asked]).double().mean()))
        differences.append(right[2] - right[0])
        print(f"seed {seed}: plain {right[0]:.2f} % (moved {right[1]:.2f} %), on shares {right[2]:.2f} %, "
              f"of {len(asked)} sentences; {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    print(f"mean difference {statistics.mean(differences):+.2f} points, at most {max(map(abs, differences)):.2f}")


# An attack on what is revealed: membership.


@dataclass(frozen=True)
class Training:
    """How an adapter learns from so many sentences; noise is each party's deviation, as a multiple of the norm."""

    sentences: int
    steps: int
    batch: int
    rate: float
    clip: float = 0.0
    noise: float = 0.0


TRAININGS = (
    Training(150, 150, 30, 0.005), Training(150, 100, 50, 0.005, 1.0, 4.0),
    Training(1500, 100, 32, 0.005), Training(1500, 60, 300, 0.01, 0.5, 4.0),
)  # fmt: skip


def attacked_adapter(how: Training, weights: dict, ids: torch.Tensor, labels: torch.Tensor, seed: int) -> nn.Module:
    """A plain model that learned from these sentences, in batches without repetition."""
    model, draws = with_adapters(weights, seed), torch.Generator().manual_seed(seed)
    model.config._attn_implementation = "eager"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad} | dict(model.named_buffers())
    optimiser = torch.optim.AdamW(trained.values(), how.rate)

    def loss(given: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, given | fixed, (x,)).logits, y)

    by_row = vmap(grad(lambda given, x, y: loss(given, x[None], y[None])), (None, 0, 0))
    for _ in range(how.steps):
        rows = torch.randperm(len(ids), generator=draws)[: how.batch]
        optimiser.zero_grad()
        if not how.noise:
            loss(trained, ids[rows], labels[rows]).backward()
        else:
            found = by_row({name: p.detach() for name, p in trained.items()}, ids[rows], labels[rows])
            norms = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in found.values()))
            for name, p in trained.items():
                total = torch.einsum("b,b...->...", (how.clip / norms).clamp(max=1), found[name])
                noise = math.sqrt(2) * how.noise * how.clip * torch.randn(p.shape, generator=draws)
                p.grad = (total + noise) / how.batch
        optimiser.step()
    return model


def confidence(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """log p / (1 - p) of the right package of each sentence, and the percentage of right answers."""
    with torch.no_grad():
        scores = model(input_ids=ids).logits.double()
    own = scores.log_softmax(1).gather(1, labels[:, None])[:, 0]
    right = 100 * float((scores.argmax(1) == labels).double().mean())
    return own - torch.log(-torch.expm1(own.clamp(max=-1e-9))), right


def told_apart(scores: torch.Tensor, member: torch.Tensor) -> tuple[float, float]:
    """The area under the curve, and the part of the members found at 5 % of false alarms, in percent."""
    inside, outside = scores[member], scores[~member]
    above = (inside[:, None] > outside).double() + (inside[:, None] == outside).double() / 2
    return float(above.mean()), 100 * float((inside > torch.quantile(outside, 0.95)).double().mean())


def attack(count: int) -> None:
    ids, labels = corpus()
    weights = vendor(ids)
    for how in TRAININGS:
        chosen = balanced(labels, 1400, 99)
        both, others = chosen[: 2 * how.sentences], chosen[-1000:]
        scores, members, rights = [], [], []
        for i in range(count):
            member = torch.zeros(len(both), dtype=torch.bool)
            member[torch.randperm(len(both), generator=torch.Generator().manual_seed(1000 + i))[: how.sentences]] = True
            model = attacked_adapter(how, weights, ids[both[member]], labels[both[member]], i)
            scores.append(confidence(model, ids[both], labels[both])[0])
            members.append(member)
            rights.append(confidence(model, ids[others], labels[others])[1])
        outcomes = []
        for i in range(count):
            rest = [j for j in range(count) if j != i]
            seen, inside = torch.stack([scores[j] for j in rest]), torch.stack([members[j] for j in rest]).double()
            mean = lambda part, seen=seen: (seen * part).sum(0) / part.sum(0).clamp(min=1)
            with_it, without = mean(inside), mean(1 - inside)
            ratio = (scores[i] - (with_it + without) / 2) * (with_it - without)
            outcomes.append(told_apart(scores[i], members[i]) + told_apart(ratio, members[i]))
        loss_area, loss_found, area, found = (statistics.mean(column) for column in zip(*outcomes, strict=True))
        bound = "no noise"
        if how.noise:
            curve = sampled_curve(lambda order, how=how: 2 * order / how.noise**2, how.batch, how.sentences)
            bound = f"epsilon {epsilon_of(how.steps * curve, 1e-4):.1f} at delta 1e-4"
        print(
            f"{how.sentences} sentences, {bound}: {statistics.mean(rights):.1f} % right; by the loss {loss_area:.3f} "
            f"({loss_found:.1f} %), by {count - 1} other adapters {area:.3f} ({found:.1f} %)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(ADAPTED), default="bert")
    for name, value in (("layers", 12), ("rank", 8), ("batch", 4), ("length", 64), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peft", action="store_true", help="adapters of peft")
    parser.add_argument("--check", action="store_true", help="compare with the reference")
    parser.add_argument("--dry", action="store_true", help="bytes and rounds of two steps, on shapes")
    parser.add_argument("--accuracy", type=int, metavar="SEEDS", help="right answers in plain and on shares")
    parser.add_argument("--attack", type=int, metavar="ADAPTERS", help="membership of sentences in what was learned")
    chosen = parser.parse_args()
    if chosen.attack:
        return attack(chosen.attack)
    if chosen.accuracy:
        return accuracy(chosen.accuracy)
    if chosen.dry:
        return dry(chosen)
    found = trained(chosen, Session(), shown=True)
    if chosen.check:
        wanted = trained(chosen, Session(reference=True), shown=False)
        same = all(torch.equal(value, wanted[name]) for name, value in found.items())
        print(f"bit for bit the reference: {same}")


if __name__ == "__main__":
    main()
