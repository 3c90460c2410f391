"""Training from second moments ends where scikit-learn does on the join by DuckDB."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from strategies import Explain
from strategies.methods.moments.strategy import Moments, TablePuppetMoments
from strategies.run.exchange import ask
from tests.support.examples.orders import (
    FEATURES,
    L2,
    coefficients,
    fit,
    joined,
    rows_of,
    sites,
    sql,
    tables,
)
from tests.support.federated import (
    LocalGrid,
    WatchedGrid,
    pieces,
    site_per_table,
    train,
    write_site,
)
from tests.support.ledgers import ledger_lines
from tp_flower import api
from tp_flower.errors import QueryError, SiteError
from tp_flower.methods.moments.messages import MomentsRequest
from tp_flower.methods.moments.penalties import RIDGES
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.splits import TRAIN, VALIDATION, Shares, split_by_order

ALLOWED = 'releases = { moments = "clear" }'


def test_regression_is_ridge_on_the_join():
    model = fit()
    features, label = joined()
    expected = Ridge(alpha=L2 * len(label)).fit(features, label)
    np.testing.assert_allclose(coefficients(model), expected.coef_, rtol=1e-6)
    train = model.report["final"]["train"]
    assert train["r2"] == pytest.approx(expected.score(features, label), abs=1e-7)
    predicted = np.sort(model.predict(sites()).frame["prediction"])
    np.testing.assert_allclose(
        predicted, np.sort(expected.predict(features)), atol=1e-4
    )


def test_columns_need_no_mean_of_0():
    encoders = "; ".join(f"{name}=none" for name in FEATURES[:3])
    query = sql(features=", ".join(FEATURES[:3]))
    model = api.fit(
        query, sites(), strategy="moments", encoders=encoders, l2=L2, test_fraction=0.0
    )
    rows = rows_of(query, tables())
    label = rows.pop("label")
    expected = Ridge(alpha=L2 * len(label)).fit(rows.to_numpy(), label)
    predicted = np.sort(model.predict(sites()).frame["prediction"])
    np.testing.assert_allclose(
        predicted, np.sort(expected.predict(rows.to_numpy())), atol=1e-4
    )


@pytest.mark.parametrize("label", ["o.qty > 2", "o.kind"])
def test_classes_have_the_log_odds_of_the_discriminant_on_the_join(label):
    model = fit(label, l2=0.0)
    reason = "classification, because the label is "
    assert model.report["chosen"]["task"].startswith(reason)
    features, classes = joined(label)
    exact = LinearDiscriminantAnalysis(solver="svd").fit(features, classes)
    predicted = model.predict(sites()).frame
    chances = [column for column in predicted if column.startswith("probability")]
    expected = exact.predict_proba(features)
    # scikit-learn divides the covariance by N - k, the moments by N
    np.testing.assert_allclose(
        np.sort(predicted[chances].to_numpy(), axis=0),
        np.sort(expected[:, -len(chances) :], axis=0),
        atol=0.01,
    )
    # a new evaluation's constant is the classes' shares
    shares = classes.value_counts(normalize=True)
    baseline = model.evaluate(sites()).report["baseline"]["test"]
    assert baseline["log_loss"] == pytest.approx(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize(
    ("label", "how", "problem"),
    [
        ("o.qty > 9999", {}, r"constant at all sites \(one class: 0\)"),
        ("o.qty - o.qty", {"task": "classification"}, r"\(one class: 0\)"),
        ("o.kind", {"task": "regression"}, "text, but the task is regression"),
    ],
)
def test_refused_labels(label, how, problem):
    with pytest.raises(QueryError, match=problem):
        fit(label, **how)


@pytest.mark.cases("random", "random(u)", "group(o.iid)", "time(o.day)")
@pytest.mark.parametrize(
    "split", ["random", "random(u)", "random(m)", "group(o.iid)", "time(o.day)"]
)
def test_held_out_metrics_are_exact(split):
    how = {"test_split": split, "test_fraction": 0.3, "tolerance": 1e-9}
    expected = fit(strategy="cg", **how).report
    del how["tolerance"]
    found = fit(**how).report
    assert found["joined-rows"] == expected["joined-rows"]
    for part in ("train", "test"):
        for name in ("loss", "rmse", "r2"):
            value = expected["final"][part][name]
            assert found["final"][part][name] == pytest.approx(value, rel=1e-5)


def test_a_table_in_two_roles():
    query = """SELECT o.qty AS label, o.day, u.age, other.age AS second FROM orders o
    JOIN users u ON o.uid = u.uid JOIN users other ON o.iid = other.uid"""
    expected, found = (
        api.fit(query, sites(), strategy=strategy, **how).report["final"]["test"]["r2"]
        for strategy, how in (("cg", {"tolerance": 1e-9}), ("moments", {}))
    )
    assert found == pytest.approx(expected, abs=1e-6)


def validation_loss(l2: float, shares: Shares) -> float:
    """The loss of ridge on the rows of the join that validate in a split by day."""
    rows = rows_of(sql(), tables())
    label = rows.pop("label")
    subset = split_by_order(rows["day"].to_numpy(), shares)
    is_trained, validates = subset == TRAIN, subset == VALIDATION
    trained = rows[is_trained]
    scaled = ((rows - trained.mean()) / trained.std(ddof=0)).fillna(0.0).to_numpy()
    ridge = Ridge(alpha=l2 * len(trained)).fit(scaled[is_trained], label[is_trained])
    residuals = ridge.predict(scaled[validates]) - label[validates]
    return 0.5 * float(np.mean(residuals**2))


@pytest.mark.parametrize("l2", [L2, 10.0])
def test_the_penalty_is_that_of_the_lowest_validation_loss(l2):
    how = {"test_split": "time(o.day)", "test_fraction": 0.2}
    report = fit(validation_fraction=0.3, l2=l2, **how).report
    losses = {
        candidate: validation_loss(candidate, Shares(0.2, 0.3))
        for candidate in (l2, *RIDGES)
    }
    assert report["chosen"]["l2"] == min(losses, key=losses.__getitem__)
    (validated,) = filter(None, (each["validation"] for each in report["history"]))
    assert validated["loss"] == pytest.approx(min(losses.values()), rel=1e-5)


def test_rounds_and_bytes_are_as_explained():
    explanation = api.explain(sql(), sites(), strategy="moments").report
    report = api.fit(sql(), sites(), strategy="moments").report
    cost = explanation["cost"]
    history = report["history"]
    assert cost["rounds"]["run"] == len(history) == 6
    for way in ("up", "down"):
        sent = sum(
            sum(each[f"bytes-{way}"].values())
            for each in history
            if each["phase"] in ("moments", "solution")
        )
        assert sent == pytest.approx(cost["bytes"][way], rel=0.02)
    assert report["privacy"]["messages"] == explanation["releases"]
    assert report["privacy"]["readings"] == []


def test_explain_compares_the_bytes_with_conjugate_gradients():
    costs = {
        strategy: api.explain(sql(), sites(), strategy=strategy).report["cost"]
        for strategy in ("moments", "cg")
    }
    own, theirs = (sum(each["bytes"].values()) for each in costs.values())
    beside = costs["moments"]["beside"]
    assert beside["strategy"] == "cg"
    # of models that the server sets, cg would send a little more
    assert beside["epochs"] == pytest.approx(own / theirs, rel=0.1)
    assert "beside" not in costs["cg"]


def test_no_label_and_no_score_leaves():
    frames = [{name: [frame]} for name, frame in tables().items()]
    with WatchedGrid(frames, None) as grid:
        TablePuppetMoments(Query.from_sql(sql())).start(grid)
    sent = {name for seen in grid.seen if seen.is_reply for _, name in seen.arrays}
    assert {"hashes/0", "sums/0-0-0"} <= sent
    assert not {"label-values", "scores", "rows"} & sent


def test_no_message_of_score_limits_is_sent_or_reported(tmp_path):
    frames = tables()
    rules = f"scores-per-rank = 0.5\n{ALLOWED}"
    files = site_per_table(tmp_path, frames, dict.fromkeys(frames, rules))
    with WatchedGrid(files, None) as grid:
        strategy = TablePuppetMoments(Query.from_sql(sql()))
        strategy.start(grid)
    explained = train(files, sql(), Explain, strategy="moments", num_epochs=0)
    told = strategy.report.privacy["messages"]
    assert told == explained.explanation["privacy"]["messages"]
    assert {each["message"] for each in told} <= {seen.action for seen in grid.seen}


def label_scales(grid: WatchedGrid, folder: Path) -> list[str]:
    """What the sites' ledgers say of the label's scale, where replies have it."""
    for node in grid.contexts:
        grid.keep_state(node, folder / str(node))
    TablePuppetMoments(Query.from_sql(sql())).start(grid)
    for seen in grid.seen:
        if seen.is_reply and seen.action == "query.extract":
            notes = ledger_lines(folder / str(seen.node), "note")
            booked = [
                note["release"]["scope"]
                for note in notes
                if note["release"]["what"] == "label-magnitude"
            ]
            labels = [part.get("label", {}) for part in seen.header["parts"]]
            assert len(booked) == sum("magnitude" in label for label in labels)
            yield from booked


@pytest.mark.parametrize("cuts", [(), (150,)])
def test_the_scale_of_the_label_leaves_where_shards_share_it(tmp_path, cuts):
    frames = tables()
    orders = [{"orders": shard} for shard in pieces(frames.pop("orders"), *cuts)]
    sites = {f"site {number}": each for number, each in enumerate([*orders, frames])}
    releases = api.explain(sql(), sites, strategy="moments").report["releases"]
    told = [
        release["message"]
        for release in releases
        if "square of the label" in release["carries"]
    ]
    assert told == ["query.extract"] * bool(cuts)
    with WatchedGrid(list(sites.values()), None) as grid:
        booked = list(label_scales(grid, tmp_path))
    assert len(booked) == (len(orders) if cuts else 0)
    assert all("square of the labels" in text for text in booked)


@pytest.mark.parametrize("rules", ["", ALLOWED])
def test_the_scale_of_the_label_leaves_by_policy(tmp_path, rules):
    frames = tables()
    shards = pieces(frames.pop("orders"), 150)
    files = [
        write_site(tmp_path / f"{number}", {"orders": shard}, {"orders": rules})
        for number, shard in enumerate(shards)
    ]
    others = write_site(tmp_path / "others", frames)
    with WatchedGrid([*files, others], None) as grid:
        if rules:
            assert len(list(label_scales(grid, tmp_path))) == len(shards)
        else:
            with pytest.raises(SiteError, match=r"releases\.moments = never"):
                list(label_scales(grid, tmp_path))
            replies = [seen.header for seen in grid.seen if seen.is_reply]
            assert "magnitude" not in str(replies)


class Dishonest(Moments):
    """A server that changes its request for moments, or asks for them again."""

    def changed(self, request):
        return request

    def set_up(self):
        self.asked = []
        rounds = super().set_up()
        requests = next(rounds)
        while True:
            if isinstance(requests.message, MomentsRequest):
                self.asked.append(requests.message)
                parts = requests.parts.values()
                requests = ask(self.changed(requests.message), parts)
            try:
                requests = rounds.send((yield requests))
            except StopIteration as end:
                return end.value


class Twice(Dishonest):
    def epochs(self, problem):
        (request,) = self.asked
        yield self.run.request(ask(replace(request, outputs=2), problem.parts))


class AsksTwice(TablePuppetMoments):
    method_type = Twice


class AllButOne(Dishonest):
    """All rows that are trained on are tested on, but for one."""

    def changed(self, request):
        label = self._counts.joined.bound.label_table
        (part,) = self._counts.joined.extracted.parts[label]
        body = request.parts[part.number]
        passes = np.where(body.passes == 1, np.uint8(1 | 4), body.passes)
        passes[np.flatnonzero(passes == 5)[0]] = 1
        bodies = {**request.parts, part.number: replace(body, passes=passes)}
        return replace(request, parts=bodies)


class TellsARow(TablePuppetMoments):
    method_type = AllButOne


def test_no_two_passes_differ_in_a_row():
    frames = [{name: [frame]} for name, frame in tables().items()]
    with (
        LocalGrid(frames) as grid,
        pytest.raises(SiteError, match="'passes' has a row in several passes"),
    ):
        TellsARow(Query.from_sql(sql())).start(grid)


class Chooser(Dishonest):
    """Swaps a row that trains with one that is held out, or leaves a row out."""

    how = "swap"

    def changed(self, request):
        part, *_ = self._counts.joined.extracted.parts[self._counts.splitting]
        body = request.parts[part.number]
        if self.how == "all":
            passes = None
        else:
            passes = body.passes.copy()
            trained = np.flatnonzero(passes == 1)[0]
            tested = np.flatnonzero(passes == 4)[-1]
            passes[trained] = 4 if self.how == "swap" else 0
            passes[tested] = 1 if self.how == "swap" else 4
        bodies = {**request.parts, part.number: replace(body, passes=passes)}
        return replace(request, parts=bodies)


@pytest.mark.parametrize(
    ("split", "how"),
    [
        ("random", "swap"),
        ("random(u)", "leave out"),
        ("group(o.iid)", "swap"),
        ("time(o.day)", "swap"),
    ],
)
def test_the_server_does_not_choose_which_rows_train(split, how, monkeypatch):
    monkeypatch.setattr(Chooser, "how", how)
    with pytest.raises(SiteError, match="'passes' has other rows than the run's split"):
        train_by(Chooser, test_split=split, test_fraction=0.3)


def test_rows_out_of_the_sample_take_no_part(monkeypatch):
    train_by(Dishonest, sample=0.5, test_fraction=0.3)
    with pytest.raises(SiteError, match="other rows than the run's split"):
        train_by(Chooser, sample=0.5, test_fraction=0.3)
    monkeypatch.setattr(Chooser, "how", "all")
    with pytest.raises(SiteError, match="'passes' of table 'o' is missing"):
        train_by(Chooser, test_fraction=0.3)


def train_by(method, *, cuts=(), users=(), **how):
    """Train on the tables, a site each but for shards, by a server's method."""
    strategy = type("Strategy", (TablePuppetMoments,), {"method_type": method})
    settings = Settings(strategy="moments", **how)
    frames = tables()
    shards = [
        {name: [shard]}
        for name, places in (("orders", cuts), ("users", users))
        for shard in pieces(frames.pop(name), *places)
    ]
    others = [{name: [frame]} for name, frame in frames.items()]
    with LocalGrid([*shards, *others]) as grid:
        strategy(Query.from_sql(sql()), settings).start(grid)


class Miscounts(Dishonest):
    """Tells a number of rows of a shard of the label's table that is not its own."""

    def changed(self, request):
        first, second, *others = request.label_rows
        return replace(request, label_rows=[first + 1, second - 1, *others])


def test_shards_know_which_of_their_rows_train():
    how = {"cuts": (100, 150), "sample": 0.8, "test_fraction": 0.3}
    train_by(Dishonest, **how)
    with pytest.raises(SiteError, match="other rows than the run's split"):
        train_by(Chooser, **how)
    with pytest.raises(SiteError, match="label_rows"):
        train_by(Miscounts, **how)


class MiscountsJoined(Dishonest):
    """Tells a number of joined rows of a shard that is not its own."""

    def changed(self, request):
        first, second, *others = request.split_rows
        return replace(request, split_rows=[first + 1, second - 1, *others])


def test_shards_of_another_table_know_which_of_their_rows_train(monkeypatch):
    how = {"users": (7, 12), "test_split": "random(u)", "test_fraction": 0.3}
    train_by(Dishonest, validation_fraction=0.2, **how)
    for lie in ("swap", "leave out"):
        monkeypatch.setattr(Chooser, "how", lie)
        with pytest.raises(SiteError, match="other rows than the run's split"):
            train_by(Chooser, **how)
    with pytest.raises(SiteError, match="split_rows"):
        train_by(MiscountsJoined, **how)


def test_moments_leave_once_in_a_run():
    frames = [{name: [frame]} for name, frame in tables().items()]
    with (
        LocalGrid(frames) as grid,
        pytest.raises(SiteError, match="this run's moments have left, and leave once"),
    ):
        AsksTwice(Query.from_sql(sql())).start(grid)


def test_a_cycle_is_refused_by_name():
    query = sql().replace("i.mid = m.mid", "i.mid = m.mid AND u.uid = m.mid")
    query = query.replace("LEFT JOIN", "JOIN")
    with pytest.raises(QueryError, match="joins of o, u, i, m make a cycle"):
        api.fit(query, sites(), strategy="moments")
    # as it says: another strategy, or without the predicate
    assert api.fit(query, sites(), strategy="cg").report["final"]
    assert api.fit(sql(), sites(), strategy="moments").report["final"]


@pytest.mark.parametrize("label", ["o.qty", "o.kind"])
def test_shards_add_up(label):
    frames = tables()
    cuts = {"orders": (100, 110), "users": (12,), "makers": (3,)}
    shards = {
        f"{name} {number}": {name: piece}
        for name, frame in frames.items()
        for number, piece in enumerate(pieces(frame, *cuts.get(name, ())))
    }
    how = {"strategy": "moments", "l2": L2, "test_split": "group(o.iid)"}
    whole = api.fit(sql(label), sites(), **how)
    cut = api.fit(sql(label), shards, **how)
    for part in ("train", "test"):
        for name, value in whole.report["final"][part].items():
            found = cut.report["final"][part][name]
            assert found == pytest.approx(value, abs=1e-6)
    order = ["table", "column", *(["output"] if label == "o.kind" else [])]
    found, expected = (
        model.coefficients.sort_values(order)["coefficient"].to_numpy()
        for model in (cut, whole)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.cases("u.age - 20-joined-o.qty", "-entity(i)-o.kind", "-entity-o.qty")
@pytest.mark.parametrize("label", ["o.qty", "o.kind"])
@pytest.mark.parametrize(
    ("weight", "row_weight"),
    [
        ("1 + o.uid % 7", "joined"),
        ("u.age - 20", "joined"),
        ("o.day > -1", "joined"),
        ("", "entity"),
        ("", "entity(i)"),
        ("", "entity(U)"),
    ],
)
def test_joined_rows_weigh_as_by_other_strategies(label, weight, row_weight):
    features = ", ".join(FEATURES)
    if weight:
        features = f"CAST({weight} AS DOUBLE) AS weight, {features}"
    query = sql(label, features)
    how = {"row_weight": row_weight, "test_fraction": 0.25, "l2": L2}
    found = api.fit(query, sites(), strategy="moments", **how).report
    if label == "o.kind":
        assert 0.0 < found["final"]["test"]["r2"] < 1.0
        return
    expected = api.fit(query, sites(), strategy="cg", tolerance=1e-9, **how).report
    for part in ("train", "test"):
        for name in ("loss", "rmse", "r2"):
            value = expected["final"][part][name]
            assert found["final"][part][name] == pytest.approx(value, rel=1e-4)
    for table, entries in expected["coefficients"].items():
        for entry, other in zip(entries, found["coefficients"][table], strict=True):
            assert other["value"] == pytest.approx(entry["value"], abs=1e-4)
    shares = expected["contributions"].items()
    for table, contribution in shares:
        other = found["contributions"][table]["share"]
        assert other == pytest.approx(contribution["share"], abs=1e-3)


def test_shards_of_weighted_rows_add_up():
    frames = tables()
    shards = {
        f"{name} {number}": {name: piece}
        for name, frame in frames.items()
        for number, piece in enumerate(pieces(frame, len(frame) // 3))
    }
    for row_weight, weight in (("entity(i)", ""), ("joined", "u.age AS weight, ")):
        query = sql(features=weight + ", ".join(FEATURES))
        how = {"strategy": "moments", "row_weight": row_weight}
        whole = api.fit(query, sites(), **how).report["final"]
        cut = api.fit(query, shards, **how).report["final"]
        for part in ("train", "test"):
            assert cut[part] == pytest.approx(whole[part], abs=1e-4)


def test_two_weights_are_refused():
    query = sql(features=f"u.age AS weight, {', '.join(FEATURES)}")
    with pytest.raises(QueryError, match="takes one weight: leave 'AS weight' out, or"):
        api.fit(query, sites(), strategy="moments", row_weight="entity")
    assert api.fit(query, sites(), strategy="moments").report["final"]
    assert api.fit(query, sites(), strategy="cg", row_weight="entity").report["final"]


def check_start(
    files: list[Path],
    query: Query,
    refusal: str | bool,
    test_fraction: float = 0.0,
) -> None:
    """See sites refuse a run by a message, or train."""
    with LocalGrid(files) as grid:
        strategy = TablePuppetMoments(query, test_fraction=test_fraction)
        if refusal:
            with pytest.raises(SiteError, match=refusal):
                strategy.start(grid)
        else:
            strategy.start(grid)
            assert strategy.final.train


def test_a_weight_that_leaves_one_row_is_refused(tmp_path):
    """Most of the sums would be those of one user's row."""
    files = [
        write_site(
            tmp_path / name,
            {name: frame},
            {name: f"min-rows = {5 if name == 'users' else 1}\n{ALLOWED}"},
        )
        for name, frame in tables().items()
    ]
    for heaviest, is_refused in ((1000, True), (2, False)):
        weight = f"CASE WHEN o.uid = 3 THEN {heaviest} ELSE 1 END AS weight"
        query = Query.from_sql(sql(features=f"{weight}, {', '.join(FEATURES)}"))
        check_start(files, query, is_refused and "'u', one of which weighs most")


def test_a_column_without_a_scale_is_refused_in_shards():
    frames = tables()
    frames["orders"]["day"] *= 1e4
    north, south = pieces(frames.pop("orders"), 150)
    shards = {"north": {"orders": north}, "south": {"orders": south}, "others": frames}
    how = {"strategy": "moments", "test_fraction": 0.0}
    with pytest.raises(SiteError, match="table o: the moments of day are out of range"):
        api.fit(sql(), shards, encoders="o.day=none", **how)
    for encoder in ("none", "standard"):
        query = sql("o.qty / 1000").replace("o.day", "o.day / 10000 AS day")
        report = api.fit(query, shards, encoders=f"o.day={encoder}", **how).report
        assert report["final"]["train"]["r2"] > 0.3


def test_it_goes_on_where_it_was_stopped(tmp_path):
    def stop(report):
        if report.phase == "moments":
            raise KeyboardInterrupt

    frames = [{name: [frame]} for name, frame in tables().items()]
    query = Query.from_sql(sql())
    how = {"l2": L2, "output_dir": str(tmp_path)}
    with LocalGrid(frames) as grid:
        stopped = TablePuppetMoments(query, on_round=stop, **how)
        with pytest.raises(KeyboardInterrupt):
            stopped.start(grid)
        resumed = TablePuppetMoments(query, **how, resume=str(tmp_path))
        resumed.start(grid)
    with LocalGrid(frames) as grid:
        whole = TablePuppetMoments(query, l2=L2)
        whole.start(grid)
    assert resumed.losses == whole.losses


def test_min_count_holds_for_the_label_and_in_held_out_rows(tmp_path):
    frames = tables()
    rows = len(frames["orders"])
    frames["orders"]["few"] = 1 * (np.arange(rows) < 4)
    frames["orders"]["some"] = 1 * (np.arange(rows) < 12)
    rules = dict.fromkeys(frames, ALLOWED)
    rules["orders"] = f"min-count = 8\n{ALLOWED}"
    files = [
        write_site(tmp_path / name, {name: frame}, rules)
        for name, frame in frames.items()
    ]
    label = "moments of the label, or of a class of it, which is the same in all but"
    held_out = "moments of column 'some', which is the same in all but fewer rows"
    for label_sql, feature, test_fraction, refusal in (
        ("o.few", "o.day", 0.0, label),
        ("o.qty", "o.some", 0.2, held_out),
        # as the advice says: encoded otherwise, or nothing held out
        ("o.qty", "o.some", 0.0, None),
    ):
        query = sql(label_sql, features=f"{feature}, u.age, i.price")
        check_start(files, Query.from_sql(query), refusal, test_fraction)


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ("", r"releases.moments = never\) refuses: the run asks for moments"),
        (f"min-rows = 4\n{ALLOWED}", r"min-rows\) refuses: the moments of table 'o'"),
        (f"min-count = 25\n{ALLOWED}", "of column 'rare', which is the same in all"),
        (f"min-count = 5\n{ALLOWED}", "of column 'rare', which is the same in all"),
        (f"min-rows = 2\n{ALLOWED}", "moments of 2 columns of no more rows"),
    ],
)
def test_a_policy_refuses(tmp_path, rules, match):
    frames = tables()
    frames["users"]["rare"] = 1 * (np.arange(30) < 3)
    if "min-rows = 2" in rules:
        frames["users"] = frames["users"][2:4]
    files = [
        write_site(tmp_path / name, {name: frame}, {name: rules})
        for name, frame in frames.items()
    ]
    query = Query.from_sql(sql(features="o.day, u.age, u.rare, i.price"))
    # three orders to test on
    fraction = 0.01 if "min-rows = 4" in rules else 0.0
    # of a standardised column no value is 0
    encoder = "standard" if "min-count = 5" in rules else "none"
    how = {"encoders": f"u.rare={encoder}", "test_fraction": fraction}
    with (
        LocalGrid(files) as grid,
        pytest.raises(SiteError, match=match),
    ):
        TablePuppetMoments(query, **how).start(grid)


@pytest.mark.parametrize(
    ("users", "test_fraction", "is_refused"),
    [(7, 0.2, True), (8, 0.2, False), (7, 0.0, False)],
)
def test_rows_that_train_and_rows_that_test_may_tell_few(
    tmp_path, users, test_fraction, is_refused
):
    """Of day, age, price, the label and ones: 2 (5 + 2) / 2 rows and fewer."""
    frames = tables()
    frames["users"] = frames["users"].head(users)
    rules = dict.fromkeys(frames, ALLOWED) | {"users": f"min-rows = 2\n{ALLOWED}"}
    files = [
        write_site(tmp_path / name, {name: frame}, rules)
        for name, frame in frames.items()
    ]
    query = Query.from_sql(sql(features="o.day, u.age, i.price"))
    refusal = is_refused and "5 columns in 2 weightings .*, or test-fraction = 0"
    check_start(files, query, refusal, test_fraction)


def test_a_table_of_more_columns_than_rows_trains_with_fewer(tmp_path):
    frames = tables()
    frames["users"] = frames["users"].assign(rare=1.0 * np.arange(30))[2:4]
    files = [
        write_site(tmp_path / name, {name: frame}, {name: f"min-rows = 2\n{ALLOWED}"})
        for name, frame in frames.items()
    ]
    for features, is_refused in (("u.age, u.rare", True), ("u.age", False)):
        query = Query.from_sql(sql(features=f"o.day, {features}, i.price"))
        check_start(files, query, is_refused and "2 columns of no more rows")
