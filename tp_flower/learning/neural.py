"""Local models made of torch modules: MLPs and modules from a user's factory."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tp_flower.errors import SettingsError
from tp_flower.learning.models import FeatureArray, FloatArray, LocalModel, ModelSpec
from tp_flower.learning.problem import FitProblem

EVALUATION_ROWS = 65536


class TorchModel(LocalModel):
    """A torch module as a local model, with float32 parameters on its device."""

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        self.module, self.spec, self.outputs = module, spec, spec.outputs
        self.penalised = np.concatenate(
            [
                np.full(parameter.numel(), parameter.ndim > 1)
                for parameter in module.parameters()
            ]
        )

    @property
    def parameters(self) -> FloatArray:
        """The module's parameters as one vector, (p,)."""
        vector = parameters_to_vector(self.module.parameters())
        flat: FloatArray = vector.detach().cpu().numpy().astype(np.float64)
        return flat

    @parameters.setter
    def parameters(self, values: FloatArray) -> None:
        parameter = next(self.module.parameters())
        vector = torch.as_tensor(values, dtype=parameter.dtype, device=parameter.device)
        vector_to_parameters(vector, self.module.parameters())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scaled output of the module, (n, d_c)."""
        output: torch.Tensor = self.module(rows)
        return output * self.spec.output_scale

    def scores(self, features: FeatureArray) -> FloatArray:
        """Return the local scores, in chunks that bound the memory."""
        out = np.empty((len(features), self.spec.outputs))
        device = next(self.module.parameters()).device
        with torch.no_grad():
            for start in range(0, len(features), EVALUATION_ROWS):
                chunk = _tensor(features[start : start + EVALUATION_ROWS], device)
                out[start : start + EVALUATION_ROWS] = self.forward(chunk).cpu().numpy()
        return out

    def pullback(self, features: FeatureArray, messages: FloatArray) -> FloatArray:
        """Return the vector-Jacobian product of the scores with Y, by autograd."""
        device = next(self.module.parameters()).device
        scores = self.forward(_tensor(features, device))
        upstream = _tensor(messages, device).to(scores.dtype)
        gradients = torch.autograd.grad(
            scores, list(self.module.parameters()), grad_outputs=upstream
        )
        flat: FloatArray = parameters_to_vector(gradients).cpu().numpy()
        return flat.astype(np.float64)


def build_torch_model(spec: ModelSpec, features: int, device: str) -> TorchModel:
    """Return the MLP or the factory's module, initialised from the spec's seed.

    Raises:
        SettingsError: if the factory cannot be imported or makes no usable module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)  # noqa: TID251 - forked: no module has a Generator argument
        if spec.kind == "mlp":
            module = _mlp(features, spec)
        else:
            module = _from_factory(features, spec)
    return TorchModel(module.to(resolve_device(device)), spec)


def resolve_device(name: str) -> torch.device:
    """Return the device of ``"auto"`` (CUDA when there), ``"cpu"`` or ``"cuda"``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is 'cuda', but this site has no CUDA device")
    return torch.device(name)


@dataclass(frozen=True)
class FitBudget:
    """How long and how a fit runs.

    Attributes:
        passes: passes over the rows.
        least_steps: at least so many steps, for small tables.
        batch_rows: rows per step.
        learning_rate: Adam's, at the start; it falls to zero along a cosine.
    """

    passes: int = 4
    least_steps: int = 100
    batch_rows: int = 4096
    learning_rate: float = 2e-2


def fit_least_squares(
    model: TorchModel, problem: FitProblem, budget: FitBudget, rng: np.random.Generator
) -> None:
    """Fit a torch model in place, warm-started from its current parameters.

    Adam on mini-batches of rows drawn without replacement; the objective is divided by
    kappa * sum(G) / N, so that its scale (and the learning rate) does not depend on
    rho. Without rows the penalised parameters move to the centre at once.
    """
    if not len(problem.features):
        model.parameters = problem.settle(model.parameters)
        return
    device = next(model.module.parameters()).device
    rows = _tensor(problem.features, device)
    target = _tensor(problem.target, device).to(rows.dtype)
    weight = torch.as_tensor(problem.weights, dtype=rows.dtype, device=device)
    penalty = torch.as_tensor(problem.relative_penalty, dtype=rows.dtype, device=device)
    centre = torch.as_tensor(problem.centre, dtype=rows.dtype, device=device)
    scale = model.spec.output_scale**2
    parameters = list(model.module.parameters())
    steps_per_pass = -(-len(rows) // budget.batch_rows)
    steps = max(budget.passes * steps_per_pass, budget.least_steps)
    optimizer = torch.optim.Adam(parameters, lr=budget.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.arange(len(rows), device=device)
    for step in range(steps):
        if step % steps_per_pass == 0:
            order = torch.from_numpy(rng.permutation(len(rows))).to(device)
        start = (step % steps_per_pass) * budget.batch_rows
        batch = order[start : start + budget.batch_rows]
        residual = model.forward(rows[batch]) - target[batch]
        theta = parameters_to_vector(parameters)
        objective = (weight[batch] * residual.square().sum(dim=1)).mean()
        objective = objective + (penalty * (theta - centre).square()).sum()
        optimizer.zero_grad(set_to_none=True)
        (objective * (0.5 / scale)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


def _mlp(features: int, spec: ModelSpec) -> nn.Module:
    layers: list[nn.Module] = []
    width = features
    for hidden in spec.hidden_sizes:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    # no activation at the end: a final ReLU can kill a whole table
    layers.append(nn.Linear(width, spec.outputs, bias=spec.intercept))
    return nn.Sequential(*layers)


def _from_factory(features: int, spec: ModelSpec) -> nn.Module:
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
            f"model factory {spec.kind!r} returned {type(module).__name__}, "
            "not a torch.nn.Module"
        )
    return module


def _tensor(values: npt.NDArray[np.floating], device: torch.device) -> torch.Tensor:
    # torch warns of read-only arrays (memory-mapped features); nothing here writes
    writable = values if values.flags.writeable else values.copy()
    return torch.from_numpy(np.ascontiguousarray(writable)).to(device)
