"""`check_module` says before a run whether a module is supported, where it is not, and after it whether it is right."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import sectorch
from sectorch.errors import ArgumentError
from sectorch.testing import ModuleFault, check_module

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward, weight: float = 0.1):
        super().__init__()
        self.layer, self.calls, self.given = nn.Linear(4, 4), 0, forward
        nn.init.constant_(self.layer.weight, weight)
        self.eval()

    def forward(self, x):
        return self.given(self, x)


def after_a_branch(m, x):
    y = m.layer(x)
    if y.sum() > 0:  # the branch
        y = torch.erfinv(y)
    return y


def behind_a_handler(m, x):
    try:
        return torch.erfinv(m.layer(x).clamp(-0.5, 0.5))  # tried
    except Exception:
        return m.layer(x)


def by_a_weight(m, x):
    return m.layer(x) if m.layer.weight.sum() > 0 else x  # asked


def in_numpy(m, x):
    return torch.from_numpy(m.layer(x).numpy())  # left


def of_large_weights(m, x):
    return x @ (m.layer.weight.T * 2e6)  # too large


@pytest.mark.parametrize(
    ("forward", "problem", "line"),
    [
        (after_a_branch, "__bool__", "# the branch"),
        (behind_a_handler, "erfinv", "# tried"),
        (by_a_weight, "__bool__", "# asked"),
        (in_numpy, "numpy", "# left"),
        (of_large_weights, "may sum to 504", "# too large"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_is_refused_is_known_before_it_runs(forward, problem: str, line: str):
    """And the verdict is true: the secure module refuses as well."""
    model = Own(forward).requires_grad_(False)
    report = check_module(model, X, run=False, refuse=False)
    assert not report.supported and not report.passed and report.equal is None
    assert problem in report.problem and report.change.endswith(line) and "test_check_module.py" in report.change
    with pytest.raises(Exception, match=r"\w"):
        sectorch.secure(model, session=sectorch.Session())(X)
    with pytest.raises(ModuleFault, match="first line to change"):
        check_module(model, X)


def test_a_sound_module():
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2), nn.Softmax(1)).eval()
    report = check_module(model, X)
    assert report.passed and report.supported and report.equal and 0 < report.error < 1e-4 and not report.other_rows
    assert report.learned == ["a result of [3, 2]", "whether every value was in its range: one bit"]
    assert report.explained.online_bytes > 0 and report.ranges[0][1] < report.limit
    for said in ("supported", "rounds", "Q learns a result", "equal to sectorch.reference", "error"):
        assert said in str(report)


def test_another_number_of_rows_may_be_refused():
    model = Own(lambda m, x: torch.erfinv(x) if len(x) == 1 else m.layer(x))
    report = check_module(model, X)
    assert report.passed and list(report.other_rows) == [1] and "erfinv" in report.other_rows[1]
    assert "with 1 rows" in str(report)


def test_a_module_that_changes_is_said_to_be_judged_by_one_call():
    def forward(m, x):
        m.calls += 1
        return torch.erfinv(x) if m.calls > 9 else m.layer(x)

    model = Own(forward)
    report = check_module(model, X, rows=())
    assert (
        report.supported and "changes its own attributes" in report.alone and "another may do otherwise" in str(report)
    )
    assert model.calls == 0, "the module is left as it was"


def test_a_module_that_is_wrong_on_secrets_is_found():
    model = Own(lambda m, x: m.layer(x) * (2 if isinstance(x, sectorch.SharedTensor) else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ModuleFault, match=r"error 1.0e\+00 of the largest result") as raised:
            check_module(model, X)
    assert raised.value.report.supported and raised.value.report.equal


def test_values_beyond_the_range_are_withheld_and_named():
    report = check_module(Own(lambda m, x: torch.relu(m.layer(m.layer(m.layer(x * 30)))), 20.0), X.abs(), refuse=False)
    assert report.supported and not report.passed and "left the range" in report.problem
    assert report.ranges[0][1] > report.limit


def test_what_sends_too_much_is_not_run():
    report = check_module(nn.Conv2d(3, 8, 3).eval(), torch.randn(2, 3, 8, 8), megabytes=0.01)
    assert report.supported and "above megabytes=0.01" in report.not_run and report.error is None


@pytest.mark.parametrize(
    ("model", "example", "how", "said"),
    [
        (nn.Linear(4, 4).eval(), torch.randn(2, 5), {}, "itself does not take x"),
        (len, X, {}, "takes an nn.Module"),
        (nn.Linear(4, 4).eval(), X, {"tolerance": 0}, "are above 0"),
    ],
)
def test_checks_that_cannot_be_made(model, example, how: dict, said: str):
    with pytest.raises(ArgumentError, match=said):
        check_module(model, example, **how)


def test_a_module_in_training_mode_and_several_inputs():
    assert "training mode" in check_module(nn.Linear(4, 4), X, refuse=False).problem
    model = Own(lambda m, x: m.layer(x["a"]) + x["b"])
    assert check_module(model, sectorch.Inputs({"a": X, "b": sectorch.public(X)})).passed


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: x * (s.layer(x) > 0),
        lambda s, x: s.layer(x) > 0,
        lambda s, x: {"a": s.layer(x) > 0, "b": x.argmax(1)},
        lambda s, x: s.layer(x)[:0],
    ],
)
def test_results_and_values_that_are_no_floating_point_numbers(forward):
    report = check_module(Own(forward), X, refuse=False, rows=())
    assert not report.problem
