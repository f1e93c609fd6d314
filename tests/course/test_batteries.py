"""The batteries: minillm's own parts and the shortest right ones hold, and each injected fault is caught."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from minillm.cache.kv import ContiguousCache
from minillm.course import prove_cache, prove_sampler, prove_tokenizer
from minillm.course.batteries import SAMPLER_CLAIMS, BatteryFailure
from minillm.sample import SampledToken, Sampler
from minillm.text.bpe import bytes_to_alphabet
from minillm.text.tokenizer import byte_tokenizer, train_bpe

TEXT = "the cat that sat, the hat that the cat had; aaaa bananas é é don't stop\n" * 3
TOKENIZER = train_bpe(TEXT, 80, special_tokens=["<|eos|>"])


# --- tokenizer


class MyEncoder:
    """The shortest right encoder; each fault is a subclass that changes one method."""

    def __init__(self):
        self.vocab, self.merges = TOKENIZER.encoder.vocab, TOKENIZER.encoder.merges

    def encode_pieces(self, pieces):
        return [token_id for piece in pieces for token_id in self.encode(piece)]

    def encode(self, piece):
        ids = self.symbols(piece)
        while found := self.candidates(ids):
            i = self.choose(found)
            ids[i:i + 2] = [self.merges[ids[i], ids[i + 1]][1]]
        return ids

    def symbols(self, piece):
        return [self.vocab[char] for char in bytes_to_alphabet(piece.encode())]

    def candidates(self, ids):
        return [(self.merges[pair][0], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in self.merges]

    def choose(self, found):
        return min(found)[1]


class LeftmostFirst(MyEncoder):
    def choose(self, found):
        return min(i for _, i in found)


class RightmostAmongEquals(MyEncoder):
    def choose(self, found):
        return min(found, key=lambda entry: (entry[0], -entry[1]))[1]


class NewestFirst(MyEncoder):
    def choose(self, found):
        return max(found)[1]


class AcrossPieces(MyEncoder):
    def encode_pieces(self, pieces):
        return self.encode("".join(pieces))


class Characters(MyEncoder):
    def symbols(self, piece):
        return [self.vocab[char] for char in piece.replace(" ", "Ġ").replace("\n", "Ċ") if char in self.vocab]


class Stripped(MyEncoder):
    def symbols(self, piece):
        return super().symbols(piece.strip() or piece)


class LowerCase(MyEncoder):
    def symbols(self, piece):
        return super().symbols(piece.lower())


class OneMergeOnly(MyEncoder):
    def encode(self, piece):
        ids = self.symbols(piece)
        if found := self.candidates(ids):
            i = self.choose(found)
            ids[i:i + 2] = [self.merges[ids[i], ids[i + 1]][1]]
        return ids


class ForgetsTheEnd(MyEncoder):
    def candidates(self, ids):
        return super().candidates(ids[:-1])


class SharesItsCache(MyEncoder):
    seen = {}

    def encode_pieces(self, pieces):
        pieces = tuple(pieces)
        if pieces not in self.seen:
            self.seen[pieces] = super().encode_pieces(pieces)
        return self.seen[pieces]


class EachPieceOnce(MyEncoder):
    def encode_pieces(self, pieces):
        return super().encode_pieces(dict.fromkeys(pieces))


class NeedsAList(MyEncoder):
    def encode_pieces(self, pieces):
        return [token_id for i in range(len(pieces)) for token_id in self.encode(pieces[i])]


class Tuples(MyEncoder):
    def encode_pieces(self, pieces):
        return tuple(super().encode_pieces(pieces))


class LongPiecesCut(MyEncoder):
    def encode(self, piece):
        return super().encode(piece) if len(piece) < 60 else self.encode(piece[:59]) + self.encode(piece[59:])


class FirstLettersOnly(MyEncoder):
    def symbols(self, piece):
        return super().symbols(piece)[:200]


class GrowsItsOwnCache(MyEncoder):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def encode_pieces(self, pieces):
        parts = [self.seen.setdefault(piece, self.encode(piece)) for piece in pieces] or [[]]
        for part in parts[1:]:
            parts[0] += part
        return parts[0]


def test_own_tokenizers_and_the_shortest_right_encoder_hold(capsys):
    for tokenizer in (TOKENIZER, byte_tokenizer(), TOKENIZER.with_encoder(MyEncoder())):
        prove_tokenizer(tokenizer)
    assert capsys.readouterr().out.count("cases hold") == 3


@pytest.mark.parametrize("fault", MyEncoder.__subclasses__(), ids=lambda fault: fault.__name__)
def test_each_fault_of_an_encoder_is_caught(fault):
    with pytest.raises(BatteryFailure, match=r"tokenizer fails; of \d+ cases, .*\n  case .*\n  because"):
        prove_tokenizer(TOKENIZER.with_encoder(fault()), TOKENIZER)


def test_merging_from_left_to_right_is_called_by_its_name_and_not_a_spoilt_list():
    tokenizer = train_bpe("he\nhe\nhe\nthe\nthe\nth\nth", 3)  # h+e, then t+he, then t+h

    class FromTheLeft(LeftmostFirst):
        def __init__(self):
            self.vocab, self.merges = tokenizer.encoder.vocab, tokenizer.encoder.merges

    with pytest.raises(BatteryFailure, match=r"case     one piece, 'the'\n  because .* merged from left to right"):
        prove_tokenizer(tokenizer.with_encoder(FromTheLeft()), tokenizer)


def test_without_a_vocabulary_to_compare_with_it_says_what_to_pass():
    class Bare:
        def encode_pieces(self, pieces):
            return []

    with pytest.raises(TypeError, match="like="):
        prove_tokenizer(TOKENIZER.with_encoder(Bare()))


# --- sampler


class MySampler:
    """The plainest right sampler, a row at a time; each fault is a subclass."""

    temperature_power = 1

    def __call__(self, logits, rows):
        return [self.row(scores.double(), row, i) for i, (scores, row) in enumerate(zip(logits, rows))]

    def row(self, scores, row, place):
        if not scores.max().isfinite():
            return SampledToken(-1, error="no usable logit")
        scores = self.penalize(scores.clone(), row)
        best = int((scores == scores.max()).nonzero()[0])
        return SampledToken(best if row.params.greedy else self.draw(scores, row, place))

    def penalize(self, scores, row):
        params = row.params
        for i in {*row.prompt_token_ids, *row.output_token_ids}:
            scores[i] *= 1 / params.repetition_penalty if scores[i] > 0 else params.repetition_penalty
        for i, count in Counter(row.output_token_ids).items():
            scores[i] -= params.presence_penalty + params.frequency_penalty * count
        return scores

    def draw(self, scores, row, place):
        weights = torch.exp((scores - scores.max()) / row.params.temperature ** self.temperature_power)
        order = torch.sort(scores, descending=True, stable=True).indices
        kept = torch.zeros_like(weights).index_copy(0, order, self.keep(weights[order], row.params))
        generator = torch.Generator().manual_seed(self.key(row, place))
        return int(torch.multinomial(weights * kept, 1, generator=generator))

    def keep(self, weights, params):
        """1 for what stays, of weights from the largest to the smallest."""
        kept = torch.ones_like(weights)
        if 0 < params.top_k:
            kept[params.top_k:] = 0
        left = weights * kept
        kept *= left.cumsum(0) - left < params.top_p * left.sum()
        return kept * (weights >= params.min_p)

    def key(self, row, place):
        return hash((row.seed, row.index, row.position)) & 0xFFFFFFFF


class HighestAmongEquals(MySampler):
    def row(self, scores, row, place):
        best = len(scores) - 1 - int(scores.flip(0).argmax())
        return SampledToken(best) if row.params.greedy else super().row(scores, row, place)


class TemperatureTwice(MySampler):
    temperature_power = 2


class NoTemperature(MySampler):
    temperature_power = 0


class TopKOneTooMany(MySampler):
    def keep(self, weights, params):
        kept = super().keep(weights, params)
        kept[params.top_k:params.top_k + 1] = 1
        return kept


class TopPWithoutTheLast(MySampler):
    def keep(self, weights, params):
        kept = super().keep(weights, params)
        return kept if params.top_p == 1 else kept * (weights.cumsum(0) <= params.top_p * weights.sum())


class TopPOfTheWhole(MySampler):
    def keep(self, weights, params):
        return super().keep(weights, params) * (weights.cumsum(0) - weights < params.top_p * weights.sum()) \
            if not params.top_k else self.unordered(weights, params)

    def unordered(self, weights, params):
        kept = (weights.cumsum(0) - weights < params.top_p * weights.sum()).double()
        kept[params.top_k:] = 0
        return kept * (weights >= params.min_p)


class MinPOfTheWhole(MySampler):
    def keep(self, weights, params):
        return super().keep(weights, params) * (weights / weights.sum() >= params.min_p)


class RepetitionAlwaysDivides(MySampler):
    def penalize(self, scores, row):
        for i in {*row.prompt_token_ids, *row.output_token_ids}:
            scores[i] /= row.params.repetition_penalty ** (1 if scores[i] <= 0 else 0)
            scores[i] /= row.params.repetition_penalty ** (1 if scores[i] <= 0 else 0)
        return super().penalize(scores, row)


class RepetitionEveryTime(MySampler):
    def penalize(self, scores, row):
        scores = super().penalize(scores, row)
        for i, count in Counter(row.prompt_token_ids).items():
            scores[i] /= row.params.repetition_penalty ** (count - 1)
        return scores


class PresenceOfThePrompt(MySampler):
    def penalize(self, scores, row):
        for i in set(row.prompt_token_ids):
            scores[i] -= row.params.presence_penalty
        return super().penalize(scores, row)


class FrequencyOnce(MySampler):
    def penalize(self, scores, row):
        scores = super().penalize(scores, row)
        for i, count in Counter(row.output_token_ids).items():
            scores[i] += row.params.frequency_penalty * (count - 1)
        return scores


class SameDrawForEveryChoice(MySampler):
    def key(self, row, place):
        return hash((row.seed, row.position)) & 0xFFFFFFFF


class SameDrawAtEveryPosition(MySampler):
    def key(self, row, place):
        return hash((row.seed, row.index)) & 0xFFFFFFFF


class ByPlaceInTheBatch(MySampler):
    def key(self, row, place):
        return super().key(row, place) + place


class GlobalGenerator(MySampler):
    def key(self, row, place):
        return int(torch.randint(1 << 30, ()))


class ChangesLogits(MySampler):
    def __call__(self, logits, rows):
        tokens = super().__call__(logits, rows)
        logits -= 1
        return tokens


class NaNEndsTheBatch(MySampler):
    def __call__(self, logits, rows):
        if logits.isnan().any():
            return [SampledToken(-1, error="NaN")] * len(rows)
        return super().__call__(logits, rows)


class NaNIsGreedy(MySampler):
    def row(self, scores, row, place):
        return super().row(scores.nan_to_num(0.0), row, place)


class GivesTensors(MySampler):
    def row(self, scores, row, place):
        return SampledToken(torch.tensor(super().row(scores, row, place).token_id))


class ForgetsARow(MySampler):
    def __call__(self, logits, rows):
        return super().__call__(logits, rows)[:max(1, len(rows) - 1)]


class TopPWithTheBorder(MySampler):
    def keep(self, weights, params):
        kept = super().keep(weights, params)
        if params.top_k:
            return kept
        return (weights.cumsum(0) - weights <= params.top_p * weights.sum()) * (weights >= params.min_p).double()


class PresenceBeforeRepetition(MySampler):
    def penalize(self, scores, row):
        for i, count in Counter(row.output_token_ids).items():
            scores[i] -= row.params.presence_penalty + row.params.frequency_penalty * count
        penalty = row.params.repetition_penalty
        for i in {*row.prompt_token_ids, *row.output_token_ids}:
            scores[i] *= 1 / penalty if scores[i] > 0 else penalty
        return scores


class KeysAdded(MySampler):
    def key(self, row, place):
        return row.seed + row.index + row.position & 0xFFFFFFFF


class KeysXored(MySampler):
    def key(self, row, place):
        return (row.seed ^ row.position ^ row.index << 8) & 0xFFFFFFFF


class SeedsOf32Bits(MySampler):
    def key(self, row, place):
        return hash((row.seed & 0xFFFFFFFF, row.index, row.position)) & 0xFFFFFFFF


class LowTemperatureIsGreedy(MySampler):
    def row(self, scores, row, place):
        token = super().row(scores, row, place)
        return SampledToken(int(scores.argmax())) if row.params.temperature < 0.25 and not token.error else token


class MinusOneIsASlice(MySampler):
    def keep(self, weights, params):
        kept = super().keep(weights, params)
        kept[params.top_k or len(kept):] = 0
        return kept


class FirstIdsOnly(MySampler):
    def row(self, scores, row, place):
        return super().row(scores[:512], row, place)


def test_own_sampler_and_the_plainest_right_one_hold(capsys):
    prove_sampler(Sampler(vocab_size=1000))
    prove_sampler(MySampler())
    assert capsys.readouterr().out.count("cases hold") == 2


@pytest.mark.parametrize("fault", MySampler.__subclasses__(), ids=lambda fault: fault.__name__)
def test_each_fault_of_a_sampler_is_caught(fault):
    with pytest.raises(BatteryFailure, match=r"sampler fails; of \d+ cases, .*\n  case .*\n  because"):
        prove_sampler(fault())


def test_a_simple_sampler_is_asked_only_for_what_it_claims(capsys):
    class Greedy:
        def __call__(self, logits, rows):
            return [SampledToken(int(token_id)) for token_id in logits.max(-1).indices]

    prove_sampler(Greedy(), claims={"greedy"})
    assert "cases hold" in capsys.readouterr().out
    for claim in SAMPLER_CLAIMS - {"greedy"}:
        with pytest.raises(BatteryFailure):
            prove_sampler(Greedy(), claims={"greedy", "temperature", claim})
    with pytest.raises(ValueError, match="no claim 'beam'; there are greedy, min_p, nan"):
        prove_sampler(Greedy(), claims={"beam"})


# --- cache


class MyCache:
    """The shortest right cache: it grows by copying; each fault is a subclass."""

    def __init__(self, config, *, capacity, dtype, device):
        nothing = torch.empty(config.num_kv_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.layers = [(nothing, nothing)] * config.num_layers
        self.capacity = capacity

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


class RewindsNothing(MyCache):
    def write(self, layer, start, key, value):
        super().write(layer, self.layers[layer][0].shape[1], key, value)


class KeysForValues(MyCache):
    def read(self, layer, start, end):
        return super().read(layer, start, end)[::-1]


class OneLayerForAll(MyCache):
    def write(self, layer, start, key, value):
        super().write(0, start, key, value)
        self.layers = [self.layers[0]] * len(self.layers)


class OneForAllSequences(MyCache):
    shared: dict = {}

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.layers = self.shared.setdefault((config, options["dtype"]), self.layers)


class IgnoresStart(MyCache):
    def read(self, layer, start, end):
        return super().read(layer, 0, end)


class CapacityIsALimit(MyCache):
    def write(self, layer, start, key, value):
        super().write(layer, start, key, value)
        keys, values = self.layers[layer]
        if keys.shape[1] > 16:
            self.layers[layer] = keys[:, -16:], values[:, -16:]


class LosesTheOldWhenItGrows(MyCache):
    def write(self, layer, start, key, value):
        before = self.layers[layer][0].shape[1]
        super().write(layer, start, key, value)
        if before <= self.capacity < start + len(key):
            self.layers[layer] = tuple(x.clone().index_fill_(1, torch.arange(start), 0.0) for x in self.layers[layer])


class AlwaysFloat32(MyCache):
    def __init__(self, config, *, capacity, dtype, device):
        super().__init__(config, capacity=capacity, dtype=torch.float32, device=device)


class KeepsTheCallersTensors(MyCache):
    def write(self, layer, start, key, value):
        if start:
            return super().write(layer, start, key, value)
        self.layers[layer] = key.transpose(0, 1), value.transpose(0, 1)


class HeadsMixed(MyCache):
    def write(self, layer, start, key, value):
        super().write(layer, start, key.roll(1, 1), value.roll(1, 1))


class CountsEveryLayer(MyCache):
    @property
    def num_tokens(self):
        return sum(keys.shape[1] for keys, _ in self.layers)


class CountsKeysAlone(MyCache):
    @property
    def num_bytes(self):
        return super().num_bytes // 2


class ReadsTheNewestAlone(MyCache):
    def read(self, layer, start, end):
        keys, values = super().read(layer, start, end)
        return keys[:, -4:], values[:, -4:]


class ReadsOneMore(MyCache):
    def read(self, layer, start, end):
        keys, values = self.layers[layer]
        return keys[:, start:end + 1], values[:, start:end + 1]


class KeepsTheLast64(MyCache):
    def write(self, layer, start, key, value):
        super().write(layer, start, key, value)
        self.layers[layer] = tuple(x[:, -64:] for x in self.layers[layer])


class RoundsToFloat32(MyCache):
    def write(self, layer, start, key, value):
        super().write(layer, start, key.float().to(key.dtype), value.float().to(value.dtype))


@pytest.mark.parametrize("cache", [ContiguousCache, MyCache])
def test_own_cache_and_the_shortest_right_one_hold(cache, capsys):
    start_s = time.process_time()
    prove_cache(cache)
    assert time.process_time() - start_s < 10, "it takes a second"
    assert "cases hold" in capsys.readouterr().out


@pytest.mark.parametrize("fault", MyCache.__subclasses__(), ids=lambda fault: fault.__name__)
def test_each_fault_of_a_cache_is_caught(fault):
    with pytest.raises(BatteryFailure, match=r"cache fails; of \d+ cases, .*\n  case .*\n  because"):
        prove_cache(fault)


def test_the_smallest_case_is_shown_in_words():
    with pytest.raises(BatteryFailure) as failure:
        prove_cache(KeysForValues)
    assert "tokens written: 1 at position 0" in str(failure.value) and "keys differ at position 0" in str(failure.value)


def test_importing_the_batteries_loads_no_torch():
    code = "import sys; from minillm.course import prove_cache; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_an_interrupted_battery_says_in_which_case_the_part_hung(capsys):
    class Hangs(MySampler):
        def row(self, scores, row, place):
            raise KeyboardInterrupt  # as Ctrl-C does, or the notebook's stop button

    with pytest.raises(KeyboardInterrupt):
        prove_sampler(Hangs())
    assert "stopped in this case, which had not come to an end: 1 rows over a vocabulary" in capsys.readouterr().out


@pytest.mark.parametrize(("prove", "part", "words"), [
    (prove_tokenizer, MyEncoder(), "tokenizer must be a Tokenizer .*lacks with_encoder"),
    (prove_tokenizer, None, "None lacks with_encoder"), (prove_sampler, MySampler, "MySampler is a class: make one"),
    (prove_sampler, None, "None lacks __call__")])
def test_what_is_no_part_at_all_is_refused_before_any_case(prove, part, words):
    with pytest.raises(TypeError, match=words):
        prove(part)


def test_a_part_that_raises_at_once_fails_with_its_own_words():
    def broken(*args, **options):
        raise RuntimeError("not written yet")

    class Broken(MyEncoder):
        encode_pieces = broken

    for prove, part in ((prove_cache, broken), (prove_sampler, broken),
                        (prove_tokenizer, TOKENIZER.with_encoder(Broken()))):
        with pytest.raises(BatteryFailure, match="it raised RuntimeError: not written yet"):
            prove(part)
