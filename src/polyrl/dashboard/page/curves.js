// All metrics, of one run or several, over steps, seconds or dollars.

import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { h, plain, shown as shownText } from "./dom.js";

const FIRST = ["reward/mean", "validation/reward/mean", "token/response_length/mean", "time/step_total", "actor/entropy", "actor/grad_norm", "actor/mismatch_kl", "perf/throughput_all_gpus", "fleet/workers", "cost/usd_total"];
const KEY = "polyrl-metrics", MOST = 64; // as many as the server gives at once

export function open(place, state) {
  const axis = h("select", { "aria-label": "x axis" }, ["step", "seconds", "dollars"].map((one) => h("option", { value: one }, one)));
  const filter = h("input", { type: "search", placeholder: "name", "aria-label": "Metrics that contain" });
  const runs = h("span", { class: "inline" }, state.runs.map((run, at) => h("label", {}, h("input", { type: "checkbox", value: String(at), checked: at === state.run || state.runs.length <= 4, onchange: () => draw() }), " ", run.name, " ")));
  const picks = h("div", { class: "picks", role: "group", "aria-label": "Metrics" }), charts = h("div", { class: "charts" }), note = h("p", { class: "error" });
  place.append(h("div", { class: "filters" }, h("label", {}, "over", axis), h("label", {}, "metrics", filter), state.runs.length > 1 ? runs : null), picks, note, charts);
  let names = [], chosen = JSON.parse(localStorage.getItem(KEY) ?? "null") ?? FIRST, drawn = [], drawnKey = "", known = -1, pending = false, again = false;

  async function list() {
    const found = await get("metrics", { run: state.run }).catch((error) => { note.textContent = error.message; return names; });
    const isNew = JSON.stringify(found) !== JSON.stringify(names);
    names = found;
    if (isNew) drawPicks();
    draw();
  }

  function drawPicks() {
    picks.replaceChildren(...names.filter((one) => one.name.includes(filter.value)).map((one) => h("label", { title: one.meaning },
      h("input", { type: "checkbox", checked: chosen.includes(one.name), onchange: (event) => {
        chosen = event.target.checked ? [...chosen, one.name] : chosen.filter((name) => name !== one.name);
        localStorage.setItem(KEY, JSON.stringify(chosen));
        draw();
      } }), " ", shownText(one.name))));
  }

  async function draw() {
    if (pending) { again = true; return; }
    pending = true;
    const there = chosen.filter((name) => names.some((one) => one.name === name)), wanted = there.slice(0, MOST);
    const of = [...runs.querySelectorAll("input:checked")].map((box) => Number(box.value));
    const shown = of.length ? of : [state.run];
    try {
      const told = await Promise.all(shown.map((run) => series(run, wanted, axis.value)));
      const key = JSON.stringify([axis.value, shown, wanted]), isSame = key === drawnKey; // the same curves have grown: what was zoomed to stays
      if (!isSame) {
        for (const chart of drawn) chart.close();
        drawn = [];
        charts.replaceChildren();
      }
      wanted.forEach((name, place) => {
        const { x, lines } = merged(told.map((one, at) => ({ label: shown.length > 1 ? state.runs[shown[at]].name : "value", x: one.x, values: one.columns[name] })));
        if (isSame) drawn[place].update(x, lines);
        else drawn.push(lineChart(newChart(name), axis.value, x, lines));
      });
      drawnKey = key;
      note.textContent = there.length > MOST ? `${MOST} of ${there.length} chosen metrics are drawn.` : wanted.length ? "" : "No metric is chosen, or none was told yet.";
    } catch (error) {
      note.textContent = error.message;
    }
    pending = false;
    if (again) { again = false; draw(); }
  }

  function newChart(name) {
    const about = names.find((one) => one.name === name), body = h("div");
    charts.append(h("section", { class: "chart", "aria-label": plain(name) }, h("h2", {}, shownText(name), about.unit ? ` (${about.unit})` : ""), h("p", { class: "quiet" }, about.meaning.replaceAll("`", "")), body));
    return body;
  }

  axis.addEventListener("change", draw);
  filter.addEventListener("input", drawPicks);
  list();
  return {
    close: () => { for (const chart of drawn) chart.close(); },
    update({ now }) {
      if (known >= 0 && now.steps !== known) list(); // a metric may come later: a validation's does
      known = now.steps;
    },
    key(key) { if (key === "/") { filter.focus(); return true; } return false; },
  };
}

/** Ask for the values of metrics, a few at a time: their names may be long, and an address may not. */
async function series(run, names, x) {
  const told = [];
  for (let first = 0; first === 0 || first < names.length; first += 8) told.push(await get("series", { run, name: names.slice(first, first + 8), x }));
  return { x: told[0].x, columns: Object.fromEntries(told.flatMap((one) => Object.entries(one.columns))) };
}

/** Bring several runs onto one x. */
function merged(runs) {
  if (runs.length === 1) {
    const kept = runs[0].x.map((x, at) => at).filter((at) => runs[0].x[at] !== null);
    return { x: kept.map((at) => runs[0].x[at]), lines: [{ label: runs[0].label, values: kept.map((at) => runs[0].values[at]) }] };
  }
  const all = [...new Set(runs.flatMap((run) => run.x.filter((one) => one !== null)))].sort((a, b) => a - b);
  const places = new Map(all.map((one, place) => [one, place]));
  return { x: all, lines: runs.map((run) => {
    const values = new Array(all.length).fill(null);
    run.x.forEach((one, at) => { if (one !== null) values[places.get(one)] = run.values[at]; });
    return { label: run.label, values };
  }) };
}
