"""A search is as many trainings as it has fits: the same losses, each in the ledger."""

from collections import Counter

import numpy as np
import pytest

from strategies import STRATEGIES
from strategies.search.run import Search
from strategies.setup.joined_rows import MappedRows
from tests.support.federated import (
    LocalGrid,
    WatchedGrid,
    one_per_site,
    sharded,
    store,
    store_sql,
    whole,
)
from tp_flower.errors import DivergedError
from tp_flower.folds import OUT
from tp_flower.query import Query
from tp_flower.splits import TEST, TRAIN

SQL = store_sql("squared")
CANDIDATES = {
    "cg": [{"l2": 0.01}, {"l2": 1.0, "num-epochs": 3}],
    "admm": [{"rho": 0.5, "num-epochs": 2}, {"l2": 1.0, "num-epochs": 2}],
    "boost": [{"leaves": 3, "num-epochs": 2}, {"tree-rate": 0.3, "num-epochs": 2}],
    "sgd": [{"batch-size": 40, "num-epochs": 1}, {"batch-size": 30, "num-epochs": 1}],
    "gd": [{"num-epochs": 2}, {"l2": 0.1, "num-epochs": 2}],
}
# the first two begin alike
TRIED = [
    {"l2": 0.01, "num-epochs": 2},
    {"l2": 0.01, "num-epochs": 1},
    {"l2": 1.0, "num-epochs": 2},
]
FITS = 2 * len(TRIED)
ONE = [{"num-epochs": 1}]


def search(sites, **settings):
    """Run a search on sites; return it with the grid that has seen its messages."""
    values = {"folds": 2, "candidates": TRIED, "device": "cpu", "seed": 1, **settings}
    strategy = Search(Query.from_sql(SQL), **values)
    with WatchedGrid(sites) as grid:
        strategy.start(grid)
    return strategy, grid


@pytest.fixture(scope="module")
def found():
    return search(one_per_site(whole(store())))


@pytest.fixture
def divisions(monkeypatch):
    """The divisions of the joined rows that searches make, by fold."""
    made = {}
    original = MappedRows.in_fold

    def in_fold(rows, settings, fold):
        made[fold] = original(rows, settings, fold)
        return made[fold]

    monkeypatch.setattr(MappedRows, "in_fold", in_fold)
    return made


def trained(sites, method="cg", **settings):
    """A run of its own."""
    strategy = STRATEGIES[method](Query.from_sql(SQL), device="cpu", seed=1, **settings)
    with LocalGrid(sites) as grid:
        strategy.start(grid)
    return strategy


@pytest.mark.cases("cg-sharded", "boost-whole")
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        *(("cg", whole), ("cg", sharded), ("boost", whole), ("boost", sharded)),
        *(("admm", sharded), ("sgd", whole), ("gd", whole)),
    ],
)
def test_each_fit_has_the_loss_of_a_run_of_its_own(
    method, layout, divisions, monkeypatch
):
    sites = one_per_site(layout(store()))
    tried = CANDIDATES[method]
    strategy, _ = search(sites, strategy=method, candidates=tried, test_fraction=0.0)
    assert len(strategy.results) == 4
    divide = STRATEGIES[method].method_type.divide
    # the first of a fold, and one that finds its set-up there
    for fit in strategy.results[1:3]:
        settings = {
            key.replace("-", "_"): value for key, value in tried[fit.candidate].items()
        }
        with monkeypatch.context() as patch:
            held_out = divisions[fit.fold][1]
            patch.setattr(
                MappedRows, "in_fold", lambda rows, *_, as_in=held_out: (rows, as_in)
            )
            patch.setattr(
                STRATEGIES[method].method_type,
                "divide",
                lambda own, rows: divide(own, rows, 0),
            )
            alone = trained(sites, method, test_fraction=0.0, **settings)
        assert fit.epochs == len(alone.losses)
        assert fit.loss == pytest.approx(alone.final.test["loss"], rel=1e-9)


@pytest.mark.parametrize("split", ["random", "random(c)", "group(o.customer)"])
def test_every_row_that_is_not_for_testing_is_held_out_once(split, divisions):
    sites = one_per_site(whole(store()))
    strategy, _ = search(sites, candidates=ONE, test_split=split)
    problem = strategy.trainer.training_problem
    held_out = 0
    for rows, division in divisions.values():
        assert rows.mapping.joined_rows == len(division.subset)
        assert set(division.subset) == {TRAIN, TEST}
        held_out += np.count_nonzero(division.subset == TEST)
    assert held_out == problem.train.joined_rows == len(division.subset)
    assert problem.test.joined_rows > 0


def test_folds_of_a_time_train_on_what_came_before(divisions):
    sites = one_per_site(whole(store()))
    days = store()["orders"]["day"].to_numpy()
    search(sites, candidates=ONE, folds=3, test_split="time(o.day)")
    firsts = []
    for fold in range(3):
        rows, division = divisions[fold]
        times = rows.mapping.tables["o"].expand(days)
        firsts.append(times[division.subset == TEST].min())
        assert times[division.subset == TRAIN].max() < firsts[-1]
        assert OUT not in division.subset
    assert firsts == sorted(set(firsts))


def test_the_best_candidate_trains_the_model_on_all_rows(found):
    """The model is that of a run with its settings alone."""
    strategy, _ = found
    means = [
        np.mean([fit.loss for fit in strategy.results[number :: len(TRIED)]])
        for number in range(len(TRIED))
    ]
    section = strategy.report.sections["search"]
    assert [each["loss"] for each in section["candidates"]] == pytest.approx(means)
    assert section["best"] == int(np.argmin(means))
    best = TRIED[section["best"]]
    alone = trained(
        one_per_site(whole(store())), l2=best["l2"], num_epochs=best["num-epochs"]
    )
    assert strategy.report.final_test == pytest.approx(alone.report.final_test)
    assert strategy.report.final_train == pytest.approx(alone.report.final_train)


def test_one_extraction_and_one_encoding_of_each_fold(found):
    strategy, _ = found
    rounds = Counter(report.phase for report in strategy.history)
    assert rounds["extract"] == 1
    assert rounds["statistics"] == 2 + 1
    assert rounds["prepare"] == rounds["next"] == FITS + 1
    section = strategy.report.sections["search"]
    of_fits = sum(fit["rounds"] for fit in section["fits"])
    of_model = sum(report.rounds for report in strategy.report.history)
    assert of_fits + of_model == sum(rounds.values())


def test_the_ledgers_count_what_leaves_in_each_fit(found):
    strategy, _ = found
    uses = {
        line["release"]["what"]: line.get("used", 1)
        for lines in strategy.ledgers.values()
        for line in lines
    }
    assert uses == {
        **dict.fromkeys(("keys", "counts", "labels", "features"), 1),
        **dict.fromkeys(("scores", "curvature", "products"), FITS + 1),
    }


def test_no_two_fits_mask_alike(found):
    """Equal scores, of two candidates that begin alike, leave as other words."""
    words = [{}]
    for seen in found[1].seen:
        if seen.action == "train.next" and not seen.is_reply and words[-1]:
            words.append({})
        if seen.action == "train.descent" and seen.is_reply:
            for (part, name), array in seen.arrays.items():
                if name == "scores":
                    words[-1].setdefault(part, array)
    first, second = words[:2]
    assert first.keys() == second.keys() == {0, 1, 2}
    for part, array in first.items():
        assert array.dtype == np.uint32
        assert not np.any(array == second[part])


def test_a_candidate_that_diverges_is_not_the_best():
    tried = [{"learning-rate": 1e6}, {"learning-rate": 0.0}]
    sites = one_per_site(whole(store()))
    settings = {"strategy": "sgd", "num_epochs": 2, "batch_size": 10}
    strategy, _ = search(sites, candidates=tried, **settings)
    section = strategy.report.sections["search"]
    diverged, fine = section["candidates"]
    assert diverged["loss"] is None
    assert fine["loss"] > 0.0
    assert section["best"] == 1
    with pytest.raises(DivergedError, match="no candidate has a finite mean loss"):
        search(sites, candidates=tried[:1], **settings)
