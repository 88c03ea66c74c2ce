"""Models of `transformers`, unmodified: error, processor seconds, bytes and rounds of each, or the reason of refusal.

    python benchmarks/huggingface.py                    # all that the results lack; benchmarks/results/huggingface.json
    python benchmarks/huggingface.py --only BertModel   # one, measured anew
    python benchmarks/huggingface.py --list             # their names

Each model has a small configuration (two layers of width 32, mostly) and random weights of the size that training gives
them, see `drawn`; it is called with what a tokenizer or an image processor gives: text has real padding, and its mask
is secret unless the row says otherwise. The results are the rows of docs/huggingface.md: run docs/generate.py after it.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_models import CASES, Case
from rich.console import Console
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import SectorchError

RESULTS = Path(__file__).parent / "results" / "huggingface.json"
WRONG = 1e-3
"""From this relative error on a result counts as wrong."""
BATCHES = 16


class Late(BaseException):
    """The time limit; no handler of errors takes it for one."""


@torch.no_grad()
def drawn(model: nn.Module, case: Case) -> None:
    """Weights of the size that training gives them: the constructors' own let a signal fade to 1e-6 in a few layers.

    A linear layer keeps the size of its input (a deviation of 1 / sqrt(fan_in)), an embedding has entries about 1, a
    vector (of a norm, a bias) lies about where its constructor put it, and batch norms have the statistics of batches.
    """
    layers = {id(p): layer for layer in model.modules() for p in layer.parameters(recurse=False)}
    for p in model.parameters():
        layer, noise = layers[id(p)], torch.randn(p.shape)
        if isinstance(layer, nn.Embedding):
            p.copy_(noise)
        elif p.dim() < 2:
            p.add_(0.1 * noise)
        elif isinstance(layer, transformers.pytorch_utils.Conv1D):
            p.copy_(noise / p.shape[0] ** 0.5)
        elif type(layer).__module__.startswith("torch.nn"):
            p.copy_(noise / p[0].numel() ** 0.5)
        else:
            p.add_(noise / p.shape[-1] ** 0.5)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    if norms:
        draws = [case.inputs() for _ in range(BATCHES)]
        model(**{name: torch.cat([draw[name] for draw in draws]) for name in draws[0]})
        model.eval()


def plain(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the plain model."""
    return {name: getattr(x, "value", x) for name, x in inputs.items()}


def numbers(result: Any) -> list[torch.Tensor]:
    """The tensors of a result; a model's own containers are trees."""
    return [leaf.double() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def relative_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference over the largest magnitude, of all tensors together, where the plain one is finite."""
    if [x.shape for x in got] != [x.shape for x in expected]:
        return float("inf")
    pairs = [(a[b.isfinite()], b[b.isfinite()]) for a, b in zip(got, expected, strict=True)]
    apart = max(float((a - b).abs().max()) for a, b in pairs if b.numel())
    return apart / largest(expected)


def largest(values: list[torch.Tensor]) -> float:
    return max(float(x[x.isfinite()].abs().max()) for x in values if x.isfinite().any())


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(max(1, round(seconds)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(case: Case, limit: float) -> dict[str, Any]:
    """One row; what stands under "defect" is wrong, or refused by an error that is not the library's own."""
    row: dict[str, Any] = {"kind": case.kind}
    torch.manual_seed(0)
    try:
        model = case.build()
        drawn(model, case)
        inputs = case.inputs()
        start = time.process_time()
        with torch.no_grad():
            expected = numbers(model(**plain(inputs)))
        row |= {"plain_s": time.process_time() - start, "largest": largest(expected)}
    except Exception as error:
        return row | {"plain": text_of(error)}
    try:
        with within(limit):
            return row | secure(model, inputs, expected)
    except SectorchError as error:
        return row | {"refused": text_of(error)}
    except Exception as error:
        return row | {"defect": text_of(error)}
    except Late:
        return row | {"refused": f"not finished after {limit:.0f} s"}


def text_of(error: Exception) -> str:
    """Its kind and words; files by their path inside the packages."""
    inside = re.sub(r"/\S*/(?=(?:transformers|timm|torch|sectorch)/)", "", str(error))
    return f"{type(error).__name__}: {inside}"


def secure(model: nn.Module, inputs: dict[str, Any], expected: list[torch.Tensor]) -> dict[str, Any]:
    """Two calls: the first one traces the model and sends its masked weights."""
    secured = sectorch.secure(model, session=sectorch.Session())
    start = time.process_time()
    secured(**inputs)
    first = time.process_time() - start
    start = time.process_time()
    with sectorch.profile() as spent:
        result = numbers(secured(**inputs))
    row = {
        "first_s": first, "second_s": time.process_time() - start, "bytes": spent.bytes,
        "online_bytes": spent.online_bytes, "rounds": spent.rounds, "error": relative_error(result, expected),
        "alone": secured.graphs.eager_reason,
    }  # fmt: skip
    return row if row["error"] <= WRONG else row | {"defect": f"a relative error of {row['error']:.1e}"}


def said(row: dict[str, Any]) -> str:
    for how in ("plain", "defect", "refused"):
        if how in row:
            return f"{how}: {row[how]}"
    how = f"; operation by operation: {row['alone']}" if row["alone"] else ""
    return f"error {row['error']:.1e}, {row['first_s']:.1f} s, {row['second_s']:.1f} s, {row['rounds']} rounds{how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these anew")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for one model")
    parser.add_argument("--json", type=Path, default=RESULTS, help="rows by name; what is there is not measured again")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    if unknown := set(options.only or ()) - set(CASES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; see --list")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console, rows = Console(), json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in options.only or [name for name in CASES if name not in rows]:
        rows[name] = measure(CASES[name], options.seconds)
        console.print(f"{name:40}", said(rows[name]), soft_wrap=True, markup=False, highlight=False)
        options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
