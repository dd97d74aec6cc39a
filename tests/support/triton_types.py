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
    _share_shapes_of_blocks(core)
    _share_shapes_of_values(core)
    _compare_by_identity_first(core)
    _look_up_promotions(semantic)
    _leave_alike_shapes_alone(semantic)


def _share_shapes_of_blocks(core: Any) -> None:
    """Of a type of block: its shape, the number of its entries, and the first part of its name."""
    validate = core.validate_block_shape

    @functools.cache
    def describe(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        shape = core.tuple(sizes)
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return shape, validate(shape), str(shape)

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, (list, core.tuple))
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if any([type(size) is not int for size in sizes]):
            validate(sizes)  # 16.0 would be found where 16 is kept
        self.element_ty = element_ty
        self.shape, self.numel, name = describe(sizes)
        self.name = f"<{name}, {element_ty}>"
        self.alike = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        # By identity, as types of pointers have no hash; a type that is kept keeps its identity from being used again.
        found = self.alike.get(id(scalar_ty))
        if found is None:
            found = self.alike[id(scalar_ty)] = core.block_type(scalar_ty, self.shape)
        return found

    core.block_type.__init__ = begin
    core.block_type.with_element_ty = with_element_ty


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


def _leave_alike_shapes_alone(semantic: Any) -> None:
    """Two blocks of one shape need no search for the shape in which they meet."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_where_shapes_differ(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_where_shapes_differ
