"""The one thread pool: Numba's, on tbb where its wheel is installed.

Forge's kernels, and any other Numba code of the process, share it; OpenBLAS is called from inside
its loops, single-threaded, so no second pool competes for the cores. The number of threads never
changes a result: tiles have fixed sizes and partial results are added in tile order.
"""

import ctypes
import importlib.metadata
import os
import sys
import threading
from pathlib import Path

import numba
from numba.np.ufunc import parallel as pool

from forge.errors import ArgumentError

_TBB = {"linux": "libtbb.so.12", "darwin": "libtbb.12.dylib", "win32": "tbb12.dll"}


class _Applied(threading.local):
    """The thread count this Python thread has told Numba, which keeps one per thread."""

    count = -1


applied = _Applied()
# Threads that kernels run on; 0 until it is asked for.
count = 0


def set_threads(number: int) -> None:
    """Run kernels on `number` threads from now on, in every Python thread.

    Raises `ArgumentError` for less than one, and for more than NUMBA_NUM_THREADS where the pool is
    Numba's workqueue, which can't grow.
    """
    global count
    if number < 1:
        raise ArgumentError(f"[threads] expected at least 1 thread, got {number}; leave it unset")
    most = numba.config.NUMBA_NUM_THREADS
    if number > most and layer() == "workqueue":
        raise ArgumentError(
            f"[threads] expected at most {most} threads on Numba's workqueue, got {number}; "
            "install tbb, or start Python with a higher NUMBA_NUM_THREADS"
        )
    count = number
    apply()


def get_threads() -> int:
    """Threads that kernels run on."""
    global count
    count = count or default_threads()
    return count


def default_threads() -> int:
    """NUMBA_NUM_THREADS where the environment has it, else the cores this process may use."""
    named = os.environ.get("NUMBA_NUM_THREADS")
    return int(named) if named else available_cores()


def available_cores() -> int:
    """Cores this process may use: its affinity mask, cut by its control group's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return cores if quota is None else max(1, min(cores, round(quota)))


def cgroup_quota(root: Path, own: Path) -> float | None:
    """The control group's limit in cores (v2's cpu.max, v1's cfs quota), or None without one.

    `root` is where control groups are mounted, `own` the file that names this process's groups.
    Every group on the path down to the process's own can limit it; the smallest limit counts.
    """
    limits: list[float] = []
    for folder in _cgroup_folders(root, own):
        v2 = _words(folder / "cpu.max")
        if len(v2) == 2 and v2[0] != "max":
            limits.append(int(v2[0]) / int(v2[1]))
        v1 = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(v1) == 2 and int(v1[0]) > 0:
            limits.append(int(v1[0]) / int(v1[1]))
    return min(limits, default=None)


def _cgroup_folders(root: Path, own: Path) -> list[Path]:
    folders = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        relative = Path(path.lstrip("/"))
        folders += [base / part for part in (relative, *relative.parents)]
    return folders


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # an absent or unreadable file sets no limit


def layer() -> str:
    """Numba's threading layer that runs the kernels: tbb, omp or workqueue; starts the pool."""
    start()
    name: str = numba.threading_layer()
    return name


def start() -> None:
    """Start the pool once, on tbb if its library can be loaded, with a notice if it can't."""
    if pool._is_initialized:
        return
    chosen = numba.config.THREADING_LAYER
    if chosen == "default":
        load_tbb()
    numba.get_num_threads()
    taken = numba.threading_layer()
    if chosen == "default" and taken != "tbb":
        sys.stderr.write(
            f"[forge] tbb can't be loaded: kernels run on Numba's {taken} threads, up to a third "
            "slower; pip install tbb\n"
        )


def load_tbb() -> bool:
    """Load tbb's library from its wheel so that Numba finds it; False where there is none.

    The wheel puts it into the environment's lib folder, where the system's loader does not look.
    """
    name = _TBB.get(sys.platform, "")
    for path in _tbb_candidates(name):
        if path.is_file():
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue  # built for another system; Numba then names the layer it took
            return True
    return False


def _tbb_candidates(name: str) -> list[Path]:
    candidates = []
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates += [Path(str(file.locate())).resolve() for file in files if file.name == name]
    candidates.append(Path(sys.prefix) / "lib" / name)
    return candidates


def apply() -> None:
    """Tell Numba the thread count for the calling Python thread."""
    start()
    # Not `numba.set_num_threads`: it refuses more than NUMBA_NUM_THREADS, though tbb and omp don't
    # mind, and raising that limit would raise the default of the user's own Numba code.
    pool._set_num_threads(get_threads())
    applied.count = get_threads()
