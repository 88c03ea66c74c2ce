"""The forest of `trees.py` in Concrete ML, on the same machine: seconds for one row, and its answers.

    python benchmarks/trees_concrete.py --trees 100 --depth 8 --bits 6      # in an environment that has concrete-ml

Concrete ML (TFHE) quantises features to `bits` and lets one party compute on ciphertexts of another; nobody third is
needed, and the model is in the clear at the evaluator. It prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from concrete.ml.sklearn import RandomForestClassifier
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier as Plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--bits", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    x, y = make_classification(5000, 30, n_informative=15, random_state=0)
    x, new = x[1000:].astype(np.float32), x[:1000].astype(np.float32)
    y = y[1000:]
    sizes = {"n_estimators": options.trees, "max_depth": options.depth, "random_state": 0}
    plain = Plain(**sizes).fit(x, y)
    model = RandomForestClassifier(n_bits=options.bits, **sizes).fit(x, y)
    start = time.perf_counter()
    circuit = model.compile(x)
    compiled = time.perf_counter() - start
    start = time.perf_counter()
    circuit.client.keygen()
    keys = time.perf_counter() - start
    start = time.perf_counter()
    found = model.predict(new[: options.rows], fhe="execute")
    took = time.perf_counter() - start
    clear = model.predict(new)
    print(json.dumps({
        **vars(options), "compile_s": compiled, "keys_s": keys, "seconds_a_row": took / options.rows,
        "equal_to_its_own": int((found == clear[: options.rows]).sum()),
        "equal_to_scikit_learn": float((clear == plain.predict(new)).mean()),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
