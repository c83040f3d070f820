"""Work that Triton's interpreter repeats, done once: the same kernels give the same numbers in a fraction of the time.

1. Every call of a device function patches `triton.language` for the interpreter. Here it is patched once per process.
2. Every integer operation is computed again in 64 bits to assert that it did not overflow. The assertion itself is off, as it
   is on a GPU without `debug`; here the second computation is off too.
3. A reduction with a function of its own goes from element to element. Here it combines whole arrays in pairs, as a GPU does.
4. The numpy type of a Triton type is looked up in a table that is built anew each time. Here it is remembered.
5. Every tensor checks its shape and wraps each number of it anew. Here tensors of one shape share what was made of it.
6. Two operands are compared size by size before they are broadcast. Here those that share their shape are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@functools.cache
def take() -> None:
    """Replaces these parts of the interpreter in this process, once."""
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(everything)
    interpreter._patch_lang = lambda fn: type(scope)()  # which restores nothing
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = reduce_in_pairs
    share_shapes()


def remembered(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton's types of blocks and of pointers have no hash, their elements do."""
    of_scalar = functools.cache(numpy_type)

    def numpy_type_of(kind: Any) -> Any:
        scalar = kind.scalar
        return numpy_type(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return numpy_type_of


def share_shapes() -> None:
    """Types and tensors of blocks get the shape, its text and the number of elements of the first ones like them."""
    make_type, make_tensor, broadcast = tl.block_type.__init__, tl.tensor.__init__, TritonSemantic.broadcast_impl_value
    of_types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[int, tuple[Any, Any]] = {}  # by the id of a type's shape, which lives in the table above

    def type_of(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else 0
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    def broadcast_of(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = type_of, tensor_of
    TritonSemantic.broadcast_impl_value = broadcast_of


def reduce_in_pairs(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Combines neighbours along the axis until one is left; the order of operands stays."""
    inputs, axis = self.unravel(inputs, self.axis)
    arrays = [np.moveaxis(each.handle.data, axis, 0) for each in inputs]
    while len(arrays[0]) > 1:
        even = len(arrays[0]) // 2 * 2
        pairs = [self.to_tensor(a[side:even:2], each.dtype) for side in (0, 1) for a, each in zip(arrays, inputs, strict=True)]
        made = self.combine_fn.fn(*pairs)
        made = made if isinstance(made, tuple) else (made,)
        arrays = [np.concatenate([new.handle.data, a[even:]]) for new, a in zip(made, arrays, strict=True)]
    results = [a[0] for a in arrays]
    if self.keep_dims:
        whole = inputs[0].handle.data.ndim if self.axis is None else 0
        results = [a.reshape((1,) * whole) if whole else np.expand_dims(a, axis) for a in results]
    return [self.to_tensor(a, each.dtype) for a, each in zip(results, inputs, strict=True)]
