"""The client operator: one shard of one table in training, and what leaves it.

Algorithm 1 of the paper gives a client three functions: *receive* (the message),
*compute* (the methods of :class:`Participant`) and *send* (``releases.py``). A
participant is rebuilt from the state of its site, changed by at most one method per
message, and saved again.

Notation:
    T_i^q    ``features``  (n, d): encoded rows that take part, trained ones first
    G_i      ``multiplicity``  (n_trained,)
    theta    ``model.parameters``  (p,)        w, u  ``consensus``, ``consensus_duals``
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from client_apps.data.run_store import Entry
from client_apps.data.score_counts import ScoreLimit
from client_apps.operator.masks import GroupKeys, Masked, masks_entry, read_masks
from client_apps.operator.releases import Releaser
from tp_flower import errors
from tp_flower.arrays import AnyArray, FloatArray, IntArray
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

SCORE_SUMS: Final = "score_sums"  # state: sums of the scores that left last, (2, d_c)
SCORES_NUMBER: Final = "scores_number"  # state: of the last scores that left
RELEASED: Final = (
    # state: how often scores of each row have left, where rows differ in it, (n,)
    "released"
)
MOST_KEPT = 1 << 24  # values of a batch kept for the next message: 64 MiB

DESCENT: Final = "descent"
DIRECTION: Final = "direction"
GRADIENT: Final = "gradient"  # state vectors of conjugate gradients: v, p and g, (p,)

BEST: Final = "best"
BEST_SUMS: Final = "best_sums"
"""State vectors: the parameters of the best model so far, (p,), and its score sums."""

SUMS: Final = "sums"  # state vector: how many shares have left, (1,)
_ARRAYS: Final = ("multiplicity", "tested", "batch_start", "batch_rows")
_VALUES: Final = (
    *("table", "joined_rows", "l2", "device", "label_scale"),
    *("most_scores", "most_sums", "is_even"),
)
_UNION: Final = ("group", "shards", "shard", "table")
_FACTORS: Final = ("eigenvalues", "eigenvectors", "mean", "block")
_DIAGONAL: Final = ("mean", "diagonal")
_UNITS: Final = "units"


def solver_entry(solver: Solver) -> Entry:
    """Return what is stored of a solver, with the rest of a shard's data."""
    meta: dict[str, object] = {"weight": solver.weight}
    if isinstance(solver, IterativeSolver):
        arrays = {name: getattr(solver, name) for name in _DIAGONAL}
        return Entry(arrays, {**meta, "solves_intercept": solver.model.intercept})
    return Entry({name: getattr(solver, name) for name in _FACTORS}, meta)


def _read_solver(entry: Entry, features: local_model.Features) -> Solver | None:
    """Return the solver of a shard's entry, over its features (n, d), or None."""
    arrays, meta = entry.arrays, entry.meta
    if "weight" not in meta:
        return None
    weight, joined_rows = float(meta["weight"]), int(meta["joined_rows"])
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
    return row_numbers(scores) if masks is None else masks.words(scores, rows, name)


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
    union: ShardUnion | None = None
    label_scale: float = 1.0
    limit: ScoreLimit | None = None
    is_even: bool = True
    most_scores: int = 0
    most_sums: int = 0
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
            union=union,
            limit=msgspec.convert(meta["limit"], ScoreLimit)
            if "limit" in meta
            else None,
        )

    def entry(
        self, further_arrays: Mapping[str, AnyArray], further: Mapping[str, object]
    ) -> Entry:
        """Return the entry that :meth:`read` reads, with more arrays and values."""
        arrays = {**further_arrays, **{name: getattr(self, name) for name in _ARRAYS}}
        meta: dict[str, Any] = {
            "features": local_model.on_host(self.features),
            **further,
        }
        meta |= {"model": msgspec.to_builtins(self.spec), "update": str(self.update)}
        meta |= {name: getattr(self, name) for name in _VALUES}
        meta["privacy"] = msgspec.to_builtins(self.plan)
        if self.solver is not None:
            factors = solver_entry(self.solver)
            arrays, meta = {**arrays, **factors.arrays}, {**meta, **factors.meta}
        if self.masks is not None:
            masks = masks_entry(self.masks)
            arrays, meta = {**arrays, **masks.arrays}, {**meta, **masks.meta}
        if self.union is not None:
            meta["union"] = [getattr(self.union, name) for name in _UNION]
        if self.units is not None:
            arrays[_UNITS] = self.units.codes
        if self.limit is not None:
            meta["limit"] = msgspec.to_builtins(self.limit)
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
        return self.masks and self.masks.taken(self.batch_rows)

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
class Participant:
    """One shard in one role: as a particular table of the query.

    ``vectors`` are the rest of the state by name, as far as they exist: ``momentum``,
    ``theta``, ``consensus``, ``consensus_duals``, (p,) each, the ``rho_in`` (1,) that
    scales them, and what a handler keeps.
    """

    number: int
    data: ShardData
    model: local_model.LocalModel
    vectors: dict[str, FloatArray]
    releaser: "Releaser"

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
        return self._encoded(self._noisy_scores(features), self.data.masks, rows, name)

    def release_zeros(self) -> AnyArray:
        """Return the zero scores of an untrained linear model or of no trees.

        They reveal nothing of the rows.
        """
        zeros = np.zeros((len(self.data.features), self.model.outputs))
        return self._encoded(
            self.releaser.scores(zeros), self.data.masks, slice(None), "scores"
        )

    def release_batch(self, batch: int) -> AnyArray:
        """Return the scores of a batch's distinct rows to send."""
        data = self.data
        self._count(data.batch_of(batch))
        scores = self._noisy_scores(data.batch(batch), batch)
        return self._encoded(scores, data.batch_masks, data.span(batch), "batch_scores")

    def release_rows(self, *, is_tested: bool) -> AnyArray:
        """Return the scores of all rows to send, or of those trained on.

        Their sums are kept for the end of the run.
        """
        data = self.data
        trained = slice(len(data.multiplicity))
        rows = slice(None) if is_tested else trained
        self._count(rows)
        scores = self._noisy_scores(data.features[rows])
        self.vectors[SCORE_SUMS] = score_sums(scores[trained], data.multiplicity)
        return self._encoded(scores, data.masks, rows, "scores")

    def release_values(self, values: FloatArray) -> AnyArray:
        """Return what all rows' scores change by to send, (n, d_c)."""
        self._count(slice(None))
        return self._encoded(
            self.finite(values), self.data.masks, slice(None), "scores"
        )

    def _count(self, rows: RowIndex) -> None:
        """Count the score vectors that leave of some rows, where a policy limits them.

        With batches of SGD these are the times that scores of one row have left, at
        most.
        """
        data, outputs = self.data, self.model.outputs
        if data.limit is None:
            return
        vectors = outputs
        if len(data.batch_start) > 1:
            times = self.vectors.get(RELEASED, np.zeros(len(data.features)))
            before = times.max(initial=0.0)
            times[rows] += outputs
            vectors = int(times.max(initial=0.0) - before)
            self.vectors[RELEASED] = times
        self.releaser.scored[self.number, data.limit] += vectors

    def _noisy_scores(
        self, features: local_model.Features, batch: int | None = None
    ) -> FloatArray:
        return self.releaser.scores(self.finite(self.model.scores(features)), batch)

    def _encoded(
        self, scores: FloatArray, masks: ScoreMasks | None, rows: RowIndex, name: str
    ) -> AnyArray:
        if masks is None:
            return sent_scores(scores, None, rows, name)
        number = int(self.vectors[SCORES_NUMBER][0])
        words = sent_scores(scores, masks, rows, f"{number} {name}")
        self.releaser.masked.append(Masked(self.number, f"{name} {number}", words))
        return words

    def begin_scores(self, number: int) -> None:
        """Take the number of the scores of this message, which names their masks.

        No two scores have one number: their difference would be without a mask.
        """
        before = self.vectors.get(SCORES_NUMBER)
        if before is not None and number <= before[0]:
            raise errors.MessageError(
                f"'scores-number' is {number}; the run is at {before[0]:.0f}"
            )
        if number > self.data.most_scores:
            raise errors.ProposalError(
                f"'scores-number': the run was proposed with {self.data.most_scores} "
                f"at most, and the request says {number}"
            )
        self.vectors[SCORES_NUMBER] = np.array([float(number)])

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
        self.vectors[SUMS] = self.vectors.get(SUMS, np.zeros(1)) + 1.0
        if (count := int(self.vectors[SUMS][0])) > self.data.most_sums:
            raise errors.ProposalError(
                f"the run was proposed with {self.data.most_sums} sums over the shards "
                f"of table {self.data.table!r}, and the request asks for {count}"
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
        if SUMS not in self.vectors:
            raise errors.MessageError("it brings a sum, but no share has left")
        return f"{self.vectors[SUMS][0]:.0f}"

    def moments(self, step: FloatArray, kappa: float) -> FloatArray:
        """Return [T, 1]^T (G * step) to be sent or used, (d [+ 1], d_c), of (n, d_c).

        It adds up over the shards; of a private run it has noise.
        """
        data, intercept = self.data, self.linear.intercept
        if data.plan.statistics is None:
            self.releaser.check_clear(MOMENTS)
            return self._weighted_sum(step)
        return (
            self.releaser.moments(data.rows(intercept=intercept), kappa * step) / kappa
        )

    def _weighted_sum(self, values: FloatArray) -> FloatArray:
        """Return [T, 1]^T (G * values), (d [+ 1], d_c), of values (n, d_c)."""
        weighted = self.data.multiplicity[:, None] * values
        return local_model.moment(
            self.data.trained, weighted, intercept=self.linear.intercept
        )

    def fit_consensus_exactly(
        self, solver: Solver, target: FloatArray, kappa: float, rho_in: float
    ) -> FloatArray:
        """Fit theta^q (Eq. 22) of a linear model and return theta^q + u^q, (p,).

        With theta = a + delta, a = w - u, this is a ridge regression of strength rho_in
        on the target minus the scores of a. ``solver`` penalises the intercept, too.
        """
        centre = self.model.parameters = self.centre
        remaining = target - self.model.scores(self.data.trained)
        delta = solver.solve(self._weighted_sum(remaining), kappa, rho_in)
        return self.propose(centre + delta.ravel())

    @property
    def centre(self) -> FloatArray:
        """The point that theta^q is pulled to, w - u, (p,)."""
        return self.vectors["consensus"] - self.vectors["consensus_duals"]

    def set_inner_penalty(self, rho_in: float) -> None:
        """Use rho_in from now on; scaled duals u are divided by it, so they follow."""
        if (before := self.vectors.get("rho_in")) is not None:
            self.vectors["consensus_duals"] *= before[0] / rho_in
        self.vectors["rho_in"] = np.array([rho_in])

    def propose(self, theta: FloatArray) -> FloatArray:
        """Store theta^q; return theta^q + u^q, all that the server needs, (p,)."""
        self.vectors["theta"] = theta
        return theta + self.vectors["consensus_duals"]

    def accept_consensus(self, consensus: FloatArray) -> None:
        """Take w and update u += theta - w (Eq. 21); the shard predicts with w."""
        self.vectors["consensus_duals"] += self.vectors["theta"] - consensus
        self.vectors["consensus"] = consensus
        self.model.parameters = consensus

    def advance(self, length: float, conjugacy: float) -> None:
        """Take a step theta += a p, p = v + c p, of conjugate gradients."""
        if DESCENT not in self.vectors:
            raise errors.MessageError("no direction has left")
        last = self.vectors.get(DIRECTION, np.zeros_like(self.vectors[DESCENT]))
        direction = self.vectors[DIRECTION] = self.vectors[DESCENT] + conjugacy * last
        self.model.parameters = self.model.parameters + length * direction

    def mark_best(self) -> None:
        """Copy the model, which is the best so far."""
        self.vectors[BEST] = self.model.parameters.copy()
        if SCORE_SUMS in self.vectors:
            self.vectors[BEST_SUMS] = self.vectors[SCORE_SUMS]

    def return_to_best(self) -> None:
        """Take the model that was marked as the best, if one was."""
        self.model.parameters = self.vectors.get(BEST, self.model.parameters)
        if BEST_SUMS in self.vectors:
            self.vectors[SCORE_SUMS] = self.vectors[BEST_SUMS]

    def step(self, gradient: FloatArray, learning_rate: float, momentum: float) -> None:
        """Take one SGD step (Eq. 13 or 19) with the mean gradient of the loss, (p,).

        velocity = momentum * velocity + gradient + beta * theta (no beta for biases);
        theta -= learning_rate * velocity.
        """
        theta = self.model.parameters
        decay = self.data.l2 * np.where(self.model.penalised, theta, 0.0)
        velocity = self.vectors["momentum"] = (
            momentum * self.vectors["momentum"] + decay + gradient
        )
        self.model.parameters = theta - learning_rate * velocity

    @property
    def linear(self) -> local_model.LinearModel:
        """The model, which must be linear."""
        if not isinstance(self.model, local_model.LinearModel):
            raise TypeError(f"{type(self.model).__name__} has no exact solution")
        return self.model


def body_of(bodies: Mapping[int, AnyBody], part: Participant) -> AnyBody:
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


def initial_vectors(
    model: local_model.LocalModel, update: Update
) -> dict[str, FloatArray]:
    """Return the state vectors that training by ``update`` needs besides theta."""
    zeros = np.zeros(len(model.parameters))
    if update is Update.CONSENSUS:
        return {
            "theta": model.parameters,
            "consensus": model.parameters,
            "consensus_duals": zeros,
        }
    return {"momentum": zeros}
