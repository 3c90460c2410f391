"""Seconds that packing and unpacking a message takes."""

import time
from collections.abc import Callable

import numpy as np

from scripts.bench.runs import Check, Outcome
from tp_flower.protocol import Packet, pack, unpack

PACKED_ARRAYS = 8
PACKED_ROWS = 500
PACK_SECONDS = 60e-6
LARGE_BYTES = 64 << 20
REPEATS = 7


def measure_packing() -> Outcome:
    """Time packing and unpacking: the machine's own seconds, best of some."""
    rng = np.random.default_rng(0)
    outcome = Outcome()
    small = Packet(
        {"batch": 1, "next-batch": 2, "evaluate": None, "momentum": 0.9},
        {
            (part, "messages"): rng.normal(size=(PACKED_ROWS, 1)).astype(np.float32)
            for part in range(PACKED_ARRAYS)
        },
    )
    seconds = best_seconds(lambda: unpack(pack(small)), times=200)
    name = f"packing and unpacking {PACKED_ARRAYS} arrays of {PACKED_ROWS} rows"
    outcome.checks.append(Check(name, seconds, PACK_SECONDS, "s"))
    array = np.ones(LARGE_BYTES // 8)
    large = Packet({}, {(0, "x"): array})
    packing, copying = best_seconds(lambda: pack(large)), best_seconds(array.tobytes)
    content = pack(large)
    outcome.facts |= {
        "packing 64 MiB over one copy": packing / copying,
        "unpacking 64 MiB over one copy": best_seconds(lambda: unpack(content))
        / copying,
    }
    return outcome


def best_seconds(function: Callable[[], object], times: int = 1) -> float:
    """Return the least processor seconds that a call took."""
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        for _ in range(times):
            function()
        found.append((time.process_time() - started) / times)
    return min(found)
