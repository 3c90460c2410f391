"""Set-up if every site gets its own model: labels and rows stay at the sites.

``extract`` brings the number of rows and the classes; with ``statistics`` and ``fit``
the sites fit one encoder. ``personalise`` sends the split, and brings sums of labels,
which give the base score.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from strategies.disclosures import (
    NOTHING,
    DisclosureValues,
    Exposure,
    exposure_of,
    features_note,
)
from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import refuse
from strategies.run.sites import Inventory
from strategies.setup.absent_columns import check_present
from strategies.setup.columns import bind_columns, reading_warnings
from strategies.setup.encoding import TableEncoding, fit_encoders, fitted_tables
from strategies.setup.extract import extract
from strategies.setup.joined_rows import SplitRows, encoder_choices
from strategies.setup.labels import check_numbers, fitting_loss, read_classes
from strategies.setup.leaks import leak_warnings
from strategies.setup.problem import PreparedRun, PreparedTable
from strategies.training.prepare import common_shape
from tp_flower.arrays import AnyArray, BoolArray, FloatArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.heads import Sum
from tp_flower.joins.joining import JoinStep
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.methods.personalised.messages import (
    BY_DATA,
    BY_FEATURES,
    BY_MODELS,
    TRAIN_PERSONAL,
    TRAIN_PERSONALISE,
    TRAIN_SUMMARISE,
    PersonalisedPart,
    PersonalisePart,
    PersonaliseRequest,
)
from tp_flower.methods.personalised.settings import (
    EVERYTHING,
    INTERCEPT,
    LAST,
    PersonalisedSettings,
    named_coordinates,
    summaries_of,
)
from tp_flower.objectives import (
    Response,
    Target,
    make_objective,
    response_of,
)
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import pack_bits
from tp_flower.protocol.setup_messages import EncodedColumns
from tp_flower.query import BoundQuery, Query
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings
from tp_flower.splits import split_rows
from tp_flower.terms.run_terms import model_seed

TRAINING: Final = (TRAIN_PERSONALISE, TRAIN_SUMMARISE, TRAIN_PERSONAL)
SUMMARY_TEXTS: Final = {
    BY_DATA: "the mean of random features of each site's rows and labels",
    BY_FEATURES: "the covariance of each site's features",
    BY_MODELS: "the parameters of a model that each site has trained alone",
}
LARGEST_SUM: Final = 1e60  # bound on a sum of squared labels


@dataclass(frozen=True, kw_only=True)
class PersonalisedProblem(PreparedRun):
    """A model for every site of one table.

    Attributes:
        rows: (N,), trained rows.
        start: (p,), the initial parameters, common to all sites.
        curvature: (N,), bounds on the curvatures of the sites' objectives.
        label_scale: deviation of the labels in a regression; 1 for classes.
    """

    sites: tuple[str, ...]
    rows: tuple[int, ...]
    held_out_rows: int
    start: FloatArray
    curvature: FloatArray
    label_scale: float

    @property
    def table(self) -> PreparedTable:
        """The one table."""
        (table,) = self.tables.values()
        return table

    @property
    def joined_rows(self) -> tuple[int, int]:
        """Trained and held-out rows; here a joined row is a row of the one table."""
        return sum(self.rows), self.held_out_rows


def set_up_personalised(
    query: Query, settings: Settings, inventory: Inventory, warn: Callable[..., None]
) -> Generator[Requests, Replies, PersonalisedProblem]:
    """Run the rounds of the set-up; ``warn`` takes texts."""
    bound, columns = bind_columns(query.bind, inventory)
    warn(*reading_warnings(bound, columns), *leak_warnings(bound))
    name = _only_table(bound)
    check_numbers(bound, settings)
    check_present(bound, inventory)
    choices = encoder_choices(bound, settings)
    extracted = yield from extract(bound, settings, inventory, columns)
    warn(*extracted.absent)
    parts = extracted.parts[name]
    rows = extracted.rows
    # every site holds out its own share of rows
    rng = generator(settings.seed, Stream.SPLIT)
    held_out = [
        split_rows(rows[part.number], settings.test_fraction, rng) for part in parts
    ]
    classes = read_classes(extracted, parts, settings)
    loss = fitting_loss(classes.names, settings.loss)
    response = response_of(loss, classes.names, classes.kind)
    split = SplitRows(
        bound=bound,
        choices=choices,
        extracted=extracted,
        held_out=np.concatenate(held_out),
    )
    encoders = yield from fit_encoders(split)
    spec = ModelSpec(
        kind=settings.model_of(name) if encoders[name].columns.width else "linear",
        outputs=response.outputs,
        intercept=True,
        hidden_sizes=settings.hidden_sizes,
        seed=model_seed(settings.seed, name),
    )
    sealed_encoder = encoders[name].sealed
    request = PersonaliseRequest(
        loss=response.loss,
        classes=list(classes.values),
        graph=summaries_of(settings),
        graph_epsilon=settings.of(PersonalisedSettings).graph_epsilon,
        delta=settings.privacy.delta,
        parts={
            part.number: _part_request(sealed_encoder, spec, mask, settings)
            for part, mask in zip(parts, held_out, strict=True)
        },
    )
    replies = yield ask(request, parts)
    bodies = [replies.body(part, PersonalisedPart) for part in parts]
    exposure = _exposure(split, settings, inventory, encoders)
    return _make_problem(
        split, encoders[name].columns, response, spec, bodies, exposure
    )


def _exposure(
    split: SplitRows,
    settings: Settings,
    inventory: Inventory,
    encoders: Mapping[str, TableEncoding],
) -> Exposure:
    """Return the properties of the run that decide who learns what."""
    messages = [Action.STATISTICS]
    if len(split.extracted.all_parts) > 1:
        messages.append(Action.FIT)
    return exposure_of(
        split.bound,
        split.extracted.parts,
        settings,
        inventory,
        [*messages, *TRAINING],
        keeps_labels=True,
        has_joins=False,
        fitted=fitted_tables(encoders),
        method=_disclosure_values(settings),
    )


def _make_problem(
    split: SplitRows,
    columns: EncodedColumns,
    response: Response,
    spec: ModelSpec,
    bodies: Sequence[PersonalisedPart],
    exposure: Exposure,
) -> PersonalisedProblem:
    """Return the problem, from the replies of the parts in their order."""
    extracted = split.extracted
    name = split.bound.label_table
    parts = extracted.parts[name]
    trained = tuple(
        int(np.count_nonzero(~split.held_out[rows]))
        for _, rows in extracted.shards_of(name)
    )
    features, penalised = common_shape(parts, bodies)
    base_score, label_scale = _base_and_scale(
        response, _label_sums(parts, bodies, trained, len(response.classes))
    )
    table = PreparedTable(name, parts, spec.kind, features, spec.outputs, penalised)
    return PersonalisedProblem(
        tables={name: table},
        head=Sum(response.outputs),
        response=response,
        base_score=base_score,
        join_steps=(JoinStep(name, len(split.held_out)),),
        source_rows=extracted.table_rows,
        fan_out={name: {"min": 1, "mean": 1.0, "max": 1}},
        names=split.names,
        encoders={name: columns},
        exposure=exposure,
        sites=site_names(parts),
        rows=trained,
        held_out_rows=int(np.count_nonzero(split.held_out)),
        start=bodies[0].parameters.astype(np.float64),
        curvature=np.array([body.curvature for body in bodies]),
        label_scale=label_scale,
    )


def _part_request(
    sealed_encoder: AnyArray | None,
    spec: ModelSpec,
    is_held_out: BoolArray,
    settings: Settings,
) -> PersonalisePart:
    """Return the request for a part whose rows (n,) train unless they are held out."""
    return PersonalisePart(
        encoder=sealed_encoder,
        model=msgspec.to_builtins(spec),
        l2=settings.l2,
        device=settings.device,
        trained=pack_bits(~is_held_out),
        tested=pack_bits(is_held_out),
    )


def _disclosure_values(settings: Settings) -> DisclosureValues:
    """Return the values of names that the disclosures of summaries use."""
    privacy = settings.privacy
    summaries = NOTHING
    values = settings.of(PersonalisedSettings)
    if values.graph_epsilon and values.graph != BY_MODELS:
        amount = f"epsilon {values.graph_epsilon:g}, delta {privacy.delta:g}"
        summaries = f"Gaussian noise (summaries: {amount}{features_note(privacy)})"
    texts = {"summary": SUMMARY_TEXTS.get(values.graph, "")}
    return DisclosureValues(texts, {"summaries": summaries})


def site_names(parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the sites of the parts by name; several parts of one site get numbers.

    >>> parts = [Part(k, "t", site, 0, k) for k, site in enumerate(["a", "b", "a"])]
    >>> site_names(parts)
    ('a', 'b', 'a#2')
    """
    counts: Counter[str] = Counter()
    names = []
    for part in parts:
        counts[part.site] += 1
        times = counts[part.site]
        names.append(part.site if times == 1 else f"{part.site}#{times}")
    return tuple(names)


def _only_table(bound: BoundQuery) -> str:
    """Return the only table of the query; QueryError if it joins several."""
    if len(bound.tables) > 1:
        raise QueryError(
            "strategy 'personalised' is for the rows of one table, whose shards get a "
            f"model each; the query joins {', '.join(bound.tables)}: put what belongs "
            "to a row into its table, or use admm"
        )
    if bound.weight_table is not None:
        raise QueryError(
            "strategy 'personalised' weighs all rows of a site alike: leave out 'AS "
            "weight'"
        )
    return bound.tables[0]


def _label_sums(
    parts: Sequence[Part],
    bodies: Sequence[PersonalisedPart],
    trained: Sequence[int],
    classes: int,
) -> FloatArray:
    """Return the sums over all sites: rows per class, or count, sum and squares."""
    for part, body, rows in zip(parts, bodies, trained, strict=True):
        if body.rows != rows:
            raise refuse(part, "a different number of rows than it trains on")
        sums = body.label_sums
        if len(sums) != (classes or 3) or max(map(abs, sums)) > LARGEST_SUM:
            raise refuse(part, "impossible sums of its labels")
    total: FloatArray = np.array([body.label_sums for body in bodies]).sum(axis=0)
    return total


def _base_and_scale(response: Response, sums: FloatArray) -> tuple[FloatArray, float]:
    """Return the score that all sites' rows start from, and their labels' deviation."""
    if not response.classes:
        count, total, squares = sums.tolist()
        mean = total / max(count, 1.0)
        if count and squares - count * mean**2 <= 1e-12 * abs(squares):
            raise QueryError(f"the label is constant in the training rows ({mean:g})")
        variance = squares / max(count, 1.0) - mean**2
        constant = make_objective(response.loss, Target.of(np.array([mean])))
        return constant.base_score, math.sqrt(max(variance, 0.0)) or 1.0
    if np.count_nonzero(sums) < 2:
        raise QueryError("the label is constant in the training rows (one class)")
    # a class that occurs only in held-out rows gets the lowest finite score
    one_row_each = Target.of(np.arange(len(sums)), response.classes)
    weights = np.maximum(sums, 1e-3)
    return make_objective(response.loss, one_row_each, weights).base_score, 1.0


def personal_mask(settings: Settings, problem: PersonalisedProblem) -> BoolArray:
    """Return which parameters each site has for itself, (p,)."""
    table = problem.table
    count = len(table.penalised)
    personal = settings.of(PersonalisedSettings).personal
    if personal == EVERYTHING or not personal.strip():
        return np.full(count, personal == EVERYTHING)
    if personal == LAST:
        last_parameters = (settings.hidden_sizes[-1] + 1) * table.outputs
        return np.arange(count) >= count - last_parameters
    features = problem.encoders[table.name].features
    columns = [name for name, count in features.items() for _ in range(count)]
    names = [*columns, INTERCEPT]
    named = named_coordinates(personal)
    lowered = [name.lower() for name in names]
    if unknown := [name for name in named if name.lower() not in lowered]:
        raise SettingsError(
            f"personal: the model has no feature {unknown[0]!r}; it has "
            f"{', '.join(dict.fromkeys(names))}"
        )
    # W is (d + 1, d_c), row by row
    return np.repeat(np.isin(lowered, [name.lower() for name in named]), table.outputs)
