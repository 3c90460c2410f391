"""A training that diverges after a good epoch ends with that epoch's model."""

import re

import numpy as np
import pytest

from strategies import STRATEGIES
from tests.support.examples.killed_servers import Killed, KilledServer
from tests.support.examples.store_runs import (
    FRAMES,
    LAYOUTS,
    assert_same_models,
    query,
    saved_parameters,
)
from tests.support.federated import WatchedGrid, one_per_site, run_query
from tp_flower.errors import DivergedError
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings

HOW = {"task": "regression", "device": "cpu", "l2": 0.01, "num_epochs": 6}
RUNS = {
    "cg": {"tolerance": 1e-9},
    "admm": {},
    "sgd": {"batch_size": 24, "learning_rate": 0.02},
}
FIRST = {"cg": "train.descent", "admm": "train.admm", "sgd": "train.sgd"}
GOOD = 2  # epochs before the fault


def run(folder, strategy, layout, change=None, **settings):
    sites = one_per_site(LAYOUTS[layout](FRAMES))
    how = {**HOW, **RUNS[strategy], **settings}
    return run_query(query(), sites, strategy, change, folder, **how)


class Fault:
    """Change one array of a kind in the message that begins an epoch after good
    ones.
    """

    def __init__(
        self, strategy: str, rounds: int, *, of_replies: bool, good: int = GOOD
    ) -> None:
        """Count the rounds of an epoch."""
        self.action = FIRST[strategy]
        self.of_replies = of_replies
        self.rounds = []
        self.begin = good * rounds

    def __call__(self, seen) -> None:
        if seen.action != self.action:
            return
        if seen.round not in self.rounds:
            self.rounds.append(seen.round)
        if len(self.rounds) <= self.begin or seen.is_reply != self.of_replies:
            return
        for (part, name), array in seen.arrays.items():
            if part == 0 and name in ("step", "messages", "scores", "batch_scores"):
                random = np.random.default_rng(5).integers(
                    0, 1 << 32, array.shape, np.uint32
                )
                seen.arrays[part, name] = (
                    random if self.of_replies else array + np.float32(1e20)
                )


def shares_of(finished) -> dict[str, float]:
    contributions = finished.report.contributions
    return {name: each["share"] for name, each in contributions.items()}


def check_ends_with(finished, folder, epoch: int, short) -> None:
    report = finished.report
    assert report.verdict.startswith(
        f"diverged in epoch {epoch + 1}: the model of epoch {epoch},"
    )
    rate = finished.strategy.settings.learning_rate
    advice = rf"Lower learning-rate \(here {rate}\)" if rate else "Raise (rho or )?l2"
    assert re.search(rf"{advice}, or look for extreme values$", report.verdict)
    assert report.verdict in report.warnings
    assert_same_models(folder / "a", folder / "b")
    assert report.final_test == short.report.final_test
    assert shares_of(finished) == pytest.approx(shares_of(short), abs=1e-5)


class KilledGrid(KilledServer, WatchedGrid):
    pass


@pytest.mark.cases("admm")
@pytest.mark.parametrize("strategy", ["cg", "admm"])
def test_a_server_that_is_killed_around_the_divergence_ends_alike(strategy, tmp_path):
    run(tmp_path / "b", strategy, "whole", num_epochs=GOOD)
    sites = one_per_site(LAYOUTS["whole"](FRAMES))
    rounds = 4 + GOOD  # of the set-up and of good epochs
    for at in (rounds + 1, -(rounds + 1), rounds + 2, -(rounds + 2)):
        place = tmp_path / str(at)
        fault = Fault(strategy, 1, of_replies=False)
        with KilledGrid(sites, fault, state=place / "sites") as grid:
            grid.kill_at = at
            how = {**HOW, **RUNS[strategy], "output_dir": str(place / "run")}
            with pytest.raises(Killed):
                STRATEGIES[strategy](Query.from_sql(query()), **how).start(grid)
            grid.kill_at = None
            again = STRATEGIES[strategy](
                Query.from_sql(query()), **how, resume=how["output_dir"]
            )
            again.start(grid)
        assert again.verdict.startswith(
            f"diverged in epoch {GOOD + 1}: the model of epoch {GOOD},"
        )
        phases = [report.phase for report in again.history]
        assert phases[-2:] == [FIRST[strategy][6:], "finish"]
        assert_same_models(place / "sites", tmp_path / "b")


@pytest.mark.cases("cg-mixed", "admm-whole", "sgd-mixed")
@pytest.mark.parametrize("layout", ["whole", "mixed"])
@pytest.mark.parametrize("strategy", RUNS)
def test_a_site_that_cannot_take_a_round_has_the_model_before_it(
    strategy, layout, tmp_path
):
    short = run(tmp_path / "b", strategy, layout, num_epochs=GOOD)
    batches = sum(r.phase == FIRST[strategy][6:] for r in short.history) // GOOD
    fault = Fault(strategy, batches, of_replies=False)
    finished = run(tmp_path / "a", strategy, layout, fault)
    assert "out of range" in finished.report.verdict
    check_ends_with(finished, tmp_path, GOOD, short)
    # all sites have ended the run
    shards = sum(map(len, LAYOUTS[layout](FRAMES).values()))
    assert len(finished.sent("query.finish", replies=True)) == shards


def test_a_loss_far_above_a_constants_ends_with_the_epoch_before(tmp_path):
    short = run(tmp_path / "b", "admm", "whole", num_epochs=GOOD)
    finished = run(tmp_path / "a", "admm", "whole", Fault("admm", 1, of_replies=True))
    assert "against" in finished.report.verdict
    check_ends_with(finished, tmp_path, GOOD, short)


def test_the_epoch_of_the_lowest_loss_is_saved(tmp_path):
    """Long steps: the fourth epoch is better than the fifth."""
    how = {"learning_rate": 0.6, "num_epochs": 8}
    plain = run(tmp_path / "c", "sgd", "whole", **how)
    assert int(np.argmin(plain.losses[:5])) + 1 == 4
    batches = sum(r.phase == "sgd" for r in plain.history) // 8
    fault = Fault("sgd", batches, of_replies=False, good=5)
    finished = run(tmp_path / "a", "sgd", "whole", fault, **how)
    assert finished.losses == plain.losses[:5]
    assert (
        "in epoch 6: the model of epoch 4, of the lowest training"
        in finished.strategy.verdict
    )
    run(tmp_path / "b", "sgd", "whole", **{**how, "num_epochs": 4})
    assert_same_models(tmp_path / "a", tmp_path / "b")


def test_steps_that_are_too_long_from_the_start_fail_as_before(tmp_path):
    match = r"diverged.* Lower learning-rate \(here 50.0\), or look for extreme values"
    for privacy in (PrivacySettings(), PrivacySettings(scores="clear")):
        with pytest.raises(DivergedError, match=match):
            run(tmp_path, "sgd", "whole", learning_rate=50.0, privacy=privacy)
    assert not list(tmp_path.rglob("part-*"))
    # raising l2 would make steps longer: the advice is the rate alone
    assert run(tmp_path, "sgd", "whole").strategy.verdict.startswith(
        ("converged", "not conv")
    )


def test_a_training_that_does_not_diverge_saves_its_last_model(tmp_path):
    finished = run(tmp_path, "sgd", "whole", learning_rate=1.0, num_epochs=3)
    assert int(np.argmin(finished.losses)) + 1 < 3
    models = saved_parameters(tmp_path), finished.theta.values()
    for theta, other in zip(*models, strict=True):
        np.testing.assert_array_equal(theta, other)
