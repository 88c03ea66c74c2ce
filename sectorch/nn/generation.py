"""Text generation with secret tokens: `sectorch.generate(secure_model, input_ids, max_new_tokens)`.

A causal language model of `transformers` runs twice: once on the prompt, and then once for each token on that token
alone, with the keys and values of all tokens before it. These stay in shares from call to call. Q learns the tokens,
and nobody learns anything else; the model never leaves its owner.

The keys and values stand at the end of a window of prompt and tokens to come, whose empty places a secret mask hides,
so that every step is the same program: it is traced once, and can be prepared ahead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..choreography.program.trace import Program
from ..errors import ArgumentError, DtypeError, SectorchError, ShapeError, UnsupportedOpError
from ..tensor import SharedTensor
from .choice import Choice
from .held import as_shared
from .inputs import Inputs
from .module import SecureModule

Cache = list[tuple[Any, Any]]
"""Keys and values of each layer."""


class Step(nn.Module):
    """One call of a causal language model: from tokens and the cache before them to the next token and the cache."""

    def __init__(self, model: nn.Module, choice: Choice):
        super().__init__()
        self.model, self.choice = model, choice
        taken = inspect.signature(model.forward).parameters
        self._placed, self._last = "position_ids" in taken, "logits_to_keep" in taken

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache, window: int, noise: Any
    ) -> Any:
        scores, cache = self.scores(input_ids, attention_mask, position_ids, past)
        return self.choice.token(scores, noise), [tuple(_last(x, window) for x in pair) for pair in cache]

    def scores(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache) -> tuple[Any, Cache]:
        """The scores of the next token, [rows, words], and the whole cache."""
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        more = {"position_ids": position_ids} if self._placed else {}
        more |= {"logits_to_keep": 1} if self._last else {}
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **more
        )
        layers = getattr(out.past_key_values, "layers", None)
        if not layers or not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in layers):
            raise UnsupportedOpError(
                f"{type(self.model).__name__} keeps no keys and values that generate() could pass on"
            )
        return out.logits[:, -1], [(layer.keys, layer.values) for layer in layers]


def _last(x: Any, window: int) -> Any:
    """The last positions of a cache's tensor [rows, heads, positions, width]; zeros stand before a shorter one."""
    empty = window - x.shape[-2]
    return F.pad(x, (0, 0, empty, 0)) if empty > 0 else x[..., x.shape[-2] - window :, :]


class Generation:
    """Generation with prompts of one shape: what `sectorch.generate` uses, for more than one text.

    Args:
        model: what `sectorch.secure` made of a causal language model of `transformers`.
        max_new_tokens: how many tokens are generated at most.
        do_sample, temperature, top_k: as in transformers' `generate`. Q draws the randomness, and nobody else knows it.
        eos_token_id: Q stops when every row has ended with one of these; the model's own unless named. All parties see
            how many steps are taken.
        pad_token_id: what follows an end.
        until_end: whether tokens stay secret of Q too until all are there: then the steps do not stop at an end.

    Attributes:
        secure: one step as a secure module.

    Raises:
        ArgumentError: a choice that is none; a model that is not secure, or that generates in another way.
    """

    def __init__(
        self,
        model: SecureModule,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        until_end: bool = False,
    ):
        if not isinstance(model, SecureModule):
            raise ArgumentError(f"generate() takes what sectorch.secure() made, got {type(model).__name__}")
        plain = model.plain
        config: Any = getattr(plain, "config", None)
        if config is None or getattr(config, "is_encoder_decoder", False) or not hasattr(config, "vocab_size"):
            raise ArgumentError(
                f"generate() takes causal language models of transformers (AutoModelForCausalLM), got "
                f"{type(plain).__name__}; call the secure model in a loop of your own"
            )
        if max_new_tokens < 1:
            raise ArgumentError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.max_new_tokens, self.until_end = max_new_tokens, until_end
        self._choice = Choice(do_sample, temperature, top_k)
        ends = eos_token_id if eos_token_id is not None else _configured(plain, "eos_token_id")
        self._ends = [ends] if isinstance(ends, int) else list(ends or ())
        pad = pad_token_id if pad_token_id is not None else _configured(plain, "pad_token_id")
        self._pad = pad if isinstance(pad, int) else (self._ends[0] if self._ends else 0)
        self._words = int(config.vocab_size)
        step = Step(plain, self._choice).eval()
        if model.session.present(model.party):
            _check_window(step)
        self.secure = model.over(step)
        self._session = model.session

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        streamer: Callable[[torch.Tensor], Any] | None = None,
    ) -> torch.Tensor:
        """Prompts and what follows them, [rows, positions + new tokens]; see `generate`."""
        ids, mask = _prompt(input_ids, attention_mask)
        taken: list[Any] = []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        token, past = self.secure.in_shares(self._first(ids, mask, generator))
        while True:
            if not self.until_end:
                token = self._learned(token, past)
                token[ended] = self._pad
                ended |= torch.isin(token[:, 0], torch.tensor(self._ends, dtype=token.dtype))
                if streamer is not None:
                    streamer(token[:, 0].clone())
            taken.append(token)
            if len(taken) == self.max_new_tokens or bool(ended.all()):
                break
            token, past = self.secure.in_shares(self._next(token, mask, past, len(taken), generator))
        if self.until_end:
            together: Any = torch.cat(taken, 1)
            return torch.cat((ids, together.reveal()), 1)
        return torch.cat((ids, *taken), 1)

    def preprocess(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, steps: int | None = None
    ) -> int:
        """Run everything that does not depend on the prompt, for one text after a prompt of this shape.

        Args:
            input_ids, attention_mask: of the later prompt; only the shapes are used, and whether there is a mask.
            steps: how many of the later steps are prepared; all of them unless named.

        Returns:
            bytes of memory that the material takes until it is used.
        """
        first, later = self._forms(input_ids, attention_mask)
        held = self.secure.preprocess(first)
        for _ in range(self.max_new_tokens - 1 if steps is None else steps):
            held += self.secure.preprocess(later)
        return held

    def programs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[Program, Program]:
        """What all parties do for a prompt of this shape, and what they do for each later token."""
        first, later = (self.secure.choreography(inputs) for inputs in self._forms(input_ids, attention_mask))
        return first, later

    def _forms(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[Inputs, Inputs]:
        ids, mask = _prompt(input_ids, attention_mask)
        first = self._first(ids, mask, None)
        module = self.secure
        found = module._check(first).outputs
        token, past = as_shared(found, [], module.session, module.party, module.scheme)
        token = token if self.until_end else torch.zeros(len(ids), 1, dtype=torch.int64)
        return first, self._next(token, mask, past, 1, None)

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        noise = self._choice.noise(len(ids), self._words, generator)
        window = ids.shape[1] + self.max_new_tokens - 2
        return Inputs(ids, mask, None if mask is None else _positions(mask), [], window, noise).staying()

    def _next(
        self, token: Any, mask: torch.Tensor | None, past: Cache, count: int, generator: torch.Generator | None
    ) -> Inputs:
        """The step after so many tokens."""
        rows, window = len(token), past[0][0].shape[-2]
        noise = self._choice.noise(rows, self._words, generator)
        length = window + 2 - self.max_new_tokens
        before = torch.ones(rows, length, dtype=torch.int64) if mask is None else mask
        seen = F.pad(
            torch.cat((before, torch.ones(rows, count, dtype=torch.int64)), 1), (window + 1 - length - count, 0)
        )
        return Inputs(token, seen, seen.sum(1, keepdim=True) - 1, past, window, noise).staying()

    def _learned(self, token: SharedTensor, past: Cache) -> torch.Tensor:
        """The tokens, revealed to Q. What they depend on was in range: so was what the cache depends on."""
        found = token.reveal()
        looked_at = {id(flag) for flag in token.flags}
        for x in (x for pair in past for x in pair):
            x.flags = tuple(flag for flag in x.flags if id(flag) not in looked_at)
        return found


def generate(
    model: SecureModule,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    streamer: Callable[[torch.Tensor], Any] | None = None,
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
        options: of `Generation`: do_sample, temperature, top_k, eos_token_id, pad_token_id, until_end.

    Returns:
        the prompts and what follows them, [rows, positions + new tokens].

    What is learned: Q learns the tokens, one after the other, and nothing of the scores; the others learn the shape of
    the prompts and the number of steps. Numeric error: that of the scores in fixed point; a token differs from the
    plain model's where two scores are closer than that.

    Raises:
        DtypeError, ShapeError: prompts or masks that are none; nothing was shared.
        ArgumentError: a choice that is none, or a model that generates in another way.
        RangeExceededError: a value left its range; Q has the tokens before it.
    """
    run = Generation(model, max_new_tokens, **options)
    return run(input_ids, attention_mask, generator=generator, streamer=streamer)


def _check_window(step: Step) -> None:
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
            past = [(_last(keys, 7), _last(values, 7)) for keys, values in cache]
            mask = F.pad(torch.ones(1, 5, dtype=torch.int64), (3, 0))
            found, _ = step.scores(ids[:, 4:], mask, torch.tensor([[4]]), past)
            if torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())):
                return
    except SectorchError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raise ArgumentError(f"generate() cannot continue texts of {type(model).__name__}: {reason}")


def _configured(model: nn.Module, name: str) -> Any:
    named = getattr(getattr(model, "generation_config", None), name, None)
    return named if named is not None else getattr(getattr(model, "config", None), name, None)


def _prompt(ids: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts and mask as they are used.

    Raises:
        DtypeError: no tensor of whole numbers. ShapeError: not [rows, positions], or the mask is not.
    """
    for name, x in (("input_ids", ids), ("attention_mask", mask)):
        if x is not None and (not isinstance(x, torch.Tensor) or x.is_floating_point()):
            said = f"{x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise DtypeError(f"{name} must be a tensor of whole numbers, got {said}; a tokenizer's return_tensors='pt'")
    if ids is None or ids.dim() != 2 or 0 in ids.shape:
        raise ShapeError(f"input_ids must be [rows, positions], got {[] if ids is None else list(ids.shape)}")
    if mask is not None and mask.shape != ids.shape:
        raise ShapeError(f"attention_mask is {list(mask.shape)}, input_ids {list(ids.shape)}")
    ids = ids.long()
    if mask is None:
        return ids, None
    mask = mask.long()
    if not mask.is_meta and not bool((mask[:, -1] == 1).all() and (mask.diff(dim=1) >= 0).all()):
        raise ArgumentError("prompts are padded on the left: tokenizer.padding_side = 'left'")
    return ids, mask


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)
