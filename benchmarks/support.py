"""What `check_module` says of public networks before anything runs, beside what happens when each is run.

    python benchmarks/support.py                       # all: torchvision, and transformers where it is installed
    python benchmarks/support.py --only r3d_18 XLMModel
    python benchmarks/support.py --json FILE

Of each network the verdict is made from shapes alone (`check_module(..., run=False)`); then it is made secure anew and
called, whatever was said. The verdict is true where a supported network gives a result (or `RangeExceededError`: what
random weights make of a value, no shape tells), and a refused one gives none. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import nn
from torchvision_table import estimate_statistics

import sectorch
from sectorch import Inputs
from sectorch.errors import RangeExceededError, SectorchError
from sectorch.testing import check_module

IMAGES = dict.fromkeys(
    (
        "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "resnet18",
        "googlenet", "efficientnet_b0", "regnet_y_400mf", "densenet121", "convnext_tiny", "swin_t", "maxvit_t",
        "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large",
    ), (1, 3, 64, 64),
) | {
    "r3d_18": (1, 3, 4, 32, 32), "mc3_18": (1, 3, 4, 32, 32), "maxvit_t": (1, 3, 224, 224),
    "ssdlite320_mobilenet_v3_large": (1, 3, 64, 64), "fasterrcnn_mobilenet_v3_large_320_fpn": (1, 3, 64, 64),
    "keypointrcnn_resnet50_fpn": (1, 3, 64, 64), "fcos_resnet50_fpn": (1, 3, 64, 64),
}  # fmt: skip
TEXTS = (
    "BertModel", "GPT2LMHeadModel", "ViTModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "MambaForCausalLM",
    "MixtralForCausalLM", "WhisperForConditionalGeneration", "CLIPModel", "DetrForObjectDetection",
    "ConditionalDetrForObjectDetection", "DeepseekV3ForCausalLM", "FlaubertModel", "InformerModel",
    "LEDForConditionalGeneration", "LayoutLMv3Model", "Llama4ForCausalLM", "LongformerModel", "ReformerModel",
    "SwitchTransformersForConditionalGeneration", "TimesFmModelForPrediction", "XLMModel",
)  # fmt: skip
Made = tuple[nn.Module, Inputs]


def of_torchvision(name: str, shape: tuple[int, ...]) -> Made:
    options: dict[str, Any] = {"weights": None}
    options |= {"weights_backbone": None} if "resnet50" in name or "mobilenet_v3_large" in name else {}
    options |= {"init_weights": True} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, **options).eval().requires_grad_(False)
    batch = torch.randn(4, *shape[1:])
    if "rcnn" in name or name.startswith(("ssd", "fcos")):
        return model, Inputs(list(batch[:1]))  # a detector takes a list of images
    estimate_statistics(model, batch)
    return model, Inputs(batch[:1])


def of_transformers(name: str) -> Made:
    from huggingface_models import CASES

    case = CASES[name]
    return case.build(), Inputs(**case.inputs())


def networks() -> Iterator[tuple[str, Callable[[], Made]]]:
    for name, shape in IMAGES.items():
        yield name, lambda name=name, shape=shape: of_torchvision(name, shape)
    try:
        from huggingface_models import CASES
    except ImportError:
        return
    for name in TEXTS:
        if name in CASES:
            yield name, lambda name=name: of_transformers(name)


def happened(model: nn.Module, inputs: Inputs) -> str:
    """What a call of the secure module does."""
    try:
        sectorch.secure(model, session=sectorch.Session())(inputs)
    except RangeExceededError:
        return "ran, out of range"
    except SectorchError as error:
        return type(error).__name__
    except Exception as error:
        return f"the forward's {type(error).__name__}"
    return "ran"


def measured(make: Callable[[], Made]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = make()
    start = time.perf_counter()
    report = check_module(model, inputs, run=False, rows=(), refuse=False)
    said = time.perf_counter() - start
    did = happened(model, inputs)
    return {
        "supported": report.supported, "said_s": said, "ran_s": time.perf_counter() - start - said, "did": did,
        "true": report.supported == did.startswith("ran"), "problem": report.problem, "change": report.change,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these networks")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    console = Console(width=150)
    for name, make in networks():
        if options.only and name not in options.only:
            continue
        try:
            rows[name] = measured(make)
        except Exception as error:  # the plain network itself, or memory
            rows[name] = {"plain": f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"}
        console.print(name, rows[name].get("did", rows[name].get("plain")), highlight=False)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table()
    for column in ("network", "said before", "s", "what a call did", "s", "true", "first line to change"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for name, row in rows.items():
        if "plain" in row:
            table.add_row(name, "", "", f"the plain network: {row['plain']}", "", "", "")
            continue
        said = "supported" if row["supported"] else "refused"
        change = row["change"].split("site-packages/")[-1] or ("" if row["supported"] else row["problem"])
        table.add_row(
            name,
            said,
            f"{row['said_s']:.1f}",
            row["did"],
            f"{row['ran_s']:.1f}",
            "yes" if row["true"] else "NO",
            change,
        )
    console.print(table)
    tried = [row for row in rows.values() if "plain" not in row]
    console.print(f"{sum(row['true'] for row in tried)} of {len(tried)} verdicts true; "
                  f"{sum(not row['supported'] for row in tried)} networks refused")  # fmt: skip


if __name__ == "__main__":
    main()
