"""How many score vectors policies let leave, by the rank of the rows behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from client_apps.data.score_counts import ANY_COLUMN, ScoreLimit
from client_apps.privacy.cover import check_cover
from client_apps.privacy.proposal_checks import agree_in_rows, rows_of_run
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, IntArray
from tp_flower.errors import PolicyError
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.ranks import LEAST_RANK, effective_rank
from tp_flower.features.sparse import EncodedRows
from tp_flower.query.fragment import Fragment, Role
from tp_flower.query.reads import reads
from tp_flower.sources.derived.accounts import source_id
from tp_flower.sources.shards import ShardSource

_ROUNDING: Final = 1e-9
RANKED: Final = "ranked"
"""The role of rows whose rank a run has been told: no others may take part."""
_ALL_COLUMNS: Final = "*"
"""The column of a feature that names none, such as a count of rows."""


def rule_of(site: Site, source: ShardSource) -> float | None:
    """Return ``scores-per-rank`` of a source's rows; None if no policy bounds it."""
    if not site.most_scores_by_rows:
        return None
    return site.most_scores_by_rows.get(source_id(source))


@dataclass(frozen=True)
class EncodedPart:
    """The participating rows of a part: encoded (n, d), with their positions (n,)."""

    encoder: TableEncoder
    features: EncodedRows
    positions: IntArray


def score_limit(site: Site, number: int, part: EncodedPart) -> ScoreLimit | None:
    """Return how many score vectors of a part's rows may leave; None for any number.

    No rows have no scores, and those of a table without features are constants: no
    limit either.
    """
    source = site.source(number)
    fragment = site.fragment(number)
    rule = rule_of(site, source)
    if rule is None or 0 in part.features.shape:
        return None
    rank = encoded_rank(source, fragment, part)
    columns = set().union(*_raw_columns(fragment).values())
    if _has_other_names(site, source):
        columns.add(ANY_COLUMN)
    return ScoreLimit(
        source=source_id(source),
        table=fragment.table,
        columns=tuple(sorted(columns)),
        rule=rule,
        rank=rank,
        allowed=int(rule * rank + _ROUNDING) if rank >= LEAST_RANK else 0,
    )


def _has_other_names(site: Site, source: ShardSource) -> bool:
    """Return whether the account of a source's rows has others' under other names.

    A derived table may call its columns as it likes, and make two of one.
    """
    name = source_id(source)
    derived = [
        shard.derived is not None for shard in site.shards if source_id(shard) == name
    ]
    return len(derived) > 1 and any(derived)


def encoded_rank(source: ShardSource, fragment: Fragment, part: EncodedPart) -> int:
    """Return the effective rank of a part's rows.

    Fewer than min-count rows add nothing to it.
    """
    raw = _raw_columns(fragment)
    reading: dict[str, list[int]] = {}
    for position, encoding in enumerate(part.encoder.owners):
        for column in raw[encoding.name]:
            reading.setdefault(column, []).append(position)
    return effective_rank(
        part.features,
        {name: np.array(places, np.int64) for name, places in reading.items()},
        source.min_count - 1,
    )


def _raw_columns(fragment: Fragment) -> dict[str, set[str]]:
    """Return the columns of the source, in lower case, that each feature reads."""
    return {
        feature.name: {
            read.column.lower()
            for read in reads(replace(fragment, features=(feature,)))
            if read.role is Role.FEATURE
        }
        or {_ALL_COLUMNS}
        for feature in fragment.features
    }


def pays_for_scores(source: ShardSource, *, has_noise: bool) -> bool:
    """Return whether scores spend an epsilon of a budget, and so need no other limit.

    Without a budget the server may ask for so little noise that it is none.
    """
    return has_noise and source.policy.epsilon is not None


def admit_scores(
    site: Site,
    number: int,
    part: EncodedPart,
    cover: Mapping[str, AnyArray],
    outputs: int,
    *,
    has_noise: bool,
) -> ScoreLimit | None:
    """Return how many score vectors of a part may leave without noise that is paid for.

    PolicyError if not even one may (``outputs`` of them), or if too few tables of other
    sites state in ``cover`` that they vary. Scores of a table without features are
    constants.
    """
    if pays_for_scores(site.source(number), has_noise=has_noise):
        return None
    if RANKED in rows_of_run(site, number):
        takes_part = np.zeros(site.extracted(number).rows, np.bool_)
        takes_part[part.positions] = True
        agree_in_rows(site, number, RANKED, takes_part)
    if 0 not in part.features.shape:
        check_cover(site, number, cover)
    limit = score_limit(site, number, part)
    check_limit(site, limit, outputs)
    return limit


def check_limit(site: Site, limit: ScoreLimit | None, vectors: int) -> None:
    """Refuse training that would release more score vectors than may leave."""
    if limit is None or not vectors:
        return
    if limit.rank < LEAST_RANK:
        raise PolicyError(
            f"the table's policy (scores-per-rank = {limit.rule:g}) refuses: the rows "
            f"of table {limit.table!r} vary in fewer than {LEAST_RANK} directions that "
            "count, as the query encodes them: constants, copies and a column beside "
            "which little else varies count nothing; read no feature of the table, or "
            "more columns that vary"
        )
    used = site.ledger.scores_used(limit)
    if used + vectors > limit.allowed:
        raise PolicyError(limit.refusal(vectors, used))
