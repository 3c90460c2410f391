"""Cutoffs: the times up to which a LATERAL sub-query looks at its table's rows.

``LATERAL (SELECT ... FROM p WHERE p.k = o.k AND p.t < o.day)`` is one derived row for
each pair of a key and a cutoff, (o.k, o.day), which o is then joined with by equality.
The pairs are those of o's rows, where both tables are at one site; elsewhere the table
of p makes them itself: each of its keys at each point of a grid of times at which the
sub-query finds a row. Of o the grid takes the last point at or before its cutoff: what
is known then is known at the cutoff. Or the sites of o seal its pairs for those of p:
the key as a keyed hash, the cutoff as it is.
"""

import re
from dataclasses import dataclass
from datetime import date
from typing import Final

from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query import expressions

CUTOFF: Final = "(cutoff)"
"""The column of the cutoff; a name in parentheses is none that a query can write."""

PAIRS: Final = "cutoffs"
"""The relation of the pairs, where they are those of another table at the site."""

MOST_POINTS: Final = 100_000
SEALED_TYPES: Final = (
    *("DATE", "TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS"),
    *("TIMESTAMP WITH TIME ZONE", "TINYINT", "SMALLINT", "INTEGER", "BIGINT"),
    *("UTINYINT", "USMALLINT", "UINTEGER"),
)
"""The types of cutoffs that are sealed: each value is a whole number of 64 bits."""
_KEY: Final = "(key {})"
_UNITS: Final = {"hour": 1 / 24, "day": 1.0, "week": 7.0, "month": 28.0, "year": 365.0}
_FORM: Final = re.compile(
    r"\s*(\d{1,5})\s+(hour|day|week|month|year)s?"
    r"\s+from\s+(\d{4}-\d\d-\d\d)\s+to\s+(\d{4}-\d\d-\d\d)\s*"
)
_EXAMPLE: Final = '"1 month from 2015-01-01 to 2020-12-31"'


_POINT: Final = re.compile(
    r"TIME_BUCKET\(INTERVAL '(?P<count>[0-9]+)' (?P<unit>[A-Z]+), .*, "
    r"CAST\('(?P<first>[^']*)' AS TIMESTAMP\)\) <= "
    r"CAST\('(?P<last>[^']*)' AS TIMESTAMP\) THEN CAST\(.* AS (?P<type>[A-Z]+)\) END"
)


def key_column(number: int) -> str:
    """Return the column of a key of the pairs, counted from 0."""
    return _KEY.format(number)


def is_reserved(name: str) -> bool:
    """Return whether a column is one of the pairs; as in DuckDB, case does not count.

    >>> is_reserved("(key 0)"), is_reserved("(Cutoff)"), is_reserved("key")
    (True, True, False)
    """
    name = name.lower()
    return name == CUTOFF or re.fullmatch(r"\(key \d+\)", name) is not None


@dataclass(frozen=True)
class CutoffGrid:
    """Times at equal steps, ``step`` such as "1 month", from one day to another.

    ``type`` is that of its points, DATE or TIMESTAMP.
    """

    step: str
    first: str
    last: str
    type: str

    @classmethod
    def parse(cls, text: str) -> "CutoffGrid":
        """Return the grid that a setting describes.

        >>> CutoffGrid.parse("1 month from 2015-01-01 to 2020-12-31").step
        '1 month'
        """
        match = _FORM.fullmatch(text.lower())
        if match is None:
            raise QueryError(
                f"cutoff-grid is {text!r}; it must be a step of hours, days, weeks, "
                f"months or years and the first and the last day, such as {_EXAMPLE}"
            )
        count, unit, first, last = match.groups()
        return cls(f"{int(count)} {unit}", first, last, "TIMESTAMP").check()

    def check(self) -> "CutoffGrid":
        """Return the grid, or refuse one without points or with very many."""
        match = re.fullmatch(r"([0-9]{1,5}) (hour|day|week|month|year)", self.step)
        try:
            first = date.fromisoformat(self.first)
            last = date.fromisoformat(self.last)
        except ValueError as error:
            raise QueryError(f"cutoff-grid: {error}") from None
        if match is None or not int(match[1]) or self.type not in ("DATE", "TIMESTAMP"):
            raise QueryError(f"cutoff-grid: {self.step!r} is no step of a grid")
        if (str(first), str(last)) != (self.first, self.last):
            raise QueryError("cutoff-grid: a day is written as 2015-01-01")
        if last < first:
            raise QueryError(
                f"cutoff-grid ends on {self.last}, before it begins on {self.first}"
            )
        points = (last - first).days / (int(match[1]) * _UNITS[match[2]])
        if points > MOST_POINTS:
            raise QueryError(
                f"cutoff-grid has about {points:.0f} points, at most {MOST_POINTS} are "
                "allowed: a longer step has fewer"
            )
        if match[2] in ("month", "year") and first.day != 1:
            raise QueryError(
                f"cutoff-grid in {match[2]}s begins on {self.first}; it must begin on "
                f"the first day of a month, such as {first.replace(day=1)}"
            )
        return self

    def points(self) -> str:
        """Return the SELECT of all points; as dates, those of one day are one."""
        start = f"CAST('{self.first}' AS TIMESTAMP)"
        stop = f"CAST('{self.last}' AS TIMESTAMP)"
        return (
            f'SELECT DISTINCT CAST(point AS {self.type}) AS "{CUTOFF}" FROM (SELECT '
            f"unnest(generate_series({start}, {stop}, {self._interval})) AS point)"
        )

    def last_point(self, cutoff: str) -> str:
        """Return the SQL of the last point at or before a time, NULL off the grid."""
        start = f"CAST('{self.first}' AS TIMESTAMP)"
        stop = f"CAST('{self.last}' AS TIMESTAMP)"
        time = f"CAST({cutoff} AS TIMESTAMP)"
        point = f"TIME_BUCKET({self._interval}, {time}, {start})"
        return (
            f"CASE WHEN {time} >= {start} AND {point} <= {stop} "
            f"THEN CAST({point} AS {self.type}) END"
        )

    @property
    def _interval(self) -> str:
        count, unit = self.step.split(" ")
        return f"INTERVAL '{count}' {unit.upper()}"


def column_of_point(tree: exp.Expr) -> str:
    """Return the column of which an expression is the last point; "" if of none.

    It is exactly what :meth:`CutoffGrid.last_point` writes of a column.
    """
    sql = expressions.render(tree.unnest(), quote=True)
    match = _POINT.search(sql)
    names = {column.name for column in tree.find_all(exp.Column)}
    if match is None or len(names) != 1:
        return ""
    (name,) = names
    step = f"{match['count']} {match['unit'].lower()}"
    try:
        grid = CutoffGrid(step, match["first"], match["last"], match["type"]).check()
    except QueryError:
        return ""
    point = expressions.parse_expression(grid.last_point(quote_name(name)), "cutoff")
    return name if sql == expressions.render(point, quote=True) else ""


@dataclass(frozen=True)
class Cutoffs:
    """Where the pairs of keys and cutoffs of a sub-query come from.

    They are those of the rows of ``table`` (an alias of the query), at the same site or
    sealed by its sites; or of a grid.
    """

    table: str = ""
    grid: CutoffGrid | None = None
    sealed: bool = False

    def __str__(self) -> str:
        """Describe where they come from.

        >>> str(Cutoffs(grid=CutoffGrid("1 month", "2015-01-01", "2020-12-31", "DATE")))
        'a DATE every 1 month from 2015-01-01 to 2020-12-31'
        """
        if self.sealed:
            return f"of the rows of {self.table}, sealed by their site"
        if self.grid is None:
            return f"of the rows of {self.table}"
        return (
            f"a {self.grid.type} every {self.grid.step} from {self.grid.first} to "
            f"{self.grid.last}"
        )

    @property
    def makes_pairs(self) -> bool:
        """Whether its table has not all pairs of the rows around it, but some."""
        return self.sealed or self.grid is not None

    def check(self) -> "Cutoffs":
        """Return the cutoffs from the wire, or refuse another form."""
        if bool(self.table) == (self.grid is not None):
            raise QueryError("cutoffs are those of a table or of a grid")
        if self.sealed and not self.table:
            raise QueryError("cutoffs of a grid are not sealed")
        if self.grid is not None:
            self.grid.check()
        return self
