// How does a stream fare? Its numbers now, and over time, fetched every two seconds.

import { Chart } from "./charts.js";
import { $, count, duration, el, many, percent } from "./dom.js";
import { Refused, ask, forget, get, token } from "./service.js";

const EVERY_MS = 2000;
const SPANS = { 1: 600, 10: 7200, 300: 259200 };
const NAMED = 10; // classes with a colour of their own
const WINDOW = 100; // audited answers behind one point of the accuracy line

let classes = [];
let step = 1;
let stream = null;
let points = [];
let labels = [];
let notices = [];
let round = 0;

// ---- fetching ------------------------------------------------------------------------------------------------------

async function refresh() {
  const turn = (round += 1);
  const at = `/streams/${encodeURIComponent(stream)}`;
  const since = points.at(-1)?.at ?? 0;
  const [status, fresh, newLabels, events] = await Promise.all([
    get(at),
    get(`${at}/history?step=${step}&since=${since}`),
    get(`${at}/labels?since=${labels.at(-1)?.at ?? 0}`),
    get("/notices?limit=200"),
  ]);
  // Another stream or another range was chosen meanwhile.
  if (turn !== round) return;
  // The last step was not over when it was fetched.
  const old = points.filter((point) => !fresh.length || point.at < fresh[0].at);
  points = [...old, ...fresh].filter((point) => point.at > status.now - SPANS[step]);
  labels = [...labels, ...newLabels].slice(-1000);
  notices = events.filter((notice) => notice.stream === stream || notice.stream === null);
  show(status);
  await get("/healthz");
}

async function loop() {
  for (;;) {
    if (!document.hidden) {
      try {
        await refresh();
        live("good", "live");
      } catch (error) {
        failed(error);
      }
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, EVERY_MS);
    });
  }
}

let wake = () => {};

function live(state, text) {
  $("live").dataset.state = state;
  if ($("live").textContent !== text) $("live").textContent = text;
}

function failed(error) {
  if (error instanceof Refused) live("bad", error.message);
  else live("bad", "cannot be reached, trying again");
}

function choose() {
  points = [];
  labels = [];
  round += 1;
  wake();
}

// ---- at a glance ---------------------------------------------------------------------------------------------------

function tile(id, big, sub, tone = "") {
  const node = $(`tile-${id}`);
  node.dataset.tone = tone;
  node.querySelector(".big").replaceChildren(...[big].flat());
  node.querySelector(".sub").replaceChildren(...[sub].flat());
  return node;
}

const small = (text) => el("small", {}, text);

function glance(status) {
  const left = Math.max(status.allowed - status.spent, 0);
  const rule = `${many(left, "label")} left to ask · ${+(100 * status.ratio).toPrecision(3)} per 100 pictures`;
  const budget = tile("budget", [count(status.spent), small(` of ${count(status.allowed)}`)], rule);
  budget.querySelector("i").style.width = status.allowed ? `${Math.min(100, (100 * status.spent) / status.allowed)}%` : "0";

  accuracy(status);

  const recent = points.filter((point) => point.at > status.now - Math.max(10, 2 * step));
  const seconds = recent.length ? Math.max(status.now - recent[0].at, 1) : 1;
  const rate = recent.reduce((sum, point) => sum + point.pictures, 0) / seconds;
  const sum = `${many(status.pictures, "picture")} in ${many(status.requests, "request")} since the start`;
  tile("requests", rate >= 100 ? whole(rate) : rate.toFixed(1), sum);

  const { latency } = status;
  if (latency) tile("latency", duration(latency.p50_s), `99 of 100 requests within ${duration(latency.p99_s)}`);
  else tile("latency", "–", "no requests in the last five minutes");

  const open = status.questions.open ?? 0;
  const link = el("a", { href: "/label" }, `${many(open, "question")} open`);
  const waiting = open ? [link, `, the oldest for ${duration(status.oldest_open_s)}`] : "no question is open";
  tile("age", status.label_age_s === null ? "–" : duration(status.label_age_s), waiting);

  const share = status.batches ? status.skipped / status.batches : 0;
  const failures = status.failed ? `, ${count(status.failed)} failed` : "";
  const others = `${count(status.learned)} learned, ${status.waiting} waiting${failures}`;
  tile("learning", count(status.skipped), others, share > 0.05 ? "warn" : "");
}

function accuracy({ audit, accuracy: audited, recent }) {
  if (!audit) {
    const why = ": a tenth of the labels then goes to pictures drawn by chance.";
    tile("accuracy", "not measured", ["Start with ", el("code", {}, "--audit 0.1"), why], "none");
  } else if (!audited) {
    tile("accuracy", "–", "No audit question has an answer yet. They are among those to label.", "none");
  } else {
    const latest = audited.total > recent.total ? ` · the latest ${recent.total}: ${percent(recent.share)}` : "";
    const interval = `${percent(audited.low)} – ${percent(audited.high)} from ${many(audited.total, "audited picture")}`;
    const node = tile("accuracy", percent(audited.share), interval + latest);
    const [span, dot] = node.querySelectorAll("i, b");
    span.style.left = `${100 * audited.low}%`;
    span.style.width = `${100 * (audited.high - audited.low)}%`;
    dot.style.left = `${100 * audited.share}%`;
  }
}

// ---- over time -----------------------------------------------------------------------------------------------------

const whole = (value) => count(Math.round(value));
const share = (value) => percent(value, 0);
const rounded = (digits) => (value) => String(+value.toPrecision(digits));

const chart = (id, title, hint, format, kind) => new Chart({ id: `chart-${id}`, title, hint, format, kind });
const charts = {
  budget: chart("budget", "Budget", "labels asked for, and how many were allowed", whole),
  accuracy: chart("accuracy", "Accuracy", `of the latest ${WINDOW} audited pictures, with its 95 % interval`, share),
  age: chart("age", "Time to a label", "from question to answer, each label a dot", duration),
  classes: chart("classes", "Predicted classes", "share of the predictions", share, "wide"),
  pictures: chart("pictures", "Pictures per second", "predicted", rounded(3)),
  latency: chart("latency", "Time to answer", "of a request, within the service", duration),
  updates: chart("updates", "Updates", "micro-batches learned and skipped", whole),
  entropy: chart("entropy", "Entropy", "of the predictions, mean, in nats", rounded(3)),
  drift: chart("drift", "Drift", "distance of the adapted weights from the source, relative", rounded(2)),
};

const card = (id, title, hint, body) =>
  el("section", { class: "card", id }, el("h2", {}, title), el("p", { class: "hint" }, hint), body);
const states = el("ul", { class: "rows" });
const events = el("ol", { class: "events" });

$("charts").append(
  charts.budget.card, charts.accuracy.card, charts.age.card,
  charts.classes.card, card("questions", "Questions", "how far they got", states),
  charts.pictures.card, charts.latency.card, charts.updates.card,
  charts.entropy.card, charts.drift.card, card("events", "Events", "starts, resets, the guard, reviews", events),
);

function show(status) {
  $("state").hidden = true;
  $("board").hidden = false;
  $("title").textContent = status.stream;
  const about = [status.method, `up for ${duration(status.now - status.started)}`, many(classes.length, "class", "classes")];
  $("about").textContent = about.join(" · ");
  glance(status);
  const first = Math.min(points[0]?.at ?? status.now, labels[0]?.at ?? status.now);
  const earliest = Math.max(status.now - SPANS[step], Math.min(first, status.now - 30 * step));
  const size = binSize((status.now - earliest) / 90);
  const from = Math.floor(earliest / size) * size;
  const base = { from, to: status.now, gap: Math.max(3 * size, 3 * step), marks: notices.map(mark) };
  const bins = gather(points, size);
  drawBudget(base, status);
  drawAccuracy(base, status);
  drawAges(base, status);
  drawClasses(base, bins);
  drawTraffic(base, status, bins, size);
  drawModel(base, status, bins, size);
  drawStates(status);
  drawEvents(status.now);
}

const line = (key) => points.filter((point) => point[key] !== null).map((point) => ({ x: point.at, y: point[key] }));

function drawBudget(base, { spent, allowed }) {
  const until = (list, y) => (list.length ? [...list, { x: base.to, y }] : []);
  charts.budget.draw({
    ...base, least: 4, value: `${count(spent)} of ${count(allowed)}`,
    series: [
      { name: "allowed", kind: "step", cls: "k-quiet", points: until(line("allowed"), allowed) },
      { name: "asked for", kind: "step", cls: "k-accent filled", points: until(line("spent"), spent) },
    ],
  });
}

function drawAges(base, { label_age_s: mean }) {
  const list = labels.filter((label) => label.at >= base.from).map((label) => ({ x: label.at, y: label.age_s }));
  charts.age.draw({
    ...base, log: true, legend: false, empty: "no label in this time",
    value: mean === null ? "" : `${duration(mean)} on average`,
    series: [{ name: "age", kind: "dots", cls: "k-accent", points: list }],
  });
}

function drawTraffic(base, { now, skipped, latency }, bins, size) {
  // The last bin is not over yet.
  const rates = bins.map((bin) => ({ x: bin.at, y: bin.pictures / Math.min(size, Math.max(now - bin.at, step)) }));
  charts.pictures.draw({
    ...base, least: 1,
    series: [{ name: "pictures/s", kind: "bars", cls: "k-accent", size, points: rates }],
  });
  charts.latency.draw({
    ...base, log: true, value: latency ? `${duration(latency.p50_s)} / ${duration(latency.p99_s)}` : "",
    series: [
      { name: "99 of 100", kind: "line", cls: "k-quiet", points: line("p99_s") },
      { name: "median", kind: "line", cls: "k-accent", points: line("p50_s") },
    ],
  });
  const learned = bins.map((bin) => ({ x: bin.at, y: bin.learned }));
  const passed = bins.map((bin) => ({ x: bin.at, y: bin.skipped, y0: bin.learned, high: bin.skipped + bin.learned }));
  charts.updates.draw({
    ...base, least: 1, value: `${count(skipped)} skipped`,
    series: [
      { name: "learned", kind: "bars", cls: "k-accent", size, points: learned },
      { name: "skipped", kind: "bars", cls: "k-warn", size, points: passed },
    ],
  });
}

function drawModel(base, { drift }, bins, size) {
  const entropy = bins.filter((bin) => bin.pictures).map((bin) => ({
    x: Math.min(bin.at + size / 2, base.to), y: bin.entropy / bin.pictures,
  }));
  charts.entropy.draw({
    ...base, least: 0.05, value: entropy.at(-1)?.y.toFixed(3),
    series: [{ name: "entropy", kind: "line", cls: "k-accent", points: entropy }],
  });
  charts.drift.draw({
    ...base, least: 1e-3, value: drift.toPrecision(2),
    series: [{ name: "drift", kind: "line", cls: "k-accent", points: line("drift") }],
  });
}

function binSize(about) {
  const sizes = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600].filter((size) => size % step === 0);
  return sizes.find((size) => size >= about) ?? 3600;
}

// Points added up over longer times, so that bars are wide enough to see.
function gather(list, size) {
  const binned = new Map();
  for (const point of list) {
    const at = Math.floor(point.at / size) * size;
    const bin = binned.get(at) ?? { at, pictures: 0, learned: 0, skipped: 0, entropy: 0, classes: {} };
    binned.set(at, bin);
    for (const key of ["pictures", "learned", "skipped"]) bin[key] += point[key];
    bin.entropy += (point.entropy ?? 0) * point.pictures;
    for (const [label, number] of Object.entries(point.classes)) bin.classes[label] = (bin.classes[label] ?? 0) + number;
  }
  return [...binned.values()];
}

function drawClasses(base, bins) {
  const totals = {};
  for (const [label, number] of bins.flatMap((bin) => Object.entries(bin.classes))) {
    totals[label] = (totals[label] ?? 0) + number;
  }
  const all = bins.reduce((sum, bin) => sum + bin.pictures, 0);
  const best = Object.keys(totals).sort((a, b) => totals[b] - totals[a] || a - b).slice(0, NAMED);
  const named = best.map(Number).sort((a, b) => a - b);
  const filled = bins.filter((bin) => bin.pictures);
  const low = new Map(filled.map((bin) => [bin, 0]));
  const layer = (name, cls, partOf) => ({
    name, cls, kind: "band",
    points: filled.map((bin) => {
      const from = low.get(bin);
      const part = partOf(bin);
      low.set(bin, from + part);
      return { x: bin.at, y: part, low: from, high: from + part };
    }),
  });
  const series = named.map((label, place) =>
    layer(classes[label], `c${place}`, (bin) => (bin.classes[label] ?? 0) / bin.pictures));
  if (Object.keys(totals).length > named.length || filled.some((bin) => 1 - low.get(bin) > 1e-6)) {
    series.push(layer("others", "c-rest", (bin) => Math.max(1 - low.get(bin), 0)));
  }
  const rows = best.map((label) => {
    const meter = el("i", { class: `c${named.indexOf(Number(label))}` });
    meter.style.width = `${(100 * totals[label]) / totals[best[0]]}%`;
    const name = el("span", { class: "name", title: classes[label] }, classes[label]);
    return el("li", {}, name, el("span", { class: "track" }, meter), el("b", {}, share(totals[label] / all)));
  });
  charts.classes.draw({ ...base, ceiling: 1, series, legendNode: rows });
}

function wilson(right, total) {
  const z = 1.96;
  const weight = (z * z) / total;
  const share = right / total;
  const half = z * Math.sqrt((share * (1 - share)) / total + weight / (4 * total));
  return [(share + weight / 2 - half) / (1 + weight), (share + weight / 2 + half) / (1 + weight)];
}

function drawAccuracy(base, { audit, accuracy: audited }) {
  const rights = [];
  const list = [];
  for (const label of labels) {
    if (label.right === null) continue;
    rights.push(label.right);
    const last = rights.slice(-WINDOW);
    const right = last.filter(Boolean).length;
    const [low, high] = wilson(right, last.length);
    if (label.at >= base.from) list.push({ x: label.at, y: right / last.length, low, high });
  }
  charts.accuracy.draw({
    ...base, gap: Infinity, ceiling: 1, value: audited ? percent(audited.share) : "", legend: false,
    empty: audit ? "no audit question was answered in this time" : "not measured: start with --audit 0.1",
    series: [
      { name: "95 % interval", kind: "band", cls: "k-accent soft", points: list.map(({ x, low, high }) => ({ x, low, high })) },
      { name: "accuracy", kind: "line", cls: "k-accent", points: list },
    ],
  });
}

const STATES = [
  ["open", "open", "c1"], ["held", "held for review", "c3"], ["answered", "answered, learned with the next batch", "c6"],
  ["learned", "answered and learned", "c2"], ["measured", "answered for the audit", "c0"],
  ["cant_tell", "nobody can tell", "c7"], ["expired", "expired", "c-rest"],
];

function drawStates({ questions: counts, accuracy: audit }) {
  // What measures is never learned.
  const measured = Math.min(audit?.total ?? 0, counts.answered ?? 0);
  const questions = { ...counts, answered: (counts.answered ?? 0) - measured, measured };
  const most = Math.max(...Object.values(questions), 1);
  states.replaceChildren(...STATES.filter(([key]) => questions[key]).map(([key, text, cls]) => {
    const meter = el("i", { class: cls });
    meter.style.width = `${(100 * questions[key]) / most}%`;
    const track = el("span", { class: "track" }, meter);
    return el("li", {}, el("span", { class: "name" }, text), el("b", {}, count(questions[key])), track);
  }));
  if (!states.children.length) states.append(el("li", { class: "muted" }, "No question was asked yet."));
}

const EVENTS = {
  start: () => "Started",
  recovered: ({ replayed }) => `Came back after a crash, ${many(replayed, "event")} replayed`,
  reset: ({ by }) => `Reset to the source by ${by}`,
  guard: ({ why }) => `Guard: ${why}`,
  failed: ({ why }) => `A batch could not be learned: ${why}`,
  held: ({ by, answers }) => `${many(answers, "answer")} of ${by} held for review`,
  revoked: ({ answers, exact }) => `${many(answers, "label")} revoked${exact ? "" : ", approximately"}`,
};

const told = (notice) => EVENTS[notice.kind]?.(notice.body) ?? notice.kind;
const mark = (notice) => ({ at: notice.at, kind: notice.kind, text: told(notice) });

function drawEvents(now) {
  const rows = notices.slice(0, 50).map((notice) => {
    const at = new Date(notice.at * 1000);
    const ago = `${duration(Math.max(now - notice.at, 0.01))} ago`;
    const time = el("time", { datetime: at.toISOString(), title: at.toLocaleString() }, ago);
    return el("li", { class: notice.kind }, el("span", {}, told(notice)), time);
  });
  events.replaceChildren(...(rows.length ? rows : [el("li", {}, "Nothing happened yet.")]));
}

// ---- beginning -----------------------------------------------------------------------------------------------------

async function begin() {
  try {
    classes = await get("/classes");
    const streams = await get("/streams");
    $("stream").replaceChildren(...streams.map((item) => el("option", { value: item.stream }, item.stream)));
    $("stream-pick").hidden = streams.length < 2;
    stream = (streams.find((item) => location.hash === `#${encodeURIComponent(item.stream)}`) ?? streams[0]).stream;
    $("stream").value = stream;
  } catch (error) {
    failed(error);
    const silence = "The service cannot be reached. Trying again…";
    $("state-text").textContent = error instanceof Refused ? `${error.message}.` : silence;
    $("state-button").hidden = !(error instanceof Refused && error.status === 403);
    setTimeout(begin, EVERY_MS);
    return;
  }
  $("leave").hidden = token() === null;
  loop();
}

$("stream").addEventListener("change", () => {
  stream = $("stream").value;
  history.replaceState(null, "", `#${encodeURIComponent(stream)}`);
  choose();
});
$("range").addEventListener("change", (event) => {
  step = Number(event.target.value);
  choose();
});
$("leave").addEventListener("click", forget);
$("state-button").addEventListener("click", () => ask(""));
document.addEventListener("visibilitychange", () => { if (!document.hidden) wake(); });
begin();
