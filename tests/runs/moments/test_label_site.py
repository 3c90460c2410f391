"""Runs in which the label's site reads the second moments in the server's place."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from strategies.methods.moments import label_site
from strategies.methods.moments.strategy import Moments, TablePuppetMoments
from strategies.run.exchange import ask
from tests.support.examples.orders import L2, fit, sites, sql, tables
from tests.support.federated import LocalGrid, WatchedGrid, pieces, write_site
from tests.support.ledgers import ledger_lines
from tp_flower import api
from tp_flower.errors import QueryError, SettingsError, SiteError
from tp_flower.methods.moments.messages import SolutionRequest, SolveRequest
from tp_flower.query import Query

BY_SITE = {"moments_to": "label-site"}


def parameters(model: api.FittedModel) -> np.ndarray:
    """The coefficients, and the intercepts with the base of the scores."""
    frame = model.coefficients
    found = frame["coefficient"].to_numpy().copy()
    is_intercept = (frame["column"] == "(intercept)").to_numpy()
    found[is_intercept] += np.array(model.manifest["base-score"])
    return found


@pytest.mark.cases("o.qty-how1", "o.kind-how3")
@pytest.mark.parametrize(
    ("label", "how"),
    [
        ("o.qty", {}),
        ("o.qty", {"validation_fraction": 0.3, "test_split": "random(u)"}),
        ("o.qty", {"l1": 0.1, "validation_fraction": 0.3}),
        ("o.kind", {"test_fraction": 0.2}),
        ("o.qty > 2", {"row_weight": "entity(i)"}),
    ],
)
def test_the_model_is_that_of_moments_to_the_server(label, how):
    expected = fit(label, **how)
    found = fit(label, **BY_SITE, **how)
    np.testing.assert_allclose(parameters(found), parameters(expected), rtol=1e-9)
    reports = (found.report, expected.report)
    assert len(reports[0]["history"]) == len(reports[1]["history"]) + 1
    for name in ("l1", "l2"):
        assert reports[0]["chosen"].get(name) == reports[1]["chosen"].get(name)
    for part in ("train", "test"):
        ours, theirs = (each["final"][part] for each in reports)
        assert ours == pytest.approx(theirs, rel=1e-5)
        ours, theirs = (each["baseline"][part] for each in reports)
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)
    frames = [model.predict(sites()).frame for model in (found, expected)]
    chances = [name for name in frames[0] if name.startswith("probability")]
    of_run = chances or ["prediction"]
    np.testing.assert_allclose(frames[0][of_run], frames[1][of_run], atol=1e-4)
    # its base is the label's site's alone
    assert "baseline" not in found.evaluate(sites()).report


def test_tables_in_shards_add_up_and_the_label_s_is_in_one():
    frames = tables()
    cuts = {"users": (12,), "makers": (3,)}
    shards = {
        f"{name} {number}": {name: piece}
        for name, frame in frames.items()
        for number, piece in enumerate(pieces(frame, *cuts.get(name, ())))
    }
    how = {"strategy": "moments", "l2": L2, "test_fraction": 0.0}
    cut = api.fit(sql(), shards, **BY_SITE, **how)
    whole = api.fit(sql(), sites(), **how)
    np.testing.assert_allclose(parameters(cut), parameters(whole), atol=1e-6)
    north, south = pieces(frames.pop("orders"), 150)
    label_cut = {"north": {"orders": north}, "south": {"orders": south}, "at": frames}
    with pytest.raises(QueryError, match="o, has shards at 2 places, and one site rea"):
        api.fit(sql(), label_cut, **BY_SITE, **how)
    assert api.fit(sql(), label_cut, moments_to="server", **how).report["final"]


def strategy(**how: object) -> TablePuppetMoments:
    settings = {"l2": L2, "test_fraction": 0.3, **BY_SITE, **how}
    return TablePuppetMoments(Query.from_sql(sql()), **settings)


def replies_of(frames: dict) -> list[str]:
    """What the sites tell in the clear from the moments on, but for the metrics."""
    with WatchedGrid([{name: [frame]} for name, frame in frames.items()], None) as grid:
        strategy().start(grid)
    told = []
    begins = [seen.action for seen in grid.seen].index("train.moments")
    for seen in grid.seen[begins:]:
        if seen.is_reply:
            names = [str(name) for name in seen.arrays]
            header = {**seen.header}
            header.pop("seconds")
            # a line has a time, and the place of the rows
            header["ledger"] = [
                (line["release"]["what"], line["release"]["scope"])
                for line in header.pop("ledger", ())
            ]
            if seen.action == "train.solve":
                (part,) = header.pop("parts")
                names += sorted(part)
            told.append(json.dumps([seen.action, sorted(names), header], default=str))
    return sorted(told)


def test_the_server_is_told_the_same_of_other_values():
    frames = tables()
    others = tables()
    rng = np.random.default_rng(2)
    for name, column in (("orders", "qty"), ("orders", "day"), ("items", "price")):
        others[name][column] = 9.0 * rng.permutation(others[name][column])
    told = replies_of(frames)
    assert told == replies_of(others)
    text = " ".join(told)
    assert "sealed-bits" in text
    for name in ("'bits'", "score-sums", "'parameters'"):
        assert name not in text


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ('releases = { moments = "clear" }', r"releases\.regressions = never"),
        ('releases = { regressions = "clear" }', ""),
    ],
)
def test_every_owner_lets_the_label_s_site_read(tmp_path, rules, problem):
    files = [
        write_site(tmp_path / name, {name: frame}, {name: f"min-rows = 1\n{rules}"})
        for name, frame in tables().items()
    ]
    with LocalGrid(files) as grid:
        for node in grid.contexts:
            grid.keep_state(node, tmp_path / str(node))
        if problem:
            with pytest.raises(SiteError, match=problem):
                strategy().start(grid)
            return
        strategy().start(grid)
        noted = [
            (line["release"]["what"], line["release"]["scope"])
            for node in grid.contexts
            for line in ledger_lines(tmp_path / str(node), "note")
        ]
    kinds = [what for what, _ in noted]
    assert kinds.count("site-moments") == 4
    assert kinds.count("moment-metrics") == 1
    assert "second-moments" not in kinds
    assert all("orders" in scope for what, scope in noted if what == "site-moments")


class Changes(WatchedGrid):
    """A server that changes what it sends with an action."""

    def __init__(self, action, change):
        def lie(seen):
            if seen.action == action and not seen.is_reply and not self.has_lied:
                self.has_lied = True
                change(seen)

        self.has_lied = False
        frames = [{name: [frame]} for name, frame in tables().items()]
        super().__init__(frames, lie)


def alter_a_word(seen):
    name = next(key for key in seen.arrays if "products" in str(key))
    seen.arrays[name] = seen.arrays[name] ^ np.uint64(1 << 20)


def swap_bits(seen):
    first, second, *_ = (key for key in seen.arrays if "sealed-bits" in str(key))
    arrays = seen.arrays
    arrays[first], arrays[second] = arrays[second], arrays[first]


def alter_a_model(seen):
    name = next(key for key in seen.arrays if "sealed" in str(key))
    seen.arrays[name] = seen.arrays[name] ^ np.uint8(1)


@pytest.mark.parametrize(
    ("action", "change", "problem"),
    [
        ("train.solve", alter_a_word, "it has altered words, or told a site other"),
        ("train.solve", swap_bits, "the sealed bits of part . cannot be opened"),
        ("train.solution", alter_a_model, "sealed parameters of part 0 cannot be op"),
    ],
)
def test_what_a_dishonest_server_alters_is_refused(action, change, problem):
    with Changes(action, change) as grid, pytest.raises(SiteError, match=problem):
        strategy().start(grid)


class AsksTwice(Moments):
    """A server that asks for the metrics again, of other moments."""

    def _forward(self, *_):
        (reader,) = self._counts.joined.extracted.parts["o"]
        yield self.run.request(ask(self.again, [reader]))


class ForOtherParts(Moments):
    """A server that brings the moments to another table's site."""

    def _forward(self, *_):
        (other,) = self._counts.joined.extracted.parts["u"]
        (body,) = self.again.parts.values()
        request = SolveRequest(parts={other.number: body})
        yield self.run.request(ask(request, [other]))


class SetsModels(Moments):
    """A server that sends a model of its own."""

    def _forward(self, problem, solved):
        parts = {
            number: replace(body, sealed=None, parameters=np.zeros(1))
            for number, body in solved.parts(
                {name: table.parts for name, table in problem.tables.items()}
            ).items()
        }
        yield self.run.request(ask(SolutionRequest(parts=parts), problem.parts))


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (AsksTwice, "this run's moments have been read, and are read once"),
        (ForOtherParts, "this site does not read the moments of this run"),
        (SetsModels, "'sealed': the run was proposed with True"),
    ],
)
def test_requests_of_another_server_are_refused(method, problem, monkeypatch):
    def solve_request(**fields):
        message = SolveRequest(**fields)
        (body,) = message.parts.values()
        name, *_ = body.products
        products = {**body.products, name: body.products[name] + np.uint64(1)}
        (number,) = message.parts
        method.again = SolveRequest(parts={number: replace(body, products=products)})
        return message

    monkeypatch.setattr(label_site, "SolveRequest", solve_request)
    lying = type("Lying", (TablePuppetMoments,), {"method_type": method})
    frames = [{name: [frame]} for name, frame in tables().items()]
    with LocalGrid(frames) as grid, pytest.raises(SiteError, match=problem):
        lying(Query.from_sql(sql()), l2=L2, **BY_SITE).start(grid)


def test_rounds_bytes_and_disclosures_are_as_explained():
    explanation = api.explain(sql(), sites(), strategy="moments", **BY_SITE).report
    report = api.fit(sql(), sites(), strategy="moments", **BY_SITE).report
    cost = explanation["cost"]
    history = report["history"]
    assert cost["rounds"]["run"] == len(history) == 7
    for way in ("up", "down"):
        sent = sum(
            sum(each[f"bytes-{way}"].values())
            for each in history
            if each["phase"] in ("moments", "solve", "solution")
        )
        assert sent == pytest.approx(cost["bytes"][way], rel=0.02)
    assert report["privacy"]["messages"] == explanation["releases"]
    carried = {
        (each["to"], each["carries"]): each["protection"]
        for each in report["privacy"]["messages"]
    }
    of_server = [text for to, text in carried if to == "server"]
    assert not any("second moments" in text for text in of_server)
    assert any(text.startswith("half the mean square and R2") for text in of_server)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"describe": "table-one", "test_fraction": 0.0}, "is in the server's report"),
        (
            {"privacy": {"features": "statistics", "label_range": (0, 9)}},
            "is for moments without noise: set moments-to = 'server', or",
        ),
    ],
)
def test_settings_that_it_does_not_go_with_are_refused(how, problem):
    if "privacy" in how:
        how = {"privacy.features": "statistics", "privacy.label-range": "0, 9"}
    with pytest.raises(SettingsError, match=problem):
        api.fit(sql(), sites(), strategy="moments", **BY_SITE, **how)


def test_what_the_refusals_say_to_write_is_taken():
    described = {"describe": "table-one", "test_fraction": 0.0}
    noisy = {"privacy.features": "statistics", "privacy.label-range": "0, 9"}
    for how in (described, {**noisy, "private_tables": "o", "privacy.epsilon": 50.0}):
        run = {"strategy": "moments", "moments_to": "server", **how}
        assert api.fit(sql(), sites(), **run).report["joined-rows"]
    assert fit(**BY_SITE).report["final"]["train"]


def test_answers_are_for_whoever_reads_the_moments():
    with pytest.raises(SettingsError, match="report has no answer of theirs: set mom"):
        api.moments(sql(), sites(), **BY_SITE)
    assert len(api.moments(sql(), sites(), moments_to="server").correlations)
