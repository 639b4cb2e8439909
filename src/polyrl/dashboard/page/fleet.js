// Workers, hosts and reward workers: what they are at, how fast, what they cost; and asking one to leave.

import { drain } from "./api.js";
import { dollars, h, number, seconds, table } from "./dom.js";

export function open(place) {
  const workers = h("section", { "aria-label": "Workers" }), hosts = h("section", { "aria-label": "Hosts" }), note = h("p", { role: "status" });
  const token = h("input", { type: "password", autocomplete: "off", "aria-label": "Admin token" });
  const dialog = h("dialog");
  place.append(note, workers, hosts, dialog);
  let busy = false;
  dialog.addEventListener("close", () => { token.value = ""; busy = false; }); // however it was closed, the token is not kept

  function ask(kind, name) {
    const close = () => dialog.close();
    const act = async () => {
      try {
        await drain(kind, name, token.value.trim());
        note.textContent = `${name} was asked to hand everything over and leave.`;
      } catch (error) {
        note.textContent = `${name}: ${error.message}; draining needs the text of RUN/admin.token`;
      }
      close();
    };
    busy = true;
    dialog.replaceChildren(h("h2", {}, `Drain ${name}?`), h("p", {}, "It hands over what it writes and leaves. Nothing is lost. This needs the admin token (RUN/admin.token), which this page does not keep."),
      h("p", {}, token), h("p", {}, h("button", { type: "button", onclick: act }, "Drain"), " ", h("button", { type: "button", onclick: close }, "Leave it")));
    dialog.showModal();
  }

  const leave = (kind, name) => h("button", { type: "button", "aria-label": `Drain ${name}`, onclick: () => ask(kind, name) }, "drain");

  return {
    update(state) {
      const at = place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
      draw(state);
      if (at && !busy) place.querySelector(`button[aria-label="${CSS.escape(at)}"]`)?.focus(); // the tables are new, the place is not
    },
  };

  function draw({ now }) {
    if (busy) return;
    const status = now.status;
    if (!status) { workers.replaceChildren(h("p", { class: "quiet" }, now.kind === "live" ? "Asking the manager …" : "This run has no manager any more: the timeline and the ledger have its fleet.")); return; }
    const rows = [...status.workers].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    workers.replaceChildren(table(`${rows.length} workers`, ["worker", "state", "engine", "version#", "running#", "tokens/s#", "KV used#", "$/h#", "$#", "heard#", ""], rows.slice(0, 1000).map((one) => [
      one.name + (one.spot ? " (spot)" : ""), state(one), one.engine, one.version, `${one.running} of ${one.slots}`, number(one.tokens_per_s), `${Math.round(100 * one.kv_used)}%`,
      one.price_usd_per_hour.toFixed(2), dollars(one.usd), seconds(one.last_heard_s), leave("worker", one.name),
    ])));
    hosts.replaceChildren(status.hosts.length ? table(`${status.hosts.length} hosts`, ["host", "state", "environment", "playing#", "$/h#", "$#", "heard#", ""], status.hosts.map((one) => [
      one.name, one.draining ? "draining" : one.connected ? "connected" : "away", one.environment, `${one.playing} of ${one.slots}`, one.price_usd_per_hour.toFixed(2), dollars(one.usd), seconds(one.last_heard_s), leave("host", one.name),
    ])) : "");
    if (status.reward_workers.length) hosts.append(table(`${status.reward_workers.length} reward workers`, ["reward worker", "state", "busy#", "scored#", "failed#", "heard#", ""], status.reward_workers.map((one) => [
      one.name, one.connected ? one.state : `${one.state}, away`, `${one.running} of ${one.places}`, number(one.scored), number(one.failed), seconds(one.last_heard_s), leave("reward-worker", one.name),
    ])));
    if (status.turned_away.length) hosts.append(table("Turned away", ["worker", "why", "ago#"], status.turned_away.map((one) => [one.name, one.why, seconds(one.ago_s)])));
  }
}

const state = (one) => [one.connected ? one.state : `${one.state}, away`, one.pulling >= 0 ? `pulls ${one.pulling} from ${one.source || "the trainer"}` : "", one.duty === "generating" ? "" : one.duty].filter(Boolean).join("; ");
