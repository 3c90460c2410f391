"""Set-up where every site gets a model of its own: labels and rows stay at the sites.

``extract`` brings the number of rows and the classes there are, ``statistics`` what the
encoders need, which all sites share, and ``personalise`` sends encoders and the split,
and brings sums of labels, from which the base score is made.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from strategies.run.exchange import Part, Replies, Request, ask
from strategies.run.replies import refuse
from strategies.run.sites import Inventory
from strategies.setup.disclosures import audience_of
from strategies.setup.extract import Extracted, extract
from strategies.setup.joined_rows import JoinedRows
from strategies.setup.labels import LARGEST_LABEL, MAX_CLASSES, Labels, loss_of
from strategies.setup.problem import Table, TrainingProblem, compact_tables
from strategies.setup.row_weights import Weighting
from strategies.training.prepare import Plan, Problem, fan_out, fit_encoders, model_seed
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.features.choice import choose_encoders
from tp_flower.joins.mapping import build_mapping, split_rows
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.methods import SUMMARIES
from tp_flower.protocol import (
    ExtractedPart,
    LabelFacts,
    PersonalisedPart,
    PersonalisePart,
    PersonaliseRequest,
)
from tp_flower.query import BoundQuery, Query
from tp_flower.randomness import Stream, generator
from tp_flower.settings import (
    EVERYTHING,
    INTERCEPT,
    LAST,
    Settings,
    named_coordinates,
)

LARGEST_SUM: Final = 1e60
"""Of squares of labels."""


def class_names(extracted: Extracted, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the names of the classes of all sites; none in a regression.

    Raises:
        QueryError: the sites' labels differ in type.
        ReplyError: what a site says of its label is not usable.
    """
    told = {
        part: _label(extracted.replies, part)
        for part in parts
        if extracted.rows[part.number]
    }
    kinds = {label.kind for label in told.values()}
    if len(kinds) > 1:
        raise QueryError(
            f"the label differs in type between the shards: {sorted(kinds)}"
        )
    listed = [
        _listed(part, label.kind, label.classes)
        for part, label in told.items()
        if label.classes is not None
    ]
    if not listed:
        return ()
    if len(listed) != len(told):
        raise QueryError("only some sites take the label for a class: set task")
    found = sorted({value for own in listed for value in own})
    if len(found) > MAX_CLASSES:
        raise QueryError(
            f"the label has {len(found)} distinct values; classification takes at most "
            f"{MAX_CLASSES}"
        )
    return tuple(value if isinstance(value, str) else repr(value) for value in found)


def _label(replies: Replies, part: Part) -> LabelFacts:
    label = replies.body(part, ExtractedPart).label
    if label is None:
        raise refuse(part, "nothing of its label")
    return label


def _listed(part: Part, kind: str, classes: list[Any]) -> list[Any]:
    """Return the classes of one site: texts, or finite numbers."""
    kinds = (str,) if kind == "text" else (int, float)
    is_listed = all(type(value) in kinds for value in classes)
    if not is_listed or not all(
        isinstance(value, str) or abs(value) <= LARGEST_LABEL for value in classes
    ):
        raise refuse(part, "classes of its label that are none")
    return classes


def check_task(labels: Labels, settings: Settings) -> None:
    """Refuse classes that nothing can be learned of.

    Raises:
        QueryError: there is one class, or none where the task asks for them.
    """
    if labels.classes and len(labels.classes) < 2:
        raise QueryError(
            f"the label is constant at all sites (one class: {labels.classes[0]})"
        )
    if settings.task == "classification" and not labels.classes:
        raise QueryError("no site has told the classes of its label")


def class_values(joined: JoinedRows) -> list[Any]:
    """Return the classes as the sites have told them."""
    (table,) = joined.bound.tables
    kinds = {
        _label(joined.extracted.replies, part).kind
        for part in joined.extracted.parts[table]
        if joined.extracted.rows[part.number]
    }
    names = joined.labels.classes
    return list(names) if kinds == {"text"} else [float(name) for name in names]


def base_score_of(
    joined: JoinedRows, replies: Replies, parts: Sequence[Part]
) -> FloatArray:
    """Return the best constant score of all sites' rows together.

    Raises:
        ReplyError: a site's sums are none.
        QueryError: the label is constant in the training rows.
    """
    loss, classes = joined.loss, len(joined.labels.classes)
    told = np.array([_sums(replies, part, classes or 3) for part in parts])
    sums: FloatArray = told.sum(axis=0)
    if not classes:
        count, total, squares = sums.tolist()
        mean = total / max(count, 1.0)
        if count and squares - count * mean**2 <= 1e-12 * abs(squares):
            raise QueryError(f"the label is constant in the training rows ({mean:g})")
        return np.array([mean])
    if np.count_nonzero(sums) < 2:
        raise QueryError("the label is constant in the training rows (one class)")
    labels = np.arange(classes, dtype=np.float64)
    # a class that only held-out rows have, has the least score that is finite
    weights = np.maximum(sums, 1e-3)
    return loss.base_score(labels, weights)


def label_scale_of(
    joined: JoinedRows, replies: Replies, parts: Sequence[Part]
) -> float:
    """Return the deviation of all sites' training labels; of classes 1."""
    if joined.labels.classes:
        return 1.0
    told = np.array([_sums(replies, part, 3) for part in parts])
    count, total, squares = told.sum(axis=0).tolist()
    variance = squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2
    return math.sqrt(max(variance, 0.0)) or 1.0


def _sums(replies: Replies, part: Part, count: int) -> list[float]:
    sums = replies.body(part, PersonalisedPart).label_sums
    if len(sums) != count or not all(abs(total) < LARGEST_SUM for total in sums):
        raise refuse(part, "sums of labels that are none")
    return sums


NO_GRAPH = "none"


@dataclass(frozen=True)
class PersonalProblem:
    """A model for every site of one table.

    Attributes:
        training_problem: the table, its encoders and its rows, without labels.
        parts: of the sites, N of them.
        sites: their names, each once.
        rows: (N,), trained rows.
        start: (p,), the parameters that all begin with.
        curvature: (N,), bounds of the curvatures of the sites' objectives.
        label_scale: deviation of the labels of a regression; 1 of classes.
    """

    training_problem: TrainingProblem
    parts: tuple[Part, ...]
    sites: tuple[str, ...]
    rows: tuple[int, ...]
    start: FloatArray
    curvature: FloatArray
    label_scale: float

    @property
    def penalised(self) -> BoolArray:
        """(p,), the parameters that the penalty covers."""
        (table,) = self.training_problem.tables.values()
        return table.penalised


def set_up_personal(
    query: Query, settings: Settings, plan: Plan, inventory: Inventory
) -> Generator[Request, Replies, PersonalProblem]:
    """Run the rounds of the set-up.

    Raises:
        TPFlowerError: any of its kinds, before any training, if the query is not of one
            table, does not fit it, or the label does not fit the task.
    """
    joined = yield from _align(query, settings, inventory)
    encoders = yield from fit_encoders(joined)
    problem = Problem(joined, settings, encoders, joined.train_labels)
    (table,) = joined.bound.tables
    request = _order(problem, table)
    replies = yield request
    trained, start = _read_table(problem, table, plan, replies)
    parts = joined.extracted.parts[table]
    training_problem = TrainingProblem(
        tables={table: trained},
        train=joined.train,
        test=joined.test,
        train_labels=joined.train_labels,
        test_labels=joined.test_labels,
        loss=joined.loss,
        base_score=base_score_of(joined, replies, parts),
        initial_scores={},
        l2=settings.l2,
        seed=settings.seed,
        classes=joined.labels.classes,
        join_steps=joined.steps,
        source_rows=joined.extracted.table_rows,
        fan_out=fan_out(joined),
        names=joined.names,
        encoders=encoders,
        audience=replace(
            audience_of(joined, settings, inventory, {table: trained.update}, encoders),
            graph=settings.graph,
            graph_epsilon=settings.graph_epsilon,
        ),
        weighting=joined.weighting,
    )
    return PersonalProblem(
        training_problem=training_problem,
        parts=parts,
        sites=site_names(parts),
        rows=tuple(own.trained for own in trained.rows),
        start=start,
        curvature=np.array(
            [replies.body(part, PersonalisedPart).curvature for part in parts]
        ),
        label_scale=label_scale_of(joined, replies, parts),
    )


def site_names(parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the names of the parts' sites; of several at one site, numbered.

    >>> parts = [Part(k, "t", site, 0, k) for k, site in enumerate(["a", "b", "a"])]
    >>> site_names(parts)
    ('a', 'b', 'a#2')
    """
    seen: dict[str, int] = {}
    names = []
    for part in parts:
        seen[part.site] = seen.get(part.site, 0) + 1
        times = seen[part.site]
        names.append(part.site if times == 1 else f"{part.site}#{times}")
    return tuple(names)


def _align(
    query: Query, settings: Settings, inventory: Inventory
) -> Generator[Request, Replies, JoinedRows]:
    """Extract; a joined row is a row of the one table."""
    bound = query.bind(inventory.schemas())
    _check_one_table(bound)
    (table,) = bound.tables
    names = [feature.name for feature in bound.fragments_of(table)[0].features]
    choices = choose_encoders(
        settings.encoders, {table: names}, settings.max_categories
    )
    extracted = yield from extract(bound, settings, inventory)
    parts, rows = extracted.parts[table], extracted.rows
    mapping, steps = build_mapping(
        (), {}, extracted.table_rows, table, (), settings.max_joined_rows
    )
    # every site holds out its own share
    rng = generator(settings.seed, Stream.SPLIT)
    held_out = np.concatenate(
        [split_rows(rows[part.number], settings.test_fraction, rng) for part in parts]
    )
    train, test, compact = compact_tables(mapping, held_out, extracted.parts, rows)
    labels = Labels(np.full(len(held_out), np.nan), class_names(extracted, parts))
    check_task(labels, settings)
    return JoinedRows(
        bound=bound,
        choices=choices,
        extracted=extracted,
        labels=labels,
        mapping=mapping,
        steps=steps,
        held_out=held_out,
        is_test=held_out,
        train=train,
        test=test,
        compact=compact,
        # no number is known of a label that stays
        values=labels.values,
        loss=loss_of(labels, settings.loss, settings),
        weighting=Weighting(),
    )


def _check_one_table(bound: BoundQuery) -> None:
    """Refuse what one site's rows do not answer alone."""
    if len(bound.tables) > 1:
        raise QueryError(
            "strategy 'personalised' is for the rows of one table, whose shards get a "
            f"model each; the query joins {', '.join(bound.tables)}: put what belongs "
            "to a row into its table, or use admm"
        )
    if bound.weight_table is not None:
        raise QueryError(
            "strategy 'personalised' weighs all rows of a site alike: leave out "
            "'AS weight'"
        )


def _order(problem: Problem, table: str) -> Request:
    """Return the message that prepares the sites' models."""
    joined, settings = problem.joined, problem.settings
    own, spec = joined.compact[table], _spec(problem, table)
    parts = {
        # every row counts once: nothing is said of multiplicities
        number: PersonalisePart(
            encoder=problem.encoders[table].to_json(),
            model=spec.to_json(),
            l2=settings.l2,
            device=settings.device,
            trained=arrays["trained"],
            tested=arrays["tested"],
        )
        for number, arrays in own.set_up_arrays().items()
    }
    request = PersonaliseRequest(
        loss=joined.loss.name,
        classes=class_values(joined),
        graph=settings.graph if settings.graph in SUMMARIES else NO_GRAPH,
        graph_epsilon=settings.graph_epsilon,
        delta=settings.privacy.delta,
        parts=parts,
    )
    return ask(request, own.parts)


def _spec(problem: Problem, table: str) -> ModelSpec:
    """Return the sites' model; how far labels spread is not known before it is made."""
    settings = problem.settings
    kind = settings.model_of(table)
    return ModelSpec(
        kind=kind if problem.encoders[table].width else "linear",
        outputs=problem.joined.loss.outputs,
        intercept=True,
        hidden_sizes=settings.hidden_sizes,
        seed=model_seed(settings, table),
    )


def _read_table(
    problem: Problem, name: str, plan: Plan, replies: Replies
) -> tuple[Table, FloatArray]:
    """Return the table, and the parameters that all sites begin with."""
    own, spec = problem.joined.compact[name], _spec(problem, name)
    bodies = [replies.body(part, PersonalisedPart) for part in own.parts]
    first, features, penalised = own.parts[0], bodies[0].features, bodies[0].penalised
    for part, rows, body in zip(own.parts, own.rows, bodies, strict=True):
        if body.features != features:
            raise refuse(part, f"another number of features than {first.site!r}")
        if body.rows != rows.trained:
            raise refuse(part, "another number of rows than it was told to train on")
        if body.penalised.shape != penalised.shape:
            raise refuse(part, f"another number of parameters than {first.site!r}")
    is_linear = spec.kind == "linear"
    curvature = [body.curvature for body in bodies]
    table = Table(
        name=own.name,
        parts=own.parts,
        rows=own.rows,
        update=plan.choose_update(name, len(own.parts), is_linear),
        features=features,
        outputs=spec.outputs,
        has_intercept=spec.intercept,
        is_linear=is_linear,
        largest_curvature=max(curvature),
        mean_curvature=tuple(curvature),
        penalised=penalised.astype(np.bool_),
        gram=None,
    )
    return table, bodies[0].parameters.astype(np.float64)


def personal_mask(settings: Settings, training_problem: TrainingProblem) -> BoolArray:
    """Return which parameters each site has for itself, (p,).

    Raises:
        SettingsError: ``personal`` names a feature that there is not.
    """
    (table,) = training_problem.tables.values()
    count, personal = len(table.penalised), settings.personal
    if personal == EVERYTHING or not personal.strip():
        return np.full(count, personal == EVERYTHING)
    if personal == LAST:
        last = (settings.hidden_sizes[-1] + 1) * table.outputs
        return np.arange(count) >= count - last
    encoder = training_problem.encoders[table.name]
    columns = [own.name for own in encoder.encodings for _ in own.feature_names]
    names = [*columns, INTERCEPT]
    wanted = named_coordinates(personal)
    known = {name.lower() for name in names}
    if unknown := [name for name in wanted if name.lower() not in known]:
        raise SettingsError(
            f"personal: the model has no feature {unknown[0]!r}; it has "
            f"{', '.join(dict.fromkeys(names))}"
        )
    chosen = {name.lower() for name in wanted}
    # W is (d + 1, d_c), row after row
    is_chosen: BoolArray = np.array(
        [name.lower() in chosen for name in names], np.bool_
    )
    return np.repeat(is_chosen, table.outputs)
