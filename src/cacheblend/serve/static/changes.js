// Results in words: what is right, what was faster, what the answer needs, and what changed since the last one.
// Knows no element.

import { list, percent, plural, some } from "./dom.js";

const SOON = 1.15; // a first token is called sooner from this factor on: less is within the noise of one measurement
export const MODES = ["blend", "full", "reuse"]; // in the order in which they are shown and asked
const NAMES = { blend: "Blend", full: "Full recompute", reuse: "Full reuse" };
const LONGEST_SOURCE = 80; // characters of an answer that is looked for in the passages

const plain = (text) => text.trim().replace(/[.\s]+$/, "").toLowerCase();
const same = (one, other) => plain(one) === plain(other);
const inTime = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(2)} s`);
const loadedOf = (report) => Object.values(report.hit_tokens).reduce((sum, count) => sum + count, 0);
export const timeOf = (report) => inTime(report.ttft_s);
// Rows that passed a layer, those of checks and of the question's own pass among them, as a share of a full prefill's.
export const workOf = (report, layers) => report.row_layers / (report.prompt_tokens * layers);
const blendWork = ({ answers, found }) => workOf(answers.blend.report, found.layers);

// Whether an answer is right if that is known, else whether it is full recompute's: `isGood` is null for the reference.
export function judge(mode, result) {
  const { expected } = result.found;
  const text = result.answers[mode].text;
  if (expected) return same(text, expected.answer) ? { isGood: true, words: "right" } : { isGood: false, words: `wrong, it is ${expected.answer}` };
  if (mode === "full") return { isGood: null, words: "the reference" };
  const [own, whole] = [text, result.answers.full.text];
  if (same(own, whole)) return { isGood: true, words: "as full recompute" };
  const alike = wordsAlike(plain(own).split(/\s+/), plain(whole).split(/\s+/));
  return { isGood: false, words: alike ? `as full recompute for ${plural(alike, "word")}` : "not as full recompute" };
}

function wordsAlike(one, other) {
  const first = one.findIndex((word, at) => word !== other[at]);
  return first < 0 ? one.length : first;
}

const gainOf = ({ answers }) => answers.full.report.ttft_s / answers.blend.report.ttft_s;

function speed(result) {
  const gain = gainOf(result);
  if (gain >= SOON) return `${gain.toFixed(1)} times sooner than with full recompute`;
  return gain > 1 / SOON ? "about as soon as with full recompute" : "later than with full recompute: short prompts gain nothing";
}

export function headline(result) {
  const isKnown = Boolean(result.found.expected);
  const [blend, full, reuse] = MODES.map((mode) => judge(mode, result).isGood);
  const work = `${percent(blendWork(result))} of the work; its first token came ${speed(result)}.`;
  if (isKnown && full && reuse && blend) return `All three are right. Blend did ${work}`;
  const words = isKnown ? ["is right", "is wrong"] : ["answers as full recompute does", "answers differently"];
  const parts = [`Blend ${words[blend ? 0 : 1]}, with ${work}`];
  parts.push(`Full reuse ${words[reuse ? 0 : 1]}${reuse === blend ? ", too" : ""}.`);
  if (isKnown && !full) parts.push("Full recompute is wrong here, too: the model itself does not know better.");
  return parts.join(" ");
}

// The sentences that the answer needs, if they are known, or where the answer's words stand.
export function sources(result) {
  const { expected } = result.found;
  if (expected) return { isKnown: true, places: expected.places };
  const wanted = plain(result.answers.blend.text);
  if (!wanted || wanted.length > LONGEST_SOURCE) return { isKnown: false, places: [] };
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}])${wanted.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}(?![\\p{L}\\p{N}])`, "giu");
  const places = result.prompt.documents.flatMap(({ text }, passage) =>
    [...text.matchAll(pattern)].map((hit) => ({ passage, start: hit.index, stop: hit.index + hit[0].length })));
  return { isKnown: false, places };
}

export function reason(result) {
  const { isKnown, places } = sources(result);
  const { documents } = result.prompt;
  const numbers = [...new Set(places.map((place) => place.passage))];
  const titles = numbers.map((number) => documents[number].title);
  if (!isKnown) return titles.length ? `The answer's words stand in ${some(titles)}.` : "";
  if (!places.length) return "No passage says who has it.";
  const quote = ({ passage, start, stop }) => `“${documents[passage].text.slice(start, stop)}”`;
  const needed = some(numbers.map((number) => `${documents[number].title} (${places.filter((place) => place.passage === number).map(quote).join(", ")})`));
  if (numbers.length === 1) return `The answer needs ${needed} alone, so reusing it as it is stored can be enough.`;
  const others = numbers.length > 2 ? "the others" : titles[0];
  return `The answer needs ${needed}. As it is stored, ${titles.at(-1)} has never seen ${others}.`;
}

// ---- what changed -----------------------------------------------------------------------------------------

const inWords = ({ selector, recompute_ratio: ratio }) => (selector ? `${selector}, ${ratio.toFixed(2)}` : "the model's settings");

export function changedInputs(before, now) {
  const changed = [];
  const [old, fresh] = [before.documents, now.documents];
  const has = (passages, one) => passages.some((other) => other.title === one.title && other.text === one.text);
  const added = fresh.filter((one) => !has(old, one));
  const gone = old.filter((one) => !has(fresh, one));
  const isEdited = (one) => gone.some((other) => other.title === one.title) || gone.some((other) => one.title === `${other.title}, edited`);
  const edited = added.filter(isEdited);
  const lost = gone.filter((one) => !edited.some((other) => other.title === one.title || other.title === `${one.title}, edited`));
  if (edited.length) changed.push(`${some(edited.map((one) => one.title.replace(/, edited$/, "")))} was edited`);
  const more = added.filter((one) => !edited.includes(one));
  if (more.length) changed.push(`${some(more.map((one) => one.title))} ${more.length > 1 ? "were" : "was"} added`);
  if (lost.length) changed.push(`${some(lost.map((one) => one.title))} ${lost.length > 1 ? "were" : "was"} removed`);
  if (!added.length && !gone.length && JSON.stringify(old) !== JSON.stringify(fresh)) changed.push("the passages have another order");
  if (before.question !== now.question) changed.push("another question is asked");
  if (JSON.stringify(before.blending) !== JSON.stringify(now.blending)) changed.push(`what is recomputed: ${inWords(now.blending)} in place of ${inWords(before.blending)}`);
  return changed;
}

// Rows of (what, before, now) about two results, of what differs. A time alone is noise: it is named where the work differs.
export function changedResults(before, now) {
  const rows = [["Right answer", before.found.expected?.answer, now.found.expected?.answer]];
  for (const mode of MODES) rows.push([NAMES[mode], before.answers[mode].text || "(nothing)", now.answers[mode].text || "(nothing)"]);
  const shares = [before, now].map((result) => percent(blendWork(result)));
  if (shares[0] !== shares[1]) {
    rows.push(["Blend, share of the work", ...shares]);
    const gains = [before, now].map((result) => gainOf(result).toFixed(1));
    rows.push(["Blend, times sooner than full recompute", ...gains]);
  }
  return rows.filter(([, old, fresh]) => old !== fresh && fresh);
}

export function facts(report, layers) {
  const loaded = loadedOf(report);
  if (!loaded) return `all of the work; ${plural(report.prompt_tokens, "token")}`;
  return `${percent(workOf(report, layers))} of the work; ${loaded.toLocaleString("en")} of ${plural(report.prompt_tokens, "token")} loaded`;
}
