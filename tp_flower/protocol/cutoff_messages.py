"""Messages of ``cutoffs`` and ``partials``: what sites seal for LATERAL sub-queries."""

from typing import Annotated

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Discloses, PartBody, Reply, Request
from tp_flower.protocol.setup_messages import ProposedRun, TypeName


class CutoffsRequest(ProposedRun, Request, frozen=True, kw_only=True):
    """Seal the keys and cutoffs of rows, before any rows are extracted.

    It is the request for the rows, of all parts at the site, as it will come.
    """


class PairsOfPart(PartBody, frozen=True, kw_only=True):
    """A part's distinct pairs of a key and a cutoff, in the order of the hashes.

    Attributes:
        type: of the cutoffs, in DuckDB's words.
        kinds: of the keys' values, such as "number+text"; "" without keys.
        hashes: of the keys.
        cutoffs: as whole numbers.
    """

    type: TypeName
    kinds: f.Name
    hashes: Annotated[AnyArray, f.hash_pairs("pairs")]
    cutoffs: Annotated[AnyArray, f.whole_numbers("pairs")]


class CutoffPairs(Reply, frozen=True):
    """The pairs of one part: they travel sealed, in a CutoffsReply."""

    parts: dict[int, PairsOfPart]


class KeysOfPart(PartBody, frozen=True, kw_only=True):
    """The distinct keys of a shard of a LATERAL sub-query's table.

    Attributes:
        kinds: of the keys' values, such as "number+text"; "" without keys.
        hashes: of the keys, sorted.
    """

    kinds: f.Name
    hashes: Annotated[AnyArray, f.hash_pairs("keys")]


class ShardKeys(Reply, frozen=True):
    """The keys of one part: they travel sealed, in a CutoffsReply."""

    parts: dict[int, KeysOfPart]


class SealedPart(PartBody, frozen=True):
    """What a part seals for other sites, before any rows are extracted.

    Attributes:
        cutoffs: its pairs, by the node that they are sealed for, key and cutoff.
        sealed_keys: its keys, by this shard and a later one, which they are sealed for.
    """

    cutoffs: dict[str, Annotated[AnyArray, f.sealed("sealed-{}")]] = {}
    sealed_keys: dict[str, Annotated[AnyArray, f.sealed("keys-{}")]] = {}


class CutoffsReply(Reply, frozen=True):
    """The sealed keys and cutoffs of the tables around LATERAL sub-queries.

    And the sealed keys of shards of their own tables.
    """

    parts: dict[int, SealedPart]

    discloses = (
        Discloses(
            "to the sites of {sealed_cutoffs}: at which cutoffs each key has rows; "
            "they recognise the keys that they have or guess, and see hashes of the "
            "others, new in every run",
            fields=("cutoffs",),
            covered_by="sites",
            kinds=("cutoffs",),
            policy="cutoffs",
            when="sealed_cutoffs",
            reader=f.SITES,
        ),
        Discloses(
            "to the sites of later shards of {partials}: which of their keys the shard "
            "has; of the others they see hashes, new in every run",
            fields=("sealed_keys",),
            covered_by="sites",
            kinds=("shard-keys",),
            policy="partials",
            when="partials",
            reader=f.SITES,
        ),
    )


class PartialsRequest(ProposedRun, Request, frozen=True, kw_only=True):
    """Seal partial answers about keys that an earlier shard has, too.

    It is the request for the rows, of all parts at the site, as it will come, but for
    the partial answers.
    """


class PartialsOfPart(PartBody, frozen=True, kw_only=True):
    """What a shard's rows add to answers about another shard's keys.

    Attributes:
        type: of the cutoffs, in DuckDB's words.
        kinds: of the keys' values, such as "number+text"; "" without keys.
        types: of the partial columns, in DuckDB's words.
        texts: the distinct texts of all columns.
        hashes: of the keys.
        cutoffs: as whole numbers.
        words: of each column, whole numbers and times, the bits of other numbers, or
            positions in ``texts``.
        present: which of these are not NULL.
    """

    type: TypeName
    kinds: f.Name
    types: list[TypeName]
    texts: list[str]
    hashes: Annotated[AnyArray, f.hash_pairs("pairs")]
    cutoffs: Annotated[AnyArray, f.whole_numbers("pairs")]
    words: Annotated[AnyArray, f.whole_numbers("pairs", "columns")]
    present: Annotated[AnyArray, f.flags("pairs", "columns")]


class ShardPartialAnswers(Reply, frozen=True):
    """The partial answers of one part: they travel sealed, in a PartialsReply."""

    parts: dict[int, PartialsOfPart]


class SealedPartials(PartBody, frozen=True):
    """A part's partial answers, by an earlier shard, which they are sealed for."""

    sealed_partials: dict[str, Annotated[AnyArray, f.sealed("partials-{}")]] = {}


class PartialsReply(Reply, frozen=True):
    """The sealed partial answers of LATERAL sub-queries over several shards."""

    parts: dict[int, SealedPartials]

    discloses = (
        Discloses(
            "to the sites of earlier shards of {partials}: for each key that both have "
            "and each cutoff the count, sum, least and greatest value of the shard's "
            "own rows, as the sub-query has them, or their last row",
            fields=("sealed_partials",),
            covered_by="sites",
            kinds=("partials",),
            policy="partials",
            reader=f.SITES,
        ),
    )
