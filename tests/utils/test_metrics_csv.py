"""metrics.csv of a run that is resumed, perhaps after its last line was cut short."""

import pytest

from landmark.utils.errors import UserError
from landmark.utils.metrics_csv import COLUMNS, append_metrics, drop_lines_after, read_metrics


def test_a_resumed_file_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.csv"
    drop_lines_after(path, 0)
    for step in range(1, 6):
        append_metrics(path, step, {"train/loss": 1 / step})
    drop_lines_after(path, 3)
    append_metrics(path, 4, {"validation/loss": 0.5})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2] == {"step": 3, "train/loss": 0.333333333}
    assert rows[3] == {"step": 4, "validation/loss": 0.5}


def test_a_line_cut_short_is_dropped_and_a_file_of_fewer_columns_is_gone_on_with(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,train/loss,validation/loss\n1,2,\n2,1.5,1.25\n3,1")
    first = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.5, "validation/loss": 1.25}]
    assert read_metrics(path) == first
    drop_lines_after(path, 2)
    append_metrics(path, 3, {"train/gradient_norm": 0.5})
    assert read_metrics(path) == [*first, {"step": 3, "train/gradient_norm": 0.5}]
    drop_lines_after(path, 0)  # a new run starts a new file
    assert path.read_text() == ",".join(COLUMNS) + "\n"


def test_a_folder_that_is_moved_meanwhile_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "metrics.csv"
    drop_lines_after(path, 0)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"metrics\.csv cannot be written, its folder was moved or deleted"):
        append_metrics(path, 1, {"train/loss": 2.0})
