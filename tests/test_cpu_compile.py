"""How the CPU's kernels are compiled, stored, found again, and prepared for a command."""

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numba import prange

import forge
from forge import cache
from forge.backends.cpu import (
    compiler,
    embedding,
    jit,
    layout,
    loops,
    micro,
    pointwise,
    prepare,
    quantized,
    reduce,
    store,
)
from forge.cli import main
from forge.errors import DeviceError

f32 = np.float32
PACKAGE = Path(jit.__file__).parent

# It has no main guard, as a user's script may not.
PROGRAM = """
import numpy as np
from forge.backends.cpu import pointwise, prepare, reduce
from forge.tensor import tensor
prepare.fill([each["float32", "float32"] for each in (pointwise._scale, reduce._sum_rows)])
x = tensor(np.ones((70, 3), np.float32))
total = tensor(np.zeros(3, np.float32))
reduce.sum_rows(x, out=total)
pointwise.scale(total, 2.0, out=total)
print(total.numpy().tolist())
"""
RESULT = "[140.0, 140.0, 140.0]"
# The same without filling the cache first.
ALONE = PROGRAM.replace("prepare.fill", "list")
COMPILING = "[forge] compiling 2 CPU kernels for this machine, once (about 1 s)…\n"
EACH = "[forge] compiling CPU kernels for this machine, once, each at its first use…\n"


def start(code: str, home: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, home: Path, **environment: str) -> tuple[str, str]:
    process = start(code, home, **environment)
    out, notices = process.communicate(timeout=300)
    assert process.returncode == 0, notices
    return out.strip(), notices


def stored(home: Path) -> dict[str, tuple[str, ...]]:
    """Names of the kernels in a cache, with the keys of each."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted((home / "forge" / "kernels").glob("*.kernel")):
        name, _, key = path.stem.rpartition("-")
        found[name] = (*found.get(name, ()), key)
    return found


# ---- The files ----


def test_an_edit_recompiles_what_imports_the_file_and_nothing_else(tmp_path):
    copy = tmp_path / "src"
    shutil.copytree(Path(forge.__file__).parent, copy / "forge")
    package = copy / "forge" / "backends" / "cpu"
    code = """
import numpy as np
from forge.backends.cpu import layout, loss
x = np.full((1, 1, 3), 2, np.float32)
layout.merge["float32"](x, out := np.empty_like(x), 0)
loss._weighted_sum(x[0, 0], np.ones(1, np.float32), total := np.empty(1, np.float32))
print(out.ravel().tolist(), total.tolist())
"""
    # Away from its home the same source has the same key.
    here = {"PYTHONPATH": str(copy)}
    assert run(code, tmp_path) == ("[2.0, 2.0, 2.0] [6.0]", EACH)
    assert run(code, tmp_path, **here) == ("[2.0, 2.0, 2.0] [6.0]", "")
    before = stored(tmp_path)
    with (package / "mathlib.py").open("a") as file:
        file.write("# imported by the losses, by way of the products\n")
    assert run(code, tmp_path, **here) == ("[2.0, 2.0, 2.0] [6.0]", EACH)
    after = stored(tmp_path)
    assert after["layout.merge"] == before["layout.merge"]
    assert len(after["loss._weighted_sum"]) == 2
    # The helper itself, in the kernel's own file and in one it imports.
    helper = package / "layout.py"
    helper.write_text(helper.read_text().replace("out[i] = x[i]", "out[i] = x[i] + 1"))
    assert run(code, tmp_path, **here) == ("[3.0, 3.0, 3.0] [6.0]", EACH)
    assert len(stored(tmp_path)["layout.merge"]) == 2


def test_the_key_follows_imports_through_other_modules():
    names = {path.name for path in store._closure(PACKAGE / "attention.py")}
    assert {"attention.py", "head.py", "mathlib.py", "tiles.py", "jit.py", "loops.py"} <= names
    assert not {"norm.py", "update.py", "prepare.py"} & names


def test_kernels_name_nothing_from_outside_their_package():
    """What the key does not see must not be compiled in: only NumPy, Numba and this package."""
    for source in PACKAGE.glob("*.py"):
        tree = ast.parse(source.read_text())
        outside = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and str(node.module).startswith("forge")
            and not str(node.module).startswith("forge.backends.cpu")
            for name in node.names
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and any(
                ast.unparse(mark).split("(")[0] in ("kernel", "routine", "device", "forms")
                for mark in function.decorator_list
            ):
                names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
                own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
                own |= {argument.arg for argument in function.args.args}
                assert not {n.id for n in names} & outside - own, f"{source.name}: {function.name}"


def test_a_damaged_file_is_compiled_again(tmp_path):
    assert run(PROGRAM, tmp_path) == (RESULT, COMPILING)
    for path in (tmp_path / "forge" / "kernels").glob("*.kernel"):
        path.write_bytes(path.read_bytes()[:-1])
    assert run(PROGRAM, tmp_path) == (RESULT, EACH)
    assert run(PROGRAM, tmp_path) == (RESULT, "")


def test_old_files_of_a_kernel_are_removed_but_not_the_newest(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store.root().mkdir(parents=True)
    for age in range(store._KEEP + 2):
        for kernel in ("a.f", "a.f_2"):
            path = store.root() / f"{kernel}-{age:016}.kernel"
            path.touch()
            os.utime(path, (1000 - age, 1000 - age))
    own = store.root() / "a.f-new.kernel"
    store.write(own, b"data")
    assert cache.read(own) == b"data"
    kept = stored(tmp_path)
    assert kept["a.f"] == (*(f"{age:016}" for age in range(store._KEEP - 1)), "new")
    assert len(kept["a.f_2"]) == store._KEEP + 2


# ---- Filling the cache ----


def test_a_cold_cache_is_filled_once_by_two_processes_that_start_together(tmp_path):
    both = [start(PROGRAM, tmp_path) for _ in range(2)]
    ends = [process.communicate(timeout=300) for process in both]
    assert [out.strip() for out, _ in ends] == [RESULT, RESULT], ends
    lines = "".join(notices for _, notices in ends).splitlines(keepends=True)
    assert lines.count(COMPILING) == 1
    # The other process, if it came while the first compiled, says that it waits, and nothing else.
    assert all("waiting for it" in line for line in lines if line != COMPILING)
    assert run(PROGRAM, tmp_path) == (RESULT, "")
    assert all(len(keys) == 1 for keys in stored(tmp_path).values())


def test_a_compilation_that_is_killed_leaves_a_cache_that_works(tmp_path):
    with start(PROGRAM, tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == COMPILING
        time.sleep(0.5)
        process.kill()
    out, notices = run(PROGRAM, tmp_path)
    assert out == RESULT
    assert notices in ("", COMPILING, COMPILING.replace("2 CPU kernels", "a CPU kernel"))


def test_an_unwritable_cache_is_named_and_kernels_still_run(tmp_path):
    (tmp_path / "file").touch()
    for code in (PROGRAM, ALONE):
        out, notices = run(code, tmp_path / "file")
        assert out == RESULT
        assert notices.count("cannot write the kernel cache") == 1
        assert notices.count("\n") <= 2


def test_on_a_full_disk_kernels_still_run(tmp_path):
    # A limit on the size of files lets small ones be made, as a disk does before it is full.
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    for code in (PROGRAM, ALONE):
        out, notices = run(full + code, tmp_path)
        assert out == RESULT
        assert notices.count("(File too large): kernels are compiled in memory") == 1
    assert stored(tmp_path) == {}
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_will_do(tmp_path, error):
    without = f"""
import errno, fcntl
def refuse(*_): raise OSError(errno.{error}, "no locks")
fcntl.flock = refuse
"""
    assert run(without + PROGRAM, tmp_path) == (RESULT, COMPILING)
    assert run(without + PROGRAM, tmp_path) == (RESULT, "")


def test_a_filled_cache_may_be_read_only(tmp_path):
    run(PROGRAM, tmp_path)
    refuse = """
import errno
from forge.backends.cpu import store
def refuse(*_): raise OSError(errno.EROFS, "Read-only file system")
store.check = store.write = refuse
"""
    assert run(refuse + PROGRAM, tmp_path) == (RESULT, "")
    out, notices = run(refuse + PROGRAM, tmp_path / "empty")
    assert out == RESULT
    assert "(Read-only file system): kernels are compiled in memory" in notices


def test_a_compiler_process_that_fails_is_reported():
    with pytest.raises(DeviceError, match=r"got exit 1.*no attribute 'absent'"):
        prepare._run_workers(["forge.backends.cpu.jit:absent"], 1)


def test_every_kernel_is_found_with_its_own_name():
    found = {kernel.name: kernel for kernel in prepare.every()}
    assert {
        "forge.backends.cpu.wide_product:_tiles",
        "forge.backends.cpu.update:_adamw:float32,float32",
    } <= set(found)
    assert all(prepare._find(name) is kernel for name, kernel in found.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_command_prepares_exactly_the_kernels_that_it_calls(tmp_path, monkeypatch, dtype):
    called: set[str] = set()
    monkeypatch.setattr(prepare, "fill", lambda wanted: None)
    before = jit.Kernel.__call__

    def call(self, *args):
        called.add(self.name.removeprefix("forge.backends.cpu."))
        return before(self, *args)

    monkeypatch.setattr(jit.Kernel, "__call__", call)
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 400)
    run_folder = str(tmp_path / "run")
    small = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 4 --steps 2"
    where = ["--device", "cpu", "--data", str(text)]
    if dtype == "bfloat16":
        monkeypatch.setattr(micro, "FAST", True)
        where += ["--precision", "bf16"]
    assert main(["train", *small.split(), *where, "--dropout", "0.1", "--out", run_folder]) == 0
    needed = {kind: set(prepare.names(kind, dtype)) for kind in prepare.NEEDED}
    everything = needed["train"] | needed["dropout"] | needed["generate"]
    assert called == everything
    called.clear()
    assert main(["train", *small.split(), *where, "--out", str(tmp_path / "other")]) == 0
    assert called == needed["train"] | needed["generate"]
    called.clear()
    prompt = "to be or not"
    assert main(["generate", run_folder, "--prompt", prompt, "--max-new-tokens", "4"]) == 0
    assert called == needed["generate"]
    called.clear()
    low = ["--weights", "bf16", "--prompt", prompt, "--max-new-tokens", "4"]
    assert main(["generate", run_folder, *low]) == 0
    assert called == set(prepare.names("generate", "bfloat16"))
    called.clear()
    assert main(["eval", run_folder]) == 0
    assert called == needed["eval"]
    called.clear()
    monkeypatch.setattr(quantized, "_FEW", 8)  # fewer than the prompt's rows
    assert main(["generate", run_folder, "--weights", "int8", *low[2:]]) == 0
    assert called == set(prepare.names("generate", "int8"))
    called.clear()
    assert main(["eval", run_folder, "--weights", "int8"]) == 0
    assert called == set(prepare.names("eval", "int8"))


# ---- Compiling ----


def test_functions_that_kernels_call_are_optimised_once_and_become_code_once(monkeypatch):
    optimised, emitted = [], []
    optimise, emit = (
        compiler._Library._optimize_final_module,
        compiler._Library._finalize_final_module,
    )

    def defined(library):
        return {f.name for f in library._final_module.functions if not f.is_declaration}

    def optimising(self):
        optimised.append(defined(self))
        optimise(self)

    def emitting(self):
        emitted.append(defined(self))
        emit(self)

    monkeypatch.setattr(compiler._Library, "_optimize_final_module", optimising)
    monkeypatch.setattr(compiler._Library, "_finalize_final_module", emitting)
    embedding._scatter_add_rows["float32", "float32"].load(stored=False)
    helpers = [{name for name in names if "_continues" in name} for names in optimised]
    assert sum(map(bool, helpers)) <= 1
    assert len(emitted) == 1


def test_only_functions_that_make_arrays_count_references():
    def counts(kernel):
        kernel._set_up()
        return "NRT_decref" in kernel._compiled().library.get_llvm_str()

    assert not counts(layout.merge["float32"])
    assert counts(reduce._sum_rows["float32", "float32"])


def test_what_a_kernel_makes_is_freed():
    code = """
import numpy as np
from numba.core.runtime import rtsys
from forge.backends.cpu import jit, reduce
x = np.ones((130, 3), np.float32)
for _ in range(9):
    reduce._sum_rows["float32", "float32"](x, x[0])
stats = rtsys.get_allocation_stats()
print(stats.alloc >= 9, stats.alloc == stats.free, stats.mi_alloc == stats.mi_free)
"""
    assert run(code, Path("/nowhere"), NUMBA_NRT_STATS="1")[0] == "True True True"


def test_a_parallel_loop_may_assign_only_variables_of_its_own():
    def total(x, out):
        total = 0.0
        for i in prange(x.size):
            total += x[i]
        out[0] = total

    with pytest.raises(TypeError, match=r"\[total\] .* got total; put results in arrays"):
        loops.outlined(total, compiler.part)


def test_a_parallel_loop_inside_another_statement_is_refused():
    def in_a_branch(x):
        if x.size:
            for i in prange(x.size):
                x[i] = 0

    def in_a_loop(x):
        for i in prange(x.size):
            for j in prange(i):
                x[i] = j

    for function in (in_a_branch, in_a_loop):
        with pytest.raises(TypeError, match=r"expected each prange loop as a statement of the"):
            loops.outlined(function, compiler.part)


def test_an_error_inside_a_parallel_loop_reaches_the_caller():
    @jit.kernel("void(int64, float32[::1])")
    def fill(size, out):
        for i in prange(out.size):
            out[i] = np.ones(size, np.float32)[0]

    fill.load(stored=False)
    out = np.zeros(4, f32)
    fill(3, out)
    assert out.tolist() == [1.0] * 4
    with pytest.raises(MemoryError, match="inside"):
        fill(1 << 60, out)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_a_parallel_loop_visits_every_value_once(count):
    x = np.zeros((count, 3), f32)
    out = np.zeros(3, f32)
    pointwise._scale["float32", "float32"](np.ones(x.size, f32), f32(1.0), x.reshape(-1), True)
    reduce._sum_rows["float32", "float32"](x, out)
    assert out.tolist() == [count] * 3
