"""Extracting a table of a frame."""

import pandas as pd

from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.query import Fragment
from tp_flower.sources.shards import load_tables, register_frames, release


def run(
    frame: pd.DataFrame, wanted: Fragment, folder=None, order_key=b""
) -> ExtractedShard:
    token = register_frames({"table": frame}, site="here")
    try:
        (source,) = load_tables(f"memory:{token}")
        return extract(source, wanted, folder, order_key)
    finally:
        release(token)
