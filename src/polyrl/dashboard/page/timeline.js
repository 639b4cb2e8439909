// Who did what when: every worker, host and the trainer, from hours down to one sample.

import { get } from "./api.js";
import { h, plain, seconds, shown } from "./dom.js";

const ROW = 22, TOP = 24, ROWS = 60;
const LOOKS = {
  generating: ["#3a86c8", "generating, or playing"], training: ["#e69f00", "training"], validating: ["#8c6bb1", "validating"],
  idle: ["#a8adb3", "idle"], pulling: ["#009e73", "pulling weights"], starting: ["#cc79a7", "starting"],
  draining: ["#d55e00", "draining"], switching: ["#c9b400", "switching"],
};
const ENDINGS = { finished: "#ffffff", moved: "#ffe08a", stopped: "#c8c8c8", lost: "#ff5a5f", "": "#d6ecff" };

export function open(place, state) {
  const names = h("div", { class: "names", "aria-hidden": "true" });
  const canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": "Timeline of the fleet" });
  const status = h("p", { class: "quiet", role: "status" });
  const story = h("div", { class: "beside", role: "region", "aria-label": "Story of a sample", tabindex: "0" });
  const sample = h("input", { type: "search", placeholder: "GROUP/INDEX", "aria-label": "Tell the story of sample", size: "12" });
  sample.addEventListener("change", () => sample.value && tell(sample.value.trim()));
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  const pages = h("span");
  place.append(
    h("div", { class: "filters" }, button("whole run", () => { view = [0, 0]; load(); }), button("zoom in (+)", () => zoom(0.5)), button("zoom out (−)", () => zoom(2)),
      button("‹ earlier", () => pan(-0.5)), button("later ›", () => pan(0.5)), pages, h("label", {}, "story of sample", sample)),
    h("div", { class: "legend" }, Object.values(LOOKS).map(([colour, words]) => legend(colour, words)), legend("#e0218a", "✕ gone without handing over"), legend("#5b6570", "| left")),
    h("div", { class: "told" }, h("div", {}, h("div", { class: "timeline" }, names, canvas), status), story));
  let view = [0, 0], told = null, first = 0, timer = null, drag = null, read = 1;

  async function load() {
    try {
      told = await get("timeline", { run: state.run, from: view[0], to: view[1] || "", first, most: ROWS });
    } catch (error) {
      status.textContent = error.message;
      return;
    }
    draw();
  }

  function draw() {
    const width = Math.max(240, canvas.parentElement.clientWidth - names.offsetWidth - 2), height = TOP + ROW * told.rows.length + 8;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`; canvas.style.width = `${width}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const span = Math.max(1e-6, told.to_s - told.from_s), x = (at) => ((at - told.from_s) / span) * width;
    pen.font = "11px system-ui";
    for (const tick of ticks(told.from_s, told.to_s, Math.floor(width / 110))) {
      pen.fillStyle = style.getPropertyValue("--quiet");
      pen.fillText(clock(tick, span), x(tick) + 3, 14);
      pen.fillStyle = style.getPropertyValue("--line");
      pen.fillRect(x(tick), 0, 1, height);
    }
    told.rows.forEach((row, place) => {
      const y = TOP + place * ROW;
      for (const [start, end, what] of row.spans) {
        pen.fillStyle = LOOKS[what]?.[0] ?? "#777";
        pen.fillRect(x(start), y + 3, Math.max(0.6, x(end) - x(start)), ROW - 6);
      }
      const lanes = [], near = row.leases.length && (span / width) * 4 < median(row.leases.map(([start, end]) => (end ?? told.to_s) - start));
      for (const [start, end, , , ending] of near ? row.leases : []) {
        const until = end ?? told.to_s;
        let lane = lanes.findIndex((at) => at <= start);
        if (lane < 0) lane = lanes.length;
        lanes[lane] = until;
        const thick = Math.max(1, Math.min(4, (ROW - 8) / Math.max(1, Math.min(14, row.leases.length))));
        pen.fillStyle = ENDINGS[ending] ?? "#fff";
        pen.fillRect(x(start) + 0.5, y + 4 + (lane * thick) % (ROW - 9), Math.max(1, x(until) - x(start) - 1), Math.max(1, thick - 0.6));
      }
      for (const [at, how] of row.ends) {
        pen.fillStyle = how === "lost" ? "#e0218a" : style.getPropertyValue("--quiet");
        pen.font = "bold 14px system-ui";
        pen.fillText(how === "lost" ? "✕" : "|", x(at) - 5, y + 16);
      }
    });
    names.replaceChildren(...told.rows.map((row) => h("div", { title: `${plain(row.name)} (${row.kind})` }, shown(row.kind === "local" ? `${row.name}, engine` : row.name))));
    const gone = told.rows.reduce((sum, row) => sum + row.ends.filter((end) => end[1] === "lost").length, 0);
    const text = `${seconds(told.from_s)} to ${seconds(told.to_s)} of ${seconds(told.run_s)}; rows ${first + 1} to ${first + told.rows.length} of ${told.num_rows}; ${gone} lost in view. Drag to zoom, double-click for the whole run, zoom in to click on a sample.`;
    status.textContent = text;
    canvas.setAttribute("aria-label", `Timeline of the fleet, ${text}`);
    pages.replaceChildren(
      ...(first > 0 ? [button("rows before", () => { first = Math.max(0, first - ROWS); load(); })] : []),
      ...(first + told.rows.length < told.num_rows ? [button("rows after", () => { first += ROWS; load(); })] : []));
  }

  const at = (event) => { const box = canvas.getBoundingClientRect(); return { s: told.from_s + ((event.clientX - box.left) / box.width) * (told.to_s - told.from_s), row: Math.floor((event.clientY - box.top - TOP) / ROW) }; };

  function zoom(by) {
    if (!told) return;
    const middle = (told.from_s + told.to_s) / 2, half = Math.max(0.05, ((told.to_s - told.from_s) / 2) * by);
    view = [Math.max(0, middle - half), Math.min(told.run_s, middle + half)];
    load();
  }

  function pan(by) {
    if (!told) return;
    const width = told.to_s - told.from_s, from = Math.min(Math.max(0, told.from_s + by * width), told.run_s - width);
    view = [from, from + width];
    load();
  }

  async function click(event) {
    const { s, row } = at(event), found = told.rows[row];
    if (!found) return;
    const end = found.ends.find(([when]) => Math.abs(when - s) < (told.to_s - told.from_s) / 80);
    if (end) { story.replaceChildren(h("p", {}, `${plain(found.name)} was ${end[1]} at ${seconds(end[0])}: `, shown(end[2] || "no reason is known"))); return; }
    const lease = found.leases.filter(([start, until]) => start <= s && (until ?? told.to_s) >= s).sort((a, b) => (b[1] ?? 1e18) - (a[1] ?? 1e18))[0];
    if (!lease) { story.replaceChildren(h("p", { class: "quiet" }, found.leases.length ? "No sample runs there at that moment." : "Too many samples to be told apart: zoom in.")); return; }
    tell(lease[2]);
  }

  async function tell(sample) {
    story.replaceChildren(h("p", { class: "quiet" }, "Reading the journal …"));
    const lines = await get("story", { run: state.run, sample }).catch((error) => [error.message]);
    story.replaceChildren(h("h2", {}, `Sample ${sample}`), h("pre", { class: "story" }, shown(lines.join("\n"))));
    draw(); // the picture has become narrower
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (!told) return;
    drag = { ...at(event), x: event.clientX };
    canvas.setPointerCapture(event.pointerId); // a drag may end beside the picture
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag || !told) return;
    const until = at(event);
    if (Math.abs(event.clientX - drag.x) < 5) click(event);
    else { view = [Math.min(drag.s, until.s), Math.max(drag.s, until.s)].map((one) => Math.max(0, one)); load(); }
    drag = null;
  });
  canvas.addEventListener("dblclick", () => { view = [0, 0]; load(); });
  const resized = () => told && draw();
  addEventListener("resize", resized);
  load();
  timer = setInterval(() => { if (state.now?.kind === "live" && view[1] === 0) load(); else if (state.now && state.now.read < 1) load(); }, 3000);
  return {
    close: () => { clearInterval(timer); removeEventListener("resize", resized); },
    update: ({ now }) => {
      if (now.read === 1 && (read < 1 || told?.num_rows === 0)) load(); // the last of it was read
      read = now.read;
    },
    key(key) {
      const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.5), ArrowRight: () => pan(0.5), 0: () => { view = [0, 0]; load(); } }[key];
      act?.();
      return Boolean(act);
    },
  };
}

function legend(colour, words) {
  const mark = h("i");
  mark.style.background = colour;
  return h("span", {}, mark, words);
}

const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** A moment of the run, as fine as the picture needs it. */
function clock(at, span) {
  const s = at % 60, m = Math.floor(at / 60) % 60, hours = Math.floor(at / 3600);
  if (span < 60) return `${at.toFixed(span < 5 ? 2 : 0)} s`;
  const tail = span < 1800 ? `:${String(Math.round(s)).padStart(2, "0")}` : "";
  return hours || !tail ? `${hours}h ${String(m).padStart(2, "0")}${tail || "m"}` : `${m}${tail} min`;
}

function ticks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const step = STEPS.find((one) => one >= rough) ?? 86400;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
  return found;
}
