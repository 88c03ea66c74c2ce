"""Models as three processes over TLS on this machine, beside the same call in one process: equal to the bit.

    python benchmarks/processes.py                    # all that the results lack; benchmarks/results/processes.json
    python benchmarks/processes.py --only BertModel   # one, measured anew

Models of `transformers` as in benchmarks/huggingface.py (small, of random weights, with real padding), networks of timm
as in benchmarks/timm_table.py (`pip install timm`), and plain ones of torch. Each is saved as a model file and answered
by `sectorch answer` in a process of its own, through a `sectorch server` in another; this process asks, twice: the
first question sends the masked weights. The results are the rows of a table in docs/huggingface.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface import drawn
from huggingface_models import CASES
from rich.console import Console
from timm_table import built
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import SectorchError
from sectorch.network import save_model
from sectorch.nn.models import ZOO, randomize_batchnorm
from sectorch.testing.local_network import START, Stage

RESULTS = Path(__file__).parent / "results" / "processes.json"
FAMILIES = (
    "BertModel", "RobertaModel", "DistilBertModel", "ElectraModel", "AlbertModel", "DebertaV2Model", "RoCBertModel",
    "MarkupLMModel", "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
    "HeliumForCausalLM", "Exaone4ForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration", "ViTForImageClassification", "DeiTForImageClassification",
    "SwinForImageClassification", "ConvNextForImageClassification", "ResNetForImageClassification",
    "SegformerForImageClassification", "Wav2Vec2ForCTC", "PatchTSTForPrediction", "CLIPModel", "LiltModel",
)  # fmt: skip
NETWORKS = ("test_resnet", "test_vit", "test_convnext", "mobilenetv3_small_050", "levit_128s")
"""Of timm."""
Made = tuple[nn.Module, sectorch.Inputs]


class Tagger(nn.Module):
    """An LSTM on token ids, with lengths as a mask, and a dictionary as its result."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(50, 16), nn.LSTM(16, 12, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(24, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        y, _ = self.rnn(self.words(ids) * mask[..., None])
        return {"tags": self.tags(y), "last": y[:, -1]}


def of_zoo(name: str) -> Made:
    construct, shape = ZOO[name]
    model = construct().eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    return model, sectorch.Inputs(torch.randn(2, *shape))


def of_transformers(name: str) -> Made:
    model = CASES[name].build()
    drawn(model, CASES[name])
    return model, sectorch.Inputs(**CASES[name].inputs())


def of_timm(name: str) -> Made:
    model, images = built(name)
    return model, sectorch.Inputs(images[:1])


MODELS: dict[str, Callable[[], Made]] = {
    **{name: lambda name=name: of_zoo(name) for name in ("mlp", "lenet", "resnet8")},
    "LSTM": lambda: (nn.LSTM(8, 16, num_layers=2, batch_first=True), sectorch.Inputs(torch.randn(2, 6, 8))),
    "GRU": lambda: (nn.GRU(8, 16, batch_first=True), sectorch.Inputs(torch.randn(2, 6, 8))),
    "Tagger": lambda: (
        Tagger(), sectorch.Inputs(torch.randint(0, 50, (2, 6)), mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool())
    ),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        sectorch.Inputs(torch.randn(2, 5, 16)),
    ),
    **{name: lambda name=name: of_transformers(name) for name in FAMILIES if name in CASES},
    **{f"timm {name}": lambda name=name: of_timm(name) for name in NETWORKS},
}  # fmt: skip


def tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def measure(stage: Stage, name: str) -> dict[str, Any]:
    """One row: whether the bits are equal, and seconds, bytes and rounds of the second question."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    party = f"model{len(stage.processes)}-{os.urandom(2).hex()}"
    model = model.eval().requires_grad_(False)
    try:
        expected = tensors(sectorch.secure(model, session=sectorch.Session())(inputs))
        stage.credentials(party)
        path = stage.folder / f"{party}.safetensors"
        save_model(model, inputs, path)
        stage.start_answering(party)
        with stage.connect("asker") as connection:
            end = time.monotonic() + START
            while party not in connection.models():
                stage._check(end)
                time.sleep(0.1)
            start = time.perf_counter()
            remote = connection.model(party)
            first = remote(inputs)
            first_s, start = time.perf_counter() - start, time.perf_counter()
            with sectorch.profile() as spent:
                again = remote(inputs)
            row = {
                "first_s": first_s, "second_s": time.perf_counter() - start, "bytes": spent.bytes,
                "rounds": spent.rounds, "rows": remote.served.calls[0].least, "inputs": inputs.names,
            }  # fmt: skip
    except SectorchError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        process = stage.processes.get(party)
        if process is not None:
            process.terminate()
            process.wait(timeout=30)
            del stage.processes[party]
    equal = all(
        len(tensors(got)) == len(expected) and all(map(torch.equal, map(bits, tensors(got)), map(bits, expected)))
        for got in (first, again)
    )
    return row | {"equal": equal, "description_bytes": described(path)}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: nan equals itself."""
    return x.contiguous().flatten().view(torch.uint8)


def described(path: Path) -> int:
    """Bytes of a model file's description."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return len(file.metadata()["sectorch.model"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these anew")
    parser.add_argument("--json", type=Path, default=RESULTS, help="rows by name; what is there is not measured again")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console, rows = Console(), json.loads(options.json.read_text()) if options.json.exists() else {}
    with Stage({}) as stage:
        for name in options.only or [name for name in MODELS if name not in rows]:
            rows[name] = measure(stage, name)
            console.print(f"{name:40}", rows[name], soft_wrap=True, markup=False, highlight=False)
            options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
