"""A model of transformers that reads with landmarks: `wrap` it, then call it or `generate` as before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.modeling_outputs import CausalLMOutputWithPast

from landmark.attention.layout import insert_landmarks
from landmark.huggingface.attention import ATTENTION, LandmarkWindow
from landmark.huggingface.families import check_model
from landmark.huggingface.landmark_cache import LandmarkCache
from landmark.huggingface.safe_loading import open_model, open_tokenizer
from landmark.utils.constants import DEFAULT_CHUNK, LANDMARK
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Base: Any = object  # `attach` makes a class with LandmarkModel and the model's own class as bases

SETTINGS = "landmark"  # in a model's configuration, and so in its config.json
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(frozen=True)
class LandmarkSettings:
    """How a model reads with landmarks.

    token: id of the landmark. block_size: ℓ. local: tokens of a text read at a time. memory: settings of
    `landmark.memory.Memory`.
    """

    token: int
    block_size: int
    local: int
    memory: dict[str, Any] = field(default_factory=dict)


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int = 63,
    memory: Mapping[str, Any] | None = None,
    local: int = DEFAULT_CHUNK,
) -> LandmarkModel:
    """Make a decoder of transformers a `LandmarkModel` too, in place.

    Args:
        model: the decoder.
        tokenizer: gets the token `<landmark>`, whose embedding is the mean of the others until it is trained.
        block_size: ℓ, tokens a block.
        memory: settings of `landmark.memory.Memory`, as {"k": 4, "max_blocks": 1000}. None: its defaults.
        local: tokens of a prompt read at a time.

    Returns the same model. Raises UserError for a model or settings that do not fit, and if the tokenizer has the token
    already.
    """
    check_model(model)
    if LANDMARK in tokenizer.get_vocab():
        raise UserError(
            f"the tokenizer has a token {LANDMARK} already: to go on with a model that was saved with landmarks, "
            "use landmark.huggingface.load(folder)"
        )
    settings = LandmarkSettings(len(tokenizer), block_size, local, dict(memory or {}))
    wrapped = attach(model, settings)
    tokenizer.add_tokens([LANDMARK], special_tokens=True)
    place_embedding(model, settings.token)
    assert tokenizer.convert_tokens_to_ids(LANDMARK) == settings.token
    return wrapped


def load(folder: str | Path, **settings: Any) -> tuple[LandmarkModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer that `save_pretrained` wrote after `wrap`. settings: of `from_pretrained`.

    Raises UserError if the folder holds none.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json: name the folder that save_pretrained wrote")
    return attach(open_model(folder, **settings)), open_tokenizer(folder)


def attach(model: PreTrainedModel, settings: LandmarkSettings | None = None) -> LandmarkModel:
    """Make a model that has the landmark's embedding already a `LandmarkModel` too, in place.

    settings: None, the ones that it was saved with. Raises UserError for a model or settings that do not fit.
    """
    check_model(model)
    if settings is None:
        if (saved := getattr(model.config, SETTINGS, None)) is None:
            raise UserError(f"{model.name_or_path} was not saved with landmarks: use landmark.huggingface.wrap")
        settings = LandmarkSettings(**saved)
    if settings.local < 1:
        raise UserError(f"local={settings.local}: at least one token must be read at a time")
    LandmarkCache(model, settings.block_size, **settings.memory)  # raises UserError for settings without meaning
    setattr(model.config, SETTINGS, asdict(settings))
    model.set_attn_implementation(ATTENTION[str(model.config._attn_implementation)])
    base = type(model)
    model.__class__ = type(base.__name__, (LandmarkModel, base), {"__module__": base.__module__})
    return cast(LandmarkModel, model)


class LandmarkModel(_Base):
    """A causal language model of transformers that can read with landmarks.

    - With a `LandmarkCache` as `past_key_values`, or in `generate`, the ids have no landmarks. The model reads `local`
      of them at a time, inserts the landmarks, and returns logits of the text's own tokens.
    - With `phase`, the ids are whole windows with landmarks, as in fine-tuning.
    - With neither, it is the original model.
    """

    @property
    def landmarks(self) -> LandmarkSettings:
        return LandmarkSettings(**getattr(self.config, SETTINGS))

    def new_memory(self, **settings: Any) -> LandmarkCache:
        """An empty memory. settings: of `landmark.memory.Memory`; they replace those the model was wrapped with."""
        return LandmarkCache(self, self.landmarks.block_size, **self.landmarks.memory | settings)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        phase: Tensor | None = None,
        local: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The original forward pass, or one with landmarks.

        Args:
            input_ids: (B, T); with a `LandmarkCache` required, and without landmarks.
            attention_mask: (B, T) or None; a `LandmarkCache` allows no padding.
            position_ids: as the original model.
            past_key_values: a `LandmarkCache` for a text that continues, or a cache of the original model.
            inputs_embeds: as the original model.
            labels: as the original model; a `LandmarkCache` allows none.
            use_cache: as the original model.
            logits_to_keep: as the original model; with a `LandmarkCache` a number.
            phase: (B,), for windows with landmarks: tokens missing from the first block of each.
            local: tokens of the text read at a time with a `LandmarkCache`. None: as the model was wrapped.
            kwargs: as the original model.

        Raises UserError for arguments that a landmark memory does not allow.
        """
        if isinstance(past_key_values, LandmarkCache):
            if input_ids is None or labels is not None:
                raise UserError("with a landmark memory a text is read from input_ids, and has no labels")
            if attention_mask is not None and not bool(attention_mask.all()):
                raise UserError("a landmark memory reads no padding: give it texts of one length, or one at a time")
            return self._read(input_ids, past_key_values, logits_to_keep, local or self.landmarks.local)
        if phase is not None:
            kwargs["landmarks"] = LandmarkWindow(self.landmarks.block_size, phase)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache if phase is None else False,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def _read(
        self, ids: Tensor, cache: LandmarkCache, logits_to_keep: int | Tensor, local: int
    ) -> CausalLMOutputWithPast:
        """Read more of a text: insert landmarks, and return the logits of the text's own tokens."""
        settings, memory = self.landmarks, cache.memory
        if ids.shape[1] > 1 and bool((ids == settings.token).any()):
            raise UserError(f"the ids hold landmarks ({settings.token}): leave them out, the model inserts them itself")
        if not isinstance(logits_to_keep, int):
            raise UserError("logits_to_keep: with a landmark memory it must be a number")
        unwanted = ids.shape[1] - logits_to_keep if logits_to_keep else 0
        logits = []
        for chunk in ids.split(local, 1):
            tokens, text_positions = insert_landmarks(chunk, memory.position, settings.block_size, settings.token)
            outputs = super().forward(
                input_ids=tokens,
                position_ids=cache.positions(tokens.shape[1], tokens.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=text_positions[max(0, unwanted) :],
                landmarks=cache,
            )
            cache.commit()
            unwanted -= chunk.shape[1]
            logits.append(outputs.logits)
        return CausalLMOutputWithPast(logits=torch.cat(logits, 1), past_key_values=cache)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        past_key_values: LandmarkCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, greedy or sampling, with a landmark memory.

        Ids that are given, streamed, counted by max_new_tokens and returned have no landmarks.

        Args:
            inputs: ids (B, T).
            generation_config: as in transformers.
            logits_processor: as in transformers.
            past_key_values: a memory of the text read before. None: an empty one.
            kwargs: as in transformers.

        Raises UserError for beam and assisted search, and without a cache.
        """
        config, _ = self._prepare_generation_config(generation_config, **kwargs)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in _MODES:
            raise UserError(
                f"{mode.value.replace('_', ' ')}: a landmark memory cannot go back; use greedy search or sampling"
            )
        if not config.use_cache or (config.guidance_scale or 1) != 1:
            raise UserError("use_cache=False, guidance_scale: they read the text without its landmark memory")
        cache = self.new_memory() if past_key_values is None else past_key_values
        if not isinstance(cache, LandmarkCache):
            raise UserError(f"past_key_values: must be made by new_memory(), not a {type(cache).__name__}")
        never = SuppressTokensLogitsProcessor([self.landmarks.token], device=str(self.device))
        return super().generate(
            inputs,
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([*(logits_processor or []), never]),
            past_key_values=cache,
            **kwargs,
        )


@torch.no_grad()
def place_embedding(model: PreTrainedModel, token: int) -> None:
    """Make room for a token and give it the mean embedding of the others."""
    rows = len(embedding_weights(model)[0])
    if token >= rows:
        model.resize_token_embeddings(token + 1, mean_resizing=False)
    for weight in embedding_weights(model):
        others = torch.arange(rows, device=weight.device) != token
        weight[token] = weight[:rows][others].mean(0)


def embedding_weights(model: PreTrainedModel) -> list[Tensor]:
    """Weights of the input and of the output embedding; the same tensor if they are tied."""
    return [cast(Any, layer).weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
