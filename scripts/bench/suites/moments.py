"""What an epsilon costs by moments: test metrics on true labels, a table at a time.

Every encoder is declared, so that the epsilon is of all values of the table's rows.
Beside it: the model without noise, and the one that leaves the table's columns out. A
run that needs more noise than the model stands is refused, and has no figure. Tables
without the label are measured twice, the second time with joined rows of weight 1/G, so
that each row of the table weighs the same and needs less noise. Noise comes from a
secure source also here: figures are means of the runs of ``--repeats``.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import sqlglot

from scripts.bench.datasets import Dataset, at_hand, flights, store
from scripts.bench.harness import Options, Outcome
from scripts.bench.suites.privacy import DELTA, Task
from tp_flower.errors import SettingsError
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.settings.run import JOINED

EPSILONS: Final = (0.5, 1.0, 2.0, 4.0)
MOST_LOST: Final = 0.01

FLIGHTS_SQL: Final = """SELECT COALESCE(f.arr_delay, 0) > 15 AS label,
f.month, f.day, f.hour, f.minute, f.distance, f.origin,
p.year AS plane_year, p.engines, p.seats,
w.temp, w.dewp, w.humid, w.wind_speed, w.precip, w.pressure, w.visib,
a.lat, a.lon, a.alt, a.tz
FROM flights AS f
JOIN planes AS p ON f.tailnum = p.tailnum
JOIN weather AS w ON f.origin = w.origin AND f.time_hour = w.time_hour
JOIN airports AS a ON f.dest = a.faa"""
ENCODERS: Final[Mapping[str, str]] = {
    "flights": "f.month=range(1, 12); f.day=range(1, 31); f.hour=range(0, 24); "
    "f.minute=range(0, 60); f.distance=range(0, 3000); "
    "f.origin=categories(EWR, JFK, LGA); p.plane_year=range(1980, 2015); "
    "p.engines=range(1, 4); p.seats=range(0, 400); w.temp=range(0, 100); "
    "w.dewp=range(0, 80); w.humid=range(0, 100); w.wind_speed=range(0, 40); "
    "w.precip=range(0, 0.5); w.pressure=range(990, 1040); w.visib=range(0, 10); "
    "a.lat=range(20, 60); a.lon=range(-130, -60); a.alt=range(0, 6000); "
    "a.tz=range(-10, -5)",
    "store": "o.channel=categories(web, shop, phone); o.discount=range(0, 0.3); "
    "o.placed=range(2024-01-01, 2025-01-01); "
    "i.part=categories(case, motor, screen, battery, cable); i.price=range(0, 80); "
    "i.weight=range(0, 10); i.fragile=categories(true, false); c.age=range(18, 80); "
    "c.income=range(0, 120); c.segment=categories(home, office, school); "
    "c.country=hash(8)",
    "movielens": "r.rated=range(874000000, 894000000); m.year=range(1930, 2000); "
    "m.genre=hash(24); u.age=range(10, 70); u.is_male=categories(true, false); "
    "u.occupation=hash(24)",
}
RANGES: Final[Mapping[str, tuple[float, ...]]] = {
    "flights": (),
    "store": (0.0, 25.0),
    "movielens": (1.0, 5.0),
}
PRIVATE: Final[Mapping[str, tuple[str, ...]]] = {
    "flights": ("f", "w", "p", "a"),
    "store": ("o", "i", "c"),
    "movielens": ("r", "u", "m"),
}
"""Tables of each data set, that of the label first: it cannot be left out."""


@dataclass(frozen=True)
class Measured:
    """A data set, and how its private runs are set up.

    Attributes:
        left_out: the table whose features are not read; "" for none.
    """

    task: Task
    left_out: str = ""

    @property
    def settings(self) -> Settings:
        """The settings of a run without noise."""
        entries = ENCODERS[self.task.data.name].split("; ")
        kept = [entry for entry in entries if entry.split(".")[0] != self.left_out]
        settings = replace(self.task.settings, strategy="moments")
        return settings.with_fields(encoders="; ".join(kept))

    def private(self, table: str, epsilon: float, row_weight: str) -> Settings:
        """Return the settings with one table's values private."""
        privacy = PrivacySettings(
            features="statistics",
            epsilon=epsilon,
            delta=DELTA,
            label_range=self.task.label_range,
        )
        return self.settings.with_fields(
            private_tables=table, privacy=privacy, row_weight=row_weight
        )

    def without(self, table: str) -> "Measured":
        """Return the data set whose query reads no feature of a table."""
        select = sqlglot.parse_one(self.task.data.sql, dialect="duckdb")
        kept = [
            item
            for item in select.expressions
            if item.alias == "label" or item.find(sqlglot.exp.Column).table != table
        ]
        select.set("expressions", kept)
        data = replace(self.task.data, sql=select.sql(dialect="duckdb"))
        return Measured(replace(self.task, data=data), table)


def measured(options: Options) -> Iterator[Measured]:
    """Yield the data sets that are at hand."""
    narrow = replace(flights(), sql=FLIGHTS_SQL)
    datasets: list[tuple[Dataset, str]] = [(narrow, "auc"), (store(), "rmse")]
    datasets += [(data, "rmse") for data in at_hand(options.movielens, "movielens")]
    for data, metric in datasets:
        limits = RANGES[data.name]
        yield Measured(Task(data.title, (metric,), data, data.join_only(), limits))


def measure_moments(options: Options) -> Outcome:
    """Return the test metric by data set, private table and epsilon."""
    outcome = Outcome()
    for each in measured(options):
        metric = each.task.metrics[0]
        figure = f"test {metric.upper()}"
        exact = each.task.mean_metrics([each.settings])[metric]
        outcome.facts[f"{each.task.name}, no noise: {figure}"] = exact
        first, *others = PRIVATE[each.task.data.name]
        for head, value in _private_metrics(each, first, JOINED, options.repeats):
            outcome.facts[f"{each.task.name}, {first}, {head}: {figure}"] = value
            if head == "eps 1":
                lost = abs(value - exact) / exact
                name = f"{each.task.name}, {first}: lost at epsilon 1"
                outcome.check(name, lost, MOST_LOST)
        for table in others:
            name = f"{each.task.name}, {table}"
            left_out = each.without(table)
            value = left_out.task.mean_metrics([left_out.settings])[metric]
            outcome.facts[f"{name} left out: {figure}"] = value
            for title, row_weight in (("", JOINED), (", 1/G", f"entity({table})")):
                metrics = _private_metrics(each, table, row_weight, options.repeats)
                for head, value in metrics:
                    outcome.facts[f"{name}{title}, {head}: {figure}"] = value
    return outcome


def _private_metrics(
    each: Measured, table: str, row_weight: str, repeats: int
) -> Iterator[tuple[str, float]]:
    """Yield the metric at each epsilon that the model stands."""
    for epsilon in EPSILONS:
        runs = repeats * [each.private(table, epsilon, row_weight)]
        with suppress(SettingsError):
            yield f"eps {epsilon:g}", each.task.mean_metrics(runs)[each.task.metrics[0]]
