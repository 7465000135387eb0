"""What the wrapper and the tape cost, in microseconds, on ops whose body does nothing.

`python benchmarks/overhead.py [--json]`. Three numbers per op: calling it on Tensors, recording it
on Vars, and sweeping its node, each less the time of its bare body or bare rule. The thread's own
CPU time, in the best of many rounds: on a busy machine that one was disturbed least.
"""

import argparse
import gc
import json
import time
from types import SimpleNamespace

import forge
from forge.extend import op

NODES = 1000
ROUNDS = 60
TARGETS = {"wrapper": 0.5, "record": 4.0, "backward": 4.0}


def _unary(x, *, form="tanh"):
    return x


def _unary_rule(node, dx):
    return {"x": node.x}


def _binary(a, b):
    return a


def _binary_rule(node, dy):
    return {"a": node.a, "b": node.b}


def _linear(x, w, bias=None, *, gelu=None, record=None):
    return x


def _linear_rule(node, dy):
    return {"x": node.x, "w": node.w, "bias": node.bias}


OPS = {
    "unary(x, form=…)": (_unary, _unary_rule, ("x",), {"form": "erf"}),
    "binary(a, b)": (_binary, _binary_rule, ("a", "b"), {}),
    "linear(x, w, bias)": (_linear, _linear_rule, ("x", "w", "bias"), {}),
}


def best(run, prepare=tuple):
    """Microseconds per node of the fastest round; `prepare` makes each round's arguments."""
    times = []
    for _ in range(ROUNDS):
        args = prepare()
        start = time.thread_time()
        run(*args)
        times.append(time.thread_time() - start)
    return min(times) / NODES * 1e6


def repeat(function, *args, **keywords):
    """A round of equal calls; the loop itself is in both sides of every difference."""

    def run():
        for _ in range(NODES):
            function(*args, **keywords)

    return run


def measure(body, rule, names, keywords):
    """The three costs of one op."""
    function = op(saves=names)(body)
    function.rule(rule)
    x = forge.tensor([1.0, 2.0])
    tensors = [x] * len(names)
    bare = best(repeat(body, *tensors, **keywords))
    wrapped = best(repeat(function, *tensors, **keywords))

    def leaves():
        """Fresh ones for every node: summing gradients is an op's cost, not the tape's."""
        tape = forge.Tape()
        first, *rest = ([tape.leaf(x) for _ in range(NODES)] for _ in names)
        return first[0], list(zip(*rest, strict=True)) or [()] * NODES

    def record(y, rests):
        for rest in rests:
            y = function(y, *rest, **keywords)
        return y

    saves = SimpleNamespace(**dict.fromkeys(names, x))
    return {
        "wrapper": wrapped - bare,
        "record": best(record, leaves) - bare,
        "backward": best(lambda y: y.tape.backward(y, x), lambda: [record(*leaves())])
        - best(repeat(rule, saves, x)),
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    gc.disable()
    try:
        rows = {name: measure(*definition) for name, definition in OPS.items()}
    finally:
        gc.enable()
    if args.json:
        print(json.dumps({"unit": "us", "targets": TARGETS, "rows": rows}, indent=2))
        return
    print(f"{'us per op':24}" + "".join(f"{key:>10}" for key in TARGETS))
    for name, row in [*rows.items(), ("target", TARGETS)]:
        print(f"{name:24}" + "".join(f"{row[key]:10.2f}" for key in TARGETS))


if __name__ == "__main__":
    main()
