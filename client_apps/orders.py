"""What a request says, read with the types and ranges that it must have.

The server is not trusted: nothing of a request is used before it went through here. A
refusal says what was asked for under which name and what is allowed, and nothing of
the site's data.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from client_apps.site import Site
from tp_flower.errors import SiteError, TPFlowerError
from tp_flower.model_names import ModelVersion
from tp_flower.protocol import AnyArray, Packet

MOST: Final = (1 << 31) - 1
"""The largest whole number that a request may hold where nothing else limits it."""

MOST_SEED: Final = (1 << 63) - 1

Item = TypeVar("Item")
Shape = tuple[int | None, ...]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_MALFORMED: Final = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError),
    RecursionError,
)
"""What code that reads JSON of the wrong form raises."""


class Order:
    """A JSON object of a request.

    Every method raises ``SiteError`` where the request says nothing under the name, or
    something of another type or out of range.

    Args:
        facts: the object.
        what: it is, for messages.
    """

    def __init__(self, facts: object, what: str) -> None:
        if not isinstance(facts, dict):
            raise SiteError(f"malformed request: {what} is no object of names")
        self._facts: Mapping[str, Any] = facts
        self._what = what

    def has(self, name: str) -> bool:
        """Return whether the order says anything but null under a name."""
        return self._facts.get(name) is not None

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        value = self._get(name)
        if type(value) is not bool:
            raise self._refused(name, "be true or false")
        return value

    def text(self, name: str, choices: Sequence[str] = ()) -> str:
        """Return a text; one of the choices, if there are any."""
        value = self._get(name)
        if type(value) is not str:
            raise self._refused(name, "be a text")
        if choices and value not in choices:
            raise self._refused(name, f"be one of {', '.join(choices)}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        value = self._get(name)
        if type(value) is not list or not all(type(item) is str for item in value):
            raise self._refused(name, "be a list of texts")
        return value

    def count(self, name: str, low: int = 0, most: int = MOST) -> int:
        """Return a whole number from ``low`` to ``most``."""
        value = self._get(name)
        if type(value) is not int or not low <= value <= most:
            raise self._refused(name, f"be a whole number from {low} to {most}")
        return value

    def number(
        self, name: str, high: float = math.inf, *, above_zero: bool = False
    ) -> float:
        """Return a finite number from 0, or above it, to ``high``."""
        value = self._get(name)
        is_number = type(value) in (int, float) and 0 <= value <= sys.float_info.max
        if not is_number or value > high or (above_zero and not value):
            start = "above 0" if above_zero else "from 0 on"
            end = "" if high == math.inf else f" and at most {high:g}"
            raise self._refused(name, f"be a finite number {start}{end}")
        return float(value)

    def order(self, name: str) -> "Order":
        """Return a JSON object within this one."""
        return Order(self._get(name), f"{name!r} of {self._what}")

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._facts)

    def one_of(self, name: str, choices: Sequence[Item]) -> Item:
        """Return the choice at the position that is given."""
        if not choices:
            raise self._refused(name, "not be there: there is none")
        return choices[self.count(name, most=len(choices) - 1)]

    def parsed(self, name: str, parse: Callable[[Any], Item]) -> Item:
        """Return what ``parse`` makes of a value.

        Raises:
            TPFlowerError: what ``parse`` raises on purpose, as it is.
            SiteError: it fails otherwise: the value is of another form.
        """
        value = self._get(name)
        try:
            return parse(value)
        except TPFlowerError:
            raise
        except _MALFORMED as error:
            raise self._refused(name, "be of the form that it has in a run") from error

    def _get(self, name: str) -> Any:
        if name not in self._facts:
            raise SiteError(f"malformed request: {self._what} has no {name!r}")
        return self._facts[name]

    def _refused(self, name: str, must: str) -> SiteError:
        return SiteError(f"malformed request: {name!r} of {self._what} must {must}")


def header_of(request: Packet) -> Order:
    """Return what a request says of all parts."""
    return Order(request.header, "the request")


def part_orders(site: Site, request: Packet) -> Iterator[tuple[int, Order]]:
    """Yield what a request says of each part, by number; errors are about that part.

    Raises:
        SiteError: it lists no parts, or one twice.
    """
    listed = request.header.get("parts")
    if type(listed) is not list:
        raise SiteError("malformed request: 'parts' must be a list of orders")
    seen: set[int] = set()
    for facts in listed:
        number = Order(facts, "an order").count("id")
        if number in seen:
            raise SiteError(f"malformed request: part {number} is ordered twice")
        seen.add(number)
        site.current_part = number
        yield number, Order(facts, f"the order of part {number}")
    site.current_part = None


def model_of(header: Order) -> ModelVersion:
    """Return the model that a request names, as what becomes a path."""
    return ModelVersion(header.text("model-name"), header.text("model-version"))


def whole_numbers(
    array: AnyArray, what: str, *, low: int, high: int, length: int | None = None
) -> IntArray:
    """Return an array (length,) of whole numbers from ``low`` to ``high``.

    Raises:
        SiteError: it is something else.
    """
    is_whole = array.dtype.kind in "iu"
    if not is_whole or array.ndim != 1 or length not in (None, len(array)):
        size = "any number" if length is None else str(length)
        raise _refused(array, what, f"{size} whole numbers")
    if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        raise SiteError(
            f"malformed request: array {what!r} must hold numbers from {low} to {high}"
        )
    return array.astype(np.int64)


def real_numbers(array: AnyArray, what: str, shape: Shape) -> FloatArray:
    """Return an array of finite numbers; None in the shape is any length.

    Raises:
        SiteError: it is something else.
    """
    fits = len(shape) == array.ndim and all(
        size in (None, given) for size, given in zip(shape, array.shape, strict=True)
    )
    if array.dtype.kind != "f" or not fits:
        sizes = " x ".join("any" if size is None else str(size) for size in shape)
        raise _refused(array, what, f"{sizes} numbers")
    if not np.isfinite(array).all():
        raise SiteError(f"malformed request: array {what!r} must hold finite numbers")
    return array.astype(np.float64)


def _refused(array: AnyArray, what: str, must: str) -> SiteError:
    return SiteError(
        f"malformed request: array {what!r} is {array.dtype.name} of shape "
        f"{array.shape}, but must be {must}"
    )
