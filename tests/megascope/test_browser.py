"""Both pages in a real Chromium: every control, two widths, both schemes, no complaint."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascan.topology import Layout
from megascope.frames import encode
from megascope.recorder import data_file_name
from megascope.request import FILE_NAME, read_request
from tests import ranks

from .conftest import Written

pytestmark = pytest.mark.browser
WIDE, PHONE = 1400, 400
STOP_AT_THE_FIRST_TOKEN = """() => new MutationObserver((_, watching) => {
  if (!document.querySelector('#tokensA .token.new')) return;
  watching.disconnect();
  dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
}).observe(document.getElementById('view'), {childList: true, subtree: true})"""
CUT = """() => [...document.querySelectorAll('header *, main *')]
  .filter(one => !one.closest('.scroll') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 80))"""


def started(
    words: list[object], sign: str, cwd: Path = ranks.ROOT
) -> tuple[subprocess.Popen[str], str]:
    """A server, and the address that it has printed."""
    process = ranks.start(*words, cwd=cwd)
    assert process.stdout is not None
    heard = []
    for line in process.stdout:
        heard.append(line)
        if sign in line:
            return process, line.split(" at ")[1].split()[0]
    raise AssertionError("".join(heard))


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def write_tokenizer(folder: Path) -> None:
    """Bytes and a few pairs of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:190]
    trainer = trainers.BpeTrainer(
        vocab_size=203, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    library.train_from_iterator(["the cat sat on the mat"], trainer)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


@pytest.fixture(scope="module")
def speaking(
    written: dict[str, Written], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a page over a model, which may run long enough to be stopped."""
    place = tmp_path_factory.mktemp("speaking") / "llama"
    folder = shutil.copytree(written["llama"].folder, place)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    words = ["-m", "training.serve", "--load-hf", folder, "--scope", "--port", "0"]
    process, address = started([*words, "--distributed-backend", "gloo"], "looking into it at")
    yield address
    ended(process)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a page over recordings that have a NaN, and their folder."""
    random = np.random.default_rng(2)
    header = {"kind": "run", "schema": 1, "rank": 0, "layout": Layout().to_json(),
              "model": {"num_layers": 6}, "first_iteration": 1, "is_continued": False,
              "may_change": True}  # fmt: skip
    frames = [encode(header)]
    for iteration in range(1, 33):
        items, arrays = [], {}
        for number, (place, reduction) in enumerate([("residual", "rms"), ("fc1", "max")]):
            items.append({"place": place, "reduction": reduction, "gradient": False,
                          "share": "whole", "width": 4, "layers": [1, 2, 3, 4, 5, 6],
                          "microbatches": [0, 1, 2]})  # fmt: skip
            table = (
                random.uniform(1, 2, size=(6, 3, 1, 1, 1))
                * np.arange(1, 7)[:, None, None, None, None]
            )
            if iteration == 30 and place == "fc1":
                table[3, 1] = np.nan
            arrays[str(number)] = table
        data: dict[str, object] = {"kind": "data", "iteration": iteration, "per_token": False,
                                   "items": items}  # fmt: skip
        if iteration == 30:
            data["broken"] = {"layer": 4, "place": "fc1", "microbatch": 1, "gradient": False}
        if iteration == 32:
            data["weights"] = ["layer.1.fc1", "layer.2.fc1"]
            arrays["weights"] = np.array([[0.02, 1e-4, 2e-5], [0.03, 2e-4, 6e-5]])
        frames.append(encode(data, arrays))
    (tmp_path / data_file_name(0)).write_bytes(b"".join(frames))
    process, address = started(["-m", "megascan", "scope", tmp_path], "looking into")
    yield address, tmp_path
    ended(process)


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """`opened(address, width)`: the page in a window; a complaint or foreign request fails."""
    complaints: list[str] = []
    foreign: list[str] = []
    contexts: list[Any] = []

    def show(address: str, width: int = WIDE, scheme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 1000}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)
        home = address.split("/scope", maxsplit=1)[0]
        # A question that is refused shows in the console, too; the page says why.
        tab.on("console", lambda message: complaints.append(message.text)
               if "status of 400" not in message.text else None)  # fmt: skip
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: foreign.append(request.url)
               if not request.url.startswith((home, "blob:", "data:")) else None)  # fmt: skip
        tab.goto(address)
        return tab

    yield show
    for context in contexts:
        context.close()
    assert complaints == [] and foreign == []


def run_prompt(tab: Any, button: str = "#run", side: str = "A", most: str = "4") -> None:
    tab.fill("#most", most)
    tab.click(button)
    generated = tab.locator(f"#tokens{side} .token.new")
    generated.nth(int(most) - 1).wait_for()
    tab.locator("#run:enabled").wait_for()


def kept_picture(tab: Any, name: str) -> None:
    """A picture for whoever wants to look: SCOPE_PICTURES names the folder."""
    folder = os.environ.get("SCOPE_PICTURES")
    if folder:
        tab.wait_for_timeout(500)
        tab.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def is_painted(tab: Any, selector: str) -> bool:
    """Whether a canvas gets more than one colour within five seconds; it is there before that."""
    for _ in range(100):
        if tab.locator(selector).first.evaluate(
            "one => { const g = new OffscreenCanvas(one.width, one.height).getContext('2d');"
            " g.drawImage(one, 0, 0); const d = g.getImageData(0, 0, one.width, one.height).data;"
            " return new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 3)"
            ".join())).size > 1 }"
        ):  # fmt: skip
            return True
        tab.wait_for_timeout(50)
    return False


def test_a_prompt_shows_tokens_probabilities_strips_attention_lens_and_pca(
    speaking: str, opened: Callable[..., Any]
) -> None:
    tab = opened(speaking)
    tab.locator("#run").wait_for()
    assert "token=" not in tab.evaluate("location.href")
    run_prompt(tab)
    assert tab.locator("#bars i").count() == 20
    assert tab.locator(".stripMap").count() == 4 and is_painted(tab, ".stripMap")
    tab.locator("#lensTable").wait_for()
    assert tab.locator("#lensTable tr").count() == 5
    tab.click("#allHeads")
    tab.locator("canvas.head").nth(11).wait_for()
    assert is_painted(tab, "canvas.head")
    assert "shares of the variance" in tab.locator("#pca").inner_text()
    assert is_painted(tab, "#pcaCanvas")
    before = tab.locator("#bars").inner_text()
    tab.locator("#tokensA .token.new").first.click()
    assert tab.locator("#bars").inner_text() != before
    shaded = tab.locator("#tokensA .token[style*=color-mix]")
    assert 0 < shaded.count() <= tab.locator("#tokensA .token").count()
    tab.fill("#heads", "7")
    tab.click("#look")
    tab.locator(".heads.one figcaption", has_text="head 7").wait_for()
    assert tab.locator(".labelled .rows span").count() > 3
    under = tab.locator("#strips .under span").all_inner_texts()
    assert under == tab.locator("#tokensA .token").all_inner_texts()[:-1]
    assert "linear-gradient" in tab.locator(".strip .scale").first.get_attribute("style")
    tab.locator(".stripMap").first.hover()
    assert "residual" in tab.locator("#tip").inner_text() or tab.locator("#tip").is_visible()
    kept_picture(tab, "generation")


def test_all_layers_lead_to_a_head_and_its_words_to_a_large_map(
    speaking: str, opened: Callable[..., Any]
) -> None:
    tab = opened(speaking)
    tab.locator("#allLayers").wait_for()
    tab.click("#allLayers")
    tab.locator("#trouble", has_text="run a prompt first").wait_for()
    run_prompt(tab)
    tab.locator("#lensTable").wait_for()
    tab.click("#allLayers")
    tab.locator(".layers canvas").nth(4 * 12 - 1).wait_for()
    assert is_painted(tab, ".layers canvas")
    tab.locator(".layers canvas").nth(2 * 12 + 5).click()
    tab.locator("figcaption", has_text="head 5").wait_for()
    assert tab.locator("#layer").input_value() == "3"
    assert tab.locator("canvas.head").count() == 1
    tab.fill("#heads", "2 9 11")
    tab.click("#look")
    tab.locator("figcaption", has_text="head 9").wait_for()
    assert tab.locator(".few .labelled").count() == 3
    tab.locator("figcaption", has_text="head 9").click()
    tab.locator(".heads.one").wait_for()
    assert tab.locator("#heads").input_value() == "9"


def test_keys_choose_and_links_lead_back(speaking: str, opened: Callable[..., Any]) -> None:
    tab = opened(speaking)
    tab.locator("#text").fill("the mat")
    run_prompt(tab)
    tab.locator("h1").click()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#layer").input_value() == "2"
    for _ in range(100):  # written at most every 100 ms; the page lets nobody wait by `eval`
        if "layer=2" in tab.evaluate("location.hash"):
            break
        tab.wait_for_timeout(50)
    address = tab.evaluate("location.href")
    assert "text=the+mat" in address and "layer=2" in address
    again = tab.context.new_page()
    token = tab.evaluate("sessionStorage.getItem('token')")
    again.goto(f"{address}&token={token}")
    again.locator("#tokensA .token.new").first.wait_for(timeout=60_000)
    assert again.locator("#text").input_value() == "the mat"
    assert again.locator("#layer").input_value() == "2"


def test_of_long_runs_the_rows_around_the_chosen_token_are_shown(
    speaking: str, opened: Callable[..., Any]
) -> None:
    """As if the server computed few weights at once."""
    asked: list[dict[str, Any]] = []

    def fewer(route: Any) -> None:
        found = route.fetch()
        route.fulfill(response=found, json={**found.json(), "most_weights": 40})

    tab = opened(speaking)
    tab.locator("#run").wait_for()
    tab.route("**/scope/api/state", fewer)
    tab.on("request", lambda request: asked.append(json.loads(request.post_data))
           if request.url.endswith("/ask") else None)  # fmt: skip
    tab.reload()
    tab.locator("#run").wait_for()
    run_prompt(tab, most="2")
    tab.locator("figcaption", has_text="head 0").wait_for()
    tab.locator("#tokensA .token").first.click()
    tab.locator("figcaption", has_text="head 0").wait_for()
    tab.wait_for_timeout(300)
    rows = [one["rows"] for one in asked if one["do"] == "attention"]
    length = tab.locator("#tokensA .token").count()
    assert rows[-1][0] == 0 and rows[0][-1] == length - 2 and len(rows[0]) == 40 // length


def test_changes_make_a_run_b_beside_a(speaking: str, opened: Callable[..., Any]) -> None:
    tab = opened(speaking)
    tab.locator("#runB").wait_for()
    tab.click("#runB")
    tab.locator("#trouble", has_text="add a change first").wait_for()
    run_prompt(tab)
    tab.select_option("#kind", "noise")
    tab.select_option("#place", "residual")
    tab.fill("#layers", "2")
    tab.fill("#amount", "3")
    tab.click("#add")
    assert "noise residual layers 2" in tab.locator("#changeList").inner_text()
    run_prompt(tab, "#runB", "B")
    assert tab.locator("#tokensA .token").count() == tab.locator("#tokensB .token").count()
    tab.click("#difference")
    tab.locator(".strip", has_text="B − A").first.wait_for()
    assert is_painted(tab, ".stripMap")
    tab.locator("#changeList button").click()
    assert tab.locator("#changeList").inner_text() == ""
    tab.select_option("#place", "context")
    tab.select_option("#kind", "offset")
    tab.fill("#units", "99999")
    tab.fill("#amount", "1e12")
    tab.click("#add")
    tab.click("#runB")
    tab.locator("#trouble", has_text="amount is").wait_for()


def test_patching_with_run_a_brings_its_answer_back(
    speaking: str, opened: Callable[..., Any]
) -> None:
    tab = opened(speaking)
    tab.locator("#run").wait_for()
    run_prompt(tab, most="2")
    said = tab.locator("#bars").inner_text()
    tab.select_option("#kind", "replace")
    tab.select_option("#place", "residual")
    tab.fill("#layers", "4")
    tab.click("#add")
    run_prompt(tab, "#runB", "B", most="2")
    assert tab.locator("#bars").inner_text() == said


def test_stop_ends_a_long_run(speaking: str, opened: Callable[..., Any]) -> None:
    tab = opened(speaking)
    tab.locator("#run").wait_for()
    tab.fill("#most", "900")
    tab.evaluate(STOP_AT_THE_FIRST_TOKEN)
    tab.click("#run")
    tab.locator("#tokensA .token.new").first.wait_for()
    tab.locator("#run:enabled").wait_for()
    assert tab.locator("#tokensA .token.new").count() < 900


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:4] == b"\x89PNG"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_exports_are_pictures_and_a_table(speaking: str, opened: Callable[..., Any]) -> None:
    import pyarrow.parquet as pq

    tab = opened(speaking)
    tab.locator("#run").wait_for()
    run_prompt(tab)
    with tab.expect_download() as picture:
        tab.click("#strips #png")
    width, height = png_size(Path(picture.value.path()))
    assert width > 1000 and height > 4 * 60  # all four strips, as large as they are shown
    tab.locator("canvas.head").first.wait_for()
    with tab.expect_download() as picture:
        tab.click("#attentionPng")
    assert min(png_size(Path(picture.value.path()))) > 200
    with tab.expect_download() as table:
        tab.click("#strips #parquet")
    found = pq.read_table(table.value.path()).to_pydict()
    assert set(found) == {"place", "layer", "token", "number", "value"}
    assert set(found["place"]) >= {"residual", "neurons"} and len(found["value"]) > 100


def test_a_training_shows_health_the_first_break_and_takes_requests(
    recorded: tuple[str, Path], opened: Callable[..., Any]
) -> None:
    address, folder = recorded
    tab = opened(address)
    tab.locator("#broken").wait_for()
    text = tab.locator("#broken").inner_text()
    assert text.startswith("layer 4 fc1, rank 0") and "iteration 30, microbatch 1" in text
    tab.locator("#weights td").first.wait_for()
    assert is_painted(tab, "#map") and is_painted(tab, "#lines") and is_painted(tab, "#cells")
    tab.select_option("#key", "fc1|max|false")
    tab.wait_for_timeout(300)
    tab.locator("#map").click(position={"x": 5, "y": 5})
    tab.locator("#detail", has_text="iteration 1, fc1 max").wait_for()
    tab.locator("#map").press("ArrowRight")
    tab.locator("#detail", has_text="iteration 2,").wait_for()
    tab.click("text=gradients")
    tab.select_option("#kind", "noise")
    tab.select_option("#place", "residual")
    tab.fill("#layers", "3")
    tab.fill("#amount", "0.5")
    tab.fill("#from", "40")
    tab.fill("#to", "42")
    tab.click("#add")
    tab.click("#ask")
    tab.locator("#status", has_text="holds from iteration 34").wait_for()
    request = read_request((folder / FILE_NAME).read_bytes())
    assert request.gradients and request.first == 34 and "residual" in request.places
    (change,) = request.interventions
    assert (change.kind, change.place, change.layers, change.amount) == (
        "noise", "residual", (3,), 0.5,
    )  # fmt: skip
    assert (change.first, change.last) == (40, 42)
    with tab.expect_download() as table:
        tab.click("#parquet")
    assert Path(table.value.path()).read_bytes()[:4] == b"PAR1"
    kept_picture(tab, "training")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_on_a_phone(
    scheme: str, speaking: str, recorded: tuple[str, Path], opened: Callable[..., Any]
) -> None:
    tab = opened(speaking, PHONE, scheme)
    tab.locator("#run").wait_for()
    run_prompt(tab)
    tab.locator("#lensTable").wait_for()
    assert tab.evaluate(CUT) == []
    kept_picture(tab, f"generation-{scheme}-400")
    other = opened(recorded[0], PHONE, scheme)
    other.locator("#weights td").first.wait_for()
    assert other.evaluate(CUT) == []
    kept_picture(other, f"training-{scheme}-400")


def test_without_the_token_the_page_says_what_to_do(
    speaking: str, opened: Callable[..., Any]
) -> None:
    context = opened(speaking).context.browser.new_context()
    tab = context.new_page()
    tab.goto(speaking.split("#", maxsplit=1)[0])
    tab.locator("#trouble", has_text="open the address that was printed").wait_for(timeout=60_000)
    context.close()


def tour() -> list[list[str]]:
    """The commands of the guide, by block."""
    text = (ranks.ROOT / "docs" / "scope.md").read_text(encoding="utf-8")
    part = text.split("## A tour")[1].split("\n## ")[0]
    blocks = [one.split("```")[0] for one in part.split("```bash\n")[1:]]
    return [shlex.split(line) for block in blocks for line in
            block.replace("\\\n", " ").strip().splitlines()]  # fmt: skip


@pytest.mark.distributed
def test_the_commands_of_the_tour_do_what_it_says(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    """As they stand, in an empty folder; both pages are looked at, and a head is silenced."""
    pytest.importorskip("transformers")
    modules = {"torchrun": ["torch.distributed.run"], "megascan": ["megascan"]}
    looked: list[str] = []
    for program, *given in tour():
        words = ["-m", *modules[program], *given] if program in modules else given
        if "serve" not in words[1] and words[2:3] != ["scope"]:
            ranks.run(*words, cwd=tmp_path, check=True)
            continue
        process, address = started([*words], "looking into", cwd=tmp_path)
        tab = opened(address)
        if "serve" in words[1]:
            tab.fill("#text", "5 17 42")
            run_prompt(tab)
            tab.fill("#units", "1")
            tab.fill("#layers", "2")
            tab.click("#add")
            run_prompt(tab, "#runB", "B")
            tab.click("#difference")
            tab.locator(".strip", has_text="B − A").first.wait_for()
            looked.append("speaking")
        else:
            tab.locator("#bits", has_text="all replicas agreed bit for bit in 4 probes").wait_for()
            assert is_painted(tab, "#map")
            looked.append("training")
        tab.close()  # or it complains that the server is gone
        ended(process)
    assert looked == ["training", "speaking"]
