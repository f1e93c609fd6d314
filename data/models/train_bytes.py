"""Train the model in ``data/models/bytes-1m``: a small one whose weights were never in few bits.

    python data/models/train_bytes.py            some minutes on two cores

The default model's weights were made as 4-bit numbers, so quantizing them to 4 bits loses next to nothing. How much it
loses elsewhere is asked of this one: 1.6 million weights, one token a byte, trained in float32 on the sources of
Python's standard library, which every reader has, and kept in float16. transformers does the training.
"""

from __future__ import annotations

import json
import random
import sysconfig
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).with_name("bytes-1m")
STEPS, BATCH, LENGTH, PEAK_RATE, WARM_UP = 800, 16, 256, 3e-3, 80


def corpus() -> bytes:
    """The library's modules, tests left out, in an order that does not depend on the disk."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = sorted(path for path in root.rglob("*.py")
                  if not {"test", "tests", "idlelib", "lib2to3", "site-packages"} & {*path.relative_to(root).parts})
    return b"\n\n".join(path.read_bytes() for path in kept)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's, from Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def save_tokenizer(folder: Path) -> None:
    """One token a byte: a byte-level vocabulary without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(byte_letters())}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level,
               "post_processor": None, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def train() -> LlamaForCausalLM:
    """From random weights; prints the loss in nats a byte."""
    torch.manual_seed(0)
    draw, text = random.Random(0), torch.frombuffer(bytearray(corpus()), dtype=torch.uint8).long()
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, STEPS, pct_start=WARM_UP / STEPS)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(text):,} bytes of text", flush=True)
    start_s = time.perf_counter()
    for step in range(STEPS):
        starts = [draw.randrange(len(text) - LENGTH) for _ in range(BATCH)]
        batch = torch.stack([text[start:start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - start_s:.0f} s", flush=True)
    return model


if __name__ == "__main__":
    model = train()
    model.half().save_pretrained(FOLDER)
    save_tokenizer(FOLDER)
