"""On a GPU, where there is one: limb products, whole models and every operation, all parties on it, against the CPU."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import ring_values
from op_stage import Stage, reference_stage
from test_ops import ONCE, TORCH_SAYS, Called, each, of_rows, opened
from torch.utils import _pytree as pytree

import sectorch
from sectorch import Scheme
from sectorch.choreography.run.cuda_graphs import CapturedGraph
from sectorch.nn.models import ZOO
from sectorch.ring import products
from sectorch.ring.products import Conv2d
from sectorch.session import Session
from sectorch.testing.calls import as_tuple, reveal_leaf

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(f"ignore:{text}:UserWarning") for text in TORCH_SAYS),
]


@pytest.mark.parametrize("kind", products.KINDS)
def test_products(kind: str):
    x, y = ring_values((130, 4608), 63), ring_values((4608, 70), 63, 1)
    assert torch.equal(products.limb_matmul(x.cuda(), y.cuda(), kind).cpu(), x @ y)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convolutions(groups: int):
    conv = Conv2d((1, 1), (1, 1), (1, 1), groups)
    x, weight = ring_values((2, 8, 9, 9), 63), ring_values((16, 8 // groups, 3, 3), 63, 1)
    assert torch.equal(conv(x.cuda(), weight.cuda()).cpu(), conv(x, weight))
    assert torch.equal(products.matmul(x.cuda(), x.cuda()).cpu(), products.matmul(x, x))


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("name", ["lenet", "vgg7"])
def test_models(name: str, network: str):
    torch.manual_seed(0)
    construct, shape = ZOO[name]
    model, x = construct().eval(), torch.randn(2, *shape)
    expected = model(x)
    secured = sectorch.secure(model.cuda(), Scheme(network=network))
    y = secured(x.cuda())
    assert y.device.type == "cuda"
    assert (y.cpu() - expected).abs().max() <= 1e-4
    with pytest.raises(sectorch.errors.ArgumentError, match="the input is on cpu, the secure module on cuda:0"):
        secured(x)


def test_a_module_is_recorded_and_checked_there():
    """Material can be prepared for what was recorded; an input of the check is where the module's weights are."""
    secured = sectorch.secure(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval().cuda())
    x = torch.randn(2, 4).cuda()
    expected = secured(x)
    secured.preprocess(x)
    assert torch.equal(secured(x), expected)


def recorded(session: Session) -> list[CapturedGraph]:
    """What is recorded of the programs of a session."""
    graphs = session.runtime.graphs
    return [one for of in graphs._of.values() for one in of.values()]


@pytest.mark.parametrize("network", ["lan", "wan"])
def test_calls_are_replayed(network: str):
    """From the third on, whole ones and those of prepared material, each on an input of its own, with an observed one
    between them; and what a call gave stays what it is when there are others."""
    construct, shape = ZOO["lenet"]
    model, scheme = construct().eval(), Scheme(network=network)
    inputs = [torch.randn(2, *shape) for _ in range(6)]
    expected = [sectorch.reference(model, scheme)(x) for x in inputs]
    secured = sectorch.secure(model.cuda(), scheme)
    found = [secured(x.cuda()) for x in inputs]
    with sectorch.profile():
        found.append(secured(inputs[0].cuda()))
    for x in inputs:
        secured.preprocess(x.cuda())
        found.append(secured(x.cuda()))
    ideal = [*expected, expected[0], *expected]
    assert [i for i, y in enumerate(found) if not torch.equal(y.cpu(), ideal[i])] == []
    whole = recorded(secured.session)
    assert len(whole) == 3 and all(one._pieces and not one.refused for one in whole)


def test_a_replayed_call_that_leaves_its_range():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    secured = sectorch.secure(model.cuda())
    small = torch.randn(3, 4).cuda() / 1000
    expected = secured(small)
    for _ in range(4):
        assert torch.equal(secured(small), expected)
    for _ in range(2):
        with pytest.raises(sectorch.errors.RangeExceededError):
            secured(torch.full((3, 4), 100.0).cuda())
        assert torch.equal(secured(small), expected)


def test_threads_share_what_is_recorded():
    construct, shape = ZOO["lenet"]
    model = construct().eval()
    inputs = [torch.randn(1, *shape) for _ in range(16)]
    reference = sectorch.reference(model)
    expected = [reference(x) for x in inputs]
    secured = sectorch.secure(model.cuda())

    def called(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return secured(x.cuda()).cpu()

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(*pair) for pair in zip(pool.map(called, inputs), expected, strict=True))


class OnDevice(Stage):
    """All operands of a sample on the device, its public tensors too."""

    def place(self, role: str, plain: torch.Tensor, arrange: Any = None) -> torch.Tensor:
        return super().place(role, plain.cuda(), arrange)


def test_a_device_may_be_named_without_its_number():
    session = Session(device="cuda")
    assert torch.equal(sectorch.share(torch.arange(3).cuda(), session=session).reveal(), torch.arange(3).cuda())


@functools.cache
def on_device() -> OnDevice:
    return OnDevice(Session(device="cuda"))


OTHERWISE = {
    "put": "of entries written to one place a device keeps any",
    "scatter": "of entries written to one place a device keeps any",
    "to": "the sample moves to the CPU, which is refused there",
    "batch_norm": "the device's rsqrt of public float32 numbers has other last bits than the CPU's",
}


@of_rows([case for case in ONCE if case.row.name not in OTHERWISE])
def test_operations(cases: list[Called]):
    def moved(v: Any) -> Any:
        return v.cuda() if type(v) is torch.Tensor and v.is_cpu else v

    def body(case: Called) -> None:
        args, kwargs = pytree.tree_map(moved, case.secret(at=on_device(), grid=False))
        found = [reveal_leaf(leaf) for leaf in pytree.tree_leaves(as_tuple(case.key(*args, **kwargs)))]
        for mine, ideal in zip(found, opened(case, reference_stage(), grid=False)[1], strict=True):
            assert torch.equal(mine.cpu(), ideal) if isinstance(mine, torch.Tensor) else mine == ideal

    each(cases, body)
