"""A trained row and its table, recomputed in float64 from the tokens by plain loops, without the evaluation."""

import json
import math
import random

import numpy as np
import pytest
import torch

import landmark
from landmark.experiment.results.tables import build
from tests.configurations import SMALL
from tests.workplace import run_task

SPAN, BUDGET, LENGTHS = 4096, 40_960, (512, 360)


def write_books(folder):
    """Eight books a split, some easy and some hard: losses of one book are alike."""
    draw = random.Random(0)
    for split in ("train", "validation", "test"):
        (folder / split).mkdir(parents=True)
        for number in range(8):
            words = ["crow", "boat", "lake", "hill", "étang", "Quito"][: 1 + number % 6]
            (folder / split / f"{number}.txt").write_text(" ".join(draw.choice(words) for _ in range(1200)))


@torch.no_grad()
def losses_of(model, tokens, length):
    """For each segment the place where its span begins to count, and of its counted tokens the places and losses: each
    token of ten spans counts once, where it is first predicted; the last segment of a span begins so early that it has
    the full length.
    """
    predictions, segments = len(tokens) - 1, []
    count = BUDGET // SPAN
    for number in range(count):
        start, seen = number * predictions // count, set()
        for offset in range(0, SPAN, length):
            begin = start + min(offset, SPAN - length)
            ids = torch.tensor(tokens[begin : begin + length])[None]
            logits, counted = model(ids)[0].double(), {}
            for place in range(length):
                target = begin + place + 1
                if target not in seen:
                    seen.add(target)
                    row = logits[place]
                    counted[target] = float(torch.logsumexp(row, 0) - row[tokens[target]])
            segments.append((start + 1, counted))
        assert len(seen) == SPAN
    return segments


def clustered(sums):
    """The mean of tokens in clusters and its standard error. sums: of each cluster, tokens and nats."""
    tokens, nats = sum(each[0] for each in sums), sum(each[1] for each in sums)
    squares = sum((nats_of - nats / tokens * tokens_of) ** 2 for tokens_of, nats_of in sums)
    return nats / tokens, math.sqrt(len(sums) / (len(sums) - 1) * squares) / tokens


def by_book(segments, books):
    """Tokens and nats of each book; a segment is of the book in which its span begins to count."""
    sums = {}
    for first, counted in segments:
        book = sum(start <= first for start in books)
        tokens, nats = sums.get(book, (0, 0.0))
        sums[book] = tokens + len(counted), nats + sum(counted.values())
    return list(sums.values())


def test_a_trained_row_is_what_plain_loops_in_float64_say(tmp_path):
    write_books(tmp_path / "books")
    given = ["size=nano", f"data.path={tmp_path / 'books'}", "tokenizer=bytes", "model=transformer", *SMALL]
    given += [f"output={tmp_path / 'outputs'}", f"data.cache={tmp_path / 'cache'}", f"eval.tokens={BUDGET}"]
    for length in LENGTHS:
        run_task(*given, f"eval.length={length}")
    records = [json.loads(file.read_text()) for file in (tmp_path / "outputs" / "records" / "rows").iterdir()]
    records = {record["settings"]["eval_length"]: record for record in records}
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    (file,) = (tmp_path / "cache").glob("*/test.bin")
    tokens = np.fromfile(file, "<u2").astype(int).tolist()
    model = landmark.load(folder)[0].double().eval()
    end = max(tokens)  # no byte
    books = [0, *(place + 1 for place, token in enumerate(tokens) if token == end)]
    own = {length: losses_of(model, tokens, length) for length in LENGTHS}
    table = build("t", {str(length): [records[length]] for length in LENGTHS})
    for length, row in zip(LENGTHS, table.rows, strict=True):
        results, counted = records[length]["results"], own[length]
        nats = sum(sum(segment.values()) for _, segment in counted)
        assert results["tokens"] == sum(len(segment) for _, segment in counted) == BUDGET
        found = [segment[:2] for segment in sorted(results["segments"])]
        assert found == [[min(segment), len(segment)] for _, segment in counted]
        assert row.perplexity == pytest.approx(math.exp(nats / BUDGET))
        bytes_read = sum(tokens[target] != end for _, segment in counted for target in segment)
        assert row.bits_per_byte == pytest.approx(nats / bytes_read / math.log(2))
        mean, error = clustered(by_book(counted, books))
        assert row.units == "8 documents"
        assert row.spread == pytest.approx(math.exp(mean) * error, rel=1e-4)
        naive = clustered([(len(segment), sum(segment.values())) for _, segment in counted])[1]
        assert error > 1.5 * naive  # as if segments of a book were independent
    pairs = [
        dict(enumerate(sorted({k: v for _, each in own[length] for k, v in each.items()}.items())))
        for length in LENGTHS
    ]
    spans = []
    for number in range(BUDGET // SPAN):
        (first, _), nats = pairs[0][number * SPAN], 0.0
        for place in range(number * SPAN, (number + 1) * SPAN):
            (here, loss), (there, other) = pairs[0][place], pairs[1][place]
            assert here == there
            nats += other - loss
        spans.append((first, {first: nats, **{first + place: 0.0 for place in range(1, SPAN)}}))
    difference, error = clustered(by_book(spans, books))
    found = table.rows[1]
    assert found.difference == pytest.approx(difference, rel=1e-4)
    assert found.difference_error == pytest.approx(error, rel=1e-3)
