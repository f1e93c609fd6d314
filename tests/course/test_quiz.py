"""Quizzes: every answer is explained; they read as a form, as HTML and as text; callbacks answer."""

import sys

import pytest

from minillm.course import quiz
from minillm.course.files import CourseError, data_file
from minillm.course.quizzes import Choice, Question, Quiz, Trap, load_questions
from minillm.course.units import format_bytes, format_seconds, parse_quantity

NUMBERS = sorted(path.stem for path in data_file("quizzes/00.json").parent.glob("*.json"))
CHOICE = Question("c", "Which `one`?", choices=(Choice("this", "because", True), Choice("that", "no: <b>")))
NUMBER = Question("n", "How long?", low=4.7, high=4.9, unit="ms", why="16 GB / 3.35 TB/s",
                  traps=(Trap(2.3, 2.5, "half"),))


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setenv("MINILLM_LIVE", "1")


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_answer_is_not_given_away_by_its_place_or_length(number):
    """Readers found it where it was always the second, or always the longest."""
    choices = [question.choices for question in load_questions(number) if question.choices]
    right = [[choice.correct for choice in own].index(True) for own in choices]
    longest = [len(own[i].text) == max(len(choice.text) for choice in own) for own, i in zip(choices, right)]
    if len(choices) >= 3:
        assert len(set(right)) > 1
        assert sum(longest) <= len(longest) / 2


@pytest.mark.parametrize("number", NUMBERS)
def test_shipped_questions_keep_the_rules_and_accept_their_own_answers(number):
    for question in load_questions(number):
        if question.choices:
            answers = [question.answer("abcdefgh"[i]) for i in range(len(question.choices))]
            assert [a.correct for a in answers].count(True) == 1
            assert len({a.why for a in answers}) == len(answers)
        else:
            middle = (question.low + question.high) / 2
            assert question.answer(f"{middle} {question.unit}").correct
            assert question.traps
            for trap in question.traps:
                assert question.answer((trap.low + trap.high) / 2).why == trap.why
                assert not question.answer((trap.low + trap.high) / 2).correct


@pytest.mark.parametrize(("given", "correct"), [
    ("4.8", True), ("4.8 ms", True), ("0.0048 s", True), ("4800 us", True), (4.8, True),
    ("4,8", True), ("4,8 ms", True), ("4,800", False),
    ("5 ms", False),
    ("4.8 s", False), ("4.8 GB", False), ("soon", False), ("", False), ("2.4", False),
])
def test_numbers_accept_a_range_and_units(given, correct):
    answer = NUMBER.answer(given)
    assert answer.correct is correct and answer.why


def test_letters_are_judged():
    assert CHOICE.answer("A").correct and not CHOICE.answer("b").correct
    assert "letter from a to b" in CHOICE.answer("z").why
    assert "letter" in CHOICE.answer("").why


def test_mimebundle_without_a_kernels_reader_has_html_and_text_alone(monkeypatch):
    monkeypatch.setenv("MINILLM_LIVE", "0")
    bundle = Quiz([CHOICE, NUMBER])._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/html"].count("<details>") == 3
    assert "no: &lt;b&gt;" in bundle["text/html"] and "<code>one</code>" in bundle["text/html"]
    assert "Accepted: 4.7 to 4.9 ms" in bundle["text/html"]
    assert "because" not in bundle["text/plain"] and "a) this" in bundle["text/plain"]


def test_mimebundle_with_a_kernel_carries_the_form_too(live):
    bundle = Quiz([CHOICE])._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}


def test_reads_without_ipywidgets(live, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(Quiz([CHOICE])._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_pressing_a_letter_shows_its_explanation(live):
    _, row_a, row_b, feedback = Quiz([CHOICE]).form().children[0].children
    row_b.children[0].click()
    assert "Not so." in feedback.value and "no: &lt;b&gt;" in feedback.value
    row_a.children[0].click()
    assert "Right." in feedback.value and "because" in feedback.value


def test_entering_a_number_shows_its_explanation(live):
    _, row, feedback = Quiz([NUMBER]).form().children[0].children
    entry, button = row.children
    entry.value = "2.4 ms"
    button.click()
    assert "half" in feedback.value
    entry.value = "0.0048 s"
    button.click()
    assert "Right." in feedback.value


def test_the_form_is_made_once(live):
    own = Quiz([CHOICE])
    assert own.form() is own.form()


def test_unknown_questions_and_files_are_named():
    with pytest.raises(CourseError, match="has no question 'nope'"):
        quiz("00", "nope")
    with pytest.raises(CourseError, match=r"quizzes/77\.json"):
        quiz("77")


@pytest.mark.parametrize("text", [
    '[{"id": "x", "question": "?", "choices": [{"text": "a", "why": "w"}, {"text": "b", "why": "w"}]}]',
    '[{"id": "x", "question": "?", "choices": [{"text": "a", "why": "", "correct": true}]}]',
    '[{"id": "x", "question": "?", "low": 2, "high": 1, "unit": "s", "why": "w"}]',
    '[{"id": "x", "question": "?", "low": 1, "high": 2, "unit": "", "why": "w"}]',
])
def test_a_question_that_breaks_the_rules_is_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "q.json"
    path.write_text(text)
    monkeypatch.setattr("minillm.course.quizzes.data_file", lambda name: path)
    with pytest.raises(CourseError, match="x: "):
        load_questions("00")


def test_units_convert_within_a_kind_only():
    assert parse_quantity("512 MiB", "MB") == pytest.approx(536.870912)
    assert parse_quantity("12 %", "times") == pytest.approx(0.12)
    assert parse_quantity("1_000 tok/s", "tokens/s") == 1000
    with pytest.raises(ValueError, match="asked for in GB"):
        parse_quantity("3 s", "GB")
    assert (format_bytes(96.6e6), format_bytes(12)) == ("96.6 MB", "12 B")
    assert [format_seconds(seconds) for seconds in (1.35, 0.0172, 8.5e-5)] == ["1.35 s", "17.2 ms", "85 µs"]
