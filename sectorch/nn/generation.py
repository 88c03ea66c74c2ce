"""Text generation with secret tokens: `sectorch.generate(secure_model, input_ids, max_new_tokens)`.

A causal language model of `transformers` runs on the prompt first, and then on each new token alone, with the keys and
values of all tokens before it, which stay in shares from call to call. Q learns the tokens, and nobody learns anything
else; the model never leaves its owner.

The keys and values stand at the end of a window with room for prompt and new tokens, and a secret mask hides its empty
places. So every step is the same program, which is traced once and can be prepared.

In a beam search (`num_beams`) the scores of the beams stay in shares as well. Q learns which beams go on, and with
which tokens, and gives the next step the order of the beams as a secret input.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..choreography.program.trace import Program
from ..errors import ArgumentError, DimensionError, DtypeError, SectorchError, ShapeError, UnsupportedOpError
from ..optional_deps import required_imports
from .inputs import Inputs, as_shared
from .module import SecureModule
from .remote_program import Choice, TextSettings

Cache = list[tuple[Any, Any]]
"""Keys and values of each layer."""


class TokenScorer(nn.Module):
    """A causal language model of `transformers` as a module that scores the next token."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        taken = inspect.signature(model.forward).parameters
        self._placed, self._last = "position_ids" in taken, "logits_to_keep" in taken
        before = "cache" not in taken and "past_key_values" in taken  # as transformers called it until 5.23
        self._cache = "past_key_values" if before else "cache"

    def scores(self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache) -> tuple[Any, Cache]:
        """The scores of the next token, [rows, words], and the whole cache."""
        with required_imports("generating text", "transformers", ArgumentError):
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


class TokenStep(TokenScorer):
    """One call of a causal language model: from tokens and the cache before them to the next token and the cache."""

    def __init__(self, model: nn.Module, choice: Choice):
        super().__init__(model)
        self.choice = choice

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache, window: int, noise: Any
    ) -> Any:
        scores, cache = self.scores(input_ids, attention_mask, position_ids, past)
        return self.choice.token(scores, noise), [tuple(last_positions(x, window) for x in pair) for pair in cache]


def last_positions(x: Any, window: int) -> Any:
    """The last positions of a cache's tensor [rows, heads, positions, width]; zeros stand before a shorter one."""
    empty = window - x.shape[-2]
    return F.pad(x, (0, 0, empty, 0)) if empty > 0 else x[..., x.shape[-2] - window :, :]


def check_window(step: TokenScorer) -> None:
    """Check on plain numbers that a cache which begins with empty places does not change the scores.

    Raises:
        ArgumentError: the scores change, or the model cannot be called so.
    """
    model: Any = step.model
    draw = torch.Generator().manual_seed(0x5EC)
    ids = torch.randint(0, min(model.config.vocab_size, 1000), (1, 5), generator=draw)
    reason = "its scores depend on the places of tokens in the cache"
    try:
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[:, -1]
            _, cache = step.scores(ids[:, :4], None, None, [])
            past = [(last_positions(keys, 7), last_positions(values, 7)) for keys, values in cache]
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
    """Check, at the model's owner, that the model has positions for all tokens of a text, new ones included.

    Raises:
        ArgumentError: its table of positions is too short.
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
    "watermarking_config": (None,), "max_time": (None,), "stop_strings": (None,), "token_healing": (None, False),
    "penalty_alpha": (None, 0.0), "dola_layers": (None,), "constraints": (None,), "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1), "diversity_penalty": (None, 0.0),
}  # fmt: skip
"""Settings of a model's generation_config that change the scores of a step or where it ends, and their neutral
values."""
_CHANGES_DRAWS = {
    "top_p": (None, 1.0), "min_p": (None, 0.0), "top_h": (None, 1.0), "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0),
}  # fmt: skip
"""Those that change how a token is drawn."""


def _refuse_configured(model: nn.Module, choice: Choice, named: bool, beams: bool) -> None:
    """Refuse settings of the model's generation_config that only the plain model's `generate` applies.

    Args:
        named: whether the caller says if tokens are drawn. beams: whether it asks for a beam search.

    Raises:
        ArgumentError: naming the setting.
    """
    config = getattr(model, "generation_config", None)
    if getattr(config, "do_sample", None) and not named:
        raise ArgumentError(
            "the model's generation_config has do_sample=True: say do_sample=True, with a temperature and top_k, or "
            "do_sample=False (of a beam search, model.generation_config.do_sample = False leaves it out)"
        )
    for name in ("temperature", "top_k") if choice.do_sample else ():
        value = getattr(config, name, None)
        if value is not None and getattr(choice, name) in (None, 1.0) and value != getattr(choice, name):
            raise ArgumentError(f"the model's generation_config has {name}={value!r:.40}: name {name} to draw tokens")
    refused = (
        _CHANGES_SCORES | (_CHANGES_DRAWS if choice.do_sample else {}) | ({} if beams else {"num_beams": (None, 1)})
    )
    for name, neutral in refused.items():
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
    draws_named: bool = True,
    beams: bool = False,
) -> TextSettings:
    """The settings with which a causal language model continues texts.

    Raises:
        ArgumentError: another kind of model, no new tokens, or an end or a padding that is no token.
    """
    config: Any = getattr(plain, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or not hasattr(config, "vocab_size"):
        raise ArgumentError(
            f"generate() takes causal language models of transformers (AutoModelForCausalLM), got "
            f"{type(plain).__name__}; call the secure model in a loop of your own"
        )
    _refuse_configured(plain, choice, draws_named, beams)
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
    return TextSettings(max_new_tokens, words, choice, ends, pad, until_end=until_end)


class TextContinuation:
    """Continues texts by one step for each token.

    Attributes:
        texts: the public settings.
    """

    texts: TextSettings

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        generator: torch.Generator | None = None,
        streamer: Callable[[torch.Tensor], Any] | None = None,
    ) -> torch.Tensor:
        """Prompts and what follows them, [rows, positions + new tokens]; see `generate`.

        Raises:
            ArgumentError: more tokens than there is room for, or a streamer that cannot be called.
            DimensionError: a prompt with tokens that the model does not have.
        """
        ids, mask = prompt_of(input_ids, attention_mask)
        most = self.texts.max_new_tokens if max_new_tokens is None else max_new_tokens
        if type(most) is not int or not 1 <= most <= self.texts.max_new_tokens:
            raise ArgumentError(f"there is room for {self.texts.max_new_tokens} new tokens, {most} were asked for")
        if streamer is not None and not callable(streamer):
            raise ArgumentError(f"streamer is called with the token of each row, got {type(streamer).__name__}")
        check_words(ids, self.texts.words)
        check_padding(ids, mask, self.texts)
        taken: list[Any] = []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        token, past = self._call(self._first(ids, mask, generator), most - 1)
        while True:
            if not self.texts.until_end:
                token[ended] = self.texts.pad
                ended |= torch.isin(token[:, 0], torch.tensor(self.texts.ends, dtype=token.dtype))
                if streamer is not None:
                    streamer(token[:, 0].clone())
            taken.append(token)
            if len(taken) == most or bool(ended.all()):
                break
            token, past = self._call(self._next(token, mask, past, len(taken), generator))
        if self.texts.until_end:
            together: Any = torch.cat(taken, 1)
            return torch.cat((ids, together.reveal()), 1)
        return torch.cat((ids, *taken), 1)

    def _call(self, inputs: Inputs, later: int = 0) -> tuple[Any, Cache]:
        """Run one step and return the token and the cache in shares; `later` steps may follow the first one."""
        raise NotImplementedError

    @property
    def _learned(self) -> int:
        """The number of results of a step that Q learns: the token, or none before the end."""
        return 0 if self.texts.until_end else 1

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        noise = self.texts.choice.noise(len(ids), self.texts.words, generator)
        return Inputs(**self._prompt(ids, mask), noise=noise).retaining_results(self._learned)

    def _prompt(self, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of a step for the prompt."""
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        called = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {**called, "past": [], "window": self._window(ids)}

    def _window(self, ids: torch.Tensor) -> int:
        """Places of the cache that a step takes."""
        return ids.shape[1] + self.texts.max_new_tokens - 2

    def _next(
        self, token: Any, mask: torch.Tensor | None, past: Cache, count: int, generator: torch.Generator | None
    ) -> Inputs:
        """The inputs of the step after `count` tokens."""
        noise = self.texts.choice.noise(len(token), self.texts.words, generator)
        return Inputs(**self._later(token, mask, past, count), noise=noise).retaining_results(self._learned)

    def _later(self, token: Any, mask: torch.Tensor | None, past: Cache, count: int) -> dict[str, Any]:
        """The arguments of the step after `count` tokens."""
        rows, window = len(token), past[0][0].shape[-2]
        length = window + 2 - self.texts.max_new_tokens
        before = torch.ones(rows, length, dtype=torch.int64) if mask is None else mask
        seen = F.pad(
            torch.cat((before, torch.ones(rows, count, dtype=torch.int64)), 1), (window + 1 - length - count, 0)
        )
        called = {"input_ids": token, "attention_mask": seen, "position_ids": seen.sum(1, keepdim=True) - 1}
        return {**called, "past": past, "window": window}


class Generation(TextContinuation):
    """Generation with prompts of one shape: what `sectorch.generate` uses, for more than one text.

    Args:
        model: what `sectorch.secure` made of a causal language model of `transformers`.
        max_new_tokens: how many tokens are generated at most.
        do_sample, temperature, top_k: as in transformers' `generate`, with all tokens where top_k is not named. Q draws
            the randomness, and nobody else knows it. False unless named; what the model's generation_config asks for
            beside this is refused.
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
        do_sample: bool | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        until_end: bool = False,
    ):
        if not isinstance(model, SecureModule):
            raise ArgumentError(f"generate() takes what sectorch.secure() made, got {type(model).__name__}")
        plain, choice = model.plain, Choice(bool(do_sample), temperature, top_k)
        named = do_sample is not None
        self.texts = texts_of(plain, max_new_tokens, choice, eos_token_id, pad_token_id, until_end, named)
        step = TokenStep(plain, choice).eval()
        if model.session.present(model.party):
            check_window(step)
        self.secure = model.with_module(step)

    def _call(self, inputs: Inputs, later: int = 0) -> tuple[Any, Cache]:
        return self.secure.in_shares(inputs)

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        check_places(self.secure, ids, mask, self.texts.max_new_tokens)
        return super()._first(ids, mask, generator)

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
        first, later = self.forms(input_ids, attention_mask)
        held = self.secure.preprocess(first)
        for _ in range(self.texts.max_new_tokens - 1 if steps is None else steps):
            held += self.secure.preprocess(later)
        return held

    def programs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[Program, Program]:
        """What all parties do for a prompt of this shape, and what they do for each later token."""
        first, later = (self.secure.choreography(inputs) for inputs in self.forms(input_ids, attention_mask))
        return first, later

    def forms(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[Inputs, Inputs]:
        """The call with a prompt of this shape, and that of each later step; only shapes are used."""
        ids, mask = prompt_of(input_ids, attention_mask)
        first = self._first(ids, mask, None)
        module = self.secure
        found = module._check(first).outputs
        token, past = as_shared(found, [], module.session, module.party, module.scheme)
        token = token if self.texts.until_end else torch.zeros(len(ids), 1, dtype=torch.int64)
        return first, self._next(token, mask, past, 1, None)


def check_words(ids: torch.Tensor, words: int) -> None:
    """Raise `DimensionError` for a prompt with numbers that are no tokens, before anything is sent."""
    if not ids.is_meta and bool(((ids < 0) | (ids >= words)).any()):
        wrong = int(((ids < 0) | (ids >= words)).sum())
        raise DimensionError(
            f"index out of range: {wrong} of {ids.numel()} tokens of input_ids are not among 0 to {words - 1}, which "
            f"the model has"
        )


def check_padding(ids: torch.Tensor, mask: torch.Tensor | None, texts: TextSettings) -> None:
    """Raise `ArgumentError` for a prompt without a mask that holds the padding, before anything is sent: plain
    transformers would make a mask of it."""
    if mask is None and texts.pad not in texts.ends and not ids.is_meta and bool((ids == texts.pad).any()):
        raise ArgumentError(
            f"input_ids hold the padding, token {texts.pad}: pass attention_mask, 0 where a prompt is padded and 1 "
            f"where it is text"
        )


def prompt_of(ids: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts and mask as int64 tensors.

    Raises:
        DtypeError: one of them is no tensor of whole numbers.
        ShapeError: prompts that are not [rows, positions], or a mask of another shape.
        ArgumentError: prompts that are padded on the right.
    """
    for name, x in (("input_ids", ids), ("attention_mask", mask)):
        dense = isinstance(x, torch.Tensor) and x.layout == torch.strided
        whole = dense and not (x.is_floating_point() or x.is_complex()) and (x.dtype != torch.bool or x is mask)
        if x is not None and not whole:
            said = f"{x.dtype} {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__
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


class BeamStep(TokenScorer):
    """One call of a causal language model for all beams; the beams of a text are consecutive rows."""

    def __init__(self, model: nn.Module, beams: int):
        super().__init__(model)
        self._beams = beams

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache, window: int, order: Any = None,
        before: Any = None,
    ) -> Any:  # fmt: skip
        """
        Args:
            order: of a later step, which beam each one goes on from, one-hot [rows, beams, beams].
            before: the beams' sums of log-probabilities so far [rows, beams].

        Returns:
            beam * words + token of each beam, the best first; their sums; the cache.
        """
        if order is not None:
            past = [(_ordered(keys, order), _ordered(values, order)) for keys, values in past]
        scores, cache = self.scores(input_ids, attention_mask, position_ids, past)
        found = torch.log_softmax(scores, -1)
        if order is not None:
            found = (found.reshape(*before.shape, -1) + before[..., None]).flatten(1)
        sums, chosen = found.topk(self._beams)
        cache = [tuple(last_positions(x, window) for x in pair) for pair in cache]
        if order is None:
            cache = [tuple(x.repeat_interleave(self._beams, 0) for x in pair) for pair in cache]
        return chosen, sums, cache


def _ordered(x: Any, order: Any) -> Any:
    """A cache's tensor [rows * beams, ...] with the beams of each row in another order."""
    rows, beams = order.shape[:2]
    return (order.to(x.dtype) @ x.reshape(rows, beams, -1)).reshape(x.shape)


class Beams(TextContinuation):
    """Beam search with prompts of one shape: what `sectorch.generate` uses for `num_beams`.

    Args:
        model: what `sectorch.secure` made of a causal language model of `transformers`.
        max_new_tokens: how many tokens are generated, neither more nor less: no text ends before.
        num_beams: how many texts are kept; the best is given.
        eos_token_id: [] where the model's configuration names a token that ends a text.

    Attributes:
        secure: one step as a secure module.

    Raises:
        ArgumentError: fewer than two beams, or an end of texts; a model that is not secure, or that generates in
            another way.
    """

    def __init__(
        self, model: SecureModule, max_new_tokens: int, num_beams: int, eos_token_id: int | list[int] | None = None
    ):
        if not isinstance(model, SecureModule):
            raise ArgumentError(f"generate() takes what sectorch.secure() made, got {type(model).__name__}")
        if not isinstance(num_beams, int) or num_beams < 2:
            raise ArgumentError(f"num_beams must be a whole number of 2 or more, got {num_beams!r}")
        self.texts = texts_of(model.plain, max_new_tokens, Choice(), eos_token_id, None, False, False, beams=True)
        if self.texts.ends:
            raise ArgumentError(
                f"a beam search does not stop at the end of a text (token {self.texts.ends[0]}): its sums stay secret; "
                f"eos_token_id=[] goes on to max_new_tokens"
            )
        if num_beams > self.texts.words:
            raise ArgumentError(f"num_beams must be at most {self.texts.words}, the number of words, got {num_beams}")
        step = BeamStep(model.plain, num_beams).eval()
        if model.session.present(model.party):
            check_window(step)
        self.secure, self._beams = model.with_module(step), num_beams

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **other: Any
    ) -> torch.Tensor:
        """Prompts and what follows them, [rows, positions + new tokens]: of each the text of the largest probability
        that was found.

        Raises:
            ArgumentError: other arguments, which beams do not take.
        """
        given = sorted(name for name, value in other.items() if value is not None)
        if given:
            raise ArgumentError(f"num_beams goes without {', '.join(given)}")
        ids, mask = prompt_of(input_ids, attention_mask)
        check_words(ids, self.texts.words)
        check_padding(ids, mask, self.texts)
        check_places(self.secure, ids, mask, self.texts.max_new_tokens)
        chosen, sums, past = self.secure.in_shares(Inputs(**self._prompt(ids, mask)).retaining_results(1))
        texts = (chosen % self.texts.words)[..., None]
        mask = None if mask is None else mask.repeat_interleave(self._beams, 0)
        while texts.shape[-1] < self.texts.max_new_tokens:
            beam, token = chosen // self.texts.words, texts[..., -1].reshape(-1, 1)
            called = self._later(token, mask, past, texts.shape[-1])
            inputs = Inputs(**called, order=F.one_hot(beam, self._beams), before=sums).retaining_results(1)
            chosen, sums, past = self.secure.in_shares(inputs)
            texts = texts.gather(1, (chosen // self.texts.words)[..., None].expand_as(texts))
            texts = torch.cat((texts, (chosen % self.texts.words)[..., None]), -1)
        return torch.cat((ids, texts[:, 0]), 1)


Function = TypeVar("Function", bound=Callable[..., Any])


def _naming_options(f: Function) -> Function:
    """Make a function refuse unknown keywords by an error that names the nearest option."""
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
    do_sample: bool | None = None,
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
