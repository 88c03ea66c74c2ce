"""Generation with a language model at another party: the caches stay in shares at A and S from token to token."""

import contextlib
import json

import pytest
import torch

from sectorch.errors import ArgumentError, DtypeError, ProgramError, ShapeError
from sectorch.network import Connection, Server, Store
from sectorch.network.parties.answer import Answering
from sectorch.network.parties.remote_model import RemoteTexts
from sectorch.serving.description import from_json, load_program, to_json
from sectorch.serving.model_file import describe_texts

transformers = pytest.importorskip("transformers")

WORDS, TOKENS, NAME = 30, 3, "hospital-b"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(8)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    made = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.6 * torch.randn(p.shape))
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def described(model):
    return describe_texts(model, [(1, 4), (2, 5)], TOKENS)


@pytest.fixture(scope="module")
def address(pki):
    _, made = pki
    server = Server("localhost:0", made["server"])
    yield f"localhost:{server.port}"
    server.stop()


@pytest.fixture(scope="module")
def starting(pki, address):
    """Serves a description, and gives it as Q has it."""
    _, made = pki
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(Connection(address, made["alice"]))
        names = iter((NAME, "bob"))

        def start(description, weights):
            name = next(names)
            party = Answering(address, made[name], description, weights)
            stack.callback(party.close)
            party.register(name)
            return connection.model(name)

        yield start


@pytest.fixture(scope="module")
def remote(starting, described):
    return starting(*described)


def prompts():
    ids = torch.randint(1, WORDS, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return ids, mask


def plain(model, ids, mask, tokens=TOKENS):
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def test_the_tokens_are_those_of_the_plain_model(model, remote):
    ids, mask = prompts()
    expected = plain(model, ids, mask)
    assert len(set(expected[:, 5:].flatten().tolist())) > 2
    seen = []
    assert torch.equal(remote.generate(ids, attention_mask=mask, streamer=seen.append), expected)
    assert torch.equal(torch.stack(seen, 1), expected[:, 5:])
    assert torch.equal(remote.generate(ids, 2, attention_mask=mask), expected[:, :7])
    one = ids[:1, :4]
    assert torch.equal(remote.generate(one), plain(model, one, torch.ones_like(one)))


def test_prepared_steps_are_used(model, remote):
    ids, mask = prompts()
    RemoteTexts(remote).prepare(ids, mask, steps=TOKENS - 2)
    assert sum(remote.prepared().values()) == TOKENS - 1
    assert torch.equal(remote.generate(ids, attention_mask=mask), plain(model, ids, mask))
    assert not remote.prepared()


@pytest.mark.sectorch_long
def test_material_of_a_former_session_is_used_for_a_whole_text_only(pki, address, remote, model, tmp_path):
    """A session that is taken up makes prepared calls only: a text that began there would end midway."""
    _, made = pki
    ids, _ = prompts()
    expected = plain(model, ids, torch.ones_like(ids))
    with Connection(address, made["bob"], store=Store(tmp_path)) as connection:
        RemoteTexts(connection.model(NAME)).prepare(ids, steps=TOKENS - 2)
    with Connection(address, made["bob"], store=Store(tmp_path)) as connection:
        again = connection.model(NAME)
        assert torch.equal(again.generate(ids), expected)
        assert sum(again.prepared().values()) == TOKENS - 1
        assert torch.equal(again.generate(ids, TOKENS - 1), expected[:, :-1])
        assert not again.prepared()


def test_two_texts_at_once_are_refused_and_not_mixed(remote):
    ids, mask = prompts()
    texts = RemoteTexts(remote)
    token, past = texts._call(texts._first(ids, mask, None))
    other, later = texts._call(texts._first(ids.flip(1), torch.ones_like(ids), None))
    with pytest.raises(ArgumentError, match="begin again"):
        texts._call(texts._next(token, mask, past, 1, None))
    with pytest.raises(ArgumentError, match="begin again"):
        texts._call(texts._next(other, mask, [pair[::-1] for pair in later], 1, None))
    again, _ = texts._call(texts._next(other, torch.ones_like(ids), later, 1, None))
    expected = remote.generate(ids.flip(1), 2)
    assert torch.equal(torch.cat((other, again), 1), expected[:, 5:])


def test_a_request_that_goes_on_from_another_call_is_refused(remote):
    ids, mask = prompts()
    texts = RemoteTexts(remote)
    token, past = texts._call(texts._first(ids, mask, None))
    (opened,) = remote._sessions.values()
    opened.party.retained_calls += 1
    with pytest.raises(Exception, match="another call than the last"):
        texts._call(texts._next(token, mask, past, 1, None))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"input_ids": [[1, 2]]}, DtypeError, "return_tensors='pt'"),
        ({"input_ids": torch.ones(3, 5, dtype=torch.long)}, ShapeError, r"prompts .*\[2, 5\]"),
        ({"max_new_tokens": TOKENS + 1}, ArgumentError, f"room for {TOKENS} new tokens"),
    ],
)
def test_what_is_not_served_is_refused(remote, arguments, error, text):
    with pytest.raises(error, match=text):
        remote.generate(**({"input_ids": prompts()[0]} | arguments))


def test_a_model_for_generation_says_so_when_it_is_called(remote):
    with pytest.raises(ArgumentError, match="generate"):
        remote(prompts()[0])


def test_a_description_of_texts_comes_back_as_it_is(described):
    description, weights = described
    served = load_program(from_json(to_json(description)), weights)
    assert served.texts is not None
    texts = json.loads(to_json({"texts": served.texts.to_description()}))["texts"]
    assert texts == json.loads(to_json(description))["texts"]
    assert [call.inputs.learned for call in served.calls] == [1] * 4
    assert [any(call.inputs.held) for call in served.calls] == [False, True] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["texts"].update(words=-1),
        lambda d: d["texts"].update(words="many"),
        lambda d: d["texts"].update(masked=1),
        lambda d: d["texts"].update(more=1),
        lambda d: d["texts"]["choice"].update(temperature=0),
        lambda d: d.update(texts=[]),
        lambda d: d["programs"][0].update(learned=-1),
        lambda d: d["programs"][0].update(learned=True),
        lambda d: d["programs"][1].update(learned=None),
        lambda d: d["programs"][1]["inputs"][3].update(held=[20, None]),
        lambda d: d["programs"][1]["inputs"][3].update(held=[True, None, 0]),
        lambda d: d["programs"][1]["inputs"][3].update(held=[20, float("inf"), 0]),
        lambda d: d["programs"][1]["inputs"][3].update(held=[63, None, 0]),
        lambda d: d["programs"][1].update(rows=1),
    ],
)
def test_a_description_that_was_changed_is_refused(described, change):
    changed = json.loads(to_json(described[0]))
    load_program(changed)
    change(changed)
    with pytest.raises(ProgramError):
        load_program(changed)


def test_shares_of_another_form_are_refused(described, starting):
    """A description whose second program takes the cache for something else than its first one leaves."""
    changed = json.loads(to_json(described[0]))
    changed["programs"][1]["inputs"][3]["held"][0] -= 1
    remote = starting(changed, described[1])
    with pytest.raises(ShapeError):
        remote.generate(torch.ones(1, 4, dtype=torch.long))
