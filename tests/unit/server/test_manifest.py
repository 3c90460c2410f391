"""Manifests come back as they were written, and nothing else is taken for one."""

import json
import re
from datetime import UTC, datetime

import pytest

from strategies.inference.manifest import (
    _digest,
    decode_manifest,
    encode_manifest,
    feature_texts,
    finite_metrics,
    label_text,
    manifest_path,
    read_manifest,
    resolve,
    write_manifest,
)
from tests.support.examples.reports import small_manifest
from tp_flower.errors import ModelError
from tp_flower.model_names import (
    ModelVersion,
    check_name,
    delete_version,
    find_version,
    make_version,
    versions_in,
)
from tp_flower.query import Fragment, Query
from tp_flower.settings import Settings

NAN = float("nan")
TABLE = encode_manifest(small_manifest())["model"]["tables"][0]
FIRST = "20261122-001500-3f9a"
SECOND = "20261122-001501-00aa"
PATHS = ("", ".", "..", "a/b", "a\\b", "-a", ".a", "A", "ä", "a" * 65, "a\n", 3)
NO_VERSIONS = ("", FIRST + "\n", "..", FIRST.upper(), "١" * 8)
TABLES = {
    "a": {"id": "BIGINT", "x": "DOUBLE", "y": "DOUBLE", "label": "DOUBLE"},
    "b": {"id": "BIGINT", "n": "DOUBLE", "Kind": "VARCHAR"},
}


def refused(match):
    """Expect a model to be refused, with such a text."""
    return pytest.raises(ModelError, match=match)


def test_manifest_comes_back_as_it_was_written(tmp_path):
    # numbers that are not finite are no metrics
    metrics = finite_metrics({"auc": NAN, "loss": 0.1})
    manifest = small_manifest(base_score=(0.1,), test={}, train=metrics)
    path = write_manifest(tmp_path, manifest)
    assert path == tmp_path / "models" / "delays" / FIRST / "manifest.json"
    again = read_manifest(tmp_path, manifest.model)
    texts = (json.dumps(encode_manifest(each)) for each in (manifest, again))
    assert len(set(texts)) == 1
    assert again.base_score == (0.1,)
    assert again.train == {"loss": 0.1}
    assert Settings.from_run_config(again.settings) == Settings(l2=0.01)
    assert again.table("p").encoded == manifest.table("p").encoded
    with pytest.raises(KeyError, match="zz"):
        again.table("zz")
    parts = [part.site for table in again.tables for part in table.parts]
    assert parts == ["EWR", "JFK", "registry"]
    assert [item.name for item in path.parent.iterdir()] == ["manifest.json"]


def save(folder, *name, **changes):
    """Write the small manifest, with changes; return its path."""
    return write_manifest(folder, small_manifest(*name, **changes))


def edited(model=(), *, is_signed=True, **file):
    """The data of a manifest with these changes, by default with a right digest."""
    data = encode_manifest(small_manifest())
    data["model"] |= dict(model)
    if is_signed:
        data["sha256"] = _digest(data["model"])
    return {**data, **file}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field `format`"),
        (edited(format="other"), "'other', not 'tp_flower model'"),
        (edited(version=1), "has version 1, not 2"),
        (edited({"loss": "squared"}, is_signed=False), "does not match its digest"),
        (edited({"train": {"auc": NAN}}, is_signed=False), "not JSON compliant"),
        (edited({"other": 1}), "unknown field `other`"),
        (edited({"base-score": []}), "length >= 1 - at `$.base-sc"),
        (edited({"base-score": [10**400]}), "out of range - at"),
        (edited({"base-score": [0.0, 1.0]}), "numbers, expected 2"),
        (edited({"name": "../x"}), "model name '../x' is not allowed"),
        (edited({"joined-rows": -1}), "`int` >= 0 - at `$.joined-"),
        (
            edited({"tables": [{**TABLE, "encoded": {}}]}),
            "missing required field `features`",
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_what_is_no_manifest_is_refused(data, match):
    with refused(re.escape(match)):
        decode_manifest(data)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1'])
def test_a_file_that_is_no_json_is_refused(tmp_path, text):
    save(tmp_path).write_text(text)
    with refused(rf"model delays@{FIRST}: .* it is not JSON"):
        resolve(tmp_path, "delays")


def test_a_manifest_in_the_folder_of_another_model_is_refused(tmp_path):
    path = save(tmp_path)
    other = manifest_path(tmp_path, ModelVersion("delays", SECOND))
    other.parent.mkdir(parents=True)
    path.rename(other)
    with refused(f"the manifest of delays@{FIRST}"):
        resolve(tmp_path, "delays")
    with refused(rf"delays@{FIRST} has no manifest\.json in"):
        resolve(tmp_path, f"delays@{FIRST}")
    with refused(r"manifest\.json cannot be written"):
        write_manifest(other, small_manifest())


def test_a_name_stands_for_its_latest_version(tmp_path):
    for version in (SECOND, FIRST):
        save(tmp_path, version=version)
    save(tmp_path, "age", "20261123-000000-0000")
    (tmp_path / "models" / "delays" / ".half-written").mkdir()
    (tmp_path / "models" / "README").write_text("not a model")
    assert resolve(tmp_path, "delays").model.version == SECOND
    assert resolve(tmp_path, f"delays@{FIRST}").model.version == FIRST
    names = ["age@20261123-000000-0000", f"delays@{FIRST}", f"delays@{SECOND}"]
    assert list(map(str, versions_in(tmp_path))) == names


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("delay", "there is no model 'delay'. Did you mean delays?"),
        ("zzz", "there is no model 'zzz'; there are delays"),
        (f"delays@{SECOND}", f"Did you mean delays@{FIRST}?"),
        ("delays@", "'delays@' has no version"),
        ("delays@latest", "model version 'latest' is not of the form"),
        ("Delays", "model name 'Delays' is not allowed"),
    ],
)
def test_an_unknown_model_is_refused_with_what_is_close(tmp_path, text, match):
    with refused("no model 'default'; there is none yet"):
        find_version(tmp_path, "default")
    save(tmp_path)
    with refused(re.escape(match)):
        resolve(tmp_path, text)


def test_names_and_versions_that_could_be_paths_are_refused():
    for name in PATHS:
        with refused("is not allowed"):
            check_name(name)
    for version in NO_VERSIONS:
        with refused("is not of the form"):
            ModelVersion("a", version)


def test_versions_sort_by_the_start_of_their_runs():
    stamps = [datetime(2026, 11, 22, 0, 15, s, tzinfo=UTC) for s in (9, 10)]
    early = make_version(stamps[0], "ff" * 16)
    late = make_version(stamps[1], "00" * 16)
    assert early < late
    assert ModelVersion("a", early) < ModelVersion("a", late) < ModelVersion("b", early)


def test_a_deletion_that_is_cut_off_is_finished_by_the_next(tmp_path, monkeypatch):
    for version in (FIRST, SECOND):
        save(tmp_path, version=version)
    with monkeypatch.context() as patch:
        patch.setattr("tp_flower.model_names.shutil.rmtree", lambda _: None)
        delete_version(tmp_path, f"delays@{FIRST}")
    assert [version.version for version in versions_in(tmp_path)] == [SECOND]
    assert len(list((tmp_path / "models" / "delays").iterdir())) == 2
    with refused("there is no model"):
        delete_version(tmp_path, f"delays@{FIRST}")
    delete_version(tmp_path, f"delays@{SECOND}")
    assert list((tmp_path / "models").iterdir()) == []


def fragments(sql: str, table: str) -> tuple[Fragment, ...]:
    return Query.from_sql(sql).bind(TABLES).fragments_of(table)


def texts(sql: str, table: str) -> tuple[str, ...]:
    return feature_texts(fragments(sql, table))


def grouped(values, where=""):
    inner = f"SELECT id, {values} AS m FROM b {where} GROUP BY id"
    select = "SELECT a.y AS label, s.m + 1 AS p, s.m"
    return f"{select} FROM a JOIN ({inner}) s ON a.id = s.id"


def test_texts_of_features_do_not_depend_on_spelling_or_filters():
    first = texts("select y as label, x, x+y as s from a where x > 1", "a")
    again = texts("SELECT t.y AS label, T.X, (t.x + t.y) AS s FROM a t", "t")
    assert first == again == ('x = "x"', 's = "x" + "y"')
    mean = texts(grouped("AVG(n)"), "s")
    assert mean == ('p = (AVG("n")) + 1 GROUP BY "id"', 'm = AVG("n") GROUP BY "id"')
    assert texts(grouped("AVG(n)", "WHERE n > 3"), "s") == mean
    assert texts(grouped("SUM(n)"), "s") != mean


def test_texts_of_features_of_a_union_name_each_part():
    union = (
        "SELECT l AS label, v FROM (SELECT y AS l, x AS v FROM a UNION ALL SELECT n, n "
        "FROM b) u"
    )
    assert texts(union, "u") == ('v = "x" | "n"',)
    assert label_text(fragments(union, "u")) == '"y" | "n"'
    joined = "SELECT a.y AS label, b.n FROM a JOIN b ON a.id = b.id"
    assert label_text(fragments(joined, "b")) == ""
