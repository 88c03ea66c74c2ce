"""The picture of who holds what in trainings, federations and the papers: docs/figures/holders.svg.

A box's colour is a claim on messages that protocols declare, and the picture is refused where it does not hold: what
arrives at a "masked" box shows its receiver nothing, and at a "learns" box each message shows something.
"""

from __future__ import annotations

from dataclasses import dataclass

from figures import text
from plots import framed

from sectorch.choreography import PROTOCOLS

KINDS = {"own": ("#c8e6c9", "its own, in plain"), "masked": ("#e0e0e0", "uniform bits, or ciphertexts"),
         "learns": ("#bbdefb", "what it learns of others")}  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A party, the lines of what it holds, and the messages (protocol, label) by which it has that."""

    party: str
    kind: str
    lines: tuple[str, ...]
    messages: tuple[tuple[str, str], ...] = ()


ROWS: dict[str, tuple[Box, ...]] = {
    "Training on shares": (
        Box("each owner", "own", ("its rows",)),
        Box("A and S", "masked", ("halves of rows, gradients", "and of the model"),
            (("share", "x_S"), ("open_masked", "c_A"), ("open_masked", "c_S"), ("deal", "v_S"))),
        Box("who is named", "learns", ("the trained model, or", "nothing"),
            (("reveal_to_A", "x_S"), ("reveal", "result"))),
    ),
    "A program in a federation": (
        Box("each party", "own", ("its inputs, keys, limits,", "and what it agreed to")),
        Box("a server that relays", "masked", ("sealed frames: who meets", "whom, when, how many bytes")),
        Box("who is named", "learns", ("reveals that every party", "has accepted"),
            (("reveal_to_A", "x_S"), ("reveal_to_S", "x_A"))),
    ),
    "PrivHFL": (
        Box("each client", "own", ("its data and its model",)),
        Box("who answers, and S", "masked", ("shares of queries; S has", "masked weights"),
            (("share", "x_S"), ("mask_weight", "omega_masked"), ("linear", "m"), ("aggregate", "masked_A"))),
        Box("who asks", "learns", ("the sum of all answers",), (("aggregate", "sum"),)),
    ),
    "CaPC": (
        Box("each voter", "own", ("its model, its budget",)),
        Box("the guardian S", "masked", ("half of the votes; it draws", "the noise and knows it"),
            (("collect", "masked_A"),)),
        Box("who asks", "learns", ("the noisy winner",), (("garbled_argmax_noisy", "decoding"),)),
    ),
    "CaPriDe": (
        Box("each party", "own", ("its data, model, key",)),
        Box("the peer", "masked", ("the others' inputs, encrypted",),
            (("capride_publish", "inputs"), ("capride_divergence", "directions"))),
        Box("the key's owner", "learns", ("noisy sums over a batch",), (("capride_divergence", "aggregates"),)),
    ),
    "Perturbed models": (
        Box("server; each client", "own", ("the model and its noise;", "its data")),
        Box("the server", "learns", ("the sum of all updates",), (("secure_sum_masked", "masked"),)),
        Box("each client", "learns", ("a noised model of the", "same function"), (("perturbation_model", "model"),)),
    ),
    "SecSV": (
        Box("each client", "own", ("its model, its test data",)),
        Box("the servers P and X", "masked", ("shares of test data,", "encrypted models"),
            (("secsv_samples", "features_P"), ("secsv_samples", "features_X"), ("secsv_model", "model_P"))),
        Box("who decrypts a layer", "learns", ("the layer's outputs; P: who", "contributed how much"),
            (("secsv_layer", "layer_output"),)),
    ),
}  # fmt: skip


def check(box: Box) -> None:
    """Raise ValueError unless the box's messages are declared and show, or do not show, something as its kind says."""
    for protocol, label in box.messages:
        shows = [message.shows for message in PROTOCOLS[protocol].messages if message.label == label]
        if not shows or any(bool(shown) != (box.kind == "learns") for shown in shows):
            raise ValueError(f"'{box.party}' is {box.kind}, but '{label}' of '{protocol}' shows {shows}")


def holders() -> str:
    """The picture: a row for each setting, of three boxes."""
    parts, y = [], 36
    for title, boxes in ROWS.items():
        parts.append(text(10, y + 12, title, text_anchor="start", font_weight="bold"))
        for k, box in enumerate(boxes):
            check(box)
            x = 10 + 214 * k
            parts.append(f'<rect x="{x}" y="{y + 18}" width="206" height="58" rx="6" fill="{KINDS[box.kind][0]}"/>')
            parts.append(text(x + 103, y + 34, box.party, font_weight="bold"))
            parts += [text(x + 103, y + 51 + 16 * i, line) for i, line in enumerate(box.lines)]
        y += 84
    for k, (colour, said) in enumerate(KINDS.values()):
        parts.append(f'<rect x="{10 + 214 * k}" y="{y + 4}" width="14" height="14" fill="{colour}"/>')
        parts.append(text(30 + 214 * k, y + 16, said, text_anchor="start"))
    return framed("Who holds what", 654, y + 28, parts)
