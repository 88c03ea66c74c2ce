"""`sectorch.fitted_models.module`: an estimator as an ordinary module, with one function for each family of estimators.

Estimators are known by their class's name and package, so that neither library is imported here.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..errors import ArgumentError, PrecisionWarning, UnsupportedOpError
from .models import (
    Affine,
    Chain,
    Concatenation,
    Encode,
    Impute,
    Kernel,
    Layers,
    Output,
    Project,
    Select,
    TabularModel,
    TreeScores,
)
from .readers import Ensemble, hist_tree, read_lightgbm, read_xgboost, sklearn_tree, stack_outputs
from .schema import Schema
from .trees import Tree, Trees

OUTPUTS = ("predict", "predict_proba", "decision_function")


def module(model: Any, output: str = "predict", *, missing: bool = False) -> TabularModel:
    """A fitted model of scikit-learn, xgboost or lightgbm as an ordinary module, for `sectorch.secure` and its kin.

        model = sectorch.fitted_models.module(RandomForestClassifier(max_depth=8).fit(x, y))
        secure_model = sectorch.secure(model)  # secure(forest) does the same
        secure_model(**model.schema.rows(table))

    Args:
        model: a fitted estimator or `Pipeline`; a `Booster`; or the path of a model that xgboost saved as JSON or
            lightgbm as text. See docs/fitted-models.md for the kinds.
        output: what the querying party learns. "predict": of a classifier the number of the class among `classes`
            [rows] int64, of an isolation forest 1 or -1, of others the prediction. "predict_proba": [rows, classes].
            "decision_function": scores, as of the library's method of that name; of boosters the raw score; of an
            isolation forest `score_samples`.
        missing: whether rows may lack numbers. It is public, and costs two to four times the selection of features.

    Public are the kinds of steps, the numbers of columns, trees, nodes and outputs as `Trees` pads them, classes and
    categories; everything else that the model learned is the answering party's secret.

    Raises:
        UnsupportedOpError: a kind, or a setting of it, that is not supported.
        ArgumentError: an estimator that is not fitted, a damaged file, or an output that the model does not have.
    """
    if output not in OUTPUTS:
        raise ArgumentError(f"output is one of {', '.join(OUTPUTS)}, got {output!r}")
    if isinstance(model, (str, Path)):
        return _of_ensemble(_read_file(Path(model)), output, missing)
    if isinstance(model, nn.Module):
        raise ArgumentError("this is a module already: sectorch.secure takes it")
    return _Converter(output, missing).convert(model)


def is_estimator(model: Any) -> bool:
    """Whether a model is for `module` to convert: one with a `predict`, or the path of a booster's text."""
    if isinstance(model, (str, Path)):
        return Path(model).suffix in (".json", ".txt")
    return not isinstance(model, nn.Module) and hasattr(type(model), "predict")


def _read_file(path: Path) -> Ensemble:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"no model's text is at {path.name}: {type(error).__name__}") from None
    return read_lightgbm(text) if text.startswith("tree") else read_xgboost(text)


def _of_ensemble(found: Ensemble, output: str, missing: bool) -> TabularModel:
    return _Converter(output, missing).finish_ensemble(found)


@dataclass
class _Source:
    """A column on its way: the raw column that it is a copy of, or None; and what a scaler did to it since.

    Attributes:
        filled: whether an imputer filled its missing numbers.
    """

    raw: int | None
    factor: float = 1.0
    shift: float = 0.0
    filled: bool = False


@dataclass
class _Scores:
    """The last step: its module, and its output's link and classes."""

    module: nn.Module
    link: str
    classes: np.ndarray | None = None
    inclusive: bool = False
    cut: float | None = None
    keeps_columns: bool = False


@dataclass
class _Converter:
    """One conversion."""

    output: str
    missing: bool
    schema: Schema = field(default_factory=lambda: Schema(1))

    def convert(self, model: Any) -> TabularModel:
        kind, package = type(model).__name__, _package(model)
        if package == "xgboost" or package == "lightgbm":
            return self.finish_ensemble(_booster(model))
        _refuse_foreign(model)
        steps = [step for _, step in model.steps] if hasattr(model, "steps") else [model]
        first = next((s for s in (*steps, model) if hasattr(s, "n_features_in_")), None)
        if first is None:
            raise ArgumentError(f"the {kind} is not fitted: call fit first")
        names = getattr(first, "feature_names_in_", None)
        self.schema = Schema(int(first.n_features_in_), None if names is None else [str(n) for n in names])
        self.schema.missing = self.missing
        sources, chain = [_Source(i) for i in range(self.schema.columns)], []
        for step in steps[:-1]:
            made, sources = self._transform(step, sources)
            chain += made
        last = steps[-1]
        if type(last).__name__ == "Pipeline":
            raise UnsupportedOpError("a Pipeline at the end of a Pipeline: join the two")
        made, scores = self._predict(last, sources)
        return self._finish([*chain, *made], scores)

    def finish_ensemble(self, found: Ensemble) -> TabularModel:
        """The module of a booster that was read."""
        categories = {column: list(values) for column, values in found.categories.items()}
        self.schema = Schema(
            found.features, found.names, categories, dict.fromkeys(categories, "other"), self.missing,
            found.zero_missing and self.missing, found.strict,
        )  # fmt: skip
        if found.zero_missing and not self.missing:
            raise ArgumentError(
                "zeros are missing numbers to this model: sectorch.fitted_models.module(model, missing=True)"
            )
        return self._finish([], self._trees(found, [_Source(i) for i in range(found.features)]))

    def _finish(self, steps: list[nn.Module], scores: _Scores) -> TabularModel:
        count = 0 if scores.classes is None else len(scores.classes)
        if count == 1:
            raise UnsupportedOpError(
                "a classifier that was fitted with one class gives it for every row, which needs no computation: fit "
                "it with two or more"
            )
        if self.output == "predict_proba" and (scores.classes is None or scores.link in ("votes", "none")):
            raise ArgumentError("this model has no predict_proba: take output='predict' or 'decision_function'")
        if self.output == "predict":
            kind = "inlier" if scores.cut is not None else "value" if scores.classes is None else "class"
        else:
            kind = "probabilities" if self.output == "predict_proba" else "scores"
        cut = 0.0 if scores.cut is None else scores.cut
        given = Output(kind, scores.link, count, scores.inclusive, cut, scores.keeps_columns)
        return TabularModel(self.schema, Chain(*steps), scores.module, given, scores.classes).eval()

    # Steps before the last

    def _transform(self, step: Any, sources: list[_Source]) -> tuple[list[nn.Module], list[_Source]]:
        """The modules of a transformer, and its columns. Scalers make none: what comes later takes them in."""
        kind = type(step).__name__
        if step is None or step == "passthrough":
            return [], sources
        if isinstance(step, str):
            raise UnsupportedOpError(f"a step '{step}' in a Pipeline")
        _refuse_foreign(step)
        if not hasattr(step, "n_features_in_"):
            raise ArgumentError(f"the {kind} is not fitted: call fit first")
        if kind == "FunctionTransformer" and step.func is None:
            return [], sources
        if kind == "ColumnTransformer":
            return self._columns(step, sources)
        if kind == "Pipeline":
            made: list[nn.Module] = []
            for _, inner in step.steps:
                more, sources = self._transform(inner, sources)
                made += more
            return made, sources
        if kind in _SCALERS:
            factor, shift = _SCALERS[kind](step)
            width = len(sources)
            factor, shift = np.broadcast_to(factor, (width,)), np.broadcast_to(shift, (width,))
            scaled = [
                replace(s, factor=s.factor * f, shift=s.shift * f + c)
                for s, f, c in zip(sources, factor, shift, strict=True)
            ]
            return [], scaled
        if kind == "SimpleImputer":
            return self._imputer(step, sources)
        if kind in ("OneHotEncoder", "OrdinalEncoder"):
            return self._encoder(step, kind, sources)
        if kind == "PCA":
            scale = 1 / np.sqrt(step.explained_variance_) if step.whiten else np.ones(len(step.components_))
            weight = step.components_ * scale[:, None]
            return [self._project(weight, -weight @ step.mean_, sources)], _fresh(len(weight))
        if hasattr(step, "get_support"):
            kept = np.flatnonzero(step.get_support()).tolist()
            return [Select(kept)], [sources[i] for i in kept]
        raise UnsupportedOpError(f"the step {kind} is not supported; see docs/fitted-models.md for the steps that are")

    def _project(self, weight: np.ndarray, bias: np.ndarray, sources: list[_Source]) -> nn.Module:
        self._require_numbers(sources)
        return Project(*_taken_in(weight, bias, sources))

    def _require_numbers(self, sources: list[_Source]) -> None:
        """What computes with columns takes no missing numbers there, as its library does, unless they were filled."""
        if self.missing:
            lacking = {s.raw for s in sources if s.raw is not None and not s.filled}
            self.schema.complete = sorted({*self.schema.complete, *lacking})

    def _columns(self, step: Any, sources: list[_Source]) -> tuple[list[nn.Module], list[_Source]]:
        if step.transformer_weights:
            raise UnsupportedOpError(
                "a ColumnTransformer with transformer_weights: leave them out, or scale the columns"
            )
        parts, made = [], []
        for _, inner, chosen in step.transformers_:
            places = _places(step, chosen)
            if not places or (isinstance(inner, str) and inner == "drop"):
                continue
            picked, here = [sources[i] for i in places], [Select(places)]
            more, out = self._transform(inner, picked)
            encodes = bool(more) and isinstance(more[0], Encode)
            parts.append(Chain(*([] if encodes else here), *more))
            made += out
        if not parts:
            raise UnsupportedOpError("a ColumnTransformer without columns")
        return [Concatenation(parts)], made

    def _imputer(self, step: Any, sources: list[_Source]) -> tuple[list[nn.Module], list[_Source]]:
        whole = isinstance(step.missing_values, float) and math.isnan(step.missing_values)
        statistics = np.asarray(step.statistics_)
        if step.add_indicator or not whole or statistics.dtype.kind not in "fiu" or np.isnan(statistics).any():
            raise UnsupportedOpError("a SimpleImputer of numbers that are NaN, without indicators, is supported")
        factor, shift = (np.array([getattr(s, name) for s in sources]) for name in ("factor", "shift"))
        # What was imputed is scaled already, and the columns are not yet: x factor + shift.
        return [Impute((statistics - shift) / factor)], [replace(s, filled=True) for s in sources]

    def _encoder(self, step: Any, kind: str, sources: list[_Source]) -> tuple[list[nn.Module], list[_Source]]:
        if any(s.raw is None or (s.factor, s.shift) != (1.0, 0.0) for s in sources):
            raise UnsupportedOpError(
                f"the {kind} encodes columns that another step made: let it be the first of its columns"
            )
        if getattr(step, "_infrequent_enabled", False):
            raise UnsupportedOpError(f"{kind} with infrequent categories is not supported: leave max_categories out")
        columns = [s.raw for s in sources if s.raw is not None]
        tables, other = [], "error" if step.handle_unknown == "error" else "other"
        for i, (column, values) in enumerate(zip(columns, step.categories_, strict=True)):
            self._declare(column, [_plain(v) for v in values], other)
            size = len(values)
            if kind == "OneHotEncoder":
                table = np.vstack([np.eye(size), np.zeros(size)])
                dropped = None if step.drop_idx_ is None else step.drop_idx_[i]
                table = table if dropped is None else np.delete(table, int(dropped), 1)
            else:
                unknown = 0.0 if step.unknown_value is None else float(step.unknown_value)
                if math.isnan(unknown):
                    raise UnsupportedOpError("an OrdinalEncoder with unknown_value=nan: name a number, such as -1")
                table = np.array([*range(size), unknown], np.float64)[:, None]
                lost = [k for k, v in enumerate(values) if isinstance(v, float) and math.isnan(v)]
                if lost:
                    raise UnsupportedOpError(
                        "an OrdinalEncoder of missing categories: fill them by a name of their own"
                    )
            tables.append(table)
        return [Encode(columns, tables)], _fresh(sum(t.shape[1] for t in tables))

    def _declare(self, column: int, categories: list[Any], unseen: str) -> None:
        known = self.schema.categories.setdefault(column, categories)
        if known != categories:
            raise UnsupportedOpError(f"column {column} is encoded twice, by other categories")
        self.schema.unseen[column] = unseen

    # The last step

    def _predict(self, model: Any, sources: list[_Source]) -> tuple[list[nn.Module], _Scores]:
        kind = type(model).__name__
        _refuse_foreign(model)
        for known, family in _FAMILIES.items():
            if kind in known:
                try:
                    return [], family(self, model, sources)
                except AttributeError as error:
                    if hasattr(model, "n_features_in_") and hasattr(model, "__sklearn_tags__"):
                        raise UnsupportedOpError(f"this {kind} lacks {error.name}: is it another version's?") from None
                    raise ArgumentError(f"the {kind} is not fitted: call fit first") from None
        if kind == "SGDOneClassSVM":
            raise UnsupportedOpError("SGDOneClassSVM is not supported: take OneClassSVM or an IsolationForest")
        if kind in ("SVC", "NuSVC", "SVR", "NuSVR", "OneClassSVM"):
            return self._kernel(model, sources)
        if _is_linear(model) and type(model).predict.__qualname__.partition(".")[0] in _LINEAR:
            return [], self._linear(model, sources)
        raise UnsupportedOpError(f"{kind} is not supported; see docs/fitted-models.md for the models that are")

    def _trees(self, found: Ensemble, sources: list[_Source]) -> _Scores:
        raw, sizes = {}, {}
        for column, values in found.categories.items():
            source = sources[column].raw
            if source is None or (sources[column].factor, sources[column].shift) != (1.0, 0.0):
                raise UnsupportedOpError("a categorical column that another step made: encode it once")
            raw[column], sizes[column] = source, len(values)
            self._declare(source, list(values), self.schema.unseen.get(source, "other"))
        if not self.missing:
            for tree in found.trees:
                tree.missing = None
        self.schema.single = self.schema.single or found.strict
        for tree in found.trees:
            _take_scaling(tree, sources)
        _warn_of_small_thresholds(found.trees, [s.raw for s in sources], self.schema)
        _keep_sides_of_zero(found)
        trees = Trees(found.trees, len(sources), found.strict, found.base, found.divisor, sizes)
        return _Scores(TreeScores(trees, raw), found.link, found.classes, found.inclusive)

    def _forest(self, model: Any, sources: list[_Source]) -> _Scores:
        members = list(model.estimators_) if hasattr(model, "estimators_") else [model]
        classes = getattr(model, "classes_", None)
        if model.n_outputs_ > 1 and classes is not None:
            raise UnsupportedOpError("a classifier of several targets: fit one for each")
        trees = []
        for member in members:
            value = np.array(member.tree_.value)
            value = value[:, :, 0] if classes is None else value[:, 0] / value[:, 0].sum(1, keepdims=True)
            if classes is not None and len(classes) == 2:  # the two sum to one: their difference says it all
                value = value[:, 1:] - value[:, :1]
            trees.append(sklearn_tree(member, value, missing=self.missing))
        self.schema.single = True
        self._check_missing(model)
        base = np.zeros(trees[0].value.shape[1])
        link = "identity" if classes is None else "mean"
        return self._trees(Ensemble(trees, len(sources), base, link, divisor=len(trees), classes=classes), sources)

    def _isolation(self, model: Any, sources: list[_Source]) -> _Scores:
        trees = []
        for i, (member, columns) in enumerate(zip(model.estimators_, model.estimators_features_, strict=True)):
            paths = model._average_path_length_per_tree[i] + model._decision_path_lengths[i] - 1.0
            trees.append(sklearn_tree(member, np.asarray(paths, np.float64)[:, None], columns, self.missing))
        self.schema.single = True
        self._check_missing(model)
        size = float(model._max_samples)
        most = 2 * (math.log(size - 1) + np.euler_gamma) - 2 * (size - 1) / size if size > 2 else float(size == 2)
        made = self._trees(Ensemble(trees, len(sources), np.zeros(1), "depth", divisor=len(trees) * most), sources)
        made.cut = -math.log2(-float(model.offset_))
        return made

    def _boosting(self, model: Any, sources: list[_Source]) -> _Scores:
        kept = model.estimators_
        outputs, classes = kept.shape[1], getattr(model, "classes_", None)
        initial = model.init_ if hasattr(model, "init_") else None
        if (
            initial is not None
            and not isinstance(initial, str)
            and type(initial).__name__ not in ("DummyClassifier", "DummyRegressor")
        ):
            raise UnsupportedOpError("gradient boosting that begins with an estimator of your own: leave init out")
        if self.missing:
            raise ArgumentError("GradientBoosting takes no missing numbers; HistGradientBoosting does")
        trees = []
        for line in kept:
            for i, member in enumerate(line):
                value = np.array(member.tree_.value)[:, 0] * model.learning_rate
                trees.append(stack_outputs(sklearn_tree(member, value, missing=False), i, outputs))
        base = np.asarray(model._raw_predict_init(np.zeros((1, model.n_features_in_), np.float32)), np.float64).ravel()
        link = "identity" if classes is None else "softmax" if outputs > 1 else "sigmoid"
        link = "sigmoid2" if classes is not None and model.loss == "exponential" else link
        self.schema.single = True
        return self._trees(Ensemble(trees, len(sources), base, link, classes=classes, inclusive=True), sources)

    def _histograms(self, model: Any, sources: list[_Source]) -> _Scores:
        classes, count = getattr(model, "classes_", None), len(sources)
        order, categories, known = np.arange(count), {}, {}
        if model.is_categorical_ is not None:
            order = _hist_order(model, count)
            bits, at = model._bin_mapper.make_known_categories_bitsets()
            encoder = model._preprocessor.named_transformers_["encoder"]
            for i, values in enumerate(encoder.categories_):
                column = int(order[i])
                plain = [_plain(v) for v in values]
                while plain and plain[-1] is None:
                    plain.pop()
                categories[column] = plain
                line = bits[at[i]]
                known[column] = {c for c in range(len(plain)) if line[c // 32] >> (c % 32) & 1}
        sizes = {column: len(values) for column, values in categories.items()}
        trees = []
        for line in model._predictors:
            for i, predictor in enumerate(line):
                trees.append(stack_outputs(hist_tree(predictor, sizes, order, known), i, len(line)))
        loss = model.loss if isinstance(model.loss, str) else type(model.loss).__name__
        base = np.asarray(model._baseline_prediction, np.float64).ravel()
        link = "exp" if loss in ("poisson", "gamma") else "identity"
        link = link if classes is None else "softmax" if len(base) > 1 else "sigmoid"
        self._check_missing(model)
        return self._trees(Ensemble(trees, count, base, link, classes=classes, categories=categories), sources)

    def _check_missing(self, model: Any) -> None:
        if self.missing and not model.__sklearn_tags__().input_tags.allow_nan:
            raise ArgumentError(f"{type(model).__name__} takes no missing numbers: leave missing=True out")

    def _linear(self, model: Any, sources: list[_Source]) -> _Scores:
        if not hasattr(model, "coef_"):
            raise ArgumentError(f"the {type(model).__name__} is not fitted: call fit first")
        classes = getattr(model, "classes_", None)
        weight = np.atleast_2d(np.asarray(model.coef_, np.float64))
        labels = getattr(getattr(model, "_label_binarizer", None), "y_type_", "")
        if classes is not None and (labels.startswith("multilabel") or len(weight) not in (1, len(classes))):
            raise UnsupportedOpError(f"a {type(model).__name__} of several labels at once: fit one for each")
        self._require_numbers(sources)
        bias = np.broadcast_to(np.asarray(getattr(model, "intercept_", 0.0), np.float64).reshape(-1), (len(weight),))
        weight, bias = _taken_in(weight, bias, sources)
        scores = Layers([weight], [bias])
        link = _generalized_link(model) if classes is None else _linear_link(model, len(weight))
        return _Scores(scores, link, classes, keeps_columns=classes is None and np.ndim(model.coef_) == 2)

    def _net(self, model: Any, sources: list[_Source]) -> _Scores:
        self._require_numbers(sources)
        weights, biases = [w.T for w in model.coefs_], list(model.intercepts_)
        weights[0], biases[0] = _taken_in(weights[0], biases[0], sources)
        classes = getattr(model, "classes_", None)
        if classes is not None and model.out_activation_ == "logistic" and model.n_outputs_ > 1:
            raise UnsupportedOpError("an MLPClassifier of several labels at once: fit one for each")
        link = {"identity": "identity", "logistic": "sigmoid", "softmax": "softmax"}.get(model.out_activation_)
        if link is None:
            raise UnsupportedOpError(f"an MLP that ends in '{model.out_activation_}'")
        return _Scores(Layers(weights, biases, model.activation), link, classes)

    def _kernel(self, model: Any, sources: list[_Source]) -> tuple[list[nn.Module], _Scores]:
        if not hasattr(model, "dual_coef_"):
            raise ArgumentError(f"the {type(model).__name__} is not fitted: call fit first")
        if not isinstance(model.kernel, str) or model.kernel not in ("linear", "rbf", "poly", "sigmoid"):
            raise UnsupportedOpError("a kernel of your own: fit with kernel='rbf', 'linear', 'poly' or 'sigmoid'")
        self._require_numbers(sources)
        classes = getattr(model, "classes_", None)
        dual = np.asarray(model.dual_coef_, np.float64)
        coefficients = dual if classes is None or len(classes) == 2 else _pairs(dual, np.asarray(model.n_support_))
        bias = np.asarray(model.intercept_, np.float64).reshape(-1)
        vectors = np.asarray(model.support_vectors_, np.float64)
        link = "identity" if classes is None else "votes"
        if (
            classes is not None
            and len(classes) > 2
            and self.output == "predict"
            and getattr(model, "break_ties", False)
        ):
            raise UnsupportedOpError(
                f"{type(model).__name__}(break_ties=True) predicts by other scores than votes: fit it without, or "
                f"model.set_params(break_ties=False)"
            )
        if classes is not None and len(classes) > 2 and self.output == "decision_function":
            raise UnsupportedOpError("an SVC of several classes gives its votes alone: take output='predict'")
        steps: list[nn.Module] = []
        if model.kernel == "linear":
            weight, bias = _taken_in(coefficients @ vectors, bias, sources)
            scores: nn.Module = Layers([weight], [bias])
        else:
            if any((s.factor, s.shift) != (1.0, 0.0) for s in sources):
                steps = [Affine(np.array([s.factor for s in sources]), np.array([s.shift for s in sources]))]
            scores = Kernel(model.kernel, vectors, coefficients, bias, float(model._gamma), model.coef0, model.degree)
        cut = 0.0 if type(model).__name__ == "OneClassSVM" else None
        return steps, _Scores(scores, link, classes, cut=cut)


_FAMILIES: dict[tuple[str, ...], Callable[[_Converter, Any, list[_Source]], _Scores]] = {
    (
        "DecisionTreeClassifier", "DecisionTreeRegressor", "ExtraTreeClassifier", "ExtraTreeRegressor",
        "RandomForestClassifier", "RandomForestRegressor", "ExtraTreesClassifier", "ExtraTreesRegressor",
    ): _Converter._forest,
    ("IsolationForest",): _Converter._isolation,
    ("GradientBoostingClassifier", "GradientBoostingRegressor"): _Converter._boosting,
    ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor"): _Converter._histograms,
    ("MLPClassifier", "MLPRegressor"): _Converter._net,
}  # fmt: skip

_SCALERS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "StandardScaler": lambda s: _centred(s.mean_ if s.with_mean else None, s.scale_),
    "RobustScaler": lambda s: _centred(s.center_, s.scale_),
    "MaxAbsScaler": lambda s: _centred(None, s.scale_),
    "MinMaxScaler": lambda s: _min_max(s),
}
"""By kind the factor and the shift of each column."""


def _centred(center: Any, scale: Any) -> tuple[Any, Any]:
    factor = 1.0 if scale is None else 1 / np.asarray(scale)
    return factor, 0.0 if center is None else -np.asarray(center) * factor


def _min_max(scaler: Any) -> tuple[Any, Any]:
    if scaler.clip:
        raise UnsupportedOpError("MinMaxScaler(clip=True): leave clip out")
    return scaler.scale_, scaler.min_


def _package(model: Any) -> str:
    return type(model).__module__.partition(".")[0]


def _refuse_foreign(step: Any) -> None:
    """Raise `UnsupportedOpError` for what is no estimator of scikit-learn itself, whatever its class is called."""
    kind = type(step).__name__
    if _package(step) != "sklearn":
        own = f", got a {kind} of {type(step).__module__}: give the estimator that it is made of"
        raise UnsupportedOpError(f"sectorch converts models of scikit-learn, xgboost and lightgbm{own}")
    changed = sorted({"predict", "predict_proba", "decision_function", "transform"} & set(vars(step)))
    if changed:
        raise UnsupportedOpError(f"this {kind} has a {changed[0]} of its own, which is not converted: del it first")


def _keep_sides_of_zero(found: Ensemble) -> None:
    """Zeros stay on their side of thresholds that fixed point would round to zero.

    lightgbm writes -1e-35 for "below zero", and x = 0 is not among x <= -1e-35. Such a threshold becomes one unit of
    the last place of the default scheme, or of the schemes that columns of larger numbers need.
    """
    most = max(float(np.abs(tree.threshold[np.asarray(tree.left) >= 0]).max(initial=0.0)) for tree in found.trees)
    unit = 0.75 * 2.0 ** -(20 if most < 2**12 else 12 if most < 2**20 else 4)
    side = 1.0 if found.strict else -1.0
    for tree in found.trees:
        tiny = (np.asarray(tree.left) >= 0) & (tree.threshold * side > 0) & (np.abs(tree.threshold) < unit)
        tiny[list(tree.categories)] = False
        tree.threshold[tiny] = side * unit


SMALL = 2.0**-10
"""Where no threshold of a column reaches this, numbers that are rounded to 2^-20 have few digits left."""
ZERO = 2.0**-100
"""What is not larger stands for zero, as lightgbm's 1e-35."""


def _warn_of_small_thresholds(trees: list[Tree], raw: list[int | None], schema: Schema) -> None:
    by_column: dict[int, set[float]] = {}
    for tree in trees:
        for node in np.flatnonzero(np.asarray(tree.left) >= 0):
            column, size = raw[int(tree.feature[node])], abs(float(tree.threshold[node]))
            if column is not None and int(node) not in tree.categories and size > ZERO:
                by_column.setdefault(column, set()).add(size)
    small = [column for column, sizes in sorted(by_column.items()) if len(sizes) > 1 and max(sizes) < SMALL]
    if small:
        named = ", ".join(repr(schema.names[c]) if schema.names else str(c) for c in small[:4])
        warnings.warn(
            f"all thresholds of column {named}{', ...' if len(small) > 4 else ''} are below {SMALL:.1g}, and numbers "
            f"are rounded to 2^-20 with the default scheme: multiply the column, in the fit and in the rows, or use "
            f"more fraction bits (Scheme(frac_bits=...))",
            PrecisionWarning,
            stacklevel=2,
        )


def _fresh(count: int) -> list[_Source]:
    return [_Source(None) for _ in range(count)]


def _taken_in(weight: np.ndarray, bias: np.ndarray, sources: list[_Source]) -> tuple[np.ndarray, np.ndarray]:
    """A dense layer of scaled columns as one of the columns themselves."""
    factor, shift = (np.array([getattr(s, name) for s in sources], np.float64) for name in ("factor", "shift"))
    return weight * factor, bias + weight @ shift


def _take_scaling(tree: Tree, sources: list[_Source]) -> None:
    """A tree of scaled columns as one of the columns themselves."""
    for node in np.flatnonzero(np.asarray(tree.left) >= 0):
        source = sources[int(tree.feature[node])]
        if (source.factor, source.shift) != (1.0, 0.0):
            if source.factor <= 0:
                raise UnsupportedOpError("a scaler with a negative factor before trees, which need none: leave it out")
            tree.threshold[node] = (tree.threshold[node] - source.shift) / source.factor


def _plain(value: Any) -> Any:
    """A category as JSON holds it; None for a missing one."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def _places(step: Any, chosen: Any) -> list[int]:
    """The columns of a part of a ColumnTransformer, as numbers."""
    if isinstance(chosen, slice):
        return list(range(step.n_features_in_))[chosen]
    chosen = np.atleast_1d(np.asarray(chosen))
    if chosen.dtype == bool:
        return np.flatnonzero(chosen).tolist()
    if chosen.dtype.kind in "iu":
        return [int(i) % step.n_features_in_ for i in chosen]
    names = list(getattr(step, "feature_names_in_", ()))
    return [names.index(name) for name in chosen]


def _hist_order(model: Any, count: int) -> np.ndarray:
    """The raw column of each column that the trees of histogram gradient boosting see: categorical ones come first."""
    order = []
    for _, _, chosen in model._preprocessor.transformers_:
        order += _places(model._preprocessor, chosen)
    return np.array(order if len(order) == count else range(count))


def _is_linear(model: Any) -> bool:
    package = type(model).__module__
    return package.startswith(("sklearn.linear_model", "sklearn.svm")) and (
        hasattr(model, "coef_") or not hasattr(model, "n_features_in_")
    )


_LINEAR = {
    "ARDRegression", "BaseSGDRegressor", "BayesianRidge", "LinearClassifierMixin", "LinearModel",
    "MultiOutputLinearModel", "Ridge", "RidgeCV", "_GeneralizedLinearRegressor", "_RidgeClassifierMixin",
}  # fmt: skip
"""The classes whose `predict` is known to be that of a linear model with its link."""


def _generalized_link(model: Any) -> str:
    """The link of a regression: that of a generalised linear model is the exponential, unless it is told otherwise."""
    if not hasattr(model, "_get_loss"):
        return "identity"
    link = getattr(model, "link", "log")
    return "exp" if link == "log" or (link == "auto" and model.power > 0) else "identity"


def _linear_link(model: Any, outputs: int) -> str:
    if not hasattr(model, "predict_proba"):
        return "votes" if outputs == 1 else "none"
    kind = type(model).__name__
    if kind in ("LogisticRegression", "LogisticRegressionCV"):
        return "ovr" if getattr(model, "solver", "") == "liblinear" or outputs == 1 else "softmax"
    return "ovr" if getattr(model, "loss", "log_loss") == "log_loss" else "none"


def _pairs(dual: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """libsvm's coefficients of several classes as one row for each pair of classes, [pairs, vectors]."""
    ends = np.cumsum(counts)
    span = [slice(int(end - n), int(end)) for end, n in zip(ends, counts, strict=True)]
    rows = []
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            row = np.zeros(dual.shape[1])
            row[span[i]], row[span[j]] = dual[j - 1, span[i]], dual[i, span[j]]
            rows.append(row)
    return np.array(rows)


def _booster(model: Any) -> Ensemble:
    """A booster of xgboost or lightgbm, or their scikit-learn wrapper, read from its own dump."""
    package, wrapper = type(model).__module__.partition(".")[0], hasattr(model, "get_params")
    if package == "xgboost":
        rounds = None
        if wrapper:
            wrapped, model = model, copy.copy(model)
            if not hasattr(wrapped, "_Booster"):
                raise ArgumentError(f"the {type(wrapped).__name__} is not fitted: call fit first")
            rounds = _best_iteration(wrapped)
            model = wrapped.get_booster()
            sentinel = getattr(wrapped, "missing", None)
            if sentinel is not None and not math.isnan(sentinel):
                raise UnsupportedOpError(
                    f"this {type(wrapped).__name__} takes {sentinel} for a missing number: give module() its booster, "
                    f"model.get_booster(), with missing=True, and rows with NaN in place of {sentinel}"
                )
            found = read_xgboost(bytes(model.save_raw("json")), rounds)
            return _of_kind(found, hasattr(wrapped, "predict_proba"), wrapped, "get_booster()")
        return read_xgboost(bytes(model.save_raw("json")), rounds)
    classes = None
    if wrapper:
        if not getattr(model, "fitted_", True) or getattr(model, "_Booster", None) is None:
            raise ArgumentError(f"the {type(model).__name__} is not fitted: call fit first")
        wrapped, classes, model = model, getattr(model, "classes_", None), model.booster_
        found = read_lightgbm(model.model_to_string())
        found.classes = found.classes if classes is None else np.asarray(classes)
        return _of_kind(found, classes is not None, wrapped, "booster_")
    return read_lightgbm(model.model_to_string())


def _of_kind(found: Ensemble, classifies: bool, wrapped: Any, booster: str) -> Ensemble:
    """What was read of a wrapper, which predicts classes or values whatever its objective is."""
    if classifies != (found.classes is not None) or (classifies and found.link not in ("sigmoid", "softmax")):
        raise UnsupportedOpError(
            f"a {type(wrapped).__name__} with an objective of {'values' if classifies else 'classes'} does not predict "
            f"what its booster does: module(model.{booster}, 'decision_function') is the booster, for its scores"
        )
    return found


def _best_iteration(wrapped: Any) -> int | None:
    try:
        return int(wrapped.best_iteration) + 1
    except AttributeError:
        return None
