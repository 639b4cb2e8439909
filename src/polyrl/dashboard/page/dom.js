// Elements, text that is safe to look at, and numbers as people read them.

/** Make an element. A string among the children is text, never markup. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

// Control characters, and those that turn the direction of a text or are not seen: fillers, and the tags that hide a text.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]/u;

/** Return a text as nodes, with what would not be seen written out. */
export function shown(text) {
  if (!UNSEEN.test(text)) return [text];
  const nodes = [];
  for (const part of text.split(new RegExp(`(${UNSEEN.source})`, "u"))) {
    if (!part) continue;
    if (UNSEEN.test(part)) nodes.push(h("span", { class: "ctl" }, `\\u{${part.codePointAt(0).toString(16)}}`));
    else nodes.push(part);
  }
  return nodes;
}

/** Return advice as nodes: what stands between backticks is code. */
export const advice = (text) => text.split("`").map((part, place) => place % 2 ? h("code", {}, shown(part)) : shown(part));

/** Return a text for places that take no nodes: titles, options, accessible names. */
export const plain = (text) => text.replace(new RegExp(UNSEEN.source, "gu"), (one) => `\\u{${one.codePointAt(0).toString(16)}}`);

/** Draw the children of an element anew, as happens every second: what somebody marks there stays until they let go, and the focus goes to what has the same name. Returns whether it was drawn. */
export function redraw(element, ...children) {
  const marked = getSelection(), focused = document.activeElement;
  if (!marked.isCollapsed && element.contains(marked.anchorNode)) return false;
  const label = element.contains(focused) ? focused.getAttribute("aria-label") : null;
  element.replaceChildren(...children);
  if (label) element.querySelector(`[aria-label="${CSS.escape(label)}"]`)?.focus({ preventScroll: true });
  return true;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 600) return `${value.toFixed(0)} s`;
  return value < 4 * 3600 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

export const dollars = (value) =>
  value === null || value === undefined ? "–" : `$${value >= 0.1 || value === 0 ? value.toFixed(2) : value.toFixed(4)}`;

/** A table: titles, where a title that ends with # is a column of numbers, and rows of cells. `kind`: a class for its look. */
export function table(caption, titles, rows, kind = "") {
  const isNumber = titles.map((title) => title.endsWith("#"));
  return h("div", { class: `scroll ${kind}`, role: "region", tabindex: "0", "aria-label": `Table: ${caption}` }, h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, titles.map((title, place) =>
      title ? h("th", { scope: "col", class: isNumber[place] ? "num" : "" }, title.replace(/#$/, "")) : h("td")))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) =>
      h("td", { class: isNumber[place] ? "num" : "" }, cell instanceof Node ? cell : shown(String(cell)))))))));
}
