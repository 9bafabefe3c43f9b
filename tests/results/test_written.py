"""Text, Markdown and CSV of tables stay the same, byte for byte: `written/` holds them as they were reviewed."""

from pathlib import Path

import pytest

from landmark.config import to_config
from landmark.config.rows import select
from landmark.results import render
from landmark.results.paper import read_paper
from landmark.results.tables import build
from tests.configurations import compose_conf, row_record
from tests.results.made_up import made_up

WRITTEN = Path(__file__).parent / "written"
CASES = {  # experiment: seeds, rows
    "table1_pg19": (2, slice(0, 4)),
    "table3_cmt": (1, ("no_cmt", "cmt_0.2", "cmt_0.6")),
    "ablation_retrieval": (1, ("rerank_512", "random_512", "sinks_512", "landmark_1024")),
    "figure3_passkey": (1, slice(-4, None)),
    "retriever": (1, slice(None)),
    "figure5_unique_blocks": (1, slice(None)),
}


def written(experiment: str) -> str:
    """All three forms of a table with made-up results."""
    seeds, chosen = CASES[experiment]
    overrides = [f"+experiment={experiment}", "size=nano", f"seeds=[{','.join(map(str, range(seeds)))}]"]
    config = to_config(compose_conf(overrides))
    records = {}
    rows = select(config, overrides, compose_conf)
    rows = rows[chosen] if isinstance(chosen, slice) else [row for name in chosen for row in rows if row.name == name]
    for number, row in enumerate(rows):
        records[row.name] = [
            made_up(row_record(each, row.name, 4.5 + 0.1 * number + 0.02 * each.seed), experiment)
            for each in row.configs
        ]
        if experiment == "figure3_passkey" and number % 2:  # blocks on disk
            records[row.name][0]["results"]["memory"] = {"cache_hits": 7, "seconds_searching": 2.5}
    table = build(experiment, records, read_paper(experiment), config.compare, figure=config.figure)
    return "\n".join([render.as_text(table), render.as_markdown(table), render.as_csv(table)])


@pytest.mark.parametrize("experiment", CASES)
def test_a_table_is_written_as_before(experiment):
    assert written(experiment) == (WRITTEN / f"{experiment}.txt").read_text(encoding="utf-8")
