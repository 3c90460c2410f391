"""The model card of an export: what a model is for, and what it was measured on.

Reference:
    Mitchell et al., Model cards for model reporting, 2019.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from strategies.inference.manifest import Manifest, ModelTable
from tp_flower.protocol.fields import CLEAR
from tp_flower.reports.console import format_count

SPLIT: Final = (
    "test-split",
    "test-fraction",
    "validation-fraction",
    "validation-split",
    "sample",
    "seed",
)
"""Settings that say which rows were held out."""
PRIVACY: Final[Mapping[str, Sequence[str]]] = {
    "privacy.labels": ("privacy.label-epsilon",),
    "privacy.features": ("privacy.epsilon", "privacy.delta"),
    "privacy.scores": (),
    "privacy.unions": (),
}
"""Settings of privacy, and those that matter where one of them is not in the clear."""
LIMITS: Final = """\
- The runner casts every column to the type that it had in training, and refuses values
  that are none of it. A CSV file has a point in its decimals; its other columns may be
  anything. Whatever a tables file said of a source (renamed columns, types of texts)
  must hold of the rows that are given.
- A category that training has not seen, a missing value and a constant feature are what
  the encoders make of them; an effect of a key that training has not seen is 0.
- Rows are not drawn by a privacy unit, and no policy, mask or noise of a prediction
  applies: whoever has the archive has the model. Its categories are hashed under a key
  that is in the archive, so that guesses of them can be tested.
- What `score` writes has the join keys in the clear: it is for whoever may have them.
- Joined rows come in the order of the rows of the label's table. Those of a sub-query
  with groups or windows have no order of their own.
- Nothing tells whether new rows are like those of the training: measure before use.
"""


def model_card(manifest: Manifest, parts: Sequence[str]) -> str:
    """Return the model card, in Markdown, of a model with parts of these names."""
    sections = (
        ("Use", _use(manifest, parts)),
        ("Data", _data(manifest)),
        ("Split", _settings(manifest, SPLIT)),
        ("Metrics", _metrics(manifest)),
        ("Privacy", _privacy(manifest)),
        ("Limits", [LIMITS.rstrip()]),
    )
    lines = [f"# Model {manifest.model}", ""]
    for title, content in sections:
        lines += [f"## {title}", "", *content, ""]
    return "\n".join(lines)


def _use(manifest: Manifest, parts: Sequence[str]) -> Iterator[str]:
    """Yield what the model predicts, and how."""
    predicted = f"`{manifest.label}`" if manifest.label else "clusters of the rows"
    classes = f" Classes: {', '.join(manifest.classes)}." if manifest.classes else ""
    yield (
        f"Predicts {predicted}, by the loss {manifest.loss}.{classes} Trained "
        f"{manifest.created}, by strategy {manifest.settings.get('strategy', '')}."
    )
    yield ""
    yield "```sql"
    yield manifest.query
    yield "```"
    yield ""
    tables = " ".join(f"{name}=FILE" for name in parts)
    yield f"`python MODEL.zip predict {tables} --out predictions.csv`"


def _data(manifest: Manifest) -> Iterator[str]:
    """Yield the tables, with their sites and features."""
    yield f"{format_count(manifest.joined_rows)} joined rows were trained on."
    yield ""
    yield "| table | sites | model | features | share of the scores' variance |"
    yield "|---|---|---|---|---|"
    for table in manifest.tables:
        yield _table_row(table)


def _table_row(table: ModelTable) -> str:
    sites = ", ".join(dict.fromkeys(part.site for part in table.parts))
    features = ", ".join(text.replace("|", "\\|") for text in table.features) or "none"
    share = "" if table.share is None else f"{table.share:.1%}"
    names = f"{table.name} as {table.table}"
    return f"| {names} | {sites} | {table.kind} | {features} | {share} |"


def _metrics(manifest: Manifest) -> Iterator[str]:
    """Yield the metrics of the rows for training, and of those held out."""
    names = list(dict.fromkeys((*manifest.train, *manifest.test)))
    yield "| metric | training rows | held out |"
    yield "|---|---|---|"
    for name in names:
        values = (_number(rows.get(name)) for rows in (manifest.train, manifest.test))
        yield f"| {name} | {' | '.join(values)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _privacy(manifest: Manifest) -> Iterator[str]:
    """Yield the settings of privacy; report.json has what they cost, and who learns."""
    for name, details in PRIVACY.items():
        yield from _settings(manifest, (name,))
        if manifest.settings.get(name) != CLEAR:
            yield from _settings(manifest, details)
    yield ""
    yield (
        "report.json of the training says what each party has learned, and adds up the "
        "epsilons."
    )


def _settings(manifest: Manifest, names: Sequence[str]) -> Iterator[str]:
    """Yield settings of the run that have values."""
    settings: Mapping[str, object] = manifest.settings
    for name in names:
        if (value := settings.get(name)) not in (None, ""):
            yield f"- `{name}` = {value}"
