// How does a person answer the questions of the model? One picture at a time, by keys or by touch.
//
// The service knows no undo, so an answer stays here for some seconds before it is sent. It is sent at once when the page
// is left or hidden, and kept until the service has taken it from whoever gave it.

import { $, count, el, many, percent } from "./dom.js";
import { find, index } from "./search.js";
import { Refused, ask, forget, get, owner, picture, post, token } from "./service.js";

const UNDO_MS = 8000;
const UNDO_DEPTH = 5;
const AHEAD = 2; // the picture that is shown, and the next one
const KEYS = 9;
const SHOWN = 50;
const POLL_MS = 3000;
const RETRY_MS = 3000;
const LEAVE_MS = 3000;
const SEEN_MS = 300; // in less, nobody has seen a picture
const OUTBOX = "wise-atta.outbox";

let classes = [];
let entries = [];
let queue = []; // questions in our hands, the first one is shown
let outbox = []; // answers that can still be taken back, oldest first
const closed = new Map(); // questions that were answered, and when the service said so
let recent = []; // labels given here, latest first
let totals = { open: 0, spent: 0, allowed: 0 };
let mine = 0;
let clock = 0; // the service's clock less ours, in seconds
let leaseLength = 0;
let active = 0; // when somebody last touched anything
let leased = 0; // when we last asked for questions
let phase = "loading";
let offline = false;
let pollAt = 0;
let filling = null;
let again = false;
let retryAt = 0;
let leaving = false;

const idOf = (question) => `${question.stream}/${question.query}`;
const now = () => Date.now() / 1000 + clock;
const stream = () => $("stream").value;
// What was answered where nobody needed a token may be sent under any.
const isOurs = (item) => item.by === null || item.by === owner();
const ours = () => outbox.filter(isOurs);

// ---- questions -----------------------------------------------------------------------------------------------------

// Fetches questions until enough are at hand. What we hold comes first, and its lease begins anew.
function fill() {
  // What is under way may have asked for too few.
  again = filling !== null;
  filling ??= (async () => {
    const limit = Math.min(ours().length + Math.max(queue.length, AHEAD), 50);
    const wanted = stream();
    const began = Date.now();
    const reply = await get(`/queries?limit=${limit}${wanted ? `&stream=${encodeURIComponent(wanted)}` : ""}`);
    if (wanted !== stream()) return;
    reached();
    leased = began;
    clock = reply.now - Date.now() / 1000;
    totals = reply;
    const ids = new Set(reply.queries.map(idOf));
    const lost = queue.filter((item) => !ids.has(idOf(item)) && item.lease_until <= reply.now);
    queue = queue.filter((item) => !lost.includes(item));
    if (lost.includes(shown)) toast("That question went to somebody else.");
    const held = new Map([...queue, ...ours().map((answer) => answer.question)].map((item) => [idOf(item), item]));
    for (const question of reply.queries) {
      leaseLength = question.lease_until - reply.now;
      const known = held.get(idOf(question));
      if (known) known.lease_until = question.lease_until;
      // One that was answered after we asked is in this reply still; one that is open again is asked again.
      else if (!(closed.get(idOf(question)) >= began) && queue.length < AHEAD) queue.push(question);
    }
    for (const question of queue) if (!question.image) preload(question);
    show();
  })().catch(trouble).finally(() => {
    filling = null;
    if (again) fill();
  });
  return filling;
}

async function preload(question) {
  question.image = new Image();
  try {
    question.url = await picture(question.picture);
    question.image.src = question.url;
    await question.image.decode();
    question.ready = true;
    if (shown === question) paint(question);
  } catch (error) {
    question.image = null;
    if (!(error instanceof Refused) && error.name !== "EncodingError") return trouble(error);
    // Its picture was deleted, or cannot be shown.
    closed.set(idOf(question), Infinity);
    queue = queue.filter((item) => item !== question);
    if (question.url) URL.revokeObjectURL(question.url);
    toast("A picture could not be loaded and was left out.");
    return fill();
  }
  return undefined;
}

// Gives back what we hold, so that nobody has to wait for the lease to end.
function letGo() {
  const body = { queries: queue.map(({ stream: name, query }) => ({ stream: name, query })) };
  if (queue.length) post("/queries/release", body, { keepalive: true }).catch(() => {});
  for (const question of queue) if (question.url) URL.revokeObjectURL(question.url);
  queue = [];
  shown = null;
}

// ---- showing -------------------------------------------------------------------------------------------------------

let shown = null;
let shownAt = 0;
let options = [];

function show() {
  progress();
  const question = queue[0];
  if (!question) {
    shown = null;
    closeSearch();
    pollAt = Date.now() + POLL_MS;
    return become("empty");
  }
  if (shown === question) return become("question");
  shown = question;
  shownAt = Date.now();
  $("work").dataset.question = idOf(question);
  options = choices(question);
  $("from").textContent = $("stream-pick").hidden ? "" : question.stream;
  $("guesses").replaceChildren(...options.map(option));
  $("picture").classList.add("loading");
  closeSearch();
  become("question");
  if (question.ready) paint(question);
}

function paint({ image }) {
  const target = $("picture");
  target.src = image.src;
  // Few pixels are to be seen as they are, not as a blur.
  target.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) <= 128);
  target.classList.remove("loading");
  target.alt = `The picture to label. The likeliest class is ${options[0].name}.`;
}

// What the number keys stand for: the model's guesses, then the other classes, or those used last if there are many.
function choices(question) {
  const offered = question.guesses.slice(0, KEYS).map((guess) => ({ ...guess, guess: true }));
  const taken = new Set(offered.map((item) => item.label));
  const more = classes.length <= KEYS ? classes.keys() : recent;
  for (const label of more) {
    if (offered.length === KEYS) break;
    if (!taken.has(label)) offered.push({ label, name: classes[label], guess: false });
  }
  return offered;
}

function option(item, place) {
  const meter = el("i");
  // Set as a property: the page's policy forbids styles in markup.
  meter.style.width = item.guess ? percent(item.probability, 0).replace(" ", "") : "0";
  const kind = item.guess ? "guess" : "guess other";
  return el(
    "li", {},
    el(
      "button", { type: "button", class: kind, "aria-keyshortcuts": place + 1, onclick: tap(item.label) },
      meter, el("kbd", { "aria-hidden": "true" }, place + 1), el("span", { class: "name" }, item.name),
      el("span", { class: "share" }, item.guess ? chance(item.probability) : classes.length <= KEYS ? "" : "used before"),
    ),
  );
}

const chance = (probability) => (probability < 0.005 ? "< 1 %" : percent(probability, 0));

const STATES = {
  loading: ["…", "One moment", "Looking for questions."],
  empty: ["✓", "Nothing to label now", "New questions come with new pictures. This page looks for them every few seconds."],
  expired: ["⏳", "Still there?", "You were away for a while, so the question went back to the others."],
  refused: ["✋", "This token cannot label", ""],
};

function become(next, text) {
  phase = next;
  $("work").hidden = next !== "question";
  $("state").hidden = next === "question";
  document.body.dataset.phase = next;
  if (next !== "question") {
    const [glyph, title, usual] = STATES[next];
    $("state-glyph").textContent = glyph;
    $("state-title").textContent = title;
    $("state-text").textContent = text ?? usual;
    const button = { expired: "Go on", refused: "Use another token" }[next];
    $("state-button").hidden = !button;
    $("state-button").textContent = button ?? "";
    if (button) $("state-button").focus();
  }
  undoable();
}

function progress() {
  const open = Math.max(totals.open - ours().filter((answer) => answer.label !== "skip").length, 0);
  const left = Math.max(totals.allowed - totals.spent, 0);
  $("progress").hidden = false;
  $("open").textContent = count(open);
  $("open-text").textContent = open === 1 ? "question waits" : "questions wait";
  $("left").textContent = count(left);
  $("left-text").textContent = left === 1 ? "label left to ask" : "labels left to ask";
  $("budget-text").textContent = ` · ${count(totals.spent)} of ${count(totals.allowed)} asked`;
  $("budget-bar").style.width = totals.allowed ? `${Math.min(100, (100 * totals.spent) / totals.allowed)}%` : "0";
  $("mine").textContent = count(mine);
  document.title = open ? `(${count(open)}) Label · wise-atta` : "Label · wise-atta";
}

function toast(text, kind = "") {
  const note = el("div", { class: `toast ${kind}` }, text);
  $("toasts").replaceChildren(note);
  setTimeout(() => note.remove(), 6000);
}

// ---- answering -----------------------------------------------------------------------------------------------------

const spoken = (label) => ({ skip: "Skipped", cant_tell: "Can’t tell" })[label] ?? `Labelled “${classes[label]}”`;

function answer(label) {
  const question = queue[0];
  // Nobody can have seen a picture that is not there yet.
  if (leaving || phase !== "question" || !question?.ready) return;
  queue.shift();
  const until = (question.lease_until - now() - 3) * 1000;
  outbox.push({ question, label, by: owner(), due: Date.now() + Math.max(0, Math.min(UNDO_MS, until)) });
  if (typeof label === "number") recent = [label, ...recent.filter((item) => item !== label)].slice(0, KEYS);
  if (label !== "skip") mine += 1;
  keep();
  show();
  $("question").focus({ preventScroll: true });
  toast(spoken(label), "done");
  deliver();
  fill();
}

// A double tap answers one question: its second half falls on the next one.
const tap = (label) => (event) => {
  if (event.detail < 2 || Date.now() - shownAt >= SEEN_MS) answer(label);
};

function undo() {
  const last = outbox.at(-1);
  if (!last || last.busy || !last.question.url) return;
  outbox.pop();
  if (last.label !== "skip") mine -= 1;
  keep();
  queue.unshift(last.question);
  show();
  toast(`Taken back: ${spoken(last.label).toLowerCase()}`);
}

function undoable() {
  const can = outbox.some((item) => !item.busy && item.question.url);
  $("undo").disabled = !can;
  $("state-undo").hidden = !can;
}

// What is not sent yet outlives a reload of this tab.
function keep() {
  const rows = outbox.map(({ question, label, by }) => ({ stream: question.stream, query: question.query, label, by }));
  sessionStorage.setItem(OUTBOX, JSON.stringify(rows));
  undoable();
  progress();
}

function restore() {
  for (const { stream: name, query, label, by } of JSON.parse(sessionStorage.getItem(OUTBOX) ?? "[]")) {
    outbox.push({ question: { stream: name, query }, label, by, due: 0 });
  }
  for (const { question } of ours()) closed.set(idOf(question), Infinity);
  const others = outbox.length - ours().length;
  if (others) toast(`${many(others, "answer")} of somebody else kept in this tab until they sign in here again.`, "warn");
}

// Sends our answers whose time has come. All at once: when the page is being left, there is no later.
function deliver(everything = false) {
  if (!everything && Date.now() < retryAt) return;
  const due = outbox.filter((item, place) => everything || place < outbox.length - UNDO_DEPTH || item.due <= Date.now());
  for (const item of due) if (!item.busy && isOurs(item)) item.busy = dispatch(item);
  undoable();
}

// What was answered is sent before the token goes. What does not get through stays in this tab, for nobody else to send.
async function leave() {
  leaving = true;
  deliver(true);
  const late = new Promise((resolve) => { setTimeout(resolve, LEAVE_MS); });
  await Promise.race([Promise.all(outbox.map((item) => item.busy)), late]);
  letGo();
  forget();
}

async function dispatch(item) {
  const { question, label } = item;
  closed.set(idOf(question), Infinity);
  try {
    // keepalive: the browser finishes this even if the page is gone.
    const body = { answers: [{ stream: question.stream, query: question.query, label }] };
    const taken = await post("/answers", body, { keepalive: true });
    reached();
    if (label !== "skip") totals.open -= 1;
    if (taken.held) toast("Your answers wait for a review before they count.", "warn");
  } catch (error) {
    if (!(error instanceof Refused) || [403, 429].includes(error.status) || error.status >= 500) {
      item.busy = false;
      retryAt = Date.now() + (error.after ? error.after * 1000 : RETRY_MS);
      return trouble(error);
    }
    if (label !== "skip") {
      mine -= 1;
      toast(`${spoken(label)} did not count: ${error.message}.`, "warn");
    }
  }
  closed.set(idOf(question), Date.now());
  if (question.url) URL.revokeObjectURL(question.url);
  outbox = outbox.filter((other) => other !== item);
  return keep();
}

// ---- trouble -------------------------------------------------------------------------------------------------------

function trouble(error) {
  if (error instanceof Refused && error.status === 403) return become("refused", `${error.message}.`);
  if (error instanceof Refused && error.status === 404 && stream()) {
    $("stream").value = "";
    return undefined;
  }
  const busy = error instanceof Refused;
  offline = true;
  pollAt = Date.now() + (busy ? error.after * 1000 : RETRY_MS);
  const waiting = ours().length;
  const kept = waiting ? ` ${many(waiting, "answer")} kept here until it is back.` : "";
  const what = busy ? `The service is busy: ${error.message}.` : "The service cannot be reached. Trying again…";
  $("offline").textContent = what + kept;
  $("offline").hidden = false;
  return undefined;
}

function reached() {
  offline = false;
  $("offline").hidden = true;
}

// ---- time ----------------------------------------------------------------------------------------------------------

function tick() {
  deliver();
  if (document.hidden) return;
  if (phase === "question" && queue[0]) lease();
  const wanting = phase === "empty" || phase === "loading" || (offline && phase === "question");
  if (wanting && Date.now() >= pollAt) {
    pollAt = Date.now() + POLL_MS;
    fill();
  }
}

// While somebody is at work the lease is renewed; otherwise the question goes back to the others.
function lease() {
  const left = queue[0].lease_until - now();
  if (left <= 0 && !offline) {
    letGo();
    $("lease").textContent = "";
    become("expired");
    return;
  }
  $("lease").textContent = left < Math.min(20, leaseLength / 3) ? "Going back to the others soon. Move to keep it." : "";
  if (left < leaseLength / 2 && active > leased && !offline) fill();
}

// ---- searching -----------------------------------------------------------------------------------------------------

let matches = [];
let chosen = -1;

function search() {
  matches = find(entries, $("query").value);
  const list = matches.slice(0, SHOWN).map((match, place) => el(
    "li", { id: `found-${place}`, role: "option", "aria-selected": "false", onclick: tap(match.label) },
    el("span", { class: "name" }, ...marked(match)),
  ));
  $("found").replaceChildren(...list);
  $("query").setAttribute("aria-expanded", String(list.length > 0));
  const rest = matches.length - list.length;
  const more = rest ? `; type on to see the other ${count(rest)}` : "";
  const summary = matches.length ? many(matches.length, "class", "classes") + more : "No class is called so.";
  $("found-count").textContent = $("query").value.trim() ? summary : "";
  choose(matches.length ? 0 : -1);
}

function marked({ name, place, length }) {
  if (place < 0) return [name];
  return [name.slice(0, place), el("mark", {}, name.slice(place, place + length)), name.slice(place + length)];
}

function choose(place) {
  const rows = $("found").children;
  rows[chosen]?.setAttribute("aria-selected", "false");
  chosen = place;
  rows[place]?.setAttribute("aria-selected", "true");
  rows[place]?.scrollIntoView({ block: "nearest" });
  if (place < 0) $("query").removeAttribute("aria-activedescendant");
  else $("query").setAttribute("aria-activedescendant", `found-${place}`);
}

function closeSearch() {
  $("query").value = "";
  search();
  document.body.classList.remove("searching");
  if (document.activeElement === $("query")) $("question").focus({ preventScroll: true });
}

function searchKey(event) {
  const shownRows = $("found").children.length;
  if (event.key === "ArrowDown" && shownRows) choose((chosen + 1) % shownRows);
  else if (event.key === "ArrowUp" && shownRows) choose((chosen - 1 + shownRows) % shownRows);
  else if (event.key === "Enter" && matches[chosen]) answer(matches[chosen].label);
  else if (event.key === "Escape") closeSearch();
  else return;
  event.preventDefault();
}

// ---- keys ----------------------------------------------------------------------------------------------------------

function key(event) {
  if (document.querySelector("dialog[open]") || event.target.matches("select, [type=checkbox]")) return;
  const typing = event.target === $("query");
  const isUndo = (event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z";
  // In a box with text in it, the browser's own undo is meant.
  if (isUndo && !(typing && $("query").value)) {
    event.preventDefault();
    undo();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (typing) return searchKey(event);
  if (!$("keys").checked) return;
  if (event.key === "ArrowLeft" || event.key === "Backspace") undo();
  else if (phase !== "question") return;
  // A key that is held down answers one question, not all of them.
  else if (event.repeat) return;
  else if (event.key === "ArrowRight") answer("skip");
  else if (event.key === "0") answer("cant_tell");
  else if (/^[1-9]$/.test(event.key)) { if (options[event.key - 1]) answer(options[event.key - 1].label); }
  else if (event.key === "/" && !$("search").hidden) $("query").focus();
  else {
    // A letter begins the search; it lands in the box, since that has the focus by the time it is entered.
    if (/^\p{L}$/u.test(event.key) && !$("search").hidden) $("query").focus();
    return;
  }
  event.preventDefault();
}

// ---- beginning -----------------------------------------------------------------------------------------------------

function listen() {
  addEventListener("keydown", key);
  for (const kind of ["keydown", "pointerdown", "pointermove"]) {
    addEventListener(kind, () => { active = Date.now(); }, { passive: true });
  }
  $("undo").addEventListener("click", undo);
  $("state-undo").addEventListener("click", undo);
  $("skip").addEventListener("click", tap("skip"));
  $("cant-tell").addEventListener("click", tap("cant_tell"));
  $("query").addEventListener("input", search);
  $("query").addEventListener("focus", () => document.body.classList.add("searching"));
  $("search-back").addEventListener("click", closeSearch);
  $("help-open").addEventListener("click", () => $("help").showModal());
  $("leave").addEventListener("click", leave);
  $("state-button").addEventListener("click", () => (phase === "refused" ? ask("").then(() => location.reload()) : fill()));
  $("stream").addEventListener("change", () => { letGo(); become("loading"); (filling ?? Promise.resolve()).then(fill); });
  $("keys").checked = localStorage.getItem("wise-atta.keys") !== "off";
  $("keys").addEventListener("change", () => localStorage.setItem("wise-atta.keys", $("keys").checked ? "on" : "off"));
  addEventListener("online", () => { retryAt = pollAt = 0; tick(); });
  addEventListener("pagehide", () => { deliver(true); letGo(); });
  addEventListener("pageshow", (event) => { if (event.persisted) fill(); });
  document.addEventListener("visibilitychange", () => (document.hidden ? deliver(true) : tick()));
  // Where nothing can be sent, leaving would lose answers.
  addEventListener("beforeunload", (event) => {
    if (!leaving && outbox.some((item) => offline || !isOurs(item))) event.preventDefault();
  });
}

async function begin() {
  become("loading");
  try {
    classes = await get("/classes");
    const streams = await get("/streams");
    $("stream").append(...streams.map((item) => el("option", { value: item.stream }, item.stream)));
    $("stream-pick").hidden = streams.length < 2;
  } catch (error) {
    trouble(error);
    setTimeout(begin, RETRY_MS);
    return;
  }
  $("leave").hidden = token() === null;
  entries = index(classes);
  $("search").hidden = classes.length <= KEYS;
  $("query").placeholder = `Search ${count(classes.length)} classes`;
  restore();
  deliver();
  await fill();
  setInterval(tick, 500);
}

listen();
begin();
