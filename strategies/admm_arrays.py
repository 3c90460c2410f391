"""The arrays of ADMM's server, and what an epoch does with them.

:class:`~strategies.admm.AdmmServer` decides (rho, relaxation, when to forget the past);
what it decides about lies here, in one place, so that it may lie elsewhere than in the
main memory. What comes from the sites and goes to them is a numpy array either way.
"""

from abc import ABC, abstractmethod
from typing import Final

from strategies import loj
from strategies.federation import Federation
from tp_flower.device.choice import CPU, CUDA, resolve
from tp_flower.errors import SettingsError
from tp_flower.experiment import Settings
from tp_flower.learning.admm import (
    AdmmState,
    LocalScores,
    Residuals,
    admm_step,
    initial_state,
    residuals,
)
from tp_flower.learning.anderson import AndersonMixer, Point
from tp_flower.learning.losses import FloatArray

LEAST_VALUES: Final = 1 << 22
"""Scores of joined rows below which a GPU's start costs more than it saves."""

FLOAT: Final = 8
WORKING: Final = 14
"""Arrays of N scores that an epoch on a device has at once, those between steps too."""


class AdmmArrays(ABC):
    """z, duals, the scores of the joined rows, and those of the tables' rows.

    Attributes:
        device: where they lie, ``"cpu"`` or ``"cuda"``.
    """

    device: str

    @abstractmethod
    def targets(
        self, rho: float, kappa: float, over_relaxation: float
    ) -> dict[str, FloatArray]:
        """Take the z- and dual update; return every table's target (n_i, d_c)."""

    @abstractmethod
    def take(self, local_scores: LocalScores) -> Residuals:
        """Take the sites' new scores (n_i, d_c); return the residuals of the epoch."""

    @abstractmethod
    def train_metrics(self) -> dict[str, float]:
        """Return the metrics of the scores that were taken last."""

    @abstractmethod
    def test_metrics(self) -> dict[str, float]:
        """Return those on the held-out rows; nothing without any."""

    @abstractmethod
    def mix(self, rho: float) -> None:
        """Move the next epoch's start by Anderson mixing, once scores were taken."""

    @abstractmethod
    def restart_mixing(self) -> None:
        """Forget the epochs before."""

    @property
    @abstractmethod
    def duals(self) -> FloatArray:
        """The duals lambda after their last update, (N, d_c)."""

    @property
    @abstractmethod
    def z(self) -> FloatArray:
        """The auxiliary variable z after its last update, (N, d_c)."""


class HostArrays(AdmmArrays):
    """The arrays in the main memory, as numpy's.

    Args:
        federation: the training problem.
        corrections: c.
        memory: epochs that Anderson mixing looks back on; 0 without.
    """

    device = CPU

    def __init__(self, federation: Federation, corrections: int, memory: int) -> None:
        self._federation = federation
        self._mixer = AndersonMixer(
            federation.train, memory, corrections, federation.weighting.train
        )
        self._stepped = initial_state(
            federation.base_score, federation.train.joined_rows, rho=1.0
        )
        local_scores = dict(federation.initial_scores)
        scores = loj.gather(federation, local_scores)
        self._reached = self._point = Point(scores, self._stepped.duals, local_scores)

    def targets(
        self, rho: float, kappa: float, over_relaxation: float
    ) -> dict[str, FloatArray]:
        """Take the z- and dual update; return every table's target (n_i, d_c)."""
        self._stepped, message = admm_step(
            AdmmState(self._stepped.z, self._point.duals, rho),
            self._point.scores,
            self._federation.train_labels,
            self._federation.loss,
            over_relaxation,
        )
        return loj.scatter_targets(
            self._federation, self._point.local_scores, message, kappa
        )

    def take(self, local_scores: LocalScores) -> Residuals:
        """Take the sites' new scores (n_i, d_c); return the residuals of the epoch."""
        before = self._reached.scores
        scores = loj.gather(self._federation, local_scores)
        self._reached = Point(scores, self._stepped.duals, local_scores)
        return residuals(
            self._stepped,
            scores,
            before,
            self._federation.base_score,
            self._federation.weighting.train_rows,
        )

    def train_metrics(self) -> dict[str, float]:
        """Return the metrics of the scores that were taken last."""
        return loj.train_metrics(self._federation, self._reached.scores)

    def test_metrics(self) -> dict[str, float]:
        """Return those on the held-out rows; nothing without any."""
        return loj.test_metrics(self._federation, self._reached.local_scores)

    def mix(self, rho: float) -> None:
        """Move the next epoch's start by Anderson mixing, once scores were taken."""
        self._point = self._mixer.mix(rho, self._point, self._reached)

    def restart_mixing(self) -> None:
        """Forget the epochs before."""
        self._mixer.restart()

    @property
    def duals(self) -> FloatArray:
        """The duals lambda after their last update, (N, d_c)."""
        return self._stepped.duals

    @property
    def z(self) -> FloatArray:
        """The auxiliary variable z after its last update, (N, d_c)."""
        return self._stepped.z


def make_arrays(
    federation: Federation, settings: Settings, corrections: int, memory: int
) -> AdmmArrays:
    """Return the arrays where the setting ``server-device`` wants them.

    Raises:
        SettingsError: it wants them on a GPU that is not there, or too small.
    """
    values = federation.train.joined_rows * federation.loss.outputs
    name = server_device(settings, is_large=values >= LEAST_VALUES)
    if name == CPU:
        return HostArrays(federation, corrections, memory)
    # torch takes a second to import
    from strategies.device_arrays import DeviceArrays
    from tp_flower.device.torch_device import free_bytes, torch_device

    device = torch_device(name)
    needed, free = device_bytes(federation, memory), free_bytes(device)
    if needed <= free:
        return DeviceArrays(federation, corrections, memory, device)
    if settings.server_device == CUDA:
        raise SettingsError(
            f"server-device is {CUDA!r}, but the server's arrays take about "
            f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of the GPU's memory are "
            "free; allowed: 'cpu', 'auto', or a smaller anderson-memory"
        )
    return HostArrays(federation, corrections, memory)


def server_device(settings: Settings, *, is_large: bool = True) -> str:
    """Return ``"cpu"`` or ``"cuda"``, where the server's arrays are to lie.

    Raises:
        SettingsError: there is no such device.
    """
    return resolve(
        settings.server_device, "server-device", "the server", is_large=is_large
    )


def device_bytes(federation: Federation, memory: int) -> int:
    """Return about the bytes that :class:`DeviceArrays` take on their device."""
    train, test = federation.train.joined_rows, len(federation.test_labels)
    own = sum(table.total_rows for table in federation.tables.values())
    epoch = WORKING * train + 2 * test + 5 * own
    # the points and the steps of the last epochs
    mixed = memory * (3 * train + 2 * own) if memory else 0
    row_of = (train + test) * (4 * len(federation.tables) + FLOAT)
    return row_of + (epoch + mixed) * federation.loss.outputs * FLOAT
