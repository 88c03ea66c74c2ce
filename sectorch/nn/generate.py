"""Text generation with secret tokens: `sectorch.generate(secure_model, input_ids, max_new_tokens)`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import ArgumentError
from .beams import Beams
from .generation import Generation
from .module import SecureModule

F = TypeVar("F", bound=Callable[..., Any])


def _naming_options(f: F) -> F:
    """Refuse a keyword that there is none of by an error that names the nearest one."""
    options = [name for name, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        unknown = sorted(set(kwargs) - set(inspect.signature(f).parameters))
        if unknown:
            close = {name: difflib.get_close_matches(name, options) for name in unknown}
            near = [f"{name} (perhaps {close[name][0]})" for name in unknown if close[name]]
            raise ArgumentError(
                f"{f.__name__}() has no option {', '.join(near or unknown)}; it takes {', '.join(options)}"
            )
        return f(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


@_naming_options
def generate(
    model: SecureModule,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    streamer: Callable[[torch.Tensor], Any] | None = None,
    num_beams: int = 1,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    until_end: bool = False,
) -> torch.Tensor:
    """Continue secret texts with a secret causal language model of `transformers`.

    Args:
        model: `sectorch.secure(AutoModelForCausalLM....eval())`.
        input_ids: Q's prompts, whole numbers [rows, positions]; prompts of several lengths are padded on the left.
        max_new_tokens: how many tokens are generated at most.
        attention_mask: 0 where a prompt is padded; as secret as the prompt.
        generator: Q's randomness for `do_sample`; the operating system's unless named.
        streamer: called with the tokens of each step [rows], as soon as Q has them.
        num_beams: how many texts are kept in a beam search; it goes on to `max_new_tokens`, without the options
            below.
        do_sample, temperature, top_k, eos_token_id, pad_token_id, until_end: as of `Generation`.

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
    if num_beams != 1:
        beams = Beams(model, max_new_tokens, num_beams, eos_token_id)
        return beams(
            input_ids, attention_mask, generator=generator, streamer=streamer, do_sample=do_sample or None,
            temperature=None if temperature == 1.0 else temperature, top_k=top_k, pad_token_id=pad_token_id,
            until_end=until_end or None,
        )  # fmt: skip
    run = Generation(
        model, max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k, eos_token_id=eos_token_id,
        pad_token_id=pad_token_id, until_end=until_end,
    )  # fmt: skip
    return run(input_ids, attention_mask, generator=generator, streamer=streamer)
