"""Nothing is skipped without a word: rules are cited, public names are listed and documented."""

import subprocess
import sys
from pathlib import Path

import planner
import planner.testing

ROOT = Path(__file__).parents[2]


def test_every_rule_is_cited() -> None:
    """scripts/check_rules.py lists no rule of its areas that is neither cited nor explained."""
    script = [sys.executable, str(ROOT / "scripts" / "check_rules.py")]
    run = subprocess.run(script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_public_names() -> None:
    """The packages list what they offer, sorted, and every name has a docstring."""
    for package in (planner, planner.testing):
        assert sorted(package.__all__) == sorted(set(package.__all__))
        for name in package.__all__:
            value = getattr(package, name)
            assert not callable(value) or value.__doc__, name
