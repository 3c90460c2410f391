"""Importances, shares and metrics by group are those of the built join."""

import math
from dataclasses import replace

import lightgbm
import msgspec
import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.inspection import permutation_importance
from sklearn.metrics import (
    accuracy_score,
    get_scorer,
    log_loss,
    mean_squared_error,
    recall_score,
    roc_auc_score,
)

from strategies.inference import predict
from strategies.inference.inspection import inspect
from strategies.inference.predict import Evaluate
from tests.support.federated import WatchedGrid, on_requests, write_site
from tests.support.predicted import features_of, model_of, train
from tp_flower.errors import SettingsError, SiteError
from tp_flower.learning.groups import OTHERS
from tp_flower.methods.boost.linear import LinearPart, is_linear
from tp_flower.protocol.messages import Action
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings, Settings

ORDERS = 300
CUSTOMERS = 40
REPEATS = 8
ROUNDING = 1e-4  # relative, of numbers that leave
TABLES = {"o": ["price", "day"], "c": ["age", "region"]}
FEATURES = [column for columns in TABLES.values() for column in columns]
JOIN = "FROM orders AS o JOIN customers AS c ON o.customer = c.id"


def sql_of(label: str, join: str = JOIN) -> str:
    return f"SELECT o.{label} AS label, o.price, o.day, c.age, c.region {join}"


def frames() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(5)
    customers = pd.DataFrame(
        {
            "id": np.arange(CUSTOMERS),
            "age": rng.normal(45, 12, CUSTOMERS).round(),
            # the west has one customer
            "region": rng.choice(["north", "south", "east"], CUSTOMERS),
        }
    )
    customers.loc[7, "region"] = "west"
    # some customers have many orders, and three orders are nobody's
    customer = np.floor(CUSTOMERS * rng.random(ORDERS) ** 2).astype(float)
    customer[:3] = np.nan
    orders = pd.DataFrame(
        {
            "customer": customer,
            "price": rng.gamma(2.0, 2.0, ORDERS),
            "day": rng.integers(1, 29, ORDERS),
        }
    )
    known = customers.set_index("id").reindex(customer).reset_index(drop=True)
    score = 0.5 * orders["price"] - 0.06 * (known["age"].fillna(45) - 45)
    score += (known["region"] == "north") - 1.5
    orders["qty"] = score + rng.normal(size=ORDERS)
    orders["late"] = rng.random(ORDERS) < 1 / (1 + np.exp(-score))
    return {"orders": orders, "customers": customers}


STORE = frames()
SITES = {name: {name: [frame]} for name, frame in STORE.items()}


def joined(how: str = "inner") -> pd.DataFrame:
    """Return the built join, with the rows of both tables behind each joined row."""
    orders = STORE["orders"].assign(order_row=range(ORDERS))
    customers = STORE["customers"].assign(customer_row=range(CUSTOMERS))
    built = orders.merge(customers, how=how, left_on="customer", right_on="id")
    return built.reset_index(drop=True)


class JoinModel(BaseEstimator):
    """The saved model as one of scikit-learn's, of rows of the built join.

    Its X has for each feature the position of the joined row whose value it is: of the
    rows as they are all positions are their own. The values are encoded once, and every
    row is scored by itself.
    """

    classes_ = np.array([False, True])

    def __init__(self, model, built: pd.DataFrame) -> None:
        (self.base,) = model.manifest.base_score
        self.rows = pd.DataFrame(dict.fromkeys(FEATURES, np.arange(len(built))))
        self.models = {}
        self.owners = {}
        self.encoded = {}
        self.absent = {}
        for alias, columns in TABLES.items():
            saved = model.saved(alias)
            self.models[alias] = model_of(saved)
            self.encoded[alias] = features_of(saved, built[columns])
            # the feature that each encoded column is of
            items = saved.encoder.encoder.encodings
            names = [item.name for item in items for _ in item.feature_names]
            self.owners[alias] = np.array(names)
            # where a LEFT JOIN finds no row
            self.absent[alias] = built[columns].isna().all(axis=1).to_numpy()

    def added(self, alias: str, rows: pd.DataFrame) -> np.ndarray:
        encoded = self.encoded[alias].copy()
        for name in TABLES[alias]:
            own = np.flatnonzero(self.owners[alias] == name)
            encoded[:, own] = self.encoded[alias][rows[name].to_numpy()][:, own]
        scores = self.models[alias].scores(encoded)[:, 0]
        return np.where(self.absent[alias], 0.0, scores)

    def decision_function(self, rows: pd.DataFrame) -> np.ndarray:
        return self.base + self.added("o", rows) + self.added("c", rows)

    def fit(self, *_) -> "JoinModel":
        return self


class JoinRegressor(RegressorMixin, JoinModel):
    def predict(self, rows: pd.DataFrame) -> np.ndarray:
        return self.decision_function(rows)


class JoinClassifier(ClassifierMixin, JoinModel):
    def predict_proba(self, rows: pd.DataFrame) -> np.ndarray:
        chance = 1 / (1 + np.exp(-self.decision_function(rows)))
        return np.column_stack([1 - chance, chance])


def evaluate(model, sites=SITES, sql="", change=None, **settings):
    """Return what evaluates a model, with what passed between server and sites."""
    query = Query.from_sql(sql or model.sql)
    strategy = Evaluate(query, model.manifest, mode="evaluate", **settings)
    with WatchedGrid(sites, change, state=model.state) as grid:
        strategy.start(grid)
    return strategy, grid.seen


def falls(strategy, metric: str) -> dict[str, tuple[float, float]]:
    """Return the mean fall of a metric and its deviation, by feature or table."""
    items = strategy.outcomes["importances"]["items"]
    return {item["feature"] or item["table"]: item["falls"][metric] for item in items}


def check_alike(ours: tuple[float, float], theirs: np.ndarray) -> None:
    """Assert that two means of permutations are equal within five standard errors."""
    mean, deviation = ours
    error = math.sqrt((deviation**2 + theirs.std() ** 2) / REPEATS)
    assert abs(mean - theirs.mean()) < 5 * error + ROUNDING


MODELS = {
    "linear": ("qty", {"strategy": "cg"}),
    "logistic": ("late", {"strategy": "cg"}),
    "trees": ("late", {"strategy": "boost", "effects": "none", "factors": "none"}),
    "numbers": ("qty", {"strategy": "boost", "effects": "none", "factors": "none"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Train each model when it is first asked for."""
    trained = {}

    def of(name: str):
        if name not in trained:
            label, how = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            settings = {"num_epochs": 4, "test_fraction": 0.0, **how}
            trained[name] = train(folder, SITES, sql_of(label), **settings)
        return trained[name]

    return of


SCORERS = {
    "qty": {"r2": "r2", "rmse": "neg_root_mean_squared_error"},
    "late": {"auc": "roc_auc", "log_loss": "neg_log_loss"},
}


@pytest.mark.cases("linear", "trees")
@pytest.mark.parametrize("name", MODELS)
def test_importances_are_those_of_scikit_learn_on_the_built_join(models, name):
    model = models(name)
    label = MODELS[name][0]
    strategy, _ = evaluate(model, importances=REPEATS)
    built = joined()
    on_join = (JoinClassifier if label == "late" else JoinRegressor)(model, built)
    for metric, scorer in SCORERS[label].items():
        ours = falls(strategy, metric)
        theirs = permutation_importance(
            *(on_join, on_join.rows, built[label]),
            scoring=scorer,
            n_repeats=REPEATS,
            random_state=0,
        ).importances
        for feature, values in zip(FEATURES, theirs, strict=True):
            check_alike(ours[feature], values)
        # a table's columns change places together
        score = get_scorer(scorer)
        best = score(on_join, on_join.rows, built[label])
        rng = np.random.default_rng(0)
        for table, columns in TABLES.items():
            values = []
            for _ in range(REPEATS):
                moved = on_join.rows
                places = rng.permutation(len(moved))
                moved = moved.assign(**dict.fromkeys(columns, places))
                values.append(best - score(on_join, moved, built[label]))
            check_alike(ours[table], np.array(values))
    # what matters most is told apart, beyond its sampling error
    (mean, deviation), (little, _) = ours["price"], ours["day"]
    assert mean - 3 * deviation > little


@pytest.mark.parametrize("join", ["JOIN", "LEFT JOIN"])
def test_shares_are_the_mean_sizes_of_shap_values_on_the_built_join(models, join):
    model = models("linear")
    query = sql_of("qty", JOIN.replace("JOIN", join))
    strategy, _ = evaluate(model, sql=query, importances=1)
    items = strategy.outcomes["importances"]["items"]
    shares = {item["feature"] or item["table"]: item["share"] for item in items}
    built = joined("left" if join == "LEFT JOIN" else "inner")
    on_join = JoinRegressor(model, built)
    for alias, columns in TABLES.items():
        owners = on_join.owners[alias]
        weights = on_join.models[alias].weights[: len(owners), 0]
        absent = on_join.absent[alias][:, None]
        rows = np.where(absent, 0.0, on_join.encoded[alias])
        # Lundberg and Lee 2017, with these rows as the background
        shap_values = weights * (rows - rows.mean(axis=0))
        for feature in columns:
            expected = np.abs(shap_values[:, owners == feature].sum(axis=1)).mean()
            assert shares[feature] == pytest.approx(expected, rel=ROUNDING)
        added = on_join.added(alias, on_join.rows)
        expected = np.abs(added - added.mean()).mean()
        assert shares[alias] == pytest.approx(expected, rel=ROUNDING)


def test_shares_in_trees_are_the_mean_sizes_of_lightgbms_shap_values(models):
    model = models("trees")
    strategy, _ = evaluate(model, importances=1)
    items = strategy.outcomes["importances"]["items"]
    shares = {item["feature"]: item["share"] for item in items}
    on_join = JoinClassifier(model, joined())
    for alias, columns in TABLES.items():
        encoded = on_join.encoded[alias]
        for feature in columns:
            of_feature = on_join.owners[alias] == feature
            # what other columns add to a linear model is a constant then
            alone = np.where(of_feature, encoded, np.nan)
            added = np.zeros(len(encoded))
            for step, text in on_join.models[alias].forest.rounds:
                if is_linear(text):
                    added += step * LinearPart.of(text).values(alone)[:, 0]
                else:
                    booster = lightgbm.Booster(model_str=text)
                    values = booster.predict(encoded, pred_contrib=True)
                    # the last column is the mean
                    added += step * values[:, :-1][:, of_feature].sum(axis=1)
            expected = np.abs(added - added.mean()).mean()
            assert shares[feature] == pytest.approx(expected, rel=ROUNDING)
            assert expected > 0.001


@pytest.mark.parametrize("name", ["linear", "trees"])
def test_curves_are_the_mean_scores_of_the_built_join(models, name):
    model = models(name)
    label = MODELS[name][0]
    query = sql_of(label, JOIN.replace("JOIN", "LEFT JOIN"))
    strategy, _ = evaluate(model, sql=query, importances=1)
    built = joined("left").astype({"day": float})
    items = strategy.outcomes["importances"]["items"]
    curves = {item["feature"]: item["curve"] for item in items if item["feature"]}
    assert {*curves} == {*FEATURES}
    for feature, curve in curves.items():
        assert 3 <= len(curve) <= 10
        for point in curve:
            there = built.copy()
            alias = "o" if feature in TABLES["o"] else "c"
            known = ~built[TABLES[alias]].isna().all(axis=1)
            there.loc[known, feature] = point["value"]
            on_join = JoinRegressor(model, there)
            expected = on_join.decision_function(on_join.rows).mean()
            assert point["score"] == pytest.approx(expected, rel=ROUNDING, abs=2e-4)


def test_absent_rows_take_part_in_the_permutation_of_their_table(models):
    model = models("linear")
    query = sql_of("qty", JOIN.replace("JOIN", "LEFT JOIN"))
    strategy, _ = evaluate(model, sql=query, importances=REPEATS)
    built = joined("left")
    on_join = JoinRegressor(model, built)
    scores = on_join.decision_function(on_join.rows)
    added = on_join.added("c", on_join.rows)
    best = mean_squared_error(built["qty"], scores)
    rng = np.random.default_rng(1)
    values = [
        mean_squared_error(built["qty"], scores - added + rng.permutation(added)) - best
        for _ in range(REPEATS)
    ]
    mean, deviation = falls(strategy, "loss")["c"]
    check_alike((2 * mean, 2 * deviation), np.array(values))


def test_groups_have_the_metrics_of_their_rows_in_the_built_join(models):
    model = models("logistic")
    strategy, _ = evaluate(model, metrics_by="c.region")
    groups = {item["group"]: item for item in strategy.outcomes["groups"]["items"]}
    assert {*groups} == {"north", "south", "east", "west"}
    built = joined()
    on_join = JoinClassifier(model, built)
    chances = pd.Series(on_join.predict_proba(on_join.rows)[:, 1])
    for region, rows in built.groupby("region").groups.items():
        labels, of_rows = built.loc[rows, "late"], chances[rows]
        chosen = of_rows > 0.5
        expected = {
            "rows": len(rows),
            "auc": roc_auc_score(labels, of_rows),
            "log_loss": log_loss(labels, of_rows),
            "accuracy": accuracy_score(labels, chosen),
            "actual": labels.mean(),
            "predicted": of_rows.mean(),
            "chosen": chosen.mean(),
            "recall": recall_score(labels, chosen),
            "false_alarms": chosen[~labels].mean(),
        }
        for name, value in expected.items():
            assert groups[region][name] == pytest.approx(value, rel=ROUNDING), name


def test_groups_of_numbers_have_errors_and_no_variance_of_labels(models):
    strategy, seen = evaluate(models("linear"), metrics_by="c.age", importances=1)
    # one message brings both
    inspected = strategy.outcomes["importances"]["items"]
    assert [item["feature"] for item in inspected if item["curve"]] == FEATURES
    items = strategy.outcomes["groups"]["items"]
    assert {*items[0]} == {"group", "site", "rows", "loss", "rmse", "mae", "bias"}
    built = joined()
    on_join = JoinRegressor(models("linear"), built)
    scores = on_join.decision_function(on_join.rows)
    residuals = (scores - built["qty"]).groupby(built["age"])
    for item in items:
        own = residuals.get_group(float(item["group"]))
        assert item["rows"] == len(own)
        assert item["bias"] == pytest.approx(own.mean(), rel=ROUNDING, abs=1e-6)
        assert item["rmse"] == pytest.approx((own**2).mean() ** 0.5, rel=ROUNDING)
    # sites are told residuals, in the order of their own rows, and no label or score
    asked = [s for s in seen if s.action == Action.INSPECT and not s.is_reply]
    arrays = {name: a for s in asked for (part, name), a in s.arrays.items() if part}
    assert not arrays["scores"].any()
    assert (np.diff(arrays["positions"]) >= 0).all()
    told = pd.Series(arrays["labels"]).groupby(arrays["positions"]).sum()
    expected = (built["qty"] - scores).groupby(built["customer_row"]).sum()
    np.testing.assert_allclose(told, expected, atol=1e-4)


def test_small_groups_are_pooled_and_none_is_told_by_the_others(tmp_path, models):
    model = models("logistic")
    sites = policed(tmp_path, **dict.fromkeys(STORE, f"{ALLOWING}\nmin-cell = 9"))
    strategy, _ = evaluate(model, sites, metrics_by="c.region")
    groups = {item["group"]: item for item in strategy.outcomes["groups"]["items"]}
    # the one customer of the west is pooled, with the customers of the smallest other
    assert OTHERS in groups
    assert "west" not in groups
    built = joined()
    alone = built[~built["region"].isin([*groups])]
    assert groups[OTHERS]["rows"] == len(alone)
    assert alone["customer_row"].nunique() >= 9
    assert sum(group["rows"] for group in groups.values()) == len(built)
    # a customer each has too few rows of its own, however many orders
    strategy, _ = evaluate(model, sites, metrics_by="c.id")
    (group,) = strategy.outcomes["groups"]["items"]
    assert (group["group"], group["rows"]) == (OTHERS, len(built))


ALLOWING = 'releases.inspection = "clear"'


def policed(folder, **rules):
    """Write the tables of real sites whose policies have some rules.

    The model was trained where they were before: they have accounts of their own.
    """
    return {
        name: write_site(
            folder / name,
            {name: frame},
            {name: f'budget-name = "{name}"\n{rules.get(name, "")}'},
        )
        for name, frame in STORE.items()
    }


@pytest.mark.parametrize("name", STORE)
def test_every_table_of_the_query_must_allow_it(tmp_path, models, name):
    rules = {**dict.fromkeys(STORE, ALLOWING), name: ""}
    sites = policed(tmp_path, **rules)
    match = rf"'{name}'.*releases.inspection = never\) refuses: the run asks for insp"
    for asked in ({"importances": 2}, {"metrics_by": "c.region"}):
        with pytest.raises(SiteError, match=match):
            evaluate(models("logistic"), sites, **asked)
    # nothing else of an evaluation changes
    assert evaluate(models("logistic"), sites)[0].metrics["auc"] > 0.6


def test_a_column_that_leaves_as_a_hash_alone_groups_no_rows(tmp_path, models):
    customers = STORE["customers"].assign(city="x")
    rules = f'{ALLOWING}\njoin-only = ["city"]'
    site = write_site(
        tmp_path / "x" / "customers", {"customers": customers}, {"customers": rules}
    )
    sites = {**policed(tmp_path, orders=ALLOWING), "customers": site}
    match = r"\(join-only\) refuses: metrics by group reads column 'city'"
    with pytest.raises(SiteError, match=match):
        evaluate(models("logistic"), sites, metrics_by="c.city")


def test_the_ledger_and_the_report_have_what_left(tmp_path, models):
    sites = policed(tmp_path, **dict.fromkeys(STORE, ALLOWING))
    strategy, _ = evaluate(models("logistic"), sites, importances=1)
    report = strategy.report()
    kinds = {
        (entry["release"]["table"], entry["release"]["what"])
        for entries in report["privacy"]["ledger"].values()
        for entry in entries
    }
    assert {("orders", "inspection"), ("customers", "inspection")} <= kinds
    told = [m for m in report["privacy"]["messages"] if m["message"] == Action.INSPECT]
    assert [message["to"] for message in told] == ["sites", "server"]
    assert all(total["features"] for total in report["privacy"]["totals"])


def most_for_one(rows):
    """Return as many joined rows of the same rows, nearly all of the first of them."""
    own = np.unique(rows)
    return np.sort(np.concatenate([own, np.full(len(rows) - len(own), own[0])]))


LIES = {
    "fewer rows": (
        "positions",
        lambda rows: np.maximum(rows, 1),
        "not those of an earl",
    ),
    "one row for most": (
        "positions",
        most_for_one,
        "one row counts for most, would be",
    ),
    "too few rows": ("positions", lambda rows: np.full_like(rows, 3), "min-rows"),
    "rows beyond": ("positions", lambda rows: rows + 1000, "hold numbers from 0 to"),
    "labels as digits": ("labels", lambda own: own * 10.0**9, "not numbers of 2 cl"),
    "more scores": ("scores", lambda own: np.hstack([own, own]), "not 1 of each row"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_asks_for_more_is_refused(tmp_path, models, lie):
    name, change, match = LIES[lie]
    rules = f"{ALLOWING}\nmin-rows = 5"
    sites = policed(tmp_path, **dict.fromkeys(STORE, rules))

    @on_requests(Action.INSPECT)
    def hostile(seen):
        for (part, own), array in seen.arrays.items():
            # each order is joined once
            if own == name and (part or change is not most_for_one):
                seen.arrays[part, own] = change(array)

    with pytest.raises(SiteError, match=match):
        evaluate(models("logistic"), sites, change=hostile, importances=1)


def test_a_model_is_inspected_once_in_a_run(models, monkeypatch):
    def twice(joined, manifest, objective, scores, *others):
        yield from inspect(joined, manifest, objective, scores, *others)
        yield from inspect(joined, manifest, objective, 2.0 * scores, *others)

    monkeypatch.setattr(predict, "inspect", twice)
    with pytest.raises(SiteError, match="a model is inspected once in a run"):
        evaluate(models("logistic"), importances=1)


def test_numbers_leave_rounded(models):
    _, seen = evaluate(models("logistic"), importances=2)
    told = [s for s in seen if s.action == Action.INSPECT and s.is_reply]
    for message in told:
        for (_, name), values in message.arrays.items():
            digits = [f"{value:.4e}" for value in values.ravel()]
            np.testing.assert_array_equal(np.array(digits, float), values.ravel(), name)
    assert len(told) == len(STORE)


REFUSED = {
    "other_runs": ({"mode": "train", "importances": 2}, "is for mode 'evaluate' only"),
    "noise": (
        {"importances": 2, "privacy": PrivacySettings(predictions=1.0)},
        "importances: 2 does not go with privacy.predictions",
    ),
    "a_column": ({"metrics_by": "c.age + 1"}, "is not a column such as"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_go_with_no_inspection_are_refused(name):
    settings, match = REFUSED[name]
    with pytest.raises(SettingsError, match=match):
        Settings(**{"mode": "evaluate", **settings})


def test_a_model_that_is_no_sum_of_tables_has_no_importances(models):
    model = models("linear")
    for field, value, match in (
        ("trees", "tree", "it has trees on the bins of all tables"),
        ("divided", "o", "it has trees that read the regions of table 'o'"),
    ):
        other = replace(
            model, manifest=msgspec.structs.replace(model.manifest, **{field: value})
        )
        with pytest.raises(SettingsError, match=match):
            evaluate(other, importances=2)


def test_the_shards_of_a_table_are_inspected_each_on_its_rows(models):
    # both shards are at one site, which keeps one part of the model
    halves = [STORE["customers"][:20], STORE["customers"][20:]]
    sites = {"orders": SITES["orders"], "customers": {"customers": halves}}
    model = models("linear")
    strategy, _ = evaluate(model, sites, importances=REPEATS, metrics_by="c.region")
    items = strategy.outcomes["importances"]["items"]
    of_shards = [item for item in items if item["feature"] == "age"]
    assert [item["site"] for item in of_shards] == ["customers", "customers"]
    built = joined()
    for half, item in zip((slice(0, 20), slice(20, 40)), of_shards, strict=True):
        customers = STORE["customers"]["id"][half]
        rows = built[built["customer"].isin(customers)].reset_index(drop=True)
        on_join = JoinRegressor(model, rows)
        theirs = permutation_importance(
            *(on_join, on_join.rows, rows["qty"]),
            scoring="r2",
            n_repeats=REPEATS,
            random_state=0,
        )
        check_alike(item["falls"]["r2"], theirs.importances[FEATURES.index("age")])
    counts = pd.DataFrame(strategy.outcomes["groups"]["items"])
    assert counts["rows"].sum() == len(built)
    expected = built["region"].value_counts()
    assert counts.groupby("group")["rows"].sum().to_dict() == expected.to_dict()
