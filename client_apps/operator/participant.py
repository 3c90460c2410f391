"""The client operator: one shard of one table in training, and what leaves it.

Algorithm 1 of the paper gives a client three functions: *receive* (the message),
*compute* (a method's room, on a :class:`Participant`) and *send* (``releases.py``). A
participant is rebuilt from the state of its site, changed by at most one function per
message, and saved again.

Notation:
    T_i^q    ``features``  (n, d): encoded rows that take part, trained ones first
    G_i      ``multiplicity``  (n_trained,)
    theta    ``model.parameters``  (p,)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from client_apps.data.run_store import Entry
from client_apps.data.score_counts import ScoreLimit
from client_apps.operator.masks import GroupKeys, Masked, masks_entry, read_masks
from client_apps.operator.pairs import PairedRows
from client_apps.operator.releases import Releaser
from client_apps.operator.state import Progress, State
from tp_flower import errors
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.keyed_hash import HashArray
from tp_flower.learning.models import local_model
from tp_flower.learning.solvers import IterativeSolver, RidgeSolver, Solver
from tp_flower.privacy.plan import MOMENTS, PartPlan
from tp_flower.privacy.score_masks import RowIndex, ScoreMasks
from tp_flower.privacy.sealed_sums import ShardUnion
from tp_flower.privacy.statistics_update import Rows
from tp_flower.privacy.units import Units
from tp_flower.protocol.codec import required
from tp_flower.protocol.fields import PartBody
from tp_flower.protocol.packet import row_numbers
from tp_flower.protocol.training_messages import Update

if TYPE_CHECKING:
    import lightgbm

AnyBody = TypeVar("AnyBody", bound=PartBody)
NewState = TypeVar("NewState")

MOST_KEPT: Final = 1 << 24  # values of a batch kept for the next message: 64 MiB

_ARRAYS: Final = ("multiplicity", "tested", "batch_start", "batch_rows")
_VALUES: Final = (
    *("table", "joined_rows", "l2", "device", "label_scale"),
    *("most_scores", "most_sums", "most_pairs", "is_even", "key_names"),
)
_UNION: Final = ("group", "shards", "shard", "table")
_FACTORS: Final = ("eigenvalues", "eigenvectors", "mean", "block")
_DIAGONAL: Final = ("mean", "diagonal")
PAIR_ROWS: Final = "rows-of-pairs"
_PAIR_REGIONS: Final = "regions-of-pairs"
_UNITS: Final = "units"
_KEYS: Final = "row-keys"


def solver_entry(solver: Solver) -> Entry:
    """Return the entry of a solver that is stored with a shard's data."""
    meta: dict[str, object] = {"weight": solver.weight}
    if isinstance(solver, IterativeSolver):
        arrays = {name: getattr(solver, name) for name in _DIAGONAL}
        return Entry(arrays, {**meta, "solves_intercept": solver.model.intercept})
    return Entry({name: getattr(solver, name) for name in _FACTORS}, meta)


def _read_solver(entry: Entry, features: local_model.Features) -> Solver | None:
    """Return the solver of a shard's entry, over its features (n, d), or None."""
    arrays = entry.arrays
    meta = entry.meta
    if "weight" not in meta:
        return None
    weight = float(meta["weight"])
    joined_rows = int(meta["joined_rows"])
    if "solves_intercept" not in meta:
        factors: Any = {name: arrays[name] for name in _FACTORS}
        return RidgeSolver(**factors, weight=weight, joined_rows=joined_rows)
    counts = arrays["multiplicity"] / joined_rows
    return IterativeSolver(
        local_model.LinearModel(
            features.shape[1], 1, intercept=bool(meta["solves_intercept"])
        ),
        features[: len(counts)],
        counts,
        **{name: arrays[name] for name in _DIAGONAL},
        weight=weight,
        joined_rows=joined_rows,
    )


def score_sums(scores: FloatArray, multiplicity: npt.NDArray[np.number]) -> FloatArray:
    """Return sum G s and sum G s^2 of a shard's scores (n, d_c), (2, d_c).

    G is the ``multiplicity`` (n,), G^w of weighted joined rows. Sums of shards add up.

    >>> score_sums(np.array([[3.0], [0.0]]), np.array([2, 2])).tolist()
    [[6.0], [18.0]]
    """
    return np.stack([multiplicity @ scores, multiplicity @ scores**2])


def sent_scores(
    scores: FloatArray, masks: ScoreMasks | None, rows: RowIndex, name: str
) -> AnyArray:
    """Return scores (k, d_c) of some rows as they leave: numbers, or masked words."""
    if masks is None:
        return row_numbers(scores)
    return masks.words(scores, rows, name)


@dataclass(frozen=True)
class ShardData:
    """All data of a shard that never change during training.

    Attributes:
        features: (n, d) float32, the trained rows first, then those only tested, on the
            device that computes the model.
        multiplicity: (n_trained,), G; G^w where joined rows are weighted.
        tested: (n,) bool, rows that appear in held-out joined rows.
        joined_rows: N of the training rows.
        l2: beta.
        batch_start: (batches + 1,), where a batch starts in ``batch_rows``.
        table: alias in the query.
        solver: the factorised theta-update; None if the server or torch solves, or the
            shards have not yet summed what it is made of.
        masks: of the scores; None if they leave in the clear.
        units: of the trained rows, if clips are of the table's units of privacy.
        union: the table's shards; None if nothing is summed.
        label_scale: size of the loss's derivatives, the unit of what is summed.
        limit: on the score vectors that leave without noise; None where no policy sets
            one.
        is_even: whether no row counts for most of a sum over the trained rows.
        most_scores: the highest number of scores in the run, by its proposal.
        most_sums: how many arrays are summed in it.
        binned: the trained rows as trees read them, once they have.
        kept: what is computed alike in several fits of a search, in memory.
        most_pairs: pairs that a row is in, at most, where the rows of the above are
            pairs of rows and regions of another table.
    """

    features: local_model.Features
    multiplicity: IntArray | FloatArray
    tested: npt.NDArray[np.bool_]
    joined_rows: int
    l2: float
    batch_start: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    batch_rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    table: str = ""
    spec: local_model.ModelSpec = field(default_factory=local_model.ModelSpec)
    update: Update = Update.LOCAL
    plan: PartPlan = field(default_factory=PartPlan)
    device: str = local_model.AUTO
    solver: Solver | None = None
    masks: ScoreMasks | None = None
    units: Units | None = None
    row_keys: HashArray | None = None
    key_names: tuple[str, ...] = ()
    union: ShardUnion | None = None
    label_scale: float = 1.0
    limit: ScoreLimit | None = None
    is_even: bool = True
    most_scores: int = 0
    most_sums: int = 0
    most_pairs: int = 1
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    binned: "list[lightgbm.Dataset]" = field(default_factory=list, repr=False)
    _gathered: dict[int, local_model.Features] = field(default_factory=dict, repr=False)

    @classmethod
    def read(
        cls, entry: Entry, features: local_model.Features, keys: GroupKeys
    ) -> Self:
        """Return the data of an entry that :meth:`entry` made, with the features."""
        meta: Any = entry.meta
        arrays: Any = entry.arrays
        union = None
        if "union" in meta:
            group, shards, *names = meta["union"]
            union = ShardUnion(
                group, keys(group) if group else b"", tuple(shards), *names
            )
        limit = None
        if "limit" in meta:
            limit = msgspec.convert(meta["limit"], ScoreLimit)
        if PAIR_ROWS in arrays:
            rows, regions = arrays[PAIR_ROWS], arrays.get(_PAIR_REGIONS)
            features = local_model.pair_features(features, rows, regions)
        return cls(
            features=features,
            **{name: arrays[name] for name in _ARRAYS},
            **{name: meta[name] for name in _VALUES},
            spec=msgspec.convert(meta["model"], local_model.ModelSpec),
            update=Update(meta["update"]),
            plan=msgspec.convert(meta["privacy"], PartPlan),
            solver=_read_solver(entry, features),
            masks=read_masks(entry, keys),
            units=Units(arrays[_UNITS]) if _UNITS in arrays else None,
            row_keys=arrays.get(_KEYS),
            union=union,
            limit=limit,
        )

    def entry(
        self, further_arrays: Mapping[str, AnyArray], further: Mapping[str, object]
    ) -> Entry:
        """Return the entry that :meth:`read` reads, with more arrays and values."""
        arrays = {**further_arrays, **{name: getattr(self, name) for name in _ARRAYS}}
        meta: dict[str, Any] = {
            "features": local_model.host_features(self.features),
            **further,
        }
        meta |= {"model": msgspec.to_builtins(self.spec), "update": str(self.update)}
        meta |= {name: getattr(self, name) for name in _VALUES}
        meta["privacy"] = msgspec.to_builtins(self.plan)
        if self.solver is not None:
            factors = solver_entry(self.solver)
            arrays = {**arrays, **factors.arrays}
            meta = {**meta, **factors.meta}
        if self.masks is not None:
            masks = masks_entry(self.masks)
            arrays = {**arrays, **masks.arrays}
            meta = {**meta, **masks.meta}
        if self.union is not None:
            meta["union"] = [getattr(self.union, name) for name in _UNION]
        if self.units is not None:
            arrays[_UNITS] = self.units.codes
        if self.row_keys is not None:
            arrays[_KEYS] = self.row_keys
        if self.limit is not None:
            meta["limit"] = msgspec.to_builtins(self.limit)
        return Entry(arrays, meta)

    def paired_entry(self, paired: PairedRows, regions: AnyArray | None) -> Entry:
        """Return what changes in the stored entry where pairs take the rows' place.

        Of ``regions`` (m,) the model reads; None of the table that is divided.
        """
        rows = paired.rows
        arrays: dict[str, AnyArray] = {
            "multiplicity": paired.multiplicity,
            "tested": paired.tested,
            PAIR_ROWS: rows,
        }
        if regions is not None:
            arrays[_PAIR_REGIONS] = regions
        meta: dict[str, Any] = {"most_pairs": int(np.bincount(rows).max(initial=1))}
        if self.masks is not None:
            masks = masks_entry(self.masks.split(rows, paired.regions))
            arrays |= masks.arrays
            meta |= masks.meta
        if self.row_keys is not None:
            arrays[_KEYS] = self.row_keys[rows[: len(paired.multiplicity)]]
        return Entry(arrays, meta)

    @property
    def trained(self) -> local_model.Features:
        """The features of the trained rows, (n_trained, d)."""
        return self.features[: len(self.multiplicity)]

    def rows(self, *, intercept: bool) -> Rows:
        """Return the trained rows as sums over rows are made of them."""
        return Rows(self.trained, self.multiplicity, intercept, self.units)

    def batch_of(self, batch: int) -> IntArray:
        """Return the distinct rows of an SGD batch, ascending, (k,)."""
        return self.batch_rows[self.span(batch)]

    def span(self, batch: int) -> slice:
        """Return where the rows of a batch are in ``batch_rows``."""
        return slice(self.batch_start[batch], self.batch_start[batch + 1])

    @cached_property
    def batch_masks(self) -> ScoreMasks | None:
        """The masks of ``batch_rows``: in one piece they are read much faster."""
        return self.masks and self.masks.take(self.batch_rows)

    def units_of(self, batch: int) -> Units | None:
        """Return the units of the distinct rows of an SGD batch, (k,)."""
        return self.units and self.units.of(self.batch_of(batch))

    def batch(self, batch: int) -> local_model.Features:
        """Return the features of the distinct rows of an SGD batch, (k, d).

        The last result is kept: a batch's scores are requested in one message and its
        gradient in the next, which the same process may answer.
        """
        if batch in self._gathered:
            return self._gathered[batch]
        rows = self.batch_of(batch)
        if len(rows) == len(self.multiplicity):
            return self.trained
        features = local_model.rows_of(self.features, rows)
        self._gathered.clear()
        if features.shape[0] * features.shape[1] <= MOST_KEPT:
            self._gathered[batch] = features
        return features


@dataclass(frozen=True)
class Participant(Generic[State]):
    """One shard in one role: as a particular table of the query.

    Attributes:
        state: of the method, which changes it in place.
        releaser: of the message that is being answered.
        progress: what has left, and the best model so far.
    """

    number: int
    data: ShardData
    model: local_model.LocalModel
    state: State
    releaser: Releaser
    progress: Progress = field(default_factory=Progress)

    def finite(self, numbers: FloatArray) -> FloatArray:
        """Return parameters or scores; raise DivergedError unless they are finite."""
        if not np.isfinite(numbers).all():
            raise errors.DivergedError(
                f"table {self.data.table}: the model is no longer finite: training "
                "diverged"
            )
        return numbers

    def release_scores(
        self, features: local_model.Features, rows: RowIndex, name: str
    ) -> AnyArray:
        """Return the scores of rows to send: numbers, or masked words.

        ``name`` says which scores of the message they are.
        """
        self._count(rows)
        return self._scores_to_send(
            self._noisy_scores(features), self.data.masks, rows, name
        )

    def release_zeros(self) -> AnyArray:
        """Return the zero scores of an untrained linear model or of no trees.

        They reveal nothing of the rows.
        """
        zeros = np.zeros((len(self.data.features), self.model.outputs))
        return self._scores_to_send(
            self.releaser.scores(zeros), self.data.masks, slice(None), "scores"
        )

    def release_batch(self, batch: int) -> AnyArray:
        """Return the scores of a batch's distinct rows to send."""
        data = self.data
        self._count(data.batch_of(batch))
        scores = self._noisy_scores(data.batch(batch), batch)
        return self._scores_to_send(
            scores, data.batch_masks, data.span(batch), "batch_scores"
        )

    def release_rows(self, *, is_tested: bool) -> AnyArray:
        """Return the scores of all rows to send, or of those trained on.

        Their sums are kept for the end of the run.
        """
        data = self.data
        trained = slice(len(data.multiplicity))
        rows = slice(None) if is_tested else trained
        self._count(rows)
        scores = self._noisy_scores(data.features[rows])
        self.progress.score_sums = score_sums(scores[trained], data.multiplicity)
        return self._scores_to_send(scores, data.masks, rows, "scores")

    def release_values(self, values: FloatArray) -> AnyArray:
        """Return the change of all rows' scores, to send, (n, d_c)."""
        self._count(slice(None))
        return self._scores_to_send(
            self.finite(values), self.data.masks, slice(None), "scores"
        )

    def _count(self, rows: RowIndex) -> None:
        """Count the score vectors that leave of some rows, where a policy limits them.

        With batches of SGD these are the times that scores of one row have left, at
        most.
        """
        data = self.data
        outputs = self.model.outputs
        if data.limit is None:
            return
        vectors = outputs * data.most_pairs
        if len(data.batch_start) > 1:
            times = self.progress.released
            if times is None:
                times = np.zeros(len(data.features))
            previous_most = times.max(initial=0.0)
            times[rows] += outputs
            vectors = int(times.max(initial=0.0) - previous_most)
            self.progress.released = times
        self.releaser.scored[self.number, data.limit] += vectors

    def _noisy_scores(
        self, features: local_model.Features, batch: int | None = None
    ) -> FloatArray:
        return self.releaser.scores(self.finite(self.model.scores(features)), batch)

    def _scores_to_send(
        self, scores: FloatArray, masks: ScoreMasks | None, rows: RowIndex, name: str
    ) -> AnyArray:
        """Return scores to send, masked if the run masks them."""
        if masks is None:
            return sent_scores(scores, None, rows, name)
        number = self.progress.scores_number
        words = sent_scores(scores, masks, rows, f"{number} {name}")
        self.releaser.masked.append(Masked(self.number, f"{name} {number}", words))
        return words

    def begin_scores(self, number: int) -> None:
        """Take the number of the scores of this message, which names their masks.

        No two scores have one number: their difference would be without a mask.
        """
        last_number = self.progress.scores_number
        if last_number is not None and number <= last_number:
            raise errors.MessageError(
                f"'scores-number' is {number}; the run is at {last_number}"
            )
        if number > self.data.most_scores:
            raise errors.ProposalError(
                f"'scores-number': the run was proposed with {self.data.most_scores} "
                f"at most, and the request says {number}"
            )
        self.progress.scores_number = number

    @property
    def union(self) -> ShardUnion:
        """The shards whose arrays are summed."""
        if self.data.union is None:
            raise errors.MessageError("nothing of this table is summed")
        return self.data.union

    def share(self, numbers: FloatArray, unit: float = 1.0) -> AnyArray:
        """Return the share of numbers whose size is about ``unit`` in their sum.

        No two have one name. All shards of a table take part in the same rounds, hence
        count alike.
        """
        self.progress.sums += 1
        if self.progress.sums > self.data.most_sums:
            raise errors.ProposalError(
                f"the run was proposed with {self.data.most_sums} sums over the shards "
                f"of table {self.data.table!r}, and the request asks for "
                f"{self.progress.sums}"
            )
        share = self.union.share(numbers, self._last_sum, unit)
        if self.union.is_sealed:
            self.releaser.masked.append(
                Masked(self.number, f"sum {self._last_sum}", share)
            )
        return share

    def total(self, shares: AnyArray | None, unit: float = 1.0) -> FloatArray:
        """Return the sum of the arrays whose shares left last, flat."""
        return self.union.total(required(shares, "sum"), self._last_sum, unit)

    @property
    def _last_sum(self) -> str:
        if not self.progress.sums:
            raise errors.MessageError("it brings a sum, but no share has left")
        return str(self.progress.sums)

    def moments(self, step: FloatArray, kappa: float) -> FloatArray:
        """Return [T, 1]^T (G * step) to be sent or used, (d [+ 1], d_c), of (n, d_c).

        It adds up over the shards; of a private run it has noise.
        """
        data = self.data
        intercept = self.linear.intercept
        if data.plan.statistics is None:
            self.releaser.check_clear(MOMENTS)
            return self.weighted_sum(step)
        return (
            self.releaser.moments(data.rows(intercept=intercept), kappa * step) / kappa
        )

    def weighted_sum(self, values: FloatArray) -> FloatArray:
        """Return [T, 1]^T (G * values), (d [+ 1], d_c), of values (n, d_c)."""
        weighted = self.data.multiplicity[:, None] * values
        return local_model.moment(
            self.data.trained, weighted, intercept=self.linear.intercept
        )

    def mark_best(self) -> None:
        """Copy the model, which is the best so far."""
        self.progress.best = self.model.parameters.copy()
        if self.progress.score_sums is not None:
            self.progress.best_sums = self.progress.score_sums

    def return_to_best(self) -> None:
        """Take the model that was marked as the best, if one was."""
        if self.progress.best is not None:
            self.model.parameters = self.progress.best
        if self.progress.best_sums is not None:
            self.progress.score_sums = self.progress.best_sums

    def sum_scores(self, effects: FloatArray | None = None) -> None:
        """Sum the model's scores of the trained rows anew, with the rows' effects."""
        scores = self.model.scores(self.data.trained)
        if effects is not None:
            scores = scores + effects
        self.progress.score_sums = score_sums(scores, self.data.multiplicity)

    def with_state(
        self, solver: Solver | None, state: NewState
    ) -> "Participant[NewState]":
        """Return the participant with the solver and the state that it begins with."""
        data = replace(self.data, solver=solver)
        return Participant(
            self.number, data, self.model, state, self.releaser, self.progress
        )

    @property
    def linear(self) -> local_model.LinearModel:
        """The model, which must be linear."""
        if not isinstance(self.model, local_model.LinearModel):
            raise TypeError(f"{type(self.model).__name__} has no exact solution")
        return self.model


def body_of(bodies: Mapping[int, AnyBody], part: Participant[Any]) -> AnyBody:
    """Return the body of a request that concerns a participant."""
    if part.number not in bodies:
        raise errors.MessageError(f"it has no entry for part {part.number}")
    return bodies[part.number]


def make_model(
    spec: local_model.ModelSpec, features: int, device: str
) -> local_model.LocalModel:
    """Return a table's model; the errors of a factory are passed on with their text."""
    try:
        return local_model.build_model(spec, features, device)
    except errors.TPFlowerError:
        raise
    except Exception as error:
        # a factory sees only sizes, so that its message cannot quote data
        raise errors.SettingsError(
            f"model {spec.kind!r} raised {type(error).__name__} for {features} "
            f"features and {spec.outputs} outputs: {error}"
        ) from error
