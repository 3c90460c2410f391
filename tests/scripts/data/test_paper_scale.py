"""The made-up tables of the papers' sizes: shapes, joins, and what can be learned."""

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from scripts.data.paper_scale import PAPER_SCALES, write_paper_scale

SMALL = 1e-4


def test_sizes_are_those_of_table_7():
    yelp, mimic = PAPER_SCALES["yelp"], PAPER_SCALES["mimic"]
    sizes = [3_200_000, 1_200_000, 35_000]
    assert [yelp.rows_of(name, 1.0) for name in yelp.tables] == sizes
    for scale, features, classes, tables in ((yelp, 775, 5, 3), (mimic, 717, 2, 5)):
        assert sum(table.features for table in scale.tables.values()) == features
        assert (scale.classes, len(scale.tables)) == (classes, tables)
    sizes = [table.rows for table in mimic.tables.values()]
    assert (min(sizes), max(sizes)) == (35_000, 2_900_000)


@pytest.mark.parametrize("name", PAPER_SCALES)
def test_every_row_of_the_largest_table_is_one_joined_row(tmp_path, name):
    scale = PAPER_SCALES[name]
    write_paper_scale(name, tmp_path, SMALL)
    with duckdb.connect() as connection:
        for table in scale.tables:
            source = connection.read_parquet(str(tmp_path / f"{table}.parquet"))
            source.create_view(table)
            assert len(source) == scale.rows_of(table, SMALL)
        joined = connection.sql(scale.sql)
        assert len(joined) == scale.rows_of(scale.table, SMALL)
        # vectors come as one column
        width = scale.tables[scale.table].features
        features = sum(table.features for table in scale.tables.values())
        assert len(joined.columns) == 2 + features - width
    largest = pq.read_table(tmp_path / f"{scale.table}.parquet")
    labels = {1, 2, 3, 4, 5} if scale.classes == 5 else {0, 1}
    assert set(largest["label"].to_pylist()) == labels
    vectors = np.array(largest["vector"].to_pylist())
    assert vectors.shape == (len(largest), width)
    assert np.isfinite(vectors).all()
    # mean 0; HIDDEN / HIDDEN = 1 of the directions and 1/4 of their own
    assert abs(vectors.mean()) < 0.1
    assert vectors.var() == pytest.approx(1.25, rel=0.2)


def test_equal_seeds_make_equal_files_and_others_do_not(tmp_path):
    def read(folder, seed):
        write_paper_scale("yelp", tmp_path / folder, SMALL, seed)
        return pq.read_table(tmp_path / folder / "reviews.parquet")

    first = read("a", 3)
    assert first.equals(read("b", 3))
    assert not first["label"].equals(read("c", 4)["label"])


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("imdb", 1.0, "'imdb' is none of yelp, mimic"),
        ("yelp", 0.0, "the factor must be above 0, not 0"),
        ("yelp", float("nan"), "the factor must be above 0, not nan"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, factor, message):
    with pytest.raises(ValueError, match=message):
        write_paper_scale(name, tmp_path, factor)
