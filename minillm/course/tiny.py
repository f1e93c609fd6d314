"""A model of random weights, small enough that a cell runs it hundreds of times, whose answers still vary."""

from __future__ import annotations

from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors

TINY = ModelConfig(model_type="llama", vocab_size=261, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
                   num_kv_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True)


def tiny_decoder(config: ModelConfig = TINY, *, dtype: str = "float64", seed: int = 0, scale: float = 0.4) -> Decoder:
    """In float64, so that no two ways to compute its logits choose different tokens. Its vocabulary is that of
    :func:`~minillm.text.tokenizer.byte_tokenizer`; its weights are of size ``scale``, so large that logits spread."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.ones(shape) if name.endswith("norm.weight")
               else torch.randn(shape, generator=generator) * scale
               for name, shape in expected_tensors(config).items()}
    return Decoder.from_weights(config, weights, dtype=dtype)
