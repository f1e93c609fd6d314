"""Every notebook in a real browser: opened in JupyterLab, run to the end, answered, its sliders moved, looked at."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from minillm.course.execute import work_copy
from minillm.course.quizzes import Question, load_questions

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
READY_S, RUN_S = 120, 400
TOKEN = "a-token-of-this-test"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]
WIDE, NARROW = {"width": 1280, "height": 1400}, {"width": 800, "height": 1400}
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells in the page, not only those in sight
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# What JupyterLab itself knows of the notebook in front. `dialog` is any modal that stands in a reader's way.
STATE = """() => {
  const panel = window.jupyterapp?.shell?.currentWidget, context = panel?.context;
  const session = context?.sessionContext, kernel = session?.session?.kernel;
  const cells = (context?.isReady && panel.content.widgets || []).filter(cell => cell.model.type === 'code');
  return {
    dialog: document.querySelector('.jp-Dialog')?.innerText ?? null,
    ready: Boolean(window.labRestored && cells.length && session.isReady && kernel
                   && kernel.connectionStatus === 'connected' && kernel.status === 'idle'),
    about: [window.labRestored, context?.isReady, session?.isReady, kernel?.connectionStatus, kernel?.status],
    run: window.runAll ?? null,
    cells: cells.map(cell => ({id: cell.model.id, count: cell.model.executionCount,
      outputs: cell.model.outputs.toJSON().filter(o => o.output_type === 'error' || o.name === 'stderr')})),
  }; }"""

pytestmark = pytest.mark.browser


class Lab:
    """A JupyterLab of this test, on this machine alone, over copies as ``minillm course work`` makes them."""

    def __init__(self, folder: Path, home: Path):
        self.root, self.log = folder / "notebooks", folder / "lab.log"
        self.root.mkdir()
        for name, value in SETTINGS.items():
            path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(value))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        environment = os.environ | {
            "JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "MINILLM_LIVE": "1", "MINILLM_BRIEF": "1", "MINILLM_HOME": str(home), "PYTHONPATH": str(ROOT)}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
                 f"--port={self.url.rpartition(':')[2]}", f"--IdentityProvider.token={TOKEN}",
                 "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.root}", "--LabApp.news_url=",
                 "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                 "--LabApp.expose_app_in_browser=True"],
                env=environment, stdout=log, stderr=log)

    def address_of(self, notebook: Path) -> str:
        """Copy a notebook for its reader; the address at which it opens, in a fresh workspace."""
        shutil.copy(notebook, self.root)
        copy = Path(work_copy(self.root / notebook.name))
        return f"{self.url}/lab/tree/{copy.relative_to(self.root)}?token={TOKEN}&reset"

    def ask(self, path: str, method: str = "GET") -> bytes:
        """One request to the server's own interface."""
        request = urllib.request.Request(f"{self.url}/api{path}?token={TOKEN}", method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
            return answer.read()

    def wait(self) -> None:
        """Until the server answers."""
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                self.ask("")
                return
            except OSError:
                time.sleep(0.3)
        pytest.fail(f"JupyterLab did not start:\n{self.tail()}")

    def tail(self) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-2000:]

    def kernel_peak_gb(self) -> float:
        """The most memory that a kernel which is running now has held, in GB."""
        kernels = psutil.Process(self.process.pid).children()
        states = [Path(f"/proc/{kernel.pid}/status").read_text() for kernel in kernels]
        return max(int(re.search(r"VmHWM:\s+(\d+) kB", state)[1]) * 1024 / 1e9 for state in states)

    def end_kernels(self) -> None:
        """One notebook's memory at a time."""
        for session in json.loads(self.ask("/sessions")):
            self.ask(f"/sessions/{session['id']}", "DELETE")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def lab(tmp_path_factory, reader_home):
    server = Lab(tmp_path_factory.mktemp("lab"), reader_home)
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def browser(browser_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(lab, browser):
    """An empty page; afterwards it is closed and its kernel is gone."""
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.script_errors = []
    page.on("pageerror", lambda error: page.script_errors.append(str(error)))
    yield page
    context.close()
    lab.end_kernels()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_a_browser(notebook, lab, page, tmp_path):
    """Open, run all, answer a quiz right and wrong, move every slider, see every figure, in two widths for 00; live,
    the kernel stays below the memory that the notebook states.

    Screenshots go to MINILLM_SCREENSHOTS.
    """
    shots = Path(os.environ.get("MINILLM_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    number, stated = notebook.name[:2], json.loads(notebook.read_text("utf-8"))["metadata"]["minillm"]
    open_notebook(page, lab, notebook)
    run_all(page, lab)
    assert 0.2 < lab.kernel_peak_gb() < stated["memory_gb"]
    if "retrieval checks" not in stated["absent"]:
        answer_a_quiz(page, load_questions(number))
        page.screenshot(path=shots / f"notebook-{number}-quiz.png")
    move_sliders(page)
    page.screenshot(path=shots / f"notebook-{number}-slider.png")
    see_the_figures(page, shots / f"notebook-{number}-figure")
    if number == "00":
        page.set_viewport_size(NARROW)
        see_the_figures(page, shots / f"notebook-{number}-narrow")
    assert not page.script_errors


def test_no_modal_hides_the_page_unseen(lab, page):
    """Run All before a kernel is there opens a modal "Select Kernel": the tests wait for the kernel, however late its
    list comes. Where one opens all the same it is answered, and any other fails the test with its words."""
    notebook = small_notebook(lab.root / "late")
    page.route(re.compile("/api/kernelspecs"), lambda route: (page.wait_for_timeout(4000), route.continue_()))
    open_notebook(page, lab, notebook)
    run_all(page, lab)
    show_dialog(page, "notebook:change-kernel")
    wait_for(page, lab, lambda state: state["dialog"] is None and state["ready"], READY_S)
    show_dialog(page, "help:about")
    with pytest.raises(pytest.fail.Exception, match="JupyterLab asks:(.|\n)*Version(.|\n)*Its log ends:"):
        wait_for(page, lab, lambda state: False, READY_S)


def small_notebook(folder: Path) -> Path:
    """One cell, with the metadata of notebook 00."""
    folder.mkdir()
    content = json.loads(NOTEBOOKS[0].read_text("utf-8"))
    content["cells"] = [cell | {"source": "1 + 1"} for cell in content["cells"] if cell["cell_type"] == "code"][:1]
    (folder / "90_small.ipynb").write_text(json.dumps(content), "utf-8")
    return folder / "90_small.ipynb"


def show_dialog(page, command: str) -> None:
    page.evaluate("command => { window.jupyterapp.commands.execute(command); }", command)
    page.wait_for_selector(".jp-Dialog")


def open_notebook(page, lab: Lab, notebook: Path) -> None:
    """Until JupyterLab is restored, the notebook loaded, and its kernel connected and idle."""
    page.goto(lab.address_of(notebook))
    page.wait_for_function("() => window.jupyterapp")
    page.evaluate("() => { window.jupyterapp.restored.then(() => { window.labRestored = true; }); }")
    wait_for(page, lab, lambda state: state["ready"], READY_S)


def run_all(page, lab: Lab) -> None:
    """Run All, as the menu does, until the last cell; a cell that fails ends the wait at once."""
    page.evaluate("""() => {
        window.runAll = 'running';
        window.jupyterapp.commands.execute('notebook:run-all-cells')
            .then(() => { window.runAll = 'ended'; }, error => { window.runAll = 'failed: ' + error; }); }""")
    state = wait_for(page, lab, lambda state: state["run"] != "running", RUN_S)
    assert state["run"] == "ended"
    assert all(cell["count"] for cell in state["cells"]), state["cells"]


def wait_for(page, lab: Lab, done, limit_s: float) -> dict:
    """Poll STATE until ``done(state)``. "Select Kernel" gets its default; another modal, or an error, fails at once."""
    end_s = time.monotonic() + limit_s
    while True:
        state = page.evaluate(STATE)
        if state["dialog"] is not None:
            if "Select Kernel" not in state["dialog"]:
                pytest.fail(f"JupyterLab asks:\n{state['dialog']}\nIts log ends:\n{lab.tail()}")
            page.locator(".jp-Dialog .jp-mod-accept").click()
        failed = [cell for cell in state["cells"] if cell["outputs"]]
        assert not failed, failed
        if done(state):
            return state
        if time.monotonic() > end_s:
            pytest.fail(f"not there after {limit_s} s: {state['about']}, {state['run']}\n{lab.tail()}")
        page.wait_for_timeout(200)


def answer_a_quiz(page, questions: list[Question]) -> None:
    """One question, first wrong, then right, each with its reason."""
    question = next((question for question in questions if question.choices), questions[0])
    form = page.locator(".jp-OutputArea-output .widget-vbox .widget-vbox").filter(has_text=plain(question.question))
    form.scroll_into_view_if_needed()
    for correct, words in ((False, "Not so."), (True, "Right.")):
        if question.choices:
            index = next(i for i, choice in enumerate(question.choices) if choice.correct == correct)
            reason = question.choices[index].why
            form.locator("button").nth(index).click()
        else:
            reason = question.why if correct else ""
            form.locator("input").fill(f"{question.low if correct else question.high * 1e6} {question.unit}")
            form.locator("button").click()
        form.filter(has_text=f"{words} {plain(reason)}").wait_for()


def plain(text: str) -> str:
    """A text as the page shows it."""
    return text.replace("`", "")


def move_sliders(page) -> None:
    """Each slider changes the figure below it."""
    from playwright.sync_api import expect

    forms = page.locator(".jp-OutputArea-output .widget-vbox:has(.noUi-handle)")
    assert forms.count() or page.locator(".jp-OutputArea-output .noUi-handle").count() == 0
    for index in range(forms.count()):
        form = forms.nth(index)
        picture = form.locator("img")
        for handle in form.locator(".noUi-handle").all():
            before = picture.get_attribute("src")
            at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
            handle.scroll_into_view_if_needed()
            handle.focus()
            page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
            expect(picture).not_to_have_attribute("src", before, timeout=30_000)


def see_the_figures(page, shots: Path) -> None:
    """Every picture that a cell made is drawn, large enough, described, and inside the notebook's width."""
    figures = page.locator(".jp-OutputArea-output img")
    assert figures.count()
    right_edge = page.evaluate("""() => { const area = document.querySelector('.jp-WindowedPanel-outer');
        return area.getBoundingClientRect().left + area.clientWidth; }""")
    for index, figure in enumerate(figures.all()):
        figure.scroll_into_view_if_needed()
        box, alt = figure.bounding_box(), figure.get_attribute("alt")
        assert alt and len(alt.split()) >= 5, f"figure {index} has no description"
        assert figure.evaluate("picture => picture.complete && picture.naturalWidth > 0"), alt
        assert box and box["width"] >= 300 and box["height"] > 60, (alt, box)
        assert box["x"] + box["width"] <= right_edge + 1, f"too wide for the page: {alt}"
        figure.screenshot(path=f"{shots}-{index}.png")
