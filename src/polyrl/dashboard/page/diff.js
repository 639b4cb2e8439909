// The difference of two texts, word by word; in scripts without spaces, and of signs, character by character.

const MOST = 4000;
const WORD = /\s+|[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]|[[\p{L}\p{M}\p{N}_]--[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]]+|[^]/gv;

/** Return [{kind: "same" | "left" | "right", text}]; of long texts, only the ends that differ are compared word by word. */
export function diff(left, right) {
  const a = left.match(WORD) ?? [], b = right.match(WORD) ?? [];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const one = a.slice(start, a.length - end), other = b.slice(start, b.length - end);
  const middle = one.length * other.length > MOST * MOST / 4 || one.length > MOST || other.length > MOST
    ? [{ kind: "left", text: one.join("") }, { kind: "right", text: other.join("") }]
    : common(one, other);
  return [{ kind: "same", text: a.slice(0, start).join("") }, ...middle, { kind: "same", text: end ? a.slice(-end).join("") : "" }].filter((part) => part.text);
}

function common(a, b) {
  const width = b.length + 1, length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
  }
  const parts = [];
  const add = (kind, text) => { if (parts.at(-1)?.kind === kind) parts.at(-1).text += text; else parts.push({ kind, text }); };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("same", a[i]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && length[(i + 1) * width + j] >= length[i * width + j + 1])) { add("left", a[i]); i += 1; }
    else { add("right", b[j]); j += 1; }
  }
  return parts;
}
