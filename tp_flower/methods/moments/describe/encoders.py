"""The encoders under which second moments are sums, squares and counts of a column.

A number has columns of its value, of its square and of whether there is one, zeros
where there is none; a category a column per category, and that. So every figure of a
group is a moment with the group's own column.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tp_flower.errors import SettingsError
from tp_flower.features.spec import EncoderSpec

NUMBER: Final = "none"
RANGE: Final = "range"
CATEGORIES: Final = "categories"
ONE_HOT: Final = "one-hot"
_BY_KIND: Final = {
    "number": EncoderSpec(NUMBER),
    "boolean": EncoderSpec(CATEGORIES, "false, true"),
    "text": EncoderSpec(ONE_HOT),
}
_ADVICE: Final = {
    "time": "write a number, such as DATE_DIFF('day', t.first, t.last), a category, "
    "such as YEAR(t.day), or leave it out",
    "vector": "leave it out",
}
NUMBERS: Final = (NUMBER, RANGE)
"""Encoders under which a number stays one."""
_OF_CATEGORIES: Final = (CATEGORIES, ONE_HOT)


def describing_encoder(
    feature: str, kind: str, text: str | None, *, is_group: bool
) -> EncoderSpec:
    """Return the encoder of a feature that is described.

    Args:
        feature: ``table.name``, for messages.
        kind: of its values.
        text: the encoder that the run's settings name; None without one.
        is_group: whether its categories are the groups.

    Raises:
        SettingsError: no encoder describes such values, or not the one that is named.
    """
    if kind not in _BY_KIND:
        raise SettingsError(f"{feature} is a {kind}: {_ADVICE[kind]}")
    spec = _BY_KIND[kind]
    if text is not None:
        spec = EncoderSpec.parse(text)
    is_number = spec.kind in NUMBERS and kind == "number"
    if is_group and is_number:
        raise SettingsError(
            f"group-by: {feature} is a number, and groups are categories: write these, "
            f"encoders = '{feature}={CATEGORIES}(<a>, <b>)'"
        )
    if not (is_number or spec.kind in _OF_CATEGORIES):
        fitting = "none, range(<low>, <high>), " if kind == "number" else ""
        raise SettingsError(
            f"{feature} has the encoder {spec}, under which nothing describes it: use "
            f"{fitting}categories(<a>, <b>) or one-hot"
        )
    # a missing value that counts as another one is not counted by itself
    fills = spec.missing not in ("", "zero", "middle")
    missing = spec.missing
    if not missing and spec.kind != RANGE:
        missing = "zero"
    return replace(
        spec,
        missing=missing,
        indicator=False,
        squared=is_number,
        present=not fills,
    )


def scale_of(spec: EncoderSpec) -> tuple[float, float]:
    """Return the number that a number's column has as 0, and the unit of the column.

    >>> scale_of(EncoderSpec.parse("range(0, 120)")), scale_of(EncoderSpec("none"))
    ((60.0, 60.0), (0.0, 1.0))
    """
    if spec.kind != RANGE:
        return 0.0, 1.0
    ends = spec.range
    half = ends.high / 2 - ends.low / 2
    return ends.low + half, half


def category_names(spec: EncoderSpec, columns: int) -> Sequence[str]:
    """Return the names of categories by column: numbers of those not declared.

    >>> category_names(EncoderSpec("one-hot"), 2)
    ['[0]', '[1]']
    """
    if spec.kind == CATEGORIES:
        return list(spec.categories)
    return [f"[{number}]" for number in range(columns)]
