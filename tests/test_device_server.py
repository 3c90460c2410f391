"""The server's kernels on torch tensors equal numpy's, one by one and run by run."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import admm_arrays
from strategies.admm import AdmmServer
from strategies.admm_arrays import HostArrays
from strategies.device_arrays import DeviceArrays
from tests.devices import each_device, pretend
from tests.federated import one_per_site, run, store, whole
from tp_flower.device.admm import admm_step, residuals, targets
from tp_flower.device.anderson import DeviceMixer
from tp_flower.device.losses import on_device
from tp_flower.device.metrics import evaluate
from tp_flower.device.rows import DeviceRows
from tp_flower.device.torch_device import to_device, to_host
from tp_flower.errors import SettingsError
from tp_flower.experiment import Settings
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.learning import admm as host
from tp_flower.learning.anderson import AndersonMixer, Point
from tp_flower.learning.corrected import corrected
from tp_flower.learning.losses import LogisticLoss, SoftmaxLoss, SquaredLoss
from tp_flower.learning.metrics import evaluate as host_metrics
from tp_flower.privacy.labels import ClassNoise, NumberNoise

CLASSES = ClassNoise(3, 0.8)
LOSSES = [
    SquaredLoss(),
    LogisticLoss(),
    SoftmaxLoss(2),
    SoftmaxLoss(5),
    corrected(SquaredLoss(), NumberNoise(0.7)),
    corrected(LogisticLoss(), ClassNoise(2, 0.75)),
    corrected(SoftmaxLoss(3), CLASSES),
]
each_loss = pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{type(loss).__name__}-{loss.outputs}"
)
# of two solutions of a prox, each with |gradient| <= 1e-8
PROX_GRADIENT = 1e-8


@pytest.fixture
def device(device_name):
    return torch.device(device_name)


def problem(loss, rows=200, seed=0):
    """Scores, z and duals of an epoch, and labels with every class."""
    rng = np.random.default_rng(seed)
    scores, z, duals = 3.0 * rng.normal(size=(3, rows, loss.outputs))
    if loss.name == "squared":
        return scores, z, duals, rng.normal(size=rows)
    classes = max(2, loss.outputs)
    return scores, z, duals, np.resize(np.arange(classes), rows).astype(float)


def moved(device, *arrays):
    return [to_device(array, device) for array in arrays]


# losses


@each_device
@each_loss
def test_values_and_gradients(loss, device):
    scores, *_, labels = problem(loss)
    scores[:4] *= 1e3
    own = on_device(loss)
    for name in ("row_values", "gradient"):
        expected = getattr(loss, name)(scores, labels)
        found = to_host(getattr(own, name)(*moved(device, scores, labels)))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@each_device
@each_loss
@pytest.mark.parametrize("rho", [1e-3, 0.05, 1.0, 1e3])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_prox_is_optimal_and_numpys(loss, rho, scale, device, monkeypatch):
    monkeypatch.setattr("tp_flower.device.losses.PROX_ROWS", 64)
    centre, start, _, labels = problem(loss)
    centre, start = scale * centre, -scale * start
    centre[0], start[0] = 500.0, -500.0
    arguments = moved(device, centre, labels, start)
    found = to_host(on_device(loss).prox(arguments[0], arguments[1], rho, arguments[2]))
    gradient = loss.gradient(found, labels) + rho * (found - centre)
    # rounding of a large z costs some
    assert (np.abs(gradient) <= 1.1 * PROX_GRADIENT + 1e-12 * rho * scale).all()
    expected = loss.prox(centre, labels, rho, start=start)
    # the objective's curvature is at least rho
    np.testing.assert_allclose(
        found, expected, rtol=1e-12, atol=2 * PROX_GRADIENT * np.sqrt(5) / rho
    )


@each_device
@each_loss
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_metrics(loss, weighted, missing, device):
    scores, *_, labels = problem(loss)
    if loss.outputs == 1:
        # ties; of rates of several classes they would depend on their last bits
        scores = scores.round()
    if missing:
        scores, labels = scores[labels != 0.0], labels[labels != 0.0]
    rng = np.random.default_rng(5)
    weights = rng.gamma(2.0, size=len(labels)) if weighted else None
    expected = host_metrics(loss, scores, labels, weights)
    arrays = moved(device, scores, labels)
    own = None if weights is None else to_device(weights, device)
    found = evaluate(loss, on_device(loss), *arrays, own)
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12, nan_ok=True)


def test_other_losses_are_refused():
    class Odd(SquaredLoss):
        name = "odd"

    with pytest.raises(TypeError, match="'odd' is not known on a device"):
        on_device(Odd())


# the mapping, the targets, the residuals


@each_device
@settings(deadline=None, max_examples=40)
@given(
    row_of=st.lists(st.integers(-1, 4), min_size=1, max_size=12),
    outputs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_expand_and_segment_sum(device_name, row_of, outputs, seed):
    device = torch.device(device_name)
    rng = np.random.default_rng(seed)
    rows = TableRows(np.array(row_of, np.int32), 5)
    own, joined = rng.normal(size=(5, outputs)), rng.normal(size=(len(row_of), outputs))
    placed = DeviceRows(rows, device)
    total = torch.zeros((len(row_of), outputs), dtype=torch.float64, device=device)
    placed.add_expanded(to_device(own, device), total)
    np.testing.assert_array_equal(to_host(total), rows.expand(own))
    sums = to_host(placed.segment_sum(to_device(joined, device)))
    np.testing.assert_allclose(sums, rows.segment_sum(joined), rtol=1e-12, atol=1e-13)
    found = to_host(targets(placed, *moved(device, own, joined), kappa=0.7))
    expected = host.targets(rows, own, joined, kappa=0.7)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@each_device
@each_loss
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_step_and_residuals(loss, alpha, device):
    scores, z, duals, labels = problem(loss)
    state = host.AdmmState(z, duals, 0.3)
    expected, message = host.admm_step(state, scores, labels, loss, alpha)
    own_labels, *at = moved(device, labels, scores, z, duals)
    found = admm_step(on_device(loss), own_labels, 0.3, alpha, tuple(at))
    for own, other in zip(found, (expected.z, expected.duals, message), strict=True):
        np.testing.assert_allclose(to_host(own), other, atol=1e-7)
    base = np.full(loss.outputs, 0.5)
    arrays = moved(device, base, 0.9 * scores, scores)
    gap = residuals(found[0], found[1], 0.3, arrays[0], tuple(arrays[1:]))
    other = host.residuals(expected, 0.9 * scores, scores, base)
    assert gap.primal == pytest.approx(other.primal, rel=1e-7)
    assert gap.dual == pytest.approx(other.dual, rel=1e-7)


# Anderson mixing


@each_device
@pytest.mark.parametrize("memory", [0, 1, 3])
def test_mixing(memory, device):
    """The points that both make of a linear map, with a restart and a setback."""
    mapping = TableMapping({"t": TableRows(np.array([0, 1, 1], np.int32), 2)})
    count = to_device(mapping.tables["t"].multiplicity, device).double()
    own = DeviceMixer([(3 * count).sqrt()[:, None]], memory)
    other = AndersonMixer(mapping, memory, 3)
    rng = np.random.default_rng(4)
    matrix = rng.normal(size=(5, 5))
    matrix *= 0.9 / np.abs(np.linalg.eigvals(matrix)).max()
    shift = rng.normal(size=5)

    def point_of(flat):
        local = {"t": flat[3:, None].copy()}
        scores = mapping.sum_scores(np.zeros(1), local)
        return Point(scores, flat[:3, None].copy(), local)

    before, after = point_of(np.zeros(5)), point_of(shift)
    for epoch in range(9):
        if epoch == 5:
            own.restart()
            other.restart()
        rho = 0.8 if epoch < 5 else 0.4
        mixed = other.mix(rho, before, after)
        found = own.mix(
            rho,
            moved(device, before.scores, *before.free),
            moved(device, after.scores, *after.free),
        )
        for one, two in zip(found, [mixed.scores, *mixed.free], strict=True):
            # the host keeps its changes in float32
            np.testing.assert_allclose(to_host(one), two, rtol=1e-4, atol=1e-5)
        before = mixed
        flat = np.concatenate([mixed.duals.ravel(), mixed.local_scores["t"].ravel()])
        jump = 40.0 if epoch == 7 else 0.0
        after = point_of(matrix @ flat + shift + jump)


# whole runs

SHARDS = whole(store(orders=40, customers=8))


@functools.cache
def federation_of(loss, weight="joined"):
    """The training problem of a run, made once."""
    finished = run(loss, one_per_site(SHARDS), num_epochs=1, row_weight=weight)
    return finished.strategy.federation


@each_device
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_runs_are_the_cpus_epoch_by_epoch(loss, device_name, monkeypatch):
    sites = one_per_site(SHARDS)
    expected = run(loss, sites, num_epochs=5)
    pretend(monkeypatch, device_name)
    made = []
    original = admm_arrays.make_arrays

    def spy(*arguments):
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr("strategies.admm.make_arrays", spy)
    found = run(loss, sites, num_epochs=5, server_device="cuda")
    assert [type(arrays) for arrays in made] == [DeviceArrays]
    assert found.strategy.chosen["server-device"] == device_name
    assert expected.strategy.chosen["server-device"] == "cpu"
    for one, other in zip(found.parameters, expected.parameters, strict=True):
        for table in one:
            # what travels is float32
            np.testing.assert_allclose(one[table], other[table], rtol=1e-4, atol=1e-6)
    pairs = zip(found.history, expected.history, strict=True)
    for own, other in ((a, b) for a, b in pairs if b.train):
        assert own.train == pytest.approx(other.train, rel=1e-5)
        assert own.test == pytest.approx(other.test, rel=1e-5)
        assert own.primal_residual == pytest.approx(other.primal_residual, rel=1e-4)
        assert own.dual_residual == pytest.approx(other.dual_residual, rel=1e-4)


@each_device
@pytest.mark.parametrize("relaxation", [0.0, 1.3])
@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("weight", ["joined", "entity(c)"])
def test_server_alone_is_numpys(relaxation, memory, weight, device_name, monkeypatch):
    """Through epochs of scores that no site would send, rho that is balanced included.

    All in float64: nothing travels.
    """
    federation = federation_of("softmax", weight)
    assert (federation.weighting.train is None) == (weight == "joined")
    how = {"over_relaxation": relaxation, "anderson_memory": memory}
    other = AdmmServer(federation, Settings(**how))
    pretend(monkeypatch, device_name)
    own = AdmmServer(federation, Settings(server_device="cuda", **how))
    assert own.memory == memory
    for _ in range(8):
        found, expected = own.targets(), other.targets()
        for table, target in expected.items():
            # mixing magnifies the 1e-8 that two proxes may differ by
            np.testing.assert_allclose(found[table], target, rtol=1e-5, atol=1e-6)
        # tables that follow half of the way: residuals differ more and more
        replies = {table: 0.5 * target for table, target in expected.items()}
        one, two = own.take(replies), other.take(replies)
        assert one.train == pytest.approx(two.train, rel=1e-9)
        assert one.primal_residual == pytest.approx(
            two.primal_residual, rel=1e-5, abs=1e-7
        )
        assert own.rho == other.rho
    np.testing.assert_allclose(own.z, other.z, atol=1e-6)
    np.testing.assert_allclose(own.duals, other.duals, atol=1e-6)


# refusals


def test_a_server_without_a_gpu_refuses_before_the_first_round(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = "server-device is 'cuda', but the server has no CUDA device .* allowed"
    seen = []
    monkeypatch.setattr("tests.federated._seen", seen.append)
    with pytest.raises(SettingsError, match=text):
        run("squared", one_per_site(SHARDS), server_device="cuda")
    assert {message.metadata.message_type for message in seen} <= {
        "query.describe",
        "query.finish",
    }


def test_a_gpu_for_the_server_of_sgd_is_refused():
    text = "server-device: 'cuda' is for strategies admm and vfl-admm; with 'sgd' the"
    with pytest.raises(SettingsError, match=text):
        Settings(strategy="sgd", server_device="cuda")
    assert Settings(strategy="sgd", server_device="auto").server_device == "auto"


def test_arrays_beyond_the_gpus_memory(monkeypatch):
    federation = federation_of("squared")
    pretend(monkeypatch, "cpu")
    needed = admm_arrays.device_bytes(federation, 5)
    arguments = (federation, Settings(server_device="cuda"), 3, 5)
    monkeypatch.setattr(
        "tp_flower.device.torch_device.free_bytes", lambda _: needed - 1
    )
    with pytest.raises(SettingsError, match=r"server-device is 'cuda', but .* GB"):
        admm_arrays.make_arrays(*arguments)
    monkeypatch.setattr("tp_flower.device.torch_device.free_bytes", lambda _: needed)
    assert isinstance(admm_arrays.make_arrays(*arguments), DeviceArrays)


def test_auto_is_the_cpu_for_a_small_problem(monkeypatch):
    federation = federation_of("squared")
    pretend(monkeypatch, "cpu")
    monkeypatch.setattr("tp_flower.device.choice.has_driver", lambda: True)
    arguments = (federation, Settings(server_device="auto"), 3, 5)
    assert isinstance(admm_arrays.make_arrays(*arguments), HostArrays)
    monkeypatch.setattr(admm_arrays, "LEAST_VALUES", 1)
    assert isinstance(admm_arrays.make_arrays(*arguments), DeviceArrays)
