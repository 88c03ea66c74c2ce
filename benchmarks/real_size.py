"""Transformers of real size, unmodified: error, seconds, bytes, rounds and memory, one process a model.

    python benchmarks/real_size.py                  # BERT-base, GPT-2 small, ViT-S; benchmarks/results/real_size.json
    python benchmarks/real_size.py vit-s --repeats 3

BERT-base reads 128 tokens, of which 28 are padding (secret), GPT-2 small 64 tokens, ViT-S an image of 224 x 224. The
weights are random and of trained-like size (`huggingface.drawn`). 'error' is the largest difference over the largest
magnitude of the plain float32 result. 'first s' has tracing and the masking of the weights in it, 'second s' the
offline phase, 'online s' is a call from prepared material. Seconds are of the clock, on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface import drawn
from huggingface_models import Case
from rich.console import Console
from rich.table import Table

import sectorch

RESULTS = Path(__file__).parent / "results" / "real_size.json"


def bert() -> dict[str, Any]:
    mask = torch.ones(1, 128, dtype=torch.int64)
    mask[:, 100:] = 0
    return {"input_ids": torch.randint(5, 30000, (1, 128)), "attention_mask": mask}


VIT_S = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000}
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
"""glibc then gives tensors of 4 MiB and more back when they are freed; it keeps pieces of up to 32 MiB otherwise."""
CASES = {
    "bert-base": Case("encoder", "BertModel", "BertConfig", {}, bert),
    "gpt2-small": Case(
        "decoder", "GPT2LMHeadModel", "GPT2Config", {}, lambda: {"input_ids": torch.randint(0, 50257, (1, 64))}
    ),
    "vit-s": Case(
        "vision", "ViTForImageClassification", "ViTConfig", VIT_S, lambda: {"pixel_values": torch.randn(1, 3, 224, 224)}
    ),
}  # fmt: skip


def measured(name: str, repeats: int) -> dict[str, Any]:
    """One model in this process."""
    case = CASES[name]
    torch.manual_seed(0)
    model, given = case.build(), case.inputs()
    drawn(model, case)
    with torch.no_grad():
        expected = model(**given)[0]
        plain = median(lambda: model(**given), repeats)
    secured = sectorch.secure(model)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    start = time.perf_counter()
    found = secured(**given)[0]
    first = time.perf_counter() - start
    with sectorch.profile() as spent:
        second = median(lambda: secured(**given), 1)
    more = [median(lambda: secured(**given), 1) for _ in range(repeats - 1)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    held = secured.preprocess(sectorch.Inputs(**given))
    online = median(lambda: secured(**given), 1)
    return {
        "parameters_m": size, "error": float((found - expected).abs().max() / expected.abs().max()),
        "largest": float(expected.abs().max()), "plain_s": plain, "first_s": first,
        "second_s": statistics.median([second, *more]), "online_s": online, "mb": spent.bytes / 1e6,
        "online_mb": spent.online_bytes / 1e6, "rounds": spent.rounds, "peak_gb": peak, "material_gb": held / 1e9,
        "peak_prepared_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }  # fmt: skip


def median(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of the clock."""
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--here", action="store_true", help="one model, in this process; prints its row as JSON")
    options = parser.parse_args()
    unknown = set(options.names) - set(CASES)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    warnings.simplefilter("ignore")
    if options.here:
        print(json.dumps(measured(options.names[0], options.repeats)))
        return
    rows = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in options.names or CASES:
        command = [sys.executable, __file__, name, "--here", "--repeats", str(options.repeats)]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | MEMORY).stdout
        rows[name] = json.loads(out.splitlines()[-1])
        options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    table = Table(title="transformers of real size")
    heads = list(next(iter(rows.values())))
    for head in ("model", *heads):
        table.add_column(head.replace("_", " "), justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[head]:.3g}" for head in heads))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
