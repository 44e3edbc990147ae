"""Do the pages work in a real browser, for people with a keyboard or a phone?

Drives Debian's chromium. Time in a page is moved by hand where seconds would have to pass.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from serve.parts import pictures, settings, settled, small_model
from sqlalchemy import select, update
from torch import nn

from wise_atta.data.models import SourceModel
from wise_atta.serve import auth
from wise_atta.serve.app import create_app
from wise_atta.serve.client import Client
from wise_atta.serve.ledger import Question, Reply, Showing
from wise_atta.serve.service import Service

pytestmark = [pytest.mark.heavy, pytest.mark.browser]

WAIT = 30_000
ROLES = {"camera": "client", "ann": "annotator", "bob": "annotator", "eve": "admin"}


class Site:
    """A service that listens, and people with tokens."""

    def __init__(self, url: str, service: Service) -> None:
        self.url = url
        self.service = service
        self.tokens = {
            name: service.ledger.write(lambda session, pair=(name, role): auth.create(session, *pair)).result(30)
            for name, role in ROLES.items()
        }
        self.camera = Client(url, self.tokens["camera"])
        self.sent = 0

    def send(self, count: int = 1, stream: str = "default") -> None:
        """Have pictures predicted by the client, and learned from."""
        for _ in range(count):
            self.sent += 1
            self.camera.predict(pictures(self.sent), stream=stream)
        settled(self.service)

    def ask(self, count: int) -> None:
        """Send pictures until so many questions are open."""
        while self.open() < count:
            assert self.sent < 200
            self.send()

    def open(self) -> int:
        with self.service.ledger.read() as session:
            return len(session.scalars(select(Question.id).where(Question.state == "open")).all())

    def answers(self) -> dict[str, tuple[str, int | None, str]]:
        """Who said what about which question."""
        with self.service.ledger.read() as session:
            rows = session.scalars(select(Reply).order_by(Reply.id)).all()
            return {f"{row.stream}/{row.query}": (row.by, row.label, row.status) for row in rows}

    def guesses(self, question: str) -> list[int]:
        stream, _, name = question.partition("/")
        with self.service.ledger.read() as session:
            row = session.get(Question, (stream, name))
            assert row is not None
            return [int(label) for label, _ in row.guesses]


@contextmanager
def site(folder: Path, model: SourceModel | None = None, **changes: Any) -> Iterator[Site]:
    service = Service(model or small_model(), settings(folder, **{"audit": 0, "ratio": 1, **changes}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_app(service)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    here = Site(f"http://127.0.0.1:{port}", service)
    try:
        yield here
    finally:
        here.camera.close()
        server.should_exit = True
        thread.join(60)


@contextmanager
def asking(folder: Path, count: int) -> Iterator[Site]:
    """A service with so many open questions."""
    with site(folder) as here:
        here.ask(count)
        yield here


def until(holds: Callable[[], object]) -> None:
    """Wait for something that happens outside of the browser."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Person:
    """Somebody in front of a page."""

    def __init__(self, browser: Any, here: Site, name: str | None, path: str = "/label", **options: Any) -> None:
        self.here = here
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self.context.set_default_timeout(WAIT)
        if name is not None:
            self.context.add_init_script(f"sessionStorage['wise-atta.token'] = '{here.tokens[name]}'")
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if "Security Policy" in line.text else None)
        self.page.on("request", lambda request: self.urls.append(request.url))
        if path == "/label":
            # Time stands still until it is moved by hand, and is not the service's.
            self.page.clock.install(time=0)
            self.page.clock.pause_at(1000)
        else:
            self.page.clock.install()
        self.page.goto(here.url + path)

    def __enter__(self) -> Person:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        if kind is not None:
            return
        assert self.errors == []
        # Nothing from another host, and no token in an address.
        assert all(url.startswith((f"{self.here.url}/", f"blob:{self.here.url}/")) for url in self.urls)
        assert not any("wa_" in url for url in self.urls)

    def question(self, other_than: str | None = None) -> str:
        """The question whose picture is on the screen."""
        self.page.wait_for_function(
            """other => document.body?.dataset.phase === "question" && document.getElementById("work").dataset.question
            !== other && document.querySelector("#picture:not(.loading)")?.naturalWidth > 0""",
            arg=other_than,
        )
        question = self.page.get_attribute("#work", "data-question")
        assert isinstance(question, str)
        return question

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def answer(self, key: str) -> str:
        """Answer by a key; gives the question that was answered."""
        answered = self.question()
        self.press(key)
        self.page.wait_for_function(
            "was => document.body?.dataset.phase !== 'question' || "
            "document.getElementById('work').dataset.question !== was",
            arg=answered,
        )
        return answered

    def phase(self, name: str) -> None:
        self.page.wait_for_selector(f'body[data-phase="{name}"]')

    def sees(self, selector: str, text: str) -> None:
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)", arg=[selector, text]
        )

    def later(self, seconds: float) -> None:
        self.page.clock.fast_forward(int(1000 * seconds))


def test_a_picture_is_asked_about_labelled_by_keyboard_learned_and_seen_on_the_dashboard(
    browser: Any, tmp_path: Path
) -> None:
    with site(tmp_path) as here, Person(browser, here, "ann", "/") as chief, Person(browser, here, "bob") as bob:
        chief.sees("#tile-budget .big", "0 of 0")
        chief.sees("#questions", "No question was asked yet")
        bob.phase("empty")
        here.ask(2)
        bob.later(4)
        first = bob.question()
        assert bob.page.evaluate("document.getElementById('picture').src").startswith("blob:")
        assert bob.page.inner_text("#open") == str(here.open())
        left = here.service.streams["default"].state
        assert bob.page.inner_text("#left") == str(left.allowed - left.spent)
        chief.later(3)
        chief.sees("#tile-budget .big", f"{left.spent} of {left.allowed}")
        chief.sees("#questions", "open")
        label = here.guesses(first)[1]
        assert bob.answer("2") == first
        # Whoever leaves the page loses nothing.
        bob.page.goto(f"{here.url}/")
        until(lambda: here.answers() == {first: ("bob", label, "accepted")})
        here.send()
        chief.later(3)
        chief.sees("#questions", "answered and learned\n1")
        chief.sees("#tile-age", "1 question" if here.open() == 1 else f"{here.open()} questions")
        chief.sees("#tile-latency .sub", "99 of 100")
        chief.sees("#tile-requests .sub", f"{4 * here.sent} pictures in {here.sent} requests")
        for chart in ("budget", "classes", "pictures", "latency", "updates", "entropy", "drift", "age"):
            drawn = f"#chart-{chart} :is(path, rect, circle, .line)"
            chief.page.wait_for_function("drawn => document.querySelectorAll(drawn).length > 0", arg=drawn)


def test_answers_can_be_taken_back_one_after_the_other_until_they_are_sent(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 4) as here, Person(browser, here, "ann") as ann:
        first, second = ann.answer("1"), ann.answer("0")
        third = ann.question()
        ann.press("ArrowLeft")
        assert ann.question(third) == second
        ann.press("Control+z")
        assert ann.question(second) == first
        assert ann.page.inner_text("#mine") == "0" and ann.page.is_disabled("#undo") and here.answers() == {}
        ann.answer("2"), ann.answer("ArrowRight"), ann.answer("3")
        assert here.answers() == {}
        ann.later(9)
        until(lambda: len(here.answers()) == 3)
        assert here.answers() == {
            first: ("ann", here.guesses(first)[1], "accepted"),
            second: ("ann", None, "skip"),
            third: ("ann", here.guesses(third)[2], "accepted"),
        }
        ann.page.wait_for_selector("#undo:disabled", state="attached")


def test_two_people_are_never_shown_the_same_picture(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 10) as here, Person(browser, here, "ann") as ann, Person(browser, here, "bob") as bob:
        seen = {"ann": [ann.question()], "bob": [bob.question()]}
        for _ in range(3):
            for person, name in ((ann, "ann"), (bob, "bob")):
                seen[name].append(person.question(person.answer("1")))
                assert ann.question() != bob.question()
        assert not set(seen["ann"]) & set(seen["bob"]) and len(set(seen["ann"])) == len(set(seen["bob"])) == 4
        with here.service.ledger.read() as session:
            shown = [f"{row.stream}/{row.query}" for row in session.scalars(select(Showing))]
        assert len(shown) == len(set(shown))


def test_a_question_that_is_left_alone_goes_to_somebody_else(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, "ann") as ann:
        question = ann.question()
        ann.later(121)
        ann.phase("expired")
        with Person(browser, here, "bob") as bob:
            assert bob.question() == question
            bob.answer("1")
        until(lambda: here.answers().get(question, ("",))[0] == "bob")
        here.ask(2)
        ann.press("Enter")
        assert ann.question() != question


def test_whoever_is_at_work_keeps_the_question(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, "ann") as ann:
        question = ann.question()
        here.service.ledger.write(lambda session: session.execute(update(Question).values(lease_until=1))).result(30)
        ann.later(1)
        ann.page.mouse.move(200, 300)
        ann.later(70)
        with here.service.ledger.read() as session:
            until(lambda: (session.rollback(), session.scalar(select(Question.lease_until)) > time.time())[1])
        assert ann.question() == question


def test_an_answer_that_comes_too_late_is_said_not_to_count(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, "ann") as ann:
        question = ann.question()
        here.service.ledger.write(lambda session: session.execute(update(Question).values(lease_until=1))).result(30)
        with Client(here.url, here.tokens["bob"]) as bob:
            bob.answer(bob.queries().queries[0], 3)
        label = next(place for place, guess in enumerate(here.guesses(question)) if guess != 3)
        ann.answer(str(label + 1))
        ann.later(9)
        ann.sees("#toasts", "did not count")
        assert ann.page.inner_text("#mine") == "0"
        assert here.answers() == {question: ("bob", 3, "accepted")}


def test_nobody_loses_an_answer_while_the_service_cannot_be_reached(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 3) as here, Person(browser, here, "ann") as ann:
        ann.question()
        ann.context.set_offline(True)
        question = ann.answer("1")
        ann.later(9)
        ann.sees("#offline", "1 answer kept here")
        assert here.answers() == {}
        ann.context.set_offline(False)
        ann.later(4)
        until(lambda: here.answers().get(question) == ("ann", here.guesses(question)[0], "accepted"))
        ann.page.wait_for_selector("#offline", state="hidden")
        ann.question(question)


def test_a_token_is_asked_for_once_and_a_wrong_one_is_refused(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, None) as ann:
        ann.page.fill("#token", "wa_nobody_knows-this")
        ann.press("Enter")
        ann.sees("#token-reason", "not known")
        ann.page.fill("#token", here.tokens["camera"])
        ann.press("Enter")
        ann.phase("refused")
        ann.sees("#state-text", "annotator")
        ann.press("Enter")
        ann.page.fill("#token", here.tokens["ann"])
        ann.press("Enter")
        ann.question()
        ann.page.click("text=Dashboard")
        ann.sees("#live", "live")
        assert ann.page.evaluate("localStorage.length") == 0
        ann.page.click("#leave")
        ann.page.wait_for_selector("#token")


def enter(person: Person, token: str) -> None:
    person.page.fill("#token", token)
    person.press("Enter")


def test_whoever_signs_out_leaves_no_answer_to_the_next_person(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, None) as tab:
        enter(tab, here.tokens["ann"])
        skipped = tab.answer("ArrowRight")
        tab.page.click("#leave")
        tab.page.wait_for_selector("#token")
        assert here.answers() == {skipped: ("ann", None, "skip")}
        assert tab.page.evaluate("sessionStorage['wise-atta.outbox']") == "[]"
        enter(tab, here.tokens["bob"])
        assert tab.question() == skipped


def test_an_answer_that_could_not_be_sent_waits_for_whoever_gave_it(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, None) as tab:
        enter(tab, here.tokens["ann"])
        tab.question()
        tab.page.route("**/answers", lambda route: route.abort())
        question = tab.answer("1")
        tab.page.click("#leave")
        tab.page.wait_for_selector("#token")
        tab.page.unroute("**/answers")
        enter(tab, here.tokens["bob"])
        tab.sees("#toasts", "1 answer of somebody else")
        tab.phase("empty")
        tab.later(9)
        tab.page.click("#leave")
        tab.page.wait_for_selector("#token")
        assert here.answers() == {}
        enter(tab, here.tokens["ann"])
        until(lambda: here.answers() == {question: ("ann", here.guesses(question)[0], "accepted")})


def test_an_answer_whose_token_was_revoked_is_not_sent_under_the_next_one(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 1) as here, Person(browser, here, None) as tab:
        enter(tab, here.tokens["ann"])
        tab.question()
        here.service.ledger.write(lambda session: auth.revoke(session, "ann")).result(30)
        # A token may be taken for a second after that.
        time.sleep(1.1)
        tab.answer("1")
        tab.later(9)
        tab.sees("#token-reason", "not known")
        enter(tab, here.tokens["bob"])
        tab.sees("#toasts", "1 answer of somebody else")
        tab.phase("empty")
        tab.later(9)
        settled(here.service)
        assert here.answers() == {}


def thousand_names() -> tuple[str, ...]:
    shades = "amber azure crimson golden grey hazel indigo ivory jade khaki lilac olive pearl ruby rusty sable scarlet"
    shades += " silver tawny umber verdant violet white yellow zébré"
    beasts = (
        "adder badger bat bear bison boar crane crow deer duck eagle eel finch fox frog gecko goose hare hawk heron"
    )
    beasts += (
        " hornet ibis jackal kite lark lemur lynx mole moth newt otter owl pike quail raven seal shrew swan toad wren"
    )
    return tuple(f"{shade} {beast}" for shade in shades.split() for beast in beasts.split())


def wide_model() -> SourceModel:
    """The small model with a thousand classes."""
    model = small_model()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = nn.Linear(24, 1000)
    net = nn.Sequential(*list(model.module.children())[:-1], head).eval()
    names = thousand_names()
    assert len(set(names)) == 1000
    return SourceModel(
        module=net, name="wide", architecture="wide", classes=names, mean=model.mean, std=model.std, crop=8
    )


def test_a_thousand_classes_are_searched_by_keyboard_and_by_touch(browser: Any, tmp_path: Path) -> None:
    names = thousand_names()
    with site(tmp_path, wide_model()) as here:
        here.ask(2)
        with Person(browser, here, "ann") as ann:
            first = ann.question()
            ann.page.keyboard.type("crimson h")
            ann.sees("#found-count", "7 classes")
            # First those that begin so, then those with all of the words.
            beasts = ("hare", "hawk", "heron", "hornet", "moth", "finch", "shrew")
            assert ann.page.locator("#found li").all_inner_texts() == [f"crimson {beast}" for beast in beasts]
            ann.press("ArrowDown", "ArrowDown", "ArrowUp")
            assert ann.page.inner_text('#found [aria-selected="true"]') == "crimson hawk"
            ann.press("Enter")
            second = ann.question(first)
            assert ann.page.inner_text("#guesses li:nth-child(6) .name") == "crimson hawk"
            for typed, best in (
                ("zebre lynx", "zébré lynx"),
                ("OTTER sil", "silver otter"),
                ("vrdt quail", "verdant quail"),
            ):
                ann.page.fill("#query", typed)
                assert ann.page.inner_text('#found [aria-selected="true"]') == best
            ann.page.fill("#query", "unicorn")
            ann.sees("#found-count", "No class is called so")
            ann.press("Escape")
            assert ann.question() == second and ann.page.input_value("#query") == ""
        until(lambda: here.answers().get(first) == ("ann", names.index("crimson hawk"), "accepted"))
        phone = {"has_touch": True, "is_mobile": True}
        with Person(browser, here, "bob", **phone) as bob:
            bob.page.set_viewport_size({"width": 390, "height": 780})
            question = bob.question()
            bob.page.tap("#query")
            bob.page.fill("#query", "jade o")
            bob.page.tap("#found li:nth-child(2)")
            bob.page.wait_for_function("() => !document.body.classList.contains('searching')")
        until(lambda: here.answers().get(question) == ("bob", names.index("jade otter"), "accepted"))


@pytest.mark.parametrize("height", [780, 640])
def test_everything_is_in_reach_on_a_phone(browser: Any, tmp_path: Path, height: int) -> None:
    with site(tmp_path, wide_model(), streams=("default", "other")) as here:
        here.ask(2)
        with Person(browser, here, "ann", has_touch=True, is_mobile=True) as ann:
            ann.page.set_viewport_size({"width": 360, "height": height})
            question = ann.question()
            for selector in ("#picture", "#guesses button", "#query", "#undo", "#cant-tell", "#skip", "#theme"):
                box = ann.page.locator(selector).first.bounding_box()
                assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360
                assert box["y"] + box["height"] <= height and box["height"] >= 40, selector
            ann.page.tap("#guesses li:nth-child(2) button")
            ann.question(question)
            ann.page.tap("#undo")
            assert ann.question() == question
            ann.page.tap("#cant-tell")
            ann.page.goto(here.url)
            ann.page.wait_for_selector("#board")
            assert ann.page.evaluate("document.documentElement.scrollWidth") <= 360
        until(lambda: here.answers().get(question) == ("ann", None, "accepted"))


def test_a_key_that_is_held_down_answers_once_and_keys_can_be_turned_off(browser: Any, tmp_path: Path) -> None:
    with asking(tmp_path, 4) as here, Person(browser, here, "ann") as ann:
        question = ann.question()
        ann.page.keyboard.down("1")
        second = ann.question(question)
        for _ in range(5):
            ann.page.keyboard.down("1")
        assert ann.question() == second and ann.page.inner_text("#mine") == "1"
        ann.page.keyboard.up("1")
        ann.page.click("#help-open")
        ann.page.uncheck("#keys")
        ann.press("Escape", "1", "ArrowLeft")
        assert ann.question() == second and ann.page.inner_text("#mine") == "1"
        # Buttons are reached and pressed by keyboard all the same.
        ann.page.focus("#question")
        ann.press("Tab", "Enter")
        ann.question(second)
        assert ann.page.inner_text("#mine") == "2"


def contrasts(page: Any) -> dict[str, float]:
    """Contrast of each colour of text with each ground that it stands on, as WCAG defines it."""
    ratios = page.evaluate(
        """() => {
          const probe = document.body.appendChild(document.createElement("i"));
          const light = (name) => {
            probe.style.color = `var(--${name})`;
            const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
            canvas.fillStyle = getComputedStyle(probe).color;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
              .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const pairs = [["ink", "bg"], ["ink", "surface"], ["ink", "soft"], ["muted", "bg"], ["muted", "surface"],
            ["muted", "raised"], ["muted", "soft"], ["accent", "surface"], ["accent", "soft"], ["on-accent", "accent"],
            ["warn", "surface"], ["bad", "surface"]];
          return Object.fromEntries(pairs.map(([a, b]) => {
            const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y);
            return [`${a} on ${b}`, (bright + 0.05) / (dark + 0.05)];
          }));
        }"""
    )
    assert isinstance(ratios, dict)
    return ratios


@pytest.mark.parametrize("hand", ["mouse", "finger"])
def test_a_double_tap_answers_one_question(browser: Any, tmp_path: Path, hand: str) -> None:
    with asking(tmp_path, 4) as here, Person(browser, here, "ann", has_touch=hand == "finger") as ann:
        # The next picture is there already: it was seen, and the answer before it taken back.
        ann.answer("1")
        second = ann.question()
        ann.press("ArrowLeft")
        ann.question(second)
        box = ann.page.locator("#guesses li:nth-child(1) button").bounding_box()
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        if hand == "finger":
            wire = ann.context.new_cdp_session(ann.page)
            # A double tap by the times that are given, however long the browser takes over each of its parts.
            began = time.time()
            for number, (kind, points) in enumerate(2 * [("touchStart", [place]), ("touchEnd", [])]):
                at = began + 0.05 * number
                wire.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points, "timestamp": at})
        else:
            ann.page.mouse.dblclick(**place)
        ann.sees("#mine", "1")
        ann.later(1)
        ann.question()
        ann.page.mouse.dblclick(**place)
        ann.sees("#mine", "2")


def test_both_pages_are_readable_in_light_and_dark(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path) as here, Person(browser, here, "ann", "/", color_scheme="dark") as ann:
        ann.sees("#live", "live")
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = ann.page.evaluate(ground)
        assert {name: value for name, value in contrasts(ann.page).items() if value < 4.5} == {}
        ann.page.click("#theme")
        light = ann.page.evaluate(ground)
        assert light != dark
        assert {name: value for name, value in contrasts(ann.page).items() if value < 4.5} == {}
        ann.page.goto(f"{here.url}/label")
        assert ann.page.evaluate(ground) == light
        ann.page.click("#theme")
        assert ann.page.evaluate(ground) == dark


def test_the_dashboard_shows_accuracy_from_the_audit_alone_events_and_each_stream(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path, audit=0.5, streams=("default", "other")) as here, Person(browser, here, "eve", "/") as eve:
        eve.sees("#tile-accuracy", "No audit question has an answer yet")
        here.send(8)
        with Client(here.url, here.tokens["eve"]) as admin:
            for query in admin.queries(limit=50).queries:
                admin.answer(query, query.guesses[0].label if query.query.endswith(("1", "2")) else 0)
            here.send()
            accuracy = admin.stream().accuracy
            assert accuracy is not None and 0 < accuracy.right < accuracy.total
            admin.reset()
            here.send()
        eve.later(3)
        eve.sees("#tile-accuracy .big", f"{100 * accuracy.share:.1f} %")
        eve.sees(
            "#tile-accuracy .sub",
            f"{100 * accuracy.low:.1f} % – {100 * accuracy.high:.1f} % from {accuracy.total} audited",
        )
        eve.sees("#events", "Reset to the source by eve")
        eve.sees("#events", "Started")
        eve.page.wait_for_selector("#chart-drift .mark.reset", state="attached")
        eve.page.wait_for_selector("#chart-accuracy path.band", state="attached")
        eve.page.hover("#chart-classes svg")
        eve.sees("#chart-classes .tip", "%")
        eve.page.select_option("#stream", "other")
        eve.sees("#title", "other")
        eve.sees("#tile-budget .big", "0 of 0")
        eve.page.select_option("#stream", "default")
        eve.page.check("input[value='10']", force=True)
        eve.sees("#tile-requests .sub", f"{4 * here.sent} pictures")
        eve.page.wait_for_selector("#chart-pictures rect", state="attached")


def test_without_an_audit_the_dashboard_says_how_to_get_one(browser: Any, tmp_path: Path) -> None:
    with site(tmp_path) as here, Person(browser, here, "ann", "/") as ann:
        here.send(2)
        ann.sees("#tile-accuracy", "not measured")
        ann.sees("#tile-accuracy .sub", "--audit 0.1")
        assert "%" not in ann.page.inner_text("#tile-accuracy")
        here.service.streams["default"].learner.failed = RuntimeError("as if it had stopped")
        ann.sees("#live", "a learner has stopped")
        here.service.streams["default"].learner.failed = None
