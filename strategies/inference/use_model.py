"""The ServerApp with a saved model: predict, or evaluate."""

from pathlib import Path

from flwr.serverapp import Grid
from rich.console import RenderableType

from strategies.inference.manifest import resolve
from strategies.inference.predict import Evaluate, Predict
from strategies.inference.report import model_run_dict, model_run_view
from strategies.run.strategy import RoundListener
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.learning.losses import KMEANS
from tp_flower.query import Query
from tp_flower.reports.predictions import PREDICTIONS_FILE, write_predictions
from tp_flower.reports.records import write_json
from tp_flower.settings import Settings
from tp_flower.settings.run import EVALUATE, LABEL_SITE, SERVER

READABLE = 0o644
"""As `report.json` beside it: a file is as readable as its folder."""


def use_model(
    settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> RenderableType:
    """Predict or evaluate, write the report, and return its summary for the console."""
    manifest = resolve(home_folder(), settings.model_name)
    is_evaluation = settings.mode == EVALUATE
    # the user's query, or the one that was trained on
    query = Query.from_sql(
        settings.sql if settings.sql.strip() else manifest.query,
        needs_label=is_evaluation and manifest.loss != KMEANS,
    )
    if is_evaluation:
        evaluation = Evaluate(query, manifest, settings, on_round)
        evaluation.start(grid)
        report = evaluation.report(metrics=evaluation.metrics)
    else:
        prediction = Predict(query, manifest, settings, on_round)
        prediction.start(grid)
        report = prediction.report(predictions=_write(prediction, folder))
    write_json(model_run_dict(report), folder)
    return model_run_view(report)


def _write(strategy: Predict, folder: Path) -> dict[str, object]:
    """Write the predictions, unless sites have, and return where they are."""
    table = strategy.predictions
    if table is None:
        return {"at": LABEL_SITE, "files": strategy.delivered}
    path = folder / PREDICTIONS_FILE
    metadata = {
        "model": str(strategy.manifest.model),
        "query": strategy.query.to_sql(),
        "run": folder.name,
    }
    try:
        write_predictions(table, path, metadata, READABLE)
    except OSError as error:
        raise SettingsError(
            f"the predictions cannot be written to {path}: {error.strerror}"
        ) from error
    return {"at": SERVER, "file": str(path), "columns": table.column_names}
