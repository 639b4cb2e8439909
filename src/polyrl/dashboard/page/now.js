// What the run does now: progress, who waits for whom, alarms, money.

import { get } from "./api.js";
import { lineChart } from "./charts.js";
import { advice, dollars, h, number, plain, redraw, seconds, shown, table } from "./dom.js";

export function open(place, state) {
  const cards = h("div", { class: "cards" });
  const slow = h("section", { "aria-label": "What holds the run up" });
  const time = h("section", { "aria-label": "Where the time goes" });
  const alarms = h("section", { "aria-label": "Alarms" });
  const findings = h("section", { "aria-label": "Who waits for whom" });
  const rounds = h("section", { "aria-label": "Open rounds" });
  const waits = h("section", { "aria-label": "Waits" });
  const curve = h("div"), title = h("h2", {}, "Mean reward");
  place.append(cards, alarms, slow, time, h("div", { class: "two" },
    h("div", {}, h("h2", {}, "At this moment"), findings, h("h2", {}, "Open rounds"), rounds),
    h("div", {}, title, curve, waits)));
  let chart = null, drawn = -1, told = "[]", held = "", isHeld = false, said = new Set();

  async function drawCurve(run, steps) {
    if (steps === drawn || steps === 0) return;
    drawn = steps;
    const told = await get("series", { run, name: ["reward/mean", "time/step_total"], x: "step" });
    const name = told.columns["reward/mean"].some((value) => value !== null) ? "reward/mean" : "time/step_total";
    const label = name === "reward/mean" ? "Mean reward" : "Seconds a step", lines = [{ label, values: told.columns[name] }];
    if (chart && title.textContent === label) {
      chart.update(told.x, lines);
      return;
    }
    title.textContent = label;
    chart?.close();
    curve.replaceChildren();
    chart = lineChart(curve, "step", told.x, lines, { height: 190, legend: false });
  }

  return {
    close: () => chart?.close(),
    update({ now, run }) {
      const status = now.status;
      redraw(cards,
        card("steps trained", now.last_step === null ? "–" : number(now.last_step + 1), now.last_step === null ? "none is trained yet" : `${now.steps_wanted ? `of ${number(now.steps_wanted)}; ` : ""}the last is step ${number(now.last_step)}`),
        card("reward", number(now.headlines.reward), now.headlines.reward === undefined ? "" : "mean of the last step"),
        card("seconds a step", number(now.step_s ?? now.headlines.time), now.stands_s !== null ? `no step has ended for ${seconds(now.stands_s)}` : now.step_s === null ? "of the last step" : "waits and validation included"),
        card("answer length", number(now.headlines.len), now.headlines.longest === undefined ? "" : `longest ${number(now.headlines.longest)}`),
        card("workers", status ? number(status.num_workers) : "–", status ? `${status.queues.samples_running ?? 0} samples running` : `${number(now.headlines.workers)} in the last step`),
        card("spent", dollars(now.usd), now.usd_per_hour === null ? "" : `${dollars(now.usd_per_hour)} an hour now`),
      );
      const raised = JSON.stringify(now.alarms);
      if (raised !== told && redraw(alarms, ...(now.alarms.length ? [h("h2", {}, `Alarms (${now.alarms.length})`)] : []), ...now.alarms.map((one) => problem("alarm", one.name, one, !said.has(one.name + one.of))))) {
        said = new Set(now.alarms.map((one) => one.name + one.of)); // a screen reader reads an alert whenever it is put there
        told = raised;
      }
      const holds = JSON.stringify(now.slow);
      if (holds !== held && redraw(slow, ...(now.slow ? [h("h2", {}, "What holds it up"), problem("alarm slow", "", now.slow, !isHeld)] : []))) {
        held = holds;
        isHeld = now.slow !== null;
      }
      redraw(time, ...timeOf(now.time));
      redraw(findings, ...(now.findings.length ? now.findings : [{ what: { live: "the manager is being asked", simulation: "the simulation is over", over: "no process of this run is there" }[now.kind], then: "" }]).map((one) => finding(one, now.well)));
      redraw(rounds, ...(status?.rounds ?? []).map((one) => round(one, status.queues.prompts_deferred ?? 0)), ...(status?.rounds?.length ? [] : [h("p", { class: "quiet" }, "No round is open.")]));
      redraw(waits, status ? table("Waits", ["for", "of", "so far#", "ended by", "at the latest in#"], status.waits.map((one) => [
        one.what.replaceAll("_", " "), one.of, seconds(one.age_s), one.ended_by, one.given_up_in_s === null ? "as long as it takes" : h("span", { class: "left" }, seconds(Math.max(0, one.given_up_in_s))),
      ]), "waits") : "", others(status?.more_waits ?? {}));
      drawCurve(run, now.steps);
    },
  };
}

/** What was seen, why, what it costs and what to do. */
const problem = (kind, name, one, isNew) => h("div", { class: kind, role: isNew ? "alert" : "note" }, name ? [h("b", {}, name), ": "] : null, name ? advice(one.what) : h("b", {}, advice(one.what)),
  h("dl", { class: "facts" }, [["why", one.why], ["costs", one.costs], ["what to do", one.do]].filter(([, text]) => text).map(([word, text]) => [h("dt", {}, word), h("dd", {}, advice(text))]), one.run ? [h("dt", {}, "command"), h("dd", {}, h("code", { class: "command" }, shown(one.run)))] : null));

/** Waits without a line: deadlines that always run, most of them. */
function others(more) {
  const kinds = Object.entries(more), num = kinds.reduce((sum, [, count]) => sum + count, 0);
  return num ? h("p", { class: "quiet" }, `and ${number(num)} more: ${kinds.map(([what, count]) => `${number(count)} for ${what.replaceAll("_", " ")}`).join(", ")}`) : "";
}

/** Where the trainer's time of the newest steps went, as a bar and in words. */
function timeOf(parts) {
  if (!parts.length) return [];
  const some = parts.filter((one) => one.share >= 0.005), words = some.map((one) => `${one.words} ${Math.round(100 * one.share)}%`);
  const bar = h("div", { class: "timebar", role: "img", "aria-label": `The trainer's time: ${words.join(", ")}` }, some.map((one) => {
    const piece = h("i", { class: `u-${one.name.replace(" ", "-")}`, title: `${one.words}: ${seconds(one.seconds)}, ${Math.round(100 * one.share)}%` });
    piece.style.flexGrow = String(100 * one.share);
    return piece;
  }));
  const total = parts.reduce((sum, one) => sum + one.seconds, 0);
  return [h("h2", {}, "Where the trainer's time goes ", h("span", { class: "note" }, `of the last ${seconds(total)}`)), bar, h("div", { class: "legend" }, some.map((one) => h("span", {}, h("i", { class: `u-${one.name.replace(" ", "-")}` }),
    `${one.words} ${Math.round(100 * one.share)}% · ${seconds(one.seconds)}${one.usd >= 0.005 ? ` · ${dollars(one.usd)}` : ""}`)))];
}

const card = (title, value, note) => h("div", { class: "card" }, h("span", {}, title), h("b", {}, shown(String(value))), h("span", {}, shown(note)));

/** One finding: green only where the run does well. */
const finding = (one, well) => h("div", { class: `finding ${one.needs_help ? "help" : well ? "ok" : ""}` }, advice(one.what),
  one.then && h("div", { class: "quiet" }, "Next, by itself: ", advice(one.then)),
  one.do && h("div", {}, "What to do: ", advice(one.do)));

function round(one, deferred) {
  const label = `round ${one.step} (${one.kind}), ${seconds(one.age_s)}: ${one.groups_delivered} of ${one.groups} groups delivered`;
  return h("div", {}, h("label", {}, label, h("progress", { max: String(Math.max(1, one.groups)), value: String(one.groups_delivered), "aria-label": label })),
    h("p", { class: "quiet" }, `samples: ${one.samples_waiting} waiting, ${one.samples_running} running, ${one.samples_generated} generated`,
      deferred ? `; ${number(deferred)} prompts are deferred to a long round` : "",
      one.episodes_playing || one.episodes_unhosted ? `; episodes: ${one.episodes_playing} with their environment, ${one.episodes_unhosted} without a host` : "",
      one.longest_tokens ? `; the longest has ${number(one.longest_tokens)} tokens, on ${plain(one.longest_on)}` : ""));
}
