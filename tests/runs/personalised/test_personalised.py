"""Models of the sites' own: both limits, the optimum between, and what leaves."""

import re
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from strategies import Personalised
from strategies.report_page.page import render, result_view
from strategies.run.grid import InProcessGrid
from strategies.training.saving import make_manifest
from tests.support import federated
from tests.support.federated import WatchedGrid
from tests.support.files import case_table
from tests.support.page_reading import console_text
from tests.support.predicted import predicting
from tp_flower.errors import (
    DivergedError,
    QueryError,
    ReplyError,
    SettingsError,
    SiteError,
)
from tp_flower.methods.personalised.graph import parse_edges
from tp_flower.methods.personalised.messages import (
    TRAIN_PERSONAL,
    TRAIN_PERSONALISE,
    TRAIN_SUMMARISE,
)
from tp_flower.protocol.messages import Action
from tp_flower.reports.console import format_value
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings, Settings

CASES = case_table(__file__)
SQL = "SELECT y AS label, a, b FROM t"
CHAIN = "s0-s1, s1-s2"
WHOLE = {"test_fraction": 0.0, "tolerance": 1e-7, "num_epochs": 80, "l2": 0.01}


def frames(sites: int = 3, rows: int = 30) -> dict[str, pd.DataFrame]:
    """Sites whose labels depend on a and b in ways of their own."""
    found = {}
    for site in range(sites):
        rng = np.random.default_rng(site)
        count = rows + 7 * site
        own = pd.DataFrame(rng.normal(size=(count, 2)), columns=["a", "b"])
        noise = 0.3 * rng.normal(size=count)
        found[f"s{site}"] = own.assign(y=own.a + site * own.b + 1 + noise)
    return found


def grid_of(tables: dict[str, pd.DataFrame], **options: object) -> WatchedGrid:
    return WatchedGrid({s: {"t": own} for s, own in tables.items()}, **options)


def train(
    tables: dict[str, pd.DataFrame] | None = None,
    sql: str = SQL,
    grid: InProcessGrid | None = None,
    **settings: object,
) -> Personalised:
    grid = grid or grid_of(tables or frames())
    return federated.train(grid, sql, Personalised, **{"graph": CHAIN, **settings})


def models_of(strategy: Personalised) -> np.ndarray:
    """The parameters of every site's own model."""
    return strategy.method.parameters["personal"]


def facts_of(strategy: Personalised) -> dict:
    """What the report says of the sites' own models."""
    return strategy.report.sections["personal"]


class Obvious:
    """The same objective on all rows in one place, of a squared loss."""

    def __init__(self, tables: dict[str, pd.DataFrame], l2: float) -> None:
        rows = pd.concat(tables.values())
        centre = rows[["a", "b"]].mean()
        scale = rows[["a", "b"]].std(ddof=0)
        self.base = rows.y.mean()
        self.l2 = l2
        self.designs = [
            np.column_stack([(own[["a", "b"]] - centre) / scale, np.ones(len(own))])
            for own in tables.values()
        ]
        self.labels = [own.y.to_numpy() - self.base for own in tables.values()]

    def quadratic(self, site: int) -> tuple[np.ndarray, np.ndarray]:
        """H and c of f = 1/2 z'Hz - c'z + constant."""
        design = self.designs[site]
        labels = self.labels[site]
        penalty = self.l2 * np.diag([1.0, 1.0, 0.0])
        count = len(labels)
        return design.T @ design / count + penalty, design.T @ labels / count

    def gradients(self, models: np.ndarray) -> np.ndarray:
        pairs = [self.quadratic(k) for k in range(len(models))]
        return np.array([h @ z - c for (h, c), z in zip(pairs, models, strict=True)])


def test_without_a_penalty_every_site_has_the_model_of_its_rows_alone():
    tables = frames()
    strategy = train(tables, graph_penalty=0.0, **WHOLE)
    obvious = Obvious(tables, 0.01)
    alone = [np.linalg.solve(*obvious.quadratic(k)) for k in range(3)]
    np.testing.assert_allclose(models_of(strategy), alone, atol=1e-5)
    means = facts_of(strategy)["means"]
    loss, loss_alone = (means[name]["train"]["loss"] for name in ("personal", "local"))
    assert loss == pytest.approx(loss_alone, rel=1e-6)


def test_a_large_penalty_leads_to_the_one_model_of_no_personal_coordinate():
    tables = frames()
    tied = train(tables, graph_penalty=100.0, **WHOLE)
    obvious = Obvious(tables, 0.01)
    pairs = [obvious.quadratic(k) for k in range(3)]
    # every site counts alike, however many rows it has
    one = np.linalg.solve(sum(h for h, _ in pairs), sum(c for _, c in pairs))
    found = models_of(tied)
    assert (found == found[0]).all()
    np.testing.assert_allclose(found[0], one, atol=1e-5)
    np.testing.assert_allclose(tied.method.parameters["global"][0], one, atol=1e-5)
    assert facts_of(tied)["clusters"] == [[0, 1, 2]]


def test_no_personal_coordinate_is_one_model_whatever_the_penalty():
    models = train(personal="", graph_penalty=0.3, **WHOLE).method.parameters
    np.testing.assert_allclose(models["personal"], models["global"], atol=1e-6)


def test_between_the_limits_it_is_the_optimum_of_a_generic_solver():
    import cvxpy

    tables = frames(5)
    edges = "s0-s1, s1-s2, s2-s3, s3-s4, s4-s0, s0-s2"
    strategy = train(tables, graph=edges, graph_penalty=0.05, **WHOLE)
    obvious = Obvious(tables, 0.01)
    models = cvxpy.Variable((5, 3))
    fits = 0.0
    for k in range(5):
        fits += cvxpy.sum_squares(
            obvious.designs[k] @ models[k] - obvious.labels[k]
        ) / (2 * len(obvious.labels[k]))
        fits += 0.005 * cvxpy.sum_squares(models[k, :2])
    pulls = sum(
        cvxpy.norm(models[i] - models[j])
        for i, j in parse_edges(edges, strategy.training_problem.sites).edges.tolist()
    )
    problem = cvxpy.Problem(cvxpy.Minimize(fits / 5 + 0.05 * pulls))
    problem.solve(solver=cvxpy.CLARABEL)
    assert facts_of(strategy)["objective"] == pytest.approx(problem.value, rel=1e-6)
    np.testing.assert_allclose(models_of(strategy), models.value, atol=2e-4)


def test_shared_coordinates_are_one_and_named_ones_are_each_sites_own():
    tables = frames()
    found = models_of(train(tables, personal="b", graph_penalty=0.0, **WHOLE))
    assert (found[:, [0, 2]] == found[0, [0, 2]]).all()
    assert len(set(found[:, 1])) == 3
    gradients = Obvious(tables, 0.01).gradients(found)
    # optimal: what is shared in the mean, what is not at each site
    np.testing.assert_allclose(gradients[:, [0, 2]].mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(gradients[:, 1], 0.0, atol=1e-5)


def clusters_of_sites() -> dict[str, pd.DataFrame]:
    """30 sites of 40 rows, which in turn are of 3 clusters, each with its own law."""
    rng = np.random.default_rng(0)
    laws = rng.normal(size=(3, 10))
    found = {}
    for site in range(30):
        rows = pd.DataFrame(rng.normal(size=(40, 10))).add_prefix("x")
        label = rows.to_numpy() @ laws[site % 3] + rng.normal(size=40)
        found[f"s{site:02}"] = rows.assign(y=label)
    return found


OF_TEN = f"SELECT y AS label, {', '.join(f'x{k}' for k in range(10))} FROM t"


def some_sites(members: slice) -> dict[str, pd.DataFrame]:
    """Some of the sites in clusters."""
    return dict([*clusters_of_sites().items()][members])


def along(tables: dict[str, pd.DataFrame]) -> str:
    """The edges of a chain of sites."""
    return ", ".join(f"{a}-{b}" for a, b in pairwise(tables))


def test_clusters_of_sites_are_found_and_predict_better_than_one_or_each_alone():
    from sklearn.metrics import adjusted_rand_score

    facts = facts_of(
        train(
            clusters_of_sites(),
            OF_TEN,
            graph="models",
            graph_penalty=0.01,
            num_epochs=15,
        )
    )
    clusters = [own["cluster"] for own in facts["sites"]]
    assert adjusted_rand_score(np.arange(30) % 3, clusters) >= 0.95
    loss = {name: own["test"]["loss"] for name, own in facts["means"].items()}
    assert loss["personal"] <= 0.9 * min(loss["global"], loss["local"])


def test_labels_and_rows_stay():
    tables = frames()
    grid = grid_of(tables)
    train(grid=grid, graph="data", num_epochs=3)
    replies = [seen for seen in grid.seen if seen.is_reply]
    extracted = [own for own in replies if "engine" in str(own.header)]
    assert len(extracted) == 3
    assert not any(own.arrays for own in extracted)
    # nothing has a number per row
    counts = {len(own) for own in tables.values()}
    sizes = {array.shape[0] for own in replies for array in own.arrays.values()}
    assert sizes
    assert not sizes & counts
    parts = [part for own in replies for part in own.header.get("parts", [])]
    sums = [part["label-sums"] for part in parts if "label-sums" in part]
    assert [len(own) for own in sums] == [3, 3, 3]


@pytest.mark.parametrize("graph", ["data", "features"])
def test_noise_on_the_summaries_is_paid_for_and_so_said(graph, tmp_path):
    grid = grid_of(frames(), state=tmp_path)
    strategy = train(grid=grid, graph=graph, graph_epsilon=1.0, num_epochs=1)
    for lines in strategy.ledgers.values():
        (own,) = [o for o in lines if o["release"]["what"] == "summaries"]
        assert own["release"]["mechanism"]["kind"] == "gaussian"
        assert own["used"]
        clear = {o["release"]["what"] for o in lines if "mechanism" not in str(o)}
        assert "summaries" not in clear
    # and every message says what it tells
    messages = strategy.report.privacy["messages"]
    covered = [own["message"] for own in messages if "epsilon" in str(own)]
    assert covered == [str(TRAIN_SUMMARISE)]
    sent = {
        *(Action.DESCRIBE, Action.SEAL, Action.EXTRACT, Action.STATISTICS),
        *(Action.FIT, TRAIN_PERSONALISE, TRAIN_SUMMARISE, TRAIN_PERSONAL),
        Action.FINISH,
    }
    assert {own["message"] for own in messages} == set(map(str, sent))
    carried = [own["carries"] for own in messages]
    assert not any("label of every row" in text for text in carried)
    assert any("covariance" in text for text in carried) == (graph == "features")


def test_a_policy_that_keeps_models_refuses(tmp_path):
    policies = {"t": "releases.models = 'never'"}
    site = federated.write_site(tmp_path / "s0", {"t": frames()["s0"]}, policies)
    grid = WatchedGrid([site])
    with pytest.raises(SiteError, match=r"releases\.models = never"):
        train(grid=grid, baselines=False)


@pytest.mark.parametrize(
    ("label", "loss", "classes"),
    [
        ("y > 1", "logistic", 2),
        ("CASE WHEN y > 2 THEN 'hi' WHEN y > 0 THEN 'mid' ELSE 'lo' END", "softmax", 3),
    ],
    ids=["logistic", "softmax"],
)
def test_classes_of_all_sites_are_put_together(label, loss, classes):
    strategy = train(sql=f"SELECT {label} AS label, a, b FROM t", num_epochs=30)
    problem = strategy.training_problem
    assert (problem.response.loss, len(problem.classes)) == (loss, classes)
    assert strategy.report.final_test["accuracy"] > 0.6
    assert np.isfinite(strategy.report.final_test["log_loss"])


def test_an_mlps_last_layer_is_each_sites_own():
    strategy = train(
        personal="last",
        baselines=False,
        model="mlp",
        hidden_sizes=(4,),
        num_epochs=15,
        device="cpu",
    )
    found = models_of(strategy)
    assert (found[:, :-5] == found[0, :-5]).all()
    assert not (found[1:, -5:] == found[0, -5:]).any()
    assert strategy.losses[-1] < 0.5 * strategy.losses[0]


def test_local_steps_on_batches_come_near_the_same_place():
    exact = train(graph_penalty=0.05, num_epochs=60)
    rough = train(graph_penalty=0.05, num_epochs=40, batch_size=8, local_epochs=2)
    found = facts_of(rough)["objective"]
    best = facts_of(exact)["objective"]
    assert best <= found + 1e-9
    assert found == pytest.approx(best, rel=0.1)


def test_every_site_predicts_with_its_own_model(tmp_path):
    tables = frames()
    grid = grid_of(tables, state=tmp_path)
    strategy = train(grid=grid, graph_penalty=0.01, **WHOLE)
    manifest = make_manifest(strategy)
    name = str(manifest.model)
    predict = predicting(manifest, "SELECT a, b FROM t", model_name=name)
    predict.start(grid)
    scores = predict.predictions["score"].to_numpy()
    obvious = Obvious(tables, 0.01)
    models = zip(obvious.designs, models_of(strategy), strict=True)
    expected = [design @ model + obvious.base for design, model in models]
    np.testing.assert_allclose(scores, np.concatenate(expected), atol=1e-5)


def test_the_page_has_the_graph_and_every_site():
    strategy = train(frames(4), graph="s0-s1, s2-s3", graph_penalty=100.0)
    page = render(report_dict(strategy.report))
    graph = page[page.index("The similarity graph") :].partition("</table>")[0]
    assert re.findall(r"<t[hd][^>]*>(s\d)</t[hd]>", graph) == ["s0", "s1", "s2", "s3"]
    assert "4 sites, 2 edges, 2 clusters of equal models, 2 connected groups" in page
    apart = render(report_dict(train(frames(4), graph_penalty=0.0).report))
    assert "4 clusters of equal models" in apart
    for own in facts_of(strategy)["sites"]:
        shown = format_value(own["personal"]["test"]["rmse"])
        assert re.search(rf"{own['site']}</t[hd]>.*?{shown}", page, re.DOTALL)


def test_the_console_compares_with_one_model_and_with_each_alone():
    strategy = train()
    text = console_text(result_view(report_dict(strategy.report)))
    means = facts_of(strategy)["means"].values()
    values = [format_value(own["test"]["rmse"]) for own in means]
    row = r"mean of the sites +\d+ +" + " +".join(map(re.escape, values))
    assert re.search(row, text)
    assert "one model for all" in " ".join(text.split())
    # a page of odd facts is a page
    facts = {"sites": [{}, {"site": 3}], "graph": {"edges": [[0, 9], "x", [0, 1]]}}
    assert "2 sites, 1 edges" in render({"personal": facts})


@pytest.mark.parametrize(("rows", "how", "advice"), CASES["advice"])
def test_models_that_lose_to_others_say_how_to_change_the_penalty(rows, how, advice):
    report = train(frames(rows=rows), **how).report
    assert len(report.warnings) == bool(advice)
    assert advice in "".join(report.warnings)


@pytest.mark.parametrize(
    ("members", "penalty", "advice"),
    [(slice(6), 10.0, "lower it, say to "), (slice(0, 30, 3), 1e-5, "raise it, ")],
    ids=["sites of three clusters", "sites of one"],
)
def test_the_advice_about_the_penalty_leads_to_one_without_advice(
    members, penalty, advice
):
    tables = some_sites(members)
    for _ in range(6):
        warnings = train(
            tables, OF_TEN, graph=along(tables), graph_penalty=penalty, num_epochs=30
        ).report.warnings
        if not warnings:
            break
        assert advice in warnings[0]
        said = re.search(r"lower it, say to (\S+),", warnings[0])
        penalty = float(said[1]) if said else 10 * penalty
    assert warnings == []
    assert penalty not in (10.0, 1e-5)


def test_classes_that_one_site_leaves_out_are_refused():
    @federated.on_replies(Action.EXTRACT)
    def change(seen):
        if seen.node == 2:
            seen.header["parts"][0]["label"]["classes"] = None

    grid = grid_of(frames(), change=change)
    match = r"'s0'.* sent no classes of its label, which others"
    with pytest.raises(ReplyError, match=match):
        train(sql=SQL.replace("y AS", "y > 1 AS"), grid=grid)


def test_a_training_that_diverges_is_told_the_learning_rate():
    match = (
        r"diverged\. Lower learning-rate \(here 1000\.0\), or look for extreme values"
    )
    with pytest.raises(DivergedError, match=match):
        train(learning_rate=1e3, num_epochs=9)
    assert train(learning_rate=0.1, num_epochs=9).report.final_train


def test_edges_that_are_named_keep_a_penalty():
    tables = some_sites(slice(6))

    def warnings_of(graph):
        return train(
            tables, OF_TEN, graph=graph, graph_penalty=10.0, num_epochs=60
        ).report.warnings

    (warning,) = warnings_of(along(tables))
    assert warning.endswith(", or name the edges in graph")
    assert warnings_of("s00-s03, s01-s04, s02-s05") == []


@pytest.mark.parametrize(("sql", "message"), CASES["queries"])
def test_queries_that_are_not_of_one_table_are_refused(sql, message):
    with pytest.raises(QueryError, match=message):
        train(sql=sql)


def test_labels_and_features_that_there_are_not_are_refused():
    tables = frames()
    tables["s1"].loc[3, "y"] = np.nan
    with pytest.raises(SiteError, match=r"'s1'.*the label is NULL in 1 rows"):
        train(tables)
    with pytest.raises(SettingsError, match=r"no feature 'c'; it has a, b, \(inter"):
        train(personal="a, c")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        *CASES["settings"],
        ({"privacy": PrivacySettings(features="dp-sgd", epsilon=1.0)}, "not use it"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(own, message):
    with pytest.raises(SettingsError, match=message):
        Settings(strategy="personalised", **own)
    with pytest.raises(SettingsError, match=r"graph-penalty: is for strategy 'pers"):
        Settings(graph_penalty=0.5)
