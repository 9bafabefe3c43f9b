"""`push_to_hub`, with a hub that is a folder."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError

from landmark.huggingface import load, wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the hub."""

    class Api:
        def create_repo(self, repo_id, **_):
            (tmp_path / repo_id).mkdir(parents=True, exist_ok=True)
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **_):
            for each in operations:
                shutil.copy(each.path_or_fileobj, tmp_path / repo_id / each.path_in_repo)

    def card(repo_id, **_):
        path = tmp_path / repo_id / "README.md"
        if not path.exists():
            raise EntryNotFoundError("no README.md")
        return ModelCard(path.read_text())

    monkeypatch.setattr("transformers.utils.hub.hf_api", Api)
    monkeypatch.setattr(ModelCard, "load", card)
    return tmp_path


def test_a_folder_without_a_tokenizer_is_one_line(tokenizer, tmp_path):
    wrap(make_model("llama"), tokenizer, block_size=4).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds no tokenizer of transformers; landmark\.load opens runs"):
        load(tmp_path)


def test_a_model_with_landmarks_is_pushed_and_keeps_its_card(hub, tokenizer):
    model = wrap(make_model("llama"), tokenizer, block_size=4, memory={"k": 2}, local=9)
    for each in (model, tokenizer):
        each.push_to_hub("me/mine")
    (hub / "me/mine/README.md").write_text("---\nlibrary_name: transformers\n---\n# from its record\n")
    model.push_to_hub("me/mine", tags=["long-context"])
    card = (hub / "me/mine/README.md").read_text()
    assert "# from its record" in card
    assert "long-context" in card
    again, its_tokenizer = load(hub / "me/mine")
    ids = torch.randint(0, 256, (1, 40))
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(again.generate(ids, **settings), model.generate(ids, **settings))
    assert its_tokenizer.convert_tokens_to_ids("<landmark>") == model.landmarks.token
    assert (hub / "me/mine/classes.py").exists(), "so that trust_remote_code opens it"
