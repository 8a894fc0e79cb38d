"""Frames of MegaScope's page in a real Chromium, while it is used on a large model.

    python -m benchmarks.scope_page [-o RESULT.md]

No model computes: what one of 32 layers and 16 heads would send for 1,000 tokens (900 read, 100
written 10 ms apart, told together as often as a session tells; strips of 6 places) is made up, and
recordings of 400 iterations of 96 layers. Each use of the page lasts some seconds. For each are
given: the frames that came, over those that a display of 60 a second shows; the longest time
between two; and the time of the page's thread for a frame (scripts, layout, painting), which other
work on the machine disturbs less: below 16.7 ms the page itself keeps up. Then the heap of the page
after use for long, swept before it is read.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.fuzz.scope import TOKEN, served
from benchmarks.jobs import environment_line, publish
from megascan.topology import Layout
from megascope.folder_page import FolderPage
from megascope.frames import encode
from megascope.model_page import ModelPage
from megascope.recorder import data_file_name
from megascope.server import Backend, build_app
from megascope.session import SHOWN_EVERY_S

LAYERS, HEADS, READ, WRITTEN = 32, 16, 900, 100
PLACES = ("residual", "attention_out", "fc2", "neurons", "context", "query")
ITERATIONS, TRAINED_LAYERS = 400, 96
_WORD_MS = 10
_TOLD_TOGETHER = round(1000 * SHOWN_EVERY_S / _WORD_MS)
_WATCH = """() => {
  const times = window.frameTimes = [];
  const tick = now => {
    times.push(now);
    if (window.frameTimes === times) requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}"""
_WATCHED = "() => { const times = window.frameTimes; window.frameTimes = null; return times; }"


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a use of the page has taken."""

    what: str
    shown_ratio: float
    longest_ms: float
    thread_ms: float
    """Of the page's thread, a frame of 1/60 s."""

    @property
    def row(self) -> str:
        """As a line of the result."""
        return (
            f"| {self.what} | {100 * self.shown_ratio:.0f} % | {self.longest_ms:.0f} ms | "
            f"{self.thread_ms:.1f} ms |"
        )


class MadeUp:
    """Answers as a session of a large model would."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(1)
        self.page = ModelPage(
            {"model": "made up", "num_layers": LAYERS, "hidden_size": 4096, "num_heads": HEADS,
             "tp": 1, "pp": 1, "ffn_hidden_size": 16384},
            tell=self._tell, tokenize=lambda text: list(range(READ)), text_of=str,
            max_length=4096, vocab_size=50_000,
        )  # fmt: skip

    def _tell(self, command: str) -> None:
        given = json.loads(command)
        if given["do"] != "stop":
            threading.Thread(target=self._answer, args=(given,)).start()

    def _answer(self, command: Mapping[str, Any]) -> None:
        number = command["id"]
        frames = {"run": self._run, "attention": self._attention, "lens": self._lens,
                  "pca": self._pca}[command["do"]]  # fmt: skip
        for header, arrays in frames(command):
            self.page.deliver(number, encode({**header, "run": number}, arrays))
        self.page.deliver(number, None)

    def _run(self, command: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
        layers = list(range(1, LAYERS + 1))
        for at in range(WRITTEN):
            tokens = list(range(READ)) if not at else [READ + at - 1]
            arrays = {place: self._random.gamma(2, size=(LAYERS, len(tokens), 1))
                      for place in command["places"]}  # fmt: skip
            top = [[one, -1.0 - one, f"word{one}"] for one in range(20)]
            yield {
                "kind": "step", "start": 0 if not at else READ + at - 1, "tokens": tokens,
                "next": READ + at, "texts": [f" w{one}" for one in tokens],
                "text": f" w{READ + at}", "logprob": -1.0, "top": top,
                "layers": dict.fromkeys(command["places"], layers),
            }, arrays  # fmt: skip
            if at % _TOLD_TOGETHER == 0:  # the first alone, then those of a session's pause
                time.sleep(SHOWN_EVERY_S)

    def _attention(self, command: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
        num = READ + WRITTEN - 1
        weights = np.tril(self._random.random((num, num), dtype=np.float32)).astype(np.float16)
        heads = command["heads"]
        header = {"kind": "attention", "layer": command["layer"], "heads": heads, "tokens": []}
        yield header, {"weights": np.broadcast_to(weights, (len(heads), num, num))}

    def _lens(self, command: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
        del command
        ids = self._random.integers(0, 20, size=(LAYERS, 64, 5))
        header = {
            "kind": "lens", "layers": list(range(1, LAYERS + 1)), "tokens": [],
            "first": READ + WRITTEN - 65, "texts": {str(one): f"word{one}" for one in range(20)},
        }  # fmt: skip
        yield header, {"ids": ids, "logprobs": -self._random.gamma(2, size=ids.shape)}

    def _pca(self, command: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
        del command
        points = self._random.normal(size=(LAYERS, 128, 3))
        header = {"kind": "pca", "layers": list(range(1, LAYERS + 1)), "tokens": [],
                  "shares": [0.5, 0.3, 0.1], "first": READ + WRITTEN - 129}  # fmt: skip
        yield header, {"points": points}


def write_recordings(folder: Path) -> None:
    """What a training of one rank leaves."""
    random = np.random.default_rng(2)
    header: dict[str, object] = {
        "kind": "run", "schema": 1, "rank": 0, "layout": Layout().to_json(),
        "model": {"num_layers": TRAINED_LAYERS}, "first_iteration": 1, "is_continued": False,
    }  # fmt: skip
    layers = list(range(1, TRAINED_LAYERS + 1))
    frames = [encode(header)]
    for iteration in range(1, ITERATIONS + 1):
        items = [{"place": place, "reduction": reduction, "gradient": False, "share": "whole",
                  "width": 4, "layers": layers, "microbatches": list(range(16))}
                 for place in PLACES[:4] for reduction in ("rms", "max")]  # fmt: skip
        tables = {str(at): random.gamma(2, size=(TRAINED_LAYERS, 16, 1, 1, 1))
                  for at in range(len(items))}  # fmt: skip
        data = {"kind": "data", "iteration": iteration, "per_token": False, "items": items}
        frames.append(encode(data, tables))
    (folder / data_file_name(0)).write_bytes(b"".join(frames))


class Tab:
    """A page that is used and measured."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self._inside = tab.context.new_cdp_session(tab)
        self._inside.send("Performance.enable")

    def _metrics(self) -> dict[str, float]:
        found = self._inside.send("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in found}

    def measure(self, what: str, use: Callable[[], None]) -> Use:
        """Frames and thread time while something is done."""
        self.tab.evaluate(_WATCH)
        before = self._metrics()
        use()
        after = self._metrics()
        gaps = np.diff(self.tab.evaluate(_WATCHED))
        num_due = (after["Timestamp"] - before["Timestamp"]) * 60
        return Use(
            what=what, shown_ratio=min(1.0, len(gaps) / num_due), longest_ms=float(gaps.max()),
            thread_ms=1000 * (after["TaskDuration"] - before["TaskDuration"]) / num_due,
        )  # fmt: skip

    def memory(self) -> str:
        """Heap, elements and listeners that stay."""
        self._inside.send("HeapProfiler.collectGarbage")
        found = self._metrics()
        return (
            f"{found['JSHeapUsedSize'] / 1e6:.1f} MB, {found['Nodes']:.0f} nodes, "
            f"{found['JSEventListeners']:.0f} listeners"
        )

    def each_frame(self, step: Callable[[int], None], seconds: float = 3.0) -> Callable[[], None]:
        """Do something about 60 times a second."""

        def use() -> None:
            begun, number = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                step(number)
                number += 1
                time.sleep(max(0.0, begun + number / 60 - time.perf_counter()))

        return use

    def over(self, selector: str) -> Callable[[], None]:
        """Move the pointer over an element."""
        self.tab.locator(selector).first.scroll_into_view_if_needed()
        box = self.tab.locator(selector).first.bounding_box()
        width = min(box["width"], 1300)

        def step(number: int) -> None:
            self.tab.mouse.move(box["x"] + number * 7 % width, box["y"] + box["height"] * 0.4)

        return self.each_frame(step)

    def press(self, key: str) -> Callable[[], None]:
        """Hold a key."""
        return self.each_frame(lambda number: self.tab.keyboard.press(key))


def _run_prompt(tab: Any) -> None:
    tab.fill("#most", str(WRITTEN))
    tab.click("#run")
    tab.locator("#tokensA .token").nth(READ + WRITTEN - 1).wait_for(timeout=120_000)
    tab.locator("#run:enabled").wait_for(timeout=120_000)


def of_a_model(tab: Any) -> Iterator[str]:
    """Uses of the page over a model that speaks."""
    page = Tab(tab)
    tab.locator("#run").wait_for()
    for name in PLACES[4:]:
        tab.get_by_role("button", name=name, exact=True).click()
    yield page.measure("100 tokens come, 10 ms apart, behind 900", lambda: _run_prompt(tab)).row
    tab.locator("#lensTable").wait_for()
    tab.click("#allHeads")
    tab.locator("canvas.head").nth(HEADS - 1).wait_for()
    tab.wait_for_timeout(2000)
    tab.locator("#strips h2").click()

    def scroll(number: int) -> None:
        tab.mouse.wheel(60 if number // 60 % 2 == 0 else -60, 0)

    over = page.over(".stripMap")
    tab.mouse.move(400, tab.locator(".stripMap").first.bounding_box()["y"] + 20)
    yield page.measure(
        "six strips of 1,000 tokens × 32 layers scrolled", page.each_frame(scroll)
    ).row
    yield page.measure("pointer over a strip", over).row
    tab.locator("h1").click()
    move = page.press("ArrowLeft")
    yield page.measure("← held: tokens, beside 16 maps of 999 × 999", move).row
    yield page.measure("pointer over a map", page.over("canvas.head")).row
    yield page.measure("pointer over PCA, 4,096 points", page.over("#pcaCanvas")).row
    first = page.memory()
    for _ in range(10):
        _run_prompt(tab)
    tab.wait_for_timeout(2000)
    yield f"\nPage of a model that speaks: {first}; after ten more such runs {page.memory()}.\n"


def of_a_training(tab: Any) -> Iterator[str]:
    """Uses of the page over recordings."""
    page = Tab(tab)
    tab.locator("#detail", has_text="iteration 400").wait_for(timeout=120_000)
    tab.wait_for_timeout(1000)
    yield page.measure("pointer over 96 layers × 400 iterations", page.over("#map")).row
    tab.locator("#map").focus()
    yield page.measure("← held: iterations", page.press("ArrowLeft")).row
    yield page.measure("↓ held: layers", page.press("ArrowDown")).row
    tab.wait_for_timeout(1000)
    first = page.memory()
    for number in range(40):
        tab.locator("#key").select_option(index=number % 8)
        tab.wait_for_timeout(150)
    tab.wait_for_timeout(3000)
    yield f"\nPage of a training: {first}; after 40 other places {page.memory()}.\n"


def measured(pages: Sequence[str]) -> Iterator[str]:
    """Lines of the result."""
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as place, sync_playwright() as player:
        write_recordings(Path(place))
        browser = player.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        apps: dict[str, tuple[Backend, Callable[[Any], Iterator[str]]]] = {
            "model": (MadeUp().page, of_a_model),
            "training": (FolderPage(Path(place), list), of_a_training),
        }
        for name in pages:
            backend, use = apps[name]
            with served(build_app(backend, token=TOKEN)) as port:
                tab = browser.new_page(viewport={"width": 1400, "height": 1000})
                tab.set_default_timeout(30_000)
                tab.goto(f"http://127.0.0.1:{port}/scope/#token={TOKEN}")
                yield from use(tab)
                tab.close()
        browser.close()


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", choices=("model", "training"), help="(both)")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    pages = [given.page] if given.page else ["model", "training"]
    lines = list(measured(pages))
    rows = [line for line in lines if line.startswith("|")]
    words = [line for line in lines if not line.startswith("|")]
    text = "\n".join(
        ["# The page in use", "", environment_line("cpu") + ", headless Chromium, 1,400 pixels", "",
         "`python -m benchmarks.scope_page`; its docstring says how.", "",
         "| use | frames shown, of 60 a second | longest gap | page's thread, a frame |",
         "|---|---|---|---|", *rows, *words]
    )  # fmt: skip
    publish(text, given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
