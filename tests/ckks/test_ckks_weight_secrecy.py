"""What Q is told of A's weights under CKKS: the result. The form of an answer follows from the architecture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sectorch
from sectorch import ckks
from sectorch.choreography.ledger import Transcript
from sectorch.ckks.exchange import _words
from sectorch.ckks.module import on_shapes
from sectorch.ckks.scheme.ciphertext import residues
from sectorch.ckks.tensor.ckks_tensor import rerandomise
from sectorch.errors import ArgumentError, UnsupportedOpError
from sectorch.nn.fhe import Polynomial
from sectorch.nn.models import Square

F = nn.functional


class Scaled(nn.Module):
    """Weights of a single number before and after layers, in sums, joins and squares, and at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3)
        self.gain, self.gate, self.shift = (nn.Parameter(torch.empty(())) for _ in range(3))
        self.register_buffer("temperature", torch.empty(1))

    def forward(self, x):
        x = F.avg_pool2d(self.norm(self.first(x * self.gain)), 2)
        x = x * self.gate + x * self.gain - self.gate * (x + self.shift) / 4
        x = torch.cat((x[:, :1] * self.gate, x[:, 1:]), 1)
        return (self.last((x * self.gain).square().flatten(1)) * 2 + self.shift) / self.temperature


def single(*weights: str) -> type[nn.Module]:
    """A model whose only weights are numbers, which its forward names."""

    class Single(nn.Module):
        def __init__(self, forward):
            super().__init__()
            for name in weights:
                setattr(self, name, nn.Parameter(torch.empty(1)))
            self.run = forward

        def forward(self, x):
            return self.run(self, x)

    return Single


AB = single("a", "b")
MODELS = {
    "all kinds": (Scaled, (1, 4, 4)),
    "a number alone": (lambda: AB(lambda m, x: x * m.a), (2,)),
    "numbers in a row": (lambda: AB(lambda m, x: x * m.a / m.b), (2,)),
    "a power": (lambda: AB(lambda m, x: (x * m.a) ** 3), (2,)),
    "a polynomial": (lambda: nn.Sequential(AB(lambda m, x: x * m.a), Polynomial((0.5, 0.25, 0.125, 0.25))), (2,)),
    "a longer one": (lambda: nn.Sequential(AB(lambda m, x: x * m.a + m.b), Polynomial((0, 0.5, 0.1, 0, -0.01))), (2,)),
    "sums": (lambda: AB(lambda m, x: torch.add(x, x * m.a, alpha=3) - m.b * x), (2,)),
    "a residual": (lambda: AB(lambda m, x: x + m.a * x.square()), (2,)),
    "a batch as operand": (lambda: AB(lambda m, x: (x * m.a) * torch.ones(5, 1)), (2,)),
    "pools": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(2)), (1, 4, 4)),
    "layers": (lambda: nn.Sequential(nn.Linear(3, 4), Square(), nn.Linear(4, 1)), (3,)),
}  # fmt: skip


def filled(model: nn.Module, seed: int, wide: float = 1.0) -> nn.Module:
    """The model with weights of either sign and several sizes."""
    torch.manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            drawn = wide * (0.25 + torch.rand_like(tensor))
            tensor.data = drawn if "var" in name else drawn * torch.where(torch.rand_like(tensor) < 0.5, -1.0, 1.0)
    return model.eval().requires_grad_(False)


def form(answer: ckks.CKKSTensor) -> tuple:
    """All that is known of ciphertexts but their residues."""
    c = answer.cipher
    known = c.data.shape, c.pending, c.factor, c.pending_factor, c.largest, c.error, c.declared
    return (*known, answer.full_shape, answer.float_dtype)


@pytest.mark.parametrize("name", MODELS)
def test_q_works_the_answers_form_out_on_shapes(name):
    """Alone: of an architecture made on shapes. Models that differ in all weights, a zero too, have that form, and take
    that depth.
    """
    make, shape = MODELS[name]
    x = torch.rand(5, *shape) - 0.5
    with torch.device("meta"):
        blank = make().eval()
    depth = ckks.explain(blank, x).depth
    keys = ckks.keygen(depth + 1, integer_bits=20)
    with torch.no_grad():
        known = rerandomise(blank(ckks.encrypt(x.to("meta"), keys.public, bound=None)))
    assert known.levels_left == 1
    for seed, wide in ((0, 1.0), (1, 0.5), (2, 1.5), (3, 0.0)):
        model = filled(make(), seed, wide)
        if not wide and hasattr(model, "temperature"):
            model.temperature.fill_(1.0)
        if not wide and name == "numbers in a row":
            model.b.fill_(1.0)
        assert ckks.explain(model, x).depth == depth
        before = model(x)
        with torch.no_grad():
            whole = model(ckks.encrypt(x, keys, bound=1.0))
            answer = rerandomise(whole)
        assert form(answer)[:4] == form(known)[:4] and form(answer)[-2:] == form(known)[-2:]
        assert answer.cipher.pending_factor is None and answer.cipher.factor == known.cipher.factor
        # Beside the plain pass's float32: the error that A knows, a level's rescale, an encryption of zero.
        slack = 1e-5 + 2 * whole.error_bound + 1e-3
        assert float((answer.decrypt(keys.secret) - before).abs().max()) < slack
        again = whole.decrypt(keys.secret)
        assert float((again - before).abs().max()) < slack, "who holds the tensor needs no level to read it"


def test_what_leaves_is_cleared_and_takes_its_level(tmp_path):
    keys, weight = ckks.keygen(1), torch.tensor(0.3)
    e = ckks.encrypt(torch.ones(2, 1), keys) * weight
    assert e.levels_left == 1 and e.cipher.factor == 1.0 and "0.3" not in repr(e.cipher.pending_factor)
    for sent in (e.smallest_form(), ckks.rerandomise(e), ckks.rerandomise(e, flood_bits=2)):
        assert sent.levels_left == 0 and sent.cipher.pending_factor is None and sent.cipher.factor == 1.0
    e.save(tmp_path / "e")
    assert torch.allclose(ckks.load(tmp_path / "e", keys).decrypt(keys.secret), torch.full((2, 1), 0.3), atol=1e-3)
    spent = F.linear(ckks.encrypt(torch.ones(2, 1), keys), torch.ones(1, 1)) * weight
    for leave in (spent.smallest_form, lambda: ckks.rerandomise(spent), lambda: spent.save(tmp_path / "spent")):
        with pytest.raises(ckks.LevelError, match="a weight of a single number needs one more level"):
            leave()
    assert not (tmp_path / "spent").exists()
    public = ckks.encrypt(torch.ones(2, 1), keys) * 0.3
    assert public.smallest_form().levels_left == 1 and public.smallest_form().cipher.factor == pytest.approx(0.3)


def test_a_weight_that_waits_does_not_leave():
    """Every place that sends residues asks `residues`: what it gives is whole, or it raises."""
    e = ckks.encrypt(torch.ones(2, 1), ckks.keygen(1))
    assert residues(e.cipher) is e.cipher.data
    waits = e * torch.tensor(0.3)
    for send in (residues, lambda c: _words([e.cipher, c])):
        with pytest.raises(ckks.ScaleError, match="a weight of a single number waits") as raised:
            send(waits.cipher)
        assert "0.3" not in str(raised.value)
    assert residues(waits.smallest_form().cipher).shape[2] == 1


def test_shares_of_a_product_with_a_weight(keys):
    x = torch.rand(3, 2)
    shared = ckks.to_shares(ckks.encrypt(x, keys) * torch.tensor(0.3), keys.secret)
    assert torch.allclose(shared.reveal(), 0.3 * x, atol=1e-3)


def test_weights_as_python_numbers_are_refused(keys):
    """Q cannot work them out; nothing is sent."""
    coefficients = nn.Parameter(torch.ones(2))
    with pytest.raises(ArgumentError, match="are public numbers, got tensors"):
        ckks.polynomial(ckks.encrypt(torch.ones(2, 1), keys), coefficients)
    module = ckks.CKKSModule(filled(AB(lambda m, x: x * float(m.a)), 0), keys)
    with sectorch.profile() as profile, pytest.raises(UnsupportedOpError, match="depends on its weights' values"):
        module(torch.ones(2, 1))
    assert not profile.ledger


def test_a_copy_on_shapes_has_no_weights():
    model = filled(Scaled(), 0)
    copied = on_shapes(model)
    tensors = dict([*copied.named_parameters(), *copied.named_buffers()])
    assert all(t.is_meta for n, t in tensors.items() if "num_batches" not in n)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_which_chain_a_model_needs_is_a_message():
    model, x = nn.Sequential(nn.Linear(2, 2)).eval(), torch.rand(3, 2)
    nn.init.constant_(model[0].weight, 30.0)
    module = sectorch.secure(model, backend="ckks", session=sectorch.Session())
    with Transcript() as transcript:
        assert torch.allclose(module(x), model(x), atol=0.1)
        module(x)
    told = [(line.label, line.src.role, line.dst.role, value.tolist()) for line, value in transcript.lines
            if line.path == "ckks_chain"]  # fmt: skip
    p = module.keys.parameters
    assert p.integer_bits > 8
    wanted = [p.depth, p.integer_bits]
    assert told == [("chain", "A", "S", wanted), ("chain_forwarded", "S", "Q", wanted)]
