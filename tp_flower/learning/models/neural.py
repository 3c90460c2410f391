"""Local models built on torch: MLPs, and modules from a user's factory."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tp_flower.arrays import FloatArray, blocks
from tp_flower.errors import SettingsError
from tp_flower.features.sparse import SparseRows
from tp_flower.learning.models import local_model

EVALUATION_ROWS = 65536
EVALUATION_VALUES = 1 << 24  # 64 MiB of features at a time, of wide tables


def torch_device(name: str) -> torch.device:
    """Return the device ``"cpu"`` or ``"cuda"``, set to full precision.

    TF32 rounds the factors of float32 products to ten bits, 5e-4 of their size: scores
    would differ from the CPU's by more than 1e-4. It is off by default, but other code
    in the process (such as a model's factory) may have turned it on.
    """
    if name == local_model.CUDA:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes on a device; practically unlimited on the CPU."""
    if device.type != local_model.CUDA:
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(
        torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    )


def as_tensor(values: torch.Tensor | npt.NDArray[Any] | SparseRows) -> torch.Tensor:
    """Return the values where they are, with their type; memory is shared if it can."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, SparseRows):
        return torch.from_numpy(values.dense())
    # torch warns of read-only arrays (memory maps), but shared memory is only read
    writable = values if values.flags.writeable else values.copy()
    return torch.from_numpy(np.ascontiguousarray(writable))


class TorchModel(local_model.LocalModel):
    """A torch module as a local model, with float32 parameters on its device."""

    def __init__(self, module: nn.Module, spec: local_model.ModelSpec) -> None:
        self.module = module
        self.spec = spec
        self.outputs = spec.outputs
        self.penalised = np.concatenate(
            [
                np.full(parameter.numel(), parameter.ndim > 1)
                for parameter in module.parameters()
            ]
        )

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next(self.module.parameters()).device

    @property
    def parameters(self) -> FloatArray:
        """The module's parameters as one vector, (p,)."""
        vector = parameters_to_vector(self.module.parameters())
        return vector.detach().cpu().numpy().astype(np.float64)

    @parameters.setter
    def parameters(self, values: FloatArray) -> None:
        parameter = next(self.module.parameters())
        vector = torch.as_tensor(values, dtype=parameter.dtype, device=parameter.device)
        vector_to_parameters(vector, self.module.parameters())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scaled output of the module, (n, d_c)."""
        output: torch.Tensor = self.module(rows)
        return output * self.spec.output_scale

    def scores(self, features: local_model.Features) -> FloatArray:
        """Return the local scores, in chunks that bound the memory."""
        out = np.empty((len(features), self.spec.outputs))
        with torch.no_grad():
            for block, rows in _device_blocks(features, self.device):
                out[block] = self.forward(rows).cpu().numpy()
        return out

    def pullback(
        self, features: local_model.Features, messages: FloatArray
    ) -> FloatArray:
        """Return the vector-Jacobian product of the scores with Y, by autograd.

        Sums over chunks of rows bound the memory that autograd needs.
        """
        total = np.zeros(len(self.penalised))
        parameters = list(self.module.parameters())
        for block, rows in _device_blocks(features, self.device):
            scores = self.forward(rows)
            upstream = as_tensor(messages[block]).to(self.device, scores.dtype)
            gradients = torch.autograd.grad(scores, parameters, grad_outputs=upstream)
            total += parameters_to_vector(gradients).cpu().numpy()
        return total


def build_torch_model(
    spec: local_model.ModelSpec, features: int, device: str
) -> TorchModel:
    """Return the MLP or the factory's module, initialised from the spec's seed."""
    with torch.random.fork_rng(devices=[]):
        # forked: no module has a Generator argument; ``torch.manual_seed`` would seed
        # those of all accelerators as well, which takes longer than to make a network
        torch.default_generator.manual_seed(spec.seed)
        if spec.kind == "mlp":
            module = _mlp(features, spec)
        else:
            module = _call_factory(features, spec)
    return TorchModel(module.to(torch_device(local_model.resolve(device))), spec)


def count_torch_parameters(spec: local_model.ModelSpec, features: int) -> int:
    """Return how many parameters a factory's module has, from a copy without memory."""
    with torch.device("meta"):
        module = _call_factory(features, spec)
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class FitBudget:
    """The steps of a fit: passes over the rows, at least ``least_steps``.

    The learning rate is Adam's at the start; it falls to zero along a cosine.
    """

    passes: int = 4
    least_steps: int = 100
    batch_rows: int = 4096
    learning_rate: float = 2e-2


def fit_least_squares(
    model: TorchModel,
    problem: local_model.FitProblem,
    budget: FitBudget,
    rng: np.random.Generator,
) -> None:
    """Fit a torch model in place, warm-started from its current parameters.

    Adam on mini-batches of rows drawn without replacement; the objective is divided by
    kappa * sum(G) / N, so that its scale (and the learning rate) does not depend on
    rho. Without rows the penalised parameters move to the centre at once.

    Everything that a step needs is on the model's device, and no step waits for a
    number from there; only features that a GPU has no room for are copied step by step.
    """
    if not len(problem.features):
        model.parameters = problem.settle(model.parameters)
        return
    device = model.device
    total = len(problem.features)
    features = problem.features
    if not isinstance(features, SparseRows):
        features = as_tensor(features)
    target, weight, penalty, centre = (
        as_tensor(array).to(device).float()
        for array in (
            problem.target,
            problem.weights,
            problem.relative_penalty,
            problem.centre,
        )
    )
    scale = model.spec.output_scale**2
    parameters = list(model.module.parameters())
    steps_per_pass = -(-total // budget.batch_rows)
    steps = max(budget.passes * steps_per_pass, budget.least_steps)
    optimizer = torch.optim.Adam(parameters, lr=budget.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.arange(total, device=device)
    for step in range(steps):
        if step % steps_per_pass == 0:
            order = torch.from_numpy(rng.permutation(total)).to(device)
        start = (step % steps_per_pass) * budget.batch_rows
        batch = order[start : start + budget.batch_rows]
        residual = model.forward(_batch(features, batch).to(device)) - target[batch]
        theta = parameters_to_vector(parameters)
        objective = (weight[batch] * residual.square().sum(dim=1)).mean()
        objective = objective + (penalty * (theta - centre).square()).sum()
        optimizer.zero_grad(set_to_none=True)
        (objective * (0.5 / scale)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


def _mlp(features: int, spec: local_model.ModelSpec) -> nn.Module:
    """Return a network of ReLU layers of the hidden sizes, linear at its end."""
    layers: list[nn.Module] = []
    width = features
    for hidden in spec.hidden_sizes:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    # no activation at the end: a final ReLU can deactivate a whole table
    layers.append(nn.Linear(width, spec.outputs, bias=spec.intercept))
    return nn.Sequential(*layers)


def _call_factory(features: int, spec: local_model.ModelSpec) -> nn.Module:
    """Return the module that the user's factory makes; SettingsError if none."""
    path, _, name = spec.kind.partition(":")
    try:
        factory: Callable[..., nn.Module] = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"model {spec.kind!r} cannot be imported ({type(error).__name__}); "
            "allowed: 'linear', 'mlp' or 'package.module:factory'"
        ) from None
    module = factory(features, spec.outputs, spec.intercept)
    if not isinstance(module, nn.Module):
        raise SettingsError(
            f"model factory {spec.kind!r} returned {type(module).__name__}, not a "
            "torch.nn.Module"
        )
    return module


def _batch(features: SparseRows | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the features of rows (k,), (k, d), where the features are."""
    if isinstance(features, SparseRows):
        return as_tensor(features.take(rows.cpu().numpy()))
    return features[rows.to(features.device)]


def rows_at_once(columns: int) -> int:
    """Return how many rows are evaluated at a time, by the number of their columns."""
    return min(EVALUATION_ROWS, max(EVALUATION_VALUES // max(columns, 1), 1))


def _device_blocks(
    features: local_model.Features, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    for block in blocks(len(features), rows_at_once(features.shape[1])):
        yield block, as_tensor(features[block]).to(device)
