"""What second moments of joined rows answer, as data frames."""

from io import StringIO
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, cast

from rich.console import Console, RenderableType

from tp_flower.errors import SettingsError
from tp_flower.reports.results import CONSOLE_WIDTH, PAGE, Result

if TYPE_CHECKING:
    import pandas as pd

METHOD: Final = "moments"


class JoinAnswers:
    """What the second moments of the joined training rows answer.

    A column is named ``table.feature``, with a number in brackets where the feature has
    several; those of the label are ``label``, or ``label = class``.

    Attributes:
        model: that was trained on them, with its report.
    """

    def __init__(self, model: Result) -> None:
        self.model = model
        if not model.report.get(METHOD):
            raise SettingsError(
                "moments-to: the label's site has read the moments, and the report has "
                "no answer of theirs: set moments-to = 'server'"
            )
        self._answers: dict[str, Any] = model.report[METHOD]

    @property
    def correlations(self) -> "pd.DataFrame":
        """``first``, ``second``, ``correlation``, the strongest first.

        Of columns of two features, or of the label; of more than 63 columns the 2,000
        strongest.
        """
        import pandas as pd

        return pd.DataFrame(self._answers["correlations"])

    @property
    def inflation(self) -> "pd.DataFrame":
        """The generalised variance inflation of each ``feature`` (Fox, Monette 1992).

        ``columns`` are its degrees of freedom, ``factor`` is the usual VIF of a single
        column, ``scaled`` the widening of one standard error. None: other features
        determine it.
        """
        import pandas as pd

        return pd.DataFrame(self._answers["inflation"])

    @property
    def tables(self) -> "pd.DataFrame":
        """The R2 of each ``table`` alone and of all others, ``alone_train`` and so on.

        A table without which R2 stays the same could be left out of the query.
        """
        import pandas as pd

        return pd.DataFrame(
            {"table": each["table"]}
            | {
                f"{which}_{rows}": r2
                for which in ("alone", "without")
                for rows, r2 in each[which].items()
            }
            for each in self._answers["tables"]
        )

    @property
    def components(self) -> "pd.DataFrame":
        """The first principal components of the standardised columns, a row each.

        ``share`` is that of the variance, the others are loadings by column.
        """
        import pandas as pd

        return pd.DataFrame(
            {"share": each["share"], **each["loadings"]}
            for each in self._answers["components"]
        )

    @property
    def path(self) -> "pd.DataFrame":
        """The losses of least squares under penalties, the strongest first."""
        import pandas as pd

        return pd.DataFrame(self._answers["path"])

    def view(self) -> RenderableType:
        """Return what a console prints of the answers."""
        view: RenderableType = resolve_name(f"{PAGE}:method_view")(
            self.model.report, METHOD
        )
        return view

    def text(self) -> str:
        """Return what the console prints of the answers."""
        page = Console(file=StringIO(), width=CONSOLE_WIDTH, highlight=False)
        page.print(self.view())
        return cast(StringIO, page.file).getvalue()
