"""Models of tables as three processes over TLS: of both public shapes of trees, with missing numbers and categories."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from sectorch import Inputs
from sectorch.fitted_models import module
from sectorch.testing.local_network import Stage


@pytest.mark.sectorch_long
def test_models_of_tables_answer_as_processes():
    x, y = load_breast_cancer(return_X_y=True)
    holes = x.copy()
    holes[np.random.default_rng(0).random(x.shape) < 0.2] = np.nan
    kinds = np.stack([x[:, 0].astype(int) % 3, x[:, 1]], 1)
    encoder = ColumnTransformer([("kind", OneHotEncoder(), [0]), ("number", StandardScaler(), [1])])
    fitted = {
        "forest": (RandomForestClassifier(5, max_depth=3, random_state=0).fit(x, y), x, False),
        "holes": (HistGradientBoostingClassifier(max_iter=3).fit(holes, y), holes, True),
        "kinds": (make_pipeline(encoder, LogisticRegression()).fit(kinds, y), kinds, False),
    }
    models = {name: module(model, missing=missing) for name, (model, _, missing) in fitted.items()}
    assert models["forest"].scores.trees.complete and not models["holes"].scores.trees.complete
    examples = {name: (m, Inputs(**m.schema.rows(fitted[name][1][:4]))) for name, m in models.items()}
    with Stage(examples) as stage, stage.connect("hospital") as connection:
        for name, (model, table, _) in fitted.items():
            rows = models[name].schema.rows(table[:30])
            assert np.array_equal(connection.model(name)(**rows).numpy(), model.predict(table[:30])), name
