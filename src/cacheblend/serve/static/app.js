// The page: loads the examples, asks a prompt in three ways, one after the other, and keeps results and prompt apart.

import * as api from "./api.js";
import { MODES, changedInputs } from "./changes.js";
import { byId, element, say } from "./dom.js";
import { drawMap } from "./map.js";
import * as passages from "./passages.js";
import { beginPane, breakPanes, clearPanes, drawPanes, drawResult, endPane, markStale, writeAnswer } from "./results.js";
import { watchShadow } from "./shadow.js";

const MORE = 0.3; // the ratio that the page proposes to try
const PAPERS = 0.15; // the ratio of the paper, whose selector is `hkvd`
const KEPT = "cacheblend-prompt"; // in the tab's session: own passages, the prompt and the question, never the key
let settings = {};
let examples = []; // prompts with the passages that they are made of, and the sentences that their answers need
let shown = null; // the result that is drawn
let last = null; // the last result, drawn or not
let known = null; // a prompt, and the sentences that its answer needs
let isRestored = false; // what was written before a reload is there again
let stopping = null; // ends the question under way; null: none is

// ---- the prompt as it stands ------------------------------------------------------------------------------

const asDocument = ({ title, text }) => ({ title, text });

// Nothing about blending if the model's settings are chosen, so that the engine uses its own.
function promptNow() {
  const selector = byId("selector").value;
  return {
    documents: passages.inPrompt().map(asDocument),
    question: byId("question").value.trim(),
    blending: selector ? { selector, recompute_ratio: Number(byId("ratio").value) } : {},
  };
}

// The sentences that the answer needs, as long as passages and question are those for which they are known.
function placesNow() {
  return known && asksTheSame(known, promptNow()) ? known.places : [];
}

const asksTheSame = (one, other) => one.question === other.question && JSON.stringify(one.documents) === JSON.stringify(other.documents);

function promptChanged() {
  markStale(shown ? changedInputs(shown.prompt, promptNow()) : []);
  const now = promptNow();
  examples.forEach((example, number) => byId("examples").children[number].setAttribute("aria-pressed", String(asksTheSame(example, now))));
  if (isRestored) keep({ ...passages.written(), question: byId("question").value });
}

// A browser may refuse to keep anything.
function keep(written) {
  try { sessionStorage.setItem(KEPT, JSON.stringify(written)); } catch { /* then a reload begins anew */ }
}

// What was written before the page was loaded again.
function restore() {
  let written = null;
  try { written = JSON.parse(sessionStorage.getItem(KEPT)); } catch { /* as above */ }
  isRestored = true;
  if (!written) return;
  byId("question").value ||= written.question;
  passages.restore(written);
  known = examples.find((example) => asksTheSame(example, promptNow())) ?? null;
  passages.draw();
}

function drawRatio() {
  const isOwn = !byId("selector").value;
  const ratio = isOwn ? settings.recompute_ratio : Number(byId("ratio").value);
  byId("ratio").disabled = isOwn;
  if (isOwn && ratio != null) byId("ratio").value = ratio;
  byId("ratio-shown").textContent = ratio?.toFixed(2) ?? "";
  promptChanged();
}

function setSelector(selector, ratio) {
  byId("selector").value = selector;
  if (!byId("selector").value) byId("selector").value = "hkvd"; // the model's own is not among those to choose
  if (ratio !== undefined) byId("ratio").value = ratio;
  drawRatio();
}

// ---- asking -----------------------------------------------------------------------------------------------

function showError(message, where = "error") {
  for (const name of ["error", "refused"]) byId(name).hidden = name !== where || !message;
  byId(where).textContent = message;
  if (message) byId(where).scrollIntoView({ block: "nearest" });
}

function setAsking(isAsking) {
  document.body.dataset.state = isAsking ? "asking" : document.body.dataset.state;
  byId("ask").textContent = isAsking ? "Asking …" : "Ask";
  for (const button of [byId("ask"), byId("again"), ...byId("examples").children, ...byId("next").querySelectorAll("button")]) {
    button.setAttribute("aria-disabled", String(isAsking));
  }
  if (!isAsking && document.activeElement === byId("stop")) byId("ask").focus();
  byId("stop").hidden = !isAsking;
  if (!isAsking) byId("progress").textContent = "";
}

async function ask() {
  if (stopping) return; // once is enough: Enter or a click while one is under way asks nothing
  const prompt = promptNow();
  if (!prompt.documents.length) return refuse("Add a passage to the prompt first.", "prompt-title");
  if (!prompt.question) return refuse("Enter a question.", "question");
  showError("");
  const former = shown;
  stopping = new AbortController();
  setAsking(true);
  clearPanes();
  markStale([]);
  shown = null;
  showResults();
  try {
    const result = await run(prompt, stopping.signal);
    known = { ...prompt, places: result.found.expected?.places ?? [] };
    drawResult(result, last);
    drawMap(result);
    shown = last = result;
    byId("next").hidden = false;
    passages.draw();
    document.body.dataset.state = "done";
  } catch (error) {
    if (stopping.signal.aborted) stopped(former);
    else failed(error);
  } finally {
    const said = stopping.signal.aborted ? "Stopped." : "";
    stopping = null;
    setAsking(false);
    byId("progress").textContent = said;
    promptChanged();
  }
}

// One after the other: at the same time they would compete for the processors, and the times mean nothing.
async function run(prompt, signal) {
  const step = (number, what) => { byId("progress").textContent = `${number} of 4: ${what} …`; };
  step(1, "storing passages");
  const found = await api.explain(prompt, signal);
  const answers = {};
  for (const [number, mode] of MODES.entries()) {
    step(number + 2, { full: "full recompute", reuse: "full reuse", blend: "blend" }[mode]);
    beginPane(mode);
    answers[mode] = await api.answer(mode, prompt, (text) => writeAnswer(mode, text), signal);
    endPane(mode, answers[mode], found.layers);
  }
  return { prompt, found, answers };
}

function emptyResults() {
  byId("map").hidden = byId("next").hidden = true;
  byId("verdict").replaceChildren();
}

function refuse(message, focused) {
  byId(focused).focus();
  showError(message, "refused");
}

// The former result, if there is one, is there again.
function stopped(former) {
  document.body.dataset.state = "stopped";
  shown = former;
  if (former) drawPanes(former);
  else breakPanes("stopped");
}

function failed(error) {
  breakPanes("broke off");
  emptyResults();
  document.body.dataset.state = "failed";
  showError(error.message);
  if (error.status === 401) {
    byId("key-field").hidden = false;
    byId("key").focus();
  }
}

// ---- examples ---------------------------------------------------------------------------------------------

function load(example) {
  byId("question").value = example.question;
  known = example;
  passages.choose(example.passages);
}

function exampleCard(example, number) {
  const card = element("button", undefined, { type: "button", class: "example", "data-example": String(number) });
  card.append(element("b", example.title), element("span", example.about), element("q", example.question));
  card.addEventListener("click", () => {
    if (stopping) return;
    load(example);
    ask();
  });
  return card;
}

// The answers come into sight, wherever the page was scrolled to.
function showResults() {
  const { top, bottom } = byId("results").querySelector(".panes").getBoundingClientRect();
  if (top < 0 || bottom > innerHeight) byId("results").scrollIntoView();
}

function describeModel({ name, parameters, layers, device, dtype, is_shipped: isShipped }) {
  const size = parameters >= 1e9 ? `${(parameters / 1e9).toFixed(1)} billion` : `${(parameters / 1e6).toFixed(1)} million`;
  byId("model").replaceChildren(element("b", name), ` ${size} parameters, ${layers} layers, ${dtype}, ${device}`);
  document.body.dataset.answers = isShipped ? "words" : "sentences";
  byId("about-examples").textContent = isShipped
    ? `This server runs ${name}, the small model that ships with CacheBlend. It knows about 290 words and one thing: who has what in notes like these. The examples were chosen from many, so that full reuse answers the first ones wrong; it is often right.`
    : `This server runs ${name}. The examples are passages about places that do not exist. Nothing here knows what is right: each answer is compared with the one that ${name} gives when it computes everything anew.`;
  byId("own-hint").hidden = !isShipped;
  byId("own-hint").textContent = "This model reads sentences like “Later Vaden sat down. The boot belongs to him.”, and not much else.";
}

async function start() {
  byId("library-error").hidden = true;
  let found;
  try {
    found = await api.library();
    settings = found.settings;
    describeModel(found.model);
  } catch (error) {
    byId("library-error").querySelector("span").textContent = `The examples could not be loaded. ${error.message}`;
    byId("library-error").hidden = false;
    if (!isRestored) restore();
    return;
  }
  byId("key-field").hidden = !found.needs_key;
  byId("selector").options[0].textContent = `the model's settings: ${settings.selector}`;
  const shelf = found.passages.map(({ title, text }) => passages.makePassage(title, text, false));
  passages.fillShelf(shelf);
  examples = found.questions.map(({ title, about, text, places, passages: numbers }) => {
    const chosen = numbers.map((number) => shelf[number]);
    return { title, about, question: text, passages: chosen, documents: chosen.map(asDocument), places: places ?? [] };
  });
  byId("examples").replaceChildren(...examples.map(exampleCard));
  if (!isRestored) restore();
  drawRatio();
  if (!passages.inPrompt().length && !byId("question").value) load(examples[0]);
  if (settings.shadow) watchShadow();
}

const TRIES = {
  shuffle: () => { passages.shuffle(); ask(); },
  ratio: () => { setSelector(byId("selector").value || settings.selector, MORE); ask(); },
  selector: () => { setSelector("hkvd", PAPERS); ask(); },
  own: () => {
    byId("add").open = true;
    byId("own-text").focus();
  },
};

passages.onChange(promptChanged, placesNow);
byId("asking").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
byId("again").addEventListener("click", ask);
byId("stop").addEventListener("click", () => stopping?.abort());
byId("question").addEventListener("input", () => { promptChanged(); passages.draw(); });
byId("ratio").addEventListener("input", drawRatio);
byId("selector").addEventListener("change", drawRatio);
byId("shuffle").addEventListener("click", passages.shuffle);
byId("clear").addEventListener("click", () => { passages.choose([]); say("The prompt has no passages now"); });
byId("own").addEventListener("submit", passages.addOwn);
byId("library-again").addEventListener("click", start);
byId("next").addEventListener("click", (event) => {
  const wanted = event.target.dataset.try;
  if (wanted && !stopping) TRIES[wanted]();
});
document.body.dataset.state = "idle";
start();
