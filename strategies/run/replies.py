"""Replies of a round: answers, failures, missing sites, and arrays that must fit.

A reply that does not fit its request is refused here (``ReplyError``), with the name of
the site that sent it.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Message
from flwr.common.constant import ErrorCode

from strategies.run.exchange import Answer, Part, Replies, Requests
from tp_flower import errors
from tp_flower.arrays import NO_BIN, AnyArray
from tp_flower.extraction.extracted import KeyColumn, LabelColumn
from tp_flower.features.bins import BinArray
from tp_flower.protocol.fields import Reply, layout_of
from tp_flower.protocol.messages import Action, Failure
from tp_flower.protocol.packet import unpack
from tp_flower.protocol.setup_messages import ExtractedPart

REASON_CHARACTERS = 1000

_DIVERGED = (
    ": training diverged there. Lower learning-rate, or raise l2 where the strategy "
    "has none, or look for extreme values in the data"
)


class BehindSites(Exception):  # noqa: N818 - what to do next, no failure
    """Sites lack rounds that a request builds on; by node, the last one answered."""

    def __init__(self, positions: Mapping[int, int | None]) -> None:
        super().__init__(str(dict(positions)))
        self.positions = dict(positions)


def collect_replies(
    request: Requests,
    replies: Iterable[tuple[int, Message]],
    site_names: Mapping[int, str],
) -> Replies:
    """Return the replies of all sites; raise the errors of those that refuse.

    Or that sent what cannot be used. If none does, that of one that has not answered.
    """
    answers: dict[int, Answer] = {}
    refused: list[errors.TPFlowerError] = []
    failed: dict[int, errors.TPFlowerError] = {}
    behind: dict[int, int | None] = {}
    # sorted, so that of several failures always the same one is raised
    for node, message in sorted(replies, key=lambda pair: pair[0]):
        outcome = _outcome(request, message, node, _name(node, site_names))
        if isinstance(outcome, errors.UnavailableError | errors.DivergedError):
            failed[node] = outcome
        elif isinstance(outcome, errors.TPFlowerError):
            refused.append(outcome)
        elif isinstance(outcome.message, Failure):
            behind[node] = outcome.envelope.at
        else:
            answers[node] = outcome
    if refused:
        # a site that has stopped refuses whatever else the errors advise
        stopped = [e for e in refused if isinstance(e, errors.StoppedError)]
        kind = type((stopped or refused)[0])
        raise kind(errors.join_problems(map(str, refused)))
    if behind:
        raise BehindSites(behind)
    # one error names all that are silent
    silent = sorted(request.packets.keys() - answers.keys() - failed.keys())
    names = [_name(n, site_names) + _tables_at(request, n) for n in silent]
    missing = errors.MissingSiteError(
        f"no reply to {request.action} from {', '.join(names)} within site-timeout"
    )
    _raise_first(failed | dict.fromkeys(silent, missing))
    return Replies.of(answers)


def _outcome(
    request: Requests, message: Message, node: int, name: str
) -> Answer | errors.TPFlowerError:
    """Return a site's answer, also that it is behind, or its error.

    Raises:
        SiteError: the site could not answer, and would not if it were asked again.
    """
    if message.has_error():
        return _crash(request, message, node, name)
    try:
        answer = _read_reply(request, message, node, name)
    except errors.ReplyError as error:
        return error
    failure = answer.message
    if isinstance(failure, Failure) and failure.kind is not errors.ErrorKind.BEHIND:
        return _error_of(request, failure, node, name)
    return answer


def _raise_first(failed: Mapping[int, errors.TPFlowerError]) -> None:
    """Raise the error of the first absent node, or else of the first diverged one."""
    diverged = {n: e for n, e in failed.items() if isinstance(e, errors.DivergedError)}
    if absent := failed.keys() - diverged.keys():
        raise failed[min(absent)]
    if diverged:
        raise errors.DivergedError(str(diverged[min(diverged)]), diverged)


def _read_reply(request: Requests, message: Message, node: int, name: str) -> Answer:
    """Return a checked reply; ReplyError names its site or table."""
    if node not in request.packets:
        raise errors.ReplyError(f"{name} answered {request.action} without being asked")
    try:
        answer = Answer.read(request.action, unpack(message.content))
        _check_parts(answer.message, {part.number for part in request.parts_at(node)})
    except (errors.MessageError, errors.ReplyError) as error:
        number = getattr(error, "part", None)
        hosted = [part for part in request.parts_at(node) if part.number == number]
        sender = _site_of(hosted[0]) if hosted else name
        # nothing trains where a saved model scores rows
        may_diverge = (
            isinstance(error, errors.RangeError) and request.action is not Action.SCORE
        )
        advice = _DIVERGED if may_diverge else ""
        raise errors.ReplyError(
            f"{sender} sent a reply to {request.action} that cannot be used: "
            f"{error}{advice}"
        ) from None
    return answer


def _check_parts(reply: Reply, hosted: set[int]) -> None:
    """Refuse a reply about parts that its node does not host, or that lacks some."""
    numbers = set(getattr(reply, "parts", {}))
    part = layout_of(type(reply)).part
    lists_all = reply.is_complete and part is not None and layout_of(part).values
    if numbers - hosted or (lists_all and numbers != hosted):
        raise errors.ReplyError(
            f"it is about parts {sorted(numbers)}, but its node hosts {sorted(hosted)}"
        )


def _error_of(
    request: Requests, failure: Failure, node: int, name: str
) -> errors.TPFlowerError:
    """Return the error that a site reported, naming the participant it is about."""
    sender = name
    for part in request.parts_at(node):
        if part.number == failure.part:
            sender = f"site {part.site!r}, table {part.table!r}"
    text = f"{sender}: {request.action} failed: {_one_line(failure.error)}"
    return _ERRORS.get(failure.kind, errors.SiteError)(text)


_ERRORS: Mapping[errors.ErrorKind, type[errors.TPFlowerError]] = {
    errors.ErrorKind.TRANSIENT: errors.UnavailableError,
    errors.ErrorKind.DIVERGED: errors.DivergedError,
    errors.ErrorKind.STOPPED: errors.StoppedError,
}


def _crash(
    request: Requests, message: Message, node: int, name: str
) -> errors.UnavailableError:
    """Return the error of a site that could not answer; SiteError if it would recur."""
    code = message.error.code
    lines = (message.error.reason or "").splitlines()
    # the last line of a traceback is the exception
    reason = next((line for line in reversed(lines) if line.strip()), "no reason given")
    text = (
        f"{name}{_tables_at(request, node)}: no answer to {request.action} "
        f"(Flower error {code}): {_one_line(reason)}"
    )
    if code == ErrorCode.INVALID_FAB:
        raise errors.SiteError(text)
    return errors.UnavailableError(text)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= REASON_CHARACTERS:
        return line
    return f"{line[: REASON_CHARACTERS - 3]}..."


def _tables_at(request: Requests, node: int) -> str:
    tables = list(dict.fromkeys(repr(part.table) for part in request.parts_at(node)))
    if not tables:
        return ""
    noun = "tables" if len(tables) > 1 else "table"
    return f" ({noun} {', '.join(tables)})"


def _name(node: int, site_names: Mapping[int, str]) -> str:
    if node in site_names:
        return f"site {site_names[node]!r}"
    return f"node {node}"


def array_of(
    replies: Replies, part: Part, name: str, shape: tuple[int | None, ...]
) -> AnyArray:
    """Return a participant's array; None in ``shape`` allows any size."""
    array: AnyArray | None = getattr(replies.parts.get(part.number), name, None)
    if array is None:
        raise errors.ReplyError(f"{_site_of(part)} sent no {name!r}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise errors.ReplyError(
            f"{_site_of(part)} sent {name!r} of shape {array.shape}, expected "
            f"({expected})"
        )
    return array


def bins_of(
    replies: Replies, part: Part, shape: tuple[int, int], most: int
) -> BinArray:
    """Return the bin numbers that a part sent; refuse another shape, and others."""
    numbers: BinArray = array_of(replies, part, "numbers", shape)
    if ((numbers >= most) & (numbers != NO_BIN)).any():
        raise refuse(part, f"a bin number beyond the {most} bins of a column")
    return numbers


def addends_of(
    replies: Replies, part: Part, name: str, shape: tuple[int, ...], *, is_masked: bool
) -> AnyArray:
    """Return a participant's scores or share: numbers, or words that mask them."""
    array = array_of(replies, part, name, shape)
    if (array.dtype.kind == "u") != is_masked:
        form = "in the clear" if is_masked else "masked"
        raise refuse(part, f"{name!r} {form}, unlike the others of the run")
    return array


def read_key(replies: Replies, part: Part, key: int, rows: int) -> KeyColumn:
    """Return one join key of a participant's rows."""
    body = replies.body(part, ExtractedPart)
    name = str(key)
    codes = body.codes.get(name)
    hashes = body.hashes.get(name)
    if codes is None or hashes is None or key >= len(body.keys):
        raise refuse(part, f"no codes, hashes or type of join key {key}")
    if len(codes) != rows:
        raise refuse(part, f"codes of join key {key} for {len(codes)} of {rows} rows")
    if codes.max(initial=-1) >= len(hashes):
        raise refuse(part, f"codes of join key {key} beyond its hashes")
    return KeyColumn(codes, hashes, body.keys[key])


def read_label(replies: Replies, part: Part, rows: int) -> LabelColumn:
    """Return the label of a participant's rows; NaN where it is NULL."""
    body = replies.body(part, ExtractedPart)
    values = body.label_values
    label = body.label
    if values is None or label is None or values.shape != (rows,):
        raise refuse(part, f"no label for its {rows} rows")
    names = tuple(label.categories or ())
    if (
        label.kind == "text"
        and not np.isin(values[~np.isnan(values)], np.arange(len(names))).all()
    ):
        raise refuse(part, "labels outside its categories")
    return LabelColumn(label.kind, values, names)


def refuse(part: Part, problem: str) -> errors.ReplyError:
    """Return the error "site ... sent <problem>" for a participant's reply."""
    return errors.ReplyError(f"{_site_of(part)} sent {problem}")


def _site_of(part: Part) -> str:
    return f"site {part.site!r} (table {part.table!r})"
