"""Fixtures that all tests share: one server of each kind per session."""

from tests.servers import mariadb, postgresql

__all__ = ["mariadb", "postgresql"]
