"""A server that wants more of a saved model than predictions gets a refusal."""

import re
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace

from strategies.inference.manifest import make_manifest
from strategies.inference.predict import Predict
from tests.support.federated import store, whole
from tests.support.peers.hostile import (
    FOREIGN,
    ORDERS,
    SHOP,
    SQL,
    US,
    US_PART,
    HostileGrid,
    StoppedError,
    array,
    header,
    train,
    wrong_arrays,
    wrong_headers,
)
from tests.support.predicted import train_store
from tp_flower.errors import SiteError
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.protocol.packet import Packet, pack_bits
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings

UNLABELLED = SQL.replace("o.qty AS label, ", "")
SETTINGS = {"mode": "predict", "row_key": "price"}
AT_SITE = {"predictions_at": "label-site"}
ROWS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of sites that have kept a model, and the model."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, make_manifest(train(HostileGrid(folder), num_epochs=1))


def predict(trained, changes=None, policies=None, instead=None, **settings):
    """Predict with a server that sends changed requests; return it, and its grid."""
    folder, manifest = trained
    stops = settings.pop("stops", False)
    grid = HostileGrid(folder, changes, policies, instead, stops=stops)
    query = Query.from_sql(UNLABELLED, needs_label=False)
    strategy = Predict(query, manifest, **SETTINGS, **settings)
    try:
        with suppress(StoppedError):
            strategy.start(grid)
    finally:
        grid.close()
    return strategy, grid


def refused(trained, action, node, change, **settings):
    """Send one changed request; return the text of the refusal."""

    def changes(asked, at, packet):
        if (asked, at) == (action, node):
            yield "it", change(packet)

    _, grid = predict(trained, changes, stops=True, **settings)
    (answer,) = grid.answers
    answer.check_nothing_left()
    return answer.error


def test_a_malformed_request_is_refused_and_changes_nothing(trained):
    seen = set()

    def hostile(action, node, packet):
        if action not in {"query.score", "query.deliver"} or node in (*seen, US):
            return
        if action == "query.deliver":
            seen.add(node)
        wrong = [*wrong_headers(packet), *wrong_arrays(packet)]
        yield from wrong[::29]

    strategy, grid = predict(trained, hostile, **AT_SITE)
    assert {answer.action for answer in grid.answers} == {
        "query.score",
        "query.deliver",
    }
    for answer in grid.answers:
        assert not FOREIGN.match(answer.error), answer
        if answer.error:
            answer.check_nothing_left()
    assert sum(own.rows for own in strategy.delivered) == ROWS
    folder, _ = trained
    made = {path.name for path in folder.glob("*/*")} | {
        p.name for p in folder.iterdir()
    }
    assert made <= {
        *("shop", "us", "uk", "state", "state-kept", "tables.toml"),
        *("orders.csv", "customers.csv"),
    }


def bits(*rows):
    mask = np.zeros(ROWS, np.bool_)
    mask[list(rows)] = True
    return lambda _: pack_bits(mask)


REFUSED = [
    (header("model-name", value="../models"), "model name '../models' is not"),
    (header("model-name", value="a/b"), "model name 'a/b' is not allowed"),
    (header("model-name", value=""), "model name '' is not allowed"),
    (header("model-version", value="../../state"), "model version '../../state'"),
    (
        header("model-version", value="20200101-000000-0000"),
        "no part 0 of model default@20200101-000000-0000",
    ),
    (header("model-name", value="other"), "has no part 0 of model other@"),
    (header("parts", 0, "model-part", value=1), "this site has no part 1"),
    (header("parts", 0, "model-part", value="../part-0"), "allowed: `int`"),
    (header("parts", 0, "digest", value="ab" * 32), "its digest is another"),
    (header("parts", 0, "digest", value=""), r"'digest' is ''; .*\[0-9a-f\]\{64\}"),
    (array(ORDERS, "rows", bits(3)), r"min-rows.*scores of table 'o'"),
    (array(ORDERS, "rows", bits(1, 2)), "at least 3 are needed"),
    (array(ORDERS, "rows", lambda a: a[:1]), "not a mask of 12 rows"),
]


def test_refused_scores(trained):
    def changes(action, node, packet):
        if (action, node) == ("query.score", SHOP):
            yield from ((match, change(packet)) for change, match in REFUSED)

    _, grid = predict(trained, changes, stops=True)
    assert len(grid.answers) == len(REFUSED)
    for answer in grid.answers:
        answer.check_nothing_left()
        assert re.search(answer.what, answer.error), answer


def test_scores_of_a_part_that_is_none_of_the_run_are_refused(trained):
    def change(packet):
        arrays = {(7, name): array for (_, name), array in packet.arrays.items()}
        return header("parts", 0, "id", value=7)(Packet(packet.header, arrays))

    assert "part 7 is none of this run" in refused(trained, "query.score", SHOP, change)
    foreign = header("parts", 0, "id", value=7)
    error = refused(trained, "query.score", SHOP, foreign)
    assert "it has arrays of parts [0], not listed" in error


FRAGMENT = ("parts", 0, "fragment")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("features", 0, 1), '"price" * 2'),
        (("features", 0, 0), "other"),
        (("features",), [["price", '"price"']]),
        (("features",), [["day", '"day"'], ["price", '"price"']]),
        (("table",), "x"),
    ],
    ids=["expression", "name", "fewer", "order", "alias"],
)
def test_rows_that_are_made_otherwise_are_not_scored(trained, place, value):
    """A server that chose the features could read the model off the scores."""

    def instead(action, node, packet):
        if (action, node) == ("query.extract", SHOP):
            return header(*FRAGMENT, *place, value=value)(packet)
        return packet

    with pytest.raises(SiteError, match="model's part is of another table or query"):
        predict(trained, instead=instead)


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


# privacy


def ledger(strategy, site):
    """The released scores in a site's account: what each cost, and how often used."""
    return [
        (own["release"]["mechanism"], own.get("used"))
        for own in strategy.ledgers[site]
        if own["release"]["what"] == "scores"
    ]


COVERED = {"privacy": PrivacySettings(predictions=4.0, delta=1e-5)}
DEMANDING = {"customers": "epsilon = 8.0"}


def test_scores_in_the_clear_are_noted(trained):
    strategy, _ = predict(trained)
    assert ledger(strategy, "us") == [(None, None)]
    total = next(
        own for own in strategy.report()["privacy"]["totals"] if own["site"] == "us"
    )
    assert total["epsilon"] == 0.0
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
    total = next(
        own for own in strategy.report()["privacy"]["totals"] if own["site"] == "us"
    )
    assert total["epsilon"] == pytest.approx(4.0, rel=1e-3)
    assert "scores" not in total["uncovered"]
    noisy = strategy.predictions["score"].to_numpy()
    assert not np.allclose(noisy, exact.predictions["score"].to_numpy())


def test_covered_scores_leave_once(trained):
    def two(_):
        return pack_bits(np.array([True, True, False]))

    def changes(action, node, packet):
        if (action, node) == ("query.score", US):
            yield "as it is", packet
            yield "again", array(US_PART, "rows", two)(packet)

    _, grid = predict(trained, changes, stops=True, **COVERED)
    first, second = grid.answers
    assert not first.error
    assert "reserved already" in second.error or "round" in second.error
