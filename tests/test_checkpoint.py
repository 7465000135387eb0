"""Checkpoints: exact, deterministic, atomic, and never read wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from forge import checkpoint
from forge.checkpoint import clean, find, load, newest, save
from forge.errors import CheckpointError

STATE = {"sample": 4000, "config": {"lr": 0.1 + 0.2}, "best": None, "names": ["a", "é"]}


def arrays(value=1.0):
    return {
        "model.safetensors": {
            "wte": np.full((3, 4), value, np.float32),
            "scalar": np.array(7, np.int64),
            "empty": np.zeros((0, 2), np.float32),
        },
        "optimizer.safetensors": {
            "m": np.arange(5, dtype=np.float64) * value,
            "half": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
            "flag": np.array([True, False]),
        },
    }


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


def test_comes_back_exactly(tmp_path):
    path = save(tmp_path / "checkpoints", 12, arrays(1 / 3), STATE)
    assert path == tmp_path / "checkpoints" / "step-12"
    assert steps(path) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    found = load(path)
    assert (found.step, found.state) == (12, STATE)
    for file, named in arrays(1 / 3).items():
        assert found.arrays[file].keys() == named.keys()
        for name, array in named.items():
            got = found.arrays[file][name]
            assert got.dtype == array.dtype
            assert got.shape == array.shape
            assert got.tobytes() == array.tobytes()
            assert got.flags.writeable


def test_files_depend_on_the_arrays_alone(tmp_path):
    a = save(tmp_path / "a", 1, arrays(), STATE)
    reordered = {file: dict(reversed(named.items())) for file, named in arrays().items()}
    b = save(tmp_path / "b", 999, reordered, {"else": 1})
    for file in arrays():
        assert (a / file).read_bytes() == (b / file).read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_all_files_have_the_same_mode(tmp_path):
    path = save(tmp_path, 1, arrays(), STATE)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


def test_only_some_files(tmp_path):
    path = save(tmp_path, 1, arrays(), STATE)
    (path / "optimizer.safetensors").unlink()
    assert list(load(path, only=["model.safetensors"]).arrays) == ["model.safetensors"]
    assert load(path, only=[]).state == STATE
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors, got: No such file"):
        load(path)
    with pytest.raises(CheckpointError, match=r"expected ema\.safetensors in .*got model"):
        load(path, only=["ema.safetensors"])


# ---- what cannot be stored


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (np.zeros((4, 6)).T, "C-contiguous"),
        (np.zeros(8)[::2], "C-contiguous"),
        (np.asfortranarray(np.zeros((2, 3))), "C-contiguous"),
        (np.zeros(3, ">f4"), "got >f4"),
        (np.zeros(3, np.complex64), "got <c8"),
        (np.array([None]), "got |O"),
    ],
)
def test_arrays_that_would_be_stored_wrong(tmp_path, array, part):
    with pytest.raises(CheckpointError, match=r"\[checkpoint\] expected w ") as caught:
        save(tmp_path / "c", 1, {"model.safetensors": {"w": array}}, {})
    assert part in str(caught.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "state", [{"x": float("nan")}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": np.float32(1)}, {"x": set()}]
)
def test_states_that_json_would_change(tmp_path, state):
    with pytest.raises(CheckpointError, match="expected a state"):
        save(tmp_path / "c", 1, arrays(), state)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("file", ["model.bin", "../model.safetensors", "a/b.safetensors"])
def test_file_names(tmp_path, file):
    with pytest.raises(CheckpointError, match="file name"):
        save(tmp_path / "c", 1, {file: {}}, {})


# ---- keeping and finding


def test_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, arrays(), {}, best=step in (1, 3), keep=2)
    assert steps(tmp_path) == ["best", "last", "step-3", "step-6", "step-7"]
    assert (tmp_path / "best").read_text() == "step-3\n"
    assert (tmp_path / "last").read_text() == "step-7\n"
    assert newest(tmp_path) == tmp_path / "step-7"


def test_newest_is_by_number(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, arrays(), {}, keep=9)
    assert newest(tmp_path) == tmp_path / "step-100"
    assert newest(tmp_path / "absent") is None


def test_find_takes_what_people_type(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    save(folder, 5, arrays(), {}, best=True)
    last = save(folder, 6, arrays(), {})
    assert find(tmp_path / "run") == find(folder) == find(last) == find(folder / "last") == last
    assert find(folder / "best") == folder / "step-5"
    last.rename(tmp_path / "released")
    assert load(find(tmp_path / "released")).step == 6
    for path, part in (("absent", "does not exist"), (".", "holds none")):
        with pytest.raises(CheckpointError, match=part):
            find(tmp_path / path)
    (folder / "best").write_bytes(b"\xff../../x")
    with pytest.raises(CheckpointError):
        find(folder / "best")


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, arrays(1), {})
    save(tmp_path, 1, arrays(2), {"second": True})
    found = load(tmp_path / "step-1")
    assert found.state == {"second": True}
    assert found.arrays["model.safetensors"]["wte"][0, 0] == 2
    assert steps(tmp_path) == ["last", "step-1"]


# ---- damage


def test_every_truncation_and_flipped_byte_is_refused(tmp_path):
    path = save(tmp_path, 3, arrays(), STATE)
    rng = np.random.default_rng(0)
    cases = 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        broken = [whole[:length] for length in range(len(whole))]
        for position, byte in enumerate(whole):
            for flip in rng.choice(np.arange(1, 256), 2, replace=False):
                other = byte ^ int(flip)
                broken.append(whole[:position] + bytes([other]) + whole[position + 1 :])
        broken += [whole + b"\0", whole + b"\n"]
        for data in broken:
            file.write_bytes(data)
            with pytest.raises(CheckpointError, match=file.name):
                load(path)
        cases += len(broken)
        file.write_bytes(whole)
    assert cases >= 2000
    assert load(path).state == STATE


def test_damage_is_named_and_the_newest_good_one_offered(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, arrays(), {}, keep=9)
    for step, file in ((3, "state.json"), (4, "model.safetensors")):
        with (tmp_path / f"step-{step}" / file).open("ab") as torn:
            torn.write(b"\0")
    assert newest(tmp_path) == tmp_path / "step-4"
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "step-4")
    message = str(caught.value)
    assert message.startswith(f"[checkpoint] expected {tmp_path / 'step-4' / 'model.safetensors'}")
    assert f"; the newest good one is {tmp_path / 'step-2'}, " in message
    assert message.endswith(f"once {tmp_path / 'step-4'} is removed")


@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "optimizer.safetensors"])
def test_missing_file(tmp_path, file):
    path = save(tmp_path, 1, arrays(), STATE)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}, got: No such file"):
        load(path)
    (path / file).mkdir()
    with pytest.raises(CheckpointError, match=f"{file}, got: Is a directory"):
        load(path)


def test_files_of_two_checkpoints_mixed(tmp_path):
    first = save(tmp_path, 1, arrays(1), STATE)
    second = save(tmp_path, 2, arrays(2), STATE)
    (first / "model.safetensors").replace(second / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors as it was written"):
        load(second)
    (first / "state.json").replace(second / "state.json")
    with pytest.raises(CheckpointError, match="to hold its step, got step 1"):
        load(second)


def test_newer_format(tmp_path, monkeypatch):
    path = save(tmp_path, 1, arrays(), STATE)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    with pytest.raises(CheckpointError, match="format 0 or older, got 1, from a newer version"):
        load(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", "[" * 100_000, '{"format": []}'])
def test_state_that_is_other_json(tmp_path, text):
    path = save(tmp_path, 1, arrays(), STATE)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json as it was written"):
        load(path)


def test_state_is_for_people_too(tmp_path):
    path = save(tmp_path, 1, arrays(), STATE)
    body = json.loads((path / "state.json").read_text())
    assert body["format"] == 1
    assert body["step"] == 1
    assert body["state"] == STATE
    assert body["files"]["model.safetensors"][0] == (path / "model.safetensors").stat().st_size


# ---- crashes


class Killed(BaseException):
    """The process ends here: nothing may catch it."""


@pytest.fixture(scope="module")
def kill_at():
    """Ends the process, as it were, at the nth call that touches a folder, by Python's audit."""
    state = {"folder": None, "left": 0}
    touching = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod"}

    def hook(event, arguments):
        if state["folder"] is None or event not in touching:
            return
        # Inside a folder that is being removed, names are relative to it.
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | Path) else ""
        if state["folder"] in path or not os.path.isabs(path):
            state["left"] -= 1
            if state["left"] == 0:
                raise Killed

    def arm(folder, n):
        state.update(folder=str(folder) if folder else None, left=n)

    sys.addaudithook(hook)
    return arm


@pytest.mark.parametrize("step", [2, 3], ids=["same step again", "new step"])
def test_killed_at_every_moment(tmp_path, kill_at, step):
    kills = 0
    for n in range(1, 200):
        folder = tmp_path / str(n)
        save(folder, 1, arrays(1), {})
        save(folder, 2, arrays(2), {}, best=True)
        kill_at(folder, n)
        try:
            save(folder, step, arrays(9), {}, best=True, keep=1)
        except Killed:
            kills += 1
        else:
            break
        finally:
            kill_at(None, 0)
        clean(folder)
        value = load(newest(folder)).arrays["model.safetensors"]["wte"][0, 0]
        assert value in (2, 9)
        assert not [name for name in steps(folder) if name.startswith(".")]
        for path in folder.glob("step-*"):
            load(path)
        for pointer in ("last", "best"):
            load(find(folder / pointer))
        save(folder, 4, arrays(4), {}, keep=1)
        assert load(find(folder)).step == 4
    assert 10 < kills < 199


FULL = """
import errno, resource, sys
import numpy as np
from forge.checkpoint import save
save(sys.argv[1], 1, {"model.safetensors": {"w": np.ones(10)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
big = {"model.safetensors": {"w": np.ones(int(sys.argv[2]))}}
try:
    save(sys.argv[1], 2, big, {"padding": "x" * int(sys.argv[3])})
except OSError as error:
    print(error.errno == errno.EFBIG, error.strerror)
"""


@pytest.mark.parametrize("sizes", [("100000", "1"), ("1", "10000")], ids=["arrays", "state"])
def test_disk_full(tmp_path, sizes):
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), *sizes], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.startswith(f"True [checkpoint] could not write {tmp_path / 'step-2'}: ")
    assert steps(tmp_path) == ["last", "step-1"]
    assert load(find(tmp_path)).step == 1
