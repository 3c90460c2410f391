"""Settings of a search: candidates for other settings, and the folds that judge them.

A candidate replaces some settings of training. Each is trained on every fold of the
rows (:mod:`tp_flower.folds`), and the one of the lowest mean loss on the rows held out
trains the model of the run. Which fits a run makes, and in which order, follows from
its settings: sites count them (:class:`PlannedFit`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tp_flower.folds import MOST_FOLDS
from tp_flower.methods.method import METHODS, Method
from tp_flower.settings.declare import (
    Form,
    Readers,
    UnusableSettingsError,
    setting,
)
from tp_flower.settings.rules import names_of, rules_of
from tp_flower.settings.run import EXPLAIN, TRAIN
from tp_flower.settings.training import LocalSettings, ModelSettings
from tp_flower.splits import GROUP

if TYPE_CHECKING:
    from tp_flower.settings.settings import Settings

Candidate = tuple[tuple[str, Any], ...]
"""The settings that a candidate replaces, by key, with their values."""

MOST_CANDIDATES: Final = 1000
_PLAIN: Final = (str, bool, int, float)
_FURTHER: Final = frozenset({"strategy", "patience"})
_OF_THE_ROWS: Final = frozenset({"loss", "bins"})
"""Settings of training that ask something else of the rows, or of their sites."""


def read_candidates(value: object) -> tuple[Candidate, ...]:
    """Return the candidates of a JSON list of objects, or of such a list itself.

    >>> read_candidates('[{"l2": 0.1}, {"num_epochs": 3}]')
    ((('l2', 0.1),), (('num-epochs', 3),))
    """
    items: Any = value
    if isinstance(value, str):
        try:
            items = json.loads(value) if value.strip() else []
        except ValueError:
            items = None
    if not isinstance(items, list | tuple) or len(items) > MOST_CANDIDATES:
        raise ValueError(f"{value!r} is not {_FORM}")
    candidates = tuple(map(_read_candidate, items))
    if len(set(candidates)) < len(candidates):
        raise ValueError("two candidates are the same")
    return candidates


def _read_candidate(item: Any) -> Candidate:
    try:
        pairs = dict(item).items()
        candidate = tuple((str(k).replace("_", "-"), value) for k, value in pairs)
    except (TypeError, ValueError):
        candidate = (("", None),)
    if any(type(value) not in _PLAIN for _, value in candidate):
        raise ValueError(f"{item!r} has no settings with plain values")
    return tuple(sorted(candidate))


def render_candidates(candidates: tuple[Candidate, ...]) -> str:
    """Return the text that :func:`read_candidates` reads back; "" for none."""
    return json.dumps(list(map(dict, candidates))) if candidates else ""


_FORM: Final = (
    f"a JSON list of at most {MOST_CANDIDATES} objects of settings and their values"
)


def _folds(value: Any) -> int:
    if value == 0 or 2 <= value <= MOST_FOLDS:
        return int(value)
    raise ValueError(f"{value!r} is not {_FOLDS}")


_FOLDS: Final = f"0, or from 2 to {MOST_FOLDS}"


@dataclass(frozen=True)
class SearchSettings:
    """The search: settings that are tried, and the folds that decide."""

    folds: int = setting(
        0,
        "Folds of the rows that are not for testing, each held out once: the settings, "
        "or each of the `candidates`, are trained on the others, and the best of them "
        "trains the model. Folds are made as `test-split` says. 0 = no search.",
        Form(_FOLDS, _folds, lambda value: value),
        Readers(modes=(TRAIN, EXPLAIN)),
    )
    candidates: tuple[Candidate, ...] = setting(
        (),
        "Settings to try in a search, a JSON list: "
        """'[{"l2": 0.1}, {"l2": 1.0, "num-epochs": 5}]'. """
        "`tp-flower tune` makes it of a grid.",
        Form(_FORM, read_candidates, render_candidates),
        Readers(modes=(TRAIN, EXPLAIN)),
    )


@dataclass(frozen=True)
class PlannedFit:
    """One of the trainings of a search.

    Attributes:
        fold: that is held out; None where the best candidate is trained on all.
        candidate: its position; None where the folds will have decided.
    """

    fold: int | None
    candidate: int | None


def fits_of(settings: "Settings") -> list[PlannedFit]:
    """Return the fits of a search in their order: fold by fold, then the last one.

    >>> from tp_flower.settings import Settings
    >>> two = Settings(folds=2, candidates='[{"l2": 0.1}, {"l2": 1.0}]')
    >>> [(fit.fold, fit.candidate) for fit in fits_of(two)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (None, None)]
    """
    count = len(candidates_of(settings))
    fits = [
        PlannedFit(fold, candidate)
        for fold in range(settings.folds)
        for candidate in range(count)
    ]
    return [*fits, PlannedFit(None, None)]


def candidates_of(settings: "Settings") -> tuple[Candidate, ...]:
    """Return the candidates of a search; without any, the settings as they are."""
    return settings.candidates or ((),)


def with_candidate(settings: "Settings", candidate: Candidate) -> "Settings":
    """Return the settings of a candidate's fits: its own in place of the search's."""
    return settings.with_fields(
        candidates=(), **{key.replace("-", "_"): value for key, value in candidate}
    )


def searched_fields() -> frozenset[str]:
    """Return the fields of the settings that candidates may replace.

    They are those of training that ask nothing else of a query, its rows and labels.
    """
    groups = [LocalSettings, ModelSettings]
    methods = filter(trains_on_folds, METHODS.values())
    groups += [group for method in methods for group in rules_of(method).groups]
    return (names_of(*groups) | _FURTHER) - _OF_THE_ROWS


def trains_on_folds(method: Method) -> bool:
    """Return whether a method trains, at the sites, on some of the joined rows."""
    return (
        method.joins and method.is_prepared and method.holds_out and not method.solvers
    )


def search_conflicts(values: "Settings") -> Iterator[str]:
    """Yield why settings cannot be searched over."""
    if not values.folds:
        if values.candidates:
            yield "candidates: they are tried on folds of the rows: set folds"
        return
    yield from _conflicts_of_fit(values)
    fields_by_key = {name.replace("_", "-") for name in searched_fields()}
    shares = set()
    for candidate in values.candidates:
        named = json.dumps(dict(candidate))
        if unknown := [key for key, _ in candidate if key not in fields_by_key]:
            yield (
                f"candidates: {unknown[0]} is not a setting that a search tries: it "
                f"tries {', '.join(sorted(fields_by_key))}"
            )
            continue
        try:
            settings = with_candidate(values, candidate)
        except UnusableSettingsError as error:
            yield f"candidates: {named}: {'; '.join(error.problems)}"
            continue
        shares.add(settings.validation_share)
    if values.split.kind == GROUP and len(shares | {values.validation_share}) > 1:
        yield (
            "candidates: some validate on another share of the groups than others, "
            "which the groups' site decides once: set validation-fraction"
        )


def _conflicts_of_fit(values: "Settings") -> Iterator[str]:
    """Yield why a run with these settings cannot be one of several fits."""
    method = values.method
    name = values.method_name
    if not trains_on_folds(method):
        yield f"folds: strategy {name!r} does not train on folds of joined rows"
    for kind in values.privacy.covered("features", "predictions"):
        yield (
            f"folds: a search does not go with privacy.{kind}, whose epsilon is of one "
            "training: fit each candidate, or leave the noise out"
        )
    if values.training_sample:
        yield "folds: a search trains on all rows of a fold: leave coreset-size 0"
    if values.start:
        yield "folds: a search does not start from a saved model: leave it out"
    if values.most_bins:
        yield "folds: bin numbers of rows leave once, not for each fit: leave bins out"
