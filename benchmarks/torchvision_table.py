"""All torchvision classifiers: CPU seconds plain and secure, bytes, error, or the reason of refusal; one process each.

    python benchmarks/torchvision_table.py                  # all; results in benchmarks/results/torchvision.json
    python benchmarks/torchvision_table.py resnet18 swin_t  # some, measured anew
    python benchmarks/torchvision_table.py --write          # docs/torchvision.md from the results

Every architecture runs at the input size of its first weights (where its constructor takes another, at that) with
random weights, BatchNorm statistics that are random too (or of a random batch, see `LARGEST`), and one image, with the
scheme's activation limit, or the power of two that the largest output of a layer needs. A model that needs more memory
than the limit is stopped and listed with that as the reason. Seconds are of processor time on one thread, which other
work on the machine disturbs little: the table takes two hours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch import Scheme
from sectorch.config import limit_bits_of
from sectorch.errors import FixedPointRangeError, SectorchError
from sectorch.nn.models import randomize_batchnorm

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "torchvision.json"
PAGE = HERE.parent / "docs" / "torchvision.md"
OPTIONS = {"googlenet": {"init_weights": False, "aux_logits": False}, "inception_v3": {"aux_logits": False}}
COLUMNS = (
    "model", "input", "parameters, M", "f", "limit", "plain s", "secure s", "times", "MB", "online MB", "once MB",
    "rounds", "error", "memory GB",
)  # fmt: skip
LARGEST = 2.0**15
"""Random statistics let the signal of very deep networks grow past the number format, up to 1e14. From here on a
network gets the statistics of a random batch in their place, and 24 fraction bits: its signal stays below a hundred,
and it carries an error on from layer to layer."""
AGAIN = 60.0
"""CPU seconds under which the second call is measured, without the setup of the first."""
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
"""glibc then gives tensors of 4 MiB and more back when they are freed; it keeps pieces of up to 32 MiB otherwise."""
SQUARE = {"vit_h_14": 224}
"""Constructed for this size, where the weights were trained at another."""


def names() -> list[str]:
    """All classifiers, the smallest first."""
    found = torchvision.models.list_models(module=torchvision.models)
    return sorted(found, key=lambda n: next(iter(torchvision.models.get_model_weights(n))).meta["num_params"])


def ways(name: str, most: int | None) -> Iterator[tuple[nn.Module, torch.Tensor, dict]]:
    """The model, an image, and what `secure` is told (fraction bits and activation limit), until the weights fit."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, **OPTIONS.get(name, {})).eval().requires_grad_(False)
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    for p in model.parameters():
        if p.dim() > 1 and not p.any():
            nn.init.normal_(p, std=0.02)
    weights = next(iter(torchvision.models.get_model_weights(name)))
    size = min(SQUARE.get(name, weights.transforms().crop_size[0]), most or 4096)
    x = torch.randn(1, 3, size, size)
    if (largest := reaches(model, x)) < LARGEST:
        yield model, x, {"frac_bits": 20, "activation_limit": max(Scheme(20).activation_limit, above(largest))}
    estimate_statistics(model, torch.randn(4, 3, size, size))
    for frac_bits in (24, 23, 22, 20):
        yield model, x, {"frac_bits": frac_bits, "activation_limit": above(reaches(model, x))}


def above(size: float) -> float:
    """The power of two from a fifth above it on."""
    return 2.0 ** math.ceil(math.log2(1.2 * size))


@torch.no_grad()
def reaches(model: nn.Module, x: torch.Tensor) -> float:
    """The largest magnitude of any layer's output."""
    found = [0.0]
    tensors = lambda y: [v for v in pytree.tree_leaves(y) if isinstance(v, torch.Tensor) and v.numel()]
    note = lambda _module, _inputs, y: found.extend(float(v.abs().max()) for v in tensors(y))
    hooks = [m.register_forward_hook(note) for m in model.modules() if not any(m.children())]
    model(x)
    for hook in hooks:
        hook.remove()
    return max(found)


@torch.no_grad()
def estimate_statistics(model: nn.Module, batch: torch.Tensor) -> None:
    """BatchNorm statistics of a batch, as training has them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    model.train()(batch)
    model.eval()


def measure(name: str, most: int | None) -> dict:
    """Seconds, bytes and error of one model; the reason where it is refused."""
    for model, x, told in ways(name, most):
        try:
            return measured(model, x, told)
        except FixedPointRangeError as error:
            row = {"refused": f"{type(error).__name__}: {error}"}
        except SectorchError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    return row


def measured(model: nn.Module, x: torch.Tensor, told: dict) -> dict:
    row = {
        **told,
        "input": "x".join(map(str, x.shape[1:])),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    expected = model(x)
    start = time.process_time()
    model(x)
    row["plain_s"] = time.process_time() - start
    scheme = Scheme(told["frac_bits"], limit_bits=limit_bits_of(told["activation_limit"]))
    secured = sectorch.secure(model, scheme, session=sectorch.Session())
    start = time.process_time()
    with sectorch.profile() as first:
        y = secured(x)
    seconds = time.process_time() - start
    row["setup_bytes"] = first.bytes
    if seconds < AGAIN:
        start = time.process_time()
        with sectorch.profile() as first:
            y = secured(x)
        seconds = time.process_time() - start
    row |= {
        "secure_s": seconds, "bytes": first.bytes, "online_bytes": first.online_bytes, "rounds": first.rounds,
        "error": float((y - expected).abs().max() / expected.abs().max()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    row["setup_bytes"] -= row["bytes"]
    return row if math.isfinite(row["error"]) else row | {"refused": "the plain result is not finite"}


def limited(name: str, gigabytes: float, seconds: float, most: int | None) -> dict:
    """`measure` in a process of its own."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)

    command = [sys.executable, __file__, "--one", name, *([] if most is None else ["--size", str(most)])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, preexec_fn=limit, check=False,
            env=os.environ | MEMORY,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"refused": f"not finished after {seconds:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        scarce = "memory" in last.lower() or done.returncode == -signal.SIGKILL
        return {"refused": f"needs more memory than {gigabytes:g} GiB" if scarce else last}
    return json.loads(done.stdout.splitlines()[-1])


def page(rows: dict[str, dict], note: str) -> str:
    """The table as a page of the documentation, with a note on how it was measured."""
    ran = [r for r in rows.values() if "refused" not in r]
    lines = [
        "# Torchvision's classifiers",
        "",
        f"{len(rows)} of the {len(names())} classifiers of `torchvision.models`: one image, random weights and",
        "BatchNorm statistics, all parties on one machine of 24 GiB."
        + (f" {len(rows) - len(ran)} are refused, {len(ran)} run." if len(ran) < len(rows) else " All of them run."),
        "The error is the largest difference of a logit over the largest logit. Masked weights cross once a session",
        "(`once`). Made by `python benchmarks/torchvision_table.py`; processor seconds on one thread, of the",
        "second call if the first took under a minute, all three parties' work one after another.",
        *([note] if note else []),
        "",
        "f are the fraction bits; an activation beyond the limit is an error and no result (the scheme's own, or a",
        "power of two that the largest output needs). With random BatchNorm statistics the signal of some very deep",
        "networks grows beyond the number format (to 1e8 in ResNet-101, to 1e14 in Inception v3): those rows have the",
        "statistics of a random batch, and up to 24 bits as their weights allow: the signal then stays below a hundred",
        "and carries errors on from layer to layer. An input that is smaller than the weights' own is for the time",
        "that the larger one takes (`--size`).",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|" + "--:|" * (len(COLUMNS) - 2),
    ]
    for name, r in sorted(rows.items()):
        if "refused" in r:
            lines.append(f"| {name} | {r.get('input', '')} | refused: {r['refused']} ||||||||||||")
            continue
        cells = (
            name, r["input"], f"{r['parameters'] / 1e6:.1f}", r["frac_bits"],
            f"{r['activation_limit']:.0f}", f"{r['plain_s']:.3f}",
            f"{r['secure_s']:.2f}", f"{r['secure_s'] / r['plain_s']:.0f}", f"{r['bytes'] / 1e6:.0f}",
            f"{r['online_bytes'] / 1e6:.0f}", f"{r['setup_bytes'] / 1e6:.0f}", r["rounds"], f"{r['error']:.1e}",
            f"{r['peak_bytes'] / 1e9:.1f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--one", help="measure this model in this process and print a JSON line")
    parser.add_argument("--missing", action="store_true", help="only those that the results lack")
    parser.add_argument("--write", action="store_true", help="write the page from the results and stop")
    parser.add_argument("--note", default="", help="with --write: a sentence on how the rows were measured")
    parser.add_argument("--size", type=int, help="pixels of a side at most, for models whose images take long")
    parser.add_argument("--memory", type=float, default=20.0, help="limit in GiB for one model")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit for one model")
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(options.one, options.size)))
        return
    RESULTS.parent.mkdir(exist_ok=True)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.write:
        wanted = [n for n in options.models or names() if not (options.missing and "error" in rows.get(n, {}))]
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns) as progress:
            task = progress.add_task("", total=len(wanted))
            for name in wanted:
                progress.update(task, description=name)
                rows[name] = limited(name, options.memory, options.seconds, options.size)
                RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
                progress.console.print(name, rows[name].get("refused") or f"{rows[name]['secure_s']:.2f} s")
                progress.advance(task)
    PAGE.write_text(page(rows, options.note))


if __name__ == "__main__":
    main()
