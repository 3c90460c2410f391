"""DP-SGD: sums against batches of one, noise against its law, fits against ridge."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch.nn import Dropout, LayerNorm, Linear, Module, Parameter, Sequential

from tests.support.examples.fits import fit_problem, normal_rows, ridge_of, with_ones
from tp_flower.errors import SettingsError, SiteError
from tp_flower.learning.models import local_model
from tp_flower.learning.models.neural import TorchModel
from tp_flower.privacy import torch_gradients
from tp_flower.privacy.gradients import (
    PrivateFit,
    clipped_sum,
    fit_privately,
    private_sum,
)
from tp_flower.privacy.mechanisms import ClippedNoise
from tp_flower.privacy.units import Units
from tp_flower.randomness import NoiseSource

KEY = bytes(range(32))
EXACT = PrivateFit(clip=np.inf, noise_multiplier=0.0, steps=3000, learning_rate=0.02)


def linear(columns=4, outputs=2, intercept=True) -> local_model.LinearModel:
    model = local_model.LinearModel(columns, outputs, intercept=intercept)
    model.parameters = default_rng(5).normal(size=len(model.penalised))
    return model


def torch_model(kind="mlp", columns=4, outputs=2, **spec) -> TorchModel:
    spec = {"intercept": True, "hidden_sizes": (5,), "seed": 3, **spec}
    model = local_model.build_model(
        local_model.ModelSpec(kind, outputs, **spec), columns, "cpu"
    )
    assert isinstance(model, TorchModel)
    return model


class Gate(Module):
    """A layer of a user, which Opacus has no rule for."""

    def __init__(self, width):
        super().__init__()
        self.gain = Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, rows):
        return torch.tanh(rows * self.gain)


class Tied(Module):
    """One layer used twice."""

    def __init__(self, features, outputs, intercept):
        super().__init__()
        self.inner = Linear(features, features)
        self.outer = Linear(features, outputs, intercept)

    def forward(self, rows):
        return self.outer(self.inner(torch.relu(self.inner(rows))))


class Centred(Module):
    """Subtracts the mean of its batch: no parameter, and no row by itself."""

    def forward(self, rows):
        return rows - rows.mean(dim=0)


class Idle(Module):
    """Has a parameter that no score depends on."""

    def __init__(self, features, outputs, intercept):
        super().__init__()
        self.used = Linear(features, outputs, intercept)
        self.unused = Linear(features, outputs)

    def forward(self, rows):
        return self.used(rows)


def gated(features, outputs, intercept):
    last = Linear(4, outputs, intercept)
    return Sequential(Linear(features, 4), Gate(4), LayerNorm(4), last)


def centred(features, outputs, intercept):
    return Sequential(Centred(), Linear(features, outputs, intercept))


def frozen(features, outputs, intercept):
    module = Sequential(Linear(features, 4), Linear(4, outputs, intercept))
    module[0].bias.requires_grad_(requires_grad=False)
    return module


def with_dropout(features, outputs, intercept):
    return Sequential(Dropout(0.5), Linear(features, outputs, intercept))


MODELS = {
    "linear": linear,
    "linear without intercept": lambda: linear(intercept=False),
    "mlp": torch_model,
    "scaled mlp": lambda: torch_model(output_scale=7.0, hidden_sizes=(6, 3)),
    "own layers": lambda: torch_model(f"{__name__}:gated"),
    "tied layers": lambda: torch_model(f"{__name__}:Tied"),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def example(make, rows):
    """A model, rows of its features, and what the server would send for them."""
    messages = default_rng(1).normal(size=(rows, 2))
    return make(), normal_rows(rows, 4), messages


def noisy_sum(model, features, messages, clip, multiplier, noise):
    return private_sum(model, features, messages, ClippedNoise(clip, multiplier), noise)


def one_by_one(model, features, messages, clip) -> np.ndarray:
    """Batches of one: a row's gradient is the pullback of the row alone."""
    total = np.zeros(len(model.parameters))
    for row in range(len(features)):
        gradient = model.pullback(features[row : row + 1], messages[row : row + 1])
        norm = np.sqrt(sum(value**2 for value in gradient))
        total += gradient * (clip / norm if norm > clip else 1.0)
    return total


@pytest.mark.parametrize("clip", [0.05, 2.0, 1e6])
@each_model
def test_clipped_sum_is_that_of_batches_of_one(make, clip):
    model, features, messages = example(make, 23)
    before = model.parameters
    total = clipped_sum(model, features, messages, clip)
    expected = one_by_one(model, features, messages, clip)
    assert_allclose(total, expected, rtol=1e-5, atol=1e-6 * min(clip, 10))
    assert_array_equal(model.parameters, before)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 12),
    clip=st.floats(1e-3, 1e3),
    size=st.floats(1e-3, 1e4),
    intercept=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_row_moves_a_sum_beyond_the_clip(rows, clip, size, intercept, seed):
    rng = default_rng(seed)
    model = linear(intercept=intercept)
    features = (size * rng.normal(size=(rows, 4))).astype(np.float32)
    messages = rng.normal(size=(rows, 2))
    whole = clipped_sum(model, features, messages, clip)
    for row in range(rows):
        others = np.arange(rows) != row
        without = clipped_sum(model, features[others], messages[others], clip)
        change = np.linalg.norm(whole - without)
        norm = np.linalg.norm(model.pullback(features[[row]], messages[[row]]))
        assert change <= clip * (1 + 1e-9) + 1e-12 * np.abs(whole).max()
        # and by all of its gradient where that is allowed
        assert change == pytest.approx(min(clip, norm), rel=1e-6, abs=1e-9)


@each_model
def test_a_sum_is_the_pullback_with_noise_and_no_rows_are_noise_alone(make):
    model, features, messages = example(make, 50)
    clear = noisy_sum(model, features, messages, np.inf, 0.0, NoiseSource())
    assert_array_equal(clear, model.pullback(features, messages))
    nothing = normal_rows(0, 4), np.zeros((0, 2))
    assert not clipped_sum(model, *nothing, 1.0).any()
    noisy = noisy_sum(model, *nothing, 2.0, 3.0, NoiseSource(KEY))
    expected = NoiseSource(KEY).with_gaussian(np.zeros(len(model.parameters)), 6.0)
    assert_array_equal(noisy, expected)
    source = NoiseSource()
    first, second = (noisy_sum(model, *nothing, 1.0, 1.0, source) for _ in range(2))
    # values stand on a grid: of some hundred two may meet by chance, no more
    assert np.isin(first, second).sum() <= 2


@pytest.mark.parametrize(("make", "rows"), [(linear, 20_000), (torch_model, 11)])
def test_sums_do_not_depend_on_the_size_of_the_blocks(make, rows, monkeypatch):
    model, features, messages = example(make, rows)
    whole = clipped_sum(model, features, messages, 0.5)
    monkeypatch.setattr(torch_gradients, "CHUNK_VALUES", 3 * len(model.parameters))
    parts = [
        clipped_sum(model, features[cut], messages[cut], 0.5)
        for cut in (slice(0, 7), slice(7, None))
    ]
    assert_allclose(sum(parts), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [linear, torch_model])
def test_gradients_that_are_not_finite_count_as_zero(make):
    """A server that asks for an overflow learns nothing of where one was."""
    model, features, messages = example(make, 5)
    messages[1], messages[3] = [np.inf, 0.0], [np.nan, 1.0]
    total = clipped_sum(model, features, messages, 0.5)
    of_finite = clipped_sum(model, features[::2], messages[::2], 0.5)
    assert_allclose(total, of_finite, rtol=1e-6, atol=1e-7)
    # a norm that overflows leaves nothing unclipped
    total = clipped_sum(model, features, np.full((5, 2), 1e200), 0.5)
    assert np.linalg.norm(total) <= 5 * 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("make", [linear, torch_model])
def test_features_that_are_not_finite_count_as_zero(make, value):
    model, features, messages = example(make, 5)
    features[1, 2] = value
    others = np.array([0, 2, 3, 4])
    total = clipped_sum(model, features, messages, 0.5)
    of_others = clipped_sum(model, features[others], messages[others], 0.5)
    assert_allclose(total, of_others, rtol=1e-6, atol=1e-7)
    assert np.isfinite(total).all()
    # all of them
    assert not clipped_sum(model, features[1:2], messages[1:2], 0.5).any()


def test_a_unit_with_a_feature_that_is_not_finite_counts_as_zero():
    model, features, messages = example(linear, 5)
    codes = np.array([0, 1, 1, 2, 0])
    features[1, 2] = np.nan
    total = clipped_sum(model, features, messages, 0.5, Units(codes))
    others = codes != 1
    units = Units(codes[others])
    of_others = clipped_sum(model, features[others], messages[others], 0.5, units)
    assert_array_equal(total, of_others)


def test_a_hooked_model_is_as_it_was():
    model = torch_model()
    model.module.eval()
    features = normal_rows(6, 4)
    messages = np.ones((6, 2))
    scores = model.scores(features)
    gradient = model.pullback(features, messages)
    clipped_sum(model, features, messages, 0.5)
    assert not model.module.training
    assert not any(map(vars, model.module.parameters()))
    assert all(parameter.grad is None for parameter in model.module.parameters())
    for layer in model.module.modules():
        assert not {**layer._forward_hooks, **layer._backward_hooks}
        assert not hasattr(layer, "activations")
    assert_array_equal(model.scores(features), scores)
    assert_array_equal(model.pullback(features, messages), gradient)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("centred", "scores of a row depend on other rows"),
        ("Idle", "parameter 'unused.weight' takes no part in the scores"),
        ("frozen", r"layer '0' \(Linear\) .* parameters that are not trained"),
    ],
)
def test_models_without_row_gradients_are_refused_by_layer(factory, message):
    model = torch_model(f"{__name__}:{factory}")
    with pytest.raises(SettingsError, match=message):
        clipped_sum(model, normal_rows(5, 4), np.ones((5, 2)), 1.0)


def test_dropout_mixes_no_rows_and_both_passes_see_the_same():
    """With other zeros in the second one, norms would miss the clip either way."""
    model = torch_model(f"{__name__}:with_dropout")
    state = torch.random.get_rng_state()
    torch_gradients.check_rows_are_apart(model, 4)
    assert torch.equal(torch.random.get_rng_state(), state)
    features = normal_rows(30, 4)
    clip = 1e-3
    for row in range(30):
        gradient = clipped_sum(model, features[[row]], np.ones((1, 2)), clip)
        assert np.linalg.norm(gradient) == pytest.approx(clip, rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_without_noise_a_linear_fit_reaches_the_ridge(scale):
    model = local_model.LinearModel(3, 1, intercept=True)
    centre = scale * np.array([1.0, 0.0, -1.0, 9.0])
    problem = replace(fit_problem(model, scale=scale), centre=centre)
    fit_privately(model, problem, replace(EXACT, output_scale=scale), NoiseSource())
    assert_allclose(model.parameters, ridge_of(problem), rtol=1e-3)


def test_without_noise_it_is_the_loop_without_privacy():
    """Whole batches and no clip: torch's Adam on the documented objective."""
    model = linear(3, 1)
    problem = fit_problem(model)
    plan = PrivateFit(np.inf, 0.0, steps=30, learning_rate=0.05, row_norm=2.0)
    theta = torch.tensor(model.parameters, requires_grad=True)
    dense = torch.tensor(with_ones(problem.features))
    count = torch.tensor(problem.multiplicity).double()
    adam = torch.optim.Adam([theta], lr=0.05)
    for _ in range(30):
        residual = (dense @ theta[:, None] - torch.tensor(problem.target)).square()
        value = problem.kappa / 2 * (count * residual.sum(dim=1)).sum()
        penalty = (torch.tensor(problem.penalised) * theta.square()).sum()
        value = value / problem.joined_rows + problem.strength / 2 * penalty
        # the docstring's factor: divided by sum(G) / N and by r
        value = value * problem.joined_rows / count.sum() / 2.0
        adam.zero_grad()
        value.backward()
        adam.step()
    fit_privately(model, problem, plan, NoiseSource())
    assert_allclose(model.parameters, theta.detach().numpy(), rtol=1e-8, atol=1e-10)


fitted = pytest.mark.parametrize(
    "make", [lambda: linear(3, 1), lambda: torch_model(columns=3, outputs=1)]
)


@fitted
def test_one_step_is_the_equation_of_the_docstring(make):
    """Poisson batch, clip, noise, division by q n, penalty: then Adam's first step."""
    model = make()
    problem = fit_problem(model)
    plan = PrivateFit(0.3, 0.8, sample_rate=0.4, steps=1, row_norm=1.5)
    again = NoiseSource(KEY)
    theta = model.parameters
    drawn = again.bernoulli(60, 0.4)
    weights = problem.multiplicity / problem.multiplicity.mean()
    messages = (model.scores(problem.features) - problem.target) * weights[:, None]
    messages *= problem.kappa / 1.5
    total = one_by_one(model, problem.features[drawn], messages[drawn], 0.3)
    noise = again.with_gaussian(np.zeros(len(theta)), 0.8 * 0.3)
    ridge = problem.strength * problem.joined_rows
    ridge /= problem.kappa * problem.multiplicity.sum()
    gradient = (total + noise) / (0.4 * 60)
    gradient += problem.kappa / 1.5 * ridge * problem.penalised * theta
    rate = (0.01 if isinstance(model, local_model.LinearModel) else 0.03) / (
        1 + 20 * 0.8 * np.sqrt(len(theta)) / (0.4 * 60)
    )
    fit_privately(model, problem, plan, NoiseSource(KEY))
    # Adam's first step is the rate along the signs
    moved = theta - model.parameters
    clear = np.abs(gradient) > 1e-4
    assert clear.sum() > 0.9 * len(theta)
    assert_allclose(moved[clear], rate * np.sign(gradient[clear]), rtol=1e-3)


@fitted
def test_no_rows_in_a_batch_are_noise_and_in_a_shard_a_move_to_the_centre(make):
    model = make()
    theta = model.parameters
    full = fit_problem(model)
    names = ("features", "multiplicity", "target")
    problem = replace(full, **{name: getattr(full, name)[:0] for name in names})
    fit_privately(model, problem, PrivateFit(1.0, 5.0), NoiseSource())
    expected = np.where(model.penalised, 0.0, theta)
    assert_array_equal(model.parameters, expected)
    empty_batches = PrivateFit(1.0, 1.0, sample_rate=1e-9, steps=5)
    fit_privately(model, full, empty_batches, NoiseSource(KEY))
    assert np.isfinite(model.parameters).all()
    assert (model.parameters != expected).mean() > 0.5


@pytest.mark.parametrize(
    "change", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"noise_multiplier": np.inf}]
)
def test_plans_without_noise_are_refused(change):
    with pytest.raises(SiteError, match=r"multiplier .* times clip .* gives no noise"):
        PrivateFit(**{"clip": 1.0, "noise_multiplier": 1.0, **change})
