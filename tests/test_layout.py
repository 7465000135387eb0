"""The shape of the source: which part imports which, sizes, dependencies, equal backends."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forge.backends import reference, registry

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "forge"
MODULES = sorted(SOURCE.rglob("*.py"))
KERNELS = sorted(SOURCE.rglob("*.cu*"))
CHORES = [ROOT / "Makefile", ROOT / "pyproject.toml"]
SCRIPTS = [path for top in ("benchmarks", "examples") for path in (ROOT / top).rglob("*.py")]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

BASE = {"errors", "dtypes", "philox", "config"}
VALUES = BASE | {"tensor", "pool", "dlpack"}
ENGINE = VALUES | {"autograd", "backends", "ops", "extend"}
STATE = ENGINE | {"params"}
RUN = STATE | {"models", "data", "optim", "checkpoint", "durable", "graph"}

# Part of forge -> the parts it may import besides itself. The whole rule is in this table: the
# tape knows no ops, checkpoints no models, generation no tokenizer, the optimizer only ops and
# parameters.
MAY_IMPORT = {
    "errors": set(),
    "dtypes": {"errors"},
    "philox": {"errors"},
    "config": {"errors", "dtypes"},
    "durable": {"errors"},
    "cache": {"errors"},
    "pool": BASE,
    "dlpack": BASE,
    "tensor": BASE | {"pool", "dlpack"},
    "autograd": VALUES,
    "backends": VALUES | {"cache"},
    "ops": VALUES | {"autograd", "backends"},
    "extend": VALUES | {"autograd", "backends", "ops"},
    "params": ENGINE,
    "models": STATE,
    "data": VALUES,
    "optim": VALUES | {"ops", "params"},
    "checkpoint": BASE | {"durable"},
    "graph": VALUES | {"backends"},
    "generate": STATE | {"models", "graph"},
    "training": RUN,
    "verify": RUN,
    "forge": RUN | {"generate", "training", "verify"},  # forge/__init__.py: the public names
    "run": RUN | {"training"},
    "cli": RUN | {"generate", "training", "verify", "run", "forge"},
    "__main__": {"cli"},
}

# GPU and framework packages: nothing on the CPU path imports them, torch nothing at all.
GPU_PACKAGES = {"cuda", "cudnn", "cupy", "cupyx", "nvmath", "triton"}
FRAMEWORKS = {"jax", "tensorflow", "torch", "transformers"}

# Distributions whose import has another name.
IMPORTED_AS = {
    "cuda-bindings": "cuda",
    "nvidia-cudnn-frontend": "cudnn",
    "nvmath-python": "nvmath",
}
# Libraries loaded without an import -> the text that shows it.
LOADED_BY = {"tbb": "libtbb.so", "scipy_openblas32": "scipy_openblas32"}

# float32 kernels that the CPU leaves to the reference: none so far.
# The first a model calls only where it is one kernel; the second is NumPy's own speed; the third
# runs once, when weights are loaded.
CPU_FALLBACKS = {"decode_token", "argmax", "quantize"}
BACKENDS = [
    path.name for path in (SOURCE / "backends").iterdir() if (path / "__init__.py").exists()
]


def module_name(path):
    parts = ("forge", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path):
    """Every module that the file imports, at its top or inside a function, by absolute name."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.rsplit(".", node.level - 1)[0]
                base = f"{anchor}.{base}".rstrip(".")
            if base == "forge":  # `from forge import ops` means the part, not the public names
                yield from (f"forge.{alias.name}" for alias in node.names)
            else:
                yield base


def part(module):
    """`forge.ops.linear` -> `ops`; `forge` and its plain names -> `forge`; None outside of it."""
    names = module.split(".")
    if names[0] != "forge":
        return None
    is_part = len(names) > 1 and (
        (SOURCE / names[1]).is_dir() or (SOURCE / f"{names[1]}.py").is_file()
    )
    return names[1] if is_part else "forge"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path):
    own = part(module_name(path))
    assert own in MAY_IMPORT, f"{own} is new: give it a row in MAY_IMPORT"
    parts = {part(module) for module in imported_modules(path)} - {None, own}
    assert parts <= MAY_IMPORT[own], f"{own} may not import {sorted(parts - MAY_IMPORT[own])}"


def test_arrows_never_run_back():
    left = {name: targets - {name} for name, targets in MAY_IMPORT.items()}
    while left:
        done = {name for name, targets in left.items() if not targets & left.keys()}
        assert done, f"a cycle in MAY_IMPORT among {sorted(left)}"
        left = {name: targets for name, targets in left.items() if name not in done}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_cpu_path_imports_no_gpu_package(path):
    packages = {module.partition(".")[0] for module in imported_modules(path)}
    banned = FRAMEWORKS if "cuda" in path.parts else FRAMEWORKS | GPU_PACKAGES
    assert not packages & banned


def test_importing_forge_imports_no_gpu_package():
    code = "import sys, forge; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & (FRAMEWORKS | GPU_PACKAGES)


def test_float32_needs_nothing_of_bfloat16():
    """Whose package takes up to a second to import."""
    code = (
        "import sys, numpy, forge; from forge import ops; x = forge.tensor(numpy.ones((3, 5)));"
        "forge.value_and_grad(lambda x: ops.sum(ops.gelu(x)))(x)[0].numpy();"
        "assert 'ml_dtypes' not in sys.modules;"
        "print(forge.tensor([1.0], 'bfloat16').numpy().dtype)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("bfloat16\n", "")


@pytest.mark.parametrize(
    "path",
    CHORES + MODULES + KERNELS + SCRIPTS + TESTS,
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_file_is_short_and_narrow(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= (600 if path in TESTS else 400)
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"over 100 columns: lines {wide}"


def test_autograd_is_small():
    """The engine proper fits one sitting; hooks and the checker of gradients come on top."""
    lines = {p.stem: len(p.read_text().splitlines()) for p in (SOURCE / "autograd").glob("*.py")}
    assert lines["node"] + lines["saves"] + lines["tape"] <= 600
    assert sum(lines.values()) <= 800


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def test_every_dependency_has_a_reason():
    runtime, extras = declared()
    text = (ROOT / "pyproject.toml").read_text()
    for requirement in [*runtime, *(each for extra in extras.values() for each in extra)]:
        assert re.search(rf'"{re.escape(requirement)}",?  # \S.{{9}}', text), requirement


def import_names(requirements):
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def test_every_dependency_is_used_and_every_import_declared():
    runtime, extras = declared()
    needed = import_names(runtime)
    optional = import_names(r for name in extras.keys() - {"test", "dev"} for r in extras[name])
    text = "\n".join(path.read_text() for path in MODULES)
    packages = {m.partition(".")[0] for path in MODULES for m in imported_modules(path)}
    unused = needed - packages - {name for name, sign in LOADED_BY.items() if sign in text}
    assert not unused, f"declared in pyproject.toml and never used: {sorted(unused)}"
    undeclared = packages - needed - optional - sys.stdlib_module_names - {"forge"}
    assert not undeclared, f"imported and not declared in pyproject.toml: {sorted(undeclared)}"


def functions(module):
    """Arguments of each top-level function of a kernel file, read without importing it.

    Names, order, kinds and defaults; annotations are mypy's business.
    """
    path = SOURCE.parent / Path(*module.split(".")).with_suffix(".py")
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_has_the_kernels_of_its_table_with_the_signatures_of_the_reference(backend):
    table = importlib.import_module(f"forge.backends.{backend}").KERNELS
    for module in {kernel.module for kernel in table.values()}:
        family = module.rpartition(".")[2]
        written = functions(module)
        definitions = functions(f"{reference.__name__}.{family}")
        listed = {name for name, kernel in table.items() if kernel.module == module}
        assert written.keys() & reference.KERNELS.keys() == listed, f"{module} and its table differ"
        for name in listed:
            assert (name, written[name]) == (name, definitions[name])


def test_cpu_falls_back_only_where_it_says_so():
    served_by_reference = {
        row.kernel
        for row in registry.report()
        if (row.device, row.dtype, row.implementation) == ("cpu", "float32", "reference")
    }
    assert served_by_reference == CPU_FALLBACKS
