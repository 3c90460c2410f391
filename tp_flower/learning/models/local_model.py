"""Local models f_i: what one table's rows add to the scores of the joined rows.

A model maps the encoded rows of its table (n, d) to local scores (n, d_c). Its
parameters are one flat vector, so that gradients, averages and saved states need no
structure. Only the label table's model has an output intercept: one per table would
make the sum degenerate (the server's fixed base score replaces the others).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tp_flower.arrays import (
    MISSING,
    AnyArray,
    FloatArray,
    blocks,
    blocks_of,
    run_in_threads,
)
from tp_flower.errors import SettingsError
from tp_flower.features.sparse import (
    EncodedRows,
    SparseRows,
    append_column,
    columns_of,
    dense,
)
from tp_flower.joins.pairs import NO_REGION

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_array

LINEAR: Final = "linear"
CENTRES: Final = "centres"  # kind of a clustering's model

MOST_LAYERS: Final = 64  # of a network, besides the last
Units = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""A number of scores per row, or the width of a layer."""
MOST_SCALE = 1e30
LEAST_SCALE = 1 / MOST_SCALE

CACHED_VALUES = 1 << 18  # converted at a time: 2 MB, about a core's cache
SMALL_PRODUCT = 1_000_000  # below it BLAS starts no threads of its own
LEAST_VALUES = 1 << 20  # minimum number of features per thread
FeatureArray = npt.NDArray[np.float32]
Features: TypeAlias = "EncodedRows | torch.Tensor"
"""Rows (n, d) float32: a tensor on the device that computes a torch model."""


def rows_of(features: Features, rows: npt.NDArray[np.integer]) -> Features:
    """Return rows (k,) of features, (k, d)."""
    if isinstance(features, np.ndarray):
        # up to four times as fast as indexing, the narrower the faster
        return features.take(rows, axis=0)
    if isinstance(features, SparseRows):
        return features.take(rows)
    return features[rows]


def pair_features(
    features: Features, rows: AnyArray, regions: AnyArray | None
) -> EncodedRows:
    """Return rows (m,) of features, with regions as a last column, (m, d + 1).

    Without ``regions`` (m,) it has none: of the table that is divided into them.
    """
    paired = host_features(rows_of(features, rows))
    if regions is None:
        return paired
    column = np.where(regions == NO_REGION, MISSING, regions).astype(np.float32)
    return append_column(paired, column)


def host_features(features: Features) -> EncodedRows:
    """Return features for work that stays on the CPU, wherever the original is."""
    if isinstance(features, np.ndarray | SparseRows):
        return features
    return features.cpu().numpy()


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The specification of a local model, without its parameters.

    Its kind is one of :data:`NUMPY_KINDS`, ``"mlp"`` or ``"package.module:factory"``,
    the dotted path of a function ``(features, outputs, intercept) -> torch.nn.Module``.
    Torch models multiply their output by ``output_scale``, in regression the label's
    standard deviation, so that weights of order one suffice. All shards of a table have
    the same seed, and start from the same parameters.
    """

    kind: str = "linear"
    outputs: Units = 1
    intercept: bool = False
    hidden_sizes: Annotated[tuple[Units, ...], msgspec.Meta(max_length=MOST_LAYERS)] = (
        16,
    )
    output_scale: float = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0

    def __post_init__(self) -> None:
        """Refuse a scale so small that clips, which are in its units, vanish."""
        if self.output_scale != 0 and not (
            LEAST_SCALE <= self.output_scale <= MOST_SCALE
        ):
            raise ValueError(
                f"output_scale must be 0, or from {LEAST_SCALE:g} to {MOST_SCALE:g}"
            )


class LocalModel(ABC):
    """A differentiable model over the rows of one table."""

    parameters: FloatArray  # flat parameters, (p,)

    outputs: int  # d_c, scores per row

    penalised: npt.NDArray[np.bool_]
    """Which parameters the penalty R = 1/2 ||theta||^2 covers: all but biases, (p,)."""

    takes_regions = False
    """Whether its rows are scored by the region of another table's row as well."""

    @abstractmethod
    def scores(self, features: Features) -> FloatArray:
        """Return the local scores h_i of rows (n, d), (n, d_c)."""

    def regions(self, features: Features) -> AnyArray | None:  # noqa: ARG002
        """Return the region of rows (n, d), uint8 (n,); None of a model without any."""
        return None

    def part(
        self,
        features: Features,  # noqa: ARG002
        columns: npt.NDArray[np.integer],  # noqa: ARG002
    ) -> FloatArray | None:
        """Return what columns (k,) of rows (n, d) add to their scores, (n, d_c).

        None of a model whose scores are not the sum of what its columns add.
        """
        return None

    def contributions(
        self, features: Features, columns: Sequence[npt.NDArray[np.integer]]
    ) -> Sequence[FloatArray | None]:
        """Return what each feature, some columns, adds to the scores, (n, d_c) each.

        That is its :meth:`part`; of trees, whose scores are no sum, the SHAP value.
        None of a model that has neither.
        """
        return [self.part(features, each) for each in columns]

    def pullback(self, features: Features, messages: FloatArray) -> FloatArray:
        """Return sum_j Y_j^T dh_j/dtheta (Eq. 12 without 1/N and penalty), (p,)."""
        raise NotImplementedError  # of models that the server solves


class LinearModel(LocalModel):
    """h = T W (+ c): float64 parameters, W first, then the intercept if there is one.

    >>> model = LinearModel(features=2, outputs=1, intercept=True)
    >>> model.parameters[:] = [1.0, 10.0, 0.5]
    >>> model.scores(np.array([[1, 1], [2, 0]], dtype=np.float32)).ravel().tolist()
    [11.5, 2.5]
    """

    def __init__(self, features: int, outputs: int, *, intercept: bool) -> None:
        self.features = features
        self.outputs = outputs
        self.intercept = intercept
        rows = features + int(intercept)
        self.parameters = np.zeros(rows * outputs)
        self.penalised = np.arange(rows * outputs) < features * outputs

    def at(self, parameters: FloatArray) -> "LinearModel":
        """Return the model with other parameters, (p,)."""
        model = LinearModel(self.features, self.outputs, intercept=self.intercept)
        model.parameters = parameters
        return model

    @property
    def weights(self) -> FloatArray:
        """The parameters as a matrix (d [+ 1], d_c); the intercept is the last row."""
        return self.parameters.reshape(-1, self.outputs)

    def scores(self, features: Features) -> FloatArray:
        """Return T W (+ c), accumulated in float64."""
        weights = self.weights[: self.features]
        rows = host_features(features)
        out = np.empty((len(features), self.outputs))

        def score(span: slice) -> None:
            for block, wide in _float64_blocks(rows, span, self.outputs):
                out[block] = wide @ weights
            if self.intercept:
                out[span] += self.weights[-1]

        run_in_threads(score, len(rows), _least_rows(rows))
        return out

    def part(
        self, features: Features, columns: npt.NDArray[np.integer]
    ) -> FloatArray | None:
        """Return what columns (k,) of rows (n, d) add to their scores, (n, d_c)."""
        model = LinearModel(len(columns), self.outputs, intercept=False)
        model.parameters = self.weights[columns].ravel()
        return model.scores(columns_of(host_features(features), columns))

    def pullback(self, features: Features, messages: FloatArray) -> FloatArray:
        """Return T^T Y (and the column sums of Y for the intercept), flat."""
        return moment(features, messages, intercept=self.intercept).ravel()


def moment(features: Features, messages: FloatArray, *, intercept: bool) -> FloatArray:
    """Return [T, 1]^T Y, (d [+ 1], d_c), accumulated in float64 block by block."""
    rows = host_features(features)
    width = rows.shape[1]
    outputs = messages.shape[1]

    def add_up(span: slice) -> FloatArray:
        total = np.zeros((width, outputs))
        for block, wide in _float64_blocks(rows, span, outputs):
            total += wide.T @ messages[block]
        return total

    out = np.zeros((width + int(intercept), outputs))
    for part in run_in_threads(add_up, len(rows), _least_rows(rows)):
        out[:width] += part
    if intercept:
        out[-1] = messages.sum(axis=0)
    return out


def _float64_blocks(
    features: EncodedRows, span: slice, outputs: int
) -> Iterator[tuple[slice, "FloatArray | csr_array"]]:
    """Yield blocks of a span of rows in float64; each is overwritten by the next.

    A block stays in the cache between its conversion and its product, which is too
    small for BLAS to start threads: several of ours are running already.
    """
    if isinstance(features, SparseRows):
        # a product of a block has a number for each of its columns, too
        size = max(CACHED_VALUES // max(features.stored, 1), features.width)
        for block in blocks_of(span, size):
            yield block, features[block].matrix()
        return
    # slicing a plain array costs less than slicing a memory map
    array = np.asarray(features)
    values = min(CACHED_VALUES, SMALL_PRODUCT // outputs)
    size = max(values // max(features.shape[1], 1), 1)
    wide = np.empty((min(size, span.stop - span.start), features.shape[1]))
    for block in blocks_of(span, size):
        converted = wide[: block.stop - block.start]
        np.copyto(converted, array[block])
        yield block, converted


def _least_rows(features: EncodedRows) -> int:
    if isinstance(features, SparseRows):
        values = features.stored
    else:
        values = int(features.shape[1])
    return max(LEAST_VALUES // max(values, 1), 1)


class CentresModel(LocalModel):
    """h_k = ||t - c_k||^2 of k centres: float64 parameters, centre after centre.

    >>> model = CentresModel(features=2, outputs=2)
    >>> model.parameters[:] = [0.0, 0.0, 3.0, 4.0]
    >>> model.scores(np.zeros((1, 2), dtype=np.float32)).tolist()
    [[0.0, 25.0]]
    """

    def __init__(self, features: int, outputs: int) -> None:
        self.features = features
        self.outputs = outputs
        self.parameters = np.zeros(outputs * features)
        self.penalised = np.zeros(outputs * features, np.bool_)

    @property
    def centres(self) -> FloatArray:
        """The parameters as a matrix (k, d)."""
        return self.parameters.reshape(self.outputs, self.features)

    def scores(self, features: Features) -> FloatArray:
        """Return ||t_j - c_k||^2, (n, k)."""
        return squared_distances(dense(host_features(features)), self.centres)


def squared_distances(
    rows: npt.NDArray[np.floating[Any]], centres: FloatArray
) -> FloatArray:
    """Return ||t_j - c_k||^2 of rows (n, d) and centres (k, d), (n, k), float64, >= 0.

    >>> squared_distances(np.array([[1.0], [3.0]]), np.array([[0.0], [4.0]])).tolist()
    [[1.0, 9.0], [9.0, 1.0]]
    """
    norms = (centres**2).sum(axis=1)
    out = np.empty((len(rows), len(centres)))
    for block in blocks(len(rows)):
        wide = np.asarray(rows[block], np.float64)
        np.matmul(wide, -2.0 * centres.T, out=out[block])
        out[block] += (wide**2).sum(axis=1)[:, None] + norms
    return np.maximum(out, 0.0, out=out)


@dataclass(frozen=True)
class ModelKind:
    """A kind of models that need no torch, and score 0 before they are trained.

    Attributes:
        build: makes the model of a table with so many encoded columns.
        count: says how many parameters such a model has before it is trained.
        fields: those of a specification that say something about such a model.
        portable: makes a ``Portable`` of such a model's specification, columns and
            parameters, for an export; None where there is none.
    """

    build: Callable[[ModelSpec, int], LocalModel]
    count: Callable[[ModelSpec, int], int]
    fields: tuple[str, ...] = ("intercept", "hidden_sizes", "seed")
    portable: Callable[[ModelSpec, int, AnyArray], object] | None = None


NUMPY_KINDS: Final[dict[str, ModelKind]] = {
    LINEAR: ModelKind(
        lambda spec, features: LinearModel(
            features, spec.outputs, intercept=spec.intercept
        ),
        lambda spec, features: (features + int(spec.intercept)) * spec.outputs,
    ),
    CENTRES: ModelKind(
        lambda spec, features: CentresModel(features, spec.outputs),
        lambda spec, features: features * spec.outputs,
        fields=(),
    ),
}
"""The kinds that are registered; every other kind is one of torch."""


def register_kind(name: str, kind: ModelKind) -> None:
    """Add a kind of models; ValueError if there is another one of its name."""
    if NUMPY_KINDS.setdefault(name, kind) is not kind:
        raise ValueError(f"kind {name!r} of models is registered: choose another name")


def build_model(spec: ModelSpec, features: int, device: str = "auto") -> LocalModel:
    """Return the local model of a table with ``features`` encoded columns."""
    if spec.kind in NUMPY_KINDS:
        return NUMPY_KINDS[spec.kind].build(spec, features)
    # torch takes a second to import: linear models do without
    from tp_flower.learning.models.neural import build_torch_model

    return build_torch_model(spec, features, device)


def count_parameters(spec: ModelSpec, features: int) -> int:
    """Return how many parameters a model has before training, without allocating any.

    >>> spec = ModelSpec("mlp", hidden_sizes=(3,), intercept=True)
    >>> count_parameters(spec, features=2)
    13
    """
    if spec.kind in NUMPY_KINDS:
        return NUMPY_KINDS[spec.kind].count(spec, features)
    if spec.kind == "mlp":
        widths = (features, *spec.hidden_sizes)
        hidden = sum((below + 1) * width for below, width in pairwise(widths))
        return hidden + (widths[-1] + int(spec.intercept)) * spec.outputs
    from tp_flower.learning.models.neural import count_torch_parameters

    return count_torch_parameters(spec, features)


@dataclass(frozen=True)
class FitProblem:
    """A penalised weighted least-squares fit of a model to targets.

        minimise  (kappa / 2N) sum_j G_j ||f(theta; T_j) - target_j||^2
                  + strength / 2 ||theta - centre||^2     over the ``penalised`` ones

    T is ``features`` (n, d), G ``multiplicity`` (n,), or G^w with weighted joined rows,
    N ``joined_rows``. In the theta-update strength is beta and centre (p,) zero; in a
    consensus step they are rho_in and w - u.
    """

    features: Features
    multiplicity: npt.NDArray[np.integer] | FloatArray
    target: FloatArray
    kappa: float
    joined_rows: int
    strength: float
    centre: FloatArray
    penalised: npt.NDArray[np.bool_]

    @property
    def weights(self) -> FloatArray:
        """G with mean 1, (n,); at least one row must be in some joined row."""
        weights: FloatArray = self.multiplicity / self.multiplicity.mean()
        return weights

    @property
    def relative_penalty(self) -> FloatArray:
        """The weight of the penalty relative to a weighted mean over the rows, (p,)."""
        data_weight = self.kappa * float(self.multiplicity.sum())
        return np.where(
            self.penalised, self.strength * self.joined_rows / data_weight, 0.0
        )

    def settle(self, parameters: FloatArray) -> FloatArray:
        """Return the parameters (p,) that minimise the penalty alone."""
        return np.where(self.penalised & (self.strength > 0), self.centre, parameters)


CPU: Final = "cpu"
CUDA: Final = "cuda"
AUTO: Final = "auto"

HIDDEN: Final = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide all devices


def resolve(name: str) -> str:
    """Return ``"cpu"`` or ``"cuda"``; ``"auto"`` is CUDA if it exists."""
    if name == CPU:
        return CPU
    import torch

    if torch.cuda.is_available():
        return CUDA
    if name == AUTO:
        return CPU
    reason = (
        " (CUDA_VISIBLE_DEVICES hides it, as Flower's simulation does where "
        "client-resources-num-gpus is 0)"
    )
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() not in HIDDEN:
        reason = ""
    raise SettingsError(
        f"device is {name!r}, but this site has no CUDA device that torch "
        f"{torch.__version__} can use{reason}; allowed there: 'cpu' and 'auto'"
    )
