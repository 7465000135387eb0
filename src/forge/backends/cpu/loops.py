"""The parallel loops of a kernel: each `prange` becomes a function of its own and one call.

Numba's own way to run them takes 0.4 s a loop to compile, four times what the loop's body takes,
and passes the body through LLVM four times.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_RUN = "_run_loop"
_INDEX = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
# What the pools of all of Numba's threading layers call: (args, dimensions, steps, data).
_TASK = ir.FunctionType(
    ir.VoidType(),
    [_BYTES.as_pointer(), _INDEX.as_pointer(), _INDEX.as_pointer(), _BYTES],
)


def outlined(
    function: Callable[..., Any], compiled: Callable[[Callable[..., Any]], Any]
) -> Callable[..., Any]:
    """`function`, whose top-level `prange` loops run on the thread pool.

    A loop `for i in prange(n)` becomes a function (start, stop, variables it reads), made callable
    by `compiled`, and the call that shares 0 … n - 1 out among the threads. What a loop assigns
    stays inside it: results go into arrays. Raises `TypeError` for a loop that assigns a variable
    made before it, and for a `prange` elsewhere, which one thread would run.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    file = inspect.getfile(function)
    scope = {**function.__globals__, _RUN: run}
    known = [argument.arg for argument in definition.args.args]
    whole: list[ast.stmt] = []
    for statement in definition.body:
        if _is_loop(statement):
            assert isinstance(statement, ast.For)
            loop = f"{function.__name__}_loop_{len(scope)}"
            used, made = _names(statement.body)
            if made & set(known):
                raise TypeError(
                    f"[{function.__name__}] expected a parallel loop that assigns only its own "
                    f"variables, got {', '.join(sorted(made & set(known)))}; put results in arrays"
                )
            captured = [name for name in dict.fromkeys(known) if name in used]
            scope[loop] = compiled(_compile(_loop(loop, captured, statement), file, scope, loop))
            statement = _call(loop, captured, statement)
        else:
            used, made = _names([statement])
            known += sorted(made)
        if "prange" in used:
            raise TypeError(
                f"[{function.__name__}] expected each prange loop as a statement of the kernel "
                "itself, got one inside another; call it range, or move it out"
            )
        whole.append(statement)
    definition.body, definition.decorator_list = whole, []
    return _compile(definition, file, scope, function.__name__)


def _is_loop(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.For)
        and isinstance(statement.iter, ast.Call)
        and isinstance(statement.iter.func, ast.Name)
        and statement.iter.func.id == "prange"
    )


def _names(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """The variables that statements read or write, and those that they write."""
    nodes = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Name)]
    return {node.id for node in nodes}, {n.id for n in nodes if isinstance(n.ctx, ast.Store)}


def _loop(name: str, captured: list[str], statement: ast.For) -> ast.FunctionDef:
    """The loop over the values start … stop - 1, as a function of these and what it captured."""
    bounds = ["_start", "_stop"]
    arguments = [ast.arg(arg=each) for each in bounds + captured]
    inner = ast.For(
        target=statement.target,
        iter=ast.Call(func=_load("range"), args=[_load(each) for each in bounds], keywords=[]),
        body=statement.body,
        orelse=[],
    )
    definition = ast.FunctionDef(
        name=name,
        args=ast.arguments(
            posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[]
        ),
        body=[ast.copy_location(inner, statement)],
        decorator_list=[],
    )
    return ast.copy_location(definition, statement)


def _call(loop: str, captured: list[str], statement: ast.For) -> ast.stmt:
    """The call that takes the loop's place."""
    assert isinstance(statement.iter, ast.Call)
    (count,) = statement.iter.args
    variables = ast.Tuple(elts=[_load(name) for name in captured], ctx=ast.Load())
    call = ast.Call(func=_load(_RUN), args=[_load(loop), count, variables], keywords=[])
    return ast.copy_location(ast.Expr(value=call), statement)


def _load(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Load())


def _compile(
    definition: ast.FunctionDef, file: str, scope: dict[str, Any], name: str
) -> Callable[..., Any]:
    module = ast.fix_missing_locations(ast.Module(body=[definition], type_ignores=[]))
    own: dict[str, Any] = {}
    exec(compile(module, file, "exec"), scope, own)
    function: FunctionType = own[name]
    return function


@intrinsic
def run(typing: Any, loop: Any, count: Any, captured: Any) -> Any:
    """Call loop(start, stop, *captured) so that 0 … count - 1 are shared out among the threads.

    In as many parts as there are threads, each of neighbours; without the pool if there is one.
    """
    arguments = [types.int64, types.int64, *map(types.unliteral, captured.types)]
    signature = loop.get_call_type(typing, tuple(arguments), {})

    def generate(context: Any, builder: Any, own: Any, values: Any) -> Any:
        result = loop.dispatcher.overloads[signature.args]
        context.active_code_library.add_linking_library(result.library)
        packed = values[2].type
        # Number of values, number of parts, whether a part failed, and what the loop captured.
        record = ir.LiteralStructType([_INDEX, _INDEX, _INDEX, packed])
        task = _task(context, builder.module, result, record, own.args[2])
        count = context.cast(builder, values[1], own.args[1], types.int64)
        kind = ir.FunctionType(_INDEX, [])
        threads = builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "get_num_threads"), []
        )
        fewer = builder.icmp_signed("<", count, threads)
        parts = builder.select(fewer, count, threads)
        shared = cgutils.alloca_once(builder, record)
        for i, value in enumerate([count, parts, _number(0), values[2]]):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, i))
        data = builder.bitcast(shared, _BYTES)
        # The pool advances the address by the step for each part: it carries the part's number.
        first = cgutils.alloca_once_value(builder, ir.Constant(_BYTES, None))
        size = cgutils.alloca_once(builder, _INDEX)
        builder.store(parts, size)
        step = cgutils.alloca_once_value(builder, _number(1))
        with builder.if_else(builder.icmp_signed(">", parts, _number(1))) as (many, few):
            with many:
                kind = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_INDEX] * 3)
                pool = cgutils.get_or_insert_function(builder.module, kind, "numba_parallel_for")
                addresses = [builder.bitcast(x, _BYTES) for x in (task, first, size, step)]
                builder.call(pool, [*addresses, data, _number(0), _number(1), threads])
            with few, builder.if_then(builder.icmp_signed("==", parts, _number(1))):
                builder.call(task, [first, size, step, data])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 2))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, _number(0))):
            text = "[cpu] expected a parallel loop to end, got an error inside it; is memory full?"
            context.call_conv.return_user_exc(builder, MemoryError, (text,))
        return context.get_dummy_value()

    return types.void(loop, count, captured), generate


def _task(context: Any, module: Any, result: Any, record: Any, captured: Any) -> Any:
    """The function that the pool calls for some neighbouring parts."""
    task = ir.Function(module, _TASK, module.get_unique_name("loop"))
    task.linkage = "internal"
    builder = ir.IRBuilder(task.append_basic_block("entry"))
    first, size, _, data = task.args
    shared = builder.bitcast(data, record.as_pointer())
    fields = [cgutils.gep_inbounds(builder, shared, 0, i) for i in range(4)]
    count, parts, _, values = (builder.load(field) for field in fields)
    part = builder.ptrtoint(builder.load(first), _INDEX)
    bounds = [
        builder.sdiv(builder.mul(n, count), parts)
        for n in (part, builder.add(part, builder.load(size)))
    ]
    status, _ = context.call_conv.call_function(
        builder,
        context.declare_function(module, result.fndesc),
        result.signature.return_type,
        result.signature.args,
        [*bounds, *cgutils.unpack_tuple(builder, values)],
    )
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(_number(1), fields[2])
    builder.ret_void()
    return task


def _number(value: int) -> ir.Constant:
    return ir.Constant(_INDEX, value)
