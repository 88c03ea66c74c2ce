"""Every claim, figure and table of the five papers: where the code is, the test or command, and what came of it.

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
"""The figures and tables that each paper has; those that are protocols are among the claims below."""


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
    _p(_H, "Figure 1", "overview", "picture", _PHF, "", "Algorithm 1 beside the code: [PrivHFL](privhfl.md)"),
    _p(_H, "Figure 6", "private and mixup queries over rounds", "reproduced", f"{_PHF} benchmarks/privhfl.py", "privhfl.py fig6", "mixup is above private-data queries; further rounds do not gain"),
    _p(_H, "Figure 7", "architectures by queries", "reproduced", f"{_PHF} benchmarks/privhfl.py", "privhfl.py fig7", "rises with queries; a last batch of two rows spoils 100"),
    _p(_H, "Table 1", "queries and C", "reproduced", f"{_PHF} benchmarks/privhfl.py", "privhfl.py table1", "rises with queries, slightly with C; about half of the gain is there without asking anybody, which the paper does not test"),
    _p(_H, "Table 2, Table 3", "seconds of the three steps, and of a prediction", "measured", f"{_PHF}/query.py", "privhfl.py table2", "faster on two CPU cores than the paper's figures of a GPU"),
    _p(_H, "Table 4", "small networks by batch", "measured", f"{_PHF}/query.py", "privhfl.py table4", "MLP's widths are ours"),
    _p(_H, "Table 5", "one lambda", "refuted", "sectorch/data/selection.py", "privhfl.py table5", "not \"almost unchanged\": 0.1 and 0.9 are some 5 points below 0.5"),
    _p(_H, "Table 6", "properties of other work", "picture", "benchmarks/privhfl_pictures.py", "privhfl.py table6", "the paper's own marks"),
    _p(_H, "Table 7", "training settings", "built", f"{_PHF}/settings.py", "", "`PRESETS`"),
    _p(_H, "Figure 8", "batches, CPU and GPU", "measured", f"{_PHF}/query.py", "privhfl.py fig8", "the CPU's side; no GPU was at hand"),
    _p(_H, "Figure 9", "federated and heterogeneous federated learning", "picture", "docs/privhfl.md", "", "a drawing of the two settings"),
    _p(_H, "Figure 10", "expanded images", "picture", "benchmarks/privhfl_pictures.py", "privhfl.py fig10", "drawn for four digits"),
    _p(_H, "Figure 19, Figure 20", "mixed and shared images", "picture", "examples/shared_image.py", "python examples/shared_image.py", "drawn for two photographs"),
    _p(_H, "Figure 11", "data set expansion", "refuted", "sectorch/data/selection.py benchmarks/privhfl_pictures.py", "privhfl.py fig11c", "on digits flips, cutmix and cutout are better than mixup, and noise is no worse; (a, b) in numbers by `privhfl.py fig11ab`"),
    _p(_H, "Figure 12", "query selection", "open", "sectorch/data/selection.py", "privhfl.py fig12", "no strategy is told from random choice by five seeds"),
    _p(_H, "Figure 13", "normalised answers", "refuted", f"{_PHF}/query.py", "privhfl.py fig13", "normalising costs nothing on digits, and the mean of the logits is better than their sum"),
    _p(_H, "Figure 14", "who has which classes", "picture", "sectorch/data/partition.py benchmarks/privhfl_pictures.py", "privhfl.py fig14", "drawn, and in numbers"),
    _p(_H, "Figure 15", "uneven classes", "refuted", "sectorch/data/partition.py", "privhfl.py fig15", "lower where uneven, as in the paper; no gain is left at alpha 0.5"),
    _p(_H, "Figure 16", "private samples", "reproduced", f"{_PHF}", "privhfl.py fig16", "rises with samples"),
    _p(_C, "Figure 2, Figure 5, Figure 6, Figure 7, Figure 8", "accuracy before and after, by class and party", "reproduced", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig2", "accuracy rises on digits over five seeds, with one architecture and with three; as numbers by class, not as the paper's pictures"),
    _p(_C, "Figure 3", "balanced accuracy under skew, by selection", "open", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig3", "all selections gain 18.6 to 20.4 points; over random -0.4 to +1.3, of which a t test tells k-center's alone from none, one of three comparisons"),
    _p(_C, "Figure 9", "weak classes asked, by selection", "reproduced", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig3", "25.3 to 28.9 % where random asks 18.5 %, told apart by five seeds"),
    _p(_C, "Figure 10", "as Figure 3 on MNIST and Fashion-MNIST", "not here", "benchmarks/capc_paper.py", "capc_paper.py fig3", "`--data mnist` runs it where the data set is on disk"),
    _p(_C, "Figure 4, Figure 12", "gain by parties and epsilon", "open", f"{_CAP} benchmarks/capc_paper.py", "capc_paper.py fig4", "on digits the gain rises with the parties at one noise, 20 to 100, since they have less data each; our epsilon does not depend on the votes, and so not on the parties"),
    _p(_C, "Figure 11", "tuning sigma", "reproduced", "sectorch/dp benchmarks/capc_paper.py", "capc_paper.py fig11", "the vote of 50 models on digits loses little up to sigma 7 and much at 20"),
    _p(_C, "Figure 13", "CPU, network, memory over time", "not here", "benchmarks/capc.py", "", "the paper's testbed of two machines; ours are seconds and bytes by step: `capc.py steps`"),
    _p(_C, "Table 1", "seconds of the steps", "measured", f"{_CAP}/ask.py", "capc.py steps", "step 1a with ReLUs on shares takes a thousandth of the paper's; with squares under CKKS, N = 16384 and 32768, it takes longer than there"),
    _p(_D, "Figure 2", "accuracy by round", "reproduced", f"{_CAD} benchmarks/capride.py", "capride.py gains", "two parties of digits, five seeds, without noise: `forward` ends above where it began in all three splits; above local training for as long it is told without overlap only"),
    _p(_D, "Figure 3", "accuracy by parties", "reproduced", f"{_CAD} benchmarks/capride.py", "capride.py gains", "the gain over before grows with 2, 5 and 10 parties, about half of it by training for longer"),
    _p(_D, "Figure 4", "by class", "reproduced", f"{_CAD} benchmarks/capride.py", "capride.py gains", "five parties: every class gains and parties come closer in it, but without overlap, where classes gain and lose"),
    _p(_D, "Figure 5", "by party", "refuted", f"{_CAD} benchmarks/capride.py", "capride.py gains", "every party gains in the first two splits; without overlap 7 of 25 gain nothing"),
    _p(_D, "Table 1", "collaborative gain", "refuted", f"{_CAD} benchmarks/capride.py", "capride.py gains", "FedAvg is above as there, but DML is not \"negligibly\" so, and FedAvg's noise of 0.01 costs little; all without noise: with the default's limit on what answers tell nothing is gained, and five or ten parties lose 2 to 10 points where they share classes"),
    _p(_D, "Table 2", "encryption parameters, memory, seconds", "measured", f"{_CAD} sectorch/ckks", "capride.py table2", "of our networks; the paper's ResNet-18 takes more levels than are measured here"),
    _p(_M, "Figure 2", "connections in networks", "built", "sectorch/nn/channels.py", "", "sums, products and concatenations have rules, tested against autograd"),
    _p(_M, "Table 1, Table 2", "accuracy beside FedAvg", "reproduced", f"{_PER}", "perturbation.py --table 1", "equal to FedAvg's but for rounding, on bundled data"),
    _p(_M, "Table 3", "with perturbed gradients", "reproduced", f"{_PER}", "perturbation.py --table 3", "equal to FedAvg's but for rounding, on bundled data"),
    _p(_M, "Table 4, Figure 3", "gradient inversion", "reproduced", "benchmarks/perturbation_attacks.py", "perturbation.py --table 4", "the masked update shows the attack nothing at FedAvg's accuracy; unmasked it is the plain gradient; five images of digits, a small net, five seeds, short runs; of a ResNet-20 the errors alone, with LeakyReLU, since through ReLU the attack fails on plain gradients"),
    _p(_M, "Figure 4", "training curves", "reproduced", f"{_PER}", "perturbation.py --table figure4", "the curves lie on each other"),
    _p(_M, "Table 5", "seconds by phase", "measured", f"{_PER}", "perturbation.py --table 5", "of MLP-3 and a CNN, with masks; the paper's ResNet-56 on 224 x 224 is not measured"),
    _p(_V, "Figure 1", "the setting", "built", f"{_SEC}/secsv.py", "", "server, auxiliary server, clients: roles and edges are declared"),
    _p(_V, "Table 1", "costs of the two matrix products", "built", "sectorch/ckks/linalg.py", "secsv.py table4", "the counts of products and rotations are Lemma 6.1's"),
    _p(_V, "Figure 5, Figure 6, Figure 7", "SampleSkip's regions and proofs", "picture", f"{_SEC}/algorithm.py", "", "Theorem 6.3 is a test"),
    _p(_V, "Table 2", "running time and error", "reproduced", f"{_SEC}", "secsv.py table2", "all four classifiers and protocols; SecSV computes 29 to 59 times as fast as HESV by the paper's letter (the paper: 7.2 to 36.6, with communication), 21 to 61 with communication; errors as small; SecretSV's does not grow here, and of the CNN it computes faster; no columns of parallel rounds"),
    _p(_V, "Table 3", "SampleSkip beside estimators", "refuted", f"{_SEC}/settings.py", "secsv.py table3", "of the logistic classifier, five seeds: every estimator has a large error, as there; but with a budget group testing and KernelSHAP are faster than exact, and SampleSkip saves nothing; the others were not run over seeds"),
    _p(_V, "Table 4", "Matrix Reducing against Matrix Squaring", "reproduced", "sectorch/ckks/linalg.py", "secsv.py table4", "Reducing takes less in every case"),
    _p(_V, "Figure 8", "samples skipped", "reproduced", f"{_SEC}/algorithm.py", "secsv.py figure8", "in the clear, 11 to 70 % skipped, of a DNN with 7 hidden layers 7 %; none wrongly by linear classifiers, at most 0.4 % by deep ones; encrypted, where it saves ciphertexts, or `--skip always`"),
    _p(_V, "Table 5, Table 6, Table 7, Table 8", "the classifiers", "built", f"{_SEC}/program.py", "", "sizes from the authors' repository"),
]  # fmt: skip


# Claims: algorithms, protocols, lemmas, theorems, definitions and equations.

VERDICTS = {
    "built": "an algorithm or a protocol: the code computes what it says, and the test compares with a direct computation",
    "holds": "the claim holds as it is printed",
    "misprint": "it holds once a printed sign, factor or index is put right",
    "incomplete": "it holds under a condition, or with a step, that the paper does not state",
    "false": "the test is a counterexample",
    "not built": "there is no code for it, and why",
}

LABELS = {
    "PrivHFL": [
        "Algorithm 1", *(f"Figure {i}" for i in (2, 3, 4, 5, 17, 18)), *(f"Theorem {i}" for i in range(1, 7)),
        *(f"Definition {i}" for i in range(1, 4)), *(f"Equation {i}" for i in range(1, 7)),
        "3.3 (ii)", "3.3 (iii)", "3.4", "B.1", "C.5", "C.6",
    ],
    "CaPC": [
        "Figure 1", *(f"Theorem {i}" for i in (1, 2)), *(f"Definition {i}" for i in range(1, 12)),
        *(f"Equation {i}" for i in range(1, 12)), "3.1", "3.3", "4.1", "4.2", "4.4", "5", "Appendix E",
    ],
    "CaPriDe": ["Algorithm 1", "Figure 1", *(f"Equation {i}" for i in range(1, 13)), "2.1", "2.2", "3.1", "3.3", "4.2", "4.4"],
    "Perturbed models": [
        "Figure 1", *(f"Lemma {i}" for i in range(1, 9)), *(f"Definition {i}" for i in (1, 2)),
        *(f"Equation {i}" for i in range(1, 32)), "III-C 2", "III-D", "V-E",
    ],
    "SecSV": [
        *(f"Algorithm {i}" for i in range(1, 11)), "Figure 2", "Figure 3", "Figure 4",
        *(f"Lemma {i}" for i in ("5.2", "5.3", "6.1", "6.4", "B.1")), "Theorem 6.3", "Proposition 6.8",
        *(f"Definition {i}" for i in ("6.2", "6.5", "6.6", "6.7")), "2, sharing", "2, Shapley value", "3, FSV", "4.2.1", "4.2.2",
        "6.2.2", "6.2.4", "6.2.5",
    ],
}  # fmt: skip
"""Every algorithm, protocol, lemma, theorem, proposition, definition and numbered equation of each paper, and sections with
a claim that has no number. The text of SecSV that we have lacks its formulas; they are from the proofs and the code."""


@dataclass(frozen=True)
class Claim:
    """One of them, or several that belong together.

    Args:
        paper: a key of `LABELS`.
        labels: as they stand there.
        says: in a sentence.
        verdict: one of `VERDICTS`.
        found: what is wrong or missing, and what is here instead; empty where it holds.
        code: `path::name` of functions and classes of the repository; empty for "not built".
        tests: `path::name`.
    """

    paper: str
    labels: tuple[str, ...]
    says: str
    verdict: str
    found: str
    code: tuple[str, ...]
    tests: tuple[str, ...]


def _c(paper: str, labels: str, says: str, verdict: str, found: str, code: str, tests: str) -> Claim:
    return Claim(paper, tuple(labels.split("; ")), says, verdict, found, tuple(code.split()), tuple(tests.split()))


_T = "tests/test_paper_claims.py::test"
_OWN = "tests/testing/test_own_protocols.py::test_a_protocol_holds_its_word"
_HT, _CT, _DT, _MT, _VT = (
    f"tests/{name}/test_{name}" for name in ("privhfl", "capc", "capride", "perturbation", "secsv")
)
_ALG, _LEM, _ATT = f"{_PER}/algorithm.py", f"{_MT}_lemmas.py::test", f"{_MT}_attacks.py::test"

CLAIMS = [
    # PrivHFL
    _c(_H, "Algorithm 1", "in each iteration every client asks a fraction C of the others about B expanded samples, and retrains on the sums of their logits", "built", "all ask the models of the iteration's start; `sequential=True` is the paper's letter; with `labels=\"shares\"` P_Q retrains without seeing a label", f"{_PHF}/algorithm.py::privhfl {_PHF}/algorithm.py::iteration {_PHF}/algorithm.py::retrain_unseen", f"{_HT}_algorithm.py::test_a_run_and_its_shape {_HT}_algorithm.py::test_labels_that_stay_in_shares_train_the_models_that_plain_labels_train {_HT}_algorithm.py::test_secure_and_plain_give_the_same {_HT}_algorithm.py::test_order_matters_only_when_sequential"),
    _c(_H, "Figure 2", "Pi_Share: one message to the server shares a query between it and P_A", "built", "", f"{_STAR}/shares.py::share", "tests/test_protocols.py::test_shares_are_halves_of_the_value"),
    _c(_H, "Theorem 1", "Pi_Share is secure against the server or any clients", "holds", "", f"{_STAR}/shares.py::share", f"{_OWN}"),
    _c(_H, "Figure 3", "Pi_Matmul: shares of w x, for a w that P_A knows and a shared x, with a triple of P_Q's", "misprint", "the server's share is printed as (w + a) b times [c]_1; it has to be (w + a) b less [c]_1", f"{_STAR}/linear.py::mask_weight {_STAR}/linear.py::linear", f"tests/test_protocols.py::test_linear_by_a_secret_matrix {_T}_privhfl_beavers_shares_as_printed_add_up_to_something_else"),
    _c(_H, "Theorem 2", "Pi_Matmul is secure against the server or any clients", "holds", "P_A's masked weight serves all calls of a session; the server's mask is fresh in each", f"{_STAR}/linear.py::linear", f"{_OWN}"),
    _c(_H, "Figure 4", "Pi_DReLU: P_Q opens z = r x under a random positive r, and shares its sign", "incomplete", "r x must not wrap around: here r is at most 2^12 and |x| below 2^51; the figure's result is the sign, and DReLU is 1 less that. The default ReLU is another, exact and without a leak", "sectorch/mpc/leaky.py::leaky_drelu sectorch/mpc/star/compare.py::drelu", "tests/test_secure.py::test_paper_mode_is_right_up_to_the_limit_and_refuses_what_is_beyond tests/test_protocols.py::test_signs_are_exact"),
    _c(_H, "Theorem 3", "Pi_DReLU is secure, since r x is uniform", "false", "it is zero exactly where x is, has x's sign and follows its size; of d inputs, d + 1 questions asked repeatedly give P_Q the first layer's weights ([paper mode](paper-mode.md))", "sectorch/mpc/leaky.py::leaky_drelu", "tests/test_leaks.py::test_the_attack_on_paper_mode tests/testing/test_own_protocols.py::test_paper_mode_does_not_pass"),
    _c(_H, "3.3 (ii); Theorem 4", "ReLU(x) = x DReLU(x) by an instance of Pi_Matmul, and secure because its parts are", "false", "Pi_Matmul takes a factor that P_A knows, and here both are shared: it takes two instances, or a product of shared values; and Theorem 3 is a part", "sectorch/mpc/leaky.py::leaky_relu_privhfl sectorch/mpc/star/multiply.py::multiply", f"{_T}_privhfl_one_pi_matmul_is_no_product_of_two_shared_values tests/test_protocols.py::test_products_of_two_secrets_broadcast tests/testing/test_own_protocols.py::test_paper_mode_does_not_pass"),
    _c(_H, "3.3 (iii)", "the largest of m values in log2 m levels and m - 1 ReLUs, by max(x, y) = ReLU(x - y) + y", "incomplete", "a difference takes one bit more than its values, so that r is at most 2^10", "sectorch/mpc/leaky.py::leaky_maxpool_privhfl", "tests/test_secure.py::test_paper_mode_pools_by_the_papers_comparisons"),
    _c(_H, "Theorem 5", "Pi_MaxPool is secure because Pi_ReLU is", "false", "P_Q sees which of two values is larger, and about how far they are apart; the default maximum shows nothing", "sectorch/mpc/leaky.py::leaky_maxpool_privhfl sectorch/mpc/star/maximum.py::max_tree", f"tests/testing/test_own_protocols.py::test_paper_mode_does_not_pass {_OWN}"),
    _c(_H, "Figure 5", "Pi_Agg: P_Q gets the sum of the answering parties' logits", "built", "", f"{_STAR}/shares.py::aggregate sectorch/tensor/holders.py::aggregate", f"{_HT}_query.py::test_equals_the_clear tests/test_ledger.py::test_costs_of_aggregation"),
    _c(_H, "Theorem 6", "Pi_Agg shows P_Q the sum alone and the server nothing", "holds", "with one answering party the sum is its logits, and clients that help P_Q subtract theirs: the run's statement says so, and noise at the server is an option", f"{_STAR}/shares.py::aggregate {_STAR}/shares.py::aggregate_noisy", f"{_HT}_query.py::test_q_receives_the_sum_and_nothing_else_that_depends_on_the_models {_HT}_query.py::test_statement"),
    _c(_H, "3.4", "differential privacy may be plugged in, which is left to others", "built", "discrete Gaussian noise at the server on sums of normalised answers, charged before the first message. At an epsilon of 6 and ten clients answers are of no use", f"{_STAR}/shares.py::aggregate_noisy {_PHF}/settings.py::NoisySums", f"{_HT}_query.py::test_answers_move_the_sum_by_no_more_than_is_charged {_HT}_algorithm.py::test_an_answering_party_is_charged_before_the_first_message"),
    _c(_H, "Figure 17", "a whole prediction is these protocols, one after another", "incomplete", "each product doubles the fraction bits, and no step of the paper cuts them; here each is rounded exactly", f"{_STAR}/truncate.py::truncate {_PHF}/query.py::secure_query", "tests/test_secure.py::test_paper_mode_pools_by_the_papers_comparisons tests/test_protocols.py::test_truncation_rounds_half_up"),
    _c(_H, "Figure 18", "Pi_Seed: two clients agree on a seed by Diffie and Hellman through the server", "incomplete", "a server that swaps the keys reads everything; here X25519 with keys that both clients sign", f"{_STAR}/key_agreement.py::seed", "tests/test_randomness.py::test_both_ends_agree tests/network/test_network_identity.py::test_a_server_in_the_middle_is_noticed_before_a_key_is_used"),
    _c(_H, "Equation 1", "a query is lambda x_i + (1 - lambda) x_j", "built", "", "sectorch/data/selection.py::expand", "tests/data/test_data_expansion.py::test_mixup_is_equation_1"),
    _c(_H, "B.1", "or a query is cut out of two samples (cutmix), or a sample with a box blacked out (cutout)", "built", "boxes are as in those methods' own papers, for this one names none", "sectorch/data/selection.py::expand", "tests/data/test_data_expansion.py::test_cutmix_takes_a_box_of_another_image tests/data/test_data_expansion.py::test_cutout_blackens_a_box_of_one_image"),
    _c(_H, "Definition 1; Equation 2", "margin sampling takes the sample nearest to a class's hyperplane", "not built", "a network has none; `margin` is CaPC's Equation 7", "", ""),
    _c(_H, "Definition 2; Equation 3", "entropy sampling takes the sample of the largest entropy", "built", "", "sectorch/data/selection.py::entropy_of", "tests/data/test_data_selection.py::test_margin_and_entropy_take_the_most_uncertain"),
    _c(_H, "Definition 3; Equation 4", "k-center takes the points that leave the least largest distance", "incomplete", "the greedy choice is within twice of that", "sectorch/data/selection.py::select", f"{_T}_the_greedy_k_center_is_within_twice_the_best tests/data/test_data_selection.py::test_kcenter_is_farthest_first"),
    _c(_H, "Equation 5", "Beaver's product of two shared values (C.4.1)", "misprint", "P_1's share is ([x]_0 + a) b - [c]_1, not ([x]_0 + a) [y]_1 - [c]_1", f"{_STAR}/multiply.py::multiply", f"{_T}_privhfl_beavers_shares_as_printed_add_up_to_something_else tests/test_protocols.py::test_matrix_products_of_two_secrets"),
    _c(_H, "Equation 6; C.6", "a product mod 2^64 is ten products of 16-bit blocks in doubles", "holds", "that a product is exact only if both factors are within 2^26 is not so: that is enough, not needed. On GPUs, six products of signed digits of 22 bits are taken here", "sectorch/ring/products.py::limb_matmul", f"{_T}_privhfl_ten_of_sixteen_products_of_blocks_are_left {_T}_privhfl_factors_above_2_to_26_may_have_an_exact_product tests/test_products.py::test_products_of_any_shape"),
    _c(_H, "C.5", "CaPC without channels between clients costs more communication", "not built", "CaPC's own messages pass through the server under pads of the two clients' key, each over two links: neither of the two modified protocols is needed", "", "tests/garbled/test_garbled_transfer.py::test_a_relayed_message_arrives_and_S_sees_the_pad_alone"),
    # CaPC
    _c(_C, "Figure 1", "steps 1a to 3: encrypted logits, shares of each vote, a noisy sum at the guardian, and its argmax to P_q", "built", "with `labels=\"shares\"` the argmax stays in shares, and P_q retrains on them", f"{_CAP}/ask.py::Panel.ask {_CAP}/algorithm.py::retrain_unseen sectorch/garbled/argmax.py::argmax_onehot sectorch/tensor/holders.py::collect sectorch/dp/mechanisms.py::NoisyMax.release", f"{_CT}_ask.py::test_label_is_the_noisy_argmax {_CT}_run.py::test_labels_that_stay_in_shares_train_the_model_that_they_train_in_the_clear {_CT}_ask.py::test_ckks_label_is_the_noisy_argmax {_CT}_ask.py::test_every_declared_message_is_sent_and_no_other"),
    _c(_C, "Appendix E", "the simulation is perfect if the encryption is CPA secure and the circuits are", "incomplete", "in 1b P_q has the secret key, and the error that it decrypts depends on the answering party's weights; CPA security says nothing of a key's owner. Here answers are masked as ring elements, or rerandomised and flooded", "sectorch/ckks/exchange.py::rerandomise_value sectorch/garbled/argmax.py::to_clients", f"{_CT}_ask.py::test_nobody_learns_a_vote_but_q_the_label {_CT}_ask.py::test_messages_look_uniform_and_differ_between_runs tests/ckks/test_ckks_uses.py::test_a_rerandomised_answer_shows_no_combination_of_the_query"),
    _c(_C, "3.3", "noise for \"a sensitivity of 1\"", "false", "another vote moves two counts: the L2 change is sqrt(2), and at the same noise the Renyi cost twice that of 1", "sectorch/dp/mechanisms.py::GNMax", f"{_T}_capc_one_vote_moves_the_histogram_by_the_root_of_two tests/dp/test_privacy_renyi.py::test_gnmax_is_gaussian_composition"),
    _c(_C, "3.1", "C corrupted parties degrade epsilon \"by a factor proportional to C\"", "incomplete", "so it is where epsilon is small; the Renyi cost grows by C^2, and epsilon by up to that. C times the noise keeps it", "sectorch/dp/mechanisms.py::NoisyMax", f"{_T}_capc_a_group_of_c_costs_more_than_c_times_as_much {_CT}_run.py::test_virtual_parties_need_more_noise"),
    _c(_C, "4.1", "ciphertexts become shares over a prime field, perfectly hidden", "incomplete", "perfect mod 2^64 with `mpc`; with `ckks` the mask hides to 2^-30 for all coefficients of a conversion", "sectorch/ckks/convert.py::to_shares", "tests/ckks/test_ckks_uses.py::test_what_q_and_s_see_of_a_conversion_is_masked tests/ckks/test_ckks_uses.py::test_the_masks_leave_what_their_width_promises"),
    _c(_C, "4.2", "epsilon of 2 (SVHN) and 20 (CIFAR10) for some 550 queries", "incomplete", "these depend on the votes and are not private themselves; whatever the votes, the same noise costs 4.23 and 32.6, which is what is charged", "sectorch/dp/mechanisms.py::epsilon_for", f"{_CT}_run.py::test_the_papers_epsilons_are_what_their_noise_costs"),
    _c(_C, "4.4", "sigma is the largest that costs no accuracy, by a grid search", "incomplete", "on true votes, which nobody in the protocol sees; here it is the least that the budget affords, and the number of queries follows from what the asker knows", f"{_CAP}/plan.py::plan", f"{_CT}_run.py::test_the_planner_takes_as_many_as_bring_the_most tests/dp/test_privacy_budget.py::test_scale_for_is_the_least"),
    _c(_C, "5", "parties that train several models on parts of their data bear more noise", "incomplete", "so it is for a record, which is in one part; of all that an organisation has, all its votes move, and noise has to grow with them, which is what is charged", f"{_CAP}/plan.py::moved_by", f"{_CT}_run.py::test_virtual_parties_move_all_their_votes {_CT}_run.py::test_virtual_parties_need_more_noise"),
    _c(_C, "Definition 1; Equation 1", "(epsilon, delta)-differential privacy", "built", "neighbours differ in one party's vote; the noise is discrete and exact", "sectorch/dp/budget.py::Budget sectorch/dp/noise.py::DiscreteGaussian", "tests/dp/test_privacy_noise.py::test_labels_fit_the_mechanism tests/dp/test_privacy_renyi.py::test_epsilon_is_not_far_above_the_exact_one"),
    _c(_C, "Theorem 1; Equation 2", "k mechanisms of (epsilon, delta) compose to epsilon sqrt(2 k log 1/delta') + k epsilon (e^epsilon - 1)", "holds", "not used: curves of Renyi cost add up to less", "sectorch/dp/noise.py::epsilon_of", f"{_T}_capc_theorem_1_holds_for_the_worst_mechanism"),
    _c(_C, "Definition 2; Equation 3; Definition 3; Equation 4", "privacy loss, and the moments accountant of its moments", "holds", "not used: lambda times the Renyi divergence of order lambda + 1 is the same number", "sectorch/dp/noise.py::gaussian_curve", f"{_T}_capc_equations_3_to_6_are_one_quantity"),
    _c(_C, "Definition 4; Equation 5; Definition 5; Equation 6", "Renyi divergence, and Renyi differential privacy", "built", "", "sectorch/dp/noise.py::gaussian_curve sectorch/dp/noise.py::response_curve", f"tests/dp/test_privacy_renyi.py::test_laplace_curve_is_the_divergence_itself {_T}_capc_equations_3_to_6_are_one_quantity"),
    _c(_C, "Theorem 2", "(lambda, epsilon)-RDP is (epsilon + log(1/delta) / (lambda - 1), delta)-DP", "holds", "a sharper one is charged (Canonne, Kamath and Steinke, 2020)", "sectorch/dp/noise.py::epsilon_of", f"{_T}_capc_theorem_2_is_what_a_budget_charges_or_more"),
    _c(_C, "Definition 6; Equation 7", "margin sampling takes the least difference of the two largest probabilities", "built", "", "sectorch/data/selection.py::margin_of", "tests/data/test_data_selection.py::test_the_measures_by_hand"),
    _c(_C, "Definition 7; Equation 8", "entropy sampling", "built", "", "sectorch/data/selection.py::entropy_of", "tests/data/test_data_selection.py::test_the_measures_by_hand"),
    _c(_C, "Definition 8; Equation 9", "k-center, greedily", "misprint", "the bound k is printed for old and new centers together; it is for the new ones. Within twice the best", "sectorch/data/selection.py::select", f"{_T}_the_greedy_k_center_is_within_twice_the_best tests/data/test_data_selection.py::test_kcenter_skips_what_is_known"),
    _c(_C, "Definition 9", "balanced accuracy is the mean of the recalls", "built", "", "sectorch/federated/outcome.py::Scores", "tests/federated/test_federated_training.py::test_scores_and_fairness"),
    _c(_C, "Definition 10; Equation 10; Definition 11; Equation 11", "equalised odds, and equal opportunity", "built", "for any number of classes, as the largest difference between groups", "sectorch/federated/outcome.py::equalized_odds sectorch/federated/outcome.py::equal_opportunity", "tests/federated/test_federated_training.py::test_scores_and_fairness"),
    # CaPriDe
    _c(_D, "Algorithm 1", "each round every party publishes encrypted predictions, the others return encrypted losses, and it steps along the gradient", "incomplete", "what comes back is a number and has no gradient (Equation 7)", f"{_CAD}/algorithm.py::capride {_CAD}/algorithm.py::learn", f"{_DT}_run.py::test_every_method_runs_and_repeats {_DT}_protocol.py::test_released_numbers_are_the_plain_ones"),
    _c(_D, "Figure 1", "data encrypted once, predictions and losses each round", "built", "", f"{_CAD}/exchange.py::publish {_CAD}/exchange.py::pairwise_divergence", f"{_DT}_peers.py::test_one_exchange_as_two_processes {_DT}_peers.py::test_every_declared_message_is_sent_and_no_other"),
    _c(_D, "2.1", "the encryption is homomorphic for sums and products", "incomplete", "CKKS is so up to an error, which is bounded before it is computed", "sectorch/ckks/module.py::CKKSModule", "tests/ckks/test_ckks_ops.py::test_sums_and_products tests/ckks/test_ckks_bounds.py::test_a_program_is_right_within_its_stated_error_or_refused"),
    _c(_D, "Equation 1; Equation 2; Equation 9", "softmax at temperature T, KL divergence, and the approximate one without log C", "built", "E(p) E(z) is a product of two ciphertexts and takes a level: not \"only linear operations\"", f"{_CAD}/training.py::approximate_kl", f"{_DT}_updates.py::test_equations_8_and_9"),
    _c(_D, "Equation 8", "the KL divergence is the approximate one and M log C", "misprint", "it is log C, once. C is the peer's: it does not depend on the party's model, so that dropping it changes no gradient", f"{_CAD}/training.py::true_kl", f"{_T}_capride_equation_8_has_log_c_once {_DT}_updates.py::test_equations_8_and_9"),
    _c(_D, "Equation 3", "cross-entropy over the party's samples", "built", "as a mean, with smoothed labels", f"{_CAD}/training.py::State.train sectorch/federated/training.py::train", "tests/federated/test_federated_training.py::test_a_step_is_along_the_gradient_of_the_mean_cross_entropy"),
    _c(_D, "Equation 4; Equation 5; Equation 6", "distillation losses by peer, their mean, and lambda times that beside the cross-entropy", "built", "lambda is of T^2 times the mean over samples", f"{_CAD}/training.py::combined {_CAD}/training.py::distillation", f"{_DT}_updates.py::test_equations_4_to_6 {_DT}_updates.py::test_agreed_logits_agree_and_pull_as_the_head_gradient_does"),
    _c(_D, "Equation 7", "the party steps along the gradient of its loss", "false", "the gradient needs the peer's logits by sample; of the decrypted number only the party's own entropy has one. Here derivatives along published directions are asked for, which are such sums too", f"{_CAD}/algorithm.py::step {_CAD}/training.py::head_update", f"{_DT}_run.py::test_the_scalar_carries_no_gradient {_DT}_updates.py::test_the_head_gradient_is_exact {_DT}_updates.py::test_forward_gradients_are_unbiased"),
    _c(_D, "Equation 10; Equation 11; Equation 12", "the loss is the party's own entropy less the decrypted sum of p z / T", "built", "", f"{_CAD}/training.py::local_uncertainty {_CAD}/training.py::pairwise", f"{_DT}_protocol.py::test_released_numbers_are_the_plain_ones"),
    _c(_D, "2.2", "the L2 distance of the logits", "built", "as a baseline", f"{_CAD}/training.py::l2", f"{_DT}_run.py::test_every_method_runs_and_repeats"),
    _c(_D, "3.1", "the utility is the mean gain in accuracy", "built", "", f"{_CAD}/experiment.py::Result", f"{_DT}_run.py::test_report_and_plots"),
    _c(_D, "3.3", "to take a sum over the samples apart is infeasible", "false", "each number is a linear equation on the peer's logits, which lie in few dimensions; without noise those of a round give most of them. Here what answers tell is measured and limited by noise", "sectorch/ckks/releases.py::LinearMeter sectorch/ckks/releases.py::ReleaseLedger", f"{_DT}_guard.py::test_with_the_guard_off_and_enough_released_the_logits_are_solved_for {_DT}_meter.py::test_a_default_round_without_noise_is_refused {_DT}_meter.py::test_the_meter_never_says_less_than_the_attack_finds"),
    _c(_D, "4.2", "0.0711 + 0.5 x + 0.2576 x^2 - 0.0128 x^4 is near to GELU", "incomplete", "within 0.15 for |x| up to 3, and 4 off at 5; inputs are to be kept small", "sectorch/nn/fhe.py::Polynomial", f"{_T}_capride_the_polynomial_of_4_2_is_gelu_near_zero_alone tests/ckks/test_ckks_uses.py::test_fhe_friendly_copies_and_folds"),
    _c(_D, "4.4", "random subsets of samples and peers save work, and two models a party lift the limit on depth", "built", "a subset of samples saves none, since a ciphertext holds all", f"{_CAD}/training.py::State.mutual {_CAD}/training.py::asked_peers", f"{_DT}_run.py::test_subsets_and_peers_are_drawn_anew {_DT}_run.py::test_two_models"),
    # Perturbed models
    _c(_M, "Figure 1", "a server sends a noised model, clients return noised gradients", "built", "", f"{_PER}/protocol.py::Federation", f"{_MT}_rounds.py::test_all_messages_of_a_round_and_their_bytes {_MT}_rounds.py::test_parties_in_processes_of_their_own"),
    _c(_M, "Equation 1; Equation 2; Equation 3", "the objective, weighted by samples, and the server's step", "built", "", f"{_PER}/scheme.py::Scheme.step", f"{_MT}_training.py::test_200_steps_follow_fedavg"),
    _c(_M, "Definition 1; Equation 4", "the Hadamard product, which a diagonal matrix passes", "holds", "", "sectorch/nn/channels.py::ChannelScale", f"{_T}_perturbation_equation_4"),
    _c(_M, "Equation 5; Equation 6; Equation 7; Equation 8; Equation 9; Lemma 1; Equation 10; Equation 11", "an MLP: hidden outputs on noised weights are r times the true ones, and the last is y + alpha r", "holds", "a bias is the weight of a feature of 1, so that alpha has one more term", f"{_ALG}::perturb {_ALG}::outputs", f"{_LEM}_lemmas_1_and_2"),
    _c(_M, "Equation 12; Equation 13; Equation 14; Equation 16; Lemma 2; Equation 17; Equation 18", "the same for convolutions, with one scale for a channel and concatenated inputs", "incomplete", "batch normalisation, which the paper's ResNets have, divides the scale out again but for eps; its input takes none here", f"sectorch/nn/channels.py::channels {_ALG}::perturb", f"{_LEM}_lemmas_1_and_2 {_MT}_gradients.py::test_gradient_of_deep_nets {_MT}_gradients.py::test_batch_statistics_are_those_of_plain_training"),
    _c(_M, "Equation 15", "the last layer's column j has the scale of channel j / (h w)", "misprint", "rounded up, where the proof rounds down: j counts from 1", "sectorch/nn/channels.py::Walk.columns", f"{_T}_perturbation_equation_15_counts_from_zero {_LEM}_lemmas_1_and_2"),
    _c(_M, "Lemma 3; Equation 19", "under MSE the noisy gradient is 1/R times the true one, r^T sigma and -v beta", "holds", "", f"{_ALG}::squared_terms", f"{_LEM}_lemma_3"),
    _c(_M, "Equation 20; Lemma 4; Equation 21; Equation 22", "the cross-entropy's gradient is softmax less target, and on noised outputs of no use", "incomplete", "targets have to sum to one, which is checked. With one r_a for all outputs softmax does not change, and no exchange is needed (`shift`)", f"{_PER}/scheme.py::dense_targets", f"{_LEM}_lemma_4_and_the_exchange {_ATT}_the_shift_exchange_shows_the_client_the_softmax_but_not_the_logits"),
    _c(_M, "Equation 23", "ratios of a client's outputs, masked by lambda, which the server corrects without learning them", "false", "one lambda_i masks a whole row: differences in a row are free of it, and two rows give every sample's prediction, of three classes or more (of two, the odds within a factor of 20). Its factor is printed twice as the inverse of what Lemma 5 takes", f"{_ALG}::ask {_ALG}::answer benchmarks/perturbation_attacks.py::prediction_from_request", f"{_ATT}_the_papers_exchange_shows_the_server_the_prediction"),
    _c(_M, "Equation 24; Equation 25; Lemma 5; Equation 26", "the client finds softmax / exp(delta), and with it the true gradient under sigma, beta and psi", "holds", "", f"{_ALG}::finish {_ALG}::exchanged_terms", f"{_LEM}_lemma_4_and_the_exchange {_LEM}_lemma_5"),
    _c(_M, "Equation 27", "masks phi_k that add up to zero hide a client's terms", "incomplete", "one phi for all terms, as it is written for simplicity, would show their differences; reals are not uniform. Here words of Z_2^64, others for each term and round", "sectorch/secure_sum.py::ClientMasks", "tests/test_secure_sum.py::test_terms_and_rounds_have_words_of_their_own tests/test_secure_sum.py::test_masks_cancel_exactly"),
    _c(_M, "Equation 28; Equation 29", "the server removes the noise from the sums and has the true gradient", "misprint", "(29)'s last line is of the noisy loss and weights; the proof's end has the true ones", f"{_ALG}::coefficients {_ALG}::times_ratios", f"{_MT}_gradients.py::test_gradient_of_the_papers_nets {_MT}_gradients.py::test_gradient_of_many_clients"),
    _c(_M, "III-C 2", "the same for cross-entropy", "misprint", "the first line's bracket turns signs; the second line is right", f"{_ALG}::coefficients", f"{_LEM}_lemma_5"),
    _c(_M, "III-D", "clients infer with a model that they do not know", "false", "predictions are the true ones, as it says, so that the client holds a network of the same function, to use or to distil", f"{_PER}/scheme.py::Scheme.inference_model", f"{_MT}_training.py::test_noised_inference_is_the_true_one {_ATT}_hidden_layers_are_known_up_to_a_harmless_scale"),
    _c(_M, "Definition 2; Lemma 6", "one-time keys make the noised weights semantically secure", "false", "multiples of a fixed vector are not uniform: signs, zeros and ratios in a row tell two models apart every time", "benchmarks/perturbation_attacks.py::distinguish", f"{_ATT}_the_game_of_definition_2_is_won_every_time {_ATT}_signs_zeros_and_row_ratios_survive"),
    _c(_M, "Lemma 7; Equation 30; Equation 31", "with m parts a client finds the true prediction with probability at most 1/m", "false", "the proof looks at one output of each part and at one sample. Under cross-entropy sum p_i = 1 is a linear equation for xi: m samples give all predictions, and these gamma, hence a network of the true function; under MSE two rounds give gamma at every m, and one nearly does at m = 1", "benchmarks/perturbation_attacks.py::prediction_from_reply benchmarks/perturbation_attacks.py::gamma_from_rounds benchmarks/perturbation_attacks.py::gamma_from_model", f"{_ATT}_the_papers_exchange_shows_the_client_the_prediction {_ATT}_the_papers_exchange_shows_the_client_a_network_of_the_true_function {_ATT}_gamma_is_found_from_two_rounds_whatever_m_is {_ATT}_gamma_is_read_off_the_model_alone"),
    _c(_M, "Lemma 8", "masks hide each client's gradient from the server", "incomplete", "no real mask is uniform; of ring elements it holds. One client has no mask, and the sum is the server's", "sectorch/secure_sum.py::secure_sum", f"tests/test_secure_sum.py::test_a_masked_update_is_uniform {_MT}_rounds.py::test_one_client_has_no_masks"),
    _c(_M, "V-E", "a client sends O(2m |W|) more for MSE and O(3m |W|) for cross-entropy", "holds", "(m + 1) |W| and 3m |W|; `shift` sends nothing more", f"{_ALG}::coefficients", f"{_MT}_gradients.py::test_bytes_are_those_of_the_paper"),
    # SecSV
    _c(_V, "2, Shapley value", "the mean marginal gain over all coalitions, which is balanced, symmetric, additive and zero for nobody's gain", "holds", "", f"{_SEC}/values.py::shapley", f"{_VT}_values.py::test_shapley_is_the_mean_marginal_gain_over_orders {_VT}_values.py::test_balance {_VT}_values.py::test_symmetry {_VT}_values.py::test_additivity {_VT}_values.py::test_zero_element"),
    _c(_V, "3, FSV", "a client's value is the sum of its rounds' values", "incomplete", "the utility of nobody is not defined. At 0 a client is paid for what there was before; here it is that of the model that the round began with", f"{_SEC}/values.py::total", f"{_VT}_values.py::test_the_federated_value_is_the_sum_of_the_rounds_attended {_VT}_run.py::test_a_free_rider_is_paid_for_what_it_adds_and_not_for_what_there_was"),
    _c(_V, "2, sharing", "a secret of a prime field in two shares, each uniform", "incomplete", "with a field of its own a client decrypts A X + p A k before it reduces, and k tells of A; here shares are modulo the encryption's modulus, where nothing wraps", f"{_SEC}/secsv.py::shared", f"{_T}_secsv_who_reduces_after_decryption_sees_sums_of_weights {_VT}_crypto.py::test_shares_add_up {_VT}_crypto.py::test_uniform_residues_are_uniform"),
    _c(_V, "Algorithm 1; Algorithm 2", "HESV: models and samples encrypted, one server", "incomplete", "the counting client sees by how much a prediction is off; here labels are compared in unary, and it sees whether they agree", f"{_SEC}/hesv.py::HESVTester {_SEC}/algorithm.py::test_encrypted", f"{_VT}_protocols.py::test_hesv_counts_the_right_samples {_VT}_run.py::test_hesv_gives_the_plain_values {_VT}_leaks.py::test_the_messages_are_the_declared_ones"),
    _c(_V, "4.2.1; 4.2.2; Figure 2; Lemma B.1", "Matrix Squaring: blocks that fit a ciphertext, about d_out products and log2(d_in / d_out) rotations each", "holds", "", "sectorch/ckks/linalg.py::MatrixSquaring", f"tests/ckks/test_ckks_uses.py::test_encrypted_matrix_products {_VT}_protocols.py::test_lemma_6_1"),
    _c(_V, "Algorithm 3; Algorithm 4", "SecSV: encrypted models, shared samples, two servers", "incomplete", "step 5's message is a known linear map of the auxiliary server's share: the principal solves for it, unless a fresh encryption of zero is added, as here; and the servers see by how much predictions are off, here only whether", f"{_SEC}/secsv.py::SecSVTester {_SEC}/algorithm.py::test_shared", f"{_VT}_protocols.py::test_secsv_finds_the_right_samples {_VT}_leaks.py::test_the_principal_cannot_solve_for_the_auxiliary_share {_VT}_leaks.py::test_no_server_can_add_up_features_outputs_or_labels"),
    _c(_V, "Algorithm 5; Figure 3; Figure 4; Lemma 5.2; Lemma 5.3", "Matrix Reducing: d_in products and no rotation give a product; parts stand side by side", "holds", "for any shape, d_out above d_in too", "sectorch/ckks/linalg.py::MatrixReducing sectorch/ckks/linalg.py::Reducing", f"{_T}_secsv_lemmas_5_2_and_5_3 tests/ckks/test_ckks_uses.py::test_encrypted_matrix_products {_VT}_crypto.py::test_matrix_reducing_on_shares"),
    _c(_V, "Lemma 6.1", "how many products and rotations HESV and SecSV take", "holds", "the text that we have lacks the formulas: counts are held to those that follow from the layout. SecSV takes fewer, for the first layer is shared between coalitions", "sectorch/ckks/linalg.py::ProductCounts", f"{_VT}_protocols.py::test_lemma_6_1"),
    _c(_V, "Algorithm 6", "SampleSkip: test the small coalitions first, and of the others only the samples that tell them apart", "built", "by default only where that saves ciphertexts; `skip=\"always\"` is the paper's", f"{_SEC}/algorithm.py::sample_skip", f"{_VT}_run.py::test_sampleskip_is_on_and_always_skips_what_algorithm_7_finds"),
    _c(_V, "Algorithm 7", "skippable are the samples that two parts of a coalition classify correctly", "built", "", f"{_SEC}/algorithm.py::skippable", f"{_VT}_skip.py::test_algorithm_7"),
    _c(_V, "Definition 6.2; Theorem 6.3", "a linear classifier's aggregate is right where both its parts are", "incomplete", "where no aggregation weight is below zero, and ties go to a fixed class; under encryption up to scores that are equal within its error", f"{_SEC}/algorithm.py::skippable {_SEC}/testers.py::averaged", f"{_VT}_skip.py::test_theorem_6_3_no_sample_is_skipped_wrongly_for_linear_classifiers {_T}_secsv_theorem_6_3_holds_where_scores_are_equal {_T}_secsv_theorem_6_3_needs_weights_of_one_sign"),
    _c(_V, "Lemma 6.4", "skipping moves no value by more than the rounds times the largest share skipped wrongly", "holds", "", f"{_SEC}/values.py::error_bound", f"{_VT}_intervals.py::test_lemma_6_4_on_any_utilities {_VT}_intervals.py::test_lemma_6_4"),
    _c(_V, "Definition 6.5", "the attack that solves a layer's equations for weights or samples", "built", "as a test that must fail, with the broken routing as control", f"{_SEC}/settings.py::Route", f"{_VT}_leaks.py::test_the_attack_works_where_the_routing_is_broken {_VT}_leaks.py::test_no_client_holds_both_input_and_output_of_a_layer"),
    _c(_V, "Definition 6.6; Definition 6.7", "membership inference, and retraining a copy from labels", "not built", "attacks on the models' answers; routes keep inputs and labels apart, which is what the definitions need", "", f"{_VT}_routing.py::test_routes_keep_the_rules"),
    _c(_V, "Proposition 6.8", "with three clients no single-layer attack succeeds, and with L + 2 no multi-layer one, if linear layers are one-way", "false", "no linear layer is: least squares inverts it. The model of all clients is known to each of them from training, and who decrypts for it finds others' samples: at once from a layer with as many outputs as inputs, else from some rounds. The run says so; `secretsv` shows no outputs. Three clients do not do for an even number of layers (four do)", f"{_SEC}/settings.py::Route {_SEC}/settings.py::strongest", f"{_T}_secsv_linear_layers_are_no_one_way_functions {_VT}_leaks.py::test_who_decrypts_for_all_clients_finds_the_samples_by_the_global_model {_VT}_leaks.py::test_rounds_add_up_where_outputs_are_fewer_than_inputs {_VT}_routing.py::test_the_bounds_hold_over_all_routes"),
    _c(_V, "Algorithm 8", "NSSV: the values in the clear", "built", "", f"{_SEC}/testers.py::PlainTester", f"{_VT}_run.py::test_secsv_with_sampleskip_gives_the_plain_values"),
    _c(_V, "Algorithm 9; Algorithm 10", "SecretSV: models and samples shared, products by triples", "built", "the third party is a client in turn; truncation is exact, so that errors do not add up", f"{_SEC}/testers.py::SecretSVTester", f"{_VT}_protocols.py::test_secretsv_finds_the_right_samples {_VT}_run.py::test_secretsv_gives_the_plain_values"),
    _c(_V, "6.2.2; 6.2.4", "rounds, and coalitions within one, may be tested in parallel; clients may join and leave", "built", "coalitions of one size, since SampleSkip asks for the smaller ones first", f"{_SEC}/algorithm.py::Utilities {_SEC}/values.py::total", f"{_VT}_run.py::test_several_processes_find_the_same {_VT}_run.py::test_clients_that_join_and_leave_have_values_for_their_rounds"),
    _c(_V, "6.2.5", "other measures take the same utilities", "built", "the contribution index, group values and GTG-Shapley; not WT-Shapley, which the paper does not define", f"{_SEC}/values.py::contribution_index {_SEC}/values.py::group_values {_SEC}/values.py::gtg", f"{_VT}_run.py::test_other_measures_take_the_same_utilities {_VT}_values.py::test_groups_do_not_overlap"),
]  # fmt: skip
"""In the order of the papers, what belongs together one after another."""
