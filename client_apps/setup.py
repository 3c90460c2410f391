"""What a site does to set a run up: describe, extract, statistics, prepare.

Every action takes the site and the request and returns the reply. It changes the site's
state last, so that an action that fails has changed nothing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from client_apps.keys import key_pair, take_secret
from client_apps.site import Site, State, initial_vectors, make_model
from client_apps.store import Entry
from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.encoder import SiteEncoder, TableEncoder
from tp_flower.encoding.statistics import Sample, feature_statistics
from tp_flower.encoding.statistics_wire import to_wire
from tp_flower.errors import SettingsError, SiteError
from tp_flower.extraction.canonical import without_values
from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.learning.models import LinearModel, LocalModel, ModelSpec
from tp_flower.learning.solvers import RidgeSolver, gram
from tp_flower.privacy.keyed_hash import HashArray, KeyedHasher
from tp_flower.protocol import AnyArray, ArrayKey, Packet, Update, unpack_bits
from tp_flower.query import Fragment
from tp_flower.randomness import Stream, generator
from tp_flower.sources.shards import ShardSource

Arrays = dict[ArrayKey, AnyArray]
Start = tuple[dict[str, AnyArray], dict[str, float], Entry]


def describe(site: Site, request: Packet) -> Packet:
    """Reply with the columns, types and row count of the shards that are asked for.

    Only the tables that the query names are opened; of the others the reply has the
    names. It also brings the site's public key of the run.
    """
    site.store.forget_stale()
    wanted = {str(name).lower() for name in request.header["tables"]}
    shards = []
    sources = site.shards()
    for position, source in enumerate(sources):
        if source.table.lower() not in wanted:
            continue
        schema = site.tables.describe(source)
        shards.append(
            {
                "table": source.table,
                "site": source.site,
                "index": source.index,
                "position": position,
                "columns": {
                    n: without_values(kind) for n, kind in schema.columns.items()
                },
                "rows": schema.rows,
                "all-null": list(schema.all_null),
            }
        )
    return Packet(
        {
            "shards": shards,
            "tables": list(dict.fromkeys(source.table for source in sources)),
            "partitions": int(str(site.context.node_config.get("num-partitions", 0))),
            "public-key": key_pair(site).public.hex(),
            "simulated": site.is_simulated,
        }
    )


def extract_rows(site: Site, request: Packet) -> Packet:
    """Run the query's fragments; reply with hashed join keys and labels."""
    take_secret(site, request)
    sources = site.shards()
    parts: list[dict[str, Any]] = []
    arrays: Arrays = {}
    for number, order in site.orders(request):
        source = sources[int(order["shard"])]
        fragment = Fragment.from_json(order["fragment"])
        extracted = site.tables.extract(number, source, fragment)
        _check_classes(source, extracted)
        facts, own = _extracted_reply(extracted, site.join_hasher())
        if order["groups"]:
            own["groups"] = _group_hashes(source, fragment, site.hasher())
        parts.append({"id": number, **facts})
        arrays.update({(number, name): array for name, array in own.items()})
    return Packet({"parts": parts}, arrays)


def _check_classes(source: ShardSource, extracted: ExtractedShard) -> None:
    """Refuse a label of texts that too few rows have: labels travel as they are."""
    if source.min_count <= 1 or extracted.label is None:
        return
    codes = extracted.label.codes
    known = len(extracted.label.categories)
    rows = np.bincount(codes[codes >= 0], minlength=known)[:known]
    if rare := int(np.count_nonzero(rows < source.min_count)):
        raise SiteError(
            f"the label has {rare} classes of fewer than min-count = "
            f"{source.min_count} rows, which may not leave the site: filter them out, "
            "or put them into one class with CASE"
        )


def _extracted_reply(
    extracted: ExtractedShard, hasher: KeyedHasher
) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    facts: dict[str, Any] = {
        "rows": extracted.rows,
        "keys": [key.kind for key in extracted.keys],
        "engine": extracted.engine,
        "pushed": list(extracted.pushed),
    }
    arrays: dict[str, AnyArray] = {}
    for number, key in enumerate(key.hashed(hasher) for key in extracted.keys):
        arrays[f"codes-{number}"] = key.codes
        arrays[f"hashes-{number}"] = key.hashes
    if extracted.label is not None:
        facts["label"] = {
            "kind": extracted.label.kind,
            "categories": list(extracted.label.categories),
        }
        arrays["label"] = extracted.label.values
    return facts, arrays


def _group_hashes(
    source: ShardSource, fragment: Fragment, hasher: KeyedHasher
) -> HashArray:
    """Return the keyed hashes of a sub-query's groups, before HAVING and filters."""
    groups = extract(source, fragment.all_groups).groups
    if groups is None:
        raise SiteError(f"table {fragment.table}: the sub-query has no groups")
    return groups.hashed(hasher.purpose(f"groups of {fragment.table}")).hashes


def statistics(site: Site, request: Packet) -> Packet:
    """Reply with the statistics of every feature, over the rows that are named."""
    parts = []
    arrays: Arrays = {}
    sources = site.shards()
    for number, order in site.orders(request):
        extracted = site.extracted(number)
        rows = None
        if (number, "rows") in request.arrays:
            rows = unpack_bits(request.array(number, "rows"), extracted.rows)
        choice = TableChoice.from_json(order["encoders"])
        min_count = sources[int(order["shard"])].min_count
        sample = Sample(site.hasher(), rows=rows, min_count=min_count)
        found = {
            info.name: feature_statistics(
                choice, info.name, info.kind, extracted.column(info.name), sample
            )
            for info in extracted.features
        }
        facts, own = to_wire(found)
        parts.append({"id": number, "statistics": facts})
        arrays.update({(number, name): array for name, array in own.items()})
    return Packet({"parts": parts}, arrays)


def prepare(site: Site, request: Packet) -> Packet:
    """Encode the features, make the model, and reply with what training starts from."""
    facts: list[dict[str, Any]] = []
    arrays: Arrays = {}
    states: dict[int, State] = {}
    for number, order in site.orders(request):
        update = Update(order["update"])
        encoder = TableEncoder.from_json(order["encoder"]).at_site(site.hasher())
        entry = _training_entry(site, number, order, request, encoder)
        width = entry.arrays["features"].shape[1]
        model = make_model(ModelSpec.from_json(order["model"]), width, order["device"])
        if isinstance(model, LinearModel):
            own, curvature, entry = _start_linear(model, entry, update)
        else:
            own, curvature = _start_torch(model, entry)
        site.save_part(number, entry)
        site.tables.forget(number)
        arrays.update({(number, name): array for name, array in own.items()})
        facts.append({"id": number, "features": width, **curvature})
        arrays[number, "penalised"] = model.penalised.astype(np.uint8)
        states[number] = (model, initial_vectors(model, update))
    site.start_state(states)
    return Packet({"parts": facts}, arrays)


def _training_entry(
    site: Site,
    number: int,
    order: Mapping[str, Any],
    request: Packet,
    encoder: SiteEncoder,
) -> Entry:
    """Encode the rows that take part, the trained ones first."""
    extracted = site.extracted(number)
    trained = unpack_bits(request.array(number, "trained"), extracted.rows)
    tested = unpack_bits(request.array(number, "tested"), extracted.rows)
    rows = np.concatenate([np.flatnonzero(trained), np.flatnonzero(tested & ~trained)])
    multiplicity = request.array(number, "multiplicity")
    if len(multiplicity) != np.count_nonzero(trained):
        raise SiteError("the multiplicities do not fit the rows to train on")
    arrays = {
        "features": site.tables.encode(number, encoder, rows),
        "multiplicity": multiplicity.astype(np.int64),
        "tested": tested[rows],
        "batch-start": np.zeros(1, np.int64),
        "batch-rows": np.zeros(0, np.int64),
    }
    for name in ("batch-start", "batch-rows"):
        if (number, name) in request.arrays:
            arrays[name] = request.array(number, name).astype(np.int64)
    meta = {
        "table": extracted.table,
        **{key: order[key] for key in ("model", "update", "joined-rows", "l2")},
        "device": order["device"],
        "encoder": encoder.to_json(),
    }
    return Entry(arrays, meta)


def _start_linear(model: LinearModel, entry: Entry, update: Update) -> Start:
    """Return what to send, the curvature, and the entry with its factorised solver.

    SGD needs the largest curvature, for its step size, and ADMM the solver: each costs
    an eigendecomposition.
    """
    multiplicity = entry.arrays["multiplicity"]
    trained = entry.arrays["features"][: len(multiplicity)]
    matrix = gram(trained, multiplicity, intercept=model.intercept)
    total = entry.meta["joined-rows"]
    facts = {
        "largest-curvature": 0.0,
        "mean-curvature": float(np.trace(matrix)) / (total * max(len(matrix), 1)),
    }
    if len(entry.arrays["batch-start"]) > 1:
        largest = np.linalg.eigvalsh(matrix / total).max(initial=0.0)
        return {}, {**facts, "largest-curvature": float(largest)}, entry
    if update is Update.GRAM:
        return {"gram": matrix}, facts, entry
    # a consensus step penalises every parameter alike, the intercept too
    centred = model.intercept and update is Update.LOCAL
    solver = RidgeSolver.from_gram(matrix, total, intercept=centred)
    arrays = {
        **entry.arrays,
        "eigenvalues": solver.eigenvalues,
        "eigenvectors": solver.eigenvectors,
        "mean": solver.mean,
    }
    return {}, facts, Entry(arrays, {**entry.meta, "weight": solver.weight})


def _start_torch(
    model: LocalModel, entry: Entry
) -> tuple[dict[str, AnyArray], dict[str, float]]:
    """Return the first scores, and the mean diagonal of the Gauss-Newton matrix.

    The diagonal is estimated with one random vector e of signs (Hutchinson):
    ||J^T (sqrt(G) e)||^2 / p has that mean as its expectation.
    """
    multiplicity = entry.arrays["multiplicity"]
    trained = entry.arrays["features"][: len(multiplicity)]
    outputs = int(entry.meta["model"]["outputs"])
    rng = generator(int(entry.meta["model"]["seed"]), Stream.CURVATURE)
    signs = rng.choice([-1.0, 1.0], size=(len(trained), outputs))
    try:
        probe = model.pullback(trained, np.sqrt(multiplicity)[:, None] * signs)
    except (RuntimeError, TypeError, ValueError) as error:
        # torch tells shapes and types here, no values
        raise SettingsError(
            f"model {entry.meta['model']['kind']!r} does not turn rows of "
            f"{trained.shape[1]} features into {outputs} scores: {error}"
        ) from error
    mean = float(probe @ probe) / (entry.meta["joined-rows"] * len(probe))
    scores = model.scores(entry.arrays["features"])
    return {"scores": scores.astype(np.float32)}, {"mean-curvature": mean}
