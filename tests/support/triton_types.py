"""Triton's types and shapes, each built once; anew for every value, they take a good part of an emulated kernel's time.

Nothing changes such an object once it is built.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any


def build_types_once() -> None:
    """Call it before kernels are emulated or compiled."""
    core = importlib.import_module("triton.language.core")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    _share_types_of_pointers(core)
    _share_shapes_of_blocks(core)
    _share_shapes_of_values(core)
    _compare_by_identity_first(core)
    _look_up_promotions(semantic)
    _let_alike_types_meet(core, semantic)
    _meet_shapes_once(core, semantic)


def _share_shapes_of_blocks(core: Any) -> None:
    """Of a type of block: its shape, the number of its entries, and the first part of its name."""
    validate = core.validate_block_shape

    @functools.cache
    def describe(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        shape = core.tuple(sizes)
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return shape, validate(shape), str(shape)

    kept: dict[tuple[int, tuple[int, ...]], Any] = {}

    def look_up(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        """The type of before."""
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        plain = type(element_ty) is core.dtype or type(element_ty) is core.pointer_type
        if not plain or any([type(size) is not int for size in sizes]):
            return object.__new__(cls)
        key = (id(element_ty), sizes)  # a type that is kept keeps the identity of its elements' from being used again
        found = kept.get(key)
        if found is None:
            found = kept[key] = object.__new__(cls)
        return found

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        if "alike" in self.__dict__:
            return
        assert isinstance(shape, (list, core.tuple))
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if any([type(size) is not int for size in sizes]):
            validate(sizes)  # 16.0 would be found where 16 is kept
        self.element_ty = element_ty
        self.shape, self.numel, name = describe(sizes)
        self.name = f"<{name}, {element_ty}>"
        self.alike = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        # By identity, as types of pointers have no hash.
        found = self.alike.get(id(scalar_ty))
        if found is None:
            found = self.alike[id(scalar_ty)] = core.block_type(scalar_ty, self.shape)
        return found

    core.block_type.__new__ = look_up
    core.block_type.__init__ = begin
    core.block_type.with_element_ty = with_element_ty


def _share_types_of_pointers(core: Any) -> None:
    kept: dict[tuple[Any, ...], Any] = {}

    def look_up(cls: Any, element_ty: Any = None, *place: Any, **named: Any) -> Any:
        if cls is not core.pointer_type or type(element_ty) is not core.dtype:
            return object.__new__(cls)
        key = (id(element_ty), *place, *sorted(named.items()))
        found = kept.get(key)
        if found is None:
            found = kept[key] = object.__new__(cls)
        return found

    core.pointer_type.__new__ = look_up


def _share_shapes_of_values(core: Any) -> None:
    """Of a value: the shape and the number of its entries, as constants of the language."""

    def describe(type: Any) -> tuple[Any, Any]:
        sizes = type.shape if type.is_block() else ()
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def begin(self: Any, handle: Any, type: Any) -> None:
        found = type.__dict__.get("of_values")
        if found is None:
            found = type.of_values = describe(type)
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = found

    core.tensor.__init__ = begin


def _compare_by_identity_first(core: Any) -> None:
    equals = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)


def _look_up_promotions(semantic: Any) -> None:
    """The type in which two values meet, by their types."""
    promote = semantic.computation_type_impl
    look_up = functools.cache(lambda *arguments: promote(semantic(None), *arguments))
    semantic.computation_type_impl = lambda self, *arguments: look_up(*arguments)


def _let_alike_types_meet(core: Any, semantic: Any) -> None:
    """Two values of one type, or a value and a number of its kind, need no search for the type in which they meet."""
    check, value = semantic.binary_op_type_checking_impl, core.tensor
    computed = {id(type) for type in (core.int1, core.int32, core.int64, core.float32, core.float64)}

    def is_kept(number: Any, dtype: Any) -> bool:
        """True if a number becomes one of a type."""
        if dtype is core.float32:
            return type(number) is float or type(number) is int
        return dtype is core.int32 and type(number) is int and -(2**31) <= number < 2**31

    def check_unless_alike(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if type(lhs) is value:
            if type(rhs) is value:
                if lhs.dtype is rhs.dtype and id(lhs.dtype) in computed:
                    return self.broadcast_impl_value(lhs, rhs)
            elif is_kept(rhs, lhs.dtype):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
        elif type(rhs) is value and is_kept(lhs, rhs.dtype):
            return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=rhs.dtype), rhs)
        return check(self, lhs, rhs, *options, **named)

    semantic.binary_op_type_checking_impl = check_unless_alike


def _meet_shapes_once(core: Any, semantic: Any) -> None:
    """Of two shapes of as many dimensions, the shape in which they meet; shapes are shared, and have an identity."""
    broadcast = semantic.broadcast_impl_value
    make = "make_tensor" if hasattr(semantic, "make_tensor") else "tensor"  # up to Triton 3.8, the class of values
    meeting: dict[tuple[int, int], Any] = {}

    def widen(self: Any, value: Any, shape: Any) -> Any:
        if value.type.shape is shape:
            return value
        wide = core.block_type(value.dtype, shape)
        return getattr(self, make)(self.builder.create_broadcast(value.handle, shape.values), wide)

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        left, right = lhs.type.shape, rhs.type.shape
        if left is right:
            return lhs, rhs
        shape = meeting.get((id(left), id(right)))
        if shape is not None:
            return widen(self, lhs, shape), widen(self, rhs, shape)
        results = broadcast(self, lhs, rhs)
        if len(left) == len(right):
            meeting[id(left), id(right)] = results[0].type.shape
        return results

    semantic.broadcast_impl_value = broadcast_once
