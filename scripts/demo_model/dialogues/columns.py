"""Arithmetic written out in columns, from the units: each step is one small table look-up."""

from __future__ import annotations


def added(a: int, b: int) -> str:
    """`47 + 38: 7 + 8 = 15, write 5 carry 1; 4 + 3 = 7, plus 1 = 8, write 8; so 85.`"""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = digit(a, place), digit(b, place)
        total = x + y + carry
        step = f"{x} + {y} = {x + y}" + (f", plus 1 = {total}" if carry else "")
        carry = total // 10
        steps.append(f"{step}, write {total % 10}" + (" carry 1" if carry else ""))
    if carry:
        steps.append("write 1")
    return f"{a} + {b}: {'; '.join(steps)}; so {a + b}."


def subtracted(a: int, b: int) -> str:
    """`82 - 47: 82 >= 47; 2 < 7, 12 - 7 = 5, write 5 borrow 1; 8 - 4 = 4, minus 1 = 3, write 3; so
    35.` A negative result is the other difference with its sign; up to two digits."""
    if a < b:
        return f"{a} - {b}: {a} < {b}, so it is -({b} - {a}). {subtracted(b, a)} So -{b - a}."
    steps, borrow = [f"{a} >= {b}"], 0
    for place in range(len(str(a))):
        x, y = digit(a, place), digit(b, place)
        if x < y:
            steps.append(f"{x} < {y}, {x + 10} - {y} = {x + 10 - y}, write {x + 10 - y} borrow 1")
            borrow = 1
        else:
            step = f"{x} - {y} = {x - y}" + (f", minus 1 = {x - y - 1}" if borrow else "")
            steps.append(f"{step}, write {x - y - borrow}")
            borrow = 0
    return f"{a} - {b}: {'; '.join(steps)}; so {a - b}."


def multiplied(a: int, b: int) -> str:
    """The product of two numbers of up to two digits by those of the digits of one of them."""
    if a < 10 and b < 10:
        return f"{a} * {b} = {a * b}."
    if a < 10:
        return f"{a} * {b} = {b} * {a}. {_times_digit(b, a)}"
    if b < 10:
        return _times_digit(a, b)
    units, tens = b % 10, b // 10
    low, high = a * units, a * tens
    return (
        f"{a} * {b} = {a} * {units} + {a} * {tens}0. {_times_digit(a, units)} "
        f"{_times_digit(a, tens)} With 0: {high}0. {added(low, high * 10)}"
    )


def divided(a: int, b: int) -> str:
    """Long division of up to two digits by one digit, or by 10."""
    if b == 10:
        steps = [f"tens {a // 10}, units {a % 10}"]
    else:
        steps, rest = [], 0
        for place in range(len(str(a)) - 1, -1, -1):
            part = rest * 10 + digit(a, place)
            steps.append(f"{part} / {b} = {part // b} rest {part % b}")
            rest = part % b
    return f"{a} / {b}: {'; '.join(steps)}; so {quotient(a, b)}."


def quotient(a: int, b: int) -> str:
    """`7 remainder 5`, or `7`."""
    return f"{a // b} remainder {a % b}" if a % b else str(a // b)


def digit(number: int, place: int) -> int:
    """The digit at a place, from the units."""
    return number // 10**place % 10


def _times_digit(a: int, d: int) -> str:
    """`47 * 8: 7 * 8 = 56, write 6 carry 5; 4 * 8 = 32, plus 5 = 37, write 37; so 376.`"""
    if d == 0:
        return f"{a} * 0 = 0."
    u, t = a % 10 * d, a // 10 * d
    carry = u // 10
    first = f"{a % 10} * {d} = {u}, write {u % 10}" + (f" carry {carry}" if carry else "")
    second = f"{a // 10} * {d} = {t}" + (f", plus {carry} = {t + carry}" if carry else "")
    return f"{a} * {d}: {first}; {second}, write {t + carry}; so {a * d}."
