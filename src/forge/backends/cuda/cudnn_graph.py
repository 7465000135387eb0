"""cuDNN's handle, and its graphs: of bfloat16 Tensors, computed in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import cudnn

from forge.backends.cuda import device


@cache
def handle() -> Any:
    """The process's handle, on Forge's stream."""
    made = cudnn.create_handle()
    cudnn.set_stream(handle=made, stream=device.stream())
    return made


def graph() -> Any:
    """An empty graph."""
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle(),
    )


def planned(made: Any) -> bool:
    """List the plans that may run a finished graph; False where cuDNN has none for this card."""
    try:
        made.validate()
        made.build_operation_graph()
        made.create_execution_plans([cudnn.heur_mode.A])
        made.check_support()
    except cudnn.cudnnGraphNotSupportedError:
        return False
    return True
