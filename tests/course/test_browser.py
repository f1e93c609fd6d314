"""Notebook 00 in a real browser: opened in JupyterLab, run to the end, answered, looked at."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from minillm.course.execute import work_copy

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "00_one_token_end_to_end.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUIRED = os.environ.get("MINILLM_REQUIRE_BROWSER") == "1"
RUN_S = 400
TOKEN = "a-token-of-this-test"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]

pytestmark = [pytest.mark.browser,
              pytest.mark.skipif(not CHROMIUM and not REQUIRED,
                                 reason="no Chromium here (MINILLM_REQUIRE_BROWSER=1 insists)")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on this machine alone, over a copy of notebook 00 as ``minillm course work`` makes it."""
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    shutil.copy(NOTEBOOK, notebooks)
    copy = Path(work_copy(notebooks / NOTEBOOK.name))
    settings = tmp_path / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')  # all cells in the page, not only those in sight
    news = tmp_path / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    port = free_port()
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "MINILLM_LIVE": "1", "PYTHONPATH": str(NOTEBOOK.parents[1])}
    with open(tmp_path / "lab.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
             f"--IdentityProvider.token={TOKEN}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={copy.parent}",
             "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/api?token={TOKEN}", process, tmp_path / "lab.log")
        yield f"http://127.0.0.1:{port}/lab/tree/{copy.name}?token={TOKEN}&reset"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        if process.poll() is not None:
            break
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


def test_notebook_00_runs_in_a_browser(lab, tmp_path):
    """Open, run all, answer a quiz, move a slider, see the figure change. Screenshots go to MINILLM_SCREENSHOTS."""
    from playwright.sync_api import sync_playwright

    shots = Path(os.environ.get("MINILLM_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.set_default_timeout(60_000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_selector('[data-status="idle"], .jp-Notebook-ExecutionIndicator[data-status="idle"]')
        start_running(page)
        wait_until_run(page)
        assert page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
        answer_a_quiz(page)
        page.screenshot(path=shots / "notebook-00-quiz.png")
        move_a_slider(page)
        page.screenshot(path=shots / "notebook-00-slider.png")
        see_the_figures(page, shots)
        assert not errors
        browser.close()


def start_running(page) -> None:
    """Run all cells. JupyterLab drops the command while it is still connecting to the kernel: ask until one starts."""
    for _ in range(12):
        page.click(".lm-MenuBar-itemLabel >> text=Run")
        page.click('.lm-Menu-item[data-command="runmenu:run-all"]')
        page.wait_for_timeout(5000)
        prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_text_contents()
        if any(prompt.strip() != "[ ]:" for prompt in prompts):
            return
    pytest.fail("no cell began to run")


def wait_until_run(page) -> None:
    """Until the last code cell (the glossary) shows its table; a cell that fails ends the wait at once."""
    end_s = time.monotonic() + RUN_S
    while time.monotonic() < end_s:
        failed = page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]')
        assert failed.count() == 0, failed.first.inner_text()
        state = page.evaluate("""() => {
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent);
            return [prompts.length, prompts.filter(p => /\\[(\\*| )\\]/.test(p)).length]; }""")
        if state[0] and not state[1]:
            return
        page.wait_for_timeout(500)
    pytest.fail(f"the notebook had not finished after {RUN_S} s")


def answer_a_quiz(page) -> None:
    button = page.locator(".jp-OutputArea-output button.jupyter-button", has_text="b").first
    button.scroll_into_view_if_needed()
    button.click()
    page.wait_for_selector(".widget-html-content >> text=Right.")


def move_a_slider(page) -> None:
    handle = page.locator(".jp-OutputArea-output .noUi-handle").first
    handle.scroll_into_view_if_needed()
    picture = page.locator(".jp-OutputArea-output .widget-html-content img").first
    before = picture.get_attribute("alt")
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('.jp-OutputArea-output .widget-html-content img').alt !== before", arg=before)


def see_the_figures(page, shots: Path) -> None:
    figures = page.locator(".jp-OutputArea-output img[alt]")
    assert figures.count() >= 4
    for index in range(figures.count()):
        figure = figures.nth(index)
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        assert box and box["width"] > 400 and box["height"] > 100
        figure.screenshot(path=shots / f"notebook-00-figure-{index}.png")
