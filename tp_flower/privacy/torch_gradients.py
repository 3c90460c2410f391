"""Clipped sums of the row gradients of torch models, by the hooks of Opacus.

There are two backward passes for one forward pass: the first computes the norm of each
row's gradient, for linear layers without building it ("ghost clipping"), the second is
an ordinary one with re-weighted messages. Row gradients that must be built, (k, p), are
built for a chunk of rows at a time.

Before that, a module is checked for having gradients row by row at all, by its layers
(Opacus) and by its behaviour: the scores of a row must not depend on other rows.

Reference:
    Li et al. 2022 (ghost clipping).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping as GradNormModule
from opacus.validators import ModuleValidator
from torch import nn

from tp_flower.arrays import FloatArray, blocks
from tp_flower.errors import SettingsError
from tp_flower.features.sparse import EncodedRows, dense
from tp_flower.learning.models.local_model import CUDA, LocalModel
from tp_flower.learning.models.neural import TorchModel, rows_at_once
from tp_flower.privacy.gradients import clip_weights

CHUNK_VALUES: Final = 2**24  # of row gradients held at a time: 64 MB in float32
_ROUNDING: Final = 2e-6  # of norms in float32: the clip stays above it
_NORM: Final = "_norm_sample"  # where Opacus leaves a parameter's norms
_PROBES: Final = 4
_CLOSE: Final = 1e-4


def clipped_torch_sum(
    model: LocalModel,
    features: EncodedRows,
    messages: FloatArray,
    clip: float | FloatArray,
) -> FloatArray:
    """Return the sum of the rows' gradients, each clipped to ``clip`` [(k,)], (p,)."""
    model = _torch_model(model)
    if not len(features):
        return np.zeros(len(model.penalised))
    clip = np.broadcast_to(clip, len(features))
    check_rows_are_apart(model, features.shape[1])
    try:
        return _sum_in_chunks(model, features, messages, clip, ghost=True)
    except NotImplementedError:
        # for a layer that is used twice, the norm of the sum of its gradients uses them
        return _sum_in_chunks(model, features, messages, clip, ghost=False)


def check_rows_are_apart(model: LocalModel, features: int) -> None:
    """Raise SettingsError if a row's scores, or its gradient, depend on other rows."""
    model = _torch_model(model)
    kind = f"model {model.spec.kind!r}"
    for name, layer in model.module.named_modules():
        if problem := _problem(layer):
            raise SettingsError(
                f"{kind}: layer {name or '(root)'!r} ({type(layer).__name__}) has no "
                f"gradients row by row, which DP-SGD needs: {problem}"
            )
    check_scores_are_apart(model, features)


def check_norms_are_whole(model: LocalModel, features: int) -> None:
    """Refuse a module whose row gradients are longer than the hooks find.

    The hooks see what passes through layers; a parameter that is used outside its layer
    (``functional.linear(x, layer.weight)``) has a gradient that would not be clipped.
    """
    model = _torch_model(model)
    try:
        hooked, whole = _probed_norms(model, features, ghost=True)
    except NotImplementedError:
        hooked, whole = _probed_norms(model, features, ghost=False)
    if not (whole <= hooked * (1.0 + _CLOSE) + _CLOSE * whole.max(initial=0.0)).all():
        raise SettingsError(
            f"model {model.spec.kind!r} uses a parameter outside of its layer, where "
            "it has no gradients row by row, which DP-SGD needs: call the layer instead"
        )


def _probed_norms(
    model: TorchModel, features: int, *, ghost: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the norms of made-up rows' gradients: by the hooks, and by autograd."""
    parameters = list(model.module.parameters())
    rng = torch.Generator().manual_seed(0)
    made_up = torch.randn((_PROBES, features), generator=rng).to(parameters[0])
    with torch.random.fork_rng(), _hook_norms(model.module, ghost=ghost) as hooked:
        hooked.enable_hooks()
        rows = made_up.requires_grad_()
        # without the scale of the output, which may be any number
        scores: torch.Tensor = model.module(rows)
        ones = torch.ones_like(scores)
        torch.autograd.grad(scores, rows, ones, retain_graph=True, allow_unused=True)
        norms = _norms(model)
        hooked.disable_hooks()
        true_norms = []
        for row in scores:
            gradients = torch.autograd.grad(
                row.sum(), parameters, retain_graph=True, materialize_grads=True
            )
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            true_norms.append(float(flat.double().norm()))
    return norms, np.array(true_norms)


def check_scores_are_apart(model: LocalModel, features: int) -> None:
    """Raise SettingsError if a made-up row's score changes with the other rows.

    Of trees, too, which have no clip and no noise of their own.
    """
    if not isinstance(model, TorchModel):
        raise SettingsError(
            "privacy.predictions: no noise is planned for the scores of trees: leave "
            "privacy.predictions out, or predict by a linear model"
        )
    twin = copy.deepcopy(model.module)
    like = next(twin.parameters())
    rng = torch.Generator().manual_seed(0)
    shape = (2, _PROBES, features)
    first, second = torch.randn(shape, generator=rng, dtype=like.dtype).to(like.device)
    second[0] = first[0]
    alone = _first_scores(twin, first)
    together = _first_scores(twin, second)
    if not torch.allclose(alone, together, rtol=_CLOSE, atol=_CLOSE):
        raise SettingsError(
            f"model {model.spec.kind!r}: the scores of a row depend on other rows; "
            "privacy needs a model that maps each row by itself"
        )


def _torch_model(model: LocalModel) -> TorchModel:
    if not isinstance(model, TorchModel):
        raise TypeError(f"{type(model).__name__} is not a torch model")
    return model


def _problem(layer: nn.Module) -> str:
    """Return why a layer by itself has no row gradients; "" if it has them."""
    parameters = list(layer.parameters(recurse=False))
    if any(not parameter.requires_grad for parameter in parameters):
        return "it has parameters that are not trained"
    if parameters and any(True for _ in layer.buffers()):
        return "it has buffers, which would keep something of the rows"
    check = ModuleValidator.VALIDATORS.get(type(layer))
    errors = check(layer) if check else []
    # the first sentence only: Opacus's texts are long
    if not errors:
        return ""
    return str(errors[0]).strip().partition(". ")[0]


def _first_scores(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the first row's scores (d_c,), with the same dropout in every call."""
    with torch.random.fork_rng(), torch.no_grad():
        # forked: dropout has no Generator argument; ``torch.manual_seed`` would seed
        # the generators of all kinds of devices, which takes longer than the scores
        torch.default_generator.manual_seed(0)
        if rows.device.type == CUDA:
            torch.cuda.manual_seed(0)
        scores: torch.Tensor = module(rows)
    return scores[0]


def _sum_in_chunks(
    model: TorchModel,
    features: EncodedRows,
    messages: FloatArray,
    clips: FloatArray,
    *,
    ghost: bool,
) -> FloatArray:
    """Return the sum (p,) of the rows' clipped gradients, some rows at a time."""
    total = np.zeros(len(model.penalised))
    with _hook_norms(model.module, ghost=ghost) as hooked:
        for chunk in blocks(len(features), _chunk_rows(hooked, features.shape[1])):
            total += _chunk_sum(
                model, hooked, features[chunk], messages[chunk], clips[chunk]
            )
    return total


@contextmanager
def _hook_norms(module: nn.Module, *, ghost: bool) -> Iterator[GradNormModule]:
    """Let backward passes through the module store the norms of the rows' gradients."""
    was_training = module.training
    module.train()
    hooked = GradNormModule(module, loss_reduction="sum", use_ghost_clipping=ghost)
    try:
        yield hooked
    finally:
        hooked.to_standard_module()
        module.train(was_training)
        for layer in module.modules():
            # left by a pass that failed
            vars(layer).pop("activations", None)


def _chunk_rows(hooked: GradNormModule, columns: int) -> int:
    """Return the size of a chunk, from the parameters whose row gradients are built."""
    parameters = 0
    for layer in hooked._module.modules():  # noqa: SLF001 - Opacus' name for it
        is_ghost = hooked.use_ghost_clipping and type(layer) in hooked.NORM_SAMPLERS
        if not is_ghost and any(True for _ in layer.parameters(recurse=False)):
            parameters += sum(parameter.numel() for parameter in layer.parameters())
    return min(rows_at_once(columns), max(1, CHUNK_VALUES // max(parameters, 1)))


def _chunk_sum(
    model: TorchModel,
    hooked: GradNormModule,
    features: EncodedRows,
    messages: FloatArray,
    clips: FloatArray,
) -> FloatArray:
    """Return the sum of the clipped gradients of one chunk of rows."""
    parameters = list(model.module.parameters())
    like = parameters[0]
    rows = torch.tensor(np.array(dense(features)), dtype=like.dtype, device=like.device)
    upstream = torch.tensor(messages, dtype=like.dtype, device=like.device)
    hooked.enable_hooks()
    scores = model.forward(rows.requires_grad_())
    # one forward pass for both: dropout draws its zeros only once
    torch.autograd.grad(scores, rows, upstream, retain_graph=True, allow_unused=True)
    weights = clip_weights(_norms(model), clips * (1.0 - _ROUNDING))
    hooked.disable_hooks()
    if not weights.all():
        # a row that is not finite would spoil the sum, whatever its weight
        finite = weights > 0
        if not finite.any():
            return np.zeros(len(model.penalised))
        return _chunk_sum(
            model, hooked, features[finite], messages[finite], clips[finite]
        )
    weighted = upstream * torch.as_tensor(weights[:, None]).to(upstream)
    gradients = torch.autograd.grad(scores, parameters, weighted)
    return (
        torch.cat([gradient.reshape(-1) for gradient in gradients])
        .double()
        .cpu()
        .numpy()
    )


def _norms(model: TorchModel) -> npt.NDArray[np.float64]:
    """Take the norms of the rows' gradients, (k,), from where Opacus stored them."""
    squares = []
    for name, parameter in model.module.named_parameters():
        norms = vars(parameter).pop(_NORM, None)
        if norms is None:
            raise SettingsError(
                f"model {model.spec.kind!r}: parameter {name!r} takes no part in the "
                "scores, or in a way that has no gradients row by row"
            )
        squares.append(norms.reshape(-1).double().square())
    norms = torch.stack(squares).sum(dim=0).sqrt()
    return norms.detach().cpu().numpy()
