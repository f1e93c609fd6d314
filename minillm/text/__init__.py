"""Text to token ids and back: BPE, tokenizer files, chat templates, the streaming detokenizer. No torch."""
