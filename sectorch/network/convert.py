"""`sectorch convert`: makes a model file, which runs no code when it is read, of a .pt2 file or a function."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..cli.command import Parser, command_status, print_json
from ..errors import ArgumentError, SectorchError
from ..nn.inputs import Inputs
from ..serving.description import describe
from ..serving.model_file import write_model
from .commands import array_files
from .federation.programs import function_of, is_function


def convert(arguments: Sequence[str] | None = None) -> int:
    """`sectorch convert`."""
    p = Parser(
        "convert",
        "Make a model file, which cannot run code when it is read, of a .pt2 file or a function, which can.",
        [
            "sectorch convert model.pt2 model.safetensors --trust",
            "sectorch convert my_models:lenet model.safetensors --trust",
        ],
    )
    p.add_argument(
        "source",
        help="a .pt2 of torch.export.save; or MODULE:FUNCTION or FILE.py:FUNCTION, which gives (model, example inputs)",
    )
    p.add_argument("target", type=Path, help="the model file to write, for `sectorch answer`")
    p.add_argument("--trust", action="store_true", help="read the .pt2, or call the function, although that runs code")
    p.add_argument("--inputs", type=Path, help="write the function's example inputs too, to ask with: .npy or .npz")
    p.takes_json("what was written")
    return command_status(p, arguments, _convert)


def _convert(options: argparse.Namespace, console: Console) -> None:
    target = options.target
    if options.inputs is not None:
        if not is_function(options.source):
            raise ArgumentError(f"--inputs are what a function gives; {options.source} is none")
        array_files.check_out(options.inputs, "--inputs")
    if target.suffix in (".py", ".pem"):
        raise ArgumentError(f"a model is not written over code or a key: {target}; name it NAME.safetensors")
    example: Any = None
    if is_function(options.source):
        if not options.trust:
            raise ArgumentError(f"{options.source} was not called: if you trust that code, add --trust")
        model, example = _call(options.source)
        description, weights = describe(model, example)
    else:
        description, weights = _read(Path(options.source), target, options.trust)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_model(description, weights, target)
    written = ""
    if options.inputs is not None:
        array_files.write_arrays(_tensors(example), options.inputs)
        written = f", and the inputs in {options.inputs}"
    made = {"model": str(target), "bytes": target.stat().st_size, "weights": len(weights)}
    if options.json:
        print_json(made)
    else:
        console.print(
            f"{target}: {len(weights)} weights, {made['bytes']} bytes{written}", highlight=False, soft_wrap=True
        )


def _tensors(example: Any) -> Any:
    """A function's example inputs: arrays by name, or a single array."""
    one = example[0] if isinstance(example, list) else example
    inputs = one if isinstance(one, Inputs) else Inputs(one)
    return inputs.tensors[0] if inputs.single else dict(zip(inputs.names, inputs.tensors, strict=True))


def _call(source: str) -> tuple:
    """The model and the example inputs that a function gives."""
    function = function_of(source)
    try:
        found = function()
    except SectorchError:
        raise
    except Exception as error:  # an error in the user's code
        raise ArgumentError(f"{source} ended with {type(error).__name__}: {error}; --debug shows where") from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise ArgumentError(f"{source} gives {type(found).__name__}, expected (model, example inputs)")
    return found


def _read(source: Path, target: Path, trust: bool) -> tuple[dict, dict[str, torch.Tensor]]:
    """The description and weights of a .pt2."""
    if not source.is_file():
        raise ArgumentError(f"cannot load {source}: it is not there, or is not a file")
    if not trust:
        raise ArgumentError(
            f"{source} was not read: reading a .pt2 can run code that is in it; if you made it, or trust who did, "
            f"add --trust"
        )
    if target.suffix == source.suffix or target.absolute() == source.absolute():
        raise ArgumentError(f"cannot convert {source} to {target}: name the model file NAME.safetensors")
    logging.getLogger("torch.export").setLevel(logging.ERROR)  # it prints errors itself
    try:
        exported = torch.export.load(source)
    except Exception as error:
        why = getattr(error, "strerror", None) or "not a file that torch.export.save has made"
        if source.suffix == ".py":
            why = f"it is code: name its function that gives a model and example inputs, {source}:FUNCTION"
        elif source.suffix == ".safetensors":
            why += "; what is a model file already needs no conversion, `sectorch answer` takes it as it is"
        raise ArgumentError(f"cannot load {source}: {why}") from None
    if exported.example_inputs is None:
        raise ArgumentError(f"{source} has no example inputs, whose shapes are needed: export the model anew")
    args, named = exported.example_inputs
    return describe(exported, Inputs(*args, **named))
