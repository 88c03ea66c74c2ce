"""Tables of measured figures, made of the rows that benchmarks wrote into benchmarks/results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sectorch.federated.command import differs

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def rows_of(paper: str, command: str) -> list[dict]:
    """What `benchmarks/PAPER.py COMMAND --json benchmarks/results/PAPER/COMMAND.json` wrote."""
    return json.loads((RESULTS / paper / f"{command}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Markdown, the first columns, of words, to the left and the others to the right."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(values: Sequence[float]) -> str:
    """The mean and its standard deviation."""
    return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}"


def difference(ones: Sequence[float], others: Sequence[float]) -> str:
    """Of the same seeds, in points; in italics what a t test does not tell from none."""
    found = [100 * (a - b) for a, b in zip(ones, others, strict=True)]
    shown = f"{statistics.mean(found):+.1f} ± {statistics.stdev(found):.1f}"
    return shown if differs(found) else f"*{shown}*"


ACCURACIES = {
    "gains": "What the queries gain",
    "fig15": "Figure 15: uneven data",
}
"""The commands whose rows are accuracies, and what each is."""


def accuracies() -> str:
    """Each condition alone, after, what it gained, and against its part's first condition."""
    body = []
    for command, what in ACCURACIES.items():
        rows = rows_of("privhfl", command)
        first = rows[0]["after_per_seed"]
        body.append([f"**{what}** (`{command}`)", "", "", "", "", ""])
        body += [
            [
                row["label"], percent(row["alone_per_seed"]), percent(row["after_per_seed"]),
                difference(row["after_per_seed"], row["alone_per_seed"]),
                "" if row is rows[0] else difference(row["after_per_seed"], first),
                row["paper"].replace("(not in the paper)", ""),
            ]
            for row in rows
        ]  # fmt: skip
    made = table(["", "alone", "after", "gain", "against the first", "paper"], body)
    return made.replace("| ---: |\n", "| --- |\n", 1)


def noise() -> str:
    """Accuracy and epsilon by sigma."""
    rows = rows_of("privhfl", "noise")
    first = rows[0]["after_per_seed"]
    body = []
    for row in rows:
        spent = [f"{row['epsilon'][who]:.4g}" if row["epsilon"] else "none" for who in ("one", "all")]
        after, alone = row["after_per_seed"], row["alone_per_seed"]
        against = "" if row is rows[0] else difference(after, first)
        body.append([row["label"], *spent, percent(alone), percent(after), difference(after, alone), against])
    return table(["", "epsilon towards one", "towards all", "alone", "after", "gain", "against no noise"], body)


def huggingface() -> str:
    """A table for each kind of models, a row for those of alike rounds; then the others, each with its reason."""
    rows = json.loads((RESULTS / "huggingface.json").read_text(encoding="utf-8"))
    right = {name: row for name, row in rows.items() if "error" in row and "defect" not in row}
    differ = sum("error" in row and "defect" in row for row in rows.values())
    own = sum("error" not in row and "defect" in row for row in rows.values())
    refused = len(rows) - len(right) - differ - own
    counts = (
        f"Of {len(rows)}, {len(right)} are right, {refused} refused by a typed error of ours, {own} by the model's own",
        f"while its code runs as compiled, and {differ} differ.",
    )
    span = lambda values: "to".join(f" {v:.1f} " for v in dict.fromkeys((min(values), max(values)))).strip()
    body = []
    for kind in dict.fromkeys(row["kind"] for row in rows.values()):
        found = {name: row for name, row in right.items() if row["kind"] == kind}
        for band in sorted({row["rounds"] // 100 for row in found.values()}):
            alike = {name: row for name, row in found.items() if row["rounds"] // 100 == band}
            classes = ", ".join(f"{name} ({row['rounds']}, {row['bytes'] / 1e6:.1f})" for name, row in alike.items())
            seconds = (span([row[key] for row in alike.values()]) for key in ("first_s", "second_s"))
            body.append([kind, classes, f"{max(row['error'] for row in alike.values()):.0e}", *seconds])
    head = ("kind", "classes (rounds, MB)", "error at most", "first call, s", "second call, s")
    alone = [[name, f"right, operation by operation: {row['alone']}"] for name, row in right.items() if row["alone"]]
    said: dict[str, list[str]] = {}
    for name, text in [*alone, *([name, _reason(row)] for name, row in rows.items() if name not in right)]:
        said.setdefault(text, []).append(name)
    others = [[", ".join(names), text] for text, names in said.items()]
    lists = [table(head, body, words=2), table(("classes", "what happens"), others, words=2)]
    return "\n\n".join([" ".join(counts), *lists])


def _reason(row: dict) -> str:
    """Why a model is refused, or how far it is off."""
    text = re.sub(r"; nearest supported: .*|layer \w+ at \S+: ", "", row.get("defect") or row["refused"])
    return text.replace("|", "\\|").replace("\n", " ")


def generation() -> str:
    """How many causal models generate the plain model's tokens, and which do not."""
    rows = json.loads((RESULTS / "generation.json").read_text(encoding="utf-8"))["families"]
    rows = {name.removesuffix("ForCausalLM"): row for name, row in rows.items() if "plain" not in row}
    same = [name for name, row in rows.items() if "same" in row and row["same"] == row["of"]]
    differ = [name for name, row in rows.items() if "same" in row and row["same"] != row["of"]]
    refused = [name for name, row in rows.items() if "refused" in row]
    said = f"Of {len(rows)} classes {len(same)} give every token: {', '.join(same)}."
    others = f"{len(differ)} differ{': ' if differ else ''}{', '.join(differ)}."
    return f"{said} {others} {len(refused)} are refused by a typed error: {', '.join(refused)}."


def real_size() -> str:
    """The memory of models of real size, and what GPT-2 generates."""
    rows = json.loads((RESULTS / "real_size.json").read_text(encoding="utf-8"))
    memory = ", ".join(f"{name} {row['peak_gb']:.1f} GB" for name, row in rows.items())
    texts = json.loads((RESULTS / "generation.json").read_text(encoding="utf-8"))
    one, apart = texts["gpt2"], texts["processes"]
    ahead, online = (one["step_cost"][phase]["bytes"] / 1e6 for phase in ("offline", "online"))
    said = (
        f"GPT-2 small continues a prompt of {one['prompt']} tokens by {one['tokens']}: {one['same']} of them are the",
        f"plain model's ({one['different_tokens']} different ones). In one process {one['step_s']:.1f} s a token, and",
        f"{one['step_online_s']:.2f} s where it was prepared; {ahead:.0f} MB ahead and {online:.0f} MB online,",
        f"{one['step_cost']['online']['rounds']} rounds; the first token takes {one['first_s']:.0f} s with tracing and",
        f"the masking of the weights; {one['peak_gb']:.1f} GB of memory. As three processes over TLS {apart['same']}",
        f"of {apart['tokens']} tokens are the same, {apart['step_s']:.1f} s a token; memory of the querying party",
        f"{apart['Q_peak_gb']:.1f} GB, of the answering party {apart['chat_peak_gb']:.1f} GB, of the server",
        f"{apart['server_peak_gb']:.1f} GB.",
    )
    return f"Largest memory of the process: {memory}.\n\n" + " ".join(said)


def headline() -> str:
    """For the README and the home page, and what it was measured on."""
    found = json.loads((RESULTS / "headline.json").read_text(encoding="utf-8"))
    head = ("one input", "plain s", "secure s", "prepared ahead s", "MB", "of them online", "rounds", "error")
    sizes = lambda row: (f"{row[key] / 1e6:,.{0 if row[key] > 1e8 else 2}f}" for key in ("bytes", "online_bytes"))
    times = lambda row: (
        f"{row[key]:.0f}" if row[key] > 10 else f"{row[key]:.2g}" for key in ("plain_s", "secure_s", "online_s")
    )
    body = [
        [row["what"], *times(row), *sizes(row), f"{row['rounds']:,}", f"{row['error']:.0e}"]
        for row in found["rows"].values()
    ]
    about = found["about"]
    said = (
        f"All three parties in one process on {about['cores']} cores ({about['processor']}); seconds have no network.",
        f"Command: `python benchmarks/headline.py`, commit {about['commit']}, {about['date']}.",
    )
    return "\n\n".join((table(head, body), "\n".join(said)))


def beside_others() -> str:
    """For the page on other systems: what was measured, how much of it, and by which command."""
    read = lambda name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    body = []
    text = read("generation")["gpt2"]
    said = (
        f"{text['step_s']:.1f} s; {text['step_online_s']:.2f} where prepared; {text['same']} of {text['tokens']} right"
    )
    body.append(["GPT-2 small, one more token", said, "generation"])
    for name, what in (
        ("huggingface", "architectures of `transformers`, small"),
        ("timm", "networks of timm"),
        ("torchvision", "classifiers of torchvision"),
    ):
        rows = read(name)
        right = sum("error" in row and "defect" not in row for row in rows.values())
        why = "; the table says of each other why not" if right < len(rows) else ""
        body.append([what, f"{right} of {len(rows)} run, and are right{why}", name])
    row = read("training")
    steps = [f"{row[who]['seconds']['median']:.2f} s" for who in ("sectorch", "CrypTen 0.4.1")]
    said = (
        f"{steps[0]}; CrypTen 0.4.1 {steps[1]} on the same machine, in turn; [what differs](training.md#how-it-works)"
    )
    body.append([f"a training step of LeNet on {row['batch']} pictures", said, "training"])
    for name, row in read("peers")["nets"].items():
        sides = {side: row[side] for side in ("sectorch", "CrypTen 0.4.1", "SPU 0.9.5") if side in row}
        said = "; ".join(f"{who} {it['seconds']['median']:.3g} s, error {it['error']:.0e}" for who, it in sides.items())
        said += "; on the same machine, in turn"
        body.append([f"an inference of {name}", said, "peers"])
    there = read("gpu")
    for row in there["rows"]:
        if row["net"] != "lenet":
            ahead = f"; {row['online_s']:.3g} s where prepared ahead" if "online_s" in row else ""
            said = f"{row['secure_s']:.3g} s{ahead}"
            body.append([f"{row['net']}, batch of {row['batch']}, all parties on an H100", said, "gpu"])
    lines = [[what, found, f"`benchmarks/results/{name}.json`"] for what, found, name in body]
    return "\n".join("| " + " | ".join(line) + " |" for line in [["what", "figure", "file"], ["---"] * 3, *lines])


def processes() -> str:
    """The models that were answered by processes, and those that were refused."""
    rows = json.loads((RESULTS / "processes.json").read_text(encoding="utf-8"))
    answered = {name: row for name, row in rows.items() if "equal" in row}
    body = []
    for equal, what in ((True, "equal in every bit"), (False, "different")):
        shown = ", ".join(
            f"{name} ({row['second_s']:.2f}, {row['bytes'] / 1e6:.2f}, {row['rounds']})"
            for name, row in answered.items()
            if row["equal"] is equal
        )
        body += [[what, shown]] if shown else []
    body += [[f"refused: {row['refused']}", name] for name, row in rows.items() if name not in answered]
    return table(("result", "models (s, MB, rounds)"), body, words=2)


HUGGINGFACE: dict[str, Callable[[], str]] = {
    "huggingface": huggingface,
    "generation": generation,
    "processes": processes,
}
