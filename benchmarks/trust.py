"""How well a measure tells answers that are right and in the text from others.

    python -m benchmarks.trust MODEL --data ../shared/data --work DIR

MODEL: a folder of transformers, or a .gguf file. About 16,384 tokens of each book of experiments/sources are read once.
Its ten questions, and those of unanswerable.json that were written for it, are answered from passages alone
(`generate.from_sources`), without a text, and through blocks. What was found and answered stays in `--work`, a line a
question, so that the command goes on where it stopped. The CSV has a row for each question, with every measure.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.settings import use_threads
from benchmarks.sources import QUESTIONS, Book
from landmark.documents import Document
from landmark.models.huggingface import load
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering, finished
from landmark.reading.sources import NULL, find, scores_of

ANSWER, MOST = 32, 3  # tokens of an answer, and passages


def likelihoods(answering: Answering, ids: list[int], answer: list[int]) -> list[float]:
    """Nats of each token of an answer behind these ids."""
    with torch.inference_mode():
        read = torch.tensor([[*ids, *answer]])
        logits = answering.model(
            read, past_key_values=answering.model.new_memory(), logits_to_keep=len(answer) + 1
        ).logits
        nats = logits[0, :-1].float().log_softmax(-1)
        return nats.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


def said(answering: Answering, ids: list[int], cache: Any) -> Any:
    """The answer to a prompt, of which the cache has read a beginning."""
    answer = answering.new_answer(ids, True, () if answering.chats.template else ("\nuser:",))
    for _ in answering.answer(ids, cache, answer, Sampling(), ANSWER):
        pass
    return answer


class Asked:
    """A book, and what is recorded of each question about it."""

    def __init__(self, answering: Answering, text: str, questions: dict[int, Any], tokens: int, folder: Path):
        self.answering, self.chats = answering, answering.chats
        book = Book(answering, text, questions, tokens, Path())
        self.ids, self.text, self._whole, self._folder = book.ids, book.text, None, folder

    def whole(self) -> Any:
        """The memory of the text."""
        if self._whole is None:
            self._whole = cache = self.answering.model.new_memory()
            if self._folder.is_dir():
                cache.load(self._folder)
            else:
                finished(self.answering.read(torch.tensor([self.ids]), cache))
                cache.save(self._folder)
            cache.marks = []
            cache.settle()
            cache.add_mark()
        return self._whole

    def recorded(self, question: str, gold: str | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The answers and measures, and the shares of attention (layers, H, blocks)."""
        answering, cache = self.answering, self.whole()
        prompt, null = (self.chats.ids([{"role": "user", "content": each}], False) for each in (question, NULL))
        documents = [(0, Document("book", self.chats.decode(self.ids)))]
        about = answering, cache, documents, self.ids, prompt, null
        scores = scores_of(*about)
        assert scores is not None
        found = find(*about, MOST, alone=True)
        passages = self.chats.text_ids(found.text)
        answer = said(answering, ids := [*passages, *prompt], answering.model.new_memory())
        alone = self.chats.ids([{"role": "user", "content": question}], True)
        row = {
            "answer": " ".join(answer.text.split()),
            "tokens": answer.tokens,
            "nats_passages": likelihoods(answering, ids, answer.tokens),
            "nats_alone": likelihoods(answering, alone, answer.tokens),
            "sources": [each._asdict() for each in found.sources],
        }
        if gold is not None:
            row["has_gold"] = any(
                each.start < (at := self.text.index(gold)) + len(gold) and at < each.end
                for each in found.sources
                if each.kind == "passage"
            )
        arrays = {"asked": scores.asked, "null": scores.null, "words": scores.words}
        return row, {name: each.astype(np.float16) for name, each in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of pg19-mini")
    parser.add_argument("--work", type=Path, required=True, help="folder of what was found and answered")
    parser.add_argument("--tokens", type=int, default=16384, help="of the stretches of a book")
    given = parser.parse_args()
    use_threads()
    content, stem = json.loads((QUESTIONS / "questions.json").read_text("utf-8")), Path(given.model).stem
    others = json.loads((QUESTIONS / "unanswerable.json").read_text("utf-8"))["questions"]
    (given.work / stem).mkdir(parents=True, exist_ok=True)
    lines = given.work / f"{stem}.jsonl"
    done = {each["id"] for each in map(json.loads, lines.read_text().splitlines())} if lines.is_file() else set()
    answering = Answering(*load(given.model), most_bytes=1)
    for book in content["books"]:
        text = (given.data / content["books"][book]["file"]).read_text("utf-8")
        questions = {number: each for number, each in enumerate(content["questions"]) if each["book"] == book}
        asked = Asked(answering, text, questions, given.tokens, given.work / stem / f"{book}.memory")
        every = [(f"a{number}", each) for number, each in questions.items()]
        every += [(f"u{number}", each) for number, each in enumerate(others) if each["book"] == book]
        for id, each in every:
            if id not in done:
                row, arrays = asked.recorded(each["question"], each.get("gold"))
                np.savez_compressed(given.work / stem / f"{id}.npz", **arrays)
                with lines.open("a") as file:
                    file.write(json.dumps({"id": id, **each, **row}, ensure_ascii=False) + "\n")
                print(id, each["question"], "|", row["answer"], flush=True)


if __name__ == "__main__":
    main()
