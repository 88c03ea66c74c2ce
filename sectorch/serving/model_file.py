"""A model in one file: its checked description, and its weights as safetensors. Reading one runs nothing.

The file is a `.safetensors` file whose metadata holds the description of `serving/description.py` as JSON under `KEY`.
Its tensors are the weights that the description names, and no others. Nothing in it is compressed, so that it takes
about as much memory as it has bytes, and nothing is unpickled.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.export import ExportedProgram

from ..errors import ArgumentError, ProgramError
from ..nn.generation import Generation, TokenStep
from ..nn.module import SecureModule
from ..session import Session
from ..tensor import Scheme
from .description import MAX_JSON, Example, describe, from_json, load_program, to_json

KEY = "sectorch.model"
MAX_HEADER = 4 * MAX_JSON
"""Bytes of a file's header: a description in quotes, and the places of the weights."""
_LENGTH_BYTES = 8
_KINDS = {"F32": "torch.float32", "F64": "torch.float64"}
_CAN_RUN_CODE = (".pt2", ".pt", ".pth", ".pkl", ".ckpt", ".bin")


def save_model(model: nn.Module | ExportedProgram, inputs: Example | Sequence[Example], path: str | Path) -> None:
    """Write a model for `sectorch answer`.

    Args:
        model: in evaluation mode: whatever `sectorch.secure` takes, or what torch.export made of it. Its weights keep
            their precision.
        inputs: what it is called with: a tensor, or `sectorch.Inputs(input_ids=ids, attention_mask=mask)`; or several
            of these in a list, and it is served for each. Of secret tensors only shapes and dtypes enter the file, and
            of what `sectorch.public` marks the content. Where the model does the same with other numbers of rows it is
            served for any number of them, and else for these shapes.
        path: of the file, by habit `NAME.safetensors`. It holds the weights, and only its owner may read it.

    Raises:
        SectorchError: what `secure` raises for such a call. TrainingModeError: it is in training mode.
        ProgramError: its calls differ from one to the next, or it is too large to be described.
        ArgumentError: the file cannot be written; what was there before is unchanged.
    """
    write_model(*describe(model, inputs), path)


def write_model(description: dict, weights: dict[str, torch.Tensor], path: str | Path) -> None:
    """Write a description and its weights (`describe` gives both) as one file; it is there whole or not at all.

    Raises:
        ProgramError: the two do not belong together. ArgumentError: the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise ArgumentError(f"cannot write {path}: it is a folder; name a file, {path / 'NAME.safetensors'}")
    load_program(description, weights)
    text = to_json(description)
    if len(text) > MAX_JSON:
        raise ProgramError(f"a model description of {len(text)} bytes; at most {MAX_JSON} can be served")
    own = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    made = None
    try:
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file(own, made, {KEY: text.decode()})
        os.chmod(made, stat.S_IRUSR | stat.S_IWUSR)
        os.replace(made, path)
        made = None
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if made is not None:
            Path(made).unlink(missing_ok=True)


def read_model(path: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The description and the weights of a file that `save_model` or `sectorch convert` wrote.

    Everything is checked before a weight is read: the header's length, the description, and of each weight the name,
    shape and dtype. The weights are then of the size of the file.

    Raises:
        ArgumentError: there is no such file, or it is of another kind; a `.pt2` is named with the way to convert it.
        ProgramError: a file of this kind that is cut, was changed, or does not hold what its description says.
    """
    path = Path(path)
    _refuse_other_kinds(path)
    try:
        return _read(path)
    except (ArgumentError, ProgramError):
        raise
    except Exception as error:  # what safetensors finds wrong has no common type
        said = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise ProgramError(f"{path} is not a whole model file: {said}; make it anew with sectorch convert") from None


def _refuse_other_kinds(path: Path) -> None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ArgumentError(f"cannot load {path}: it is not a file")
        with path.open("rb") as file:
            start, size = file.read(_LENGTH_BYTES + 1), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ArgumentError(f"cannot load {path}: {error.strerror or error}") from None
    header = int.from_bytes(start[:_LENGTH_BYTES], "little")
    whole = 2 <= header <= min(MAX_HEADER, size - _LENGTH_BYTES)
    ours = whole and start.endswith(b"{")  # a length may begin as a zip file or a pickle does
    if path.suffix.lower() in _CAN_RUN_CODE or (not ours and start.startswith((b"PK", b"\x80"))):
        to = path.with_suffix(".safetensors")
        raise ArgumentError(
            f"{path} is of a kind that can run code when it is read, and was not read; if you trust where it comes "
            f"from, convert it once: sectorch convert {path} {to} --trust"
        )
    if not whole:
        raise ProgramError(
            f"{path} is not a model file: it does not begin with a header of at most {MAX_HEADER} bytes; "
            f"sectorch.network.save_model makes one, and sectorch convert makes one of a .pt2"
        )


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        text = (file.metadata() or {}).get(KEY)
        if text is None:
            raise ProgramError(
                f"{path} holds weights and no description of a model; sectorch.network.save_model writes both"
            )
        description = from_json(text.encode())
        load_program(description)
        wanted = {entry["name"]: entry for entry in description["weights"]}
        there = set(file.keys())
        if there != set(wanted):
            name = sorted(there ^ set(wanted))[0][:80]
            what = "a weight that its description does not name" if name in there else "a description of a weight more"
            raise ProgramError(f"{path} holds {what}: '{name}'")
        for name, entry in wanted.items():
            part = file.get_slice(name)
            came = _KINDS.get(str(part.get_dtype()), str(part.get_dtype())), list(part.get_shape())
            if came != (entry["dtype"], entry["shape"]):
                raise ProgramError(
                    f"{path} holds '{name[:80]}' as {came[0]} {came[1]}, its description says {entry['dtype']} "
                    f"{entry['shape']}"
                )
        # Copies: what is mapped from a file would change with it.
        weights = {name: file.get_tensor(name).clone() for name in wanted}
    load_program(description, weights)
    return description, weights


# The description of a language model that others may ask to continue texts.


def describe_texts(
    model: nn.Module,
    prompts: Sequence[tuple[int, int]],
    max_new_tokens: int,
    *,
    masked: bool = True,
    do_sample: bool | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """The public description of a causal language model for generation, and its weights by name.

    Args:
        model: of `transformers` (AutoModelForCausalLM), in evaluation mode, on the CPU.
        prompts: for which shapes [rows, positions] it is served.
        max_new_tokens: how many tokens there is room for after a prompt; who asks may stop before.
        masked: whether prompts come with a mask, so that shorter texts can be padded on the left; it is secret.
        do_sample, temperature, top_k, eos_token_id, pad_token_id: as of `Generation`.

    Raises:
        ArgumentError: no prompts, or a model that generates in another way. Others: as of `describe`.
    """
    if not prompts or not all(len(shape) == 2 and min(shape) > 0 for shape in prompts):
        raise ArgumentError(f"prompts are shapes (rows, positions), got {list(prompts)!r:.80}")
    session = Session()
    run = Generation(
        SecureModule(model, session, session.answering[0], Scheme(), None), max_new_tokens, do_sample=do_sample,
        temperature=temperature, top_k=top_k, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
    )  # fmt: skip
    calls = []
    for shape in prompts:
        ids = torch.ones(tuple(shape), dtype=torch.int64)
        calls += run.forms(ids, torch.ones_like(ids) if masked else None)
    description, weights = describe(TokenStep(model, run.texts.choice).eval(), calls)
    return {**description, "texts": replace(run.texts, masked=masked).to_description()}, weights


def save_generation(
    model: nn.Module,
    prompts: Sequence[tuple[int, int]],
    max_new_tokens: int,
    path: str | Path,
    *,
    masked: bool = True,
    do_sample: bool | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> None:
    """Write a causal language model for `sectorch answer`, to be asked by `RemoteModel.generate`.

    Args:
        model: of `transformers` (AutoModelForCausalLM), in evaluation mode, on the CPU.
        prompts: for which shapes [rows, positions] it is served.
        max_new_tokens: how many tokens there is room for after a prompt; who asks may stop before.
        path: of the file, by habit `NAME.safetensors`. It holds the weights, and only its owner may read it.
        masked: whether prompts come with a mask, so that shorter texts can be padded on the left; it is secret.
        do_sample, temperature, top_k, eos_token_id, pad_token_id: as of `sectorch.Generation`.

    Raises:
        ArgumentError: it generates in another way, or the file cannot be written. Others: as of `save_model`.
    """
    described = describe_texts(
        model, prompts, max_new_tokens, masked=masked, do_sample=do_sample, temperature=temperature, top_k=top_k,
        eos_token_id=eos_token_id, pad_token_id=pad_token_id,
    )  # fmt: skip
    write_model(*described, path)
