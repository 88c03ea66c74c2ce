"""On a CUDA device: plain and secure seconds of a model with all parties on the device, and its bits against the CPU's.

    python benchmarks/gpu.py                                   # VGG-7, ResNet-50 and BERT-base
    python benchmarks/gpu.py vgg7 --batches 1 32 --repeats 7
    python benchmarks/gpu.py resnet50 --profile                # where the time goes, on the device and before it
    python benchmarks/gpu.py --json results.json

Plain and secure calls alternate, and medians are printed; the device is waited for before each look at the clock.
'stepwise' is a secure call whose steps are taken one by one, as the first two are; 'ahead' is the offline phase (one
call's material), 'online' a call from it (none of the three with `--whole`), 'cpu' a whole secure call of the same
machine's processor (`--cpu`). 'same': whether all results of the device, the timed ones among them, have the bits of
`sectorch.reference` on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sectorch
from sectorch.nn.models import ZOO, randomize_batchnorm

NETS = ("vgg7", "resnet50", "bert-base")


def built(name: str, batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor] | torch.Tensor]:
    """A model in evaluation mode and an input for it."""
    torch.manual_seed(0)
    if name == "bert-base":
        from real_size import CASES, drawn

        case = CASES[name]
        model, given = case.build(), case.inputs()
        drawn(model, case)
        return model, given
    if name in ZOO:
        construct, shape = ZOO[name]
        model = construct().eval()
        randomize_batchnorm(model, torch.Generator().manual_seed(0))
        return model, torch.randn(batch, *shape)
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0  # as many statistics as it takes for activations of the usual size
    with torch.no_grad():
        model(torch.randn(8, 3, 224, 224))
    return model.eval(), torch.randn(batch, 3, 224, 224)


def first(result: Any) -> torch.Tensor:
    """The tensor of a result, the first one of several."""
    return result if isinstance(result, torch.Tensor) else result[0]


def moved(given: dict[str, torch.Tensor] | torch.Tensor, device: str) -> dict[str, torch.Tensor] | torch.Tensor:
    return given.to(device) if isinstance(given, torch.Tensor) else {n: v.to(device) for n, v in given.items()}


def called(model: Callable[..., Any], given: dict[str, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    return first(model(given) if isinstance(given, torch.Tensor) else model(**given))


def seconds(work: Callable[[], Any]) -> float:
    """Of the clock, until the device is done."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


WARM = 3
"""Calls before anything is timed: the third is the one that records (`choreography/run/cuda_graphs.py`)."""


def ahead(secured: Any, given: dict[str, torch.Tensor] | torch.Tensor) -> None:
    secured.preprocess(given if isinstance(given, torch.Tensor) else sectorch.Inputs(**given))


def stepwise(secured: Any, work: Callable[[], Any]) -> None:
    """Do it without what is recorded."""
    runtime = secured.session.runtime
    kept, runtime.graphs = runtime.graphs, None
    try:
        work()
    finally:
        runtime.graphs = kept


def measured(name: str, batch: int, repeats: int, device: str, on_cpu: bool, whole: bool) -> dict[str, Any]:
    """One model and batch."""
    model, given = built(name, batch)
    expected = called(sectorch.reference(model), given)
    cpu = None
    if on_cpu:
        here = sectorch.secure(model)
        called(here, given)
        cpu = statistics.median(seconds(lambda: called(here, given)) for _ in range(3))
    model, given = model.to(device), moved(given, device)
    secured = sectorch.secure(model)
    with torch.no_grad():
        plain_result = called(model, given)
        setup = seconds(lambda: called(secured, given))
        with sectorch.profile() as spent:
            found = called(secured, given)
        results = [found]
        secure = lambda: results.append(called(secured, given))
        works: dict[str, Callable[[], Any]] = {
            "plain": lambda: called(model, given), "secure": secure, "stepwise": lambda: stepwise(secured, secure),
            "ahead": lambda: ahead(secured, given), "online": secure,
        }  # fmt: skip
        works = {n: work for n, work in works.items() if not whole or n in ("plain", "secure")}
        for _ in range(WARM):
            for name_of in [n for n in works if n != "stepwise"]:
                works[name_of]()
        took: dict[str, list[float]] = {n: [] for n in works}
        for _ in range(repeats):
            for name_of, work in works.items():
                took[name_of].append(seconds(work))
    return {
        "net": name, "batch": batch, "setup_s": setup,
        **{f"{n}_s": statistics.median(v) for n, v in took.items()},
        "spread": max(took["secure"]) / min(took["secure"]), "cpu_s": cpu,
        "error": float((found - plain_result).abs().max() / plain_result.abs().max()),
        "mb": spent.bytes / 1e6, "rounds": spent.rounds, "same": all(torch.equal(y.cpu(), expected) for y in results),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
    }  # fmt: skip


def profiled(name: str, batch: int, device: str) -> None:
    """torch's profiler over one call, by time on the device and by time of the processor."""
    from torch.profiler import ProfilerActivity, profile

    model, given = built(name, batch)
    secured, given = sectorch.secure(model.to(device)), moved(given, device)
    for _ in range(WARM):
        called(secured, given)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as found:
        called(secured, given)
        wait()
    for key in (["self_cuda_time_total"] if device == "cuda" else []) + ["self_cpu_time_total"]:
        print(found.key_averages().table(sort_by=key, row_limit=18, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "nets", nargs="*", metavar="NET", help=f"{', '.join(NETS)}, another of the zoo or torchvision's"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cpu", action="store_true", help="time the processor of this machine too")
    parser.add_argument("--whole", action="store_true", help="time plain and whole secure calls only")
    parser.add_argument("--profile", action="store_true", help="torch's profiler instead of the clock")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu shows what would run")
    pairs = [(n, b) for n in options.nets or NETS for b in options.batches]
    torch.backends.cudnn.allow_tf32 = False  # or the plain model's own products have ten bits
    if options.profile:
        for name, batch in pairs:
            profiled(name, batch, options.device)
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    rows = []
    for name, batch in pairs:
        rows.append(measured(name, batch, options.repeats, options.device, options.cpu, options.whole))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=1))
    table = Table(title=f"{where}, torch {torch.__version__}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "net" else "right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
