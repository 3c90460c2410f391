"""The rules of a table's policy: read from the tables file, and what they refuse."""

import numpy as np
import pytest

from client_apps.handlers.training_rows import (
    Batches,
    TrainingRows,
    check_training_rows,
)
from client_apps.privacy.guard import (
    budgets,
    check_extracted,
    check_fragment,
    check_plan,
    check_rows,
    source_id,
    visible_schema,
)
from tests.support.examples.policies import check, features, fragment, shards, site_of
from tp_flower.errors import PolicyError, QueryError, SourceError
from tp_flower.features.spec import DEFAULTS, EncoderSpec
from tp_flower.privacy.mechanisms import Budget
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.query import SubQuery
from tp_flower.query.fragment import Role, reads
from tp_flower.settings import PrivacySettings
from tp_flower.sources.policy import LEVELS, Policy, Releases
from tp_flower.sources.shards import load_tables

COLUMNS = ["customer", "amount", "day", "is_fraud", "salary"]


def test_a_policy_with_every_key(tmp_path):
    text = """
        columns = ["amount", "day"]
        labels = ["is_fraud"]
        filters = []
        keys = ["day"]
        join-only = ["customer"]
        coefficients = true
        min-rows = 5
        min-count = 3
        epsilon = 2
        delta = 1e-6
        budget-name = "payments"
        releases = { labels = "clear", scores = "never" }
    """
    (source,) = shards(tmp_path, text)
    assert source.policy == Policy(
        columns=("amount", "day"),
        labels=("is_fraud",),
        filters=(),
        keys=("day",),
        join_only=("customer",),
        min_rows=5,
        min_count=3,
        releases=Releases("clear", "never", "private", "never"),
        epsilon=2.0,
        delta=1e-6,
        budget_name="payments",
        coefficients=True,
    )
    assert source.min_count == 3


def test_without_a_policy_everything_is_allowed(tmp_path):
    (tmp_path / "tables.toml").write_text("[tables.t]\npath='t.csv'\nmin-count=4\n")
    (source,) = load_tables(str(tmp_path / "tables.toml"))
    assert (source.policy, source.min_count) == (Policy(), 4)
    levels = {kind: source.policy.releases.level(kind) for kind in LEVELS}
    # but for rows themselves
    assert levels == {**dict.fromkeys(LEVELS, "clear"), "rows": "never"}


def test_a_shards_keys_win_over_its_tables(tmp_path):
    text = """
        [tables.t]
        min-count = 4
        [tables.t.policy]
        columns = ["a"]
        min-rows = 10
        epsilon = 1.0
        releases = { models = "never", scores = "clear" }
        [[tables.t.shards]]
        path = "a.csv"
        policy = { min-rows = 2, min-count = 7, releases = { scores = "never" } }
        [[tables.t.shards]]
        path = "b.csv"
        min-count = 5
    """
    (tmp_path / "tables.toml").write_text(text)
    first, second = load_tables(str(tmp_path / "tables.toml"))
    assert (first.policy.min_rows, second.policy.min_rows) == (2, 10)
    assert (first.min_count, second.min_count) == (7, 5)
    assert first.policy.columns == second.policy.columns == ("a",)
    assert first.policy.releases == Releases("private", "never", "never", "never")
    assert second.policy.releases == Releases("private", "never", "never", "clear")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("column = []", "unknown key 'column' in the policy of .*mean 'columns'"),
        ("columns = 'a'", "'columns' of the policy of shard 0 .* list of strings"),
        ("labels = [1]", "'labels' of the policy .* list of strings"),
        ("min-rows = 0", "'min-rows' of the policy .* at least 1, not 0"),
        ("min-count = 1.5", "'min-count' of the policy .* at least 1, not 1.5"),
        ("epsilon = 0", "'epsilon' of the policy .* a number above 0, not 0"),
        ("epsilon = inf", "'epsilon' of the policy .* a number above 0, not inf"),
        ("epsilon = nan", "'epsilon' of the policy .* a number above 0, not nan"),
        ("epsilon = true", "'epsilon' of the policy .* a number above 0, not True"),
        ("epsilon = 's3cret'", "'epsilon' of the policy .* above 0, not str"),
        ("epsilon = 1\ndelta = 1", "'delta' of the policy .* between 0 and 1, not 1"),
        ("delta = 1e-5", "has a 'delta', but no 'epsilon'"),
        ("budget-name = 3", "'budget-name' of the policy .* must be a string, not 3"),
        ("releases = 'never'", "'releases' of the policy .* must be a table, not str"),
        ("releases = { label = 'never' }", "unknown key 'label' .* mean 'labels'"),
        (
            "releases = { labels = 'moments' }",
            "'labels' in 'releases' .* is 'moments': valid .* never, private, clear",
        ),
        (
            "releases = { statistics = 'moment' }",
            r"'moment' \(did you mean 'moments'\?\): .* never, moments, clear",
        ),
        (
            "epsilon = 1\nreleases = { statistics = 'private' }",
            "'statistics' in 'releases' .* is 'private': .* never, moments, clear",
        ),
        ("releases = { scores = 3 }", "'scores' in 'releases' .* is 3: valid levels"),
        ("releases = { models = 'private' }", "are private, but no 'epsilon'"),
        # a label in the clear, by another name
        (
            "labels = ['y']\nreleases = { labels = 'never', weights = 'clear' }",
            "list in 'weights' which columns a weight may read, or .* the label's",
        ),
        (
            "epsilon = 1\nreleases = { weights = 'clear' }",
            "lets weights leave as they are, and labels not: list in 'weights'",
        ),
        (
            "join-only = ['Customer']\nlabels = ['customer']",
            "column 'Customer' is join-only, and 'labels' has it too",
        ),
        ("join-only = ['c']\nfilters = ['c']", "join-only, and 'filters' has it too"),
    ],
)
def test_refused_policies(tmp_path, text, match):
    with pytest.raises(SourceError, match=match) as caught:
        shards(tmp_path, text)
    assert "s3cret" not in str(caught.value)


POLICY = Policy(
    columns=("amount", "day"),
    labels=("is_fraud",),
    filters=("day",),
    join_only=("customer",),
)
HIDDEN = "reads column 'salary'; it may read amount, day"
SUBQUERY = SubQuery(
    features(customer='"customer"', mean='AVG("amount")'), groups=('"customer"',)
)


def fragment_of(sub_query=None, **parts):
    """A fragment of one expression: feature, label, filter, or key (of several)."""
    key = parts.get("key", ())
    inner = None
    if sub_query is not None:
        inner = SubQuery(
            features(**sub_query.get("columns", {"n": "COUNT(*)"})),
            tuple(sub_query.get("filters", ())),
            tuple(sub_query.get("groups", ('"day"',))),
            tuple(sub_query.get("having", ())),
        )
    return fragment(
        features=features(f=parts["feature"]) if "feature" in parts else (),
        label=parts.get("label"),
        filters=(parts["filter"],) if "filter" in parts else (),
        keys=((key,) if isinstance(key, str) else key,) if key else (),
        subquery=inner,
    )


MEANS = {
    "columns": {"customer": '"customer"', "mean": 'AVG("amount")'},
    "groups": ['"customer"'],
}


@pytest.mark.parametrize(
    "parts",
    [
        {"feature": '"Amount" * 2 + "DAY"'},
        {"label": '"IS_FRAUD" = 1'},
        {"filter": '"day" > 3'},
        {"key": '"customer"'},
        {"key": ('"day"', '"amount" + 1')},
        {"key": 'CAST("customer" AS VARCHAR)'},
        {"key": 'LOWER(TRIM("customer"))'},
        {"feature": '"mean" * 2', "key": '"customer"', "sub_query": MEANS},
        {"feature": '"n"', "sub_query": {}},
    ],
)
def test_allowed_reads(parts):
    check(POLICY, fragment_of(**parts))
    check(Policy(), fragment_of(**parts))


CASE = 'CASE WHEN "amount" > 1 THEN 0 ELSE "SALARY" END'
FILTERED = 'COUNT(*) FILTER (WHERE "salary" > 3)'


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"feature": '"salary"'}, f"feature 'f' {HIDDEN}"),
        ({"feature": '"no_such"'}, "reads column 'no_such'; it may"),
        ({"feature": CASE}, r"\(columns\) refuses: feature 'f' reads column 'SALARY'"),
        ({"feature": '"is_fraud"'}, r"\(columns\).*'is_fraud'"),
        ({"label": '"amount" > 1'}, r"\(labels\).* the label .*may read is_fraud"),
        ({"label": '"customer"'}, r"\(join-only\).* the label reads.*'customer'"),
        ({"label": '"is_fraud" + "salary"'}, r"\(labels\).*column 'salary'"),
        ({"filter": '"amount" > 1'}, r"\(filters\) .*filter 0 .*'amount'; it may read"),
        ({"filter": '"customer" = 7'}, r"\(join-only\).* filter 0 reads"),
        ({"feature": '"customer"'}, r"\(join-only\).*; it may be joined on, as it is"),
        ({"key": '"customer" = 12345'}, r"\(join-only\).* join key 0 .* in an exp"),
        ({"key": 'CAST("customer" AS BOOLEAN)'}, "in an expression"),
        ({"key": ('"day"', '"salary"')}, "join key 0 reads column 'salary'"),
        (
            {"sub_query": {"columns": {"mean": 'AVG("salary")'}}, "feature": '"mean"'},
            "column 'mean' of the sub-query reads column 'salary'; it may read amount",
        ),
        (
            {"sub_query": {"filters": ['"salary" > 3']}},
            "filter 0 of the sub-query reads column 'salary'; it may read day",
        ),
        (
            {"sub_query": {"columns": {"n": FILTERED}}},
            "column 'n' of the sub-.* 'salary'",
        ),
        (
            {"sub_query": {"having": ['MAX("amount") > 3']}},
            "HAVING condition 0 of the sub-query reads column 'amount'; it may",
        ),
        (
            {"sub_query": {"groups": ['"salary"']}},
            "group 0 of the sub-query .*'salary'",
        ),
        (
            {"sub_query": {"groups": ['"customer" % 2']}},
            r"\(join-only\).*group 0 of the sub-query reads .* in an expression",
        ),
        (
            # what is a key inside may be no feature outside
            {"sub_query": MEANS, "feature": '"customer" % 2'},
            r"\(join-only\).* feature 'f' reads column 'customer'",
        ),
        (
            {"sub_query": {"columns": {"first": 'MIN("customer")'}}, "key": '"first"'},
            "join key 0 reads column 'customer' in an expression",
        ),
        (
            {"sub_query": {"columns": {"m": 'MAX("amount")'}}, "label": '"m"'},
            r"\(labels\).* the label reads column 'amount'",
        ),
    ],
)
def test_refused_reads(parts, match):
    with pytest.raises(PolicyError, match=match):
        check(POLICY, fragment_of(**parts))
    check(Policy(), fragment_of(**parts))


@pytest.mark.parametrize(
    ("rules", "parts", "error", "match"),
    [
        # a list of keys takes plain columns
        ({"keys": ("day",)}, {"key": '"day" > 3'}, PolicyError, r"\(keys\).* 'day' in"),
        ({"keys": ("day",)}, {"key": '"salary"'}, PolicyError, r"\(keys\).* 'salary';"),
        ({"labels": ()}, {"label": '"day"'}, PolicyError, r"\(labels\).* no column"),
        ({}, {"feature": "(SELECT 1)"}, QueryError, "sub-queries are not supported"),
    ],
)
def test_reads_of_a_list(rules, parts, error, match):
    check(Policy(**rules), fragment_of(key='"day"', feature='"salary"'))
    with pytest.raises(error, match=match):
        check(Policy(**rules), fragment_of(**parts))


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
    inner = {"customer": '"customer"', "mean": 'AVG("amount" * "day")', "n": "COUNT(*)"}
    wanted = fragment_of(
        {"columns": inner, "filters": ['"salary" > 1'], "groups": ['"customer"']},
        feature='"mean" + "n" + "nothing"',
        key='"customer"',
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
        with pytest.raises(PolicyError, match=r"min-rows.*answer would be of too"):
            policy.check_rows(rows, "the answer")
        Policy().check_rows(rows, "the answer")
    # of rows that the server chose
    _, (source,) = site_of(tmp_path, "min-rows = 2")
    for rows in (0, 2):
        check_rows(source, rows, "the mask")
    with pytest.raises(PolicyError, match="the mask would be of too few rows"):
        check_rows(source, 1, "the mask")


FINEST = {
    "moments": ("standard", "one-hot(4)", "length", "none"),
    "never": ("cyclic(7)", "range(0, 9)", "categories(1, 2)", "hash(4) indicator"),
    "clear": (
        "min-max",
        "bins(4)",
        "robust",
        "quantile-bins(4)",
        "standard missing=median",
    ),
}
BY_SPEC = [(spec, finest) for finest, specs in FINEST.items() for spec in specs]


@pytest.mark.parametrize(("spec", "finest"), BY_SPEC)
def test_statistics_by_level(spec, finest):
    """A level allows what its own statistics suffice for, and every coarser one."""
    levels, encoder = LEVELS["statistics"], EncoderSpec.parse(spec)
    for level in levels:
        policy = Policy(releases=Releases(statistics=level))
        if level in levels[levels.index(finest) :]:
            policy.check_statistics("t", "x", "number", encoder)
            continue
        match = rf"statistics = {level}.* t\.x is fi"
        with pytest.raises(PolicyError, match=match):
            policy.check_statistics("t", "x", "number", encoder)


def test_finer_statistics_are_named():
    policy = Policy(releases=Releases(statistics="moments"))
    spec = EncoderSpec.parse("min-max missing=median")
    match = r"t\.x is fitted to quantiles and range; counts, means, deviations and"
    with pytest.raises(PolicyError, match=match):
        policy.check_statistics("t", "x", "number", spec)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("number", r"range\(<low>, <high>\), categories\(.*hash\(.* or cyclic\("),
        ("boolean", r"range\(0, 1\)$"),
        ("time", r"range\(1950-01-01, 2013-12-31\), cyclic\(<part>\).* or hash\("),
        ("text", r"categories\(<a>, <b>\) or hash\(<columns>\)$"),
    ],
)
def test_a_refused_statistic_comes_with_what_to_write_instead(kind, instead):
    policy = Policy(releases=Releases.within_budget())
    spec = EncoderSpec.parse(DEFAULTS[kind]).for_kind(kind, 9)
    match = (
        rf"none may leave the site; set encoders = 't\.x=<encoder>' with .*{instead}"
    )
    with pytest.raises(PolicyError, match=match):
        policy.check_statistics("t", "x", kind, spec)
    policy.check_statistics("t", "x", "vector", EncoderSpec.parse(DEFAULTS["vector"]))


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("is_private", [True, False])
def test_releases_by_level(kind, is_private):
    for level in LEVELS[kind]:
        policy = Policy(releases=Releases(**{kind: level}))
        if level == "never" or (level == "private" and not is_private):
            match = f"releases.{kind} = {level}.*the run asks for {kind}"
            with pytest.raises(PolicyError, match=match):
                policy.check_release(kind, is_private=is_private)
        else:
            policy.check_release(kind, is_private=is_private)


def test_the_guards_schema_has_the_visible_columns_only(tmp_path):
    site, (source,) = site_of(tmp_path, "columns = ['day']\njoin-only = ['CUSTOMER']")
    schema = visible_schema(site, source)
    assert list(schema.columns) == ["customer", "day"]
    assert schema.rows == 2
    # a rule about no column would protect nothing
    site, (source,) = site_of(tmp_path, "join-only = ['custmer']")
    match = "table 't' .*: its policy names column 'custmer': there is none$"
    with pytest.raises(SourceError, match=match):
        visible_schema(site, source)
    with pytest.raises(SourceError, match=match):
        check_fragment(site, source, fragment_of(feature='"amount"'))


def test_a_filter_that_nobody_passes_is_refused_as_one_that_few_pass(tmp_path):
    _, (source,) = site_of(tmp_path, "min-rows = 2")
    check_extracted(source, fragment(), 2)
    check_extracted(source, fragment(), 0)  # an empty shard
    check_extracted(source, fragment(filters=('"day" > 0',)), 2)
    texts = set()
    for rows in (0, 1):
        with pytest.raises(PolicyError, match="min-rows") as caught:
            check_extracted(source, fragment(filters=('"day" > 9',)), rows)
        texts.add(str(caught.value))
    assert len(texts) == 1
    with pytest.raises(PolicyError, match="min-rows"):
        check_extracted(source, fragment(subquery=SUBQUERY), 0)


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ("columns", "feature"),
        ("labels", "label"),
        ("filters", "filter"),
        ("keys", "key"),
    ],
)
def test_the_guard_knows_an_empty_list_from_none(tmp_path, rule, part):
    site, (source,) = site_of(tmp_path, f"{rule} = []")
    with pytest.raises(PolicyError, match=rf"\({rule}\).*it may read no column"):
        check_fragment(site, source, fragment_of(**{part: '"day"'}))


def test_the_smallest_batch_must_have_enough_rows(tmp_path):
    _, (source,) = site_of(tmp_path, "min-rows = 2")
    rows = TrainingRows(np.arange(4), None, np.ones(4, np.int64), np.zeros(4, np.bool_))
    plans = {
        sizes: Batches(np.cumsum([0, *sizes]), np.arange(4))
        for sizes in [(2, 2), (3, 1)]
    }
    for sizes, sends_sums in [((2, 2), True), ((3, 1), False)]:
        check_training_rows(source, "t", rows, plans[sizes], sends_sums=sends_sums)
    with pytest.raises(PolicyError, match="a batch's gradient of table 't' would be"):
        check_training_rows(source, "t", rows, plans[3, 1], sends_sums=True)


@pytest.mark.parametrize(
    ("kind", "covering", "other"),
    [
        ("models", {"features": "dp-sgd"}, {"predictions": 1.0}),
        ("models", {"features": "statistics"}, {"predictions": 1.0}),
        ("scores", {"predictions": 1.0}, {"features": "dp-sgd"}),
    ],
)
def test_a_plan_must_cover_what_the_policy_wants_covered(
    tmp_path, kind, covering, other
):
    text = f"epsilon = 1\nreleases = {{ {kind} = 'private' }}"
    _, (source,) = site_of(tmp_path, text)
    check_plan(source, [kind], PrivacyTerms.of(PrivacySettings(**covering)))
    check_plan(source, [])
    match = rf"releases.{kind} = private.*run config pri"
    for terms in ((), (PrivacyTerms.of(PrivacySettings(**other)),)):
        with pytest.raises(PolicyError, match=match):
            check_plan(source, [kind], *terms)


def test_budgets_are_of_rows_whatever_they_are_called(tmp_path):
    again = f"""
        [tables.other]
        path = "../{tmp_path.name}/t.csv"
        types = {{ amount = "VARCHAR" }}
        policy = {{ epsilon = 0.5, delta = 1e-4 }}
        [tables.free]
        path = "u.csv"
        [tables.moved]
        path = "v.csv"
        policy = {{ epsilon = 3, budget-name = "payments" }}
        [tables.copied]
        path = "w.csv"
        policy = {{ epsilon = 4, budget-name = "payments" }}
    """
    site, (first, other, free, moved, copied) = site_of(
        tmp_path, "epsilon = 2\ndelta = 1e-6", again
    )
    ids = [source_id(s) for s in (first, other, free, moved, copied)]
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]
    assert len(set(ids)) == 3
    # of two budgets of the same rows the smaller holds, whoever asks
    assert budgets(site) == {ids[0]: Budget(0.5, 1e-6), ids[3]: Budget(3.0, 1e-5)}
