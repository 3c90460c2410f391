"""The torch device behind a name, its free memory, and how to move arrays to it."""

import numpy as np
import numpy.typing as npt
import torch

from tp_flower.arrays import FloatArray
from tp_flower.learning.models.device_choice import CUDA

MOST_ON_CPU = 1 << 62


def torch_device(name: str) -> torch.device:
    """Return the device of ``"cpu"`` or ``"cuda"``, set to full precision.

    TF32 rounds the factors of float32 products to ten bits, 5e-4 of their size: scores
    would differ from the CPU's by more than 1e-4. It is off by default, but other code
    in the process (a model's factory, say) may have turned it on.
    """
    if name == CUDA:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be had on a device; as good as all on the CPU."""
    if device.type != CUDA:
        return MOST_ON_CPU
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


def to_device(
    values: npt.NDArray[np.floating] | npt.NDArray[np.integer], device: torch.device
) -> torch.Tensor:
    """Return the array on a device, with its type; it is shared where it can be."""
    # torch warns of read-only arrays (memory maps); what is shared is only read here
    writable = values if values.flags.writeable else values.copy()
    return torch.from_numpy(np.ascontiguousarray(writable)).to(device)


def to_host(values: torch.Tensor) -> FloatArray:
    """Return a tensor as an array of float64."""
    array: FloatArray = values.detach().cpu().numpy().astype(np.float64, copy=False)
    return array
