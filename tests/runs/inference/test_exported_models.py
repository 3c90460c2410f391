"""Exported models predict what the product predicts, without the product.

Scores leave sites as float32, so that its predictions are rounded once per table; what
a part says is compared to more digits in tests/unit/export.
"""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.command_line import printed_by, refused_by
from tests.support.federated import FEATURES, store, store_sql, write_site
from tp_flower import api
from tp_flower.errors import ModelError
from tp_flower.export.model import export_model, export_parts
from tp_flower.export.runner.command import main
from tp_flower.export.runner.model import Model
from tp_flower.export.runner.rows import ExportError
from tp_flower.files import HOME_VARIABLE

FLOAT32 = 5e-7
OTHERS = (
    *("tp_flower", "strategies", "client_apps", "flwr", "msgspec", "sqlglot"),
    *("pandas", "pyarrow", "scipy", "sklearn", "torch", "lightgbm", "safetensors"),
)
"""Packages that an archive does without."""
ISOLATED = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OTHERS!r}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LEFT = store_sql("squared").replace("JOIN customers", "LEFT JOIN customers")
BY_ITEM = """SELECT o.qty AS label, o.day, c.age, c.region, i.price, i.n FROM orders o
LEFT JOIN customers c ON o.customer = c.id LEFT JOIN (SELECT item, AVG(price) AS price,
COUNT(*) AS n FROM items GROUP BY item) i ON o.item = i.item WHERE o.day > 3"""
VALUES = """SELECT o.qty AS label, o.day, c.age, (SELECT COUNT(*) FROM items i WHERE
i.item = o.item AND i.price > 1) AS n FROM orders o JOIN customers c
ON o.customer = c.id"""
SOLD = """SELECT s.paid AS label, s.qty, s.shop, p.price, p.kind FROM sales s
LEFT JOIN parts p ON s.part = p.id"""
TAUGHT = "FROM orders o JOIN customers c ON o.customer = c.id"
OWN = "FROM orders a LEFT JOIN orders b ON a.customer = b.item"
QUICK = {"num_epochs": 4}
CASES = {
    "left-join": (LEFT, {}),
    "boost": (LEFT, {"strategy": "boost", "regions": "none", **QUICK}),
    "regions": (LEFT, {"strategy": "boost", "regions": "c", "num_epochs": 8}),
    "classes": (store_sql("softmax"), {"num_epochs": 2}),
    "logistic": (store_sql("logistic"), {"num_epochs": 2}),
    "network": (LEFT, {"model": "mlp", "num_epochs": 1}),
    "sub-query": (BY_ITEM, {}),
    "values": (VALUES, {"strategy": "boost", "regions": "none", **QUICK}),
    "effects": (f"SELECT o.qty AS label, c.age {TAUGHT}", {"effects": "o, c"}),
    "factors": (store_sql("squared"), {"factors": "c, i: 4", "seed": 1}),
    "offset": (
        f"SELECT o.day AS label, LN(o.day + 1) AS offset, o.qty, c.age {TAUGHT}",
        {"loss": "poisson"},
    ),
    "survival": (
        f"SELECT o.day AS time, o.online AS event, o.qty, c.region {TAUGHT}",
        {},
    ),
    "clusters": (
        f"SELECT {FEATURES} {TAUGHT} JOIN items i ON o.item = i.item",
        {"strategy": "coreset-kmeans"},
    ),
    "bins": (
        SOLD,
        {"bins": "24", "num_epochs": 3, "effects": "none"},
    ),
    "encoders": (
        f"SELECT o.qty AS label, o.placed, o.pair, o.day, o.item, c.region {TAUGHT}",
        {
            "encoders": "o.day=cyclic(28); o.placed=cyclic(weekday); "
            "o.item=hash(4); c.region=categories(US, UK); o.pair=none indicator"
        },
    ),
    "self-join": (
        f"SELECT a.qty AS label, a.day, b.day AS other {OWN}",
        {},
    ),
}


def tables(seed=0):
    """The store, whose orders have a time and a vector besides."""
    frames = store(240, 20, seed)
    orders = frames["orders"]
    number = np.arange(len(orders))
    orders["placed"] = pd.Timestamp("2020-02-27 22:00") + pd.to_timedelta(
        7 * number, unit="h"
    )
    orders["pair"] = [[float(n % 7), float(n % 3)] if n % 9 else None for n in number]
    return frames


def sales(seed=0):
    """What is paid is a product of two tables' columns; some parts are unknown."""
    rng = np.random.default_rng(seed)
    price = np.random.default_rng(77).normal(size=80).round(3)
    parts = pd.DataFrame({"id": np.arange(80), "price": price})
    parts["kind"] = rng.choice(["a", "b", "c"], 80)
    parts.loc[3, "price"] = np.nan
    part = rng.integers(0, 84, 900)
    qty = rng.normal(size=900).round(3)
    paid = qty * np.append(price, [0.0] * 4)[part] + 0.1 * rng.normal(size=900)
    shop = rng.choice(["north", "south"], 900)
    rows = {"part": part, "qty": qty, "shop": shop, "paid": paid}
    return {"sales": pd.DataFrame(rows), "parts": parts}


STORE = tables()


def on_sites(frames, sharded=()):
    """A site for each table, or for each half of those that are sharded."""
    sites = {}
    for name, frame in frames.items():
        shards = [frame]
        if name in sharded:
            middle = len(frame) // 2
            shards = [frame[:middle], frame[middle:].reset_index(drop=True)]
        for number, shard in enumerate(shards):
            sites[f"{name}-{number}"] = {name: shard}
    return sites


def rows_of(model, sites):
    """The rows of each part of a model."""
    return {
        name: sites[part["site"]][part["name"]] for name, part in model.parts.items()
    }


def check_equal(found, predictions):
    """Compare a runner's predictions with the product's, column by column."""
    frame = predictions.frame.drop(columns="is_partial")
    found = pd.DataFrame(found).rename(columns={"row": "row_key"})
    assert list(found) == list(frame)
    assert len(frame) > 0
    for name in frame:
        if frame[name].dtype.kind == "f":
            assert_allclose(found[name], frame[name], rtol=FLOAT32, atol=FLOAT32)
        else:
            assert_array_equal(found[name], frame[name])


@pytest.mark.cases("regions", "encoders")
@pytest.mark.parametrize("name", CASES)
def test_an_export_predicts_what_its_model_predicts(name, tmp_path):
    sql, settings = CASES[name]
    sharded = ("orders", "customers") if name in ("regions", "offset") else ()
    sites = on_sites(sales() if name == "bins" else STORE, sharded)
    trained = api.fit(sql, sites, **settings)
    exported = Model(trained.export(tmp_path / "model.zip"))
    clear = {"privacy_scores": "clear"}
    check_equal(exported.predict(rows_of(exported, sites)), trained.predict(**clear))
    # rows that the model was not trained on: a category and keys that it does not know
    others = sales(seed=5)
    if name != "bins":
        others = tables(seed=5)
        others["customers"].loc[2, "region"] = "Mars"
        others["customers"].loc[7, "id"] = 1000
    if name == "values":
        # counts of NULL are 0
        orders = others["orders"]
        orders["item"] = orders["item"].astype("Int64").mask(orders["day"] % 5 == 0)
    sites = on_sites(others, sharded)
    predicted = trained.predict(sites, **clear)
    check_equal(exported.predict(rows_of(exported, sites)), predicted)
    arrays = {each for part in exported.parts.values() for each in part["arrays"]}
    # others may have effects, too
    assert {f"{name[:-1]}-keys"} & {"effect-keys", "factor-keys"} <= arrays
    assert bool(exported.about["divided"]) == (name == "regions")
    assert bool(exported.about["bins"]) == (name == "bins")
    regions = [part["regions"] for part in exported.parts.values()]
    assert (max(regions) > 1) == (name == "regions")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of three sites with files, and what it predicts."""
    folder = tmp_path_factory.mktemp("trained")
    frames = {**STORE, "orders": STORE["orders"].drop(columns="pair")}
    files = {
        name: write_site(folder / name, {name: frame}) for name, frame in frames.items()
    }
    model = api.fit(LEFT, files, home=folder / "home", effects="c", l2=1e-3)
    return model, files, folder


def run_isolated(archive: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Run an archive where nothing but the standard library, numpy and DuckDB is."""
    words = [sys.executable, "-I", "-c", ISOLATED, archive, *arguments]
    texts = list(map(str, words))
    return subprocess.run(texts, capture_output=True, text=True, check=False)


def of_aliases(frames):
    names = {"o": "orders", "c": "customers", "i": "items"}
    return {alias: frames[name] for alias, name in names.items()}


def csv_of(files, alias):
    """The part's name and the CSV file of its rows."""
    names = {"o": "orders", "c": "customers", "i": "items"}
    return f"{alias}={files[names[alias]].parent / names[alias]}.csv"


def test_an_archive_needs_numpy_and_duckdb_alone(trained, tmp_path):
    model, files, _ = trained
    archive = model.export(tmp_path / "model.zip")
    out = tmp_path / "predictions.parquet"
    inputs = [csv_of(files, alias) for alias in "oci"]
    done = run_isolated(archive, "predict", *inputs, "--out", out, "--keep", "placed")
    assert (done.returncode, done.stderr) == (0, "")
    found = pd.read_parquet(out)
    placed = STORE["orders"]["placed"][found["row"]]
    assert_array_equal(pd.to_datetime(found.pop("placed")), placed)
    check_equal(found, model.predict(privacy_scores="clear"))
    shown = run_isolated(archive, "show").stdout
    assert f"model {model.name}" in shown
    assert "part o: table orders, reads customer DOUBLE, item BIGINT" in shown
    rows = of_aliases(STORE)
    rows["o"] = rows["o"].rename(columns={"placed": "row"})
    with pytest.raises(ExportError, match="the name of a column of predictions"):
        Model(archive).predict(rows, keep=["row"])
    rows["o"].drop(columns="pair").to_csv(tmp_path / "o.csv", index=False)
    # as it says
    numbered = f"(SELECT row AS number, * FROM '{tmp_path}/o.csv')"
    again = Model(archive).predict({**rows, "o": numbered}, keep=["number"])
    assert_array_equal(again["score"], found["score"])
    # without any customer, a LEFT JOIN has all orders; without any order, nothing has
    alone = Model(archive).predict({**rows, "c": rows["c"][:0]})
    assert set(alone["row"]) == set(found["row"])
    nothing = Model(archive).predict({**rows, "o": rows["o"][:0]})
    assert {len(values) for values in nothing.values()} == {0}
    refused = run_isolated(archive, "predict", *inputs[:2], "--out", out)
    reason = "FAILED: predict takes the parts o, c, i, and was given o, c\n"
    assert (refused.returncode, refused.stderr) == (1, reason)


def test_each_site_exports_its_part_and_what_they_say_is_combined(trained, tmp_path):
    model, files, folder = trained
    name, version = model.name.split("@")
    parts = folder / "home/state/models" / name / version
    # as in a federation: the server has no parts, and a site has its own
    server = tmp_path / "server"
    shutil.copytree(folder / "home/models", server / "models")
    combiner = export_model(server, name, tmp_path / "combine.zip", None)
    assert not any(path.startswith("tables/") for path in names_in(combiner))
    said = []
    for number, alias in enumerate("oci"):
        state = tmp_path / alias
        own = state / "models" / name / version / f"part-{number}"
        shutil.copytree(parts / own.name, own)
        tables_file = str(files[csv_of(files, alias).split("/")[-1][:-4]])
        archive = tmp_path / f"{alias}.zip"
        export_parts(state, name, archive, tables_file)
        of_parts = {p for p in names_in(archive) if not p.startswith("runner/")}
        assert of_parts == {
            "__main__.py",
            f"tables/{alias}/part.json",
            f"tables/{alias}/part.npz",
        }
        said.append(tmp_path / f"{alias}.npz")
        main(str(archive), ["score", csv_of(files, alias), "--out", str(said[-1])])
    out = tmp_path / "predictions.csv"
    main(str(combiner), ["combine", *map(str, said), "--out", str(out)])
    whole = Model(model.export(tmp_path / "whole.zip"))
    expected = whole.predict(of_aliases(STORE))
    found = pd.read_csv(out)
    assert list(found) == list(expected)
    for column, values in expected.items():
        assert_allclose(found[column], values, rtol=1e-12)


def names_in(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as opened:
        return opened.namelist()


def test_equal_models_make_equal_archives_and_none_is_overwritten(trained, tmp_path):
    model, _, _ = trained
    first, second = (model.export(tmp_path / f"{n}.zip") for n in "ab")
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ModelError, match=r"a.zip exists already: choose another name"):
        model.export(first)
    with pytest.raises(ModelError, match=r"an export is a zip file: name it m.zip"):
        model.export(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f.drop(columns="item"), "o: the rows have no column 'item'"),
        (
            lambda f: f.assign(day=f["day"] + 0.5),
            "o: column 'day' is DOUBLE, and 240 of its values are no BIGINT",
        ),
    ],
)
def test_rows_that_are_not_those_of_the_training_are_refused(
    trained, tmp_path, change, reason
):
    model, _, _ = trained
    exported = Model(model.export(tmp_path / "model.zip"))
    rows = of_aliases(STORE)
    with pytest.raises(ExportError, match=reason):
        exported.predict({**rows, "o": change(rows["o"])})
    # whole numbers are the same values, whatever their type
    same = rows["o"].assign(day=rows["o"]["day"].astype(float))
    assert_array_equal(
        exported.predict({**rows, "o": same})["score"], exported.predict(rows)["score"]
    )


def test_what_cannot_be_exported_says_why(trained, tmp_path):
    _, files, folder = trained
    lateral = (
        "SELECT o.qty AS label, c.age, h.n FROM orders o JOIN customers c ON "
        "o.customer = c.id, LATERAL (SELECT COUNT(*) AS n FROM past p WHERE "
        "p.customer = o.customer AND p.placed < o.placed) h"
    )
    shop = {"orders": STORE["orders"], "past": STORE["orders"]}
    looking_back = api.fit(
        lateral, {"shop": shop, "bank": {"customers": STORE["customers"]}}
    )
    with pytest.raises(ModelError, match=r"'h' is a LATERAL sub-query.*: predict with"):
        looking_back.export(tmp_path / "lateral.zip")
    assert len(looking_back.predict().frame)
    boosted = {"strategy": "boost", "num_epochs": 2}
    first = api.fit(LEFT, files, home=folder / "home", model_name="first", **boosted)
    later = api.fit(LEFT, files, home=folder / "home", boost_from=first.name, **boosted)
    with pytest.raises(
        ModelError, match="cannot be exported: train one model, without"
    ):
        later.export(tmp_path / "later.zip")
    # as it says
    assert first.export(tmp_path / "first.zip").is_file()


def test_days_of_two_readings_need_the_owner_s_format(tmp_path):
    days = pd.DataFrame({"day": ["01/02/2024", "03/04/2024"] * 10, "y": range(20)})
    file = write_site(tmp_path / "t", {"t": days})
    sql = "SELECT t.y AS label, t.day FROM t"
    model = api.fit(sql, {"here": file}, home=tmp_path / "home", test_fraction=0.0)
    given = tmp_path / "home/state", model.name
    with pytest.raises(ModelError, match=r"the days of 'day' are read in two ways"):
        export_parts(*given, tmp_path / "part.zip", str(file))
    text = file.read_text().replace("path=", "dates='%d/%m/%Y'\npath=")
    file.write_text(text)
    part = Model(export_parts(*given, tmp_path / "part.zip", str(file))).parts["t"]
    rows = str(file.parent / "t.csv")
    whole = Model(model.export(tmp_path / "whole.zip"))
    assert part["columns"] == {"day": ["DATE", "%d/%m/%Y"]}
    assert_array_equal(
        Model(tmp_path / "part.zip").score("t", rows)["scores"],
        whole.score("t", rows)["scores"],
    )


def test_the_command_exports_a_model_or_a_site_s_parts(trained, tmp_path, monkeypatch):
    model, files, folder = trained
    monkeypatch.setenv(HOME_VARIABLE, str(folder / "home"))
    out = tmp_path / "model.zip"
    printed = printed_by("export", model.name, "--out", out)
    assert printed == f"The export is in {out}: python {out} show\n"
    assert Model(out).parts.keys() == {"o", "c", "i"}
    assert "tables/o/scores.onnx" not in names_in(out)
    with_graphs = tmp_path / "graphs.zip"
    if find_spec("onnx"):
        printed_by("export", model.name, "--out", with_graphs, "--onnx")
        assert "tables/o/scores.onnx" in names_in(with_graphs)
    else:
        refused = refused_by("export", model.name, "--out", with_graphs, "--onnx")
        assert "for ONNX graphs onnx is not installed" in refused
    refused = refused_by("export", model.name, "--state-dir", folder, status=2)
    assert "a site's parts need --state-dir and --tables" in refused
    options = ["--state-dir", folder / "home/state", "--tables", files["orders"]]
    refused = refused_by("export", model.name, *options, "--out", tmp_path / "o.zip")
    assert "has no table 'customers', whose rows the part scores" in refused
