"""The classes of models and configurations with landmarks, made when they are first named, as in a pickle.

`LandmarkLlamaForCausalLM` is made from transformers' `LlamaForCausalLM`, and so on.
"""

from landmark.huggingface.wrapping import class_named as __getattr__  # noqa: F401
