"""What do the pages look like? Runs a real service on corrupted digits, has its questions answered, and takes pictures.

`make screenshots` runs it; it needs chromium and about two minutes.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

IMAGES = Path(__file__).parent / "img"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DOMAINS = ("brightness", "gaussian_noise", "contrast", "shot_noise")


@contextlib.contextmanager
def listening(app: object) -> Iterator[str]:
    """The address at which an application answers, in a thread of this process."""
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class People:
    """Sends digits and answers questions, as cameras and annotators would."""

    def __init__(self, url: str, tokens: dict[str, str]) -> None:
        from wise_atta.serve.client import Client

        self.camera = Client(url, tokens["camera"])
        self.annotators = [Client(url, tokens["ann"]), Client(url, tokens["bob"])]
        self.labels: dict[bytes, int] = {}
        self.turn = 0

    def send(self, stream: str, seconds: float, *, answer: bool = True, severity: int = 3) -> None:
        """Keep the service busy for a while."""
        import numpy as np

        from wise_atta.data import StreamSpec, open_stream

        spec = StreamSpec(data="digits+c", domains=DOMAINS, severity=severity, batch=6, limit=400)
        digits, truth = open_stream(spec)
        began, batches = time.monotonic(), list(digits)
        # All domains pass in the time there is.
        for number in range(int(seconds * 8)):
            batch = batches[int(number / (seconds * 8) * len(batches))]
            pictures = (batch.inputs.permute(0, 2, 3, 1) * 255).round().numpy().astype(np.uint8)
            for picture, name in zip(pictures, batch.ids, strict=True):
                self.labels[picture.tobytes()] = truth[name]
            self.camera.predict(pictures, stream=stream)
            if answer and number % 6 == 5:
                self.answer(stream)
            time.sleep(max(0.0, began + (number + 1) / 8 - time.monotonic()))

    def answer(self, stream: str) -> None:
        """Answer one question, or say now and then that nobody can tell."""
        import numpy as np
        from PIL import Image

        self.turn += 1
        person = self.annotators[self.turn % 2]
        for query in person.queries(stream=stream, limit=3).queries:
            pixels = np.asarray(Image.open(io.BytesIO(person.picture(query))).convert("L"))
            person.answer(query, "cant_tell" if self.turn % 17 == 0 else self.labels[pixels.tobytes()])


def shoot(url: str, tokens: dict[str, str], live: People) -> None:
    """Take the pictures."""
    from PIL import Image
    from playwright.sync_api import Browser, Page, sync_playwright

    def page(browser: Browser, width: int, height: int, scheme: str, who: str, **more: object) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
            timezone_id="Europe/Berlin",
            **more,  # type: ignore[arg-type]
        )
        context.add_init_script(f"sessionStorage.setItem('wise-atta.token', '{tokens[who]}')")
        return context.new_page()

    def save(view: Page, name: str, **options: object) -> None:
        shot = Image.open(io.BytesIO(view.screenshot(**options)))  # type: ignore[arg-type]
        shot.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)

    with sync_playwright() as playwright:
        program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        for scheme, who in (("light", "ann"), ("dark", "bob")):
            desk = page(browser, 1280, 800, scheme, who)
            desk.goto(f"{url}/label")
            for _ in range(2):
                desk.wait_for_selector("[data-phase=question] #picture:not(.loading)")
                desk.keyboard.press("1")
            desk.wait_for_selector("[data-phase=question] #picture:not(.loading)")
            save(desk, f"label-{scheme}")
            desk.context.close()
        phone = page(browser, 390, 780, "dark", "cleo", has_touch=True, is_mobile=True, device_scale_factor=2)
        phone.goto(f"{url}/label")
        phone.wait_for_selector("[data-phase=question] #picture:not(.loading)")
        save(phone, "label-phone")
        phone.tap("#query")
        phone.keyboard.type("e")
        phone.wait_for_selector("#found li")
        save(phone, "label-phone-search")
        phone.context.close()
        for scheme in ("light", "dark"):
            board = page(browser, 1360, 900, scheme, "ann")
            board.goto(url)
            board.wait_for_selector("#board")
            live.send("door", 4, answer=False)
            board.wait_for_function("() => document.getElementById('live').textContent === 'live'")
            save(board, f"dashboard-{scheme}", full_page=True)
            board.context.close()
        browser.close()


def main() -> None:
    """Start the service, keep it busy, and take the pictures."""
    from wise_atta.data import models
    from wise_atta.serve import auth
    from wise_atta.serve.app import create_app
    from wise_atta.serve.config import Settings
    from wise_atta.serve.service import Service

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 90.0
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            database=f"sqlite:///{folder}/ledger.db",
            streams=("door", "yard"),
            ratio="0.03",
            audit="0.3",
            classes=NAMES,
            lease_s=120,
        )
        service = Service(models.load("digits"), settings)
        roles = {"camera": "client", "ann": "annotator", "bob": "annotator", "cleo": "annotator", "eve": "admin"}
        tokens = {
            name: service.ledger.write(lambda session, pair=(name, role): auth.create(session, *pair)).result()
            for name, role in roles.items()
        }
        with listening(create_app(service)) as url:
            live = People(url, tokens)
            live.send("door", seconds * 0.7)
            from wise_atta.serve.client import Client

            Client(url, tokens["eve"]).reset("door")
            live.send("door", seconds * 0.3, severity=4)
            # Questions that are left for the pages.
            live.send("door", 6, answer=False)
            shoot(url, tokens, live)


if __name__ == "__main__":
    main()
