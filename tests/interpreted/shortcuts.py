"""Work that Triton's interpreter repeats, done once: the same kernels give the same numbers in a fraction of the time.

1. Every call of a device function patches `triton.language` for the interpreter. Here it is patched once per process.
2. Every integer operation is computed again in 64 bits to assert that it did not overflow. The assertion itself is off, as it
   is on a GPU without `debug`; here the second computation is off too.
3. A reduction with a function of its own goes from element to element. Here it combines whole arrays in pairs, as a GPU does.
4. The numpy type of a Triton type is looked up in a table that is built anew each time. Here it is remembered.
5. Every tensor checks its shape and wraps each number of it anew. Here tensors of one shape share what was made of it.
6. Two operands are compared size by size before they are broadcast. Here those that share their shape are not.
7. Both operands of a binary operation are checked, cast and filled to the full size. Here those of one type are neither checked
   nor cast, and numpy broadcasts the smaller one, so that nothing is filled. The three of `where` likewise.
8. Every function of `triton.language` is called through two wrappers. Here it is called through one.
9. What holds an array is made in three calls, which compare sizes. Here it is one call, with the same comparison.
10. Types are compared by their names, and whatever is given is asked for constants. Here what is the same is equal, and what is
    plain is left.
11. A new axis of length one is made by way of a builder, and its shape number by number. Here the array is indexed.
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
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrap_of(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = equal_of(tl.dtype.__eq__)
    interpreter._patch_attr = call_directly
    scope = interpreter._patch_lang(everything)
    interpreter._patch_lang = lambda fn: type(scope)()  # which restores nothing
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = reduce_in_pairs
    interpreter.TensorHandle.__init__ = hold
    share_shapes()
    operands = operands_of(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.where = where_of(TritonSemantic.where, operands)
    TritonSemantic.expand_dims = expand_of(TritonSemantic.expand_dims)
    tl.tensor.__getitem__ = axes_of(tl.tensor.__getitem__)


WRAPPER = tl.core.builtin(lambda _semantic: None).__code__


def call_directly(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Makes a function of Triton's language one that Python calls."""
    semantic: Any = interpreter.interpreter_semantic
    inner = member.__wrapped__ if getattr(member, "__code__", None) is WRAPPER else member

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return inner(*args, **named)

    scope.set_attr(owner, name, call)


def unwrap_of(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {int, float, bool, type(None), tl.tensor, tl.dtype}
    return lambda given: given if type(given) in plain else unwrap(given)


def equal_of(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def hold(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """As `TensorHandle` does it."""
    size = data.itemsize
    if size > 1 and not isinstance(dtype, tl.pointer_type) and size * 8 > dtype.primitive_bitwidth:
        raise ValueError(f"numbers of {size * 8} bits in a tensor of {dtype}")
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def remembered(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton's types of blocks and of pointers have no hash, their elements do."""
    of_scalar = functools.cache(numpy_type)

    def numpy_type_of(kind: Any) -> Any:
        scalar = kind.scalar
        return numpy_type(scalar) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return numpy_type_of


def sizes_of(shape: Any) -> tuple[int, ...]:
    return tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])


def share_shapes() -> None:
    """Types and tensors of blocks get the shape, its text and the number of elements of the first ones like them."""
    make_type, make_tensor, broadcast = tl.block_type.__init__, tl.tensor.__init__, TritonSemantic.broadcast_impl_value
    of_types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    of_shapes: dict[int, tuple[Any, int, str]] = {}  # by the ids of shapes, which live in the table above
    of_tensors: dict[int, tuple[Any, Any]] = {}  # by the id of a type's shape, which lives in the table above

    def type_of(self: Any, element_ty: Any, shape: Any) -> None:
        known = of_shapes.get(id(shape))
        if known is None:
            sizes = sizes_of(shape)
            known = of_types.get(sizes)
            if known is None:
                make_type(self, element_ty, shape)
                known = of_types[sizes] = self.shape, self.numel, str(self.shape)
                of_shapes[id(self.shape)] = known
        self.element_ty = element_ty
        self.shape, self.numel, text = known
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


def where_of(where: Callable[..., Any], operands: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Blocks go to numpy as they are, which broadcasts them; scalars, and shapes that do not fit, go through `where`."""
    tensor, joined = tl.tensor, dict[tuple[int, int], Any]()  # by the ids of two shapes, which `share_shapes` keeps

    def choice(semantic: Any, condition: Any, x: Any, y: Any) -> Any:
        if not condition.type.is_block() or condition.dtype.name != "int1":
            return where(semantic, condition, x, y)
        one, other = operands(semantic, x, y, True, True)
        kind = one.type
        if not kind.is_block() or one.shape is not other.shape:
            return where(semantic, condition, x, y)
        if condition.shape is not one.shape:
            key = id(condition.shape), id(one.shape)
            if key not in joined:
                try:
                    joined[key] = list(np.broadcast_shapes(sizes_of(condition.shape), sizes_of(one.shape)))
                except ValueError:
                    joined[key] = None
            if joined[key] is None:
                return where(semantic, condition, x, y)
            kind = tl.block_type(one.dtype, joined[key])
        return tensor(semantic.builder.create_select(condition.handle, one.handle, other.handle), kind)

    return choice


def expand_of(expand: Callable[..., Any]) -> Callable[..., Any]:
    tensor, handle, longer = tl.tensor, interpreter.TensorHandle, dict[tuple[int, int], Any]()

    def expanded(semantic: Any, given: Any, axis: int) -> Any:
        kind = given.type
        if not kind.is_block() or type(axis) is not int or not 0 <= axis <= len(kind.shape):
            return expand(semantic, given, axis)
        key = id(kind.shape), axis
        if key not in longer:
            sizes = sizes_of(kind.shape)
            longer[key] = tl.block_type(tl.int32, [*sizes[:axis], 1, *sizes[axis:]]).shape
        data = given.handle.data[(slice(None),) * axis + (None,)]
        return tensor(handle(data, given.handle.dtype.scalar), tl.block_type(kind.scalar, longer[key]))

    return expanded


def axes_of(item: Callable[..., Any]) -> Callable[..., Any]:
    whole = slice(None)

    def axes(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all(each is None or each == whole for each in slices):
            return item(self, slices)
        if len(slices) - slices.count(None) > len(self.shape):
            return item(self, slices)
        semantic, result = interpreter.interpreter_semantic, self
        for axis, each in enumerate(slices):
            if each is None:
                result = semantic.expand_dims(result, axis)
        return result

    return axes


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
