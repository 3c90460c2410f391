"""The results of a run as Python objects, for programs, consoles and notebooks.

They have the content of `report.json`. What people read of it is made by the server's
half, which is loaded by name.
"""

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from rich.console import Console, RenderableType

from tp_flower.errors import ModelError
from tp_flower.reports.inspection import (
    dependence_of,
    groups_of,
    importances_of,
)
from tp_flower.reports.records import REPORT_FILE, CompletedRun, report_line

if TYPE_CHECKING:
    import pandas as pd

PAGE: Final = "strategies.report_page.page"
CONSOLE_WIDTH: Final = 100
REPR_WIDTH: Final = 88


class Result:
    """The results of a run: the content of its report, for programs and people.

    In a notebook it is shown as the head of its page.
    """

    hint: ClassVar[str] = "text() is what the console prints"

    def __init__(self, completed: CompletedRun, home: object) -> None:
        self._completed = completed
        # a temporary home is deleted with the last result that refers to it
        self._home = home

    @property
    def report(self) -> Mapping[str, Any]:
        """The content of `report.json`."""
        return self._completed.report

    @property
    def folder(self) -> Path:
        """The folder of the report and its page; a temporary one is deleted in time."""
        return self._completed.folder

    def view(self, *, full: bool = False) -> RenderableType:
        """Return what a console prints of the results; ``full`` is for explanations."""
        view: RenderableType = resolve_name(f"{PAGE}:run_view")(self.report, full)
        return view

    def text(self, *, full: bool = False) -> str:
        """Return what the console prints of the results."""
        page = Console(file=StringIO(), width=CONSOLE_WIDTH, highlight=False)
        page.print(self.view(full=full))
        return cast(StringIO, page.file).getvalue()

    def show(self, *, full: bool = False) -> None:
        """Print the results and where their files are, as the command line does."""
        console = Console(width=CONSOLE_WIDTH, highlight=False)
        console.print(self.view(full=full))
        for line in (
            self._completed.next_steps,
            report_line(self.folder / REPORT_FILE),
        ):
            console.print(line, soft_wrap=True, markup=False)

    def __repr__(self) -> str:
        """Return five lines: the run, its method, figures, warnings, what is next."""
        head = resolve_name(f"{PAGE}:head")(self.report)
        figures = [f"{name} {value}" for name, value, _ in head["facts"]]
        warnings = self.report.get("warnings") or ()
        counted = "no warnings"
        if warnings:
            counted = f"{len(warnings)} warnings, the first: {warnings[0]}"
        lines = (
            f"{type(self).__name__}: {head['label']} {head['subject']}",
            head["about"],
            " · ".join(figures),
            counted,
            self._next_line(),
        )
        first, *others = (_shorten(line) for line in lines)
        return "\n  ".join((first, *others))

    def _repr_html_(self) -> str:
        """Return the head of the run's page."""
        html: str = resolve_name(f"{PAGE}:head_html")(self.report)
        return html

    def _next_line(self) -> str:
        return self.hint


class Explanation(Result):
    """An explanation of a training: the join, the costs, and who would learn what."""

    hint = "text(full=True) has everything that the console prints of it"


class Predictions(Result):
    """Predictions of a saved model."""

    hint = "frame has a row for each joined row"

    @property
    def frame(self) -> "pd.DataFrame":
        """The rows of `predictions.parquet`, one for each joined row."""
        frame: pd.DataFrame = cast(Any, self._completed.predictions).to_pandas()
        return frame


class Compared(Result):
    """Predictions of a model that were compared with labels."""

    @property
    def curve(self) -> "pd.DataFrame":
        """How much is found of the second of two classes, by threshold.

        Of the held-out rows, or of an evaluation's. A row for each of at most 50
        thresholds of the probability, the highest first, at least ten rows apart:
        ``rows`` are taken, a ``share`` of all; ``recall`` of the second class is among
        them (true positive rate), ``false_alarms`` of the first (false positive rate),
        and ``precision`` of them are of the second. ``probability`` is the mean of the
        rows that are taken since the threshold before.

        Raises:
            ModelError: the report has none, and of what there is one.
        """
        import pandas as pd

        if not self.report.get("curve"):
            raise ModelError(
                "the report has no curve of thresholds: it is of two classes, both "
                "among at least ten rows to compare with, whose labels have no noise"
            )
        return pd.DataFrame(self.report["curve"])


class Evaluation(Compared):
    """How good a saved model is on the rows of a query."""

    hint = "metrics has the figures, over all joined rows"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics over all joined rows, by name."""
        metrics: Mapping[str, float] = self.report["metrics"]
        return metrics

    @property
    def importances(self) -> "pd.DataFrame":
        """The permutation importances and the shares of tables and their features.

        A row each, with ``table``; ``feature``, "" for the whole table; ``site``, whose
        rows it is about if the table is in several shards; ``share``, how far it moves
        the score on average; and by metric how much worse it is with the values
        permuted, a mean over the repetitions and its ``_deviation``.

        Raises:
            ModelError: it was evaluated without ``importances``.
        """
        return importances_of(self.report)

    @property
    def dependence(self) -> "pd.DataFrame":
        """The partial dependence on features: the mean ``score`` at each ``value``.

        A row for each point of a ``feature`` of a ``table``: the mean score of all
        joined rows, if each had this value.

        Raises:
            ModelError: it was evaluated without ``importances``.
        """
        return dependence_of(self.report)

    @property
    def groups(self) -> "pd.DataFrame":
        """The metrics of each group of the joined rows, a row each.

        Raises:
            ModelError: it was evaluated without ``metrics_by``.
        """
        return groups_of(self.report)


def _shorten(line: str) -> str:
    if len(line) <= REPR_WIDTH:
        return line
    return f"{line[: REPR_WIDTH - 1]}…"
