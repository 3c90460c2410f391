"""The vital signs of MIMIC-III: which CHARTEVENTS items measure them, in which unit.

The 17 variables of the MIMIC-III benchmarks (Harutyunyan et al. 2019, "Multitask
learning and benchmarking with clinical time series data"), as far as CHARTEVENTS has
them, by the item ids of D_ITEMS for CareVue (below 200000) and MetaVision.
"""

from collections.abc import Mapping

ITEMS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "capillary_refill": {"refill": (115, 3348, 8377, 223951, 224308)},
    "diastolic_pressure": {"": (8368, 8440, 8441, 8555, 220051, 220180)},
    "inspired_oxygen": {"share": (190, 2981, 3420, 3422, 223835)},
    "coma_eye_opening": {"": (184, 220739)},
    "coma_motor_response": {"": (454, 223901)},
    "coma_total": {"": (198,)},
    "coma_verbal_response": {"": (723, 223900)},
    "glucose": {
        "": (807, 811, 1529, 3744, 3745, 220621, 225664, 226537),
    },
    "heart_rate": {"": (211, 220045)},
    "height": {"inch": (920, 1394, 226707), "": (226730,)},
    "mean_pressure": {"": (52, 443, 456, 6702, 220052, 220181, 225312)},
    "oxygen_saturation": {"percent": (646, 834, 220277)},
    "respiratory_rate": {"": (615, 618, 220210, 224690)},
    "systolic_pressure": {"": (51, 442, 455, 6701, 220050, 220179)},
    "temperature": {
        "fahrenheit": (678, 679, 223761),
        "": (676, 677, 223762),
    },
    "weight": {
        "pound": (226531,),
        "": (762, 763, 224639, 226512),
    },
    "ph": {"": (780, 1126, 3839, 220274, 223830)},
}
"""By variable and unit, the items; "" is the unit that is used."""

CONVERSIONS: Mapping[str, str] = {
    "": "number",
    # brisk or not: a text in the files
    "refill": (
        "CASE WHEN value IN ('Brisk', 'Normal <3 secs', 'Normal <3 Seconds') THEN 0.0 "
        "WHEN value IN ('Delayed', 'Abnormal >3 secs', 'Abnormal >3 Seconds') THEN 1.0 "
        "END"
    ),
    # in both units under the same item
    "share": "CASE WHEN number > 1.0 THEN number / 100.0 ELSE number END",
    "percent": "CASE WHEN number <= 1.0 THEN number * 100.0 ELSE number END",
    "inch": "number * 2.54",
    "fahrenheit": "(number - 32.0) * 5.0 / 9.0",
    "pound": "number * 0.45359237",
}
"""By unit, SQL over ``value`` (text) and ``number``."""


def items_select() -> str:
    """Return SQL for a table of items: ``item``, ``variable``, ``unit``."""
    rows = [
        f"({item}, '{variable}', '{unit}')"
        for variable, units in ITEMS.items()
        for unit, items in units.items()
        for item in items
    ]
    return f"SELECT * FROM (VALUES {', '.join(rows)}) AS items(item, variable, unit)"


def converted() -> str:
    """Return SQL for the value of an event in the unit that is used."""
    cases = [f"WHEN unit = '{unit}' THEN {sql}" for unit, sql in CONVERSIONS.items()]
    return f"CASE {' '.join(cases)} END"
