// Who did what when: every worker, host and the trainer, from hours down to one sample.

import { get } from "./api.js";
import { h, number, plain, redraw, shown } from "./dom.js";

const ROW = 22, TOP = 24, ROWS = 60, LANE = 11, MOST_LANES = 600;
const LOOKS = {
  generating: ["#3a86c8", "generating, or playing"], training: ["#e69f00", "training"], validating: ["#8c6bb1", "validating"],
  idle: ["#a8adb3", "idle"], pulling: ["#009e73", "pulling weights"], starting: ["#cc79a7", "starting"],
  draining: ["#d55e00", "draining"], switching: ["#c9b400", "switching"],
};
const ENDINGS = { finished: ["#56b4e9", "sample finished"], moved: ["#f0c419", "moved on"], stopped: ["#8b939c", "stopped"], lost: ["#e0218a", "lost"], "": ["#009e73", "still there"] };

export function open(place, state) {
  const names = h("div", { class: "names" });
  const canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": "Timeline of the fleet" });
  const status = h("p", { class: "quiet", role: "status" });
  const story = h("div", { class: "beside", role: "region", "aria-label": "Story of a sample", tabindex: "0" });
  const sample = h("input", { type: "search", placeholder: "GROUP/INDEX", "aria-label": "Tell the story of sample", size: "12" });
  sample.addEventListener("change", () => sample.value && tell(sample.value.trim()));
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  const pages = h("span");
  const ends = h("div", { class: "legend" }, Object.values(ENDINGS).map(([colour, words]) => legend(colour, words)));
  place.append(
    h("div", { class: "filters" }, button("whole run", () => { view = [0, 0]; load(); }), button("zoom in (+)", () => zoom(0.5)), button("zoom out (−)", () => zoom(2)),
      button("‹ earlier", () => pan(-0.5)), button("later ›", () => pan(0.5)), pages, h("label", {}, "story of sample", sample)),
    h("div", { class: "legend" }, Object.values(LOOKS).map(([colour, words]) => legend(colour, words)), legend("#e0218a", "✕ gone without handing over"), legend("#5b6570", "| left")),
    h("div", { class: "told" }, h("div", {}, h("div", { class: "timeline" }, names, canvas), status, ends), story));
  let view = [0, 0], told = null, first = 0, timer = null, drag = null, read = 1;
  let opened = null, tops = [], lanes = [], chosen = ""; // the row whose samples lie below it, one lane each; the sample whose story is told

  async function load() {
    try {
      told = await get("timeline", { run: state.run, from: view[0], to: view[1] || "", first, most: ROWS, open: opened });
    } catch (error) {
      status.textContent = error.message;
      return;
    }
    draw();
  }

  function draw() {
    const row = told.rows.find(isOpened);
    lanes = row ? laid(row.leases, told.to_s) : [];
    const numLanes = Math.min(MOST_LANES, 1 + Math.max(-1, ...lanes)), sizes = told.rows.map((one) => (one === row ? ROW + LANE * numLanes : ROW));
    tops = sizes.map((_, place) => TOP + sizes.slice(0, place).reduce((sum, one) => sum + one, 0));
    drawNames(sizes);
    const width = Math.max(240, canvas.parentElement.clientWidth - names.offsetWidth - 2), height = TOP + sizes.reduce((sum, one) => sum + one, 0) + 8;
    const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`; canvas.style.width = `${width}px`;
    pen.scale(scale, scale);
    const style = getComputedStyle(document.documentElement), paper = { pen, width, height, quiet: style.getPropertyValue("--quiet"), line: style.getPropertyValue("--line"), text: style.getPropertyValue("--text") };
    paper.x = (at) => ((at - told.from_s) / Math.max(1e-6, told.to_s - told.from_s)) * width;
    drawTicks(paper, told);
    told.rows.forEach((one, place) => drawRow(paper, one, tops[place]));
    if (row) drawSamples(paper, row, tops[told.rows.indexOf(row)] + ROW);
    if (drag) drawMarked(paper);
    ends.hidden = !row;
    say(row);
  }

  /** The part that a drag has marked so far. */
  function drawMarked({ pen, x, height, text }) {
    const [from, to] = [x(drag.s), x(drag.until)].sort((a, b) => a - b);
    pen.globalAlpha = 0.2;
    pen.fillStyle = text;
    pen.fillRect(from, 0, to - from, height);
    pen.globalAlpha = 1;
  }

  function drawNames(sizes) {
    redraw(names, ...told.rows.map((row, place) => {
      const name = row.kind === "local" ? `${row.name}, engine` : row.name, label = `Samples of ${plain(row.name)}`;
      const made = row.num_leases || isOpened(row) ? h("button", { type: "button", "aria-label": label, "aria-expanded": String(isOpened(row)), title: `${plain(row.name)} (${row.kind})`, onclick: () => unfold(row.name) }, shown(name)) : h("div", { title: `${plain(row.name)} (${row.kind})` }, shown(name));
      made.style.marginBottom = `${sizes[place] - ROW}px`;
      return made;
    }));
  }

  function drawSamples({ pen, x, text }, row, top) {
    pen.font = "9px system-ui";
    row.leases.forEach(([start, end, name, , ending], place) => {
      const from = Math.max(0, x(start)), long = Math.max(1, x(end ?? told.to_s) - from - 1), y = top + LANE * (lanes[place] % MOST_LANES);
      pen.fillStyle = ENDINGS[ending]?.[0] ?? "#777";
      pen.fillRect(from, y, long, LANE - 2);
      if (name === chosen) { pen.strokeStyle = text; pen.lineWidth = 2; pen.strokeRect(from, y, long, LANE - 2); }
      if (long > 8 + 5.5 * name.length) { pen.fillStyle = "#14171b"; pen.fillText(name, from + 3, y + LANE - 3); }
    });
  }

  function say(row) {
    const gone = told.rows.reduce((sum, one) => sum + one.ends.filter((end) => end[1] === "lost").length, 0), span = told.to_s - told.from_s;
    const samples = !row ? "Click on a row for its samples." : row.leases.length ? `${row.name}: ${number(row.num_leases)} samples; click on one for its story.` : row.num_leases ? `${row.name}: ${number(row.num_leases)} samples, too many to be drawn: zoom in.` : `${row.name}: no samples.`;
    const text = `${clock(told.from_s, span)} to ${clock(told.to_s, span)} of ${clock(told.run_s, span)}; rows ${first + 1} to ${first + told.rows.length} of ${told.num_rows}; ${gone} lost in view. Drag to zoom, double-click for the whole run. ${samples}`;
    status.replaceChildren(...shown(text));
    canvas.setAttribute("aria-label", `Timeline of the fleet, ${plain(text)}`);
    pages.replaceChildren(
      ...(first > 0 ? [button("rows before", () => { first = Math.max(0, first - ROWS); load(); })] : []),
      ...(first + told.rows.length < told.num_rows ? [button("rows after", () => { first += ROWS; load(); })] : []));
  }

  const isOpened = (row) => row.name === opened && (row.kind === "worker" || row.kind === "local"); // the trainer's row may have its worker's name

  function unfold(name) {
    opened = opened === name ? null : name;
    return load();
  }

  const at = (event) => {
    const box = canvas.getBoundingClientRect(), y = event.clientY - box.top, row = tops.findLastIndex((top) => top <= y);
    return { s: told.from_s + ((event.clientX - box.left) / box.width) * (told.to_s - told.from_s), row, lane: Math.floor((y - tops[row] - ROW) / LANE) };
  };

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
    const { s, row, lane } = at(event), found = told.rows[row];
    if (!found) return;
    const end = found.ends.find(([when]) => Math.abs(when - s) < (told.to_s - told.from_s) / 80);
    if (lane < 0 && end) {
      beside(h("p", {}, `${plain(found.name)} was ${end[1]} at ${clock(end[0], told.to_s - told.from_s)}: `, shown(end[2] || "no reason is known")));
      return;
    }
    if (lane < 0) { if (found.num_leases || isOpened(found)) unfold(found.name); return; }
    const off = ([start, until]) => Math.max(0, start - s, s - (until ?? told.to_s)); // some are no wider than a line
    const near = found.leases.filter((_, place) => lanes[place] % MOST_LANES === lane).sort((one, other) => off(one) - off(other))[0];
    if (near && off(near) < ((told.to_s - told.from_s) * 5) / canvas.clientWidth) tell(near[2]);
  }

  function beside(...nodes) {
    story.replaceChildren(...nodes);
    draw(); // the picture has become narrower
  }

  async function tell(name) {
    chosen = name;
    beside(h("p", { class: "quiet" }, "Reading the journal …"));
    const lines = await get("story", { run: state.run, sample: name }).catch((error) => [error.message]);
    beside(h("h2", {}, `Sample ${name}`), h("pre", { class: "story" }, shown(lines.join("\n"))));
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (!told) return;
    drag = { ...at(event), x: event.clientX, until: at(event).s };
    canvas.setPointerCapture(event.pointerId); // a drag may end beside the picture
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    drag.until = at(event).s;
    draw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); }); // a finger that scrolls the page
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const from = drag, until = at(event);
    drag = null;
    if (Math.abs(event.clientX - from.x) < 5) click(event);
    else { view = [Math.min(from.s, until.s), Math.max(from.s, until.s)].map((one) => Math.max(0, one)); load(); }
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

/** The lane of each lease: the first that is free when it begins. */
function laid(leases, now) {
  const until = [], found = new Array(leases.length);
  for (const place of leases.map((_, one) => one).sort((a, b) => leases[a][0] - leases[b][0])) {
    const lane = until.findIndex((at) => at <= leases[place][0]);
    found[place] = lane < 0 ? until.length : lane;
    until[found[place]] = leases[place][1] ?? now;
  }
  return found;
}

function drawTicks({ pen, x, width, height, quiet, line }, { from_s, to_s }) {
  pen.font = "11px system-ui";
  for (const tick of ticks(from_s, to_s, Math.floor(width / 110))) {
    pen.fillStyle = quiet;
    pen.fillText(clock(tick, to_s - from_s), x(tick) + 3, 14);
    pen.fillStyle = line;
    pen.fillRect(x(tick), 0, 1, height);
  }
}

function drawRow({ pen, x, quiet }, row, y) {
  for (const [start, end, what] of row.spans) {
    pen.fillStyle = LOOKS[what]?.[0] ?? "#777";
    pen.fillRect(x(start), y + 3, Math.max(0.6, x(end) - x(start)), ROW - 6);
  }
  for (const [at, how] of row.ends) {
    pen.fillStyle = how === "lost" ? "#e0218a" : quiet;
    pen.font = "bold 14px system-ui";
    pen.fillText(how === "lost" ? "✕" : "|", x(at) - 5, y + 16);
  }
}

function legend(colour, words) {
  const mark = h("i");
  mark.style.background = colour;
  return h("span", {}, mark, words);
}

const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** A moment of the run, as fine as the picture needs it. */
function clock(at, span) {
  const s = at % 60, m = Math.floor(at / 60) % 60, hours = Math.floor(at / 3600);
  if (span < 60) return `${Number(at.toFixed(span < 5 ? 2 : 1))} s`;
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
