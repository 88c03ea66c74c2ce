"""A forest that nobody sees answers a hospital that shows nobody its patients.

    python examples/trees.py             # all parties in this process
    python examples/trees.py --processes # three processes on this machine, over TLS

A clinic has fitted histogram gradient boosting on rows with missing numbers and publishes the schema of its columns.
The hospital encodes its own table by that schema, and learns one class for each row: the thresholds, the leaves and
which columns the trees look at stay the clinic's secret. Data: scikit-learn's breast cancer, with numbers left out.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier

import sectorch
from sectorch.fitted_models import Schema, module
from sectorch.testing.local_network import Stage


def table() -> tuple[np.ndarray, np.ndarray]:
    """Patients, of whom every tenth number is not known, and what was found."""
    x, y = load_breast_cancer(return_X_y=True)
    x[np.random.default_rng(0).random(x.shape) < 0.1] = np.nan
    return x, y


def main() -> None:
    """Prints how many answers are the plain model's, and what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", action="store_true", help="three processes, over TLS")
    parser.add_argument("--rows", type=int, default=100)
    given = parser.parse_args()
    x, y = table()
    fitted = HistGradientBoostingClassifier(max_iter=20, max_depth=4, random_state=0).fit(x[::2], y[::2])
    model = module(fitted, missing=True)
    patients = x[1::2][: given.rows]
    rows = Schema.from_json(model.schema.to_json()).rows(patients)  # the hospital has the schema's text alone
    if given.processes:
        with Stage({"clinic": (model, sectorch.Inputs(**rows))}) as stage, stage.connect("hospital") as connection:
            answers = connection.model("clinic")(**rows)
        cost = ""
    else:
        with sectorch.profile() as seen:
            answers = sectorch.secure(model)(**rows)
        cost = f"; {(seen.online_bytes + seen.offline_bytes) / 1e6:.0f} MB, {seen.rounds} rounds"
    same = int((answers.numpy() == fitted.predict(patients)).sum())
    print(f"{same} of {len(patients)} answers are the plain model's{cost}")


if __name__ == "__main__":
    main()
