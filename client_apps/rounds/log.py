"""What a site writes to its log: one line per message, answered or refused.

At a real site that is level INFO, so that its owner has a record of all that was asked;
in simulations, where a process answers hundreds per minute for many sites, DEBUG. The
environment variable FLWR_LOG_LEVEL says what is shown. Nothing of rows is told, and of
the run's name, which is the right to go on with it, the first digits.
"""

import time
from logging import DEBUG, ERROR, INFO

from flwr.app import RecordDict
from flwr.common.logger import log

from client_apps.rounds.request import Request
from client_apps.rounds.site import Site
from tp_flower.errors import kind_of
from tp_flower.events import Value, line
from tp_flower.node_config import site_id
from tp_flower.protocol import Action, message_bytes


class MessageLog:
    """The line of one message.

    Args:
        action: what is asked for.
        content: of the message.
    """

    def __init__(self, action: Action, content: RecordDict) -> None:
        self._action, self._bytes = action, message_bytes(content)
        self._started = time.perf_counter()

    def answered(self, request: Request, site: Site, content: RecordDict) -> None:
        """The reply is about to leave."""
        level, size = DEBUG if site.is_simulated else INFO, message_bytes(content)
        self._write(level, "answered", request, site, bytes_out=size)

    def refused(
        self, request: Request | None, site: Site | None, error: Exception, reason: str
    ) -> None:
        """An error takes the place of the reply.

        Args:
            request: None where it could not be read.
            site: None where there is none yet.
            error: that was raised.
            reason: what the site's owner is told of it.
        """
        kind = str(kind_of(error))
        self._write(ERROR, "refused", request, site, kind=kind, reason=reason)

    def _write(
        self,
        level: int,
        event: str,
        request: Request | None,
        site: Site | None,
        **facts: Value,
    ) -> None:
        own: dict[str, Value] = {}
        if request is not None:
            own |= {"run": request.run, "round": request.number}
        if site is not None:
            own["site"] = site_id(site.context.node_config, site.context.node_id)
        own |= {
            "action": str(self._action),
            "seconds": time.perf_counter() - self._started,
            "bytes_in": self._bytes,
        }
        log(level, line(event, **own, **facts))
