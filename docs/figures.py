"""The papers' protocol figures, redrawn as this code runs them: docs/figures/*.svg, written by docs/generate.py.

A figure is a list of steps from top to bottom. Its arrows must be exactly the messages that the named protocols declare
in the code, so a figure cannot show what is not sent, nor leave out what is.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from sectorch.choreography import PROTOCOLS

COLUMNS = {"Q": 130, "S": 390, "A": 650}
TITLES = {"Q": "Q, querying party", "S": "S, server", "A": "A, answering party"}
COLOURS = {"Q": "#1565c0", "S": "#616161", "A": "#2e7d32"}
WIDTH, LINE = 780, 18


@dataclass(frozen=True)
class Local:
    """What parties draw or compute by themselves: lines of text by party."""

    lines: dict[str, str]


@dataclass(frozen=True)
class Arrow:
    """A declared message: its protocol and label, what it carries, and when it is sent: "once", "ahead" or "online"."""

    protocol: str
    label: str
    text: str
    when: str = "online"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper and the protocols whose messages it shows."""

    title: str
    protocols: tuple[str, ...]
    steps: tuple[Local | Arrow, ...]


def at(**lines: str) -> Local:
    return Local(lines)


FIGURES: dict[str, Figure] = {
    "seeds": Figure("Pair keys (Figure 18, with signatures)", ("seed",), (
        at(Q="fresh X25519 key pair", A="fresh X25519 key pair"),
        Arrow("seed", "public_Q", "public key of Q", "once"),
        Arrow("seed", "public_Q_relayed", "public key of Q", "once"),
        at(A="signs both public keys"),
        Arrow("seed", "signed_A", "public key of A, signature", "once"),
        Arrow("seed", "signed_A_relayed", "public key of A, signature", "once"),
        at(Q="checks, derives k_QA, signs"),
        Arrow("seed", "signed_Q", "signature of Q", "once"),
        Arrow("seed", "signed_Q_relayed", "signature of Q", "once"),
        at(A="checks, derives k_QA"),
        at(S="draws k_SA and k_SQ"),
        Arrow("seed", "key_SA", "k_SA, inside TLS", "once"),
        Arrow("seed", "key_SQ", "k_SQ, inside TLS", "once"),
    )),
    "share": Figure("Sharing a query (Figure 2)", ("share",), (
        at(Q="x_A ← stream of k_QA", A="x_A ← stream of k_QA"),
        Arrow("share", "x_S", "x_S = x - x_A"),
        at(S="holds x_S", A="holds x_A"),
    )),
    "linear": Figure("A linear layer with a masked weight (Figure 3)", ("mask_weight", "linear"), (
        at(Q="a ← k_QA", A="a ← k_QA"),
        Arrow("mask_weight", "omega_masked", "ω + a", "once"),
        at(Q="b ← k_SQ\ndefers c = a∘b", S="b ← k_SQ"),
        at(S="y_S = (ω + a)∘b"),
        Arrow("linear", "m", "m = x_S - b"),
        at(A="y_A = ω∘(x_A + m)"),
    )),
    "relu": Figure("ReLU after a linear layer (in place of Figure 4)",
                   ("open_masked", "deal_bits", "and_layers", "floor_bits", "deal", "open_bit"), (
        at(Q="r_A ← k_QA, r_S ← k_SQ\nr = r_A + r_S", S="r_S ← k_SQ", A="r_A ← k_QA"),
        at(Q="thermometer code of r,\nproducts of masks α", A="A's shares ← k_QA"),
        Arrow("deal_bits", "v_S", "code and products, S's shares", "ahead"),
        at(Q="r >> f, random bits b,\ntheir products", A="A's shares ← k_QA"),
        Arrow("deal", "v_S", "S's shares of them", "ahead"),
        Arrow("open_masked", "c_S", "x_S + r_S", "ahead"),
        Arrow("open_masked", "c_A", "x_A + r_A"),
        at(S="c = x + r; picks [c < r]\nper block from the code", A="c = x + r; picks [c < r]\nper block too"),
        Arrow("and_layers", "masked_A", "bits of a level ⊕ α_A"),
        Arrow("and_layers", "masked_S", "bits of a level ⊕ α_S"),
        at(S="shares of the sign's parts\nand of the borrow u", A="shares of the sign's parts\nand of the borrow u"),
        Arrow("floor_bits", "masked_A", "the three of them ⊕ α_A"),
        Arrow("floor_bits", "masked_S", "the three of them ⊕ α_S"),
        at(S="shares of s = [x ≥ 0], s u", A="shares of s = [x ≥ 0], s u"),
        Arrow("open_bit", "e_A", "the bits ⊕ b_A"),
        Arrow("open_bit", "e_S", "the bits ⊕ b_S"),
        at(S="share of s (x >> f), rounded", A="share of s (x >> f), rounded"),
    )),
    "leaky-drelu": Figure("DReLU as the paper has it (Figure 4): leaks to Q", ("leaky_drelu",), (
        at(Q="δ, δ' ← k_QA", S="r > 0 ← k_SA", A="δ, δ' ← k_QA, r ← k_SA"),
        Arrow("leaky_drelu", "z_A", "r x_A - δ"),
        Arrow("leaky_drelu", "z", "r x_A - δ + r x_S"),
        at(Q="adds δ and sees r x:\nsign, zeros and size of x"),
        Arrow("leaky_drelu", "y_S", "[r x ≥ 0] - δ'"),
        at(S="share of [x ≥ 0]", A="share of [x ≥ 0]: δ'"),
    )),
    "aggregate": Figure("Aggregation (Figure 5); A stands for each of A_1 .. A_n", ("aggregate",), (
        at(Q="r_j ← k_QA_j", A="r_j ← k_QA_j"),
        Arrow("aggregate", "masked_A", "x_j,A - r_j"),
        at(S="adds all halves that it has"),
        Arrow("aggregate", "sum", "Σ (x_j,A - r_j + x_j,S)"),
        at(Q="adds Σ r_j: the sum of all\nlogits, and no single one"),
    )),
}  # fmt: skip


def ends(arrow: Arrow) -> tuple[str, str]:
    """Sender and receiver, as the protocol declares them."""
    for message in PROTOCOLS[arrow.protocol].messages:
        if message.label == arrow.label:
            return message.src, message.dst
    raise ValueError(f"'{arrow.protocol}' declares no message '{arrow.label}'")


def check(figure: Figure) -> None:
    """Raise ValueError unless the figure shows every message of its protocols, once, and no other."""
    shown = [(step.protocol, step.label) for step in figure.steps if isinstance(step, Arrow)]
    declared = [(name, message.label) for name in figure.protocols for message in PROTOCOLS[name].messages]
    if sorted(shown) != sorted(declared):
        raise ValueError(f"'{figure.title}' shows {sorted(shown)}, but the code declares {sorted(declared)}")


def text(x: float, y: float, line: str, **attributes: str) -> str:
    """A centred line. Indices stay as in the code and the pages: x_A."""
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x}" y="{y}"{given}>{escape(line)}</text>'


def drawn(figure: Figure) -> str:
    """The figure as SVG: three columns, time from top to bottom; dashed arrows do not wait for the query."""
    check(figure)
    parts, y = [], 84
    for step in figure.steps:
        if isinstance(step, Local):
            count = max(line.count("\n") + 1 for line in step.lines.values())
            for party, block in step.lines.items():
                lines, x = block.split("\n"), COLUMNS[party]
                height = LINE * len(lines) + 8
                parts.append(f'<rect x="{x - 112}" y="{y}" width="224" height="{height}" rx="4" class="box"/>')
                parts += [text(x, y + LINE * (i + 1) - 1, line) for i, line in enumerate(lines)]
            y += LINE * count + 20
        else:
            src, dst = (COLUMNS["Q" if party == "D" else party] for party in ends(step))  # in the papers Q deals
            y += 14
            dash = "" if step.when == "online" else ' stroke-dasharray="6 4"'
            note = "" if step.when == "online" else f" ({step.when})"
            parts.append(text((src + dst) / 2, y, step.text + note))
            stop = dst - 6 if dst > src else dst + 6
            parts.append(f'<path d="M{src} {y + 8}H{stop}" class="arrow" marker-end="url(#head)"{dash}/>')
            y += 26
    head = [text(WIDTH / 2, 24, figure.title, font_weight="bold", font_size="15")]
    for party, x in COLUMNS.items():
        head.append(f'<path d="M{x} 70V{y}" class="life"/>')
        head.append(f'<rect x="{x - 80}" y="42" width="160" height="28" rx="4" fill="{COLOURS[party]}"/>')
        head.append(text(x, 61, TITLES[party], fill="#ffffff"))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" font-family="sans-serif" '
        'font-size="13" text-anchor="middle" fill="#212121">',
        "<style>.box{fill:#fff;stroke:#bdbdbd}.arrow{stroke:#212121;fill:none}.life{stroke:#bdbdbd}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="2" refY="4" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#212121"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{y + 12}" fill="#ffffff"/>',
        *head,
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip
