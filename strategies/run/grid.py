"""A Flower Grid without Ray or network, for tests, notebooks and benchmarks.

The sites' ClientApp is called at once, in this process, when messages are pushed. Every
message goes through Flower's own serialisation both ways, as on the wire.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from tp_flower import node_config
from tp_flower.protocol.codec import read_envelope
from tp_flower.protocol.messages import NO_RUN, RequestEnvelope
from tp_flower.protocol.packet import unpack
from tp_flower.sources.policy import WATCHED
from tp_flower.sources.shards import MEMORY_PREFIX, Frames, register_frames, release

Tables: TypeAlias = "Frames | str | Path"
Observer = Callable[[Message], None]

CLIENT_APP_RAISED = 2


class InProcessGrid(Grid):
    """Call a ClientApp directly for every message.

    A site has tables: a data frame or a list of them (shards) by table name, or the
    path of a tables file. A mapping names the sites; a sequence names them ``site-0``,
    ``site-1``, ... A number stands for as many simulated nodes, among which the
    organisations of the run config's ``tables`` are divided. ``run_config`` is
    ``context.run_config`` at the sites. ``observe`` is called with every message and
    reply after serialisation, for audits. ``state`` is a folder that holds one for each
    site's state; None keeps the states in memory. Data frames show no coefficients.

    >>> from client_apps.app import app  # doctest: +SKIP
    >>> grid = InProcessGrid(app, sites=[{"orders": orders}])  # doctest: +SKIP
    """

    def __init__(
        self,
        client_app: ClientApp,
        sites: int | Sequence[Tables] | Mapping[str, Tables],
        run_config: UserConfig | None = None,
        observe: Observer | None = None,
        state: Path | None = None,
    ) -> None:
        self._client_app = client_app
        self._observe = observe
        self._state = state
        self._run_id = uuid4().int >> 65
        self._tokens: list[str] = []
        self.contexts: dict[int, Context] = {
            node: Context(self._run_id, node, config, RecordDict(), run_config or {})
            for node, config in enumerate(self._node_configs(sites), start=2)
        }
        self._replies: dict[str, Message] = {}
        self._last: Message | None = None
        try:
            _ = TaskIdentity.task_id
        except RuntimeError:  # Flower's runtimes set it before an app starts
            TaskIdentity.task_id = 1
            TaskIdentity.node_id = 1
            TaskIdentity.run_id = self._run_id

    def close(self) -> None:
        """Release the data frames."""
        for token in self._tokens:
            release(token)

    def set_run(self, run: Run) -> None:
        """Set the run's number."""
        self._run_id = run.run_id

    @property
    def run(self) -> Run:
        """The run that this grid is in."""
        return Run.create_empty(self._run_id)

    @property
    def state_folders(self) -> set[Path]:
        """The folders in which sites keep their state; none of those in memory."""
        configs = (context.node_config for context in self.contexts.values())
        states = set(map(node_config.state_dir, configs))
        return set(map(Path, states - {node_config.IN_MEMORY}))

    @property
    def run_name(self) -> str:
        """The server's name of the run to which the last message to a site belongs."""
        if self._last is None:
            return NO_RUN
        return read_envelope(RequestEnvelope, unpack(self._last.content)).run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message to a site."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the sites."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the ClientApp for every message; return their ids."""
        identifiers = []
        for message in messages:
            identifier = uuid4().hex
            message.metadata.__dict__["_message_id"] = identifier
            if message.metadata.dst_node_id not in self.contexts:
                # as Flower's grids do with an unknown node
                identifiers.append("")
                continue
            self._replies[identifier] = self._deliver(message)
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages, each of them once."""
        return [
            self._replies.pop(identifier)
            for identifier in list(message_ids)
            if identifier in self._replies
        ]

    def send_and_receive(
        self, messages: Iterable[Message], **_: Any
    ) -> Iterable[Message]:
        """Send messages and return their replies, which arrive at once."""
        return self.pull_messages(self.push_messages(list(messages)))

    def _node_configs(
        self, sites: int | Sequence[Tables] | Mapping[str, Tables]
    ) -> list[UserConfig]:
        """Return the node config of every site; register its data frames."""
        by_name: Mapping[str, Tables | None]
        if isinstance(sites, Mapping):
            by_name = sites
        elif isinstance(sites, int):
            by_name = {str(number): None for number in range(sites)}
        else:
            by_name = {f"site-{number}": site for number, site in enumerate(sites)}
        configs: list[UserConfig] = []
        for number, (name, tables) in enumerate(by_name.items()):
            # in memory a test leaves nothing to clean up
            folder = ":memory:"
            if self._state is not None:
                folder = str(self._state / name)
            config: UserConfig = {
                node_config.STATE_DIR: folder,
                node_config.PARTITION_ID: number,
                # nobody needs to wait for any other site
                node_config.NUM_PARTITIONS: len(by_name),
                # nobody is between the sites
                node_config.KEYS: node_config.UNCHECKED,
            }
            if isinstance(tables, str | Path):
                config[node_config.TABLES] = str(tables)
            elif tables is not None:
                self._tokens.append(register_frames(tables, name, WATCHED))
                config[node_config.TABLES] = MEMORY_PREFIX + self._tokens[-1]
            configs.append(config)
        return configs

    def _deliver(self, message: Message) -> Message:
        """Return the ClientApp's reply to a message, or the error it raised."""
        context = self.contexts[message.metadata.dst_node_id]
        incoming = self._last = _serialise(message)
        self._notify(incoming)
        try:
            reply = self._client_app(incoming, context)
        except Exception as error:  # noqa: BLE001 - as Flower reports it
            reason = f"{type(error)}:<{str(error)!r}>"
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
        outgoing = _serialise(reply)
        self._notify(outgoing)
        return outgoing

    def _notify(self, message: Message) -> None:
        if self._observe is not None:
            self._observe(message)


def _serialise(message: Message) -> Message:
    """Return a message as it arrives, after serialisation both ways."""
    data = recorddict_to_proto(message.content).SerializeToString()
    arrived = copy(message)
    arrived.content = recorddict_from_proto(RecordDictProto.FromString(data))
    return arrived
