"""A server that wants more of a saved model than predictions gets a refusal."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from strategies.training.saving import make_manifest
from tests.support.federated import store, whole
from tests.support.files import case_table
from tests.support.peers import hostile
from tests.support.peers.hostile import arrays
from tests.support.peers.hostile_runs import cases, check_all_refused, once
from tests.support.predicted import predicting, train_store, unlabelled
from tp_flower.errors import SettingsError, SiteError
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.protocol.packet import pack_bits
from tp_flower.settings import PrivacySettings

REQUESTS = Path(__file__).with_name("refused_requests.toml")
FRAGMENT = ("parts", 0, "fragment")
PROPOSED = ("proposal", "parts", str(hostile.ORDERS), "fragment")
COVERED = {"privacy": PrivacySettings(predictions=4.0, delta=1e-5)}
DEMANDING = {"customers": "epsilon = 8.0"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of sites that have kept a model, and the model."""
    folder = tmp_path_factory.mktemp("trained")
    grid = hostile.HostileGrid(folder)
    return folder, make_manifest(hostile.train(grid, num_epochs=1))


def predict(trained, changes=None, policies=None, instead=None, **settings):
    """Predict with a server that sends changed requests; return it, and its grid."""
    folder, manifest = trained
    grid = hostile.HostileGrid(
        folder, changes, policies, instead, stops=changes is not None
    )
    sql = unlabelled(hostile.SQL)
    strategy = predicting(manifest, sql, row_key="price", **settings)
    with grid, suppress(hostile.StoppedError):
        strategy.start(grid)
    return strategy, grid


def mask(rows, *chosen):
    return pack_bits(np.isin(np.arange(rows), chosen))


def test_refused_scores(trained):
    changes = {
        match: hostile.change_of(change)
        for *_, change, match in cases(REQUESTS, "predict")
    }
    changes |= {
        r"min-rows.*scores of table 'o'": arrays(hostile.ORDERS, rows=mask(12, 3)),
        "at least 3 are needed": arrays(hostile.ORDERS, rows=mask(12, 1, 2)),
        "part 7 does not belong to this run": hostile.renumbered,
    }
    _, grid = predict(trained, once("query.score", hostile.SHOP, changes))
    assert len(grid.answers) == len(changes) == 14
    check_all_refused(grid.answers)


def test_refused_row_keys(trained):
    changes = {
        str(names): hostile.header("parts", 0, "row-key", value=names)
        for names in case_table(__file__)["row_keys"]
    }
    _, grid = predict(trained, once("query.extract", hostile.SHOP, changes))
    assert len(grid.answers) == len(changes) == 4
    check_all_refused(grid.answers, "'row-key' must be at most")


def test_a_refused_prediction_leaves_no_row_keys_at_the_site(trained):
    folder, _ = trained

    def kept():
        return {*folder.glob("*/state/predictions/**/*.parquet")}

    before = kept()
    rules = f"{hostile.POLICIES['orders']}\nscores-per-rank = 0"
    with pytest.raises(SettingsError, match="scores-per-rank"):
        predict(trained, policies={"orders": rules})
    assert kept() == before
    predict(trained)
    # for the owner, who tells by them whom a prediction is of
    assert len(kept() - before) == 1


def proposed_otherwise(*place, value):
    """A server that asks for another fragment of orders, and tells all sites so."""

    def instead(action, node, packet):
        if action != "query.extract":
            return packet
        fragment = FRAGMENT if node == hostile.SHOP else PROPOSED
        return hostile.header(*fragment, *place, value=value)(packet)

    return instead


@pytest.mark.parametrize(("place", "value"), case_table(__file__)["fragments"])
def test_rows_that_are_made_otherwise_are_not_scored(trained, place, value):
    """A server that chose the features could read the model off the scores."""

    with pytest.raises(SiteError, match="model's part is for another table or query"):
        predict(trained, instead=proposed_otherwise(*place, value=value))


def test_rows_of_another_alias_are_not_scored(trained):
    with pytest.raises(
        SiteError, match=r"'table': the run was proposed with 'o', .* says 'x'"
    ):
        predict(trained, instead=proposed_otherwise("table", value="x"))


def test_another_tables_part_is_refused(tmp_path):
    sites = {"all": whole(store())}
    model = train_store(tmp_path, "squared", sites, num_epochs=1)
    first, *others = model.manifest.tables
    swapped = [
        replace(own, parts=(replace(own.parts[0], number=o.number, digest=o.digest),))
        for own, o in zip(
            others, [table.parts[0] for table in reversed(others)], strict=True
        )
    ]
    model.manifest = replace(model.manifest, tables=(first, *swapped))
    with pytest.raises(SiteError, match="its table differs from that of 'c'"):
        model.table(sites)


def ledger(strategy, site):
    """The released scores in a site's account: what each cost, and how often used."""
    return [
        (own["release"]["mechanism"], own.get("used"))
        for own in strategy.ledgers[site]
        if own["release"]["what"] == "scores"
    ]


def total_of(strategy, site):
    return next(
        own for own in strategy.report()["privacy"]["totals"] if own["site"] == site
    )


def test_scores_in_the_clear_are_noted(trained):
    strategy, _ = predict(trained)
    assert ledger(strategy, "us") == [(None, None)]
    total = total_of(strategy, "us")
    assert total["features"] == "none: sums of scores tell of the features"
    assert set(total["uncovered"]) == {"counts", "keys", "scores"}


def test_a_policy_may_demand_covered_scores(trained):
    with pytest.raises(SiteError, match=r"'c'.*releases.scores = private.*noise only"):
        predict(trained, policies=DEMANDING)


def test_covered_scores_are_clipped_noised_and_paid_for(trained):
    exact, _ = predict(trained)
    strategy, _grid = predict(trained, policies=DEMANDING, **COVERED)
    ((mechanism, used),) = ledger(strategy, "us")
    assert used == 1
    own = Gaussian(mechanism["noise_multiplier"], mechanism["count"])
    assert epsilon([own], 1e-5) == pytest.approx(4.0, rel=1e-3)
    total = total_of(strategy, "us")
    assert total["scores"] == pytest.approx(4.0, rel=1e-3)
    # the model has read the same rows
    assert total["features"] == "none: the model comes from an earlier run"
    assert "scores" not in total["uncovered"]
    noisy = strategy.predictions["score"].to_numpy()
    assert not np.allclose(noisy, exact.predictions["score"].to_numpy())


def test_covered_scores_leave_once(trained):
    changes = {
        "as it is": lambda packet: packet,
        "again": arrays(hostile.US_PART, rows=mask(3, 0, 1)),
    }
    _, grid = predict(trained, once("query.score", hostile.US, changes), **COVERED)
    first, second = grid.answers
    assert not first.error
    assert "reserved already" in second.error or "round" in second.error
