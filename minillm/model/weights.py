"""A model's weights under canonical names, from whatever file: checked in full before anything is read.

Canonical names are those of a Hugging Face Llama without the prefix ``model.``, each matrix [out, in], the rotary
halves of q and k a half head apart; experts are stacked, [num_experts, out, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from minillm.errors import ModelError
from minillm.model.checkpoint import IGNORABLE, Checkpoint, Location, open_checkpoint
from minillm.model.config import ModelConfig
from minillm.model.converted import keep_converted, load_converted
from minillm.model.decoder import Decoder
from minillm.model.layers import WeightReader
from minillm.model.linear import DenseLinear, Linear
from minillm.model.quantize import QuantizedTensor

HEAD, FETCH_AGAIN = "lm_head.weight", "fetch the model again"
NOT_OF_ONE_MODEL = "the config and the weights are not of one model"
HINTS = {HEAD: "its config says tie_word_embeddings = false; if the head is tied to the embedding, set it to true"}


class _Recorder(WeightReader):
    """Notes the weights that a decoder asks for, and hands out tensors that take no memory."""

    def __init__(self) -> None:
        super().__init__({}, dtype="float32", device=torch.device("cpu"))
        self.shapes: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.zeros(()).expand(shape)  # (device="meta" would load torch's compiler: seconds)

    def make(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = (), **_: object) -> Linear:
        return DenseLinear(weights[0], None)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of ``config`` has: those that its :class:`Decoder` asks for.

    ``lm_head.weight`` is among them only where it is untied.
    """
    recorder = _Recorder()
    Decoder(config, recorder)
    return recorder.shapes


def load_weights(path: str | Path, config: ModelConfig, *,
                 keep_blocks: bool = False) -> dict[str, torch.Tensor | QuantizedTensor]:
    """The tensors of :func:`expected_tensors`, on the CPU, in the file's precision (GGUF: dequantized to float32).

    A tied head is not in the result, even where the file holds one: the decoder uses ``embed_tokens.weight``. A
    progress bar appears on a terminal when it takes over a second. Dequantized weights are kept for the next load
    (see :mod:`minillm.model.converted`). With ``keep_blocks``, matrices of layers that a GGUF file holds in 4 bit stay
    as they are.

    Raises:
        ModelError: a missing or extra tensor, a missing shard, a wrong shape or a damaged file, by name, before any
            tensor is read.
    """
    path, expected = Path(path), expected_tensors(config)
    is_gguf = not path.is_dir()
    if is_gguf and not keep_blocks and (kept := load_converted(path, expected)) is not None:
        return kept
    checkpoint = open_checkpoint(path, config)
    places = _locate_all(checkpoint, expected, str(path))
    title = "Converting weights, once" if is_gguf and not keep_blocks else "Loading weights"
    bar = tqdm(places.items(), desc=title, unit="tensor", delay=1.0, leave=False, disable=None)
    weights = {name: _read(checkpoint, place, keep_blocks and name.startswith("layers.")) for name, place in bar}
    if is_gguf and not keep_blocks:
        keep_converted(path, weights)
    return weights


def _locate_all(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], path: str) -> dict[str, Location]:
    stored, places = checkpoint.shapes, {}
    for name, shape in expected.items():
        alternatives = checkpoint.locations(name)
        place = next((a for a in alternatives if any(part in stored for part in a.names)), alternatives[0])
        for part in place.names:
            if part not in stored:
                raise ModelError(f"tensor {part!r} ({name}) is missing from {path}; {HINTS.get(name, FETCH_AGAIN)}")
            if stored[part] != place.stored_shape(shape):
                raise ModelError(f"tensor {part!r} in {path} has shape {list(stored[part])}, but the config asks for "
                                 f"{list(place.stored_shape(shape))}; {NOT_OF_ONE_MODEL}")
        places[name] = place
    # A tied head has no place, but the file may hold it all the same.
    used = {part for place in (*places.values(), *checkpoint.locations(HEAD)) for part in place.names}
    if extra := sorted(name for name in stored if name not in used and not name.endswith(IGNORABLE)):
        raise ModelError(f"{path} holds {len(extra)} tensor(s) that its config has no place for, the first "
                         f"{extra[0]!r}; {NOT_OF_ONE_MODEL}")
    return places


def _read(checkpoint: Checkpoint, place: Location, keep_blocks: bool) -> torch.Tensor | QuantizedTensor:
    if keep_blocks and (blocks := checkpoint.read_blocks(place.names[0])) is not None:
        return blocks
    tensors = [checkpoint.read(name) for name in place.names]
    if place.stack:
        return torch.stack(tensors)
    return tensors[0] if place.half is None else tensors[0].chunk(2, dim=1)[place.half].contiguous()
