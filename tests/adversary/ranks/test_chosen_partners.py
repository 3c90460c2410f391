"""A server whose operator chooses query, partners and encoders reads no column of a
table.

Where the rules are off, each attack reads the amounts: that is the code of before,
whose ``min-features`` all of these queries met.
"""

from contextlib import suppress

import numpy as np
import pytest
from scipy.spatial import cKDTree

from strategies import Explain
from tests.support.federated import LocalGrid, train
from tests.support.peers.curious import watch_sums
from tests.support.peers.payments import (
    JOINED,
    NAMES,
    OF_OTHERS,
    ROWS,
    RULES,
    counted,
    features,
    others,
    payments,
    written,
)
from tp_flower.errors import SettingsError, SiteError
from tp_flower.features.ranks import effective_rank
from tp_flower.settings import PrivacySettings

OFF = ""  # what ``lenient`` allows
TOO_FEW = (
    r"\(scores-per-rank = 0.5\) refuses: the rows of table 'p' vary in fewer than 4"
)
NO_COVER = r"\(cover = 1\) refuses: .* table 'p', and 0 tables of other sites"


def none_left():
    """Expect that a site lets no more scores leave."""
    return pytest.raises(SettingsError, match="lets 0 more score vectors leave")


def attack(folder, sql, rules, *, method="cg", frames=None, epochs=1, **settings):
    """Let a server pose a query in a new run; return the sums of scores that it
    reads.
    """
    frames = frames or {"payments": payments(), "clinic": others()}
    sites = written(folder, rules, **frames)
    grid = LocalGrid(sites, state=folder / "state")
    with grid, pytest.MonkeyPatch.context() as patch:
        sums = watch_sums(patch)
        if method is not Explain:
            settings |= {"test_fraction": 0.0, "num_epochs": epochs}
        strategy = train(grid, sql, method, **settings)
    return strategy, sums


OTHERS_CONSTANT = [f"o.x{k} = range(1000, 1001)" for k in range(6)]
CONSTANT = "; ".join(f"p.{name} = range(1000, 1001)" for name in NAMES[1:])
ALONE = features("p", NAMES)
FOUR_NAMES = ", ".join(
    f"p.amount + 0 * p.{name} AS f{k}" for k, name in enumerate(NAMES[1:5])
)
ATTACKS = {
    # the scores of the partner are 0
    "partner without features": (
        f"SELECT p.y AS label, {ALONE} FROM payments p JOIN clinic o ON p.id = o.id",
        CONSTANT,
        NO_COVER,
    ),
    "self-join on the key": (
        f"SELECT p.y AS label, {ALONE} FROM payments p JOIN payments q ON p.id = q.id",
        CONSTANT,
        NO_COVER,
    ),
    "declared constant": (
        (
            f"SELECT p.y AS label, {ALONE}, {OF_OTHERS} FROM payments p JOIN clinic o "
            "ON p.id = o.id"
        ),
        "; ".join([CONSTANT, *OTHERS_CONSTANT]),
        TOO_FEW,
    ),
    "one column by four names": (
        f"SELECT p.y AS label, {FOUR_NAMES}, {JOINED}",
        "; ".join(OTHERS_CONSTANT),
        TOO_FEW,
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_column_is_not_read_from_one_score_vector(tmp_path, name):
    sql, encoders, match = ATTACKS[name]
    _, sums = attack(tmp_path / "off", sql, OFF, encoders=encoders)
    assert abs(np.corrcoef(sums[-1], payments()["amount"])[0, 1]) > 1.0 - 1e-9
    rules = RULES.replace("cover = 1", "cover = 0") if match is TOO_FEW else RULES
    with pytest.raises(
        (SiteError, SettingsError), match=rf"{match}|lets 0 more score vectors leave"
    ):
        attack(tmp_path / "on", sql, rules, encoders=encoders)
    # the site itself refuses, whatever the server asks
    assert counted(tmp_path / "on") == 0


def test_a_category_beside_constants_is_not_told_by_one_score_vector(tmp_path):
    """Of 60 categories the rank is 59, and half of it 29."""
    sql = f"SELECT p.y AS label, p.secret, {features('p', NAMES[1:])}, {JOINED}"
    encoders = "; ".join([CONSTANT, *OTHERS_CONSTANT])
    _, sums = attack(tmp_path / "off", sql, OFF, encoders=encoders)
    told = dict(zip(sums[-1].round(9), payments()["secret"], strict=True))
    assert [told[value] for value in sums[-1].round(9)] == payments()["secret"].tolist()
    with none_left():
        attack(tmp_path / "on", sql, RULES.replace("1", "0"), encoders=encoders)


def share_read(vectors, known=40):
    """The share of the payments' values that are read, from sums and some known
    rows.
    """
    table = payments()[list(NAMES)].to_numpy()
    everything = np.hstack(
        [table, others().drop(columns="id").to_numpy(), np.ones((ROWS, 1))]
    )
    sums = np.column_stack(vectors)
    theta = np.linalg.lstsq(everything[:known], sums[:known], rcond=None)[0]
    # the clinic sides with the server, as a partner of three tables would
    left = sums - everything[:, 6:] @ theta[6:]
    read = left @ np.linalg.pinv(theta[:6], rcond=1e-6)
    return np.mean(np.abs(read - table)[known:] < 0.1)


def queries():
    """Queries of the same columns for other labels: other directions in every run."""
    for label in ("p.y", *(f"p.y * p.{name}" for name in NAMES[1:])):
        yield f"SELECT {label} AS label, {ALONE}, {JOINED}"


def until_refused(folder, rules, posed, **settings):
    """Pose queries until all are refused; return the sums that were read."""
    read = []
    for sql in posed:
        with suppress(SettingsError):
            read += attack(folder, sql, rules, **settings)[1]
    return read


def test_ranks_do_not_add_up_over_queries(tmp_path):
    """Each query keeps to half the rank, and several together would tell everything."""
    assert share_read(until_refused(tmp_path / "off", OFF, queries())) > 0.95
    read = until_refused(tmp_path / "on", RULES, queries())
    assert len(read) == counted(tmp_path / "on") == 3
    assert share_read(read) < 0.35


def test_ranks_do_not_add_up_over_columns(tmp_path):
    """Queries of other columns that overlap, in other runs and by other names."""
    posed = [
        f"SELECT p.y AS label, {features('p', names)}, {JOINED}"
        for shift in range(6)
        for names in [(*NAMES[shift:], *NAMES[:shift])[:4]]
    ]
    read = until_refused(tmp_path, RULES, posed)
    # any four of six columns have two vectors at most
    assert len(read) == counted(tmp_path) == 2
    # and all six one more
    assert len(until_refused(tmp_path, RULES, queries())) == 1


def test_two_roles_of_a_table_have_one_count(tmp_path):
    """Both aliases' scores leave in every epoch."""
    of_q = ", ".join(f"q.{name} AS {name}2" for name in NAMES)
    sql = f"SELECT p.y AS label, {ALONE}, {of_q}, {JOINED} "
    sql += "JOIN payments q ON p.id = q.id"
    attack(tmp_path, sql, RULES)
    assert counted(tmp_path) == 2
    with pytest.raises(
        SettingsError, match="lets 1 more score vectors leave, and an epoch takes 2"
    ):
        attack(tmp_path, sql, RULES)
    assert counted(tmp_path) == 2


def test_shards_of_a_table_count_their_own_rows(tmp_path):
    """A table in two files is no table with twice the rank: every row keeps half of
    it.
    """
    frame = payments()
    file = written(tmp_path, RULES, payments=frame, clinic=others())["payments"]
    text = file.read_text().replace(
        "path='payments.csv'", "shards = [{ path = 'one.csv' }, { path = 'two.csv' }]"
    )
    for name, part in (("one", frame[: ROWS // 2]), ("two", frame[ROWS // 2 :])):
        part.to_csv(file.parent / f"{name}.csv", index=False)
    sql = next(queries())

    def run(epochs):
        file.write_text(text)
        sites = {"payments": file, "clinic": tmp_path / "clinic" / "tables.toml"}
        with LocalGrid(sites, state=tmp_path / "state") as grid:
            train(grid, sql, "cg", test_fraction=0.0, num_epochs=epochs)

    run(3)
    assert counted(tmp_path) == 6
    with none_left():
        run(1)


OF_METHOD = {
    "admm": {},
    "boost": {"validation_fraction": "0"},
    "sgd": {"batch_size": ROWS // 2},
}


@pytest.mark.parametrize(
    ("method", "epochs", "vectors"), [("admm", 2, 2), ("boost", 3, 3), ("sgd", 1, 2)]
)
def test_every_method_counts_what_it_releases(tmp_path, method, epochs, vectors):
    how = OF_METHOD[method]
    attack(tmp_path, next(queries()), RULES, method=method, epochs=epochs, **how)
    assert counted(tmp_path) == vectors
    if vectors == 3:
        with none_left():
            attack(tmp_path, next(queries()), RULES)


def test_zero_forbids_and_any_allows(tmp_path):
    sql = next(queries())
    with none_left():
        attack(tmp_path / "none", sql, "scores-per-rank = 0\n")
    attack(tmp_path / "any", sql, "scores-per-rank = 'any'\n", epochs=9)
    assert counted(tmp_path / "any") == 0
    # a table without features tells nothing, and needs neither rule
    attack(
        tmp_path / "key",
        f"SELECT p.y AS label, {JOINED}",
        "scores-per-rank = 0\ncover = 3\n",
    )


def test_noise_that_no_budget_pays_for_is_none(tmp_path):
    """Else a server would ask for so large an epsilon that its noise is none."""
    sql, encoders, match = ATTACKS["partner without features"]
    how = {
        "method": "admm",
        "encoders": encoders,
        "privacy": PrivacySettings(predictions=1e4),
    }
    _, sums = attack(tmp_path / "off", sql, OFF, **how)
    assert abs(np.corrcoef(sums[-1], payments()["amount"])[0, 1]) > 0.99
    with pytest.raises(
        (SiteError, SettingsError), match=rf"{match}|lets 0 more score vectors"
    ):
        attack(tmp_path / "on", sql, RULES, **how)
    # a budget pays, and scores with noise do not count
    budget = (
        f"{RULES}epsilon = 9\nepsilon-per-run = 9\nreleases = {{ models = 'sealed' }}\n"
    )
    private = PrivacySettings(
        labels="laplace", label_epsilon=1.0, label_range=(-4.0, 4.0), predictions=2.0
    )
    how = {"method": "admm", "privacy": private}
    how["encoders"] = "; ".join(f"p.{name} = range(-4, 4)" for name in NAMES)
    attack(tmp_path / "budget", next(queries()), budget, epochs=4, **how)
    assert counted(tmp_path / "budget") == 0


def test_half_the_rank_of_categories_tells_them():
    """The limit that the reference states: what is discrete takes fewer equations.

    Of six columns of ten categories the rank is 54. Who knows 100 rows reads all others
    from the 27 vectors that are allowed, and from as many as three.
    """
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 10, (ROWS, 6))
    rows = np.hstack([np.eye(10)[codes[:, column]] for column in range(6)])
    reading = {f"c{k}": np.arange(10 * k, 10 * k + 10) for k in range(6)}
    allowed = effective_rank(rows.astype(np.float32), reading) // 2
    assert allowed == 27

    def share_told(vectors):
        sums = rows @ rng.normal(size=(60, vectors))
        theta = np.linalg.lstsq(rows[:100], sums[:100], rcond=None)[0].reshape(
            6, 10, vectors
        )
        # meet in the middle: all sums of three columns, and of the other three
        halves = [
            (half[0][:, None, None] + half[1][None, :, None] + half[2][None, None, :])
            for half in (theta[:3], theta[3:])
        ]
        first, second = (half.reshape(1000, vectors) for half in halves)
        tree = cKDTree(second)
        right = 0
        for row in range(100, 200):
            distances, nearest = tree.query(sums[row] - first)
            best = int(distances.argmin())
            found = [
                *np.unravel_index(best, (10, 10, 10)),
                *np.unravel_index(nearest[best], (10, 10, 10)),
            ]
            right += [int(code) for code in found] == codes[row].tolist()
        return right / 100

    assert share_told(allowed) == share_told(3) == 1.0
