"""The rows of one table among the joined rows, on a device: expand and its adjoint.

A GPU adds up in no fixed order: sums may differ in their last bits from run to run,
unless ``torch.use_deterministic_algorithms(True)`` has been called.
"""

import torch
from torch import Tensor

from tp_flower.device.torch_device import to_device
from tp_flower.joins.table_rows import TableRows


class DeviceRows:
    """:class:`TableRows` on a device.

    Args:
        rows: of the table.
        device: where to.

    Attributes:
        inverse_multiplicity: 1 / G_i, (n_i,); 1 where G_i = 0.
    """

    def __init__(self, rows: TableRows, device: torch.device) -> None:
        self._rows = rows.rows
        row_of = to_device(rows.row_of, device)
        self._has_missing = rows.has_missing
        # a last row stands for that of joined rows without one
        self._slots = row_of.masked_fill(row_of < 0, rows.rows)
        self.inverse_multiplicity = to_device(rows.inverse_multiplicity, device)

    def add_expanded(self, values: Tensor, total: Tensor) -> None:
        """Add the values (n_i, d_c) of the table's rows to ``total`` (N, d_c)."""
        if self._has_missing:
            values = torch.cat([values, values.new_zeros((1, values.shape[1]))])
        total += values.index_select(0, self._slots)

    def segment_sum(self, values: Tensor) -> Tensor:
        """Return sums (n_i, d_c) of values (N, d_c) over each row's joined rows."""
        out = values.new_zeros((self._rows + 1, values.shape[1]))
        out.index_add_(0, self._slots, values)
        return out[: self._rows]
