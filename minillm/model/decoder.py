"""The decoder: token ids and positions in, logits out. One class for every family; a family is a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from minillm.attention.base import AttentionBackend, StepTensors
from minillm.model.config import ModelConfig
from minillm.model.experts import Experts
from minillm.model.layers import MLP, Attention, RMSNorm, WeightReader
from minillm.model.quantize import QuantizedTensor, Scheme, scheme_of
from minillm.model.quantized import UnpackedLinear
from minillm.model.rope import RotaryEmbedding


class DecoderLayer:
    """Attention, then an MLP; each reads a normed copy of the hidden state and adds its result to it.

        hidden ──┬─ norm ─ attention ─ + ──┬─ norm ─ MLP or experts ─ + ── hidden
                 └─────────────────────┘   └──────────────────────────┘
    """

    def __init__(self, layer: int, config: ModelConfig, reader: WeightReader):
        prefix, size = f"layers.{layer}", config.hidden_size
        sparse = bool(config.sparse_layers) and config.sparse_layers[layer]
        self.attention_norm = RMSNorm(reader.vector(f"{prefix}.input_layernorm.weight", size), config.rms_norm_eps)
        self.attention = Attention(layer, config, reader)
        self.mlp_norm = RMSNorm(reader.vector(f"{prefix}.post_attention_layernorm.weight", size), config.rms_norm_eps)
        self.mlp = (Experts if sparse else MLP)(layer, config, reader)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], step: StepTensors,
                 attention: AttentionBackend) -> Tensor:
        """``hidden`` ``[T, hidden]``, changed in place."""
        hidden += self.attention(self.attention_norm(hidden), rotation, step, attention)
        hidden += self.mlp(self.mlp_norm(hidden))
        return hidden


class Decoder:
    """A decoder-only transformer with its weights.

    ``dtype`` and ``device`` are those of activations. ``num_bytes`` are the bytes of weights held, shared storage
    counted once. ``bytes_read_per_step`` are those that a step of one token reads: of the input embedding one row,
    which doesn't count, but all of the head.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader):
        self.config, self.device, self.dtype = config, reader.device, reader.activations
        table = reader.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config, self.device)
        self.layers = [DecoderLayer(layer, config, reader) for layer in range(config.num_layers)]
        self.norm = RMSNorm(reader.vector("norm.weight", config.hidden_size), config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.head = reader.make([table], role="head", name="embed_tokens")
        else:
            self.head = reader.linear(["lm_head"], [config.vocab_size], config.hidden_size, role="head")
        self.num_bytes, self.bytes_read_per_step = reader.num_bytes, reader.bytes_read
        if config.tie_word_embeddings and isinstance(self.head, UnpackedLinear):
            self.embed = self.head.rows  # quantized once, for both
        else:
            if config.tie_word_embeddings and self.head.kernel == "dense":
                self.embedding = self.head.weight  # one tensor for both
            else:
                narrow = config.tie_word_embeddings and self.head.kernel == "fbgemm-fp16"  # as precise as that head
                self.embedding = table.to(self.device, torch.float16 if narrow else self.dtype)
                self.num_bytes += self.embedding.nbytes
            self.embed = partial(embedding, weight=self.embedding)
        reader.finish()

    @classmethod
    def from_weights(cls, config: ModelConfig, weights: Mapping[str, Tensor | QuantizedTensor], *,
                     dtype: str = "float32", device: str | torch.device = "cpu",
                     quantization: str | Scheme | None = None) -> Decoder:
        """The decoder of ``config`` with ``weights`` under their canonical names; a ``dict`` is emptied on the way.

        ``dtype``: ``"auto"``, ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``, as in ``EngineConfig``;
        ``quantization``: how linear layers are quantized, by name or as a scheme; None: not.

        Raises:
            ModelError: naming a weight that is missing, left over or of the wrong shape, or an unknown RoPE type.
        """
        with torch.inference_mode():
            return cls(config, WeightReader(weights, dtype=dtype, device=torch.device(device),
                                            quantization=scheme_of(quantization)))

    @torch.inference_mode()
    def hidden_states(self, step: StepTensors, attention: AttentionBackend, taps: Sequence[int] = ()) -> list[Tensor]:
        """Of ``step.logit_rows`` alone the hidden states ``[S, hidden]`` after the layers ``taps``, in their order, and
        last after the final norm."""
        hidden, tapped = self.embed(step.token_ids).to(self.dtype), []
        rotation = self.rope(step, self.dtype)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, step, attention)
            if number in taps:
                tapped.append(hidden[step.logit_rows])
        return [*tapped, self.norm(hidden[step.logit_rows])]

    @torch.inference_mode()
    def forward(self, step: StepTensors, attention: AttentionBackend) -> Tensor:
        """Logits ``[S, vocab_size]`` of ``step.logit_rows`` alone, in float32 (float64 for a float64 model)."""
        return self.logits(self.hidden_states(step, attention)[-1])

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """``[S, vocab_size]`` of final hidden states ``[S, hidden]``."""
        return self.head(rows).to(torch.promote_types(self.dtype, torch.float32))

    __call__ = forward
