"""The arrays of ADMM's server on a device, as torch tensors of float64.

What goes up per epoch are the sites' scores, what comes down their targets and the
metrics' few numbers: both are n_i, not N.
"""

from collections.abc import Mapping

import torch

from strategies.admm_arrays import AdmmArrays
from strategies.federation import Federation
from tp_flower.device.admm import admm_step, residuals, sum_scores, targets
from tp_flower.device.anderson import DeviceMixer
from tp_flower.device.losses import on_device
from tp_flower.device.metrics import evaluate
from tp_flower.device.rows import DeviceRows
from tp_flower.device.torch_device import to_device, to_host
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.admm import LocalScores, Residuals
from tp_flower.learning.losses import FloatArray

Scores = dict[str, torch.Tensor]


class DeviceArrays(AdmmArrays):
    """The arrays on a device.

    Args:
        federation: the training problem.
        corrections: c.
        memory: epochs that Anderson mixing looks back on; 0 without.
        device: where to.
    """

    def __init__(
        self,
        federation: Federation,
        corrections: int,
        memory: int,
        device: torch.device,
    ) -> None:
        self._federation, self._device = federation, device
        self.device = device.type
        self._loss = on_device(federation.loss)
        self._labels = to_device(federation.train_labels, device)
        self._base = to_device(federation.base_score, device)
        self._train = self._rows(federation.train)
        self._test = self._rows(federation.test) if federation.test else {}
        self._weights = _Weights(federation, device)
        self._mixer = DeviceMixer(
            [(corrections * mass).sqrt()[:, None] for mass in self._weights.masses],
            memory,
            None if self._weights.rows is None else self._weights.rows.sqrt(),
        )
        self._local = self._on_device(federation.initial_scores)
        self._scores = self._gather(self._local)
        self._z = self._base.expand_as(self._scores).clone()
        self._duals = torch.zeros_like(self._z)
        self._start = [self._scores, self._duals, *self._local.values()]
        self._rho = 1.0

    def targets(
        self, rho: float, kappa: float, over_relaxation: float
    ) -> dict[str, FloatArray]:
        """Take the z- and dual update; return every table's target (n_i, d_c)."""
        self._rho = rho
        scores, duals, *local = self._start
        self._z, self._duals, message = admm_step(
            self._loss, self._labels, rho, over_relaxation, (scores, self._z, duals)
        )
        if self._weights.rows is not None:
            message = message * self._weights.rows
        tables = zip(self._train.items(), local, strict=True)
        inverse = self._weights.inverse_masses
        return {
            name: to_host(targets(rows, own, message, kappa, inverse.get(name)))
            for (name, rows), own in tables
        }

    def take(self, local_scores: LocalScores) -> Residuals:
        """Take the sites' new scores (n_i, d_c); return the residuals of the epoch."""
        before = self._scores
        self._local = self._on_device(local_scores)
        self._scores = self._gather(self._local)
        return residuals(
            self._z,
            self._duals,
            self._rho,
            self._base,
            (self._scores, before),
            self._weights.rows,
        )

    def train_metrics(self) -> dict[str, float]:
        """Return the metrics of the scores that were taken last."""
        weights = self._weights.rows
        return evaluate(
            self._federation.loss,
            self._loss,
            self._scores,
            self._labels,
            None if weights is None else weights[:, 0],
        )

    def test_metrics(self) -> dict[str, float]:
        """Return those on the held-out rows; nothing without any."""
        if not self._test:
            return {}
        federation = self._federation
        labels = to_device(federation.test_labels, self._device)
        given = federation.weighting.test
        weights = None if given is None else to_device(given, self._device)
        pairs = [(rows, self._local[name]) for name, rows in self._test.items()]
        scores = sum_scores(self._base, len(labels), pairs)
        return evaluate(federation.loss, self._loss, scores, labels, weights)

    def mix(self, rho: float) -> None:
        """Move the next epoch's start by Anderson mixing, once scores were taken."""
        reached = [self._scores, self._duals, *self._local.values()]
        self._start = self._mixer.mix(rho, self._start, reached)

    def restart_mixing(self) -> None:
        """Forget the epochs before."""
        self._mixer.restart()

    @property
    def duals(self) -> FloatArray:
        """The duals lambda after their last update, (N, d_c)."""
        return to_host(self._duals)

    @property
    def z(self) -> FloatArray:
        """The auxiliary variable z after its last update, (N, d_c)."""
        return to_host(self._z)

    def _rows(self, mapping: TableMapping) -> dict[str, DeviceRows]:
        return {
            name: DeviceRows(rows, self._device)
            for name, rows in mapping.tables.items()
        }

    def _on_device(self, local_scores: Mapping[str, FloatArray]) -> Scores:
        """Return the scores in the mapping's order of tables, as float64."""
        return {
            name: to_device(local_scores[name], self._device).double()
            for name in self._train
        }

    def _gather(self, local_scores: Scores) -> torch.Tensor:
        pairs = [(rows, local_scores[name]) for name, rows in self._train.items()]
        return sum_scores(self._base, len(self._labels), pairs)


class _Weights:
    """The weights of the joined training rows on a device.

    Attributes:
        rows: w, (N, 1); None where all weigh alike.
        masses: G^w_i, or G_i, of each table, (n_i,).
        inverse_masses: 1 / G^w_i by table, (n_i,); empty where all weigh alike.
    """

    def __init__(self, federation: Federation, device: torch.device) -> None:
        own, tables = federation.weighting.train, federation.train.tables
        self.rows: torch.Tensor | None = None
        self.inverse_masses: Scores = {}
        counts = {name: rows.multiplicity for name, rows in tables.items()}
        masses = counts if own is None else own.masses
        self.masses = [to_device(masses[name], device).double() for name in tables]
        if own is not None:
            self.rows = to_device(own.rows, device)[:, None]
            inverse = own.inverse_masses
            self.inverse_masses = {
                name: to_device(inverse[name], device) for name in tables
            }
