"""FAULTS.md is whole: every fault once, every test it names there, every option an option."""

import ast
import pathlib
import re

import pytest
import test_parity

HERE = pathlib.Path(__file__).parent
KNOWN = HERE.parent.parent / "shared" / "faults.md"
NUMBERS = """
    2 4 6 7 8 9 10 12 13 15 16 18 21 23 25 26 27 29 30 31 32 37 38 39 40 41 43 45 47 48 49 50 52 53
    54 55 57 60 61 62 63 64 66 68 69 71 72 74 77 78 79 80 81 83 85 86 87 88 89 92 94 95 96 97 98 100
    101 103 104 107 109 110 112 113 115 116 118 119 120 121 123 124 125 127 128 129 132 135 136 137
    139 140 141 143 144 145 147 148 149 151 153 154 155 156 157"""
IDS = [f"B{int(n):03}" for n in NUMBERS.split()]


def rows():
    """{id: its cells}; a list of all ids as they stand there."""
    found = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in (HERE / "FAULTS.md").read_text().splitlines()
             if re.match(r"\| B\d+ ", line)]
    return {row[0]: row[1:] for row in found}, [row[0] for row in found]


@pytest.mark.quick
def test_every_fault_stands_there_once():
    assert rows()[1] == IDS


@pytest.mark.quick
def test_the_list_of_faults_is_the_whole_one():
    if not KNOWN.exists():
        pytest.skip("the list of reports is not beside this checkout")
    assert re.findall(r"^\*\*(B\d+)\*\*", KNOWN.read_text(), re.M) == IDS


@pytest.mark.quick
def test_every_test_and_option_that_is_named_exists():
    """And each fault names a test that runs by default, or says that it does not apply."""
    tests = {path.name: {node.name: node for node in ast.parse(path.read_text()).body
                         if isinstance(node, ast.FunctionDef)} for path in HERE.glob("test_*.py")}
    for number, (fault, names, how) in rows()[0].items():
        assert fault and how, number
        default = []
        for name in re.findall(r"`([^`]*)`", names + how):
            if name.startswith("parity matrix: "):
                assert name.removeprefix("parity matrix: ") in test_parity.OPTIONS, (number, name)
                continue
            file, _, function = name.partition("::")
            assert function.startswith("test_") and function in tests[file], (number, name)
            marks = map(ast.unparse, tests[file][function].decorator_list)
            default.append("pytest.mark.full" not in marks)
        assert any(default), number


@pytest.mark.quick
def test_numbers_stand_in_the_table_alone():
    """Other texts tell what is meant, not its number."""
    for path in [*HERE.parent.glob("*.py"), *HERE.parent.glob("*.md"), *HERE.glob("*.py")]:
        text = re.sub(r"# noqa: \w+", "", path.read_text())
        found = [n for n in re.findall(r"\bB\d{3}\b", text) if n in IDS]
        assert not found, (path.name, found)
