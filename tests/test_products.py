"""Products mod 2^64: tiles, limbs, Karatsuba and einsums; each equals a reference that has no branches."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import HIGHEST, LOWEST, ring_values
from hypothesis import example, given
from hypothesis import strategies as st

import sectorch
from sectorch import Scheme
from sectorch.errors import ArgumentError, UnsupportedDeviceError
from sectorch.ring import productloops, products
from sectorch.ring.products import (
    FLOAT64,
    INT8,
    KINDS,
    TILE,
    Conv2d,
    Linear,
    by_matmul,
    digits,
    limb_matmul,
    matmul,
    short_matmul,
    times_tiles,
)


def by_integers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y over Python integers, reduced at the end."""
    exact = np.matmul(x.numpy().astype(object), y.numpy().astype(object))
    reduced = (np.asarray(exact, dtype=object) + (1 << 63)) % (1 << 64) - (1 << 63)
    return torch.from_numpy(np.asarray(reduced, dtype=np.int64))


def by_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y for matrices as element-wise products and a sum, without a matrix kernel."""
    return torch.stack([(row.unsqueeze(1) * y).sum(0) for row in x]) if len(x) else x.new_zeros(0, y.shape[1])


def conv_by_slices(x: torch.Tensor, weight: torch.Tensor, conv: Conv2d) -> torch.Tensor:
    """A convolution as a sum over kernel places and input channels of element-wise products of slices."""
    x = F.pad(x, (conv.padding[1],) * 2 + (conv.padding[0],) * 2)
    (b, _, h, w), (c_out, per_group, kh, kw) = x.shape, weight.shape
    oh = (h - conv.dilation[0] * (kh - 1) - 1) // conv.stride[0] + 1
    ow = (w - conv.dilation[1] * (kw - 1) - 1) // conv.stride[1] + 1
    out = torch.zeros(b, c_out, oh, ow, dtype=torch.int64)
    group_of = torch.arange(c_out) // (c_out // conv.groups)
    for c in range(per_group):
        source = x[:, group_of * per_group + c]
        for i in range(kh):
            for j in range(kw):
                top, left = i * conv.dilation[0], j * conv.dilation[1]
                part = source[:, :, top : top + (oh - 1) * conv.stride[0] + 1 : conv.stride[0]]
                part = part[..., left : left + (ow - 1) * conv.stride[1] + 1 : conv.stride[1]]
                out += part * weight[:, c, i, j].view(1, -1, 1, 1)
    return out


def worst(shape) -> torch.Tensor:
    """-2^63 and 2^63 - 1 in turn."""
    out = torch.full(torch.Size(shape), LOWEST)
    out.view(-1)[1::2] = HIGHEST
    return out


SIDE = st.sampled_from([1, 2, 3, 7, 8, 9, 17])


@given(SIDE, st.integers(0, 9), SIDE, st.integers(0, 1 << 30))
def test_small_matrices_against_python_integers(n: int, k: int, m: int, seed: int):
    x, y = ring_values((n, k), 63, seed), ring_values((k, m), 63, seed + 1)
    assert torch.equal(matmul(x, y), by_integers(x, y))


# Both tilings (wide and tall), a partial last tile, and each reason for torch's own kernel.
@pytest.mark.parametrize(
    ("n", "k", "m"),
    [
        *((8, 64, 64), (9, 70, 65), (64, 64, 8), (65, 70, 9), (130, 33, 130), (129, 5, 64), (16, 1, 4096)),
        *((7, 90, 64), (64, 90, 7), (63, 63, 63), (1, 300, 200), (200, 300, 1)),
    ],
)
def test_large_matrices(n: int, k: int, m: int):
    x, y = ring_values((n, k), 63, 1), ring_values((k, m), 63, 2)
    assert torch.equal(matmul(x, y), by_sums(x, y))
    assert torch.equal(matmul(worst((n, k)), worst((k, m))), by_sums(worst((n, k)), worst((k, m))))
    assert torch.equal(matmul(x.t().contiguous().t(), y.t().contiguous().t()), by_sums(x, y))


@pytest.mark.parametrize("kept", [1, 64 * 70, 2 * 64 * 70 + 1])
def test_matrices_whose_tiles_are_made_in_parts(kept: int, monkeypatch):
    """One tile at a time, or two, and a last part that is narrower."""
    parts = []
    monkeypatch.setattr(products, "_KEPT", kept)
    monkeypatch.setattr(products, "to_tiles", lambda y, made=products.to_tiles: parts.append(made(y)) or parts[-1])
    x, y = ring_values((33, 70), 63, 1), ring_values((70, 200), 63, 2)
    for left, right in ((x, y), (y.t(), x.t().contiguous()), (x.t().contiguous().t(), y.t().contiguous().t())):
        parts.clear()
        assert torch.equal(matmul(left, right), by_sums(left, right))
        assert not parts or all(len(tiles) <= max(1, kept // (64 * 70)) for tiles in parts)
    assert parts or not products.wide_products()


BATCHED = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((3, 5), (5,)),
    ((2, 3, 5), (5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (7, 5, 4)),
    ((4, 40, 30), (30, 70)),
    ((4, 40, 30), (30, 9)),
    ((2, 3, 5), (5,)),
    ((0, 3, 5), (5, 4)),
    ((0, 5), (5, 4)),
]


def test_tiles_on_either_kind_of_processor(monkeypatch):
    """Both compiled loops against torch's kernel: sums of any length, the edges of the ring, a matrix with strides; all
    numbers of rows of a block, and more of both than are taken at a time; results beside each other."""
    for r, k, count in (
        (1, 1, 1),
        (3, 4, 2),
        (130, 577, 3),
        (5, 7, 1),
        (6, 256, 4),
        (15, 257, 2),
        (4, 0, 2),
        (0, 3, 1),
    ):
        left, tiles = ring_values((k, r), 63).t(), ring_values((count, k, TILE), 63, 1)
        tiles[..., :2], tiles[..., 2:4] = LOWEST, HIGHEST
        expected = torch.matmul(left, tiles)
        for wide in (True, False):
            monkeypatch.setattr("sectorch.ring.products.wide_products", lambda wide=wide: wide)
            assert torch.equal(times_tiles(left, tiles), expected), (r, k, count)
            out = ring_values((1, r, TILE * count), 63, 2)
            assert times_tiles(left, tiles, out) is out
            assert torch.equal(out[0], torch.cat(list(expected), 1)), (r, k, count)
            two = ring_values((count, r, TILE), 63, 3)
            assert torch.equal(times_tiles(left, tiles, two), expected), (r, k, count)
        assert r == 0 or k == 0 or torch.equal(expected[0], by_sums(left, tiles[0]))


@pytest.mark.parametrize(("left", "right"), BATCHED)
def test_the_shapes_of_torch_matmul(left, right):
    x, y = ring_values(left, 63, 3), ring_values(right, 63, 4)
    assert torch.equal(matmul(x, y), by_integers(x, y))
    assert matmul(x.to("meta"), y.to("meta")).shape == torch.matmul(x, y).shape


def test_a_contraction_of_length_zero():
    assert torch.equal(matmul(ring_values((3, 0)), ring_values((0, 2))), torch.zeros(3, 2, dtype=torch.int64))
    assert torch.equal(matmul(ring_values((2, 3, 0)), ring_values((0, 5))), torch.zeros(2, 3, 5, dtype=torch.int64))


LINEAR = [((6,), 3), ((4, 6), 3), ((2, 3, 6), 5), ((2, 40), 128), ((127, 5), 200), ((3, 4, 9), 131), ((128, 4), 128)]


@pytest.mark.parametrize(("x_shape", "out"), LINEAR)
@pytest.mark.parametrize("fill", [lambda s: ring_values(s, 63, 5), worst])
def test_linear_plain_and_prepared(x_shape, out: int, fill):
    x, weight = fill(x_shape), fill((out, x_shape[-1]))
    product, expected = Linear(), by_integers(x, weight.t())
    assert torch.equal(product(x, weight), expected)
    assert torch.equal(product(x, weight, product.prepare(weight)), expected)


def test_which_linear_layers_are_prepared():
    assert Linear().prepared(torch.Size((2, 40)), torch.Size((128, 40)))
    assert not Linear().prepared(torch.Size((1, 40)), torch.Size((128, 40)))
    assert not Linear().prepared(torch.Size((128, 40)), torch.Size((128, 40)))
    assert not Linear().prepared(torch.Size((2, 40)), torch.Size((127, 40)))


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c_in = groups * draw(st.sampled_from([1, 2]))
    c_out = groups * draw(st.integers(1, 3))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pair = lambda low, high: draw(st.tuples(st.integers(low, high), st.integers(low, high)))
    conv = Conv2d(pair(1, 3), pair(0, 2), pair(1, 2), groups)
    size = [conv.dilation[i] * (kernel[i] - 1) + 1 + draw(st.integers(0, 7)) for i in (0, 1)]
    shape = (draw(st.integers(1, 4)), c_in, *size)
    return conv, shape, (c_out, c_in // groups, *kernel), draw(st.integers(0, 1 << 30))


@given(convolutions())
def test_convolutions(case):
    conv, x_shape, w_shape, seed = case
    x, weight = ring_values(x_shape, 63, seed), ring_values(w_shape, 63, seed + 1)
    expected = conv_by_slices(x, weight, conv)
    assert torch.equal(conv(x, weight), expected)
    assert torch.equal(F.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups), expected)
    assert conv(x.to("meta"), weight.to("meta")).shape == expected.shape
    if conv.groups == 1:
        assert torch.equal(conv(x, weight, conv.prepare(weight)), expected)


@given(convolutions())
def test_groups_one_after_the_other(case):
    conv, x_shape, w_shape, seed = case
    with mock.patch.object(products, "_GROUP", 1):
        x, weight = ring_values(x_shape, 63, seed), ring_values(w_shape, 63, seed + 1)
        assert torch.equal(conv(x, weight), conv_by_slices(x, weight, conv))
        assert conv(x.to("meta"), weight.to("meta")).shape == conv(x, weight).shape


# Output sizes with a 3x3 kernel and padding 1, the same as the input's: tiles of whole rows, of parts of a row, of
# several images, tiles that end in one, and a last one that is not full.
SIZES = [
    *[(1, 8, 8), (3, 16, 16), (2, 32, 2), (1, 64, 1), (2, 4, 32), (1, 3, 64), (1, 1, 128), (2, 3, 128), (1, 5, 192)],
    *[(4, 4, 4), (64, 1, 1), (16, 2, 2), (32, 1, 2), (2, 4, 8), (128, 1, 1), (13, 4, 4), (7, 8, 8), (1, 14, 14)],
    *[
        (1, 4, 4),
        (3, 5, 7),
        (1, 1, 1),
        (63, 1, 1),
        (2, 10, 12),
        (5, 4, 4),
        (1, 2, 96),
        (65, 1, 1),
        (2, 7, 7),
        (1, 9, 8),
    ],
]


@pytest.mark.parametrize("wide", [True, False], ids=["vectors", "words"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fill", [lambda s: ring_values(s, 63, 6), worst])
def test_every_way_to_make_columns(size, fill, wide: bool, monkeypatch):
    """Also in two threads; the numbers of outputs are those of all kinds of blocks of rows."""
    monkeypatch.setattr("sectorch.ring.products.wide_products", lambda: wide)
    conv, (batch, h, w) = Conv2d((1, 1), (1, 1)), size
    x = fill((batch, 3, h, w))
    for outputs, threads in ((9, 1), (13, 2), (97, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        weight = fill((outputs, 3, 3, 3))
        assert torch.equal(conv(x, weight), conv_by_slices(x, weight, conv))


@pytest.mark.parametrize("wide", [True, False], ids=["vectors", "words"])
@pytest.mark.parametrize("depth", [1, 63, 64, 65, 130])
def test_depths_of_several_parts(depth: int, wide: bool, monkeypatch):
    monkeypatch.setattr("sectorch.ring.products.wide_products", lambda: wide)
    x, weight = ring_values((2, depth, 5, 9), 63, 7), ring_values((11, depth, 1, 1), 63, 8)
    assert torch.equal(Conv2d()(x, weight), conv_by_slices(x, weight, Conv2d()))


@pytest.mark.parametrize("multiplier", [1, 2, 3])
@pytest.mark.parametrize("conv", [Conv2d(groups=6), Conv2d((2, 1), (1, 2), (1, 2), 6)])
def test_depthwise(multiplier: int, conv: Conv2d):
    for fill in (lambda s: ring_values(s, 63, 9), worst):
        x, weight = fill((2, 6, 9, 8)), fill((6 * multiplier, 1, 3, 2))
        assert torch.equal(conv(x, weight), conv_by_slices(x, weight, conv))


def test_an_empty_batch():
    x, weight = torch.zeros(0, 3, 8, 8, dtype=torch.int64), ring_values((4, 3, 3, 3))
    assert Conv2d()(x, weight).shape == F.conv2d(x, weight).shape == (0, 4, 6, 6)


def test_an_input_that_is_not_contiguous():
    conv = Conv2d((1, 1), (0, 0))
    x, weight = ring_values((2, 8, 8, 3)).permute(0, 3, 1, 2), ring_values((3, 3, 4, 3)).permute(2, 0, 1, 3)
    assert torch.equal(conv(x, weight), conv_by_slices(x, weight, conv))


def multiply_places(x, rows, depth, y, columns, depth_y, out, into_rows, into_columns, tiles=None):
    """What the matrix unit computes of the places it is given, in plain numpy; of x in tiles by their bytes."""
    x, y = (v.reshape(-1).numpy() if v.is_contiguous() else v.numpy() for v in (x, y))
    left = x[np.add.outer(rows, depth)] if tiles is None else from_tiles(tiles)[: len(rows), : len(depth)]
    out.view(-1).numpy()[np.add.outer(into_rows, into_columns)] = left @ y[np.add.outer(columns, depth_y)].T
    return out


def from_tiles(tiles: torch.Tensor) -> np.ndarray:
    """The words of `productloops.pack_tiles`: byte 8 g + j of a plane's row of 64 is of summand 8 j + g."""
    data = tiles.numpy().view(np.uint8).astype(np.int64)
    groups, planes, deep, side, _ = data.shape
    words = (data << (8 * np.arange(planes)).reshape(-1, 1, 1, 1)).sum(1).reshape(groups, deep, side, 8, 8)
    return words.transpose(0, 2, 1, 4, 3).reshape(groups * side, deep * 64)


@pytest.mark.parametrize("unit", [False, True])
def test_an_input_that_is_a_part_of_another(unit, monkeypatch):
    monkeypatch.setattr(products, "_unit_for", lambda n, k, m: unit)
    monkeypatch.setattr(productloops, "multiply_on_unit", multiply_places)
    conv, x = Conv2d(), ring_values((1, 9, 8, 8))
    for out, start in itertools.product((2, 16, 40), (0, 3, 6)):
        part, weight = x[:, start : start + 3], ring_values((out, 3, 3, 3), 63, out)
        assert torch.equal(conv(part, weight), conv_by_slices(part, weight, conv))


@pytest.mark.parametrize(("rows", "k", "out"), [(2, 16, 128), (5, 65, 17), (17, 200, 40)])
def test_a_weight_that_is_packed_for_the_matrix_unit(rows: int, k: int, out: int, monkeypatch):
    """On any processor: the packing is the unit's own, and the product of what was packed is numpy's."""
    monkeypatch.setattr(products, "unit", lambda: True)
    monkeypatch.setattr(productloops, "multiply_on_unit", multiply_places)
    x, weight = ring_values((rows, k), 63, rows), ring_values((out, k), 63, out)
    assert torch.equal(Linear()(x, weight, Linear().prepare(weight)), x @ weight.t())
    images, kernel = ring_values((1, 3, 5, 5), 63, 1), ring_values((out, 3, 3, 3), 63, 2)
    conv = Conv2d(form="tiles")
    assert torch.equal(conv(images, kernel, conv.prepare(kernel)), F.conv2d(images, kernel))


def test_which_convolutions_are_prepared():
    x, weight = torch.Size((1, 8, 7, 9)), torch.Size((128, 8, 3, 3))
    assert Conv2d((1, 1), (1, 1)).prepared(x, weight)
    assert not Conv2d((1, 1), (1, 1)).prepared(torch.Size((1, 8, 8, 8)), weight)
    assert not Conv2d((1, 1), (1, 1)).prepared(torch.Size((2, 8, 7, 9)), weight)
    assert not Conv2d((1, 1), (1, 1)).prepared(x, torch.Size((127, 8, 3, 3)))
    assert not Conv2d((1, 1), (1, 1), groups=2).prepared(x, torch.Size((128, 4, 3, 3)))


def test_results_do_not_share_memory():
    conv = Conv2d((1, 1), (1, 1))
    for _, h, w in SIZES:
        x, weight = ring_values((64, 2, h, w), 63, 10), ring_values((3, 2, 3, 3))
        first = conv(x, weight)
        kept = first.clone()
        conv(x + 1, weight)
        assert torch.equal(first, kept)


@pytest.mark.parametrize("modes", [(True, False, True, False), (False, True, False, True)], ids=str)
def test_a_thread_begins_in_inference_mode_and_goes_on_outside(modes):
    """A tensor made in inference mode cannot be written outside it: a thread keeps none for its next product."""
    conv, sizes = Conv2d((1, 1), (1, 1)), [(2, 8, 8), (64, 4, 4), (3, 16, 16), (80, 32, 32)]

    def serve(first: int) -> list[bool]:
        right = []
        for i, inference in enumerate(modes):
            batch, h, w = sizes[(first + i) % len(sizes)]
            x, weight = ring_values((batch, 3, h, w), 63, i), ring_values((5, 3, 3, 3), 63, first)
            with torch.inference_mode(inference):
                result = conv(x, weight)
            right.append(torch.equal(result, conv_by_slices(x, weight, conv)))
        return right

    for first in range(len(sizes)):
        with ThreadPoolExecutor(2) as fresh:  # threads of its own
            assert all(all(right) for right in fresh.map(serve, (first, first + 1)))


@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 1 << 30))
def test_tiles_there_and_back(k: int, n: int, seed: int):
    matrix = ring_values((k, n), 63, seed)
    tiles = products.to_tiles(matrix)
    assert tiles.shape == (-(-n // TILE), k, TILE)
    assert torch.equal(products._times_columns(torch.eye(k, dtype=torch.int64), tiles, n), matrix)


def test_a_device_without_an_integer_kernel():
    for names in (("xpu:0",), ("cpu", "cuda:0")):
        elsewhere = [SimpleNamespace(device=torch.device(name)) for name in names]
        with pytest.raises(UnsupportedDeviceError, match="run on the CPU or on CUDA, got tensors on"):
            products._device(*elsewhere)


@given(
    stride=st.integers(1, 2), padding=st.integers(0, 2), dilation=st.integers(1, 2), groups=st.sampled_from([1, 2, 4]),
    out=st.sampled_from([4, 8, 64]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_convolutions_by_limbs(stride: int, padding: int, dilation: int, groups: int, out: int, seed: int):
    conv = Conv2d((stride, 1), (padding, 1), (1, dilation), groups)
    x, weight = ring_values((2, 8, 7, 6), 63, seed), ring_values((out, 8 // groups, 3, 2), 63, seed + 1)
    assert torch.equal(conv.by_limbs(x, weight), conv_by_slices(x, weight, conv))


@pytest.mark.parametrize(
    "shapes", [((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 4)), ((2, 3, 5), (5, 4)), ((70, 70), (70, 70))]
)
def test_products_by_limbs_have_the_shapes_of_matmul(shapes):
    x, y = (ring_values(shape, 63, i) for i, shape in enumerate(shapes))
    assert torch.equal(products._limb_matmul(x, y), torch.matmul(x, y))


# Einsums as products of matrices, which a device without int64 products takes, against torch's own.
EQUATIONS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)),
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "i,i->": ((5,), (5,)),
    "i,j->ji": ((5,), (3,)),
    "ij,ij->ij": ((2, 3), (2, 3)),
    "ijk,jil->kl": ((2, 3, 4), (3, 2, 5)),
    "ijk,l->il": ((2, 3, 4), (5,)),
    "ii,ij->j": ((3, 3), (3, 4)),
    "aab,b->a": ((3, 3, 2), (2,)),
    "ba,cb": ((2, 3), (4, 2)),
    "...i,...i": ((2, 3, 4), (3, 4)),
    "...ij,...jk->...ik": ((5, 1, 2, 3), (4, 3, 2)),
    "i...,i...->...": ((2, 3), (2, 3)),
    "bij,bjk->ikb": ((1, 3, 4), (2, 4, 5)),
    "ij,jk->": ((2, 0), (0, 3)),
}


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS.items())
def test_by_matmul_is_torchs_einsum(equation: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    x, y = (ring_values(shape, 63, seed) for seed, shape in enumerate(shapes))
    assert torch.equal(by_matmul(equation, x, y), torch.einsum(equation, x, y))


# Products by limbs against torch's wrapping int64 product: random, worst-case digits, long sums, and the bound.
EDGES = (0, 1, -1, (1 << 63) - 1, -(1 << 63), 0x7F7F7F7F7F7F7F7F, -0x7F7F7F7F7F7F7F80, (1 << 21) - 1, -(1 << 21))


def ring(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, dtype=torch.int64, generator=generator)


def worst_digits(limbs) -> int:
    """The element all of whose digits are the lowest, -2^(w-1): every digit product is as large as can be."""
    value = sum(-(1 << (limbs.bits - 1)) << (limbs.bits * i) for i in range(limbs.count)) % (1 << 64)
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(st.sampled_from(EDGES) | st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=8))
def test_digits_are_small_and_give_the_element_back(kind: str, values: list[int]):
    x, limbs = torch.tensor(values), KINDS[kind]
    cut = digits(x, limbs)
    assert (cut >= -(1 << (limbs.bits - 1))).all()
    assert (cut < 1 << (limbs.bits - 1)).all()
    assert torch.equal(sum(d << (limbs.bits * i) for i, d in enumerate(cut)), x)


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(0, 20), k=st.integers(0, 40), m=st.integers(0, 20), seed=st.integers(0, 1 << 30))
def test_products_of_any_shape(kind: str, n: int, k: int, m: int, seed: int):
    x, y = ring(n, k, seed=seed), ring(k, m, seed=seed + 1)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_broadcast(kind: str):
    x, y = ring(3, 1, 4, 5), ring(2, 5, 6, seed=1)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)


@pytest.mark.parametrize(
    ("kind", "fan_in"), [("float64", 2048), ("float64", 512 * 9), ("int8", 512 * 9), ("int8", 131071)]
)
@pytest.mark.parametrize("value", ["worst", "largest", "random"])
def test_long_sums_with_the_worst_digits(kind: str, fan_in: int, value: str):
    if value == "random":
        x, y = ring(2, fan_in), ring(fan_in, 3, seed=1)
    else:
        element = worst_digits(KINDS[kind]) if value == "worst" else (1 << 63) - 1
        x, y = torch.full((2, fan_in), element), torch.full((fan_in, 3), element)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)
    if fan_in <= KINDS[kind].longest:
        assert torch.equal(short_matmul(x, y, kind), x @ y)


def test_the_bounds_are_those_of_the_accumulators():
    assert FLOAT64.longest << (2 * FLOAT64.bits - 2) == 1 << 53
    assert INT8.longest << (2 * INT8.bits - 2) < 1 << 31 <= (INT8.longest + 1) << (2 * INT8.bits - 2)
    # One more product of lowest digits and the int32 sum wraps: the bound cannot be larger.
    column = torch.full((INT8.longest + 1, 8), -128, dtype=torch.int8)
    assert (torch._int_mm(column.t().contiguous()[:1].expand(17, -1).contiguous(), column) < 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_longer_sums_are_refused_or_cut(kind: str):
    fan_in = KINDS[kind].longest + 1
    x, y = ring(1, fan_in), ring(fan_in, 1, seed=1)
    with pytest.raises(ArgumentError, match=f"exact up to a fan-in of {fan_in - 1}, got {fan_in}"):
        short_matmul(x, y, kind)
    assert torch.equal(limb_matmul(x, y, kind), x @ y)


def test_an_unknown_kind():
    with pytest.raises(ArgumentError, match="float64 or int8, got 'fp8'"):
        limb_matmul(ring(1, 1), ring(1, 1), "fp8")


# Karatsuba's convolutions: the bits of the definition, on either kind of processor, in any parts.
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


def test_karatsuba_of_an_input_that_is_not_contiguous():
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
