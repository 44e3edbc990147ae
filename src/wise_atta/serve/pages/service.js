// How do the pages talk to the service? The token is asked for once, kept for this tab, and sent in a header.

import { el } from "./dom.js";

const KEY = "wise-atta.token";
const PATIENCE_MS = 20_000;

// The service said no.
export class Refused extends Error {
  constructor(status, detail, after) {
    super(typeof detail === "string" ? detail : JSON.stringify(detail));
    this.status = status;
    this.after = after;
  }
}

// The service said nothing.
class Offline extends Error {}

export const token = () => sessionStorage.getItem(KEY);

// Whose it is: the part of it that is no secret.
export const owner = () => token()?.split("_")[1] ?? null;

export function forget() {
  sessionStorage.removeItem(KEY);
  location.reload();
}

async function send(path, { body, keepalive = false } = {}) {
  const sent = token();
  const headers = sent === null ? {} : { Authorization: `Bearer ${sent}` };
  const options = { headers, keepalive, signal: AbortSignal.timeout(PATIENCE_MS) };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    throw new Offline(error.message);
  }
  if (reply.ok) return reply;
  const detail = await reply.json().then((body) => body.detail, () => reply.statusText);
  const refused = new Refused(reply.status, detail, Number(reply.headers.get("Retry-After")) || 1);
  refused.token = sent;
  throw refused;
}

// Sends a request; where a token is wanted, asks for one and sends it again.
async function admitted(path, options) {
  for (;;) {
    try {
      return await send(path, options);
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 401) throw error;
      // While this one was under way somebody may have given a token: the first one, or another and the page begins anew.
      if (error.token === token()) await ask(error.token === null ? "" : "This token is not known. Is it complete?");
      else if (error.token !== null) await new Promise(() => {});
    }
  }
}

export const get = async (path) => (await admitted(path)).json();

export const post = async (path, body, options = {}) => (await admitted(path, { body, ...options })).json();

export async function picture(path) {
  const reply = await admitted(path);
  return URL.createObjectURL(await reply.blob());
}

let asking = null;

// Opens the door once, however many requests wait before it.
export function ask(reason) {
  asking ??= new Promise((resolve) => {
    const input = el("input", {
      id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true,
      placeholder: "wa_…", "aria-describedby": "token-reason",
    });
    const enter = (event) => {
      event.preventDefault();
      const before = token();
      sessionStorage.setItem(KEY, input.value.trim());
      // What waits to be sent was said by somebody else.
      if (before !== null && before !== token()) {
        location.reload();
        return;
      }
      gate.close();
      gate.remove();
      asking = null;
      resolve();
    };
    const gate = el(
      "dialog", { class: "gate", "aria-labelledby": "gate-title", oncancel: (event) => event.preventDefault() },
      el(
        "form", { onsubmit: enter },
        el("h2", { id: "gate-title" }, "Who are you?"),
        el("p", {}, "This service lets people in by token. It stays in this tab and is forgotten when you close it."),
        el("label", { for: "token" }, "Token"),
        input,
        el("p", { id: "token-reason", class: "bad", role: "alert" }, reason),
        el("button", { class: "primary" }, "Continue"),
        el("p", { class: "muted small" }, "A new one is made with ", el("code", {}, "wise-atta ledger token create")),
      ),
    );
    document.body.append(gate);
    gate.showModal();
    input.focus();
  });
  return asking;
}
