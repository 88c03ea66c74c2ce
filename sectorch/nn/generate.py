"""Text generation with secret tokens: `sectorch.generate(secure_model, input_ids, max_new_tokens)`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from .beams import Beams
from .generation import Generation
from .module import SecureModule

OPTIONS = ("do_sample", "temperature", "top_k", "eos_token_id", "pad_token_id", "until_end")


def generate(
    model: SecureModule,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    streamer: Callable[[torch.Tensor], Any] | None = None,
    num_beams: int = 1,
    **options: Any,
) -> torch.Tensor:
    """Continue secret texts with a secret causal language model of `transformers`.

    Args:
        model: `sectorch.secure(AutoModelForCausalLM....eval())`.
        input_ids: Q's prompts, whole numbers [rows, positions]; prompts of several lengths are padded on the left.
        max_new_tokens: how many tokens are generated at most.
        attention_mask: 0 where a prompt is padded; as secret as the prompt.
        generator: Q's randomness for `do_sample`; the operating system's unless named.
        streamer: called with the tokens of each step [rows], as soon as Q has them.
        num_beams: how many texts are kept in a beam search; it goes on to `max_new_tokens`, and takes no options.
        options: of `Generation`: do_sample, temperature, top_k, eos_token_id, pad_token_id, until_end.

    Returns:
        the prompts and what follows them, [rows, positions + new tokens].

    What is learned: Q learns the tokens, one after the other (of a beam search those of all beams, and which go on),
    and nothing of the scores but their order; the others learn the shape of the prompts and the number of steps.
    Numeric error: that of the scores in fixed point; a token differs from the plain model's where two scores are closer
    than that.

    Raises:
        DtypeError, ShapeError: prompts or masks that are none; nothing was shared.
        ArgumentError: a choice that is none, or a model that generates in another way.
        RangeExceededError: a value left its range; Q has the tokens before it.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        near = [
            f"{name} (perhaps {close[0]})" for name in unknown if (close := difflib.get_close_matches(name, OPTIONS))
        ]
        raise ArgumentError(
            f"generate() has no option {', '.join(near or unknown)}; it takes {', '.join(OPTIONS)}, num_beams, "
            f"attention_mask, generator and streamer"
        )
    if num_beams != 1:
        beams = Beams(model, max_new_tokens, num_beams, options.pop("eos_token_id", None))
        return beams(input_ids, attention_mask, generator=generator, streamer=streamer, **options)
    run = Generation(model, max_new_tokens, **options)
    return run(input_ids, attention_mask, generator=generator, streamer=streamer)
