"""Heads: from the tables' vectors to the scores of joined rows, one file a head."""

from tp_flower.heads.head import Contribution, Head, table_part
from tp_flower.heads.registry import HEADS, head_of
from tp_flower.heads.sum import Sum

__all__ = ["HEADS", "Contribution", "Head", "Sum", "head_of", "table_part"]
