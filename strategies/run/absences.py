"""Sites that are missing: stop, or go on with what they sent last.

ADMM's server can take an epoch with a table's scores of the epoch before: that table
has not moved. How long is bounded, and the report says which rounds went without whom.
"""

from collections.abc import Mapping
from typing import Final

from strategies.run.exchange import Answer, Replies, Request
from strategies.run.log import RunLog
from strategies.run.replies import Opened
from tp_flower.protocol import Action, Packet
from tp_flower.settings import STALE, Settings

_REPEATABLE: Final = frozenset({Action.ADMM, Action.CONSENSUS, Action.PERSONAL})

_JOINING: Final = frozenset({Action.PERSONAL})
"""A site may come to these rounds late: nothing of it is needed before."""

_Key = tuple[Action, int, int]


class Absences:
    """Who is missing, since when, and what they sent last.

    Args:
        settings: ``on-missing`` and ``max-stale``.
        log: of the run.
    """

    def __init__(self, settings: Settings, log: RunLog) -> None:
        self._may_go_on = settings.on_missing == STALE
        self._most, self._log = settings.max_stale, log
        self._last: dict[_Key, Answer] = {}
        self._since: dict[int, int] = {}

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that were missing in the last round that they were asked in."""
        return frozenset(self._since)

    def fill(self, request: Request, opened: Opened) -> Replies:
        """Return the replies of a round, older ones in place of those that are missing.

        Raises:
            MissingSiteError: a site has not answered, and must.
            UnavailableError: a site could not, and must.
        """
        for node, error in sorted(opened.absent.items()):
            if not self._can_miss(request, node):
                raise error
            self._log.stale(node, request, error)
        return self.filled(request, opened.answers)

    def filled(self, request: Request, answers: Mapping[int, Answer]) -> Replies:
        """Return the replies of a round whose missing sites have been put up with."""
        missing = request.packets.keys() - answers.keys()
        nothing = Answer(Packet({"parts": []}))
        older = {
            node: self._last.get(self._key(request, node), nothing) for node in missing
        }
        for node in missing:
            self._since.setdefault(node, request.epoch)
        for node, answer in answers.items():
            self._since.pop(node, None)
            if self._may_go_on and request.action in _REPEATABLE:
                self._last[self._key(request, node)] = answer
        return Replies.of({**answers, **older}, missing)

    def _can_miss(self, request: Request, node: int) -> bool:
        is_known = self._key(request, node) in self._last
        if not self._may_go_on or not (is_known or request.action in _JOINING):
            return False
        since = self._since.get(node, request.epoch)
        return request.epoch - since < self._most

    def _key(self, request: Request, node: int) -> _Key:
        # rounds of consensus before the last one bring other arrays
        more = int(getattr(request.message, "more_rounds", 0))
        return request.action, node, more
