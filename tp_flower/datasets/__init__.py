"""Built-in federations."""

from tp_flower.datasets.carriers import CARRIERS_SQL, make_carriers
from tp_flower.datasets.flights import (
    FLIGHTS_REGRESSION_SQL,
    FLIGHTS_SQL,
    flights_tables,
)
from tp_flower.datasets.store import (
    STORE_CLASSIFICATION_SQL,
    STORE_SQL,
    make_store,
)

__all__ = [
    "CARRIERS_SQL",
    "FLIGHTS_REGRESSION_SQL",
    "FLIGHTS_SQL",
    "STORE_CLASSIFICATION_SQL",
    "STORE_SQL",
    "flights_tables",
    "make_carriers",
    "make_store",
]
