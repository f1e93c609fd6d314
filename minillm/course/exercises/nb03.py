"""Exercises of notebook 03: counting weights, a layer with a fault, FLOPs of a request, the last step by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception

Step = Callable[[float], float]


def parameters(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
               tied: bool) -> int:
    """Every weight of a Llama-like model, norms too."""
    attention = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
    layer = attention + 3 * hidden * inner + 2 * hidden
    return vocab * hidden * (1 if tied else 2) + layers * layer + hidden


def _no_norms(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
              tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, tied) - (2 * layers + 1) * hidden


def _no_final_norm(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
                   tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, tied) - hidden


def _one_table(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
               tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, True)


def _two_tables(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
                tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, False)


def _ungrouped(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
               tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, heads, dim, vocab, tied)


def _one_matrix_for_key_and_value(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int,
                                  vocab: int, tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, tied) - layers * hidden * kv_heads * dim


def _square_queries(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
                    tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, tied) + 2 * layers * hidden * (
        hidden - heads * dim)


def _two_matrices(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int,
                  tied: bool) -> int:
    return parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, tied) - layers * hidden * inner


@dataclass(frozen=True)
class ToyLayer:
    """A layer on single numbers: what it does with the functions it is given, perhaps with one fault."""

    name: str
    fault: str = "none"

    def __repr__(self) -> str:
        return f"layer {self.name}"

    def __call__(self, x: float, norm: Step, attention: Step, mlp: Step) -> float:
        """``h = x + attention(norm(x))``, then ``h + mlp(norm(h))``."""
        if self.fault == "lost residual":
            h = attention(norm(x))
        elif self.fault == "normed residual":
            h = norm(x) + attention(norm(x))
        else:
            h = x + attention(norm(x))
        return h + mlp(h if self.fault == "missing norm" else norm(h))


def find_fault(layer: ToyLayer) -> str:
    """Silence both parts and see what stays of x; then see what the MLP is given."""
    through = layer(8.0, lambda v: v / 2, lambda v: 0.0, lambda v: 0.0)
    if through != 8.0:
        return "normed residual" if through == 4.0 else "lost residual"
    return "none" if layer(8.0, lambda v: v / 2, lambda v: 0.0, lambda v: v) == 12.0 else "missing norm"


def _norm_does_nothing(layer: ToyLayer) -> str:
    return "none" if layer(8.0, lambda v: v, lambda v: 0.0, lambda v: 0.0) == 8.0 else "lost residual"


def _mlp_is_silent(layer: ToyLayer) -> str:
    found = find_fault(layer)
    return "none" if found == "missing norm" else found


def _any_loss_is_a_lost_residual(layer: ToyLayer) -> str:
    found = find_fault(layer)
    return "lost residual" if found == "normed residual" else found


def _nothing_found(layer: ToyLayer) -> str:
    return "none"


def _another_spelling(layer: ToyLayer) -> str:
    return find_fault(layer).replace(" ", "_")


def flops(weights: int, head: int, prompt: int, answer: int) -> int:
    """Matrix FLOPs of a request: all computed tokens through the layers, the head once an answer token."""
    return 2 * ((weights - head) * (prompt + answer - 1) + head * answer)


def _head_for_every_token(weights: int, head: int, prompt: int, answer: int) -> int:
    return 2 * weights * (prompt + answer - 1)


def _head_twice(weights: int, head: int, prompt: int, answer: int) -> int:
    return 2 * (weights * (prompt + answer - 1) + head * answer)


def _reads_the_last_token(weights: int, head: int, prompt: int, answer: int) -> int:
    return 2 * ((weights - head) * (prompt + answer) + head * answer)


def _head_in_decode_only(weights: int, head: int, prompt: int, answer: int) -> int:
    return 2 * ((weights - head) * (prompt + answer - 1) + head * (answer - 1))


def _rule_of_thumb(weights: int, head: int, prompt: int, answer: int) -> int:
    return 2 * weights * (prompt + answer)


def _head_once(weights: int, head: int, prompt: int, answer: int) -> int:
    return 2 * ((weights - head) * (prompt + answer - 1) + head)


def _one_operation_a_weight(weights: int, head: int, prompt: int, answer: int) -> int:
    return flops(weights, head, prompt, answer) // 2


def _whole_prompt_again(weights: int, head: int, prompt: int, answer: int) -> int:
    return sum(2 * ((weights - head) * (prompt + done) + head) for done in range(answer))


def last_step(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
              table: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Norm, one dot product a row, the first of the largest and its id."""
    return _best(vector, norm_weights, math.sqrt(_mean_square(vector) + epsilon), table)


def _mean_square(vector: Sequence[float]) -> float:
    return sum(x * x for x in vector) / len(vector)


def _best(vector: Sequence[float], norm_weights: Sequence[float], size: float,
          table: Sequence[Sequence[float]]) -> tuple[int, float]:
    """The last step with a norm that divides by ``size``."""
    normed = [x / size * weight for x, weight in zip(vector, norm_weights)]
    logits = [sum(a * b for a, b in zip(row, normed)) for row in table]
    return logits.index(max(logits)), max(logits)


def _no_norm(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
             table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return _best(vector, [1.0] * len(vector), 1.0, table)


def _weights_only(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                  table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return _best(vector, norm_weights, 1.0, table)


def _sum_for_mean(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                  table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return _best(vector, norm_weights, math.sqrt(sum(x * x for x in vector) + epsilon), table)


def _no_root(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
             table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return _best(vector, norm_weights, _mean_square(vector) + epsilon, table)


def _epsilon_outside(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                     table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return _best(vector, norm_weights, math.sqrt(_mean_square(vector)) + epsilon, table)


def _no_epsilon(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return last_step(vector, norm_weights, 0.0, table)


def _without_weights(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                     table: Sequence[Sequence[float]]) -> tuple[int, float]:
    return last_step(vector, [1.0] * len(vector), epsilon, table)


def _last_of_equals(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                    table: Sequence[Sequence[float]]) -> tuple[int, float]:
    best, logit = last_step(vector, norm_weights, epsilon, table[::-1])
    return len(table) - 1 - best, logit


def _id_alone(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
              table: Sequence[Sequence[float]]) -> int:
    return last_step(vector, norm_weights, epsilon, table)[0]


def _logit_alone(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                 table: Sequence[Sequence[float]]) -> float:
    return last_step(vector, norm_weights, epsilon, table)[1]


def _logit_first(vector: Sequence[float], norm_weights: Sequence[float], epsilon: float,
                 table: Sequence[Sequence[float]]) -> tuple[float, int]:
    return last_step(vector, norm_weights, epsilon, table)[::-1]


EXERCISES = {task.id: task for task in (
    Exercise(
        "03-1", "weights of a model", parameters,
        cases=((8, 16, 1, 2, 2, 4, 10, True), (8, 16, 2, 2, 1, 4, 10, False), (576, 1536, 30, 9, 3, 64, 49_152, True),
               (4096, 14_336, 32, 32, 8, 128, 128_256, False), (1024, 3072, 28, 16, 8, 128, 151_936, True)),
        misconceptions=(
            Misconception(_no_norms, "two norms a layer and one at the end have a weight for each of `hidden` numbers"),
            Misconception(_no_final_norm, "`hidden` too few: follow x to its last step. What stands between the last "
                                          "layer and the head?"),
            Misconception(_one_table, "an untied model has a second table of vocab x hidden: its head"),
            Misconception(_two_tables, "a tied head is the embedding table itself: count it once"),
            Misconception(_ungrouped, "keys and values have kv_heads heads, not heads"),
            Misconception(_one_matrix_for_key_and_value, "keys and values have a matrix each"),
            Misconception(_square_queries, "queries have heads x dim numbers, which need not be hidden"),
            Misconception(_two_matrices, "a gated MLP has three matrices: gate, up and down"),
        )),
    Exercise(
        "03-2", "find the flaw", find_fault,
        cases=((ToyLayer("A"),), (ToyLayer("B", "lost residual"),), (ToyLayer("C", "normed residual"),),
               (ToyLayer("D", "missing norm"),)),
        misconceptions=(
            Misconception(_norm_does_nothing, "with a norm that changes nothing, a misplaced norm cannot show: "
                                              "let it halve its input"),
            Misconception(_mlp_is_silent, "let the MLP return what it is given: then you see whether that was normed"),
            Misconception(_any_loss_is_a_lost_residual, "how much is left? Nothing, or what the norm made of x?"),
            Misconception(_nothing_found, "three of these layers have a fault: probe before you acquit"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "03-3", "FLOPs of a request", flops,
        cases=((100, 20, 3, 1), (100, 20, 3, 4), (134_515_008, 28_311_552, 34, 15), (134_515_008, 28_311_552, 1, 1),
               (8_030_261_248 - 525_336_576, 525_336_576, 4000, 200)),
        misconceptions=(
            Misconception(_head_for_every_token, "the head runs once for each answer token: a prompt's other rows need "
                                                 "no logits"),
            Misconception(_head_twice, "`weights` contains the head: how many of them does a token meet in the layers "
                                       "alone?"),
            Misconception(_reads_the_last_token, "the last token is never read: prompt + answer - 1 tokens go through "
                                                 "the layers"),
            Misconception(_head_in_decode_only, "prefill makes the first token's logits: the head runs `answer` times"),
            Misconception(_rule_of_thumb, "a rule of thumb: the head runs only where a token is chosen, and the "
                                          "last token is never read"),
            Misconception(_head_once, "a token is chosen `answer` times, and each time the head runs"),
            Misconception(_one_operation_a_weight, "a weight takes a multiplication and an addition: two FLOPs"),
            Misconception(_whole_prompt_again, "with a cache each token goes through the layers once"),
        )),
    Exercise(
        "03-4", "the last step, by hand", last_step, dtype="float32",
        cases=(([3.0, 4.0], [1.0, 1.0], 1e-5, [[1.0, 0.0], [0.0, 1.0]]), ([2.0], [1.0], 1e-5, [[-1.0]]),
               ([3.0, 4.0], [2.0, 1.0], 1e-5, [[1.0, 0.0], [0.0, 1.0]]),
               ([1.0, 1.0], [1.0, 1.0], 1e-5, [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]),
               ([1.0, 2.0], [1.0, 1.0], 1e-5, [[0.0, 1.0], [3.0, 0.0]]),
               ([0.003, 0.004], [1.0, 0.5], 1e-5, [[1.0, 0.0], [0.0, 1.0]]),
               ([0.0, 0.0], [1.0, 1.0], 1e-5, [[1.0, 2.0], [3.0, 4.0]])),
        misconceptions=(
            Misconception(_no_norm, "your logits grow with the vector's length: the vector is not normed yet"),
            Misconception(_weights_only, "the weights are there, the division is not: double the vector, and no logit "
                                         "may change"),
            Misconception(_sum_for_mean, "the logits are too small by the root of the number of entries: what does the "
                                         "M of RMS stand for?"),
            Misconception(_no_root, "after a norm a vector twice as long gives the same: what does RMS begin with?"),
            Misconception(_epsilon_outside, "only vectors near zero differ: what exactly is epsilon added to in "
                                            "`my_norm`?"),
            Misconception(_no_epsilon, "only vectors near zero differ, and zeros divide by 0: which argument is "
                                       "unused?"),
            Misconception(_without_weights, "each number of the normed vector is multiplied by its own weight"),
            Misconception(_last_of_equals, "of equal logits the lowest id counts"),
            Misconception(_id_alone, "the id is right; its logit is asked for too, as a pair"),
            Misconception(_logit_alone, "that is the largest logit: which row of the table gave it?"),
            Misconception(_logit_first, "the right two, in the other order: the id comes first"),
        )),
)}
