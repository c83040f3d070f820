"""Work that Triton's interpreter repeats, done once: the same kernels give the same numbers in a fraction of the time.

1. Every call of a device function patches `triton.language` for the interpreter. Here it is patched once per process.
2. Every integer operation is computed again in 64 bits to assert that it did not overflow. The assertion itself is off, as it
   is on a GPU without `debug`; here the second computation is off too.
3. A reduction with a function of its own goes from element to element. Here it combines whole arrays in pairs, as a GPU does.
4. The numpy type of a Triton type is looked up in a table that is built anew each time. Here it is remembered.
5. Every tensor checks its shape and wraps each number of it anew. Here tensors of one shape share what was made of it.
6. Two operands are compared size by size before they are broadcast. Here those that share their shape are not.
7. Both operands of a binary operation are checked, cast and filled to the full size. Here those of one type are neither checked
   nor cast, and numpy broadcasts the smaller one, so that nothing is filled.
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
    TritonSemantic.binary_op_type_checking_impl = operands_of(TritonSemantic.binary_op_type_checking_impl)


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


PLAIN = {kind.name: kind for kind in (tl.float32, tl.float64, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.uint64)}
"""Types that two operands of them keep in every operation, and so does one beside a number of Python's of the same kind."""
OFFSETS = {"int32", "int64"}
"""Types of what is added to pointers."""


def operands_of(check: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Operands of one type; any other pair goes through `check`, and so do shapes that do not fit.

    An operand has the type of the whole result, and as many numbers as it came with: those of both together fill the result.
    """
    tensor, constants = tl.tensor, dict[Any, Any]()
    joined: dict[tuple[int, int], list[int] | None] = {}  # by the ids of two shapes, which `share_shapes` keeps
    blocks: dict[tuple[tuple[int, int], tuple[str, str]], tuple[Any, Any]] = {}

    def constant(semantic: Any, value: Any, kind: Any) -> Any:
        """A number as a tensor. It is remembered unless it is 0.0, which equals -0.0, or NaN, which equals nothing."""
        if isinstance(value, float) and (value == 0.0 or value != value):
            return semantic._cast_to_computation_type(value, kind)
        key = value, kind.name
        if key not in constants:
            constants[key] = semantic._cast_to_computation_type(value, kind)
        return constants[key]

    def sizes_of(shape: Any) -> tuple[int, ...]:
        return tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)

    def block(key: tuple[int, int], kind: Any, shape: Any) -> Any:
        """The type of the result of shapes `key`, of elements `kind`; None where `shape` is that of the result."""
        sizes = joined[key]
        return None if sizes is None or list(sizes_of(shape)) == sizes else tl.block_type(kind, sizes)

    def operands(semantic: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        if isinstance(lhs, tensor) and isinstance(rhs, tensor):
            left, right = lhs.dtype.name, rhs.dtype.name
            alike = left == right and (left in PLAIN or left == "int1")
            if not alike and not (right in OFFSETS and flags[:1] == (True,) and isinstance(lhs.dtype, tl.pointer_type)):
                return check(semantic, lhs, rhs, *flags, **named)
        else:
            kind, number = (lhs.dtype, rhs) if isinstance(lhs, tensor) else (getattr(rhs, "dtype", None), lhs)
            name = getattr(kind, "name", None)
            fits = type(number) is int or (type(number) is float and name in ("fp32", "fp64"))
            if not fits or name not in PLAIN or (type(number) is float and semantic.to_tensor_type(number) is not tl.float32):
                return check(semantic, lhs, rhs, *flags, **named)
            made = constant(semantic, number, kind)
            lhs, rhs = (lhs, made) if number is rhs else (made, rhs)
        one, other = lhs.shape, rhs.shape
        if one is other:
            return lhs, rhs
        key = id(one), id(other)
        names = lhs.dtype.name, rhs.dtype.name
        if (key, names) not in blocks:
            try:
                joined[key] = list(np.broadcast_shapes(sizes_of(one), sizes_of(other)))
            except ValueError:
                joined[key] = None
            blocks[key, names] = block(key, lhs.dtype, one), block(key, rhs.dtype, other)
        if joined[key] is None:
            return check(semantic, lhs, rhs, *flags, **named)
        wide, tall = blocks[key, names]
        return lhs if wide is None else tensor(lhs.handle, wide), rhs if tall is None else tensor(rhs.handle, tall)

    return operands


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
