"""Figures state their finding, carry their data, and read without a kernel; explorers and background work too."""

import base64
import re
import threading
import time

import pytest

from minillm.course import canvas, explore, figures, in_background, show
from minillm.course.display import PALETTE

FINDING = "The second bar is twice as high as the first."


def two_bars(height=2.0):
    figure, axes = canvas(3, 2)
    axes.bar([0, 1], [1, height])
    return show(figure, alt=FINDING, table={"bar": ["a", "b"], "height (m)": [1.0, height]})


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setenv("MINILLM_LIVE", "1")


def test_html_holds_picture_finding_and_data():
    bundle = two_bars()._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and bundle["text/plain"] == FINDING
    assert f'alt="{FINDING}"' in bundle["text/html"]
    assert "<details><summary>The numbers behind the figure</summary><table>" in bundle["text/html"]
    picture = base64.b64decode(re.search(r"base64,([^\"]+)", bundle["text/html"])[1])
    assert picture.startswith(b"\x89PNG")


def test_background_is_opaque_white_in_any_theme():
    import io

    from PIL import Image
    image = Image.open(io.BytesIO(two_bars().png))
    assert "transparency" not in image.info
    assert image.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


@pytest.mark.parametrize(("alt", "table"), [
    ("A figure", {"x": [1]}), (FINDING, {}), (FINDING, {"x": [], "y": []}), (FINDING, {"x": [1], "y": [1, 2]}),
])
def test_a_figure_without_finding_or_data_is_refused(alt, table):
    figure, _ = canvas()
    with pytest.raises(ValueError, match="must"):
        show(figure, alt=alt, table=table)


def test_palette_colours_differ_in_lightness_too():
    assert len(set(PALETTE)) == len(PALETTE)


def test_style_leaves_matplotlib_as_it_was():
    import matplotlib
    before = dict(matplotlib.rcParams)
    two_bars()
    assert dict(matplotlib.rcParams) == before


def test_token_path_names_what_is_lit():
    shown = figures.token_path("decode")
    assert "Lit: decode" in shown.alt
    assert [row[0] for row in shown.rows if row[2] == "yes"] == ["decode"]
    assert all(row[2] == "yes" for row in figures.token_path().rows)
    with pytest.raises(ValueError, match="no stage 'magic'"):
        figures.token_path("magic")


def test_stage_timeline_adds_up_the_stages():
    spans = [("load", 0, 2.0), ("prefill", 2.0, 2.1), ("decode", 2.1, 2.12), ("decode", 2.12, 2.14)]
    shown = figures.stage_timeline({"cold": spans}, first_token_s={"cold": 2.1}, empty="yours")
    assert [(row[1], row[2], round(row[3])) for row in shown.rows] == [
        ("load", 1, 2000), ("prefill", 1, 100), ("decode", 2, 40)]
    assert "first token after 2,100 ms, 2,000 ms of it loading" in shown.alt


@pytest.mark.parametrize("names", [[1.0, 2.0], ["prefill", "decode"]])
@pytest.mark.parametrize("yours", [None, [2.0, 3.0]])
def test_recorded_and_yours(names, yours):
    shown = figures.recorded_and_yours(names, [1.5, 2.5], yours, x_label="x", y_label="measured / ideal",
                                       recorded_label="a machine, a date", finding=FINDING, absolute={"ms": [10, 20]})
    assert len(shown.header) == (3 if yours is None else 4)
    assert shown.rows[0][-1] == 10


def test_faster_than_the_floor_is_told_as_a_card_to_measure_again():
    def shown(recorded, yours):
        return figures.recorded_and_yours(["a", "b"], recorded, yours, x_label="", y_label="times", recorded_label="x",
                                          finding=FINDING)
    assert shown([1.5, 2.5], [2.0, 3.0]).alt == FINDING
    assert "than your card says is possible: measure the card again" in shown([1.5, 2.5], [2.0, 0.9]).alt
    assert "its card" in shown([0.5, 2.5], None).alt


def test_columns_of_text_stand_left():
    page = two_bars().html()
    assert '<th style="text-align: left">bar</th><th>height (m)</th>' in page
    assert '<td style="text-align: left">a</td><td>1</td>' in page


# ---- explorers

def test_explorer_shows_its_default_without_a_kernel(monkeypatch):
    monkeypatch.setenv("MINILLM_LIVE", "0")
    bundle = explore(two_bars, height=[2.0, 3.0])._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and "<img" in bundle["text/html"]


def test_moving_a_slider_redraws(live):
    form = explore(two_bars, height=[2.0, 3.0], default={"height": 3.0}).form()
    slider, picture = form.children
    assert slider.continuous_update is False and slider.value == 3.0
    before = picture.value
    slider.value = 2.0
    assert picture.value != before and "<td>2</td>" in picture.value


def test_explorer_bundle_has_widget_and_picture(live):
    bundle = explore(two_bars, height=[2.0, 3.0])._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and "<img" in bundle["text/html"]


def test_an_exception_in_a_callback_is_shown_and_does_not_stick(live):
    """J04: not swallowed by the kernel's log."""
    def draw(height):
        if height == 3.0:
            raise RuntimeError("too <high>")
        return two_bars(height)
    slider, picture = explore(draw, height=[2.0, 3.0]).form().children
    slider.value = 3.0
    assert "RuntimeError: too &lt;high&gt;" in picture.value
    slider.value = 2.0
    assert "<img" in picture.value


@pytest.mark.parametrize("controls", [{}, {"height": []}])
def test_an_explorer_needs_something_to_explore(controls):
    with pytest.raises(ValueError, match="at least one"):
        explore(two_bars, **controls)


def test_a_default_outside_the_values_is_refused():
    with pytest.raises(ValueError, match="not among"):
        explore(two_bars, height=[1], default={"height": 2})


# ---- background work (J04)

def test_j04_text_lands_in_its_own_panel_while_the_kernel_is_busy(live, capsys):
    gate = threading.Event()

    def work():
        yield "one <"
        assert gate.wait(5)
        yield " two"
    background = in_background(work)
    button, panel = background.form().children
    gate.set()  # this thread, the kernel's, has been "busy" until here
    assert background.wait(5)
    assert background.text == "one < two"
    assert "one &lt; two" in panel.value and "(done)" in panel.value
    assert capsys.readouterr().out == ""


def test_j04_stop_really_cancels(live):
    closed = threading.Event()

    def work():
        try:
            while True:
                yield "x"
                time.sleep(0.001)
        finally:
            closed.set()
    background = in_background(work)
    button, panel = background.form().children
    while not background.text:
        time.sleep(0.001)
    button.click()
    assert background.wait(5) and closed.is_set()
    assert "(stopped)" in panel.value


def test_j04_an_exception_in_the_thread_is_shown(live):
    def work():
        yield "start"
        raise RuntimeError("broke")
    background = in_background(work)
    assert background.wait(5)
    assert "RuntimeError: broke" in background.form().children[1].value
    assert "RuntimeError: broke" in background._repr_mimebundle_()["text/plain"]


def test_j04_headless_waits_and_keeps_text_alone(monkeypatch):
    monkeypatch.setenv("MINILLM_LIVE", "0")
    bundle = in_background(lambda: iter(["a", "b"]))._repr_mimebundle_()
    assert bundle == {"text/plain": "ab"}
