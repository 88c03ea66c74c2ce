"""Small models of `transformers` and what each is called with: the rows of benchmarks/huggingface.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import sectorch

VOCABULARY = 64
Inputs = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One row: a class of models, its configuration, and the arguments of a call."""

    kind: str
    model: str
    config: str
    options: dict[str, Any]
    inputs: Inputs

    def build(self) -> nn.Module:
        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).eval().requires_grad_(False)


CASES: dict[str, Case] = {}


def case(kind: str, model: str, options: dict[str, Any], inputs: Inputs, config: str = "", name: str = "") -> None:
    """`config` is the class of the configuration where it is not the model's name up to "For", "Model" or "LMHead"."""
    family = re.split(r"(?:For|Model|LMHead|Encoder)(?=[A-Z]|$)", model)[0]
    CASES[name or model] = Case(kind, model, f"{config or family}Config", options, inputs)


def token_ids(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 4, (rows, length))


def tokens(**others: Any) -> dict[str, Any]:
    """What a tokenizer gives of two texts, the second of which is the shorter one."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    return {"input_ids": token_ids(), "attention_mask": mask, **others}


def public_mask() -> dict[str, Any]:
    given = tokens()
    return given | {"attention_mask": sectorch.public(given["attention_mask"])}


def pair() -> dict[str, Any]:
    return tokens(decoder_input_ids=token_ids(2, 4))


def boxes(**others: Any) -> dict[str, Any]:
    corners = torch.randint(0, 30, (2, 7, 2))
    return tokens(bbox=torch.cat([corners, corners + torch.randint(1, 30, (2, 7, 2))], -1), **others)


def image(size: int = 32, rows: int = 1) -> Inputs:
    return lambda: {"pixel_values": torch.randn(rows, 3, size, size)}


def normal(name: str, *shape: int) -> Inputs:
    return lambda: {name: torch.randn(*shape)}


SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
BASE = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, **SPECIAL,
)  # fmt: skip
GROUPED = BASE | dict(num_key_value_heads=2)
GPT = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **SPECIAL)
T5 = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
BART = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, **SPECIAL,
)  # fmt: skip
ROPE8 = GROUPED | dict(head_dim=8)

TEXT: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {}, "XLMRoberta": {}, "XLMRobertaXL": {}, "Camembert": {}, "Ernie": {}, "RoFormer": {},
    "MPNet": {}, "Deberta": {}, "DebertaV2": {}, "MegatronBert": {}, "MobileBert": {}, "ConvBert": {}, "FNet": {},
    "Nystromformer": {}, "Splinter": {}, "LayoutLM": {}, "RemBert": {}, "Data2VecText": {}, "RobertaPreLayerNorm": {},
    "IBert": {}, "RoCBert": {}, "NomicBert": {}, "MarkupLM": {}, "VisualBert": {},
    "Albert": dict(embedding_size=16), "Electra": dict(embedding_size=16),
    "DistilBert": dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "ModernBert": dict(cls_token_id=1, sep_token_id=2), "Esm": dict(mask_token_id=3),
    "SqueezeBert": dict(embedding_size=32, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2),
    "Xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "BigBird": dict(attention_type="original_full"), "Longformer": dict(attention_window=[4, 4]),
    "Tapas": dict(type_vocab_sizes=[3, 16, 16, 2, 16, 10, 10]),
}  # fmt: skip
for family, options in TEXT.items():
    case("text", f"{family}Model", BASE | options, tokens)
case("text", "BertModel", BASE, public_mask, name="BertModel, public mask")
case("text", "LongformerModel", BASE | dict(attention_window=[4, 4]), public_mask, name="LongformerModel, public mask")
for model in ("BertForSequenceClassification", "BertForMaskedLM", "BertForQuestionAnswering"):
    case("text", model, BASE, tokens)
case("text", "RobertaForTokenClassification", BASE, tokens)
case("text", "XLNetModel", dict(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48), tokens)
for family in ("XLM", "Flaubert"):
    case("text", f"{family}Model", dict(vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4), tokens)
case("text", "FunnelModel", dict(vocab_size=VOCABULARY, d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1]),
     tokens)  # fmt: skip
case("text", "CanineModel", BASE | dict(num_hash_buckets=32, local_transformer_stride=4, upsampling_kernel_size=4),
     lambda: {"input_ids": token_ids(2, 16)})  # fmt: skip
case("text", "ReformerModel", BASE | dict(
    attn_layers=["local", "lsh"], attention_head_size=8, feed_forward_size=48, axial_pos_embds=False, is_decoder=False,
    local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_hashes=1, num_buckets=2,
), tokens)  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=8), "Mistral": {}, "Mixtral": dict(num_local_experts=4), "Phi": {},
    "Phi3": {}, "Gemma": dict(head_dim=8), "Gemma2": dict(head_dim=8), "Gemma3Text": dict(head_dim=8, sliding_window=4),
    "StableLm": {}, "Olmo": {}, "Olmo2": {}, "Olmoe": dict(num_experts=4, num_experts_per_tok=2), "Cohere": {},
    "Cohere2": {}, "Starcoder2": {}, "Granite": {}, "Persimmon": {}, "Nemotron": {}, "SmolLM3": {},
    "Helium": dict(head_dim=8),
    "Glm": dict(head_dim=8), "Glm4": dict(head_dim=8), "Ernie4_5": {}, "Arcee": {}, "Exaone4": {}, "BitNet": {},
    "GPTNeoX": {}, "ModernBertDecoder": dict(cls_token_id=1, sep_token_id=2), "BioGpt": {},
    "Qwen2Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                     shared_expert_intermediate_size=24),
    "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "GraniteMoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "RecurrentGemma": dict(lru_width=32, attention_window_size=8, use_cache=False),
    "Jamba": dict(num_experts=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, attn_layer_period=2,
                  attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "DeepseekV3": dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=24,
                       kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
                       first_k_dense_replace=1, n_shared_experts=1, num_key_value_heads=4),
    "Lfm2": dict(layer_types=["conv", "full_attention"]),
}  # fmt: skip
for family, options in DECODERS.items():
    case("decoder", f"{family.removesuffix('Text')}ForCausalLM", GROUPED | options, tokens, config=family)
case("decoder", "LlamaForCausalLM", GROUPED, public_mask, name="LlamaForCausalLM, public mask")
case("decoder", "Llama4ForCausalLM", ROPE8 | dict(
    intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=16), tokens,
    config="Llama4Text")  # fmt: skip
case("decoder", "GPT2LMHeadModel", GPT, tokens)
case("decoder", "GPT2ForSequenceClassification", GPT, tokens)
case("decoder", "GPTBigCodeForCausalLM", GPT, tokens)
for family in ("GPTJ", "CodeGen"):
    case("decoder", f"{family}ForCausalLM", GPT | dict(rotary_dim=4, n_ctx=64), tokens)
case("decoder", "GPTNeoForCausalLM", dict(
    vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
    max_position_embeddings=64, window_size=4, **SPECIAL), tokens)  # fmt: skip
case("decoder", "OPTForCausalLM", BASE | dict(ffn_dim=48, word_embed_proj_dim=32), tokens)
case("decoder", "BloomForCausalLM", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), tokens)
FALCON = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **SPECIAL)
case("decoder", "FalconForCausalLM", FALCON, tokens)
case("decoder", "MptForCausalLM", dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4), tokens)
case("decoder", "CTRLLMHeadModel", dict(vocab_size=VOCABULARY, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=64),
     tokens)  # fmt: skip
case("decoder", "XGLMForCausalLM", dict(
    vocab_size=VOCABULARY, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, **SPECIAL), tokens)  # fmt: skip
MAMBA = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **SPECIAL)
case("decoder", "MambaForCausalLM", MAMBA, tokens)
case("decoder", "FalconMambaForCausalLM", MAMBA, tokens)
case("decoder", "Mamba2ForCausalLM", MAMBA | dict(num_heads=4, head_dim=16, n_groups=1, chunk_size=4), tokens)
case("decoder", "RwkvForCausalLM",
     dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, context_length=16, use_cache=False),
     lambda: {"input_ids": token_ids()})  # fmt: skip

case("encoder-decoder", "T5EncoderModel", T5, tokens)
for family in ("T5", "MT5", "UMT5", "LongT5", "SwitchTransformers"):
    more = dict(num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=2)
    case("encoder-decoder", f"{family}ForConditionalGeneration", T5 | (more if "Switch" in family else {}), pair)
for family in ("Bart", "MBart", "Pegasus", "BlenderbotSmall", "Blenderbot", "M2M100", "PLBart", "LED", "PegasusX"):
    more = dict(attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64)
    more = more if family == "LED" else dict(block_size=4, num_global_tokens=2) if family == "PegasusX" else {}
    case("encoder-decoder", f"{family}ForConditionalGeneration", BART | more, pair)
case("encoder-decoder", "MarianMTModel", BART, pair, config="Marian")
case(
    "encoder-decoder",
    "ProphetNetForConditionalGeneration",
    dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        **SPECIAL,
    ),
    pair,
)

VIT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
)
STAGES = dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
WINDOWS = dict(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)
for family in ("ViT", "DeiT", "Beit", "Data2VecVision", "Dinov2", "Dinov2WithRegisters", "ViTMSN", "IJepa"):
    case("vision", f"{family}ForImageClassification", VIT, image())
case("vision", "ViTMAEForPreTraining", VIT | dict(
    decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32),
    lambda: image()() | {"noise": sectorch.public(torch.rand(1, 16))})  # fmt: skip
case("vision", "VideoMAEForVideoClassification", VIT | dict(num_frames=4, tubelet_size=2),
     normal("pixel_values", 1, 4, 3, 32, 32))  # fmt: skip
case("vision", "TimesformerForVideoClassification", VIT | dict(num_frames=2),
     normal("pixel_values", 1, 2, 3, 32, 32))  # fmt: skip
case("vision", "Swinv2ForImageClassification", WINDOWS, image())
case("vision", "SwinForImageClassification", WINDOWS, image())
case("vision", "ConvNextForImageClassification", STAGES, image())
case("vision", "ConvNextV2ForImageClassification", STAGES, image())
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
case("vision", "ResNetForImageClassification", RESNET, image())
case("vision", "RegNetForImageClassification", RESNET | dict(groups_width=8, layer_type="y"), image())
case("vision", "BitForImageClassification", RESNET | dict(layer_type="preactivation", num_groups=4), image())
case("vision", "MobileNetV1ForImageClassification", dict(depth_multiplier=0.25), image())
case("vision", "MobileNetV2ForImageClassification", dict(depth_multiplier=0.35), image())
case("vision", "EfficientNetForImageClassification", dict(
    width_coefficient=0.2, depth_coefficient=0.2, image_size=32, hidden_dim=256), image())  # fmt: skip
case("vision", "MobileViTForImageClassification", dict(
    image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], num_attention_heads=2),
    image())  # fmt: skip
PYRAMID = dict(
    depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16
)
case("vision", "SegformerForSemanticSegmentation", PYRAMID, image())
case("vision", "SegformerForImageClassification", PYRAMID, image())
case("vision", "PvtV2ForImageClassification", PYRAMID | dict(image_size=32), image())
case("vision", "PvtForImageClassification", PYRAMID | dict(image_size=32), image())
case("vision", "PoolFormerForImageClassification", dict(depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16]), image())
case("vision", "LevitForImageClassification", dict(
    image_size=64, hidden_sizes=[32, 48, 64], depths=[2, 2, 2], key_dim=[8, 8, 8], num_attention_heads=[2, 3, 4]),
    image(64))  # fmt: skip
case("vision", "CvtForImageClassification", dict(
    embed_dim=[8, 16, 16], num_heads=[1, 2, 2], depth=[1, 2, 3]), image())  # fmt: skip
case("vision", "FocalNetForImageClassification", dict(
    image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]),
    image())  # fmt: skip
case("vision", "SwiftFormerForImageClassification", dict(
    image_size=32, depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 16]), image())  # fmt: skip
case("vision", "HieraForImageClassification", dict(
    image_size=[32, 32], embed_dim=8, patch_size=[3, 3], patch_stride=[2, 2], patch_padding=[1, 1], depths=[1, 1],
    num_heads=[1, 2], embed_dim_multiplier=2.0, num_query_pool=1, query_stride=[2, 2], masked_unit_size=[4, 4]),
    image())  # fmt: skip
case("vision", "DPTForDepthEstimation", VIT | dict(
    is_hybrid=False, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8],
    fusion_hidden_size=8, readout_type="ignore"), image())  # fmt: skip
case("vision", "YolosForObjectDetection", VIT | dict(image_size=[32, 32], num_detection_tokens=5), image())
DETR = dict(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5, use_timm_backbone=False, use_pretrained_backbone=False,
    backbone=None, backbone_config=dict(model_type="resnet", out_features=["stage2"], **RESNET),
)  # fmt: skip
for family in ("Detr", "TableTransformer", "ConditionalDetr"):
    case("vision", f"{family}ForObjectDetection", DETR, image(64))

SPEECH = BASE | dict(
    conv_dim=[16, 16], conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4, layerdrop=0.0,
)  # fmt: skip
for family in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "Data2VecAudio", "SEW"):
    more = dict(num_conv_pos_embeddings=5, conv_pos_kernel_size=5) if family == "Data2VecAudio" else {}
    case("audio", f"{family}ForCTC", SPEECH | more | (dict(squeeze_factor=2) if family == "SEW" else {}),
         normal("input_values", 1, 400))  # fmt: skip
case("audio", "Wav2Vec2ForSequenceClassification", SPEECH, normal("input_values", 1, 400))
WHISPER = BART | dict(max_source_positions=20, max_target_positions=20, num_mel_bins=16, decoder_start_token_id=1)
case("audio", "WhisperForConditionalGeneration", WHISPER,
     lambda: {"input_features": torch.randn(1, 16, 40), "decoder_input_ids": token_ids(1, 4)})  # fmt: skip
case("audio", "Speech2TextForConditionalGeneration", WHISPER | dict(
    input_feat_per_channel=16, conv_channels=16, max_source_positions=64),
    lambda: {"input_features": torch.randn(1, 24, 16), "decoder_input_ids": token_ids(1, 4)})  # fmt: skip
SPEECHT5 = SPEECH | dict(
    encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, decoder_layers=1, decoder_attention_heads=4,
    decoder_ffn_dim=48, max_speech_positions=64, max_text_positions=64,
)  # fmt: skip
case("audio", "SpeechT5ForSpeechToText", SPEECHT5,
     lambda: {"input_values": torch.randn(1, 400), "decoder_input_ids": token_ids(1, 4)})  # fmt: skip
case("audio", "ASTForAudioClassification", dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_length=32, num_mel_bins=16,
    patch_size=8), normal("input_values", 1, 32, 16))  # fmt: skip

PATCHES = dict(num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=16, prediction_length=4)
case("time series", "PatchTSTForPrediction", PATCHES | dict(num_attention_heads=2, ffn_dim=32, num_hidden_layers=1),
     normal("past_values", 1, 32, 2))  # fmt: skip
case("time series", "PatchTSMixerForPrediction", PATCHES | dict(num_layers=1), normal("past_values", 1, 32, 2))
SERIES = dict(
    prediction_length=4, context_length=8, lags_sequence=[1, 2], d_model=16, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_time_features=1,
)  # fmt: skip


def series() -> dict[str, Any]:
    return {
        "past_values": torch.randn(1, 10), "past_time_features": torch.randn(1, 10, 1),
        "past_observed_mask": torch.ones(1, 10), "future_values": torch.randn(1, 4),
        "future_time_features": torch.randn(1, 4, 1),
    }  # fmt: skip


for family in ("TimeSeriesTransformer", "Informer", "Autoformer"):
    more = dict(label_length=2, moving_average=3) if family == "Autoformer" else {}
    case("time series", f"{family}Model", SERIES | more, series)
case("time series", "TimesFmModelForPrediction", dict(
    patch_length=8, context_length=32, horizon_length=8, hidden_size=32, intermediate_size=48, head_dim=8,
    num_hidden_layers=2, num_attention_heads=4), lambda: {"past_values": [torch.randn(32)], "freq": [0]},
    config="TimesFm")  # fmt: skip
case("time series", "DecisionTransformerModel", dict(
    state_dim=4, act_dim=2, hidden_size=32, max_ep_len=16, n_layer=2, n_head=4),
    lambda: {"states": torch.randn(1, 5, 4), "actions": torch.randn(1, 5, 2), "rewards": torch.randn(1, 5, 1),
             "returns_to_go": torch.randn(1, 5, 1), "timesteps": torch.arange(5)[None],
             "attention_mask": torch.ones(1, 5, dtype=torch.int64)})  # fmt: skip

TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
WORDS = TOWER | dict(vocab_size=VOCABULARY, max_position_embeddings=32, **SPECIAL)
SIGHT = TOWER | dict(image_size=32, patch_size=8)
TOWERS = dict(text_config=WORDS, vision_config=SIGHT, projection_dim=16)
both = lambda: tokens(pixel_values=torch.randn(2, 3, 32, 32))
case("multimodal", "CLIPModel", TOWERS, both)
case("multimodal", "CLIPTextModel", WORDS, tokens, config="CLIPText")
case("multimodal", "CLIPVisionModel", SIGHT, image(), config="CLIPVision")
case("multimodal", "SiglipModel", dict(text_config=WORDS, vision_config=SIGHT), both)
case("multimodal", "ChineseCLIPModel", TOWERS, both)
case("multimodal", "AltCLIPModel", TOWERS, both)
case("multimodal", "BlipForConditionalGeneration", TOWERS | dict(image_text_hidden_size=16), both)
case("multimodal", "OwlViTForObjectDetection", TOWERS | dict(projection_dim=32), both)
case("multimodal", "ViltForQuestionAnswering", BASE | SIGHT | dict(max_image_length=-1), lambda: both() | {
    "pixel_mask": sectorch.public(torch.ones(2, 32, 32, dtype=torch.int64))})  # fmt: skip
case("multimodal", "LayoutLMv3Model", BASE | dict(
    input_size=32, patch_size=8, coordinate_size=6, shape_size=4, max_2d_position_embeddings=64,
    has_spatial_attention_bias=True), lambda: boxes(pixel_values=torch.randn(2, 3, 32, 32)))  # fmt: skip
case("multimodal", "LiltModel", BASE | dict(hidden_size=48, max_2d_position_embeddings=64), boxes)
case("multimodal", "PerceiverForSequenceClassification", dict(
    num_latents=4, d_latents=16, d_model=24, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2,
    num_cross_attention_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16),
    lambda: {"inputs": token_ids(), "attention_mask": tokens()["attention_mask"]})  # fmt: skip
