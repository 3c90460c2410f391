"""Settings of a run: each declared once, with its default, range, readers and text."""

from tp_flower.settings.privacy import PrivacySettings
from tp_flower.settings.settings import GROUPS, KEYS, SETTINGS, Settings

__all__ = ["GROUPS", "KEYS", "SETTINGS", "PrivacySettings", "Settings"]
