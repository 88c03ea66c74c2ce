"""Norms and statistics of rows of 1 to 10^6 entries, sigma from the last place to the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cases import some
from domain_numbers import LIMIT, close, grid, layer_norm, shared
from example_counts import fewer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch import Scheme, explain, reference, secure
from sectorch.errors import FixedPointRangeError


@dataclass(frozen=True)
class Rows:
    """Rows of n entries around an offset, some with one entry as large as the limit, some constant."""

    n: int
    exponent: float
    offset: float
    kind: str
    seed: int

    def make(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(2, self.n, generator=generator, dtype=torch.float64) * 2.0**self.exponent + self.offset
        if self.kind == "outlier":
            x[:, 0] = LIMIT - 1
        if self.kind == "constant":
            x[:] = self.offset + 2.0**self.exponent
        if self.kind == "two":
            x = (x > self.offset).double() * 2.0**self.exponent + self.offset
        return grid(x.clamp(-LIMIT + 1, LIMIT - 1))


rows = st.builds(
    Rows,
    n=st.one_of(st.integers(2, 40), st.sampled_from([64, 768, 1000, 4096, 5000])),
    exponent=st.floats(-20, 16),
    offset=st.sampled_from([0.0, 0.0, 1.0, -300.0, 30_000.0]),
    kind=st.sampled_from(["plain", "plain", "outlier", "constant", "two"]),
    seed=st.integers(0, 99),
)


def rms_norm(eps: float) -> Callable:
    return lambda x: F.rms_norm(x, x.shape[-1:], eps=eps)


@pytest.mark.parametrize(("frac_bits", "network"), [(20, "lan"), (20, "wan"), (16, "lan"), (24, "lan")])
@pytest.mark.parametrize("n", [2, 33, 768])
def test_a_weight_multiplies_before_the_only_rounding(n: int, frac_bits: int, network: str):
    """A weight of 30 leaves the error of a small result as it is; of 24 fraction bits it is rounded in between."""
    scheme = Scheme(frac_bits=frac_bits, network=network)
    norm = nn.RMSNorm(n, eps=1e-5, dtype=torch.float64).eval()
    norm.weight.data = grid(torch.linspace(-30.0, 30.0, n, dtype=torch.float64))
    x = grid(torch.randn(4, n, dtype=torch.float64) * 2.0 ** torch.tensor([[-9.0], [-5.0], [0.0], [4.0]]))
    y = secure(norm, scheme)(x)
    assert torch.equal(y, reference(norm, scheme)(x))
    if frac_bits == 20:
        assert ((y - norm(x)).abs() <= 1e-6 + 5e-6 * norm(x).abs()).all()
        assert [layer.rounds for layer in explain(norm, x, scheme).layers][-1] <= 3  # the result is rounded


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("n", [32, 768, 1024])
def test_rows_of_every_size_by_their_exact_sums_of_squares(n: int, kind: type[nn.Module], eps: float, network: str):
    """Of rows above and below the border between both words of the sum, constant ones, and the largest."""
    norm = kind(n, eps=eps, dtype=torch.float64).eval()
    sigma = 2.0 ** torch.arange(-12.0, 11.0, 0.5, dtype=torch.float64)
    x = torch.randn(len(sigma), n, dtype=torch.float64) * sigma[:, None] + 0.5
    x = grid(torch.cat((x.clamp(-4095, 4095), torch.full((1, n), 3.0), 4095.0 * torch.randn(2, n).sign())))
    y = secure(norm, Scheme(network=network))(x)
    assert torch.equal(y, reference(norm)(x))
    assert ((y - norm(x)).abs() <= 4e-6 + 1e-5 * norm(x).abs()).all()


def test_a_sum_of_squares_takes_one_round_after_the_opening():
    """No number of the row is rounded before it."""
    with sectorch.profile() as profile:
        secure(nn.LayerNorm(64).eval())(torch.randn(2, 64))
    rounds = {
        name: min(m.round for m in profile.ledger if m.protocol == name) for name in ("open_masked", "square_sum")
    }
    assert rounds["square_sum"] == rounds["open_masked"] + 1


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_weight_beyond_the_gain_is_refused(kind: type[nn.Module]):
    norm = kind(8).eval()
    norm.weight.data[3] = 600.0
    with pytest.raises(FixedPointRangeError, match=r"weight 'weight': the weights of one output sum to magnitude 600"):
        secure(norm, Scheme(frac_bits=20, limit_bits=12))(torch.randn(2, 8))


@fewer(12)
@given(rows, st.sampled_from([1e-6, 1e-5, 1e-3, 1.0]), st.sampled_from([layer_norm, rms_norm]))
def test_norms(of: Rows, eps: float, norm: Callable):
    close(norm(eps), of.make())


@fewer(8)
@given(rows)
def test_other_norms(of: Rows):
    """Groups and channels share the code; what differs is the shape."""
    x = of.make().reshape(1, 2, -1, 1)
    close(lambda v: F.group_norm(v, 1), x)
    close(F.instance_norm, x) if x.shape[2] > 1 else None


@fewer(12)
@given(rows, st.sampled_from(["mean", "std", "norm", "normalize", "cosine", "var", "mse", "rms"]))
def test_statistics(of: Rows, name: str):
    x = of.make()
    y = torch.linspace(1, 2, x.shape[1], dtype=torch.float64)
    function = {
        "mean": lambda v: v.mean(-1),
        "std": lambda v: v.std(-1),
        "norm": lambda v: torch.linalg.vector_norm(v, dim=-1),
        "normalize": lambda v: F.normalize(v, dim=-1),
        "cosine": lambda v: F.cosine_similarity(v, grid(y).expand(v.shape), dim=-1),
        "var": lambda v: v.var(-1),
        "mse": lambda v: F.mse_loss(v, torch.zeros(v.shape)),
        "rms": lambda v: (v.square().mean(-1) + 1e-6).sqrt(),
    }[name]
    if name in ("var", "mse", "rms") and x.abs().max() > 180:
        x = grid(x / 1024)  # results from 2^16 on are range errors, and squares by hand from 2^22 on
    if name == "mean" and x.abs().max() > LIMIT / 2:
        x = grid(x / 2)  # from half the limit on a mean may be a range error
    close(function, x)


LARGE = [(1, -3.0), (65_536, -3.0), (65_536, 9.0), (1_000_000, 3.0), (1_000_000, 15.9)]


@pytest.mark.parametrize(("n", "exponent"), some(LARGE, [(1, -3.0), (65_536, 9.0)]))
def test_large_rows(n: int, exponent: float):
    x = Rows(n, exponent, 0.0, "plain", 0).make()[:1]
    if n > 1:
        close(layer_norm(1e-5), x)
        close(lambda v: v.std(-1), x)
    close(rms_norm(1e-5), x)
    close(lambda v: v.mean(-1), x)
    if exponent < 8:
        close(lambda v: F.mse_loss(v, torch.zeros(v.shape)), x)


def test_constant_rows_have_no_deviation():
    x = grid(torch.tensor([0.1, 123.4567, -60_000.3]))[:, None].expand(3, 768).contiguous()
    assert not layer_norm(1e-12)(shared(x)).reveal().any()
    assert not shared(x).var(-1).reveal().any()


@fewer(6)
@given(n=st.sampled_from([8, 64, 100, 768]), sigma=st.floats(0.005, 100), seed=st.integers(0, 99))
def test_norms_by_hand(n: int, sigma: float, seed: int):
    """Within 1e-4: squares of the last places are what a row of small numbers has."""
    x = grid(torch.randn(2, n, generator=torch.Generator().manual_seed(seed)) * sigma)
    close(lambda v: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6), x, 1e-4)
    close(lambda v: v * torch.rsqrt(v.square().sum(-1, keepdim=True) / n + 1e-6), x, 1e-4)
    close(lambda v: v / torch.sqrt(((v - 0.125) ** 2).mean(-1, keepdim=True) + 1e-6), x, 1e-4)
