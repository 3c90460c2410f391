"""A first policy for the owner of a table: strict, and commented.

It allows nothing. A line with one ``#`` is a rule that takes effect without it, and
says what it lets out; those with ``##`` explain. The tables-file reader accepts the
text at the end of the tables file, with any of these lines taken in.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tp_flower.duckdb_engine import quote_name
from tp_flower.extraction.select_plan import drop_enum_values
from tp_flower.sources.derived.accounts import read_tables
from tp_flower.sources.entries import quote_toml
from tp_flower.sources.policy import STRICT
from tp_flower.sources.shards import ShardSource, connect, describe

_LISTS: Final[Mapping[str, str]] = {
    "columns": "features may read. Their scores leave masked, added to other tables'; "
    "the server learns\n## as how many columns each is encoded, other shards of this "
    "table its statistics",
    "labels": "the label may read, and a weight or an offset. The server learns it for "
    "every row,\n## unless it is noisy",
    "filters": "WHERE and HAVING may read. The server learns which rows pass; a "
    "condition needs expressions",
    "keys": "joins and groups may read. The server learns which rows have equal "
    "values, by keyed hashes",
    "join-only": "joins alone may compare, and nothing else reads: the number of a "
    "person\n## goes here, not in keys. The server learns what it learns of keys",
}
_RULES: Final[Mapping[str, str]] = {
    "expressions = true": "the listed columns computed with; whether that fails on "
    "some value tells of it",
    "min-rows = 20": "results of fewer rows than {min-rows}",
    "min-count = 5": "categories and label texts of fewer rows than {min-count}",
    "min-cell = 20": "no less; with it, only descriptions of a join that hide cells of "
    "fewer rows,\n## from whoever reads them, not from the server",
    'scores-per-rank = "any"': "score vectors without end, which tell the features: "
    "else, over all runs, {scores-per-rank:g} for\n## each direction that the rows "
    "vary in; constants, copies and a column beside which little varies do not count",
    "cover = 0": "scores that no other table's hide: else {cover} other sites must "
    "have a table in the query whose rows vary in\n## 4 directions; with cover = 2 "
    "none of them reads these scores alone",
    "most-unmatched = 0.2": "scores without a mask, of this share of rows, which "
    "the server says have no partner in a LEFT JOIN",
    'models = ["linear", "mlp", "trees", "my_models:make"]': "boosted trees, and the "
    "result of a function that the server names; listed, it runs here",
    "min-rows-per-parameter = 3": "no less; with it, coefficients and second moments "
    "only of so many rows\n## to each column of the table",
    "most-parameters = 10_000_000": "no more; a model of more than {most-parameters} "
    "parameters takes this\n## machine's memory",
    'releases.scores = "clear"': "this table's scores of every row, which tell its "
    "features",
    'releases.models = "clear"': "what shards of this table add up (Gram matrices, "
    "gradients, parameters), which with scores tells its rows",
    'releases.rows = "clear"': "encoded features of sampled rows",
    'releases.moments = "clear"': "sums over the joined rows of the products of two "
    "columns, for linear models: exact, so that a column that marks one row, a "
    "partner's too,\n## reads it, as do two runs whose rows differ in one",
    'releases.factors = "clear"': "in predictions, numbers by which the server knows "
    "the rows of a join key again",
    'releases.covariance = "clear"': "such sums for standard errors, in which the "
    "server says how much each joined row weighs:\n## one that departs from the "
    "protocol reads single rows from them",
    'releases.regressions = "clear"': "sums over all joined rows of the products of "
    "two columns, to the label's site alone:\n## it can work out every regression "
    "among the columns of all tables",
    'releases.cutoffs = "partner"': "at which times there are rows of each key, to the "
    "site of a table that a query looks\n## back in, for keys that it has or guesses",
    'releases.partials = "partner"': "of each key that another shard of this table "
    "has, what this one's rows add to answers of\n## queries that look back, such as "
    "one patient's count and sum before a day, to that shard's site",
    "releases.bins = 32": "of each row, into which of so many bins the value of each "
    "column falls, once a run.\n## Of seven columns, 16 bins single out nine rows in "
    "ten",
    'releases.inspection = "clear"': "to evaluate a model, scores and labels of the "
    "joined rows, to the other tables' sites, and how\n## much each feature matters, "
    "to the server",
    "coefficients = true": "coefficients of a linear model, or gains of trees",
    'releases.categories = "clear"': "beside these, the texts of categories of "
    "{min-count} rows here at least (min-count),\n## by which their columns are called",
    'releases.labels = "never"': "no label, not even one in labels",
    'releases.statistics = "never"': "no statistics: encoders must be declared",
    "queries-per-day = 1000": "answers to more than {queries-per-day} queries in 24 "
    "hours",
    "query-seconds = 3600": "no more; queries may take {query-seconds} seconds of this "
    "machine or its database",
    'partners = ["clinic", "lab"]': "runs with these organisations alone, by the names "
    "that allowed-keys gives their keys",
    "approved-runs = []": "no answer but in runs that you have approved: `tp-flower "
    "approve`\n## shows what each asks of whom",
    "epsilon = 4.0": "over all runs no more than this epsilon, for a row or for a "
    "person (privacy-unit), of what has noise;\n## a quarter in a run. Labels, models "
    "and scores leave with noise only, no statistics. With\n## "
    'releases.scores = "masked" it bounds what models and labels tell, and not what '
    "sums of scores do",
}
_IDENTIFIER: Final = re.compile(
    r"(^|_)(?i:id|key|uuid|code|name|surname|e?mail|phone|address|street|ssn|iban"
    r"|patient|person|customer|client|member|subject|insured|mrn|card|no|nr|number)$"
    r"|[a-z]I[dD]$"
)
_DISTINCT_SHARE: Final = 0.8  # of values in rows, above which they name the rows
_DISTINCT_TEXTS: Final = 0.2
"""Of texts in rows: of whom there are five rows or fewer, a text may name."""
_TEXT_CHARACTERS: Final = 30


def first_policy(table: str, shards: Sequence[ShardSource]) -> Iterator[str]:
    """Yield the lines of a policy for all of a table's shards at this site."""
    schemas = [describe(source).columns for source in shards]
    remarks = {
        name: _remark(name, shards, schemas)
        for name in schemas[0]
        if all(name in schema for schema in schemas)
    }
    yield f"\n## The policy of table {quote_toml(table)}, which allows nothing yet."
    yield "## Take the # from the front of a line to allow what it says."
    yield f"[tables.{quote_toml(table)}.policy]"
    for key, meaning in _LISTS.items():
        yield f"\n## {key}: what {meaning}."
        yield f"{key} = ["
        yield from (
            f"  # {quote_toml(n)},  # {remark}" for n, remark in remarks.items()
        )
        yield "]"
    yield "\n## further rules, and what then leaves"
    for rule, meaning in _RULES.items():
        yield f"## {meaning.format_map(STRICT)}:\n# {rule}"


def _remark(
    name: str, shards: Sequence[ShardSource], schemas: Sequence[Mapping[str, str]]
) -> str:
    """Return a column's type in the first shard with it, and a warning on values."""
    for source, schema in zip(shards, schemas, strict=True):
        if name not in source.absent:
            kind = schema[name]
            words = drop_enum_values(kind).split()
            return f"{' '.join(words)}{_looks(source, name, kind)}"
    return "absent in all shards here"


def _looks(source: ShardSource, name: str, kind: str) -> str:
    """Return a warning of a column that names rows, or has texts that may."""
    is_text = kind == "VARCHAR"
    is_whole = kind.endswith(("INT", "INTEGER", "UUID"))
    if not (is_text or is_whole):
        return ""
    column = quote_name(name)
    with connect(source) as connection:
        rows, distinct, length = connection.sql(
            f"SELECT count({column}), approx_count_distinct({column}), "
            f"avg(length(CAST({column} AS VARCHAR))) FROM shard"
        ).fetchall()[0]
    if is_text and (length or 0) > _TEXT_CHARACTERS:
        return "; CAREFUL: looks like free text"
    share = _DISTINCT_TEXTS if is_text else _DISTINCT_SHARE
    if _IDENTIFIER.search(name) or distinct > max(share * rows, 1):
        return "; CAREFUL: looks like an identifier"
    return ""


def first_policies(sources: Iterable[ShardSource], table: str) -> str:
    """Return the policies of a table, or of all tables without one.

    Those that derived tables read need none: with one, they would share an account.
    """
    hosted = list(sources)
    read = read_tables(hosted)
    shards: dict[str, list[ShardSource]] = {}
    for source in hosted:
        has_need = not source.has_policy and source.table not in read
        if source.table == table or (not table and has_need):
            shards.setdefault(source.table, []).append(source)
    return "".join(
        f"{line}\n"
        for name, parts in shards.items()
        for line in first_policy(name, parts)
    )
