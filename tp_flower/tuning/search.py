"""Search settings from Python: the candidates, the folds, and what came of them."""

from collections.abc import Mapping, Sequence
from io import StringIO
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, cast

from rich.console import Console, RenderableType

from tp_flower.api import FilePath, FittedModel, Sites, fit
from tp_flower.errors import SettingsError
from tp_flower.reports.results import CONSOLE_WIDTH, Result
from tp_flower.tuning.candidates import Grid, grid_candidates, random_candidates

if TYPE_CHECKING:
    import pandas as pd

    from tp_flower.query import Query

VIEW: Final = "strategies.report_page.search:search_view"
PLOT: Final = "strategies.report_page.search:search_plot"
SEARCH: Final = "search"
FOLDS: Final = 5
_SETTING: Final = "candidate"


class SearchResult:
    """What a search has found: the best settings, all others, and the model.

    Attributes:
        model: trained by the best settings, on the rows of all folds.
    """

    def __init__(self, model: Result) -> None:
        if SEARCH not in model.report:
            raise SettingsError("folds: the run has searched nothing: set folds")
        self.model = cast(FittedModel, model)
        self._search: Mapping[str, Any] = model.report[SEARCH]

    @property
    def best(self) -> Mapping[str, Any]:
        """The settings of the lowest mean loss, by key."""
        candidates = self._search["candidates"]
        settings: Mapping[str, Any] = candidates[self._search["best"]]["settings"]
        return settings

    @property
    def candidates(self) -> "pd.DataFrame":
        """A row for each candidate, the best first.

        Its settings, its mean ``loss`` on the rows held out, the ``deviation`` of the
        loss among folds, the means of other metrics, and of ``epochs``.
        """
        import pandas as pd

        frame = pd.DataFrame(
            {
                _SETTING: number,
                **each["settings"],
                "loss": each["loss"],
                "deviation": each["deviation"],
                **each["metrics"],
                "epochs": each["epochs"],
            }
            for number, each in enumerate(self._search["candidates"])
        )
        return frame.sort_values("loss", kind="stable", ignore_index=True)

    @property
    def fits(self) -> "pd.DataFrame":
        """A row for each candidate and fold, in the order of the fits.

        The candidate's settings, ``fold``, the ``loss`` and the metrics of the rows
        held out, ``train_loss``, ``epochs``, ``rounds``, ``bytes`` of the tables'
        arrays both ways, ``seconds``, and the ``verdict`` on the training.
        """
        import pandas as pd

        listed = self._search["candidates"]
        return pd.DataFrame(
            {
                _SETTING: each["candidate"],
                **listed[each["candidate"]]["settings"],
                "fold": each["fold"],
                "loss": each["loss"],
                **each["metrics"],
                "train_loss": each["train-loss"],
                **{name: each[name] for name in _COSTS},
            }
            for each in self._search["fits"]
        )

    def view(self) -> RenderableType:
        """Return what a console prints of the search."""
        view: RenderableType = resolve_name(VIEW)(self.model.report)
        return view

    def text(self) -> str:
        """Return what the console prints of the search."""
        page = Console(file=StringIO(), width=CONSOLE_WIDTH, highlight=False)
        page.print(self.view())
        return cast(StringIO, page.file).getvalue()

    def plot(self) -> str:
        """Return the losses of the candidates and their range over folds, as SVG."""
        drawing: str = resolve_name(PLOT)(self.model.report)
        return drawing

    def __repr__(self) -> str:
        """Return the best settings, and how many have been tried."""
        fits = len(self._search["fits"])
        tried = len(self._search["candidates"])
        best = self._search["candidates"][self._search["best"]]
        return (
            f"SearchResult: {dict(self.best)} of {tried} candidates in {fits} fits, "
            f"mean loss {best['loss']:.5g}"
        )


_COSTS: Final = ("epochs", "rounds", "bytes", "seconds", "verdict")


def search(
    query: "str | Query",
    sites: Sites,
    grid: Grid | Sequence[Grid],
    *,
    folds: int = FOLDS,
    candidates: int = 0,
    home: FilePath | None = None,
    **settings: Any,
) -> SearchResult:
    """Train candidates for some settings on folds, and the best of them on all rows.

    It is one run: its rows are extracted and joined once, and encoders are fitted once
    for each fold. Every site's ledger counts what leaves in each fit.

    Args:
        query: as for :func:`tp_flower.fit`.
        sites: as for :func:`tp_flower.fit`.
        grid: by setting its values, or a distribution: "log(1e-4, 1)", "uniform(0, 1)",
            "int(3, 63)", or one of scipy.stats. A list of grids has all of each.
        folds: into which the rows are divided that `test_fraction` leaves, by the rule
            of `test_split`: random rows, groups or blocks of a time.
        candidates: how many to try at random; 0 tries the whole grid.
        home: as for :func:`tp_flower.fit`.
        settings: of the run, as for :func:`tp_flower.fit`; those of a candidate win.

    Raises:
        SettingsError: a setting cannot be searched over, or a value is refused.
        TPFlowerError: the query, a table or a site ends the run.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"x": [0.0, 1.0, 2.0, 3.0], "y": [1.0, 3.0, 5.0, 7.0]})
    >>> found = search(
    ...     "SELECT y AS label, x FROM t",
    ...     {"here": {"t": table}},
    ...     {"l2": [1e-6, 1.0]},
    ...     folds=2,
    ...     test_fraction=0.0,
    ... )
    >>> found.best
    {'l2': 1e-06}
    """
    seed = int(settings.get("seed", 0))
    if candidates:
        listed = random_candidates(grid, candidates, seed)
    else:
        listed = grid_candidates(grid)
    model = fit(query, sites, home=home, folds=folds, candidates=listed, **settings)
    return SearchResult(model)
