"""Every row of the op table, and PyTorch's own samples: a right gradient or a typed refusal, and never a wrong one.

`python tests/training/test_training_table.py` counts PyTorch's operators that support autograd, by three samples of
each: `--all` takes all (up to 1,000 of one), and `--double` those of float64.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_stage import outcome, wanting
from op_rows.base import Data, OpRow
from op_table import ROWS
from torch.utils import _pytree as pytree
from torch_samples import op_db

import sectorch
from sectorch import DifferentiableTensor, Scheme, Session
from sectorch.errors import RangeExceededError
from sectorch.tensor.table import SHARES, spell
from sectorch.testing.calls import FOREIGN, INVALID, OUT_OF_RANGE, REFUSED, RIGHT, WRONG, Call, CallOutcome
from sectorch.training.decompositions import NO_GRADIENT, NOTHING_TO_FOLLOW

NO_SLOPE = ("sqrt",)
"""Rows of which the table has a sample at a place without a slope: plain autograd gives infinity there."""


def calls(row: OpRow, few: bool) -> Iterator[tuple[Any, Call]]:
    """A row's samples, with a gradient for every tensor of floats that is not public."""
    keys = SHARES.rows[row.name].keys or SHARES.rows[row.name].in_place
    for key in keys[:1] if few else keys:
        for number, sample in row.samples_of(key)[: 2 if few else None]:
            count = itertools.count()

            def place(v: Any, number: int = number, count: Iterator[int] = count) -> Any:
                if not isinstance(v, Data):
                    return v
                plain = v.make(f"{row.name} {number} {next(count)}", False)
                return wanting(plain) if v.role != "public" else plain

            is_leaf = lambda v: isinstance(v, Data)
            args, kwargs = pytree.tree_map(place, (sample.args, sample.kwargs), is_leaf=is_leaf)
            yield key, Call(*args, **kwargs)


def went(key: Any, call: Call, session: Session, scheme: Scheme | None = None) -> CallOutcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of old names
        return outcome(key, call, session, scheme)


def offences(few: bool, scheme: Scheme | None = None) -> list[str]:
    """What contradicts the claims of `training/decompositions.py`."""
    session, found = Session(reference=True), []
    for name, row in ROWS.items():
        kinds = Counter()
        for key, call in calls(row, few):
            how = went(key, call, session, scheme)
            kinds[how.kind] += 1
            bad = how.kind in (WRONG, FOREIGN) or (how.kind == REFUSED and few and name not in NO_GRADIENT)
            bad |= how.kind == OUT_OF_RANGE and few and name not in NO_SLOPE
            if bad or (how.kind == REFUSED and "(at " not in how.text and name in NO_GRADIENT):
                found.append(f"{spell(key)}: {how.kind}: {how.text}")
            if few and kinds[RIGHT]:
                break
        if name in NO_GRADIENT or name in NOTHING_TO_FOLLOW:
            if kinds[RIGHT]:
                found.append(f"{name} has a gradient, though it is said to have none")
        elif few and not kinds[RIGHT] and name not in NEVER:
            found.append(f"{name}: no gradient was seen: {dict(kinds)}")
    return found


NEVER = ("copy", "detach", "fill", "irfftn", "to")
"""Rows whose samples of the op table torch does not follow: tests of steps have them."""


def test_every_row_has_its_gradient_or_says_that_it_has_none():
    assert set(NO_GRADIENT) | NOTHING_TO_FOLLOW <= set(ROWS)
    found = offences(few=True)
    assert not found, f"{len(found)}:\n" + "\n".join(found)


@pytest.mark.sectorch_long
@pytest.mark.parametrize("bits", [20, 16])
def test_no_sample_of_a_row_has_a_wrong_gradient(bits: int):
    found = offences(False, Scheme(frac_bits=bits))
    assert not found, f"{len(found)}:\n" + "\n".join(found)


def full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def survey(
    dtype: torch.dtype, few: int | None, operators: Sequence[Any] = op_db, shown: bool = False
) -> dict[str, tuple[Counter, list[str]]]:
    """Counts of what happens to the samples of PyTorch's operators that support autograd, and what is wrong."""
    found: dict[str, tuple[Counter, list[str]]] = {}
    for info in operators:
        session = Session(reference=True)
        if not info.supports_autograd or dtype not in info.dtypes:
            continue
        torch.manual_seed(0)
        counts, texts = Counter(), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=True), few or 1000))
        for number, sample in enumerate(samples):
            drawn = "dropout" in info.name or sample.kwargs.get("dropout_p") or (info.name == "bernoulli")
            how = (
                CallOutcome(INVALID)
                if drawn
                else went(info.op, Call(sample.input, *sample.args, **sample.kwargs), session)
            )
            counts[how.kind] += 1
            if how.kind in (WRONG, FOREIGN):
                texts.append(f"{full_name(info)}, sample {number}: {how.kind}: {how.text}")
        found[full_name(info)] = counts, texts
        if shown:
            print(f"{len(found)} {full_name(info)}: {dict(counts)}", file=sys.stderr, flush=True)
    return found


def test_no_sample_of_pytorchs_has_a_wrong_gradient():
    wrong = [text for _, texts in survey(torch.float32, 1, op_db[::2]).values() for text in texts]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


WRITTEN_OUT = (
    "_segment_reduce.lengths",
    "_segment_reduce.offsets",
    "cholesky_inverse",
    "digamma",
    "fft.hfft",
    "fft.hfft2",
    "fft.hfftn",
    "fft.irfft",
    "fft.irfft2",
    "fft.irfftn",
    "lgamma",
    "linalg.cholesky",
    "linalg.cholesky_ex",
    "linalg.householder_product",
    "linalg.lu_solve",
    "linalg.solve_ex",
    "linalg.tensorsolve",
    "logdet",
    "lu_solve",
    "lu_unpack",
    "mvlgamma.mvlgamma_p_3",
    "nn.functional.ctc_loss",
    "nn.functional.embedding_bag",
    "nn.functional.gaussian_nll_loss",
    "nn.functional.max_unpool1d",
    "nn.functional.max_unpool2d",
    "nn.functional.max_unpool3d",
    "nn.functional.multilabel_margin_loss",
    "ormqr",
    "sinc",
    "special.erfcx",
    "special.log_ndtr",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
)
"""Operators with a kernel of torch's own, which `training/decompositions.py` writes as other functions."""


def test_functions_that_are_written_as_others_have_their_gradients():
    found = survey(torch.float32, 3, [info for info in op_db if full_name(info) in WRITTEN_OUT])
    assert set(found) == set(WRITTEN_OUT)
    for name, (counts, texts) in found.items():
        assert counts[RIGHT] and not texts, f"{name}: {dict(counts)} {texts}"


def test_values_out_of_the_domain_withhold_a_result():
    """Of a determinant below zero, a matrix that is not positive definite, and a variance below zero."""
    negative = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for f, given in (
        (torch.logdet, negative), (torch.linalg.cholesky, negative),
        (lambda v: F.gaussian_nll_loss(torch.zeros(2), torch.zeros(2), v), torch.tensor([1.0, -0.5])),
    ):  # fmt: skip
        x = DifferentiableTensor(sectorch.share(given, session=Session(reference=True)), requires_grad=True)
        with pytest.raises(RangeExceededError):
            f(x).reveal()


@pytest.mark.sectorch_long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_none_of_all_samples_of_pytorchs_has_a_wrong_gradient(dtype: torch.dtype):
    wrong = [text for _, texts in survey(dtype, None).values() for text in texts]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dtype = torch.float64 if "--double" in sys.argv else torch.float32
    found = survey(dtype, None if "--all" in sys.argv else 3, shown=True)
    of = {kind: [name for name, (counts, _) in found.items() if counts[kind]] for kind in (RIGHT, WRONG, FOREIGN)}
    wrong = set(of[WRONG]) | set(of[FOREIGN])
    nothing = [name for name, (counts, _) in found.items() if set(counts) <= {INVALID}]
    refused = [n for n in found if n not in of[RIGHT] and n not in nothing and n not in wrong]
    print(f"{len(found)} operators: right {len(set(of[RIGHT]) - wrong)}, refused {len(refused)}, wrong {len(wrong)}, "
          f"nothing to follow or drawn {len(nothing)}")  # fmt: skip
    total = sum((counts for counts, _ in found.values()), Counter())
    print("samples:", dict(total))
    print("refused:", ", ".join(refused))
    print(*(text for _, texts in found.values() for text in texts), sep="\n")
