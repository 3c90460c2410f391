"""Run an exported model with numpy and DuckDB, and without the software that made it.

    python MODEL.zip show
    python MODEL.zip predict ALIAS=FILE ... --out predictions.csv
    python MODEL.zip score PART=FILE --out PART.npz
    python MODEL.zip combine PART.npz ... --out predictions.csv

The score of a joined row is a base score and what the model of each table says of the
table's row behind it. `score` computes what one table says, where its rows are;
`combine` joins these by the keys of the query; `predict` does both on one machine.

FILE is a CSV or Parquet file, a folder of Parquet files, or SQL in parentheses that
DuckDB reads. From Python, with data frames::

    sys.path.insert(0, "MODEL.zip")
    from runner.model import Model
    Model("MODEL.zip").predict({"o": orders, "c": customers})

Read `model.py` first, then `rows.py`, `encoding.py` and `scoring.py`.
"""
