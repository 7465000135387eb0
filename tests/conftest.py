"""What all tests share: threads, hypothesis, plain output, and visible skips."""

import gc
import importlib.util
import os

# Before anything imports Numba or NumPy, which read these once. One thread is the fastest on a busy
# or small machine; tests about threads start their own processes.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from forge import errors
from forge.tensor import Device

# The same examples on every run, and no verdict that depends on the machine's speed.
settings.register_profile(
    "forge",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("forge")


@pytest.fixture(scope="session", autouse=True)
def _plain_output():
    """Tests of the command line read what a pipe would get, whatever CI sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "100")
        for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def gc_paused():
    """Nothing that earlier tests left in cycles is freed while a test measures memory."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def thread_counts():
    """1, 2, 3 and 5 threads, and the session's own afterwards."""
    from forge.backends.cpu import threads

    before = threads.get_threads()
    try:
        threads.set_threads(5)
    except errors.ArgumentError as error:
        pytest.skip(str(error))  # Numba's workqueue has only its own number
    yield (1, 2, 3, 5)
    threads.set_threads(before)


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, with the reason (`-ra` prints it).

    `@pytest.mark.torch` needs PyTorch, `@pytest.mark.torch("transformers")` that too. Such a test
    imports them in its own body, since its module is imported before it is skipped.
    """
    for item in items:
        for mark in item.iter_markers("torch"):
            for package in ("torch", *mark.args):
                if importlib.util.find_spec(package) is None:
                    item.add_marker(pytest.mark.skip(reason=f"needs {package}: run `make dev`"))
        if item.get_closest_marker("cuda"):
            try:
                Device("cuda")
            except errors.DeviceError as error:
                item.add_marker(pytest.mark.skip(reason=str(error)))
