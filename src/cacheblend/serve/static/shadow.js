// Checked answers over time, where the server compares some with full prefill.

import { shadow } from "./api.js";
import { byId } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, EDGE, EVERY_MS] = [600, 160, 30, 5000];

// By comparison, not by the clock: a server may have none for hours.
function curve(values, kind) {
  const step = (WIDTH - EDGE) / Math.max(1, values.length - 1);
  const at = (value, number) => `${(EDGE + number * step).toFixed(1)},${(5 + (HEIGHT - 10) * (1 - value)).toFixed(1)}`;
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("class", kind);
  line.setAttribute("points", values.map((value, number) => (value === null ? "" : at(value, number))).join(" ").trim());
  return line;
}

function scale(value) {
  const text = document.createElementNS(SVG, "text");
  text.setAttribute("x", "0");
  text.setAttribute("y", String(9 + (HEIGHT - 10) * (1 - value)));
  text.textContent = `${100 * value} %`;
  return text;
}

function draw(found) {
  byId("shadow").hidden = !found.on;
  if (!found.on) return;
  const moments = found.moments.length > 1 ? found.moments : [...found.moments, ...found.moments];
  const curves = [curve(moments.map((one) => one.ratio), "ratio"), curve(moments.map((one) => one.bound), "bound")];
  curves.push(curve(moments.map((one) => one.agreement), "agreement"));
  if (found.floor !== null) curves.push(curve(moments.map(() => found.floor), "floor"));
  byId("shadow-plot").replaceChildren(scale(1), scale(0.5), scale(0), ...curves);
  const last = found.moments.at(-1);
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const ratio = found.ratio === null ? "" : ` Recompute ratio in force: ${found.ratio.toFixed(2)}.`;
  byId("shadow-facts").textContent = (last
    ? `${percent(last.agreement)} of the last ${last.rows} agree with full prefill (lower bound ${percent(last.bound)}).`
    : "No answer has been compared yet.") + ` ${found.compared} compared, ${found.waiting} waiting, ${found.dropped} dropped.${ratio}`;
}

async function look() {
  const found = await shadow().catch(() => null);
  if (found) draw(found);
  else byId("shadow").hidden = true; // without a key nothing is shown
}

export function watchShadow() {
  look();
  setInterval(() => { if (!document.hidden) look(); }, EVERY_MS);
}
