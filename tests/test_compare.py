"""bench/compare.py: its tables from made-up numbers, the section it may write to, its commands."""

import argparse
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.quick
TRAINER = """
import json, sys
def say(**record):
    print("@bench " + json.dumps(record), flush=True)
times = iter(json.loads(sys.argv[1]))
say(ready=True, params=1234567, tokens_per_step=100)
for line in sys.stdin:
    timed = [next(times) for _ in range(int(line.split()[1]) - 1)]
    say(step_s=[99.0, *timed], loss=1.0, rss_mb=[10, 11])
"""  # the first step of a round does not count
SCRIPT = """
import json
records = [{"what": "stall", "unit": "s", "ours": [1, 2, 4], "theirs": [4, 4, 4]},
           {"what": "load", "unit": "GB/s", "ours": [3, 3, 3], "theirs": [1, 2, 3]}]
print("some table")
print("@bench", json.dumps(records))
"""


@pytest.fixture
def compare(monkeypatch):
    """The module; for it a row's command is the source of a program, and what it is told."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import compare

    monkeypatch.setattr(compare, "command_of", lambda row, args: [
        sys.executable, "-c", *row.command.split("@ ")])
    return compare


def args_of(**changed):
    return argparse.Namespace(**{"peers": None, "ranks": None, "quick": False, "rounds": 2,
                                 "steps": 3} | changed)


def test_the_table_of_those_who_take_turns(compare):
    """Medians 3 and 1.5 of all steps, 3 / 1 and 3 / 2 of the rounds."""
    rows = [compare.Row("nanoGPT", "", "nanoGPT"),
            compare.Row("peer", TRAINER + "@ [2, 4, 3, 3]"),
            compare.Row("broken", "print()\nraise ValueError('of this machine')"),
            compare.Row("mortal", TRAINER + "@ [5, 5]"),  # has no numbers for a second round
            compare.Row("ours", TRAINER + "@ [1, 1, 2, 2]"),
            compare.Row("ours, other", TRAINER + "@ [1, 1, 1, 1]")]
    table, good = compare.contest(compare.Part("", rows, 4), args_of())
    assert good and table[2:] == [
        "| nanoGPT | absent: no checkout DIR/nanoGPT | | | |",
        "| peer | 33 | 2.000 (1.500-3.000) | 10 / 11 | 1,234,567 |",
        "| broken | does not run: ValueError: of this machine | | | |",
        "| mortal | does not run: StopIteration | | | |",
        "| ours | 67 | 1 | 10 / 11 | 1,234,567 |",
        "| ours, other | 100 | 0.667 (0.500-1.000) | 10 / 11 | 1,234,567 |"]
    assert all(line.count("|") == table[0].count("|") for line in table)


def test_without_ours_there_is_no_ratio(compare):
    rows = [compare.Row("peer", TRAINER + "@ [2, 4, 3, 3]"), compare.Row("ours", "1 / 0")]
    table, good = compare.contest(compare.Part("", rows, 1), args_of())
    assert not good and table[2:] == [
        "| peer | 33 |  | 10 / 11 | 1,234,567 |",
        "| ours | does not run: ZeroDivisionError: division by zero | | | |"]


def test_the_table_of_scripts_that_measure_both(compare):
    """Of a time the smaller is better, of a rate the larger."""
    rows = [compare.Row("one", SCRIPT), compare.Row("tokenizing", SCRIPT, "FILE")]
    table, good = compare.reports(compare.Part("", rows, None), args_of())
    assert good and table[2:] == ["| one: stall | 2 s | 4 s | 2.00 (1.00-4.00) |",
                                  "| one: load | 3 GB/s | 2 GB/s | 1.50 (1.00-3.00) |",
                                  "| tokenizing | absent: no --ranks FILE | | |"]
    table, good = compare.reports(compare.Part("", [compare.Row("two", "import nothing")], None),
                                  args_of())
    assert not good and table[2:] == [
        "| two | does not run: ModuleNotFoundError: No module named 'nothing' | | |"]


def test_only_what_lies_between_the_markers_is_written(compare):
    text = f"before\n{compare.BEGIN}\n\n{compare.END}\n## after\n### gpt2: not in the section\n"
    one = compare.written(text, {"tensor": "### tensor: t\n\n| a |\n",
                                 "ddp": "### ddp: d\n\nold\n"})
    two = compare.written(one, {"ddp": "### ddp: d\n\nnew\n", "gpt2": "### gpt2: g\n\n| c |\n"})
    for made in (one, two):
        assert made.partition(compare.BEGIN)[0] == "before\n"
        assert made.partition(compare.END)[2] == text.partition(compare.END)[2]
    assert two.partition(compare.BEGIN)[2].partition(compare.END)[0] == (
        "\n\n### gpt2: g\n\n| c |\n\n### ddp: d\n\nnew\n\n### tensor: t\n\n| a |\n\n")
    assert compare.written(two, {}) == two
    for bad in ("", compare.BEGIN, compare.END + compare.BEGIN, text + compare.BEGIN):
        with pytest.raises(SystemExit, match="no place"):
            compare.written(bad, {})


def test_the_results_have_a_place_for_it(compare):
    text = (ROOT / "bench/RESULTS.md").read_text()
    made = compare.written(text, {"data": "### data: d\n\nnew\n"})
    assert made.partition(compare.BEGIN)[0] == text.partition(compare.BEGIN)[0]
    assert made.partition(compare.END)[2] == text.partition(compare.END)[2]


def test_what_is_told_of_a_measurement(compare, tmp_path):
    """Versions, machine, date and command, and no path of this machine."""
    (tmp_path / "nanoGPT").mkdir()
    told = compare.facts(args_of(peers=tmp_path, ranks=tmp_path / "r"), "ddp", "abc1234")
    for words in ("cores", "torch 2.", "numpy ", "commit ", "nanoGPT unknown", "load ",
                  "`python bench/compare.py --peers DIR --only ddp --ranks FILE --rounds 2 --ste"):
        assert words in told
    assert re.match(r"20\d\d-\d\d-\d\d, ", told) and str(tmp_path) not in told
    assert "litgpt" not in told and str(ROOT) not in told


def known(script, words):
    """Every option and every choice is in the script's source."""
    source = (ROOT / script).read_text()
    shapes = "".join((ROOT / f"bench/{name}.py").read_text() for name in ("step", "sharded"))
    for before, word in zip(["", *words], words):
        if word.startswith("--"):
            assert f'add_argument("{word}"' in source, (script, word)
        elif word.isidentifier():
            assert f'"{word}"' in source + shapes * (before == "--shape"), (script, word)


@pytest.mark.parametrize("quick", [False, True])
def test_every_row_has_a_command_that_is_there(compare, quick, monkeypatch):
    monkeypatch.undo()  # command_of is its own again
    seen = set()
    for part in compare.parts(quick).values():
        assert len({row.name for row in part.rows}) == len(part.rows)
        assert part.ours is None or part.rows[part.ours].name.startswith("ours")
        for row in part.rows:
            line = compare.command_of(row, args_of(peers=pathlib.Path("p"), ranks="r/r"))
            assert not {"DIR", "FILE"} & {piece for word in line for piece in word.split("/")}
            known(line[1], line[2:])
            seen.add(pathlib.Path(line[1]).name)
    assert seen == {"peers.py", "step.py", "sharded.py", "tensor.py", "pipeline.py", "context.py",
                    "ckpt.py", "loading.py"}


def test_the_list_for_a_gpu_is_there_too():
    """Each of its commands, and each that RESULTS.md names, which names all it runs of bench/."""
    script, results = ((ROOT / f"bench/{name}").read_text() for name in ("gpu.sh", "RESULTS.md"))
    lines = [line.split() for line in re.findall(r"^part \w+ python (\S.*)$", script, re.M)]
    assert len(lines) >= 5
    for words in lines:
        for word in words:
            assert "/" not in word or (ROOT / word).exists(), word
        if words[0].startswith("bench/"):
            known(words[0], words[1:])
            assert words[0] in results.partition("## On a GPU")[2] or words[0] == "bench/gpu.py"
    for name in re.findall(r"\bbench/\w+\.\w+", results + script):
        assert (ROOT / name).exists() or name == "bench/gpu-DATE.md", name
