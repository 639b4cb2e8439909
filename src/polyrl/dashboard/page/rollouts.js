// What the model said, and why it was paid.

import { get } from "./api.js";
import { diff } from "./diff.js";
import { h, number, plain, redraw, shown } from "./dom.js";

const PAGE = 200;
const ORDERS = { group: "by group", best: "highest reward", worst: "lowest reward", longest: "longest", shortest: "shortest", task: "by task", outcome: "by outcome", worker: "by worker" };
const OUTCOMES = { stop: "ended", length: "cut off", trained: "trained", rejected: "left out", open: "not trained yet" };
const words = (outcome) => OUTCOMES[outcome] ?? outcome;
const ABOVE = { task: (row) => row.task || "no task", outcome: (row) => `${words(row.finish)}, ${words(row.state)}`, worker: (row) => row.workers.join(", ") }; // what stands above a part of the list
const COLOURING = { logprob: "log-probability", version: "weight version", worker: "worker", none: "no colour" };

export function open(place, state) {
  const fields = {
    step: h("input", { type: "number", min: "0", "aria-label": "Step", placeholder: "newest" }),
    task: h("select", { "aria-label": "Task" }),
    outcome: select({ "": "all", ...OUTCOMES }, "Outcome"),
    worker: h("select", { "aria-label": "Worker" }),
    low: h("input", { type: "number", step: "any", "aria-label": "Lowest reward" }),
    high: h("input", { type: "number", step: "any", "aria-label": "Highest reward" }),
    fewest: h("input", { type: "number", min: "0", "aria-label": "Fewest tokens" }),
    longest: h("input", { type: "number", min: "0", "aria-label": "Most tokens" }),
    text: h("input", { type: "search", "aria-label": "Text in prompt or answer", placeholder: "text" }),
    order: select(ORDERS, "Order"),
  };
  const titles = { step: "step", task: "task", outcome: "outcome", worker: "worker", low: "reward from", high: "reward to", fewest: "tokens from", longest: "tokens to", text: "contains", order: "order" };
  const earlier = h("button", { type: "button", onclick: () => move(-1) }, "‹ earlier step");
  const later = h("button", { type: "button", onclick: () => move(1) }, "later step ›");
  const newest = h("button", { type: "button", onclick: () => { fields.step.value = ""; chosen = null; load(true); } }, "newest step »");
  const filters = h("form", { class: "filters" }, Object.entries(fields).map(([name, field]) => h("label", {}, titles[name], field)), h("span", { class: "steps" }, earlier, later, newest));
  const summary = h("p", { class: "quiet", role: "status" }, "Reading the answers …");
  const list = h("div", { class: "list", role: "group", "aria-label": "Answers" });
  const detail = h("div", { class: "detail" });
  place.append(filters, summary, h("div", { class: "reader" }, list, detail));
  filters.addEventListener("submit", (event) => event.preventDefault());
  for (const field of Object.values(fields)) field.addEventListener("change", () => load(true));

  let told = null, rows = [], chosen = null, colouring = "logprob", marked = null, first = 0, known = -1, asked = 0;

  const query = () => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));

  async function load(fromStart) {
    if (fromStart) first = 0;
    const ticket = asked += 1, from = first;
    let found;
    try {
      found = await get("samples", { run: state.run, ...query(), first, most: PAGE });
    } catch (error) {
      if (ticket === asked) summary.textContent = error.message;
      return;
    }
    if (ticket !== asked) return; // something else was asked for meanwhile
    told = found;
    rows = from === 0 ? told.samples : rows.concat(told.samples);
    fill(fields.task, told.tasks, "all");
    fill(fields.worker, told.workers, "all");
    summary.textContent = told.step === null ? (state.runs[state.run]?.simulation ? "A simulation has no answers." : "No answers are kept yet.") :
      `step ${told.step}: ${told.num} of ${told.num_all} answers; ${told.steps[0] === told.steps[1] ? `step ${told.steps[0]} is` : `steps ${told.steps[0]} to ${told.steps[1]} are`} kept`;
    drawList();
    const wanted = state.query.get("sample");
    state.query.delete("sample"); // it is meant once: later lists keep what was chosen, or begin anew
    const at = rows.find((row) => row.name === wanted) ?? (rows.some((row) => row.name === chosen) ? null : rows[0]);
    if (at) choose(at);
    else if (!rows.length) { chosen = null; detail.replaceChildren(); }
  }

  function move(by) {
    const at = told?.step ?? 0;
    fields.step.value = String(Math.max(0, at + by));
    chosen = null;
    load(true);
  }

  function drawList() {
    const nodes = [];
    let group = null;
    for (const row of rows) {
      const of = row.name.split("/")[0], above = ABOVE[fields.order.value]?.(row);
      if (above !== undefined && above !== group) {
        group = above;
        nodes.push(h("div", { class: "group" }, shown(above)));
      }
      if (fields.order.value === "group" && of !== group) {
        group = of;
        const asked = row.prompt_number === null ? "" : ` · prompt ${row.prompt_number}${row.task ? ` of ${row.task}` : ""}`;
        nodes.push(h("div", { class: "group" }, `group ${of}`, shown(asked), " ",
          row.prompt_number === null ? null : h("a", { href: "#", onclick: (event) => { event.preventDefault(); across(row); } }, "all steps"),
          h("span", { class: "snip" }, shown(row.prompt_end.replaceAll("\n", "⏎")))));
      }
      nodes.push(rowButton(row));
    }
    if (told && rows.length < told.num) nodes.push(h("button", { class: "row", type: "button", onclick: () => { first = rows.length; load(false); } }, `show more (${told.num - rows.length})`));
    list.replaceChildren(...nodes);
  }

  const rowButton = (row) => h("button", { class: "row", type: "button", "aria-current": String(row.name === chosen), "data-name": row.name, onclick: () => choose(row) },
    h("span", { class: "head" }, h("b", { class: paid(row.reward) }, row.reward === null ? "not scored" : number(row.reward)),
      h("span", { class: "quiet" }, `${number(row.tokens)} tok · ${words(row.finish)}${row.state === "trained" ? "" : ` · ${words(row.state)}`}`)),
    h("span", { class: "snip" }, shown(row.answer_begin.replaceAll("\n", "⏎").slice(0, 140))));

  async function choose(row) {
    chosen = row.name;
    for (const button of list.querySelectorAll("button.row[data-name]")) button.setAttribute("aria-current", String(button.dataset.name === chosen));
    history.replaceState(null, "", `#/rollouts?step=${row.step}&sample=${row.name}`);
    let sample;
    try {
      sample = await get("sample", { run: state.run, step: row.step, name: row.name });
    } catch (error) {
      detail.replaceChildren(h("p", { class: "error" }, error.message));
      return;
    }
    if (chosen === row.name) drawDetail(sample);
  }

  function drawDetail(sample) {
    const colour = select(COLOURING, "Colour tokens by");
    colour.value = colouring;
    colour.addEventListener("change", () => { colouring = colour.value; drawDetail(sample); });
    const mark = h("button", { type: "button", onclick: () => { marked = sample; drawDetail(sample); } }, "compare with …");
    const against = marked && marked.name + marked.step !== sample.name + sample.step
      ? h("button", { type: "button", onclick: () => compare(marked, sample) }, `difference to ${marked.name} of step ${marked.step}`) : null;
    const story = sample.story ? h("button", { type: "button", onclick: () => tell(sample.story) }, "why it took so long") : null;
    const prompt = sample.prompt_number === null ? null : h("button", { type: "button", onclick: () => across(sample) }, "this prompt in all steps");
    const parts = Object.entries(sample.parts).map(([name, value]) => h("span", { class: "part" }, shown(name.length > 80 ? `${name.slice(0, 80)}…` : name), " ", number(value)));
    const legend = colouring === "version" || colouring === "worker" ? writers(sample, colouring) : colouring === "logprob" ? HEAT() : null;
    const origin = h("div", { class: "origin" });
    if (sample.prompt_number !== null) fillOrigin(origin, sample);
    detail.replaceChildren(
      h("div", { class: "top" },
        h("b", { class: `reward ${paid(sample.reward)}` }, sample.reward === null ? "not scored" : `reward ${number(sample.reward, 4)}`), parts,
        h("div", { class: "quiet" }, `step ${sample.step} · ${sample.name} · ${words(sample.state)} · ${number(sample.tokens)} tokens · ${words(sample.finish)} · version ${sample.versions.join(", ")} · `, shown(sample.workers.join(", "))),
        h("div", { class: "tools" }, h("label", {}, "colour ", colour), legend, mark, against, story, prompt)),
      origin,
      h("div", { class: "body" }, sample.sequences.map((spans, place) => [
        sample.sequences.length > 1 ? h("h2", {}, `training sequence ${place + 1} of ${sample.sequences.length}`) : null,
        spans.map((span) => drawSpan(span, sample, colouring, spans.length)),
      ])));
  }

  /** The row is asked for until the data is read, which the server waits for; or until something else is looked at. */
  async function fillOrigin(origin, sample) {
    let row;
    do {
      row = await get("row", { run: state.run, domain: sample.domain, prompt: sample.prompt_number }).catch(() => null);
      if (row) origin.replaceChildren(...rowOf(row));
    } while (row?.is_coming && origin.isConnected);
  }

  function compare(left, right) {
    const text = (sample) => sample.sequences.map((spans) => spans.filter((span) => span.drawn).map((span) => span.pieces.join("")).join("\n")).join("\n");
    const parts = diff(text(left), text(right)).map((part) => part.kind === "same" ? h("span", {}, shown(part.text)) : h(part.kind === "left" ? "del" : "ins", {}, shown(part.text)));
    detail.querySelector(".body").replaceChildren(
      h("p", {}, h("del", {}, `${left.name}, reward ${number(left.reward)}`), " ", h("ins", {}, `${right.name}, reward ${number(right.reward)}`)),
      h("div", { class: "span drawn", "data-who": "difference" }, parts));
  }

  async function tell(sample) {
    const body = detail.querySelector(".body");
    body.replaceChildren(h("p", { class: "quiet" }, "Reading the journal …"));
    const lines = await get("story", { run: state.run, sample }).catch((error) => [error.message]);
    body.replaceChildren(h("pre", { class: "story" }, shown(lines.join("\n"))));
  }

  async function across(row) {
    const ticket = asked += 1;
    let found;
    try {
      found = await get("prompt", { run: state.run, domain: row.domain, prompt: row.prompt_number });
    } catch (error) {
      summary.textContent = error.message;
      return;
    }
    if (ticket !== asked) return;
    summary.textContent = `prompt ${row.prompt_number}${row.task ? ` of ${row.task}` : ""}: ${found.length} answers in the steps that are kept`;
    rows = found;
    told = { ...told, num: found.length };
    const nodes = [];
    let step = null;
    for (const one of found) {
      if (one.step !== step) { step = one.step; nodes.push(h("div", { class: "group" }, `step ${step}`)); }
      nodes.push(rowButton(one));
    }
    list.replaceChildren(...nodes);
  }

  fields.step.value = state.query.get("step") ?? "";
  load(true);
  return {
    reopen() { if (state.query.get("step") && state.query.get("step") !== String(told?.step)) { fields.step.value = state.query.get("step"); chosen = null; load(true); } },
    update({ now }) {
      if (known >= 0 && now.steps !== known && !fields.step.value && first === 0 && chosen === null) load(true);
      if (told?.step !== undefined) redraw(newest, now.last_step > (told.step ?? -1) ? `newest step: ${now.last_step} »` : "newest step »");
      known = now.steps;
    },
    key(key) {
      if (key === "/") { fields.text.focus(); return true; }
      if (key !== "j" && key !== "k") return false;
      const at = rows.findIndex((row) => row.name === chosen) + (key === "j" ? 1 : -1);
      if (rows[at]) { choose(rows[at]); list.querySelector(`[data-name="${CSS.escape(rows[at].name)}"]`)?.scrollIntoView({ block: "nearest" }); }
      return true;
    },
  };
}

/** The row that the prompt was made of: the expected answer in view, the other columns behind a click. */
function rowOf(row) {
  const fields = Object.entries(row.fields);
  return [
    row.trouble ? h("p", { class: "quiet" }, shown(row.trouble)) : null,
    row.expected ? h("p", {}, h("span", { class: "quiet" }, "expected answer "), h("code", {}, shown(row.expected))) : null,
    fields.length ? h("details", {}, h("summary", {}, `the row (${fields.length} ${fields.length === 1 ? "column" : "columns"})`),
      h("dl", {}, fields.map(([name, value]) => [h("dt", {}, shown(name)), h("dd", {}, shown(value))]))) : null,
  ].filter((one) => one);
}

function drawSpan(span, sample, colouring, numSpans) {
  const rest = span.left_out ? h("div", { class: "quiet" }, `… ${number(span.left_out)} tokens are left out here: polyrl samples prints them …`) : null;
  const who = span.drawn ? "the policy" : numSpans > 2 ? "given: prompt, tool or environment" : "prompt";
  if (!span.drawn || colouring === "none" || !span.logprobs.length) return h("div", { class: `span ${span.drawn ? "drawn" : "given"}`, "data-who": who }, shown(span.pieces.join("")), rest);
  const groups = writerGroups(sample, colouring);
  const tokens = span.pieces.map((piece, place) => {
    const logprob = span.logprobs[place], writer = sample.writers[span.writers[place]];
    const title = `${logprob === undefined || logprob === null ? "" : `log-probability ${logprob.toFixed(3)}, probability ${(100 * Math.exp(logprob)).toFixed(1)}%`}${writer ? `; version ${writer.version}, ${plain(writer.worker || writer.engine)}` : ""}`;
    const kind = colouring === "logprob" ? heat(logprob) : writer ? `k${groups.indexOf(groupOf(writer, colouring)) % 8}` : "";
    return h("span", { class: kind, title }, shown(piece));
  });
  return h("div", { class: "span drawn", "data-who": who }, tokens, rest);
}

const heat = (logprob) => (logprob === undefined || logprob === null || logprob > -0.5 ? "" : `l${Math.min(5, 1 + Math.floor(-logprob / 1.5))}`);
const HEAT = () => h("span", { class: "legend" }, "probability below ", ["61%", "22%", "5%", "1%", "0.2%"].map((most, place) => h("span", { class: `l${place + 1}` }, most))); // as heat() has it
const groupOf = (writer, colouring) => (colouring === "version" ? `version ${writer.version}` : writer.worker || writer.engine);
const writerGroups = (sample, colouring) => [...new Set(sample.writers.map((writer) => groupOf(writer, colouring)))];
const writers = (sample, colouring) => h("span", { class: "legend" }, writerGroups(sample, colouring).map((name, place) => h("span", { class: `k${place % 8}` }, shown(name))));
const paid = (reward) => (reward === null ? "" : reward > 0.5 ? "good" : reward <= 0 ? "bad" : "");

function select(options, label) {
  return h("select", { "aria-label": label }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));
}

function fill(field, values, all) {
  const before = field.value, wanted = ["", ...(before && !values.includes(before) ? [before] : []), ...values];
  if (field.options.length === wanted.length && wanted.every((value, at) => field.options[at].value === value)) return;
  field.replaceChildren(...wanted.map((value) => h("option", { value }, value ? plain(value).slice(0, 80) : all)));
  field.value = before;
}
