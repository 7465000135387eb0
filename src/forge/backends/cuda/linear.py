"""Products: addresses and leading dimensions for the libraries, with bias and gelu in an epilogue.

Where none has an epilogue for a shape or dtype, the bias is written first and the product
added to it. Products of few rows have kernels of their own.
"""

from __future__ import annotations

from forge.backends.cuda import few_rows, pointwise, precision, products, reduce, shape
from forge.backends.cuda.cublaslt import Product
from forge.tensor import Tensor, empty

# Widths that are no multiple of this many elements leave rows unaligned, and epilogues untested.
ALIGNED = 8


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    b_rows: int | None = None,
    accumulate: bool = False,
) -> None:
    """out (+)= alpha op(a) op(b) + bias; `b_rows` uses only b's first rows, as stored."""
    m, n = out.shape[-2:]
    k = a.shape[-2] if trans_a else a.shape[-1]
    batch = a.shape[0] if a.ndim == 3 else 1
    if out.size == 0:
        return
    plain = a.ndim == 2 and bias is None and alpha == 1.0 and not (trans_a or accumulate)
    if plain and (trans_b or n == b.shape[1]) and out.dtype == a.dtype:
        if few_rows.serves(m, n, k, a.dtype, transposed=trans_b):
            few_rows.product(a, b, None, out=out, transposed=trans_b)
            return
        if trans_b and n % ALIGNED and n < b.shape[0]:
            # Unaligned rows would take the library four times as long.
            whole = empty((m, b.shape[0]), out.dtype, out.device)
            matmul(a, b, out=whole, trans_b=True)
            shape.slice(whole, out=out, start=(0, 0), step=(1, 1))
            return
    if bias is not None:
        _write_bias(bias, out, accumulate=accumulate)
        accumulate = True
    if k == 0:
        if not accumulate:
            out.device.memory.fill(out, 0.0)
        return
    product = Product(
        m,
        n,
        k,
        lda=a.shape[-1],
        ldb=b.shape[-1],
        ldc=n,
        trans_a=trans_a,
        trans_b=trans_b,
        dtype=a.dtype,
        out_dtype=out.dtype,
        accumulate=accumulate,
        batch=batch,
        step_a=a.shape[-2] * a.shape[-1],
        step_b=b.shape[-2] * b.shape[-1],
        step_c=m * n,
        tf32=precision.tf32(a.dtype),
    )
    if not products.run(product, a.pointer, b.pointer, out.pointer, alpha=alpha):
        raise products.missing(product)


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, *, out: Tensor, pre: Tensor | None, gelu: str | None
) -> None:
    """pre = x w + bias; out = gelu(pre), or pre itself where gelu is None."""
    if out.size == 0:
        return
    m, k = x.shape
    n = w.shape[1]
    if pre is None and gelu != "erf" and few_rows.serves(m, n, k, x.dtype, transposed=False):
        few_rows.product(x, w, bias, out=out, transposed=False, gelu=gelu is not None)
        return
    epilogue = "" if bias is None else "bias"
    if gelu == "tanh" and epilogue and x.dtype == "bfloat16":
        epilogue += " gelu" if pre is None else " gelu pre"
    if epilogue and k and n % ALIGNED == 0 and k % ALIGNED == 0:
        assert bias is not None
        product = Product(
            m,
            n,
            k,
            lda=k,
            ldb=n,
            ldc=n,
            dtype=x.dtype,
            out_dtype=out.dtype,
            epilogue=epilogue,
            tf32=precision.tf32(x.dtype),
        )
        addresses = {"bias": bias.pointer}
        if pre is not None and epilogue.endswith("pre"):
            addresses["pre"] = pre.pointer
        before = out if pre is None or epilogue != "bias" else pre
        if products.run(product, x.pointer, w.pointer, before.pointer, **addresses):
            if gelu is not None and epilogue == "bias":
                pointwise.gelu(before, out=out, form=gelu)
            return
    before = out if pre is None else pre
    matmul(x, w, bias, out=before)
    if gelu is not None:
        pointwise.gelu(before, out=out, form=gelu)


def matmul_gelu_backward(
    dy: Tensor, w: Tensor, pre: Tensor, *, out: Tensor, sums: Tensor | None, form: str
) -> None:
    """out = (dy w^T) gelu'(pre), and sums[c] += sum over n of out[n, c]."""
    if out.size == 0:
        return
    m, n = out.shape
    k = dy.shape[1]
    if form == "tanh" and dy.dtype == "bfloat16" and k and n % ALIGNED == 0 and k % ALIGNED == 0:
        product = Product(
            m,
            n,
            k,
            lda=k,
            ldb=k,
            ldc=n,
            trans_b=True,
            dtype=dy.dtype,
            out_dtype=out.dtype,
            epilogue="gelu backward",
        )
        if products.run(product, dy.pointer, w.pointer, out.pointer, pre=pre.pointer):
            if sums is not None:
                reduce.sum_rows(out, out=sums)
            return
    matmul(dy, w, out=out, trans_b=True)
    pointwise.gelu_backward(pre, out, out=out, sums=sums, form=form)


def _write_bias(bias: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Put the bias into every row of out, or add it to what is there."""
    row = bias.view((1,) * (out.ndim - 1) + bias.shape)
    if not accumulate and bias.dtype == out.dtype:
        shape.broadcast_to(row, out=out)
        return
    rows = empty(out.shape, bias.dtype, bias.device)
    shape.broadcast_to(row, out=rows)
    if accumulate:
        pointwise.accumulate(rows, out=out)
    else:
        pointwise.cast(rows, out=out)
