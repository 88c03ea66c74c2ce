"""One call of a causal language model of `transformers` as a module: from tokens and a cache to the next of both."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ArgumentError, SectorchError, UnsupportedOpError
from ..extras import needed
from .choice import Choice, Texts
from .module import SecureModule

Cache = list[tuple[Any, Any]]
"""Keys and values of each layer."""


class Scoring(nn.Module):
    """A causal language model that scores the next token."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        taken = inspect.signature(model.forward).parameters
        self._placed, self._last = "position_ids" in taken, "logits_to_keep" in taken
        before = "cache" not in taken and "past_key_values" in taken  # as transformers called it until 5.23
        self._cache = "past_key_values" if before else "cache"

    def scores(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache) -> tuple[Any, Cache]:
        """The scores of the next token, [rows, words], and the whole cache."""
        with needed("generating text", "transformers", ArgumentError):
            from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        more = {"position_ids": position_ids} if self._placed else {}
        more |= {"logits_to_keep": 1} if self._last else {}
        more |= {self._cache: cache}
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **more)
        layers = getattr(getattr(out, self._cache), "layers", None)
        if not layers or not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in layers):
            raise UnsupportedOpError(
                f"{type(self.model).__name__} keeps no keys and values that generate() could pass on"
            )
        return out.logits[:, -1], [(layer.keys, layer.values) for layer in layers]


class Step(Scoring):
    """One call of a causal language model: from tokens and the cache before them to the next token and the cache."""

    def __init__(self, model: nn.Module, choice: Choice):
        super().__init__(model)
        self.choice = choice

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache, window: int, noise: Any
    ) -> Any:
        scores, cache = self.scores(input_ids, attention_mask, position_ids, past)
        return self.choice.token(scores, noise), [tuple(last(x, window) for x in pair) for pair in cache]


def last(x: Any, window: int) -> Any:
    """The last positions of a cache's tensor [rows, heads, positions, width]; zeros stand before a shorter one."""
    empty = window - x.shape[-2]
    return F.pad(x, (0, 0, empty, 0)) if empty > 0 else x[..., x.shape[-2] - window :, :]


def check_window(step: Scoring) -> None:
    """On plain numbers: a token after a cache that begins with empty places gets the scores that the whole text gives.

    Raises:
        ArgumentError: it does not, or the model cannot be called so.
    """
    model: Any = step.model
    draw = torch.Generator().manual_seed(0x5EC)
    ids = torch.randint(0, min(model.config.vocab_size, 1000), (1, 5), generator=draw)
    reason = "its scores depend on the places of tokens in the cache"
    try:
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[:, -1]
            _, cache = step.scores(ids[:, :4], None, None, [])
            past = [(last(keys, 7), last(values, 7)) for keys, values in cache]
            mask = F.pad(torch.ones(1, 5, dtype=torch.int64), (3, 0))
            found, _ = step.scores(ids[:, 4:], mask, torch.tensor([[4]]), past)
            if torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())):
                return
    except SectorchError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raise ArgumentError(f"generate() cannot continue texts of {type(model).__name__}: {reason}")


def check_places(module: SecureModule, ids: torch.Tensor, mask: torch.Tensor | None, tokens: int) -> None:
    """Where the model is: whether it has places for all tokens of a text, those to come included.

    Raises:
        ArgumentError: a table of positions that ends before.
    """
    if not module.session.present(module.party):
        return
    step: Any = module.plain
    length = ids.shape[1] if mask is None or mask.is_meta else int(mask.sum(1).max())
    last_place = torch.tensor([[length + tokens - 2]])
    try:
        with torch.no_grad():
            step.scores(torch.zeros(1, 1, dtype=torch.int64), None, last_place, [])
    except IndexError:
        raise ArgumentError(
            f"{type(step.model).__name__} has fewer places than {length} tokens of a prompt and {tokens} new ones: "
            f"shorten the prompt, or ask for fewer max_new_tokens"
        ) from None


def _configured(model: nn.Module, name: str) -> Any:
    named = getattr(getattr(model, "generation_config", None), name, None)
    return named if named is not None else getattr(getattr(model, "config", None), name, None)


_CHANGES_SCORES = {
    "repetition_penalty": (None, 1.0), "encoder_repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0), "bad_words_ids": (None, []), "force_words_ids": (None, []),
    "suppress_tokens": (None, []), "begin_suppress_tokens": (None, []), "sequence_bias": (None, {}),
    "forced_bos_token_id": (None,), "forced_eos_token_id": (None,), "min_length": (None, 0),
    "min_new_tokens": (None, 0), "exponential_decay_length_penalty": (None,), "guidance_scale": (None, 1.0),
}  # fmt: skip
"""What a model's generation_config may ask of each step beside its scores, and the values that change nothing."""


def _refuse_configured(model: nn.Module) -> None:
    """Raise for what the plain model's `generate` would do, and this one does not.

    Raises:
        ArgumentError: naming it.
    """
    config = getattr(model, "generation_config", None)
    for name, neutral in _CHANGES_SCORES.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ArgumentError(
                f"the model's generation_config has {name}={value!r:.60}, which generate() does not compute on secret "
                f"scores; model.generation_config.{name} = {neutral[-1]!r} leaves it out"
            )


def texts_of(
    plain: nn.Module,
    max_new_tokens: int,
    choice: Choice,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
    until_end: bool,
) -> Texts:
    """How a causal language model continues texts.

    Raises:
        ArgumentError: it is none, no token is asked for, or an end or a padding that is no token.
    """
    config: Any = getattr(plain, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or not hasattr(config, "vocab_size"):
        raise ArgumentError(
            f"generate() takes causal language models of transformers (AutoModelForCausalLM), got "
            f"{type(plain).__name__}; call the secure model in a loop of your own"
        )
    _refuse_configured(plain)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ArgumentError(f"max_new_tokens must be a whole number of 1 or more, got {max_new_tokens!r}")
    words = int(config.vocab_size)
    named = eos_token_id if eos_token_id is not None else _configured(plain, "eos_token_id")
    named = tuple(named) if isinstance(named, (list, tuple)) else () if named is None else (named,)
    if not all(type(end) is int for end in named):
        raise ArgumentError(f"eos_token_id must be a whole number or a list of such, got {eos_token_id!r:.80}")
    ends = tuple(end for end in named if 0 <= end < words)  # others are never chosen
    known = lambda token: type(token) is int and 0 <= token < words
    if pad_token_id is not None and not known(pad_token_id):  # it is an input of the steps after an end
        raise ArgumentError(f"pad_token_id must be a token of the model, 0 to {words - 1}, got {pad_token_id!r:.40}")
    pad = pad_token_id if pad_token_id is not None else _configured(plain, "pad_token_id")
    pad = pad if known(pad) else ends[0] if ends else 0
    return Texts(max_new_tokens, words, choice, ends, pad, until_end=until_end)
