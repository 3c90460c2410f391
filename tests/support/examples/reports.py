"""A report small enough to add up by hand, and a manifest of two tables."""

from strategies.inference.manifest import Manifest, ModelPart, ModelTable
from tests.support.files import case_table
from tp_flower.joins.joining import JoinStep
from tp_flower.protocol.setup_messages import EncodedColumns
from tp_flower.reports.records import RoundReport, RunReport, TableReport
from tp_flower.settings import Settings

CASES = case_table(__file__)
TOTAL = CASES["total"]
FLIGHTS = {"min": 0, "mean": 0.9, "max": 2}
PLANES = {"min": 0, "mean": 5.4, "max": 9}
QUERY = "SELECT f.late AS label, f.hour, p.seats FROM flights AS f JOIN p ON f.p = p.id"


def small_report() -> RunReport:
    """Make the report of a set-up round and two epochs, the second of two rounds."""
    return RunReport(
        settings=Settings().to_dict(),
        chosen={"rho": 0.125, "loss": "logistic"},
        query="SELECT ...",
        tables=(
            TableReport("f", "flights", 30, 4, 2, ("EWR", "JFK"), (), FLIGHTS),
            TableReport("p", "planes", 5, 3, 1, ("registry",), ("engine",), PLANES),
        ),
        joined_rows_train=20,
        joined_rows_test=7,
        join_steps=(
            JoinStep("f", 30),
            JoinStep("p", 27, "f.p = p.id", False, 30, 0, 1.0, 1, 3, 2, 3),
        ),
        history=tuple(RoundReport(**fields) for fields in CASES["rounds"]),
        final_train={"loss": 0.25, "auc": 0.75},
        final_test={"loss": 0.375, "auc": 0.625},
        verdict="converged: it has settled",
        privacy={"delta": 1e-5, "totals": [TOTAL]},
        output_dir="/runs/1",
        started="2026-11-20T08:00:00+00:00",
        seconds=3.5,
    )


def small_manifest(
    name: str = "delays", version: str = "20261122-001500-3f9a", **changes: object
) -> Manifest:
    digest = "ab" * 32
    fields = {
        **CASES["manifest"],
        "name": name,
        "model_version": version,
        "query": QUERY,
        "settings": Settings(l2=0.01).to_dict(),
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
    }
    return Manifest(**{**fields, **changes})


def part(number, site, digest, name="flights"):
    return ModelPart(number, site, name, 0, digest)


def table(alias, name, feature, share, parts):
    return ModelTable(
        table=alias,
        name=name,
        columns={name: {feature: "DOUBLE", "id": "BIGINT"}},
        features=(f'{feature} = "{feature}"',),
        kind="linear",
        encoded=EncodedColumns({feature: 1}, True),
        parts=parts,
        mean_score=(0.1 + share,),
        share=share,
    )
