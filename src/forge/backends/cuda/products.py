"""Which library's algorithm computes a product: the fastest, chosen once by timing.

The first call of a product asks the libraries for candidates, times them on the operands at hand,
and keeps the fastest in a table (`algorithms`) of this card, driver and libraries: the same machine
always chooses the same, and so does a resumed run, so the bits do not depend on a measurement made
anew.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from nvmath.bindings import cublasLt

from forge import dtypes
from forge.backends import notice
from forge.backends.cuda import cudnn_linear, device
from forge.backends.cuda.algorithms import Kernel, RefusedError, Table
from forge.backends.cuda.cublaslt import Matmul, Product
from forge.cache import folder
from forge.errors import DeviceError
from forge.tensor import Device, empty

# Below this many multiply-adds a product is over before a difference between candidates shows;
# from the second number on it draws so much power that a GPU lowers its clock.
WORTH_TIMING = 1 << 22
HEAVY = 1 << 34
ROUNDS = 3
# Calls of a light candidate, and milliseconds of a heavy one, in a round.
CALLS = 5
LOAD = 10.0
# Seconds of work after which a GPU is no faster than it can be for long, and of rest after which it
# is again. Algorithms that were chosen cool made a step 0.4 to 0.8 % longer on an H200.
HEATING, COOLED = 1.0, 3.0


def run(
    product: Product,
    a: int,
    b: int,
    out: int,
    *,
    alpha: float = 1.0,
    bias: int = 0,
    pre: int = 0,
) -> bool:
    """Compute a product of matrices at these addresses; False where no library has a kernel."""
    together = a | b | out | bias | pre
    plan = _plan(product, min(together & -together, 256))
    if plan.kernel is None and not plan.absent:
        if plan.recall(a, b, out, alpha, bias, pre):
            return True
        plan.choose(a, b, bias, pre)
    if plan.kernel is None:
        return False
    try:
        plan.kernel(a, b, out, alpha, bias, pre)
    except RefusedError as error:
        raise missing(product) from error
    return True


@cache
def chosen_for() -> str:
    """The card, driver and libraries that an algorithm is chosen for."""
    card = device.card()
    libraries = f"cuBLASLt {cublasLt.get_version()}, cuDNN {cudnn_linear.version()}"
    return f"{card.name}, driver {card.driver}, {libraries}"


def begin_run(algorithms: Mapping[str, str]) -> None:
    """From here on a run's algorithms, by product, go before the machine's."""
    _table().begin_run(algorithms)
    _plan.cache_clear()


def used() -> dict[str, str]:
    """The algorithms, by product, of all products since the run began."""
    return dict(_table().used)


def missing(product: Product) -> DeviceError:
    """The error for a product that no library has a kernel for."""
    return DeviceError(
        f"[matmul] expected a library with a kernel, got none for {product}; "
        "pad the sizes to multiples of 8"
    )


class _Plan:
    """A product, and the kernel for it: None before it is chosen, and where it is `absent`."""

    def __init__(self, product: Product, alignment: int) -> None:
        self._product = product
        self._alignment = alignment
        self._key = " ".join(map(str, (*product, alignment)))
        self._matmul = Matmul(product, alignment)
        self.kernel: Kernel | None = None
        self.absent = False

    def recall(self, a: int, b: int, out: int, alpha: float, bias: int, pre: int) -> bool:
        """Compute by the table's algorithm; False where it has none that its library takes."""
        algorithm = _table().find(self._key)
        if algorithm is None:
            return False
        try:
            kernel = self._load(algorithm)
            kernel(a, b, out, alpha, bias, pre)
        except RefusedError:
            _table().refuse(self._key)
            return False
        self.kernel = kernel
        _table().use(self._key, algorithm, tuned=False)
        return True

    def choose(self, a: int, b: int, bias: int, pre: int) -> None:
        """Time the candidates and note the fastest in the table."""
        device.eager("new product")
        p = self._product
        size = p.batch * p.m * p.n * p.k
        candidates = self._matmul.candidates()
        if size >= HEAVY and cudnn_linear.serves(p, self._alignment):
            candidates += cudnn_linear.candidates(p)
        self.absent = not candidates
        if self.absent:
            return
        chosen = candidates[0]
        if len(candidates) == 1 or size < WORTH_TIMING:
            self.kernel = self._load(chosen)
        else:
            chosen, self.kernel = self._fastest(candidates, a, b, bias, pre, heavy=size >= HEAVY)
        _table().use(self._key, chosen, tuned=True)

    def _load(self, algorithm: str) -> Kernel:
        if cudnn_linear.wrote(algorithm):
            return cudnn_linear.kernel(self._product, algorithm)
        return self._matmul.kernel(algorithm)

    def _fastest(
        self, candidates: list[str], a: int, b: int, bias: int, pre: int, *, heavy: bool
    ) -> tuple[str, Kernel]:
        """The candidate of least time in the middle one of several rounds; out is a stand-in."""
        p = self._product
        room = ((p.batch - 1) * p.step_c + p.m * p.ldc) * dtypes.ITEMSIZE[p.out_dtype]
        stand_in = empty((room,), "bool", Device("cuda"))
        calls = {}
        for algorithm in candidates:
            try:
                kernel = self._load(algorithm)
                kernel(a, b, stand_in.pointer, 1.0, bias, pre)
                device.synchronize()
            except RefusedError:
                continue
            calls[algorithm] = (kernel, a, b, stand_in.pointer, 1.0, bias, pre)
        if not calls:
            raise missing(p)
        number = CALLS
        if heavy:
            notice.say_once("timing products of these sizes on this GPU, once, under load…")
            first = next(iter(calls.values()))
            _heat(first)
            number = math.ceil(LOAD / _time(first, CALLS))
        # In turn, since the clock drifts.
        rounds = [
            {name: _time(call, number) for name, call in calls.items()} for _ in range(ROUNDS)
        ]
        if heavy:
            _heated[0] = time.monotonic()
        best = min(calls, key=lambda name: median(times[name] for times in rounds))
        return best, calls[best][0]


# When the GPU was last under the load of timing.
_heated = [-math.inf]


def _heat(call: tuple[Any, ...]) -> None:
    """Let the GPU work until its clock is what its power allows, unless it just did."""
    start = time.monotonic()
    if start - _heated[0] < COOLED:
        return
    while time.monotonic() - start < HEATING:
        _time(call, CALLS)


def _time(call: tuple[Any, ...], number: int) -> float:
    """Milliseconds of a call, the mean of several."""
    kernel, *arguments = call
    start = device.Event(timing=True).record()
    for _ in range(number):
        kernel(*arguments)
    return device.Event(timing=True).record().since(start) / number


@cache
def _plan(product: Product, alignment: int) -> _Plan:
    return _Plan(product, alignment)


@cache
def _table() -> Table:
    name = hashlib.sha256(chosen_for().encode()).hexdigest()[:16]
    return Table(folder() / f"products-{name}.json")
