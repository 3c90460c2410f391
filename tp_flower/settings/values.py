"""All settings of a run as one record, unchecked."""

from dataclasses import dataclass, field
from typing import Final

from tp_flower.methods import METHODS, Method
from tp_flower.settings.coreset import CoresetSettings
from tp_flower.settings.data import DataSettings
from tp_flower.settings.declare import Setting, declared
from tp_flower.settings.model import ModelSettings
from tp_flower.settings.personalised import PersonalisedSettings
from tp_flower.settings.privacy import PRIVACY_SETTINGS, PrivacySettings
from tp_flower.settings.run import RunSettings, SiteSettings
from tp_flower.settings.training import AdmmSettings, SgdSettings

GROUPS: Final = (
    DataSettings,
    RunSettings,
    SiteSettings,
    ModelSettings,
    AdmmSettings,
    SgdSettings,
    CoresetSettings,
    PersonalisedSettings,
)
"""Groups whose keys have no prefix, in the order of the run config."""

PLAIN_SETTINGS: Final[tuple[Setting, ...]] = tuple(
    item for group in GROUPS for item in declared(group)
)
"""Settings of these groups."""

SETTINGS: Final = (*PLAIN_SETTINGS, *PRIVACY_SETTINGS)
KEYS: Final = tuple(item.key for item in SETTINGS)
"""Keys of the run config, in its order."""


@dataclass(frozen=True)
class SettingValues(
    DataSettings,
    RunSettings,
    SiteSettings,
    ModelSettings,
    AdmmSettings,
    SgdSettings,
    CoresetSettings,
    PersonalisedSettings,
):
    """Values of all settings, each of which is allowed by itself."""

    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    @property
    def method(self) -> Method:
        """The method that the strategy names."""
        return METHODS[self.strategy]

    @property
    def family(self) -> str:
        """Whose messages the strategy uses: "admm", "sgd", "coreset" or "personal"."""
        return self.method.family

    @property
    def epochs(self) -> int:
        """The number of epochs, with 0 resolved to the strategy's default."""
        return self.num_epochs or self.method.epochs

    @property
    def coreset_rows(self) -> int:
        """The joined rows that are drawn to train on; 0 where all are trained on."""
        return self.coreset_size or self.method.coreset_size

    def model_of(self, table: str) -> str:
        """Return the model of one table, named by its alias in the query."""
        # identifiers are compared as DuckDB does: without case
        models = {alias.lower(): model for alias, model in self.models}
        return models.get(table.lower(), self.model)
