"""Two hospitals, a lab and a registry learn together who will be readmitted.

    python examples/hospitals/hospitals.py make|explain|train DIR

Data are made up. Each organisation has a folder in DIR, and messages are those of a
deployment, in one process; docs/tutorial/hospitals.md walks through it.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from flwr.app import Context, RecordDict

from client_apps.app import app as site_app
from client_apps.commands import policy
from client_apps.data.key_files import site_key
from strategies.app import app as server_app
from strategies.run.grid import InProcessGrid
from tp_flower.errors import TPFlowerError
from tp_flower.node_config import ALLOWED_KEYS, KEYS, STATE_DIR

SQL = """
SELECT p.readmitted AS label, p.age, p.days, p.emergency, p.earlier_stays,
    s.crp, s.creatinine, s.sodium, s.haemoglobin,
    d.income, d.density, d.doctors, d.over_65
FROM patients AS p
JOIN samples AS s ON p.patient = s.patient
JOIN districts AS d ON p.district = d.district
"""
TABLES = ("patients", "patients", "samples", "districts")
SITES = dict(zip(("hospital-a", "hospital-b", "lab", "registry"), TABLES, strict=True))
COLUMNS = {
    "patients": ["age", "days", "emergency", "earlier_stays"],
    "samples": ["crp", "creatinine", "sodium", "haemoglobin"],
    "districts": ["income", "density", "doctors", "over_65"],
}
RULES = {
    "patients": 'join-only = ["patient", "district"]\nmin-rows = 100',
    "samples": 'join-only = ["patient"]\nprivacy-unit = "patient"\nrows-per-unit = 3',
    "districts": 'join-only = ["district"]',
}
FOR_ALL = 'models = ["linear"]\nqueries-per-day = 10\napproved-queries = []\n'


def make_tables(a: int, b: int) -> dict[str, pd.DataFrame]:
    """Return the sites' tables, with ``a`` and ``b`` patients and others' samples."""
    random, people, n = np.random.default_rng(0), (a + b) * 6 // 5, 60
    places = pd.DataFrame({"district": [f"D{number:02}" for number in range(n)]})
    places["income"] = random.normal(31, 6, n).round(1)
    places["density"] = random.gamma(2, 900, n).round()
    places["doctors"] = random.gamma(9, 0.2, n).round(2)
    places["over_65"] = random.normal(0.21, 0.04, n).round(3)
    illness, living = random.normal(size=people), random.integers(0, n, people)
    names = [f"P{number:06}" for number in random.permutation(10**6)[:people]]
    table = pd.DataFrame({"patient": names})
    table["district"] = [f"D{number:02}" for number in living]
    table["age"] = random.integers(18, 96, people)
    table["days"] = 1 + random.poisson(np.exp(1 + 0.3 * illness))
    table["emergency"] = random.random(people) < 0.4
    table["earlier_stays"] = random.poisson(0.8, people)
    risk = 0.03 * (table["age"] - 70) + 0.5 * table["emergency"] + 1.2 * illness
    risk += 0.4 * table["earlier_stays"] - 0.5 * places["doctors"].to_numpy()[living]
    table["readmitted"] = random.random(people) < 1 / (1 + np.exp(-risk))
    rows = np.repeat(np.arange(people), random.integers(0, 4, people))
    ill, noise = illness[rows], random.normal(size=(4, len(rows)))
    samples = pd.DataFrame({"patient": np.array(names)[rows]})
    samples["crp"] = np.exp(2 + 0.8 * ill + 0.4 * noise[0]).round(1)
    samples["creatinine"] = (88 + 14 * ill + 10 * noise[1]).round()
    samples["sodium"] = (139 + 3 * noise[2]).round()
    samples["haemoglobin"] = (13.5 - 0.8 * ill + noise[3]).round(1)
    tables = table[:a], table[a : a + b], samples, places
    return dict(zip(SITES, tables, strict=True))


def allow(text: str, table: str) -> str:
    """Edit a first policy as its owner would: take lines in, and write rules below."""
    for name, columns in (("columns", COLUMNS[table]), ("labels", ["readmitted"])):
        before, start, rest = text.partition(f"\n{name} = [\n")
        for column in columns:
            rest = rest.replace(f'# "{column}",', f'"{column}",', 1)
        text = before + start + rest
    return f"{text}\n{RULES[table]}\n{FOR_ALL}"


def make(folder: Path, patients: tuple[int, int] = (1200, 800)) -> None:
    """Write the folders of the organisations, and the public keys that they pin."""
    keys = ""
    for site, rows in make_tables(*patients).items():
        file, table = folder / site / "tables.toml", SITES[site]
        file.parent.mkdir(parents=True)
        rows.to_csv(file.with_name(f"{table}.csv"), index=False)
        file.write_text(f'[tables.{table}]\npath = "{table}.csv"\nsite = "{site}"\n')
        file.write_text(file.read_text() + allow(policy(str(file), ""), table))
        keys += f"{site} {site_key(folder / site / 'state').public.hex()}\n"
    (folder / "keys.txt").write_text(keys)
    (folder / "keys.txt").chmod(0o600)


def run(folder: Path, mode: str, **settings: str | int | float) -> None:
    """Explain or train; what the server keeps is in the folder ``server``."""
    os.environ["TP_FLOWER_HOME"] = str(folder / "server")
    grid = InProcessGrid(site_app, {s: folder / s / "tables.toml" for s in SITES})
    for site, context in zip(SITES, grid.contexts.values(), strict=True):
        context.node_config[STATE_DIR] = str(folder / site / "state")
        context.node_config[ALLOWED_KEYS] = str(folder / "keys.txt")
        del context.node_config[KEYS]
    config = {"sql": SQL, "mode": mode, "row-weight": "entity", **settings}
    config["output-dir"] = str(folder / "server" / mode)
    server_app(grid, Context(grid.run.run_id, 1, {}, RecordDict(), config))


if __name__ == "__main__":
    command, directory = sys.argv[1], Path(sys.argv[2]).resolve()
    try:
        make(directory) if command == "make" else run(directory, command)
    except TPFlowerError:
        sys.exit(1)
