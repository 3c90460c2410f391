"""What the ServerApp does with a saved model: predict, or evaluate."""

from pathlib import Path

from flwr.serverapp import Grid
from rich.console import RenderableType

from strategies.inference.evaluate import Evaluate
from strategies.inference.manifest import Manifest, resolve
from strategies.inference.predict import Predict
from strategies.inference.report import model_run_dict, model_run_view
from strategies.run.strategy import RoundListener
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.learning.losses import KMEANS
from tp_flower.query import Query
from tp_flower.reports.predictions import PREDICTIONS_FILE, write_predictions
from tp_flower.reports.records import write_json
from tp_flower.settings import EVALUATE, LABEL_SITE, PREDICT, SERVER, Settings

READABLE = 0o644
"""As `report.json` beside it: a file is as readable as its folder."""


def use_model(
    settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> RenderableType:
    """Predict or evaluate, write what was found, and return it for the console.

    Raises:
        ModelError: there is no such model, or its sites are gone.
        TPFlowerError: any other of its kinds; see the strategies.
    """
    manifest = resolve(home_folder(), settings.model_name)
    act = evaluate if settings.mode == EVALUATE else predict
    return act(manifest, settings, on_round, grid, folder)


def predict(
    manifest: Manifest,
    settings: Settings,
    on_round: RoundListener,
    grid: Grid,
    folder: Path,
) -> RenderableType:
    """Write predictions, or have the label table's site write them."""
    query = _query(manifest, settings)
    strategy = Predict(query, manifest, settings, on_round)
    strategy.start(grid)
    table = strategy.predictions
    where: dict[str, object] = {
        "at": LABEL_SITE,
        "files": [dict(vars(own)) for own in strategy.delivered],
    }
    if table is not None:
        path = folder / PREDICTIONS_FILE
        facts = {
            "model": str(manifest.model),
            "query": query.to_sql(),
            "run": folder.name,
        }
        try:
            write_predictions(table, path, facts, READABLE)
        except OSError as error:
            raise SettingsError(
                f"the predictions cannot be written to {path}: {error.strerror}"
            ) from error
        where = {"at": SERVER, "file": str(path), "columns": table.column_names}
    report = strategy.report(predictions=where)
    write_json(model_run_dict(report), folder)
    return model_run_view(report)


def evaluate(
    manifest: Manifest,
    settings: Settings,
    on_round: RoundListener,
    grid: Grid,
    folder: Path,
) -> RenderableType:
    """Write the metrics of a model on labelled rows."""
    strategy = Evaluate(_query(manifest, settings), manifest, settings, on_round)
    strategy.start(grid)
    report = strategy.report(metrics=strategy.metrics)
    write_json(model_run_dict(report), folder)
    return model_run_view(report)


def _query(manifest: Manifest, settings: Settings) -> Query:
    """Return the query of the run: the user's, or the one that was trained on."""
    sql = settings.sql if settings.sql.strip() else manifest.query
    is_labelled = settings.mode != PREDICT and manifest.loss != KMEANS
    return Query.from_sql(sql, needs_label=is_labelled)
