// The map of a prompt: for each passage a strip of its tokens by the source of their KV, and its text to unfold.

import { byId, element, percent, plural } from "./dom.js";
import { sources, workOf } from "./changes.js";

const SVG = "http://www.w3.org/2000/svg";
const NAMES = { prefix: "loaded, exact prefix", loaded: "loaded", recomputed: "loaded, recomputed in all layers", fresh: "computed" };
const STRONGEST = ["recomputed", "fresh", "loaded", "prefix"]; // of the sources of a character, what is shown
const MANY = 12; // parts: more of them are scrolled
const NARROW = matchMedia("(max-width: 48rem)"); // there texts stay folded, or the page has no end
const HEAT = { deviation: "stronger colour: larger KV deviation", attention: "stronger colour: more attention by the question" };

export function drawMap(result) {
  const { found } = result;
  const { isKnown, places } = sources(result);
  const parts = partsOf(found.segments);
  markNeeded(parts, places, result.prompt.documents);
  byId("map").hidden = false;
  byId("heat").hidden = !found.strength;
  byId("heat").textContent = HEAT[found.strength] ?? "";
  byId("needed-legend").hidden = !places.length;
  byId("needed-legend").textContent = isKnown ? "what the answer needs" : "the answer's words";
  byId("map-facts").textContent = `${workIn(result)} ${qualityOf(found)}`;
  byId("why").classList.toggle("many", parts.length > MANY);
  const longest = Math.max(...parts.map((part) => part.tokens.length));
  byId("why").replaceChildren(...parts.map((part) => drawPart(part, longest, found.strength, isKnown)));
}

function workIn({ answers: { blend: { report } }, found }) {
  const checks = report.projected_rows ? "checks in the first ones, " : "";
  const rows = report.recomputed_tokens ? `${plural(report.recomputed_tokens, "loaded token")} in all layers, ${checks}and the question` : "what was not loaded";
  return `Blending did ${percent(workOf(report, found.layers))} of a full prefill's work: ${rows}.`;
}

function qualityOf(found) {
  const first = found.top_1
    ? "Blending and full recompute have the same most likely first token"
    : `The most likely first token is “${found.first_token}” with blending and “${found.full_first_token}” with full recompute`;
  return `${first}; KL divergence between their distributions: ${found.kl.toPrecision(2)} nats.`;
}

// A part for each passage, one for all text in front of them and one for all behind. What separates two passages is a
// token or two, and is drawn at the end of the first one.
function partsOf(segments) {
  const last = segments.findLastIndex((segment) => segment.is_chunk);
  const parts = [];
  let passage = 0;
  segments.forEach((segment, at) => {
    const isNew = segment.is_chunk || !parts.length || at === last + 1;
    if (!isNew) {
      parts.at(-1).tokens.push(...segment.tokens.map((token) => ({ ...token, isBetween: true })));
      return;
    }
    const name = at > last ? "Question" : "Beginning of the prompt";
    const title = segment.is_chunk ? segment.title || `Passage ${passage + 1}` : name;
    parts.push({ title, passage: segment.is_chunk ? passage++ : null, tokens: [...segment.tokens] });
  });
  return parts;
}

function markNeeded(parts, places, documents) {
  for (const part of parts) {
    if (part.passage === null) continue;
    const whole = part.tokens.map((token) => token.text).join("");
    const offset = Math.max(0, whole.indexOf(documents[part.passage].text));
    const wanted = places.filter((place) => place.passage === part.passage);
    let at = 0;
    for (const token of part.tokens) {
      const [start, stop] = [at - offset, at + token.text.length - offset];
      token.isNeeded = !token.isBetween && wanted.some((place) => start < place.stop && stop > place.start);
      at += token.text.length;
    }
  }
}

// Tokens by character as a reader counts them: an emoji or an accented letter may be several tokens, which are drawn as one.
function charactersOf(tokens) {
  const starts = new Set(Array.from(new Intl.Segmenter().segment(tokens.map(({ text }) => text).join("")), ({ index }) => index));
  const found = [];
  let at = 0;
  for (const token of tokens) {
    const last = found.at(-1);
    if (last && (!token.text || !starts.has(at))) {
      const source = STRONGEST.find((name) => name === last.source || name === token.source);
      const [strength, isNeeded] = [Math.max(last.strength, token.strength), last.isNeeded || token.isNeeded];
      Object.assign(last, { text: last.text + token.text, source, strength, isNeeded });
    } else found.push({ ...token });
    at += token.text.length;
  }
  return found;
}

const isHot = (token) => (token.source === "loaded" || token.source === "recomputed") && token.strength > 0;
const heat = (token) => `${Math.round(100 * Math.sqrt(token.strength))}%`;

function drawPart(part, longest, strength, isKnown) {
  const shown = element("details", undefined, { class: "part", "data-title": part.title });
  const needed = part.tokens.some((token) => token.isNeeded);
  shown.open = needed && !NARROW.matches;
  const summary = element("summary");
  const head = element("span", undefined, { class: "head" });
  head.append(element("b", part.title));
  if (needed) head.append(element("span", isKnown ? "needed" : "has the words", { class: "tag" }));
  head.append(element("span", countOf(part.tokens), { class: "count" }));
  summary.append(head, strip(part, longest));
  const text = element("p", undefined, { class: "tokens", dir: "auto" });
  for (const token of charactersOf(part.tokens)) {
    const name = `${token.source}${token.isNeeded ? " needed" : ""}`;
    const measured = strength && isHot(token) ? `, ${strength} ${token.strength}` : "";
    const span = element("span", token.text, { class: name, title: NAMES[token.source] + measured });
    if (isHot(token)) span.style.setProperty("--heat", heat(token));
    text.append(span);
  }
  shown.append(summary, text);
  return shown;
}

function countOf(tokens) {
  const recomputed = tokens.filter((token) => token.source === "recomputed").length;
  const loaded = tokens.filter((token) => token.source !== "fresh").length;
  if (!loaded) return `${plural(tokens.length, "token")} computed`;
  return recomputed ? `${plural(recomputed, "token")} recomputed` : "reused";
}

function strip({ tokens, title }, longest) {
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("viewBox", `0 0 ${tokens.length} 24`);
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", `${title}: ${countOf(tokens)}`);
  drawn.setAttribute("class", "strip");
  drawn.style.width = `${(100 * tokens.length) / longest}%`;
  tokens.forEach((token, at) => {
    const cell = token.source === "recomputed" ? rectangle(at, 0, 19, token.source) : rectangle(at, 4, 15, token.source);
    if (isHot(token)) cell.style.setProperty("--heat", heat(token));
    drawn.append(cell);
    if (token.isNeeded) drawn.append(rectangle(at, 20, 4, "needed"));
  });
  return drawn;
}

function rectangle(x, y, height, name) {
  const drawn = document.createElementNS(SVG, "rect");
  for (const [key, value] of Object.entries({ x, y, width: 1, height, class: name })) drawn.setAttribute(key, value);
  return drawn;
}
