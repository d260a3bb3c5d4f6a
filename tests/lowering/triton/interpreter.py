"""Repair Triton's interpreter, in which correct kernels fail and wrong ones pass.

- `tl.dot` of bfloat16 multiplies bit patterns as integers; of float16 it rounds each partial sum.
- Casts from float32 to bfloat16 truncate instead of rounding to nearest even.
- `tl.sort` takes seconds: it computes xor sums element by element.
- NumPy 2.4 and later refuse the loops (`numpy<2.4` in the test requirements).
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _wide(handle: interpreter.TensorHandle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _to_bfloat16(data: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def mend() -> None:
    builder = interpreter.InterpreterBuilder
    stock_cast = builder.cast_impl

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(_wide(a), _wide(b)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16:
            wide = (src.data.astype(np.uint32) << 16).view(np.float32)
            data = wide if target == tl.float32 else wide.astype(interpreter._get_np_dtype(dst_type))
            return interpreter.TensorHandle(data, target)
        if target == tl.bfloat16:
            return interpreter.TensorHandle(_to_bfloat16(src.data.astype(np.float32)), target)
        return stock_cast(self, src, dst_type)

    stock_reduce = interpreter.ReduceOps.apply_impl

    def reduce(self, inputs):
        if self.combine_fn is not tl.standard._xor_combine:
            return stock_reduce(self, inputs)
        found = np.bitwise_xor.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, inputs[0].dtype)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    interpreter.ReduceOps.apply_impl = reduce
