"""Ways around the noise: units that vanish, refusals, gradients that hooks miss."""

import json
import math
import re
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from client_apps.data.ledger import Ledger
from tests.support.files import case_table
from tests.support.peers import hostile
from tests.support.peers.hostile_runs import (
    answers_to,
    check_all_refused,
    once,
    refusal,
    refused,
)
from tp_flower.errors import SettingsError, SiteError
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.learning.models.neural import TorchModel
from tp_flower.privacy.gradients import check_per_row, clipped_sum
from tp_flower.privacy.mechanisms import ClippedNoise
from tp_flower.privacy.plan import Schedule, plan_part
from tp_flower.privacy.shard_seals import ENCODER
from tp_flower.privacy.statistics_update import StatisticsPlan
from tp_flower.protocol.packet import pack_bits
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
TINY = 5e-324
DP_SGD = PrivacySettings(features="dp-sgd", predictions=1.0)
EXACT = PrivacySettings(features="statistics", predictions=1.0)
HASHED = {"type": "hash", "name": "age", "buckets": 2, "of-number": False}
BARE = CASES["bare"]
FAILS = 'CASE WHEN "age" = {} THEN CAST(\'x\' || "kind" AS INT) ELSE 0 END'
FRAGMENT = ("parts", 0, "fragment")


@pytest.mark.parametrize(("path", "match"), CASES["small_units"])
@pytest.mark.parametrize(("method", "privacy"), [("sgd", DP_SGD), ("admm", EXACT)])
def test_no_unit_is_so_small_that_there_is_no_noise(
    tmp_path, method, privacy, path, match
):
    """With a clip of 0, NaN would tell whose gradient or score is 0 exactly."""

    def shrink(packet):
        small = hostile.change_of("privacy.clip = 1e-12")(packet)
        return hostile.header("parts", 0, *path, value=TINY)(small)

    answer = refusal(
        tmp_path, "train.prepare", hostile.US, shrink, method, privacy=privacy
    )
    assert re.search(match, answer.error)
    assert answer.header["part"] == hostile.US_PART


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClippedNoise(0.0, 0.0),
        lambda: ClippedNoise(TINY, 0.1),
        lambda: StatisticsPlan(1e-200, 1.0, 1.0, 1.0),
        lambda: StatisticsPlan(1.0, TINY, 1.0, 0.1),
    ],
)
def test_clips_that_leave_no_noise_are_refused(make):
    with pytest.raises(SiteError, match=r"multiplier .* times clip .* gives no noise"):
        make()


def test_clips_below_what_norms_in_float32_can_tell_are_refused():
    """Of a gradient of 1e-25 hooks find the norm 0: it would not be clipped."""
    course = Schedule(1, sends_gradients=True, batches=1, label_scale=1e-18)
    plan = plan_part(DP_SGD, course, sends=(), is_linear=True)
    assert plan.gradients
    assert plan.gradients.clip == pytest.approx(math.sqrt(2) * 1e-18)
    with pytest.raises(SiteError, match=r"gradients would be clipped to 1.4.*e-18"):
        plan_part(DP_SGD, course, sends=(), is_linear=False)


@pytest.mark.parametrize("change", [{"of-length": True}, HASHED])
def test_no_refusal_tells_whose_value_is_missing(tmp_path, monkeypatch, change):
    """An encoder of another kind fits a column without values, and only that."""
    whole = hostile.tables()
    whole["us"]["customers"].loc[1, "age"] = np.nan
    monkeypatch.setattr(hostile, "tables", lambda: whole)
    row = 0
    replies = []

    def misfit(packet):
        """As a server would do that has the key of a shard."""
        seal = hostile.shard_seal(grid, hostile.US, hostile.US_PART)
        sealed = packet.arrays[hostile.US_PART, "encoder"]
        encoder = json.loads(seal.open(sealed, ENCODER, hostile.UK_PART))
        (age,) = (each for each in encoder["encodings"] if each["name"] == "age")
        if "type" in change:
            age.clear()
        age |= change
        mask = np.arange(3) == row
        text = json.dumps(encoder).encode()
        arrays = {"trained": pack_bits(mask), "tested": pack_bits(mask & False)}
        arrays["encoder"] = seal.seal(text, ENCODER, hostile.UK_PART, "")
        arrays["multiplicity"] = np.ones(1, np.int32)
        return hostile.arrays(hostile.US_PART, **arrays)(packet)

    for row in range(3):
        hostile_request = once("train.prepare", hostile.US, {"misfit": misfit})
        grid = hostile.HostileGrid(tmp_path / str(row), hostile_request, stops=True)
        with pytest.raises(hostile.StoppedError):
            hostile.train(grid, privacy=EXACT)
        (answer,) = grid.answers
        replies.append((answer.error, set(answer.arrays)))
    assert replies[0] == replies[1] == replies[2]


class Beside(nn.Module):
    """A weight that is used a second time, where no hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) + 100 * nn.functional.linear(rows, self.layer.weight)


class Factor(Beside):
    """A weight that multiplies the output, too."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * self.layer.weight.sum() * 50


class Tied(nn.Module):
    """Two layers with one weight, each called: hooks see both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(rows)))


def made(module):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TorchModel(module(), ModelSpec("mlp", output_scale=1e-30))


@pytest.mark.parametrize("module", [Beside, Factor])
def test_gradients_that_hooks_do_not_see_are_refused(module):
    model = made(module)
    with pytest.raises(SettingsError, match="uses a parameter outside of its layer"):
        check_per_row(model, 3)
    # because of this
    row = np.ones((1, 3), np.float32)
    large = np.full((1, 1), 1e30)
    assert np.linalg.norm(clipped_sum(model, row, large, clip=1e-3)) > 3e-3


def test_parameters_that_two_layers_share_are_seen():
    model = made(Tied)
    check_per_row(model, 3)
    row = np.ones((1, 3), np.float32)
    large = np.full((1, 1), 1e32)
    assert np.linalg.norm(clipped_sum(model, row, large, clip=1e-3)) <= 1e-3


def test_scores_of_rows_that_depend_on_others_are_not_covered(tmp_path, monkeypatch):
    """Batch norm's scores of all rows change with one row: no clip of its own."""
    module = types.ModuleType("mixing_models")
    module.make = lambda d, k, _: nn.Sequential(nn.BatchNorm1d(d), nn.Linear(d, k))
    monkeypatch.setitem(sys.modules, "mixing_models", module)
    private = PrivacySettings(predictions=1.0)
    rules = f"{hostile.POLICIES['orders']}\nmodels = ['mixing_models:make']"
    grid = hostile.HostileGrid(tmp_path, policies={"orders": rules})
    with pytest.raises(SiteError, match="scores of a row depend on other rows"):
        hostile.train(grid, privacy=private, model="mixing_models:make")


def ask_for(folder, policy, *expressions):
    """Return what a site says to requests with other features in them."""
    changes = {
        sql: hostile.header(*FRAGMENT, "features", 0, 1, value=sql)
        for sql in expressions
    }
    policies = {"customers": policy}
    return answers_to(folder, "query.extract", hostile.US, changes, policies=policies)


def test_an_expression_that_fails_tells_of_a_value(tmp_path):
    """Where nothing but the policy's lists is there, a refusal answers a question."""
    policy = BARE.replace("expressions = false", "")
    there, not_there = ask_for(tmp_path, policy, FAILS.format(27), FAILS.format(28))
    assert "fails on some value" in there.error
    assert not not_there.error


def test_without_expressions_no_value_decides_about_a_refusal(tmp_path):
    asked = [FAILS.format(27), FAILS.format(28)]
    asked += ['CAST("age" AS TINYINT)', '"age" + 0', 'CAST("kind" AS INT)']
    *answers, allowed = ask_for(tmp_path, BARE, *asked, '"age"')
    check_all_refused(answers, r"\(expressions\) refuses: feature 'age' reads column")
    assert not allowed.error


def test_without_expressions_neither_aggregates_nor_conditions(tmp_path):
    policy = 'expressions = false\nfilters = ["age"]'
    columns = [["age", 'MAX("age")'], ["kind", 'MIN("kind")'], ["id", '"id"']]
    grouped = {"columns": columns, "filters": [], "groups": ['"id"'], "having": []}

    changes = {
        "group": hostile.header(*FRAGMENT, "subquery", value=grouped),
        "filter": hostile.header(*FRAGMENT, "filters", value=['"age" = 27']),
    }
    policies = {"customers": policy}
    answers = answers_to(
        tmp_path, "query.extract", hostile.US, changes, policies=policies
    )
    assert len(answers) == 2
    check_all_refused(answers, r"\(expressions\) refuses")


def test_with_a_budget_no_statistic_of_one_row_leaves_as_it_is(tmp_path):
    """The mean of one row is its value."""
    trained = pack_bits(np.arange(3) == 1)
    counts = np.ones(1, np.int32)
    one_row = hostile.arrays(hostile.US_PART, trained=trained, multiplicity=counts)
    error = refused(
        tmp_path,
        "query.statistics",
        hostile.US,
        one_row,
        policies={"customers": "epsilon = 1.0"},
        privacy=EXACT,
    )
    assert "releases.statistics = never" in error


# errors, races or full disks tell no more than the quota of queries allows

QUOTA = 3
QUOTAS = {"orders": f"queries-per-day = {QUOTA}"}
LATER = "CASE WHEN \"day\" > {} THEN 'x' ELSE '1' END::INT = 1"
PROBES = {
    day: hostile.header(*FRAGMENT, "filters", value=[LATER.format(day)])
    for day in (28, 14, 7, 21, 3, 25, 10)
}
BEYOND = "(queries-per-day) refuses: 3 queries have read table orders"


def probe(folder):
    """Ask whether any day is later than some, by errors; return the errors."""
    answers = answers_to(folder, "query.extract", hostile.SHOP, PROBES, policies=QUOTAS)
    return [answer.error for answer in answers]


def counted(folder):
    lines = hostile.ledger_lines(folder, "shop", "answer", "refuse")
    return sum("source" in line for line in lines)


@pytest.mark.parametrize("is_race", [False, True])
def test_errors_tell_of_rows_no_oftener_than_answers(tmp_path, monkeypatch, is_race):
    if is_race:  # all have passed the check before any is written down
        monkeypatch.setattr(Ledger, "check_quota", lambda *_: None)
    errors = probe(tmp_path)
    assert not any(BEYOND in error for error in errors[:QUOTA])
    # the first asks for days that nobody has, the second for some that are there
    assert len(set(errors[:QUOTA])) > 1
    assert {BEYOND in error for error in errors[QUOTA:]} == {True}
    assert counted(tmp_path) == QUOTA


def test_an_error_that_cannot_be_written_down_does_not_leave(tmp_path, monkeypatch):
    record = Ledger.record

    def full(ledger, run, event, *others):
        if event == "refuse":
            raise SiteError("No space left on device")
        record(ledger, run, event, *others)

    monkeypatch.setattr(Ledger, "record", full)
    assert {*probe(tmp_path)} - {""} == {"No space left on device"}
