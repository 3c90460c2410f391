"""Reading JSON objects of a manifest with the types that they must have."""

import sys
from collections.abc import Mapping
from typing import Any, Final

from tp_flower.errors import ModelError

LARGEST: Final = sys.float_info.max


class Fields:
    """The fields of a JSON object; each method checks one field's type.

    Every method raises ``ModelError`` where the field is missing or of another type.

    Args:
        data: the object.
        what: it is, for messages.
    """

    def __init__(self, data: object, what: str) -> None:
        if not isinstance(data, Mapping):
            raise ModelError(f"the manifest is damaged: {what} is no object of names")
        self._data: Mapping[str, Any] = data
        self._what = what

    def text(self, name: str) -> str:
        """Return a text."""
        return str(self._checked(name, self._get(name), str, "a text"))

    def count(self, name: str) -> int:
        """Return a whole number from 0 on."""
        value = self._get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a whole number from 0 on")
        return value

    def number(self, name: str) -> float:
        """Return a finite number."""
        return self._numbers(name, [self._get(name)])[0]

    def items(self, name: str) -> list[Any]:
        """Return a list of anything."""
        found: list[Any] = self._checked(name, self._get(name), list, "a list")
        return found

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object of names."""
        found: Mapping[str, Any] = self._checked(
            name, self._get(name), dict, "an object of names"
        )
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        found = self.items(name)
        return tuple(self._checked(name, x, str, "a list of texts") for x in found)

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Return texts by name."""
        found = self.mapping(name)
        for value in found.values():
            self._checked(name, value, str, "texts by name")
        return dict(found)

    def numbers(self, name: str, length: int | None = None) -> list[float]:
        """Return a list of finite numbers, of a given length or not empty."""
        found = self.items(name)
        if not found or length not in (None, len(found)):
            wanted = "at least one" if length is None else str(length)
            raise self._wrong(name, f"a list of {wanted} numbers")
        return self._numbers(name, found)

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """Return finite numbers by name."""
        found = self.mapping(name)
        values = self._numbers(name, list(found.values()))
        return dict(zip(found, values, strict=True))

    def _numbers(self, name: str, values: list[Any]) -> list[float]:
        for value in values:
            # false for NaN and infinity, and for a whole number beyond any float
            is_finite = type(value) in (int, float) and abs(value) <= LARGEST
            if not is_finite:
                raise self._wrong(name, "made of finite numbers")
        return [float(value) for value in values]

    def _get(self, name: str) -> Any:
        if name not in self._data:
            raise ModelError(f"the manifest is damaged: {self._what} has no {name!r}")
        return self._data[name]

    def _checked(self, name: str, value: object, kind: type, wanted: str) -> Any:
        if type(value) is not kind:
            raise self._wrong(name, wanted)
        return value

    def _wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(
            f"the manifest is damaged: {name!r} of {self._what} is not {wanted}"
        )
