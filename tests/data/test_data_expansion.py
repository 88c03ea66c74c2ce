"""Data set expansion: each kind's formula, seen from outside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sectorch.data import EXPANSIONS, DataError, expand
from sectorch.data.selection import LAMBDAS, mixup

KINDS = sorted(EXPANSIONS)
# One hot images: which original a pixel comes from can be read off.
IMAGES = torch.eye(5).view(5, 5, 1, 1).expand(5, 5, 6, 4).contiguous()


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(0, 2**31))
def test_shape_dtype_and_repeatable(kind, size, seed):
    before = IMAGES.clone()
    pool = expand(IMAGES, size, kind, generator=draw(seed))
    assert pool.shape == (size, 5, 6, 4) and pool.dtype == IMAGES.dtype
    assert torch.equal(pool, expand(IMAGES, size, kind, generator=draw(seed)))
    assert torch.equal(IMAGES, before)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_mixup_is_equation_1(size, seed):
    """Every pixel holds lambda of one image and 1 - lambda of another, with lambda of 0.1 to 0.9."""
    for image in expand(IMAGES, size, "mixup", generator=draw(seed)):
        shares = image[:, 0, 0].sort(descending=True).values
        assert torch.equal(image, image[:, :1, :1].expand_as(image))
        assert torch.allclose(shares.sum(), torch.tensor(1.0)) and int((shares > 0).sum()) == 2
        assert min(abs(float(shares[0]) - lam) for lam in LAMBDAS) < 1e-6


def test_mixup_of_one_coefficient():
    pool = expand(IMAGES, 30, "mixup", lambdas=(0.3,), generator=draw(0))
    assert torch.allclose(pool[:, :, 0, 0].amax(1), torch.full((30,), 0.7))
    x, y = torch.rand(2, 3, 4)
    assert torch.equal(mixup(x, y, 1.0), x) and torch.equal(mixup(x, y, 0.0), y)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_cutmix_takes_a_box_of_another_image(size, seed):
    for image in expand(IMAGES, size, "cutmix", generator=draw(seed)):
        assert set(image.unique().tolist()) <= {0.0, 1.0} and torch.equal(image.sum(0), torch.ones(6, 4))
        present = image.amax((1, 2)).bool()
        assert 1 <= int(present.sum()) <= 2
        # One of the parts is a full rectangle.
        boxes = []
        for part in image[present].bool():
            rows, columns = part.any(1), part.any(0)
            boxes.append(bool((part == (rows[:, None] & columns)).all()))
        assert any(boxes)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_cutout_blackens_a_box_of_one_image(size, seed):
    for image in expand(IMAGES + 1, size, "cutout", generator=draw(seed)):
        black = (image == 0).all(0)
        rows, columns = black.any(1), black.any(0)
        assert torch.equal(black, rows[:, None] & columns) and 1 <= int(black.sum()) <= 9
        assert any(torch.equal(image[:, ~black], original[:, ~black]) for original in IMAGES + 1)


def test_flip_and_noise_and_private():
    images = torch.arange(48.0).view(2, 1, 4, 6)
    for image in expand(images, 20, "flip", generator=draw(0)):
        ways = [original.flip(dims) for original in images for dims in ([], [-1], [-2], [-1, -2])]
        assert any(torch.equal(image, way) for way in ways)
    noisy = expand(torch.zeros(1, 1, 100, 100), 1, "noise", noise=0.5, generator=draw(0))
    # 10,000 samples: the deviation is within 5 / sqrt(20000) = 3.5 % but for one draw in a million.
    assert abs(float(noisy.std()) - 0.5) < 0.02
    assert torch.equal(expand(images, 2, "private"), images)


@given(st.sampled_from([k for k in KINDS if k != "private"]), st.integers(5, 60))
def test_every_image_is_used_before_one_comes_again(kind, size):
    """Counted by the larger part: mixup and cutmix begin with a walk through all images."""
    if kind in ("mixup", "cutmix"):
        return
    pool = expand(IMAGES + 2, size, kind, noise=1e-3, generator=draw(size))
    counts = torch.cdist(pool.flatten(1), (IMAGES + 2).flatten(1)).argmin(1).bincount(minlength=5)
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(kind="rotate"), "there is no expansion 'rotate'; there are mixup"),
        (dict(images=torch.ones(3, 4)), r"takes images \[N, C, H, W\]"),
        (dict(images=torch.ones(3, 1, 4, 4, dtype=torch.int64)), "got torch.int64"),
        (dict(size=0), "at least one image, got 0"),
        (dict(images=IMAGES[:1]), "mixup pairs images and needs at least two, got 1"),
        (dict(kind="private", size=6), "has the 5 private images and no more, 6"),
        (dict(lambdas=(1.5,)), r"must lie in \[0, 1\], got \[1.5\]"),
        (dict(lambdas=()), r"must lie in \[0, 1\], got \[\]"),
        (dict(kind="noise", noise=0.0), "standard deviation above 0, got 0.0"),
    ],
)
def test_errors(change, text):
    options = {"images": IMAGES, "size": 4, **change}
    with pytest.raises(DataError, match=text):
        expand(options.pop("images"), options.pop("size"), **options)
