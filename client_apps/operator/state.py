"""The state of a participant in training, stored as arrays by name.

What every participant has besides its model is its :class:`Progress`. What a method
adds is a dataclass of that method, its *state*. The fields of either are arrays,
numbers, or dataclasses of such; a field that is None is not stored.

The codec follows from the fields: an array is stored under the field's name, a number
as an array of one, the fields of an inner dataclass under its name and theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray

State = TypeVar("State")

Arrays = Mapping[str, AnyArray]


@dataclass
class Progress:
    """A participant's scores and sums that have left, and its best model so far.

    Attributes:
        scores_number: of the last scores that left; None before any.
        score_sums: sum G s and sum G s^2 of the scores that left last, (2, d_c).
        released: how often scores of each row have left, where rows differ in it, (n,).
        sums: how many shares have left.
        best: parameters of the best model so far, (p,).
        best_sums: its ``score_sums``.
    """

    scores_number: int | None = None
    score_sums: FloatArray | None = None
    released: FloatArray | None = None
    sums: int = 0
    best: AnyArray | None = None
    best_sums: FloatArray | None = None


@dataclass
class Stateless:
    """The state of a method whose only state is the model."""


def write_state(state: object) -> dict[str, AnyArray]:
    """Return the arrays that :func:`read_state` reads.

    >>> write_state(Progress(scores_number=3, best=np.ones(1)))
    {'scores_number': array([3.]), 'sums': array([0.]), 'best': array([1.])}
    """
    arrays: dict[str, AnyArray] = {}
    for name, kind in _fields(type(state)):
        value: Any = getattr(state, name)
        if value is None:
            continue
        if is_dataclass(kind):
            inner = write_state(value).items()
            arrays |= {_inner(name, key): array for key, array in inner}
        elif kind in (int, float):
            arrays[name] = np.array([float(value)])
        else:
            arrays[name] = value
    return arrays


def read_state(state: type[State], arrays: Arrays) -> State:
    """Return a state of copies of its arrays; other arrays are left alone.

    >>> arrays = {"scores_number": np.array([3.0]), "others": np.zeros(2)}
    >>> read_state(Progress, arrays).scores_number
    3
    """
    values: dict[str, Any] = {}
    for name, kind in _fields(state):
        if is_dataclass(kind):
            start = _inner(name, "")
            inner = {
                key.removeprefix(start): array
                for key, array in arrays.items()
                if key.startswith(start)
            }
            if inner:
                values[name] = read_state(kind, inner)
        elif name in arrays:
            array = np.array(arrays[name])
            values[name] = kind(array[0]) if kind in (int, float) else array
    return state(**values)


def _inner(name: str, key: str) -> str:
    """Return the name of an array of an inner dataclass."""
    return f"{name}-{key}"


_FIELDS: Final[dict[type[Any], tuple[tuple[str, type[Any]], ...]]] = {}
"""Of states seen before: to read type hints takes longer than a batch of few rows."""


def _fields(state: type[Any]) -> tuple[tuple[str, type[Any]], ...]:
    """Return the fields of a dataclass, each with its type where it is not None."""
    if state not in _FIELDS:
        hints = get_type_hints(state)
        _FIELDS[state] = tuple(
            (field.name, _drop_none(hints[field.name])) for field in fields(state)
        )
    return _FIELDS[state]


def _drop_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (kind,) = (option for option in get_args(hint) if option is not NoneType)
    return kind
