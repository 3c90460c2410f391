"""Messages of ``cutoffs``: the keys and cutoffs that sites seal for each other."""

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


class SealedPart(PartBody, frozen=True):
    """A part's pairs, by the node that they are sealed for, key and cutoff."""

    cutoffs: dict[str, Annotated[AnyArray, f.sealed("sealed-{}")]] = {}


class CutoffsReply(Reply, frozen=True):
    """The sealed keys and cutoffs of the tables around LATERAL sub-queries."""

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
            reader=f.SITES,
        ),
    )
