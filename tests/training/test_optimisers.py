"""Every optimiser of torch's with its options beside itself in plain double precision, from the same gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from cases import long

import sectorch
from sectorch import DifferentiableTensor, Scheme, Session
from sectorch.errors import RangeExceededError, UnsupportedOpError

optim = torch.optim
EPS = (1e-8, 1e-6, 1e-4)
RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, dict(lr=0.01)),
    "sgd nesterov": (optim.SGD, dict(lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "sgd dampening": (optim.SGD, dict(lr=0.01, momentum=0.9, dampening=0.1, maximize=True)),
    "sgd foreach": (optim.SGD, dict(lr=0.01, momentum=0.9, foreach=True)),
    "sgd fused": (optim.SGD, dict(lr=0.01, fused=True)),
    "sgd tensor": (optim.SGD, dict(lr=torch.tensor(0.01))),
    **{
        f"{kind.__name__.lower()} {eps}": (kind, dict(lr=0.002, eps=eps))
        for kind in (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.RMSprop)
        for eps in EPS
    },
    "adam amsgrad": (optim.Adam, dict(lr=0.002, amsgrad=True)),
    "adamw amsgrad": (optim.AdamW, dict(lr=0.002, amsgrad=True, maximize=True)),
    "adam foreach": (optim.Adam, dict(lr=0.002, foreach=True, amsgrad=True)),
    "adam fused": (optim.Adam, dict(lr=0.002, fused=True)),
    "adam betas": (optim.Adam, dict(lr=0.002, betas=(0.5, 0.9))),
    "adam slow": (optim.Adam, dict(lr=0.002, betas=(0.0, 0.9999))),
    "adam decay": (optim.Adam, dict(lr=0.002, weight_decay=0.1)),
    "adam decoupled": (optim.Adam, dict(lr=0.002, weight_decay=0.1, decoupled_weight_decay=True)),
    "adam tensor": (optim.Adam, dict(lr=torch.tensor(0.002))),
    "adam small": (optim.Adam, dict(lr=1e-5)),
    "nadam decay": (optim.NAdam, dict(lr=0.002, weight_decay=0.1, momentum_decay=0.01)),
    "nadam decoupled": (optim.NAdam, dict(lr=0.002, weight_decay=0.1, decoupled_weight_decay=True)),
    "nadam foreach": (optim.NAdam, dict(lr=0.002, foreach=True)),
    "nadam maximize": (optim.NAdam, dict(lr=0.002, maximize=True, betas=(0.8, 0.99))),
    "nadam small": (optim.NAdam, dict(lr=1e-5)),
    "radam decay": (optim.RAdam, dict(lr=0.002, weight_decay=0.1)),
    "radam decoupled": (optim.RAdam, dict(lr=0.002, weight_decay=0.1, decoupled_weight_decay=True)),
    "radam foreach": (optim.RAdam, dict(lr=0.002, foreach=True)),
    "radam betas": (optim.RAdam, dict(lr=0.002, betas=(0.8, 0.9), maximize=True)),
    "radam small": (optim.RAdam, dict(lr=1e-5)),
    "adamax decay": (optim.Adamax, dict(lr=0.002, weight_decay=0.1, maximize=True)),
    "adamax foreach": (optim.Adamax, dict(lr=0.002, foreach=True)),
    "rmsprop centered": (optim.RMSprop, dict(lr=0.002, centered=True)),
    "rmsprop centered eps": (optim.RMSprop, dict(lr=0.002, centered=True, eps=1e-4)),
    "rmsprop momentum": (optim.RMSprop, dict(lr=0.0005, momentum=0.9)),
    "rmsprop alpha": (optim.RMSprop, dict(lr=0.002, alpha=0.5, weight_decay=0.01)),
    "rmsprop foreach": (optim.RMSprop, dict(lr=0.002, foreach=True)),
    "adagrad decay": (optim.Adagrad, dict(lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1)),
    "adagrad foreach": (optim.Adagrad, dict(lr=0.01, foreach=True)),
    "adagrad fused": (optim.Adagrad, dict(lr=0.01, fused=True)),
    "adadelta": (optim.Adadelta, {}),
    "adadelta eps": (optim.Adadelta, dict(eps=1e-4, weight_decay=0.01, lr=0.5)),
    "adadelta rho": (optim.Adadelta, dict(rho=0.99)),
    "asgd": (optim.ASGD, dict(lr=0.01)),
    "asgd average": (optim.ASGD, dict(lr=0.01, t0=5, alpha=0.6, lambd=1e-2, weight_decay=0.01)),
    "asgd foreach": (optim.ASGD, dict(lr=0.01, foreach=True)),
    "rprop": (optim.Rprop, dict(lr=0.001, step_sizes=(1e-6, 0.1))),
    "rprop etas": (optim.Rprop, dict(lr=0.001, etas=(0.4, 1.3), step_sizes=(1e-6, 0.01), maximize=True)),
    "rprop foreach": (optim.Rprop, dict(lr=0.001, step_sizes=(1e-6, 0.1), foreach=True)),
}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lbfgs": (optim.LBFGS, {}, "take SGD or Adam"),
    "adafactor": (optim.Adafactor, {}, "take Adam"),
    "muon": (optim.Muon, {}, "take SGD"),
    "sparse": (optim.SparseAdam, {}, "take Adam"),
    "capturable": (optim.Adam, dict(capturable=True), "leave capturable out"),
    "differentiable": (optim.Adam, dict(differentiable=True), "leave differentiable out"),
}
SAMPLE = (
    "sgd nesterov", "adam 1e-08", "adam foreach", "nadam 1e-06", "radam 1e-08", "adamax 1e-08", "rprop etas",
    "rmsprop centered", "adadelta",
)  # fmt: skip
SIZES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 4.0)
EACH = 4
MEANS = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad)
"""Optimisers that divide by the root of a mean of squares."""


def exact(x: Any) -> torch.Tensor:
    content = x.cell.content
    return content.shares.double() / 2.0**content.scale_bits


def walked(kind: Any, options: dict, steps: int, f: int, seed: int, sizes: tuple = SIZES) -> tuple[torch.Tensor, ...]:
    """How far parameters have gone on shares, and in plain with the same gradients; and the longest way in plain: with
    steps of one sign, as what a gradient's signs take away again may come to stay."""
    draws = torch.Generator().manual_seed(seed)
    session, scheme, shape = Session(reference=True), Scheme(frac_bits=f), (len(sizes), EACH)
    size = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1)
    start = torch.rand(shape, generator=draws) - 0.5
    p = DifferentiableTensor(sectorch.share(start, session=session, scheme=scheme), requires_grad=True)
    begin = exact(p)
    plain = {k: v for k, v in options.items() if k not in ("foreach", "fused")}
    q = torch.nn.Parameter(begin.clone())
    shared, known = kind([p], **options), kind([q], **plain)
    way = torch.zeros(shape, dtype=torch.float64)
    for _ in range(steps):
        drawn, sign = (torch.rand(shape, generator=draws, dtype=torch.float64) for _ in "12")
        shared.zero_grad()
        ((p * (64 * size * (0.25 + drawn) * torch.sign(sign - 0.2)).float()).sum() / 64).backward()
        q.grad, before = exact(p.grad), q.detach().clone()
        shared.step()
        known.step()
        way += (q.detach() - before).abs()
    p.detach().reveal()
    return exact(p) - begin, q.detach() - begin, way


def offences(name: str, steps: int, f: int, seed: int) -> list[str]:
    """A mean of squares v gets a unit of 2^-(2f+6) a step, which decays as v does, so that v is below v + 2 u / (1 - b)
    for a decay b, and for Adagrad's sum below v + 2 u t. A step over the root is then too short by a share of
    c / g^2 at most, where c is that, corrected as v is: of b = 0.999 2^-(2f+6) 2000, under 2^-(2f-5).

    A quotient keeps f + 6 fraction bits of what is divided: of gradients above g a share of 2^-(f+6) / g, ten times
    that of m; Adadelta divides a root that is sqrt(eps) at least, with f fraction bits. Public factors err by 2^-15, of
    which a step has at most eight, and series by 2^-17. A parameter is rounded to 2^-(2f+6) four times a step. What is
    no larger than where gradients end goes no further than in plain, but for what a decay takes away from that.
    """
    kind, options = RIGHT[name]
    unit = 2.0 ** -(2 * f + 6)
    sizes = SIZES[:-1] if kind is optim.Adagrad else SIZES  # whose sum of squares stays below 256
    came, right, way = walked(kind, options, steps, f, seed, sizes)
    size = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1).clamp(min=1e-30) / 4
    share = 8 * 2.0**-15 + 10 * 2.0 ** -(f + 6) / size
    if kind in MEANS:
        decay = options.get("betas", (0, 0.999))[1] if kind is not optim.RMSprop else options.get("alpha", 0.99)
        share = share + (2 * unit * steps if kind is optim.Adagrad else 2 * unit / (1 - decay)) / size**2
    if kind is optim.Adadelta:
        share = share + 2.0**-f / options.get("eps", 1e-6) ** 0.5
    allowed = (
        share.clamp(max=1) * way * (1 + 2.0**-6) + 8 * steps * unit + 2.0 ** -(f + 6) * steps * options.get("lr", 1)
    )
    decay = options.get("weight_decay", getattr(inspect.signature(kind).parameters.get("weight_decay"), "default", 0))
    allowed = allowed + steps * float(options.get("lr", 1)) * decay * share.clamp(max=1)
    beyond = (came - right).abs() > allowed
    return [f"{name}: gradients of {SIZES[i]}: {came[i, j]:.3g}, right {right[i, j]:.3g}" for i, j in beyond.nonzero()]


@pytest.mark.parametrize(
    ("name", "steps", "f"),
    [(name, 8, 20) for name in SAMPLE]
    + long(*((name, steps, f) for name in RIGHT for steps, f in ((200, 20), (50, 16)))),
)
def test_an_optimiser_goes_as_far_as_in_plain(name: str, steps: int, f: int):
    found = offences(name, steps, f, len(name))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimiser_that_shares_cannot_have_is_refused(name: str):
    kind, options, text = REFUSED[name]
    p = DifferentiableTensor(sectorch.share(torch.ones(2, 2), session=Session(reference=True)), requires_grad=True)
    before = p.detach().reveal()
    p.sum().backward()
    with pytest.raises(UnsupportedOpError, match=text):
        kind([p], **options).step(lambda: p.sum())
    assert torch.equal(p.detach().reveal(), before)


def test_all_of_torchs_optimisers_and_their_options_are_here():
    kinds = {
        v
        for v in vars(optim).values()
        if inspect.isclass(v) and issubclass(v, optim.Optimizer) and v is not optim.Optimizer
    }
    seen: dict[Any, set[str]] = {}
    for kind, options, *_ in (*RIGHT.values(), *REFUSED.values()):
        seen.setdefault(kind, set()).update(options)
    assert set(seen) == kinds
    everywhere = {
        "params",
        "capturable",
        "differentiable",
        "maximize",
        "foreach",
        "fused",
        "weight_decay",
        "lr",
        "eps",
        "betas",
    }
    missing = {
        f"{kind.__name__}.{option}"
        for kind in kinds - {kind for kind, options, _ in REFUSED.values() if not options}
        for option in set(inspect.signature(kind).parameters) - everywhere - seen[kind]
    }
    assert not missing


@pytest.mark.parametrize("kind", [optim.SGD, *long(optim.Adam, optim.NAdam, optim.RAdam)])
def test_gradients_beyond_the_range_are_withheld(kind: Any):
    with pytest.raises(RangeExceededError):
        walked(kind, {"lr": 1.0}, 2, 20, 0, (1e3,))


@pytest.mark.parametrize("name", ["nadam 1e-08", "radam 1e-08", "rprop", "adam amsgrad", *long(*SAMPLE)])
def test_a_step_is_bit_for_bit_the_reference_step(name: str):
    kind, options = RIGHT[name]

    def run(reference: bool, recorded: bool) -> torch.Tensor:
        session = Session(reference=reference)
        p = DifferentiableTensor(sectorch.share(torch.tensor([0.5, -0.25]), session=session), requires_grad=True)
        optimiser = kind([p], **options)
        for t in range(7 if kind is optim.RAdam and recorded else 2):
            with sectorch.step(session) if recorded else torch.enable_grad():
                optimiser.zero_grad()
                (p * torch.tensor([1e-5, (-1) ** t * 0.5])).sum().backward()
                torch.nn.utils.clip_grad_norm_([p], 0.25)
                optimiser.step()
        return p.detach().reveal()

    assert torch.equal(run(False, True), run(True, True))
    if name == "nadam 1e-08":
        assert torch.equal(run(False, True), run(True, False))


@pytest.mark.parametrize("most", [0.5, 1e-4, *long(1.0, 3.0)])
def test_clipping_scales_as_in_plain_for_norms_of_any_size(most: float):
    """A gradient of n entries errs by half a unit of 2^-26 an entry, its norm and the factor by 2^-14, and what is
    divided has 26 fraction bits. The factor has 20."""
    for scale in (0.0, 1e-6, 1e-4, 1e-2, 1.0, 4.0):
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            draws, session = torch.Generator().manual_seed(0), Session(reference=True)
            shared = [
                DifferentiableTensor(sectorch.share(torch.zeros(3, 2), session=session), requires_grad=True)
                for _ in "12"
            ]
            plain = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in "12"]
            weights = [64 * scale * (torch.rand(3, 2, generator=draws) - 0.5) for _ in "12"]
            for some in (shared, plain):
                (sum((p * w).sum() for p, w in zip(some, weights, strict=True)) / 64).backward()
                clip(some, most)
            for p, q in zip(shared, plain, strict=True):
                assert torch.allclose(
                    exact(p.grad).float(), q.grad, rtol=2.0**-14 + 2.0**-27 / most, atol=2.0**-24 + 2.0**-21 * scale
                )
