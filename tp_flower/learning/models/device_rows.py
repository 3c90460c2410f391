"""The device that computes torch models, and arrays on it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp_flower.learning.models.local_model import CUDA


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


def as_tensor(values: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
    """Return the values where they are, with their type; memory is shared if it can."""
    if isinstance(values, torch.Tensor):
        return values
    # torch warns of read-only arrays (memory maps), but shared memory is only read
    writable = values if values.flags.writeable else values.copy()
    return torch.from_numpy(np.ascontiguousarray(writable))
