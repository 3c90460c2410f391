"""The devices that tests of the torch kernels run on: the CPU always, a GPU if any."""

import pytest
import torch

from tp_flower.learning.models import device_rows as module
from tp_flower.learning.models import neural
from tp_flower.learning.models.local_model import CUDA

NO_GPU = "torch finds no CUDA device here"

cuda = pytest.param(
    CUDA,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU),
    ],
)
each_device = pytest.mark.parametrize("device_name", ["cpu", cuda])


def pretend(monkeypatch: pytest.MonkeyPatch, device_name: str) -> None:
    """Let what asks for CUDA get this device, by the same way."""
    if device_name == CUDA:
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for own in (module, neural):
        monkeypatch.setattr(own, "torch_device", lambda _: torch.device("cpu"))
