"""The page in a real browser: drawn without complaint, nothing cut, everything answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from detect.detector import Examination
from detect.page import PageInputs, render_page
from megascan.timeline import Timeline
from megascan.topology import Layout

pytestmark = pytest.mark.browser
WIDE, PHONE = 1400, 400
LETTERS_CUT = """() => [...document.querySelectorAll('svg text')].filter(text => {
  const [own, edge] = [text, text.ownerSVGElement].map(one => one.getBoundingClientRect());
  return own.width && (own.right > edge.right + 1 || own.left < edge.left - 1);
}).map(text => text.textContent)"""
CUT = """() => [...document.querySelectorAll('header *, main *, footer *')]
  .filter(one => !one.closest('svg') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 80))"""


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`opened(page, width)`: the page in a window; any complaint or request fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def show(page: str, width: int = WIDE, scheme: str = "light") -> Any:
        file = tmp_path / f"report-{len(contexts)}.html"
        file.write_text(page, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector("#rank-table tbody tr")
        assert requests == [file.as_uri()]
        return tab

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("width", [WIDE, PHONE])
@pytest.mark.parametrize("case", ["faulty", "healthy", "link", "undecided", "large"])
def test_nothing_is_cut_and_nothing_complains(
    case: str, width: int, pages: Callable[[str], str], opened: Callable[..., Any]
) -> None:
    tab = opened(pages(case), width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(CUT) == []
    assert tab.evaluate(LETTERS_CUT) == []
    cells = tab.locator("#topology .cell").count()
    number = len(json.loads(tab.locator("#figures").inner_text())["ranks"]["names"])
    assert cells == (0 if case == "undecided" else number)


@pytest.fixture(scope="module")
def pages(
    simulated: Callable[..., Timeline],
    inputs: Callable[[Timeline], PageInputs],
    large: Callable[..., Examination],
    faulty_page: str,
) -> Callable[[str], str]:
    made = {"faulty": faulty_page}

    def page(case: str) -> str:
        if case not in made:
            made[case] = make(case)
        return made[case]

    def make(case: str) -> str:
        if case == "large":
            examined = large(Layout(tp=4, pp=8, dp=32), {517: 1.3}, iterations=6)
            return render_page(PageInputs(source="large", examined=examined, facts=()))
        timeline = {
            "healthy": lambda: simulated(Layout(dp=8), iterations=8),
            "link": lambda: simulated(
                Layout(dp=4, pp=4), "rank=5,peer=6,kind=link,factor=20", iterations=8
            ),
            "undecided": lambda: simulated(Layout(), iterations=6),
        }[case]()
        return render_page(inputs(timeline))

    return page


def test_a_click_on_a_head_sorts_and_a_search_finds(
    pages: Callable[[str], str], opened: Callable[..., Any]
) -> None:
    tab = opened(pages("large"))
    first = tab.locator("#rank-table tbody tr").first
    assert first.locator("th").inner_text() == "517"  # the slowest stands on top
    head = tab.locator("#rank-table thead button").first
    head.click()
    assert first.locator("th").inner_text() == "0"
    head.click()
    assert first.locator("th").inner_text() == "1023"
    tab.get_by_label("Search ranks").fill("n0003 tp2")
    assert tab.locator("#rank-table tbody tr").count() == 2
    tab.get_by_label("Search ranks").fill("517")
    assert tab.locator("#rank-table tbody th").all_inner_texts() == ["517"]
    tab.get_by_label("Search ranks").fill("nobody")
    assert tab.locator("#rank-table .status").inner_text() == "no rank matches"
    tab.get_by_label("Search ranks").fill("")
    tab.get_by_label("Filter ranks").select_option("named")
    assert tab.locator("#rank-table tbody th").all_inner_texts() == ["517"]


def sixteen_fold(page: str) -> str:
    """Return the page with sixteen times its ranks: what it draws, copied."""
    before, _, rest = page.partition('id="figures">')
    text, _, after = rest.partition("</script>")
    figures = json.loads(text)
    ranks, time = figures["ranks"], figures["time"]
    number = len(ranks["names"])
    for name in ("places", "host", "gpu", "stage", "line", "slowdown", "compute_ms"):
        ranks[name] *= 16
    ranks["names"] = [str(rank) for rank in range(16 * number)]
    ranks["first"] = list(range(16 * number))
    width = max(ranks["column"]) + 1
    ranks["column"] = [one + fold * width for fold in range(16) for one in ranks["column"]]
    for room, name in ((ranks, "shares"), (time, "compute"), (time, "relative")):
        room[name] = base64.b64encode(base64.b64decode(room[name]) * 16).decode()
    return f'{before}id="figures">{json.dumps(figures)}</script>{after}'


def test_sixteen_thousand_ranks_are_sorted_searched_and_shown_in_parts(
    pages: Callable[[str], str], opened: Callable[..., Any]
) -> None:
    tab = opened(sixteen_fold(pages("large")))
    assert tab.locator("#rank-table tbody tr").count() == 25
    tab.get_by_role("button", name="show more").click()
    assert tab.locator("#rank-table tbody tr").count() == 225
    tab.get_by_label("Search ranks").fill("16383")
    assert tab.locator("#rank-table tbody th").all_inner_texts() == ["16383"]
    assert tab.locator("#topology .cell").count() == 16384


def test_hovering_tells_values_on_every_drawing(
    faulty_page: str, opened: Callable[..., Any]
) -> None:
    tab = opened(faulty_page)
    hint = tab.locator(".hint")
    for drawing, words in (
        ("#chart-1 svg", "rank 5"),
        ("#step-chart svg", "iteration"),
        ("#compute-chart svg", "rank 5"),
        ('#topology .cell[data-row="5"]', "compute against peers, whole window"),
        ("#strip-lanes .piece >> nth=20", "from the iteration's begin"),
        ("#rank-table .bar >> nth=0", "compute"),
    ):
        tab.mouse.move(0, 0)
        tab.locator(drawing).first.scroll_into_view_if_needed()
        tab.wait_for_timeout(60)  # scrolling hides the hint, one frame later
        tab.locator(drawing).first.hover(force=True)
        assert hint.is_visible() and words in hint.inner_text(), drawing


def test_the_slider_shows_one_iteration_at_a_time(
    simulated: Callable[..., Timeline], inputs: Callable[..., PageInputs], opened: Callable
) -> None:
    fault = "rank=2,kind=compute,factor=1.5,from=9,to=12"
    tab = opened(render_page(inputs(simulated(Layout(dp=4), fault, iterations=12))))
    cell = tab.locator('#topology .cell[data-row="2"]')
    slider = tab.get_by_label("Iteration shown on the map")
    slider.fill("0")
    assert "s3" in (cell.get_attribute("class") or "").split()
    slider.fill(slider.get_attribute("max") or "")
    assert {"s7", "s8"} & set((cell.get_attribute("class") or "").split())
    assert tab.locator(".slider output").inner_text() == "iteration 12"


def test_a_picked_rank_is_drawn_and_axes_say_where_they_begin(
    faulty_page: str, opened: Callable[..., Any]
) -> None:
    tab = opened(faulty_page)
    assert tab.locator("#compute-chart .mark").count() == 0  # from zero
    tab.locator("#rank-table tbody tr", has_text="DP1 PP0 TP0").click()
    assert "rank 2" in tab.locator("#compute-chart .key").inner_text()
    tab.locator("#quantity").get_by_role("button", name="against peers").click()
    assert "not at 0" in tab.locator("#compute-chart .mark").text_content()


def test_the_lanes_can_be_saved_as_a_trace(
    faulty_page: str, opened: Callable[..., Any], tmp_path: Path
) -> None:
    tab = opened(faulty_page)
    with tab.expect_download() as download:
        tab.get_by_text("save them as a trace").click()
    download.value.save_as(tmp_path / "lanes.json")
    events = json.loads((tmp_path / "lanes.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} >= {5}
    assert all(event["dur"] >= 0 for event in spans)


def test_the_lanes_are_handed_to_perfetto_by_a_click(
    faulty_page: str, opened: Callable[..., Any]
) -> None:
    """Perfetto's page is a stand-in that answers as the real one does: PONG, a while after."""
    tab = opened(faulty_page)
    answers = """<script>setTimeout(() => addEventListener("message", (event) => {
      if (event.data === "PING") event.source.postMessage("PONG", "*");
      else document.title = new TextDecoder().decode(event.data.perfetto.buffer);
    }), 300)</script>"""
    tab.context.route(
        "https://ui.perfetto.dev/**",
        lambda route: route.fulfill(body=answers, content_type="text/html"),
    )
    with tab.expect_popup() as popup:
        tab.get_by_text("open these lanes in Perfetto").click()
    popup.value.wait_for_function("document.title.length > 0")
    events = json.loads(popup.value.title())
    assert {event["pid"] for event in events if event["ph"] == "X"} >= {5}


def test_a_chart_against_peers_shows_what_is_usual(
    pages: Callable[[str], str], opened: Callable[..., Any], simulated: Callable, inputs: Callable
) -> None:
    pair = simulated(Layout(dp=2), "rank=1,kind=compute,factor=1.05", iterations=6)
    tab = opened(render_page(inputs(pair)))
    ticks = tab.locator("#chart-1 svg .axis").all_text_contents()
    assert any(float(tick) == 1.0 for tick in ticks if tick.replace(".", "").isdigit())
    assert "shaded" not in tab.locator("#chart-1 .key").inner_text()  # there is no peer to shade
    # of many ranks in stages, a slow one stands out against its peers only
    pressed = opened(pages("large")).locator("#quantity [aria-pressed=true]")
    assert pressed.inner_text() == "against peers"


def test_names_of_a_trace_are_text_to_a_browser(
    faulty: Timeline, inputs: Callable, renamed: Callable, opened: Callable[..., Any]
) -> None:
    name = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    tab = opened(render_page(replace(inputs(renamed(faulty, name, name)), source=name)))
    assert tab.locator("img").count() == 0
    assert name in tab.locator("#rank-table tbody").inner_text()


def test_print_and_dark_have_colours_of_their_own(
    faulty_page: str, opened: Callable[..., Any]
) -> None:
    light, dark = (opened(faulty_page, scheme=scheme) for scheme in ("light", "dark"))
    paper = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(paper) == "rgb(255, 255, 255)" != dark.evaluate(paper)
    assert dark.evaluate(paper) == "rgb(20, 23, 26)"
    for tab in (light, dark):
        tab.emulate_media(media="print")
        panel = "getComputedStyle(document.querySelector('.large div')).backgroundColor"
        assert tab.evaluate(paper) == "rgb(255, 255, 255)"
        assert tab.evaluate(panel) == "rgb(245, 247, 249)"  # paper is white for every reader
    assert not light.locator("nav").is_visible() and light.locator("#topology svg").is_visible()
