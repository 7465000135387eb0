"""What Forge takes on disk, with all it needs, beside PyTorch with NumPy; both as installed here.

python benchmarks/install_size.py [--json]      (after `make dev`, which installs both)

The files of each distribution and of those it requires on this machine, extras left out, and the
bytecode that pip compiles their source to. PyTorch's figure is that of its CPU build where that is
what is installed. Takes a minute.
"""

import argparse
import importlib.metadata
import json
import marshal
import re
import sys
import warnings
from pathlib import Path

from packaging.requirements import Requirement

SIDES = {"Forge": ("forge-gpt",), "PyTorch": ("torch", "numpy")}


def needed(names):
    """The distributions of these names and all that they require, by name."""
    found, left = {}, list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


def size(distribution):
    """Bytes of a distribution; of Forge's source where it is installed from a checkout."""
    files = {Path(str(file.locate())).resolve() for file in distribution.files or ()}
    if distribution.metadata["Name"] == "forge-gpt":
        source = Path(__file__).resolve().parent.parent / "src" / "forge"
        files |= set(source.rglob("*"))
    files = {f for f in files if f.is_file() and f.suffix != ".pyc"}
    return sum(f.stat().st_size + bytecode(f) for f in files)


def bytecode(path):
    """Bytes of what Python compiles a source to; 0 for what is none, or not for this Python."""
    if path.suffix != ".py":
        return 0
    try:
        with warnings.catch_warnings(action="ignore"):
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return 0
    return 16 + len(marshal.dumps(code))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes = {}
    for name, distributions in SIDES.items():
        try:
            found = needed(distributions)
        except importlib.metadata.PackageNotFoundError as error:
            sys.exit(f"{name}: not installed here: {error}; run `make dev`")
        sizes[name] = {each: size(found[each]) / 1e6 for each in found}
    totals = {name: sum(each.values()) for name, each in sizes.items()}
    if args.json:
        print(json.dumps({"MB": totals, "ratio": totals["Forge"] / totals["PyTorch"]}, indent=2))
        return
    for name, parts in sizes.items():
        version = importlib.metadata.version(SIDES[name][0])
        print(f"{name} {version}: {totals[name]:,.0f} MB in {len(parts)} distributions, of which")
        for part in sorted(parts, key=parts.get, reverse=True)[:6]:
            print(f"  {part:24} {parts[part]:7,.1f} MB")
    print(f"Forge takes {totals['Forge'] / totals['PyTorch']:.2f} of PyTorch's")


if __name__ == "__main__":
    main()
