"""The rules of a table's policy: read from the tables file, and what they refuse."""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from client_apps.handlers.training_rows import (
    Batches,
    TrainingRows,
    check_training_rows,
)
from client_apps.privacy import guard
from tests.support.examples.site_examples import check, fragment, site_of
from tests.support.files import case_table
from tests.support.tables.fragments import features
from tests.support.tables.sources import sources_of
from tp_flower.errors import PolicyError, QueryError, SourceError
from tp_flower.features.spec import DEFAULTS, EncoderSpec
from tp_flower.privacy.mechanisms import Budget
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.query import Feature, SubQuery
from tp_flower.query.fragment import Role
from tp_flower.query.reads import reads
from tp_flower.settings import PrivacySettings
from tp_flower.sources.policy import BUDGETED, LEVELS, MISSING, Policy, Releases

CASES = case_table(__file__)
COLUMNS = ["customer", "amount", "day", "is_fraud", "salary"]
NAMED = {"columns": ("amount", "day"), "labels": ("is_fraud",), "filters": ("day",)}
POLICY = Policy(join_only=("customer",), **NAMED)
FINEST = {
    "moments": ("standard", "one-hot(4)", "length", "none"),
    "never": ("cyclic(7)", "range(0, 9)", "categories(1, 2)", "hash(4) indicator"),
    "clear": ("min-max", "bins(4)", "min-max missing=zero"),
}
BY_SPEC = [(spec, finest) for finest, specs in FINEST.items() for spec in specs]


def refused(match):
    """Expect an error of a policy, with such a text."""
    return pytest.raises(PolicyError, match=match)


def strict(folder, rules=""):
    """A policy as a tables file has it, with all its defaults."""
    text = f"[tables.t]\npath='t.csv'\n[tables.t.policy]\n{rules}"
    (source,) = sources_of(folder, text)
    return source.policy


def test_a_policy_with_every_key(tmp_path):
    policy = strict(tmp_path, CASES["every-key"])
    assert policy == Policy(
        columns=("amount", "day"),
        labels=("is_fraud",),
        weights=("salary",),
        filters=(),
        keys=("day",),
        join_only=("customer",),
        expressions=True,
        min_rows=5,
        min_count=3,
        min_cell=4,
        scores_per_rank=0.25,
        cover=2,
        models=("mlp", "models:make"),
        most_parameters=2_000_000,
        min_rows_per_parameter=2.5,
        sees_regions=False,
        releases=Releases(
            *("clear", "never", "private", "clear"),
            moments="private",
            regressions="never",
            regions=7,
            factors="never",
            covariance="never",
            categories="never",
            inspection="never",
            cutoffs="partner",
            partials="partner",
            bins=16,
        ),
        privacy_unit=("customer",),
        rows_per_unit=7,
        epsilon=2.0,
        epsilon_per_run=1.5,
        delta=1e-6,
        budget_name="payments",
        coefficients=True,
        most_unmatched=0.25,
        approved_runs=("sha256:00",),
        partners=("lab",),
        queries_per_day=9,
        query_seconds=77,
    )
    # one that this test does not write would go untested
    same = {key for key, rule in vars(policy).items() if rule == vars(Policy())[key]}
    assert same == {"expressions"}


@pytest.mark.parametrize("policy", ["[tables.t.policy]", "tables.t.policy = {}"])
def test_a_policy_allows_nothing_that_it_does_not_mention(tmp_path, policy):
    (source,) = sources_of(tmp_path, f"tables.t.path = 't.csv'\n{policy}")
    assert source.policy == Policy(
        columns=(),
        labels=(),
        filters=(),
        keys=(),
        expressions=False,
        min_rows=50,
        min_count=10,
        scores_per_rank=0.5,
        cover=1,
        models=("linear", "mlp"),
        most_parameters=1_000_000,
        most_unmatched=0.0,
        queries_per_day=100,
        query_seconds=600,
        sees_regions=False,
        releases=Releases(
            models="sealed",
            scores="masked",
            moments="never",
            regressions="never",
            regions=0,
            factors="never",
            covariance="never",
            categories="never",
            inspection="never",
            bins=0,
        ),
    )
    assert source.min_count == 10
    source.check_policy()
    for piece in ("feature", "label", "filter", "key", "group", "having"):
        with refused("it may read no column"):
            check(source.policy, fragment_of(f'{piece}: "day"'))
    for kind in ("labels", "statistics"):
        source.policy.check_release(kind, is_private=False)
    for kind, level in (("scores", "masked"), ("models", "sealed")):
        source.policy.check_release(kind, is_private=False, is_masked=True)
        with refused(rf"releases\.{kind} = {level}"):
            source.policy.check_release(kind, is_private=False)


def test_a_budget_bounds_each_run_and_scores_in_the_clear(tmp_path):
    policy = strict(tmp_path, "epsilon = 2")
    assert policy.epsilon_per_run == 0.5
    assert policy.releases == BUDGETED
    assert strict(tmp_path, "epsilon = 2\nepsilon-per-run = 2").epsilon_per_run == 2.0


def test_a_table_without_a_policy_takes_part_in_nothing(tmp_path):
    text = "[tables.'a \"b\"']\npath='t.csv'\nsite = 's'\nmin-count=4\n"
    (source,) = sources_of(tmp_path, text)
    assert source.policy == MISSING
    assert source.min_count == 4
    with refused("at site 's' has no policy, and") as caught:
        source.check_policy()
    # the lines that the error tells are a policy, from which the owner goes on
    _, *lines, _ = str(caught.value).splitlines()
    assert len(lines) == 3
    (with_lines,) = sources_of(tmp_path, f"{text}\n" + "\n".join(lines))
    assert with_lines.policy == strict(tmp_path)
    # were the check forgotten, nothing would leave all the same
    with refused("releases.bins = 0"):
        MISSING.check_bins(2)
    for kind in LEVELS:
        with refused("= never"):
            MISSING.check_release(kind, is_private=True, is_masked=True)


def test_an_open_policy_allows_everything(tmp_path):
    text = "[tables.t]\npath='t.csv'\nmin-count=4\npolicy = 'open'"
    (source,) = sources_of(tmp_path, text)
    source.check_policy()
    assert source.policy == Policy()
    assert source.min_count == 4
    levels = {kind: source.policy.releases.level(kind) for kind in LEVELS}
    # but for rows themselves, and what tells other sites of them
    never = dict.fromkeys(("rows", "cutoffs", "partials", "inspection"), "never")
    assert levels == dict.fromkeys(LEVELS, "clear") | never
    # and bins where a run asks for them
    source.policy.check_bins(255)
    assert source.policy.releases.named_bins == 0


def test_a_shards_keys_win_over_its_tables(tmp_path):
    first, second, third, fourth, fifth = sources_of(tmp_path, CASES["of-shards"])
    assert first.policy.min_rows == 2
    assert second.policy.min_rows == 10
    assert first.min_count == 17
    assert second.min_count == 15
    assert first.policy.columns == second.policy.columns == ("a",)
    levels = ("private", "never", "never")
    rest = {"moments": "private", "regions": 0, "factors": "never", "bins": 8}
    rest |= {"covariance": "never", "categories": "never", "regressions": "never"}
    rest |= {"inspection": "never"}
    assert first.policy.releases == Releases(*levels, "never", **rest)
    assert second.policy.releases == Releases(*levels, "clear", **rest)
    assert third.policy == fourth.policy == Policy()
    assert fifth.policy == replace(strict(tmp_path), min_rows=2)


@pytest.mark.parametrize(
    ("rule", "most"), [("any", None), ("0", 0.0), ("2", 2.0), ("0.25", 0.25), ("", 0.5)]
)
def test_how_often_scores_may_leave(tmp_path, rule, most):
    text = f"scores-per-rank = {rule if rule != 'any' else repr(rule)}" if rule else ""
    policy = strict(tmp_path, text)
    assert policy.most_scores == most
    assert policy.asks_ranks
    assert strict(tmp_path, "scores-per-rank = 'any'\ncover = 0").asks_ranks is False


def test_cover():
    policy = Policy(cover=2)
    policy.check_cover("p", 2)
    with refused(r"\(cover = 2\) refuses: .* table 'p', and 1 tables of"):
        policy.check_cover("p", 1)
    Policy().check_cover("p", 0)


def test_models_by_name():
    policy = Policy(models=("linear", "models:make"))
    for kind in policy.models:
        policy.check_model(kind)
    for kind in ("mlp", "os:system", "models:other", ""):
        with refused(r"\(models\).*; allowed: linear, mod"):
            policy.check_model(kind)
        Policy().check_model(kind)


def test_weights_in_the_clear_need_a_list_of_their_columns(tmp_path):
    rules = 'releases = { labels = "never", weights = "clear" }\n'
    with pytest.raises(
        SourceError,
        match="list in 'weights' the columns that a weight or an offset may",
    ):
        strict(tmp_path, rules)
    assert strict(tmp_path, f'{rules}weights = ["w"]').weights == ("w",)


@CASES.each("refused", "text", "match")
def test_refused_policies(tmp_path, text, match):
    with pytest.raises(SourceError, match=match) as caught:
        sources_of(tmp_path, f"[tables.t]\npath = 't.csv'\npolicy = {{ {text} }}")
    assert "s3cret" not in str(caught.value)


def fragment_of(*pieces):
    """A fragment of expressions, each after its place in it or in its sub-query."""
    places = defaultdict(tuple)
    for piece in pieces:
        place, sql = piece.split(": ", 1)
        places[place] += (sql,)
    columns = {
        place.removeprefix("column "): sql
        for place, (sql, *_) in places.items()
        if place.startswith("column ")
    }
    inner = None
    if columns or places.keys() & {"inner filter", "group", "having"}:
        inner = SubQuery(
            features(**columns or {"n": "COUNT(*)"}),
            places["inner filter"],
            places["group"] or ('"day"',),
            places["having"],
        )
    return fragment(
        features=tuple(Feature("f", sql) for sql in places["feature"]),
        label=next(iter(places["label"]), None),
        filters=places["filter"],
        keys=(places["key"],) if places["key"] else (),
        subquery=inner,
    )


@CASES.each("allowed-reads", "pieces")
def test_allowed_reads(pieces):
    check(POLICY, fragment_of(*pieces))
    check(Policy(), fragment_of(*pieces))


@CASES.each("refused-reads", "pieces", "match")
def test_refused_reads(pieces, match):
    with refused(match):
        check(POLICY, fragment_of(*pieces))
    check(Policy(), fragment_of(*pieces))


@pytest.mark.parametrize(
    ("rules", "piece", "error", "match"),
    [
        # a list of keys takes plain columns
        ({"keys": ("day",)}, 'key: "day" > 3', PolicyError, r"\(keys\).* 'day' in"),
        ({"keys": ("day",)}, 'key: "salary"', PolicyError, r"\(keys\).* 'salary';"),
        ({"labels": ()}, 'label: "day"', PolicyError, r"\(labels\).* no column"),
        ({}, "feature: (SELECT 1)", QueryError, "sub-queries are not supported"),
    ],
)
def test_reads_of_a_list(rules, piece, error, match):
    check(Policy(**rules), fragment_of('key: "day"', 'feature: "salary"'))
    with pytest.raises(error, match=match):
        check(Policy(**rules), fragment_of(piece))


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        (Policy(), COLUMNS),
        (Policy(labels=("is_fraud",), join_only=("customer",)), COLUMNS),
        (POLICY, ["customer", "amount", "day", "is_fraud"]),
        (Policy(columns=()), []),
        (Policy(columns=("DAY",), keys=("Amount",)), ["amount", "day"]),
    ],
)
def test_which_columns_exist_for_the_server(policy, seen):
    assert policy.visible(COLUMNS) == seen


def test_the_reads_of_a_sub_query_are_followed_to_its_table():
    wanted = fragment_of(
        'column customer: "customer"',
        'column mean: AVG("amount" * "day")',
        "column n: COUNT(*)",
        'inner filter: "salary" > 1',
        'group: "customer"',
        'feature: "mean" + "n" + "nothing"',
        'key: "customer"',
    )
    assert [(read.role, read.column, read.is_plain) for read in reads(wanted)] == [
        (Role.FILTER, "salary", False),
        (Role.GROUP, "customer", True),
        (Role.INNER, "customer", True),
        (Role.INNER, "amount", False),
        (Role.INNER, "day", False),
        (Role.FEATURE, "amount", False),
        (Role.FEATURE, "day", False),
        (Role.KEY, "customer", True),
    ]


def test_few_rows(tmp_path):
    policy = Policy(min_rows=3)
    policy.check_rows(3, "the answer")
    for rows in (0, 1, 2):
        with refused(r"min-rows.*answer would be of too"):
            policy.check_rows(rows, "the answer")
        Policy().check_rows(rows, "the answer")
    # of rows that the server chose
    _, (source,) = site_of(tmp_path, "min-rows = 2")
    for rows in (0, 2):
        guard.check_rows(source, rows, "the mask")
    with refused("the mask would be of too few rows"):
        guard.check_rows(source, 1, "the mask")
    # a filter that nobody passes is refused as one that few pass
    guard.check_extracted(source, fragment(), 2)
    guard.check_extracted(source, fragment(), 0)  # an empty shard
    guard.check_extracted(source, fragment_of('filter: "day" > 0'), 2)
    texts = set()
    for rows in (0, 1):
        with refused("min-rows") as caught:
            guard.check_extracted(source, fragment_of('filter: "day" > 9'), rows)
        texts.add(str(caught.value))
    assert len(texts) == 1
    with refused("min-rows"):
        guard.check_extracted(source, fragment_of('group: "customer"'), 0)


@pytest.mark.parametrize(("spec", "finest"), BY_SPEC)
def test_statistics_by_level(spec, finest):
    """A level allows what its own statistics suffice for, and every coarser one."""
    levels = LEVELS["statistics"]
    encoder = EncoderSpec.parse(spec)
    for level in levels:
        policy = Policy(releases=Releases(statistics=level))
        is_refused = level not in levels[levels.index(finest) :]
        match = rf"statistics = {level}.* t\.x is fitted to "
        with refused(match) if is_refused else nullcontext():
            policy.check_statistics("t", "x", "number", encoder)
    # finer ones are named
    both = EncoderSpec.parse("min-max missing=mean")
    for level, finer in (("moments", "range; counts, means"), ("never", "moments and")):
        policy = Policy(releases=Releases(statistics=level))
        with refused(rf"t\.x is fitted to {finer}"):
            policy.check_statistics("t", "x", "number", both)


@CASES.each("instead", "kind", "instead")
def test_a_refused_statistic_comes_with_what_to_write_instead(kind, instead):
    policy = Policy(releases=BUDGETED)
    spec = EncoderSpec.parse(DEFAULTS[kind]).for_kind(kind, 9)
    match = rf"none may leave the site; set encoders = 't\.x=<encoder>' .*{instead}"
    with refused(match):
        policy.check_statistics("t", "x", kind, spec)
    policy.check_statistics("t", "x", "vector", EncoderSpec.parse(DEFAULTS["vector"]))


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
def test_releases_by_level(kind, is_private, is_masked):
    how = {"is_private": is_private, "is_masked": is_masked}
    for level in LEVELS[kind]:
        policy = Policy(releases=Releases(**{kind: level}))
        is_covered = {
            "never": False,
            "private": is_private,
            "masked": is_private or is_masked,
            "sealed": is_private or is_masked,
        }.get(level, True)
        match = f"releases.{kind} = {level}.*the run asks for {kind}"
        with nullcontext() if is_covered else refused(match):
            policy.check_release(kind, **how)


def test_the_guards_schema_has_the_visible_columns_only(tmp_path):
    site, (source,) = site_of(tmp_path, "columns = ['day']\njoin-only = ['CUSTOMER']")
    schema = guard.visible_schema(site, source)
    assert list(schema.columns) == ["customer", "day"]
    assert schema.rows == 2
    # a rule about no column would protect nothing
    site, (source,) = site_of(tmp_path, "join-only = ['custmer']")
    match = "table 't' .*: its policy names an unknown column 'custmer'$"
    with pytest.raises(SourceError, match=match):
        guard.visible_schema(site, source)
    with pytest.raises(SourceError, match=match):
        guard.check_fragment(site, source, fragment_of('feature: "amount"'))


def test_the_guard_knows_an_empty_list_from_none(tmp_path):
    for rule in ("columns", "labels", "filters", "keys"):
        piece = "feature" if rule == "columns" else rule.removesuffix("s")
        site, (source,) = site_of(tmp_path, f"{rule} = []")
        with refused(rf"\({rule}\).*it may read no column"):
            guard.check_fragment(site, source, fragment_of(f'{piece}: "day"'))


def test_everything_that_a_fragment_may_not_read_is_said_at_once(tmp_path):
    site, (source,) = site_of(tmp_path, "columns = ['day']\nfilters = []")
    fragment = fragment_of('feature: "amount"', 'filter: "day"', 'feature: "day"')
    both = r"\(columns\).*'amount'; it may read day; .*\(filters\).*'day'; .* no column"
    with refused(both):
        guard.check_fragment(site, source, fragment)


def test_the_smallest_batch_must_have_enough_rows(tmp_path):
    _, (source,) = site_of(tmp_path, "min-rows = 2")
    rows = TrainingRows(np.arange(4), np.ones(4, np.int64), np.zeros(4, np.bool_))
    even, odd = (
        Batches(start, np.arange(4)) for start in np.array([[0, 2, 4], [0, 3, 4]])
    )
    check_training_rows(source, "t", rows, even, sends_sums=True)
    check_training_rows(source, "t", rows, odd, sends_sums=False)
    with refused("a batch's gradient of table 't' would be"):
        check_training_rows(source, "t", rows, odd, sends_sums=True)


@CASES.each("covering", "kind", "covering", "other")
def test_a_plan_must_cover_what_the_policy_wants_covered(
    tmp_path, kind, covering, other
):
    _, (source,) = site_of(
        tmp_path, f"epsilon = 1\nreleases = {{ {kind} = 'private' }}"
    )
    guard.check_plan(source, [kind], PrivacyTerms.of(PrivacySettings(**covering)))
    guard.check_plan(source, [])
    match = rf"releases.{kind} = private.*run config pri"
    for terms in ((), (PrivacyTerms.of(PrivacySettings(**other)),)):
        with refused(match):
            guard.check_plan(source, [kind], *terms)


def test_budgets_are_of_rows_whatever_they_are_called(tmp_path):
    again = CASES["of-the-same-rows"].replace("FOLDER", tmp_path.name)
    site, sources = site_of(tmp_path, "epsilon = 2\ndelta = 1e-6", again)
    ids = list(map(guard.source_id, sources))
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]
    assert len(set(ids)) == 3
    # of two budgets of the same rows the smaller holds, whoever asks
    assert guard.budgets(site) == {
        ids[0]: Budget(0.5, 1e-6, 0.125),
        ids[3]: Budget(3.0, 1e-5, 0.75),
    }
