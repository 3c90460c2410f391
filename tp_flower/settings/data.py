"""Settings of the training set: the query, its tables, its rows and their features."""

import re
from dataclasses import dataclass
from typing import Final

from tp_flower.features.choice import (
    KEY_PREFIX,
    entries_problem,
    parse_entries,
    render_entries,
)
from tp_flower.features.choice import Entry as EncoderEntry
from tp_flower.methods import ADMM, CORESET, SGD
from tp_flower.settings.allowed import ListOf, OneOf, Range, Text
from tp_flower.settings.declare import Readers, of_families, setting
from tp_flower.settings.run import AUTO

REGRESSION: Final = "regression"
CLASSIFICATION: Final = "classification"
JOINED: Final = "joined"
MAX_JOINED_ROWS: Final = 200_000_000
ENCODER_PREFIX: Final = KEY_PREFIX
_ENTITY: Final = re.compile(r"entity(?:\(\s*([^()]+?)\s*\))?")


def entity_named(text: str) -> str | None:
    """Return the entity of the setting `row-weight`: an alias, "" for the label table.

    None is every joined row for itself.

    Raises:
        ValueError: it is no such setting.

    >>> entity_named("joined"), entity_named("entity"), entity_named("entity(c)")
    (None, '', 'c')
    """
    if text == JOINED:
        return None
    match = _ENTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not one of "joined", "entity", "entity(ALIAS)"')
    return match[1] or ""


def _row_weight_problem(text: str) -> str | None:
    try:
        entity_named(text)
    except ValueError as error:
        return str(error)
    return None


def _parse_encoders(value: object) -> object:
    return parse_entries(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class DataSettings:
    """The training set: the query, its tables, its rows and their features."""

    sql: str = setting(
        "",
        "The training set: SELECT <label> AS label, <features> FROM ... JOIN ... ON "
        '... WHERE ... "" = the built-in flights query.',
    )
    task: str = setting(
        AUTO,
        '"regression", "classification", or "auto": decided from the label.',
        OneOf((AUTO, REGRESSION, CLASSIFICATION)),
    )
    tables: str = setting(
        "",
        'Absolute path of a tables file (TOML) that says where the tables are. "" = '
        "the built-in flights federation. A SuperNode's own "
        '--node-config tables="..." wins.',
    )
    max_joined_rows: int = setting(
        MAX_JOINED_ROWS,
        "A join of more rows than this is refused before it is built.",
        Range(1),
    )
    test_fraction: float = setting(
        0.2,
        "Share of the label table's rows held out for testing, below 1; 0 = none.",
        Range(0, 1),
    )
    row_weight: str = setting(
        JOINED,
        'Weight of a joined row: "joined" (1), "entity" (a row of the label table '
        'counts once, however often it is joined), or "entity(c)": a row of table c '
        "does. A query may select `<expression> AS weight` besides.",
        Text('"joined", "entity", "entity(ALIAS)"', _row_weight_problem),
        Readers(
            of_families(ADMM, SGD, CORESET),
            refusal="{value!r} is of joined rows; strategy {strategy!r} has none: "
            f"leave it {JOINED!r}",
        ),
    )
    max_categories: int = setting(
        256,
        'Categories kept per categorical column; the rarest share "(other)".',
        Range(2),
    )
    encoders: tuple[EncoderEntry, ...] = setting(
        (),
        "Encoders other than the defaults: "
        '"flights.month=cyclic(12); planes.model=one-hot(20) indicator". Those that '
        "take no statistics (range, categories, hash, cyclic) disclose nothing of any "
        'row: "flights.distance=range(0, 5000)". A table is named by its alias; '
        'README, "Your data", lists the encoders.',
        ListOf(
            "<table>.<column>=<encoder>; ...",
            entries_problem,
            _parse_encoders,
            render_entries,
        ),
    )
