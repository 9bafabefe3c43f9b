"""How good answers about a book are, with blocks and with other ways to long context.

    python -m benchmarks.answers MODEL --data ../shared/data --work DIR

MODEL: a folder of transformers, or a .gguf file. Of each book of experiments/sources/questions.json, stretches around
its ten passages are read in each way, and ten questions are answered from copies of the memory. A cloze is made without
hand work: 20 places a book, outside of the stretches, where a name stands; the model reads the text before it, and the
most probable of ten names of the stretches, by their first tokens, is its choice. Answers stay in `--work`, so that the
command goes on where it stopped. `--time BOOK`: seconds and memory of the ways instead, with one book.
"""

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import DynamicCache

from benchmarks.settings import use_threads
from benchmarks.sources import QUESTIONS, Book
from benchmarks.wrapped import bytes_kept, bytes_of
from landmark.documents import Document
from landmark.experiment.evaluation.rows import score_interval
from landmark.models.huggingface import load
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering, finished
from landmark.reading.sources import NULL, find, words
from landmark.utils.files import write_atomic

ALL = {"dense": 1 << 20}
SEARCH = ("bm25_1", "bm25_4", "sources_3", "sources_6")  # have no cloze: a search would be made for each place
WAYS: dict[str, dict[str, int]] = {  # settings of the memory
    **{"blocks_128": {"k": 128}, "all_keys": ALL, "last_tokens": ALL},
    **dict.fromkeys((*SEARCH, "no_text"), ALL),
}
LAST, PASSAGE, ANSWER = 4096, 512, 32  # tokens
NAMES, PLACES, BEFORE = 10, 20, 300  # names and places of a book; characters before a place, without its name
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


class Asked:
    """A book, its questions and its cloze, and what is read before one of them in each way."""

    def __init__(self, answering: Answering, text: str, questions: dict[int, Any], tokens: int, folder: Path):
        self.answering, self.chats, self.folder = answering, answering.chats, folder
        book = Book(answering, text, questions, tokens, folder)
        self.ids, self._known, self._settings, self._whole = book.ids, None, None, None
        self.items = {str(number): each["question"] for number, each in questions.items()}
        self.names, self.places = cloze(self.chats, text, book.text, random.Random(folder.name))
        self.items |= {f"cloze {number}": before for number, (before, _) in enumerate(self.places)}

    def text(self, way: str, item: str) -> list[int]:
        """Ids of what is read before a question or a place."""
        count = len(self.chats.beginning)
        beginning, ids = self.ids[:count], self.ids[count:]
        if way.startswith("sources"):
            return self.chats.text_ids(self.passages(item, int(way.removeprefix("sources_"))))
        if not way.startswith("bm25"):
            return {"no_text": beginning, "last_tokens": [*beginning, *ids[-LAST:]]}.get(way, self.ids)
        parts = [ids[at : at + PASSAGE] for at in range(0, len(ids), PASSAGE)]
        scores = words([self.chats.decode(each) for each in parts], self.items[item])
        best = (-scores).argsort(kind="stable")[: int(way.removeprefix("bm25_"))]
        return [*beginning, *(token for at in best for token in parts[at])]

    def passages(self, item: str, most: int) -> str:
        """The text of those for the answer to a question, found in a memory of the whole text."""
        self._whole = whole = self._whole or self.memory("blocks_128", self.ids)
        asked, null = (self.chats.ids([{"role": "user", "content": each}], False) for each in (self.items[item], NULL))
        text = Document("book", self.chats.decode(self.ids))
        return find(self.answering, whole, [(0, text)], self.ids, asked, null, most, alone=True).text

    def memory(self, way: str, read: list[int]) -> Any:
        """A memory that has read these ids. The last one is kept: it goes on where the ids begin as its own."""
        known, settings = self._known, WAYS[way]
        if known is None or self._settings != settings or read[: known.get_seq_length()] != known.ids[0].tolist():
            self._known = known = self.answering.model.new_memory(**settings)
            self._settings, known.marks = settings, []
        if rest := read[known.get_seq_length() :]:
            finished(self.answering.read(torch.tensor([rest]), known))
        return known.fork(known.mark_before(len(read)))

    def answer(self, way: str, item: str) -> str:
        """The answer to a question, or the name for a place."""
        read = self.text(way, item)
        cache: Any = self.memory(way, read) if read else self.answering.model.new_memory(**WAYS[way])
        if item.startswith("cloze"):
            ids = [*read, *self.chats.text_ids(f"\n\n{self.items[item]}", begins=not read)]
            logits = finished(self.answering.read(torch.tensor([ids[cache.get_seq_length() :]]), cache))[0]
            return max(self.names, key=lambda name: logits[self.names[name]].item())
        return self.said(read, item, cache)

    def said(self, read: list[int], item: str, cache: Any) -> str:
        """The answer to a question behind a text, of which the cache has read a beginning."""
        ids = [*read, *self.chats.ids([{"role": "user", "content": self.items[item]}], not read)]
        answer = self.answering.new_answer(ids, True, self.chats.ends)
        for _ in self.answering.answer(ids, cache, answer, Sampling(), ANSWER):
            pass
        return " ".join(answer.text.split())

    def answers(self, ways: Sequence[str]) -> None:
        """Ask for all answers that are not on disk."""
        found, files = {way: self.found(way) for way in ways}, {way: self.folder / f"{way}.json" for way in ways}
        for item in self.items:
            for way in ways:
                if item not in found[way] and (way not in SEARCH or "cloze" not in item):
                    found[way][item] = self.answer(way, item)
                    write_atomic(files[way], json.dumps(found[way]).encode())

    def found(self, way: str) -> dict[str, str]:
        """The answers that are on disk."""
        file = self.folder / f"{way}.json"
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}

    def timed(self, way: str) -> str:
        """Seconds to the end of the first answer and of a further one, and bytes of keys and values."""
        seconds, first, kept = list[float](), list(self.items)[:2], None
        for item in first:
            started, read = time.perf_counter(), self.text(way, item)
            if way == "own_cache":
                kept = kept or DynamicCache(config=self.answering.model.config)
                if (more := kept.get_seq_length() - len(read)) > 0:
                    kept.crop(-more)
                self.said(read, item, kept)
            else:
                self.said(read, item, self.memory(way, read))
                kept = self._whole or self._known
            seconds.append(time.perf_counter() - started)
        size = bytes_of(kept) if isinstance(kept, DynamicCache) else bytes_kept(kept)
        return f"| {way} | {seconds[0]:.1f} | {seconds[1]:.1f} | {size / 1e6:.0f} |"


def cloze(chats: Any, text: str, read: str, draw: random.Random) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The ids of the first tokens of NAMES, by name; and PLACES, each the text before it and the name there.

    The names are the most frequent words of `read` that have a capital letter within sentences and are never written
    without one. Each has as many places as another, behind letters, in parts of the text that are not in `read`.
    """
    counts = Counter(re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b", read.replace("\n", " ")))
    small, names, places = set(re.findall(r"\b[a-z]+\b", text)), dict[str, int](), list[tuple[str, str]]()
    for name, _ in counts.most_common():
        first = chats.text_ids(f" {name}", False)[0]
        if name.lower() not in small and first not in names.values() and len(names) < NAMES:
            names[name] = first
    for name in names:
        found = list[str]()
        for each in re.finditer(rf"(?<=[a-z,;])\s{name}\b", text):
            before = text[max(0, each.start() - BEFORE) : each.start()]
            if name not in before and before[-80:] not in read and len(before) == BEFORE:
                found.append(before[before.index(" ") + 1 :])
        places += [(before, name) for before in draw.sample(found, min(len(found), PLACES // NAMES))]
    return names, places


def is_right(answer: str, gold: str) -> bool:
    """Whether all words of the right answer but stop words are in an answer, by their stems, numbers as digits."""
    import bm25s

    digits = {word: str(number) for number, word in enumerate(NUMBERS.split())} | {"twenty": "20", "thirty": "30"}
    tokenize: Any = bm25s.tokenize
    said, wanted = tokenize([answer, gold], stopwords="en", show_progress=False, return_ids=False)
    stems = [{str(digits.get(word, word)).removesuffix("s") for word in each} for each in (said, wanted)]
    return stems[1] <= stems[0]


def table(rows: Any) -> str:
    """Right answers, and 95 % intervals, of the questions that each way has answered."""
    lines = ["| way | questions | right | held out | cloze |", "|---|---|---|---|---|"]
    for way, of_way in rows.groupby("way", sort=False):
        asked, places = of_way[of_way["kind"] != "cloze"], of_way[of_way["kind"] == "cloze"]
        cells = [share(each["right"]) for each in (asked, asked[asked["held_out"]], places)]
        lines.append(f"| {way} | {len(asked)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def share(right: Any) -> str:
    """Of so many, and in percent."""
    if not len(right):
        return ""
    low, high = score_interval([[float(each) for each in right]])
    return f"{right.sum()} of {len(right)}: {100 * right.mean():.0f} ({100 * low:.0f} to {100 * high:.0f}) %"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of pg19-mini")
    parser.add_argument("--work", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--tokens", type=int, default=16384, help="of the stretches of a book")
    parser.add_argument("--books", type=lambda text: text.split(","), help="numbers of some books")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*WAYS], help=f"of {','.join(WAYS)}")
    parser.add_argument("--time", metavar="BOOK", help="print seconds and megabytes with this book instead")
    parser.add_argument("--out", type=Path, default=QUESTIONS.parent / "answers" / "results", help="folder of the CSV")
    given = parser.parse_args()
    use_threads()
    content, rows, stem = json.loads((QUESTIONS / "questions.json").read_text("utf-8")), [], Path(given.model).stem
    answering = Answering(*load(given.model), most_bytes=1)

    def asked(name: str) -> Asked:
        text = (given.data / content["books"][name]["file"]).read_text("utf-8")
        questions = {number: each for number, each in enumerate(content["questions"]) if each["book"] == name}
        folder = given.work / f"{stem}-{given.tokens}" / name
        folder.mkdir(parents=True, exist_ok=True)
        return Asked(answering, text, questions, given.tokens, folder)

    if given.time:
        print("| way | first question, s | a further one, s | keys and values, MB |\n|---|---|---|---|")
        for way in ["own_cache", *(each for each in given.ways if WAYS[each] != ALL or each in SEARCH)]:
            print(asked(given.time).timed(way), flush=True)
        return
    search = [way for way in given.ways if way in SEARCH]
    for group in [*([way] for way in given.ways if way not in search), *([search] if search else [])]:
        for name in given.books or content["books"]:
            asked(name).answers(group)
            print(name, *group, "done", flush=True)
    for name in content["books"]:
        book = asked(name)
        for way in WAYS:
            for item, answer in book.found(way).items():
                row = {"book": name, "way": way, "item": item, "kind": "cloze", "held_out": False}
                if item.startswith("cloze"):
                    row["right"] = answer == (gold := book.places[int(item[6:])][1])
                else:
                    each = content["questions"][int(item)]
                    row |= {"kind": each["words"], "held_out": each["held_out"]}
                    row["right"] = is_right(answer, gold := each["answer"])
                rows.append({**row, "gold": gold, "answer": answer})
    frame: Any = pd.DataFrame(rows).sort_values("way", key=lambda column: column.map([*WAYS].index), kind="stable")
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out / f"{stem}-{given.tokens}.csv", frame.to_csv(index=False).encode())
    print(table(frame))


if __name__ == "__main__":
    main()
