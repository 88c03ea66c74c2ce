"""Where the rounds of a layer of BERT-base go: each operation with its rounds, bytes, and seconds on both networks.

    python benchmarks/layer_rounds.py                       # a layer of 128 tokens, "lan" and "wan"
    python benchmarks/layer_rounds.py --layers 12           # the encoder
    python benchmarks/layer_rounds.py --tokens 1 --repeats 9

Weights are random: rounds and bytes depend on shapes alone. The time is the processor's of one call with all parties in
this process, the fastest of so many; the columns are those of `sectorch.explain`. Operations that do not wait for each
other share rounds, so that the rounds of the operations add up to those of the whole.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BertConfig, BertModel

import sectorch


class Encoder(nn.Module):
    """The layers of BERT-base, from embedded tokens on."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = BertModel(BertConfig(num_hidden_layers=layers)).encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).last_hidden_state


def milliseconds(secured: nn.Module, x: torch.Tensor, repeats: int) -> float:
    """The processor's time of the fastest call, after one that masks the weights."""
    secured(x)
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        secured(x)
        spent.append(time.process_time() - start)
    return 1e3 * min(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls; 0 measures no time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = Encoder(options.layers).eval(), torch.randn(1, options.tokens, 768)
    for network in ("lan", "wan"):
        report = sectorch.explain(model, x, network)
        table = Table(title=f"{options.layers} layers, {options.tokens} tokens, {network}")
        for column in ("operation", "what", "rounds", "online MB", "ahead MB"):
            table.add_column(column, justify="left" if column in ("operation", "what") else "right")
        for layer in report.layers:
            online, ahead = layer.profile.online_bytes / 1e6, layer.profile.offline_bytes / 1e6
            if layer.rounds or online or ahead:
                table.add_row(layer.name, layer.kind, str(layer.rounds), f"{online:.2f}", f"{ahead:.2f}")
        once = report.setup_bytes / 1e6
        row = "whole", f"{once:.1f} MB once", str(report.rounds), f"{report.online_bytes / 1e6:.1f}"
        table.add_row(*row, f"{report.offline_bytes / 1e6 - once:.1f}", style="bold")
        console = Console(width=140)
        console.print(table)
        if options.repeats:
            secured = sectorch.secure(model, network)
            console.print(f"{milliseconds(secured, x, options.repeats):.0f} ms of the processor")


if __name__ == "__main__":
    main()
