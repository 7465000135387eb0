"""Checkpoints: folders of named arrays and JSON, written whole or not at all.

`step-N/` holds the arrays as safetensors files, and `state.json`: the format's number, the step,
the caller's state, size and SHA-256 of every other file, and the SHA-256 of all that. It is written
as `.step-N.tmp` beside its final place, flushed to disk, and renamed in one step; then the text
files `last` and `best`, one line `step-N` each, are replaced, and what is no longer kept is
removed. A crash at any moment leaves every complete checkpoint complete.

This module knows arrays and JSON, not models; nothing is unpickled. `save` is a function of what it
is given alone, so it can run beside the training that goes on.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from forge import dtypes, durable
from forge.errors import CheckpointError

FORMAT = 1
STATE = "state.json"

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint folder holds: `arrays[file][name]` and the caller's `state`."""

    path: Path
    step: int
    arrays: dict[str, dict[str, npt.NDArray[Any]]]
    state: dict[str, Any]


def save(
    folder: str | Path,
    step: int,
    arrays: Mapping[str, Arrays],
    state: Mapping[str, Any],
    *,
    best: bool = False,
    keep: int = 2,
) -> Path:
    """Write `folder/step-N` and return its path.

    `arrays` maps file names to named C-contiguous arrays; the files' bytes depend on these alone.
    `state` is JSON that reads back equal. `best` moves the text file `best` here. The `keep` newest
    checkpoints and the best stay. Raises `CheckpointError` for what cannot be stored, before
    anything is written, and `OSError` when the disk fails; what was there before then stays.
    """
    folder = Path(folder)
    target = folder / f"step-{step}"
    temp = folder / f".step-{step}.tmp"
    body = {"format": FORMAT, "step": step, "state": dict(state)}
    _check_arrays(arrays)
    _check_state(body)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        temp.mkdir()
        for file, named in arrays.items():
            save_file(dict(named), temp / file)
        files = {file: list(durable.digest(temp / file)) for file in arrays}
        durable.write(temp / STATE, _render({**body, "files": files}))
        for file in arrays:
            # The safetensors library makes its files private; they get the mode of the others.
            shutil.copymode(temp / STATE, temp / file)
            durable.sync(temp / file)
        durable.sync(temp)
        _put(temp, target)
        for name in ("last", "best") if best else ("last",):
            durable.replace(folder / name, f"step-{step}\n")
        _prune(folder, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temp, ignore_errors=True)
        _refuse_to_write(target, error)
    return target


def load(path: str | Path, only: Collection[str] | None = None) -> Checkpoint:
    """Read a checkpoint folder, every byte checked against its digest.

    `only` names the array files to read and check (default: all). Raises `CheckpointError` that
    names the file and, where there is one, the newest good checkpoint beside it.
    """
    path = Path(path)
    try:
        body = _verified(path, only)
        arrays = {file: load_file(path / file) for file in body["files"]}
    except (CheckpointError, OSError, SafetensorError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"expected to read {error.filename}, got: {error.strerror}"
        others = (other for other in _steps(path.parent) if other.name != path.name)
        good = next((other for other in others if _is_good(other)), None)
        hint = "there is no other good one"
        if good is not None:
            hint = f"the newest good one is {good}, which is resumed from once {path} is removed"
        raise CheckpointError(f"[checkpoint] {reason}; {hint}") from None
    return Checkpoint(path, body["step"], arrays, body["state"])


def newest(folder: str | Path) -> Path | None:
    """The checkpoint with the highest step in a folder of checkpoints, or None.

    It may be damaged: `load` says so, rather than an older one being taken in silence.
    """
    return next(iter(_steps(Path(folder))), None)


def find(path: str | Path) -> Path:
    """The checkpoint folder that a path means.

    Itself; the one that a file `last` or `best` names; or the newest of a run folder or a folder of
    checkpoints. Raises `CheckpointError` where there is none.
    """
    path = Path(path)
    if path.is_file() and path.name in ("last", "best"):
        named = _pointed(path.parent, path.name)
        if named is not None:
            return named
    elif _is_step(path.name) or (path / STATE).exists():
        if path.is_dir():
            return path
    else:
        found = newest(path / "checkpoints") or newest(path)
        if found is not None:
            return found
    raise CheckpointError(
        f"[checkpoint] expected a run or checkpoint, got {path}, "
        + ("which holds none" if path.exists() else "which does not exist")
    )


def clean(folder: str | Path) -> None:
    """Remove what a killed save left in a folder of checkpoints. For its one writer only."""
    folder = Path(folder)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = re.fullmatch(r"\.(step-\d+|last|best)\.(tmp|old)", path.name)
        if match is None:
            continue
        if match[2] == "old" and not (folder / match[1]).exists():
            # Killed between the two renames of `_put`: the replaced checkpoint is the good one.
            path.rename(folder / match[1])
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_arrays(arrays: Mapping[str, Arrays]) -> None:
    for file, named in arrays.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"[checkpoint] expected a file name that ends in .safetensors, got {file!r}"
            )
        for name, array in named.items():
            if not dtypes.stored(array.dtype):
                raise CheckpointError(
                    f"[checkpoint] expected {name} of {', '.join(dtypes.NAMES)}, "
                    f"got {array.dtype.str}; convert it with .astype first"
                )
            # safetensors writes the wrong elements of other arrays without a word.
            if not array.flags.c_contiguous:
                raise CheckpointError(
                    f"[checkpoint] expected {name} C-contiguous, got shape {array.shape} with "
                    f"strides {array.strides}; np.ascontiguousarray copies it"
                )


def _check_state(body: dict[str, Any]) -> None:
    try:
        same = json.loads(_render(body))["state"] == body["state"]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"[checkpoint] expected a state of JSON values: {error}") from None
    if not same:
        raise CheckpointError(
            "[checkpoint] expected a state that JSON gives back equal, got tuples or keys that "
            "are no strings; use lists and strings"
        )


def _render(body: Mapping[str, Any]) -> str:
    """The only text of a state: JSON that ends with the digest of the same JSON without it."""
    text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-2]},\n "sha256": "{sha256}"\n}}\n'


def _verified(path: Path, only: Collection[str] | None = None) -> dict[str, Any]:
    """`state.json` of a checkpoint whose files (`only` those) are as they were written.

    Otherwise raises `CheckpointError`, or `OSError` for what cannot be read.
    """
    raw = (path / STATE).read_bytes()
    try:
        body: dict[str, Any] = json.loads(raw)
        written_by = body["format"]
        newer = isinstance(written_by, int) and written_by > FORMAT
        del body["sha256"]
        sound = _render(body).encode() == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        newer = sound = False
    if newer:
        raise CheckpointError(
            f"expected {path / STATE} of format {FORMAT} or older, got {written_by}, "
            "from a newer version of Forge"
        )
    if not sound:
        raise CheckpointError(f"expected {path / STATE} as it was written, got it torn or edited")
    if _is_step(path.name) and path.name != f"step-{body['step']}":
        raise CheckpointError(f"expected {path} to hold its step, got step {body['step']}")
    files = body["files"] if only is None else {file: body["files"].get(file) for file in only}
    for file, stored in files.items():
        if stored is None:
            raise CheckpointError(f"expected {file} in {path}, got {', '.join(body['files'])}")
        if list(durable.digest(path / file)) != stored:
            raise CheckpointError(
                f"expected {path / file} as it was written, got it torn or edited"
            )
    return {**body, "files": files}


def _is_good(path: Path) -> bool:
    try:
        _verified(path)
    except (CheckpointError, OSError):
        return False
    return True


def _put(temp: Path, target: Path) -> None:
    """Rename in one step; a checkpoint already there is set aside until then."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        target.rename(old)
    temp.rename(target)
    durable.sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _pointed(folder: Path, name: str) -> Path | None:
    """The checkpoint that `last` or `best` names, if it is there."""
    try:
        line = (folder / name).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return folder / line if _is_step(line) and (folder / line).is_dir() else None


def _prune(folder: Path, keep: int) -> None:
    kept = {*_steps(folder)[:keep], _pointed(folder, "best"), _pointed(folder, "last")}
    for path in _steps(folder):
        if path not in kept:
            # Renamed first, so that being killed here leaves no half a checkpoint.
            doomed = folder / f".{path.name}.tmp"
            path.rename(doomed)
            shutil.rmtree(doomed)


def _is_step(name: str) -> bool:
    return re.fullmatch(r"step-\d+", name) is not None


def _steps(folder: Path) -> list[Path]:
    """Checkpoints of a folder, newest first."""
    try:
        names = [name for name in os.listdir(folder) if _is_step(name)]
    except OSError:
        return []
    return [folder / name for name in sorted(names, key=lambda name: -int(name[5:]))]


def _refuse_to_write(target: Path, error: Exception) -> NoReturn:
    """Raise `OSError` with the system's number, which safetensors only has in its text."""
    match = re.search(r"os error (\d+)", str(error))
    number = getattr(error, "errno", None) or (int(match[1]) if match else errno.EIO)
    reason = os.strerror(number) if match or isinstance(error, OSError) else str(error)
    raise OSError(
        number, f"[checkpoint] could not write {target}: {reason}; the checkpoints before it stay"
    ) from error
