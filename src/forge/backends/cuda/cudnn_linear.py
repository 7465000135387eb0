"""A linear layer with gelu by cuDNN, whose kernels are compiled for it: bfloat16.

Its epilogue costs less than cuBLASLt's: 0.58 ms against 0.69 for GPT-2's 65,536 rows of 768 into
3,072, on an H200 at sustained clocks. An algorithm is written as "cudnn" and the name of a plan.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cudnn

from forge.backends.cuda import cudnn_graph, device
from forge.backends.cuda.algorithms import CUDNN, Kernel, RefusedError, intact
from forge.backends.cuda.cublaslt import Product
from forge.errors import installing
from forge.tensor import Device, empty

# What the graph calls its tensors.
X, W, BIAS, PRE, OUT = range(1, 6)
# Bytes: what cuDNN takes for granted of every address.
ALIGNMENT = 16
# Plans that are compiled and timed, half a second each; on an H200 the sixth was the best.
CANDIDATES = 6
# What the frontend calls a plan that it leaves to the library to choose.
UNNAMED = f"{CUDNN}backend_heuristics"


def version() -> int:
    """The library's; raises `DeviceError` where there is none."""
    try:
        number: int = cudnn.backend_version()
    except RuntimeError as error:
        raise device.absent(f"no cuDNN ({error})", installing("cuda")) from error
    return number


def serves(product: Product, alignment: int) -> bool:
    """Whether it is a layer of this kind, of matrices without gaps."""
    p = product
    plain = (p.lda, p.ldb, p.ldc, p.trans_a, p.trans_b, p.batch) == (p.k, p.n, p.n, False, False, 1)
    kinds = p.dtype == p.out_dtype == "bfloat16"
    return p.epilogue == "bias gelu pre" and plain and kinds and alignment >= ALIGNMENT


def wrote(algorithm: str) -> bool:
    """Whether an algorithm is one of these."""
    return algorithm.startswith(CUDNN)


def candidates(product: Product) -> list[str]:
    """The plans that the library holds for best, but for those whose name says no plan."""
    written = [CUDNN + name for name in _plans(product)[1]]
    return [each for each in written if intact({"": each}) and each != UNNAMED][:CANDIDATES]


def kernel(product: Product, algorithm: str) -> Kernel:
    """This layer by one plan, compiled now; its alpha is 1.

    Raises `RefusedError` where the library does not offer the plan.
    """
    graph, names = _plans(product)
    name = algorithm.removeprefix(CUDNN)
    if name not in names:
        raise RefusedError
    device.eager("new plan of cuDNN")
    index = names.index(name)
    try:
        graph.build_plan_at_index(index)
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RefusedError from error
    size = graph.get_workspace_size_plan_at_index(index)

    def run(x: int, w: int, out: int, _alpha: float, bias: int, pre: int) -> None:
        addresses = {X: x, W: w, BIAS: bias, PRE: pre, OUT: out}
        workspace = empty((size,), "bool", Device("cuda"))
        graph.execute_plan_at_index(
            addresses, workspace.pointer, index, handle=cudnn_graph.handle()
        )

    return run


@cache
def _plans(product: Product) -> tuple[Any, list[str]]:
    """The graph of a layer, and the names of its plans, the most promising first."""
    m, n, k = product.m, product.n, product.k
    graph = cudnn_graph.graph()
    x, w, bias = (
        graph.tensor(name=name, uid=uid, dim=[1, *shape], stride=[shape[0] * shape[1], shape[1], 1])
        for name, uid, shape in (("x", X, (m, k)), ("w", W, (k, n)), ("bias", BIAS, (1, n)))
    )
    pre = graph.add(a=graph.matmul(A=x, B=w, name="product"), b=bias, name="pre")
    out = graph.gelu_approx_tanh(input=pre, name="gelu")
    for tensor, uid in ((pre, PRE), (out, OUT)):
        tensor.set_uid(uid).set_output(True).set_dim([1, m, n]).set_stride([m * n, n, 1])
        tensor.set_data_type(cudnn.data_type.BFLOAT16)
    if not cudnn_graph.planned(graph):
        return graph, []
    count = graph.get_execution_plan_count()
    return graph, [graph.get_plan_name_at_index(i) for i in range(count)]
