"""Convolutions in fewer products: the bits of the definition, on either kind of processor, in any parts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers import ring_values
from hypothesis import example, given
from hypothesis import strategies as st
from test_products import conv_by_slices, worst

import sectorch
from sectorch import Scheme
from sectorch.ring import products
from sectorch.ring.products import Conv2d


def matches(shape: tuple, outputs: int, padding: tuple[int, int], fill) -> bool:
    x, weight = fill(shape), fill((outputs, shape[1], 3, 3))
    found = products.convolve_karatsuba(x, products.prepare_taps(weight), padding)
    return torch.equal(found, conv_by_slices(x, weight, Conv2d(padding=padding)))


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(3, 40), st.integers(3, 90)),
    st.integers(1, 7), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.booleans(), st.integers(1, 3),
    st.integers(0, 1 << 30),
)  # fmt: skip
@example((1, 1, 3, 3), 1, (0, 0), True, 1, 0)
@example((1, 2, 24, 192), 3, (1, 1), True, 2, 0)
@example((65, 1, 3, 3), 1, (0, 0), False, 3, 0)
def test_the_bits_of_the_definition(shape, outputs, padding, wide, threads, seed):
    """All numbers of windows in a row: eight side by side, and several rows or images in a tile."""
    with mock.patch.object(products, "wide_products", lambda: wide), \
            mock.patch.object(torch, "get_num_threads", lambda: threads):  # fmt: skip
        assert matches(shape, outputs, padding, lambda s: ring_values(s, 63, seed))


@pytest.mark.parametrize("wide", [True, False], ids=["vectors", "words"])
@pytest.mark.parametrize("outputs", [5, 47, 48, 49, 97, 150])
def test_outputs_in_parts(outputs: int, wide: bool, monkeypatch):
    """Of the outputs of one tile each thread makes some."""
    monkeypatch.setattr(products, "wide_products", lambda: wide)
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert matches((1, 3, 16, 17), outputs, (1, 1), worst)


@pytest.mark.parametrize("channels", [63, 64, 65, 130])
def test_channels_of_several_parts(channels: int):
    assert matches((2, channels, 8, 30), 7, (1, 1), lambda s: ring_values(s, 63, 1))


def test_an_input_that_is_not_contiguous():
    x, weight = ring_values((2, 9, 31, 5)).permute(0, 3, 1, 2), ring_values((3, 3, 4, 5)).permute(2, 3, 0, 1)
    found = products.convolve_karatsuba(x, products.prepare_taps(weight), (1, 1))
    assert torch.equal(found, conv_by_slices(x, weight, Conv2d(padding=(1, 1))))


def test_which_convolutions_take_fewer_products():
    """Of one stride, with enough channels and windows: those of a ResNet but for its last stages."""
    form = lambda size, weight, batch=1, **more: Conv2d(padding=(1, 1), **more).prepared(
        torch.Size((batch, weight[1], size, size)), torch.Size((*weight, 3, 3))
    )
    for weight, size in (((64, 64), 56), ((128, 128), 28), ((256, 256), 16)):
        assert form(size, weight).form == "sums"
        assert form(size, weight, stride=(2, 2)) is form(size, weight, dilation=(2, 2)) is None
    assert form(56, (64, 32), groups=2) is form(14, (256, 256)) is form(32, (64, 3)) is None
    assert form(7, (512, 512)).form == "tiles"
    assert form(8, (256, 256), 32).form == "sums"
    kernel = torch.Size((64, 64, 3, 1))
    assert Conv2d(padding=(1, 0)).prepared(torch.Size((1, 64, 56, 56)), kernel) is None


def test_a_weight_stays_as_it_is_where_a_matrix_unit_or_a_device_multiplies(monkeypatch):
    x, weight = ring_values((1, 4, 9, 9)), ring_values((5, 4, 3, 3))
    conv = Conv2d(form="sums")
    assert conv.prepare(weight.to("meta")).shape == weight.shape
    expected = conv(x, weight, conv.prepare(weight))
    monkeypatch.setattr(products, "unit", lambda: object())
    monkeypatch.setattr(products, "_unit_for", lambda n, k, m: None)
    assert conv.prepare(weight) is weight
    assert torch.equal(conv(x, weight, weight), expected)


def test_parties_on_other_processors_take_the_same_program(monkeypatch):
    """Whether a processor has a matrix unit, or products of vectors of words, is nothing that the others are told."""
    model, x = torch.nn.Conv2d(48, 48, 3).eval(), torch.randn(1, 48, 60, 60)
    digests = [sectorch.program(model, x).digest]
    monkeypatch.setattr(products, "wide_products", lambda: False)
    digests.append(sectorch.program(model, x).digest)
    monkeypatch.setattr(products, "unit", lambda: object())
    digests.append(sectorch.program(model, x).digest)
    assert len(set(digests)) == 1


@pytest.mark.parametrize("verified", [False, True])
def test_predictions_have_the_bits_of_the_other_way(verified: bool):
    """All convolutions in fewer products, and none; A, S and D each hold the sums of what they hold of the taps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 5, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(5, 4, 3), torch.nn.Flatten()
    ).eval()
    x, scheme = torch.randn(2, 2, 9, 7), Scheme(verified=verified)
    with mock.patch.object(products, "karatsuba_is_faster", lambda images, positions, weight: False):
        expected = sectorch.reference(model, scheme)(x)
    taken = mock.Mock(side_effect=products.convolve_karatsuba)
    faster = lambda images, positions, weight: list(weight[2:]) == [3, 3]
    with mock.patch.object(products, "karatsuba_is_faster", faster), \
            mock.patch.object(products, "convolve_karatsuba", taken):  # fmt: skip
        found = sectorch.secure(model, scheme)(x)
    assert torch.equal(found, expected)
    assert taken.call_count >= 6
