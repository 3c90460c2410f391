"""What became of a round's messages: answers, failures, and sites that are missing.

A reply that does not fit what was asked is refused here, in the name of the site that
sent it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from flwr.app import Message

from strategies.run.exchange import Answer, Part, Replies, Request, RunLog
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import (
    DivergedError,
    ErrorKind,
    MessageError,
    MissingSiteError,
    RangeError,
    ReplyError,
    SchemaError,
    SiteError,
    TPFlowerError,
    UnavailableError,
)
from tp_flower.extraction.extracted import KeyColumn, LabelColumn
from tp_flower.features.choice import TableChoice
from tp_flower.features.statistics import ColumnStatistics
from tp_flower.features.statistics_codec import from_wire
from tp_flower.protocol import (
    AT,
    EXCHANGES,
    KIND,
    Action,
    ExtractedPart,
    Packet,
    StatisticsOfPart,
    decode,
    layout_of,
    unpack,
)
from tp_flower.protocol.messages import MOST_SECONDS
from tp_flower.settings import STALE, Settings

REASON_CHARACTERS = 1000

_DIVERGED = (
    ": training diverged there. Lower learning-rate (0 chooses it), set rho to 0 "
    "(chosen), or raise l2; if all are at their defaults, look for extreme values in "
    "the data"
)


class BehindSites(Exception):  # noqa: N818 - what to do next, no failure
    """Sites lack rounds that a request builds on.

    Attributes:
        positions: the last round that each of these nodes has answered; None for none.
    """

    def __init__(self, positions: Mapping[int, int | None]) -> None:
        super().__init__(str(dict(positions)))
        self.positions = dict(positions)


@dataclass(frozen=True)
class Opened:
    """What became of the messages of a round.

    Attributes:
        answers: of the nodes that answered.
        absent: why there is no answer of the others, by node.
    """

    answers: Mapping[int, Answer]
    absent: Mapping[int, MissingSiteError | UnavailableError]

    def complete(self) -> Replies:
        """Return the replies.

        Raises:
            MissingSiteError: a site has not answered.
            UnavailableError: a site could not.
        """
        for node in sorted(self.absent):
            raise self.absent[node]
        return Replies.of(self.answers)


def open_replies(
    request: Request,
    replies: Iterable[tuple[int, Message]],
    site_names: Mapping[int, str],
) -> Opened:
    """Return what the sites answered.

    Args:
        request: what was asked.
        replies: with the node that each is from.
        site_names: the organisations behind each node, for messages.

    Raises:
        BehindSites: sites lack earlier rounds.
        SiteError: a site refused.
        DivergedError: a site's model is not finite.
        ReplyError: a reply is malformed.
    """
    answers: dict[int, Answer] = {}
    absent: dict[int, MissingSiteError | UnavailableError] = {}
    behind: dict[int, int | None] = {}
    # of several failures always the same one is raised
    for node, message in sorted(replies, key=lambda pair: pair[0]):
        name = _name(node, site_names)
        if message.has_error():
            absent[node] = _crash(request, message, node, name)
            continue
        answer = _open_reply(request, message, node, name)
        packet = answer.packet
        if "error" not in packet.header:
            answers[node] = answer
            continue
        kind, error = _failure(request, packet, node, name)
        if kind is ErrorKind.BEHIND:
            behind[node] = _position(packet)
        elif isinstance(error, UnavailableError):
            absent[node] = error
        else:
            raise error
    if behind:
        raise BehindSites(behind)
    silent = request.packets.keys() - answers.keys() - absent.keys()
    if silent:
        # one error names them all
        missing = _missing(request, silent, site_names)
        absent |= dict.fromkeys(silent, missing)
    return Opened(answers, absent)


def _missing(
    request: Request, nodes: Iterable[int], site_names: Mapping[int, str]
) -> MissingSiteError:
    names = ", ".join(
        _name(node, site_names) + _about(request.tables_at(node))
        for node in sorted(nodes)
    )
    return MissingSiteError(
        f"no reply to {request.action} from {names} within site-timeout"
    )


def _open_reply(request: Request, message: Message, node: int, name: str) -> Answer:
    """Return what one site answered, after checks that fit every action."""
    if node not in request.packets:
        raise ReplyError(f"{name} answered {request.action} without being asked")
    try:
        packet = unpack(message.content)
        if "error" in packet.header:
            return Answer(packet)
        _check_header(request, packet, node)
        return open_answer(request, packet)
    except MessageError as error:
        part = request.parts.get(-1 if error.part is None else error.part)
        where = name if part is None else f"site {part.site!r} (table {part.table!r})"
        advice = _DIVERGED if isinstance(error, RangeError) else ""
        raise ReplyError(
            f"{where} sent a reply to {request.action} that cannot be used: "
            f"{error}{advice}"
        ) from None
    except ReplyError as error:
        raise ReplyError(
            f"the reply of {name} to {request.action} cannot be used: {error}"
        ) from None


def open_answer(request: Request, packet: Packet) -> Answer:
    """Return a packet with the message that it carries.

    Raises:
        MessageError: it is not what the reply to the request declares.
    """
    return Answer(packet, decode(EXCHANGES[request.action].reply, packet))


def _check_header(request: Request, packet: Packet, node: int) -> None:
    """Refuse a reply that speaks of other parts than the node was asked about."""
    hosted = {part.number for part in request.parts.values() if part.node == node}
    if foreign := {part for part, _ in packet.arrays} - hosted:
        raise ReplyError(f"it has arrays of parts {sorted(foreign)}, not its own")
    told = hosted if _lists_all(request) else set()
    listed = packet.header.get("parts", []) if told else []
    if not _lists_once(listed, told):
        raise ReplyError("it does not list every part it was asked about, each once")
    seconds = packet.header.get("seconds", 0.0)
    # false for NaN, and for a whole number of any size
    if not (isinstance(seconds, int | float) and 0 <= seconds <= MOST_SECONDS):
        raise ReplyError("its 'seconds' is not a duration")


def _lists_all(request: Request) -> bool:
    """Whether a reply has to say something of every part that its node hosts."""
    reply = EXCHANGES[request.action].reply
    part = layout_of(reply).part
    return reply.is_complete and part is not None and bool(layout_of(part).facts)


def _lists_once(listed: object, wanted: set[int]) -> bool:
    if not isinstance(listed, list) or len(listed) != len(wanted):
        return False
    if not all(isinstance(facts, dict) for facts in listed):
        return False
    numbers = [facts.get("id") for facts in listed]
    return all(type(n) is int for n in numbers) and set(numbers) == wanted


def _position(packet: Packet) -> int | None:
    """Return the last round that a site says it has answered."""
    at = packet.header.get(AT)
    return at if type(at) is int and at >= 0 else None


def _failure(
    request: Request, packet: Packet, node: int, name: str
) -> tuple[ErrorKind, TPFlowerError]:
    """Return the error that a site reported, naming the part that it was at."""
    part = None
    if type(packet.header.get("part")) is int:
        part = request.parts.get(packet.header["part"])
    if part is not None and part.node == node:
        where = f"site {part.site!r}, table {part.table!r}"
    else:
        where = name
    reason = _one_line(str(packet.header["error"]))
    text = f"{where}: {request.action} failed: {reason}"
    told = packet.header.get(KIND)
    # of a kind that nobody knows it is what cannot be helped
    kind = ErrorKind(told) if told in set(ErrorKind) else ErrorKind.REFUSED
    return kind, _ERRORS.get(kind, SiteError)(text)


_ERRORS: Mapping[ErrorKind, type[TPFlowerError]] = {
    ErrorKind.TRANSIENT: UnavailableError,
    ErrorKind.DIVERGED: DivergedError,
}


def _crash(
    request: Request, message: Message, node: int, name: str
) -> UnavailableError:
    """Return the error that Flower made of a site that could not answer at all."""
    code, lines = message.error.code, (message.error.reason or "").splitlines()
    # the last line of a traceback is what was raised
    last = next((line for line in reversed(lines) if line.strip()), "no reason given")
    return UnavailableError(
        f"{name}{_about(request.tables_at(node))}: no answer to {request.action} "
        f"(Flower error {code}): {_one_line(last)}"
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= REASON_CHARACTERS:
        return line
    return line[: REASON_CHARACTERS - 3] + "..."


def _about(tables: Sequence[str]) -> str:
    if not tables:
        return ""
    listed = ", ".join(map(repr, tables))
    return f" (table {listed})" if len(tables) == 1 else f" (tables {listed})"


def _name(node: int, site_names: Mapping[int, str]) -> str:
    return f"site {site_names[node]!r}" if node in site_names else f"node {node}"


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


Fact = TypeVar("Fact", int, float, str, list[Any], dict[str, Any])

LARGEST = 1e30
"""Beyond it float32 is about to overflow: no score or gradient gets there by itself."""


_TYPES: Mapping[type, tuple[type, ...]] = {float: (int, float)}


def array_of(
    replies: Replies, part: Part, name: str, shape: tuple[int | None, ...]
) -> AnyArray:
    """Return an array that a part sent.

    Args:
        replies: of the round.
        part: who sent it.
        name: of the field that is the array.
        shape: the expected shape; None allows any size.

    Raises:
        ReplyError: if it is missing, or of another shape.
    """
    array: AnyArray | None = getattr(replies.parts.get(part.number), name, None)
    if array is None:
        raise ReplyError(f"{_who(part)} sent no {name!r}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ReplyError(
            f"{_who(part)} sent {name!r} of shape {array.shape}, expected ({expected})"
        )
    return array


def has_array(replies: Replies, part: Part, name: str) -> bool:
    """Return whether a part sent an array."""
    return getattr(replies.parts.get(part.number), name, None) is not None


def read_key(replies: Replies, part: Part, key: int, rows: int) -> KeyColumn:
    """Return one join key of a part's rows.

    Raises:
        ReplyError: if codes and hashes do not fit the rows or each other.
    """
    body, name = replies.body(part, ExtractedPart), str(key)
    codes, hashes = body.codes.get(name), body.hashes.get(name)
    if codes is None or hashes is None or key >= len(body.keys):
        raise refuse(part, f"no codes, hashes or type of join key {key}")
    if len(codes) != rows:
        raise refuse(part, f"codes of join key {key} for {len(codes)} of {rows} rows")
    if codes.max(initial=-1) >= len(hashes):
        raise refuse(part, f"codes of join key {key} that name no hash")
    return KeyColumn(codes, hashes, body.keys[key])


def read_label(replies: Replies, part: Part, rows: int) -> LabelColumn:
    """Return the label of a part's rows; NaN where it is NULL.

    Raises:
        ReplyError: if it does not fit the rows or its categories.
    """
    body = replies.body(part, ExtractedPart)
    values, label = body.label_values, body.label
    if values is None or label is None or values.shape != (rows,):
        raise refuse(part, f"no label for its {rows} rows")
    names = tuple(label.categories or ())
    present = values[~np.isnan(values)]
    if label.kind == "text" and not np.isin(present, np.arange(len(names))).all():
        raise refuse(part, "labels that are none of its categories")
    return LabelColumn(label.kind, values, names)


def read_weight(replies: Replies, part: Part, rows: int) -> FloatArray:
    """Return what joined rows of a part's rows weigh, (rows,); NaN where it is NULL.

    Raises:
        ReplyError: if it does not fit the rows.
    """
    weight = replies.body(part, ExtractedPart).weight
    if weight is None or weight.shape != (rows,):
        raise refuse(part, f"no weight for its {rows} rows")
    return weight


def read_statistics(
    replies: Replies, part: Part, choice: TableChoice, rows: int
) -> dict[str, ColumnStatistics]:
    """Return the statistics of a part's features.

    Raises:
        ReplyError: if they are not those of these features and at most ``rows`` rows.
    """
    try:
        return from_wire(replies.body(part, StatisticsOfPart), choice, rows)
    except SchemaError as error:
        raise refuse(part, str(error)) from None


def refuse(part: Part, what: str) -> ReplyError:
    """Return the error that says what is wrong with what a part sent."""
    return ReplyError(f"{_who(part)} sent {what}")


def _who(part: Part) -> str:
    return f"site {part.site!r} (table {part.table!r})"
