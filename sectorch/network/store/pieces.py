"""Offline material as bytes and back."""

from __future__ import annotations

from ...choreography.program.material import Material
from ...errors import ArgumentError, MaterialError
from ...sealed.tensors import read, written


def write_piece(material: Material) -> tuple[list, int]:
    """The parts of a piece in order, and how many bytes they are together.

    Raises:
        MaterialError: it was used, or holds something that is not kept.
    """
    if material.values is None:
        raise MaterialError(f"the material of call {material.call} was used already; prepare it again")
    head = {
        "call": material.call, "session": material.session.hex(), "program": material.program,
        "setup": material.setup,
    }  # fmt: skip
    try:
        return written(head, material.values)
    except ArgumentError as error:
        raise MaterialError(f"an offline step gave {error}") from None


def read_piece(data: bytearray) -> Material:
    """What `write_piece` wrote; its tensors share the memory of `data`.

    Raises:
        ValueError: it is something else. The caller has checked that nobody changed it.
    """
    head, values = read(data)
    if set(head) != {"call", "session", "program", "setup"}:
        raise ValueError("a piece of another version")
    return Material(head["call"], bytes.fromhex(head["session"]), head["program"], head["setup"], values)
