"""A tiny model that minillm and transformers both load."""

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> str:
    """A folder with a random Llama that both sides load; its tokenizer is a byte a token."""
    transformers = pytest.importorskip("transformers")
    import torch
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2)
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.save(str(folder / "tokenizer.json"))
    return str(folder)
