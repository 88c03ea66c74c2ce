"""What the first call of a secure module takes beside a later one: seconds, memory, and the look at its precision.

    python benchmarks/first_call.py                       # all nets; a process each
    python benchmarks/first_call.py lstm wav2vec2 --json FILE
    python benchmarks/first_call.py resnet18 --strict     # the look at every operation

Seconds are of the processor, on one thread, all parties in one process; "look" is the part of the first call that the
owner's look at the precision of its weights takes. GB is the largest memory of the process, with the plain
model in float32. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Both(nn.Module):
    """An LSTM of two layers in both directions, and a linear layer on its last step."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(16, 32, 2, bidirectional=True, batch_first=True), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "lstm":
        return Both().eval(), torch.randn(1, 200, 16)
    if name == "wav2vec2":
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        return Wav2Vec2Model(Wav2Vec2Config()).eval(), torch.randn(1, 16000)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval(), torch.randn(1, 64, 768)
    if name == "resnet18":
        import torchvision

        return torchvision.models.resnet18().eval(), torch.randn(1, 3, 64, 64)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval(), torch.randn(4, 64)


NETS = ("mlp", "resnet18", "encoder", "lstm", "wav2vec2")


def measure(name: str, strict: bool) -> dict[str, Any]:
    import sectorch
    from sectorch.nn import module

    torch.set_num_threads(1)
    model, x = build(name)
    looking, look = [], module.find_precision_loss

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return look(*args, **kwargs)
        finally:
            looking.append(time.process_time() - start)

    module.find_precision_loss = timed
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sectorch.errors.PrecisionWarning)
        secure = sectorch.secure(model, strict=strict)
        for _ in range(4):
            start = time.process_time()
            with sectorch.profile() as profile:
                secure(x)
            calls.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    row = {
        "first_s": calls[0],
        "later_s": sorted(calls[1:])[1],
        "look_s": sum(looking),
        "share": sum(looking) / calls[0],
    }
    return row | {"rounds": profile.rounds, "gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(NETS)}; all unless named")
    parser.add_argument("--strict", action="store_true", help="secure(model, strict=True)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.strict)))
        return
    unknown = [name for name in options.nets if name not in NETS]
    if unknown:
        parser.error(f"no net is called {unknown[0]!r}; there are: {', '.join(NETS)}")
    rows = {}
    for name in options.nets or NETS:
        command = [sys.executable, __file__, "--one", name, *(["--strict"] if options.strict else [])]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        rows[name] = row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name}: first {row['first_s']:.2f} s, look {row['share']:.1%}, later {row['later_s']:.3f} s, "
            f"{row['rounds']} rounds, {row['gb']:.2f} GB",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
