"""Train, explain, predict and evaluate from Python: results are data.

:func:`fit`, :func:`explain` and :func:`moments` take a query and its sites, and return
objects with the content of `report.json`. The command line and the Flower app carry out
their settings by :func:`run`, and print what it returns.

A *home* is a folder with the models of runs (``models/``), their reports (``runs/``)
and what simulated sites keep (``state/``). The server's half and the sites' are loaded
by name when a run begins, because they never import each other.
"""

import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from tp_flower.errors import ModelError, SettingsError, TPFlowerError
from tp_flower.files import home_at, user_home
from tp_flower.methods.method import start_keys, start_model
from tp_flower.model_names import MANIFEST_FILE, MODELS, ModelVersion, find_version
from tp_flower.reports.coefficients import COEFFICIENTS_FILE, coefficients_of
from tp_flower.reports.likelihood import (
    LikelihoodRatio,
    inference_of,
    likelihood_ratio,
)
from tp_flower.reports.moments import METHOD, JoinAnswers
from tp_flower.reports.results import (
    Compared,
    Evaluation,
    Explanation,
    Predictions,
    Result,
)
from tp_flower.settings.run import EVALUATE, EXPLAIN, PREDICT, TRAIN

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from tp_flower.query import Query
    from tp_flower.reports.records import CompletedRun
    from tp_flower.settings import Settings

CLIENT_APP: Final = "client_apps.app:app"
CARRY_OUT: Final = "strategies.app:carry_out"
SIMULATED: Final = "strategies.commands:simulate"
RUN_THROUGH_FLOWER: Final = "strategies.commands:run_through_flower"
READ_REPORT: Final = "strategies.report_page.page:read_report"

STATE: Final = "state"
FAILED: Final = "FAILED: "
OF_ONE_RUN: Final = ("output-dir", "resume", "sql", "tables", "track")
"""Settings of a training that runs with its model do not share."""
ARGUMENTS: Final[Mapping[str, str]] = {
    "sql": "the query is the first argument",
    "mode": "call fit, explain, predict or evaluate",
    "tables": "the sites are the second argument, and may be a tables file",
}
"""Settings that the functions of this module set."""

FilePath: TypeAlias = str | PathLike[str]
Announce: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Federation:
    """A running federation: a connection of Flower's configuration, by its name.

    It is the name that ``flwr run . NAME`` takes; "" is Flower's local simulation,
    which reads the setting ``tables``. Real sites have tables files of their own, and
    keep their parts of a model.
    """

    name: str = ""


Grid: TypeAlias = Any
"""Flower's, which this package does not import."""
Sites: TypeAlias = (
    FilePath | Mapping[str, Mapping[str, Any] | FilePath] | Federation | Grid
)


def fit(
    query: "str | Query", sites: Sites, *, home: FilePath | None = None, **settings: Any
) -> "FittedModel":
    """Train a model on the result of a query, whose tables are at several sites.

    Args:
        query: SQL; the column ``AS label`` is to be predicted, all others are features.
        sites: the tables by their names in the query, by site, as
            ``{"bank": {"customers": frame}}``. A table is a data frame (pandas, polars,
            Arrow), a path, a URI, keys of a tables file, or a list of these, its
            shards. Or: the path of a tables file, a running :class:`Federation`, a Grid
            of Flower, "" for the built-in flights.
        home: folder for the model, its report and the state of simulated sites; None is
            a temporary one, deleted with the last result that needs it.
        settings: of the run, with underscores: ``l2=1e-3``, ``strategy="boost"``,
            ``privacy_labels="laplace"``. By default a fifth of the label table's rows
            is held out; ``progress=True`` prints a line per epoch.

    Returns:
        The model, with its metrics and the report of the run.

    Raises:
        SettingsError: a setting is unknown or refused; it names the closest one.
        TPFlowerError: the query (QueryError, SchemaError), a table or a site ends it.

    >>> import pandas as pd
    >>> orders = pd.DataFrame({"customer": [0, 1, 2, 3], "paid": [1.0, 3.0, 5.0, 7.0]})
    >>> customers = pd.DataFrame({"id": [0, 1, 2, 3], "income": [0.0, 1.0, 2.0, 3.0]})
    >>> model = fit(
    ...     "SELECT o.paid AS label, c.income FROM orders AS o "
    ...     "JOIN customers AS c ON o.customer = c.id",
    ...     {"shop": {"orders": orders}, "bank": {"customers": customers}},
    ...     test_fraction=0.0,
    ...     l2=0.0,
    ... )
    >>> model.predict().frame["prediction"].round(2).to_list()
    [1.0, 3.0, 5.0, 7.0]
    """
    return cast(FittedModel, _run_mode(TRAIN, query, sites, home, settings))


def explain(
    query: "str | Query", sites: Sites, *, home: FilePath | None = None, **settings: Any
) -> Explanation:
    """Explain the training that :func:`fit` would do, by its set-up alone.

    Arguments and errors are those of :func:`fit`; no model is trained. What it returns
    says what is joined, what it would cost, and who would learn what.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": [1.0, 3.0, 5.0]})
    >>> sql = "SELECT y AS label, x FROM t"
    >>> explanation = explain(sql, {"here": {"t": table}}, test_fraction=0.0)
    >>> explanation.report["joined-rows"]
    {'train': 3, 'test': 0}
    """
    return cast(Explanation, _run_mode(EXPLAIN, query, sites, home, settings))


def moments(
    query: "str | Query", sites: Sites, *, home: FilePath | None = None, **settings: Any
) -> JoinAnswers:
    """Train by strategy "moments", and return what the moments answer besides a model.

    Correlations, variance inflation, the R2 of every table alone and of all others,
    principal components. It is a run like any other of the strategy: the second moments
    leave the sites once, which their ledgers note. Arguments and errors are those of
    :func:`fit`.

    >>> import pandas as pd
    >>> orders = pd.DataFrame({"customer": [0, 1, 2, 3], "paid": [1.0, 3.0, 5.0, 7.0]})
    >>> customers = pd.DataFrame({"id": [0, 1, 2, 3], "income": [0.0, 1.0, 2.0, 3.0]})
    >>> answers = moments(
    ...     "SELECT o.paid AS label, c.income FROM orders AS o "
    ...     "JOIN customers AS c ON o.customer = c.id",
    ...     {"shop": {"orders": orders}, "bank": {"customers": customers}},
    ...     test_fraction=0.0,
    ... )
    >>> answers.correlations.round(3).to_dict("records")
    [{'first': 'c.income', 'second': 'label', 'correlation': 1.0}]
    """
    return JoinAnswers(fit(query, sites, home=home, strategy=METHOD, **settings))


def load(folder: FilePath) -> "FittedModel":
    """Return the model that ``save`` has written, or that of a run's folder.

    Args:
        folder: of the saved model, or of a run, as ``~/.tp_flower/runs/NAME``, the
            parts of whose model are looked up in the user's home, ``~/.tp_flower``.

    Raises:
        TPFlowerError: there is no report of a completed training, or no manifest.
    """
    source = Path(folder).expanduser()
    report = resolve_name(READ_REPORT)(source)
    model = report.get("model")
    if report.get("mode") != TRAIN or not model:
        raise ModelError(f"{source} has the report of a run that has saved no model")
    tables = report["settings"].get("tables") or None
    workspace = _Workspace(tables, user_home())
    if (source / MODELS).is_dir():
        # what runs add to the state of the sites does not change the saved model
        workspace = _Workspace.temporary_for(tables)
        for name in (MODELS, STATE):
            if (source / name).is_dir():
                shutil.copytree(source / name, workspace.home / name)
    completed = _completed_run(report, source, model)
    fitted = FittedModel(completed, workspace)
    fitted.manifest  # noqa: B018 - raises if there is none
    return fitted


def run(
    settings: "Settings",
    sites: Sites | None = None,
    *,
    home: FilePath | None = None,
    announce: Announce | None = None,
) -> Result:
    """Carry out the run of some settings, and return its results.

    Args:
        settings: the run's, with its mode and its query.
        sites: see :func:`fit`; None are those of the setting `tables`.
        home: see :func:`fit`; None is the user's, ``~/.tp_flower``.
        announce: is called with the lines that tell of the progress.

    Returns:
        An :class:`Explanation`, a :class:`FittedModel`, :class:`Predictions` or an
        :class:`Evaluation`, by the mode; of a scorer a :class:`Result`.
    """
    named = settings.tables if sites is None else sites
    folder = user_home() if home is None else _absolute(home)
    return _carry_out(settings, _Workspace(named, folder), announce or _ignore)


def print_line(line: str) -> None:
    """Print a line that tells of the progress of a run."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class FittedModel(Compared):
    """A model that was trained on the result of a query.

    Its sites keep their parts. In a simulation these are in the home of the run, and
    ``save`` copies them.
    """

    def __init__(self, completed: "CompletedRun", workspace: "_Workspace") -> None:
        super().__init__(completed, workspace)
        self._workspace = workspace

    @property
    def name(self) -> str:
        """Name and version of the model, ``name@version``.

        Raises:
            ModelError: the run has described its rows, and saved none.
        """
        if not self._completed.model:
            raise ModelError("the run describes joined rows, and has saved no model")
        return self._completed.model

    @property
    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """The metrics of the rows for training ("train") and held out ("test")."""
        metrics: Mapping[str, Mapping[str, float]] = self.report["final"]
        return metrics

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The server's description of the model: loss, query, tables, parts."""
        return _read_manifest(self._workspace.home, self.name)

    @property
    def coefficients(self) -> "pd.DataFrame":
        """The coefficients of the encoded features, a row each.

        Its columns are ``table``, ``column``, ``output`` (if there are several), and
        ``coefficient``, of boosted trees ``gain``. That of a standardised number is per
        standard deviation. Tables whose policies hide their coefficients have no rows.
        With standard errors, those of several classes are differences from the first.
        A regression by strategy "moments" without l1 adds ``standard_error``, ``t``,
        ``p``, and ``low`` and ``high``, the ends of the interval of 95 %. With noise
        ``t`` is ``z``, and all are those of ``unshrunk``; ``noise`` is the deviation
        that noise alone gives the coefficient.

        Raises:
            ModelError: there are none; it says which setting or policy hides them.
        """
        return coefficients_of(self.report)

    @property
    def inflation(self) -> "pd.DataFrame":
        """The generalised variance inflation of each ``feature`` (Fox, Monette 1992).

        Of a model with standard errors, as ``car::vif`` has it in R: ``columns`` are
        the degrees of freedom, ``factor`` is the usual VIF of a single column,
        ``scaled`` the widening of one standard error. None: other features determine
        it.

        Raises:
            ModelError: the model has no standard errors, and why.
        """
        import pandas as pd

        return pd.DataFrame(inference_of(self.report)["inflation"])

    def summary(self) -> str:
        """Return the model as statisticians print one: its coefficients, and so on.

        With standard errors also Wald's tests and variance inflation of the features,
        and the differences of categories from the first one.

        Raises:
            ModelError: there are no coefficients; it says what hides them.
        """
        from tp_flower.reports.summary import summary

        return summary(self.report)

    def likelihood_ratio(self, smaller: "FittedModel") -> LikelihoodRatio:
        """Test whether this model needs the columns that a smaller one does not have.

        Both are trained on the same rows, with standard errors and without ``l2``. It
        is R's ``anova(smaller, larger, test = "LRT")``, or "F" where the dispersion is
        estimated.

        Raises:
            ModelError: the likelihoods of the two cannot be compared, and why.
        """
        return likelihood_ratio(smaller.report, self.report)

    def predict(
        self, sites: Sites | None = None, query: "str | Query" = "", **settings: Any
    ) -> Predictions:
        """Predict the rows of a query.

        Args:
            sites: with other rows, if wanted; None are those of the training.
            query: with other filters, if wanted; "" is that of the training. It needs
                no label.
            settings: that differ from the training's, ``row_key="o.id"`` for instance.

        Raises:
            ModelError: the parts of the model are not at these sites.
            TPFlowerError: the query, a table or a site ends the run.
        """
        return cast(Predictions, self._use(PREDICT, sites, query, settings))

    def evaluate(
        self, sites: Sites | None = None, query: "str | Query" = "", **settings: Any
    ) -> Evaluation:
        """Measure the model on the rows of a query, which has a label.

        Arguments and errors are those of :meth:`predict`. Nothing is held out: rows
        that the model was trained on count as others do.
        """
        return cast(Evaluation, self._use(EVALUATE, sites, query, settings))

    def save(self, folder: FilePath) -> Path:
        """Write report, manifest and, in a simulation, the sites' parts of the model.

        Rows are not written: :func:`load` returns a model that is told its sites. The
        parts of real sites stay there, and the loaded model predicts at these sites
        alone.

        Raises:
            ModelError: the folder is not empty, or cannot be written.
        """
        target = _absolute(folder)
        models = _lineage(self._workspace.home, self.name)
        try:
            target.mkdir(parents=True, exist_ok=True)
            if any(target.iterdir()):
                raise ModelError(f"{target} is not empty: choose another folder")
            for pattern in ("report.*", COEFFICIENTS_FILE):
                for file in self.folder.glob(pattern):
                    shutil.copy(file, target)
            for model in models:
                for part in (Path(), Path(STATE)):
                    source = model.folder(self._workspace.home / part)
                    if source.is_dir():
                        shutil.copytree(source, model.folder(target / part))
        except OSError as error:
            raise ModelError(f"{target} cannot be written: {error.strerror}") from None
        return target

    def export(self, path: FilePath, *, onnx: bool = False) -> Path:
        """Write one zip file that predicts without this package, and return its path.

        ``python MODEL.zip predict ALIAS=FILE ... --out predictions.csv`` needs numpy
        and DuckDB alone. In a simulation the file has the parts of all sites; of real
        sites none: each exports its own, by ``tp-flower export --state-dir``. With
        ``onnx``, each part has an ONNX graph besides.

        Raises:
            ModelError: the model cannot be exported, and why; or there is a file.
        """
        from tp_flower.export.model import export_model

        home = self._workspace.home
        state = home / STATE if self._has_parts else None
        return export_model(home, self.name, _absolute(path), state, with_onnx=onnx)

    def __reduce__(self) -> tuple[Callable[..., "FittedModel"], tuple[Any, ...]]:
        """Return the files that save writes, for pickle: the copy has no sites."""
        with tempfile.TemporaryDirectory() as folder:
            saved = self.save(Path(folder) / MODELS)
            files = {
                file.relative_to(saved): file.read_bytes()
                for file in saved.rglob("*")
                if file.is_file()
            }
        return _unpickled, (files,)

    def view(self, *, full: bool = False) -> "RenderableType":
        """Return what a console prints of the results."""
        from rich.console import Group
        from rich.text import Text

        if not self._completed.model:
            return super().view(full=full)
        return Group(super().view(full=full), Text(f"Model: {self.name}"))

    def _use(
        self,
        mode: str,
        sites: Sites | None,
        query: "str | Query",
        keywords: Mapping[str, object],
    ) -> Result:
        """Return the result of a mode that reads the saved model."""
        workspace = self._workspace
        if sites is not None:
            workspace = replace(workspace, sites=sites)
        if workspace.sites is None:
            raise SettingsError(
                "sites: no rows are saved with a model; name the sites, as in fit"
            )
        self._check_parts(workspace.sites)
        settings = self.report["settings"]
        config = {
            key: settings[key]
            for key in settings
            if key not in (*OF_ONE_RUN, *start_keys())
        }
        config["model-name"] = self._requested_name(workspace.sites)
        values = _read_settings(mode, query, workspace.sites, keywords, config)
        return _carry_out(values, workspace, _announce_of(values))

    def _check_parts(self, sites: Sites) -> None:
        """Refuse simulated sites that have no parts of the model."""
        if isinstance(sites, Federation) or _is_grid(sites) or self._has_parts:
            return
        raise ModelError(
            f"the parts of model {self.name} are not here: they stay at the sites that "
            "were trained, a Federation or a Grid. Predict there"
        )

    @property
    def _has_parts(self) -> bool:
        state = self._workspace.home / STATE
        return ModelVersion.parse(self.name).folder(state).is_dir()

    def _requested_name(self, sites: Sites) -> str:
        """Return the name for a run that uses the model.

        Sites allow the one name that a run proposes; a model that adds to the scores of
        another version is requested without a version, which both then have.
        """
        if isinstance(sites, Federation):
            # the manifest is at the SuperLink
            return self.name
        model, *others = _lineage(self._workspace.home, self.name)
        is_latest = find_version(self._workspace.home, model.name) == model
        return model.name if others and is_latest else self.name

    def _next_line(self) -> str:
        if not self._completed.model:
            return self.hint
        if not self._has_parts:
            return f"{self.name}, whose parts stay at its sites"
        if self._workspace.temporary is None:
            return f"{self.name}, in {self._workspace.home}"
        return f"{self.name}, deleted with this object: save(folder) copies it"


RESULTS: Final[Mapping[str, type[Result]]] = {
    TRAIN: FittedModel,
    EXPLAIN: Explanation,
    PREDICT: Predictions,
    EVALUATE: Evaluation,
}


@dataclass(frozen=True)
class _Workspace:
    """The sites of a run, and the home of its model, report and simulated state.

    Attributes:
        sites: None if nobody has named any.
        temporary: a home that is deleted with the last result that refers to it.
    """

    sites: Sites | None
    home: Path
    temporary: "_TemporaryFolder | None" = None

    @classmethod
    def temporary_for(cls, sites: Sites | None) -> "_Workspace":
        """Return a workspace with a temporary home."""
        folder = _TemporaryFolder()
        return cls(sites, folder.path, folder)


class _TemporaryFolder:
    """A folder that is deleted with the last object that refers to this one."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tp-flower-")).resolve()
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _unpickled(files: Mapping[Path, bytes]) -> FittedModel:
    """Return the model of the files that save has written, by relative path."""
    folder = Path(tempfile.mkdtemp(prefix="tp-flower-"))
    for path, content in files.items():
        (folder / path.parent).mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    model = load(folder)
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def _run_mode(
    mode: str,
    query: "str | Query",
    sites: Sites,
    home: FilePath | None,
    keywords: Mapping[str, object],
) -> Result:
    """Run a mode on sites; an error keeps no notes on a temporary home."""
    settings = _read_settings(mode, query, sites, keywords, {})
    if isinstance(sites, Federation):
        if home is not None:
            raise SettingsError("home: the sites and the SuperLink have homes already")
        workspace = _Workspace(sites, user_home())
    elif home is None:
        workspace = _Workspace.temporary_for(sites)
    else:
        workspace = _Workspace(sites, _absolute(home))
    try:
        return _carry_out(settings, workspace, _announce_of(settings))
    except BaseException as error:
        if workspace.temporary is not None:
            # the checkpoint and the trace that notes speak of are deleted
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if str(workspace.home) not in note]
        raise


def _read_settings(
    mode: str,
    query: "str | Query",
    sites: Sites,
    keywords: Mapping[str, object],
    config: Mapping[str, object],
) -> "Settings":
    """Return the settings of keyword arguments, over those of a config."""
    from tp_flower.settings import Settings
    from tp_flower.settings.run_config import config_of_keywords

    for name in ARGUMENTS.keys() & keywords.keys():
        # Flower's local simulation reads them
        if name != "tables" or not isinstance(sites, Federation):
            raise SettingsError(f"{name}: {ARGUMENTS[name]}")
    values = {"progress": False, **config, **config_of_keywords(keywords), "mode": mode}
    values["sql"] = query if isinstance(query, str) else query.to_sql()
    if isinstance(sites, str | PathLike):
        values["tables"] = _tables_file(sites)
    elif not (isinstance(sites, Federation | Mapping) or _is_grid(sites)):
        raise SettingsError(
            "sites: expected the path of a tables file, a dictionary of site to "
            f"tables, a Federation or a Grid, not {type(sites).__name__}"
        )
    return Settings.from_run_config(values)


def _tables_file(path: FilePath) -> str:
    """Return the absolute path of a tables file; "" for the built-in flights."""
    if str(path) == "":
        return ""
    file = _absolute(path)
    if not file.is_file():
        raise SettingsError(
            f"sites: there is no tables file {file}; a running federation is "
            f"Federation({str(path)!r})"
        )
    return str(file)


def _carry_out(
    settings: "Settings", workspace: _Workspace, announce: Announce
) -> Result:
    """Return the result of a run, in this process or through Flower."""
    sites = workspace.sites
    if isinstance(sites, Federation):
        completed = _run_through_flower(settings, sites, announce)
    else:
        with home_at(workspace.home), _open_grid(sites, settings) as grid:
            completed = resolve_name(CARRY_OUT)(grid, settings, announce)
    return RESULTS.get(settings.mode, Result)(completed, workspace)


def _open_grid(sites: Any, settings: "Settings") -> AbstractContextManager[Any]:
    """Return the Grid of sites, which simulated ones need for this run alone."""
    if _is_grid(sites):
        return nullcontext(sites)
    tables = sites if isinstance(sites, Mapping) else None
    simulated: AbstractContextManager[Any] = resolve_name(SIMULATED)(
        resolve_name(CLIENT_APP), settings, tables
    )
    return simulated


def _run_through_flower(
    settings: "Settings", federation: Federation, announce: Announce
) -> "CompletedRun":
    """Run in a federation; read the results that the server has written."""
    reasons: list[str] = []

    def listen(line: str) -> None:
        if FAILED in line:
            reasons.append(line.partition(FAILED)[2])
        announce(line)

    file = resolve_name(RUN_THROUGH_FLOWER)(settings, federation.name, listen)
    if file is None:
        reason = "progress=True prints what Flower says"
        if reasons:
            reason = reasons[-1]
        raise TPFlowerError(f"the run has failed: {reason}")
    if not file.is_file():
        raise TPFlowerError(
            f"the run has completed, and {file} is at the SuperLink: copy its folder, "
            "and load(folder)"
        )
    report = resolve_name(READ_REPORT)(file.parent)
    return _completed_run(report, file.parent, report.get("model") or "")


def _completed_run(
    report: Mapping[str, Any], folder: Path, model: str
) -> "CompletedRun":
    """Return the results of a run that has ended, from its folder."""
    from tp_flower.reports.records import CompletedRun

    predictions = None
    if (report.get("predictions") or {}).get("file"):
        import pyarrow.parquet as pq

        from tp_flower.reports.predictions import PREDICTIONS_FILE

        predictions = pq.read_table(folder / PREDICTIONS_FILE)
    return CompletedRun(report, folder, model=model, predictions=predictions)


def _lineage(home: Path, name: str) -> list[ModelVersion]:
    """Return a model and those whose scores it adds to, from its manifest."""
    models = []
    while name:
        models.append(ModelVersion.parse(name))
        name = start_model(_read_manifest(home, name)["settings"])
    return models


def _read_manifest(home: Path, name: str) -> Mapping[str, Any]:
    """Return the saved model's part of its manifest; ModelError if there is none."""
    path = ModelVersion.parse(name).folder(home) / MANIFEST_FILE
    try:
        manifest: Mapping[str, Any] = json.loads(path.read_bytes())["model"]
    except FileNotFoundError:
        raise ModelError(
            f"the manifest of model {name} is not in {home}: it is in the home of "
            "whoever trained it, ~/.tp_flower of the SuperLink's machine"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    return manifest


def _absolute(path: FilePath) -> Path:
    return Path(path).expanduser().absolute()


def _is_grid(sites: object) -> bool:
    return hasattr(sites, "push_messages")


def _announce_of(settings: "Settings") -> Announce:
    return print_line if settings.progress else _ignore


def _ignore(_: str) -> None:
    pass
