"""Correlations, VIF, R2 by table and components are those of the built join."""

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression

import tp_flower
from strategies.report_page.page import render
from tests.support.examples.orders import (
    FEATURES,
    coefficients,
    joined,
    sites,
    sql,
    tables,
)
from tests.support.federated import pieces
from tp_flower.methods.moments.questions import FeatureColumns, inflations
from tp_flower.methods.moments.solve import JoinedMoments
from tp_flower.protocol.setup_messages import EncodedColumns

EVERYTHING = {"l2": 0.0, "test_fraction": 0.0}
TABLES = {"o": ["o.day"], "u": ["u.age"], "i": ["i.price"], "m": ["m.size"]}


@pytest.fixture(scope="module")
def answers() -> tp_flower.JoinAnswers:
    return tp_flower.moments(sql(), sites(), **EVERYTHING)


def test_correlations_are_those_of_the_join(answers):
    features, label = joined()
    expected = np.corrcoef(np.column_stack([features, label]), rowvar=False)
    names = [*FEATURES, "label"]
    found = answers.correlations
    assert len(found) == len(names) * (len(names) - 1) / 2
    sizes = found["correlation"].abs().to_numpy()
    assert np.array_equal(sizes, np.sort(sizes)[::-1])
    for first, second, value in found.itertuples(index=False):
        place = names.index(first), names.index(second)
        assert value == pytest.approx(expected[place], abs=1e-6)


def r2_of_others(features: np.ndarray, column: int) -> float:
    others = np.delete(features, column, axis=1)
    fitted = LinearRegression().fit(others, features[:, column])
    return fitted.score(others, features[:, column])


def test_the_inflation_of_a_column_is_its_vif(answers):
    features, _ = joined()
    found = answers.inflation.set_index("feature").loc[[*FEATURES]]
    expected = [1.0 / (1.0 - r2_of_others(features, n)) for n in range(len(FEATURES))]
    np.testing.assert_allclose(found["factor"], expected, atol=1e-6)
    np.testing.assert_allclose(found["scaled"], np.sqrt(expected), atol=1e-6)


def test_r2_of_every_table_alone_and_of_all_others(answers):
    features, label = joined()
    frame = pd.DataFrame(features, columns=FEATURES)
    found = answers.tables.set_index("table")
    assert list(found.index) == list(TABLES)
    for table, names in TABLES.items():
        for which, chosen in (
            ("alone", frame[names]),
            ("without", frame.drop(columns=names)),
        ):
            r2 = LinearRegression().fit(chosen, label).score(chosen, label)
            assert found.loc[table, f"{which}_train"] == pytest.approx(r2, abs=1e-6)


def test_components_are_those_of_the_standardised_columns(answers):
    features, _ = joined()
    expected = PCA().fit(features / features.std(axis=0))
    found = answers.components
    np.testing.assert_allclose(
        found.pop("share"), expected.explained_variance_ratio_, atol=1e-6
    )
    assert list(found) == list(FEATURES)
    turned = (found.to_numpy() * expected.components_).sum(axis=1)
    np.testing.assert_allclose(np.abs(turned), 1.0, atol=1e-6)


def test_rows_that_are_held_out_say_what_a_join_is_worth():
    how = {"test_split": "group(o.iid)", "test_fraction": 0.3}
    found = tp_flower.moments(sql(), sites(), **how)
    without = found.tables.set_index("table").loc["i", "without_test"]
    query = sql(features="o.day, u.age, m.size")
    expected = tp_flower.fit(query, sites(), strategy="moments", **how)
    assert without == pytest.approx(expected.metrics["test"]["r2"], abs=1e-6)


def test_shards_have_the_answers_of_the_table(answers):
    frames = tables()
    north, south = pieces(frames.pop("orders"), 110)
    shards = {"north": {"orders": north}, "south": {"orders": south}, "others": frames}
    found = tp_flower.moments(sql(), shards, **EVERYTHING)
    for name in ("inflation", "tables"):
        numbers = getattr(found, name).select_dtypes("number")
        expected = getattr(answers, name).select_dtypes("number")
        np.testing.assert_allclose(numbers, expected, atol=1e-6)


def moments_of(features: np.ndarray) -> JoinedMoments:
    rows = np.column_stack([features, np.zeros(len(features)), np.ones(len(features))])
    width = features.shape[1]
    return JoinedMoments(rows.T @ rows, np.arange(width), np.array([width]), width + 1)


def determinant(features: np.ndarray) -> float:
    return float(np.linalg.det(np.corrcoef(features, rowvar=False)))


def test_the_inflation_of_a_feature_of_several_columns():
    rng = np.random.default_rng(2)
    kinds = rng.integers(3, size=500)
    indicators = np.eye(3)[kinds]
    numbers = rng.normal(size=(500, 2)) + indicators[:, :2]
    moments = moments_of(np.column_stack([numbers, indicators]))
    groups = [np.array([0]), np.array([1]), np.array([2, 3, 4])]
    found = inflations(moments.covariance, groups)
    # Fox and Monette: the determinants of R, without one of three indicators
    kept = np.column_stack([numbers, indicators[:, 1:]])
    whole = determinant(kept)
    expected = determinant(kept[:, 2:]) * determinant(kept[:, :2]) / whole
    assert found[2].columns == 2
    assert found[2].factor == pytest.approx(expected)
    assert found[2].scaled == pytest.approx(expected**0.25)
    assert found[0].factor == pytest.approx(1 / (1 - r2_of_others(kept, 0)))


def test_what_others_determine_has_no_inflation():
    rng = np.random.default_rng(4)
    numbers = rng.normal(size=(200, 3))
    numbers[:, 2] += numbers[:, 0]
    # two columns that are one, and a third on its own with a neighbour
    features = np.column_stack([numbers, 2.0 * numbers[:, 1] + 3.0])
    covariance = moments_of(features).covariance
    found = inflations(covariance, [np.array([n]) for n in range(4)])
    assert [np.isinf(each.factor) for each in found] == [False, True, False, True]
    alone = 1 / (1 - r2_of_others(features[:, :3], 0))
    assert found[0].factor == pytest.approx(alone)


def test_determined_features_are_none_in_the_report():
    frames = tables()
    frames["users"]["months"] = 12.0 * frames["users"]["age"]
    everywhere = {f"at {name}": {name: frame} for name, frame in frames.items()}
    query = sql(features="o.day, u.age, u.months")
    found = tp_flower.moments(query, everywhere, **EVERYTHING)
    factors = found.inflation.set_index("feature")["factor"]
    assert factors.isna().to_dict() == {"o.day": False, "u.age": True, "u.months": True}
    assert "determined by others" in found.text()


def test_categories_and_classes_have_their_names():
    query = sql("o.kind", features="o.day, CAST(m.mid AS VARCHAR) AS maker")
    found = tp_flower.moments(query, sites())
    names = set(found.correlations["first"]) | set(found.correlations["second"])
    assert {"o.day", "m.maker=1", "label = few", "label = some"} <= names
    assert found.inflation.set_index("feature").loc["m.maker", "columns"] == 4


def test_a_features_own_columns_are_no_pair():
    made = {"o": {"day": 1, "gone": 0}, "i": {"kind": 2}, "u": {}}
    columns = FeatureColumns(
        {table: EncodedColumns(features, True) for table, features in made.items()}
    )
    assert columns.names == ["o.day", "i.kind[0]", "i.kind[1]"]
    assert [each.tolist() for each in columns.by_table.values()] == [[0], [1, 2], []]
    assert [each.tolist() for each in columns.by_feature.values()] == [[0], [1, 2]]


def test_page_and_console_have_the_answers(answers):
    text = answers.text()
    titles = (
        "R2 of the tables",
        "Variance inflation",
        "Strongest correlations",
        "Principal components",
        "Least squares by penalty",
        "Coefficients and their standard errors",
    )
    page = (answers.model.folder / "report.html").read_text()
    for title in titles:
        assert title in text
        assert title in page
    # a training prints what is not folded on its page
    shown = [title for title in titles if title in answers.model.text()]
    assert shown == [titles[0], titles[-1]]
    assert len(coefficients(answers.model)) == len(FEATURES)


@pytest.mark.cases("x", "-1", "odd4", "odd5", "odd6")
@pytest.mark.parametrize("odd", [None, "x", -1, [], {}, [None], [{"table": 3}]])
def test_a_page_shows_what_is_left_of_a_damaged_report(answers, odd):
    report = answers.model.report
    moments = report["moments"]
    for key, value in moments.items():
        assert "<html" in render({**report, "moments": {**moments, key: odd}})
        for name in value[0] if isinstance(value, list) and value else ():
            damaged = {**moments, key: [{**value[0], name: odd}, *value[1:]]}
            assert "<html" in render({**report, "moments": damaged})
