"""All checks of one row's settings: the model's and the memory's own, and those of the whole configuration."""

from landmark.config import Config, checks
from landmark.config.schema import memory_settings
from landmark.evaluation.chunks import chunk_length, kept_tokens, penultimate_chunk_start
from landmark.models.config import decoder_config


def check(config: Config) -> None:
    """Raise UserError, naming the key, where a setting makes no sense. Loads no torch."""
    shape = decoder_config(config.model, cmt=config.cmt.enabled)
    checks.check(config)
    settings = checks.resolve(config).eval
    local = chunk_length(shape, settings.length, settings.local, kept_tokens(config))
    if config.model.kind == "landmark":
        memory_settings(config).check_layers(config.model.num_layers)
    if settings.retrieval_statistics:
        penultimate_chunk_start(shape, settings.length, local, config.retrieval.k)
