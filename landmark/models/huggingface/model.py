"""A model of transformers that reads with landmarks: call it or `generate` as before (wrapping.py makes it)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import TransformersKwargs  # pyright: ignore[reportPrivateImportUsage]

from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.settings import MemorySettings
from landmark.memory.retrievals import Observer
from landmark.models.huggingface.attention import ATTENTION, LandmarkWindow, check_attended, with_landmarks
from landmark.models.huggingface.chunked_forward import (
    ChunkedForward,
    check_ends,
    check_goes_on,
    check_positions,
    last_columns,
)
from landmark.models.huggingface.families import Slides, check_model, landmark_layers, text_config
from landmark.models.huggingface.landmark_cache import LandmarkCache
from landmark.models.huggingface.next_token import replaying
from landmark.models.huggingface.windows import Stream, check_windows
from landmark.utils.errors import UserError
from landmark.utils.setting import setting

SETTINGS = "landmark"  # in a model's configuration, and so in its config.json


@dataclass(frozen=True)
class LandmarkSettings:
    """How a model reads with landmarks, as its config.json has it. token: the landmark's id; None: the text has none,
    and blocks are found by a summary of their keys (`memory` are then `BlockCacheSettings`). block_size: ℓ. local:
    tokens of a text read at a time. landmark_positions: whether a landmark takes a position, as in the paper; else it
    has that of the token behind it, so that the text has its own.
    """

    token: int | None
    block_size: int = setting(least=1)
    local: int = setting(least=1)
    memory: MemorySettings | BlockCacheSettings = MemorySettings()  # noqa: RUF009 (it is frozen)
    landmark_positions: bool = False

    def saved(self) -> dict[str, Any]:
        """As config.json has it."""
        return vars(self) | {"memory": self.memory.saved()}


_Base: Any = (
    object  # a class of `landmark.models.huggingface.classes` has LandmarkModel and a class of transformers as bases
)

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class LandmarkModel(_Base):
    """A causal language model of transformers that can read with landmarks.

    With a `LandmarkCache` as `past_key_values`, or in `generate`, the ids have no landmarks: the model inserts them,
    and returns logits of the text's own tokens. With `phase`, the ids are whole windows with landmarks, as in
    fine-tuning (`LandmarkCollator` makes them). With neither, it is the original model.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        """New weights, or those that `from_pretrained` fills. Raises UserError for a config without settings of
        landmarks, or of a model that cannot have them.
        """
        _from_before(config)
        settings = saved_settings(config)
        super().__init__(config, *args, **kwargs)
        prepare(cast(Any, self), settings)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: its weights are named, in memory and in files, as those of the original model."""
        return False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:  # transformers reads the source file of the class
        return cls.__bases__[-1]._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.__bases__[-1]._can_set_experts_implementation()

    @property
    def landmarks(self) -> LandmarkSettings:
        return saved_settings(self.config)

    def new_memory(self, observer: Observer | None = None, **settings: Any) -> LandmarkCache:
        """An empty memory. settings: in place of those that the model was wrapped with, of `MemorySettings`, or of
        `BlockCacheSettings` without landmarks.
        """
        landmarks = self.landmarks
        given = landmarks.block_size, landmarks.memory.updated(settings), observer, landmarks.landmark_positions
        return LandmarkCache(cast(Any, self), *given)

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
        cu_seqlens: Tensor | None = None,
        local: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The original forward pass, or one with landmarks. Other arguments are those of the original model.

        input_ids: (B, T), with a `LandmarkCache` without landmarks. attention_mask: (B, T) or (B, all tokens so far), 0
        for padding, which windows may have on the right. labels: with `phase` together with `shift_labels`, where the
        target before a landmark is the token after it. phase: (B,), tokens missing from the first block of each window;
        with `cu_seqlens`, the bounds (documents + 1,) of documents packed into a row, (documents,). local: tokens read
        at a time with a `LandmarkCache` (None: as wrapped). Tokens without landmarks whose logits are not kept choose
        blocks together.

        Raises UserError for arguments that landmarks do not allow, or that the original model does not have, and for
        labels that would train without landmarks.
        """
        is_reading = isinstance(past_key_values, LandmarkCache)
        if is_reading or phase is not None:
            self._check_call(past_key_values, inputs_embeds, kwargs)
        if not torch.compiler.is_compiling():
            check_names(kwargs, type(self).__bases__[-1].forward)
        if cu_seqlens is not None and (is_reading or phase is None):
            raise UserError("cu_seqlens: only for packed windows with landmarks, together with phase")
        if is_reading:
            if input_ids is None or labels is not None or phase is not None:
                raise UserError("with a landmark memory a text is read from input_ids; it has no labels and no phase")
            self._check_reading()
            reading = self._most(local), kwargs
            given = input_ids, past_key_values, attention_mask, position_ids, logits_to_keep
            return self._read_batch(*given, *reading)  # pyright: ignore[reportCallIssue]
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "logits_to_keep": logits_to_keep,
            "labels": labels,
            "use_cache": use_cache,
            **kwargs,
        }
        if phase is not None:
            return self._forward_windows(given, phase, cu_seqlens)
        if labels is not None and self.landmarks.token is not None:
            self._check_plain_loss()
        return super().forward(**given)

    def _forward_windows(self, given: dict[str, Any], phase: Tensor, cu_seqlens: Tensor | None) -> Any:
        """Whole windows with landmarks. given: arguments of the original forward."""
        token, block_size = self.landmarks.token, self.landmarks.block_size
        if token is None:
            raise UserError("phase: this model reads without landmarks, so there are no windows with them")
        check_windows(given, phase, cu_seqlens, token, block_size)
        tokens = given["input_ids"] if given["inputs_embeds"] is None else given["inputs_embeds"]
        stream = Stream.of_windows(phase.to(tokens.device, non_blocking=True), tokens.shape[1], block_size, cu_seqlens)
        slides = Slides.of(text_config(cast(Any, self)))
        seen = None if slides is None else stream.seen(tokens.shape[1], slides)
        window = LandmarkWindow(landmark_layers(cast(Any, self)), block_size, phase, cu_seqlens, seen)
        given |= {"landmarks": window, "use_cache": False}
        if not self.landmarks.landmark_positions:
            given["position_ids"] = stream.positions
        if self.config.model_type == "gemma3":  # which of the tokens are of images
            given.setdefault("token_type_ids", torch.zeros(tokens.shape[:2], dtype=torch.int64, device=self.device))
        outputs = super().forward(**given)
        check_attended(window.landmark_layers, window.attended)
        return outputs

    def _check_plain_loss(self) -> None:
        """Raise UserError where a loss without landmarks would train; else warn."""
        if self.training:
            raise UserError(
                "labels without phase would train the model without landmarks: make the batches with "
                "landmark.models.huggingface.LandmarkCollator, or take the landmarks off with its unwrap"
            )
        if not torch.compiler.is_compiling():
            why = "this loss is of the model without landmarks; LandmarkCollator gives the phase"
            warnings.warn(f"labels without phase: {why}", stacklevel=3)

    def _check_call(self, cache: Any, inputs_embeds: Tensor | None, kwargs: dict[str, Any]) -> None:
        """Raise UserError for arguments that landmarks do not allow."""
        implementation = self.config._attn_implementation
        if implementation not in ATTENTION.values():
            again = with_landmarks(implementation) or ATTENTION["sdpa"]
            raise UserError(
                f"attn_implementation={implementation} has no landmarks: call model.set_attn_implementation('{again}')"
                ", or landmark.models.huggingface.unwrap(model) for the model without landmarks"
            )
        if kwargs.get("output_attentions") or self.config.output_attentions:
            raise UserError("output_attentions: attention with landmarks gives no weights of single tokens")
        if isinstance(cache, LandmarkCache) and kwargs.get("output_router_logits"):
            raise UserError("output_router_logits: with a landmark memory the model returns logits and hidden states")
        if kwargs.get("pixel_values") is not None:
            raise UserError("pixel_values: landmarks read text; call the original model, or unwrap it, for images")
        if isinstance(cache, LandmarkCache) and inputs_embeds is not None:
            raise UserError("inputs_embeds: with a landmark memory a text is read from input_ids")

    @torch.no_grad()
    def read_text(
        self, ids: Tensor, cache: LandmarkCache, kept: int = 1, most: Callable[[], int] | None = None
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Read more of texts of one length, piece by piece: after each the tokens read so far and their logits.

        ids: (B, T), without landmarks. kept: last tokens that get logits; a piece with some gives (B, n, vocabulary),
        another None. most: tokens of a piece, asked before each (None: as wrapped). A caller may stop after any piece:
        the memory has read the text up to there. What the memory holds is settled first (`LandmarkCache.settle`), so
        that the logits depend on the text alone; an answer's tokens are read by calling the model.
        """
        self._check_call(cache, None, {})
        mask = self._checked_mask(ids, cache, None, None, kept)
        with cache.whole_batch(*ids.shape):
            cache.settle()
            for step in ChunkedForward(self, super().forward, most or self._most()).steps(ids, mask, cache, kept):
                found = [x for x in step.logits if x is not None and len(x)]
                yield step.tokens, self._finite(torch.stack(found)) if found else None

    def _most(self, local: int | None = None) -> Callable[[], int]:
        """Tokens that are read at a time; local: None: as wrapped."""
        if local is not None and local < 1:
            raise UserError(f"local={local}: at least one token must be read at a time")
        return lambda: local or self.landmarks.local

    @torch.compiler.disable
    @torch.no_grad()
    def _read_batch(
        self,
        ids: Tensor,
        cache: LandmarkCache,
        mask: Tensor | None,
        position_ids: Tensor | None,
        logits_to_keep: int | Tensor,
        most: Callable[[], int],
        kwargs: dict[str, Any],
    ) -> Any:
        """Read more of each text of a batch. Logits (B, T or logits_to_keep, vocabulary), 0 for padding."""
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise UserError("logits_to_keep: with a landmark memory it must be a number of tokens, or 0 for all")
        given = {name: x for name, x in kwargs.items() if name not in ("return_dict", "output_hidden_states")}
        hidden = kwargs.get("output_hidden_states")
        hidden = bool(self.config.output_hidden_states if hidden is None else hidden)
        mask = self._checked_mask(ids, cache, mask, position_ids, logits_to_keep)
        with cache.whole_batch(*ids.shape):
            is_token = ids.shape[1] == 1 and not hidden and not given
            read_token = replaying(self, cache, ids) if is_token else None
            if read_token is not None and bool(mask.all()):
                logits = read_token(super().forward)
                outputs = CausalLMOutputWithPast(logits=cast(Any, logits), past_key_values=cast(Any, cache))
            else:
                reader = ChunkedForward(self, super().forward, most, hidden, given)
                outputs = reader.read(ids, mask, cache, logits_to_keep or ids.shape[1])
        self._finite(cast(Tensor, outputs.logits))
        as_dict = kwargs.get("return_dict")
        return outputs if (self.config.return_dict if as_dict is None else as_dict) else outputs.to_tuple()

    def _checked_mask(
        self, ids: Tensor, cache: LandmarkCache, mask: Tensor | None, position_ids: Tensor | None, kept: int
    ) -> Tensor:
        """Which ids (B, T) are text, bool. Raises UserError where the memory cannot go on with them."""
        if not ids.shape[1]:
            raise UserError("input_ids: there is no text to read")
        cache.check_batch(len(ids))
        mask = torch.ones_like(ids) if mask is None else last_columns(mask, ids.shape[1]).to(ids.device)
        check_ends(mask, kept)
        check_positions(position_ids, mask, cache)
        cache.check_model(self, is_token=ids.shape[1] == 1)
        self._check_reading()
        return mask.bool()

    def _finite(self, logits: Tensor) -> Tensor:
        """The logits. Raises UserError where numbers of float16 overflowed."""
        if logits.dtype == torch.float16 and not bool(logits[:, -1].isfinite().all()):
            raise UserError("the logits are not finite: numbers of float16 overflow, load it in bfloat16 or float32")
        return logits

    def _check_reading(self) -> None:
        """Raise UserError in training mode, where a memory passes no gradients on and layers may drop their cache."""
        if not self.training:
            return
        if torch.is_grad_enabled():
            raise UserError(
                "in training mode, a text that is read with a landmark memory would give wrong gradients: train on "
                "windows (LandmarkCollator), or call model.eval() or torch.no_grad() to read"
            )
        if any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            raise UserError(
                "gradient checkpointing in training mode drops the cache of layers with a sliding window: call "
                "model.eval() to read with a landmark memory"
            )

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, greedy, sampling or by beam search, with a landmark memory. Ids have no landmarks.

        `past_key_values`: a memory of the text read before, which `inputs` (B, T) repeats; None: an empty one. With a
        cache of transformers the original model generates. For beams or several answers a copy of the memory goes on.
        Raises UserError for modes, caches and padding that a memory does not allow, and for inputs that do not repeat
        its text and go on.
        """
        token = self.landmarks.token
        never = LogitsProcessorList([*(logits_processor or []), *([] if token is None else [_NoLandmark(token)])])
        given = {"generation_config": generation_config, "logits_processor": never, **kwargs}
        if past_key_values is not None and not isinstance(past_key_values, LandmarkCache):
            return super().generate(inputs, past_key_values=past_key_values, **given)
        config, _ = self._prepare_generation_config(generation_config, **kwargs)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in _MODES:
            why = ", and cannot go back" if mode == GenerationMode.ASSISTED_GENERATION else ""
            name = mode.value.replace("_", " ")
            raise UserError(f"{name}: a landmark memory goes on by greedy search, sampling or beam search{why}")
        if not config.use_cache or (config.guidance_scale or 1) != 1:
            raise UserError(
                "use_cache=False, guidance_scale: they read the text without its landmark memory; to generate without "
                "landmarks pass past_key_values=DynamicCache()"
            )
        if config.cache_implementation is not None:
            if kwargs.get("cache_implementation") or getattr(generation_config, "cache_implementation", None):
                raise UserError(
                    f"cache_implementation={config.cache_implementation}: the cache is a landmark memory; leave it "
                    "out, or generate without landmarks (past_key_values=DynamicCache())"
                )
            given["cache_implementation"] = None  # the model's own habit without landmarks
        cache = self.new_memory() if past_key_values is None else past_key_values
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(ids, Tensor):
            if not ids.shape[-1]:
                raise UserError("input_ids: the prompt has no text")
            check_goes_on(ids, kwargs.get("attention_mask"), cache)
            cache.check_model(self)
            cache.settle()  # so that the answer depends on the text alone
            if cache.padded is None:  # room for the answer too, no more than a memory that grows would take
                new = max((config.max_length or 0) - ids.shape[1], config.max_new_tokens or 0)
                cache.expect(ids.shape[1] + min(new, ids.shape[1] // 8) - cache.get_seq_length())
        repeats = max(config.num_beams or 1, config.num_return_sequences or 1)
        if repeats > 1 and past_key_values is not None:
            cache = cache.select(torch.arange(cache.batch_size).repeat_interleave(repeats))
        return super().generate(inputs, past_key_values=cache, **given | {"prefill_chunk_size": None})

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Those of transformers, without its warning of a text beyond the trained positions: a memory has its own."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        for each in criteria:
            if isinstance(each, MaxLengthCriteria):
                each.max_position_embeddings = None
        return criteria

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Raises UserError: the paged cache of transformers' continuous batching holds no landmark memory."""
        raise UserError(
            "continuous batching: its paged cache holds no landmark memory; generate with a padded batch, or serve the "
            "model with `python -m landmark.reading.serving`"
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching


def prepare(model: PreTrainedModel, settings: LandmarkSettings) -> None:
    """Let attention use landmarks, and write the settings to the configuration, where `save_pretrained` finds them."""
    implementation = str(model.config._attn_implementation)
    if implementation not in ATTENTION.values():
        check_model(model, is_free=settings.token is None)
        model.set_attn_implementation(with_landmarks(implementation) or ATTENTION["sdpa"])
    setattr(model.config, SETTINGS, settings.saved())


def _from_before(config: Any) -> None:
    """Complete the settings of a model that was saved when a landmark always took a position, and sliding windows
    showed it. Raises UserError where a layer has such a window.
    """
    saved = getattr(config, SETTINGS, None)
    if not isinstance(saved, dict) or "landmark_positions" in saved:
        return
    if saved.get("token") is not None and Slides.of(config.get_text_config(decoder=True)) is not None:
        raise UserError(
            "the model has learned landmarks that its layers with a sliding window saw, and here they do not: "
            "fine-tune it again"
        )
    saved["landmark_positions"] = saved.get("token") is not None


def saved_settings(config: Any) -> LandmarkSettings:
    """The settings that a configuration was saved with. Raises UserError if it has none."""
    if (saved := getattr(config, SETTINGS, None)) is None:
        raise UserError("the configuration was not saved with landmarks: use landmark.models.huggingface.wrap")
    names = sorted(LandmarkSettings.__dataclass_fields__)  # torch.compile traces no `fields`
    if not isinstance(saved, dict) or sorted(saved) != names:
        raise UserError(f"{SETTINGS}={saved}: must have the settings {', '.join(names)}")
    kind = BlockCacheSettings if saved["token"] is None else MemorySettings
    values: dict[str, Any] = {**saved, "memory": kind.from_saved(saved["memory"])}
    return LandmarkSettings(**values)


@lru_cache
def _names_of(function: Any) -> frozenset[str]:
    """The names of the arguments that a forward of transformers takes, and hands on to its parts."""
    handed_on = {"shift_labels", "return_dict", "cache_position", "token_type_ids"}
    return frozenset({*inspect.signature(function).parameters, *TransformersKwargs.__annotations__, *handed_on})


def check_names(kwargs: Mapping[str, Any], original: Any) -> None:
    """Raise UserError for an argument that a forward of transformers does not know, and would drop in silence."""
    if unknown := sorted(kwargs.keys() - _names_of(original)):
        raise UserError(f"{unknown[0]}: the model's forward has no such argument")


class _NoLandmark(LogitsProcessor):
    """No landmark is generated. A class of its own, because `generate` drops a processor of a class that it adds."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.token] = -torch.inf
        return scores
