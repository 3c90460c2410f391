"""The rows of a scorer by their keys, and the requests that wait for it."""

import time
from threading import Thread

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from strategies.serving import request_queue
from strategies.serving.request_queue import (
    DownError,
    MalformedError,
    RequestQueue,
    UnknownKeyError,
)
from strategies.serving.row_keys import RowKeys

SOON = 0.01
DAY = pa.timestamp("us", "UTC")


def test_rows_are_those_that_a_comparison_of_all_columns_finds():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "number": rng.integers(0, 4, 200),
            "text": rng.choice(["a", "b", None], 200),
            "share": rng.choice([0.5, np.nan, 2.0], 200),
        }
    )
    label_rows = np.sort(rng.integers(0, 200, 300))
    keys = RowKeys(pa.Table.from_pandas(frame), label_rows)
    # each value of a key is there, and not all of them together
    wanted = [
        {"number": number, "text": text, "share": share}
        for number in range(5)
        for text in "abc"
        for share in (0.5, 2, 3)
    ]
    for key in wanted:
        is_row = (frame[list(key)] == pd.Series(key)).all(axis=1)
        if is_row.any():
            (found,) = keys.joined_rows([key])
            expected = np.flatnonzero(np.isin(label_rows, np.flatnonzero(is_row)))
            assert sorted(found.tolist()) == expected.tolist()
        else:
            with pytest.raises(UnknownKeyError, match=r"has keys\[1\]$"):
                keys.joined_rows([{"number": 0, "text": "a", "share": 2}, key])


def test_values_of_many_columns_are_not_confused():
    # as many combinations as no 64 bits could number
    columns = {f"c{k}": np.arange(5000) for k in range(6)}
    keys = RowKeys(pa.table(columns), np.arange(5000))
    key = dict.fromkeys(columns, 4321)
    assert [rows.tolist() for rows in keys.joined_rows([key])] == [[4321]]
    with pytest.raises(UnknownKeyError):
        keys.joined_rows([key | {"c5": 4320}])


def test_times_and_truth_values_are_keys():
    times = pa.array([0, 86_400_000_000, 0]).cast(DAY)
    columns = pa.table({"at": times, "on": [True, True, False]})
    keys = RowKeys(columns, np.arange(3))
    asked = [
        {"at": "1970-01-02T00:00:00Z", "on": True},
        {"at": "1970-01-01T01:00:00+01:00", "on": False},
    ]
    assert [rows.tolist() for rows in keys.joined_rows(asked)] == [[1], [2]]
    for changed in ({"at": "yesterday"}, {"on": 1}, {"at": 0}):
        with pytest.raises(MalformedError, match=rf"keys\[.*\]\.{next(iter(changed))}"):
            keys.joined_rows([asked[0] | changed])


@pytest.mark.parametrize(
    "column", [pa.array([[1], [2]]), pa.nulls(2), pa.array([1, 2], pa.duration("s"))]
)
def test_a_key_that_no_value_of_json_can_be_ends_its_request_alone(column):
    keys = RowKeys(pa.table({"k": column}), np.arange(2))
    with pytest.raises(MalformedError, match=r"keys\[..\]\.k: "):
        keys.joined_rows([{"k": "a"}])


def test_requests_that_wait_are_taken_together_as_far_as_a_round_goes():
    requests = RequestQueue()
    with pytest.raises(DownError, match=request_queue.OPENING):
        requests.submit([{"row": 0}])
    requests.open()
    waiting = [requests.submit([{"row": row}] * size) for row, size in ((0, 3), (1, 2))]
    end = time.monotonic() + 60.0
    assert requests.take(end, 4) == waiting[:1]
    assert requests.take(end, 1) == waiting[1:]
    assert requests.take(time.monotonic() + SOON, 4) == ()
    # a request that comes while somebody waits
    asking = Thread(target=lambda: (time.sleep(SOON), requests.submit([{"row": 2}])))
    asking.start()
    (taken,) = requests.take(end, 4)
    asking.join()
    requests.fail("site 'b' is gone")
    with pytest.raises(DownError, match="site 'b' is gone"):
        taken.answer.result(0)
    with pytest.raises(DownError, match="site 'b' is gone"):
        requests.submit([{"row": 3}])


def test_only_so_many_requests_wait_and_none_after_the_end(monkeypatch):
    monkeypatch.setattr(request_queue, "MOST_WAITING", 2)
    requests = RequestQueue()
    requests.open()
    for row in range(2):
        requests.submit([{"row": row}])
    with pytest.raises(DownError, match="2 requests wait already: try again"):
        requests.submit([{"row": 2}])
    assert len(requests.take(time.monotonic() + 60.0, 4)) == 2
    requests.submit([{"row": 2}])
    requests.close()
    assert requests.take(time.monotonic() + 60.0, 4) == ()
    assert requests.wait_closed(60.0)
