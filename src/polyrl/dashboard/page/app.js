// The frame of the page: which run, which view, and what the run does now.

import { get, setToken, takeToken, Unauthorized, watch } from "./api.js";
import { h, number } from "./dom.js";
import * as curves from "./curves.js";
import * as fleet from "./fleet.js";
import * as ledger from "./ledger.js";
import * as now from "./now.js";
import * as rollouts from "./rollouts.js";
import * as timeline from "./timeline.js";

const VIEWS = { now, rollouts, timeline, fleet, curves, ledger };
const place = document.getElementById("view");
const state = { run: 0, runs: [], now: null, query: new URLSearchParams() };
let shown = null; // the view: {update(state), key(event), close()}
let stopWatching = () => {};

const wanted = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  state.query = new URLSearchParams(query ?? "");
  return Object.hasOwn(VIEWS, path) ? path : "now";
};

/** Go to a view, with what it should show. */
state.go = (view, query = {}) => {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
  location.hash = `#/${view}${text ? `?${text}` : ""}`;
};

function show() {
  const name = wanted();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} · ${state.runs[state.run]?.name ?? ""} · PolyRL`;
  if (shown?.name === name && shown.view.reopen) {
    shown.view.reopen(state);
    return;
  }
  shown?.view.close?.();
  place.replaceChildren();
  shown = { name, view: VIEWS[name].open(place, state) };
  if (state.now) shown.view.update?.(state);
}

function tellState(text, isBad = false) {
  const element = document.getElementById("state");
  element.textContent = text;
  element.classList.toggle("bad", isBad);
}

function heard(told) {
  state.now = told;
  const step = told.last_step === null ? "no step yet" : `step ${number(told.last_step)}`;
  const reading = told.read < 1 ? `, ${Math.round(100 * told.read)}% of the journal is read` : "";
  tellState(told.trouble || `${told.kind} · ${step}${reading}`, Boolean(told.trouble));
  shown?.view.update?.(state);
}

function lost(error) {
  if (error instanceof Unauthorized) askForToken();
  else tellState(error instanceof TypeError ? "not connected; trying again" : `${error.message}; trying again`, true);
}

function follow() {
  stopWatching();
  state.now = null;
  stopWatching = watch(state.run, heard, lost);
}

function askForToken() {
  const input = h("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const use = () => { setToken(input.value.trim()); location.reload(); };
  place.replaceChildren(
    h("h2", {}, "A token is needed"),
    h("p", {}, "Open the link that ", h("code", {}, "polyrl dash RUN"), " prints, or paste the text of RUN/view.token."),
    h("p", {}, input, " ", h("button", { type: "button", onclick: use }, "Look")),
  );
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") use(); });
  input.focus();
  tellState("no valid token", true);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("polyrl-theme", theme);
  if (shown) { shown.view.close?.(); place.replaceChildren(); shown = null; show(); }
}

const otherTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view) state.go(view);
  else if (event.key === "t") otherTheme();
  else if (!shown?.view.key?.(event.key)) return;
  event.preventDefault();
}

async function start() {
  const prefers = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = localStorage.getItem("polyrl-theme") ?? prefers;
  takeToken();
  place.replaceChildren(h("p", { class: "quiet", role: "status" }, "The page's process is starting; on a machine that trains, this takes a while …"));
  while (!state.runs.length) {
    try {
      state.runs = await get("runs");
    } catch (error) {
      lost(error);
      if (error instanceof Unauthorized) return;
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  const select = document.getElementById("run");
  select.replaceChildren(...state.runs.map((run, place) => h("option", { value: String(place) }, run.name)));
  select.addEventListener("change", () => { state.run = Number(select.value); follow(); shown?.view.close?.(); shown = null; show(); });
  document.getElementById("theme").addEventListener("click", otherTheme);
  addEventListener("hashchange", () => { takeToken(); show(); });
  addEventListener("keydown", keys);
  follow();
  show();
}

start();
