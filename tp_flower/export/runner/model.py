"""An exported model: parts that say something of tables' rows, and what combines it."""

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tp_flower.export.runner.answers import predictions
from tp_flower.export.runner.joined import JoinedParts
from tp_flower.export.runner.rows import Array, ExportError, Json, read_rows
from tp_flower.export.runner.scoring import Partial, score_rows
from tp_flower.export.runner.trees import NO_BIN, sum_of_trees

KEPT = "keep."
"""What begins the names of columns that go with the predictions."""


class Model:
    """An exported model, or the parts of it that one site has.

    Attributes:
        about: what combines the tables, `model.json`; {} where the archive has none.
        trees: arrays of the trees that read the bins of all tables.
        parts: by name, how a table's rows are read, encoded and scored: the `part.json`
            and the arrays of each table, or of each of its shards.
    """

    def __init__(self, archive: str | os.PathLike[str]) -> None:
        files = dict(_files_of(Path(archive)))
        self.about: Json = json.loads(files.get("model.json", b"{}"))
        self.trees = read_arrays(files.get("trees.npz"))
        self.parts: dict[str, Json] = {}
        for path in sorted(files):
            folder, _, name = path.rpartition("/")
            if name == "part.json":
                part = json.loads(files[path])
                part["arrays"] = read_arrays(files.get(f"{folder}/part.npz"))
                self.parts[part["part"]] = part

    def predict(
        self, tables: Mapping[str, Any], keep: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Return the predictions of the joined rows, (N,) each, by name.

        Args:
            tables: by part, the file, the SQL or the data frame of its rows.
            keep: columns of the label's table that go with the predictions.

        Raises:
            ExportError: parts are missing, or a table lacks columns.
        """
        self._check_names("predict", tables)
        read = {
            name: read_rows(part, tables[name], self._kept(part, keep))
            for name, part in self.parts.items()
        }
        joined = JoinedParts(self.about, read)
        partials = {}
        if divided := self.about["divided"]:
            # scores of other tables read the regions of its rows
            for name in joined.parts_of(divided):
                partials[name] = score_rows(self.parts[name], read[name])
                read[name] |= {"regions": partials[name]["regions"]}
        for name, part in self.parts.items():
            if name not in partials:
                wanted = joined.wanted(part) if part["regions"] > 1 else None
                partials[name] = score_rows(part, read[name], wanted)
        combined = JoinedParts(self.about, partials)
        combined.rows = joined.rows
        return self._combined(combined)

    def score(self, name: str, source: Any, keep: Sequence[str] = ()) -> Partial:
        """Return what a part says of its rows: their keys, scores (n, R, w), and so on.

        With `offset` (n,), `regions` (n,), `factors` (n, f) and `bins` (n, c), where
        the model has such. The keys are canonical texts, in the clear.
        """
        if name not in self.parts:
            raise ExportError(f"no part {name!r} is here: {', '.join(self.parts)}")
        part = self.parts[name]
        return score_rows(part, read_rows(part, source, self._kept(part, keep)))

    def combine(self, partials: Mapping[str, Partial]) -> dict[str, Array]:
        """Return the predictions of the joined rows from what the parts say."""
        self._check_names("combine", partials)
        return self._combined(JoinedParts(self.about, partials))

    def _combined(self, joined: JoinedParts) -> dict[str, Array]:
        """Return the predictions of joined rows."""
        about = self.about
        label_table = about["label-table"]
        base = np.array(about["base"])
        scores = base + sum(joined.scores_of(table) for table in joined.rows)
        if about["bins"]:
            scores = self._add_trees(scores, base, joined)
        if about["factors"]:
            first, second = (joined.gather(t, "factors") for t in about["factors"])
            scores = scores + (first * second).sum(axis=1, keepdims=True)
        names = joined.names_of(label_table)
        if "offset" in names:
            scores = scores + joined.gather(label_table, "offset")[:, None]
        of_keep = {
            name.removeprefix(KEPT): joined.gather(label_table, name)
            for name in names
            if name.startswith(KEPT)
        }
        predicted = predictions(about, joined.rows[label_table], scores)
        if clash := sorted(of_keep.keys() & predicted.keys()):
            raise ExportError(
                f"{clash[0]!r} is the name of a column of predictions: give it another "
                "one in SQL, such as (SELECT row AS number, * FROM 'orders.csv')"
            )
        return of_keep | predicted

    def name_of(self, number: int) -> str:
        """Return the name of the part of a number."""
        for part in self.about.get("parts", ()):
            if part["number"] == number:
                return str(part["part"])
        raise ExportError(f"the model has no part {number}: it is another model's")

    def _add_trees(self, scores: Array, base: Array, joined: JoinedParts) -> Array:
        """Return scores (N, w) with those of the trees that read all tables' bins."""
        bins = self.about["bins"]
        numbers = [joined.gather(table, "bins", NO_BIN) for table in bins["tables"]]
        values = np.concatenate(numbers, axis=1).astype(np.float32)
        values[values == NO_BIN] = np.nan
        share = bins["share"]
        of_trees = sum_of_trees(self.trees, (0, bins["trees"]), values.T, len(base))
        total: Array = share * scores + (1.0 - share) * base + of_trees
        return total

    def _kept(self, part: Json, keep: Sequence[str]) -> Sequence[str]:
        """Return the columns that go with the predictions, of the label's table."""
        label_table = self.about.get("label-table", part["table"])
        return keep if part["table"] == label_table else ()

    def _check_names(self, task: str, parts: Mapping[str, Any]) -> None:
        if not self.about:
            raise ExportError(
                "the archive has parts of tables alone, and no model.json: score their "
                f"rows here, and {task} by the archive of whoever trained the model"
            )
        names = [part["part"] for part in self.about["parts"]]
        if sorted(names) != sorted(parts):
            raise ExportError(
                f"{task} takes the parts {', '.join(names)}, and was given "
                f"{', '.join(parts) or 'none'}"
            )
        absent = [name for name in names if name not in self.parts]
        if task == "predict" and absent:
            raise ExportError(
                f"the archive has no part {', '.join(absent)}: its site scores its "
                "rows by its own archive, and `combine` takes what it says"
            )


def read_arrays(content: bytes | None) -> dict[str, Array]:
    """Return the arrays of an npz file's content; None has none."""
    if content is None:
        return {}
    with np.load(io.BytesIO(content), allow_pickle=False) as opened:
        return {name: opened[name] for name in opened.files}


def _files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and content of an archive's files, or of a folder's."""
    if archive.is_dir():
        for file in archive.rglob("*.*"):
            yield file.relative_to(archive).as_posix(), file.read_bytes()
        return
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            yield name, opened.read(name)
