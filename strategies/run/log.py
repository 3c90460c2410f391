"""What the server writes to the log of a run: one line per event.

Rounds and replies are told at level DEBUG, of which there may be hundreds per minute;
what an operator wants to know of a run at INFO; what a run goes on in spite of at
WARNING. The environment variable FLWR_LOG_LEVEL says which of them are shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import DEBUG, ERROR, INFO, WARNING

from flwr.app import Message
from flwr.common.logger import log

from strategies.run.exchange import Answer, Request
from tp_flower.events import Fact, line
from tp_flower.reports.records import RoundReport


@dataclass(frozen=True)
class RunLog:
    """The log of one run.

    Attributes:
        run: its name.
        names: of the organisations behind each node.
    """

    run: str
    names: Mapping[int, str] = field(default_factory=dict)

    def started(self, strategy: str) -> None:
        """The sites of a run have been found."""
        sites = sorted(set(self.names.values()))
        self._write(INFO, "start", strategy=strategy, sites=sites)

    def sent(self, number: int, messages: Sequence[Message]) -> None:
        """The messages of a round leave."""
        actions = sorted({message.metadata.message_type for message in messages})
        sites = len(messages)
        self._write(DEBUG, "sent", round=number, action=actions, sites=sites)

    def retry(self, node: int, message: Message, reason: str, pause: float) -> None:
        """A message will be sent again, after a pause in seconds."""
        told = message.metadata
        facts = {"round": told.group_id, "action": told.message_type}
        site = self._name(node)
        self._write(WARNING, "retry", site=site, **facts, reason=reason, pause=pause)

    def stale(self, node: int, request: Request, reason: Exception) -> None:
        """A round goes on with what a site sent in an earlier one."""
        facts = {"action": str(request.action), "reason": str(reason)}
        site, epoch = self._name(node), request.epoch
        self._write(WARNING, "stale", site=site, epoch=epoch, **facts)

    def round_done(
        self, action: str, report: RoundReport, answers: Mapping[int, Answer]
    ) -> None:
        """A round is over, and in the checkpoint of a run that keeps one.

        Args:
            action: of the round.
            report: of the round.
            answers: of the sites, by node.
        """
        number = report.round
        for node, answer in sorted(answers.items()):
            facts: dict[str, Fact] = {"action": action, "seconds": answer.seconds}
            self._write(DEBUG, "reply", site=self._name(node), round=number, **facts)
        self._write(
            DEBUG,
            "round",
            round=number,
            action=action,
            epoch=report.epoch,
            wait_seconds=report.wait_seconds,
            site_seconds=report.client_seconds,
            server_seconds=report.server_seconds,
            bytes_up=sum(report.bytes_up.values()),
            bytes_down=sum(report.bytes_down.values()),
        )

    def found_again(self, sites: str) -> None:
        """The sites of a run that stopped are there."""
        self._write(INFO, "found-again", sites=sites)

    def resumed(self, rounds: int, epochs: int) -> None:
        """A run goes on from its checkpoint."""
        self._write(INFO, "resume", rounds=rounds, epochs=epochs)

    def behind(self, sites: str) -> None:
        """Sites lack rounds, and are brought up to date."""
        self._write(WARNING, "behind", sites=sites)

    def unreached(self, error: Exception) -> None:
        """The sites could not be told to forget the run."""
        self._write(WARNING, "unreached", error=type(error).__name__, reason=str(error))

    def finished(self, rounds: int, seconds: float) -> None:
        """A run has come to its end."""
        self._write(INFO, "finish", rounds=rounds, seconds=seconds)

    def stopped(self, error: Exception, rounds: int, *, is_kept: bool) -> None:
        """A run has failed; its error is told where it is raised to.

        Args:
            error: of the run.
            rounds: that were done.
            is_kept: whether the run can be resumed.
        """
        facts: dict[str, Fact] = {"rounds": rounds, "error": type(error).__name__}
        self._write(ERROR, "stop", **facts, checkpoint=is_kept)

    def _name(self, node: int) -> str:
        return self.names.get(node, f"node {node}")

    def _write(self, level: int, event: str, **facts: Fact) -> None:
        log(level, line(event, run=self.run, **facts))
