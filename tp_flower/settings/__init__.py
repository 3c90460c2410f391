"""Settings of a run: each declared once, with its default, range, readers and text."""

from tp_flower.settings.privacy import PrivacySettings
from tp_flower.settings.rules import is_read
from tp_flower.settings.settings import Settings, all_settings, groups, keys

__all__ = ["PrivacySettings", "Settings", "all_settings", "groups", "is_read", "keys"]
