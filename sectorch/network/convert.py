"""`sectorch convert`: a .pt2 of one's own becomes a model file, which can be read without trusting it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from ..cli.command import Parser, ended, print_json
from ..errors import ArgumentError
from ..nn.describe import describe
from ..nn.exported import module_of
from ..nn.inputs import Inputs
from ..nn.model_file import write_model


def convert(arguments: Sequence[str] | None = None) -> int:
    """`sectorch convert`."""
    p = Parser(
        "convert",
        "Convert a .pt2 file, which can run code when it is read, to a model file, which cannot.",
        ["sectorch convert model.pt2 model.safetensors --trust"],
    )
    p.add_argument("source", type=Path, help="a .pt2 file made by torch.export.save")
    p.add_argument("target", type=Path, help="the model file to write, for `sectorch answer`")
    p.add_argument("--trust", action="store_true", help="read the .pt2 although that can run code that is in it")
    p.takes_json("what was written")
    return ended(p, arguments, _convert)


def _convert(options: argparse.Namespace, console: Console) -> None:
    source, target = options.source, options.target
    if not source.is_file():
        raise ArgumentError(f"cannot load {source}: it is not there, or is not a file")
    if not options.trust:
        raise ArgumentError(
            f"{source} was not read: reading a .pt2 can run code that is in it; if you made it, or trust who did, "
            f"add --trust"
        )
    if target.suffix == source.suffix or target.absolute() == source.absolute():
        raise ArgumentError(f"cannot convert {source} to {target}: name the model file NAME.safetensors")
    logging.getLogger("torch.export").setLevel(logging.ERROR)  # it tells what went wrong in lines of its own
    try:
        exported = torch.export.load(source)
    except Exception as error:
        said = getattr(error, "strerror", None) or "not a file that torch.export.save has made"
        raise ArgumentError(f"cannot load {source}: {said}") from None
    if exported.example_inputs is None:
        raise ArgumentError(f"{source} has no example inputs, whose shapes are needed: export the model anew")
    args, named = exported.example_inputs
    description, weights = describe(module_of(exported), Inputs(*args, **named))
    write_model(description, weights, target)
    made = {"model": str(target), "bytes": target.stat().st_size, "weights": len(weights)}
    if options.json:
        print_json(made)
    else:
        console.print(f"{target}: {len(weights)} weights, {made['bytes']} bytes", highlight=False, soft_wrap=True)
