"""The picture of a run's losses: which points it has, and where they lie."""

import json
import math
import types
import xml.etree.ElementTree as xml

import pytest

import train

LINE = [(step, 13 - 12 * (step - 1) / 60) for step in range(1, 62)]  # 13 down to 1 in 61 steps


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # NaN and Infinity as they are
    return path


def cells(text):
    """{(column, row): mark} of the picture, without its labels and axes."""
    rows = [line[13:] for line in text.splitlines() if line[12:13] == "|"]
    return {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row) if mark != " "}


@pytest.mark.quick
def test_a_straight_line_is_the_diagonal():
    """61 steps on 61 columns: each its own, in the row that its loss says; 13 rows, 13 losses."""
    text = train.as_text(train.smooth(LINE), [])
    found = cells(text)
    assert found == {(i, round(12 * i / 60)): "." for i in range(61)}
    assert text.splitlines()[-1].split() == ["steps", "1", "16", "31", "46", "61"]
    labels = [line[:12].strip() for line in text.splitlines()[1:14]]
    assert labels == ["13", "", "", "10", "", "", "7", "", "", "4", "", "", "1"]
    rising = cells(train.as_text([(1, 1.0), (5, 2.0)], [(3, 2.0)]))
    assert rising[0, 12] == rising[60, 0] == "." and rising[30, 0] == "o"
    assert {x for x, _ in rising} == set(range(61))  # no holes
    steep = cells(train.as_text([(1, 1.0), (2, 9.0), (100, 9.0)], []))
    assert {y for _, y in steep} == set(range(13))
    flat = cells(train.as_text([(1, 2.0), (9, 2.0)], []))
    assert set(flat) == {(x, 12) for x in range(61)}


@pytest.mark.quick
def test_the_axis_of_steps_follows_the_fall():
    """1/step falls early: equal factors of the steps are equal distances; a late fall is linear."""
    early = [(step, 1 / step) for step in range(1, 10001)]
    place, steps, losses, axis = train.frame(early, [])
    assert axis == "steps (log)" and steps == [1, 10, 100, 1000, 10000]
    assert [place(10**i, 1.0)[0] for i in range(5)] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert train.frame([(s, -x) for s, x in early], [])[3] == "steps"  # rises
    assert train.frame([(s, 1.0) for s, _ in early], [])[3] == "steps"
    late = [(step, 1.0 if step < 900 else 0.5) for step in range(1, 1001)]
    assert train.frame(late, [(2000, 0.1)])[1] == [1, 501, 1000, 1500, 2000]


@pytest.mark.quick
def test_smoothing_keeps_a_line_and_halves_nothing_but_noise():
    long = [(s, 5.0 - s / 1000) for s in range(1, 3001)]
    few = train.smooth(long)
    assert len(few) <= 602 and few[0] == long[0] and few[-1] == long[-1]
    assert [loss for _, loss in few] == pytest.approx([5.0 - s / 1000 for s, _ in few])
    noisy = train.smooth([(s, loss + (-1) ** s) for s, loss in long])
    assert max(abs(a[1] - b[1]) for a, b in zip(noisy[60:-60], few[60:-60])) < 0.02
    assert train.smooth(LINE[:40]) == LINE[:40]  # too few to lose any


@pytest.mark.quick
def test_the_image_has_the_points_where_the_data_say():
    """Well-formed, in one piece: the plot is x 60 .. 620 and y 340 up to 30."""
    dots = [(31, 7.0), (61, 4.0)]
    image = xml.fromstring(train.as_svg(LINE, dots))
    tag = "{http://www.w3.org/2000/svg}"
    assert image.tag == f"{tag}svg" and not image.findall(f".//{tag}image")
    [path] = image.findall(f"{tag}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in path.get("points").split()]
    assert len(points) == 61
    for (x, y), (step, loss) in zip(points, LINE):
        assert x == pytest.approx(60 + 560 * (step - 1) / 60, abs=0.01)
        assert y == pytest.approx(340 - 310 * (loss - 1) / 12, abs=0.01)
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in image.findall(f"{tag}circle")]
    assert circles == [(340, 185), (620, 262.5)]
    words = [text.text for text in image.findall(f"{tag}text")]
    assert {"1", "16", "31", "46", "61", "13", "10", "7", "4"} <= set(words)


@pytest.mark.quick
def test_points_are_those_of_the_whole_run(tmp_path):
    """Each step once, the last word counts; what is not finite, and other records, are left out."""
    file = write(tmp_path / "metrics.jsonl", [
        {"step": 1, "loss": 5.0, "lr": 1.0}, {"step": 2, "loss": math.nan},
        {"step": 3, "loss": math.inf}, {"step": 3, "fingerprints": {"a": "b"}},
        {"step": 5, "loss": 4.0}, {"step": 5, "val_loss": 4.5, "val_bits_per_byte": 1.0},
        {"step": 4, "loss": 4.4}, {"step": 5, "loss": 3.5}, {"step": 6, "val_loss": math.nan}])
    assert train.curves(file) == [[(1, 5.0), (4, 4.4), (5, 3.5)], [(5, 4.5)]]


@pytest.mark.quick
@pytest.mark.parametrize("logged, rank", [(0, 0), (1, 0), (2, 0), (2, 1)])
def test_less_than_two_points_are_no_picture(logged, rank, tmp_path, capsys):
    """Nor do other ranks than the first make one."""
    write(tmp_path / "metrics.jsonl", [{"step": s, "loss": 1.0 * s} for s in range(1, logged + 1)]
          + [{"step": 1, "val_loss": 2.0}, {"step": 3, "loss": math.nan}])
    run = types.SimpleNamespace(config={"run": {"dir": str(tmp_path)}},
                                mesh=types.SimpleNamespace(rank=rank))
    train.plot(run)
    drawn = (logged, rank) == (2, 0)
    assert (tmp_path / "loss.svg").exists() == bool(capsys.readouterr().out) == drawn
