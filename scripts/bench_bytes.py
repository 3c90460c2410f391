"""What an epoch of linear ADMM sends, against the least that it could send."""

from bench_runs import Check, Outcome, by_table, flights_frames, run_traced

from strategies import RelationalStrategy
from tp_flower.datasets import FLIGHTS_SQL
from tp_flower.experiment import Settings
from tp_flower.report import RoundReport

BYTES_PER_NUMBER = 4
MARGIN = 1.05
EPOCHS = 3


def measure_bytes() -> Outcome:
    """Count the bytes of flights, every table in one shard and as it is."""
    outcome = Outcome()
    sites = flights_frames()
    settings = Settings(num_epochs=EPOCHS)
    unsharded = {name: {name: frame} for name, frame in by_table(sites).items()}
    strategy = run_traced(FLIGHTS_SQL, settings, unsharded).strategy
    last = strategy.report.history[-2]  # the last one is "finish"
    # one site per table, one message per site each way
    messages = 2 * len(unsharded)
    floor = floor_bytes(strategy)
    for direction, sent in (("up", last.bytes_up), ("down", last.bytes_down)):
        total = sum(sent.values())
        outcome.checks.append(
            Check(
                f"join-only ADMM, an epoch's bytes {direction} over the floor",
                total / floor,
                MARGIN,
            )
        )
        outcome.facts[f"join-only: bytes {direction} per epoch"] = total
    outcome.facts |= {
        "join-only: floor, each way": floor,
        "join-only: rounds per epoch": rounds_of(strategy, EPOCHS),
        "join-only: overhead per message": last.overhead_bytes / messages,
    }
    sharded = run_traced(FLIGHTS_SQL, settings, sites).strategy
    rounds = [item for item in sharded.report.history if item.epoch == EPOCHS]
    outcome.facts |= {
        "five organisations: bytes up per epoch": _total(rounds, "bytes_up"),
        "five organisations: bytes down per epoch": _total(rounds, "bytes_down"),
        "five organisations: floor, each way": floor_bytes(sharded),
        "five organisations: rounds per epoch": len(rounds),
        "five organisations: overhead per epoch": sum(r.overhead_bytes for r in rounds),
    }
    return outcome


def floor_bytes(strategy: RelationalStrategy) -> int:
    """Return 4 d_c sum(n_i): one float32 per output for every row that takes part."""
    federation = strategy.federation
    if federation is None:
        message = "the run had no set-up"
        raise RuntimeError(message)
    rows = sum(table.total_rows for table in federation.tables.values())
    return BYTES_PER_NUMBER * federation.loss.outputs * rows


def rounds_of(strategy: RelationalStrategy, epoch: int) -> int:
    """Return how many rounds an epoch took."""
    return sum(item.epoch == epoch for item in strategy.report.history)


def _total(rounds: list[RoundReport], direction: str) -> int:
    return sum(sum(getattr(item, direction).values()) for item in rounds)
