"""A .gguf file in the place of a model's folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from landmark.data.tokenizers import open_pretrained
from landmark.huggingface.folders import folder_of
from landmark.utils.errors import UserError

gguf = pytest.importorskip("gguf")


def write(model, path):
    """The model as llama.cpp writes it, with a vocabulary of bytes."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "rope_dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # pairs of channels side by side
            weight = weight.view(-1, 2, config.head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_is_converted_once_and_a_damaged_file_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=259, num_hidden_layers=2, max_position_embeddings=128, **shape)
    ).eval()
    ids = torch.arange(3, 40)[None]
    write(model, file := tmp_path / "tiny.gguf")
    folder = folder_of(str(file))
    assert "is converted" in capsys.readouterr().err
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert folder_of(str(file)) == folder
    assert "is converted" not in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert open_pretrained(folder).encode("a").tolist()[-1] == 3 + ord("a")
    file.write_bytes(b"GGUF" + b"\0" * 50)
    with pytest.raises(UserError, match="cannot be converted"):
        folder_of(str(file))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
