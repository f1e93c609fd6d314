"""Records the golden file of the default model: greedy tokens by transformers on the same GGUF, in float32.

    python tests/golden/record_golden.py            # needs the extra "dev"

A golden changes only with its cause in the commit and this oracle run again. Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minillm.model.hub import resolve

MODEL = "smollm2-135m"
GOLDEN = Path(__file__).with_name("smollm2_135m.json")
NUM_TOKENS = 200
CHATS = {
    "chat": [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}],
    "chat with system and history": [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "Name three rivers in Africa."},
        {"role": "assistant", "content": "The Nile, the Congo and the Niger."},
        {"role": "user", "content": "And the longest of them?"},
    ],
}
TEXTS = {
    "prose": "The lighthouse keeper had not spoken to anyone for eleven days when",
    "python": "def fibonacci(n: int) -> int:\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "french": "Il était une fois, dans un petit village au bord de la mer,",
    "german": "Die wichtigsten Städte in Deutschland sind",
    "spanish": "La receta de la tortilla de patatas es muy sencilla:",
    "russian": "Однажды утром в небольшом городе",
    "chinese": "今天天气很好，我们去公园",
    "arabic": "في يوم من الأيام كان هناك",
    "emoji": "Good morning! 🌞🙂👩‍👩‍👧‍👦 Today's plan: 🏃‍♀️ then 🍕,",
    "whitespace": "  \n\n\t  item one\n\n\t  item two\n\n\t  ",
    "numbers": "2, 4, 8, 16, 32, 64, 128, 256, 512, 1024,",
    "one token": "The",
}


def record(num_threads: int) -> dict:
    """The golden file's content."""
    torch.set_num_threads(num_threads)
    file = Path(resolve(MODEL))
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # all 200 tokens, whatever the model has to say
    prompts = {name: tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
               for name, chat in CHATS.items()} | TEXTS
    cases = []
    for name, text in prompts.items():
        ids = tokenizer(text, add_special_tokens=False).input_ids
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            output = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                                    max_new_tokens=NUM_TOKENS, pad_token_id=0)
        tokens = output[0, len(ids):].tolist()
        cases.append({"name": name, "prompt": text, "prompt_token_ids": ids, "token_ids": tokens,
                      "text": tokenizer.decode(tokens)})
        print(f"{name}: {len(ids)} + {len(tokens)} tokens: {cases[-1]['text'][:80]!r}", flush=True)
    return {
        "model": MODEL, "file": file.name, "file_sha256": sha256(file.read_bytes()).hexdigest(), "dtype": "float32",
        "oracle": "transformers generate, do_sample=False, no end of sequence",
        "versions": {name: version(name) for name in ("transformers", "torch", "gguf", "tokenizers")},
        "machine": platform.machine(), "num_threads": num_threads, "cases": cases,
    }


def write(golden: dict) -> None:
    """One case a line, so that a change is readable."""
    head = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in golden.items()
            if key != "cases"]
    lines = ",\n  ".join(json.dumps(case, ensure_ascii=False) for case in golden["cases"])
    GOLDEN.write_text("{" + ",\n ".join([*head, f'"cases": [\n  {lines}\n ]']) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    golden = record(parser.parse_args().threads)
    write(golden)
