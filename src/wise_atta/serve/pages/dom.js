// How are elements made without writing markup as text? Nothing that comes from outside is ever read as HTML.

export const $ = (id) => document.getElementById(id);

function build(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export const el = (tag, props = {}, ...children) => build(document.createElement(tag), props, children);

export const svg = (tag, props = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

const number = new Intl.NumberFormat("en");

export const count = (value) => number.format(value);

// "1 label", "12 labels"
export const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

// A time as long as people say it: "8 ms", "1.2 s", "42 s", "3 min", "2 h", "4 days".
export function duration(seconds) {
  if (seconds < 0.0095) return `${+(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 9.95) return `${+seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 36 * 3600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}
