"""A few of the kills of `python -m tests.kills`."""

import random

from tests.kills import WORKS, faults_of_kills


def test_what_is_killed_at_any_change_of_a_file_is_whole_afterwards(tmp_path):
    faults, kills = faults_of_kills(tmp_path, random.Random(1), dict.fromkeys(WORKS, 2))
    assert faults == []
    assert kills >= 2 * len(WORKS)
