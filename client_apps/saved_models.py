"""What a site keeps of a run that went well: its part of the model, and the encoder.

Each part has a folder ``<state-dir>/models/<run>/part-<number>`` with its parameters
(``model.safetensors``) and what turns rows into their features (``model.json``: the
encoder with its keys, and the model's specification). It never leaves the site.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import safetensors.numpy

from client_apps.folders import whole_folder
from tp_flower.encoding.encoder import SiteEncoder
from tp_flower.errors import SchemaError, SiteError
from tp_flower.learning.losses import FloatArray
from tp_flower.learning.models import LocalModel, ModelSpec, build_model

VERSION: Final = 1
MODELS: Final = "models"
_FACTS, _PARAMETERS, _THETA = "model.json", "model.safetensors", "theta"


@dataclass(frozen=True)
class SavedModel:
    """One part of a trained model.

    Attributes:
        table: alias in the query.
        encoder: of the table's rows.
        spec: what kind of model it is.
        parameters: (p,).
    """

    table: str
    encoder: SiteEncoder
    spec: ModelSpec
    parameters: FloatArray

    def model(self, device: str = "auto") -> LocalModel:
        """Return the model, ready to score encoded rows."""
        model = build_model(self.spec, self.encoder.encoder.width, device)
        model.parameters = self.parameters
        return model

    def save(self, folder: Path) -> None:
        """Write the part; the folder appears whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        facts = {
            "version": VERSION,
            "table": self.table,
            "model": self.spec.to_json(),
            "encoder": self.encoder.to_json(),
        }
        parameters = {_THETA: np.ascontiguousarray(self.parameters)}
        with whole_folder(folder) as whole:
            (whole / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
            data = safetensors.numpy.save(parameters)
            (whole / _PARAMETERS).write_bytes(data)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what ``save`` wrote.

        Raises:
            SiteError: there is no such model, or it is damaged or of another version.
        """
        try:
            facts: dict[str, Any] = json.loads(
                (folder / _FACTS).read_text(encoding="utf-8")
            )
            if facts["version"] != VERSION:
                raise SiteError(
                    f"the model in {folder} is of version {facts['version']!r}, "
                    f"expected {VERSION}"
                )
            found = safetensors.numpy.load((folder / _PARAMETERS).read_bytes())
            return cls(
                table=str(facts["table"]),
                encoder=SiteEncoder.from_json(facts["encoder"]),
                spec=ModelSpec.from_json(facts["model"]),
                parameters=found[_THETA],
            )
        except FileNotFoundError:
            raise SiteError(f"there is no model in {folder}") from None
        except (OSError, KeyError, TypeError, ValueError, SchemaError) as error:
            reason = type(error).__name__
            raise SiteError(f"the model in {folder} is damaged: {reason}") from None
        except safetensors.SafetensorError:
            raise SiteError(f"the model in {folder} is damaged") from None
