"""Compare what each way of looking back is worth, with LightGBM on DuckDB's answer.

    python compare.py

All models are tested on the last fifth of the index dates. The rows are those of
tables.toml, without its policies.
"""

import tomllib
from pathlib import Path
from typing import Any

import duckdb
import lightgbm
import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

import tp_flower

FOLDER = Path(__file__).resolve().parent
GRID = "from 2021-12-01 to 2023-12-31"
SPLIT = "time(c.cohort_start_date)"
WITHOUT = """
SELECT c.readmitted AS label, c.age, c.female, c.days, c.emergency,
    c.heart_failure, c.diabetes, c.lung_disease, c.cancer
FROM cohort c
"""
COUNTS = f"""{WITHOUT.replace("FROM", ", v.visits, v.emergencies FROM")}
LEFT JOIN {{}}
"""
NUMBERS = """SELECT {}COUNT(*) AS visits,
    COUNT(*) FILTER (WHERE v.visit_concept_id = 262) AS emergencies
FROM visit_occurrence v"""
BEFORE = f"""LATERAL ({NUMBERS.format("")}
    WHERE v.patient = c.patient AND v.visit_start_date < c.cohort_start_date
) v ON TRUE"""
WHENEVER = f"""({NUMBERS.format("v.patient, ")}
    GROUP BY v.patient
) v ON v.patient = c.patient"""


def read_sites(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of tables.toml by organisation, without their policies."""
    sites: dict[str, dict[str, Any]] = {}
    tables = tomllib.loads((folder / "tables.toml").read_text())["tables"]
    for name, entry in tables.items():
        for shard in entry.get("shards", [entry]):
            source = {"path": str(folder / shard["path"])}
            if "sql" in entry:
                source["sql"] = entry["sql"]
            sites.setdefault(shard["site"], {})[name] = source
    return sites


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Return the tables as one database would have them: what the owners' SQL makes."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for tables in read_sites(folder).values():
        with duckdb.connect() as engine:
            for name, source in tables.items():
                engine.read_parquet(source["path"]).create(name)
            for name, source in tables.items():
                frame = engine.sql(source.get("sql", f"FROM {name}")).df()
                parts.setdefault(name, []).append(frame)
    return {name: pd.concat(frames) for name, frames in parts.items()}


def create_tables(engine: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Create the tables of :func:`read_tables` in one database, days as DATE."""
    for name, frame in read_tables(folder).items():
        dates = [column for column in frame if column.endswith("_date")]
        days = ", ".join(f"{column}::DATE AS {column}" for column in dates)
        items = f"* REPLACE ({days})" if dates else "*"
        engine.register("rows_of_table", frame)
        engine.execute(f"CREATE TABLE {name} AS SELECT {items} FROM rows_of_table")


def answer(folder: Path, sql: str) -> pd.DataFrame:
    """Return DuckDB's answer to a query over all tables in one database."""
    with duckdb.connect() as engine:
        create_tables(engine, folder)
        return engine.sql(sql).df()


def trees_auc(folder: Path, sql: str) -> float:
    """Return the AUC of LightGBM on the last fifth of the rows of DuckDB's answer."""
    rows = answer(
        folder, sql.replace("AS label", "AS label, c.cohort_start_date AS day")
    )
    is_test = rows["day"].rank(method="min") > 0.8 * len(rows)
    features = rows.drop(columns=["label", "day"]).astype(float)
    model = lightgbm.LGBMClassifier(
        n_estimators=100, learning_rate=0.05, num_leaves=15, verbose=-1
    )
    model.fit(features[~is_test], rows["label"][~is_test])
    chances = np.asarray(model.predict_proba(features[is_test]))[:, 1]
    return float(roc_auc_score(rows["label"][is_test], chances))


def main() -> None:
    """Print the test AUC of each way."""
    sites = read_sites(FOLDER)
    sql = tomllib.loads((FOLDER / "sealed.toml").read_text())["sql"]
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "without history": (WITHOUT, {}),
        "grid of a month": (sql, {"cutoff_grid": f"1 month {GRID}"}),
        "grid of a week": (sql, {"cutoff_grid": f"1 week {GRID}"}),
        "sealed pairs": (sql, {"sealed_cutoffs": True}),
        "visits and emergencies alone": (
            COUNTS.format(BEFORE),
            {"sealed_cutoffs": True},
        ),
        "also those of afterwards": (COUNTS.format(WHENEVER), {}),
    }
    for name, (query, how) in ways.items():
        for strategy in ("cg", "boost"):
            model = tp_flower.fit(
                query, sites, strategy=strategy, test_split=SPLIT, **how
            )
            metrics, report = model.metrics["test"], model.report
            print(f"{name:28} {strategy:6} {metrics['auc']:.4f}  {report['seconds']}")
    for name, query in (("without history", WITHOUT), ("exact windows", sql)):
        print(f"{name:28} LightGBM on DuckDB's answer {trees_auc(FOLDER, query):.4f}")


if __name__ == "__main__":
    main()
