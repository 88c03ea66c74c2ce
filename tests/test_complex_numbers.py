"""Complex secret tensors: functions of them against torch's, what they refuse, and models that make them."""

from __future__ import annotations

import math

import pytest
import torch
from op_rows.base import ULP, complex_number, number
from op_stage import reference_stage, stage
from torch import nn

import sectorch
from sectorch.errors import DtypeError, SectorchError, UnsupportedOpError
from sectorch.tensor import ComplexShared

T = torch.Tensor
Z, W = complex_number(3, 4).make("z", True), complex_number(3, 4).make("w", True)
X = number(3, 4).make("x", True)


def _written(z: T, w: T) -> T:
    z[1] = w[0]
    z[:, 0] = 2.0
    return z


FUNCTIONS = {
    "sum of both": lambda z, w: z + w,
    "with a number": lambda z, w: 1j - (2 + z) + (3j + w) * 2 - 1,
    "alpha": lambda z, w: torch.add(z, w, alpha=2) - torch.sub(w, z, alpha=3),
    "times public": lambda z, w: z * torch.tensor([1, 1j, 2 - 1j, 0.5]),
    "product": lambda z, w: z * w,
    "conjugate": lambda z, w: (z * w.conj()).resolve_conj(),
    "matmul": lambda z, w: z @ w.mH,
    "public matmul": lambda z, w: torch.ones(2, 3, dtype=torch.complex64) @ z,
    "einsum": lambda z, w: torch.einsum("ab,cb->ac", z, w) + torch.einsum("ab->a", z),
    "division": lambda z, w: z / 4 / (0.5 + 1j),
    "power": lambda z, w: z**2 - z.square(),
    "magnitude": lambda z, w: z.abs() + abs(w),
    "parts": lambda z, w: z.real * w.imag + torch.imag(z) - torch.real(w),
    "pairs": lambda z, w: torch.view_as_real(torch.view_as_complex(torch.view_as_real(z)) + w),
    "moved": lambda z, w: z.permute(1, 0).reshape(2, 6)[:, ::2].flatten().unsqueeze(0).expand(2, 6).contiguous(),
    "pieces": lambda z, w: torch.cat((z.chunk(2, 1)[0], w.split(1, 1)[2], torch.zeros(3, 1)), 1),
    "stacked": lambda z, w: torch.stack([z, w, w * 0]).sum(0).mean(-1, keepdim=True),
    "negative": lambda z, w: -z.roll(1, 0) + torch.fft.fftshift(w) + w.flip(1),
    "chosen": lambda z, w: torch.where(X > 0, z, 1j) + w.masked_fill(X < 1, 0),
    "padded": lambda z, w: torch.nn.functional.pad(z, (1, 2)),
    "rows": lambda z, w: torch.stack(list(z)),
    "constants": lambda z, w: z + torch.ones_like(w) + w.new_zeros(3, 4),
    "written": lambda z, w: _written(z * 1, w),
    "made complex": lambda z, w: z.real.to(torch.complex64) * 1j,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_complex_tensors_are_torchs(name: str):
    """Entries are multiples of 1/8 up to 4: products of two are exact in 40 bits, and sums of 4 of them."""
    wanted = FUNCTIONS[name](Z, W)
    for at in (stage(), reference_stage()):
        found = FUNCTIONS[name](at.share(Z), at.share(W))
        assert isinstance(found, ComplexShared) == wanted.is_complex()
        plain = found.reveal()
        assert plain.dtype == wanted.dtype
        assert plain.shape == wanted.shape
        assert float((plain - wanted).abs().max()) <= 24 * ULP + float(wanted.abs().max()) * 2**-20


@pytest.mark.parametrize(
    ("match", "f"),
    [
        ("of a complex secret tensor is not supported", torch.tanh),
        ("in place", lambda z: z.mul_(2)),
        ("views of", lambda z: (z.real, z.__setitem__(0, 1))),
        ("conj", lambda z: 1 / z),
        ("x.real", lambda z: z.to(torch.float32)),
        ("other than 1 to 4", lambda z: z**0.5),
        ("way to the content|take the content", lambda z: z.tolist()),
        ("pickled", lambda z: __import__("copy").deepcopy(z)),
        ("views of", lambda z: z.real.add_(1)),
        ("dispatch table|not supported", lambda z: z < 1),
        ("dispatch table|not supported", lambda z: z.sort()),
    ],
)
def test_the_rest_is_refused(match: str, f):
    z = stage().share(Z)
    with sectorch.profile() as profile, pytest.raises(SectorchError, match=match):
        f(z)
    assert not profile.ledger
    assert torch.equal(z.reveal(), Z)


def test_a_long_transform_leaves_room_for_its_sum():
    """2048 entries up to 8: the sum reaches 2^14; the matrix is a half of the cosines, and the result twice its own."""
    x = number(1, 2048, low=-8, high=8).make("long", True)
    found = torch.fft.rfft(reference_stage().share(x)).reveal()
    assert float((found - torch.fft.rfft(x.double())).abs().max()) < 2 * 2048 * 4 * ULP
    flat = torch.full((1, 2048), 1000.0)
    assert float((torch.fft.rfft(reference_stage().share(flat)).reveal()[0, 0] - 2_048_000).abs()) < 8


class Mixer(nn.Module):
    """FNet's mixing of tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)


class GlobalFilter(nn.Module):
    """GFNet's layer: a weight for each frequency."""

    def __init__(self):
        super().__init__()
        self.complex_weight = nn.Parameter(torch.randn(4, 3, 6, 2) * 0.3)

    def forward(self, x):
        side = math.isqrt(x.shape[1])
        y = torch.fft.rfft2(x.view(-1, side, side, x.shape[2]).to(torch.float32), dim=(1, 2), norm="ortho")
        y = y * torch.view_as_complex(self.complex_weight)
        return torch.fft.irfft2(y, s=(side, side), dim=(1, 2), norm="ortho").reshape(x.shape)


class LogMel(nn.Module):
    """The front end of a speech model; its window and its filters are A's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.register_buffer("filters", torch.rand(17, 6))

    def forward(self, x):
        power = torch.stft(x, 32, 16, window=self.window, return_complex=True).abs() ** 2
        return torch.log(torch.clamp(power.transpose(1, 2) @ self.filters, min=1e-2))


class Correlation(nn.Module):
    """Autoformer's correlation of queries and keys."""

    def forward(self, x):
        y = torch.fft.rfft(x, dim=-1)
        return torch.fft.irfft(y * torch.conj(y.flip(1)), dim=-1)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies, mixed over channels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, 2))

    def forward(self, x):
        low = torch.einsum("bix,iox->box", torch.fft.rfft(x)[..., :4], torch.view_as_complex(self.weight))
        return torch.fft.irfft(nn.functional.pad(low, (0, 2)), n=x.shape[-1])


class Rotary(nn.Module):
    """The positions of a language model as angles, which the forward makes itself, in complex64."""

    def forward(self, x):
        angles = torch.outer(torch.arange(3.0), 10.0 ** -torch.arange(4.0))
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Mixer, (2, 4, 8)),
        (GlobalFilter, (2, 16, 6)),
        (LogMel, (2, 96)),
        (Correlation, (2, 3, 8)),
        (Spectral, (2, 3, 10)),
        (Rotary, (2, 3, 8)),
    ],
)
def test_models_that_transform_give_what_they_give(model: type[nn.Module], shape: tuple[int, ...]):
    torch.manual_seed(0)
    plain, x = model().eval(), torch.rand(shape) - 0.5
    secure = sectorch.secure(plain)
    with torch.no_grad():
        wanted = plain(x)
    assert float((secure(x) - wanted).abs().max()) < 1e-4  # the log has a slope of 100 at 1e-2
    assert secure.graphs.eager_reason is None, "it did not run as one program"


def test_complex_weights_and_results_are_refused():
    layer = nn.Linear(2, 2).eval()
    layer.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(DtypeError, match="view_as_real"):
        sectorch.secure(layer)
    with pytest.raises(UnsupportedOpError, match="view_as_real"):
        sectorch.secure(nn.Sequential(nn.Linear(2, 2), Transform()).eval())(torch.zeros(1, 2))


class Transform(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)
