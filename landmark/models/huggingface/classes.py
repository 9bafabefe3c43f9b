"""Classes with landmarks, made when first named, as in a pickle: `LandmarkLlamaForCausalLM` of `LlamaForCausalLM`."""

from landmark.models.huggingface.wrapping import class_named as __getattr__  # noqa: F401
