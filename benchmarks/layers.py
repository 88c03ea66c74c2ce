"""What the layers of ResNet-50 and BERT-base cost: processor seconds, bytes and rounds, for docs/benchmarks.md.

    python benchmarks/layers.py                 # benchmarks/results/layers.json
    python benchmarks/layers.py resnet50

ResNet-50 is that of `headline.py`. Of BERT-base's twelve layers, which cost the same, one is computed, on 128 tokens
with a secret mask. All parties compute in this process, layer by layer; a first call masks the weights, and of three
more the fastest counts for each part. Seconds are the processor's, of all parties together.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from headline import about, build
from torch import fx, nn
from transformers import BertConfig, BertModel

import sectorch
from sectorch.choreography import Phase
from sectorch.nn.dry_run import shared_inputs
from sectorch.nn.graph import run
from sectorch.nn.inputs import Inputs

RESULTS = Path(__file__).parent / "results" / "layers.json"
PARTS = {
    "resnet50": {
        r"layer(\d)\.(\d)": r"block \1.\2", r"fc|avgpool|flatten": "pool, linear", r"conv1|bn1|relu|maxpool": "stem",
    },
    "bert-base": {
        r"embeddings\.": "embeddings", r"attention\.self": "query, key, value", "scaled_dot_product": "attention",
        r"attention\.output\.dense": "attention's output", "LayerNorm": "two LayerNorms",
        "intermediate": "first linear layer", "gelu": "GELU", r"output\.dense": "second linear layer",
        "pooler": "pooler",
    },
}  # fmt: skip
"""Patterns of layers' names and what the picture calls them; the first that is found counts."""


def one_layer() -> tuple[nn.Module, tuple, dict[str, torch.Tensor]]:
    """BERT-base with one layer, and what it is called with."""
    ids = torch.randint(0, 30522, (1, 128))
    return (
        BertModel(BertConfig(num_hidden_layers=1)).eval(),
        (),
        {"input_ids": ids, "attention_mask": ids.ge(100).long()},
    )


def measured(name: str) -> dict[str, dict[str, float]]:
    """Seconds, bytes of both phases and rounds by part, of one call."""
    torch.manual_seed(0)
    model, arguments, options = build(name) if name == "resnet50" else one_layer()
    secured = sectorch.secure(model)
    inputs = secured.inputs_of(Inputs(*arguments, **options))
    found: dict[str, dict[str, float]] = {}
    deepest = 0

    def count(part: str, profile: sectorch.Profile, seconds: float) -> None:
        nonlocal deepest
        reached = max(deepest, *(line.round for line in profile.ledger if line.phase == Phase.ONLINE), 0)
        row = found.setdefault(part, dict.fromkeys(("seconds", "offline", "online", "rounds"), 0.0))
        row["seconds"] += seconds
        row["offline"] += profile.offline_bytes - profile.setup_bytes
        row["online"] += profile.online_bytes
        row["rounds"] += reached - deepest
        deepest = reached

    def step(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        begun = time.process_time()
        with sectorch.profile() as profile:
            y = compute(*args, **kwargs)
        where = node.meta.get("where")
        said = (where.layer if where else "") or node.name
        part = next((re.sub(f".*?{p}.*", to, said) for p, to in PARTS[name].items() if re.search(p, said)), "additions")
        count(part, profile, time.process_time() - begun)
        return y

    fastest: dict[str, float] = {}
    for call in range(4):
        found.clear()
        deepest = 0
        with torch.no_grad(), secured.session.call(secured.party):
            shared = shared_inputs(inputs, secured.session, secured.scheme, secured.party)
            _, weights = secured.bind(secured.session, secured.party)
            program = secured.program(inputs)
            run(program, weights.of(program), shared.tensors, step=step)
        if call:
            fastest = {part: min(row["seconds"], fastest.get(part, row["seconds"])) for part, row in found.items()}
    return {part: {**row, "seconds": fastest[part]} for part, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(PARTS), metavar="MODEL", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json.is_file() else {"rows": {}}
    for name in options.models:
        kept["rows"][name] = measured(name)
        for part, row in kept["rows"][name].items():
            print(f"{name}: {part}: {row}")
    kept["about"] = about()
    options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
