"""A few of the faults that `python -m tests.faults` draws."""

import random

import pytest

from tests.faults import faults_of_files, faults_of_settings


@pytest.mark.parametrize("seed", [0, 1])
def test_bad_settings_end_in_one_line(work, seed):
    assert faults_of_settings(work, random.Random(seed), 15) == {}


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files_end_in_one_line(work, seed):
    assert faults_of_files(work, random.Random(seed), 15) == {}
