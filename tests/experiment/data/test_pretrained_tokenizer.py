"""Tokenizers of transformers, of bytes and of pieces, made here."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from landmark.experiment.data.ruler import evidence_ranges
from landmark.experiment.data.ruler.tasks import Sample
from landmark.experiment.data.tokenizers import PretrainedTokenizer, load_tokenizer, open_pretrained
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import make_tokenizer

TEXT = "A heron, <landmark> <eot> naïve — 鷺.\n"


def of_pieces() -> PreTrainedTokenizerFast:
    """As LLaMA's first tokenizer: ▁ for a space, bytes where there is no piece."""
    pieces = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [make_tokenizer, of_pieces])
def test_text_comes_back_whole_and_special_tokens_in_it_are_text(make):
    tokenizer = PretrainedTokenizer(make())
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert int(tokenizer.byte_lengths[ids].sum()) == len(TEXT.encode())
    assert not {tokenizer.eot, tokenizer.landmark} & set(ids.tolist())
    assert tokenizer.decode(np.array([tokenizer.landmark, *ids[:2], tokenizer.eot])) == TEXT[:2]
    assert ids.dtype == tokenizer.dtype
    if make is of_pieces:  # merged ones are bytes too
        assert [tokenizer.decode_bytes([id]) for id in tokenizer.encode("ab a")] == [b"ab", b" a"]


def test_line_ends_that_are_added_tokens_are_written():
    """As of Gemma; special tokens are not."""
    inner = make_tokenizer()
    inner.add_tokens(["\n\n"])
    inner.add_tokens(["<turn>"], special_tokens=True)
    ids = inner("a\n\nb<turn>")["input_ids"]
    assert len(ids) == 4
    assert PretrainedTokenizer(inner).written(ids) == b"a\n\nb"


def test_evidence_is_found_where_the_tokenizer_changes_the_text():
    """It takes accents off, and puts a space in front."""
    tokenizer = of_pieces()
    backend = tokenizer.backend_tokenizer
    without_accents = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Prepend("▁")]
    backend.normalizer = normalizers.Sequence([*without_accents, normalizers.Replace(" ", "▁")])
    tokenizer = PretrainedTokenizer(tokenizer)
    text = "Élève naïve. " * 20 + "The number for crow is: 1234567. Où?"
    ids, ends = tokenizer.encode_with_ends(text)
    ((first, stop),) = evidence_ranges(Sample(text, ("1234567",), ("The number for crow is: 1234567.",)), ends)
    assert tokenizer.decode(ids[first:stop]) == "The number for crow is: 1234567."


def test_the_landmark_is_added_once_and_the_folder_of_a_model_opened(tmp_path):
    inner = make_tokenizer()
    first = PretrainedTokenizer(inner)
    assert (first.landmark, first.vocab_size) == (257, 258)
    second = PretrainedTokenizer(inner)
    assert second.landmark == 257
    assert second.hash == first.hash
    assert second.hash != PretrainedTokenizer(of_pieces()).hash
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer("pretrained", str(tmp_path))
    assert tokenizer.encode("heron").tolist() == PretrainedTokenizer(make_tokenizer()).encode("heron").tolist()
    assert tokenizer.hash == open_pretrained(tmp_path).hash


def test_unusable_tokenizers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.file must name"):
        load_tokenizer("pretrained")
    with pytest.raises(UserError, match="not a tokenizer"):
        PretrainedTokenizer(object())
    inner = make_tokenizer()
    inner.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no end of text"):
        open_pretrained(tmp_path)
