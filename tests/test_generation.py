"""Tensors that stay in shares between calls, and the generation of text that stands on them."""

import pytest
import torch
from cases import some
from torch import nn

import sectorch
from sectorch.choreography.net import Read
from sectorch.errors import ArgumentError, DimensionError, DtypeError, RangeExceededError, ShapeError
from sectorch.nn.remote_program import Choice

transformers = pytest.importorskip("transformers")

WORDS = 40
SMALL = {
    "GPT2": dict(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2),
    "Llama": dict(vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=32),
    "Bloom": dict(vocab_size=WORDS, hidden_size=16, n_layer=1, n_head=2),
}  # fmt: skip


def language_model(family, **other):
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    model = getattr(transformers, name)(
        getattr(transformers, f"{family}Config")(**SMALL[family] | other, **ends)
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return model.requires_grad_(False)


def prompts():
    ids = torch.randint(1, WORDS, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return ids, mask


def plain(model, ids, mask, tokens):
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.fixture(scope="module")
def gpt2():
    """Of one layer: the tests of the plain model's tokens and of beam search have the caches of two."""
    return language_model("GPT2", n_layer=1)


@pytest.fixture(scope="module")
def secured(gpt2):
    return sectorch.secure(gpt2, session=sectorch.Session())


@pytest.mark.parametrize("family", some(SMALL, ["GPT2", "Llama"]))
def test_the_tokens_are_those_of_the_plain_model(family):
    model = language_model(family)
    ids, mask = prompts()
    run = sectorch.Generation(sectorch.secure(model, session=sectorch.Session()), 6)
    expected = plain(model, ids, mask, 6)
    assert len(set(expected[:, 5:].flatten().tolist())) > 2
    assert torch.equal(run(ids, mask), expected)
    assert len(run.secure._checked) == 2  # the prompt's program, and one for every later token


def test_tokens_that_stay_secret_to_the_end_are_the_same(gpt2, secured):
    ids, mask = prompts()
    found = sectorch.generate(secured, ids, 5, attention_mask=mask, until_end=True)
    assert torch.equal(found, plain(gpt2, ids, mask, 5))


def test_the_reference_gives_the_same_tokens(gpt2):
    ids, _ = prompts()
    secured = sectorch.secure(gpt2, session=sectorch.Session(reference=True))
    assert torch.equal(sectorch.generate(secured, ids, 4), plain(gpt2, ids, torch.ones_like(ids), 4))


def test_a_sampled_token_is_the_largest_of_noisy_scores(gpt2, secured):
    """The control: the same noise on the plain model's scores."""
    ids, mask = prompts()
    scores = gpt2(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
    for options in ({}, {"top_k": 3}, {"temperature": 0.5, "top_k": WORDS + 1}):
        choice = Choice(do_sample=True, **options)
        noise = choice.noise(2, WORDS, torch.Generator().manual_seed(7))
        expected = choice.token(scores, noise)
        drawn = torch.Generator().manual_seed(7)
        found = sectorch.generate(secured, ids, 1, attention_mask=mask, do_sample=True, generator=drawn, **options)
        assert torch.equal(found[:, 5:], expected)


def test_sampling_follows_the_softmax():
    """A test of fit on 20,000 draws; the noise is the operating system's."""
    scipy = pytest.importorskip("scipy.stats")
    scores = torch.tensor([2.0, 0.0, 1.0, -1.0]).expand(20_000, 4)
    choice = Choice(do_sample=True, temperature=2.0)
    counts = choice.token(scores, choice.noise(20_000, 4, None)).flatten().bincount(minlength=4)
    expected = (scores[0] / 2).softmax(0) * 20_000
    assert scipy.chisquare(counts.numpy(), expected.numpy(), sum_check=False).pvalue > 1e-6


@pytest.mark.parametrize("beams", [3])
def test_the_text_of_a_beam_search_is_that_of_the_plain_model(beams):
    gpt2, (ids, mask) = language_model("GPT2"), prompts()
    secured = sectorch.secure(gpt2, session=sectorch.Session())
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = gpt2.generate(ids, attention_mask=mask, num_beams=beams, **options)
    greedy = gpt2.generate(ids, attention_mask=mask, **options)
    assert not torch.equal(expected, greedy)
    assert torch.equal(sectorch.generate(secured, ids, 6, attention_mask=mask, num_beams=beams), expected)


def test_generation_ends_where_every_row_has_ended(gpt2, secured):
    ids, mask = prompts()
    expected = plain(gpt2, ids, mask, 8)
    end = int(expected[0, 6])
    stopped = gpt2.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=3
    )
    seen = []
    found = sectorch.generate(
        secured, ids, 8, attention_mask=mask, eos_token_id=end, pad_token_id=3, streamer=seen.append
    )
    assert torch.equal(found, stopped)
    assert torch.equal(torch.stack(seen, 1), found[:, 5:])


def test_what_is_prepared_is_used(secured):
    ids, _ = prompts()
    run = sectorch.Generation(secured, 3)
    assert run.preprocess(ids) > 0
    assert sum(run.secure.prepared().values()) == 3
    with sectorch.profile() as spent:
        run(ids)
    assert sum(run.secure.prepared().values()) == 0
    with sectorch.profile() as unprepared:
        run(ids)
    assert spent.offline_bytes == 0 < unprepared.offline_bytes
    assert unprepared.online_bytes == spent.online_bytes


@pytest.mark.parametrize("until_end", [False, True])
def test_of_a_step_q_reads_the_token_and_the_others_their_own_shares(secured, until_end):
    ids, mask = prompts()
    for program in sectorch.Generation(secured, 3, until_end=until_end).programs(ids, mask):
        reads = [node for node in program.call if isinstance(node.step, Read)]
        learned = [node.results[0].shape for node in reads if "Q" in {party.name for party in node.step.owners}]
        assert {party.name for node in reads for party in node.step.owners} <= {"Q", "A", "S"}
        assert [tuple(shape) for shape in learned] == ([] if until_end else [(2, 1), (1,)])  # and whether it is right


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"input_ids": [[1, 2]]}, DtypeError, "return_tensors='pt'"),
        ({"input_ids": torch.rand(1, 2)}, DtypeError, "whole numbers"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, ShapeError, r"\[rows, positions\]"),
        ({"attention_mask": torch.ones(1, 2, dtype=torch.long)}, ShapeError, "attention_mask"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]] * 2)}, ArgumentError, "padding_side"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.bool)}, DtypeError, "whole numbers"),
        ({"max_new_tokens": 0}, ArgumentError, "1 or more"),
        ({"max_new_tokens": True}, ArgumentError, "1 or more"),
        ({"max_new_tokens": 1.5}, ArgumentError, "1 or more"),
        ({"max_new_tokens": None}, ArgumentError, "1 or more"),
        ({"top_k": 2.5, "do_sample": True}, ArgumentError, "1 or more"),
        ({"streamer": 3}, ArgumentError, "streamer is called"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.complex64)}, DtypeError, "whole numbers"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.long).to_sparse()}, DtypeError, "whole numbers"),
        ({"input_ids": torch.full((2, 5), WORDS)}, DimensionError, f"10 of 10 tokens .* 0 to {WORDS - 1}"),
        ({"input_ids": torch.full((2, 5), -1), "num_beams": 2}, DimensionError, "10 of 10"),
        ({"max_new_tokens": 29}, ArgumentError, "fewer places than 5 tokens"),
        ({"max_new_tokens": 29, "num_beams": 2}, ArgumentError, "fewer places than 5 tokens"),
        ({"max_new_tokens": 10**9}, ArgumentError, "fewer places than 5 tokens"),
        ({"eos_token_id": 1.5}, ArgumentError, "eos_token_id"),
        ({"eos_token_id": [1.5]}, ArgumentError, "eos_token_id"),
        ({"eos_token_id": "a"}, ArgumentError, "eos_token_id"),
        ({"eos_token_id": 1, "pad_token_id": WORDS}, ArgumentError, "pad_token_id"),
        ({"eos_token_id": 1, "pad_token_id": "a"}, ArgumentError, "pad_token_id"),
        ({"temperature": "a", "do_sample": True}, ArgumentError, "temperature"),
        ({"generator": 5, "do_sample": True}, ArgumentError, "generator"),
        ({"temperature": 0.0, "do_sample": True}, ArgumentError, "temperature"),
        ({"top_k": 2}, ArgumentError, "do_sample=True"),
        ({"num_beams": 0}, ArgumentError, "2 or more"),
        ({"num_beams": WORDS + 1}, ArgumentError, f"at most {WORDS}"),
        ({"num_beams": 2, "do_sample": True}, ArgumentError, "without do_sample"),
        ({"num_beams": 2, "eos_token_id": 3}, ArgumentError, "eos_token_id=\\[\\]"),
        ({"num_beams": 2, "streamer": print}, ArgumentError, "without streamer"),
    ],
)
def test_what_is_no_prompt_is_refused_before_anything_is_sent(secured, change, error, text):
    ids, mask = prompts()
    with sectorch.profile() as spent, pytest.raises(error, match=text):
        sectorch.generate(
            **({"model": secured, "input_ids": ids, "attention_mask": mask, "max_new_tokens": 2} | change)
        )
    assert spent.bytes == 0


def test_models_that_generate_in_another_way_are_refused(gpt2):
    with pytest.raises(ArgumentError, match=r"what sectorch\.secure"):
        sectorch.generate(gpt2, prompts()[0], 2)
    with pytest.raises(ArgumentError, match="causal language models"):
        sectorch.generate(sectorch.secure(nn.Linear(2, 2).eval()), prompts()[0], 2)
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ArgumentError, match="cannot continue texts of MambaForCausalLM"):
        sectorch.generate(sectorch.secure(mamba.eval()), prompts()[0], 2)


class Shifted(nn.Module):
    """Counts positions from the beginning of the cache, whatever the mask says."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, attention_mask=None, use_cache=None, **cache):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache, **cache)


def test_a_model_that_takes_places_from_the_cache_is_refused(gpt2):
    """Its window would put tokens at wrong positions: seen on plain numbers, before anything is shared."""
    with pytest.raises(ArgumentError, match="places of tokens in the cache"):
        sectorch.generate(sectorch.secure(Shifted(gpt2).eval()), prompts()[0], 2)


# Tensors in shares.


@pytest.fixture
def halves():
    """Two halves of a model in one session."""
    torch.manual_seed(0)
    session = sectorch.Session()
    parts = nn.Sequential(nn.Linear(5, 7), nn.GELU()).eval(), nn.Sequential(nn.Linear(7, 3), nn.ReLU()).eval()
    return session, parts, [sectorch.secure(part, session=session) for part in parts]


def test_results_in_shares_go_into_another_module(halves):
    _, (first, second), (one, two) = halves
    x = torch.randn(4, 5)
    hidden = one.in_shares(x)
    assert isinstance(hidden, sectorch.SharedTensor)
    with torch.no_grad():
        torch.testing.assert_close(two(hidden).reveal(), second(first(x)), atol=1e-5, rtol=0)
        torch.testing.assert_close(hidden.reveal(), first(x), atol=1e-5, rtol=0)


def test_calls_on_shares_are_prepared_ahead(halves):
    _, _, (one, two) = halves
    x = torch.randn(4, 5)
    hidden = one.in_shares(x)
    expected = two(hidden).reveal()
    two.preprocess(sectorch.Inputs(hidden))
    with sectorch.profile() as spent:
        found = two(hidden)
    assert spent.offline_bytes == 0
    assert torch.equal(found.reveal(), expected)


class Product(nn.Module):
    def forward(self, x, y):
        return x * y


def test_a_plain_input_beside_one_in_shares_is_still_q_s(halves):
    session, _, _ = halves
    total = sectorch.secure(Product().eval(), session=session)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    in_shares = sectorch.share(x, session=session)
    torch.testing.assert_close(total(in_shares, y).reveal(), x * y, atol=1e-5, rtol=0)


def test_a_value_that_left_its_range_stays_withheld_over_calls(halves):
    session, _, _ = halves

    class Large(nn.Module):
        def forward(self, x):
            return (x * 3000.0) * (x * 3000.0) * x

    large = sectorch.secure(Large().eval(), session=session)
    half = sectorch.secure(nn.Softmax(-1).eval(), session=session)
    kept = large.in_shares(torch.full((2, 2), 4000.0))
    with pytest.raises(RangeExceededError):
        kept.reveal()
    with pytest.raises(RangeExceededError):
        half(kept).reveal()
    fine = half(large.in_shares(torch.full((2, 2), 0.01))).reveal()
    torch.testing.assert_close(fine, torch.full((2, 2), 0.5), atol=1e-5, rtol=0)


def test_options_that_generation_has_not_are_named():
    model, (ids, _) = language_model("GPT2"), prompts()
    secured = sectorch.secure(model)
    for options, said in (
        (dict(temprature=2.0), "temprature .perhaps temperature."),
        (dict(length_penalty=1.0), "no option length_penalty"),
        (dict(num_beams=2, do_smaple=True), "perhaps do_sample"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=said):
            sectorch.generate(secured, ids, 2, **options)


def test_what_a_models_configuration_asks_of_each_step_is_refused_and_not_left_out():
    model, (ids, _) = language_model("GPT2", n_layer=1), prompts()
    model.generation_config.repetition_penalty = 1.3
    with pytest.raises(ArgumentError, match=r"model.generation_config.repetition_penalty = 1.0 leaves it out"):
        sectorch.generate(sectorch.secure(model), ids, 1)
    model.generation_config.repetition_penalty = 1.0
    secured = sectorch.secure(model, session=sectorch.Session(reference=True))
    assert sectorch.generate(secured, ids, 1).shape == (2, 6)
    drawn, beams = {"do_sample": True}, {"num_beams": 2}
    config = secured.plain.generation_config
    for name, value, options in (
        ("do_sample", True, {}), ("num_beams", 3, {}), ("watermarking_config", {"bias": 5.0}, {}),
        ("max_time", 0.0, {}), ("stop_strings", ["a"], {}), ("temperature", 0.7, drawn), ("top_k", 3, drawn),
        ("top_p", 0.5, drawn), ("min_p", 0.1, drawn), ("do_sample", True, beams), ("diversity_penalty", 0.5, beams),
    ):  # fmt: skip
        setattr(config, name, value)
        with pytest.raises(ArgumentError, match=f"generation_config has {name}="):
            sectorch.generate(secured, ids, 1, **options)
        setattr(config, name, None)
    config.do_sample = True
    assert sectorch.generate(secured, ids, 1, do_sample=False).shape == (2, 6)


def test_a_prompt_that_holds_the_padding_says_where_it_is_padded(gpt2, secured):
    """transformers makes a mask of such a prompt; it may as well be text."""
    ids, mask = prompts()
    ids[mask == 0] = pad = 3
    ids[ids == pad] += mask[ids == pad]
    with pytest.raises(ArgumentError, match="pass attention_mask"):
        sectorch.generate(secured, ids, 1, pad_token_id=pad)
    found = sectorch.generate(secured, ids, 2, attention_mask=mask, pad_token_id=pad)
    assert torch.equal(found, gpt2.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=pad))
