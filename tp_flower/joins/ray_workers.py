"""Workers of the server as actors of Ray, on this machine or on the nodes of a cluster.

Flower's simulation brings Ray. It hands kernels and arrays from the server to its own
workers and back, in the form of cloudpickle, which runs code that it is given: the
server and its workers are one program on several machines. Nothing of it comes from a
site. Whoever can reach the ports of a cluster could have it run code as well: one that
is started here asks for a token that this process alone has.
"""

import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from tp_flower.arrays import THREADS
from tp_flower.errors import SettingsError
from tp_flower.joins.partitions import Partitions
from tp_flower.joins.workers import WorkerLostError, Workers

TOKEN_MODE: Final = "RAY_AUTH_MODE"
TOKEN: Final = "RAY_AUTH_TOKEN"
NICENESS: Final = "RAY_worker_niceness"
START_SECONDS: Final = 120.0
"""For a worker to start in: Ray starts in 8 to 17 s, and a node may be busy."""


class RayWorkers(Workers):
    """Actors of Ray."""

    def __init__(
        self, where: int | str, on_loss: Callable[[int], None] = lambda _: None
    ) -> None:
        """Start so many workers on this machine, or one on each node of a cluster.

        Args:
            where: their number, or the cluster's address.
            on_loss: is told the number of a worker that has died.

        Raises:
            SettingsError: Ray is not installed, there is no cluster at the address, or
                its workers do not start.
        """
        self._ray = load_ray()
        self._began_ray = not self._ray.is_initialized()
        if self._began_ray:
            connect(self._ray, where)
        places = [{}] * where if isinstance(where, int) else self._nodes()
        super().__init__(len(places), on_loss)
        self._places: list[dict[str, Any]] = places
        self._actors: dict[int, Any] = {}
        try:
            for number in range(len(places)):
                self.start(number)
            self._await(where)
        except BaseException:
            self.close()
            raise

    def _nodes(self) -> list[dict[str, Any]]:
        """Return by node of the cluster how an actor is started there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return [
            {
                # elsewhere once the node is gone
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    node["NodeID"], soft=True
                ),
                "runtime_env": {"env_vars": {THREADS: str(_cores(node))}},
            }
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _await(self, where: int | str) -> None:
        pings = [self.call(number, "ping") for number in range(len(self))]
        ready, _ = self._ray.wait(pings, num_returns=len(pings), timeout=START_SECONDS)
        if len(ready) < len(pings):
            raise SettingsError(
                f"server-workers = {where!r}: {len(ready)} of {len(pings)} workers "
                f"have started within {START_SECONDS:g} s"
            )
        try:
            for ping in pings:
                self.fetch(ping)
        except WorkerLostError as error:
            raise SettingsError(
                f"server-workers = {where!r}: a worker does not start; all nodes need "
                f"the same version of tp-flower. Ray says: {error}"
            ) from error

    def put(self, value: object) -> Any:
        """Store a value once for all workers; return the reference to it."""
        return self._ray.put(value)

    def call(self, number: int, method: str, *args: object) -> Any:
        """Begin a call of a worker; return the reference to its result."""
        return getattr(self._actors[number], method).remote(*args)

    def fetch(self, future: Any) -> Any:
        """Return the result of a call.

        Raises:
            WorkerLostError: a worker, or its node, has died before.
        """
        try:
            return self._ray.get(future)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, self._losses):
                raise WorkerLostError(str(cause).strip().splitlines()[0]) from error
            raise

    @property
    def _losses(self) -> tuple[type[Exception], ...]:
        errors = self._ray.exceptions
        return (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError)

    def start(self, number: int) -> None:
        """Start the actor of a worker, or another one in place of a dead one."""
        # it takes no core of those that Ray shares among tasks
        actor = self._ray.remote(Partitions).options(num_cpus=0, **self._places[number])
        self._actors[number] = actor.remote()

    def stop(self) -> None:
        """End all actors, and Ray if it began with them."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        if self._began_ray:
            self._ray.shutdown()


@contextmanager
def open_workers(
    where: int | str, on_loss: Callable[[int], None]
) -> Iterator[Workers | None]:
    """Start workers where a setting says, and end them; None for 0."""
    if not where:
        yield None
        return
    workers = RayWorkers(where, on_loss)
    try:
        yield workers
    finally:
        workers.close()


def load_ray() -> ModuleType:
    """Return Ray, where a cluster of this process asks for a token.

    Ray listens on all addresses of a machine, and runs what it is sent. It reads the
    token when it is loaded.

    Raises:
        SettingsError: it is not installed, or was loaded without a token.
    """
    if "ray" not in sys.modules:
        os.environ.setdefault(TOKEN_MODE, "token")
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
    try:
        ray = import_module("ray")
    except ImportError:
        raise SettingsError(
            "server-workers needs Ray, which is not installed: "
            "pip install 'flwr[simulation]'"
        ) from None
    if os.environ.get(TOKEN_MODE) != "token" and not ray.is_initialized():
        raise SettingsError(
            "server-workers: this process has loaded Ray without a token, and others "
            f"could run code on its workers: set {TOKEN_MODE}=token in its environment"
        )
    return ray


def connect(ray: ModuleType, where: int | str) -> None:
    """Start Ray on this machine for so many workers, or connect to a cluster.

    Raises:
        SettingsError: nobody answers at the address.
    """
    options: dict[str, Any] = {"address": where}
    if isinstance(where, int):
        # they compute for the server; by default they wait for all other processes
        os.environ.setdefault(NICENESS, "0")
        # never a cluster that somebody else has on this machine
        options = {
            "address": "local",
            "num_cpus": where,
            "include_dashboard": False,
        }
    try:
        with warnings.catch_warnings():
            # of its own next versions, and of files that it leaves open
            warnings.simplefilter("ignore")
            ray.init(log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise SettingsError(
            f"server-workers = {where!r}: there is no cluster of Ray that answers: "
            f"{error}"
        ) from error


def _cores(node: Mapping[str, Any]) -> int:
    """Return how many threads the worker of a node may use."""
    return max(int(node["Resources"].get("CPU", 1)), 1)
