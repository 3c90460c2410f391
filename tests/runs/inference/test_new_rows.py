"""New rows that only some sites of the label table have are predicted and measured."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import printed_by, settings_of
from tests.support.federated import FEATURES, SOURCE, pieces, store
from tests.support.files import read_json, toml_lines
from tests.support.policies import OPEN
from tests.support.predicted import check_equal, scored, train_store
from tp_flower.errors import ModelError
from tp_flower.files import HOME_VARIABLE

UNLABELLED = f"SELECT {FEATURES} {SOURCE}"
FRAMES = store()
NEW = store(orders=25, seed=9)["orders"]
GONE = "'south' of table 'o' took part in the training and not in this run"
JOINED = "FROM orders o JOIN customers c ON o.customer = c.id"
MEANS = re.compile(r"mean scores?|a mean stands")


def sites(**orders):
    """Sites of the label table, and one of each other table."""
    others = {name: {name: [FRAMES[name]]} for name in ("customers", "items")}
    return {**{site: {"orders": [frame]} for site, frame in orders.items()}, **others}


def in_two(frame):
    north, south = pieces(frame, len(frame) // 2)
    return sites(north=north, south=south)


@pytest.fixture(scope="module", params=["squared", "softmax"])
def model(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("new")
    return train_store(folder, request.param, in_two(FRAMES["orders"]))


@pytest.mark.cases(
    "squared-north alone", "softmax-south alone", "squared-nothing at south"
)
@pytest.mark.parametrize(
    "there",
    [{"north": NEW}, {"south": NEW}, {"north": NEW, "south": NEW.head(0)}],
    ids=["north alone", "south alone", "nothing at south"],
)
def test_rows_that_one_site_has_are_predicted_as_if_there_were_no_other(model, there):
    expected = model.reference({**FRAMES, "orders": NEW}, SOURCE)
    strategy = model.predict(sites(**there), UNLABELLED)
    check_equal(scored(strategy.predictions), expected)
    assert not any(strategy.predictions["is_partial"].to_pylist())
    assert len(strategy.warnings) == (len(there) == 1)
    metrics = model.evaluate(sites(**there))
    assert metrics == pytest.approx(model.evaluate(in_two(NEW)))


def test_the_run_says_which_sites_are_not_there(model):
    strategy = model.predict(sites(north=NEW), UNLABELLED)
    assert strategy.warnings == [f"{GONE}, which is about the rows of the other sites"]
    assert strategy.report()["missing"] == [{"table": "o", "sites": ["south"]}]


def test_a_site_of_another_table_is_still_asked_for_by_itself(model):
    """The label table's missing site is no reason to stop, and not named as one."""
    first, _ = pieces(FRAMES["customers"], 4)
    split = {**in_two(FRAMES["orders"]), "customers": {"customers": [first]}}
    without_items = {
        name: own for name, own in split.items() if name not in ("south", "customers")
    }
    with pytest.raises(
        ModelError, match=r"unavailable: 'customers' of table 'c'; start them"
    ):
        model.table(
            {**without_items, "elsewhere": {"customers": [FRAMES["customers"]]}},
            UNLABELLED,
        )


@pytest.fixture(scope="module")
def store_of_files(tmp_path_factory):
    """A trained store of CSV files, whose orders are at two sites."""
    folder = tmp_path_factory.mktemp("store")
    shops = np.resize(["web", "town"], 60)
    orders = FRAMES["orders"].assign(oid=np.arange(60), shop=shops)
    write_orders(folder, "train", pieces(orders, 30))
    write_orders(folder, "new", [orders.tail(9), orders.head(0)])
    write_orders(folder, "part", [orders, orders.head(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(folder / "home"))
        patch.chdir(folder)
        printed_by("train", "train.toml")
    return folder


@pytest.fixture
def folder(store_of_files, home, monkeypatch):
    """A copy of the trained store."""
    folder = home.parent
    shutil.copytree(store_of_files, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    return folder


def write_orders(folder: Path, name: str, shards: list[pd.DataFrame]) -> None:
    FRAMES["customers"].to_csv(folder / "customers.csv", index=False)
    tables = f"[tables.customers]\npath = 'customers.csv'\nsite = 'crm'\n{OPEN}"
    tables += f"[tables.orders]\n{OPEN}"
    for site, frame in zip(("north", "south"), shards, strict=True):
        frame.to_csv(folder / f"{name}-{site}.csv", index=False)
        tables += (
            f"[[tables.orders.shards]]\npath = '{name}-{site}.csv'\nsite = '{site}'\n"
        )
    (folder / f"{name}-tables.toml").write_text(tables)
    sql = f"SELECT o.qty AS label, o.day, o.shop, c.age {JOINED}"
    settings = {"tables": f"{name}-tables.toml", "sql": sql, "model-name": "m"}
    (folder / f"{name}.toml").write_text(toml_lines(settings))


@pytest.mark.usefixtures("folder")
def test_a_file_with_a_header_alone_stops_nothing():
    for mode in ("predict", "evaluate"):
        printed = printed_by(mode, "new.toml", "--set", f"output-dir={mode}")
        assert not MEANS.search(printed)
    orders = FRAMES["orders"].tail(9)
    joined = orders.merge(FRAMES["customers"], left_on="customer", right_on="id")
    assert len(pq.read_table("predict/predictions.parquet")) == len(joined)


WAYS = {
    "cg": ["strategy=cg"],
    "boost": ["strategy=boost"],
    # of some fifty joined rows, the draws meet far more than ten
    "coreset": ["strategy=admm", "coreset-size=40"],
    "sgd": ["strategy=sgd", "num-epochs=2", "batch-size=10"],
    "noisy labels": [
        "strategy=cg",
        "privacy.labels=laplace",
        "privacy.label-epsilon=4",
        "privacy.label-range=-5,15",
    ],
    "personalised": [
        "strategy=personalised",
        "sql=SELECT qty AS label, day, shop FROM orders",
    ],
    # the columns of a file with a header alone have the types that the others have
    "numbers": [f"sql=SELECT o.qty * 2 AS label, o.shop {JOINED}"],
    "days": [f"sql=SELECT o.qty > 3 AS label, o.day + 1 AS next, o.shop {JOINED}"],
    "time": ["test-split=time(o.day)"],
    "group": ["test-split=group(o.shop)"],
}


@pytest.mark.cases(
    "boost", "coreset", "sgd", "noisy labels", "personalised", "days", "time"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("folder")
def test_every_way_of_training_takes_a_shard_without_rows(way):
    options = settings_of("output-dir=out", *WAYS[way])
    assert "Result of" in printed_by("train", "part.toml", *options)
    assert read_json(Path("out/report.json"))["joined-rows"]["train"] > 10
