// The passages to choose from, and those in the prompt: shown, moved, written, edited. Whoever asks about them listens.

import { byId, element, iconButton, keepingFocus, say, some } from "./dom.js";

const shelf = []; // to choose from: the library's passages and the page's own
let chosen = []; // in the prompt, in its order
let edited = null; // the passage whose form is open
let form = null; // that form: one element across redraws, so that what is written in it stays
const unfolded = new Set(); // ids of passages that are shown in full
let dragged = null;
let listener = () => {};
let placesIn = () => []; // sentences that the answer needs, if they are known of the prompt as it is
let counted = 0;

export const inPrompt = () => chosen;
export function onChange(act, places) {
  listener = act;
  placesIn = places;
}

export function makePassage(title, text, isOwn) {
  counted += 1;
  return { id: `p${counted}`, title, text, isOwn };
}

export function fillShelf(passages) {
  shelf.splice(0, shelf.length, ...passages, ...shelf.filter((one) => one.isOwn));
  drawShelf();
}

// What a reload would lose, and how it is restored. A passage that is not on the shelf comes from a library of before.
export const written = () => ({ own: shelf.filter((one) => one.isOwn).map(asWritten), prompt: chosen.map(asWritten) });

const asWritten = ({ title, text, isOwn }) => ({ title, text, isOwn });

export function restore({ own, prompt }) {
  const made = (one) => makePassage(one.title, one.text, one.isOwn);
  shelf.push(...own.map(made));
  choose(prompt.map((one) => shelf.find((other) => other.title === one.title && other.text === one.text) ?? made(one)));
}

export function choose(passages) {
  chosen = passages;
  if (!chosen.includes(edited)) edited = null;
  changed();
}

export function shuffle() {
  if (chosen.length < 2) return;
  const mixed = [...chosen];
  do {
    for (let at = mixed.length - 1; at > 0; at--) {
      const other = Math.floor(Math.random() * (at + 1));
      [mixed[at], mixed[other]] = [mixed[other], mixed[at]];
    }
  } while (mixed.every((one, at) => one === chosen[at]));
  choose(mixed);
  say(`Shuffled: ${some(chosen.map((one) => one.title))}`);
}

function changed() {
  drawShelf();
  listener();
  draw();
}

function move(from, to) {
  const [passage] = chosen.splice(from, 1);
  chosen.splice(to, 0, passage);
  changed();
  say(`${passage.title} is now ${to + 1} of ${chosen.length}`);
}

function remove(passage) {
  const at = chosen.indexOf(passage);
  chosen = chosen.filter((one) => one !== passage);
  keepingFocus(changed, chosen.length ? `remove-${chosen[Math.min(at, chosen.length - 1)].id}` : "prompt-title");
  say(`${passage.title} removed from the prompt`);
}

// ---- the prompt -------------------------------------------------------------------------------------------

export function draw() {
  byId("prompt-empty").hidden = chosen.length > 0;
  const places = placesIn();
  keepingFocus(() => byId("prompt").replaceChildren(...chosen.map((passage, at) => item(passage, at, places))), "prompt-title");
}

function item(passage, at, places) {
  if (passage === edited) return form;
  const shown = element("li", undefined, { draggable: "true", "data-title": passage.title });
  const head = element("div", undefined, { class: "head" });
  head.append(element("span", at + 1, { class: "place", "aria-hidden": "true" }), titleOf(passage, "read", draw));
  head.append(
    iconButton(`Move ${passage.title} up`, "↑", `up-${passage.id}`, () => move(at, at - 1), at === 0),
    iconButton(`Move ${passage.title} down`, "↓", `down-${passage.id}`, () => move(at, at + 1), at === chosen.length - 1),
    iconButton(`Edit ${passage.title}`, "✎", `edit-${passage.id}`, () => edit(passage)),
    iconButton(`Remove ${passage.title}`, "×", `remove-${passage.id}`, () => remove(passage)),
  );
  shown.append(head, excerpt(passage, places.filter((place) => place.passage === at)));
  shown.addEventListener("dragstart", () => { dragged = at; });
  shown.addEventListener("dragend", () => { dragged = null; });
  shown.addEventListener("dragover", (event) => { event.preventDefault(); shown.classList.add("over"); });
  shown.addEventListener("dragleave", () => shown.classList.remove("over"));
  shown.addEventListener("drop", (event) => {
    event.preventDefault();
    shown.classList.remove("over");
    if (dragged !== null) move(dragged, at);
  });
  return shown;
}

// A click on a title shows the whole text, or its beginning again.
function titleOf(passage, key, redraw) {
  const shown = element("button", passage.title, { type: "button", class: "title", "data-key": `${key}-${passage.id}`, "aria-expanded": String(unfolded.has(passage.id)) });
  shown.addEventListener("click", () => {
    if (!unfolded.delete(passage.id)) unfolded.add(passage.id);
    redraw();
  });
  return shown;
}

// The whole text if it is unfolded; else the sentences that the answer needs, or the beginning.
function excerpt({ id, text }, places) {
  const isWhole = unfolded.has(id);
  const shown = element("p", undefined, { class: isWhole ? "whole" : places.length ? "needs" : "", dir: "auto" });
  let end = 0;
  for (const { start, stop } of places) {
    if (start > end) shown.append(isWhole ? text.slice(end, start) : "… ");
    shown.append(element("mark", text.slice(start, stop)), isWhole ? "" : " ");
    end = isWhole ? stop : stop + 1;
  }
  if (end < text.length) shown.append(isWhole || !places.length ? text.slice(end) : "…");
  return shown;
}

// ---- writing and editing ----------------------------------------------------------------------------------

function edit(passage) {
  edited = passage;
  form = editForm(passage);
  draw();
  byId("edited-text").focus();
}

function editForm(passage) {
  const shown = element("li", undefined, { "data-title": passage.title });
  const fields = element("form", undefined, { class: "own", "aria-label": `Edit ${passage.title}` });
  const [title, text] = [element("label", "Title "), element("label", "Text ")];
  title.append(element("input", undefined, { id: "edited-name", maxlength: "80", autocomplete: "off", dir: "auto" }));
  text.append(element("textarea", passage.text, { id: "edited-text", rows: "7", required: "", dir: "auto" }));
  title.querySelector("input").value = passage.title;
  const tools = element("div", undefined, { class: "tools" });
  const [save, cancel] = [element("button", "Save", { type: "submit" }), element("button", "Cancel", { type: "button" })];
  tools.append(save, cancel);
  if (passage.isOwn) {
    const gone = element("button", "Delete", { type: "button" });
    gone.addEventListener("click", () => discard(passage));
    tools.append(gone);
  }
  cancel.addEventListener("click", () => close(passage));
  fields.addEventListener("keydown", (event) => { if (event.key === "Escape") close(passage); });
  fields.addEventListener("submit", (event) => {
    event.preventDefault();
    const written = byId("edited-text").value.trim();
    if (written) keep(passage, byId("edited-name").value.trim() || passage.title, written);
  });
  fields.append(title, text, tools);
  shown.append(fields);
  return shown;
}

function close(passage) {
  edited = null;
  draw();
  document.querySelector(`[data-key="edit-${passage.id}"]`)?.focus();
}

// A passage of the library stays as it is there: its edited copy is an own one.
function keep(passage, title, text) {
  let kept = passage;
  if (title === passage.title && text === passage.text) return close(passage);
  if (passage.isOwn) Object.assign(passage, { title, text });
  else {
    kept = makePassage(title === passage.title ? `${title}, edited` : title, text, true);
    shelf.push(kept);
    chosen = chosen.map((one) => (one === passage ? kept : one));
  }
  edited = null;
  changed();
  document.querySelector(`[data-key="edit-${kept.id}"]`)?.focus();
  say(`${kept.title} saved`);
}

function discard(passage) {
  shelf.splice(shelf.indexOf(passage), 1);
  chosen = chosen.filter((one) => one !== passage);
  edited = null;
  changed();
  byId("prompt-title").focus();
  say(`${passage.title} deleted`);
}

export function addOwn(event) {
  event.preventDefault();
  const [name, text] = [byId("own-name"), byId("own-text")];
  if (!text.value.trim()) return;
  const number = shelf.filter((one) => one.isOwn).length + 1;
  const passage = makePassage(name.value.trim() || `Your passage ${number}`, text.value.trim(), true);
  name.value = text.value = "";
  shelf.push(passage);
  choose([...chosen, passage]);
  say(`${passage.title} added to the prompt`);
  name.focus();
}

// ---- the passages to choose from --------------------------------------------------------------------------

function drawShelf() {
  keepingFocus(() => byId("library").replaceChildren(...shelf.map((passage) => {
    const isTaken = chosen.includes(passage);
    const shown = element("li");
    const head = element("div", undefined, { class: "head" });
    head.append(titleOf(passage, "look", drawShelf));
    const add = () => {
      choose([...chosen, passage]);
      say(`${passage.title} added to the prompt`);
    };
    head.append(iconButton(isTaken ? `${passage.title} is in the prompt` : `Add ${passage.title}`, isTaken ? "✓" : "+", `add-${passage.id}`, add, isTaken));
    shown.append(head, excerpt(passage, []));
    return shown;
  })));
}
