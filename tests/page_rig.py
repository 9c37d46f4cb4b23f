"""A fleet whose answers read like prose, and a browser that looks at its gateway's page."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from playwright.async_api import Browser, Page, ViewportSize, async_playwright

from shared.messages import ChatMessage
from tests.fake_engine import VOCAB, FakeEngine, FakeTokenizer
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, gateway_on

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
PROSE = (
    "A prompt is cut into blocks of a few tokens each. The keys and values of a block are named by a digest of all "
    "that they depend on, so whoever has computed one can give it to whoever needs it. Prefill workers compute blocks, "
    "decode workers read them and go on, and a drafter guesses what comes next. A guess is kept only where the model "
    "itself takes the same token, so the text is the same with a good drafter, with a bad one, and with none at all."
)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
BEATS: dict[str, Any] = {"beat_s": 0.2, "peer_timeout_s": 1.5, "ack_wait_s": 1.0}
"""Few beats: those of five workers take more time than the page."""
PIXELS = ViewportSize(width=1440, height=900)


def browser_path() -> str | None:
    """A Chromium that is installed here."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class ProseTokenizer(FakeTokenizer):
    """A word is a token. The n-th token of an answer reads as the n-th word of `text`, over and over."""

    def __init__(self) -> None:
        self.text = PROSE

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        return [zlib.crc32(word.encode()) % VOCAB for word in re.findall(r"\S+", text)]

    def chat(self, messages: Sequence[ChatMessage], *, tools: Any = None, limit: int | None = None) -> list[int]:
        return [token for m in messages for token in self.encode(m.content or "")]

    def detokenizer(self) -> ProseDetokenizer:  # type: ignore[override]
        return ProseDetokenizer(self.text)


class ProseDetokenizer:
    def __init__(self, text: str) -> None:
        self._words = re.findall(r"\S+\s*", text + " ")
        self._next = 0

    def push(self, token_id: int) -> str:
        word = self._words[self._next % len(self._words)]
        self._next += 1
        return word

    def flush(self) -> str:
        return ""


class PageRig:
    def __init__(self, fleet: FleetRig, gateway: GatewayRig, browser: Browser, tokenizer: ProseTokenizer) -> None:
        self.fleet = fleet
        self.gateway = gateway
        self.browser = browser
        self.tokenizer = tokenizer
        self.complaints: list[str] = []
        """What the browser has logged as an error, and scripts that failed."""

    @asynccontextmanager
    async def page(self, path: str = "/", **options: Any) -> AsyncIterator[Page]:
        context = await self.browser.new_context(viewport=PIXELS, reduced_motion="reduce", **options)
        page = await context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        try:
            await page.goto(self.gateway.server.address + path)
            yield page
        finally:
            await context.close()

    async def load(self, conversations: int, turns: int) -> None:
        """Several that ask at once, about a few documents in turn."""

        async def talk(number: int) -> None:
            document = " ".join(f"{number % 4}-{word}" for word in range(90))
            for turn in range(turns):
                body = {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": f"{document} question {number} {turn}"}],
                    "max_tokens": 20 + 37 * (number + turn) % 70,
                }
                answer = await self.gateway.http.post("/v1/chat/completions", json=body)
                assert answer.status_code in (200, 503), answer.text

        await asyncio.gather(*(talk(number) for number in range(conversations)))


@asynccontextmanager
async def page_rig(**gateway: Any) -> AsyncIterator[PageRig]:
    async with FleetRig() as fleet, async_playwright() as playwright:
        fleet.tokenizer = tokenizer = ProseTokenizer()
        for number in (1, 2):
            await fleet.prefill(f"prefill-{number}", FakeEngine(blocks=512, step_s=0.005), **BEATS)
            await fleet.decode(f"decode-{number}", FakeEngine(blocks=512, step_s=0.005), max_running=4, **BEATS)
        await fleet.drafter("drafter-1", FakeEngine(blocks=512, wrong_every=3), **BEATS)
        browser = await playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        async with gateway_on(
            fleet, **{"peer_timeout_s": BEATS["peer_timeout_s"], "worker_wait_s": 5.0, **gateway}
        ) as rig:
            try:
                yield PageRig(fleet, rig, browser, tokenizer)
            finally:
                await browser.close()


async def pictures(rig: PageRig, folder: Path, slowly: bool) -> None:
    """Idle, under load, and with a dead worker, in both themes; `slowly`: to be looked at. A worker dies here."""
    seconds = 4.0 if slowly else 0.4
    async with rig.page(color_scheme="light") as page:
        await page.locator("#workers tr.decode").first.wait_for()
        await _both(page, folder / "page-idle", slowly)
        await page.fill("#text", "How do workers share what they have computed?")
        await page.fill("#max-tokens", "95")
        await page.click("#send")
        await page.locator(".turn.model .facts").wait_for()
        load = asyncio.create_task(rig.load(14 if slowly else 2, 6))
        await asyncio.sleep(seconds)
        await page.fill("#text", "And what does a drafter do?")
        await page.click("#send")
        await asyncio.sleep(seconds / 4)
        await _both(page, folder / "page-load", slowly)
        await rig.fleet.kill("decode-2")
        await page.locator("#workers tr.silent").wait_for()
        await _both(page, folder / "page-dead-worker", slowly)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


async def _both(page: Page, path: Path, small: bool) -> None:
    for scheme in SCHEMES:
        await page.emulate_media(color_scheme=scheme)
        shot = await page.screenshot(animations="disabled")
        image = await asyncio.to_thread(_compact, shot) if small else shot
        path.with_name(f"{path.name}-{scheme}.png").write_bytes(image)
    await page.emulate_media(color_scheme="light")


def _compact(png: bytes) -> bytes:
    """With a palette: text and bars have few colours."""
    out, image = io.BytesIO(), Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()
