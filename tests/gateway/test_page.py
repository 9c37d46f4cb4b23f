"""The page at `/`, in a real browser before a fleet with fake engines.

`TRINE_SCREENSHOTS=1 python -m pytest tests/gateway/test_page.py` renews the pictures in docs/images.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Request, Route

from tests.fleet_rig import MODEL
from tests.gateway_rig import eventually, gateway_on
from tests.page_rig import PROSE, PageRig, browser_path, page_rig, pictures

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium here: Debian has it as chromium-headless-shell"),
]
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
KEY = "0123456789abcdef"
QUESTION = "How do workers share what they have computed?"


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[PageRig]:
    async with page_rig() as rig:
        yield rig


@pytest.fixture(autouse=True)
async def _no_complaints(rig: PageRig) -> AsyncIterator[None]:
    """No script fails, and nothing is asked for that the page's policy forbids."""
    rig.tokenizer.text = PROSE
    rig.complaints.clear()
    yield
    assert rig.complaints == []


async def ask(page: Page, text: str, tokens: int = 40) -> str:
    """The answer's text, once its life is shown too."""
    count = await page.locator(".turn.model").count()
    await page.fill("#max-tokens", str(tokens))
    await page.fill("#text", text)
    await page.keyboard.press("Enter")
    turn = page.locator(".turn.model").nth(count)
    await turn.locator(".facts").wait_for()
    return await turn.locator(".text").text_content() or ""


async def test_an_answer_streams_and_its_life_is_shown(rig: PageRig) -> None:
    async with rig.page() as page:
        asked: list[Any] = []
        page.on("request", lambda request: _note(asked, request))
        await page.locator("#send:enabled").wait_for()
        await page.fill("#temperature", "0.3")
        said = await ask(page, QUESTION)
        assert said.split() == PROSE.split()[:40]
        facts = await page.locator(".turn.model .facts").text_content() or ""
        assert "40 tokens" in facts
        assert "prompt tokens cached" in facts
        assert "decode-" in facts
        told = await page.locator("#answers .life").first.get_attribute("aria-label") or ""
        assert [part.split()[0] for part in told.split(", ")] == ["queue", "transfer", "prefill", "decode"]
        assert await page.locator("#said").text_content() == "Answer complete: 40 tokens."

        await ask(page, "And then?")
        assert [m["role"] for m in asked[1]["messages"]] == ["user", "assistant", "user"]
        assert asked[1]["messages"][1]["content"] == said
        assert (asked[1]["temperature"], asked[1]["max_tokens"], asked[1]["model"]) == (0.3, 40, MODEL)
        await page.click("#new")
        assert await page.locator(".turn").count() == 0


def _note(asked: list[Any], request: Request) -> None:
    if request.method == "POST":
        asked.append(request.post_data_json)


async def test_stop_ends_the_request_everywhere(rig: PageRig) -> None:
    async with rig.page() as page:
        await page.locator("#send:enabled").wait_for()
        for stop in ("click", "Escape"):
            await page.fill("#max-tokens", "400")
            await page.fill("#text", f"on and on {stop}")
            await page.click("#send")
            await page.locator(".turn.model .text", has_text="blocks").last.wait_for()
            await (page.click("#stop") if stop == "click" else page.keyboard.press("Escape"))
            await page.locator(".turn.model .note", has_text="Stopped.").last.wait_for()
            await page.locator("#send:visible").wait_for()
            await eventually(lambda: rig.gateway.running_answers == 0)


async def test_what_a_model_says_is_text_whatever_it_is(rig: PageRig) -> None:
    rig.tokenizer.text = '<img src=x onerror="hit=1"> <script>hit=1</script> <b>x</b> [x](javascript:hit=1) &amp;'
    async with rig.page() as page:
        await page.locator("#send:enabled").wait_for()
        said = await ask(page, '<img src=y onerror="hit=1">', tokens=7)
        assert said.strip() == rig.tokenizer.text
        assert await page.locator("#log img, #log script, #log b, #log a").count() == 0
        assert await page.evaluate("window.hit") is None
        markup = "try { document.body.innerHTML = '<i>x</i>'; 'taken' } catch (error) { error.name }"
        assert await page.evaluate(markup) == "TypeError", "nor could it be taken for markup by mistake"
        assert "TrustedHTML" in " ".join(rig.complaints)
        rig.complaints.clear()


async def test_a_stream_that_breaks_goes_on_where_it_was(rig: PageRig) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "whole"}], "max_tokens": 30, "stream": True}
    whole = (await rig.gateway.http.post("/v1/chat/completions", json=body)).text
    ids: list[str | None] = []

    async def broken_once(route: Route) -> None:
        ids.append(await route.request.header_value("last-event-id"))
        if len(ids) > 1:
            await route.continue_()
            return
        cut = whole.index("\n\n", len(whole) // 2) + 2
        await route.fulfill(status=200, body=whole[: cut + 9], content_type="text/event-stream")

    async with rig.page() as page:
        await page.route("**/v1/chat/completions", broken_once)
        await page.locator("#send:enabled").wait_for()
        said = await ask(page, "whole", tokens=30)
        assert said.split() == PROSE.split()[:30]
        assert len(ids) == 2
        assert ids[0] is None
        assert (ids[1] or "").startswith("chatcmpl-")


async def test_an_error_is_told_and_the_question_is_kept(rig: PageRig) -> None:
    refusal = {"error": {"message": "the queue is full; <b>try again</b>", "code": "overloaded"}}

    async def refuse(route: Route) -> None:
        await route.fulfill(status=503, body=json.dumps(refusal), content_type="application/json")

    async with rig.page() as page:
        await page.route("**/v1/chat/completions", refuse)
        await page.locator("#send:enabled").wait_for()
        await page.fill("#text", QUESTION)
        await page.click("#send")
        error = page.locator(".turn .error")
        assert await error.text_content() == refusal["error"]["message"]
        assert await page.input_value("#text") == QUESTION
        rig.complaints[:] = [told for told in rig.complaints if "503" not in told]


async def test_the_fleet_is_shown_as_it_is(rig: PageRig) -> None:
    async with rig.page() as page:
        await page.locator("#state", has_text="ready · 5 workers").wait_for()
        rows = [(await row.inner_text()).split() for row in await page.locator("#workers tbody tr").all()]
        assert [row[1] for row in rows] == ["prefill-1", "prefill-2", "decode-1", "decode-2", "drafter-1"]
        assert all("serving" in row for row in rows)
        await ask(page, "the same " * 30, tokens=10)
        await ask(page, "the same " * 30, tokens=10)
        figure = page.locator("#at-cache .figure")
        await figure.filter(has_not_text="–").wait_for()
        assert 0 < int(await figure.text_content() or "0") <= 100
        assert float(await page.locator("#at-decode .figure").text_content() or "0") > 0
        await page.route("**/fleet", lambda route: route.abort())
        await page.locator("#trouble", has_text="does not answer; trying again").wait_for()
        await page.unroute("**/fleet")
        await page.locator("#trouble").wait_for(state="hidden")
    rig.complaints.clear()  # what was aborted


async def test_a_key_is_asked_for_and_lets_in(rig: PageRig) -> None:
    async with gateway_on(rig.fleet, api_keys=f"default:{KEY}", peer_timeout_s=1.5) as keyed:
        keyed_rig = PageRig(rig.fleet, keyed, rig.browser, rig.tokenizer)
        assert (await keyed.http.get("/fleet")).status_code == 401
        assert (await keyed.http.get("/")).status_code == 200
        async with keyed_rig.page() as page:
            await page.locator("#key:visible").wait_for()
            await page.fill("#key", "wrong-key-wrong-key")
            await page.keyboard.press("Enter")
            await page.locator("#key-error", has_text="not known here").wait_for()
            await page.fill("#key", KEY)
            await page.keyboard.press("Enter")
            await page.locator("#workers tr.decode").first.wait_for()
            await ask(page, "with a key", tokens=5)
            stored = "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]"
            local, session, cookie = await page.evaluate(stored)
            assert KEY in session
            assert KEY not in local + cookie
            await page.click("#key-change")
            assert KEY not in (await page.evaluate(stored))[1]


CONTRASTS = """() => {
  const scale = (v) => (v /= 255, v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (c) => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = c; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => 0.2126 * scale(r) + 0.7152 * scale(g) + 0.0722 * scale(b);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (rgb(c)[3]) return c; } return "#fff"; };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const color = getComputedStyle(e).color;
    if (!own || !e.checkVisibility() || e.closest(":disabled, .unseen, noscript") || !rgb(color)[3]) continue;
    const [a, b] = [light(rgb(color)), light(rgb(ground(e)))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`);
  }
  return low;
}"""  # WCAG 2.2, 1.4.3
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, [role=img], [tabindex]")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim() || e.getAttribute("aria-labelledby")))
  .map((e) => e.outerHTML.slice(0, 80))"""


async def test_it_can_be_read_and_used_by_all(rig: PageRig) -> None:
    async with rig.page(color_scheme="dark") as page:
        await page.locator("#send:enabled").wait_for()
        await ask(page, QUESTION, tokens=5)
        backgrounds = []
        for theme in ("Theme: auto", "Theme: light", "Theme: dark"):
            assert await page.locator("#theme").text_content() == theme
            backgrounds.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert await page.evaluate(CONTRASTS) == [], theme
            await page.click("#theme")
        assert backgrounds[0] == backgrounds[2] != backgrounds[1]
        assert await page.evaluate(UNNAMED) == []
        await page.click("#theme")
        await page.reload()
        assert await page.locator("#theme").text_content() == "Theme: light", "it is remembered"

        await page.set_viewport_size({"width": 390, "height": 800})
        for pane in ("chat", "fleet"):
            await page.click(f"[data-show={pane}]")
            assert await page.locator(f"section.{pane}").is_visible()
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), pane


async def test_files_are_served_with_a_strict_policy(rig: PageRig) -> None:
    http = rig.gateway.http
    for path, kind in (("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/style.css", "text/css")):
        answer = await http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (await http.get(path, headers={"if-none-match": answer.headers["etag"]})).status_code == 304
    for path in ("/page/no.js", "/page/../app.py", "/page/..%2fapp.py", "/page/"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
    assert "/fleet" in (await http.get("/openapi.json")).json()["paths"]


async def test_pictures(rig: PageRig, tmp_path: Path) -> None:
    """The last one: a worker dies in it."""
    wanted = bool(os.environ.get("TRINE_SCREENSHOTS"))
    folder = IMAGES if wanted else tmp_path
    async with page_rig() if wanted else nullcontext(rig) as fresh:
        await pictures(fresh, folder, slowly=wanted)
    shots = {path.stem: path.read_bytes() for path in folder.glob("page-*.png")}
    assert sorted(shots) == [
        f"page-{moment}-{scheme}" for moment in ("dead-worker", "idle", "load") for scheme in ("dark", "light")
    ]
    assert len(set(shots.values())) == len(shots)
    assert all(len(shot) > 10_000 for shot in shots.values())
