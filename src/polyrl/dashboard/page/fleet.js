// Workers, hosts and reward workers: what they are at, how fast, what they cost; and asking one to leave.

import { drain, get } from "./api.js";
import { dollars, h, number, plain, redraw, seconds, shown, table } from "./dom.js";

const ROWS = 100;

export function open(place, state) {
  const workers = h("section", { "aria-label": "Workers" }), hosts = h("section", { "aria-label": "Hosts" }), note = h("p", { role: "status" });
  const filter = h("input", { type: "search", placeholder: "name, state or engine", "aria-label": "Workers that contain" }), pages = h("span", { class: "inline" });
  const token = h("input", { type: "password", autocomplete: "off", "aria-label": "Admin token" });
  const dialog = h("dialog", { "aria-label": "Drain" });
  place.append(h("div", { class: "filters" }, h("label", {}, "workers", filter), pages), note, workers, hosts, dialog);
  let busy = false, first = 0, asked = 0, isOpen = true, drawnAt = null;
  dialog.addEventListener("close", () => { token.value = ""; busy = false; }); // however it was closed, the token is not kept
  filter.addEventListener("input", () => { first = 0; load(); });

  function ask(kind, name) {
    const close = () => dialog.close();
    const act = async () => {
      try {
        await drain(kind, name, token.value.trim());
        note.textContent = `${plain(name)} was asked to hand everything over and leave.`;
      } catch (error) {
        note.textContent = `${plain(name)}: ${error.message}; draining needs the text of RUN/admin.token`;
      }
      close();
    };
    busy = true;
    dialog.replaceChildren(h("h2", {}, "Drain ", shown(name), "?"), h("p", {}, "It hands over what it writes and leaves. Nothing is lost. This needs the admin token (RUN/admin.token), which this page does not keep."),
      h("p", {}, token), h("p", {}, h("button", { type: "button", onclick: act }, "Drain"), " ", h("button", { type: "button", onclick: close }, "Leave it")));
    dialog.showModal();
  }

  const leave = (kind, name) => !state.runs[state.run]?.drains ? "" : h("button", { type: "button", "aria-label": `Drain ${plain(name)}`, onclick: () => ask(kind, name) }, "drain");

  async function load() {
    const ticket = asked += 1;
    let told;
    try {
      told = await get("fleet", { run: state.run, text: filter.value, first, most: ROWS });
    } catch (error) {
      note.textContent = error.message;
      return;
    }
    if (ticket !== asked || !isOpen || busy) return;
    draw(told);
  }

  function draw(told) {
    const button = (text, to) => h("button", { type: "button", "aria-label": text, onclick: () => { first = to; load(); } }, text);
    redraw(pages, ...(told.num > ROWS ? [h("span", { class: "quiet" }, `${number(first + 1)} to ${number(first + told.workers.length)} of ${number(told.num)}`)] : []),
      ...(first > 0 ? [button("workers before", Math.max(0, first - ROWS))] : []), ...(first + ROWS < told.num ? [button("workers after", first + ROWS)] : []));
    const caption = told.num === told.num_all ? `${number(told.num)} workers` : `${number(told.num)} of ${number(told.num_all)} workers`;
    if (!told.is_there) { redraw(workers, h("p", { class: "quiet" }, { live: "Asking the manager …", simulation: "The simulation had these workers." }[state.now?.kind] ?? "This run has no manager any more; its journal tells of these workers."), ...(told.num_all ? [had(caption, told.workers)] : [])); hosts.replaceChildren(); return; }
    redraw(workers, table(caption, ["worker", "state", "engine", "version#", "running#", "tokens/s#", "KV used#", "$/h#", "$#", "heard#", ""], told.workers.map((one) => [
      one.name + (one.spot ? " (spot)" : ""), doing(one), one.engine, one.version, `${one.running} of ${one.slots}`, number(one.tokens_per_s), `${Math.round(100 * one.kv_used)}%`,
      one.price_usd_per_hour.toFixed(2), dollars(one.usd), seconds(one.last_heard_s), one.local ? "" : leave("worker", one.name),
    ])));
    redraw(hosts, ...[
      told.hosts.length ? table(`${told.hosts.length} hosts`, ["host", "state", "environment", "playing#", "$/h#", "$#", "heard#", ""], told.hosts.map((one) => [
        one.name, one.draining ? "draining" : one.connected ? "connected" : "away", one.environment, `${one.playing} of ${one.slots}`, one.price_usd_per_hour.toFixed(2), dollars(one.usd), seconds(one.last_heard_s), leave("host", one.name),
      ])) : "",
      told.reward_workers.length ? table(`${told.reward_workers.length} reward workers`, ["reward worker", "state", "busy#", "scored#", "failed#", "heard#", ""], told.reward_workers.map((one) => [
        one.name, one.connected ? one.state : `${one.state}, away`, `${one.running} of ${one.places}`, number(one.scored), number(one.failed), seconds(one.last_heard_s), leave("reward-worker", one.name),
      ])) : "",
      told.turned_away.length ? table("Turned away", ["worker", "why", "ago#"], told.turned_away.map((one) => [one.name, one.why, seconds(one.ago_s)])) : "",
    ]);
  }

  return {
    close: () => { isOpen = false; },
    update({ now }) {
      const at = now.status ? now.status.now_s : now.read;
      if (at !== drawnAt && !busy) { drawnAt = at; load(); }
    },
    key(key) { if (key === "/") { filter.focus(); return true; } return false; },
  };
}

const had = (caption, rows) => table(caption, ["worker", "state", "joined#", "lost#", "time#", "$/h#", "$#", "why it went"], rows.map((one) => [
  one.name + (one.spot ? " (spot)" : ""), one.state, one.joined, one.lost, seconds(one.seconds), one.price_usd_per_hour.toFixed(2), dollars(one.usd), one.why,
]));

const doing = (one) => [one.connected ? one.state : `${one.state}, away`, one.pulling >= 0 ? `pulls ${one.pulling} from ${one.source || "the trainer"}` : "", one.duty === "generating" ? "" : one.duty].filter(Boolean).join("; ");
