"""`forge kernels`."""

from __future__ import annotations

import json
from typing import Annotated

from rich.table import Table

from forge.backends import registry
from forge.cli.flags import JSON
from forge.cli.output import Console


def kernels(*, json_: Annotated[bool, JSON] = False) -> int:
    """Show which implementation serves which op, by device and dtype.

    `reference` is the plain NumPy definition, which stands in where a device has no kernel of its
    own: correct, and slow.

    Parameters
    ----------
    json_
        Print one JSON document.
    """
    rows = registry.report()
    if json_:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return 0
    served = {(row.kernel, row.device, row.dtype): row.implementation for row in rows}
    # The reference serves itself: no column needed.
    columns = dict.fromkeys((r.device, r.dtype) for r in rows if r.device != "reference")
    names = dict.fromkeys(row.kernel for row in rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True, overflow="ignore", min_width=max(map(len, names)))
    for device, dtype in columns:
        table.add_column(f"{device}\n{dtype}")
    for kernel in names:
        table.add_row(kernel, *(served[kernel, *column] for column in columns))
    Console().print(table)
    return 0
