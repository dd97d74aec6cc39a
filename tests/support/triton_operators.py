"""The operators of values of an emulated kernel, each in one call where the interpreter makes dozens.

What an operator does depends on the types of its operands alone. The interpreter computes the first result for each of
them. If one function of NumPy gives the same, it computes the later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Operator = Callable[[Any, Any], Any]


def divide_integers(left: Any, right: Any) -> Any:
    """A quotient rounded towards zero, as the interpreter computes it."""
    return (left - np.fmod(left, right)) // right


COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
OF_NUMBERS = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, **COMPARISONS}
OF_FLOATS = {**OF_NUMBERS, "__truediv__": np.divide}
OF_BOOLEANS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
OF_INTEGERS = {**OF_NUMBERS, **OF_BOOLEANS, "__floordiv__": divide_integers, "__mod__": np.fmod}
# Operators whose left operand is a number.
REVERSED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__", "__rtruediv__": "__truediv__"}
OPERATORS = {*OF_FLOATS, *OF_INTEGERS, *REVERSED}
# How a block gets dimensions of size one.
WIDENINGS = [
    (slice(None), None),
    (None, slice(None)),
    (slice(None), slice(None), None),
    (slice(None), None, slice(None)),
    (None, slice(None), slice(None)),
]


class Rules:
    """What the operators do with values of each type."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.handle = interpreter.TensorHandle
        self.convert = interpreter.interpreter_builder.cast_impl
        self.core = core
        self.integers = {id(core.int32): np.dtype(np.int32), id(core.int64): np.dtype(np.int64)}
        self.floats = {id(core.float32): np.dtype(np.float32), id(core.float64): np.dtype(np.float64)}
        self.numbers = {id(core.bfloat16), id(core.float16), *self.integers, *self.floats}
        self.kept: dict[str, dict[Any, Any]] = {name: {} for name in (*OPERATORS, "__getitem__", "to")}
        self.types: dict[int, Any] = {}  # all that rules are about, so that no other object gets their identities

    def quicken(self, name: str, slow: Operator) -> Operator:
        """An operator that calls the interpreter's, `slow`, only for types that it has not met yet."""
        if name == "__getitem__":
            return self.quicken_widening(slow)
        return self.quicken_conversion(slow) if name == "to" else self.quicken_operator(name, slow)

    def quicken_operator(self, name: str, slow: Operator) -> Operator:
        value, constexpr, handle, rules = self.core.tensor, self.core.constexpr, self.handle, self.kept[name]

        def operate(left: Any, right: Any) -> Any:
            if type(right) is value:
                rule = rules.get((id(left.type), id(right.type)))
                if rule is None:
                    return self.learn(name, slow, left, right)
                if rule is False:
                    return slow(left, right)
                operand = right.handle.data
            else:
                number = right.value if type(right) is constexpr else right
                kind = type(number)
                rule = rules.get((id(left.type), kind))
                if rule is None:
                    return self.learn(name, slow, left, right)
                # -0.0 loses its sign up to Triton 3.8.
                if rule is False or (number == 0 if kind is float else kind is int and not -(2**31) <= number < 2**31):
                    return slow(left, right)
                operand = np.array([number], rule[1])
            compute, _, widens, entries, (type_, dtype, shape, numel), dtype_of_handle = rule
            first = left.handle.data
            # The interpreter widens a number to a block, after which the memory order of the other counts no longer.
            if widens and not (first.flags.c_contiguous and operand.flags.c_contiguous):
                return slow(left, right)
            data = compute(first, operand)
            if data.dtype is not entries:
                return slow(left, right)
            result = value.__new__(value)
            result.handle = handle(data, dtype_of_handle or left.handle.dtype.scalar)
            result.type, result.dtype, result.shape, result.numel = type_, dtype, shape, numel
            return result

        return operate

    def quicken_widening(self, slow: Operator) -> Operator:
        """`x[:, None]`."""
        value, handle, rules = self.core.tensor, self.handle, self.kept["__getitem__"]

        def widen(x: Any, slices: Any) -> Any:
            if slices not in WIDENINGS:
                return slow(x, slices)
            key = (id(x.type), WIDENINGS.index(slices))
            rule = rules.get(key)
            if rule is None:
                result = slow(x, slices)
                described = (result.type, result.dtype, result.shape, result.numel)
                rules[key] = (result.handle.data.shape, described) if x.type.is_block() else False
                self.types[id(x.type)] = x.type
                return result
            if rule is False:
                return slow(x, slices)
            sizes, (type_, dtype, shape, numel) = rule
            result = value.__new__(value)
            result.handle = handle(x.handle.data.reshape(sizes), x.handle.dtype.scalar)
            result.type, result.dtype, result.shape, result.numel = type_, dtype, shape, numel
            return result

        return widen

    def quicken_conversion(self, slow: Operator) -> Operator:
        """`x.to(dtype)`."""
        value, constexpr, rules = self.core.tensor, self.core.constexpr, self.kept["to"]

        def convert(x: Any, dtype: Any, *options: Any, **named: Any) -> Any:
            target = dtype.value if type(dtype) is constexpr else dtype
            if options or named:
                return slow(x, dtype, *options, **named)
            key = (id(x.type), id(target))
            rule = rules.get(key)
            if rule is None:
                result = slow(x, dtype)
                rules[key] = self.learn_conversion(x, target, result)
                self.types |= {id(x.type): x.type, id(target): target}
                return result
            if rule is False:
                return slow(x, dtype)
            if not rule:  # it has this type
                return x
            type_, dtype, shape, numel = rule
            result = value.__new__(value)
            result.handle = self.convert(x.handle, dtype)
            result.type, result.dtype, result.shape, result.numel = type_, dtype, shape, numel
            return result

        return convert

    def learn_conversion(self, x: Any, target: Any, result: Any) -> Any:
        """How values of a type become those of another; nothing for those that stay as they are."""
        if id(x.dtype) not in self.numbers or id(target) not in self.numbers:
            return False
        if result is x:
            return ()
        data, known = self.convert(x.handle, result.dtype).data, result.handle.data
        if data.dtype is known.dtype and data.tobytes() == known.tobytes() and result.handle.dtype is result.dtype:
            return result.type, result.dtype, result.shape, result.numel
        return False

    def learn(self, name: str, slow: Operator, left: Any, right: Any) -> Any:
        """The interpreter's result; keep what gives results for such operands."""
        result = slow(left, right)
        of_two = type(right) is self.core.tensor
        number = right.value if type(right) is self.core.constexpr else right
        key = (id(left.type), id(right.type) if of_two else type(number))
        self.kept[name][key] = False
        self.types |= {id(left.type): left.type} | ({id(right.type): right.type} if of_two else {})
        compute, constant = self.find(name, left.dtype, right.dtype if of_two else type(number))
        if compute is None or (not of_two and type(number) is int and not -(2**31) <= number < 2**31):
            if compute is not None:
                del self.kept[name][key]  # a number of two types
            return result
        data = compute(left.handle.data, right.handle.data if of_two else np.array([number], constant))
        known = result.handle.data
        if data.dtype is known.dtype and data.shape == known.shape and data.tobytes() == known.tobytes():
            described = (result.type, result.dtype, result.shape, result.numel)
            # A boolean's array is noted with the type of the numbers that were compared, which may be any.
            dtype_of_handle = None if left.dtype is self.core.int1 else result.handle.dtype
            widens = left.type.is_block() != (of_two and right.type.is_block())
            self.kept[name][key] = (compute, constant, widens, data.dtype, described, dtype_of_handle)
        return result

    def find(self, name: str, left: Any, right: Any) -> tuple[Any, Any]:
        """The function for operands of two types, of which the second may be Python's, and NumPy's type of a number."""
        integers, floats = self.integers, self.floats
        turned = name in REVERSED
        name = REVERSED.get(name, name)
        constant = None
        compute: Any = None
        if id(left) in floats and (right is left or right is float or right is int):
            compute, constant = OF_FLOATS.get(name), floats[id(left)]
        elif id(left) in integers and (id(right) in integers or right is int):
            compute, constant = OF_INTEGERS.get(name), integers[id(left)]
        elif left is self.core.int1 and right is left:
            compute = OF_BOOLEANS.get(name)
        elif left.is_ptr() and name == "__add__" and not turned and (id(right) in integers or right is int):
            width = max(1, left.element_ty.primitive_bitwidth // 8)
            return lambda places, steps: places + width * steps.astype(np.uint64), np.dtype(np.int32)
        if turned and compute is not None:
            straight = compute
            compute = lambda number, value: straight(value, number)  # noqa: E731
        return compute, constant
