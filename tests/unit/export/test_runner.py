"""The runner that archives have: what it imports, and how it reads rows."""

import ast
import sys

import duckdb
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tp_flower.export.archive import npz_bytes, runner_files
from tp_flower.export.runner.model import read_arrays
from tp_flower.export.runner.rows import ExportError, read_rows


def imported(source: bytes) -> set[str]:
    """The packages that a module imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_the_runner_imports_numpy_duckdb_and_itself():
    modules = runner_files()
    assert {"runner/__init__.py", "runner/model.py"} <= modules.keys()
    packages = set().union(*map(imported, modules.values()))
    assert packages - sys.stdlib_module_names == {"numpy", "duckdb", "runner"}
    assert not any(b"tp_flower" in source for source in modules.values())


def part(**columns):
    """A part that reads columns of some types, numbers as the product does."""
    names = list(columns)
    kinds = {"VARCHAR": "text", "DATE": "time"}
    forms = {
        "VARCHAR": '"{}"',
        "DATE": "coalesce(epoch(\"{}\"), CAST('nan' AS DOUBLE))",
        "DOUBLE[]": '"{}"',
    }
    number = "coalesce(CAST(\"{}\" AS DOUBLE), CAST('nan' AS DOUBLE))"
    items = [
        [forms.get(columns[name][0], number).format(name), f"c{n}"]
        for n, name in enumerate(names)
    ]
    features = [
        [name, f"c{n}", kinds.get(columns[name][0], "number"), 0]
        for n, name in enumerate(names)
    ]
    return {
        "part": "t",
        "columns": columns,
        "nulls": ["", "NA"],
        "select": {
            "inner": items,
            "outer": [[column, column] for _, column in items],
            "from": "shard",
            "features": features,
            "keys": [],
            "offset": "",
        },
    }


TYPES = {
    "n": ["BIGINT", ""],
    "x": ["DOUBLE", ""],
    "t": ["VARCHAR", ""],
    "d": ["DATE", "%d.%m.%Y"],
}


def test_texts_of_a_file_have_the_types_of_the_training(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("t,n,unread,x,d\n007,1,a,0.5,02.01.1970\nNA,,b,nan,\n")
    rows = read_rows(part(**TYPES), str(file))
    assert int(rows["rows"]) == 2
    assert_array_equal(rows["features"]["n"], [1.0, np.nan])
    assert_array_equal(rows["features"]["x"], [0.5, np.nan])
    assert_array_equal(rows["features"]["d"], [86_400.0, np.nan])
    codes, texts = rows["features"]["t"]
    assert (codes.tolist(), texts.tolist()) == ([0, -1], ["007"])


def test_sources_are_files_folders_sql_and_frames(tmp_path):
    frame = duckdb.sql("SELECT range AS n FROM range(3)").df()
    (tmp_path / "folder").mkdir()
    frame.to_parquet(tmp_path / "folder" / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    sources = (
        *(frame, tmp_path / "folder", tmp_path / "folder/a.parquet"),
        *(tmp_path / "a.csv", "(SELECT range AS N FROM range(3))"),
    )
    for source in sources:
        rows = read_rows(part(n=["BIGINT", ""]), source, ["n"])
        assert_array_equal(rows["features"]["n"], [0.0, 1.0, 2.0])
        assert_array_equal(rows["keep.n"], [0, 1, 2])


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("1.5", "BIGINT", "column 'n' is VARCHAR, and 1 of its values are no BIGINT"),
        ("0.123", "DECIMAL(4,2)", "1 of its values are no DECIMAL"),
    ],
)
def test_values_that_a_cast_would_change_are_refused(tmp_path, text, kind, reason):
    file = tmp_path / "rows.csv"
    file.write_text(f"n\n{text}\n2.0\n")
    with pytest.raises(ExportError, match=reason):
        read_rows(part(n=[kind, ""]), str(file))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("n,d\n1,02.01.1970\n2,secret\n", "column 'd' are no DATE"),
        ("n,d\nsecret,02.01.1970\n", "column 'n' are no BIGINT"),
        ("n,d\n1,02.01.1970\n2,secret\xff\n", "CSV Error on Line: 3"),
    ],
)
def test_rows_that_cannot_be_read_are_named_without_their_values(
    tmp_path, content, reason
):
    file = tmp_path / "rows.csv"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ExportError, match=reason) as refused:
        read_rows(part(n=["BIGINT", ""], d=TYPES["d"]), str(file))
    assert f"{file}: " in str(refused.value)
    assert "secret" not in str(refused.value)


def test_vectors_of_another_length_are_refused():
    described = part(v=["DOUBLE[]", ""])
    described["select"]["features"] = [["v", "c0", "vector", 3]]
    with pytest.raises(
        ExportError, match="of 'v' have 2 numbers, and the model takes 3"
    ):
        read_rows(described, "(SELECT [1.0, 2.0] AS v)")
    rows = read_rows(described, "(SELECT unnest([[1.0, 2, 3], NULL]) AS v)")
    assert_array_equal(rows["features"]["v"], [[1, 2, 3], [np.nan] * 3])


def test_arrays_are_files_without_pickle():
    arrays = {"a": np.arange(3), "b.c": np.array(["x", "äé"])}
    assert npz_bytes(arrays) == npz_bytes(dict(reversed(arrays.items())))
    for name, array in read_arrays(npz_bytes(arrays)).items():
        assert_array_equal(array, arrays[name])
    with pytest.raises(ValueError, match="allow_pickle"):
        npz_bytes({"a": np.array([object()])})
