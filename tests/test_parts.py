"""A reader's own parts, as short as a notebook has them, run in the real engine; what is no such part is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool
from minillm.cache.kv import ContiguousCache
from minillm.sample import SampledToken, Sampler, lowest_argmax
from minillm.schedule.scheduler import Scheduler
from minillm.text.bpe import bytes_to_alphabet
from minillm.text.tokenizer import byte_tokenizer, train_bpe

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
TEXT = "the cat that sat, the hat that the cat had\n" * 3


class MyEncoder:
    """Byte pair encoding by looking at all pairs again after every merge."""

    def __init__(self, vocab, merges):
        self.vocab, self.merges = vocab, merges

    def encode_pieces(self, pieces):
        return [token for piece in pieces for token in self.encode(piece)]

    def encode(self, piece):
        ids = [self.vocab[char] for char in bytes_to_alphabet(piece.encode())]
        while found := [(*self.merges[pair], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in self.merges]:
            _, merged, i = min(found, key=lambda entry: (entry[0], entry[2]))
            ids[i:i + 2] = [merged]
        return ids


class MyCache:
    """Keys and values that grow by copying."""

    def __init__(self, config, *, capacity, dtype, device):
        nothing = torch.empty(config.num_kv_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.layers = [(nothing, nothing)] * config.num_layers

    def write(self, layer, start, key, value):
        new = key.transpose(0, 1), value.transpose(0, 1)
        self.layers[layer] = tuple(torch.cat([old[:, :start], more], 1) for old, more in zip(self.layers[layer], new))

    def read(self, layer, start, end):
        keys, values = self.layers[layer]
        return keys[:, start:end], values[:, start:end]

    @property
    def num_tokens(self):
        return self.layers[-1][0].shape[1]

    @property
    def num_bytes(self):
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class MySampler:
    """Greedy, or temperature and a generator of the row's own."""

    def __call__(self, logits, rows):
        return [SampledToken(self.choose(scores, row)) for scores, row in zip(logits, rows)]

    def choose(self, scores, row):
        if row.params.greedy:
            return int(lowest_argmax(scores[None])[0])
        generator = torch.Generator().manual_seed(row.seed * 7919 + row.index * 104729 + row.position)
        shares = torch.softmax((scores.double() - scores.max()) / row.params.temperature, -1)  # the best is 0: no inf
        return int(torch.multinomial(shares, 1, generator=generator))


def tokens(llm, params=GREEDY, prompts=("The sky is", "A", "Name three fruits")):
    return [out.outputs[0].token_ids for out in llm.generate(list(prompts), params)]


def test_an_own_encoder_gives_the_tokenizers_ids_and_leaves_the_tokenizer_alone():
    tokenizer = train_bpe(TEXT, 40, special_tokens=["<|eos|>"])
    own = tokenizer.with_encoder(MyEncoder(tokenizer.encoder.vocab, tokenizer.encoder.merges))
    for text in ("", "the hat", "né 🙂<|eos|>that", TEXT):
        assert own.encode(text) == tokenizer.encode(text)
        assert own.decode(own.encode(text)) == text
    assert own is not tokenizer and own.encoder is not tokenizer.encoder and own.vocab_size == tokenizer.vocab_size


def test_an_own_encoder_an_own_sampler_and_an_own_cache_answer_as_the_engine_does(tiny_model, byte_tok):
    expected = tokens(LLM(tiny_model, tokenizer=byte_tok))
    encoder = MyEncoder(byte_tok.encoder.vocab, byte_tok.encoder.merges)
    attention = ContiguousAttention(tiny_model.config, dtype=tiny_model.dtype, device="cpu", make_cache=MyCache)
    llm = LLM(tiny_model, tokenizer=byte_tok.with_encoder(encoder), sampler=MySampler(), attention_backend=attention)
    assert tokens(llm) == expected and len({len(set(own)) for own in expected} - {1}) > 0
    drawn = tokens(llm, SamplingParams(temperature=3.0, seed=5, max_tokens=9, ignore_eos=True))
    assert drawn == tokens(llm, SamplingParams(temperature=3.0, seed=5, max_tokens=9, ignore_eos=True)) != expected
    assert llm.attention.num_tokens == 0


def test_a_part_that_counts_as_false_is_still_the_readers_part(tiny_model, byte_tok):
    class Counted(Scheduler):
        def __len__(self):
            return len(self.running)

    own = Counted(BlockPool(16), max_num_seqs=2)
    assert LLM(tiny_model, tokenizer=byte_tok, scheduler=own).engine.scheduler is own


@pytest.mark.parametrize(("wrong", "words"), [
    ({"tokenizer": "gpt2"}, r"tokenizer must be a Tokenizer \(see minillm.text.tokenizer\): 'gpt2' lacks with_encoder"),
    ({"tokenizer": MyEncoder({}, {})}, "lacks with_encoder"),
    ({"sampler": "greedy"}, "sampler must be a SamplerProtocol .*'greedy' lacks __call__"),
    ({"sampler": MySampler}, r"MySampler is a class: make one, MySampler\(\.\.\.\)"),
    ({"scheduler": object()}, "lacks waiting, running, add, schedule, commit, finish"),
    ({"attention_backend": MyCache}, "attention_backend must be an object; MyCache is a class"),
    ({"attention_backend": "triton"}, "lacks write, attend, free"),
])
def test_what_is_no_such_part_is_refused_before_a_model_is_loaded(wrong, words):
    with pytest.raises(TypeError, match=words):
        LLM("no-such-model", **wrong)


def test_an_encoder_or_cache_without_its_methods_is_refused_where_it_is_given(tiny_model):
    with pytest.raises(TypeError, match="encoder must be a PieceEncoder .*lacks encode_pieces"):
        byte_tokenizer().with_encoder(str.encode)

    class WriteOnly(ContiguousCache):
        read = property()

    options = {"dtype": torch.float32, "device": "cpu"}
    with pytest.raises(TypeError, match="what make_cache makes must be a SequenceCache.*lacks read"):
        ContiguousAttention(tiny_model.config, make_cache=WriteOnly, **options)
    with pytest.raises(TypeError, match="capacity"):
        ContiguousAttention(tiny_model.config, make_cache=lambda config, dtype, device: None, **options)


def odd_at_step(number, odd):
    """A sampler that is the engine's own but for one step, when ``odd`` has the last word."""
    own, step = Sampler(vocab_size=261), 0

    def sample(logits, rows):
        nonlocal step
        step += 1
        return odd(own(logits, rows)) if step == number else own(logits, rows)

    return sample


@pytest.mark.parametrize("odd_id", [-1, 261, 10**9, 3.0, None, True, "3", np.int64(3), torch.tensor(3)], ids=str)
def test_an_id_that_is_none_ends_its_request_alone_and_says_what_the_sampler_chose(tiny_model, byte_tok, odd_id):
    prompts = ["the cat", "name three fruits"]
    expected = tokens(LLM(tiny_model, tokenizer=byte_tok), prompts=prompts)
    llm = LLM(tiny_model, tokenizer=byte_tok, sampler=odd_at_step(3, lambda own: [own[0], SampledToken(odd_id)]))
    good, bad = (out.outputs[0] for out in llm.generate(prompts, GREEDY))
    assert good.token_ids == expected[0] and good.finish_reason == "length"
    assert bad.token_ids == expected[1][:2] and bad.finish_reason == "error"
    assert bad.error == f"the sampler chose {odd_id!r}; an id is an int from 0 to {llm.engine.limits.vocab_size - 1}"
    assert tokens(llm, prompts=prompts) == expected and llm.attention.num_tokens == 0


@pytest.mark.parametrize("odd", [
    lambda own: None, lambda own: own[:-1], lambda own: own * 2, lambda own: [token.token_id for token in own],
    lambda own: iter(own), lambda own: torch.tensor([token.token_id for token in own])],
    ids=["nothing", "too few", "too many", "bare ids", "an iterator", "a tensor"])
def test_what_is_no_list_of_tokens_is_said_and_the_engine_goes_on(tiny_model, byte_tok, odd):
    expected = tokens(LLM(tiny_model, tokenizer=byte_tok))
    llm = LLM(tiny_model, tokenizer=byte_tok, sampler=odd_at_step(3, odd))
    with pytest.raises(TypeError, match="the sampler must return a list of 3 SampledToken, one for each row.*returned"):
        tokens(llm)
    assert llm.stats().num_running == llm.stats().num_waiting == llm.attention.num_tokens == 0
    assert tokens(llm) == expected


@pytest.mark.parametrize("returned", [None, np.array([1, 2]), (1, 2), "ab"], ids=["none", "array", "tuple", "text"])
def test_an_encoder_that_returns_no_list_is_told_so(byte_tok, returned):
    class Odd:
        def encode_pieces(self, pieces):
            return returned

    with pytest.raises(TypeError, match="the encoder's encode_pieces must return a list of ids, it returned"):
        byte_tok.with_encoder(Odd()).encode("ab")


def test_none_is_no_encoder_and_no_cache(tiny_model, byte_tok):
    with pytest.raises(TypeError, match="encoder must be a PieceEncoder .*None lacks encode_pieces"):
        byte_tok.with_encoder(None)
    options = {"dtype": torch.float32, "device": "cpu"}
    with pytest.raises(TypeError, match="what make_cache makes must be a SequenceCache .*None lacks num_tokens"):
        ContiguousAttention(tiny_model.config, make_cache=lambda *config, **options: None, **options)
    with pytest.raises(TypeError, match="not callable"):
        ContiguousAttention(tiny_model.config, make_cache=None, **options)


@pytest.mark.parametrize("odd", [
    lambda keys, values: (keys[:, :-1], values[:, :-1]), lambda keys, values: (keys, values[:, 1:]),
    lambda keys, values: (keys.transpose(0, 1), values.transpose(0, 1)), lambda keys, values: (keys[:, :0],) * 2],
    ids=["loses the newest", "one value too few", "tokens before heads", "nothing"])
def test_a_cache_that_loses_tokens_ends_in_an_error_and_not_in_other_words(tiny_model, byte_tok, odd):
    class Odd(ContiguousCache):
        is_odd = True

        def read(self, layer, start, end):
            pair = super().read(layer, start, end)
            return odd(*pair) if Odd.is_odd and end > 20 else pair

    attention = ContiguousAttention(tiny_model.config, dtype=tiny_model.dtype, device="cpu", make_cache=Odd)
    llm = LLM(tiny_model, tokenizer=byte_tok, attention_backend=attention)
    with pytest.raises(ValueError, match=r"a cache gave keys \[.*\] and values \[.*\], not \["):
        tokens(llm)
    assert llm.stats().num_running == attention.num_tokens == 0
    Odd.is_odd = False
    assert tokens(llm) == tokens(LLM(tiny_model, tokenizer=byte_tok))
