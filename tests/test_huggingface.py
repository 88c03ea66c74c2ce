"""Models of `transformers`, unmodified: called with what their tokenizers give, and right with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import SecretAccessError

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-3
"""Of the largest magnitude: 2^-20 of a fixed-point number, carried on through some hundred operations of two layers, of
which each may lengthen an error a few times. What is measured lies a hundred times below."""

TEXT = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
VIT = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
)


def built(name: str, config: str, **options: Any) -> nn.Module:
    """Matrices keep the size of what they are applied to: the constructors' own weights let a signal fade."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).eval().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return model


def texts(**others: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(3, 60, (2, 7), generator=draw), "attention_mask": mask, **others}


def leaves(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def right(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The secure result, once it was compared with the plain model's and with the reference's."""
    secure = sectorch.secure(model, session=sectorch.Session())
    with torch.no_grad():
        expected = leaves(model(**{name: getattr(x, "value", x) for name, x in inputs.items()}))
    result = secure(**inputs)
    got = leaves(result)
    assert secure.graphs.eager_reason is None, "it is one program"
    assert [x.shape for x in got] == [x.shape for x in expected]
    largest = max(float(x.abs().max()) for x in expected)
    assert 0.1 < largest < 100
    assert all(float((a - b).abs().max()) <= TOLERANCE * largest for a, b in zip(got, expected, strict=True))
    reference = leaves(sectorch.reference(model)(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, reference, strict=True))
    return result


def test_bert_with_a_secret_and_with_a_public_mask():
    model, inputs = built("BertForSequenceClassification", "BertConfig", **TEXT), texts()
    answer = right(model, inputs)
    assert type(answer).__name__ == "SequenceClassifierOutput"
    right(model, inputs | {"attention_mask": sectorch.public(inputs["attention_mask"])})


def test_t5():
    model = built("T5ForConditionalGeneration", "T5Config", **T5)
    right(model, texts(decoder_input_ids=texts()["input_ids"][:, :4]))


def test_llama_keeps_no_cache():
    model = built("LlamaForCausalLM", "LlamaConfig", **TEXT, num_key_value_heads=2)
    assert model(**texts()).past_key_values is not None
    assert right(model, texts()).past_key_values is None
    assert model.config.use_cache, "the plain model is left as it was"


def test_mixtral_chooses_experts_in_secret():
    model = built("MixtralForCausalLM", "MixtralConfig", **TEXT, num_key_value_heads=2, num_local_experts=4)
    for layer in model.modules():
        if type(layer).__name__ == "MixtralExperts":
            nn.init.normal_(layer.gate_up_proj, std=32**-0.5)
            nn.init.normal_(layer.down_proj, std=48**-0.5)
    right(model, texts())


@pytest.mark.sectorch_long  # an encoder as BERT is
def test_clip_text():
    right(built("CLIPTextModel", "CLIPTextConfig", **TEXT), texts())


def test_mamba():
    model = built("MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    right(model, texts())


@pytest.mark.sectorch_long
def test_vit():
    model = built("ViTForImageClassification", "ViTConfig", **VIT)
    right(model, {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))})


def test_sizes_that_a_public_tensor_holds():
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = torch.div(torch.tensor(x.shape[1]), 2, rounding_mode="trunc")
            return x.view(-1, half, half) + 1

    x, model = torch.arange(8.0).view(2, 4), Sized().eval()
    assert torch.allclose(sectorch.secure(model)(x), model(x), atol=1e-5)
    half = torch.tensor(2)
    assert torch.equal(sectorch.share(x).view(2, half, half).reveal(), x.view(2, 2, 2))


def test_what_reads_a_secret_number_is_refused_at_its_line():
    model = built("LongformerModel", "LongformerConfig", **TEXT, attention_window=[4])
    with pytest.raises(SecretAccessError, match=r"modeling_longformer\.py.*would take the content out"):
        sectorch.secure(model)(**texts())


class RmsNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)


class Positions(nn.Module):
    """All entries of the table are larger together than one output's weights may be; those of a row are not."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(100, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bnd,td->bnt", x, self.table)


class Decay(nn.Module):
    """As in Mamba 2: sums of products, and e^-infinity where a mask hides them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.cumsum(-x * x, -1)
        later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
        return torch.exp(sums.masked_fill(later, -torch.inf)) + torch.exp(torch.where(later, -torch.inf, sums))


class Segments(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logical_and(x[..., :1], torch.logical_not(x[..., 1:])).float()


@pytest.mark.parametrize("kind", [RmsNorm, Positions, Decay, Segments])
def test_what_their_code_does(kind: type[nn.Module]):
    model = kind().eval().requires_grad_(False)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)).relu_()
    result = sectorch.secure(model, session=sectorch.Session())(x)
    assert torch.allclose(result, model(x), atol=1e-4)
    assert torch.equal(result, sectorch.reference(model)(x))
