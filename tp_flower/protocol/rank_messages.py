"""Messages before scores leave: how often they may, and how other tables hide them."""

from typing import Annotated

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.setup_messages import SealedText

Cover = dict[str, Annotated[AnyArray, f.sealed("sealed-{}")]]
"""By participant, the sealed statements about how much the rows of all tables vary."""


class RankPart(PartBody, frozen=True, kw_only=True):
    """The rows of a shard that take part, and the encoder of its table.

    Attributes:
        model_part: of a saved model, whose encoder is used; ``digest`` is its.
    """

    rows: Annotated[AnyArray, f.bits("rows")]
    encoder: SealedText | None = None
    model_part: Annotated[int, f.between(0, 1_000_000)] | None = None
    digest: f.Digest | None = None


class RankRequest(Request, frozen=True, kw_only=True):
    """Say how many more score vectors may leave, and state how much rows vary."""

    model_name: f.Name | None = None
    model_version: f.Name | None = None
    parts: dict[int, RankPart]

    discloses = (Discloses("which rows of the site are joined", fields=("rows",)),)
    schedule = ("model_name", "model_version", "encoder", "model_part", "digest")


class CoverStatement(Body, frozen=True, kw_only=True):
    """A shard's statement about itself, sealed to the run's sites.

    Attributes:
        site: public key of its site in this run.
        rows: that take part.
        varies: whether their effective rank is ``LEAST_RANK`` or more.
    """

    site: f.Digest
    rows: f.TableRowCount
    varies: bool


class RankedPart(PartBody, frozen=True, kw_only=True):
    """How many score vectors are left, and a statement.

    ``left`` is None where no policy limits them.
    """

    left: f.Count | None = None
    statement: SealedText


class RankReply(Reply, frozen=True):
    """The score vectors that are left, and sealed statements for the other sites."""

    parts: dict[int, RankedPart]

    discloses = (
        Discloses(
            "how many more score vectors leave of a table's rows, where its policy "
            "limits them: that tells the rank of the encoded rows",
            fields=("left",),
            kinds=("ranks",),
        ),
        Discloses(
            "to the run's sites: how many rows of each table take part, and whether "
            "they vary in four directions or more",
            fields=("statement",),
            covered_by="sites",
            reader=f.SITES,
        ),
    )
