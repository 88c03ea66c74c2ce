"""The strategies give what they say, over all of it, and what sectorch takes."""

from __future__ import annotations

import sys

import pytest
import torch
from commands import run_command
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

import sectorch
from sectorch.errors import ArgumentError, NonFiniteError
from sectorch.session import Session
from sectorch.tensor import Scheme
from sectorch.testing import Call, check_op
from sectorch.testing import strategies as sts

SESSION = Session()
FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
EXACT = [torch.float32, torch.float64, *sts.WHOLE, torch.bool]


@given(sts.tensors(dtype=EXACT, domain=(-8, 8)))
def test_tensors_are_shared_and_revealed_exactly(x: torch.Tensor):
    assert not x.numel() or -8 <= float(x.min()) <= float(x.max()) <= 8
    assert torch.equal(sectorch.share(x, session=SESSION).reveal(), x)


@pytest.mark.parametrize(
    ("what", "there"),
    [
        (sts.tensors(domain=(-2, 3)), lambda x: x.numel() > 0 and float(x.max()) == 3.0),
        (sts.tensors(domain=(-2, 3)), lambda x: x.numel() > 0 and float(x.min()) == -2.0),
        (sts.tensors(domain=(-2, 3)), lambda x: bool(((x != 0) & (x.abs() < 1e-5)).any())),
        (sts.tensors(), lambda x: x.numel() > 0 and float(x.abs().max()) > 4000),
        (sts.tensors(), lambda x: not x.is_contiguous()),
        (sts.tensors(), lambda x: x.dim() > 0 and x.numel() > 1 and x.stride(0) == 0),
        (sts.tensors(), lambda x: not x.numel()),
        (sts.tensors(), lambda x: not x.dim()),
        (sts.broadcastable(2), lambda s: s[0] != s[1] and len(s[0]) != len(s[1])),
        (sts.schemes(), lambda s: s.network == "wan" and s.frac_bits == 26 and s.limit_bits is not None),
        (sts.sessions(), lambda s: len(s.answering) == 3),
        (sts.programs(), lambda p: len(p.steps) >= 3),
    ],
)
def test_everything_that_is_named_is_reached(what, there):
    find(what, there, settings=settings(FEW, max_examples=2000))


@given(sts.tensors((2, 3), domain=(-4, 4), layouts=["strided"], special=[float("nan"), float("inf")]))
def test_special_values_are_refused_by_type(x: torch.Tensor):
    if bool(x.isfinite().all()):
        assert not x.is_contiguous()
    else:
        with pytest.raises(NonFiniteError):
            sectorch.share(x, session=SESSION)


@FEW
@given(sts.calls(domain=(-4, 4)))
def test_calls_are_samples(call: Call):
    check_op(torch.add, [call], error=2e-6)


@FEW
@given(st.data())
def test_formats_sessions_and_models(data):
    scheme, session = data.draw(sts.schemes()), data.draw(sts.sessions())
    x = data.draw(sts.tensors((2, 2), scheme=scheme))
    assert torch.equal(sectorch.share(x, session=session, scheme=scheme).reveal(), x)
    model, given_to_it = data.draw(sts.modules())
    assert isinstance(model(given_to_it), torch.Tensor) and not model.training


@pytest.mark.parametrize(
    ("how", "said"), [({"domain": (1, 0)}, "a domain goes from"), ({"layouts": ["sparse"]}, "layouts are contiguous")]
)
def test_what_cannot_be_drawn(how: dict, said: str):
    with pytest.raises(ArgumentError, match=said):
        find(sts.tensors(**how), lambda x: True)


def test_without_hypothesis_there_is_one_error_with_the_way_out():
    code = (
        "import sys; sys.modules['hypothesis'] = None; import sectorch.testing; from sectorch.testing import strategies"
    )
    done = run_command([sys.executable, "-c", code], timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert (
        last.endswith("needs hypothesis, which is not installed: pip install 'sectorch[testing]'")
        and "ArgumentError" in last
    )


assert Scheme().frac_bits == 20, "the domains above are for this"
