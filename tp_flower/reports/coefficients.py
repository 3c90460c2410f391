"""The coefficients of a trained model as a data frame, and as the file of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tp_flower.errors import ModelError
from tp_flower.reports.records import write_whole

if TYPE_CHECKING:
    import pandas as pd

COEFFICIENTS_FILE: Final = "coefficients.csv"


def coefficients_of(report: Mapping[str, Any]) -> "pd.DataFrame":
    """Return the coefficients that a report shows, a row each.

    Raises:
        ModelError: it shows none; which setting or policy hides them.
    """
    import pandas as pd

    rows = [
        {"table": table, "column": entry["feature"], **entry}
        for table, entries in (report.get("coefficients") or {}).items()
        for entry in entries
    ]
    if not rows:
        raise ModelError(_why_none(report))
    frame = pd.DataFrame(rows).drop(columns="feature")
    frame = frame.rename(columns={"value": "coefficient"})
    frame.columns = frame.columns.str.replace("-", "_")
    outputs = set(frame["output"])
    if outputs == {"gain"}:
        frame = frame.rename(columns={"coefficient": "gain"})
    if len(outputs) == 1:
        frame = frame.drop(columns="output")
    return frame


def write_coefficients(report: Mapping[str, Any], folder: Path) -> None:
    """Write the coefficients beside the report that shows them, if it shows any."""
    if any((report.get("coefficients") or {}).values()):
        text = coefficients_of(report).to_csv(index=False)
        write_whole(folder / COEFFICIENTS_FILE, text)


def _why_none(report: Mapping[str, Any]) -> str:
    """Return why the model has no coefficients to show."""
    from tp_flower.settings import Settings

    settings = Settings.from_run_config(report["settings"])
    if model := settings.other_model:
        return f"model {model!r} has no coefficients: linear and boosted models do"
    if "validation_fraction" not in settings.rules.reads:
        return (
            f"strategy {settings.method_name!r} reports no coefficients: cg, admm, "
            "sgd and boost do"
        )
    tables = ", ".join(repr(table["table"]) for table in report["tables"])
    return (
        f"the policies of tables {tables} hide their coefficients: coefficients = "
        "true in the policy of a table shows them"
    )
