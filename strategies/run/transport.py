"""Messages on their way: sent, sent again, and answered or given up.

A site answers a message once however often it arrives, so that sending it again is
always right: after an error that may pass (a machine that is restarted, a full disk)
and where nothing came back for long (a SuperNode that was killed has taken its message
with it). Flower's own loop polls every three seconds in deployment; this one polls
often.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.run.exchange import RunLog
from tp_flower.errors import ErrorKind, ReplyError
from tp_flower.protocol import KIND, Action, unpack

FIRST_POLL_SECONDS: Final = 0.001
LONGEST_POLL_SECONDS: Final = 0.1

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 10.0
"""Seconds before a message is sent again after an error; the pauses double."""

SILENCE: Final = 60.0
"""Seconds without an answer before a message is sent again; they double too."""

MOST_CRASHES: Final = 3
"""Tries of a message whose ClientApp crashes: the next one is likely to crash too."""

HURRIED_SECONDS: Final = 5.0
"""How long a round waits for sites that were missing before, once the rest is there."""

_PASSING: Final = frozenset({0, 3, 4, 5})
"""Flower's errors of nodes and messages that cannot be reached now."""


@dataclass
class _Errand:
    """One site's message of a round.

    Attributes:
        message: as it was made.
        pause: seconds before the next try after an error.
        silence: seconds before the next try without an answer.
        due: when it is sent next.
        ids: of the messages that were sent.
        crashes: how often the site's app has crashed over it, or could not even
            describe its tables.
        answer: the reply that counts.
        failure: the last reply that is worth another try.
    """

    message: Message
    pause: float = FIRST_PAUSE
    silence: float = SILENCE
    due: float = 0.0
    ids: set[str] = field(default_factory=set)
    crashes: int = 0
    answer: Message | None = None
    failure: Message | None = None

    @property
    def node(self) -> int:
        """The node as the strategy knows it."""
        return self.message.metadata.dst_node_id


class Courier:
    """What carries the messages of one run to its sites, and the replies back.

    Args:
        grid: how messages reach Flower's nodes.
        log: of the run.
        addresses: of nodes that have another number now than when the run began.
    """

    def __init__(
        self, grid: Grid, log: RunLog, addresses: Mapping[int, int] | None = None
    ) -> None:
        self._grid, self._log = grid, log
        self._addresses = addresses or {}
        self._node_of: dict[str, int] = {}
        self._strangers: list[Message] = []

    @property
    def is_redirected(self) -> bool:
        """Whether the nodes have other numbers than when the run began."""
        return bool(self._addresses)

    def node_of(self, reply: Message) -> int:
        """Return the node that a reply is from.

        Errors that Flower makes itself do not say which node they are about, but which
        message.
        """
        metadata = reply.metadata
        return self._node_of.get(metadata.reply_to_message_id, metadata.src_node_id)

    def deliver(
        self,
        messages: Iterable[Message],
        timeout: float,
        hurried: Collection[int] = (),
    ) -> list[Message]:
        """Send messages and return the replies; of what did not arrive, the error.

        Args:
            messages: at most one per node.
            timeout: seconds to wait for all of them.
            hurried: nodes to wait for only shortly once all others have answered.
        """
        errands = {m.metadata.dst_node_id: _Errand(m) for m in messages}
        started = time.monotonic()
        deadline, pause = started + timeout, FIRST_POLL_SECONDS
        self._node_of, self._strangers = {}, []
        while True:
            now = time.monotonic()
            self._send([e for e in errands.values() if not e.answer and e.due <= now])
            arrived = self._collect(errands)
            waiting = {node for node, e in errands.items() if e.answer is None}
            if waiting and waiting <= set(hurried):
                deadline = min(deadline, time.monotonic() + HURRIED_SECONDS)
                hurried = ()
            if not waiting or time.monotonic() > deadline:
                found = [e.answer or e.failure for e in errands.values()]
                # who was not asked is refused by whoever opens the replies
                return [r for r in found if r is not None] + self._strangers
            pause = (
                FIRST_POLL_SECONDS
                if arrived
                else min(1.5 * pause, LONGEST_POLL_SECONDS)
            )
            time.sleep(pause)

    def _send(self, errands: Sequence[_Errand]) -> None:
        if not errands:
            return
        messages = [self._addressed(errand.message) for errand in errands]
        identifiers = list(self._grid.push_messages(messages))
        now = time.monotonic()
        for errand, identifier in zip(errands, identifiers, strict=False):
            if identifier:
                errand.ids.add(identifier)
                self._node_of[identifier] = errand.node
                errand.due, errand.silence = now + errand.silence, 2 * errand.silence
            else:
                # a node that is not there, or not yet
                errand.due, errand.pause = now + errand.pause, _longer(errand.pause)

    def _addressed(self, message: Message) -> Message:
        """Return a message of its own for every try: Flower numbers them."""
        metadata = message.metadata
        node = self._addresses.get(metadata.dst_node_id, metadata.dst_node_id)
        return Message(
            content=message.content,
            dst_node_id=node,
            message_type=metadata.message_type,
            group_id=metadata.group_id,
        )

    def _collect(self, errands: Mapping[int, _Errand]) -> int:
        """Take the replies that have arrived; return how many those are."""
        wanted = {i for e in errands.values() if e.answer is None for i in e.ids}
        if not wanted:
            return 0
        replies = list(self._grid.pull_messages(wanted))
        for reply in replies:
            errand = errands.get(self.node_of(reply))
            if errand is None:
                self._strangers.append(reply)
            else:
                errand.ids.discard(reply.metadata.reply_to_message_id)
                self._take(errand, reply)
        return len(replies)

    def _take(self, errand: _Errand, reply: Message) -> None:
        """Note a reply: an answer, or a reason to try again."""
        if errand.answer is not None:
            return
        reason = _reason(errand, reply)
        if reason is None:
            errand.answer = reply
            return
        errand.failure = reply
        self._log.retry(errand.node, errand.message, reason, errand.pause)
        errand.due = time.monotonic() + errand.pause
        # somebody has answered: silence is counted from the next try on
        errand.pause, errand.silence = _longer(errand.pause), SILENCE


def _reason(errand: _Errand, reply: Message) -> str | None:
    """Return why a message should be sent again, None if it should not."""
    if reply.has_error():
        code = reply.error.code
        if code not in _PASSING:
            errand.crashes += 1
        is_final = errand.crashes >= MOST_CRASHES
        return None if is_final else f"Flower error {code}"
    try:
        header = unpack(reply.content).header
    except ReplyError:
        # malformed: refused by whoever opens the replies
        return None
    if "error" not in header or header.get(KIND) != ErrorKind.TRANSIENT:
        return None
    # before a run has begun nothing is lost by saying soon what may be a wrong address
    errand.crashes += errand.message.metadata.message_type == Action.DESCRIBE
    is_final = errand.crashes >= MOST_CRASHES
    return None if is_final else "the site cannot do it now"


def _longer(pause: float) -> float:
    return min(2 * pause, LONGEST_PAUSE)
