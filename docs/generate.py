"""Rewrite what the documents have from the code and from benchmarks/results: tables and figures.

    python docs/generate.py            # rewrite
    python docs/generate.py --check    # change nothing; exit 1 if a table or a figure is stale

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from figures import FIGURES, drawn
from holders import holders
from measured import HUGGINGFACE, accuracies, beside_others, headline, noise, real_size
from measured_capc import CAPC
from measured_capride import CAPRIDE, CAPRIDE_FIGURES
from papers import CLAIMS, ITEMS, LABELS, VERDICTS
from papers import KINDS as PAPER_KINDS
from parties import picture
from plots import PLOTS
from refusals import listed

import sectorch
from sectorch.choreography import PROTOCOLS, ProtocolSpec
from sectorch.training.decompositions import NO_GRADIENT

DOCS = Path(__file__).parent

KINDS = {
    "arithmetic": "Arithmetic",
    "linear": "Linear layers and products",
    "activation": "Piecewise linear activations",
    "smooth": "Smooth functions, logarithms, roots and quotients",
    "normalization": "Softmax and normalisation layers",
    "sequences": "Attention and recurrent layers",
    "pooling": "Pooling, interpolation and three dimensions",
    "compare": "Comparison and choice",
    "reduction": "Reductions",
    "order": "Order, medians and running maxima",
    "linalg": "Factorisations of small matrices",
    "fourier": "Fourier transforms",
    "complex_numbers": "Complex numbers",
    "losses": "Losses",
    "structure": "Moving and joining elements",
    "composites": "Functions made of other operations",
    "rounding": "Rounding",
    "indexing": "Entries at public and at secret positions",
}
"""The handler modules in the order of the document; a module that is not listed comes last under its own name."""


def protocols() -> list[ProtocolSpec]:
    """Every protocol that ships, by name: those of all packages."""
    for module in pkgutil.walk_packages(sectorch.__path__, "sectorch."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return sorted(PROTOCOLS.values(), key=lambda spec: spec.name)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _uniform(mask: str) -> str:
    """What a message is to whoever cannot take its mask off."""
    if "encrypt" in mask or "rerandomised" in mask:
        return "ciphertexts"
    if "mod Q" in mask:
        return "uniform residues"
    return "within 2^-30 of uniform bits" if "statistically" in mask else "uniform bits"


def messages() -> str:
    """Every declared message of all protocols; those of one protocol that show the same share a row."""
    body = []
    for spec in protocols():
        alike: dict[str, list[str]] = {}
        for message in spec.messages:
            learns = f"**{message.shows}**" if message.shows else f"nothing: {_uniform(message.mask)}"
            shown = f"`{message.label}` {message.src} → {message.dst} ({message.mask or 'nothing'})"
            alike.setdefault(learns, []).append(shown)
        body += [[f"`{spec.name}`", "; ".join(shown), learns] for learns, shown in alike.items()]
    return table(("protocol", "messages: from → to (hidden by)", "what the receiver learns"), body)


def operations() -> str:
    """The dispatch table, one section per kind of handler; operations with the same note and result share a row."""
    rows: dict[str, dict[tuple[str, str], list[tuple[str, str]]]] = {kind: {} for kind in KINDS}
    for op in sectorch.supported_ops():
        reached = [n for n in (*op["functions"], *op["in_place"]) if not re.search(r"\._(?!_)", n)]  # private names
        alike = rows.setdefault(op["kind"], {}).setdefault((op["note"], "exact" if op["exact"] else "smooth"), [])
        alike.append((f"`{op['name']}`", ", ".join(f"`{name}`" for name in reached)))
    sections = []
    for kind, found in rows.items():
        if found:
            body = [
                (", ".join(name for name, _ in alike), "; ".join(names for _, names in alike), *what)
                for what, alike in found.items()
            ]
            sections.append(
                f"### {KINDS.get(kind, kind)}\n\n{table(('operations', 'reached by', 'note', 'result'), body)}"
            )
    return "\n\n".join(sections)


def gradients() -> str:
    """The operations that have no gradient, with the way out."""
    ways: dict[str, list[str]] = {}
    for name, way in sorted(NO_GRADIENT.items()):
        ways.setdefault(way, []).append(f"`{name}`")
    return table(("without a gradient", "instead"), ([", ".join(names), way] for way, names in ways.items()))


def papers() -> str:
    """What the words mean, and for each paper a table of its claims and one of its figures and tables."""

    def words(meanings: dict[str, str]) -> str:
        return table(("word", "meaning"), ([f"**{word}**", meaning] for word, meaning in meanings.items()))

    def code(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    def joined(labels: Iterable[str]) -> str:
        """Labels as people write them: "Equation 5, Equation 6, Equation 7, Lemma 1" is "Equations 5 to 7, Lemma 1"."""
        runs: list[tuple[str, list[int]]] = []
        for label in labels:
            kind, _, number = label.rpartition(" ")
            if not (kind and number.isdigit()):
                runs.append((label, []))
            elif runs and runs[-1][0] == kind and runs[-1][1][-1] + 1 == int(number):
                runs[-1][1].append(int(number))
            else:
                runs.append((kind, [int(number)]))
        names = {1: "{0} {1[0]}", 2: "{0}s {1[0]} and {1[1]}"}
        return ", ".join(
            names.get(len(numbers), "{0}s {1[0]} to {2}").format(kind, numbers, numbers[-1]) if numbers else kind
            for kind, numbers in runs
        )

    sections = [f"Of claims:\n\n{words(VERDICTS)}\n\nOf figures and tables:\n\n{words(PAPER_KINDS)}"]
    for paper in LABELS:
        claims = (
            [joined(c.labels), c.says, f"**{c.verdict}**", c.found, code(c.code), code(c.tests)]
            for c in CLAIMS
            if c.paper == paper
        )
        items = (
            [
                joined(i.numbers), i.what, f"**{i.kind}**", i.found, code(i.code),
                f"`{i.command}`" if i.command else "",
            ]
            for i in ITEMS
            if i.paper == paper
        )  # fmt: skip
        head = ("there", "what", "here", "found", "code")
        sections.append(f"## {paper}\n\n{table((*head, 'test'), claims)}\n\n{table((*head, 'command'), items)}")
    return "\n\n".join(sections)


GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "learned.md": {"messages": messages},
    "ops.md": {"operations": operations, "gradients": gradients},
    "errors.md": {"errors": listed},
    "../README.md": {"headline": headline},
    "compare.md": {"ours": beside_others},
    "privhfl.md": {"noise": noise},
    "capride.md": CAPRIDE,
    "replications.md": {"results": accuracies, **CAPC, **CAPRIDE_FIGURES},
    "papers.md": {"papers": papers},
    "huggingface.md": HUGGINGFACE,
    "your-model.md": {"real_size": real_size},
}


def rewritten(name: str) -> str:
    """The text of a document with its tables made anew.

    Raises:
        ValueError: a marker is missing.
    """
    text = (DOCS / name).read_text(encoding="utf-8")
    for marker, make in GENERATED[name].items():
        begin, end = f"<!-- begin {marker} -->", f"<!-- end {marker} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"docs/{name} needs exactly one '{begin}' and one '{end}'")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def _present(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    options = parser.parse_args()
    made = {name: rewritten(name) for name in GENERATED}
    protocols()  # the figures read what they declare
    made |= {f"figures/{name}.svg": drawn(figure) for name, figure in FIGURES.items()}
    made["figures/parties.svg"] = picture()
    made["figures/holders.svg"] = holders()
    made |= {f"figures/{name}.svg": plot() for name, plot in PLOTS.items()}
    stale = [name for name, text in made.items() if text != _present(DOCS / name)]
    for name in stale:
        if options.check:
            print(f"docs/{name} is stale: run python docs/generate.py")
        else:
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(made[name], encoding="utf-8")
            print(f"docs/{name} rewritten")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
