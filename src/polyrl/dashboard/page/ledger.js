// What became of every prompt, sample, token and dollar.

import { get } from "./api.js";
import { dollars, h, number, shown, table } from "./dom.js";

export function open(place, state) {
  const body = h("div", {}, h("p", { class: "quiet" }, "Reading the journal …"));
  place.append(body);
  let isOpen = true, known = -1;

  async function load() {
    try {
      const told = await get("ledger", { run: state.run });
      if (!isOpen) return;
      body.replaceChildren(
        h("div", { class: "cards" }, [["trainer", told.usd.trainer], ["workers", told.usd.workers], ["hosts", told.usd.hosts], ["reward workers", told.usd.reward_workers], ["in all", told.usd.total], ["a step", told.usd.per_step], ["a million tokens", told.usd.per_mtok]]
          .map(([title, usd]) => h("div", { class: "card" }, h("span", {}, title), h("b", {}, dollars(usd))))),
        h("div", { class: "two" }, became("Prompts", told.prompts), became("Samples", told.samples), became("Tokens", told.tokens), became("Episodes", told.episodes), became("Dollars", told.dollars, dollars)),
        h("h2", {}, "As ", h("code", {}, "polyrl ledger"), " prints it"), h("pre", { class: "ledger", tabindex: "0" }, shown(told.text)));
    } catch (error) {
      body.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }

  load();
  return {
    close: () => { isOpen = false; },
    update({ now }) { if (known >= 0 && now.steps !== known) load(); known = now.steps; },
  };
}

function became(title, counts, show = number) {
  const rows = [];
  for (const [name, value] of Object.entries(counts)) {
    if (value !== null && typeof value === "object") for (const [cause, num] of Object.entries(value)) rows.push([`${name.replaceAll("_", " ")}: ${cause.replaceAll("_", " ")}`, show(num)]);
    else rows.push([name.replaceAll("_", " "), show(value)]);
  }
  const some = rows.filter((row) => row[1] !== show(0));
  return some.length ? h("div", {}, table(title, ["", show === number ? "number#" : "$#"], some)) : null;
}
