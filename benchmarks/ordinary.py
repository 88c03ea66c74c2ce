"""Ordinary models: error, seconds and bytes of torchvision classifiers, a transformer and a GRU, secure against plain.

    python benchmarks/ordinary.py                      # those of the table in docs/benchmarks.md
    python benchmarks/ordinary.py swin_t convnext_tiny --size 64

Weights are random, and so are BatchNorm statistics; a head that torchvision initialises with zeros is made random too.
"""

from __future__ import annotations

import argparse
import time

import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import nn

import sectorch
from sectorch.nn.models import randomize_batchnorm


class Recurrent(nn.Module):
    """A GRU and a linear layer on its last step."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0][:, -1])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def bert_sized() -> nn.Module:
    """Twelve layers, hidden size 768, twelve heads: the size of BERT-base without its embeddings."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


OWN = {
    "bert-base-size encoder": (bert_sized, (1, 128, 768)),
    "transformer encoder": (encoder, (1, 16, 64)),
    "gru classifier": (Recurrent, (1, 10, 16)),
}


def build(name: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name in OWN:
        construct, shape = OWN[name]
        return construct().eval(), torch.randn(*shape)
    options = {"init_weights": False, "aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    randomize_batchnorm(model, torch.Generator().manual_seed(0))
    for p in model.parameters():
        if p.dim() > 1 and not p.detach().any():
            nn.init.normal_(p, std=0.02)
    return model, torch.randn(1, 3, size, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet18", "mobilenet_v2", "vit_b_16", *OWN])
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()
    table = Table(title=f"{torch.get_num_threads()} threads, batch 1")
    for column in ("model", "input", "plain s", "secure s", "error", "of the largest", "MB", "online MB", "rounds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in options.models:
        size = 224 if name.startswith("vit") or name == "maxvit_t" else options.size
        model, x = build(name, size)
        with torch.no_grad():
            expected = model(x)
            start = time.perf_counter()
            model(x)
            plain = time.perf_counter() - start
            secured = sectorch.secure(model, session=sectorch.Session())
            secured(x)
            with sectorch.profile() as p:
                error = float((secured(x) - expected).abs().max())
        table.add_row(
            name, "x".join(map(str, x.shape[1:])), f"{plain:.3f}", f"{p.seconds:.2f}", f"{error:.1e}",
            f"{error / float(expected.abs().max()):.1e}", f"{p.bytes / 1e6:.0f}", f"{p.online_bytes / 1e6:.0f}",
            str(p.rounds),
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
