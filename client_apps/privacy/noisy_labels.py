"""The labels of a participant as they may leave the site: noisy, drawn once, paid for.

Every label is first moved into the declared domain and then gets its noise: a number
out of range becomes the nearer end, a missing number the middle; a missing or
undeclared class is replaced by a uniformly drawn one. So nothing but the noisy labels
depends on the true ones, not even whether the request succeeds: otherwise a malicious
server could read labels row by row from refusals. The site's log says how many labels
were replaced; in a simulation, where there is nobody to protect, that is an error.

Guarantee
    unit         the label of one row that the fragment yields; of a unit of privacy at
                 most k labels, each of the plan's epsilon, composed
    neighbours   any label instead of any other (local privacy: whatever else is known)
    mechanism    the plan's epsilon with delta 0, once per draw
    not covered  which rows there are; what features, keys and filters reveal about the
                 label; that an expression fails on a value
"""

import hashlib
import json
from dataclasses import asdict
from logging import WARNING
from typing import Final

import numpy as np
from flwr.common.logger import log
from msgspec.structs import replace

from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import budgets, check_single_rows
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SettingsError, SiteError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.objectives import ClassNoise
from tp_flower.privacy.label_mechanisms import LabelPlan
from tp_flower.privacy.mechanisms import PureDp, Release
from tp_flower.protocol.messages import Action
from tp_flower.query import Fragment
from tp_flower.query.fragment import SURVIVAL
from tp_flower.randomness import NoiseSource
from tp_flower.sources.policy import LABELS

_OTHERWISE: Final = (
    "which rows there are; what features, keys and filters tell of a label"
)
_BOOLEANS: Final = {"false": 0.0, "true": 1.0}


def released_label(
    site: Site, number: int, plan: LabelPlan | None, label: LabelColumn
) -> LabelColumn:
    """Return the label as it may leave the site, paid for.

    Without a noise plan, it leaves in the clear.
    """
    run = site.store.run
    source = site.source(number)
    source.policy.check_release(LABELS, is_private=plan is not None)
    release = _release(site, number, plan)
    if plan is None:
        site.ledger.note(run, [release])
        return label
    if not len(label.values):
        # without rows, a column of a text file may have any type
        return LabelColumn(plan.kind, np.zeros(0), plan.classes)
    domain = _domain_values(label, plan)
    fragment = site.fragment(number)
    if replaced := int(np.isnan(domain).sum()):
        wrong = "NULL or not in privacy.label-classes"
        if plan.limits:
            wrong = "NULL"
        text = (
            f"table {fragment.table}: the label is {wrong} in {replaced} rows: filter "
            "them out (WHERE ... IS NOT NULL), or put them into a class with CASE"
        )
        if site.is_simulated:
            raise SiteError(text)
        log(WARNING, "%s; noise took their place", text)
    name = _name(release, fragment, plan, label)
    # drawn and paid for only once: the round's transaction stores both
    values, draw = site.store.labels(name, lambda: _draw(domain, plan, NoiseSource()))
    site.ledger.charge(run, release, budgets(site), draw)
    return LabelColumn(plan.kind, values.astype(np.float64), plan.classes)


def _release(site: Site, number: int, plan: LabelPlan | None) -> Release:
    """Return the release of a label column, with or without noise."""
    source = site.source(number)
    scope = f"each label for itself, whatever else is known; not: {_OTHERWISE}"
    mechanism = None
    if plan is not None:
        check_single_rows(source, site.fragment(number))
        mechanism = PureDp(plan.epsilon, source.policy.rows_per_unit)
    if plan is None:
        scope = "the labels leave in the clear"
        if beside := site.fragment(number).numbers.keys() & SURVIVAL:
            scope += f": the times, and of each the {' and the '.join(sorted(beside))}"
    elif isinstance(plan.noise, ClassNoise):
        noise = plan.noise
        scope = (
            f"{plan.mechanism}: a class stays with probability {noise.keep:.4g} and "
            f"becomes each of {noise.classes - 1} others with {noise.flip:.4g}, which "
            f"by itself is epsilon {noise.epsilon:.4g}; {scope}"
        )
    else:
        low, high = plan.limits
        scope = f"{plan.mechanism}: clipped to {low:g} .. {high:g}; {scope}"
    return replace(
        ledger_entries.release(site, number, Action.EXTRACT, LABELS, scope),
        unit=f"the label of {ledger_entries.unit_text(source, source.table)}",
        neighbours="any other label",
        mechanism=mechanism,
    )


def _domain_values(label: LabelColumn, plan: LabelPlan) -> FloatArray:
    """Return numbers (n,) within the limits, or codes (n,); NaN if out of domain."""
    if not plan.limits:
        return _codes(label, plan)
    if label.kind == "text":
        raise SettingsError(
            "the label is text, but the run has privacy.label-range: CAST it to a "
            "number, or list privacy.label-classes"
        )
    low, high = plan.limits
    if label.kind == "boolean" and (low, high) != (0.0, 1.0):
        raise SettingsError(
            "the label is true or false: privacy.label-range must be "
            '"0, 1" (regression) or left out (classification)'
        )
    return np.clip(label.values, low, high)


def _codes(label: LabelColumn, plan: LabelPlan) -> FloatArray:
    """Return the positions of labels among the declared classes; NaN elsewhere."""
    if not plan.classes and label.kind != "boolean":
        raise SettingsError(
            f"the label is of type {label.kind}: its classes would disclose data, so "
            "list them in privacy.label-classes (or, for a regression, set "
            "privacy.label-range)"
        )
    if label.kind == "text":
        return label.positions_in(plan.classes)
    return label.positions_in(_class_numbers(plan.classes, label.kind))


def _class_numbers(classes: tuple[str, ...], kind: str) -> list[float]:
    """Return the declared classes as distinct numbers or truth values."""
    if not classes:
        return [0.0, 1.0]
    words = _BOOLEANS if kind == "boolean" else {}
    try:
        numbers = [float(words.get(name.lower(), name)) for name in classes]
    except ValueError:
        numbers = []
    if len(set(numbers)) != len(classes):
        raise SettingsError(
            f"the label is of type {kind}, and privacy.label-classes "
            f"({', '.join(classes)}) are not distinct values of that type"
        )
    return numbers


def _name(
    release: Release, fragment: Fragment, plan: LabelPlan, label: LabelColumn
) -> str:
    """Return a digest of everything that a draw, and its cost, depends on."""
    document = fragment.to_json()
    rows = [document[key] for key in ("label", "filters", "subquery")]
    inputs = [release.source, rows, asdict(plan), label.kind, label.categories]
    inputs += [] if release.per == "row" else [release.per]
    digest = hashlib.sha256(json.dumps(inputs).encode())
    digest.update(np.ascontiguousarray(label.values).tobytes())
    return digest.hexdigest()


def _draw(domain: FloatArray, plan: LabelPlan, noise: NoiseSource) -> AnyArray:
    """Return noisy numbers, or noisy classes in the smallest dtype."""
    has_none = np.isnan(domain)
    if plan.limits:
        middle = 0.5 * (plan.limits[0] + plan.limits[1])
        return plan.draw_numbers(np.where(has_none, middle, domain), noise)
    count = plan.class_count
    # a uniformly drawn class stays uniform: between the noise's flip and keep rates
    uniform_codes = np.minimum(noise.uniform(len(domain)) * count, count - 1)
    codes = np.where(has_none, uniform_codes, domain).astype(np.intp)
    return plan.draw_classes(codes, noise).astype(np.min_scalar_type(count - 1))
