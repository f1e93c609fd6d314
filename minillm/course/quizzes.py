"""Retrieval checks: questions of judgement, each answer with its own explanation.

A :class:`Quiz` is a plain object. With a kernel it is a small form; on a page without one it is HTML that unfolds; in
a terminal it is text. Its words live in ``data/quizzes/NN.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from minillm.course import html, live
from minillm.course.files import CourseError, data_file
from minillm.course.units import parse_quantity


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to choose, and why it is right or wrong."""

    text: str
    why: str
    correct: bool = False


@dataclass(frozen=True, slots=True)
class Trap:
    """A wrong number that people really give, from ``low`` to ``high``, and what went wrong on the way to it."""

    low: float
    high: float
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether an answer is right, and why."""

    correct: bool
    why: str


@dataclass(frozen=True, slots=True)
class Question:
    """A choice question (``choices``) or a number question (``low`` to ``high`` in ``unit``)."""

    id: str
    question: str
    choices: tuple[Choice, ...] = ()
    low: float = 0.0
    high: float = 0.0
    unit: str = ""
    why: str = ""
    traps: tuple[Trap, ...] = ()

    def answer(self, given: str | float) -> Answer:
        """Judge a letter ("a", "b", ...) or a number with an optional unit ("4.8 ms", "0.0048 s")."""
        if self.choices:
            index = ord(str(given).strip().lower()[:1] or " ") - ord("a")
            if not 0 <= index < len(self.choices):
                return Answer(False, f"Answer with a letter from a to {chr(ord('a') + len(self.choices) - 1)}")
            return Answer(self.choices[index].correct, self.choices[index].why)
        try:
            value = parse_quantity(given, self.unit)
        except ValueError as error:
            return Answer(False, str(error))
        if self.low <= value <= self.high:
            return Answer(True, self.why)
        trap = next((trap.why for trap in self.traps if trap.low <= value <= trap.high), None)
        return Answer(False, trap or "Not in the accepted range; estimate it again, units first")


def quiz(number: str, question_id: str | None = None) -> Quiz:
    """The quiz of notebook ``"NN"``, or one of its questions.

    Raises:
        CourseError: for an unknown question, or a question file that breaks the rules (see :func:`load_questions`).
    """
    questions = load_questions(number)
    chosen = [q for q in questions if question_id in (None, q.id)]
    if not chosen:
        raise CourseError(f"quiz {number} has no question {question_id!r}; it has {', '.join(q.id for q in questions)}")
    return Quiz(chosen)


def load_questions(number: str) -> list[Question]:
    """Read and validate ``data/quizzes/NN.json``: every choice explained, exactly one right, ranges not empty."""
    name = f"quizzes/{number}.json"
    questions = []
    for entry in json.loads(data_file(name).read_text(encoding="utf-8")):
        choices = tuple(Choice(**choice) for choice in entry.pop("choices", []))
        traps = tuple(Trap(**trap) for trap in entry.pop("traps", []))
        question = Question(**entry, choices=choices, traps=traps)
        if choices and (sum(c.correct for c in choices) != 1 or not all(c.why for c in choices)):
            raise CourseError(f"{name}, {question.id}: exactly one choice must be right and each needs its reason")
        if not choices and not (question.low <= question.high and question.unit and question.why):
            raise CourseError(f"{name}, {question.id}: a number needs low <= high, a unit and a reason")
        questions.append(question)
    return questions


@dataclass
class Quiz:
    """Questions as a form, as HTML or as text, whatever the page can show."""

    questions: list[Question]
    _form: Any = field(default=None, repr=False)

    def answer(self, question_id: str, given: str | float) -> Answer:
        """Judge an answer without a form."""
        return next(q for q in self.questions if q.id == question_id).answer(given)

    def form(self) -> Any:
        """The live form, made once."""
        if self._form is None:
            from ipywidgets import VBox

            self._form = VBox([_question_form(question) for question in self.questions])
        return self._form

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = {"text/plain": self.text(), "text/html": self.html()}
        return bundle | live.widget_bundle(self.form)

    def text(self) -> str:
        """All questions with their answers left out."""
        return "\n\n".join(_question_text(question) for question in self.questions)

    def html(self) -> str:
        """All questions, each answer folded away with its explanation."""
        return "".join(_question_html(question) for question in self.questions)


def _letters(question: Question) -> list[tuple[str, Choice]]:
    return [(chr(ord("a") + i), choice) for i, choice in enumerate(question.choices)]


def _question_text(question: Question) -> str:
    lines = [question.question]
    lines += [f"  {letter}) {choice.text}" for letter, choice in _letters(question)]
    return "\n".join(lines + ([] if question.choices else [f"  (a number in {question.unit})"]))


def _question_html(question: Question) -> str:
    head = f"<p><b>{html.rich_text(question.question)}</b></p>"
    if question.choices:
        return head + "".join(
            html.details(f"{letter}) {choice.text.replace('`', '')}", f"<p>{_verdict(choice.correct, choice.why)}</p>")
            for letter, choice in _letters(question))
    bounds = dict.fromkeys(map(html.format_cell, (question.low, question.high)))  # one where both are equal
    span = f"{' to '.join(bounds)} {question.unit}"
    return head + html.details(f"Your number, in {question.unit}, then open",
                               f"<p>Accepted: {html.escape(span)}. {html.rich_text(question.why)}</p>")


def _verdict(correct: bool, why: str) -> str:
    return f"<b>{'Right.' if correct else 'Not so.'}</b> {html.rich_text(why)}"


def _question_form(question: Question) -> Any:
    from ipywidgets import HTML, Button, HBox, Layout, Text, VBox

    feedback = HTML()

    def judge(given: str) -> None:
        answer = question.answer(given)
        feedback.value = f"<p>{_verdict(answer.correct, answer.why)}</p>"

    head = HTML(f"<p><b>{html.rich_text(question.question)}</b></p>")
    if question.choices:
        rows = []
        for letter, choice in _letters(question):
            button = Button(description=letter, layout=Layout(width="3em", min_width="3em"))
            button.on_click(lambda _, letter=letter: judge(letter))
            rows.append(HBox([button, HTML(html.rich_text(choice.text))]))
        return VBox([head, *rows, feedback])
    entry = Text(placeholder=f"a number in {question.unit}", continuous_update=False)
    button = Button(description="Check")
    button.on_click(lambda _: judge(entry.value))
    return VBox([head, HBox([entry, button]), feedback])
