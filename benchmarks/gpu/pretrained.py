"""A token of a pretrained model that reads through blocks, beside the caches of transformers. Weights are random."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks import line, off
from benchmarks.gpu.journal import Line
from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.timing import Times, launched, lines
from benchmarks.gpu.work import summary
from benchmarks.report import Target

OURS, DYNAMIC, STATIC = "blocks, one CUDA graph", "DynamicCache", "StaticCache, compiled"
FASTER = {4_096: 0.67, 32_768: 0.5, 131_072: 0.25}  # most of DynamicCache's time, by tokens before
ROOM = 512  # tokens that are generated at most
SUMS = 1e-4  # error in float32 of sums in another order, through all layers


def model_of(scale: Scale, dtype: torch.dtype) -> Any:
    """Qwen 2.5 0.5B's shape, whose positions suffice for all texts; on a CPU a tiny one. Reads through blocks."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from landmark.memory.blocks.settings import BlockCacheSettings
    from landmark.models.huggingface import LandmarkSettings, attach

    sizes = (896, 4864, 24, 14, 2, 151_936) if scale.is_gpu else (32, 48, 2, 4, 2, 99)
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    config = Qwen2Config(**dict(zip((*names, "vocab_size"), sizes, strict=True)), max_position_embeddings=1 << 18)
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.eval().to(scale.device, dtype)
    settings = BlockCacheSettings() if scale.is_gpu else BlockCacheSettings().updated({"k": 2, "window": 8})
    return attach(model, LandmarkSettings(None, 32 if scale.is_gpu else 4, 512, settings.updated({"dense": 0})))


def keys_of(model: Any, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random keys and values (1, H_kv, context, d) of each layer, always the same."""
    config, weight = model.config, model.lm_head.weight
    shape = 1, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads
    generator = torch.Generator(weight.device).manual_seed(0)
    for _ in range(config.num_hidden_layers):
        made = (torch.randn(shape, device=weight.device, generator=generator).to(weight.dtype) for _ in range(2))
        yield next(made), next(made)


def filled(model: Any, context: int) -> Any:
    """A memory of a text of random keys and values."""
    cache = model.new_memory()
    cache.expect(context + ROOM)
    for layer, (keys, values) in enumerate(keys_of(model, context)):
        state = cache.memory.layers[layer] = cache.memory.new_layer(keys)
        state.write(0, keys[0], values[0], context + ROOM, 0)
    cache.ids = torch.zeros(1, context, dtype=torch.int64, device=model.device)
    cache.memory.position = context
    return cache


@torch.no_grad()
def as_operators(context: int, scale: Scale) -> Iterator[Line]:
    """Logits of tokens in float32 that the graph reads, against those of the operators that a CPU uses."""

    def check() -> Line:
        model = model_of(scale, torch.float32)
        ours, plain = filled(model, context), filled(model, context)
        plain.memory.observer = lambda retrieval: None  # which kernels do not tell
        errors = []
        for token in torch.randint(0, 99, (40, 1, 1), device=scale.device):
            found, expected = (model(token, past_key_values=each).logits for each in (ours, plain))
            errors.append(off(found, expected.double()))
        captured = ours.next_token is not None and ours.next_token.graphs.captures
        middle = sorted(errors)[len(errors) // 2]  # a near tie of blocks may fall to either side
        return {"ok": middle <= SUMS and captured == scale.is_gpu, "off": f"{middle:.2e}", "largest": max(errors)}

    yield line(f"a pretrained model's tokens as a graph, after {context:,}", check)


@torch.no_grad()
def tokens(contexts: tuple[int, ...], scale: Scale) -> Iterator[Line]:
    """The time of a token until the device is done, with what Python takes to launch it."""
    from transformers import DynamicCache, StaticCache

    model = model_of(scale, scale.half)
    token = torch.zeros(1, 1, dtype=torch.int64, device=scale.device)
    for context in contexts:
        dynamic = DynamicCache(config=model.config)
        static: Any = StaticCache(config=model.config, max_cache_len=context + ROOM)
        for layer, (keys, values) in enumerate(keys_of(model, context)):
            for cache in (dynamic, static):
                cache.update(keys, values, layer)
        compiled = torch.compile(model, mode="reduce-overhead") if scale.is_gpu else model
        competitors: dict[str, Callable[[], object]] = {
            OURS: partial(model, token, past_key_values=filled(model, context)),
            DYNAMIC: partial(model, token, past_key_values=dynamic),
            STATIC: partial(compiled, token, past_key_values=static),
        }
        setting = (
            f"Qwen 0.5B: a token after {context:,} tokens" if scale.is_gpu else f"a token after {context:,} tokens"
        )
        try:
            competitors[STATIC]()
        except Exception as error:
            yield {"kind": "note", "setting": setting, "measured": STATIC, "left_out": summary(error)}
            del competitors[STATIC]
        times = {name: Times() for name in competitors}
        for number in range(scale.rounds + 3):
            for name, function in competitors.items():
                host, whole = launched(function, scale)
                if number >= 3:  # compiled and captured by now
                    times[name].host.append(host)
                    times[name].device.append(whole)
        targets = {OURS: Target("≤", FASTER[context])} if context in FASTER else None
        yield from lines(setting, times, DYNAMIC, targets)
