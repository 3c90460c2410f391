"""A table's features on a device: copied once where they fit, else streamed in blocks.

Products are computed on blocks that the device widens to float64, as the CPU does:
float32 sums over millions of rows would lose the digits that distinguish the
eigenvalues of a rank-deficient Gram matrix from zero.

Features that exceed the free memory stay where they are, usually in a file. Each pass
copies them block by block through two buffers of pinned memory: the device reads one
while the CPU fills the other.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tp_flower.arrays import FloatArray, blocks
from tp_flower.learning.models.local_model import CUDA, FeatureArray


def torch_device(name: str) -> torch.device:
    """Return the device ``"cpu"`` or ``"cuda"``, set to full precision.

    TF32 rounds the factors of float32 products to ten bits, 5e-4 of their size: scores
    would differ from the CPU's by more than 1e-4. It is off by default, but other code
    in the process (such as a model's factory) may have turned it on.
    """
    if name == CUDA:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes on a device; practically unlimited on the CPU."""
    if device.type != CUDA:
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


def to_device(
    values: npt.NDArray[np.floating] | npt.NDArray[np.integer], device: torch.device
) -> torch.Tensor:
    """Return the array on a device, with its type; memory is shared if possible."""
    # torch warns of read-only arrays (memory maps), but shared memory is only read
    writable = values if values.flags.writeable else values.copy()
    return torch.from_numpy(np.ascontiguousarray(writable)).to(device)


def to_host(values: torch.Tensor) -> FloatArray:
    """Return a tensor as an array of float64."""
    return values.detach().cpu().numpy().astype(np.float64, copy=False)


BLOCK_VALUES: Final = 1 << 24
"""Features of a block: 64 MB, and twice that in float64."""

RESIDENT_SHARE: Final = 0.7
"""Share of the free memory; the rest is for what is computed with the features."""

Positions = npt.NDArray[np.int64]


class DeviceFeatures:
    """Features (n, d), with products that are computed on a device.

    The rows of ``source`` are streamed to the device, or ``resident`` there; ``rows``,
    (n,), selects some of them.
    """

    def __init__(
        self,
        source: FeatureArray,
        device: torch.device,
        resident: Tensor | None,
        rows: Positions | None = None,
    ) -> None:
        self._source, self.device, self._resident = source, device, resident
        self._rows = rows
        count = len(source) if rows is None else len(rows)
        self.shape = (count, source.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def place(cls, source: FeatureArray, device: torch.device) -> "DeviceFeatures":
        """Return the features with a copy on the device, if there is room for one."""
        placed = cls(source, device, None)
        if source.nbytes > RESIDENT_SHARE * free_bytes(device):
            return placed
        try:
            resident = torch.empty(source.shape, dtype=torch.float32, device=device)
            for block, rows in placed.blocks():
                resident[block] = rows
        except torch.OutOfMemoryError:
            # another process was faster
            return placed
        return cls(source, device, resident)

    @property
    def is_resident(self) -> bool:
        """Whether the rows are on the device."""
        return self._resident is not None

    @property
    def host(self) -> FeatureArray:
        """The same rows as a numpy array, (n, d)."""
        return self._source if self._rows is None else self._source[self._rows]

    def __getitem__(self, rows: Any) -> "DeviceFeatures":
        """Return some of the rows; nothing is copied."""
        if self._rows is None and isinstance(rows, slice):
            resident = None if self._resident is None else self._resident[rows]
            return DeviceFeatures(self._source[rows], self.device, resident)
        positions = np.asarray(rows) if self._rows is None else self._rows[rows]
        if positions.dtype == np.bool_:
            positions = np.flatnonzero(positions)
        positions = positions.astype(np.int64)
        return DeviceFeatures(self._source, self.device, self._resident, positions)

    def blocks(self, size: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows in blocks on the device, which must not be changed.

        A size of 0 means as many rows as the memory for products allows.
        """
        largest = max(BLOCK_VALUES // max(self.shape[1], 1), 1)
        size = min(size or largest, largest, max(len(self), 1))
        if self._resident is None:
            stage = _Stage((size, self.shape[1]), self.device)
            for block in blocks(len(self), size):
                rows = block if self._rows is None else self._rows[block]
                yield block, stage.move(self._source[rows])
            return
        places = None if self._rows is None else to_device(self._rows, self.device)
        for block in blocks(len(self), size):
            if places is None:
                yield block, self._resident[block]
            else:
                yield block, self._resident.index_select(0, places[block])

    def tensor(self) -> Tensor:
        """Return all the rows on the device, which must not be changed."""
        if self._resident is not None and self._rows is None:
            return self._resident
        parts = [rows.clone() for _, rows in self.blocks()]
        return torch.cat(parts) if parts else torch.empty(self.shape).to(self.device)

    def times(self, weights: FloatArray) -> FloatArray:
        """Return T W, (n, d_c), for weights (d, d_c)."""
        factor = to_device(weights, self.device)
        out = factor.new_empty((len(self), weights.shape[1]))
        for block, rows in self.blocks():
            torch.mm(rows.double(), factor, out=out[block])
        return to_host(out)

    def moment(self, messages: FloatArray) -> FloatArray:
        """Return T^T Y, (d, d_c), for messages (n, d_c)."""
        upstream = to_device(messages, self.device)
        total = upstream.new_zeros((self.shape[1], messages.shape[1]))
        for block, rows in self.blocks():
            total.addmm_(rows.double().T, upstream[block])
        return to_host(total)

    def gram(self, multiplicity: npt.NDArray[Any]) -> FloatArray:
        """Return T^T diag(G) T, (d, d), for multiplicities (n,)."""
        roots = to_device(multiplicity, self.device).double().sqrt()[:, None]
        total = roots.new_zeros((self.shape[1], self.shape[1]))
        for block, rows in self.blocks():
            scaled = rows.double().mul_(roots[block])
            total.addmm_(scaled.T, scaled)
        return to_host(total)


class _Stage:
    """Two alternating buffers of pinned memory, which carry blocks to the device."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == CUDA
        self._buffers = [torch.empty(shape, pin_memory=self._is_cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def move(self, values: FeatureArray) -> Tensor:
        """Return the values on the device; on a CPU they are overwritten later."""
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        buffer = self._buffers[self._turn][: len(values)]
        np.copyto(buffer.numpy(), values)
        moved = buffer.to(self._device, non_blocking=True)
        if self._is_cuda:
            stream = torch.cuda.current_stream(self._device)
            self._copied[self._turn] = stream.record_event()
        return moved
