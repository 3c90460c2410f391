"""The step of set-up that draws the joined rows to train on, where not all are.

It belongs to no method: all that train over joins can train on a sample. The room that
draws is in :mod:`strategies.registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Protocol

from strategies.run.exchange import Replies, Requests
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.protocol.fields import Document
from tp_flower.protocol.messages import Action
from tp_flower.settings import Settings


class RowSample(Protocol):
    """A sample of the joined training rows."""

    @property
    def rows(self) -> IntArray:
        """The positions of the distinct rows among the training rows, (k,)."""

    @property
    def weights(self) -> FloatArray:
        """Their weights, (k,)."""

    def report_entries(self) -> Document:
        """Return the report's entries about the drawing, by name."""


class RowDrawing(ABC):
    """A way to draw ``training_sample`` of the joined training rows."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def messages(self) -> tuple[Action, ...]:
        """The messages that it takes, a round each.

        They come before ``prepare``; there are none if the server draws alone.
        """

    @abstractmethod
    def draw(
        self, joined: JoinedTables, encoders: Mapping[str, TableEncoding]
    ) -> Generator[Requests, Replies, RowSample]:
        """Draw the rows."""

    @abstractmethod
    def stand_in(self, joined: JoinedTables) -> RowSample:
        """Return as many rows that the server draws alone, for a forecast."""
