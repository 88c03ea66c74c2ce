"""Look-ups by a secret index give what torch gives, whoever holds the table, and refuse what is out of range."""

from __future__ import annotations

import pytest
import torch
from example_counts import fewer
from hypothesis import given, settings
from hypothesis import strategies as st

import sectorch
from sectorch.errors import DimensionError, FixedPointRangeError, RangeExceededError
from sectorch.session import Session

SESSION = Session()
DRAW = torch.Generator().manual_seed(5)
ROUNDING = 2.0**-19
"""A table's entry is rounded once to 20 fraction bits, and chosen by zeros and a one; float32 of values below 8 has
errors below 2^-21."""


def table(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW).clamp(-7, 7)


def where(x: torch.Tensor, held: str) -> torch.Tensor:
    return sectorch.share(x, session=SESSION) if held == "shared" else x


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_indexing(data):
    """One part of the index is secret, and the others are slices, numbers or public tensors, before and behind it."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    at = data.draw(st.integers(0, len(shape) - 1))
    block = data.draw(st.lists(st.integers(0, 3), max_size=2))
    index: list = []
    for dim, size in enumerate(shape[: data.draw(st.integers(at + 1, len(shape)))]):
        if dim == at:
            index.append(torch.randint(0, size, block, generator=DRAW))
        else:
            kinds = (slice(None), slice(None, None, 2), 0, -1, torch.randint(-size, size, block, generator=DRAW))
            index.append(data.draw(st.sampled_from(kinds)))
    x = table(*shape)
    expected = x[tuple(index)]
    index[at] = sectorch.share(index[at], session=SESSION)
    got = where(x, data.draw(st.sampled_from(("shared", "public"))))[tuple(index)].reveal()
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert not got.numel() or (got - expected).abs().max() <= ROUNDING


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.sampled_from(("shared", "public")))
def test_gather(dim: int, sizes: list[int], held: str):
    x, index = table(3, 3, 3), torch.randint(0, 3, sizes, generator=DRAW)
    got = torch.gather(where(x, held), dim, sectorch.share(index, session=SESSION)).reveal()
    assert (got - torch.gather(x, dim, index)).abs().max() <= ROUNDING
    along = torch.randint(0, 3, [n if d == dim else 1 for d, n in enumerate(sizes)], generator=DRAW)
    got = torch.take_along_dim(where(x, held), sectorch.share(along, session=SESSION), dim).reveal()
    assert (got - torch.take_along_dim(x, along, dim)).abs().max() <= ROUNDING
    line = index.flatten()[:4]
    got = where(x, held).index_select(dim, sectorch.share(line, session=SESSION)).reveal()
    assert (got - x.index_select(dim, line)).abs().max() <= ROUNDING


def test_a_model_looks_up_in_its_own_tables():
    """What a text classifier does: positions from a buffer, and the state of the last token that is no padding."""

    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(9, 4)
            self.register_buffer("places", torch.arange(12).view(1, 12) % 5)

        def forward(self, ids):
            kinds = torch.gather(self.places.expand(ids.shape[0], -1), 1, ids)
            last = ((ids != 0).int() * torch.arange(ids.shape[1])).argmax(-1)
            return self.words(ids)[torch.arange(ids.shape[0]), last] + kinds.float().sum(1, keepdim=True)

    model, ids = Last().eval(), torch.tensor([[3, 8, 1, 0, 0], [2, 2, 7, 4, 0]])
    got = sectorch.secure(model)(ids)
    assert (got - model(ids)).abs().max() < 1e-5
    assert torch.equal(got, sectorch.reference(model)(ids))


@pytest.mark.parametrize("bad", [-1, 3])
def test_out_of_range(bad: int):
    index = sectorch.share(torch.tensor([0, bad]), session=SESSION)
    with pytest.raises(DimensionError, match="out of range"):  # Q looks at its own input
        _ = table(3, 2)[index]
    with pytest.raises(RangeExceededError):  # and one that was computed is compared
        table(3, 2)[index * 1 + 0].reveal()


@fewer(6)
@given(st.sampled_from((float("-inf"), torch.finfo(torch.float32).min, -1e30)), st.booleans(), st.integers(-4000, 4000))
def test_a_secret_mask_hides(least: float, filled: bool, largest: int):
    """Whatever activations are there, what a secret mask hides has no weight: by fill, choice, sum and product."""
    x = torch.tensor([[largest / 1.0, -largest / 2.0, 4000.0], [1.0, -3.0, 4000.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    s, m = (sectorch.share(v, session=SESSION) for v in (x, mask))
    hidden = [
        s.masked_fill(m == 0, least),
        torch.where(m == 1, s, least),
        s + torch.where(m == 1, 0.0, least),
    ]
    if least > float("-inf"):
        hidden.append(s + (1.0 - m.float()) * least)
    plain = torch.softmax(x.masked_fill(mask == 0, float("-inf")), -1)
    for scores in hidden:
        assert (torch.softmax(scores, -1).reveal() - plain).abs().max() < 1e-4


@pytest.mark.parametrize("held", ["private", "shared"])
def test_a_large_table(held: str):
    """A look-up adds up nothing: the entries count, and not the sum of a column, however large a vocabulary is."""
    words, ids = table(3000, 2) * 4, torch.tensor([[0, 2999, 17]])
    assert words.abs().sum(0).max() > sectorch.Scheme().gain
    if held == "private":
        model = torch.nn.Embedding.from_pretrained(words).eval()
        got = sectorch.secure(model)(ids)
        assert torch.equal(got, sectorch.reference(model)(ids))
    else:
        index = sectorch.share(ids, session=SESSION)
        got = torch.nn.functional.embedding(index, sectorch.share(words, session=SESSION)).reveal()
    assert (got - words[ids]).abs().max() <= 4 * ROUNDING


def test_a_table_of_entries_that_are_too_large():
    model = torch.nn.Embedding.from_pretrained(torch.full((4, 1), 600.0)).eval()
    with pytest.raises(FixedPointRangeError, match=r"weight 'weight'.*magnitude 600"):
        sectorch.secure(model, sectorch.Scheme(frac_bits=20, limit_bits=12))(torch.tensor([1]))


def test_numbers_in_tensors_are_taken_first():
    """torch takes a tensor of one number as the number: the dimension that it indexes does not move the others."""
    x, i, at = table(3, 3, 4, 3), torch.tensor([2, 0, 1]), torch.tensor(1)
    share = lambda v: sectorch.share(v, session=SESSION)
    for got, expected in (
        (share(x)[at, :, share(i)], x[at, :, i]),
        (share(x)[share(at), :, i], x[at, :, i]),
        (share(x)[i, :, share(at), i], x[i, :, at, i]),
        (share(x)[:, share(at)], x[:, at]),
    ):
        assert got.shape == expected.shape and (got.reveal() - expected).abs().max() <= ROUNDING


def test_infinity_times_a_count_is_an_error():
    """A factor of 1e30 is for masks, of zeros and ones; times three it would be a wrong number without a word."""
    mask = sectorch.share(torch.tensor([0, 1, 1]), session=SESSION)
    assert torch.equal((mask.float() * -1e30).reveal() < -1e4, torch.tensor([False, True, True]))
    with pytest.raises(RangeExceededError):
        (sectorch.share(torch.tensor([0, 3]), session=SESSION) * 1e30).reveal()
    with pytest.raises(FixedPointRangeError, match="1e\\+30"):
        _ = sectorch.share(torch.tensor([0.5]), session=SESSION) * 1e30
