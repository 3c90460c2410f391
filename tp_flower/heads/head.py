"""The head: from the tables' vectors to the scores of joined rows.

The model of a table turns each of its rows into a *vector*, of which sites send no more
than today's scores: numbers, or masked words. The server expands the vectors to the
joined rows and combines them, and a gradient goes back by the chain rule:

    h      = combine(b, v)            v = sum_i expand(v_i), or (v_1, .., v_M)
    dv     = pullback(d loss / d h, v)
    dv_i   = seg_i(dv)                what table i is sent

A head is a subclass in a file of its own, and one line in the registry. It is the only
place in which vectors of tables become scores.

Notation:
    v   ``vectors``  (N, w): their sums over the tables, or (N, M, w): those of every
        table, in the mapping's order, for a head that ``needs_tables``
    h   scores  (N, d_c)          b  ``base``  (d_c,), or (N, d_c)
    w   ``width``                 M  tables
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tp_flower.arrays import FloatArray


@dataclass(frozen=True)
class Contribution:
    """What a table contributes to the scores of the joined training rows.

    Attributes:
        mean_score: the mean of its vector, (w,), which stands in for it where a site is
            missing; a joined row without a row of the table counts as 0.
        share: of the tables' variances; None of a head whose scores are not a sum.
    """

    mean_score: FloatArray
    share: float | None


@dataclass(frozen=True)
class Head(ABC):
    """A function of the tables' vectors, to ``outputs`` = d_c scores of a joined row.

    Attributes:
        name: of the registry and of manifests.
        is_linear: whether the scores are the base score and a sum of vectors: then a
            step of the models is a step of the scores, along which methods search.
        needs_tables: whether it takes the vector of every table. Of masked vectors the
            server reads the sums alone, so that such a head's cannot be masked.
        discloses: what a vector tells beyond the scores of a sum, in the words of a
            report that follow "a score per row"; "" for nothing.
    """

    name: ClassVar[str]
    is_linear: ClassVar[bool] = False
    needs_tables: ClassVar[bool] = False
    discloses: ClassVar[str] = ""

    outputs: int

    @property
    @abstractmethod
    def width(self) -> int:
        """The numbers of a vector, w: the outputs of every table's model."""

    @abstractmethod
    def combine(self, base: FloatArray, vectors: FloatArray) -> FloatArray:
        """Return the scores h of some joined rows, of their vectors v."""

    @abstractmethod
    def pullback(self, derivative: FloatArray, vectors: FloatArray) -> FloatArray:
        """Return d loss / d v, like v, from d loss / d h (N, d_c) at these vectors."""

    def columns(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of a vector's numbers, of a label with some classes."""
        del classes
        return tuple(str(number) for number in range(1, self.width + 1))

    def contributions(
        self, sums: Mapping[str, FloatArray], joined_rows: int
    ) -> dict[str, Contribution]:
        """Return each table's contribution, from sums of its vectors and their squares.

        ``sums`` are (2, w) by table, over the joined training rows, weighted as they
        are. Other functions than a sum have no shares, only mean vectors.
        """
        return {
            table: Contribution(total / joined_rows, None)
            for table, (total, _) in sums.items()
        }


def table_part(vectors: FloatArray, position: int) -> FloatArray:
    """Return the part (N, w) of vectors, or of derivatives, that is a table's.

    Of sums over the tables it is all of them, for a sum's derivative is each addend's.
    """
    return vectors if vectors.ndim == 2 else vectors[:, position]
