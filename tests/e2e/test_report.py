"""The page of a report in headless Chromium."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.cli import report
from tests.browser import CHROMIUM, BrowserPage, open_browser
from tests.nightly import all_but
from tests.unit.tools.report_runs import (
    PLANTED,
    build_rl_metrics,
    write_eval_run,
    write_rl_run,
    write_run,
)

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: Debian has it in chromium"),
]
DRAWN = "document.getElementById('main')?.dataset.drawn"
# Titles of cards in which Plotly has drawn no trace.
EMPTY = """[...document.querySelectorAll('.card')].filter(card =>
    !card.querySelector('.plot .trace, .plot .points path, .plot .hm image, .plot .barlayer path')
).map(card => card.querySelector('h3').textContent)"""
# Heights of the areas in which plots draw.
HEIGHTS = """[...document.querySelectorAll('.plot')].map(
    plot => plot.querySelector('.nsewdrag').getBoundingClientRect().height)"""
# Texts of plots that reach beyond their plot, and other texts and boxes that are cut.
CUT = """[
    ...[...document.querySelectorAll('.plot')].flatMap(plot => {
        const box = plot.getBoundingClientRect();
        return [...plot.querySelectorAll('text')].filter(text => {
            const r = text.getBoundingClientRect();
            return r.width && (r.left < box.left - 1 || r.right > box.right + 1 ||
                r.top < box.top - 1 || r.bottom > box.bottom + 1);
        });
    }),
    ...[...document.querySelectorAll('header *, main *')].filter(node => !node.closest('svg') &&
        node.getClientRects().length && (node.getBoundingClientRect().right > innerWidth + 1 ||
        (node.scrollWidth > node.clientWidth + 1 && node.clientWidth &&
            getComputedStyle(node).overflowX !== 'visible'))),
].map(node => node.textContent.slice(0, 80))"""
FOCUSED = "document.activeElement.textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and the page of both."""
    folder = tmp_path_factory.mktemp("runs")
    write_rl_run(folder / "a")
    write_rl_run(folder / "b", num_steps=5, seed=7)
    report.main([str(folder / "a"), str(folder / "b")])
    return folder


def open_page(tab: BrowserPage, path: Path, **window) -> None:
    tab.errors.clear()
    tab.requests.clear()
    tab.open(path.as_uri(), **window)
    tab.wait_for(DRAWN)


SCREENS = [(width, theme) for width in (1400, 400) for theme in ("light", "dark")]


@pytest.mark.parametrize(("width", "theme"), all_but([(1400, "light"), (400, "dark")], SCREENS))
def test_every_plot_is_drawn_at_this_width_without_errors(tab, runs, width, theme):
    open_page(tab, runs / "a" / "report.html", width=width, theme=theme)
    num_cards = tab.evaluate("document.querySelectorAll('.card').length")
    assert (int(tab.evaluate(DRAWN)), num_cards) == (24, 24)
    assert tab.evaluate(EMPTY) == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    widths = tab.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)")
    assert max(widths) < width
    assert tab.requests == [(runs / "a" / "report.html").as_uri()]  # it loads nothing else
    assert tab.errors == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("num_runs", [1, 3, 12])
def test_plots_keep_their_height_and_texts_are_whole(tab, tmp_path, num_runs, width):
    folders = [
        write_rl_run(tmp_path / f"qwen3_30b_a3b_seed_{number}", 2, seed=number)
        for number in range(num_runs)
    ]
    report.main([*map(str, folders), "--output", str(tmp_path / "page.html")])
    open_page(tab, tmp_path / "page.html", width=width)
    heights = tab.evaluate(HEIGHTS)
    assert len(heights) == 24 and min(heights) >= 200
    # A metric is named by a long text that nothing wraps: its choice is of the plot's width.
    assert [text for text in tab.evaluate(CUT) if "<script>" not in text] == []
    legend = tab.evaluate(
        "[...document.querySelectorAll('#legend:not([hidden]) button')].map(b => b.textContent)"
    )
    assert legend == [folder.name for folder in folders if num_runs > 1]
    assert tab.evaluate("document.querySelectorAll('.plot .legend .traces').length") == 0
    assert tab.errors == []


def test_a_click_in_a_legend_hides_a_run_or_a_phase_and_shows_it_again(tab, runs):
    open_page(tab, runs / "a" / "report.html")
    drawn = """state.data.figures.filter(f => f.id === 'training-KIND').flatMap(f =>
        document.getElementById('plot-' + f.id).data.filter(t => t.visible).map(t => t.name))"""
    rewards, phases = drawn.replace("KIND", "reward"), drawn.replace("KIND", "time")
    assert tab.evaluate(rewards) == ["a: reward", "b: reward"]
    tab.evaluate("document.querySelector('#legend button').click()")
    assert tab.evaluate(rewards) == ["b: reward"]
    tab.evaluate("document.querySelector('#legend button').click()")
    assert tab.evaluate(rewards) == ["a: reward", "b: reward"]
    assert tab.evaluate(phases) == ["generate", "update", "weight_sync"]
    tab.evaluate("document.querySelector('#legend-training-time button').click()")
    assert tab.evaluate(phases) == ["update", "weight_sync"]
    pressed = "document.querySelector('#legend-training-time button').ariaPressed"
    assert tab.evaluate(pressed) == "false"


def test_page_follows_the_theme_of_the_system(tab, runs):
    colors = []
    for theme in ("light", "dark"):
        open_page(tab, runs / "a" / "report.html", theme=theme)
        colors.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
    tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == colors[0]


def test_planted_markup_of_a_response_is_text(tab, runs):
    open_page(tab, runs / "a" / "report.html")
    shown = tab.evaluate("document.querySelector('#sample .assistant .text').textContent")
    assert PLANTED in shown
    tab.evaluate(
        "document.querySelectorAll('select').forEach(s => s.dispatchEvent(new Event('change')))"
    )
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    tab.wait_for("document.querySelectorAll('#sample .tokens tr').length")
    assert tab.evaluate("typeof window.planted") == "undefined"
    assert tab.evaluate("document.querySelectorAll('main img, main script, main a').length") == 0
    assert tab.errors == []


def test_policy_blocks_a_script_that_is_in_the_page(tab, runs, tmp_path):
    text = (runs / "a" / "report.html").read_text()
    (tmp_path / "planted.html").write_text(text.replace("</main>", f"</main>{PLANTED}"))
    open_page(tab, tmp_path / "planted.html")
    assert tab.evaluate("typeof window.planted") == "undefined"
    assert any("Content Security Policy" in error for error in tab.errors)


def test_keyboard_reaches_sections_and_samples(tab, runs):
    open_page(tab, runs / "a" / "report.html")
    focused = []
    for _ in range(6):
        tab.press("Tab")
        focused.append(tab.evaluate(FOCUSED))
    assert focused[:5] == ["Skip to the plots", "Runs", "Training", "Samples", "Settings"]
    tab.evaluate("document.querySelector('.list button').focus()")
    title = "document.querySelector('#sample h3').textContent"
    before = tab.evaluate(title)
    tab.press("ArrowDown")
    after = tab.evaluate(title)
    assert (before, after) == (
        "training, step 3, group 0, no. 0", "training, step 3, group 1, no. 0",
    )  # fmt: skip
    assert tab.evaluate("document.activeElement.getAttribute('aria-current')") == "true"


def test_shown_sample_stays_when_newer_ones_come_before_it(tab, runs):
    open_page(tab, runs / "a" / "report.html")
    title = "document.querySelector('#sample h3').textContent"
    tab.evaluate("document.querySelectorAll('.list button')[1].click()")
    before = tab.evaluate(title)
    samples = "state.data.samples[0].samples"
    tab.evaluate(f"{samples}.unshift({{ ...{samples}[0], label: 'new' }})")
    tab.evaluate("drawSamples()")
    assert tab.evaluate(title) == before == "training, step 3, group 1, no. 0"
    assert tab.evaluate("document.querySelectorAll('.list button')[2].ariaCurrent") == "true"


@pytest.mark.parametrize("is_left_out", [False, True])
def test_chosen_step_of_a_plot_stays_when_newer_ones_come_before_it(tab, runs, is_left_out):
    open_page(tab, runs / "a" / "report.html")
    select = "document.querySelector('section[aria-label=\"Timeline of a step\"] select')"
    chosen = f"{select}.selectedOptions[0].text"
    names = "document.getElementById('plot-training-timeline').data.map(trace => trace.name)"
    variants = "state.data.figures.find(figure => figure.id === 'training-timeline').variants"
    tab.evaluate(f"{variants}[1].data[0].name = 'of step 2'")
    tab.evaluate(f"{select}.selectedIndex = 1")
    tab.evaluate(f"{select}.dispatchEvent(new Event('change'))")
    tab.evaluate(f"{select}.focus()")
    before = tab.evaluate(chosen)
    tab.evaluate(f"{variants}.splice(1, {int(is_left_out)})")
    tab.evaluate(f"{variants}.unshift({{ ...{variants}[0], label: 'a, step 4' }})")
    tab.evaluate("draw()")
    assert tab.evaluate(chosen) == before == "a, step 2"
    assert "of step 2" in tab.evaluate(names)
    assert tab.evaluate(f"{select} === document.activeElement")
    assert tab.errors == []


def test_runs_are_side_by_side(tab, runs):
    open_page(tab, runs / "a" / "report.html")
    cells = tab.evaluate(
        "[...document.querySelectorAll('#settings-box tr')].map(r => r.textContent)"
    )
    assert "seed07" in cells
    names = tab.evaluate(
        "document.getElementById('plot-training-reward').data.map(trace => trace.name)"
    )
    assert names == ["a: reward", "b: reward"]


@pytest.mark.parametrize("kind", ["sft", "dpo", "rm", "eval"])
def test_other_commands_have_their_page(tab, tmp_path, kind):
    rows = [{"loss": 1.0 / step, "accuracy": 0.5, "lr": 1e-4} for step in (1, 2, 3)]
    folder = tmp_path / kind
    write_eval_run(folder) if kind == "eval" else write_run(folder, kind, rows)
    report.main([str(folder)])
    open_page(tab, folder / "report.html", width=400)
    assert tab.evaluate(EMPTY) == [] and tab.errors == []
    titles = tab.evaluate("[...document.querySelectorAll('.card h3')].map(h => h.textContent)")
    samples = tab.evaluate("document.getElementById('browser').textContent")
    assert ("writes no samples" in samples) == (kind != "eval")
    expected = ["Set math"] if kind == "eval" else ["Accuracy", "Loss", "Learning rate"]
    assert titles == expected


def test_live_page_shows_a_new_step_without_a_reload(tab, tmp_path):
    folder = write_rl_run(tmp_path / "a", num_steps=1)
    command = [sys.executable, "-m", "mcore_rl.cli.main", "report", str(folder), "--live"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#[\w-]{43}", address)
        tab.errors.clear()
        tab.open(address)
        tab.wait_for(DRAWN)
        select = "document.querySelector('section[aria-label=\"Timeline of a step\"] select')"
        assert tab.evaluate(select) is None
        tab.evaluate("window.is_same_page = true")
        steps = "document.getElementById('plot-training-reward').data[0].x.length"
        assert tab.evaluate(steps) == 1
        row = {"phase": "training", "step": 2, "wall_time_s": 0.0, **build_rl_metrics(2)}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        with (folder / "timeline.jsonl").open("a") as file:
            file.write((folder / "timeline.jsonl").read_text().replace('"step": 1', '"step": 2'))
        tab.wait_for(f"{steps} === 2", 30)
        tab.wait_for(f"{select}?.options.length === 2")  # of one step before
        assert tab.evaluate("window.is_same_page") is True
        assert tab.evaluate("location.hash") == ""  # a copied address has no token
        assert tab.errors == []
        tab.open("about:blank")
        tab.open(address.partition("#")[0] + "#samples")  # as a reload at a section
        tab.wait_for(DRAWN)
        tab.evaluate("sessionStorage.clear()")
        tab.open(address.partition("#")[0])
        tab.wait_for("document.getElementById('status')?.textContent.includes('No new data')")
        assert tab.evaluate(f"{DRAWN}") is None
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
