"""The picture of the three parties, docs/figures/parties.svg: who holds what, and what crosses each edge.

Each line stands for messages that protocols declare, and says between whom; the picture is refused where the code
declares no such message, or another direction. Dots move along the edges where the reader's system allows motion. It is
narrow, so that a phone shows it with words that can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from figures import COLOURS, Arrow, ends, text

WIDTH, HEIGHT = 480, 332


@dataclass(frozen=True)
class Box:
    """A party: its corner and width, and the lines under its name."""

    x: int
    y: int
    width: int
    lines: tuple[str, ...]


BOXES = {
    "Q": Box(10, 10, 212, ("Q, querying party", "owns the input", "alone learns the result")),
    "A": Box(258, 10, 212, ("A, answering party", "owns the model", "learns nothing")),
    "S": Box(118, 222, 244, ("S, server", "owns and learns nothing", "colludes with neither Q nor A")),
}


@dataclass(frozen=True)
class Line:
    """What crosses an edge: messages as (protocol, label), all between the same two parties, and what they are."""

    said: str
    messages: tuple[tuple[str, str], ...]
    ways: tuple[tuple[str, str], ...]


LINES = {
    "Q": (
        Line("↓ input - mask", (("share", "x_S"),), (("Q", "S"),)),
        Line("↓ dealt randomness", (("deal", "v_S"), ("deal_bits", "v_S")), (("D", "S"),)),
        Line("↑ result + mask", (("reveal", "result"),), (("S", "Q"),)),
    ),
    "A": (
        Line("↓ weights + mask", (("mask_weight", "omega_masked"),), (("A", "S"),)),
        Line("↓↑ values + masks", (("open_masked", "c_A"), ("open_masked", "c_S")), (("A", "S"), ("S", "A"))),
    ),
}
PATHS = {"Q": ("M176 106V216", "M206 222V112"), "A": ("M304 106V216", "M274 222V112")}
"""Down to S, and up from it."""


def check() -> None:
    """Raise ValueError unless each line's messages are declared, between the parties that it says."""
    for line in (line for lines in LINES.values() for line in lines):
        found = {ends(Arrow(protocol, label, "")) for protocol, label in line.messages}
        if found != set(line.ways):
            raise ValueError(f"'{line.said}' is said to go {line.ways}, and the code declares {sorted(found)}")


def picture() -> str:
    """The picture as SVG, with a title and a description for those who do not see it."""
    check()
    parts = []
    for party, paths in PATHS.items():
        for k, path in enumerate(paths):
            parts.append(f'<path d="{path}" class="edge" marker-end="url(#tip)"/>')
            move = f'<animateMotion dur="4s" begin="-{2 * k}s" repeatCount="indefinite" path="{path}"/>'
            parts.append(f'<circle r="4" fill="{COLOURS["S" if k else party]}" class="dot">{move}</circle>')
    for party, lines in LINES.items():
        for k, line in enumerate(lines):
            x, anchor = (10, "start") if party == "Q" else (470, "end")
            parts.append(text(x, 136 + 24 * k, line.said, text_anchor=anchor, font_size="14"))
    for party, box in BOXES.items():
        name, *lines = box.lines
        parts.append(f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="96" rx="8" class="box"/>')
        head = f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="34" rx="8" fill="{COLOURS[party]}"/>'
        parts += [head, text(box.x + box.width / 2, box.y + 23, name, fill="#ffffff", font_weight="bold")]
        parts += [text(box.x + box.width / 2, box.y + 57 + 23 * k, line) for k, line in enumerate(lines)]
    described = ". ".join(", ".join(box.lines) for box in BOXES.values())
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" '
        'font-size="15" text-anchor="middle" fill="#212121">',
        f"<title>Three parties</title><desc>{described}. Q and A talk to S only.</desc>",
        "<style>.box{fill:#fff;stroke:#9e9e9e}.edge{stroke:#757575;stroke-width:1.5;fill:none}"
        "@media (prefers-reduced-motion:reduce){.dot{display:none}}</style>",
        '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4.5" orient="auto">'
        '<path d="M0 0L9 4.5L0 9z" fill="#757575"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip
