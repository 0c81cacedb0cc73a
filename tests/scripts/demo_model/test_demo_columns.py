"""Thinking in columns, for every pair of numbers: each step is true, and the digits written are the result's."""

from __future__ import annotations

import re

import pytest

from scripts.demo_model.dialogues import columns
from scripts.demo_model.dialogues.arithmetic import Exercise

EQUATION = re.compile(
    r"(?<![\d-])(\d+) ([-+*/]) (\d+) = (-?\d+)(?!\d| \*)(?: (?:rest|remainder) (\d+))?"
)
THEN = re.compile(r"= (\d+), (plus|minus) (\d+) = (\d+)")
COMPARED = re.compile(r"(?<![\d-])(\d+) (<|>=) (\d+)")
SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def check_steps(text: str) -> None:
    """Every equation and comparison of a thinking text holds."""
    found = EQUATION.findall(text)
    assert found, text
    for a, sign, b, result, rest in found:
        x, y = int(a), int(b)
        if sign == "/":
            assert (int(result), int(rest or 0)) == divmod(x, y), text
        else:
            assert int(result) == {"+": x + y, "-": x - y, "*": x * y}[sign], text
    for before, word, by, after in THEN.findall(text):
        assert int(after) == int(before) + (int(by) if word == "plus" else -int(by)), text
    for a, sign, b in COMPARED.findall(text):
        assert (int(a) < int(b)) == (sign == "<"), text


def written(text: str) -> int:
    """The number whose digits a column wrote, from the units."""
    return int("".join(reversed(re.findall(r"write (\d)", text))))


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_all_pairs(operation: str) -> None:
    for a in range(100):
        for b in range(100):
            one = Exercise(operation, a, b)
            check_steps(one.steps)
            expected = {"add": a + b, "sub": a - b, "mul": a * b}[operation]
            assert one.steps.endswith(f"{a} {SIGNS[operation]} {b} = {expected}.")
            if operation == "add":
                assert written(one.steps) == expected
            elif operation == "sub":
                assert written(one.steps) == abs(expected)


def test_all_quotients() -> None:
    for a in range(100):
        for b in range(2, 11):
            steps = Exercise("div", a, b).steps
            check_steps(steps)
            quotient, rest = divmod(a, b)
            ending = f" remainder {rest}" if rest else ""
            assert steps.endswith(f"{a} / {b} = {quotient}{ending}.")
            digits = re.findall(r"= (\d+) rest", steps)
            if b < 10:
                assert int("".join(digits)) == quotient
            else:
                assert f"tens {quotient}, units {rest}" in steps


def test_the_last_sum_of_a_product_is_written_out() -> None:
    assert columns.multiplied(47, 38) == (
        "47 * 38 = 47 * 8 + 47 * 30. 47 * 8: 7 * 8 = 56, write 6 carry 5; 4 * 8 = 32, plus 5 = 37, "
        "write 37; so 376. 47 * 3: 7 * 3 = 21, write 1 carry 2; 4 * 3 = 12, plus 2 = 14, write 14; "
        "so 141. With 0: 1410. 376 + 1410: 6 + 0 = 6, write 6; 7 + 1 = 8, write 8; 3 + 4 = 7, "
        "write 7; 0 + 1 = 1, write 1; so 1786."
    )


def test_both_orders_of_a_sum_have_one_key() -> None:
    assert Exercise("add", 47, 38).key == Exercise("add", 38, 47).key == "add:38+47"
    assert Exercise("sub", 47, 38).key != Exercise("sub", 38, 47).key
