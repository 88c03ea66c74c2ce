"""The description of a language model that others may ask to continue texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..errors import ArgumentError
from ..session import Session
from ..tensor import Scheme
from .choice import Choice
from .describe import describe
from .generation import Generation
from .model_file import write_model
from .module import SecureModule
from .step import Step


def describe_texts(
    model: nn.Module,
    prompts: Sequence[tuple[int, int]],
    max_new_tokens: int,
    *,
    masked: bool = True,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """The public description of a causal language model for generation, and its weights by name.

    Args:
        model: of `transformers` (AutoModelForCausalLM), in evaluation mode, on the CPU.
        prompts: for which shapes [rows, positions] it is served.
        max_new_tokens: how many tokens there is room for after a prompt; who asks may stop before.
        masked: whether prompts come with a mask, so that shorter texts can be padded on the left; it is secret.
        do_sample, temperature, top_k, eos_token_id, pad_token_id: as of `Generation`.

    Raises:
        ArgumentError: no prompts, or a model that generates in another way. Others: as of `describe`.
    """
    if not prompts or not all(len(shape) == 2 and min(shape) > 0 for shape in prompts):
        raise ArgumentError(f"prompts are shapes (rows, positions), got {list(prompts)!r:.80}")
    session = Session()
    run = Generation(
        SecureModule(model, session, session.answering[0], Scheme(), None), max_new_tokens, do_sample=do_sample,
        temperature=temperature, top_k=top_k, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
    )  # fmt: skip
    calls = []
    for shape in prompts:
        ids = torch.ones(tuple(shape), dtype=torch.int64)
        calls += run.forms(ids, torch.ones_like(ids) if masked else None)
    description, weights = describe(Step(model, Choice(do_sample, temperature, top_k)).eval(), calls)
    return {**description, "texts": replace(run.texts, masked=masked).said}, weights


def save_generation(
    model: nn.Module,
    prompts: Sequence[tuple[int, int]],
    max_new_tokens: int,
    path: str | Path,
    *,
    masked: bool = True,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Write a causal language model for `sectorch answer`, to be asked by `RemoteModel.generate`.

    Args:
        model: of `transformers` (AutoModelForCausalLM), in evaluation mode, on the CPU.
        prompts: for which shapes [rows, positions] it is served.
        max_new_tokens: how many tokens there is room for after a prompt; who asks may stop before.
        path: of the file, by habit `NAME.safetensors`. It holds the weights, and only its owner may read it.
        masked: whether prompts come with a mask, so that shorter texts can be padded on the left; it is secret.
        do_sample, temperature, top_k, eos_token_id, pad_token_id: as of `sectorch.Generation`.

    Raises:
        ArgumentError: it generates in another way, or the file cannot be written. Others: as of `save_model`.
    """
    described = describe_texts(
        model, prompts, max_new_tokens, masked=masked, do_sample=do_sample, temperature=temperature, top_k=top_k,
        eos_token_id=eos_token_id, pad_token_id=pad_token_id,
    )  # fmt: skip
    write_model(*described, path)
