"""A process that is stopped, dies or does not come is named, within the patience that is set, in one line.

Where the first process says it first, the others may only say that they lost it: it keeps the store of all.
"""

import signal

import pytest

from tests.cli.presence_case import part
from tests.together import exit_codes

LOST = "error: the connection with another process was lost ("
KEEPER = "error: the process that keeps the store of all, rank 0 or torchrun, gave no sign of life for 4 seconds"


@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("1 stops", [2, None, 2], ["error: rank 1 (", None, "error: "]),
        ("0 stops", [None, 2, 2], [None, KEEPER, KEEPER]),
        ("1 is absent", [2, 3, 2], ["error: rank 1 of 3 processes did not join within 4 seconds", None, "error: "]),
        (
            "0 is absent",
            [3, 2, 2],
            [None, "error: rank 0 was not reached within 4 seconds at 127.0.0.1", "error: rank"],
        ),
        ("1 is killed", [2, -signal.SIGKILL, 2], [LOST, None, LOST]),
        ("0 refuses", [2, 2, 2], ["error: train.steps=-1: must be at least 1", "", ""]),
        ("0 evaluates", [0, 0, 0], ["", "", ""]),
        ("all are suspended", [0, 0, 0], ["", "", ""]),
    ],
)
def test_who_is_missing_is_said(tmp_path, case, codes, said):
    assert exit_codes(3, part, tmp_path, case, timeout=25) == codes
    for rank, expected in enumerate(said):
        lines = [
            line for line in (tmp_path / str(rank)).read_text().splitlines() if line.startswith(("error", "Trace"))
        ]
        if expected is not None:
            assert len(lines) == bool(expected)
            assert "".join(lines).startswith(expected)
