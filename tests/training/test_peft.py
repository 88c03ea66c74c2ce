"""Models of transformers with adapters of peft, as they are: the base is A's secret, the adapters are in shares.

Three steps of SGD at a rate of 0.1 from small gradients: what is trained is apart from plain torch's by 5e-6 at most,
and by nothing from the reference's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import some

import sectorch
from sectorch import Session
from sectorch.choreography.ledger import Transcript

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own calls of transformers' old names

WORDS = 50


def bert() -> Any:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=2,
        )
    )  # fmt: skip


def gpt2() -> Any:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def classes(model: Any, ids: Any, labels: Any) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=ids).logits, labels)


def words(model: Any, ids: Any, labels: Any) -> torch.Tensor:
    """Each word from those before it; scores of virtual tokens in front are left out."""
    scores = model(input_ids=ids).logits[:, -ids.shape[1] :]
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


ADAPTERS = {
    "lora of bert": (
        bert, classes, lambda: peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    ),
    "dora of bert": (
        bert, classes, lambda: peft.LoraConfig(r=4, target_modules=["query"], use_dora=True, task_type="SEQ_CLS")
    ),
    "ia3 of bert": (
        bert, classes,
        lambda: peft.IA3Config(
            target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"], task_type="SEQ_CLS"
        ),
    ),
    "prompt of bert": (bert, classes, lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS")),
    "lora of gpt2": (
        gpt2, words,
        lambda: peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    ),
    "prefix of gpt2": (gpt2, words, lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
}  # fmt: skip


def fitted(name: str, session: Session | None, steps: int = 3) -> dict[str, torch.Tensor]:
    construct, loss_of, config = ADAPTERS[name]
    torch.manual_seed(0)
    model = peft.get_peft_model(construct(), config())
    for key, p in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.1)
    model.eval()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if session is not None:
        model = sectorch.shared(model, owner="A", session=session)
        assert sum(p.cell.own for p in model.parameters()) == len(frozen)
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
    value = lambda p: p.detach() if session is None else p.reveal()
    found = {}
    for step in range(steps):
        torch.manual_seed(step)
        ids, labels = torch.randint(0, WORDS, (3, 5)), torch.randint(0, 2, (3,))
        if session is not None:
            ids, labels = (sectorch.share(v, session=session) for v in (ids, labels))
        with sectorch.step(session) if session is not None else torch.enable_grad():
            optimiser.zero_grad()
            loss = loss_of(model, ids, labels)
            loss.backward()
            optimiser.step()
        found[f"loss {step}"] = value(loss)
    return found | {key: value(p) for key, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", some(ADAPTERS, ["ia3 of bert", "lora of gpt2"]))
def test_adapters_of_peft_learn_what_they_learn_in_plain(name: str):
    found, plain = fitted(name, Session(reference=True)), fitted(name, None)
    for key, value in plain.items():
        allowed = 4e-5 if key.startswith("loss") else 5e-6
        assert (found[key] - value).abs().max() <= allowed, key


@pytest.mark.parametrize("name", some(ADAPTERS, ["lora of bert"]))
def test_adapters_of_peft_are_bit_for_bit_the_references(name: str):
    session = Session()
    with Transcript() as sent:
        found = fitted(name, session, 2)
    wanted = fitted(name, Session(reference=True), 2)
    assert all(torch.equal(value, wanted[key]) for key, value in found.items())
    assert not any(line.shows for line, _ in sent.lines if line.dst.role != "Q")
