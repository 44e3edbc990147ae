// How are numbers over time drawn? As SVG, by hand: lines, steps, bands, bars and dots on one time axis.

import { el, svg } from "./dom.js";

const LEFT = 46;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 22;
const HEIGHT = 168;
const TIMES = [5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];

// Round numbers from `low` to a little beyond `high`.
function ticks(low, high, about = 3) {
  const rough = (high - low) / about || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((size) => size >= rough * 0.999);
  const values = [];
  for (let value = Math.floor(low / step) * step; value < high + step * 0.999; value += step) values.push(value);
  return values.map((value) => Number(value.toPrecision(10)));
}

// Powers of ten around some values, five at most.
function decades(values) {
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [1, 1];
  const first = Math.floor(Math.log10(Math.max(low, 1e-4)) + 1e-9);
  const last = Math.max(Math.ceil(Math.log10(Math.max(high, 1e-4)) - 1e-9), first + 1);
  const step = Math.ceil((last - first) / 4);
  return Array.from({ length: Math.ceil((last - first) / step) + 1 }, (_, place) => 10 ** (first + place * step));
}

const clockOf = (at, span) => {
  const time = new Date(at * 1000);
  if (span > 86400 * 1.5) return time.toLocaleDateString("en", { weekday: "short", hour: "2-digit", hour12: false });
  return time.toLocaleTimeString("en-GB", span < 300 ? {} : { hour: "2-digit", minute: "2-digit" });
};

// A chart of its own in a card. `draw` is called with new data as often as it comes.
export class Chart {
  constructor({ id, title, hint = "", format = String, kind = "" }) {
    this.format = format;
    this.title = title;
    this.value = el("span", { class: "value" });
    this.plot = svg("svg", { class: "plot", role: "img", tabindex: "0", height: HEIGHT });
    this.tip = el("div", { class: "tip", hidden: true });
    this.legend = el("ul", { class: "legend" });
    this.body = el("div", { class: "body" }, this.plot, this.tip);
    this.card = el(
      "figure", { class: `card ${kind}`, id },
      el("figcaption", {}, el("h2", {}, title), this.value), el("p", { class: "hint" }, hint), this.body, this.legend,
    );
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerleave", () => this.hide());
    this.plot.addEventListener("blur", () => this.hide());
    this.plot.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.data && this.draw(this.data)).observe(this.body);
  }

  // data: from, to (seconds), series [{name, kind, cls, points: [{x, y, y0, low, high}]}], marks [{at, kind, text}],
  // log (whether the y axis goes by powers of ten), ceiling (of it, if fixed), least (what it reaches at least),
  // gap (seconds without a point that break a line), empty (what to say if there is none)
  draw(data) {
    this.data = data;
    const width = this.body.clientWidth;
    if (!width) return;
    const values = data.series.flatMap((series) => series.points.flatMap((p) => [p.y, p.high ?? p.y, p.low ?? p.y]));
    const some = values.length > 0;
    const marks = data.log ? decades(values) : ticks(0, some ? data.ceiling ?? Math.max(...values, data.least ?? 0) : 1);
    const floor = marks[0];
    const ceiling = data.ceiling ?? marks.at(-1);
    const scale = data.log ? Math.log10 : (value) => value;
    const clamp = (value) => Math.min(Math.max(value, floor), ceiling);
    const height = (value) => (scale(clamp(value)) - scale(floor)) / (scale(ceiling) - scale(floor));
    this.x = (at) => LEFT + ((at - data.from) / (data.to - data.from)) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - height(value) * (HEIGHT - TOP - BOTTOM);
    this.width = width;
    const parts = [];
    const text = (cls, x, y, anchor, words) => parts.push(svg("text", { class: cls, x, y, "text-anchor": anchor }, words));
    const upright = (cls, at) => svg("line", { class: cls, x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
    for (const mark of marks) {
      if (mark > ceiling * 1.0001) continue;
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.y(mark), y2: this.y(mark) }));
      if (some) text("axis", LEFT - 8, this.y(mark) + 4, "end", this.format(mark));
    }
    const span = data.to - data.from;
    const step = TIMES.find((size) => span / size <= Math.max(2, width / 85)) ?? 86400;
    const zone = new Date(data.to * 1000).getTimezoneOffset() * 60;
    for (let at = Math.ceil((data.from - zone) / step) * step + zone; at <= data.to; at += step) {
      if (this.x(at) > LEFT + 18 && this.x(at) < width - 24) text("axis", this.x(at), HEIGHT - 5, "middle", clockOf(at, span));
    }
    for (const series of data.series) parts.push(...this.shape(series, data));
    for (const mark of data.marks ?? []) {
      if (mark.at < data.from || mark.at > data.to) continue;
      parts.push(upright(`mark ${mark.kind}`, this.x(mark.at)));
    }
    const empty = data.empty ?? "nothing yet";
    if (!some) text("none", width / 2, HEIGHT / 2, "middle", empty);
    this.cross = upright("cross", 0);
    this.cross.setAttribute("visibility", "hidden");
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.setAttribute("width", width);
    this.plot.replaceChildren(...parts, this.cross);
    this.value.textContent = data.value ?? "";
    const summary = some ? data.value || "go through the points with the arrow keys" : empty;
    this.plot.setAttribute("aria-label", `${this.title}: ${summary}`);
    if (data.legend !== false && data.series.length > 1 && !data.legendNode) {
      this.legend.replaceChildren(...data.series.map((series) => el("li", {}, el("i", { class: series.cls }), series.name)));
    }
    if (data.legendNode) this.legend.replaceChildren(...data.legendNode);
    if (this.hover !== undefined) this.point(this.hover);
  }

  // The points in runs without a gap.
  runs(points, gap) {
    const stretches = [];
    for (const point of points) {
      const run = stretches.at(-1);
      if (run && point.x - run.at(-1).x <= gap) run.push(point);
      else stretches.push([point]);
    }
    return stretches;
  }

  shape({ kind, cls, points, size }, { gap = Infinity, to }) {
    const path = (list) => list.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const { x, y } = this;
    if (kind === "bars") {
      const wide = Math.max(1, x(size) - x(0) - 1);
      return points.filter((p) => p.y > 0).map((p) => {
        const [head, foot] = [y(p.y + (p.y0 ?? 0)), y(p.y0 ?? 0)];
        return svg("rect", { class: `bars ${cls}`, x: x(p.x), width: wide, y: head, height: Math.max(1, foot - head) });
      });
    }
    if (kind === "dots") return points.map((p) => svg("circle", { class: `dots ${cls}`, cx: x(p.x), cy: y(p.y), r: 2.6 }));
    const shapes = [];
    for (const run of this.runs(points, kind === "step" ? Infinity : gap)) {
      if (kind === "band") {
        const edge = [...run.map((p) => [x(p.x), y(p.high)]), ...run.map((p) => [x(p.x), y(p.low)]).reverse()];
        // A single point has no width.
        shapes.push(svg("path", { class: `${run.length > 1 ? "band" : "line"} ${cls}`, d: `${path(edge)}Z` }));
        continue;
      }
      const line = [];
      for (const [place, p] of run.entries()) {
        if (kind === "step" && place) line.push([x(p.x), y(run[place - 1].y)]);
        line.push([x(p.x), y(p.y)]);
      }
      if (kind === "step") line.push([x(to), y(run.at(-1).y)]);
      if (line.length === 1) shapes.push(svg("circle", { class: `dots ${cls}`, cx: line[0][0], cy: line[0][1], r: 2 }));
      if (cls.includes("filled")) {
        const edge = [[line[0][0], HEIGHT - BOTTOM], ...line, [line.at(-1)[0], HEIGHT - BOTTOM]];
        shapes.push(svg("path", { class: `fill ${cls}`, d: `${path(edge)}Z` }));
      }
      shapes.push(svg("path", { class: `line ${cls}`, d: path(line) }));
    }
    return shapes;
  }

  // Says what was at the moment under the pointer.
  point(place) {
    const { from, to, series } = this.data;
    const at = from + ((place - LEFT) / (this.width - LEFT - RIGHT)) * (to - from);
    const rows = [];
    let near = null;
    for (const line of series) {
      const best = line.points.reduce((a, b) => (a === null || Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a), null);
      if (best === null) continue;
      if (near === null || Math.abs(best.x - at) < Math.abs(near - at)) near = best.x;
      const text = best.y === undefined ? `${this.format(best.low)} – ${this.format(best.high)}` : this.format(best.y);
      rows.push({ x: best.x, row: el("div", {}, el("i", { class: line.cls }), line.name, el("b", {}, text)) });
    }
    if (near === null) return;
    this.hover = place;
    const node = rows.filter((row) => Math.abs(row.x - near) < (to - from) / 50).map((row) => row.row);
    const event = (this.data.marks ?? []).find((mark) => Math.abs(this.x(mark.at) - place) < 6);
    this.tip.replaceChildren(el("time", {}, clockOf(near, 1)), ...node, event ? el("div", { class: "event" }, event.text) : "");
    this.tip.hidden = false;
    const left = this.x(near);
    this.tip.style.left = `${Math.min(Math.max(left + 12, 0), this.width - this.tip.offsetWidth)}px`;
    if (left > this.width / 2) this.tip.style.left = `${Math.max(left - this.tip.offsetWidth - 12, 0)}px`;
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, left);
    this.cross.setAttribute("visibility", "visible");
  }

  step(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !this.data) return;
    event.preventDefault();
    const next = (this.hover ?? this.width - RIGHT) + way * 12;
    this.point(Math.min(Math.max(next, LEFT), this.width - RIGHT));
    const words = [...this.tip.children].map((node) => node.textContent);
    this.plot.setAttribute("aria-label", [this.title, ...words].join(", "));
  }

  hide() {
    this.hover = undefined;
    this.tip.hidden = true;
    this.cross?.setAttribute("visibility", "hidden");
  }
}
