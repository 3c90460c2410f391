"""A manifest of two tables, small enough to read."""

from strategies.inference.manifest import Manifest, ModelPart, ModelTable
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.encodings import NumberEncoding
from tp_flower.settings import Settings

QUERY = "SELECT f.late AS label, f.hour, p.seats FROM flights AS f JOIN p ON f.p = p.id"


def small_manifest(
    name: str = "delays", version: str = "20261122-001500-3f9a", **changes: object
) -> Manifest:
    digest = "ab" * 32
    fields = {
        "name": name,
        "model_version": version,
        "created": "2026-11-22T00:15:00+00:00",
        "status": "completed",
        "query": QUERY,
        "settings": Settings(l2=0.01).to_dict(),
        "label_table": "f",
        "label": '"late"',
        "loss": "logistic",
        "classes": ("false", "true"),
        "base_score": (-1.25,),
        "tables": (
            table(
                "f",
                "flights",
                "hour",
                0.75,
                (part(0, "EWR", digest), part(1, "JFK", "")),
            ),
            table("p", "p", "seats", 0.25, (part(2, "registry", digest, "p"),)),
        ),
        "train": {"loss": 0.5, "auc": 0.75},
        "test": {"loss": 0.625},
        "joined_rows": 20,
        "versions": {"tp_flower": "0.1", "numpy": "2.0"},
    }
    return Manifest(**{**fields, **changes})


def part(number, site, digest, name="flights"):
    return ModelPart(number, site, name, 0, digest)


def table(alias, name, feature, share, parts):
    encoding = NumberEncoding(feature, 12.0, 5.0, 12.0)
    return ModelTable(
        table=alias,
        name=name,
        columns={name: {feature: "DOUBLE", "id": "BIGINT"}},
        features=(f'{feature} = "{feature}"',),
        kind="linear",
        saved_encoder=TableEncoder(alias, (encoding,)).to_json(),
        parts=parts,
        mean_score=(0.1 + share,),
        share=share,
    )
