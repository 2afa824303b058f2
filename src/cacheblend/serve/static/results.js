// Draws results: three panes, what they come to, and what changed since the result before.

import { MODES, changedInputs, changedResults, facts, headline, judge, reason, timeOf } from "./changes.js";
import { byId, element, list } from "./dom.js";

const part = (mode, name) => byId(`pane-${mode}`).querySelector(name);

export function clearPanes() {
  for (const mode of MODES) {
    const pane = byId(`pane-${mode}`);
    pane.dataset.state = "waiting";
    for (const name of [".answer", ".judged", ".time", ".facts"]) part(mode, name).textContent = "";
    delete part(mode, ".judged").dataset.good;
    part(mode, ".bar i").style.width = "0";
  }
}

export function beginPane(mode) {
  byId(`pane-${mode}`).dataset.state = "asking";
}

export function writeAnswer(mode, text) {
  part(mode, ".answer").textContent = text;
}

export function endPane(mode, answer, layers) {
  byId(`pane-${mode}`).dataset.state = "done";
  writeAnswer(mode, answer.text || "(nothing)");
  part(mode, ".time").textContent = timeOf(answer.report);
  part(mode, ".facts").textContent = facts(answer.report, layers);
}

// After a failure or a stop: what has come stays readable, and says that it is not whole.
export function breakPanes(why) {
  for (const mode of MODES) {
    const pane = byId(`pane-${mode}`);
    if (pane.dataset.state === "asking") part(mode, ".judged").textContent = why;
    if (pane.dataset.state !== "done") pane.dataset.state = "broken";
  }
}

export function drawPanes(result) {
  const longest = Math.max(...MODES.map((mode) => result.answers[mode].report.ttft_s));
  for (const mode of MODES) {
    endPane(mode, result.answers[mode], result.found.layers);
    const { isGood, words } = judge(mode, result);
    part(mode, ".judged").textContent = words;
    part(mode, ".judged").dataset.good = String(isGood);
    part(mode, ".bar i").style.width = `${(100 * result.answers[mode].report.ttft_s) / longest}%`;
  }
}

export function drawResult(result, before) {
  drawPanes(result);
  const since = before ? sinceThen(changedInputs(before.prompt, result.prompt), result.found.stored) : "";
  const lines = [reason(result), since].filter(Boolean).map((line) => element("p", line));
  byId("verdict").replaceChildren(element("p", headline(result), { class: "headline" }), ...lines);
  const rows = before ? changedResults(before, result) : [];
  byId("changes").hidden = !before;
  byId("changes").replaceChildren(element("h3", "What changed"), rows.length ? tableOf(rows) : element("p", "Neither the answers nor the work."));
}

const sinceThen = (inputs, stored) =>
  (inputs.length ? `Since the last answer: ${list(inputs)}.` : "The same prompt as before, asked once more.") + (stored ? "" : " All passages were stored already.");

function tableOf(rows) {
  const table = element("table");
  const head = element("tr");
  head.append(element("td"), element("th", "before", { scope: "col" }), element("th", "now", { scope: "col" }));
  table.append(element("thead"), element("tbody"));
  table.tHead.append(head);
  for (const [what, old, now] of rows) {
    const row = element("tr");
    row.append(element("th", what, { scope: "row" }), element("td", old, { dir: "auto" }), element("td", now, { dir: "auto" }));
    table.tBodies[0].append(row);
  }
  return table;
}

// `changed`: what differs from the prompt that the results belong to; empty: they fit.
export function markStale(changed) {
  byId("results").dataset.stale = String(changed.length > 0);
  byId("stale").hidden = !changed.length;
  byId("stale").querySelector("span").textContent = `These results belong to the prompt before: since then ${list(changed)}.`;
}
