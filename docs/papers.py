"""Every figure and table of the five papers: where the code is, the command, and what came of it.

`docs/generate.py` makes the list of docs/papers.md out of this; `tests/test_papers.py` holds it to the code.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "built": "a protocol or an architecture, which is code here; its messages are tested against the declaration",
    "reproduced": "the paper's claim holds on our data",
    "refuted": "the paper's claim does not hold on our data",
    "open": "our data or seeds do not decide it",
    "measured": "seconds or bytes, on our hardware, beside the paper's",
    "picture": "an illustration or a list of properties; nothing to reproduce",
    "not here": "not reproduced, and why",
}

NUMBERS = {
    "PrivHFL": [*(f"Figure {i}" for i in range(1, 21)), *(f"Table {i}" for i in range(1, 8))],
    "CaPC": [*(f"Figure {i}" for i in range(1, 14)), "Table 1"],
    "CaPriDe": [*(f"Figure {i}" for i in range(1, 6)), "Table 1", "Table 2"],
    "Perturbed models": [*(f"Figure {i}" for i in range(1, 5)), *(f"Table {i}" for i in range(1, 6))],
    "SecSV": [*(f"Figure {i}" for i in range(1, 9)), *(f"Table {i}" for i in range(1, 9))],
}
"""What each paper has."""


@dataclass(frozen=True)
class Item:
    """A figure or a table, or several that belong together.

    Args:
        paper: a key of `NUMBERS`.
        numbers: as they stand there.
        what: it shows.
        kind: one of `KINDS`.
        code: files and folders of the repository.
        command: after `python benchmarks/`, or a whole command; empty where there is none.
        found: in a sentence; for "not here" the reason.
    """

    paper: str
    numbers: tuple[str, ...]
    what: str
    kind: str
    code: tuple[str, ...]
    command: str
    found: str


def _p(paper: str, numbers: str, what: str, kind: str, code: str, command: str, found: str) -> Item:
    return Item(paper, tuple(numbers.split(", ")), what, kind, tuple(code.split()), command, found)


_H, _C, _D, _M, _V = "PrivHFL", "CaPC", "CaPriDe", "Perturbed models", "SecSV"
_STAR = "sectorch/mpc/star"
_PHF, _CAP, _CAD, _PER, _SEC = (
    f"sectorch/protocols/{n}" for n in ("privhfl", "capc", "capride", "perturbation", "secsv")
)

ITEMS = [
    _p(_H, "Figure 1", "overview", "picture", _PHF, "", "the package's files beside the paper: [PrivHFL](privhfl.md)"),
    _p(_H, "Figure 2", "Pi_Share", "built", f"{_STAR}/shares.py", "", "beside the paper's lines in [how it works](how-it-works.md)"),
    _p(_H, "Figure 3", "Pi_Matmul", "built", f"{_STAR}/linear.py", "", "beside the paper's lines in [how it works](how-it-works.md)"),
    _p(_H, "Figure 4", "Pi_DReLU", "built", "sectorch/mpc/leaky.py", "", "shows Q the sign and rough size of every activation; a named mode, see [paper mode](paper-mode.md)"),
    _p(_H, "Figure 5", "Pi_Agg", "built", "sectorch/tensor/aggregation.py", "", "beside the paper's lines in [how it works](how-it-works.md)"),
    _p(_H, "Figure 17", "a whole private inference", "built", "sectorch/nn", "", "every layer is exact and leak-free by default: [how it works](how-it-works.md)"),
    _p(_H, "Figure 18", "Pi_Seed", "built", f"{_STAR}/key_agreement.py", "", "with signed keys, which the paper does not have"),
    _p(_H, "Figure 6", "private and mixup queries over rounds", "reproduced", f"{_PHF} benchmarks/privhfl.py", "privhfl.py fig6", "mixup is above private-data queries; further rounds do not gain"),
    _p(_H, "Figure 7", "architectures by queries", "reproduced", f"{_PHF} benchmarks/privhfl.py", "privhfl.py fig7", "rises with queries; a last batch of two rows spoils 100"),
    _p(_H, "Table 1", "queries and C", "reproduced", f"{_PHF} benchmarks/privhfl.py", "privhfl.py table1", "rises with queries, slightly with C; about half of the gain is there without asking anybody, which the paper does not test"),
    _p(_H, "Table 2, Table 3", "seconds of the three steps, and of a prediction", "measured", f"{_PHF}/query.py", "privhfl.py table2", "faster on two CPU cores than the paper's figures of a GPU"),
    _p(_H, "Table 4", "small networks by batch", "measured", f"{_PHF}/query.py", "privhfl.py table4", "MLP's widths are ours"),
    _p(_H, "Table 5", "one lambda", "refuted", "sectorch/data/expansion.py", "privhfl.py table5", "not \"almost unchanged\": 0.1 and 0.9 are some 5 points below 0.5"),
    _p(_H, "Table 6", "properties of other work", "picture", "benchmarks/privhfl_pictures.py", "privhfl.py table6", "the paper's own marks"),
    _p(_H, "Table 7", "training settings", "built", f"{_PHF}/settings.py", "", "`PRESETS`"),
    _p(_H, "Figure 8", "batches, CPU and GPU", "measured", f"{_PHF}/query.py", "privhfl.py fig8", "the CPU's side; no GPU was at hand"),
    _p(_H, "Figure 9", "federated and heterogeneous federated learning", "picture", "docs/privhfl.md", "", "a drawing of the two settings"),
    _p(_H, "Figure 10", "expanded images", "picture", "benchmarks/privhfl_pictures.py", "privhfl.py fig10", "drawn for four digits"),
    _p(_H, "Figure 19, Figure 20", "mixed and shared images", "picture", "examples/shared_image.py", "python examples/shared_image.py", "drawn for two photographs"),
    _p(_H, "Figure 11", "data set expansion", "refuted", "sectorch/data/expansion.py benchmarks/privhfl_pictures.py", "privhfl.py fig11c", "on digits flips, cutmix and cutout are better than mixup, and noise is no worse; (a, b) in numbers by `privhfl.py fig11ab`"),
    _p(_H, "Figure 12", "query selection", "open", "sectorch/data/selection.py", "privhfl.py fig12", "no strategy is told from random choice by five seeds"),
    _p(_H, "Figure 13", "normalised answers", "refuted", f"{_PHF}/query.py", "privhfl.py fig13", "normalising costs nothing on digits, and the mean of the logits is better than their sum"),
    _p(_H, "Figure 14", "who has which classes", "picture", "sectorch/data/partition.py benchmarks/privhfl_pictures.py", "privhfl.py fig14", "drawn, and in numbers"),
    _p(_H, "Figure 15", "uneven classes", "refuted", "sectorch/data/partition.py", "privhfl.py fig15", "lower where uneven, as in the paper; no gain is left at alpha 0.5"),
    _p(_H, "Figure 16", "private samples", "reproduced", f"{_PHF}", "privhfl.py fig16", "rises with samples"),
    _p(_C, "Figure 1", "the protocol", "built", f"{_CAP}/ask.py", "", "every message is declared: [what each party learns](learned.md)"),
    _p(_C, "Figure 2, Figure 5, Figure 6, Figure 7, Figure 8", "accuracy before and after, by class and party", "reproduced", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig2", "accuracy rises on digits over five seeds, with one architecture and with three; as numbers by class, not as the paper's pictures"),
    _p(_C, "Figure 3", "balanced accuracy under skew, by selection", "open", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig3", "all selections gain 18.6 to 20.4 points; over random -0.4 to +1.3, of which a t test tells k-center's alone from none, one of three comparisons"),
    _p(_C, "Figure 9", "weak classes asked, by selection", "reproduced", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig3", "25.3 to 28.9 % where random asks 18.5 %, told apart by five seeds"),
    _p(_C, "Figure 10", "as Figure 3 on MNIST and Fashion-MNIST", "not here", "benchmarks/capc_paper.py", "capc_paper.py fig3", "`--data mnist` runs it where the data set is on disk"),
    _p(_C, "Figure 4, Figure 12", "gain by parties and epsilon", "open", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig4", "on digits the gain rises with the parties at one noise, 20 to 100, since they have less data each; our epsilon does not depend on the votes, and so not on the parties"),
    _p(_C, "Figure 11", "tuning sigma", "reproduced", "sectorch/dp benchmarks/capc_paper.py", "capc_paper.py fig11", "the vote of 50 models on digits loses little up to sigma 7 and much at 20"),
    _p(_C, "Figure 13", "CPU, network, memory over time", "not here", "benchmarks/capc.py", "", "the paper's testbed of two machines; ours are seconds and bytes by step: `capc.py steps`"),
    _p(_C, "Table 1", "seconds of the steps", "measured", f"{_CAP}/ask.py", "capc.py steps", "step 1a with ReLUs on shares takes a thousandth of the paper's; with squares under CKKS, N = 16384 and 32768, it takes longer than there"),
    _p(_D, "Figure 1", "the framework", "built", f"{_CAD}/exchange.py", "", "three protocols between two parties; each runs as a process of its own in the tests"),
    _p(_D, "Figure 2", "accuracy by round", "reproduced", f"{_CAD} benchmarks/capride.py", "capride.py gains", "two parties of digits, five seeds, without noise: `forward` ends above where it began in all three splits; above local training for as long it is told without overlap only"),
    _p(_D, "Figure 3", "accuracy by parties", "reproduced", f"{_CAD} benchmarks/capride.py", "capride.py gains", "the gain over before grows with 2, 5 and 10 parties, about half of it by training for longer"),
    _p(_D, "Figure 4", "by class", "reproduced", f"{_CAD} benchmarks/capride.py", "capride.py gains", "five parties: every class gains and parties come closer in it, but without overlap, where classes gain and lose"),
    _p(_D, "Figure 5", "by party", "refuted", f"{_CAD} benchmarks/capride.py", "capride.py gains", "every party gains in the first two splits; without overlap 7 of 25 gain nothing"),
    _p(_D, "Table 1", "collaborative gain", "refuted", f"{_CAD} benchmarks/capride.py", "capride.py gains", "FedAvg is above as there, but DML is not \"negligibly\" so, and FedAvg's noise of 0.01 costs little; all without noise: with the default's limit on what answers tell nothing is gained, and five or ten parties lose 2 to 10 points where they share classes"),
    _p(_D, "Table 2", "encryption parameters, memory, seconds", "measured", f"{_CAD} sectorch/ckks", "capride.py table2", "of our networks; the paper's ResNet-18 takes more levels than are measured here"),
    _p(_M, "Figure 1", "the system", "built", f"{_PER}/protocol.py", "", "a protocol of server and clients; every message is declared"),
    _p(_M, "Figure 2", "connections in networks", "built", "sectorch/nn/channels.py", "", "sums, products and concatenations have rules, tested against autograd"),
    _p(_M, "Table 1, Table 2", "accuracy beside FedAvg", "reproduced", f"{_PER}", "perturbation.py --table 1", "equal to FedAvg's but for rounding, on bundled data"),
    _p(_M, "Table 3", "with perturbed gradients", "reproduced", f"{_PER}", "perturbation.py --table 3", "equal to FedAvg's but for rounding, on bundled data"),
    _p(_M, "Table 4, Figure 3", "gradient inversion", "reproduced", "benchmarks/perturbation_attacks.py", "perturbation.py --table 4", "the masked update shows the attack nothing at FedAvg's accuracy; unmasked it is the plain gradient; five images of digits, a small net, five seeds, short runs; of a ResNet-20 the errors alone, with LeakyReLU, since through ReLU the attack fails on plain gradients"),
    _p(_M, "Figure 4", "training curves", "reproduced", f"{_PER}", "perturbation.py --table figure4", "the curves lie on each other"),
    _p(_M, "Table 5", "seconds by phase", "measured", f"{_PER}", "perturbation.py --table 5", "of MLP-3 and a CNN, with masks; the paper's ResNet-56 on 224 x 224 is not measured"),
    _p(_V, "Figure 1", "the setting", "built", f"{_SEC}/secsv.py", "", "server, auxiliary server, clients: roles and edges are declared"),
    _p(_V, "Figure 2, Table 1", "Matrix Squaring", "built", f"{_SEC}/hesv.py", "secsv.py table4", "with Table 1's counts of products and rotations"),
    _p(_V, "Figure 3, Figure 4", "Matrix Reducing", "built", "sectorch/ckks/linalg.py", "secsv.py table4", "held to the product in the clear"),
    _p(_V, "Figure 5, Figure 6, Figure 7", "SampleSkip's regions and proofs", "picture", f"{_SEC}/algorithm.py", "", "Theorem 6.3 is a test"),
    _p(_V, "Table 2", "running time and error", "reproduced", f"{_SEC}", "secsv.py table2", "all four classifiers and protocols; SecSV computes 29 to 59 times as fast as HESV by the paper's letter (the paper: 7.2 to 36.6, with communication), 21 to 61 with communication; errors as small; SecretSV's does not grow here, and of the CNN it computes faster; no columns of parallel rounds"),
    _p(_V, "Table 3", "SampleSkip beside estimators", "refuted", f"{_SEC}/settings.py", "secsv.py table3", "of the logistic classifier, five seeds: every estimator has a large error, as there; but with a budget group testing and KernelSHAP are faster than exact, and SampleSkip saves nothing; the others were not run over seeds"),
    _p(_V, "Table 4", "Matrix Reducing against Matrix Squaring", "reproduced", "sectorch/ckks/linalg.py", "secsv.py table4", "Reducing takes less in every case"),
    _p(_V, "Figure 8", "samples skipped", "reproduced", f"{_SEC}/algorithm.py", "secsv.py figure8", "in the clear, 11 to 70 % skipped, of a DNN with 7 hidden layers 7 %; none wrongly by linear classifiers, at most 0.4 % by deep ones; encrypted, where it saves ciphertexts, or `--skip always`"),
    _p(_V, "Table 5, Table 6, Table 7, Table 8", "the classifiers", "built", f"{_SEC}/program.py", "", "sizes from the authors' repository"),
]  # fmt: skip
