"""Networks on which the seconds of messages are modelled (paper, section 6.3)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """How long messages take.

    Attributes:
        name: for people.
        round_seconds: latency of one round, whatever it carries.
        bits_per_second: of the server's link.
    """

    name: str
    round_seconds: float
    bits_per_second: float

    def seconds(self, rounds: int, sent: float) -> float:
        """Return latency per round plus bytes over bandwidth.

        Args:
            rounds: how many.
            sent: bytes, both ways.

        >>> Network("n", 0.5, 1e4).seconds(rounds=3, sent=1250)
        2.5
        """
        return rounds * self.round_seconds + 8.0 * sent / self.bits_per_second


US_UK = Network("US-UK", 0.136, 0.42e9)
US_US = Network("US-US", 0.067, 1.15e9)

PAPER_NETWORKS = (
    US_UK,
    US_US,
    Network("US-East, US-West", 0.063, 8 * 60.0e6),
    Network("US-West, EU", 0.153, 8 * 26.2e6),
    Network("US-East, EU", 0.110, 8 * 33.8e6),
)
"""The last three are what the paper measured between AWS regions (Table 8)."""

NETWORKS = (
    US_UK,
    US_US,
    # a SuperNode polls every 3 s and starts a process per message (measured, 1.41)
    Network("Flower, LAN", 4.0, 1e9),
)
